"""`raftlog broker`: when a broker may be stopped, against the real services."""

from __future__ import annotations

import pytest

from raftlog.cli import waiting
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import create_topic
from tests.support.pauses import instead_of_sleeping


def test_brokers_are_listed(run: Run) -> None:
    ran = run("broker", "list", "-o", "json")
    assert ran.code == 0
    assert [(each["broker_id"], each["state"]) for each in ran.json] == [(id, "active") for id in (1, 2, 3, 4)]


def test_a_broker_may_stop_while_all_are_in_sync_or_it_is_not(server: AdminServer, run: Run) -> None:
    ran = run("broker", "await-safe-stop", "1", "--timeout", "0")
    assert (ran.code, ran.out) == (0, "broker 1 may stop: no partition falls below min.insync.replicas by that\n")
    server.set_isr("a", [1, 3])
    assert run("broker", "await-safe-stop", "2", "--timeout", "0").code == 0, "2 is out of sync already"


def test_a_broker_that_is_needed_is_named_with_what_needs_it(server: AdminServer, run: Run) -> None:
    server.set_isr("a", [1, 3])
    ran = run("broker", "await-safe-stop", "3", "--timeout", "0")
    assert ran.code == 1
    assert ran.out == ""
    assert "1 partition needs it: a-0 (in sync: 1, 3; min.insync.replicas=2)" in ran.err
    assert "broker 3 is still needed after 0 s" in ran.err


def test_it_waits_until_others_are_in_sync_again(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set_isr("a", [1, 3])
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            server.set_isr("a", [1, 2, 3])

    instead_of_sleeping(monkeypatch, sleep)
    ran = run("broker", "await-safe-stop", "1", "--timeout", "300")
    assert ran.code == 0
    assert pauses == [waiting.LOOK_EVERY_S] * 3
    assert ran.err.count("waiting") == 1, "said once, not with every look"


def test_what_no_waiting_would_help_does_not_hold_it_up(server: AdminServer, run: Run) -> None:
    command = create_topic("narrow", 2, 1, 2, {"min.insync.replicas": "2"})
    command.create_topic.assignments.add(replicas=[1, 2])
    server.propose(command)
    server.set_isr("narrow", [1])
    assert run("broker", "await-safe-stop", "1", "--timeout", "0").code == 0


def test_internal_topics_are_waited_for_as_well(server: AdminServer, run: Run) -> None:
    """Nobody commits an offset while they take no writes."""
    command = create_topic("__consumer_offsets", 2, 1, 3, {"min.insync.replicas": "2"})
    command.create_topic.assignments.add(replicas=[1, 2, 3])
    server.propose(command)
    server.set_isr("__consumer_offsets", [1, 3])
    ran = run("broker", "await-safe-stop", "3", "--timeout", "0s")
    assert ran.code == 1
    assert "__consumer_offsets-0 (in sync: 1, 3" in ran.err


@pytest.mark.parametrize(("text", "said"), [("60", 60.0), ("60s", 60.0), ("2m", 120.0), ("0.5", 0.5), ("500ms", 0.5)])
def test_timeouts_are_seconds_or_have_a_unit(text: str, said: float) -> None:
    assert waiting.seconds(text) == said


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "", "-5s"])
def test_what_is_no_timeout_is_a_wrong_command_line(run: Run, text: str) -> None:
    ran = run("broker", "await-safe-stop", "1", f"--timeout={text}")
    assert ran.code == 2
    assert "such as 90s or 2m" in ran.err
