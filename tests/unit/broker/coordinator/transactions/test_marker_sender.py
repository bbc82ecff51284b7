"""Decisions are sent to every partition and group, whichever broker leads it, until each has confirmed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.coordinator.shard import State
from broker.coordinator.transactions.commands import MarkersWritten, PendingMarkers
from broker.coordinator.transactions.marker_sender import (
    BATCH_MS,
    HOLDS_S,
    MARKER_MS,
    MARKERS_OF_A_TARGET,
    MAX_IN_BATCH,
    MOST_TARGETS,
    Answer,
    LocalMarkers,
    MarkerDispatch,
    MarkerSender,
    Target,
)
from raftlog.errors import CoordinatorNotAvailable, NotEnoughReplicas, NotLeader, RaftlogError
from raftlog.format.control import Marker
from tests.support import virtual_time
from tests.support.logged import lines_of

ME, OTHER, THIRD = 1, 2, 3
TOPIC = bytes(16)
P0, P1, P2 = (TOPIC, 0), (TOPIC, 1), (TOPIC, 2)


class Written:
    """Stands in for a path of markers, local or remote: records them, and answers when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Target, list[Marker], Answer]] = []
        self.refuse_with: list[RaftlogError] = []
        self.answers_at_once = True
        self.flushed = 0

    def take(self, target: Target, markers: Sequence[Marker], answer: Answer) -> None:
        self.calls.append((target, list(markers), answer))
        if self.answers_at_once:
            error = self.refuse_with.pop(0) if self.refuse_with else None
            answer([error] * len(markers))

    # As LocalMarkers

    def write(self, topic_id: bytes, partition: int, markers: Sequence[Marker], answer: Answer) -> None:
        self.take((topic_id, partition), markers, answer)

    def write_group(self, group_id: str, markers: Sequence[Marker], answer: Answer) -> None:
        self.take(group_id, markers, answer)

    @property
    def targets(self) -> list[Target]:
        return [target for target, _, _ in self.calls]


class Links(Written):
    """Stands for MarkerLinks."""

    def __init__(self) -> None:
        super().__init__()
        self.brokers: list[int] = []

    def put(self, broker_id: int, target: Target, markers: Sequence[Marker], answer: Answer) -> None:
        self.brokers.append(broker_id)
        self.take(target, markers, answer)

    def flush(self) -> None:
        self.flushed += 1

    def on_metadata(self, image: object) -> None:
        pass

    async def close(self) -> None:
        pass


class Coordinator:
    """Stands for a shard."""

    def __init__(self, leader_epoch: int = 7) -> None:
        self.leader_epoch = leader_epoch
        self.state = State.ACTIVE
        self.told: list[MarkersWritten] = []

    def tell(self, command: MarkersWritten) -> None:
        self.told.append(command)


class Surroundings:
    """A sender with its surroundings; `leaders`: the leaders in the metadata."""

    def __init__(self) -> None:
        self.leaders: dict[tuple[bytes, int], int] = {P0: ME, P1: OTHER, P2: ME}
        self.group_leaders: dict[str, int] = {"g": ME, "h": OTHER}
        self.local = Written()
        self.links = Links()
        self.coordinator = Coordinator()
        self.charged: dict[str, float] = {}
        """By user, in ms."""
        self.sender = MarkerSender(
            ME,
            lambda: cast(Any, self),
            cast(LocalMarkers, self.local),
            self.links,
            self._group_broker,
            charge=self._charge,
            rng=random.Random(1),
        )
        self.topics: dict[bytes, Any] = {TOPIC: SimpleNamespace(name="t")}

    def _charge(self, user: str, ms: float) -> None:
        self.charged[user] = self.charged.get(user, 0.0) + ms

    def _group_broker(self, group_id: str) -> int:
        if group_id not in self.group_leaders:
            raise CoordinatorNotAvailable("nobody")
        return self.group_leaders[group_id]

    def partition(self, topic_id: bytes, partition: int) -> Any:
        """As the image has it."""
        leader = self.leaders.get((topic_id, partition))
        return None if leader is None else SimpleNamespace(leader=leader)

    def moved(self) -> None:
        self.sender.on_metadata(cast(Any, self))

    def send(self, pending: PendingMarkers) -> None:
        MarkerDispatch(self.sender, lambda: self.coordinator).notify(pending)


