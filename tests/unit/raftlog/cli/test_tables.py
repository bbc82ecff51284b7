"""Tables on a terminal of some width."""

from __future__ import annotations

import io
import re
import sys

import pytest

from raftlog.cli.group_view import LAG_COLUMNS, LAG_OPTIONAL, MEMBER_COLUMNS, MEMBER_OPTIONAL
from raftlog.cli.output import Output, Row, print_rows
from raftlog.cli.tables import short_ids

IDS = ["3f2a9c01aaaa4bbbb5ccccddddeeeeff", "3f2a9c01bbbb4bbbb5ccccddddeeeeff", "77777777777777777777777777777777"]


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def lag_rows() -> list[Row]:
    return [
        {
            "topic": "customer-orders",
            "partition": number,
            "current_offset": None if number == 2 else 123_456_789,
            "log_end_offset": 123_456_999,
            "lag": 210,
            "lag_seconds": 12.5,
            "member_id": IDS[number],
            "host": "192.168.100.1",
            "client_id": "raftlog-python",
        }
        for number in range(3)
    ]


def printed(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    rows: list[Row],
    columns: tuple[str, ...] = LAG_COLUMNS[1:],
    optional: tuple[str, ...] = LAG_OPTIONAL,
) -> list[str]:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    print_rows(rows, columns, Output.TABLE, ids=("member_id",), optional=optional)
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()


def test_on_a_wide_terminal_every_row_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    header, *lines = printed(monkeypatch, 200, lag_rows())
    assert header.split() == [name.upper() for name in LAG_COLUMNS[1:]]
    assert len(lines) == 3
    assert lines[0].split()[-3:] == ["3f2a9c01a", "192.168.100.1", "raftlog-python"]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_is_broken_on_a_narrow_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    lines = printed(monkeypatch, width, lag_rows())
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if "customer-orders" in line]
    assert len(rows) == 3
    assert rows[0][:7] == ["customer-orders", "0", "123456789", "123456999", "210", "12.5", "3f2a9c01a"]
    words = " ".join(lines[: len(lines) - 3]).split()
    assert {"PARTITION", "LAG"} <= set(words)
    assert all(word in "_".join(LAG_COLUMNS).upper() for word in words)
    said = capsys.readouterr().err
    assert ("client_id" in said) == ("raftlog-python" not in "".join(lines))


def test_numbers_stay_at_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [{"lag": 5, "seconds": 0.5}, {"lag": None, "seconds": None}, {"lag": 12345, "seconds": 10.25}]
    assert [line.rstrip() for line in printed(monkeypatch, 80, rows, ("lag", "seconds"), ())] == [
        "  LAG  SECONDS",
        "    5      0.5",
        "    -        -",
        "12345    10.25",
    ]


def test_columns_without_anything_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [{"topic": "a", "partition": 0, "current_offset": 5, "log_end_offset": 5, "lag": 0}]
    header = printed(monkeypatch, 100, rows)[0]
    assert header.split() == ["TOPIC", "PARTITION", "CURRENT_OFFSET", "LOG_END_OFFSET", "LAG"]


def test_members(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [
        {
            "member_id": each,
            "instance_id": None,
            "client_id": "raftlog-python",
            "host": "127.0.0.1",
            "epoch": 12,
            "partitions": 20,
            "assigned": "customer-orders:0-9,12 payments:0-8",
            "to_get": None,
            "to_let_go": None,
            "last_heartbeat_ms": 1500,
            "connected": True,
            "subscription": ["customer-orders", "payments"],
        }
        for each in IDS
    ]
    lines = printed(monkeypatch, 80, rows, MEMBER_COLUMNS[1:], MEMBER_OPTIONAL)
    assert max(map(len, lines)) <= 80
    assert "INSTANCE" not in lines[0]
    assert "customer-orders:0-9,12" in "\n".join(lines)
    assert "payments:0-8" in "\n".join(lines)


def test_ids_are_shortened_as_far_as_they_stay_different() -> None:
    assert short_ids(IDS) == {IDS[0]: "3f2a9c01a", IDS[1]: "3f2a9c01b", IDS[2]: "777777777"}
    assert short_ids(["a", "ab"]) == {"a": "a", "ab": "ab"}
    assert short_ids([]) == {}
