"""Compaction of logs on a disk in memory: what stays, also of transactions, and when the background cleaner runs."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Coroutine
from copy import copy
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.log.cleaner import FAILED_PAUSE_MS, Cleaner, CleaningAbandoned, Plan, clean, next_in_line, plan_cleaning
from broker.log.config import LogConfig
from broker.log.partition_log import PartitionLog, SealedSegments
from broker.log.producer_state import Before
from broker.log.recovery import Cleaned
from broker.log.transactions import MarkerMissing, OpenTransaction, OpenTransactions
from raftlog.errors import CorruptRecordError, InvalidRecord
from raftlog.format import Attributes, validate_produced
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker, PlacedMarker
from tests.support.broker_parts import HeldDisk
from tests.support.fresh import examples
from tests.support.keyed_log import KeyedLog, keyed_batch
from tests.support.log_driver import TOPIC_ID, FakeClock, open_manager, restored, saved
from tests.support.memory_storage import Fault, MemoryStorage, moments
from tests.support.transactional_log import TransactionalKeyedLog

CONFIG = LogConfig(
    segment_bytes=2_000,
    index_interval_bytes=300,
    cleanup_policy="compact",
    delete_retention_ms=1_000,
    file_delete_delay_ms=10,
)


@cache
def _filled(config: LogConfig, rounds: int) -> bytes:
    log = KeyedLog(config)
    for number in range(rounds):
        for key in range(5):
            log.append((b"k%d" % key, b"%d" % number * 20), (b"own%d" % (number * 5 + key), b"x"))
            log.clock.now += 1
    log.commit()
    return saved(log)


def filled(config: LogConfig = CONFIG, rounds: int = 10) -> KeyedLog:
    """A log in which five keys were written many times, in batches of two."""
    return restored(KeyedLog, _filled(config, rounds))


def test_the_last_value_of_each_key_stays_at_its_offset() -> None:
    log = filled()
    before = log.log.size_bytes
    active = log.log.segments[-1].base_offset
    assert log.clean()
    log.check(untouched_from=active)
    left = [record for record in log.records() if record[0] < active]
    keys = [record[2] for record in left]
    assert len(keys) == len(set(keys))
    assert log.log.size_bytes < before
    assert log.log.size_bytes == sum(segment.size for segment in log.log.segments)
    log.stop(None)
    log.check(untouched_from=active)


def test_a_second_cleaning_finds_nothing_to_do() -> None:
    log = filled()
    assert log.clean()
    assert not log.clean()
    end = log.log.cleaned.first_dirty_offset
    assert end == log.log.segments[-1].base_offset
    log.stop(None)
    assert log.log.cleaned.first_dirty_offset == end


def test_neighbours_that_have_shrunk_become_one_segment() -> None:
    log = filled(replace(CONFIG, segment_bytes=3_000), rounds=30)
    many = log.log.segment_count
    for _ in range(3):
        log.append(*((b"own%d" % number, b"y") for number in range(150)))
    log.log.roll()
    log.append((b"end", b""))
    log.commit()
    assert log.clean()
    assert log.log.segment_count < many / 2
    log.check()


def test_nothing_at_or_above_the_high_watermark_is_touched() -> None:
    log = filled()
    bound = 31
    log.log.high_watermark = bound
    assert log.clean()
    log.check(untouched_from=bound)
    assert log.log.cleaned.first_dirty_offset <= bound
    log.log.truncate_to(bound, now_ms=log.clock.now)
    log.written = [record for record in log.written if record[0] < log.log.log_end_offset]
    assert log.log.log_end_offset in (30, 31)
    log.check()


def test_tombstones_stay_for_delete_retention_after_the_first_cleaning() -> None:
    log = filled()
    tombstone = log.append((b"k1", None))
    log.append(*((b"fill%d" % number, b"z" * 30) for number in range(60)))
    log.log.roll()
    log.append((b"x", b""))
    log.commit()
    assert log.clean()
    found = {record[0] for record in log.records()}
    assert tombstone in found
    assert [record[0] for record in log.records() if record[2] == b"k1"] == [tombstone]
    log.clock.now += 999
    for step, present in ((0, True), (1, False)):
        log.clock.now += step
        log.append((b"y", b""))
        log.log.roll()
        log.append((b"x", b""))
        log.commit()
        assert log.clean()
        log.check()
        assert (tombstone in {record[0] for record in log.records()}) is present


def test_what_follows_a_cut_below_the_clean_end_is_not_clean() -> None:
    """Else a tombstone written again would go at once, and what it hides would be back."""
    log = filled()
    assert log.clean()
    clean_end = log.log.cleaned.first_dirty_offset
    log.log.truncate_to(20, now_ms=log.clock.now)
    log.written = [record for record in log.records() if record[0] < log.log.log_end_offset]
    assert log.log.cleaned.first_dirty_offset <= log.log.log_end_offset < clean_end
    log.epoch += 1
    log.append((b"k", b"hidden"))
    log.append((b"k", None))
    while log.log.log_end_offset < clean_end + 2:
        log.append((b"fill%d" % log.log.log_end_offset, b"z" * 300))
    log.log.roll()
    log.append((b"x", b""))
    log.commit()
    log.stop(None)
    log.clock.now += 2_000
    assert log.clean()
    log.check()
    assert [record[3] for record in log.records() if record[2] == b"k"] == [None]


def test_a_log_that_starts_over_is_not_clean() -> None:
    log = filled()
    assert log.clean()
    log.log.reset_to(10, now_ms=log.clock.now)
    log.stop(None)
    assert log.log.cleaned.first_dirty_offset == 0
    assert not log.log.cleaned.times


def test_it_is_due_by_ratio_or_by_age() -> None:
    log = filled(replace(CONFIG, min_cleanable_dirty_ratio=0.9))
    plan = plan_cleaning(log.log, log.log.high_watermark, log.clock.now)
    assert plan is not None
    assert (plan.dirty_ratio, plan.is_due) == (1.0, True)
    assert log.clean(force=False)
    log.append((b"k1", b"new"))
    log.log.roll()
    log.append((b"x", b""))
    log.commit()
    plan = plan_cleaning(log.log, log.log.high_watermark, log.clock.now)
    assert plan is not None
    assert not plan.is_due
    log.log.update_config(replace(CONFIG, min_cleanable_dirty_ratio=0.9, max_compaction_lag_ms=500))
    assert not log.clean(force=False)
    log.clock.now += 501
    assert log.clean(force=False)


def test_segments_keep_to_their_size() -> None:
    """Also where what is left of a segment is still to be written, and is most of its bytes."""
    log = KeyedLog(replace(CONFIG, segment_bytes=40_000))
    for number in range(80):
        log.append((b"big%d" % number, b"v" * 3_000), *((b"s%d" % row, b"") for row in range(100)))
    log.log.roll()
    log.append((b"x", b""))
    log.commit()
    assert log.clean()
    log.check()
    assert max(segment.size for segment in log.log.segments) <= 40_000


@pytest.mark.parametrize("pieces", [1, 3, 6, 12, 14, 20, 40])
@pytest.mark.parametrize("starts_over", [False, True])
def test_a_log_that_is_cut_meanwhile_is_not_damaged(
    pieces: int, starts_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.log.cleaner.PIECE_BYTES", 1_000)
    monkeypatch.setattr("broker.log.cleaner.MAX_PIECE_BYTES", 1_000)
    log = filled(replace(CONFIG, segment_bytes=8_000), rounds=60)
    plan = plan_cleaning(log.log, log.log.high_watermark, log.clock.now)
    assert plan is not None
    cleaning = clean(plan, dedupe_bytes=1 << 20, clock=log.clock.now_ms)
    for _ in range(pieces):
        next(cleaning)
    if starts_over:
        log.log.reset_to(5_000, now_ms=log.clock.now)
    else:
        log.log.truncate_to(20, now_ms=log.clock.now)
    with pytest.raises(CleaningAbandoned):
        list(cleaning)
    log.written = [record for record in log.written if record[0] < log.log.log_end_offset and not starts_over]
    log.check()


def test_a_log_whose_segment_is_removed_amid_the_look_at_its_transactions_is_cleaned_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = filled_with_transactions(3)
    seal(log)
    plan = plan_cleaning(log.log, log.last_stable_offset, log.clock.now)
    assert plan is not None
    look = PartitionLog.aborted_transactions

    def late(self: PartitionLog, *arguments: int) -> Any:
        self.delete_records(self.log_end_offset)
        return look(self, *arguments)

    monkeypatch.setattr(PartitionLog, "aborted_transactions", late)
    with pytest.raises(CleaningAbandoned):
        list(clean(plan, dedupe_bytes=1 << 20, clock=log.clock.now_ms))


def test_records_younger_than_the_minimum_lag_stay() -> None:
    log = filled(replace(CONFIG, min_compaction_lag_ms=1_000_000))
    assert not log.clean()
    log.clock.now += 1_000_000
    assert log.clean()


def test_a_small_key_buffer_cleans_in_several_goes() -> None:
    log = filled(rounds=40)
    goes = 0
    while log.clean(dedupe_bytes=1):
        goes += 1
        log.check()
    assert goes >= 1


def test_records_without_key_go() -> None:
    log = KeyedLog(CONFIG)
    for _ in range(40):
        log.append((None, b"v" * 100), (b"k", b"w"))
    log.commit()
    active = log.log.segments[-1].base_offset
    assert log.clean()
    log.check(untouched_from=active)
    assert [record[0] for record in log.records() if record[2] is None and record[0] < active] == []


def test_what_a_producer_has_written_last_keeps_its_numbers() -> None:
    log = KeyedLog(CONFIG)
    for number in range(60):
        log.append((b"k", b"v" * 100), (b"j", b"w"), producer=(7, 0, 2 * number))
    for _ in range(40):
        log.append((b"k", b"v" * 100), (b"j", b"w"))
    log.commit()
    assert log.clean()
    log.check()
    numbered = [batch.header for batch in log.batches() if batch.header.producer_id == 7]
    last_five = [header for header in numbered if header.base_sequence >= 110]
    assert [(header.base_offset, header.base_sequence) for header in last_five] == [
        (110, 110),
        (112, 112),
        (114, 114),
        (116, 116),
        (118, 118),
    ]
    assert all(header.last_offset_delta == 1 and header.record_count == 0 for header in last_five)


def test_offsets_by_time_pass_over_what_is_gone() -> None:
    log = filled()
    assert log.clean()
    assert log.log.max_timestamp() is not None
    for at_ms in {record[1] for record in log.written}:
        found = log.log.offset_for_time(at_ms)
        expected = next((record for record in log.records() if record[1] >= at_ms), None)
        assert (found and found.offset) == (expected and expected[0])


def test_the_largest_timestamp_may_have_gone_with_its_record() -> None:
    log = KeyedLog(CONFIG)
    log.append((b"k", b"old"), timestamps_ms=9_000_000)
    log.append((b"j", b"new"), timestamps_ms=5)
    log.append((b"k", b"new" * 300), timestamps_ms=7)
    log.log.roll()
    log.append((b"z", b"z"), timestamps_ms=6)
    log.commit()
    assert log.clean()
    log.check()
    found = log.log.max_timestamp()
    assert found is not None
    assert (found.offset, found.timestamp_ms) == (2, 7)


def test_a_follower_goes_on_within_what_its_leader_has_merged() -> None:
    """Wherever its log ends: it keeps what it has and takes the rest of the merged batch."""
    leader = filled()
    assert leader.clean()
    whole = [batch.header for batch in leader.batches()]
    assert any(header.last_offset_delta > 4 for header in whole)
    records = leader.records()
    for end in range(0, leader.log.log_end_offset, 2):
        follower = filled()
        follower.log.high_watermark = 0
        follower.log.truncate_to(end, now_ms=follower.clock.now)
        assert follower.log.log_end_offset == end
        while follower.log.log_end_offset < leader.log.log_end_offset:
            found = leader.log.read(follower.log.log_end_offset, 700, leader.log.log_end_offset, blocking=True)
            assert found is not None
            follower.log.append_stamped(found.records, now_ms=0, max_epoch=1)
        follower.commit()
        follower.check()
        expected = [record for record in records if record[0] >= end]
        assert [record for record in follower.records() if record[0] >= end] == expected
        follower.stop(None)
        assert follower.clean()
        follower.check()


@pytest.mark.parametrize("transactional", [False, True])
def test_a_follower_goes_on_within_what_an_earlier_leader_has_split(transactional: bool) -> None:
    """It has copied the first part of a batch from a leader that split it; the next leader has the batch as it was."""
    config = replace(CONFIG, max_message_bytes=1_000, segment_bytes=100_000)
    leaders = TransactionalKeyedLog(config), TransactionalKeyedLog(config)
    rows = [(b"%03d" % number, b"v") for number in range(60)]
    for log in leaders:
        log.append((b"first", b"x"))
        log.produce(7, *rows) if transactional else log.append(*rows, producer=(7, 0, 0))
        if transactional:
            log.end({7: True})
        log.append((b"005", b"later"))
        log.log.roll()
        log.append((b"after", b"x"))
        log.commit()
        log.log.expire_producers(log.clock.now + log.log.producers.limits.expiration_ms + 1)
    first, second = leaders
    assert first.clean()
    border = [batch.header.next_offset for batch in first.batches()][1]
    assert 1 < border < 61, "the batch has lost a record, and is larger with the offsets of the others"
    follower = TransactionalKeyedLog(config)
    while follower.log.log_end_offset < border:
        found = first.log.read(follower.log.log_end_offset, 1, border, blocking=True)
        assert found is not None
        follower.log.append_stamped(found.records, now_ms=0, max_epoch=1)
    follow(follower, second)
    assert follower.log.log_end_offset == second.log.log_end_offset
    assert follower.log.first_unstable_offset is None
    assert follower.visible() == [record for record in second.visible() if record[2] != b"005" or record[0] > border]


RETENTION_MS = 1_000
TRANSACTIONS_CONFIG = LogConfig(
    segment_bytes=1_500,
    index_interval_bytes=300,
    cleanup_policy="compact",
    delete_retention_ms=RETENTION_MS,
    file_delete_delay_ms=10,
)


@cache
def _filled_with_transactions(rounds: int) -> bytes:
    log = TransactionalKeyedLog(TRANSACTIONS_CONFIG)
    for number in range(rounds):
        for key in range(3):
            log.produce(1, (b"k%d" % key, b"%d" % number * 20), (b"own%d" % (number * 3 + key), b"x"))
            log.produce(2, (b"k%d" % key, b"aborted"), (b"gone%d" % (number * 3 + key), b"x"))
            log.clock.now += 1
        log.end({1: True, 2: False})
    log.commit()
    return saved(log)


def filled_with_transactions(rounds: int = 8) -> TransactionalKeyedLog:
    """Two producers write the same keys in turn: what 1 writes is committed, what 2 writes is aborted."""
    return restored(TransactionalKeyedLog, _filled_with_transactions(rounds))


def seal(log: TransactionalKeyedLog) -> None:
    """Begin another segment, so that all that was written can be compacted."""
    log.log.roll()
    log.append((b"after", b"%d" % log.log.log_end_offset))
    log.commit()


def marks(log: TransactionalKeyedLog, below: int, mark: Attributes) -> list[int]:
    """Return the offsets of batches with this attribute, and rows, below an offset."""
    return [offset for offset, attributes in log.headers() if attributes & mark and offset < below]


def controls(log: TransactionalKeyedLog) -> list[int]:
    """Return the offsets of the control batches."""
    return marks(log, log.log.log_end_offset, Attributes.CONTROL)


def test_committed_rows_are_compacted_and_aborted_ones_go() -> None:
    log = filled_with_transactions()
    log.check_committed()
    before = log.log.size_bytes
    seal(log)
    assert log.clean()
    log.check_committed()
    log.check_rebuilt()
    assert log.log.size_bytes < before
    raw = [record[2] for record in log.records() if record[2] is not None]
    assert not [key for key in raw if key.startswith(b"gone")], "records that no reader will ever get must be removed"
    clean_end = log.log.cleaned.first_dirty_offset
    transactional = set(marks(log, clean_end, Attributes.TRANSACTIONAL))
    assert transactional == set(controls(log)), "after the cleaning only markers may have the transactional flag"
    log.stop(None)
    log.check_committed()
    log.check_rebuilt()


def test_nothing_from_an_open_transaction_on_is_touched() -> None:
    log = filled_with_transactions(4)
    first_open = log.produce(3, (b"k0", b"open"))
    for number in range(20):
        log.append((b"k0", b"%d" % number * 30), (b"k1", b"later"))
    seal(log)
    assert log.last_stable_offset == first_open
    before = [record for record in log.records() if record[0] >= first_open]
    assert log.clean()
    assert log.log.cleaned.first_dirty_offset <= first_open
    assert [record for record in log.records() if record[0] >= first_open] == before
    log.check_committed()
    log.end({3: False})
    seal(log)
    assert log.clean()
    log.check_committed()
    assert b"open" not in [record[3] for record in log.records()]


def test_a_marker_that_is_not_committed_decides_nothing_yet() -> None:
    log = filled_with_transactions(4)
    first = log.produce(3, (b"k0", b"late"))
    log.log.roll()
    log.commit()
    log.end({3: True})
    log.log.roll()
    log.log.flush()
    assert log.last_stable_offset == first
    log.clean()
    assert log.log.cleaned.first_dirty_offset <= first
    log.commit()
    seal(log)
    assert log.clean()
    assert log.log.cleaned.first_dirty_offset > first
    log.check_committed()


def test_markers_go_after_delete_retention_when_their_producers_are_forgotten() -> None:
    log = filled_with_transactions()
    seal(log)
    assert log.clean()
    there = controls(log)
    assert len(there) == 8
    log.clock.now += RETENTION_MS - 1
    seal(log)
    assert log.clean()
    assert controls(log) == there, "markers must stay while a reader may be between their batches and them"
    log.clock.now += 1
    seal(log)
    assert log.clean()
    last = there[-1:]
    assert controls(log) == last, "the last marker must stay, as it is the last record of two producers"
    log.check_committed()
    log.check_rebuilt()
    log.clock.now += log.log.producers.limits.expiration_ms + 1
    log.log.expire_producers(log.clock.now)
    assert log.log.producers.get(1) is None
    seal(log)
    assert log.clean()
    assert controls(log) == []
    log.check_committed()
    log.stop(None)
    assert log.log.first_unstable_offset is None
    log.check_committed()


def test_markers_stay_while_a_snapshot_may_know_their_transaction_as_open() -> None:
    """Recovery may begin at any snapshot that is there: what comes behind it has to end what it has begun."""
    log = filled_with_transactions(2)
    log.produce(3, (b"k0", b"open at the snapshot"))
    seal(log)
    log.log.store_producers()
    snapshot = log.log.oldest_snapshot_offset(-1)
    assert snapshot > 0
    marker = log.end({3: True})
    for _ in range(3):  # the producer goes on, so another marker tells of it
        log.produce(3, (b"k1", b"x"))
        log.end({3: True})
    seal(log)
    assert log.clean()
    log.clock.now += RETENTION_MS
    kept = list(log.log._snapshots.offsets)
    log.log._snapshots.offsets = [snapshot]
    seal(log)
    assert log.clean()
    assert marker in controls(log)
    log.log._snapshots.offsets = kept
    log.stop(None)
    log.check_rebuilt()
    log.check_committed()


def test_aborted_ranges_of_what_was_compacted_are_told_as_long_as_the_marker_is_there() -> None:
    """A reader of the old batches, just before they were replaced, still learns that they were aborted."""
    log = filled_with_transactions(3)
    seal(log)
    end = log.log.segments[-1].base_offset
    before = [(a.producer_id, a.first_offset, a.last_offset) for a in log.log.aborted_transactions(0, end)]
    assert len(before) == 3
    assert log.clean()
    after = [(a.producer_id, a.first_offset, a.last_offset) for a in log.log.aborted_transactions(0, end)]
    assert after == before
    log.stop(None)
    again = [(a.producer_id, a.first_offset, a.last_offset) for a in log.log.aborted_transactions(0, end)]
    assert again == before


KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
ROWS = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.binary(max_size=60))), min_size=1, max_size=3)


class CompactedTransactions(RuleBasedStateMachine):
    """Any mix of transactions, cleanings, restarts and time."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TransactionalKeyedLog(TRANSACTIONS_CONFIG)
        self.numbered: dict[int, list[tuple[int, int, int]]] = {4: [], 5: []}
        """(base offset, base sequence, next sequence) of each batch of the idempotent producers."""

    @rule(rows=ROWS, producer=st.integers(4, 5))
    def append_numbered(self, rows: list[tuple[bytes, bytes | None]], producer: int) -> None:
        """A batch of an idempotent producer."""
        batches = self.numbered[producer]
        sequence = batches[-1][2] if batches else 0
        offset = self.log.append(*rows, producer=(producer, 0, sequence))
        batches.append((offset, sequence, sequence + len(rows)))

    @rule(rows=ROWS)
    def append(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        """A batch of no transaction."""
        self.log.append(*rows)

    @rule(rows=ROWS, producer=st.integers(1, 3))
    def produce(self, rows: list[tuple[bytes, bytes | None]], producer: int) -> None:
        """A transactional batch."""
        self.log.produce(producer, *rows)

    @rule(producers=st.sets(st.integers(1, 3), min_size=1), commit=st.booleans())
    def end(self, producers: set[int], commit: bool) -> None:
        """One control batch; some of them may have nothing open."""
        self.log.end({producer: commit ^ (producer == 2) for producer in producers})

    @rule()
    def commit(self) -> None:
        """Flush and commit."""
        self.log.commit()

    @rule()
    def settle(self) -> None:
        """Commit and seal."""
        seal(self.log)

    @rule(commits=st.lists(st.booleans(), min_size=3, max_size=3), times=st.integers(1, 3))
    def settle_all(self, commits: list[bool], times: int) -> None:
        """End what is open, and compact all of it, perhaps again when retention has gone by."""
        if self.log.pending:
            self.log.end({producer: commits[producer - 1] for producer in sorted(self.log.pending)})
        for _ in range(times):
            seal(self.log)
            self.clean(1 << 20)
            self.log.clock.now += RETENTION_MS

    @rule(millis=st.sampled_from([1, RETENTION_MS, 2 * RETENTION_MS]))
    def wait(self, millis: int) -> None:
        """Time goes by."""
        self.log.clock.now += millis

    @rule(dedupe_bytes=st.sampled_from([1, 1 << 20]))
    def clean(self, dedupe_bytes: int) -> None:
        """Compact."""
        self.log.clean(dedupe_bytes=dedupe_bytes)
        below = self.log.log.cleaned.first_dirty_offset
        assert set(marks(self.log, below, Attributes.TRANSACTIONAL)) <= set(marks(self.log, below, Attributes.CONTROL))

    @rule(seed=st.one_of(st.none(), st.integers(0, 99)))
    def restart(self, seed: int | None) -> None:
        """Kill -9, or power loss."""
        self.log.stop(None if seed is None else Random(seed))
        self._cut()

    @rule(back=st.integers(0, 8))
    def truncate(self, back: int) -> None:
        """Cut what is not committed, as a deposed leader does."""
        self.log.truncate(self.log.log.log_end_offset - back)
        self._cut()

    def _cut(self) -> None:
        end = self.log.log.log_end_offset
        for batches in self.numbered.values():
            batches[:] = [batch for batch in batches if batch[0] < end]

    @rule()
    def housekeeping(self) -> None:
        """Checkpoint, remove files."""
        self.log.manager.run_housekeeping_once(self.log.clock.now)

    @invariant()
    def holds(self) -> None:
        """Readers get what is committed, and the log alone tells what is open."""
        self.log.check_committed()
        self.log.check_rebuilt()
        assert set(self.log.pending) == set(dict(self.log.log.producers.transactions.items()))
        producers = self.log.log.producers
        for producer, batches in self.numbered.items():
            state = producers.get(producer)
            known = () if state is None else state.batches
            assert [(b.base_offset, b.base_sequence) for b in known] == [batch[:2] for batch in batches[-5:]]
        ended = {producer for _, producer, _, _ in self.log.decided} | set(self.log.pending)
        epochs = {producer: state.epoch for producer, state in producers.items() if producer not in self.numbered}
        assert epochs == {producer: self.log.epochs[producer] for producer in ended}


def test_a_marker_goes_for_a_newer_one_only_once_that_is_durable() -> None:
    """Else a power failure takes the newer one, and nothing in the log says that the producer was fenced."""
    state = CompactedTransactions()
    state.settle()
    state.settle()
    state.produce(producer=1, rows=[(b"a", None)])
    state.settle_all(commits=[False, False, False], times=1)
    state.settle()
    state.end(commit=False, producers={1})
    state.clean(dedupe_bytes=1)
    state.restart(seed=0)
    state.holds()


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("change", ["cut", "started over", "trimmed"])
def test_a_log_that_changes_while_its_producers_are_read_is_not_damaged(
    pieces: int, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the cleaning reads then, of producers or of records, it comes to nothing or to a whole log."""
    monkeypatch.setattr("broker.log.cleaner.PIECE_BYTES", 1_500)
    monkeypatch.setattr("broker.log.cleaner.MAX_PIECE_BYTES", 1_500)
    log = filled_with_transactions(3)
    seal(log)
    plan = plan_cleaning(log.log, log.last_stable_offset, log.clock.now)
    assert plan is not None
    cleaning = clean(plan, dedupe_bytes=1 << 20, clock=log.clock.now_ms)
    for _ in range(pieces):
        next(cleaning)
    log.log._snapshots.offsets = []
    match change:
        case "cut":
            log.log.truncate_to(8, now_ms=log.clock.now)
        case "started over":
            log.log.reset_to(5_000, now_ms=log.clock.now)
        case _:
            log.log.delete_records(log.log.log_end_offset)
            log.clock.now += 20
            log.manager.run_housekeeping_once(log.clock.now)
            log.clock.now += 20
            log.manager.run_housekeeping_once(log.clock.now)
    with pytest.raises(CleaningAbandoned):
        list(cleaning)
    piece = log.log.log_start_offset
    while piece < log.log.log_end_offset:
        piece = log.log.check(piece, 1 << 20).next_offset


def test_a_marker_goes_for_a_newer_one_only_once_that_is_committed() -> None:
    """Else a new leader that lacks the newer one has it cut, and nothing in the log says that the producer was fenced.

    A replica that copies this log has no snapshots: as a leader it would let a late batch begin a transaction again.
    """
    log = filled_with_transactions(2)
    seal(log)
    assert log.clean()
    log.clock.now += RETENTION_MS
    seal(log)
    committed, fences = log.log.log_end_offset, controls(log)[-1:]
    log.end({1: False, 2: False})
    assert log.clean()
    log.truncate(committed)
    assert controls(log) == fences
    log.check_rebuilt()
    assert log.rebuilt().get(1) is not None
    log.end({1: False, 2: False})
    seal(log)
    assert log.clean()
    log.clock.now += RETENTION_MS
    seal(log)
    assert log.clean()
    assert len(controls(log)) == 1, "the older marker goes once the newer one is committed and compacted"


def test_sequence_numbers_go_for_newer_ones_only_once_those_are_committed() -> None:
    log = TransactionalKeyedLog(TRANSACTIONS_CONFIG)
    for number in range(8):
        log.append((b"k", b"v" * 100), producer=(7, 0, number))
    seal(log)
    committed = log.log.log_end_offset
    for number in range(8, 16):
        log.append((b"k", b"v" * 100), producer=(7, 0, number))
    assert log.clean()
    log.truncate(committed)
    state = log.rebuilt().get(7)
    assert state is not None
    assert [batch.base_sequence for batch in state.batches] == [3, 4, 5, 6, 7]
    log.check_rebuilt()


def test_the_last_sequence_before_a_marker_stays() -> None:
    """A Kafka client before transaction.version 2 continues it in its next transaction."""
    log = TransactionalKeyedLog(TRANSACTIONS_CONFIG)
    for _ in range(3):
        log.produce(1, (b"k", b"v" * 100), (b"j", b"w" * 100))
        log.produce(2, (b"k", b"aborted" * 30))
    log.end({1: True, 2: False})
    for number in range(20):
        log.append((b"own%d" % number, b"v" * 100), (b"k", b"later"))
    seal(log)
    assert log.clean()
    rebuilt = log.rebuilt()
    assert {id_: state.last_written for id_, state in rebuilt.items()} == {1: Before(0, 5), 2: Before(0, 2)}
    log.check_rebuilt()


TestCompactedTransactions = CompactedTransactions.TestCase
TestCompactedTransactions.settings = settings(max_examples=examples(0.4), stateful_step_count=40, deadline=None)


def due() -> TransactionalKeyedLog:
    """A log that was compacted once, has markers that are due, and transactions since; one of them is open."""
    log = filled_with_transactions(4)
    seal(log)
    assert log.clean()
    log.clock.now += RETENTION_MS
    for number in range(4):
        log.produce(1, (b"k%d" % number, b"again"), (b"k1", b"%d" % number * 30))
        log.produce(2, (b"k0", b"aborted again"))
        log.end({1: number % 2 == 0, 2: False})
    seal(log)
    log.produce(3, (b"k0", b"open"))
    log.commit()
    log.manager.run_housekeeping_once(log.clock.now)
    return log


def day(log: TransactionalKeyedLog) -> None:
    """Compact, then let housekeeping remove the replaced files."""
    assert log.clean()
    log.clock.now += 20
    log.manager.run_housekeeping_once(log.clock.now)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_crash_at_every_operation_leaves_everything_decided(seed: int | None) -> None:
    whole = due()
    start = whole.storage.operations
    stopped = moments(whole.storage, lambda: day(whole), whole.stopped)
    assert len(stopped) > 20
    expected = whole.visible()
    for number, log in enumerate(stopped, start):
        log.stop(None if seed is None else Random(seed * 1_000 + number))
        log.check_committed(half_cleaned=True)
        log.check_rebuilt()
        assert list(dict(log.log.producers.transactions.items())) == [3]
        log.commit()
        log.clean()
        log.check_committed()
        log.check_rebuilt()
        assert log.visible() == expected


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_follower_that_goes_on_in_a_compacted_log_knows_what_is_decided(at: int) -> None:
    """Wherever its own log ends: it has transactional batches of which the leader's log says nothing any more."""
    leader, follower = filled_with_transactions(4), filled_with_transactions(4)
    leader.produce(3, (b"k0", b"open"))
    seal(leader)
    assert leader.clean()
    log = follower.log
    log.high_watermark = 0
    log.truncate_to(at, now_ms=follower.clock.now)
    offset, end = log.log_end_offset, leader.log.log_end_offset
    while offset < end:
        result = leader.log.read(offset, 400, end, blocking=True)
        assert result is not None
        log.append_stamped(result.records, now_ms=follower.clock.now)
        offset = log.log_end_offset
    log.flush()
    log.high_watermark = end
    follower.written, follower.pending = leader.written, leader.pending
    live, its = log.producers, leader.log.producers
    assert list(dict(live.transactions.items())) == list(dict(its.transactions.items())) == [3]
    assert {id_: state.epoch for id_, state in live.items()} == {id_: state.epoch for id_, state in its.items()}
    assert log.last_stable_offset == leader.log.last_stable_offset
    assert set(leader.visible()) <= set(follower.visible()) <= {r for r in leader.written if r[0] < end}
    follower.check_rebuilt()


FOLLOWER_CONFIG = LogConfig(
    segment_bytes=1_500,
    index_interval_bytes=300,
    cleanup_policy="compact",
    delete_retention_ms=RETENTION_MS,
    file_delete_delay_ms=10,
)


def follow(follower: TransactionalKeyedLog, leader: TransactionalKeyedLog, up_to: int | None = None) -> None:
    """Copy the leader's batches, as far as whole batches end at or below an offset."""
    end = leader.log.log_end_offset if up_to is None else up_to
    while follower.log.log_end_offset < end:
        result = leader.log.read(follower.log.log_end_offset, 300, leader.log.log_end_offset, blocking=True)
        assert result is not None
        follower.log.append_stamped(result.records, now_ms=follower.clock.now)
    follower.log.flush()
    follower.log.high_watermark = min(leader.log.high_watermark, follower.log.log_end_offset)


def control_batches(log: TransactionalKeyedLog) -> list[int]:
    """Return the offsets of the control batches that are left."""
    return [offset for offset, attributes in log.headers() if attributes & Attributes.CONTROL]


def clean_all(log: TransactionalKeyedLog, times: int = 3) -> None:
    """Compact, and again when `delete.retention.ms` has gone by."""
    for _ in range(times):
        for number in range(30):
            log.append((b"own%d" % number, b"v" * 30))
            log.clock.now += 1
        log.log.roll()
        log.append((b"after", b"x"))
        log.commit()
        log.log.store_producers()
        log.clean()
        log.clock.now += RETENTION_MS + 1


def away(
    *, goes_on: bool, forgotten: bool, bounded: bool = True
) -> tuple[TransactionalKeyedLog, TransactionalKeyedLog]:
    """Compact a log whose follower has the first batch of an aborted transaction, and no more."""
    leader, follower = TransactionalKeyedLog(FOLLOWER_CONFIG), TransactionalKeyedLog(FOLLOWER_CONFIG)
    leader.append((b"a", b"first"))
    leader.produce(7, (b"secret", b"aborted"))
    leader.commit()
    follow(follower, leader)
    leader.end({7: False})
    if goes_on:
        leader.produce(7, (b"good", b"committed"))
        leader.end({7: True})
    leader.commit()
    if forgotten:
        leader.log.expire_producers(leader.clock.now + 25 * 3_600_000)
    if bounded:
        leader.markers_below = follower.log.flushed_end_offset
    clean_all(leader, 4)
    return leader, follower


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_follower_that_was_away_learns_how_its_transaction_ended(goes_on: bool, forgotten: bool) -> None:
    leader, follower = away(goes_on=goes_on, forgotten=forgotten)
    follow(follower, leader)
    assert follower.log.last_stable_offset == follower.log.log_end_offset
    assert b"aborted" not in [record[3] for record in follower.visible()]
    assert b"aborted" not in [record[3] for record in leader.visible()]
    leader.markers_below = follower.log.flushed_end_offset
    clean_all(leader)
    assert len(control_batches(leader)) < 1 + goes_on + (not forgotten), (
        "markers that all followers have must be removed"
    )


def test_a_follower_whose_log_lacks_a_marker_takes_no_other_one_for_it() -> None:
    leader, follower = away(goes_on=True, forgotten=False, bounded=False)
    with pytest.raises(MarkerMissing, match="lacks the marker"):
        follow(follower, leader)
    assert b"aborted" not in [record[3] for record in follower.visible()]


def placed(epoch: int, first_offset: int, commit: bool = True) -> list[PlacedMarker]:
    """Return one marker of producer 1, at offset 50."""
    return [PlacedMarker(50, Marker(1, epoch, commit, 0, first_offset))]


@pytest.mark.parametrize(
    ("epoch", "first_offset", "log_start"),
    [(4, 10, 0), (4, 3, 0), (9, 40, 11), (4, -1, 11), (2, 40, 11)],
    ids=["its own", "began earlier", "below the log start", "not known to the leader", "late"],
)
def test_markers_that_may_end_what_is_open(epoch: int, first_offset: int, log_start: int) -> None:
    known = OpenTransactions([(1, OpenTransaction(3, 10, 0))])
    known.check_followed(placed(epoch, first_offset), log_start)


@pytest.mark.parametrize(("epoch", "first_offset"), [(4, 11), (4, -1), (5, 10), (3, 10), (2, 5), (5, 20)])
def test_markers_that_are_of_another_transaction(epoch: int, first_offset: int) -> None:
    known = OpenTransactions([(1, OpenTransaction(3, 10, 0))])
    with pytest.raises(MarkerMissing, match="offset 10 on"):
        known.check_followed(placed(epoch, first_offset), 0)
    known.check_followed([PlacedMarker(49, Marker(2, epoch, True, 0, first_offset))], 0)


def test_a_transaction_of_the_last_epoch_ends_with_a_marker_of_that_epoch() -> None:
    known = OpenTransactions([(1, OpenTransaction(MAX_PRODUCER_EPOCH, 10, 0))])
    known.check_followed(placed(MAX_PRODUCER_EPOCH, 10), 0)


def test_the_second_marker_of_a_batch_ends_nothing() -> None:
    known = OpenTransactions([(1, OpenTransaction(3, 10, 0))])
    known.check_followed([*placed(4, 10), PlacedMarker(51, Marker(1, 9, True, 0, -1))], 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["produce", "commit", "abort", "plain", "clean", "follow", "settle", "wait"]), st.integers(1, 3)
    ),
    max_size=50,
)


