"""`raftlog group ...`, `raftlog consume --group` and the admin client on groups, against three real servers."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raftlog
from raftlog import OffsetAndMetadata, TopicPartition
from raftlog.errors import (
    GroupIdNotFound,
    GroupSubscribedToTopic,
    InvalidGroupId,
    NonEmptyGroup,
    OffsetMetadataTooLarge,
    UnknownTopicOrPartition,
)
from raftlog.testing import Cluster
from tests.support import patience
from tests.support.command_line import run_here
from tests.support.steady import PATIENT
from tests.support.up_to_date import heard_everywhere

RECORDS = 300
PARTITIONS = 3
WAIT_S = 90.0
SESSION_MS = 600_000
"""A member that does not leave is missed only after this; no test here waits for it."""
IDLE_S = 12
"""How long members wait for records; they join within this."""
NAMED_WITHIN_S = 30.0
REQUEST_MS = 600_000


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT, group_consumer_session_timeout_ms=SESSION_MS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(three: Cluster) -> Iterator[raftlog.Admin]:
    with raftlog.Admin(three.bootstrap) as admin:
        yield admin


@pytest.fixture
def topic(three: Cluster, admin: raftlog.Admin, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, with records 0 to 299 in turn in its three partitions."""
    name: str = request.node.name.removeprefix("test_").split("[")[0][:80]
    admin.create_topic(name, PARTITIONS, 3)
    heard_everywhere(three)
    fill(three, name, range(RECORDS))
    return name


def fill(cluster: Cluster, topic: str, numbers: Sequence[int]) -> None:
    with raftlog.Producer(cluster.bootstrap) as producer:
        for number in numbers:
            producer.send(topic, str(number).encode(), partition=number % PARTITIONS)


def command(cluster: Cluster, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "raftlog", *arguments, "--bootstrap", cluster.bootstrap]


