"""These tests have no cluster that a sink could ask before its tasks run."""

from __future__ import annotations

import pytest
from pyspark_raftlog import options as preflight


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_cluster", lambda options: None)