@settings(max_examples=examples(0.6), deadline=None)
@given(STEPS, st.integers(0, 1 << 16))
def test_wherever_a_follower_stops_it_ends_up_with_what_was_committed(steps: list[tuple[str, int]], seed: int) -> None:
    """The leader compacts at any time within the follower's range; the follower continues at any batch."""
    dice = Random(seed)
    leader, follower = TransactionalKeyedLog(FOLLOWER_CONFIG), TransactionalKeyedLog(FOLLOWER_CONFIG)
    leader.markers_below = 0
    for step, producer in steps:
        match step:
            case "produce":
                leader.produce(producer, (b"k%d" % producer, b"%d" % leader.log.log_end_offset * 20), (b"k", b"x"))
            case "commit" | "abort":
                leader.end({producer: step == "commit"})
            case "plain":
                leader.append((b"k%d" % producer, b"plain"))
            case "wait":
                leader.clock.now += RETENTION_MS
            case "settle":
                leader.log.roll()
                leader.commit()
                leader.log.store_producers()
            case "clean":
                leader.clean()
            case "follow":
                start, end = follower.log.log_end_offset, leader.log.log_end_offset
                leader.log.flush()
                follow(follower, leader, dice.randint(start, end))
                leader.markers_below = follower.log.flushed_end_offset
    leader.end(dict.fromkeys((1, 2, 3), False))
    leader.commit()
    clean_all(leader, dice.randint(0, 3))
    follow(follower, leader)
    assert follower.log.first_unstable_offset is None
    assert len(follower.log.producers.transactions) == 0
    epochs = {producer_id: state.epoch for producer_id, state in leader.log.producers.items()}
    assert {producer_id: state.epoch for producer_id, state in follower.log.producers.items()} == epochs
    assert set(follower.visible()) <= set(leader.written), "a record of an aborted transaction can be read as committed"
    assert set(leader.visible()) <= set(follower.visible())


