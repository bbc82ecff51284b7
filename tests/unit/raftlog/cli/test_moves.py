"""`raftlog partition reassign`: what is said of moves that take long, and what becomes of their throttles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raftlog.cli import moving
from raftlog.v1.records_pb2 import ConfigResource
from replication.leader import ReplicaView
from tests.support.admin_service import AdminServer, led
from tests.support.command_line import Run
from tests.support.metadata import create_topic, delete_topic
from tests.support.pauses import instead_of_sleeping

MOVE = ("partition", "reassign", "a-0=4,1,2", "--throttle", "2MiB")


def throttled(server: AdminServer) -> list[str]:
    """Return the brokers with a rate, and the topics with throttled replicas."""
    found = [
        f"broker {broker_id}"
        for broker_id in (1, 2, 3, 4)
        if any("throttled.rate" in key for key in server.image.resource_configs(ConfigResource.BROKER, str(broker_id)))
    ]
    topics = sorted(topic.name for topic in server.image.topics.values())
    return found + [
        name for name in topics if any("throttled.replicas" in key for key in server.image.topic_configs(name))
    ]


def test_a_throttle_without_wait_is_pointed_out(run: Run) -> None:
    begun = run(*MOVE)
    assert begun.code == 0
    assert "the throttle stays on until raftlog partition reassign --verify with the same moves" in begun.err
    assert "throttle" not in run("partition", "reassign", "a-1=4,3").err


def test_progress_is_told_every_now_and_then(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(moving, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    server.cluster.partitions = [led(1, 0, ReplicaView(1, 100, 0, 5_000, True), ReplicaView(4, 70, 30, -1, False))]
    ran = run(*MOVE, "--wait", "--timeout", "20")
    assert ran.err.count("0 of 1 move done, 30 records to go") == 1 + 20 / moving.TELL_EVERY_S
    assert ran.code == 1
    last = ran.err.splitlines()[-1]
    assert last.startswith("error: after 20 s 1 of 1 move is not done; it goes on")
    assert "the throttle stays on until raftlog partition reassign --verify with the same moves" in last
    again = run("partition", "reassign", "a-1=4,3", "--wait", "--timeout", "0.2").err.splitlines()[-1]
    assert again.startswith("error: after 0.2 s 1 of 1 move is not done; it goes on")
    assert "throttle" not in again


def test_ctrl_c_leaves_the_move_alone_and_says_so(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    instead_of_sleeping(monkeypatch, interrupt)
    ran = run(*MOVE, "--wait")
    assert ran.code == 130
    last = ran.err.splitlines()[-1]
    assert last.startswith("1 of 1 move is not done; it goes on")
    assert "the throttle stays on" in last
    assert server.partition("a").adding_replicas == (4,)


@pytest.mark.parametrize("option", ["--verify", "--cancel"])
def test_throttles_of_what_is_gone_or_stands_still_are_cleaned_up(server: AdminServer, run: Run, option: str) -> None:
    command = create_topic("b", 2, 1, 3)
    command.create_topic.assignments.add(replicas=[1, 2, 3])
    server.propose(command)
    assert run("partition", "reassign", "a-0=4,1,2", "b-0=4", "--throttle", "2MiB").code == 0
    assert throttled(server) == ["broker 1", "broker 2", "broker 3", "broker 4", "a", "b"]
    server.set_isr("a", [1, 2, 3, 4])
    server.propose(delete_topic("b"))
    ran = run("partition", "reassign", "a-0=4,1,2", "b-0=4", option)
    assert throttled(server) == []
    assert "b-0" in " ".join(f"{row['topic']}-{row['partition']}" for row in ran.table)
    assert "the topic is gone" in ran.out
    if option == "--verify":
        assert ran.code == 0, ran.err


def test_cancelling_what_is_not_moved_is_an_error_and_still_cleans_up(server: AdminServer, run: Run) -> None:
    assert run(*MOVE).code == 0
    server.set_isr("a", [1, 2, 3, 4])
    ran = run("partition", "reassign", "a-0", "--cancel")
    assert ran.code == 1
    assert "is not being moved" in ran.err
    assert throttled(server) == []


def test_a_plan_says_what_moves_and_what_only_changes_its_order(server: AdminServer, run: Run) -> None:
    command = create_topic("c", 3, 3, 3)
    for _ in range(3):
        command.create_topic.assignments.add(replicas=[1, 2, 3])
    server.propose(command)
    made = run("partition", "reassign", "--generate", "--topic", "c", "--brokers", "1,2,3")
    assert "wanted, with 0 partitions to move and 2 with another order:" in made.err
    moved = run("partition", "reassign", "--generate", "--topic", "a", "--brokers", "2,3,4")
    assert "wanted, with 2 partitions to move and 0 with another order:" in moved.err


def test_moves_of_internal_topics_are_verified_and_cancelled_as_others(server: AdminServer, run: Run) -> None:
    command = create_topic("__consumer_offsets", 2, 1, 1)
    command.create_topic.assignments.add(replicas=[1])
    server.propose(command)
    move = ("partition", "reassign", "__consumer_offsets-0=2")
    assert run(*move, "--throttle", "2MiB").code == 0
    verified = run(*move, "--verify")
    assert verified.code == 1
    assert verified.table[0]["state"] == "under way"
    cancelled = run(*move, "--cancel")
    assert (cancelled.code, cancelled.table[0]["state"]) == (0, "cancelled")
    assert throttled(server) == []


def test_a_plan_that_is_made_up_passes_cordoned_brokers_over(server: AdminServer, run: Run) -> None:
    assert run("broker", "cordon", "4").code == 0
    made = run("partition", "reassign", "--generate", "--topic", "a", "-o", "json").json
    assert made["proposed"] == made["current"]
    assert run("broker", "uncordon", "4").code == 0
    made = run("partition", "reassign", "--generate", "--topic", "a", "-o", "json").json
    assert any(4 in each["replicas"] for each in made["proposed"]["partitions"])
