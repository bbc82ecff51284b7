"""A follower that was away while its leader compacted: what it has of a transaction ends as it ended."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.log.config import LogConfig
from broker.log.transactions import MarkerMissing, OpenTransaction, OpenTransactions
from raftlog.format import Attributes
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker, PlacedMarker
from tests.support.transactional_log import TransactionalKeyedLog

RETENTION_MS = 1_000
CONFIG = LogConfig(
    segment_bytes=1_500,
    index_interval_bytes=300,
    cleanup_policy="compact",
    delete_retention_ms=RETENTION_MS,
    file_delete_delay_ms=10,
)


def follow(follower: TransactionalKeyedLog, leader: TransactionalKeyedLog, up_to: int | None = None) -> None:
    """Copy what the leader has, as far as whole batches go up to an offset."""
    end = leader.log.log_end_offset if up_to is None else up_to
    while follower.log.log_end_offset < end:
        result = leader.log.read(follower.log.log_end_offset, 300, leader.log.log_end_offset, blocking=True)
        assert result is not None
        follower.log.append_stamped(result.records, now_ms=follower.clock.now)
    follower.log.flush()
    follower.log.high_watermark = min(leader.log.high_watermark, follower.log.log_end_offset)


def controls(log: TransactionalKeyedLog) -> list[int]:
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
    leader, follower = TransactionalKeyedLog(CONFIG), TransactionalKeyedLog(CONFIG)
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
    assert len(controls(leader)) < 1 + goes_on + (not forgotten), "everybody has them now"


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


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 1 << 16))
def test_wherever_a_follower_stops_it_ends_up_with_what_was_committed(steps: list[tuple[str, int]], seed: int) -> None:
    """The leader cleans as it likes within what the follower holds; the follower goes on from any batch."""
    dice = Random(seed)
    leader, follower = TransactionalKeyedLog(CONFIG), TransactionalKeyedLog(CONFIG)
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
    assert set(follower.visible()) <= set(leader.written), "an aborted record is read as committed"
    assert set(leader.visible()) <= set(follower.visible())
