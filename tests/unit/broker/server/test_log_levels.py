"""Levels of loggers that change while the process runs."""

from __future__ import annotations

import logging

import pytest

from broker.server.logging import AUDIT, ROOT, LogLevels
from raftlog.errors import InvalidConfig


class Tree:
    """Loggers of their own, so that the test's are left alone."""

    def __init__(self, *names: str, configured: str = "info") -> None:
        self.root = logging.RootLogger(getattr(logging, configured.upper()))
        self.root.manager = logging.Manager(self.root)
        for name in names:
            self.root.manager.getLogger(name)
        self.levels = LogLevels(configured, self.root)

    def shown(self) -> dict[str, tuple[str, bool]]:
        return {entry.key: (entry.value, entry.source == 4) for entry in self.levels.describe()}


def tree() -> Tree:
    return Tree("broker.log.cleaner", "broker.server.lease", "raftmeta.raft.node")


def test_what_is_set_counts_for_what_is_beneath_it_until_it_is_unset() -> None:
    loggers = tree()
    assert set(loggers.shown().values()) == {("INFO", False)}
    assert {"root", "broker", "broker.log", "broker.log.cleaner"} <= loggers.shown().keys(), (
        "packages must be listed as loggers, too"
    )
    loggers.levels.alter({"broker.log": "debug"}, [])
    assert loggers.shown()["broker.log"] == ("DEBUG", True)
    assert loggers.shown()["broker.log.cleaner"] == ("DEBUG", False)
    assert loggers.shown()["broker.server.lease"] == ("INFO", False)
    loggers.levels.alter({ROOT: "ERROR", "broker.server.lease": "Warning"}, ["broker.log"])
    assert loggers.shown()["broker.log.cleaner"] == ("ERROR", False)
    assert loggers.shown()["broker.server.lease"] == ("WARN", True)
    loggers.levels.alter({}, [ROOT, "broker.server.lease"])
    assert set(loggers.shown().values()) == {("INFO", False)}
    assert loggers.root.level == logging.INFO, "the configured level must be restored"


@pytest.mark.parametrize("level", ["WARN", "error", "FATAL"])
def test_nobody_turns_the_audit_log_off(level: str) -> None:
    """A user with the permission to alter configs could hide refusals this way."""
    loggers = Tree("broker.server.lease", AUDIT)
    with pytest.raises(InvalidConfig, match=r"raftlog\.audit=.* would turn off the audit log; use INFO or DEBUG"):
        loggers.levels.alter({"broker": "DEBUG", AUDIT: level}, [])
    with pytest.raises(InvalidConfig, match="would turn off the audit log"):
        loggers.levels.alter({AUDIT: level}, [], validate_only=True)
    assert set(loggers.shown().values()) == {("INFO", False)}
    for above in (ROOT, "raftlog"):
        loggers.levels.alter({above: level, AUDIT: "debug"}, [])
        assert loggers.shown()[AUDIT] == ("DEBUG", True)
        loggers.levels.alter({}, [AUDIT])
        assert loggers.shown()[AUDIT] == ("INFO", False), "the audit log must stay on beneath loggers that are off"
        assert loggers.shown()["raftlog"][0] == loggers.shown()[above][0] != "INFO"
        loggers.levels.alter({}, [above])
        assert set(loggers.shown().values()) == {("INFO", False)}
        loggers.levels.alter({above: level}, [])
        assert loggers.shown()[AUDIT] == ("INFO", False)
        loggers.levels.alter({above: "DEBUG"}, [])
        assert loggers.shown()[AUDIT] == ("DEBUG", False), "the audit log must follow the loggers above it as before"
        loggers.levels.alter({}, [above])


def test_where_the_configured_level_is_above_info_the_audit_log_can_be_turned_on() -> None:
    loggers = Tree(AUDIT, configured="error")
    assert loggers.shown()[AUDIT] == ("ERROR", False)
    loggers.levels.alter({AUDIT: "INFO"}, [])
    assert loggers.shown()[AUDIT] == ("INFO", True)
    loggers.levels.alter({ROOT: "FATAL"}, [AUDIT])
    assert loggers.shown()[AUDIT] == ("ERROR", False), (
        "the audit log must go back to the level of the server's configuration"
    )


@pytest.mark.parametrize(
    ("changes", "unset", "words"),
    [
        ({"broker": "LOUD"}, [], "broker='LOUD' is not a level: use one of DEBUG"),
        ({"broker": "DEBUG", "borker": "DEBUG"}, [], "no logger 'borker': use root, one of broker, raftmeta"),
        ({}, ["nobody"], "no logger 'nobody'"),
        ({"broker": "DEBUG"}, ["broker"], "both sets and unsets"),
    ],
)
def test_what_makes_no_sense_changes_nothing(changes: dict[str, str], unset: list[str], words: str) -> None:
    loggers = tree()
    with pytest.raises(InvalidConfig, match=words):
        loggers.levels.alter(changes, unset)
    assert set(loggers.shown().values()) == {("INFO", False)}
    loggers.levels.alter({"broker": "DEBUG"}, [], validate_only=True)
    assert set(loggers.shown().values()) == {("INFO", False)}