def pending(
    *targets: Target, producer_id: int = 5, epoch: int = 1, commit: bool = True, user: str = ""
) -> PendingMarkers:
    return PendingMarkers(
        transactional_id="x",
        sink_id="",
        producer_id=producer_id,
        producer_epoch=epoch,
        commit=commit,
        partitions=frozenset(target for target in targets if not isinstance(target, str)),
        group_ids=frozenset(target for target in targets if isinstance(target, str)),
        user=user,
    )


def scenario(story: Callable[[Surroundings], Awaitable[None]]) -> None:
    async def run() -> None:
        around = Surroundings()
        try:
            await story(around)
        finally:
            await around.sender.close()

    virtual_time.run(run())


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for rings no bell
            await asyncio.sleep(0.005)


def test_each_goes_to_its_leader_and_the_coordinator_hears_when_all_have_it() -> None:
    async def story(around: Surroundings) -> None:
        what = pending(P0, P1, "g", "h")
        around.send(what)
        assert not around.coordinator.told
        await turns()
        assert set(around.local.targets) == {P0, "g"}
        assert set(around.links.targets) == {P1, "h"}
        assert set(around.links.brokers) == {OTHER}
        assert around.links.flushed
        assert around.local.calls[0][1] == [Marker(5, 1, True, 7)]
        assert around.coordinator.told == [MarkersWritten(what)]
        assert len(around.sender) == 0

    scenario(story)


def test_where_there_is_nobody_to_be_told_the_coordinator_hears_at_once() -> None:
    async def story(around: Surroundings) -> None:
        around.send(pending())
        assert len(around.coordinator.told) == 1

    scenario(story)


def test_what_waits_for_one_partition_shares_a_batch() -> None:
    async def story(around: Surroundings) -> None:
        for producer_id in range(50):
            around.send(pending(P0, producer_id=producer_id))
        await turns()
        ((target, markers, _),) = around.local.calls
        assert target == P0
        assert [marker.producer_id for marker in markers] == list(range(50))
        assert len(around.coordinator.told) == 50

    scenario(story)


def test_what_was_refused_is_sent_again_and_what_came_meanwhile_goes_along() -> None:
    async def story(around: Surroundings) -> None:
        around.local.refuse_with.append(NotEnoughReplicas("too few"))
        first, second = pending(P0, producer_id=1), pending(P0, producer_id=2)
        around.send(first)
        await turns()
        assert not around.coordinator.told
        around.send(second)
        await turns()
        assert len(around.local.calls) == 1, "no marker must be sent for a while to a partition that has refused one"
        await until(lambda: len(around.coordinator.told) == 2)
        assert [marker.producer_id for marker in around.local.calls[1][1]] == [1, 2]

    scenario(story)


def test_only_markers_that_failed_are_sent_again() -> None:
    async def story(around: Surroundings) -> None:
        around.local.answers_at_once = False
        around.send(pending(P0, producer_id=1))
        around.send(pending(P0, producer_id=2))
        await turns()
        around.local.answers_at_once = True
        around.local.calls[0][2]([None, NotEnoughReplicas("")])
        assert len(around.coordinator.told) == 1
        await until(lambda: len(around.coordinator.told) == 2)
        assert [marker.producer_id for marker in around.local.calls[1][1]] == [2]

    scenario(story)


def test_a_new_leader_is_told_as_soon_as_the_metadata_names_it() -> None:
    async def story(around: Surroundings) -> None:
        around.links.refuse_with += [NotLeader("moved")] * 5
        around.send(pending(P1))
        await until(lambda: len(around.links.calls) == 5)
        around.leaders[P1] = ME
        around.moved()
        await turns()
        assert around.local.targets == [P1]
        assert len(around.coordinator.told) == 1

    scenario(story)


def test_metadata_that_moves_nothing_does_not_end_the_pause() -> None:
    async def story(around: Surroundings) -> None:
        around.local.refuse_with.append(NotEnoughReplicas(""))
        around.send(pending(P0))
        await turns()
        for _ in range(20):
            around.moved()
            await turns()
        assert len(around.local.calls) == 1

    scenario(story)


@pytest.mark.parametrize("target", [P0, "lost"])
def test_without_a_leader_it_waits_for_one(target: Target) -> None:
    async def story(around: Surroundings) -> None:
        around.leaders[P0] = -1
        around.send(pending(target))
        await asyncio.sleep(0.1)
        assert not around.local.calls
        around.leaders[P0] = around.group_leaders["lost"] = THIRD
        around.moved()
        await turns()
        assert around.links.brokers == [THIRD]
        assert len(around.coordinator.told) == 1

    scenario(story)