RATE = 1 << 40
BACKOFF_MS = 15_000
BACKGROUND_CONFIG = LogConfig(segment_bytes=1_500, index_interval_bytes=0, cleanup_policy="compact")


class Scene:
    """Logs in which one key was written over and over, and a callback for damage."""

    def __init__(self, logs: int = 1, bytes_per_second: int = RATE) -> None:
        self.storage = MemoryStorage()
        self.clock = FakeClock()
        self.disk = HeldDisk()
        self.manager = open_manager(self.storage, clock=self.clock, config=BACKGROUND_CONFIG)
        self.logs = [self.manager.create("t", TOPIC_ID, partition) for partition in range(logs)]
        for log in self.logs:
            self.write(log)
        self.damaged: list[PartitionLog] = []
        self.waits = bytes_per_second < RATE
        self.cleaner = Cleaner(
            self.manager,
            self.disk,
            self.clock,
            self._on_damaged,
            bytes_per_second=bytes_per_second,
            backoff_ms=BACKOFF_MS,
            dedupe_bytes=1 << 20,
        )

    def write(self, log: PartitionLog, batches: int = 20, key: bytes = b"k") -> None:
        """Append and commit."""
        for number in range(batches):
            batch = keyed_batch([(key, b"%d" % number * 50)])
            log.append(batch, validate_produced(batch), leader_epoch=1, now_ms=0)
        log.flush()
        log.high_watermark = log.log_end_offset

    def seal(self, log: PartitionLog) -> None:
        """Let all of a log be compacted."""
        log.roll()
        log.flush()

    def _on_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        self.damaged.append(log)

    async def tick(self, after_ms: float = BACKOFF_MS) -> None:
        """Let time pass, and what is due happen."""
        self.clock.now += int(after_ms)
        self.cleaner.tick()
        await self.settle()

    async def settle(self) -> None:
        """Wait until it is idle, or for a moment where it has to wait."""
        deadline = asyncio.get_running_loop().time() + (0.05 if self.waits or self.disk.held else 30)
        while self.cleaner.is_busy and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 # no event announces it
            await asyncio.sleep(0.001)

    def clean(self) -> list[bool]:
        """Which logs have been compacted."""
        return [log.cleaned.first_dirty_offset > 0 for log in self.logs]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_all_that_is_due_is_compacted_one_log_after_the_other() -> None:
    async def scenario() -> None:
        scene = Scene(logs=3)
        await scene.tick(BACKOFF_MS - 1)
        assert scene.clean() == [False] * 3
        await scene.tick(1)
        assert scene.clean() == [True] * 3
        end = scene.logs[0].cleaned.first_dirty_offset
        scene.write(scene.logs[0])
        await scene.tick(BACKOFF_MS - 1)
        assert scene.logs[0].cleaned.first_dirty_offset == end
        await scene.tick(1)
        assert scene.logs[0].cleaned.first_dirty_offset > end

    run(scenario())


