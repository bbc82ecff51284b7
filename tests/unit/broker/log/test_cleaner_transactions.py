"""Compaction of a log with transactions: what stays, what stays decided, and when the markers go."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.log.config import LogConfig
from raftlog.format import Attributes
from tests.support.keyed_log import Record
from tests.support.memory_storage import PowerLoss
from tests.support.transactional_log import TransactionalKeyedLog

RETENTION_MS = 1_000
CONFIG = LogConfig(
    segment_bytes=1_500,
    index_interval_bytes=300,
    cleanup_policy="compact",
    delete_retention_ms=RETENTION_MS,
    file_delete_delay_ms=10,
)


def filled(rounds: int = 8) -> TransactionalKeyedLog:
    """Two producers write the same keys in turn: what 1 writes is committed, what 2 writes is aborted."""
    log = TransactionalKeyedLog(CONFIG)
    for number in range(rounds):
        for key in range(3):
            log.produce(1, (b"k%d" % key, b"%d" % number * 20), (b"own%d" % (number * 3 + key), b"x"))
            log.produce(2, (b"k%d" % key, b"aborted"), (b"gone%d" % (number * 3 + key), b"x"))
            log.clock.now += 1
        log.end({1: True, 2: False})
    log.commit()
    return log


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
    log = filled()
    log.check_committed()
    before = log.log.size_bytes
    seal(log)
    assert log.clean()
    log.check_committed()
    log.check_rebuilt()
    assert log.log.size_bytes < before
    raw = [record[2] for record in log.records() if record[2] is not None]
    assert not [key for key in raw if key.startswith(b"gone")], "nobody will ever read those"
    clean_end = log.log.cleaned.first_dirty_offset
    transactional = set(marks(log, clean_end, Attributes.TRANSACTIONAL))
    assert transactional == set(controls(log)), "only the markers are still marked"
    log.stop(None)
    log.check_committed()
    log.check_rebuilt()


def test_nothing_from_an_open_transaction_on_is_touched() -> None:
    log = filled(4)
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
    log = filled(4)
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
    log = filled()
    seal(log)
    assert log.clean()
    there = controls(log)
    assert len(there) == 8
    log.clock.now += RETENTION_MS - 1
    seal(log)
    assert log.clean()
    assert controls(log) == there, "somebody may be on the way between the batches and their marker"
    log.clock.now += 1
    seal(log)
    assert log.clean()
    last = there[-1:]
    assert controls(log) == last, "the last thing known of two producers stays"
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
    log = filled(2)
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
    kept = list(log.log._snapshots)
    log.log._snapshots = [snapshot]
    seal(log)
    assert log.clean()
    assert marker in controls(log)
    log.log._snapshots = kept
    log.stop(None)
    log.check_rebuilt()
    log.check_committed()


def test_aborted_ranges_of_what_was_compacted_are_told_as_long_as_the_marker_is_there() -> None:
    """Who has read the old batches a moment before they were replaced still learns that they were aborted."""
    log = filled(3)
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
        self.log = TransactionalKeyedLog(CONFIG)

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


TestCompactedTransactions = CompactedTransactions.TestCase
TestCompactedTransactions.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def due() -> TransactionalKeyedLog:
    """A log that was compacted once, has markers that are due, and transactions since; one of them is open."""
    log = filled(4)
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
    """Compact, then let housekeeping remove what was replaced."""
    assert log.clean()
    log.clock.now += 20
    log.manager.run_housekeeping_once(log.clock.now)


def _span() -> tuple[int, int, list[Record]]:
    log = due()
    start = log.storage.operations
    day(log)
    return start, log.storage.operations, log.visible()


START, END, EXPECTED = _span()


@pytest.mark.parametrize("seed", [None, 1])
def test_a_crash_at_every_operation_leaves_everything_decided(seed: int | None) -> None:
    assert END - START > 20
    for crash_at in range(START, END):
        log = due()
        log.storage.crash_at = crash_at
        with pytest.raises(PowerLoss):
            day(log)
        log.stop(None if seed is None else Random(seed * 1_000 + crash_at))
        log.check_committed(half_cleaned=True)
        log.check_rebuilt()
        assert list(dict(log.log.producers.transactions.items())) == [3]
        log.commit()
        log.clean()
        log.check_committed()
        log.check_rebuilt()
        assert log.visible() == EXPECTED


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_follower_that_goes_on_in_a_compacted_log_knows_what_is_decided(at: int) -> None:
    """Wherever its own log ends: it has transactional batches of which the leader's log says nothing any more."""
    leader, follower = filled(4), filled(4)
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
