"""Two replicas of a partition with transactions, and a model that knows what every offset has become of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from broker.log.config import LogConfig
from broker.log.partition_log import PartitionLog
from broker.log.transactions import MarkerFate
from raftlog.errors import InvalidProducerEpoch, InvalidTxnState
from raftlog.format import Attributes, iter_headers, validate_produced
from raftlog.format.control import Marker, placed_markers
from tests.support.log_driver import LOG_DIR, LogDriver, timed_batch
from tests.support.memory_storage import MemoryStorage

CONFIG = LogConfig(segment_bytes=1_500, index_interval_bytes=300, file_delete_delay_ms=10)
DIRECTORY = f"{LOG_DIR}/topic-0"


class Entry(NamedTuple):
    """One append at `base_offset`: records of a producer (-1: no producer), or its marker (`commit` is set)."""

    base_offset: int
    next_offset: int
    producer_id: int
    epoch: int
    commit: bool | None = None


@dataclass(frozen=True)
class Transaction:
    """One producer's transaction as the model has it; `last_offset` and `commit` are None while it is open."""

    producer_id: int
    first_offset: int
    last_offset: int | None = None
    commit: bool | None = None


def transactions_in(chain: list[Entry]) -> list[Transaction]:
    """Return all transactions, in the order in which they began."""
    found: list[Transaction] = []
    open_ones: dict[int, int] = {}
    for entry in chain:
        if entry.producer_id < 0:
            continue
        number = open_ones.get(entry.producer_id)
        if entry.commit is None:
            if number is None:
                open_ones[entry.producer_id] = len(found)
                found.append(Transaction(entry.producer_id, entry.base_offset))
        elif number is not None:
            found[number] = replace(found[number], last_offset=entry.base_offset, commit=entry.commit)
            del open_ones[entry.producer_id]
    return found


def chain_of(log: PartitionLog) -> list[Entry]:
    """Return the content of a log, read batch by batch."""
    chain, offset = [], log.log_start_offset
    while offset < log.log_end_offset:
        read = log.read(offset, 1 << 20, log.log_end_offset, blocking=True)
        assert read is not None
        for position, header in iter_headers(read.records):
            if header.is_control:
                for at, marker in placed_markers(read.records, position):
                    chain.append(Entry(at, at + 1, marker.producer_id, marker.producer_epoch, marker.commit))
            else:
                chain.append(Entry(header.base_offset, header.next_offset, header.producer_id, header.producer_epoch))
        offset = read.next_offset
    return chain