MANY_CLEANINGS = 20
VICTIM_INSIDE = "__consumer_offsets"


def test_logs_that_are_always_the_dirtiest_starve_no_other() -> None:
    """A tenant writes to its logs during each cleaning; logs that were due before come first nevertheless."""

    async def scenario() -> None:
        scene = Scene(logs=3)
        tenants = list(scene.logs)
        victims = [scene.manager.create(name, bytes(15) + name[-1:].encode(), 0) for name in ("victim", VICTIM_INSIDE)]
        for log in victims:
            for number in range(40):
                scene.write(log, 1, key=b"%d" % number)
            scene.seal(log)
        for log in tenants:
            log.update_config(replace(BACKGROUND_CONFIG, min_cleanable_dirty_ratio=0.0))
        await scene.tick()
        assert all(log.cleaned.first_dirty_offset == log.log_end_offset for log in victims)
        for log in victims:
            scene.write(log, 60)
            scene.seal(log)
        order: list[str] = []

        def written_to_meanwhile(log: PartitionLog) -> int:
            order.append(log.topic)
            if len(order) < MANY_CLEANINGS:
                for each in tenants:
                    scene.write(each, 10)
                    scene.seal(each)
                scene.clock.now += BACKOFF_MS
            return 0

        scene.cleaner._markers_below_of = written_to_meanwhile
        for log in tenants:
            scene.write(log)
            scene.seal(log)
        await scene.tick()
        assert order.index(VICTIM_INSIDE) == 0
        assert order.index("victim") <= 1 + len(tenants)
        assert len(order) >= MANY_CLEANINGS
        assert order.count("victim") == 1

    run(scenario())


