"""The demo's verdict: what counts as complete, and that each thing that can be wrong is seen."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pytest
from raftlog_demo.flights import NUMBER, checksum
from raftlog_demo.verdict import Verdict, compare
from rich.console import Console

FLIGHTS = pa.table({NUMBER: pa.array(range(5), pa.int64()), "carrier": ["UA", "AA", None, "B6", "DL"]})


def records(numbers: list[int], *, carrier: str | None = None) -> pa.Table:
    rows = {row[NUMBER]: row for row in FLIGHTS.to_pylist()}
    values = []
    for number in numbers:
        row = {**rows.get(number, {NUMBER: number, "carrier": "XX"})}
        if carrier is not None:
            row["carrier"] = carrier
        values.append(json.dumps({key: value for key, value in row.items() if value is not None}).encode())
    return pa.table({"value": pa.array(values, pa.binary())})


def verdict_of(received: pa.Table) -> Verdict:
    return compare(FLIGHTS, checksum(FLIGHTS), received)


def test_every_flight_once_in_any_order_is_complete() -> None:
    verdict = verdict_of(records([3, 1, 0, 4, 2]))
    assert verdict.is_complete
    assert verdict.repeated == 0


def test_a_sentence_is_not_broken_by_hand() -> None:
    console = Console(file=io.StringIO(), soft_wrap=True)
    verdict_of(records([0, 1, 2, 3, 4])).print(console)
    printed = str(console.file.getvalue())  # type: ignore[attr-defined] # it is a StringIO
    assert all(line.endswith(".") for line in printed.strip().splitlines()[-2:])


def test_a_repeated_flight_is_counted_and_is_not_exactly_once() -> None:
    verdict = verdict_of(records([0, 1, 2, 2, 3, 4, 2]))
    assert not verdict.is_complete
    assert (verdict.missing, verdict.repeated) == (0, 2)


@pytest.mark.parametrize(
    ("received", "missing", "unknown"),
    [
        (records([0, 1, 2, 3]), 1, 0),
        (records([0, 1, 2, 3, 3]), 1, 0),
        (records([0, 1, 2, 3, 4, 9]), 0, 1),
        (records([0, 1, 2, 3, 4], carrier="UA"), 0, 0),
    ],
)
def test_what_is_missing_unknown_or_changed_is_not_complete(received: pa.Table, missing: int, unknown: int) -> None:
    verdict = verdict_of(received)
    assert not verdict.is_complete
    assert (verdict.missing, verdict.unknown) == (missing, unknown)
