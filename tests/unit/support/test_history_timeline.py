"""A timeline has everything that happened in it, however much there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.history import availability
from tests.support.history.model import Condition, Cut, Fault, History, Operation, Outcome, Problem, Reign
from tests.support.history.timeline import draw, timeline

NODES = (1, 2, 3)


def eventful() -> History:
    """Three nodes, two clients, one outage of 3 s while node 1 is dead."""
    history = History("test_file.py::test_name[<&>]", NODES, NODES)
    for tick in range(1_000):
        at = tick / 100
        end = 6.0 if 3.0 <= at < 6.0 else at + 0.01
        outcome: Outcome = "unknown" if tick == 400 else "ok"
        history.operations.append(Operation("producer-1", "send", at, end, outcome, 0, about=f"value {tick}"))
    history.operations.append(Operation("member-1", "commit", 4.0, 4.5, "ok", 0, about="17 in epoch 2"))
    history.faults = [Fault("kill_leader", 3.0, 7.0, (1,)), Fault("cut", 8.0, None)]
    history.conditions = [Condition(1, "dead", 3.0, 7.0), Condition(2, "paused", 7.5, 7.9)]
    history.cuts = [Cut(one, other, 8.0, None) for one in NODES for other in NODES if one != other]
    history.reigns = [Reign(1, 0, 0.0, 3.0), Reign(2, 0, 5.9, 10.0), Reign(3, None, 0.0, 10.0)]
    return history


def test_it_shows_what_happened() -> None:
    history = eventful()
    lines = timeline(history, availability.check(history, 2.0)).splitlines()
    for line in (
        f"{history.title}: 2 × UNAVAILABLE",
        "3.000 s to 7.000 s: fault kill leader (1)",
        "3.000 s to 7.000 s: node 1 dead",
        "8.000 s to the end: 3 does not reach 1",
        "5.900 s to 10.000 s: node 2 leads partition 0",
        "0.000 s to 10.000 s: node 3 is the controller",
        "3.000 s to 6.000 s: outage: partition 0 acknowledged nothing for 3.000 s",
        "8.000 s to 10.000 s: no majority possible",
        "4.000 s to 6.000 s: producer-1: send unknown, partition 0: value 400",
        "producer-1: 1,000 sends, 1 unknown",
    ):
        assert line in lines


def test_only_a_run_without_problems_and_errors_is_called_sound() -> None:
    history = eventful()
    assert ": sound\n" in timeline(history, availability.check(history, 4.0))
    failed = timeline(history, [], "AssertionError: 3 x LOST\n    b'a'")
    assert ": failed\n" in failed
    assert "\nAssertionError: 3 x LOST\n" in failed
    assert timeline(History("nothing")).startswith("nothing: sound\n")


def test_its_size_is_bounded() -> None:
    history = eventful()
    history.operations += [
        Operation(f"client-{number % 4_000}", "send", number, None, "unknown", about="x" * 1_000)
        for number in range(10_000)
    ]
    text = timeline(history, [Problem("LOST", "gone", "x" * 10_000)] * 10_000, "y\n" * 10_000)
    assert len(text) < 400_000
    assert "and 19500 more" in text


def test_a_file_has_the_name_of_its_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = draw(eventful(), [], directory=tmp_path / "there")
    assert path.name == "test_file.test_name.txt"
    assert f"timeline: {path}" in capsys.readouterr().out