def test_a_log_that_is_clean_rests_however_soon_it_is_dirty_again() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.logs[0].update_config(replace(BACKGROUND_CONFIG, min_cleanable_dirty_ratio=0.0))
        order: list[int] = []

        def written_to_meanwhile(log: PartitionLog) -> int:
            order.append(log.partition)
            if len(order) < MANY_CLEANINGS:
                scene.write(scene.logs[0], 10)
                scene.seal(scene.logs[0])
            return 0

        scene.cleaner._markers_below_of = written_to_meanwhile
        await scene.tick()
        assert sorted(order) == [0, 1]
        await scene.tick()
        assert sorted(order) == [0, 0, 1]

    run(scenario())


def test_a_log_that_one_cleaning_does_not_finish_goes_to_the_end_of_the_line() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        for log in scene.logs:
            for number in range(200):
                scene.write(log, 1, key=b"%d" % number)
        scene.cleaner._dedupe_bytes = 1
        order: list[int] = []

        def noted(log: PartitionLog) -> int:
            order.append(log.partition)
            return 0

        scene.cleaner._markers_below_of = noted
        await scene.tick()
        assert len(order) > 2
        assert all(one != other for one, other in itertools.pairwise(order[: 2 * min(map(order.count, (0, 1)))]))

    run(scenario())


