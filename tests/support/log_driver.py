"""A partition log on a `MemoryStorage`, driven together with a model of what it must hold."""

from __future__ import annotations

import io
import pickle
import threading
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.log.producer_state import ProducerStates, RememberedBatch
from broker.log.storage import Storage
from raftlog.format import Columns, encode_batch, iter_headers, pack_stamp, parse_header, validate_produced
from tests.support.memory_storage import MemoryStorage

_T = TypeVar("_T")
TOPIC_ID = bytes(range(16))
LOG_DIR = "/data"
PRODUCERS = (7, 9, -1, 7)
"""Producer ids that append, in turn; -1 is a producer that is not idempotent."""


@dataclass
class FakeClock:
    """A clock that moves only when a test moves it."""

    now: int = 1_000_000

    def now_ms(self) -> int:
        """Unix time."""
        return self.now

    def monotonic_ms(self) -> float:
        """Monotonic time."""
        return float(self.now)


class ModelBatch(NamedTuple):
    """A batch as it must be on the disk."""

    base_offset: int
    data: bytes
    timestamps_ms: tuple[int, ...]

    @property
    def next_offset(self) -> int:
        """The first offset after it."""
        return self.base_offset + len(self.timestamps_ms)


def timed_batch(timestamps_ms: list[int], value_bytes: int = 20, fill: int = 0, **numbers: Any) -> bytes:
    """Return a batch with one record for each timestamp; `numbers`: of an idempotent producer."""
    values = pa.array([bytes([fill % 256]) * value_bytes] * len(timestamps_ms), pa.binary())
    return encode_batch(Columns(values, timestamp_ms=pa.array(timestamps_ms, pa.int64())), timestamps_ms[0], **numbers)


_PAIR = timed_batch([5, 6])
_PAIR_HEADER = validate_produced(_PAIR)


def append(log: PartitionLog) -> None:
    """Append a batch of two records in epoch 1."""
    log.append(_PAIR, _PAIR_HEADER, leader_epoch=1, now_ms=1_000)


def append_and_flush(log: PartitionLog) -> None:
    """Append it and make it durable."""
    append(log)
    log.flush()


def open_manager(
    storage: Storage,
    *,
    config: LogConfig | None = None,
    clock: FakeClock | None = None,
    log_dirs: tuple[str, ...] = (LOG_DIR,),
    threads: int = 1,
) -> LogManager:
    """Return a manager that has opened its directories."""
    manager = LogManager(storage, log_dirs, config or LogConfig(), clock or FakeClock(), threads=threads)
    manager.open(cluster_id="cluster", node_id=1)
    return manager


class _Saver(pickle.Pickler):
    """Saves what runs; a lock, which is not held between two calls, is made anew. Fails at functions within others."""

    def reducer_override(self, saved: object) -> Any:
        for make in (threading.Lock, threading.RLock):
            if isinstance(saved, type(make())):
                return make, ()
        return NotImplemented


def saved(driver: object) -> bytes:
    """Return a machine with its model and with all that runs on it, for `restored`."""
    kept = io.BytesIO()
    _Saver(kept).dump(driver)
    return kept.getvalue()


def restored(kind: type[_T], kept: bytes) -> _T:
    """Return another machine in the state that was saved: its broker goes on from there."""
    made = pickle.loads(kept)  # noqa: S301 # by `saved`
    assert isinstance(made, kind)
    return made


