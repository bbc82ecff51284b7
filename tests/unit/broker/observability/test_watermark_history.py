"""How long ago a committed offset was overtaken, by looks at the high watermark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.observability.watermark_history import MAX_MARKS, WatermarkHistory


def history(*looks: tuple[int, float]) -> WatermarkHistory:
    made = WatermarkHistory()
    for high_watermark, now_ms in looks:
        made.seen(high_watermark, now_ms)
    return made


def test_who_has_everything_has_no_lag_and_who_was_overtaken_between_two_looks_has_it_since_then() -> None:
    seen = history((100, 0), (100, 4_000), (200, 5_000), (200, 9_000))
    assert seen.lag_s(200, 9_000) == 0
    assert seen.lag_s(100, 9_000) == 5, "the last look that saw nothing above 100 was at 4 s"
    assert seen.lag_s(150, 9_000) == 4.5, "half-way from 100 to 200, half-way from 4 s to 5 s"
    assert seen.lag_s(99, 9_000) is None, "nobody saw it pass"
    assert WatermarkHistory().lag_s(0, 0) is None


def test_what_nobody_saw_pass_counts_from_when_the_record_there_was_written() -> None:
    seen = history((100, 60_000))
    seen.began(40, 10_000)
    assert seen.known_from == 40
    assert seen.lag_s(40, 70_000) == 60
    assert seen.lag_s(70, 70_000) == 35
    seen.began(50, 0)  # it is known already
    assert seen.lag_s(50, 70_000) == pytest.approx(60 - 50 / 6)
    late = history((100, 1_000))
    late.began(10, 5_000)  # a clock ahead: written after it was seen
    assert late.lag_s(10, 1_000) == 0


def test_a_high_watermark_that_went_back_takes_what_was_above_it_along() -> None:
    seen = history((100, 0), (200, 1_000), (150, 2_000), (300, 3_000))
    assert seen.lag_s(150, 3_000) == 1
    assert seen.lag_s(300, 3_000) == 0


def test_what_no_group_asks_for_any_more_is_forgotten() -> None:
    seen = history(*((10 * n, 1_000.0 * n) for n in range(10)))
    seen.forget_below(55)
    assert seen.known_from == 50
    assert len(seen) == 5
    seen.forget_below(1_000)
    assert len(seen) == 1


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 60_000)), min_size=1, max_size=4 * MAX_MARKS),
    st.data(),
)
def test_lag_is_between_that_of_the_looks_around_it_and_the_history_stays_small(
    steps: list[tuple[int, float]], data: st.DataObject
) -> None:
    looks: list[tuple[int, float]] = []
    offset, now_ms = 0, 0.0
    for grown, passed_ms in steps:
        offset, now_ms = offset + grown, now_ms + passed_ms
        looks.append((offset, now_ms))
    seen = history(*looks)
    assert len(seen) <= MAX_MARKS
    assert seen.known_from == looks[0][0]
    committed = data.draw(st.integers(looks[0][0], offset))
    lag_s = seen.lag_s(committed, now_ms)
    assert lag_s is not None
    if committed == offset:
        assert lag_s == 0
        return
    above = [at for high_watermark, at in looks if high_watermark > committed]
    not_above = [at for high_watermark, at in looks if high_watermark <= committed]
    if len({high_watermark for high_watermark, _ in looks}) <= MAX_MARKS:  # nothing was left out
        least, most = (now_ms - above[0]) / 1_000, (now_ms - not_above[-1]) / 1_000
        assert least - 1e-6 <= lag_s <= most + 1e-6
    assert 0 <= lag_s <= (now_ms - looks[0][1]) / 1_000 + 1e-6
    assert lag_s >= (seen.lag_s(min(offset, committed + 1), now_ms) or 0) - 1e-6, "who is further behind is not later"
