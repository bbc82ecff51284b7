"""What the commands about partitions print and change, against the real services on metadata in memory."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from raftlog.cli import clients, main
from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.image import NO_LEADER
from replication.leader import ReplicaView
from tests.support.admin_service import AdminServer
from tests.support.metadata import broker_epoch, create_topic, elect, fence, offline_replicas, refs, uuid_of

RATES = {"leader.replication.throttled.rate": "2097152", "follower.replication.throttled.rate": "2097152"}


class Ran(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def table(self) -> list[dict[str, str]]:
        """The lines of the table by column."""
        header, *lines = (line.split("\t") for line in self.out.splitlines())
        return [dict(zip(header, line, strict=True)) for line in lines]

    @property
    def json(self) -> Any:
        """The document."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def server() -> Iterator[AdminServer]:
    """Four brokers; topic `a` has two partitions of three replicas, led by 1 and 2, min.insync.replicas=2."""
    with AdminServer() as server:
        command = create_topic("a", 1, 2, 3, {"min.insync.replicas": "2"})
        for replicas in ([1, 2, 3], [2, 3, 1]):
            command.create_topic.assignments.add(replicas=replicas)
        server.propose(command)
        yield server


@pytest.fixture
def run(server: AdminServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; `stdin` is what it reads."""
    monkeypatch.setenv("RAFTLOG_BOOTSTRAP", server.bootstrap)

    def call(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["raftlog", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Ran(int(ended.value.code or 0), printed.out, printed.err)

    return call


class Log(NamedTuple):
    topic_id: bytes
    partition: int


class Description(NamedTuple):
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    replicas: Sequence[ReplicaView]


class Led(NamedTuple):
    """A partition that this server leads, as far as DescribeReplicas is concerned."""

    log: Log
    described: Description

    def describe_replicas(self) -> Description:
        return self.described


def led(partition: int, *views: ReplicaView) -> Led:
    return Led(Log(uuid_of(1), partition), Description(0, 0, 80, 100, views))


def own(broker_id: int) -> ReplicaView:
    return ReplicaView(broker_id, 100, 0, 5_000, True)


# topic describe


def test_a_topic_is_described_with_the_lag_of_each_replica(server: AdminServer, run: Run) -> None:
    server.cluster.partitions = [
        led(0, own(1), ReplicaView(2, 90, 10, 4_000, True), ReplicaView(3, -1, -1, -1, True)),
        led(1, own(2), ReplicaView(3, 100, 0, 5_000, True), ReplicaView(1, 100, 0, 5_000, True)),
    ]
    first, second = run("topic", "describe", "a").table
    assert first == {
        "partition": "0",
        "leader": "1",
        "leader_epoch": "0",
        "replicas": "1,2,3",
        "isr": "1,2,3",
        "lag": "1:0,2:10,3:?",
        "eligible": "",
        "offline": "",
        "adding": "",
        "removing": "",
    }
    assert second["lag"] == "2:0,3:0,1:0"
    document = run("topic", "describe", "a", "-o", "json").json
    assert (document["topic"], document["topic_id"]) == ("a", uuid_of(1).hex())
    part = document["partitions"][0]
    assert (part["isr"], part["high_watermark"], part["log_end_offset"]) == ([1, 2, 3], 80, 100)
    assert part["replica_lags"][1] == {
        "broker_id": 2,
        "log_end_offset": 90,
        "lag": 10,
        "last_caught_up_ms": 1_000,
        "in_sync": True,
    }


def test_only_what_is_wrong_is_shown_when_asked_for(server: AdminServer, run: Run) -> None:
    def shown(*flags: str) -> list[str]:
        return [f"{row['topic']}-{row['partition']}" for row in run("topic", "describe", *flags).table]

    server.propose(create_topic("b", 2, 1, 1))
    assert shown() == ["a-0", "a-1", "b-0"]
    assert shown("--under-replicated") == shown("--under-min-isr") == shown("--unavailable") == []
    server.set_isr("a", [1, 2])
    assert shown("--under-replicated") == ["a-0"]
    assert shown("--under-min-isr") == []
    server.set_isr("a", [1])
    assert shown("--under-min-isr") == ["a-0"]
    server.propose(offline_replicas(server.image, 1))
    server.propose(offline_replicas(server.image, 2))
    server.propose(offline_replicas(server.image, 3))
    assert server.partition("a").leader == NO_LEADER
    assert shown("--unavailable") == ["a-0"]
    assert shown("--unavailable", "a", "b") == ["a-0"]
    assert run("topic", "describe", "--unavailable", "b", "-o", "json").json == []
    [row] = run("topic", "describe", "--unavailable", "a").table
    assert (row["leader"], row["offline"]) == ("-", "1,2,3")


def test_a_topic_that_is_not_there_is_an_error(run: Run) -> None:
    assert run("topic", "describe", "zzz").code == 1
    ran = run("topic", "describe", "a", "zzz")
    assert (ran.code, ran.out) == (1, "")
    assert "zzz" in ran.err


def test_replicas_are_placed_by_hand(server: AdminServer, run: Run) -> None:
    assert run("topic", "create", "c", "--replica-assignment", "4:1,1:4,2:3").code == 0
    assert [server.partition("c", number).replicas for number in range(3)] == [(4, 1), (1, 4), (2, 3)]
    assert run("topic", "create", "d", "--replica-assignment", "4;1").code == 2
    refused = run("topic", "create", "d", "--replica-assignment", "9")
    assert refused.code == 1
    assert "broker 9 is not there" in refused.err


# cluster describe


def test_the_cluster_is_described_down_to_its_partitions(server: AdminServer, run: Run) -> None:
    server.propose(create_topic("b", 2, 1, 1))
    out = run("cluster", "describe").out
    assert "controller 1 in epoch 1" in out
    assert "2 topics, 3 partitions" in out
    assert "a\t1\t2\t2,3,1\t2,3,1" in out
    document = run("cluster", "describe", "--topic", "a", "-o", "json").json
    assert [broker["broker_id"] for broker in document["brokers"]] == [1, 2, 3, 4]
    [topic] = document["topics"]
    assert [(part["partition"], part["leader"], part["isr"]) for part in topic["partitions"]] == [
        (0, 1, [1, 2, 3]),
        (1, 2, [2, 3, 1]),
    ]


# partition elect


@pytest.mark.parametrize("command", [("partition", "elect"), ("cluster", "elect-leaders")])
def test_an_election_that_is_not_needed_is_an_error(run: Run, command: Sequence[str]) -> None:
    ran = run(*command, "a")
    assert ran.code == 1
    assert "is led by its preferred replica" in ran.err


def test_an_election_that_cannot_be_is_an_error(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_PATIENCE_MS", 300)  # the cluster is asked again for so long
    server.propose(fence(1, broker_epoch(server.image, 1)))
    server.propose(elect(refs((1, 0), (1, 1))))
    assert server.partition("a").leader == 2
    refused = run("partition", "elect", "a", "--partition", "0")
    assert refused.code == 1
    assert "preferred replica 1 is down" in refused.err


def test_an_unclean_election_comes_with_a_warning(run: Run) -> None:
    ran = run("partition", "elect", "a", "--unclean")
    assert "warning: partitions of a that nobody leads" in ran.err
    assert "has a leader" in ran.err
    assert ran.code == 1


# partition reassign


def dynamic(server: AdminServer, broker_id: int) -> dict[str, str]:
    return dict(server.image.resource_configs(ConfigResource.BROKER, str(broker_id)))


def test_a_move_is_begun_looked_after_and_done(server: AdminServer, run: Run) -> None:
    begun = run("partition", "reassign", "a-0=4,1,2", "--throttle", "2MiB")
    assert begun.code == 0, begun.err
    [row] = begun.table
    assert (row["replicas"], row["state"], row["adding"], row["removing"]) == ("4,1,2", "under way", "4", "3")
    assert '{"topic": "a", "partition": 0, "replicas": [1, 2, 3]}' in begun.err, "the way back"
    assert [dynamic(server, broker_id) for broker_id in (1, 2, 3, 4)] == [RATES] * 4
    assert server.image.topic_configs("a") == {
        "min.insync.replicas": "2",
        "leader.replication.throttled.replicas": "0:1,0:2,0:3",
        "follower.replication.throttled.replicas": "0:4",
    }
    server.cluster.partitions = [led(0, own(1), ReplicaView(4, 70, 30, -1, False))]
    verified = run("partition", "reassign", "a-0=4,1,2", "--verify")
    assert verified.code == 1
    assert "1 of 1 move is not done" in verified.err
    assert verified.table[0]["lag"] == "30"
    assert run("partition", "reassign", "--list").table[0]["state"] == "under way"
    server.set_isr("a", [1, 2, 3, 4])
    preserved = run("partition", "reassign", "a-0=4,1,2", "--verify", "--preserve-throttles")
    assert preserved.table[0]["state"] == "done"
    assert dynamic(server, 1) == RATES
    assert run("partition", "reassign", "a-0=4,1,2", "--verify").code == 0
    assert [dynamic(server, broker_id) for broker_id in (1, 2, 3, 4)] == [{}] * 4
    assert server.image.topic_configs("a") == {"min.insync.replicas": "2"}
    assert run("partition", "reassign", "--list", "-o", "json").json == {"moves": []}


def test_the_rates_stay_while_others_are_moved(server: AdminServer, run: Run) -> None:
    assert run("partition", "reassign", "a-0=4,1,2", "a-1=4,3,1", "--throttle", "2MiB").code == 0
    server.set_isr("a", [1, 2, 3, 4])
    assert run("partition", "reassign", "a-0", "--verify").code == 0
    assert dynamic(server, 1) == RATES


def test_a_plan_comes_from_a_file_or_from_stdin_and_is_cancelled(
    server: AdminServer, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = {"version": 1, "partitions": [{"topic": "a", "partition": 1, "replicas": [4, 2]}]}
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    file.write_text(json.dumps(plan))
    begun = run("partition", "reassign", "--plan", str(file), "--execute", "-o", "json").json
    assert begun["before"]["partitions"] == [{"topic": "a", "partition": 1, "replicas": [2, 3, 1]}]
    assert begun["moves"][0]["state"] == "under way"
    cancelled = run("partition", "reassign", "--plan", "-", "--cancel", stdin=json.dumps(plan))
    assert cancelled.code == 0, cancelled.err
    assert cancelled.table[0]["state"] == "cancelled"
    assert set(server.partition("a", 1).replicas) == {1, 2, 3}
    again = run("partition", "reassign", "a-1", "--cancel")
    assert again.code == 1
    assert "is not being moved" in again.err


def test_a_plan_is_made_up_and_can_be_carried_out(server: AdminServer, run: Run) -> None:
    made = run("partition", "reassign", "--generate", "--topic", "a", "--brokers", "2,3,4")
    assert made.code == 0, made.err
    assert '"replicas": [1, 2, 3]' in made.err
    assert run("partition", "reassign", "--plan", "-", stdin=made.out).code == 0
    assert {replica for part in made.json["partitions"] for replica in part["replicas"]} == {2, 3, 4}
    both = run("partition", "reassign", "--generate", "-t", "a", "-o", "json").json
    assert set(both) == {"current", "proposed"}


def test_it_can_be_waited_for(server: AdminServer, run: Run) -> None:
    def catch_up() -> None:
        deadline = time.monotonic() + 10
        while not server.partition("a").adding_replicas and time.monotonic() < deadline:
            time.sleep(0.02)
        server.set_isr("a", [1, 2, 3, 4])

    follower = threading.Thread(target=catch_up)
    follower.start()
    ran = run("partition", "reassign", "a-0=1,2,4", "--throttle", "2MiB", "--wait", "-o", "json")
    follower.join()
    assert ran.code == 0, ran.err
    assert ran.json["moves"][0]["state"] == "done"
    assert "1 of 1 move done" in ran.err
    assert dynamic(server, 1) == {}
    late = run("partition", "reassign", "a-0=1,2,3", "--wait", "--timeout", "0.2")
    assert late.code == 1
    assert "1 of 1 move is not done" in late.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the partitions, or a --plan"),
        (("a-0=1", "--plan", "x"), "name the partitions, or a --plan"),
        (("a-0",), "say to which brokers"),
        (("a=1",), "write TOPIC-PARTITION=BROKER"),
        (("a-0=1", "--verify", "--cancel"), "at a time"),
        (("--generate",), "--generate needs --topic"),
        (("--generate", "-t", "a", "--brokers", "1,x"), "write ids with commas"),
        (("--generate", "-t", "a", "--brokers", "1,9"), "broker 9 is not up"),
        (("--generate", "-t", "a", "--brokers", "1,2"), "3 replicas need as many brokers"),
        (("a-0=1", "--throttle", "fast"), "write bytes a second"),
        (
            (
                "--plan",
                "-",
            ),
            "not JSON",
        ),
    ],
)
def test_wrong_command_lines_end_with_2(run: Run, arguments: Sequence[str], words: str) -> None:
    ran = run("partition", "reassign", *arguments)
    assert ran.code == 2, ran.err
    assert words in ran.err
    assert ran.out == ""


def test_refusals_are_counted_and_the_others_go_on(server: AdminServer, run: Run) -> None:
    refused = run("partition", "reassign", "a-0=1,2,4", "a-1=9")
    assert refused.code == 1
    assert "broker 9 is not registered" in refused.err
    assert "1 of 2 were refused" in refused.err
    assert server.partition("a").adding_replicas == (4,)
    assert "none numbered 7" in run("partition", "reassign", "a-7=1").err
    assert run("partition", "reassign", "--plan", "/nowhere/plan.json").code == 1
