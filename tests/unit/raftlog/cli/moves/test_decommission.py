"""`raftlog broker decommission` against the real services: what is moved, what is refused, and how it is taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest

import raftlog
from raftlog.cli.nodes import draining
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import delete_topic
from tests.support.moves import (
    ON_THREE,
    catch_up,
    interrupt_at_look,
    is_cordoned,
    placed,
    replicas_on,
    stop,
    throttles,
    topic_on,
)
from tests.support.pauses import instead_of_sleeping


def test_a_broker_is_emptied_and_unregistered_once_it_has_stopped(
    server: AdminServer, run: Run, catches_up: list[int]
) -> None:
    ran = run("broker", "decommission", "3", "--batch", "1", "--throttle", "1MiB", "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json == {"broker_id": 3, "replicas": 0, "unregistered": False}
    assert catches_up == [1, 1, 1, 1]
    assert replicas_on(server, 3) == 0
    assert server.image.brokers[3].drained
    assert throttles(server) == []
    assert all(len(set(replicas)) == 3 for replicas in placed(server))
    told = run("broker", "decommission", "3")
    assert told.code == 0
    assert "stop its process, then run raftlog broker decommission 3 again to unregister it" in told.out
    stop(server, 3)
    last = run("broker", "decommission", "3")
    assert (last.code, last.out) == (0, "broker 3 has no replicas, has stopped, and is unregistered\n")
    assert 3 not in server.image.brokers
    gone = run("broker", "decommission", "3")
    assert (gone.code, gone.err) == (1, "error: broker 3 is not registered; the cluster has brokers 1, 2, 4\n")


def test_time_is_given_as_for_the_other_commands_of_brokers(server: AdminServer, run: Run) -> None:
    for timeout in ("90s", "2m", "90"):
        assert run("broker", "decommission", "3", "--plan-only", "--timeout", timeout).code == 0
    assert run("broker", "decommission", "3", "--plan-only", "--timeout", "-1").code == 2


def test_it_waits_for_the_process_to_stop(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if not catch_up(server) and looks.count(draining.LOOK_EVERY_S) == 3:
            stop(server, 3)

    instead_of_sleeping(monkeypatch, sleep)
    ran = run("broker", "decommission", "3", "--wait")
    assert ran.code == 0, ran.err
    assert ran.err.count("stop its process") == 1
    assert 3 not in server.image.brokers


def test_it_does_not_wait_longer_than_it_was_told(server: AdminServer, run: Run) -> None:
    server.propose(delete_topic("a"))
    ran = run("broker", "decommission", "3", "--wait", "--timeout", "0")
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == (
        "error: not unregistered after 0 s: broker 3 no longer has replicas; stop its process"
    )
    assert 3 in server.image.brokers


def test_without_room_for_its_replicas_it_is_refused_before_anything_changes(server: AdminServer, run: Run) -> None:
    assert run("broker", "cordon", "4").code == 0
    for option in ((), ("--plan-only",)):
        ran = run("broker", "decommission", "3", *option)
        assert ran.code == 1
        assert (
            "broker 3 cannot leave: no broker is left that could hold another replica of a-0, a-1, a-2, a-3" in ran.err
        )
        assert "uncordon one" in ran.err
    assert not is_cordoned(server, 3)
    assert placed(server) == [tuple(each) for each in ON_THREE]


def test_what_would_move_is_shown_first(server: AdminServer, run: Run) -> None:
    ran = run("broker", "decommission", "3", "--plan-only", "-o", "json")
    assert [3 in each["replicas"] for each in ran.json["partitions"]] == [False] * 4
    assert "4 partitions to move" in run("broker", "decommission", "3", "--plan-only").out
    assert not is_cordoned(server, 3)


def test_a_decommission_is_taken_back(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at_look(monkeypatch, 2, lambda: catch_up(server))
    ran = run("broker", "decommission", "3", "--batch", "1", "--throttle", "1MiB")
    assert ran.code == 130
    assert "raftlog broker decommission 3 --cancel keeps the broker" in ran.err
    assert is_cordoned(server, 3)
    ran = run("broker", "decommission", "3", "--cancel")
    assert ran.code == 0, ran.err
    assert "broker 3 stays, and gets replicas again; 1 move cancelled" in ran.out
    assert not is_cordoned(server, 3)
    assert replicas_on(server, 3) == 3, (
        "broker 3 must keep three replicas: one had gone, one was moving, two had not begun"
    )
    assert catch_up(server) == 0
    assert throttles(server) == []


def test_it_goes_on_after_ctrl_c(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("broker", "decommission", "3", "--batch", "2", "--throttle", "1MiB")
    interrupt_at_look(monkeypatch, 2, lambda: catch_up(server))
    assert run(*command).code == 130
    instead_of_sleeping(monkeypatch, lambda seconds: catch_up(server))
    assert run(*command).code == 0
    assert replicas_on(server, 3) == 0
    assert throttles(server) == []


def test_the_throttle_is_taken_off_also_when_all_came_to_its_end_meanwhile(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at_look(monkeypatch, 1, lambda: None)
    command = ("broker", "decommission", "3", "--throttle", "1MiB")
    assert run(*command).code == 130
    catch_up(server)
    assert run(*command).code == 0
    assert throttles(server) == []


def test_what_was_created_meanwhile_moves_as_well(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that was on its way when the broker was cordoned: the broker is looked at again in the end."""
    cordon = raftlog.Admin.alter_broker

    def cordon_late(admin: raftlog.Admin, broker_id: int, **flags: bool) -> None:
        if flags == {"cordoned": True}:
            server.propose(topic_on(2, "late", [3]))
        cordon(admin, broker_id, **flags)

    monkeypatch.setattr(raftlog.Admin, "alter_broker", cordon_late)
    instead_of_sleeping(monkeypatch, lambda seconds: catch_up(server))
    assert run("broker", "decommission", "3").code == 0
    assert replicas_on(server, 3) == 0
    assert placed(server, "late")


def test_a_dead_broker_that_alone_has_records_is_not_given_up(server: AdminServer, run: Run) -> None:
    server.propose(topic_on(2, "only", [3]))
    stop(server, 3)
    ran = run("broker", "decommission", "3")
    assert ran.code == 1
    assert "broker 3 is down and only it has all records of only-0; start it again" in ran.err
    assert not is_cordoned(server, 3)


def test_a_dead_broker_whose_replicas_others_have_too_leaves(
    server: AdminServer, run: Run, catches_up: list[int]
) -> None:
    stop(server, 3)
    ran = run("broker", "decommission", "3")
    assert ran.code == 0, ran.err
    assert 3 not in server.image.brokers
    assert all(len(set(replicas)) == 3 for replicas in placed(server))


def test_internal_topics_move_as_well(server: AdminServer, run: Run, catches_up: list[int]) -> None:
    server.propose(topic_on(2, "__consumer_offsets", [3, 1, 2], [3, 1, 2]))
    assert run("broker", "decommission", "3").code == 0
    assert placed(server, "__consumer_offsets") != []
    assert all(3 not in replicas for replicas in placed(server, "__consumer_offsets"))


def test_moves_are_told_of_in_order(server: AdminServer, run: Run, catches_up: list[int]) -> None:
    ran = run("broker", "decommission", "3", "--batch", "1")
    told = [int(line.split()[0]) for line in ran.err.splitlines() if " moves done" in line]
    assert told[0] == 0
    assert told[-1] == 4
    assert all(later >= earlier for earlier, later in pairwise(told))
