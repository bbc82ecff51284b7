"""The commands about partitions on metadata in memory: elections, moves, plans, and their output."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raftlog
import raftlog.aio
from raftlog._client import admin
from raftlog.cli import client_config
from raftlog.cli.partitions import moving
from raftlog.cli.partitions.moving import (
    Move,
    balanced,
    moves_from_arguments,
    moves_from_json,
    plan_of,
    throttled_replicas,
)
from raftlog.types import TopicPartition
from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.image import NO_LEADER
from replication.leader import ReplicaView
from tests.support.admin_service import AdminServer, led
from tests.support.command_line import Run
from tests.support.metadata import (
    broker_epoch,
    create_topic,
    delete_topic,
    elect,
    fence,
    offline_replicas,
    refs,
    unfence,
    uuid_of,
)
from tests.support.pauses import instead_of_sleeping

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


def test_alter_raises_the_number_of_partitions(server: AdminServer, run: Run) -> None:
    server.propose(create_topic("grows", 4, 1, 1))
    ran = run("topic", "alter", "grows", "--partitions", "3", "-c", "retention.ms=1d", "-o", "json")
    assert (ran.code, ran.json["partitions"]) == (0, 3)
    assert len(run("topic", "describe", "grows").table) == 3
    assert run("topic", "alter", "grows", "--partitions", "2").code == 1
    server.propose(create_topic("one", 5, 1, 1))
    assert "topic 'one' has 1 partition and cannot get 1: " in run("topic", "alter", "one", "--partitions", "1").err


def test_the_lag_of_a_broker_that_is_down_is_unknown(server: AdminServer, run: Run) -> None:
    server.cluster.partitions = [led(1, 0, own(1), ReplicaView(2, 100, 0, 4_000, True))]
    server.propose(fence(2, broker_epoch(server.image, 2)))
    assert run("topic", "describe", "a").table[0]["lag"] == "1:0,2:?,3:?"


def test_internal_topics_are_hidden_unless_a_problem_is_looked_for(server: AdminServer, run: Run) -> None:
    def shown(*arguments: str) -> list[str]:
        return sorted({row["topic"] for row in run("topic", *arguments).table})

    server.propose(create_topic("__consumer_offsets", 3, 1, 2))
    assert shown("list") == shown("describe") == ["a"]
    assert shown("list", "--internal") == shown("describe", "--internal") == ["__consumer_offsets", "a"]
    server.set_isr("__consumer_offsets", [server.partition("__consumer_offsets").leader])
    assert shown("describe", "--under-replicated") == ["__consumer_offsets"]


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


def test_an_unknown_broker_of_a_setting_is_named_with_what_the_argument_takes(run: Run) -> None:
    ran = run("config", "set", "broker", "7", "log.retention.ms=3d")
    assert ran.code == 1
    assert "there is no broker '7'; name a registered one, or all: `default` in raftlog config" in ran.err


def test_a_similar_name_is_named_once(server: AdminServer, run: Run) -> None:
    server.propose(create_topic("readings", 4, 1, 1))
    ran = run("topic", "describe", "reading")
    assert ran.err == "error: there is no topic 'reading'; did you mean 'readings'? If not, create it first\n"


def test_replicas_are_placed_by_hand(server: AdminServer, run: Run) -> None:
    assert run("topic", "create", "c", "--replica-assignment", "4:1,1:4,2:3").code == 0
    assert [server.partition("c", number).replicas for number in range(3)] == [(4, 1), (1, 4), (2, 3)]
    assert run("topic", "create", "d", "--replica-assignment", "4;1").code == 2
    refused = run("topic", "create", "d", "--replica-assignment", "9")
    assert refused.code == 1
    assert "broker 9 is not registered" in refused.err


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
    assert '{"topic": "a", "partition": 0, "replicas": [1, 2, 3]}' in begun.err, (
        "the output must have the former replicas, as the way back"
    )
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


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_a_plan_may_change_the_number_of_replicas(server: AdminServer, run: Run, wanted: int) -> None:
    """From one node to several: the topics of the first one have one replica each, the internal ones too."""
    made = run("partition", "reassign", "--generate", "--topic", "a", "--replication-factor", str(wanted))
    assert made.code == 0, made.err
    replicas = [part["replicas"] for part in made.json["partitions"]]
    assert replicas
    assert {len(set(each)) for each in replicas} == {wanted}
    held = [sum(broker in each for each in replicas) for broker in (1, 2, 3, 4)]
    assert max(held) - min(held) <= 1
    assert run("partition", "reassign", "--plan", "-", stdin=made.out).code == 0


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
        ((), "give either partitions or --plan"),
        (("a-0=1", "--plan", "x"), "give either partitions or --plan"),
        (("a-0",), "add the brokers"),
        (("a=1",), "write TOPIC-PARTITION=BROKER"),
        (("a-0=1", "--verify", "--cancel"), "give only one of"),
        (("--generate",), "--generate needs --topic"),
        (("--generate", "-t", "a", "--brokers", "1,x"), "write ids with commas"),
        (("--generate", "-t", "a", "--brokers", "1,9"), "broker 9 is not up"),
        (("--generate", "-t", "a", "--brokers", "1,2"), "3 replicas need 3 brokers"),
        (("--generate", "-t", "a", "--replication-factor", "9"), "9 replicas need 9 brokers"),
        (("a-0=1", "--replication-factor", "2"), "--replication-factor needs --generate"),
        (("a-0=1", "--throttle", "fast"), "write bytes per second"),
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
    assert "has no partition 7" in run("partition", "reassign", "a-7=1").err
    assert run("partition", "reassign", "--plan", "/nowhere/plan.json").code == 1


# topic create, topic describe: what the numbers mean


def test_a_client_without_numbers_gets_the_servers_defaults() -> None:
    with AdminServer(3, {"num.partitions": 3, "default.replication.factor": 2}) as other:
        with raftlog.Admin(other.bootstrap) as admin:
            made = admin.create_topic("plain")
            assert made is not None
            assert [len(part.replicas) for part in made.partitions] == [2, 2, 2]
            one = admin.create_topic("one", 1, 1)
            assert one is not None
            assert [len(part.replicas) for part in one.partitions] == [1]

        async def awaited() -> None:
            async with raftlog.aio.Admin(other.bootstrap) as admin:
                made = await admin.create_topic("awaited", replication_factor=3)
                assert made is not None
                assert [len(part.replicas) for part in made.partitions] == [3, 3, 3]

        asyncio.run(awaited())


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
    assert run("config", "set", "topic", "e", "retention.ms=1d").err == "", (
        "a change of another setting must not repeat the warning"
    )
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


@pytest.fixture
def leaderless(server: AdminServer) -> AdminServer:
    """u-0 has no leader: broker 1, the only replica in sync, has lost its log."""
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
    monkeypatch.setattr(client_config, "_PATIENCE_MS", 120_000)
    monkeypatch.setattr(admin, "_FIRST_CONTACT_S", 120.0)
    lead_by_the_second(server)
    started = time.monotonic()
    refused = run("partition", "elect", "a", "--partition", "0")
    assert time.monotonic() - started < 40, "the command must end at once, not when the time for the call is up"
    assert refused.code == 1
    assert "preferred replica 1 is down" in refused.err
    assert run("partition", "elect", "a", "--partition", "7").code == 1
    assert run("partition", "elect", "zzz").code == 1


@pytest.mark.parametrize("which", ["a", "--all"])
def test_new_leaders_are_named(server: AdminServer, run: Run, which: str) -> None:
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
    ran = run("partition", "elect", which)
    handing_over.join()
    assert ran.code == 0, ran.err
    assert ran.out == "a-0 is led by broker 1 now, in leader epoch 3\n"


def test_in_all_topics_a_refusal_does_not_stop_the_others(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = run("partition", "elect", "--all")
    assert (nothing.code, nothing.out) == (0, "nothing to do: every partition is led by its first replica\n")
    lead_by_the_second(server)
    server.propose(create_topic("b", 2, 1, 1))
    asked: list[str] = []
    elect_leaders = raftlog.Admin.elect_leaders

    def note(admin: raftlog.Admin, topic: str, *arguments: Any, **options: Any) -> None:
        asked.append(topic)
        elect_leaders(admin, topic, *arguments, **options)

    monkeypatch.setattr(raftlog.Admin, "elect_leaders", note)
    ran = run("partition", "elect", "--all", "-o", "json")
    assert (ran.code, ran.json) == (1, {"unclean": False, "topics": []})
    assert ran.err.startswith("error: a: ")
    assert "preferred replica 1 is down" in ran.err
    assert asked == ["a"], "topic b must not be asked about, as its leader is its only replica"
    for wrong in ([], ["a", "--all"], ["--all", "-p", "0"]):
        assert run("partition", "elect", *wrong).code == 2


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
    assert "these records are lost" in ran.err
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
    assert last.startswith("error: after 20 s 1 of 1 move is not done; it continues")
    assert "the throttle stays on until raftlog partition reassign --verify with the same moves" in last
    again = run("partition", "reassign", "a-1=4,3", "--wait", "--timeout", "0.2").err.splitlines()[-1]
    assert again.startswith("error: after 0.2 s 1 of 1 move is not done; it continues")
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
    assert last.startswith("1 of 1 move is not done; it continues")
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
    assert "wanted, with 0 partitions to move and 2 to reorder:" in made.err
    moved = run("partition", "reassign", "--generate", "--topic", "a", "--brokers", "2,3,4")
    assert "wanted, with 2 partitions to move and 0 to reorder:" in moved.err


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


def move(topic: str, partition: int, *replicas: int) -> Move:
    return Move(TopicPartition(topic, partition), replicas)


def test_arguments_name_a_partition_and_brokers() -> None:
    assert moves_from_arguments(["events-0=1,2,3", "a-b-12=4", "x-7"]) == [
        move("events", 0, 1, 2, 3),
        move("a-b", 12, 4),
        move("x", 7),
    ]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("events=1,2", "write TOPIC-PARTITION=BROKER"),
        ("events-0=", "write TOPIC-PARTITION=BROKER"),
        ("events-0=1,,2", "write TOPIC-PARTITION=BROKER"),
        ("events-0=-1", "write TOPIC-PARTITION=BROKER"),
        ("-0=1", "write TOPIC-PARTITION=BROKER"),
        ("events-0=1,1", "names a broker twice"),
    ],
)
def test_a_wrong_argument_is_told(argument: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moves_from_arguments([argument])
    with pytest.raises(ValueError, match="named twice"):
        moves_from_arguments(["a-0=1", "a-0=2"])


def test_a_plan_is_that_of_kafkas_tool() -> None:
    """As kafka-reassign-partitions --generate prints it, log_dirs and all."""
    text = (
        '{"version":1,"partitions":[{"topic":"foo","partition":0,"replicas":[3,4],"log_dirs":["any","any"]},'
        '{"topic":"foo","partition":1,"replicas":[2]}]}'
    )
    moves = moves_from_json(text)
    assert moves == [move("foo", 0, 3, 4), move("foo", 1, 2)]
    assert moves_from_json(json.dumps(plan_of(moves))) == moves


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "a plan is"),
        ('{"partitions": 1}', "a plan is"),
        ('{"version": 2, "partitions": []}', "version 2"),
        ('{"partitions": [1]}', r"partitions\[0\] of the plan needs"),
        ('{"partitions": [{"topic": "a", "partition": 0}]}', "needs topic, partition and replicas"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": [1], "x": 1}]}', "nothing else"),
        ('{"partitions": [{"topic": 1, "partition": 0, "replicas": [1]}]}', "topic must be a text"),
        ('{"partitions": [{"topic": "a", "partition": -1, "replicas": [1]}]}', "partition a number"),
        ('{"partitions": [{"topic": "a", "partition": true, "replicas": [1]}]}', "partition a number"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": []}]}', "replicas must be a list"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": ["1"]}]}', "replicas must be a list"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": [1, 1]}]}', "names a broker twice"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": [1], "log_dirs": ["/x"]}]}', "cannot be chosen"),
    ],
)
def test_what_is_no_plan_is_told(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moves_from_json(text)


def test_a_plan_leaves_what_is_balanced_where_it_is() -> None:
    now = [move("a", 0, 1, 2), move("a", 1, 2, 3), move("a", 2, 3, 1)]
    assert balanced(now, {1: "", 2: "", 3: ""}) == now


def test_a_new_broker_gets_its_share() -> None:
    now = [move("a", n, n % 2 + 1) for n in range(8)]
    placed = balanced(now, {1: "", 2: "", 3: "", 4: ""})
    assert Counter(each.replicas[0] for each in placed) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert sum(new == old for new, old in zip(placed, now, strict=True)) == 4


def test_replicas_are_put_into_racks_of_their_own() -> None:
    racks = {1: "x", 2: "x", 3: "y", 4: "y"}
    for each in balanced([move("a", n, 9, 8) for n in range(6)], racks):
        assert len({racks[replica] for replica in each.replicas}) == 2


def test_more_replicas_than_brokers_cannot_be() -> None:
    with pytest.raises(ValueError, match="3 replicas need 3 brokers, but only 2 are named"):
        balanced([move("a", 0, 1, 2, 3)], {1: "", 2: ""})


@given(st.integers(1, 6), st.integers(0, 30), st.data())
def test_every_plan_is_even(brokers: int, partitions: int, data: st.DataObject) -> None:
    factor = data.draw(st.integers(1, brokers))
    ids = st.lists(st.integers(1, 9), min_size=factor, max_size=factor, unique=True)
    now = [move("a", n, *data.draw(ids)) for n in range(partitions)]
    placed = balanced(now, dict.fromkeys(range(1, brokers + 1), ""))
    assert [each.part for each in placed] == [each.part for each in now]
    held = Counter(replica for each in placed for replica in each.replicas)
    led = Counter(each.replicas[0] for each in placed)
    for each in placed:
        assert len(set(each.replicas)) == factor
        assert set(each.replicas) <= set(range(1, brokers + 1))
    if placed:
        assert max(held.values()) <= -(-partitions * factor // brokers) + 1
        assert max(led.values()) <= -(-partitions // brokers) + factor


def test_who_sends_and_who_receives_is_held_back() -> None:
    """KIP-73: current replicas are throttled as senders, new ones as receivers; a replica that stays never is."""
    before = [move("a", 0, 1, 2), move("a", 1, 2, 3), move("b", 0, 1), move("c", 0, 1)]
    after = {each.part: each for each in (move("a", 0, 2, 3, 4), move("a", 1, 3, 2), move("b", 0, 5))}
    assert throttled_replicas(before, after) == {
        "a": {
            "leader.replication.throttled.replicas": "0:1,0:2",
            "follower.replication.throttled.replicas": "0:3,0:4",
        },
        "b": {"leader.replication.throttled.replicas": "0:1", "follower.replication.throttled.replicas": "0:5"},
    }
