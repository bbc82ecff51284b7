"""`raftlog group ...` on a cluster in memory: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftlog import Admin, TopicPartition
from raftlog._core.descriptions import state_name
from raftlog.errors import CoordinatorNotAvailable, GroupIdNotFound, OffsetMetadataTooLarge, UnknownTopicOrPartition
from raftlog.format import parse_header
from raftlog.v1 import group_pb2
from tests.support.batches import batch_of
from tests.support.command_line import Run
from tests.support.fake_broker import FakeCluster
from tests.support.fake_groups import member

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


@pytest.fixture
def server() -> Iterator[FakeCluster]:
    """Topic `a` has 10 records in partition 0, each a second younger than the one before; `b` has none."""
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("a", 2)
        cluster.create_topic("b", 1)
        now_ms = int(time.time() * 1000)
        for number in range(10):
            cluster.append("a", batch_of(b"x", timestamp_ms=now_ms - 100_000 + 1_000 * number))
        yield cluster


def busy(cluster: FakeCluster) -> None:
    one = member("m-one", {"a": [0]}, host="10.0.0.1", client_id="worker")
    idle = member("m-two", {}, host="10.0.0.2", client_id="worker")
    cluster.groups.add("busy", 2, {A0: 7, A1: 0}, [one, idle])


class TestList:
    def test_all_and_by_state(self, server: FakeCluster, run: Run) -> None:
        busy(server)
        server.groups.add("quiet", 1)
        assert run("group", "list").table == [
            {"group": "busy", "state": "stable", "members": "2", "coordinator": "2", "type": "consumer"},
            {"group": "quiet", "state": "empty", "members": "0", "coordinator": "1", "type": "consumer"},
        ]
        assert run("group", "list", "--state", "Empty", "-o", "json").json == [
            {"group_id": "quiet", "state": "empty", "member_count": 0, "coordinator_id": 1, "type": "consumer"}
        ]
        described = run("group", "describe", "quiet", "-o", "json").json[0]
        assert {"group_id", "state", "member_count", "coordinator_id"} <= described.keys()
        wrong = run("group", "list", "--state", "sleeping")
        assert wrong.code == 2
        assert "the states are empty, assigning, reconciling, stable" in wrong.err

    def test_a_list_with_holes_says_so(self, server: FakeCluster, run: Run) -> None:
        server.groups.add("seen", 1)
        server.groups.loading[2] = CoordinatorNotAvailable("__consumer_offsets-3 cannot be read at offset 17")
        ran = run("group", "list")
        assert [group["group"] for group in ran.table] == ["seen"]
        assert (ran.code, ran.err) == (
            1,
            "note: the list of groups may be incomplete: __consumer_offsets-3 cannot be read at offset 17\n",
        )


class TestDescribe:
    def test_partitions_and_who_reads_them(self, server: FakeCluster, run: Run) -> None:
        busy(server)
        ran = run("group", "describe", "busy")
        assert ran.code == 0
        assert ran.err == (
            "busy: stable, 2 members, assignor sticky, coordinator 2 (__consumer_offsets-7), group epoch 3\n"
        )
        first, second, idle = ran.table
        assert 92 < float(first.pop("lag_seconds")) < 110
        assert first == {
            "group": "busy",
            "topic": "a",
            "partition": "0",
            "current_offset": "7",
            "log_end_offset": "10",
            "lag": "3",
            "member_id": "m-one",
            "host": "10.0.0.1",
            "client_id": "worker",
        }
        assert (second["partition"], second["lag"], second["lag_seconds"], second["member_id"]) == (
            "1",
            "0",
            "0.0",
            "-",
        )
        assert (idle["topic"], idle["partition"], idle["member_id"]) == ("-", "-", "m-two")

    def test_documents_for_programs(self, server: FakeCluster, run: Run) -> None:
        busy(server)
        server.groups.add("quiet", 1, {B0: 0})
        both = run("group", "describe", "--all-groups", "-o", "json").json
        assert [group["group_id"] for group in both] == ["busy", "quiet"]
        assert both[0]["partitions"][0]["lag"] == 3
        assert both[0]["members"][0]["assigned"] == [{"topic": "a", "partition": 0}]
        assert both[1]["partitions"][0] | {"committed_at_ms": 0} == {
            "topic": "b",
            "partition": 0,
            "offset": 0,
            "log_start_offset": 0,
            "log_end_offset": 0,
            "lag": 0,
            "lag_seconds": 0.0,
            "metadata": "",
            "committed_at_ms": 0,
            "member_id": "",
            "error": None,
        }
        [found] = run("group", "describe", "--all-groups", "--state", "empty", "-o", "json").json
        assert found["group_id"] == "quiet"

    def test_what_is_not_known_is_noted(self, server: FakeCluster, run: Run) -> None:
        server.groups.add("g", 1, {A0: 3, TopicPartition("gone", 0): 1})
        ran = run("group", "describe", "g")
        assert ran.code == 1
        assert "note: g, gone-0: gone-0 does not exist\n" in ran.err
        assert [row["lag"] for row in ran.table] == ["7", "-"]

    def test_every_partition_has_the_reason_that_is_its_own(self, server: FakeCluster, run: Run) -> None:
        server.groups.add("g", 1, {A0: 3, A1: 0, B0: 0})
        server.move_leader("a", 0, -1)
        server.move_leader("a", 1, -1)
        server.move_leader("b", 0, -1)
        ran = run("group", "describe", "g")
        assert ran.code == 1
        assert ran.err.splitlines()[1:] == [
            f"note: g, {part}: {part} has no leader at the moment" for part in ("a-0", "a-1", "b-0")
        ]

    def test_a_committed_offset_outside_of_the_log_is_noted(self, server: FakeCluster, run: Run) -> None:
        server.groups.add("beyond", 1, {A0: 50})
        ran = run("group", "describe", "beyond")
        assert (ran.code, ran.table[0]["lag"], ran.table[0]["lag_seconds"]) == (1, "-", "-")
        assert "note: beyond, a-0: the committed offset 50 is beyond the log end 10: " in ran.err
        server.groups.add("below", 1, {A0: 2})
        with Admin(server.bootstrap) as admin:
            admin.delete_records({A0: 6})
        ran = run("group", "describe", "below")
        assert (ran.code, ran.table[0]["lag"]) == (0, "4")
        assert "note: below, a-0: the committed offset 2 is below the log start 6: " in ran.err

    def test_groups_that_are_there_are_shown_beside_those_that_are_not(self, server: FakeCluster, run: Run) -> None:
        server.groups.add("live", 1, {B0: 0})
        for command in ("describe", "members"):
            ran = run("group", command, "nope", "live")
            assert ran.code == 1
            assert "live: empty, 0 members" in ran.err
            assert ran.err.endswith("error: there is no group 'nope'\n")
        assert [row["group"] for row in run("group", "describe", "nope", "live").table] == ["live"]

    def test_a_group_that_is_not_there(self, run: Run) -> None:
        ran = run("group", "describe", "nobody")
        assert (ran.code, ran.err) == (1, "error: there is no group 'nobody'\n")

    @pytest.mark.parametrize("arguments", [(), ("g", "--all-groups")])
    def test_what_is_meant_has_to_be_said_once(self, run: Run, arguments: tuple[str, ...]) -> None:
        for command in ("describe", "members"):
            ran = run("group", command, *arguments)
            assert ran.code == 2
            assert "name groups, or give --all-groups" in ran.err


def test_members_have_their_assignments_and_what_moves(server: FakeCluster, run: Run) -> None:
    moving = member("m-one", {"a": [0]}, instance_id="worker-1", last_heartbeat_ms=40)
    moving.target[0].partitions[:] = [1]
    moving.pending_revocation.add(topic="b", partitions=[0])
    server.groups.add("g", 1, members=[moving])
    [row] = run("group", "members", "g").table
    assert row == {
        "group": "g",
        "member_id": "m-one",
        "instance_id": "worker-1",
        "client_id": "-",
        "host": "-",
        "epoch": "3",
        "partitions": "1",
        "assigned": "a:0",
        "to_get": "a:1",
        "to_let_go": "b:0",
        "last_heartbeat_ms": "40",
        "connected": "true",
        "subscription": "a",
    }
    [found] = run("group", "members", "g", "-o", "json").json
    assert found["members"][0]["pending_revocation"] == [{"topic": "b", "partition": 0}]


class TestDelete:
    def test_what_can_be_deleted_is(self, server: FakeCluster, run: Run) -> None:
        busy(server)
        server.groups.add("quiet", 1)
        ran = run("group", "delete", "busy", "quiet")
        assert (ran.code, ran.out) == (1, "group quiet deleted\n")
        assert ran.err == "error: not deleted: group 'busy' has members\n"
        assert run("group", "delete", "busy", "-o", "json").json == {
            "deleted": [],
            "refused": {"busy": "group 'busy' has members"},
        }

    def test_offsets_of_some_partitions(self, server: FakeCluster, run: Run) -> None:
        group = server.groups.add("g", 1, {A0: 1, A1: 2, B0: 3})
        ran = run("group", "delete-offsets", "g", "--topic", "a:1,7", "--topic", "b")
        assert (ran.code, ran.out) == (0, "2 offsets of group g deleted: a-1, b-0\n")
        assert list(group.offsets) == [A0]
        nothing = run("group", "delete-offsets", "g", "--topic", "b")
        assert nothing.code == 1
        assert "group g has committed nothing for b" in nothing.err
        nobody = run("group", "delete-offsets", "nobody", "--topic", "b")
        assert (nobody.code, nobody.err) == (1, "error: there is no group 'nobody'\n")

    def test_offsets_of_what_is_read_stay(self, server: FakeCluster, run: Run) -> None:
        busy(server)
        ran = run("group", "delete-offsets", "busy", "--topic", "a")
        assert ran.code == 1
        assert "members read a" in ran.err


class TestReset:
    def test_it_is_only_shown_unless_it_is_to_be_done(self, server: FakeCluster, run: Run) -> None:
        group = server.groups.add("g", 2, {A0: 4, B0: 0})
        ran = run("group", "reset-offsets", "g", "--topic", "a", "--to-latest")
        assert ran.code == 0
        assert ran.table == [
            {"topic": "a", "partition": "0", "current_offset": "4", "new_offset": "10", "change": "6"},
            {"topic": "a", "partition": "1", "current_offset": "-", "new_offset": "0", "change": "-"},
        ]
        assert ran.err == "nothing was changed; --execute sets these offsets\n"
        assert group.offsets[A0].offset == 4
        assert not [call for call in server.groups.calls if call[1] == "CommitOffsets"]
        done = run("group", "reset-offsets", "g", "--topic", "a", "--to-latest", "--execute", "-o", "json")
        assert done.json["executed"] is True
        assert done.err == "2 offsets of group g set\n"
        assert {part: group.offsets[part].offset for part in group.offsets} == {A0: 10, A1: 0, B0: 0}

    @pytest.mark.parametrize(
        ("goal", "offset"),
        [
            (["--to-earliest"], 0),
            (["--to-latest"], 10),
            (["--to-current"], 4),
            (["--to-offset", "6"], 6),
            (["--shift-by", "3"], 7),
            (["--shift-by=-3"], 1),
            (["--by-duration", "98s"], 3),
            (["--by-duration", "PT1000H"], 0),
            (["--to-datetime", "2001-01-01"], 0),
        ],
    )
    def test_each_goal_sets_its_offset(self, server: FakeCluster, run: Run, goal: list[str], offset: int) -> None:
        group = server.groups.add("g", 2, {A0: 4})
        first_ms = parse_header(server.topics["a"].partitions[0].batches[0]).base_timestamp_ms
        ran = run("group", "reset-offsets", "g", "--all-topics", *goal, "--execute")
        assert ran.code == 0, ran.err
        if goal == ["--by-duration", "98s"]:  # it moves on with the time
            latest = math.ceil(time.time() - 98 - first_ms / 1000)
            assert offset - 1 <= group.offsets[A0].offset <= max(offset, latest)
        else:
            assert group.offsets[A0].offset == offset

    @pytest.mark.parametrize(
        ("goal", "offset", "note"),
        [
            (["--to-offset", "50"], 10, "a-0 has offsets 0 to 10, so 10 is used instead of 50"),
            (["--shift-by=-100"], 0, "a-0 has offsets 0 to 10, so 0 is used instead of -96"),
            (["--to-datetime", "2999-01-01"], 10, "a-0 has no record that new, so its end is used"),
        ],
    )
    def test_what_is_not_there_becomes_the_nearest(
        self, server: FakeCluster, run: Run, goal: list[str], offset: int, note: str
    ) -> None:
        server.groups.add("g", 2, {A0: 4})
        ran = run("group", "reset-offsets", "g", "--topic", "a:0", *goal)
        assert ran.table[0]["new_offset"] == str(offset)
        assert f"note: {note}\n" in ran.err

    def test_members_have_to_be_stopped_first(self, server: FakeCluster, run: Run) -> None:
        busy(server)
        why = "group busy has 2 members, stop them first: m-one (worker on 10.0.0.1), m-two (worker on 10.0.0.2)\n"
        shown = run("group", "reset-offsets", "busy", "--all-topics", "--to-earliest")
        assert shown.code == 0
        assert shown.err.endswith(f"note: --execute would be refused now: {why}")
        ran = run("group", "reset-offsets", "busy", "--all-topics", "--to-earliest", "--execute")
        assert (ran.code, ran.err) == (1, f"error: {why}")
        assert server.groups.groups["busy"].offsets[A0].offset == 7

    def test_who_is_away_is_said_to_be(self, server: FakeCluster, run: Run) -> None:
        away = member("m-one", {"a": [0]}, instance_id="worker-1")
        away.connected = False
        server.groups.add("g", 1, {A0: 1}, [away])
        ran = run("group", "reset-offsets", "g", "--all-topics", "--to-earliest", "--execute")
        assert ran.err == (
            "error: group g has 1 member, stop it first: m-one (worker-1, disconnected: in the group until its "
            "session times out)\n"
        )

    def test_offsets_go_into_a_file_and_come_back(self, server: FakeCluster, run: Run, tmp_path: Path) -> None:
        group = server.groups.add("g", 2, {A0: 4, B0: 0})
        file = tmp_path / "offsets.csv"
        assert run("group", "reset-offsets", "g", "--all-topics", "--to-current", "--export", str(file)).code == 0
        assert file.read_text() == "a,0,4\nb,0,0\n"
        assert run("group", "reset-offsets", "g", "--all-topics", "--to-latest", "--execute").code == 0
        assert group.offsets[A0].offset == 10
        assert run("group", "reset-offsets", "g", "--from-file", str(file), "--execute").code == 0
        assert group.offsets[A0].offset == 4

    def test_a_file_that_cannot_be_written_is_told_before_anything_changes(
        self, server: FakeCluster, run: Run, tmp_path: Path
    ) -> None:
        group = server.groups.add("g", 2, {A0: 4})
        file = tmp_path / "nowhere" / "offsets.csv"
        goal = ("--all-topics", "--to-latest", "--execute", "--export", str(file))
        ran = run("group", "reset-offsets", "g", *goal)
        assert ran.code == 1
        assert (
            ran.err
            == f"error: {file} cannot be created: the directory {file.parent} does not exist; nothing was changed\n"
        )
        assert group.offsets[A0].offset == 4

    def test_a_file_stays_as_it_was_when_nothing_is_set(self, server: FakeCluster, run: Run, tmp_path: Path) -> None:
        server.groups.add("g", 2, {A0: 4})
        file = tmp_path / "offsets.csv"
        file.write_text("before")
        server.groups.unavailable["g"] = UnknownTopicOrPartition("no")
        goal = ("--topic", "a:0", "--to-latest", "--execute", "--export", str(file))
        assert run("group", "reset-offsets", "g", *goal).code == 1
        del server.groups.unavailable["g"]
        server.groups.refuse = [GroupIdNotFound("none"), GroupIdNotFound("none"), OffsetMetadataTooLarge("no")]
        ran = run("group", "reset-offsets", "g", *goal)
        assert (ran.code, ran.err) == (1, "error: no\n")
        assert [each.name for each in tmp_path.iterdir()] == ["offsets.csv"]
        assert file.read_text() == "before"

    def test_a_group_that_is_not_there_is_made(self, server: FakeCluster, run: Run) -> None:
        shown = run("group", "reset-offsets", "new", "--topic", "a:0", "--to-offset", "5")
        assert shown.err.startswith("note: group 'new' does not exist; it is created\n")
        ran = run("group", "reset-offsets", "new", "--topic", "a:0", "--to-offset", "5", "--execute")
        assert (ran.code, ran.err) == (0, "note: group 'new' did not exist\n1 offset of group new set\n")
        assert server.groups.groups["new"].offsets[A0].offset == 5

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--topic", "a"], "give exactly one of --to-earliest"),
            (["--topic", "a", "--to-earliest", "--to-latest"], "give exactly one of --to-earliest"),
            (["--to-earliest"], "say which partitions"),
            (["--to-earliest", "--topic", "a", "--all-topics"], "say which partitions"),
            (["--to-earliest", "--topic", "a:x"], "TOPIC:0,1"),
            (["--topic", "a", "--to-datetime", "noon"], "'noon' is not a time"),
            (["--topic", "a", "--by-duration", "long"], "'long' is not a duration"),
            (["--topic", "a", "--from-file", "PLAN"], "leave --topic and --all-topics out"),
        ],
    )
    def test_a_wrong_command_line(self, run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
        (tmp_path / "PLAN").write_text("a,0,1\n")
        given = [str(tmp_path / each) if each == "PLAN" else each for each in arguments]
        ran = run("group", "reset-offsets", "g", *given)
        assert ran.code == 2
        assert message in ran.err

    def test_what_cannot_be_done_is_said(self, server: FakeCluster, run: Run, tmp_path: Path) -> None:
        def refused(*arguments: str) -> str:
            ran = run("group", "reset-offsets", "g", *arguments, "--execute")
            assert ran.code == 1
            return ran.err

        assert refused("--all-topics", "--to-latest") == "error: there is no group 'g'\n"
        server.groups.add("g", 1)
        assert "group g has committed nothing; name topics" in refused("--all-topics", "--to-latest")
        del server.groups.groups["g"]
        assert "has no partition 9; it has 2, from 0" in refused("--topic", "a:0,9", "--to-latest")
        assert "there is no topic 'c'" in refused("--topic", "c", "--to-latest")
        assert "committed nothing for a-0" in refused("--topic", "a:0", "--shift-by", "1")
        (tmp_path / "plan").write_text("a,7,1\n")
        assert "topic a has no partition 7" in refused("--from-file", str(tmp_path / "plan"))
        assert not server.groups.groups


def test_a_state_of_a_later_version_is_shown() -> None:
    assert state_name(group_pb2.RECONCILING) == "reconciling"
    assert state_name(99) == "unknown"  # type: ignore[arg-type] # from a newer server
