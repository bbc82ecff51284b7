"""Inputs that were violations once: `cases/TARGET/NAME`, in hexadecimal digits (`./dev fuzz TARGET --hex`)."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.ci import node_of_the_module
from tests.fuzz.oracle import Limits, run_within
from tests.fuzz.registry import TARGETS

__all__ = ["node_of_the_module"]

CASES = sorted(Path(__file__).with_name("cases").glob("*/*"))


@pytest.mark.parametrize("path", CASES, ids=[f"{path.parent.name}/{path.name}" for path in CASES])
def test_it_was_a_violation_and_is_none(path: Path) -> None:
    TARGETS[path.parent.name].check(bytes.fromhex(path.read_text().strip()))


def test_memory_stays_traced() -> None:
    """To stop beside a thread of Arrow has crashed whole test runs."""
    run_within(lambda data: None, b"", Limits())
    assert tracemalloc.is_tracing()
