"""What the commands about partitions print and change, against the real services on metadata in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence

import pytest

from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.image import NO_LEADER
from replication.leader import ReplicaView
from tests.support.admin_service import AdminServer, led
from tests.support.command_line import Run
from tests.support.metadata import create_topic, offline_replicas, uuid_of

RATES = {"leader.replication.throttled.rate": "2097152", "follower.replication.throttled.rate": "2097152"}


def own(broker_id: int) -> ReplicaView:
    return ReplicaView(broker_id, 100, 0, 5_000, True)


# topic describe


def test_a_topic_is_described_with_the_lag_of_each_replica(server: AdminServer, run: Run) -> None:
    server.cluster.partitions = [
        led(1, 0, own(1), ReplicaView(2, 90, 10, 4_000, True), ReplicaView(3, -1, -1, -1, True)),
        led(1, 1, own(2), ReplicaView(3, 100, 0, 5_000, True), ReplicaView(1, 100, 0, 5_000, True)),
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
        "lost": "",
    }
    assert second["lag"] == "2:0,3:0,1:0"
    [document] = run("topic", "describe", "a", "-o", "json").json
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
    server.cluster.partitions = [led(1, 0, own(1), ReplicaView(4, 70, 30, -1, False))]
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
        deadline = time.monotonic() + 30
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
    assert "1 of 2 was refused" in refused.err
    assert server.partition("a").adding_replicas == (4,)
    assert "none numbered 7" in run("partition", "reassign", "a-7=1").err
    assert run("partition", "reassign", "--plan", "/nowhere/plan.json").code == 1


# topic create, topic describe: what the numbers mean


def test_without_numbers_the_servers_defaults_count(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    with AdminServer(3, {"num.partitions": 3, "default.replication.factor": 2}) as other:
        monkeypatch.setenv("RAFTLOG_BOOTSTRAP", other.bootstrap)
        assert run("topic", "create", "plain").code == 0
        assert [len(other.partition("plain", number).replicas) for number in range(3)] == [2, 2, 2]
        assert run("topic", "create", "one", "-p", "1", "-r", "1").code == 0
        found = other.image.topic("one")
        assert found is not None
        assert [len(part.replicas) for part in found.partitions] == [1]
    helped = "".join(run("topic", "create", "--help").out.replace("│", "").split())
    assert "num.partitions" in helped
    assert "default.replication.factor" in helped


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("1:2", "-p", "3"), "--replica-assignment names 1 partition and --partitions 3"),
        (("1:2,2:3", "-p", "1"), "--replica-assignment names 2 partitions and --partitions 1"),
        (("1:2", "-r", "3"), "--replica-assignment names 2 replicas and --replication-factor 3"),
        (("1:2,2",), "partition 0 has 2 replicas and partition 1 has 1 replica"),
        (("1:1",), "partition 0 names broker 1 twice"),
    ],
)
def test_an_assignment_that_contradicts_itself_is_refused(run: Run, options: Sequence[str], words: str) -> None:
    ran = run("topic", "create", "c", "--replica-assignment", *options)
    assert ran.code == 2
    assert words in " ".join(ran.err.split())


def test_an_assignment_may_say_again_what_it_says(server: AdminServer, run: Run) -> None:
    assert run("topic", "create", "c", "--replica-assignment", "1:2,2:3", "-p", "2", "-r", "2").code == 0


def test_a_single_topic_comes_with_its_settings(run: Run) -> None:
    ran = run("topic", "describe", "a")
    assert ran.err == "a: min.insync.replicas=2\n"
    assert run("config", "set", "topic", "a", "retention.ms=1d").code == 0
    assert run("topic", "describe", "a").err == "a: min.insync.replicas=2, retention.ms=86400000\n"
    assert run("topic", "describe", "a", "-o", "json").err == ""


def test_partitions_that_must_lose_nobody_more_are_shown(server: AdminServer, run: Run) -> None:
    assert run("topic", "describe", "--at-min-isr").table == []
    server.set_isr("a", [1, 2])
    assert [row["partition"] for row in run("topic", "describe", "--at-min-isr").table] == ["0"]
    server.set_isr("a", [1])
    assert run("topic", "describe", "--at-min-isr").table == []


# min.insync.replicas above the number of replicas

UNWRITABLE = "has 1 replica and min.insync.replicas=2: writes with acks=all are refused"


def test_a_topic_that_nobody_can_write_to_is_warned_of(server: AdminServer, run: Run) -> None:
    created = run("topic", "create", "c", "-r", "1", "-c", "min.insync.replicas=2")
    assert (created.code, created.out) == (0, "topic c created\n")
    assert f"warning: c-0 {UNWRITABLE}" in created.err
    assert run("topic", "create", "d", "-r", "2", "-c", "min.insync.replicas=2").err == ""
    assert run("topic", "create", "e", "-r", "1").err == ""
    assert f"e-0 {UNWRITABLE}" in run("config", "set", "topic", "e", "min.insync.replicas=2").err
    assert run("config", "set", "topic", "e", "retention.ms=1d").err == "", "nothing about what was so before"
    assert run("config", "unset", "topic", "e", "min.insync.replicas").err == ""
    assert f"e-0 {UNWRITABLE}" in run("topic", "alter", "e", "-c", "min.insync.replicas=2").err
    assert run("topic", "alter", "e", "--unset", "min.insync.replicas").err == ""
    everywhere = run("config", "set", "broker", "default", "min.insync.replicas=2")
    assert f"e-0 {UNWRITABLE}" in everywhere.err


def test_a_move_to_too_few_brokers_is_warned_of(server: AdminServer, run: Run) -> None:
    ran = run("partition", "reassign", "a-0=4")
    assert ran.code == 0, ran.err
    assert f"warning: a-0 {UNWRITABLE}" in ran.err.replace("will have", "has")
    assert "warning" not in run("partition", "reassign", "a-1=4,3").err
