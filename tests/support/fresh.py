"""What differs from run to run: seeds (`./dev test` prints SIMULATION_SEED, which repeats them), examples taken."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

SEED: Final = int(os.environ.get("SIMULATION_SEED") or 0)


def seeds(also: Iterable[int]) -> list[ParameterSet]:
    """Return the seeds of a test: the run's own, and with --long the others as well."""
    return [pytest.param(SEED), *(pytest.param(each, marks=pytest.mark.long) for each in also if each != SEED)]


def one_of(cases: Sequence[Any]) -> list[ParameterSet]:
    """Return the cases of a test: one that the run's seed picks, and with --long the others as well."""
    chosen = SEED % len(cases)
    return [pytest.param(case, marks=[] if n == chosen else pytest.mark.long) for n, case in enumerate(cases)]


def examples(share: float) -> int:
    """Return how many examples a property test takes: `share` times as many as others do (tests/conftest.py)."""
    return round(share * settings().max_examples)
