"""How catching up gives way to live records."""

from __future__ import annotations

import pytest

from replication.pacing import JUDGED_BYTES, LEAST_PAUSE, LIVE_MS, MOST_PAUSE, MOST_TIME_MS, CatchUpPace, LiveTraffic

MIB = 1 << 20


def pace(live_at_ms: float | None = 0.0) -> CatchUpPace:
    live = LiveTraffic()
    if live_at_ms is not None:
        live.note(live_at_ms)
    return CatchUpPace(live)


def test_without_live_records_there_is_no_pause() -> None:
    idle = pace(live_at_ms=None)
    idle.begin(0)
    idle.done(4)
    assert idle.ready_at_ms(4) == 4
    assert not idle.is_live(4)


def test_beside_live_records_the_pause_is_a_multiple_of_the_time_of_the_piece() -> None:
    busy = pace()
    busy.begin(10)
    busy.done(14)
    assert busy.ready_at_ms(14) == 14 + MOST_PAUSE * 4
    assert busy.ready_at_ms(100) == 100


def test_the_pause_counts_from_the_end_of_the_last_part_of_a_piece() -> None:
    busy = pace()
    busy.begin(10)
    busy.done(12)
    busy.done(14)
    assert busy.ready_at_ms(14) == 14 + MOST_PAUSE * 4


def test_the_pause_ends_when_live_records_have_stopped() -> None:
    busy = pace()
    busy.begin(LIVE_MS - 20)
    busy.done(LIVE_MS - 10)
    assert busy.ready_at_ms(LIVE_MS - 10) == LIVE_MS
    assert busy.ready_at_ms(LIVE_MS + 1) == LIVE_MS + 1


def test_a_slow_disk_does_not_lengthen_the_pause_without_bound() -> None:
    busy = pace()
    busy.begin(0)
    busy.done(900)
    assert busy.ready_at_ms(900) == min(LIVE_MS, 900 + MOST_PAUSE * MOST_TIME_MS)


def test_a_copy_that_the_leader_outgrows_loses_its_pauses_and_gets_them_back() -> None:
    busy = pace()
    pauses = [busy.pause]
    for _ in range(6):
        busy.note_progress(JUDGED_BYTES, copied_offsets=100, grown_offsets=90)
        pauses.append(busy.pause)
    assert pauses == [MOST_PAUSE, MOST_PAUSE / 2, LEAST_PAUSE, 0.0, 0.0, 0.0, 0.0]
    busy.begin(0)
    busy.done(4)
    assert busy.ready_at_ms(4) == 4
    for pause in (LEAST_PAUSE, MOST_PAUSE / 2, MOST_PAUSE, MOST_PAUSE):
        busy.note_progress(JUDGED_BYTES, copied_offsets=100, grown_offsets=10)
        assert busy.pause == pause


def test_between_a_quarter_and_a_half_the_pause_stays() -> None:
    busy = pace()
    busy.note_progress(JUDGED_BYTES, copied_offsets=100, grown_offsets=90)
    for grown in (26, 40, 50):
        busy.note_progress(JUDGED_BYTES, copied_offsets=100, grown_offsets=grown)
        assert busy.pause == MOST_PAUSE / 2


def test_many_small_pieces_are_judged_together() -> None:
    busy = pace()
    for _ in range(JUDGED_BYTES // MIB - 1):
        busy.note_progress(MIB, copied_offsets=10, grown_offsets=10)
    assert busy.pause == MOST_PAUSE
    busy.note_progress(MIB, copied_offsets=10, grown_offsets=10)
    assert busy.pause == MOST_PAUSE / 2


@pytest.mark.parametrize("grown_mb_per_s", [0, 10, 60, 90])
def test_a_replica_far_behind_always_catches_up(grown_mb_per_s: int) -> None:
    """A piece of 1 MB takes 10 ms: 100 MB/s without pauses, half of that with the longest ones."""
    live = LiveTraffic()
    busy, now_ms, lag_mb, before_ms = CatchUpPace(live), 0.0, 2_000.0, 0.0
    while lag_mb > 1:
        live.note(now_ms)
        now_ms = busy.ready_at_ms(now_ms)
        busy.begin(now_ms)
        now_ms += 10
        busy.done(now_ms)
        grown_mb = grown_mb_per_s * (now_ms - before_ms) / 1e3
        before_ms = now_ms
        lag_mb += grown_mb - 1
        busy.note_progress(1_000_000, 1_000, round(grown_mb * 1_000))
        assert now_ms < 600_000, f"after 600 s the replica is still {lag_mb:.0f} MB behind"
