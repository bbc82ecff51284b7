"""A timeline is a well-formed SVG with everything in it, however much there is."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.history import availability
from tests.support.history.artifacts import draw
from tests.support.history.model import Condition, Cut, Fault, History, Operation, Outcome, Problem, Reign
from tests.support.history.timeline import timeline

NODES = (1, 2, 3)
OUTCOMES: tuple[Outcome, Outcome] = ("ok", "unknown")
MOST_BYTES = 2_000_000


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


def texts(svg: str) -> list[str]:
    """All texts and tooltips; fails if it is no XML."""
    return ["".join(each.itertext()) for each in ET.fromstring(svg).iter() if each.tag.endswith(("text", "title"))]


def holds(found: list[str], part: str) -> bool:
    return any(part in each for each in found)


def test_it_shows_what_happened() -> None:
    history = eventful()
    found = texts(timeline(history, availability.check(history, 2.0)))
    assert found[0] == history.title
    for part in (
        "kill leader (1)",
        "node 1 dead: 3.000 s to 7.000 s",
        "node 2 paused",
        "node 3 cut off",
        "node 2 leads partition 0: 5.900 s",
        "node 3 is the controller",
        "✗  2 × UNAVAILABLE",
        "UNAVAILABLE  partition 0 acknowledged nothing for 3.000 s",
        "longest outage 3.00 s",
        "no majority possible",
        "1,000 sends, 1 unknown",
        "1 commits",
        "value 400",
        "17 in epoch 2",
    ):
        assert holds(found, part), part
    assert any(each.startswith("partition 0") and each.endswith("s3.00 s") for each in found), "the outage has a label"


def test_a_sound_run_is_called_so() -> None:
    history = eventful()
    found = texts(timeline(history, availability.check(history, 4.0)))
    assert "✓  sound" in found
    assert not holds(found, "What is wrong")


def test_a_run_that_failed_otherwise_is_not_called_sound() -> None:
    found = texts(timeline(eventful(), [], "AssertionError: 3 x LOST\n    b'a'"))
    assert "✗  failed" in found
    assert holds(found, "AssertionError: 3 x LOST")


def test_it_needs_nothing_from_elsewhere() -> None:
    svg = timeline(eventful())
    assert "<script" not in svg
    assert "href" not in svg
    assert svg.count("http") == svg.count('xmlns="http') == 1


def test_a_history_of_nothing_is_drawn() -> None:
    assert "✓  sound" in texts(timeline(History("nothing")))


def test_its_size_is_bounded() -> None:
    """Also if half of it goes wrong, with more clients and partitions than have rows."""
    history = eventful()
    history.operations = []
    for number in range(100_000):
        begin, outcome = number / 100, OUTCOMES[number // 40 % 2]
        history.operations.append(
            Operation(
                f"client-{number % 40}", "send", begin, begin + number % 7, outcome, number % 30, about="x" * 1_000
            )
        )
    history.faults = [Fault(f"fault {number}", number, number + 0.5) for number in range(1_000)]
    problems = [Problem("LOST", "gone", "x" * 10_000)] * 10_000
    svg = timeline(history, problems, "y\n" * 10_000)
    assert len(svg) < MOST_BYTES
    found = texts(svg)
    assert holds(found, "17 more clients")
    assert holds(found, "9988 more")


@given(st.text(), st.text())
def test_whatever_text_comes_in_it_is_xml(about: str, title: str) -> None:
    history = History(title, NODES, NODES, [Operation(about or "c", "send", 0, 1, "ok", 0, about=about)])
    history.faults = [Fault(about, 0, 1)]
    texts(timeline(history, [Problem("LOST", about, about)], about))


def test_a_drawing_has_the_name_of_its_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = draw(eventful(), [], directory=tmp_path / "there")
    assert path.name == "test_file.test_name.svg"
    assert texts(path.read_text(encoding="utf-8"))
    assert f"timeline: {path}" in capsys.readouterr().out
