"""`raftlog partition elect`: what it asks before, what it says afterwards, against the real services."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from raftlog._client import admin_calls
from raftlog.cli import clients
from raftmeta.image import NO_LEADER
from replication.leader import ReplicaView
from tests.support.admin_service import AdminServer, led
from tests.support.command_line import Run
from tests.support.metadata import broker_epoch, create_topic, elect, fence, offline_replicas, refs, unfence


@pytest.fixture
def leaderless(server: AdminServer) -> AdminServer:
    """Nobody leads u-0: 1, which alone was in sync, has no log of it any more."""
    command = create_topic("u", 2, 1, 3)
    command.create_topic.assignments.add(replicas=[1, 2, 3])
    server.propose(command)
    server.set_isr("u", [1])
    server.propose(offline_replicas(server.image, 1, refs((2, 0))))
    assert server.partition("u").leader == NO_LEADER
    return server


def lead_by_the_second(server: AdminServer) -> None:
    """Have broker 1 lose its leadership of a-0 to 2, and be back without it."""
    server.propose(fence(1, broker_epoch(server.image, 1)))
    server.propose(elect(refs((1, 0), (1, 1))))
    assert server.partition("a").leader == 2


@pytest.mark.parametrize("command", [("partition", "elect"), ("cluster", "elect-leaders")])
def test_there_is_nothing_to_do_where_first_replicas_lead(run: Run, command: Sequence[str]) -> None:
    ran = run(*command, "a")
    assert (ran.code, ran.out) == (0, "nothing to do: every partition of a is led by its first replica\n")
    assert run(*command, "a", "--unclean", "--yes").out == "nothing to do: every partition of a has a leader\n"
    assert run(*command, "a", "-o", "json").json == {"topic": "a", "unclean": False, "partitions": []}


def test_a_refusal_is_told_at_once(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_PATIENCE_MS", 120_000)
    monkeypatch.setattr(admin_calls, "_FIRST_CONTACT_S", 120.0)
    lead_by_the_second(server)
    started = time.monotonic()
    refused = run("partition", "elect", "a", "--partition", "0")
    assert time.monotonic() - started < 40, "and not when the time for the call is up"
    assert refused.code == 1
    assert "preferred replica 1 is down" in refused.err
    assert run("partition", "elect", "a", "--partition", "7").code == 1
    assert run("partition", "elect", "zzz").code == 1


def test_new_leaders_are_named(server: AdminServer, run: Run) -> None:
    lead_by_the_second(server)
    server.propose(unfence(1, broker_epoch(server.image, 1)))
    server.set_isr("a", [1, 2, 3])

    def controller() -> None:
        deadline = time.monotonic() + 30
        while server.partition("a").leader != NO_LEADER and time.monotonic() < deadline:
            time.sleep(0.02)
        server.propose(elect(refs((1, 0)), handed_over=True))

    handing_over = threading.Thread(target=controller)
    handing_over.start()
    ran = run("partition", "elect", "a")
    handing_over.join()
    assert ran.code == 0, ran.err
    assert ran.out == "a-0 is led by broker 1 now, in leader epoch 3\n"


def test_without_a_terminal_an_unclean_election_has_to_be_meant(leaderless: AdminServer, run: Run) -> None:
    refused = run("partition", "elect", "u", "--unclean", stdin="n\n")
    assert refused.code == 2
    assert "pass --yes" in refused.err
    assert run("partition", "elect", "u", "--unclean", stdin="y\n").code == 2
    assert leaderless.partition("u").leader == NO_LEADER


@pytest.mark.parametrize("typed", ["n\n", "\n", "whatever\n"])
def test_no_is_no_error(leaderless: AdminServer, run: Run, typed: str) -> None:
    ran = run("partition", "elect", "u", "--unclean", terminal=typed)
    assert ran.code == 1
    assert "what it misses is lost" in ran.err
    assert ran.err.splitlines()[-1].endswith("not elected")
    assert "Traceback" not in ran.err
    assert leaderless.partition("u").leader == NO_LEADER


def test_ctrl_c_ends_the_question_and_the_command(leaderless: AdminServer, run: Run) -> None:
    ran = run("partition", "elect", "u", "--unclean", terminal="")
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == "not elected"
    assert leaderless.partition("u").leader == NO_LEADER


@pytest.mark.parametrize("how", [{"terminal": "y\n"}, {"terminal": "YES\n"}, {"yes": True}])
def test_an_unclean_leader_is_named_with_where_its_log_ends(
    leaderless: AdminServer, run: Run, how: dict[str, str]
) -> None:
    leaderless.cluster.partitions = [led(2, 0, ReplicaView(2, 100, 0, 5_000, True))]
    options = ["--yes"] if how.pop("yes", None) else []
    ran = run("partition", "elect", "u", "--unclean", *options, **how)
    assert ran.code == 0, ran.err
    assert leaderless.partition("u").leader == 2
    assert ran.out == "u-0 is led by broker 2 now, in leader epoch 2; its log ends at offset 100\n"


def test_that_nobody_is_left_is_told(leaderless: AdminServer, run: Run) -> None:
    for broker_id in (2, 3):
        leaderless.propose(fence(broker_id, broker_epoch(leaderless.image, broker_id)))
    refused = run("partition", "elect", "u", "--unclean", "--yes")
    assert refused.code == 1
    assert "none of the replicas [1, 2, 3] is up" in refused.err
