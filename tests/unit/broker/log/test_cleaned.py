"""Which tombstones have been there long enough, however often the log is compacted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.log.cleaned import Cleaned

DAY_MS = 86_400_000


def test_tombstones_go_where_a_log_is_cleaned_all_the_time() -> None:
    cleaned, cadence_ms = Cleaned(), 15_000
    late_ms = []
    for now_ms in range(0, 3 * DAY_MS, cadence_ms):
        below = cleaned.tombstones_below(now_ms, DAY_MS)
        if below:
            late_ms.append(now_ms - DAY_MS - (below - 1))
        cleaned = cleaned.reached(now_ms + 1, now_ms, DAY_MS)  # offsets as the clock
        assert len(cleaned.times) <= 35
    assert len(late_ms) > 2 * DAY_MS // cadence_ms - 2
    assert min(late_ms) >= 0
    assert max(late_ms) <= DAY_MS // 32 + 2 * cadence_ms


@given(
    gaps=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 3)), min_size=1, max_size=200),
    retention_ms=st.sampled_from([0, 1, 20, 1_000, 20_000]),
)
def test_tombstones_go_when_it_is_time_and_never_before(gaps: list[tuple[int, int]], retention_ms: int) -> None:
    """At any cadence: late by a 32nd and the time between two cleanings, at most."""
    cleaned = Cleaned()
    clean_since: list[tuple[int, int]] = []
    now_ms = offset = longest_gap_ms = 0
    for gap_ms, records in gaps:
        now_ms += gap_ms
        offset += records
        longest_gap_ms = max(longest_gap_ms, gap_ms)
        below = cleaned.tombstones_below(now_ms, retention_ms)
        latest_ms = now_ms - retention_ms
        surely_ms = latest_ms - max(1, retention_ms // 32) - longest_gap_ms
        assert below <= max((end for end, at_ms in clean_since if at_ms <= latest_ms), default=0), "before its time"
        assert below >= max((end for end, at_ms in clean_since if at_ms <= surely_ms), default=0), "too late"
        cleaned = cleaned.reached(offset, now_ms, retention_ms)
        clean_since.append((offset, now_ms))
        assert cleaned.first_dirty_offset == offset
        assert cleaned.times[-1][0] == offset
        assert len(cleaned.times) <= 35