def test_partitions_of_a_deleted_topic_need_no_marker() -> None:
    async def story(around: Surroundings) -> None:
        around.local.refuse_with += [NotLeader("being deleted")] * 100
        around.send(pending(P0, P2))
        await turns()
        around.leaders.clear()
        around.moved()
        await turns()
        assert len(around.coordinator.told) == 1
        around.send(pending(P1, producer_id=9))
        await turns()
        assert len(around.coordinator.told) == 2

    scenario(story)


def test_a_coordinator_that_is_replaced_is_told_nothing_and_sends_nothing_more() -> None:
    async def story(around: Surroundings) -> None:
        around.local.refuse_with += [NotEnoughReplicas("")] * 100
        around.send(pending(P0))
        await turns()
        around.coordinator.state = State.GONE
        calls = len(around.local.calls)
        await asyncio.sleep(0.2)
        assert len(around.local.calls) == calls
        assert not around.coordinator.told
        assert len(around.sender) == 0

    scenario(story)


def test_the_same_decision_told_again_by_the_same_coordinator_is_on_its_way_once() -> None:
    """A coordinator that had to load its log again knows nothing of what it has sent before."""

    async def story(around: Surroundings) -> None:
        around.local.answers_at_once = False
        what = pending(P0)
        around.send(what)
        await turns()
        around.send(pending(P0))
        await turns()
        assert len(around.local.calls) == 1
        around.local.calls[0][2]([None])
        assert around.coordinator.told == [MarkersWritten(what)]
        around.send(what)
        await turns()
        assert len(around.local.calls) == 2, "after the report a marker for the same partition must be sent again"

    scenario(story)


def test_who_describes_a_transaction_sees_who_lacks_its_marker() -> None:
    async def story(around: Surroundings) -> None:
        around.local.answers_at_once = False
        around.send(pending(P0, P1))
        await turns()
        assert around.sender.left_of("x") == frozenset({P0})
        assert around.sender.left_of("y") is None

    scenario(story)


def test_many_partitions_do_not_hold_the_loop_up() -> None:
    async def story(around: Surroundings) -> None:
        def slowly(target: Target, markers: Sequence[Marker], answer: Answer) -> None:
            virtual_time.work_for(0.001)
            answer([None] * len(markers))

        around.local.take = slowly  # type: ignore[method-assign] # a slower one
        keys = [(TOPIC, number) for number in range(100)]
        around.leaders |= dict.fromkeys(keys, ME)
        around.send(pending(*keys))
        rounds = 0
        while not around.coordinator.told:
            await asyncio.sleep(0)
            rounds += 1
        assert rounds > 10, (
            f"the event loop ran {rounds} times in 0.1 s of work: others must get their turn every few milliseconds"
        )

    scenario(story)


def test_a_control_batch_has_its_bound_and_a_partition_that_refuses_one_is_not_sent_the_next() -> None:
    async def story(around: Surroundings) -> None:
        around.local.refuse_with.append(NotEnoughReplicas(""))
        for producer_id in range(2_500):
            around.send(pending(P0, producer_id=producer_id))
        await turns()
        assert [len(markers) for _, markers, _ in around.local.calls] == [250]
        await until(lambda: len(around.coordinator.told) == 2_500)
        assert [len(markers) for _, markers, _ in around.local.calls] == [250] * 11

    scenario(story)


def test_nothing_is_sent_once_the_broker_stops() -> None:
    async def story(around: Surroundings) -> None:
        around.local.refuse_with += [NotEnoughReplicas("")] * 100
        around.send(pending(P0))
        await turns()
        await around.sender.close()
        calls = len(around.local.calls)
        around.send(pending(P0, producer_id=6))
        await asyncio.sleep(0.1)
        assert len(around.local.calls) == calls

    scenario(story)


def test_what_stands_in_the_way_for_long_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.coordinator.transactions.marker_sender.LAST_RETRY_S", 0.02)

    async def story(around: Surroundings) -> None:
        around.local.refuse_with += [NotEnoughReplicas("too few in sync")] * 11
        around.send(pending(P0))
        await until(lambda: bool(around.coordinator.told))

    scenario(story)
    assert lines_of(caplog, "broker.coordinator.transactions.marker_sender") == [
        "1 transactions cannot be ended on t-0 after 10 attempts: too few in sync"
    ]


