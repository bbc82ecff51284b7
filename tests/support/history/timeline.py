"""Writes a history as a text: a verdict, what happened in the order of time, and what each client did.

The number of lines is bounded: of the operations it names those that did not end well, the longest first.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.support.history.availability import no_majority, outages
from tests.support.history.model import PLURALS, History, Operation, Problem
from tests.support.history.verdict import summary

DIRECTORY: Final = Path(__file__).resolve().parents[3] / "artifacts" / "timelines"
_MOST: Final = 500
"""Lines of a section."""
_LONGEST: Final = 200


def running_test() -> str:
    """Return the name of the running test, with its file, or "run" outside of a test."""
    current = os.environ.get("PYTEST_CURRENT_TEST", "run").rsplit(" (", 1)[0]
    return current.rsplit("/", 1)[-1]


def draw(
    history: History, problems: Sequence[Problem], error: BaseException | None = None, directory: Path | None = None
) -> Path:
    """Write the timeline to a file named like the history, and print its path: pytest shows it when the test fails."""
    directory = DIRECTORY if directory is None else directory
    directory.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", history.title.replace(".py::", ".")).strip("-")[:150]
    path = directory / f"{name}.txt"
    failure = None if error is None else f"{type(error).__name__}: {error}"
    path.write_text(timeline(history, problems, failure), encoding="utf-8")
    print(f"timeline: {path}")
    return path


def timeline(history: History, problems: Sequence[Problem] = (), failure: str | None = None) -> str:
    """Return the text. `failure` says why the run ended early, or which assertion failed."""
    verdict = "sound" if not problems and failure is None else summary(problems) or "failed"
    wrong = [f"{each.name}  {each.what}" for each in problems] + (failure or "").splitlines()
    facts = f"{history.extent.length_s:.2f} s, {_counted(history.operations)}, {len(history.faults)} faults"
    clients = [f"{name}: {_counted(own)}" for name, own in sorted(history.clients.items())]
    sections = {"What is wrong": wrong, "What happened": list(_events(history)), "Clients": clients}
    lines = [f"{history.title}: {verdict}", facts]
    for title, found in sections.items():
        lines += ["", title, *(line[:_LONGEST] for line in found[:_MOST])]
        lines += [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return "\n".join(lines) + "\n"


def _events(history: History) -> Iterator[str]:
    begin_s = history.extent.begin_s
    events: list[tuple[float, float | None, str]] = []
    for fault in history.faults:
        targets = f" ({', '.join(map(str, fault.targets))})" if fault.targets else ""
        events.append((fault.begin_s, fault.end_s, f"fault {fault.name.replace('_', ' ')}{targets}"))
    events += [(each.begin_s, each.end_s, f"node {each.node} {each.ill}") for each in history.conditions]
    events += [(each.begin_s, each.end_s, f"{each.sender} does not reach {each.receiver}") for each in history.cuts]
    for reign in history.reigns:
        what = "is the controller" if reign.partition is None else f"leads partition {reign.partition}"
        events.append((reign.begin_s, reign.end_s, f"node {reign.node} {what}"))
    events += [(*each.window, f"outage: {each}") for each in outages(history)]
    events += [(*each, "no majority possible") for each in no_majority(history)]
    unwell = [each for each in history.operations if each.outcome != "ok"]
    unwell.sort(key=lambda each: float("-inf") if each.end_s is None else each.begin_s - each.end_s)
    for each in unwell[: _MOST // 2]:
        where = "" if each.partition is None else f", partition {each.partition}"
        events.append((each.begin_s, each.end_s, f"{each.client}: {each.kind} {each.outcome}{where}: {each.about}"))
    for from_s, to_s, what in sorted(events, key=lambda event: event[0]):
        end = "the end" if to_s is None else f"{to_s - begin_s:.3f} s"
        yield f"{from_s - begin_s:.3f} s to {end}: {what}"


def _counted(operations: Iterable[Operation]) -> str:
    """Return how many operations of which kind there were, and how many did not end well."""
    kinds: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for each in operations:
        kinds[PLURALS[each.kind]] += each.count
        outcomes[each.outcome] += each.count
    parts = [f"{count:,} {kind}" for kind, count in kinds.most_common()]
    return ", ".join(parts + [f"{outcomes[each]:,} {each}" for each in ("unknown", "failed") if outcomes[each]])
