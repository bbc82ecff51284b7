"""`raftlog txn ...` on a cluster in memory: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from raftlog import TopicPartition
from raftlog.errors import CoordinatorLoadInProgress
from raftlog.v1 import transaction_pb2
from tests.support.command_line import Run
from tests.support.fake_transaction_tools import ToolCluster

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


@pytest.fixture
def server() -> Iterator[ToolCluster]:
    with ToolCluster(nodes=2) as cluster:
        cluster.create_topic("a", 2)
        yield cluster


def busy(server: ToolCluster) -> None:
    tools = server.tools
    tools.transaction("billing", (7, 3), partitions={"a": [0, 1]}, open_for_s=1_200, coordinator=2, group_ids=["g"])
    tools.sink("query-1", 41, "results", coordinator=2)
    tools.stage("query-1", 9, 42, {"a": [0, 1]})
    tools.transaction("ledger", (8, 1), transaction_pb2.PREPARE_COMMIT, {"a": [0, 1]}, pending={"a": [1]}, open_for_s=2)


def is_age(cell: str, age_s: float, since: float) -> bool:
    """Whether a cell says how old something is that was so old at a time of the monotonic clock."""
    return age_s <= float(cell) <= age_s + time.monotonic() - since + 0.1


def test_list(server: ToolCluster, run: Run) -> None:
    since = time.monotonic()
    busy(server)
    ran = run("txn", "list")
    assert (ran.code, ran.err) == (0, "")
    billing, stage, ledger = ran.table  # open for so long
    assert is_age(billing.pop("open_seconds"), 1_200, since)
    assert billing == {
        "transactional_id": "billing",
        "sink": "-",
        "producer_id": "7",
        "state": "ongoing",
        "coordinator": "2",
    }
    assert (ledger["state"], ledger["coordinator"]) == ("prepare_commit", "1")
    assert (stage["transactional_id"], stage["sink"], stage["producer_id"]) == ("-", "query-1", "9")
    (only,) = run("txn", "list", "--state", "Prepare_Commit", "-o", "json").json
    assert (only["transactional_id"], only["sink_id"], only["coordinator_id"]) == ("ledger", None, 1)
    assert [each["producer_id"] for each in run("txn", "list", "--longer-than", "10m").table] == ["7"]
    assert [each["producer_id"] for each in run("txn", "list", "--producer-id", "9").table] == ["9"]
    assert run("txn", "list", "--state", "ongoing", "--longer-than", "1h").table == []
    for wrong, why in (
        (("--state", "done"), "the states are empty, ongoing,"),
        (("--longer-than", "soon"), "not a duration"),
    ):
        ran = run("txn", "list", *wrong)
        assert ran.code == 2
        assert why in ran.err


def test_what_is_open_is_listed_first_and_what_is_open_for_long_before_that(server: ToolCluster, run: Run) -> None:
    server.tools.transaction("a-done", (4, 3), transaction_pb2.COMPLETE_COMMIT)
    server.tools.transaction("b-idle", (5, 3), transaction_pb2.TRANSACTION_EMPTY)
    server.tools.transaction("c-open", (6, 3), open_for_s=12)
    server.tools.transaction("d-prepared", (7, 3), transaction_pb2.PREPARE_ABORT, open_for_s=90)
    server.tools.sink("query-1", 41, "results", coordinator=2)
    server.tools.stage("query-1", 9, 42, {"a": [0, 1]})
    names = [each["transactional_id"] for each in run("txn", "list").table]
    assert names == ["d-prepared", "c-open", "-", "a-done", "b-idle"]
    listed = run("txn", "list", "-o", "json").json
    assert [each["transactional_id"] or "-" for each in listed] == names


def test_a_list_with_holes_says_so(server: ToolCluster, run: Run) -> None:
    busy(server)
    server.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
    ran = run("txn", "list", "--state", "ongoing")
    assert len(ran.table) == 2
    assert (ran.code, ran.err) == (
        1,
        "note: the list of transactions may be incomplete: __transaction_state-3 is being loaded\n",
    )
    assert (
        run("txn", "sinks").err == "note: the list of sinks may be incomplete: __transaction_state-3 is being loaded\n"
    )


def test_describe(server: ToolCluster, run: Run) -> None:
    busy(server)
    ran = run("txn", "describe", "ledger", "billing")
    assert ran.code == 0
    first, second = ran.err.splitlines()
    began = re.match(r"ledger: prepare_commit for (\d+(?:\.\d+)?) s,", first)
    assert began is not None
    assert float(began[1]) >= 2, "the age must be 2 s or more"
    assert first.endswith(
        ", timeout 60 s, producer 8 epoch 1, coordinator 1 (__transaction_state-7), markers still missing: a:1"
    )
    assert second.endswith(", timeout 60 s, producer 7 epoch 3, coordinator 2 (__transaction_state-7)")
    assert [
        (row["transactional_id"], row["topic"], row["partition"], row["group"], row["marker"]) for row in ran.table
    ] == [
        ("ledger", "a", "0", "-", "written"),
        ("ledger", "a", "1", "-", "missing"),
        ("billing", "a", "0", "-", "-"),
        ("billing", "a", "1", "-", "-"),
        ("billing", "-", "-", "g", "-"),
    ]
    (described,) = run("txn", "describe", "ledger", "-o", "json").json
    assert described["pending"] == [{"topic": "a", "partition": 1}]
    assert len(described["partitions"]) == 2


def test_describe_of_what_is_not_there(server: ToolCluster, run: Run) -> None:
    busy(server)
    ran = run("txn", "describe", "nobody")
    assert (ran.code, ran.err) == (1, "error: there is no transactional id 'nobody'\n")
    ran = run("txn", "describe", "nobody", "billing", "-o", "json")
    assert ran.code == 1
    assert [each["transactional_id"] for each in ran.json] == ["billing"]


def test_abort(server: ToolCluster, run: Run) -> None:
    busy(server)
    ran = run("txn", "abort", "billing", "ledger")
    assert ran.code == 1
    assert ran.out == "the open transaction of billing is aborted\n"
    assert ran.err == "error: not aborted: 'ledger' has no open transaction\n"
    ran = run("txn", "abort", "billing", "-o", "json")
    assert (ran.code, ran.json["aborted"]) == (1, [])
    assert "billing" in ran.json["refused"]


def test_abort_stages(server: ToolCluster, run: Run) -> None:
    """The open stages that a dead driver has left."""
    busy(server)
    server.tools.stage("query-1", 10, 42, {"a": [1]})
    server.tools.stage("query-1", 11, 43, {"a": [1]})
    ran = run("txn", "abort", "query-1")
    assert ran.code == 1
    assert ran.err.endswith("end its open stages with: raftlog txn abort-stages query-1\n")
    ran = run("txn", "abort-stages", "query-1", "--batch", "42")
    assert (ran.code, ran.out, ran.err) == (0, "2 open stages of batch 42 of query-1 are aborted\n", "")
    ran = run("txn", "abort-stages", "query-1", "-o", "json")
    assert (ran.code, ran.json["sink_id"]) == (0, "query-1")
    assert [(each["producer_id"], each["partitions"]) for each in ran.json["aborted"]] == [
        (11, [{"topic": "a", "partition": 1}])
    ]
    ran = run("txn", "abort-stages", "query-1")
    assert (ran.code, ran.out) == (0, "query-1 has no open stages\n")
    ran = run("txn", "abort-stages", "nothing")
    assert (ran.code, ran.err) == (1, "error: there is no sink 'nothing'\n")


def test_producers(server: ToolCluster, run: Run) -> None:
    since = time.monotonic()
    server.tools.writes(A1, (7, 3), start_offset=100, open_for_s=30)
    server.tools.writes(A1, (5, 0))
    ran = run("txn", "producers", "a")
    assert ran.code == 0
    assert ran.err == "note: a-1: the last stable offset is 100, 20 below the high watermark 120\n"
    idle, writing = ran.table
    assert (idle["producer_id"], idle["last_sequence"], idle["transaction_start_offset"]) == ("5", "-", "-")
    assert (writing["partition"], writing["producer_id"], writing["epoch"]) == ("1", "7", "3")
    assert (writing["last_sequence"], writing["transaction_start_offset"]) == ("9", "100")
    assert is_age(writing["open_seconds"], 30, since)
    empty, known = run("txn", "producers", "a", "-o", "json").json
    assert (empty["partition"], empty["producers"]) == (0, [])
    assert known["producers"][1]["transaction_start_offset"] == 100
    assert run("txn", "producers", "a", "--partition", "0").table == []
    assert "a has no partition 2" in run("txn", "producers", "a", "-p", "2").err


def test_producers_have_the_names_that_coordinators_know(server: ToolCluster, run: Run) -> None:
    """A topic that Spark writes knows a producer for each attempt of a task; the open ones are what matters."""
    busy(server)
    server.tools.writes(A1, (7, 3), start_offset=100, open_for_s=30)
    server.tools.writes(A1, (9, 0), start_offset=110, open_for_s=20)
    for attempt in range(20, 60):
        server.tools.writes(A1, (attempt, 0))
    assert len(run("txn", "producers", "a").table) == 42
    ran = run("txn", "producers", "a", "--open")
    assert [(each["producer_id"], each["transactional_id"], each["sink"]) for each in ran.table] == [
        ("7", "billing", "-"),
        ("9", "-", "query-1"),
    ]
    assert ran.code == 0
    empty, known = run("txn", "producers", "a", "--open", "-o", "json").json
    assert empty["producers"] == []
    assert [(each["producer_id"], each["transactional_id"], each["sink_id"]) for each in known["producers"]] == [
        (7, "billing", None),
        (9, None, "query-1"),
    ]
    server.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
    ran = run("txn", "producers", "a", "--open")
    assert [each["producer_id"] for each in ran.table] == ["7", "9"]
    assert ran.err.endswith("note: some names may be missing: __transaction_state-3 is being loaded\n")
    assert ran.code == 0, "the exit code must be 0, as everything asked for was found"


def test_hanging(server: ToolCluster, run: Run) -> None:
    assert run("txn", "find-hanging").table == []
    since = time.monotonic()
    server.tools.writes(A1, (7, 3), start_offset=100, open_for_s=1_000)
    server.tools.writes(A0, (8, 0), start_offset=5, open_for_s=120)
    ran = run("txn", "find-hanging")
    (found,) = ran.table
    assert is_age(found["open_seconds"], 1_000, since)
    assert (found["topic"], found["partition"], found["producer_id"], found["start_offset"]) == ("a", "1", "7", "100")
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == "  raftlog txn abort-hanging a --partition 1 --start-offset 100"
    both = run("txn", "find-hanging", "--topic", "a", "--max-transaction-timeout", "1m", "-o", "json").json
    assert [each["producer_id"] for each in both] == [8, 7]
    ran = run(*both[1]["abort_command"].split()[1:])
    assert ran.code == 0, ran.err
    assert ran.out == "the transaction of producer 7 that began at offset 100 of a-1 is aborted\n"
    ran = run("txn", "abort-hanging", "a", "-p", "1", "--start-offset", "100")
    assert (ran.code, ran.err) == (
        1,
        "error: no transaction of a-1 begins at offset 100; none is open there\n",
    )
    server.tools.transaction("known", (8, 0), partitions={"a": [0]})
    ran = run("txn", "abort-hanging", "a", "-p", "0", "--start-offset", "5")
    assert ran.code == 1
    assert "is not hanging" in ran.err
    ran = run("txn", "abort-hanging", "a", "-p", "0", "--start-offset", "5", "--force", "-o", "json")
    assert ran.json["producer_id"] == 8


def test_a_partition_that_does_not_tell(server: ToolCluster, run: Run) -> None:
    server.call(lambda: setattr(server.topics["a"].partitions[0], "leader", -1))
    server.tools.writes(A1, (7, 3), start_offset=100, open_for_s=1_000)
    ran = run("txn", "find-hanging", "-o", "json")
    assert [each["producer_id"] for each in ran.json] == [7]
    assert ran.code == 1
    assert ran.err == "note: the list of hanging transactions may be incomplete: a-0 has no leader at the moment\n"


def test_sinks(server: ToolCluster, run: Run) -> None:
    busy(server)
    server.tools.sink("new", -1, "")
    server.tools.stage("new", 10, 0, {"a": [0]})
    new, known = run("txn", "sinks").table
    assert (new["sink"], new["last_batch"], new["target"], new["open_stages"]) == ("new", "-", "-", "1")
    assert (known["sink"], known["last_batch"], known["target"], known["coordinator"]) == (
        "query-1",
        "41",
        "results",
        "2",
    )
    assert [each["last_batch_id"] for each in run("txn", "sinks", "-o", "json").json] == [-1, 41]
    ran = run("txn", "sinks", "query-1")
    assert ran.err.startswith("query-1: batch 41 is committed, 9")
    assert ran.err.endswith(" s ago, target results, 1 stage open\n")
    (stage,) = ran.table
    assert (stage["producer_id"], stage["batch"], stage["state"], stage["attempt"]) == ("9", "42", "ongoing", "task 9")
    assert (stage["timeout_seconds"], stage["partitions"]) == ("60", "a:0-1")
    ran = run("txn", "sinks", "query-1", "nothing", "-o", "json")
    assert (ran.code, ran.err) == (1, "error: there is no sink 'nothing'\n")
    assert ran.json[0]["stages"][0]["partitions"] == [{"topic": "a", "partition": 0}, {"topic": "a", "partition": 1}]
