"""Histories out of what workloads, containers and clusters note."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from raftlog.testing import Cluster
from tests.chaos.operations import Operation as Recorded
from tests.support import append_checker, group_checker
from tests.support.append_checker import Append
from tests.support.group_checker import Observation
from tests.support.history import timeline, verdict
from tests.support.history.availability import no_majority
from tests.support.history.containers import drawn, of_run
from tests.support.history.model import Condition, Operation, Window
from tests.support.history.recorder import Recorder, RoleWatch, WatchedCluster

NODES = (1, 2, 3)


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
    monkeypatch.setattr(timeline, "DIRECTORY", tmp_path / "drawings")
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
    assert "2 × UNAVAILABLE" in (drawings / "pause.txt").read_text()
    with Recorder(WatchedCluster(3), None, 8.0, lambda: operations, title="short pause"):
        pass
    assert "sound" in (drawings / "short-pause.txt").read_text()


def test_what_fails_is_drawn_and_fails_on(drawings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Recorder(WatchedCluster(3), None, 5.0, title="broken") as notes,
        notes.fault("division", 2),
    ):
        raise ZeroDivisionError("by zero")
    drawing = (drawings / "broken.txt").read_text()
    assert "ZeroDivisionError: by zero" in drawing
    assert "division (2)" in drawing
    assert f"timeline: {drawings / 'broken.txt'}" in capsys.readouterr().out


def test_a_run_on_containers_is_drawn_however_it_ends(drawings: Path) -> None:
    recorded = [Recorded("fault", "Pause leader", 1.0, 2.0, "ok", 2)]
    with pytest.raises(ZeroDivisionError), drawn(
        "containers", NODES, NODES, RoleWatch("127.0.0.1:1", "t"), lambda: recorded,
        lambda: [Operation("p", "send", 1.0, 1.5, "ok", 0)],
    ):  # fmt: skip
        raise ZeroDivisionError("by zero")
    drawing = (drawings / "containers.txt").read_text()
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
