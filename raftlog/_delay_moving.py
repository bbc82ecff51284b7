"""How a delay queue hands records over exactly once: in transactions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from raftlog._client.producer import ProducerEngine
from raftlog._core.delays import Outgoing
from raftlog._core.transaction_state import TransactionPhase
from raftlog._producer import Producer
from raftlog.errors import (
    ClosedError,
    InvalidConfig,
    InvalidTxnState,
    RaftlogError,
    RetriableError,
    TransactionAbortable,
)
from raftlog.types import GroupMetadata, TopicPartition

TIMEOUT_MS: Final = 15_000
"""After so long what a worker was handing over when it died is aborted, and others go on with it."""
_CONTRADICTING: Final = frozenset(
    {"acks", "enable_idempotence", "retries", "max_in_flight_requests_per_connection", "transactional_id"}
)


def mover_config(name: str, config: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of the producer that hands over: those of the queue's, and transactions.

    The transactional id is a new one each time: who may not go on with a partition any more is told so by the group,
    whose offsets are part of the transaction (KIP-447).
    """
    own = {key.replace("_", "."): value for key, value in (config or {}).items() if not _contradicts(key)}
    return {
        "transaction.timeout.ms": TIMEOUT_MS,
        **own,
        "transactional.id": f"{name[:200]}.delay-{uuid.uuid4().hex}",
    }


def sender_config(config: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of the producer that puts records into the queue: it has no transactions.

    Raises:
        InvalidConfig: a transactional id, which the queue gives itself.
    """
    found = {key.replace("_", "."): value for key, value in (config or {}).items()}
    if found.get("transactional.id") is not None:
        raise InvalidConfig(
            "producer_config has a transactional.id, but what is put into a delay queue is in no transaction, and what "
            "is handed over has ids of the queue's own; leave it out"
        )
    return found


def _contradicts(key: str) -> bool:
    return key.replace(".", "_") in _CONTRADICTING


def is_over(engine: ProducerEngine) -> bool:
    """Whether a producer can begin no transaction any more."""
    assert engine.transactions is not None
    return engine.transactions.state.phase is TransactionPhase.FATAL


def expect_abort(engine: ProducerEngine) -> None:
    """Before closing: whoever hands over may be in the midst of it, and what is aborted then is handed over later."""
    assert engine.transactions is not None
    engine.transactions.aborts_on_close = True


def reason_of(error: TransactionAbortable) -> RaftlogError:
    """Return what a transaction has failed by."""
    return error.__cause__ if isinstance(error.__cause__, RaftlogError) else error


class Mover:
    """A producer that sends records on, and commits the offsets behind them, both or neither."""

    def __init__(self, bootstrap: str | Sequence[str], name: str, config: Mapping[str, object] | None) -> None:
        self._producer = Producer(bootstrap, config=mover_config(name, config))
        self.in_doubt = False
        """Whether a commit was asked for, and what became of it is not known."""

    @property
    def is_over(self) -> bool:
        """Whether nothing can be handed over with this one any more."""
        return is_over(self._producer._engine)

    def move(self, outgoing: Iterable[Outgoing], ends: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        """Hand over, and return when it is decided.

        Raises:
            FencedError: others have the partitions, and hand over what was in them.
            RaftlogError: a target has refused a record, or the cluster is away; nothing was handed over.
        """
        producer = self._producer
        try:
            producer.begin_transaction()
        except InvalidTxnState:  # the one before could not be aborted in time
            producer.abort_transaction()
            producer.begin_transaction()
        try:
            for topic, value, key, headers, timestamp_ms in outgoing:
                producer.send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms)
            producer.send_offsets_to_transaction(ends, group)
        except BaseException as error:
            self._abort()
            if isinstance(error, TransactionAbortable):
                raise reason_of(error) from None
            raise
        self.in_doubt = True
        self.settle()

    def settle(self) -> None:
        """Learn what became of a transaction whose outcome is not known, asking as long as it takes; if there is one.

        Raises:
            RaftlogError: it is aborted, nothing was handed over. ClosedError: the queue was closed meanwhile.
        """
        while self.in_doubt:
            try:
                self._producer.commit_transaction()
            except RetriableError:
                continue
            except TransactionAbortable as error:
                self.in_doubt = False
                self._abort()
                raise reason_of(error) from None
            except ClosedError:
                raise
            except RaftlogError:
                self.in_doubt = False
                raise
            self.in_doubt = False

    def _abort(self) -> None:
        with contextlib.suppress(RaftlogError):  # the next one tries again, and else the coordinator does it
            self._producer.abort_transaction()

    def close(self) -> None:
        """Stop; what is open is aborted."""
        expect_abort(self._producer._engine)
        self._producer.close()
