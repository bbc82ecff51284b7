"""What a gate adds to the producer: records wait until their transaction, or stage, has their partition."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from raftlog._client.gate import GivenProducerId, PartitionGate
from raftlog._client.metadata import MetadataCache
from raftlog._client.options import ProducerOptions
from raftlog._client.producer_buffer import Callbacks, ProducerBuffer
from raftlog._client.producer_ids import ProducerId
from raftlog._core.batch import Batch
from raftlog._core.partition_queue import PartitionQueue
from raftlog.errors import RaftlogError
from raftlog.format import Attributes
from raftlog.types import TopicPartition


class GatedBuffer(ProducerBuffer):
    """A buffer with a gate, if there is one. Without, all of this lets everything through."""

    metadata: MetadataCache

    def __init__(self, options: ProducerOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(options, loop)
        self.gate: PartitionGate | None = None
        self.given = GivenProducerId()
        """The numbers of what is open, with a gate."""
        self._gated: dict[PartitionQueue, None] = {}
        """Queues that the gate has not let through yet."""
        self._numbered: list[PartitionQueue] = []
        """Queues with the producer id that was given."""

    def use_gate(self, gate: PartitionGate) -> None:
        """Send transactional batches only, of what this gate lets through."""
        self.gate = gate
        self.attributes = int(Attributes.TRANSACTIONAL)

    def reroute(self, queue: PartitionQueue) -> None:
        """Look again for the leader of a queue; under the lock."""
        raise NotImplementedError

    def may_send(self, queue: PartitionQueue) -> bool:
        """Whether the gate lets a queue through; else it is routed once it does. Under the lock."""
        if self._open_for(queue):
            return True
        self._gated[queue] = None
        return False

    def ask_ahead(self) -> None:
        """Ask for open batches too, so that the gate is open by the time they have lingered; under the lock."""
        if self.gate is not None:
            for batch in self.accumulator.open_batches():
                self._open_for(batch.queue)

    def _open_for(self, queue: PartitionQueue) -> bool:
        topic = self.metadata.view.topics.get(queue.topic)
        if self.gate is None or topic is None:  # a topic that is gone has no leader either
            return True
        return self.gate.may_send(TopicPartition(queue.topic, queue.partition), topic.topic_id)

    async def outdated(self, wanted: Mapping[tuple[bytes, int], TopicPartition]) -> list[tuple[bytes, int]]:
        """Ask the cluster again for topics that it does not know by their ids: they may have been made anew.

        Returns those of the partitions whose topic has another id by now, or is gone.
        """
        with contextlib.suppress(RaftlogError, TimeoutError):
            async with asyncio.timeout(self.options.request_timeout_ms / 1000):
                await self.metadata.refresh()
        topics = self.metadata.view.topics
        return [
            key for key, part in wanted.items() if (now := topics.get(part.topic)) is None or now.topic_id != key[0]
        ]

    def shut_by(self, queue: PartitionQueue) -> RaftlogError | None:
        """Return why the gate does not let a queue through, as far as that is known."""
        return self.gate.last_error if self.gate is not None and queue in self._gated else None

    def note_numbered(self, queue: PartitionQueue) -> None:
        """A queue has taken the numbers that were given."""
        if self.gate is not None:
            self._numbered.append(queue)

    def gate_opened(self) -> None:
        """The gate lets more through: look at what waits for it. On the event loop."""
        with self.lock:
            waiting, self._gated = self._gated, {}
            for queue in waiting:
                self.reroute(queue)

    def renumber(self, producer_id: ProducerId | None) -> None:
        """Let what is sent from now on have these numbers, from sequence 0 in every partition (None: let it wait).

        Nothing of before may be incomplete. Under the lock; `gate_opened` follows if something may wait.
        """
        assert not any(batch.sent for batch in self.accumulator.incomplete), "what was sent under other numbers is over"
        for queue in self._numbered:
            queue.drop_id()
        self._numbered.clear()
        self.given.current = producer_id

    def check_may_send(self) -> None:
        """Refuse a record that nobody may send now; under the lock.

        Raises:
            ClosedError: as `check_open`. And what `PartitionGate.check_may_send` raises.
        """
        self.check_open()
        if self.gate is not None:
            self.gate.check_may_send()

    def not_sent(self, error: Exception) -> None:
        """`send` raises this: what is open misses a record. In any thread, without the lock."""
        if self.gate is not None:
            with self.lock:
                self.gate.on_not_sent(error)

    def over(self, batch: Batch, error: RaftlogError, callbacks: Callbacks) -> None:
        """A partition says that what a batch belongs to has ended; under the lock."""
        assert self.gate is not None
        reason = self.gate.on_over(TopicPartition(batch.queue.topic, batch.queue.partition), error)
        if reason is not None:
            self.complete(batch, callbacks, error=reason)

    def complete(
        self,
        batch: Batch,
        callbacks: Callbacks,
        *,
        base_offset: int = -1,
        append_time_ms: int = -1,
        error: RaftlogError | None = None,
    ) -> None:
        """As `ProducerBuffer.complete`; the gate hears of what has failed for good."""
        if error is not None and self.gate is not None and not batch.done:
            self.gate.on_failure(TopicPartition(batch.queue.topic, batch.queue.partition), error)
        super().complete(batch, callbacks, base_offset=base_offset, append_time_ms=append_time_ms, error=error)
