"""Histories out of what workloads, containers and clusters note."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from raftlog.testing import Cluster
from tests.chaos.operations import Operation as Recorded
from tests.support import append_checker, group_checker
from tests.support.append_checker import Append, Entry, Poll
from tests.support.group_checker import Commit, Given, Observation, Span
from tests.support.history import artifacts, verdict
from tests.support.history.availability import no_majority
from tests.support.history.containers import drawn, of_run
from tests.support.history.model import Condition, Operation, Window
from tests.support.history.recorder import Recorder, RoleWatch, WatchedCluster
from tests.support.history.workloads import commits, handed, observations, of_calls, polls, rows, sends
from tests.support.linearizability import Operation as Call

NODES = (1, 2, 3)


def test_sends_and_polls() -> None:
    appends = [Append(1, 0, 2, b"a", 1.0, 2.0, 7), Append(1, 1, 0, b"b", 3.0), Append(1, 2, 0, b"c", 3.0, 4.0)]
    found = list(sends(appends, "producer-1"))
    assert [(each.outcome, each.end_s, each.partition) for each in found] == [
        ("ok", 2.0, 2), ("unknown", None, 0), ("unknown", 4.0, 0)
    ]  # fmt: skip
    assert found[0].about == "a at 2:7"
    noted = [Poll(3, 0, (Entry(5, b"a"),), 1.0, 1.5), Poll(3, 0, (Entry(6, b"b"),))]
    assert list(polls(noted)) == [Operation("consumer-3", "poll", 1.0, 1.5, "ok", 0, about="1 records of 0 from 5 on")]


def test_what_a_group_does() -> None:
    span = Span("member-1/abc", 4, 1, 2, 0.0, [Given(1.0, 1.2, (7, 8))])
    assert list(handed([span])) == [Operation("member-1", "poll", 1.0, 1.2, "ok", 4, about="2 records of 4 from 7 on")]
    (commit,) = commits([Commit("member-1/abc", 2, 4, 9, 1.3, 1.4)])
    assert (commit.client, commit.kind, commit.partition, commit.end_s) == ("member-1", "commit", 4, 1.4)
    (told,) = observations([Observation(0, 1, 2.0, 2.1), Observation(1, 5, 2.0, 2.1)])
    assert told.about == "committed: {0: 1, 1: 5}"


def test_bulk_writes_are_noted_in_rows() -> None:
    sent = [number / 1_000 for number in range(100)]
    answered = [each + 0.5 for each in sent[:90]]
    found = list(rows("writer-1", 0, sent, answered))
    assert sum(each.count for each in found if each.outcome == "ok") == 90
    assert 2 <= len([each for each in found if each.outcome == "ok"]) <= 4
    assert found[-1].outcome == "unknown"
    assert (found[-1].begin_s, found[-1].end_s, found[-1].count) == (sent[90], None, 10)
    assert found[0].begin_s == sent[0]
    assert found[-2].end_s == answered[-1]
    assert list(rows("writer-1", 0, [], [])) == []


def test_calls_without_an_answer_end_with_the_next_one() -> None:
    calls = [
        ("t", Call(0, 1.0, 2.0, ("read",), None)),
        ("t", Call(0, 3.0, None, ("delete",))),
        ("t", Call(1, 3.5, 3.6, ("set", "1"), "refused")),
        ("t", Call(0, 6.0, None, ("delete",))),
    ]
    found = sorted(of_calls(calls), key=lambda each: each.begin_s)
    assert [(each.client, each.end_s, each.outcome) for each in found] == [
        ("client-0", 2.0, "ok"),
        ("client-0", 6.0, "unknown"),
        ("client-1", 3.6, "failed"),
        ("client-0", None, "unknown"),
    ]


def test_checkers_of_logs_and_groups_are_asked() -> None:
    lost = append_checker.History([Append(1, 0, 0, b"a", 1.0, 2.0, 0)], [], {1: {0: []}})
    assert [each.name for each in verdict.of_logs(lost)] == ["LOST"]
    back = group_checker.History({0: 0}, [], [], [Observation(0, 5, 1.0, 2.0), Observation(0, 3, 4.0, 5.0)])
    problems = verdict.of_groups(back)
    assert "WENT_BACK" in {each.name for each in problems}
    assert "1 × WENT_BACK" in verdict.summary(problems)
    assert "1 x WENT_BACK: a committed offset went back\n    partition 0: 5, observed" in verdict.describe(problems)


@pytest.mark.parametrize(
    ("fault", "cut"),
    [
        ("Isolate leader", {(1, 2), (2, 1), (1, 3), (3, 1)}),
        ("Disconnect leader", {(1, 2), (2, 1), (1, 3), (3, 1)}),
        ("Mute leader", {(1, 2), (1, 3)}),
        ("Deafen leader", {(2, 1), (3, 1)}),
        ("Bridge leader", {(1, 2), (2, 1)}),
        ("Shatter leader", {(1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2)}),
        ("Kill leader", set()),
        ("Isolate leader + ClockShift leader +600 s", {(1, 2), (2, 1), (1, 3), (3, 1)}),
    ],
)
def test_links_that_faults_of_containers_cut(fault: str, cut: set[tuple[int, int]]) -> None:
    history = of_run("t", [Recorded("fault", fault, 1.0, 2.0, "ok", 1)], NODES, NODES, 5.0)
    assert {(each.sender, each.receiver) for each in history.cuts} == cut
    assert no_majority(history) == ([Window(1.0, 2.0)] if fault.startswith("Shatter") else [])


@pytest.mark.parametrize(
    ("fault", "ill"),
    [("Kill leader", "dead"), ("Pause leader", "paused"), ("SlowLink leader 1mbit", "hampered"), ("Mute leader", None)],
)
def test_what_faults_of_containers_do_to_their_victim(fault: str, ill: str | None) -> None:
    history = of_run("t", [Recorded("fault", fault, 1.0, 2.0, "ok", 2)], NODES, NODES, 5.0)
    assert [(each.ill, each.node) for each in history.conditions] == ([(ill, 2)] if ill else [])
    assert history.faults[0].targets == (2,)


def test_operations_of_containers() -> None:
    recorded = [
        Recorded("append", "producer-1", 1.0, 2.0, "ok", partition=2, detail="a 7"),
        Recorded("transaction", "t-1", 1.0, 2.0, "failed"),
        Recorded("something else", "x", 1.0, None, "unknown"),
    ]
    history = of_run("t", recorded, NODES, NODES, 5.0)
    assert [(each.kind, each.outcome) for each in history.operations] == [
        ("send", "ok"), ("transaction", "failed"), ("admin", "unknown")
    ]  # fmt: skip
    assert history.extent == Window(1.0, 5.0)


def test_a_watched_cluster_notes_what_is_done_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does to servers is left out: this is about the notes."""
    for name in ("kill", "stop", "start", "start_all", "pause", "resume", "partition", "heal"):
        monkeypatch.setattr(Cluster, name, lambda self, *args, **more: None)
    cluster = WatchedCluster(3, can_be_partitioned=True)
    cluster.kill(1)
    cluster.pause(2)
    assert open_ones(cluster.conditions) == [(1, "dead"), (2, "paused")]
    cluster.start(1)
    assert open_ones(cluster.conditions) == [(2, "paused")]
    cluster.resume(2)
    cluster.stop(3)
    assert open_ones(cluster.conditions) == [(3, "dead")]
    cluster.start_all()
    assert open_ones(cluster.conditions) == []
    assert len(cluster.conditions) == 3
    cluster.partition([1], (other for other in (2, 3)))
    cluster.partition([2], [3], one_way=True)
    assert {(each.sender, each.receiver) for each in cluster.cuts} == {(1, 2), (2, 1), (1, 3), (3, 1), (2, 3)}
    assert all(each.end_s is None for each in cluster.cuts)
    cluster.heal()
    assert all(each.end_s is not None for each in cluster.cuts)


