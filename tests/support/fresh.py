"""Seeds that differ from run to run: `./dev test` draws and prints SIMULATION_SEED, which repeats them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import pytest
from _pytest.mark import ParameterSet

SEED: Final = int(os.environ.get("SIMULATION_SEED") or 0)


def seeds(also: Iterable[int]) -> list[ParameterSet]:
    """Return the seeds of a test: the run's own, and with --long the others as well."""
    return [pytest.param(SEED), *(pytest.param(each, marks=pytest.mark.long) for each in also if each != SEED)]
