"""The rule by which records are committed, one sentence a test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.high_watermark import high_watermark


@pytest.mark.parametrize(
    ("current", "held", "expected"),
    [
        (0, [5], 5),
        (0, [5, 3, 9], 3),
        (3, [3, 9], 3),
        (4, [3, 9], 4),
        (4, [9, None], 4),
        (4, [None], 4),
        (4, [], 4),
        (0, [0, 9], 0),
    ],
)
def test_it_is_what_every_member_holds(current: int, held: list[int | None], expected: int) -> None:
    assert high_watermark(current, held, may_commit=True) == expected


def test_too_few_in_sync_commit_nothing() -> None:
    """KIP-966: whoever was in sync when the ISR became too small has all that was ever committed."""
    assert high_watermark(4, [9, 9], may_commit=False) == 4


offsets = st.integers(0, 20)


@given(offsets, st.lists(st.none() | offsets, max_size=5), st.booleans())
def test_it_never_goes_back_and_passes_nobody(current: int, held: list[int | None], may_commit: bool) -> None:
    mark = high_watermark(current, held, may_commit=may_commit)
    assert mark >= current
    if mark > current:
        assert may_commit
        assert all(each is not None and each >= mark for each in held)
        assert mark in held