def test_the_line_has_internal_topics_by_turns_and_then_the_longest_due_and_the_dirtiest() -> None:
    scene = KeyedLog(CONFIG)

    def plan(topic: str, dirty_ratio: float) -> Plan:
        log = copy(scene.log)
        log.topic = topic
        return Plan(log, SealedSegments([], 0), Cleaned(), 0, dirty_ratio, is_due=True)

    old, new, dirty, inside = plan("old", 0.1), plan("new", 1.0), plan("dirty", 0.9), plan("__transaction_state", 0.2)
    due_since = {old.log: 1.0, dirty.log: 1.0, new.log: 2.0, inside.log: 3.0}
    plans = [new, old, inside, dirty]
    line = []
    last = None
    while plans:
        chosen = next_in_line(plans, due_since, last)
        assert chosen is not None
        line.append(chosen.log.topic)
        last = chosen.log
        plans.remove(chosen)
    assert line == ["__transaction_state", "dirty", "old", "new"]
    assert next_in_line([inside, new], due_since, inside.log) is new, "internal topics starve no others"
    assert next_in_line([inside], due_since, inside.log) is inside
    assert next_in_line([], {}, None) is None


def test_a_topic_that_is_not_compacted_is_let_alone() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.logs[0].update_config(replace(BACKGROUND_CONFIG, cleanup_policy="delete"))
        await scene.tick()
        assert scene.clean() == [False, True]

    run(scenario())