def run(cluster: Cluster, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    ran = run_here(*arguments, "--bootstrap", cluster.bootstrap)
    assert ran.returncode == code, ran.stderr
    return ran


def consume(cluster: Cluster, topic: str, *arguments: str) -> list[int]:
    """Return the records that a member reads before it leaves the group."""
    ran = run(cluster, "consume", topic, *arguments)
    with raftlog.Admin(cluster.bootstrap) as admin:
        until_empty(admin, arguments[arguments.index("--group") + 1])
    return [int(line) for line in ran.stdout.split()]


def described(cluster: Cluster, group: str) -> Mapping[str, Any]:
    [found] = json.loads(run(cluster, "group", "describe", group, "-o", "json").stdout)
    assert isinstance(found, dict)
    return found


until = partial(patience.until, within_s=WAIT_S, pause_s=0.1)


def until_empty(admin: raftlog.Admin, group: str) -> None:
    """Wait until the group has no members, for much less than a session timeout."""
    until(lambda: admin.describe_group(group).members == [], "they have left, nobody waits for their sessions to end")


def _has_printed(member: Member, count: int) -> bool:
    return len(member.values) == count


class Member:
    """`raftlog consume --group` in a process of its own, its output in files."""

    def __init__(self, cluster: Cluster, directory: Path, name: str, *arguments: str) -> None:
        self._out, self._err = directory / f"{name}.out", directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(command(cluster, "consume", *arguments), stdout=out, stderr=err)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Press Ctrl-C, if it runs still; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(2)
        return self.process.wait(WAIT_S)

    @property
    def values(self) -> list[int]:
        return [int(line) for line in self._out.read_text().splitlines()]

    @property
    def said(self) -> str:
        return self._err.read_text()


def test_who_comes_next_goes_on_where_the_group_was(three: Cluster, topic: str) -> None:
    group = ("--group", f"{topic}-g", "--no-follow", "--from-beginning")
    first = consume(three, topic, *group, "--max", "40")
    assert len(first) == 40
    found = described(three, f"{topic}-g")
    assert (found["state"], found["members"]) == ("empty", [])
    assert sum(part["offset"] for part in found["partitions"]) == 40
    rest = consume(three, topic, *group)
    assert sorted(first + rest) == list(range(RECORDS))
    assert consume(three, topic, *group) == []
    began = time.time()
    fill(three, topic, range(RECORDS, RECORDS + 6))
    lags = described(three, f"{topic}-g")["partitions"]
    assert [part["lag"] for part in lags] == [2, 2, 2]
    assert all(0 < part["lag_seconds"] <= time.time() - began + 1 for part in lags)
    assert sorted(consume(three, topic, *group)) == list(range(RECORDS, RECORDS + 6))
    assert [(part["lag"], part["lag_seconds"]) for part in described(three, f"{topic}-g")["partitions"]] == [(0, 0)] * 3


def test_a_new_group_begins_at_the_end_unless_it_is_told_otherwise(
    three: Cluster, admin: raftlog.Admin, topic: str, tmp_path: Path
) -> None:
    group = f"{topic}-g"
    with Member(three, tmp_path, "new", topic, "--group", group) as member:
        until(lambda: len(admin.group_offsets(group)) == PARTITIONS, "a place in every partition")
        until(lambda: group in run(three, "group", "list", "--state", "stable").stdout, "it is stable")
        assert member.stop() == 130
        assert member.values == []
    until_empty(admin, group)
    fill(three, topic, [RECORDS])
    assert consume(three, topic, "--group", group, "--no-follow") == [RECORDS], (
        "the member had committed its position before the first record, so the group must start there"
    )
    assert consume(three, topic, "--group", group, "--no-follow") == []


def test_two_groups_get_everything_each(three: Cluster, topic: str) -> None:
    for group in ("one", "two"):
        assert sorted(consume(three, topic, "--group", group, "--no-follow", "--from-beginning")) == list(
            range(RECORDS)
        )


def test_members_share_and_the_idle_one_says_so(
    three: Cluster, admin: raftlog.Admin, topic: str, tmp_path: Path
) -> None:
    group = f"{topic}-g"
    arguments = (topic, "--group", group, "--from-beginning")
    with (
        Member(three, tmp_path, "1", *arguments) as one,
        Member(three, tmp_path, "2", *arguments) as two,
        Member(three, tmp_path, "3", *arguments) as three_,
        Member(three, tmp_path, "4", *arguments) as four,
    ):
        members = (one, two, three_, four)

        def shared() -> bool:
            if group not in [each.group_id for each in admin.list_groups(["stable"])]:
                return False
            return sorted(len(member.assigned) for member in admin.describe_group(group).members) == [0, 1, 1, 1]

        until(shared, "one partition for each of three members")
        fill(three, topic, range(RECORDS, 2 * RECORDS))
        until(
            lambda: {value for member in members for value in member.values} == set(range(2 * RECORDS)),
            "everything printed",
        )
        values = [value for member in members for value in member.values if value >= RECORDS]
        assert sorted(values) == list(range(RECORDS, 2 * RECORDS)), (
            "the new records must be printed once each, as no partition moved meanwhile"
        )
        until(lambda: "more members than partitions" in "".join(member.said for member in members), "the note")
        [row] = [
            line.split("\t")
            for line in run(three, "group", "describe", group).stdout.splitlines()
            if line.split("\t")[1:3] == ["-", "-"]
        ]
        assert row[8] != "-", "the row of the member without partitions must name its host"

        def all_are_there() -> bool:
            table = run(three, "group", "members", group)
            return table.stdout.count("true") == 4 and "stable, 4 members, assignor sticky" in table.stderr

        until(all_are_there, "four are connected")

        refused = run(three, "group", "reset-offsets", group, "--all-topics", "--to-earliest", "--execute", code=1)
        assert f"error: group {group} has 4 members, stop them first: " in refused.stderr
        assert (
            f"error: not deleted: the group '{group}' has 4 members"
            in run(three, "group", "delete", group, code=1).stderr
        )
        assert "its offsets stay" in run(three, "group", "delete-offsets", group, "--topic", topic, code=1).stderr
        assert [member.stop() for member in members] == [130] * 4
    until_empty(admin, group)
    assert described(three, group)["state"] == "empty"
    assert sum(part["offset"] for part in described(three, group)["partitions"]) == 2 * RECORDS


def test_a_member_that_is_asked_to_end_leaves(three: Cluster, admin: raftlog.Admin, topic: str, tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        group = f"{topic}-{code}"
        with Member(three, tmp_path, group, topic, "--group", group, "--from-beginning") as member:
            until(partial(_has_printed, member, RECORDS), "everything is printed")
            member.process.send_signal(number)
            assert member.process.wait(WAIT_S) == code
            until_empty(admin, group)
            assert member.said == ""


def test_leaders_that_are_out_of_reach_are_named_in_time(
    three: Cluster, admin: raftlog.Admin, topic: str, tmp_path: Path
) -> None:
    """They are waited for since the last record as long as was said, and neither until a request nor a session ends."""
    name = f"{topic}-spread"
    admin.create_topic(name, replica_assignment=[[1], [2], [3]])
    heard_everywhere(three)
    fill(three, name, range(9))
    ways = (
        (("--timeout", f"{IDLE_S}"), IDLE_S),
        (("--timeout", f"{IDLE_S}", "--no-follow"), IDLE_S),
        (("--no-follow",), 10),
    )
    of_coordinator: defaultdict[int, list[str]] = defaultdict(list)
    while max(map(len, of_coordinator.values()), default=0) <= len(ways):
        group = f"{name}-g{sum(map(len, of_coordinator.values()))}"
        admin.alter_group_offsets(group, {TopicPartition(name, number): 0 for number in range(3)})
        of_coordinator[admin.describe_group(group).coordinator_id].append(group)
    coordinator, (idle_group, *groups) = max(of_coordinator.items(), key=lambda found: len(found[1]))
    admin.alter_group_offsets(idle_group, {TopicPartition(topic, number): RECORDS // PARTITIONS for number in range(3)})
    away = next(node for node in three.node_ids if node != coordinator)
    lost = f"{name}-{away - 1}"
    settings = tmp_path / "client.toml"
    settings.write_text(f'"request.timeout.ms" = {REQUEST_MS}\n')
    three.kill(away)
    try:
        three.wait_for(lambda asked: asked.describe_topic(name).partitions[away - 1].leader < 0, what="it is missed")
        with contextlib.ExitStack() as stack:  # all of them wait at the same time
            reads: tuple[str, ...] = (topic, "--group", idle_group, "--timeout", f"{IDLE_S}")
            idle = stack.enter_context(Member(three, tmp_path, idle_group, *reads))
            members = []
            for group, (arguments, _) in zip(groups, ways, strict=True):
                reads = (name, "--group", group, "--client-config", str(settings), *arguments)
                members.append(stack.enter_context(Member(three, tmp_path, group, *reads)))
            for member, (_, limit_s) in zip(members, ways, strict=True):
                until(partial(_has_printed, member, 6), "the others are read")
                assert member.process.wait(limit_s + NAMED_WITHIN_S) == 1
                assert len(member.values) == 6
                last = member.said.splitlines()[-1]
                assert last.startswith(f"error: no record came for {limit_s} s; unreachable leaders")
                assert lost in member.said
            assert (idle.process.wait(WAIT_S), idle.values) == (0, []), (
                "the member whose partitions all have leaders must end without an error"
            )
    finally:
        three.start(away)


def test_offsets_are_set_back_by_count_by_time_and_from_a_file(three: Cluster, topic: str, tmp_path: Path) -> None:
    group = f"{topic}-g"
    reset = ("group", "reset-offsets", group)
    read = (topic, "--group", group, "--no-follow")
    assert len(consume(three, *read, "--from-beginning")) == RECORDS
    saved = tmp_path / "saved.csv"
    run(three, *reset, "--all-topics", "--to-current", "--export", str(saved))
    shown = run(three, *reset, "--all-topics", "--shift-by=-10")
    assert "nothing was changed" in shown.stderr
    assert consume(three, *read) == []
    run(three, *reset, "--all-topics", "--shift-by=-10", "--execute")
    assert sorted(consume(three, *read)) == list(range(RECORDS - 30, RECORDS))
    run(three, *reset, "--topic", f"{topic}:0", "--to-earliest", "--execute")
    assert sorted(consume(three, *read)) == list(range(0, RECORDS, 3))
    run(three, *reset, "--topic", topic, "--by-duration", "1h", "--execute")
    assert len(consume(three, *read)) == RECORDS
    run(three, *reset, "--topic", topic, "--to-datetime", "2999-01-01T00:00:00Z", "--execute")
    assert consume(three, *read) == []
    run(three, *reset, "--topic", topic, "--to-offset", "0", "--execute")
    run(three, *reset, "--from-file", str(saved), "--execute")
    assert consume(three, *read) == []
    run(three, "group", "delete-offsets", group, "--topic", f"{topic}:1")
    assert sorted(consume(three, *read, "--from-beginning")) == list(range(1, RECORDS, 3))
    run(three, "group", "delete", group)
    assert "there is no group" in run(three, "group", "describe", group, code=1).stderr
    assert group not in run(three, "group", "list").stdout


def test_bad_input_is_refused_and_changes_nothing(three: Cluster, admin: raftlog.Admin, topic: str) -> None:
    first = TopicPartition(topic, 0)
    for name in ("", "x" * 300):
        with pytest.raises(InvalidGroupId):
            admin.alter_group_offsets(name, {first: 1})
        assert "1 to 255 characters" in run(three, "group", "describe", name, code=1).stderr
        assert run(three, "consume", topic, "--group", name, code=2).stdout == ""
    with pytest.raises(UnknownTopicOrPartition):
        admin.alter_group_offsets("bad", {TopicPartition(topic, 3): 1})
    with pytest.raises(OffsetMetadataTooLarge):
        admin.alter_group_offsets("bad", {first: OffsetAndMetadata(1, "x" * 5_000)})
    assert admin.group_offsets("bad") == {}
    for call in (admin.describe_group, admin.group_lag):
        with pytest.raises(GroupIdNotFound):
            call("never-heard-of")
    with pytest.raises(GroupIdNotFound):
        admin.delete_groups(["never-heard-of"])
    for contradiction in (("--partition", "0"), ("--offset", "3")):
        wrong = run(three, "consume", topic, "--group", "bad", *contradiction, code=2)
        assert "raftlog group reset-offsets" in " ".join(wrong.stderr.split())
    unknown = run(three, "consume", "no-such-topic", "--group", "bad", code=1)
    assert "no topic 'no-such-topic'" in unknown.stderr


def test_members_keep_their_offsets_from_the_admin_client(three: Cluster, admin: raftlog.Admin, topic: str) -> None:
    group, first = f"{topic}-g", TopicPartition(topic, 0)
    with raftlog.Consumer(three.bootstrap, group_id=group, client_id="someone") as consumer:
        consumer.subscribe(topic)
        consumer.commit({first: OffsetAndMetadata(7, "mine")})
        with pytest.raises(NonEmptyGroup):
            admin.alter_group_offsets(group, {first: 0})
        with pytest.raises(GroupSubscribedToTopic):
            admin.delete_group_offsets(group, [first])
        with pytest.raises(NonEmptyGroup):
            admin.delete_groups([group])
        assert admin.group_offsets(group)[first][:2] == (7, "mine")

        def has_taken_all() -> bool:
            [member] = admin.describe_group(group).members
            return member.connected and len(member.assigned) == PARTITIONS

        until(has_taken_all, "it has told the coordinator that it has what it was given")
        until(lambda: group in [found.group_id for found in admin.list_groups(["stable"])], "it is stable")
        [member] = admin.describe_group(group).members
        assert (member.client_id, member.topics) == ("someone", [topic])
        assert member.assigned == member.target
        assert member.host.count(".") == 3 or ":" in member.host
        lags = admin.group_lag(group)
        assert {lag.member_id for lag in lags.values()} == {member.member_id}
        assert lags[first].lag == RECORDS // PARTITIONS - 7
    until_empty(admin, group)
    admin.alter_group_offsets(group, {first: 0})
    assert admin.group_offsets(group)[first].offset == 0


def test_groups_outlive_their_coordinator(three: Cluster, admin: raftlog.Admin, topic: str) -> None:
    group, first = f"{topic}-g", TopicPartition(topic, 0)
    admin.alter_group_offsets(group, {first: 42})
    former = admin.describe_group(group).coordinator_id
    three.kill(former)
    try:
        assert admin.group_offsets(group)[first].offset == 42
        found = admin.describe_group(group)
        assert found.coordinator_id != former
        admin.alter_group_offsets(group, {first: 43})
        listed = {each.group_id: each.coordinator_id for each in admin.list_groups()}
        assert listed[group] == found.coordinator_id
        assert admin.group_lag(group)[first].offset == 43
        run(three, "group", "describe", group)
    finally:
        three.start(former)


def test_what_the_coordinator_wrote_can_be_read(three: Cluster, admin: raftlog.Admin, topic: str) -> None:
    group, first = f"{topic}-g", TopicPartition(topic, 0)
    admin.alter_group_offsets(group, {first: OffsetAndMetadata(5, "note")})
    found = admin.describe_group(group)
    printed = run(three, "consume", "__consumer_offsets", "-p", str(found.offsets_partition), "--from-beginning",
                  "--no-follow").stdout  # fmt: skip
    shown = [record for record in map(json.loads, printed.splitlines()) if record["key"]["group_id"] == group]
    assert [record["value"]["offset"] for record in shown if "offset" in record["key"]] == [5]
    directory = three.log_dir(found.coordinator_id) / f"__consumer_offsets-{found.offsets_partition}"
    dumped = run_offline("log", "dump", str(directory), "--records", "-o", "json")
    records = [record for line in dumped.splitlines() for batch in json.loads(line)["batches"]
               for record in batch["contents"] if record["key"]["group_id"] == group]  # fmt: skip
    [committed] = [record for record in records if "offset" in record["key"]]
    assert committed["key"]["offset"]["partition"] == 0
    assert (committed["value"]["offset"], committed["value"]["metadata"], committed["value"]["topic"]) == (
        5,
        "note",
        topic,
    )


def run_offline(*arguments: str) -> str:
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