@pytest.fixture
def drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where drawings of this test go."""
    monkeypatch.setattr(artifacts, "DIRECTORY", tmp_path / "drawings")
    monkeypatch.setattr(Cluster, "bootstrap", property(lambda self: "127.0.0.1:1"))
    return tmp_path / "drawings"


def test_a_pause_that_is_too_long_fails_and_is_drawn(drawings: Path) -> None:
    operations = [Operation("p", "send", 0.0, 1.0, "ok", 0), Operation("p", "send", 2.0, 9.0, "ok", 0)]
    with (
        pytest.raises(AssertionError, match="UNAVAILABLE: writes paused for longer than promised"),
        Recorder(WatchedCluster(3), None, 5.0, lambda: operations, title="pause") as notes,
        notes.fault("nothing", 1),
    ):
        pass
    assert "2 × UNAVAILABLE" in (drawings / "pause.svg").read_text()
    with Recorder(WatchedCluster(3), None, 8.0, lambda: operations, title="short pause"):
        pass
    assert "sound" in (drawings / "short-pause.svg").read_text()


def test_what_fails_is_drawn_and_fails_on(drawings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Recorder(WatchedCluster(3), None, 5.0, title="broken") as notes,
        notes.fault("division", 2),
    ):
        raise ZeroDivisionError("by zero")
    drawing = (drawings / "broken.svg").read_text()
    assert "ZeroDivisionError: by zero" in drawing
    assert "division (2)" in drawing
    assert f"timeline: {drawings / 'broken.svg'}" in capsys.readouterr().out


def test_a_run_on_containers_is_drawn_however_it_ends(drawings: Path) -> None:
    recorded = [Recorded("fault", "Pause leader", 1.0, 2.0, "ok", 2)]
    with pytest.raises(ZeroDivisionError), drawn(
        "containers", NODES, NODES, RoleWatch("127.0.0.1:1", "t"), lambda: recorded,
        lambda: [Operation("p", "send", 1.0, 1.5, "ok", 0)],
    ):  # fmt: skip
        raise ZeroDivisionError("by zero")
    drawing = (drawings / "containers.svg").read_text()
    assert "node 2 paused" in drawing
    assert "by zero" in drawing


def open_ones(conditions: Iterable[Condition]) -> list[tuple[int, str]]:
    return [(each.node, each.ill) for each in conditions if each.end_s is None]


def test_who_led_when() -> None:
    watch = RoleWatch("127.0.0.1:1", "t")
    watch.note({None: 1, 0: 2}, 1.0)
    watch.note({None: 1, 0: 2}, 2.0)
    watch.note({None: 1, 0: 3}, 3.0)
    watch.note({}, 9.0)
    watch.note({0: 3}, 10.0)
    assert {(each.node, each.partition, each.begin_s, each.end_s) for each in watch.reigns} == {
        (1, None, 1.0, 3.0), (2, 0, 1.0, 3.0), (3, 0, 3.0, 3.0), (3, 0, 10.0, 10.0)
    }  # fmt: skip
