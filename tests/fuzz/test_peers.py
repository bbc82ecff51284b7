"""Clients, followers, leaders and voters that send arbitrary messages: answered or refused, without harm to others."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.fuzz import test_formats, test_recovery
from tests.fuzz.ci import fuzz, node_of_the_module
from tests.fuzz.handlers import methods
from tests.fuzz.registry import TARGETS

__all__ = ["node_of_the_module"]

NAMES = (
    "calls",
    "streams",
    "kafka-connections",
    "raft-messages",
    "raft-hello",
    "replica-follower",
    "replica-leader",
    "metadata-commands",
)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_peers_are_answered_or_refused(name: str) -> None:
    fuzz(name)


def test_every_target_has_its_turn() -> None:
    modules: tuple[ModuleType, ...] = (test_formats, test_recovery)
    assert sorted([*NAMES, *(name for module in modules for name in module.NAMES)]) == sorted(TARGETS)


def test_every_method_is_called() -> None:
    services = {path.split("/")[1].removeprefix("raftlog.v1.") for path in methods()}
    assert services == {
        *("Admin", "Controller", "Group", "Log", "Markers", "Metadata", "Node", "Raft", "Replication", "Transaction"),
    }
    assert len(methods()) >= 49