@dataclass
class LogDriver:
    """Every change goes to the log and to the model; `check` compares them."""

    storage: MemoryStorage = field(default_factory=MemoryStorage)
    config: LogConfig = field(default_factory=LogConfig)
    clock: FakeClock = field(default_factory=FakeClock)
    chain: list[ModelBatch] = field(default_factory=list)
    other_chain: list[ModelBatch] | None = None
    """What the log may hold as well, while a truncation is under way."""
    base: int = 0
    """Where the chain begins."""
    starting_over: bool = False
    """Whether the log may as well be empty, anywhere."""
    durable_end: int = 0
    cut_committed: bool = False
    """Whether the log was cut below its high watermark, so that no snapshot need have been kept from below."""
    start: int = 0
    durable_start: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        self.manager: LogManager | None = None
        self.opened: PartitionLog | None = None

    @property
    def log(self) -> PartitionLog:
        """The log, opened."""
        assert self.opened is not None
        return self.opened

    @property
    def end(self) -> int:
        """Log end offset of the model."""
        return self.chain[-1].next_offset if self.chain else self.base

    def open(self) -> None:
        """Start the broker."""
        self.manager = open_manager(self.storage, config=self.config, clock=self.clock)
        self.opened = self.manager.create("topic", TOPIC_ID, 0, self.config)

    def stopped(self) -> LogDriver:
        """Return another machine and its model in the same state, where nothing runs any more: `crash` starts it."""
        return replace(
            self,
            storage=self.storage.copy(),
            clock=replace(self.clock),
            chain=list(self.chain),
            other_chain=None if self.other_chain is None else list(self.other_chain),
        )

    def append(self, timestamps_ms: list[int] | None = None, value_bytes: int = 20) -> None:
        """Append one batch."""
        stamps = timestamps_ms or [self.clock.now]
        numbers = self._producer_numbers(PRODUCERS[(len(self.chain) + self.epoch) % len(PRODUCERS)])
        batch = timed_batch(stamps, value_bytes, fill=len(self.chain) + self.epoch, **numbers)
        header = validate_produced(batch)
        data = pack_stamp(self.end, header.batch_length, self.epoch) + batch[16:]
        self.chain.append(ModelBatch(self.end, data, tuple(stamps)))
        try:
            result = self.log.append(batch, header, leader_epoch=self.epoch, now_ms=self.clock.now)
        except Exception:
            self.chain.pop()
            raise
        assert result.base_offset == self.chain[-1].base_offset, (
            f"the append got offset {result.base_offset}, but the model expects {self.chain[-1].base_offset}"
        )
        assert result.last_offset == self.end - 1, (
            f"the append ended at offset {result.last_offset}, but the model expects {self.end - 1}"
        )

    def producers(self, base: int | None = None) -> ProducerStates:
        """Return what is to be remembered of producers, by the batches from `base` on."""
        states = ProducerStates()
        for batch in self.chain:
            if batch.base_offset >= (self.base if base is None else base):
                states.note(parse_header(batch.data), self.clock.now)
        return states

    def _producer_numbers(self, producer_id: int) -> dict[str, int]:
        if producer_id < 0:
            return {}
        known = self.log.producers.get(producer_id)
        return {
            "producer_id": producer_id,
            "producer_epoch": known.epoch if known else 0,
            "base_sequence": known.next_sequence if known else 0,
        }

    def flush(self) -> None:
        """Flush; everything appended so far has been acknowledged."""
        end = self.end
        assert self.log.flush() == end, f"the flush must reach the log end, {end}"
        self.durable_end = end
        self.log.high_watermark = end

    def checkpoint(self) -> None:
        """Checkpoint and sweep, as housekeeping does."""
        assert self.manager is not None
        self.manager.run_housekeeping_once(self.clock.now)
        self.start = self.log.log_start_offset
        self.durable_start = self.start

    def delete_records(self, offset: int) -> None:
        """Raise the log start."""
        self.start = max(self.start, offset)
        assert self.log.delete_records(offset) == self.start, (
            f"delete_records({offset}) must return the new log start, {self.start}"
        )

    def truncate(self, offset: int) -> None:
        """Truncate as a follower does."""
        kept = [batch for batch in self.chain if batch.next_offset <= offset]
        self.other_chain, self.chain = self.chain, kept
        self.cut_committed |= offset < self.log.high_watermark
        self.durable_end = min(self.durable_end, self.end)
        self.log.truncate_to(offset, now_ms=self.clock.now)
        self.other_chain = None
        self.start = min(self.start, self.end)
        self.durable_start = min(self.durable_start, self.end)
        self.epoch += 1  # a follower truncates because there is a new leader

    def start_over(self, offset: int) -> None:
        """Drop everything and begin at `offset`, as a follower does whose log lies outside its leader's."""
        self.starting_over = self.cut_committed = True
        self.durable_end = self.durable_start = 0
        self.log.reset_to(offset, now_ms=self.clock.now)
        self.began_at(offset)

    def began_at(self, offset: int) -> None:
        """Take note of an empty log at `offset`."""
        self.starting_over = False
        self.chain = []
        self.cut_committed = False
        self.other_chain = None
        self.base = self.start = self.durable_start = self.durable_end = offset
        self.epoch += 1

    def close(self) -> None:
        """Stop the broker cleanly."""
        assert self.manager is not None
        self.manager.close()
        self.durable_end = self.end
        self.durable_start = self.start

    def crash(self, dice: Random | None) -> None:
        """Lose power (None: kill -9) and start again; the model takes over the log's content."""
        self.storage.crash(dice)
        self.open()
        log = self.log
        if self.starting_over and log.log_start_offset == log.log_end_offset:
            self.began_at(log.log_end_offset)
            self.check()
            return
        if self.starting_over:
            self.durable_start = min(self.start, log.log_start_offset)
            self.starting_over = False
            self.other_chain = self.chain
        assert self.durable_start <= log.log_start_offset <= max(self.start, self.durable_start), (
            f"after recovery the log starts at {log.log_start_offset}, but must start from {self.durable_start} to "
            f"{max(self.start, self.durable_start)}"
        )
        assert log.log_end_offset >= self.durable_end, (
            f"after recovery the log ends at {log.log_end_offset}, but records up to {self.durable_end} were "
            "acknowledged as durable"
        )
        assert log.flushed_end_offset == log.log_end_offset, (
            f"after recovery the log ends at {log.log_end_offset}, but only {log.flushed_end_offset} is durable"
        )
        if dice is None:
            assert log.log_end_offset >= self.end or self.other_chain is not None, (
                f"after kill -9 the log ends at {log.log_end_offset}, but no record before {self.end} may be lost"
            )
        for chain in filter(None, (self.chain, self.other_chain)):
            if self._matches(chain):
                self.chain = [batch for batch in chain if batch.next_offset <= log.log_end_offset]
                break
        else:
            assert log.log_start_offset == log.log_end_offset, (
                f"the log from {log.log_start_offset} to {log.log_end_offset} is no prefix of what was written"
            )
            self.chain = [batch for batch in self.chain if batch.next_offset <= log.log_end_offset]
        self.other_chain = None
        self.start = self.durable_start = log.log_start_offset
        self.durable_end = self.end
        log.high_watermark = self.end
        self.check()

    def stored_batches(self) -> list[tuple[int, bytes]]:
        """Read the whole log as (base offset, bytes)."""
        found: list[tuple[int, bytes]] = []
        offset = self.log.log_start_offset
        while offset < self.log.log_end_offset:
            result = self.log.read(offset, 300, self.log.log_end_offset, blocking=True)
            assert result is not None
            assert result.records, f"the log has no records at offset {offset}, below its end: {self.log}"
            for position, header in iter_headers(result.records):
                assert not found or header.base_offset == found[-1][0] + _span(found[-1][1]), (
                    f"the batch at offset {header.base_offset} does not begin where the one before it ended"
                )
                found.append((header.base_offset, result.records[position : position + header.size]))
            assert result.next_offset > offset, (
                f"a read at offset {offset} ended at {result.next_offset}, without any progress"
            )
            offset = result.next_offset
        return found

    def _expected(self, chain: list[ModelBatch]) -> list[tuple[int, bytes]]:
        log = self.log
        return [
            (batch.base_offset, batch.data)
            for batch in chain
            if batch.next_offset > log.log_start_offset and batch.next_offset <= log.log_end_offset
        ]

    def _matches(self, chain: list[ModelBatch]) -> bool:
        expected = self._expected(chain)
        end = chain[-1].next_offset if chain else self.base
        ends = {self.base, *(batch.next_offset for batch in chain)}
        return self.log.log_end_offset <= end and self.log.log_end_offset in ends and self.stored_batches() == expected

    def check(self) -> None:
        """The log has exactly the model's content, byte for byte."""
        log = self.log
        assert log.log_end_offset == self.end, f"the log ends at {log.log_end_offset}, but the model's at {self.end}"
        assert log.log_start_offset == self.start, (
            f"the log starts at {log.log_start_offset}, but the model's at {self.start}"
        )
        assert self.stored_batches() == self._expected(self.chain), "the log's batches differ from the model's"
        assert log.size_bytes == sum(segment.size for segment in log.segments), (
            f"the log reports {log.size_bytes} bytes, but its segments have "
            f"{sum(segment.size for segment in log.segments)}"
        )
        epochs = dict(log.leader_epochs.entries)
        seen: dict[int, int] = {}
        for base_offset, data in self._expected(self.chain):
            seen.setdefault(int.from_bytes(data[12:16], "little", signed=True), max(base_offset, self.start))
        assert {epoch: start for epoch, start in epochs.items() if start < self.end} == seen, (
            f"the leader epochs of the log are {epochs}, but those of its batches {seen}"
        )
        self._check_producers()

    def _check_producers(self) -> None:
        """All batches of the chain are remembered that may be; where committed ones were cut, those in the files."""
        actual, wanted = (_remembered(states) for states in (self.log.producers, self.producers()))
        if not self.cut_committed:
            assert list(actual.items()) == list(wanted.items()), (
                f"the log remembers other producers than the model: {actual} instead of {wanted}"
            )
            return
        assert actual.keys() <= wanted.keys(), (
            f"the log remembers producers that the model does not know: {sorted(actual.keys() - wanted.keys())}"
        )
        for producer_id, (epoch, batches) in wanted.items():
            in_files = [batch for batch in batches if batch.base_offset >= self.log.segments[0].base_offset]
            known = actual.get(producer_id, (epoch, ()))
            assert known[0] == epoch, f"producer {producer_id} has epoch {known[0]}, but the model has {epoch}"
            assert len(known[1]) >= len(in_files), (
                f"producer {producer_id}: {len(known[1])} batches are remembered, but {len(in_files)} are in the files"
            )
            assert known[1] == batches[len(batches) - len(known[1]) :], (
                f"producer {producer_id}: other batches are remembered than its last ones"
            )


def _remembered(producers: ProducerStates) -> dict[int, tuple[int, tuple[RememberedBatch, ...]]]:
    """Return all but the times, in order."""
    return {producer_id: (state.epoch, state.batches) for producer_id, state in producers.items()}


def _span(data: bytes) -> int:
    return int.from_bytes(data[23:27], "little") + 1
