"""What all tests of streams between brokers have in common."""

from __future__ import annotations

import pytest

from replication.shell import fetchers, service


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No side gives a stream up because the machine is slow."""
    monkeypatch.setattr(fetchers, "HELLO_TIMEOUT_S", 60.0)
    monkeypatch.setattr(fetchers, "SILENCE_S", 60.0)
    monkeypatch.setattr(service, "HELLO_TIMEOUT_S", 60.0)
