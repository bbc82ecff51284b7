"""The table of planted bugs in docs/reliability-mutations.md: made by `./dev sim --mutations --markdown`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.simulation.mutations import Caught, Mutation, all_mutations, world_mutations
from tests.simulation.shrink import signature

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability-mutations.md"
HEAD = """\
# Planted bugs

Each is a protection taken out of the real code while a test runs, and nothing else; `./dev sim --mutations` plants one
after the other, from seed 0 on, and says what notices. This page is what `./dev sim --mutations --markdown` writes;
`./dev sim SEED --mutation NAME` plants one.

| planted bug | what it breaks | simulation | noticed as, or by | after |
| --- | --- | --- | --- | --- |
"""
LONGEST = 150


def planted_bugs() -> dict[str, Mutation]:
    """Return all of them by name: those of whole clusters, and those of parts of a broker."""
    return {**all_mutations(), **world_mutations()}


def markdown(found: Mapping[str, Caught | None]) -> str:
    """Return the page, for what has come of the hunts; a bug that was not hunted says so."""
    rows = [
        _row(name, mutation, found[name]) if name in found else _without(name, mutation, "not measured")
        for name, mutation in planted_bugs().items()
    ]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def named() -> list[str]:
    """Return the planted bugs that the page names."""
    rows = PAGE.read_text(encoding="utf-8").partition("| --- |")[2].splitlines()[1:]
    return [row.split("|")[1].strip() for row in rows if row.startswith("| ")]


def after(caught: Caught) -> str:
    """Return after how much it was noticed."""
    if not caught.schedules:
        return "the story"
    spent = f"{caught.schedules} schedule{'s' * (caught.schedules > 1)}, {_time(caught.virtual_s)}"
    return f"{spent}, then the story" if caught.test and "stories" in caught.test else spent


def _without(name: str, mutation: Mutation, what: str) -> tuple[str, ...]:
    return name, " ".join(mutation.why.split()).rstrip(".").replace("|", "/"), mutation.kind, what, ""


def _row(name: str, mutation: Mutation, caught: Caught | None) -> tuple[str, ...]:
    if caught is None:
        return _without(name, mutation, "**not caught**")
    _, why, *_ = _without(name, mutation, "")
    if "stories" in caught.test:
        return name, why, mutation.kind, f"`{caught.test}`", after(caught)
    said = re.sub(r"\s+", " ", signature(caught.violation)).replace("|", "/").strip()
    return name, why, mutation.kind, said if len(said) <= LONGEST else f"{said[:LONGEST]}…", after(caught)


def _time(seconds: float) -> str:
    """Return a simulated time as people read it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"
