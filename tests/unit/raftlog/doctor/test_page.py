"""docs/doctor.md has every check, and calls it what it is."""

from __future__ import annotations

import re
from pathlib import Path

from raftlog._doctor.checks import CHECKS
from tests.unit.raftlog.doctor.test_checks import FOUND

PAGE = Path(__file__).parents[4] / "docs" / "doctor.md"
ROW = re.compile(r"^\| `([a-z-]+)` \| ([a-z, ]+) \| (.+) \|$", re.MULTILINE)


def test_the_page_lists_the_checks_in_their_order_with_what_they_look_for_and_how_bad_that_is() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert [row[0] for row in rows] == [check.id for check in CHECKS]
    for (name, severities, about), check in zip(rows, CHECKS, strict=True):
        assert about.startswith(check.about), name
        assert set(severities.split(", ")) >= {severity for found, severity, _, _ in FOUND if found == name}, name
