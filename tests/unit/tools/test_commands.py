"""The arguments of `./dev test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import commands


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have run."""
    found: list[list[str]] = []

    def run(*command: str | Path) -> int:
        found.append([str(part) for part in command])
        return 0

    monkeypatch.setattr(commands, "_in_environment", run)
    return found


def test_all_phases_run_one_of_them_or_the_selected_tests(ran: list[list[str]]) -> None:
    assert commands.main(["test"]) == 0
    assert [command[-1] for command in ran] == ["tests/fuzz", "tests/integration", "tests/chaos"]
    ran.clear()
    assert commands.main(["test", "--phase-2"]) == 0
    assert [command[-1] for command in ran] == ["tests/integration"]
    ran.clear()
    assert commands.main(["test", "tests/unit/tools", "-x"]) == 0
    assert [command[-2:] for command in ran] == [["tests/unit/tools", "-x"]]


def test_a_phase_of_selected_tests_is_refused(ran: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["test", "--phase-1", "tests/unit/tools"]) == 1
    assert "a phase is whole" in capsys.readouterr().err
    assert ran == []
