"""A plan is carried out some moves at a time, until it is done, cancelled or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

from raftlog._core.descriptions import PartitionDescription, TopicDescription
from raftlog.cli.partitions.moving import Move
from raftlog.console.rebalance import AT_A_TIME, Rebalance
from raftlog.errors import BrokerUnavailable, ClusterAuthorizationFailed, NoReassignmentInProgress, RaftlogError
from raftlog.types import TopicPartition


class Cluster:
    """Partitions of one topic; a move is done when the test says so."""

    def __init__(self, partitions: int) -> None:
        self.replicas = {part: [1] for part in range(partitions)}
        self.moving: dict[int, list[int]] = {}
        self.cordoned: set[int] = set()
        self.fails: RaftlogError | None = None
        self.most = 0

    def describe_topics(self, names: Iterable[str] | None = None, *, internal: bool = False) -> list[TopicDescription]:
        if self.fails is not None:
            raise self.fails
        parts = []
        for part, replicas in self.replicas.items():
            goal = self.moving.get(part, replicas)
            adding = [each for each in goal if each not in replicas]
            removing = [each for each in replicas if each not in goal] if part in self.moving else []
            shown = [*goal, *removing]
            parts.append(PartitionDescription(part, replicas[0], 0, shown, replicas, [], adding, removing, [], []))
        return [TopicDescription("t", b"", False, parts)]

    def alter_reassignments(self, wanted: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        for part, replicas in wanted.items():
            if replicas is None:
                del self.moving[part.partition]
            else:
                self.moving[part.partition] = list(replicas)
        self.most = max(self.most, len(self.moving))

    def alter_broker(self, broker_id: int, *, cordoned: bool) -> None:
        self.cordoned.add(broker_id)

    def elect_leaders(self, topic: str, partitions: Iterable[int] = ()) -> None:
        raise AssertionError("leaders were elected, though every first replica leads already")

    def finish(self, count: int) -> None:
        for part in list(self.moving)[:count]:
            self.replicas[part] = self.moving.pop(part)


def rebalance(cluster: Cluster, leaving: int | None = None) -> Rebalance:
    moves = [Move(TopicPartition("t", part), (2,)) for part in cluster.replicas]
    return Rebalance(cluster, moves, leaving)  # type: ignore[arg-type] # a stand-in for the admin client


def test_so_many_moves_at_a_time_until_all_are_done() -> None:
    cluster = Cluster(50)
    made = rebalance(cluster, leaving=1)
    assert made.step()[:5] == ("running", 50, 0, AT_A_TIME, 30)
    assert cluster.cordoned == {1}, "the broker that leaves must be cordoned, so that it gets no new replicas"
    cluster.finish(5)
    assert made.step()[:5] == ("running", 50, 5, AT_A_TIME, 25)
    while made.progress.runs:
        cluster.finish(7)
        made.step()
    assert made.progress[:5] == ("done", 50, 50, 0, 0)
    assert cluster.most == AT_A_TIME
    assert set(map(tuple, cluster.replicas.values())) == {(2,)}


def test_cancelling_ends_what_is_under_way_and_keeps_what_is_done() -> None:
    cluster = Cluster(30)
    made = rebalance(cluster)
    made.step()
    cluster.finish(4)
    made.cancel()
    assert made.progress.state == "cancelling"
    assert made.step() == ("cancelled", 30, 4, 0, 0, 26, "")
    assert cluster.moving == {}
    assert sum(replicas == [2] for replicas in cluster.replicas.values()) == 4


def test_a_move_that_ends_while_it_is_cancelled_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2)
    made = rebalance(cluster)
    made.step()

    def ended(wanted: object) -> None:
        raise NoReassignmentInProgress("t-1 is not being moved; 1 of 2 was refused")

    monkeypatch.setattr(cluster, "alter_reassignments", ended)
    made.cancel()
    assert made.step().state == "cancelled"


def test_a_move_that_others_cancel_is_not_begun_again() -> None:
    cluster = Cluster(2)
    made = rebalance(cluster)
    made.step()
    del cluster.moving[1]
    cluster.finish(1)
    assert made.step() == ("done", 2, 1, 0, 0, 1, "")


@pytest.mark.parametrize(
    ("error", "state"), [(BrokerUnavailable("gone"), "running"), (ClusterAuthorizationFailed("no"), "failed")]
)
def test_silence_is_waited_out_and_a_refusal_ends_it(error: RaftlogError, state: str) -> None:
    cluster = Cluster(1)
    made = rebalance(cluster)
    cluster.fails = error
    progress = made.step()
    assert (progress.state, progress.waits) == (state, str(error))
    cluster.fails = None
    if progress.runs:
        assert made.step()[3:] == (1, 0, 0, "")


def test_a_refused_rebalance_leaves_no_throttle_on(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled: list[bool] = []
    monkeypatch.setattr("raftlog.console.rebalance.put_on", lambda *_: throttled.append(True))
    monkeypatch.setattr("raftlog.console.rebalance.take_off_forgotten", lambda _: throttled.append(False))
    cluster = Cluster(1)

    def refuse(wanted: object) -> None:
        raise ClusterAuthorizationFailed("no")

    monkeypatch.setattr(cluster, "alter_reassignments", refuse)
    made = Rebalance(cluster, [Move(TopicPartition("t", 0), (2,))], rate=1_000)  # type: ignore[arg-type] # as above
    assert made.step().state == "failed"
    assert throttled == [True, False]
