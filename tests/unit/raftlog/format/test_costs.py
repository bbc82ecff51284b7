"""The table of costs in docs/format.md is what encoding really adds."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from raftlog.format import HEADERS_TYPE, Columns, encode_batch

PAGE = Path(__file__).parents[4] / "docs" / "format.md"
ROWS = re.findall(r"^\| ([a-z, ]+) \| (\d+) \| (\d+)", PAGE.read_text(), re.MULTILINE)


def size(names: list[str], rows: int) -> int:
    empty = pa.array([b""] * rows, pa.binary())
    return len(
        encode_batch(
            Columns(
                empty,
                key=empty if "key" in names else None,
                timestamp_ms=pa.array(range(1, rows + 1), pa.int64()) if "timestamp" in names else None,
                headers=pa.array([[]] * rows, HEADERS_TYPE) if "headers" in names else None,
            ),
            0,
        )
    )


def test_the_table_was_found() -> None:
    assert [names for names, _, _ in ROWS] == [
        "value",
        "key, value",
        "timestamp, key, value",
        "timestamp, key, value, headers",
    ]


@pytest.mark.parametrize(("names", "first", "further"), ROWS)
def test_the_table_is_true(names: str, first: str, further: str) -> None:
    columns = names.split(", ")
    assert size(columns, 1) == int(first)
    assert size(columns, 1601) - size(columns, 1) == 1600 * int(further)
