"""What a transaction, or a stage, gives the producer's engine: numbers, and leave to write to a partition."""

from __future__ import annotations

from typing import Protocol

from raftlog._client.producer_ids import ProducerId
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition


class PartitionGate(Protocol):
    """Says which partitions may be written to (protocol of transactions: a partition is added before its first record).

    A closed gate is asked to open by asking for it. Whoever implements this calls `ProducerEngine.gate_opened` when
    more may be sent, or `ProducerEngine.fail_incomplete` when nothing will be.
    """

    @property
    def last_error(self) -> RaftlogError | None:
        """Why gates do not open, as far as that is known."""

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """Return whether records may go to the partition; if not, see to it that they may, soon.

        Called on the event loop, under the engine's lock, before every request and when the first record is there: it
        is to be quick, and must not call the engine back. A topic that was made again has another id, and another gate.
        """

    def check_may_send(self) -> None:
        """Refuse a record that belongs to nothing that is open; under the engine's lock, in any thread.

        Raises:
            RaftlogError: no transaction is open, or it can only be aborted.
        """

    def on_failure(self, topic_partition: TopicPartition, error: RaftlogError) -> None:
        """Records have failed for good, so what they belong to cannot be committed.

        Called under the engine's lock, in any thread, for every batch; it must not call the engine back.
        """

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError | None:
        """A partition refuses records, since what the numbers stand for has ended without us: return what they fail
        with. None: that is not known yet, and `ProducerEngine.fail_incomplete` is called once it is.

        Called as `on_failure`.
        """

    def on_not_sent(self, error: Exception) -> None:
        """A record was refused before it was queued, and whoever sent it was told. Called as `on_failure`."""


class Identity(Protocol):
    """Where an engine has its producer id from."""

    current: ProducerId | None
    """None: nothing is sent before there is one."""
    last_error: RaftlogError | None
    """Why there is none yet."""

    def want(self) -> None:
        """See to it that there will be an id."""

    def retire(self, producer_id: int) -> None:
        """Let nobody take this id any more."""

    async def close(self) -> None:
        """Ask no more."""


class GivenProducerId:
    """An identity from outside: a coordinator has given it, for one transaction or stage after the other.

    `ProducerEngine.renumber` sets it; until then, and after `renumber(None)`, batches wait.
    """

    def __init__(self, current: ProducerId | None = None) -> None:
        self.current = current
        self.last_error: RaftlogError | None = None

    def want(self) -> None:
        """Nothing to do: who begins a transaction sees to it."""

    def retire(self, producer_id: int) -> None:
        """Nothing to do: the number is the coordinator's, who ends the transaction has the next one."""

    async def close(self) -> None:
        """Nothing to do."""