class TransactionHistory:
    """A leader and a follower; `high_watermark` never passes what both have on the disk, and never goes back."""

    def __init__(self, config: LogConfig = CONFIG, storage: MemoryStorage | None = None) -> None:
        self.replicas = [LogDriver(storage or MemoryStorage(), config), LogDriver(MemoryStorage(), config)]
        for replica in self.replicas:
            replica.open()
        self.leader = 0
        self.epoch = 0
        self.chain: list[Entry] = []
        self.high_watermark = 0
        self.last_stable_offset = 0
        self.sent = 0

    @property
    def logs(self) -> list[PartitionLog]:
        """The log of each replica."""
        return [replica.log for replica in self.replicas]

    @property
    def log(self) -> PartitionLog:
        """The leader's log."""
        return self.replicas[self.leader].log

    @property
    def now_ms(self) -> int:
        """Wall clock."""
        return self.replicas[0].clock.now

    # Steps

    def produce(self, producer_id: int, records: int = 1) -> None:
        """Append a batch; with a producer id it is part of its transaction."""
        self.sent += 1
        numbers = {}
        if producer_id >= 0:
            state = self.log.producers.get(producer_id)
            numbers = {
                "attributes": int(Attributes.TRANSACTIONAL),
                "producer_id": producer_id,
                "producer_epoch": state.epoch if state else 0,
                "base_sequence": state.next_sequence if state else 0,
            }
        batch = timed_batch([self.sent + n for n in range(records)], 60, self.sent, **numbers)
        header = validate_produced(batch)
        assert self.log.check_producer(header, self.now_ms) is None, (
            "the log refuses a batch that continues its producer's sequence"
        )
        result = self.log.append(batch, header, leader_epoch=self.epoch, now_ms=self.now_ms)
        self.chain.append(
            Entry(result.base_offset, result.last_offset + 1, producer_id, numbers.get("producer_epoch", -1))
        )

    def mark(self, producer_ids: list[int], commit: bool, step: int = 1) -> None:
        """Send markers; `step` 1: that end a transaction; 0: repeated, with any decision; below: late."""
        markers = []
        for producer_id in dict.fromkeys(producer_ids):
            state = self.log.producers.get(producer_id)
            epoch = (state.epoch if state else 0) + step
            if epoch >= 0:
                markers.append(Marker(producer_id, epoch, commit, 0))
        fresh = []
        for marker, fate in zip(markers, self.log.check_markers(markers, self.now_ms), strict=True):
            known = self.log.producers.get(marker.producer_id)
            if known is None or marker.producer_epoch > known.epoch:
                assert fate is MarkerFate.APPENDED, (
                    f"a marker with a new epoch must be appended, but the log says {fate}"
                )
                fresh.append(marker)
            elif marker.producer_epoch == known.epoch:
                if known.decision in (None, marker.commit):
                    assert fate is MarkerFate.REPEATED, (
                        f"a marker that is already in the log must be taken for a repetition, but the log says {fate}"
                    )
                else:
                    assert isinstance(fate, InvalidTxnState), (
                        "a marker that contradicts the one in the log must be refused with InvalidTxnState, but the "
                        f"log says {fate}"
                    )
            else:
                assert isinstance(fate, InvalidProducerEpoch)
        if fresh:
            result = self.log.append_markers(fresh, leader_epoch=self.epoch, now_ms=self.now_ms)
            for offset, marker in enumerate(fresh, result.base_offset):
                self.chain.append(Entry(offset, offset + 1, marker.producer_id, marker.producer_epoch, marker.commit))

    def replicate(self, batches: int = 1_000) -> None:
        """Copy batches that the follower lacks, at most this many."""
        follower = self.replicas[1 - self.leader].log
        for _ in range(batches):
            if follower.log_end_offset >= self.log.log_end_offset:
                break
            read = self.log.read(follower.log_end_offset, 1, self.log.log_end_offset, blocking=True)
            assert read is not None
            follower.append_stamped(read.records, now_ms=self.now_ms)

    def flush(self, which: int) -> None:
        """Make the content of a replica durable."""
        self.replicas[which].log.flush()

    def commit(self, share: float = 1.0) -> None:
        """Move the high watermark as far as both replicas hold the log, or a part of that way."""
        held = min(log.flushed_end_offset for log in self.logs)
        mark = self.high_watermark + int((held - self.high_watermark) * share)
        if mark > self.high_watermark:
            self.high_watermark = mark
            for log in self.logs:
                log.high_watermark = mark

    def settle(self) -> None:
        """Replicate, flush and commit all."""
        self.replicate()
        for which in (0, 1):
            self.flush(which)
        self.commit()

    def roll(self, which: int) -> None:
        """Begin another segment."""
        self.replicas[which].log.roll()

    def fail_over(self) -> None:
        """The follower leads; what it lacks is lost."""
        self.leader = 1 - self.leader
        self.epoch += 1
        end = self.log.log_end_offset
        assert end >= self.high_watermark, (
            f"the new leader's log ends at {end}, before the high watermark {self.high_watermark}"
        )
        self.chain = [entry for entry in self.chain if entry.base_offset < end]
        former = self.replicas[1 - self.leader].log
        if former.log_end_offset > end:
            former.truncate_to(end, now_ms=self.now_ms)
        self.last_stable_offset = 0  # of another term

    def restart(self, which: int, how: int) -> None:
        """Stop a replica cleanly (0), by kill -9 (1) or loss of power; if it leads, and lost something, it does not."""
        replica = self.replicas[which]
        assert replica.manager is not None
        if how == 0:
            replica.manager.close()
            replica.open()
        else:
            replica.storage.crash(None if how == 1 else Random(how))
            replica.open()
        log = replica.log
        assert log.log_end_offset >= self.high_watermark, (
            f"a restart has cut the log to {log.log_end_offset}, below the high watermark {self.high_watermark}"
        )
        log.high_watermark = self.high_watermark
        if which == self.leader and log.log_end_offset < (self.chain[-1].next_offset if self.chain else 0):
            self.fail_over()

    def trim(self, which: int, below: float) -> None:
        """Delete records, also of open transactions, and the segments that held nothing else."""
        self.replicas[which].log.delete_records(int(self.high_watermark * below))
        self.checkpoint(which)
        self.replicas[which].clock.now += CONFIG.file_delete_delay_ms + 1
        self.checkpoint(which)

    def checkpoint(self, which: int) -> None:
        """Housekeeping: indexes and snapshots are written, retention takes what is due."""
        manager = self.replicas[which].manager
        assert manager is not None
        manager.run_housekeeping_once(self.replicas[which].clock.now)

    def harm(self, which: int, how: int) -> None:
        """Damage (0) the indexes of aborted transactions, or remove (1) all indexes, and start again."""
        replica = self.replicas[which]
        assert replica.manager is not None
        replica.manager.close()
        for name in replica.storage.list_sizes(DIRECTORY):
            path = f"{DIRECTORY}/{name}"
            if name.endswith(".txnindex") and how == 0:
                replica.storage.open(path).write((b"\xff",), 3)
            elif name.endswith(("index", ".snapshot")) and how == 1:
                replica.storage.remove(path)
        replica.open()
        replica.log.high_watermark = self.high_watermark

    # What must hold

    def check(self) -> None:
        """Both replicas agree with the model on the part of the log that they have."""
        for log in self.logs:
            self.check_log(log)
        stable = self.log.last_stable_offset
        assert stable >= self.last_stable_offset, (
            f"the last stable offset went back within a term, from {self.last_stable_offset} to {stable}"
        )
        self.last_stable_offset = stable

    def check_log(self, log: PartitionLog) -> None:
        """A replica agrees with the model on the part of the log that it has."""
        chain = [entry for entry in self.chain if entry.base_offset < log.log_end_offset]
        transactions = transactions_in(chain)
        unstable = [
            each.first_offset
            for each in transactions
            if each.last_offset is None or each.last_offset >= self.high_watermark
        ]
        assert log.first_unstable_offset == min(unstable, default=None), (
            f"the first unstable offset is {log.first_unstable_offset}, but the first undecided transactions begin at "
            f"{unstable}"
        )
        expected = min(self.high_watermark, *unstable) if unstable else self.high_watermark
        assert log.last_stable_offset == max(expected, log.log_start_offset), (
            f"the last stable offset is {log.last_stable_offset}, but must be {max(expected, log.log_start_offset)}"
        )
        for producer_id in {entry.producer_id for entry in chain} - {-1}:
            self._check_producer(log, producer_id, chain, transactions)
        self._check_readers(log, chain, transactions)

    def _check_producer(
        self, log: PartitionLog, producer_id: int, chain: list[Entry], transactions: list[Transaction]
    ) -> None:
        state = log.producers.get(producer_id)
        assert state is not None
        own = [entry for entry in chain if entry.producer_id == producer_id]
        assert state.epoch == own[-1].epoch, (
            f"producer {producer_id} has epoch {state.epoch}, but its last batch has {own[-1].epoch}"
        )
        last = [each for each in transactions if each.producer_id == producer_id][-1:]
        open_from = last[0].first_offset if last and last[0].last_offset is None else -1
        assert state.first_offset == open_from, (
            f"the open transaction of producer {producer_id} begins at {state.first_offset}, but in the log at "
            f"{open_from}"
        )
        assert bool(state.batches) == (own[-1].commit is None), (
            f"producer {producer_id} must have remembered batches unless its last batch is a marker, but has "
            f"{state.batches}"
        )

    def _check_readers(self, log: PartitionLog, chain: list[Entry], transactions: list[Transaction]) -> None:
        start, end = log.log_start_offset, log.last_stable_offset
        aborted = [
            (each.producer_id, each.first_offset, each.last_offset)
            for each in transactions
            if each.last_offset is not None and each.commit is False
        ]
        for first, last in ((start, end), (start + 3, end), (start, start + 4), ((start + end) // 2, end)):
            if first <= last <= end:
                found = log.aborted_transactions(first, last)
                wanted = [each for each in aborted if each[2] >= first and each[1] < last]
                assert sorted(each[:3] for each in found) == sorted(wanted), (
                    f"a read from {first} to {last} must list the aborted transactions {sorted(wanted)}, but lists "
                    f"{found}"
                )
        decided = {each.first_offset: each.commit for each in transactions}
        wanted_offsets = []
        current: dict[int, int] = {}
        for entry in chain:
            if entry.commit is not None:
                current.pop(entry.producer_id, None)
            elif entry.producer_id < 0 or decided[current.setdefault(entry.producer_id, entry.base_offset)]:
                wanted_offsets.append(entry.base_offset)
        visible = self._visible(log, start, end)
        first = visible_from(chain, start) if start < end else end  # a start within a batch may be the end as well
        assert visible == [offset for offset in wanted_offsets if first <= offset < end], (
            f"readers of committed records see the offsets {visible}, which are not those of committed transactions"
        )

    @staticmethod
    def _visible(log: PartitionLog, start: int, end: int) -> list[int]:
        """Return the base offsets of the batches that a reader of committed records gets, by protocol."""
        found, offset = [], start
        while offset < end:
            read = log.read(offset, 500, end, blocking=True)
            assert read is not None
            ranges = log.aborted_transactions(offset, read.next_offset)
            for _, header in iter_headers(read.records):
                if header.is_control:
                    continue
                if header.is_transactional and any(
                    each.producer_id == header.producer_id
                    and each.first_offset <= header.base_offset <= each.last_offset
                    for each in ranges
                ):
                    continue
                found.append(header.base_offset)
            offset = read.next_offset
        return found


def visible_from(chain: list[Entry], start: int) -> int:
    """Return the base offset of the batch that holds `start`: batches are read whole."""
    return next((entry.base_offset for entry in chain if entry.next_offset > start), start)
