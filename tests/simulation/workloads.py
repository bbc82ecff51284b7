"""Scenarios as data: `scenarios/NAME.toml` says which workload runs under which faults, where the seed does not decide.

about    = "what it is about, in a line"
kinds    = ["brokers"]          the kinds of simulation that it is for (`runner.KINDS`)
seconds  = 10.0                 how long faults go on; each kind has a default
pace_s   = 0.4                  how long it is from one fault to the next, on average
happens  = ["fault kill"]       what a few schedules of it have to count at least once
[options]                       in place of what the seed would draw: `voters`, and the kind's `OPTIONS`
[faults]                        how often each fault comes, relative to the others; without it the seed draws
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.plan import Plan

SCENARIOS = Path(__file__).with_name("scenarios")
KEYS = ("about", "kinds", "seconds", "pace_s", "happens", "options", "faults")
VOTERS = (1, 3, 5)


class ScenarioError(ValueError):
    """A scenario file is invalid."""


@dataclass(frozen=True)
class Scenario:
    """One scenario file."""

    name: str
    about: str
    kinds: tuple[str, ...]
    seconds: float | None
    happens: tuple[str, ...]
    plan: Plan = field(default_factory=Plan)


def names() -> list[str]:
    """Return the names of all scenarios."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


@functools.cache
def load(name: str) -> Scenario:
    """Return a scenario.

    Raises:
        ScenarioError: there is none of this name, or it says what is not known.
    """
    _check_names([name], names(), "scenario")
    return read(name, (SCENARIOS / f"{name}.toml").read_text(encoding="utf-8"))


def read(name: str, text: str) -> Scenario:
    """Return the content of a scenario file.

    Raises:
        ScenarioError: it has an unknown key or value, or lacks a required one.
    """
    from tests.simulation.runner import KINDS

    told = tomllib.loads(text)
    _check_names(told, KEYS, f"{name}: key")
    if not told.get("about") or not told.get("kinds") or not told.get("happens"):
        raise ScenarioError(f"{name}: `about`, `kinds` and `happens` say what it is for, for which, and what shows it")
    _check_names(told["kinds"], KINDS, f"{name}: kind")
    options, faults = told.get("options", {}), told.get("faults")
    for kind in told["kinds"]:
        simulation = KINDS[kind].simulation
        _check_names(options, [*simulation.OPTIONS, "voters"], f"{name}: option of {kind}")
        _check_types(name, options, {**simulation.OPTIONS, "voters": int})
        if faults is not None:
            known = simulation(0, 1).new_faults().names()
            _check_names(faults, known, f"{name}: fault of {kind}")
    _check_types(name, faults or {}, dict.fromkeys(faults or {}, float))
    _check_types(name, told, {"seconds": float, "pace_s": float})
    if options.get("voters", VOTERS[0]) not in VOTERS:
        raise ScenarioError(f"{name}: voters = {options['voters']}; it is one of {VOTERS}")
    plan = Plan(options=options, weights=faults, pace_s=told.get("pace_s"))
    return Scenario(name, told["about"], tuple(told["kinds"]), told.get("seconds"), tuple(told["happens"]), plan)


def _check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise ScenarioError(f"{what} {name!r} is not known{hint}")


def _check_types(name: str, given: Mapping[str, object], types: Mapping[str, type]) -> None:
    for key, value in given.items():
        wanted = types.get(key)
        if wanted is None:
            continue
        fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise ScenarioError(f"{name}: {key} = {value!r}; it is to be of type {wanted.__name__}")
