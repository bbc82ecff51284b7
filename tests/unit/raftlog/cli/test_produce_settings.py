"""Settings that `raftlog produce` does not take."""

from __future__ import annotations

import pytest

from tests.support.command_line import Run


@pytest.mark.parametrize("key", ["transactional.id", "transactional_id"])
def test_records_from_the_command_line_are_in_no_transaction(run: Run, key: str) -> None:
    ran = run("produce", "a", "--config", f"{key}=x", stdin="hello\n")
    assert ran.code == 2
    assert f"--config {key}" in ran.err
    assert "are in no transaction" in ran.err
