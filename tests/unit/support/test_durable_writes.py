"""The histories that the checker of durable writes accepts, and those that it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.durable_writes import RECORD, compare

ACKNOWLEDGED = {0: [0, 1, 4], 1: [2, 3]}
"""Offsets by writer and number."""


def log(*records: tuple[int, int]) -> tuple[Any, Any]:
    """Return offsets and values of a log, as readers give them."""
    values = b"".join(
        writer.to_bytes(4, "big") + number.to_bytes(8, "big") + bytes(RECORD.itemsize - 12)
        for writer, number in records
    )
    return np.arange(len(records)), np.frombuffer(values, RECORD)


def test_everything_where_it_was_acknowledged() -> None:
    compare(ACKNOWLEDGED, *log((0, 0), (0, 1), (1, 0), (1, 1), (0, 2)), "here")


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1)], r"writer 0: of 3 records, 1 are lost \[2\], 0 are there twice"),
        (
            [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 2)],
            r"writer 0: of 3 records, 0 are lost \[\], 1 are there twice \[2\]",
        ),
        ([(0, 0), (0, 2), (1, 0), (1, 1), (0, 1)], "writer 0: of 3 records, 0 are lost .*, and 1 are out of order"),
        ([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)], "writer 0: 1 records are not at the offset that was acknowledged"),
        ([(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (7, 0)], "1 records are there that no writer sent"),
    ],
)
def test_what_is_wrong_is_said(records: list[tuple[int, int]], complaint: str) -> None:
    with pytest.raises(AssertionError, match=f"here.*{complaint}"):
        compare(ACKNOWLEDGED, *log(*records), "here")


def test_offsets_with_a_gap_are_wrong() -> None:
    offsets, values = log((0, 0), (0, 1), (1, 0), (1, 1), (0, 2))
    with pytest.raises(AssertionError, match="without a gap"):
        compare(ACKNOWLEDGED, offsets + (offsets > 2), values, "here")
