"""`raftlog cluster rebalance` against the real services: what is shown, what is begun, and what is left behind."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import raftlog
from raftlog._core.descriptions import Reassignment
from raftlog.cli.partitions.moving import MOST_SHOWN
from raftlog.errors import NotController, PolicyViolation
from raftlog.types import TopicPartition
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import broker_epoch, delete_topic, unfence
from tests.support.moves import (
    ON_THREE,
    catch_up,
    interrupt_at_look,
    placed,
    replicas_on,
    settle,
    stop,
    throttles,
    topic_on,
)
from tests.support.pauses import instead_of_sleeping

# A plan to look at


def test_a_plan_is_shown_and_nothing_is_changed(server: AdminServer, run: Run) -> None:
    ran = run("cluster", "rebalance")
    assert ran.code == 0
    moves, loads, words = ran.out.split("\n\n")
    assert moves.splitlines()[0] == "topic\tpartition\treplicas\twanted\tadding\tsize"
    assert len(moves.splitlines()) == 4, "three of twelve replicas must move to the new broker"
    by_broker = {row[0]: row for row in (line.split("\t") for line in loads.splitlines()[1:])}
    assert {each: (row[3], row[4]) for each, row in by_broker.items()} == {
        "1": ("4", "3"),
        "2": ("4", "3"),
        "3": ("4", "3"),
        "4": ("0", "3"),
    }
    assert all(row[6] == "1" for row in by_broker.values()), "each broker must be the preferred leader of one partition"
    assert words == "3 partitions to move, 0 B to copy\n"
    assert "nothing was changed; --execute carries out the plan" in ran.err
    assert placed(server) == [tuple(each) for each in ON_THREE]


def test_a_plan_as_json_is_one_that_reassign_takes(server: AdminServer, run: Run, tmp_path: Path) -> None:
    ran = run("cluster", "rebalance", "-o", "json")
    assert len(ran.json["partitions"]) == 3
    plan = tmp_path / "plan.json"
    plan.write_text(ran.out)
    assert run("partition", "reassign", "--plan", str(plan)).code == 0
    catch_up(server)
    assert [replicas_on(server, each) for each in (1, 2, 3, 4)] == [3, 3, 3, 3]
    again = run("cluster", "rebalance", "-o", "json")
    assert again.json == {"version": 1, "partitions": []}
    assert run("cluster", "rebalance").out == "nothing to do: every partition is in its place\n"


def test_a_cordoned_or_fenced_broker_is_named_and_gets_nothing(server: AdminServer, run: Run) -> None:
    assert run("broker", "cordon", "4").code == 0
    assert run("cluster", "rebalance", "-o", "json").json["partitions"] == []
    assert run("broker", "uncordon", "4").code == 0
    stop(server, 4)
    assert run("cluster", "rebalance", "-o", "json").json["partitions"] == []
    assert run("broker", "drain", "2", "--no-wait").code == 0
    server.propose(topic_on(2, "b", *[[1, 3]] * 3))
    shown = run("cluster", "rebalance")
    assert "\tactive, drained\t" in shown.out
    assert "\tfenced\t" in shown.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", "x.json"), "--plan needs --execute"),
        (("--execute", "--throttle", "0"), "write bytes per second"),
        (("--execute", "--batch", "0"), "--batch"),
    ],
)
def test_a_wrong_command_line_is_told(run: Run, arguments: tuple[str, ...], words: str) -> None:
    ran = run("cluster", "rebalance", *arguments)
    assert ran.code == 2
    assert words in ran.err


# Carrying it out


def test_it_is_carried_out_in_batches_and_leaves_no_throttle(
    server: AdminServer, run: Run, catches_up: list[int]
) -> None:
    ran = run("cluster", "rebalance", "--execute", "--throttle", "2MiB", "--batch", "1")
    assert ran.code == 0, ran.err
    assert catches_up == [1, 1, 1], "the partitions must be moved one at a time"
    settle(server)
    assert [replicas_on(server, each) for each in (1, 2, 3, 4)] == [3, 3, 3, 3]
    for number in range(4):
        part = server.partition("a", number)
        assert part.leader == part.replicas[0]
    assert throttles(server) == []
    assert "0 of 3 moves done" in ran.err
    assert "3 of 3 moves done" in ran.err
    assert ran.out == "3 partitions in place as planned\n"


@pytest.mark.parametrize("writable", [True, False])
def test_a_long_plan_that_undoes_it_is_in_a_file(
    server: AdminServer,
    run: Run,
    catches_up: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writable: bool,
) -> None:
    server.propose(topic_on(2, "b", *ON_THREE * 5))
    before = placed(server, "b")
    monkeypatch.chdir(tmp_path)
    if not writable:
        monkeypatch.setattr(Path, "open", _read_only)
    ran = run("cluster", "rebalance", "--execute")
    assert ran.code == 0, ran.err
    undo = ran.err.split("the plan that undoes it:\n")[1].splitlines()[0]
    if writable:
        assert all(len(line) < MOST_SHOWN for line in ran.err.splitlines())
        assert Path(undo).parent == tmp_path
        assert run("cluster", "rebalance", "--execute", "--plan", undo).code == 0
        assert placed(server, "b") == before
    else:
        assert len(json.loads(undo)["partitions"]) > 5


def _read_only(*_: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_it_is_held_back_while_it_goes_on(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def sleep(seconds: float) -> None:
        seen.extend(throttles(server))
        catch_up(server)

    instead_of_sleeping(monkeypatch, sleep)
    assert run("cluster", "rebalance", "--execute", "--throttle", "2MiB").code == 0
    assert seen == ["1", "2", "3", "4", "a"]
    assert throttles(server) == []


def test_after_ctrl_c_the_same_command_goes_on(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at_look(monkeypatch, 2, lambda: catch_up(server))
    command = ("cluster", "rebalance", "--execute", "--batch", "1", "--throttle", "1MiB")
    ran = run(*command)
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == (
        "2 of 3 moves are not done; 1 of them continues, 1 has not begun; the same command continues, and removes "
        "the throttle in the end"
    )
    assert len(throttles(server)) > 0
    instead_of_sleeping(monkeypatch, lambda seconds: catch_up(server))
    again = run(*command)
    assert again.code == 0, again.err
    assert "1 partition is moving already\n1 partition to move" in again.err
    assert [replicas_on(server, each) for each in (1, 2, 3, 4)] == [3, 3, 3, 3]
    assert throttles(server) == []


def test_a_plan_that_was_looked_at_is_resumed_with_what_is_under_way(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(run("cluster", "rebalance", "-o", "json").out)
    wanted = {each["partition"]: tuple(each["replicas"]) for each in json.loads(plan.read_text())["partitions"]}
    interrupt_at_look(monkeypatch, 2, lambda: catch_up(server))
    assert run("cluster", "rebalance", "--execute", "--plan", str(plan), "--batch", "1").code == 130
    instead_of_sleeping(monkeypatch, lambda seconds: catch_up(server))
    again = run("cluster", "rebalance", "--execute", "--plan", str(plan), "-o", "json")
    assert again.code == 0, again.err
    assert {number: placed(server)[number] for number in wanted} == wanted
    assert run("cluster", "rebalance", "--execute", "--plan", str(plan)).code == 0, (
        "the command must succeed when nothing is left to move"
    )


def test_what_is_under_way_already_is_seen_through(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All had begun before Ctrl-C: there is nothing to plan, and still something to wait for and to hold back."""
    interrupt_at_look(monkeypatch, 1, lambda: None)
    assert run("cluster", "rebalance", "--execute").code == 130
    held_back: list[str] = []

    def sleep(seconds: float) -> None:
        held_back.append(server.image.topic_configs("a")["follower.replication.throttled.replicas"])
        catch_up(server)

    instead_of_sleeping(monkeypatch, sleep)
    again = run("cluster", "rebalance", "--execute", "--throttle", "2MiB")
    assert again.code == 0, again.err
    assert held_back == ["0:4,1:4,2:4"]
    assert not any(server.partition("a", number).adding_replicas for number in range(4))
    assert throttles(server) == []


