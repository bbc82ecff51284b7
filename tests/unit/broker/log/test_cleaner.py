"""Compaction of a log on a disk in memory: what stays, where, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.log.cleaner import CleaningAbandoned, clean, plan_cleaning
from broker.log.config import LogConfig
from tests.support.keyed_log import KeyedLog

CONFIG = LogConfig(
    segment_bytes=2_000,
    index_interval_bytes=300,
    cleanup_policy="compact",
    delete_retention_ms=1_000,
    file_delete_delay_ms=10,
)


def filled(config: LogConfig = CONFIG, rounds: int = 10) -> KeyedLog:
    """A log in which five keys were written many times, in batches of two."""
    log = KeyedLog(config)
    for number in range(rounds):
        for key in range(5):
            log.append((b"k%d" % key, b"%d" % number * 20), (b"own%d" % (number * 5 + key), b"x"))
            log.clock.now += 1
    log.commit()
    return log


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


def test_records_younger_than_the_minimum_lag_stay() -> None:
    log = filled(replace(CONFIG, min_compaction_lag_ms=1_000_000))
    assert not log.clean()
    log.clock.now += 1_000_000
    assert log.clean()


def test_a_small_key_buffer_cleans_in_several_goes() -> None:
    log = filled(rounds=100)
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
        assert [record for record in follower.records() if record[0] >= end] == [
            record for record in leader.records() if record[0] >= end
        ]
        follower.stop(None)
        assert follower.clean()
        follower.check()
