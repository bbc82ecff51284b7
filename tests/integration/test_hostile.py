"""Attacks of strangers and of a user with few rights on three secured servers: those that are held off.

`./dev bench hostile` has the figures of latency, and the attacks that are not held off yet (docs/security.md).
"""

from __future__ import annotations

import pytest

from bench.hostile import MEMORY_BYTES, NODES, measure, prepare, secured_cluster

pytestmark = pytest.mark.long


def test_a_flood_of_streams_of_a_user_without_rights() -> None:
    """The quorum keeps its leader, and nothing of the brokers changes. The user is shut out, comes back and goes on."""
    with secured_cluster() as cluster:
        prepare(cluster)
        figures = measure(cluster, ("streams",), rounds=2)
    assert figures.done["streams"]["opened"] > NODES * 2_500, (
        f"only {figures.done['streams']['opened']} streams were opened before the brokers shut the user out, too few "
        "to show anything"
    )
    assert figures.failures == []
    assert all(each == figures.epochs[0] for each in figures.epochs), figures.epochs
    assert figures.lost_leases == 0
    assert max(figures.grown_bytes.values()) <= MEMORY_BYTES, figures.grown_bytes


def test_sockets_made_up_producer_ids_and_guessed_passwords_at_once() -> None:
    """Honest clients get no error, no lease or leadership is lost, and nothing of the attackers gets through."""
    with secured_cluster() as cluster:
        prepare(cluster)
        figures = measure(cluster, ("sockets", "ids", "logins"), rounds=1)
    assert figures.failures == []
    assert all(each == figures.epochs[0] for each in figures.epochs), figures.epochs
    assert figures.lost_leases == 0
    assert max(figures.grown_bytes.values()) <= MEMORY_BYTES, figures.grown_bytes
    assert figures.done["sockets"]["closed"] > 0, "connections that send nothing were never closed"
    assert figures.done["ids"]["refused"] > 0
    assert "taken" not in figures.done["ids"]
    assert figures.done["logins"]["refused"] > 0
    assert "let in" not in figures.done["logins"]