def test_a_user_has_so_many_targets_under_way_and_the_next_ones_follow_answers() -> None:
    async def story(around: Surroundings) -> None:
        many = [(TOPIC, number) for number in range(3 * MOST_TARGETS)]
        around.leaders.update(dict.fromkeys(many, ME))
        around.local.answers_at_once = False
        around.send(pending(*many, user="alice"))
        await turns(10)
        assert len(around.local.calls) == MOST_TARGETS
        around.send(pending(many[-1], producer_id=6, user="bob"))
        await turns(10)
        assert around.local.calls[-1][0] == many[-1], "another user does not wait for them"
        assert len(around.local.calls) == MOST_TARGETS + 1
        around.local.calls[3][2]([None])
        around.local.calls[7][2]([None])
        await turns(10)
        assert len(around.local.calls) == MOST_TARGETS + 3
        around.local.answers_at_once = True
        for _, markers, answer in list(around.local.calls):
            answer([None] * len(markers))
        await turns(50)
        assert len(around.coordinator.told) == 2
        written = [(target, marker.producer_id) for target, markers, _ in around.local.calls for marker in markers]
        assert sorted(written) == sorted([*((part, 5) for part in many), (many[-1], 6)]), "each once"

    scenario(story)


def test_targets_that_do_not_answer_keep_the_others_of_their_user_waiting_for_a_second() -> None:
    """Markers of a partition may be committed only when more replicas are in sync."""

    async def story(around: Surroundings) -> None:
        many = [(TOPIC, number) for number in range(MOST_TARGETS + 5)]
        around.leaders.update(dict.fromkeys(many, ME))
        around.local.answers_at_once = False
        around.send(pending(*many, user="alice"))
        await asyncio.sleep(0.9 * HOLDS_S)
        assert len(around.local.calls) == MOST_TARGETS
        await asyncio.sleep(0.2 * HOLDS_S)
        assert len(around.local.calls) == len(many)
        for _, markers, answer in list(around.local.calls):
            answer([None] * len(markers))
        assert len(around.coordinator.told) == 1

    scenario(story)


def test_markers_of_many_transactions_come_to_a_partition_in_several_batches_and_count_for_more_targets() -> None:
    """1000 of them in one batch took a leader, and each follower, 20 ms of their event loops."""

    async def story(around: Surroundings) -> None:
        many = [(TOPIC, number) for number in range(MOST_TARGETS)]
        around.leaders.update(dict.fromkeys(many, ME))
        around.local.answers_at_once = False
        for producer_id in range(3 * MAX_IN_BATCH):
            around.send(pending(*many, producer_id=producer_id, user="alice"))
        await turns(100)
        sizes = [len(markers) for _, markers, _ in around.local.calls]
        assert set(sizes) == {MAX_IN_BATCH}
        cost = 1 + MAX_IN_BATCH // MARKERS_OF_A_TARGET
        assert MOST_TARGETS <= cost * len(sizes) < MOST_TARGETS + cost
        around.local.answers_at_once = True
        for _, markers, answer in list(around.local.calls):
            answer([None] * len(markers))
        await turns(2000)
        assert len(around.coordinator.told) == 3 * MAX_IN_BATCH
        assert sum(len(markers) for _, markers, _ in around.local.calls) == 3 * MAX_IN_BATCH * len(many), "each once"

    scenario(story)


def test_markers_that_are_written_count_for_their_user() -> None:
    """One small request ends a transaction of many partitions: only the request counted for request_percentage."""

    async def story(around: Surroundings) -> None:
        around.local.answers_at_once = around.links.answers_at_once = False
        around.send(pending(P0, P1, "g", "h", user="User:alice"))
        await turns()
        assert not around.charged, "nothing is written yet"
        for _, _, answer in (*around.local.calls, *around.links.calls):
            answer([None])
        assert around.charged == {"User:alice": pytest.approx(4 * (BATCH_MS + MARKER_MS))}

    scenario(story)


def test_users_whose_markers_share_a_batch_share_what_it_counts() -> None:
    async def story(around: Surroundings) -> None:
        for number, user in enumerate(["User:alice", "User:alice", "User:bob", ""]):
            around.send(pending(P0, producer_id=number, user=user))
        await turns()
        of_one = MARKER_MS + BATCH_MS / 4
        assert around.charged == {"User:alice": pytest.approx(2 * of_one), "User:bob": pytest.approx(of_one)}

    scenario(story)


def test_attempts_that_fail_count_for_no_user() -> None:
    async def story(around: Surroundings) -> None:
        around.local.refuse_with = [NotEnoughReplicas("one is missing"), NotLeader("moved")]
        around.send(pending(P0, user="User:alice"))
        await turns()
        assert not around.charged
        await until(lambda: len(around.local.calls) == 3)
        await turns()
        assert around.charged == {"User:alice": pytest.approx(BATCH_MS + MARKER_MS)}

    scenario(story)