def test_the_throttle_is_taken_off_also_when_all_came_to_its_end_meanwhile(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at_look(monkeypatch, 1, lambda: None)
    command = ("cluster", "rebalance", "--execute", "--throttle", "1MiB")
    assert run(*command).code == 130
    catch_up(server)
    assert throttles(server) == ["1", "2", "3", "4", "a"]
    again = run(*command)
    assert (again.code, again.out) == (0, "nothing to do: every partition is in its place\n")
    assert throttles(server) == []


def test_a_throttle_that_nobody_takes_off_is_told_of(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch, catches_up: list[int]
) -> None:
    command = ("cluster", "rebalance", "--execute")
    with monkeypatch.context() as refused:
        refused.setattr(raftlog.Admin, "alter_reassignments", _refuse)
        ran = run(*command, "--throttle", "1MiB")
    assert ran.code == 1
    assert "the throttle is still on; the same command continues, and removes the throttle in the end" in ran.err
    again = run(*command)
    assert again.code == 0
    assert "note: an earlier throttle is still on (a); raftlog cluster rebalance" in again.err
    assert "note: an earlier throttle is still on (a)" in run(*command).err, (
        "the note about the throttle must be printed even when nothing is to be moved"
    )
    assert run(*command, "--throttle", "1MiB").code == 0
    assert throttles(server) == []
    assert "throttle" not in run(*command).err


def _refuse(admin: raftlog.Admin, wanted: Mapping[TopicPartition, Sequence[int] | None]) -> None:
    raise PolicyViolation("not now")


def test_a_topic_that_is_deleted_meanwhile_is_left_out(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.propose(topic_on(2, "b", [1, 2, 3], [2, 3, 1]))

    def sleep(seconds: float) -> None:
        catch_up(server)
        if server.image.topic("b") is not None:
            server.propose(delete_topic("b"))

    instead_of_sleeping(monkeypatch, sleep)
    ran = run("cluster", "rebalance", "--execute", "--batch", "1")
    assert ran.code == 0, ran.err
    assert "waiting" not in ran.err


def test_when_the_time_is_up_what_has_begun_goes_on(server: AdminServer, run: Run) -> None:
    ran = run("cluster", "rebalance", "--execute", "--batch", "2", "--timeout", "0")
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith(
        "error: after 0 s 3 of 3 moves are not done; 2 of them continue, 1 has not"
    )
    assert sum(bool(server.partition("a", number).adding_replicas) for number in range(4)) == 2


def test_what_holds_it_up_is_told_once_and_waited_out(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is unreachable for a while, then the new broker dies and comes back."""
    refusals = [NotController("no controller answers")] * 3
    begin = raftlog.Admin.alter_reassignments
    looks: list[float] = []

    def refuse(admin: raftlog.Admin, wanted: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        if refusals:
            raise refusals.pop()
        begin(admin, wanted)

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 4:
            stop(server, 4)
        elif len(looks) == 7:
            server.propose(unfence(4, broker_epoch(server.image, 4)))
        elif len(looks) > 7:
            catch_up(server)

    monkeypatch.setattr(raftlog.Admin, "alter_reassignments", refuse)
    instead_of_sleeping(monkeypatch, sleep)
    ran = run("cluster", "rebalance", "--execute")
    assert ran.code == 0, ran.err
    assert ran.err.count("waiting: no controller answers\n") == 1
    assert (
        ran.err.count("waiting: broker 4 is down or has no working log for a-0 and 2 more, which should move there; ")
        == 1
    )
    assert [replicas_on(server, each) for each in (1, 2, 3, 4)] == [3, 3, 3, 3]


def test_a_plan_of_what_is_gone_is_refused(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "partitions": [{"topic": "b", "partition": 0, "replicas": [1]}]}')
    ran = run("cluster", "rebalance", "--execute", "--plan", str(plan))
    assert (ran.code, ran.err) == (1, "error: b-0 does not exist; make a new plan\n")


def test_another_order_alone_is_done_at_once(server: AdminServer, run: Run, catches_up: list[int]) -> None:
    server.propose(topic_on(2, "b", *[[1, 2, 3]] * 5))
    assert run("broker", "cordon", "4").code == 0
    ran = run("cluster", "rebalance", "--execute", "--batch", "1")
    assert ran.code == 0, ran.err
    assert "0 partitions to move, 0 B to copy; 4 partitions with another order only" in ran.err
    assert catches_up == []
    settle(server)
    leaders = [part.leader for topic in server.image.topics.values() for part in topic.partitions]
    assert sorted(leaders) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_what_begins_to_move_after_the_look_is_left_to_whoever_began_it(
    server: AdminServer, run: Run, catches_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = raftlog.Admin.list_reassignments
    just_made = {TopicPartition("new", 0): Reassignment([1, 2, 4], [4], [3])}

    def with_a_new_topic(admin: raftlog.Admin) -> dict[TopicPartition, Reassignment]:
        return {**known(admin), **just_made}

    monkeypatch.setattr(raftlog.Admin, "list_reassignments", with_a_new_topic)
    ran = run("cluster", "rebalance", "--execute")
    assert ran.code == 0, ran.err
    assert "new-0" not in ran.err
