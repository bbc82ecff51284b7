"""Every transition that is logged has a name in the table, and every name in the table is logged somewhere."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest

from broker.observability.events import EVENTS
from broker.server.logging import JsonFormatter, TextFormatter, configure_logging

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = ("broker", "raftmeta", "replication")


def events_in(source: str) -> Counter[str]:
    """Return the values of every key "event" in the dictionaries of a source file."""
    if '"event"' not in source:  # a few files have it; to parse the others takes the time
        return Counter()
    return Counter(
        value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
        and key.value == "event"
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
    )


def test_the_table_and_the_lines_name_the_same_events() -> None:
    logged: Counter[str] = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "audit_topic.py":  # whose records go to a topic, not to the log
                logged += events_in(path.read_text())
    assert logged.keys() == EVENTS.keys()
    assert events_in('log(extra={"event": "made_up", "n": 1})') == {"made_up": 1}
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in EVENTS)
    assert all(doc.endswith(".") for doc in EVENTS.values())


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    made = logging.getLogger("broker.server.lease").makeRecord(
        "broker.server.lease", logging.WARNING, "lease.py", 1, message, arguments, None, extra=fields
    )
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_a_line_is_one_object_with_the_fields_of_its_transition() -> None:
    line = JsonFormatter(3).format(record("lease ended: %s", "it ran out\n", event="lease_ended", isr={1}, n=2))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "broker.server.lease",
        "node": 3,
        "message": "lease ended: it ran out\n",
        "event": "lease_ended",
        "isr": "{1}",
        "n": 2,
    }
    assert "node" not in json.loads(JsonFormatter().format(record("x")))
    assert (
        TextFormatter()
        .format(record("x", event="lease_ended"))
        .endswith("WARNING broker.server.lease: x [event=lease_ended]")
    )


def test_a_field_begins_no_line_of_its_own() -> None:
    """Some come from clients: one would write what it likes into the log."""
    line = TextFormatter().format(record("x", resource="a\n2026 INFO forged", principal="User:ü"))
    assert line.endswith("[resource='a\\n2026 INFO forged' principal=User:ü]")
    assert "\n" not in line


def test_a_value_is_taken_for_no_other_field() -> None:
    forged = "g allowed=True] [principal=User:admin"
    line = TextFormatter().format(record("x", resource=forged, allowed=False, nodes=[1, 2], names=["a] [b=c"]))
    assert line.endswith(
        "[resource='g allowed=True] [principal=User:admin' allowed=False nodes=[1, 2] names=\"['a] [b=c']\"]"
    )
    for value in ("a b", "a=b", "a]", "[a", "'a", '"a'):
        fields = TextFormatter().format(record("x", resource=value)).partition(" [resource=")[2].removesuffix("]")
        assert ast.literal_eval(fields) == value
    for value in ("User:ü", "10.0.0.1", "topic-1.x_y", "orders,payments", "a/b:c"):
        assert TextFormatter().format(record("x", resource=value)).endswith(f" [resource={value}]")


def test_an_exception_travels_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging("info", "json", 1)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("broker.x").exception("failed")
        logging.getLogger("broker.x").debug("not told")
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        (line,) = (line for line in lines if line["logger"] == "broker.x")
        assert line["exception"].endswith("ValueError: broken")
    finally:
        root.handlers[:], root.level = before
