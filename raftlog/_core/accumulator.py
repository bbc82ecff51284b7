"""Where records wait to become batches, within `buffer.memory`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from raftlog._core.batch import BATCH_BYTES, Batch, record_bytes
from raftlog._core.numbering import BATCHES_REMEMBERED
from raftlog._core.partition_queue import PartitionQueue
from raftlog.errors import MessageTooLarge, RaftlogError
from raftlog.format import Columns
from raftlog.types import Header

CROWDED_FACTOR: Final = 4
"""So many times `batch.size` a batch may have that is begun while others wait for those in flight."""
HURRIED: Final = float("-inf")
"""`linger_until_ms` of a batch that is to be closed whatever else waits."""


@dataclass(frozen=True, slots=True)
class AccumulatorConfig:
    """Sizes in bytes, times in ms; the producer's keys of the same names."""

    batch_size_bytes: int
    buffer_memory_bytes: int
    max_request_size_bytes: int
    linger_ms: float
    delivery_timeout_ms: float


class Accumulator:
    """Open and closed batches of all partitions, and the memory they take.

    Memory is reserved by the batch: `batch.size`, or what a larger record needs, when it is opened; cut to its real
    size when it is closed; given back when it is done.

    Not thread-safe: the shell holds its lock around every call.

    Invariants: `used_bytes` is the sum of `reserved_bytes` over `incomplete`; `incomplete` is in the order of
    creation, so of deadlines too (but for the halves of split batches, which share their parent's).
    """

    def __init__(self, config: AccumulatorConfig, owner: object = None) -> None:
        self.owner = owner
        self.config = config
        self.used_bytes = 0
        self.incomplete: dict[Batch, None] = {}
        self.lingering: deque[Batch] = deque()
        self.crowded: dict[Batch, None] = {}
        """Open batches that have lingered, behind so many closed ones that nothing is lost when they grow (KIP-480)."""
        self.ready: dict[PartitionQueue, None] = {}
        """Queues with closed batches that the shell has not routed yet."""

    def check_size(self, value: bytes | None, key: bytes | None, headers: tuple[Header, ...]) -> int:
        """Return what the record is counted as.

        Raises:
            MessageTooLarge: no batch can ever hold it.
        """
        size = record_bytes(value, key, headers)
        self.check_fits(size, "the record")
        return size

    def check_fits(self, size: int, what: str) -> None:
        """Refuse `what` takes `size` bytes if no batch can ever hold it.

        Raises:
            MessageTooLarge: names the sizes.
        """
        limit = min(self.config.max_request_size_bytes, self.config.buffer_memory_bytes)
        if size + BATCH_BYTES > limit:
            raise MessageTooLarge(
                f"{what} takes {size + BATCH_BYTES} bytes as a batch of its own, more than "
                f"max.request.size={self.config.max_request_size_bytes} or "
                f"buffer.memory={self.config.buffer_memory_bytes} allows; send it in pieces or raise the limit"
            )

    def has_room(self, size: int) -> bool:
        """Whether a new batch for a record of this size would fit into `buffer.memory`."""
        return self.used_bytes + self._reservation(size) <= self.config.buffer_memory_bytes

    def _reservation(self, size: int) -> int:
        return min(max(self.config.batch_size_bytes, size + BATCH_BYTES), self.config.buffer_memory_bytes)

    def open_batch_for(self, queue: PartitionQueue, size: int) -> Batch | None:
        """Return the open batch of the queue if the record fits into it."""
        batch = queue.open
        return batch if batch is not None and batch.size_bytes + size <= batch.limit_bytes else None

    def open(self, queue: PartitionQueue, size: int, now_ms: float, *, in_turn: bool = False) -> Batch:
        """Open a batch for a record of this size; the caller has closed the one before and asked `has_room`.

        `in_turn`: the queue was not named, it has its turn among others: no more for it for being behind (KIP-794).
        """
        assert queue.open is None
        reservation = self._reservation(size)
        if queue.numbering is not None and len(queue.waiting) >= BATCHES_REMEMBERED and not in_turn:
            # As few batches may be in flight, more would only wait behind those: it may as well be a larger one.
            larger = min(CROWDED_FACTOR * self.config.batch_size_bytes, self.config.max_request_size_bytes)
            if self.used_bytes + larger <= self.config.buffer_memory_bytes:
                reservation = max(reservation, larger)
        batch = Batch(
            queue,
            queue.next_order(),
            reservation,
            now_ms + self.config.delivery_timeout_ms,
            now_ms + self.config.linger_ms,
        )
        self._reserve(batch, reservation)
        queue.open = batch
        self.lingering.append(batch)
        return batch

    def close(self, batch: Batch) -> bool:
        """Close an open batch: no more rows, next in its queue. False when it is not open (any more)."""
        queue = batch.queue
        if queue.open is not batch:
            return False
        queue.open = None
        batch.close()
        self.used_bytes -= batch.reserved_bytes - batch.size_bytes
        batch.reserved_bytes = batch.size_bytes
        queue.close(batch)
        self.ready[queue] = None
        return True

    def close_lingered(self, now_ms: float) -> list[Batch]:
        """Close the open batches that have lingered long enough, and return them.

        Not those behind as many closed ones as may be in flight: they could not be sent yet, so they go on growing,
        and a backlog is sent in full batches instead of one for each time that `linger.ms` passed. The next call
        after the queue has got shorter closes them.
        """
        closed = []
        for batch in list(self.crowded):
            if batch.queue.open is not batch or not self._is_crowded(batch):
                del self.crowded[batch]
                if self.close(batch):
                    closed.append(batch)
        lingering = self.lingering
        while lingering and (lingering[0].linger_until_ms <= now_ms or lingering[0].queue.open is not lingering[0]):
            batch = lingering.popleft()
            if batch.queue.open is batch and self._is_crowded(batch):
                self.crowded[batch] = None
            elif self.close(batch):
                closed.append(batch)
        return closed

    @staticmethod
    def _is_crowded(batch: Batch) -> bool:
        return len(batch.queue.waiting) >= BATCHES_REMEMBERED and batch.linger_until_ms > HURRIED

    def open_batches(self) -> Iterator[Batch]:
        """Yield every open batch, the oldest first."""
        for batch in (*self.crowded, *self.lingering):
            if batch.queue.open is batch:
                yield batch

    def close_all(self) -> list[Batch]:
        """Close every open batch, and return them."""
        closed = [batch for batch in self.open_batches() if self.close(batch)]
        self.crowded.clear()
        self.lingering.clear()
        return closed

    def hurry(self) -> None:
        """Let no open batch linger: somebody waits for the memory that they hold."""
        for batch in self.open_batches():
            batch.linger_until_ms = HURRIED

    def next_linger_ms(self) -> float | None:
        """Return when the next open batch has lingered long enough; nothing of those that wait for a shorter queue."""
        return self.lingering[0].linger_until_ms if self.lingering else None

    def add_columns(
        self, queue: PartitionQueue, columns: Columns, base_timestamp_ms: int, size: int, now_ms: float
    ) -> Batch:
        """Queue rows that are columns already as a closed batch, behind what was sent before them.

        The caller has asked `has_columns_room`.
        """
        if queue.open is not None:
            self.close(queue.open)
        batch = Batch(queue, queue.next_order(), size, now_ms + self.config.delivery_timeout_ms, now_ms)
        self._set_columns(batch, columns, base_timestamp_ms, size)
        self._reserve(batch, size)
        queue.close(batch)
        self.ready[queue] = None
        return batch

    def has_columns_room(self, size: int) -> bool:
        """Whether columns of this size fit, or nothing else is there (so that a large one never waits for ever)."""
        return self.used_bytes + size <= self.config.buffer_memory_bytes or not self.incomplete

    @staticmethod
    def _set_columns(batch: Batch, columns: Columns, base_timestamp_ms: int, size: int) -> None:
        batch.columns = columns
        batch.count = len(columns.value)
        batch.size_bytes = size
        batch.timestamps = columns.timestamp_ms
        batch.note_timestamp(0, base_timestamp_ms)

    def _reserve(self, batch: Batch, size: int) -> None:
        batch.owner = self.owner
        batch.reserved_bytes = size
        self.used_bytes += size
        self.incomplete[batch] = None

    def split(self, batch: Batch) -> tuple[Batch, Batch]:
        """Replace an encoded batch by two halves in the order of its queue, and return them (not encoded yet)."""
        columns = batch.split_columns()
        halves: list[Batch] = []
        for index, half in enumerate(columns):
            part = Batch(
                batch.queue, (*batch.order, index), batch.limit_bytes, batch.deadline_ms, batch.linger_until_ms
            )
            self._set_columns(part, half, int(half.timestamp_ms[0].as_py()), batch.size_bytes // 2)
            part.failures, part.sent = batch.failures, batch.failures > 0  # refused now, but what about before?
            part.in_doubt = batch.in_doubt
            part.traces = batch.traces
            part.numbered, part.place = batch.numbered, batch.place + index
            part.number = batch.number.after(halves[0].count) if index and batch.numbered else batch.number
            halves.append(part)
        self.release(batch)
        for part in halves:
            self._reserve(part, batch.size_bytes // 2)
        batch.parts = (halves[0], halves[1])
        batch.encoded = None
        batch.queue.replace(batch, batch.parts)
        return batch.parts

    def release(self, batch: Batch) -> None:
        """Give the batch's memory back."""
        if batch in self.incomplete:
            del self.incomplete[batch]
            self.used_bytes -= batch.reserved_bytes
            batch.reserved_bytes = 0

    def complete(
        self, batch: Batch, *, base_offset: int = -1, append_time_ms: int = -1, error: RaftlogError | None = None
    ) -> bool:
        """Finish a batch; False when it was done already. The shell calls its `callbacks` afterwards."""
        if batch.done:
            return False
        batch.base_offset = base_offset
        batch.append_time_ms = append_time_ms
        batch.error = error
        batch.done = True
        batch.encoded = None
        batch.columns = None
        batch.values = []
        self.release(batch)
        return True

    def expired(self, now_ms: float) -> Iterable[Batch]:
        """Return the incomplete batches whose `delivery.timeout.ms` has passed."""
        found = []
        for batch in self.incomplete:
            if batch.deadline_ms > now_ms:
                break
            found.append(batch)
        return found
