"""Four brokers and a topic on three of them; new replicas are in sync when a test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.admin_service import AdminServer
from tests.support.moves import ON_THREE, catch_up, topic_on
from tests.support.pauses import instead_of_sleeping


@pytest.fixture
def server() -> Iterator[AdminServer]:
    """Four brokers; topic `a` has four partitions of three replicas, none of them on broker 4."""
    with AdminServer() as server:
        server.propose(topic_on(1, "a", *ON_THREE, min_insync_replicas=2))
        yield server


@pytest.fixture
def catches_up(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have new replicas be in sync by the next look; return how many moves were under way at each."""
    looks: list[int] = []

    def sleep(seconds: float) -> None:
        looks.append(catch_up(server))

    instead_of_sleeping(monkeypatch, sleep)
    return looks
