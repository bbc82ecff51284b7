"""Damaged directories: the records that are served were written, or the damage is reported."""

from __future__ import annotations

import pytest

from tests.fuzz.ci import fuzz

NAMES = ("log-recovery", "metadata-recovery", "group-records", "transaction-records")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_what_was_written_comes_back(name: str) -> None:
    fuzz(name)