def test_nothing_at_or_above_the_high_watermark_is_compacted() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.logs[0].high_watermark = 5
        await scene.tick()
        assert 0 < scene.logs[0].cleaned.first_dirty_offset <= 5

    run(scenario())


def test_pauses_keep_to_the_rate() -> None:
    async def scenario() -> None:
        scene = Scene(bytes_per_second=100)
        await scene.tick()
        assert scene.clean() == [False], "at 100 bytes/s the first piece must be followed by a pause of a minute"
        scene.cleaner.close()
        await scene.tick()
        assert scene.clean() == [False]

    run(scenario())


def test_damage_is_passed_on_and_the_other_logs_are_compacted() -> None:
    async def scenario() -> None:
        scene = Scene(logs=3)
        for log in scene.logs[::2]:
            scene.storage.raw(log.segments[1].log_path)[200] ^= 1
        await scene.tick()
        assert scene.damaged == scene.logs[::2]
        assert scene.clean() == [False, True, False]

    run(scenario())


def test_another_magic_is_damage() -> None:
    """This broker has written the file, so the bit has flipped since."""

    async def scenario() -> None:
        scene = Scene()
        scene.storage.raw(scene.logs[0].segments[1].log_path)[16] ^= 2
        await scene.tick()
        assert scene.damaged == scene.logs

    run(scenario())


def test_what_cannot_be_encoded_is_no_damage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise InvalidRecord("too large")

    monkeypatch.setattr("broker.log.compaction.encode_batch", refuse)

    async def scenario() -> None:
        scene = Scene()
        await scene.tick()
        assert not scene.damaged
        assert scene.clean() == [False]
        assert "no longer fit into one batch" in caplog.text

    run(scenario())


def test_a_log_whose_compaction_is_refused_is_tried_again_later() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.storage.faults.append(Fault("write", "*/t-0/*", errno.ENOSPC))
        await scene.tick()
        assert scene.clean() == [False, True]
        scene.storage.faults.clear()
        await scene.tick()
        assert scene.clean() == [False, True]
        await scene.tick(FAILED_PAUSE_MS)
        assert scene.clean() == [True, True]

    run(scenario())


def test_a_log_that_is_deleted_meanwhile_is_forgotten() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.disk.held = True
        await scene.tick()
        scene.manager.delete(TOPIC_ID, 0)
        scene.disk.release()
        await scene.settle()
        assert not scene.damaged
        assert scene.logs[1].cleaned.first_dirty_offset > 0

    run(scenario())
