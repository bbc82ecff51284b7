"""`raftlog consume --group`: what it prints is what it commits, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import pytest

import raftlog
from raftlog import Record, TopicPartition
from raftlog.cli.records import reading as group_reading
from raftlog.cli.records.reading import GroupReading
from raftlog.errors import CoordinatorNotAvailable, LeaderNotAvailable, PartitionNotOwned, RaftlogError

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


class FakeConsumer:
    """A member that gets the records of the test, one poll after the other."""

    def __init__(self, ends: dict[TopicPartition, int], *polls: Sequence[Record] | Callable[[], Sequence[Record]]):
        self.ends = ends
        self.assigned = list(ends)
        self.positions = dict.fromkeys(ends, 0)
        self.polls = list(polls)
        self.committed: dict[TopicPartition, int] = {}
        self.refuse: RaftlogError | None = None
        self.note = ""
        self.listener: raftlog.RebalanceListener | None = None
        self.asked: list[int] = []
        self.unreachable: dict[TopicPartition, str] = {}
        self.waited_s: list[float] = []
        """How long each look-up of ends may have waited for leaders."""
        self.no_member: str | None = None

    def subscribe(self, topic: str, listener: raftlog.RebalanceListener) -> None:
        self.listener = listener

    def assignment(self) -> list[TopicPartition]:
        return sorted(self.assigned)

    def end_offsets(self, parts: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {part: self.ends[part] for part in parts}

    def position(self, part: TopicPartition) -> int:
        return self.positions[part]

    def group_note(self) -> str:
        return self.note

    def poll(self, timeout: float, max_records: int) -> list[Record]:
        self.asked.append(max_records)
        found = self.polls.pop(0) if self.polls else []
        records = list(found() if callable(found) else found)[:max_records]
        for record in records:
            self.positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
        return records

    def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self.refuse is not None:
            raise self.refuse
        if others := [part for part in offsets if part not in self.assigned]:
            raise PartitionNotOwned(f"{others[0]} has another owner")
        self.committed |= offsets


@pytest.fixture(autouse=True)
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tools look at in a consumer."""

    def ends(
        consumer: FakeConsumer, parts: Iterable[TopicPartition], at_ms: int, grace_s: float, patience_s: float
    ) -> dict[TopicPartition, object]:
        consumer.waited_s.append(patience_s)
        return {
            part: LeaderNotAvailable(consumer.unreachable[part])
            if part in consumer.unreachable
            else consumer.ends[part]
            for part in parts
        }

    monkeypatch.setattr(group_reading, "try_offsets", ends)
    monkeypatch.setattr(group_reading, "out_of_reach", lambda consumer: consumer.unreachable)
    monkeypatch.setattr(group_reading, "position_now", FakeConsumer.position)
    monkeypatch.setattr(group_reading, "why_no_member", lambda consumer: consumer.no_member)


def records(part: TopicPartition, *offsets: int) -> list[Record]:
    return [Record(part.topic, part.partition, offset, 0, None, b"") for offset in offsets]


def read(
    consumer: FakeConsumer, *, follow: bool = False, timeout_s: float | None = None, max_records: int | None = None
) -> list[tuple[int, int]]:
    reading = GroupReading(cast(raftlog.Consumer, consumer), "a", follow=follow)
    return [(each.partition, each.offset) for polled in reading.polls(timeout_s, max_records) for each in polled]


def test_it_ends_where_the_partitions_ended() -> None:
    consumer = FakeConsumer({A0: 2, A1: 1}, records(A0, 0, 1, 2), records(A1, 0))
    assert read(consumer) == [(0, 0), (0, 1), (1, 0)]
    assert consumer.committed == {A0: 2, A1: 1}


def test_records_of_a_partition_that_came_with_the_poll_are_printed() -> None:
    consumer = FakeConsumer({A0: 1, A1: 2})
    consumer.assigned = [A0]

    def rebalanced() -> list[Record]:
        consumer.assigned = [A0, A1]
        return records(A1, 0, 1)

    consumer.polls = [rebalanced, records(A0, 0)]
    assert read(consumer) == [(1, 0), (1, 1), (0, 0)]
    assert consumer.committed == {A0: 1, A1: 2}


def test_what_went_to_others_is_not_waited_for() -> None:
    consumer = FakeConsumer({A0: 1, A1: 5}, records(A0, 0))

    def revoked() -> list[Record]:
        consumer.assigned = [A0]
        return []

    consumer.polls.append(revoked)
    assert read(consumer) == [(0, 0)]


def test_an_idle_member_says_why_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    consumer = FakeConsumer({})
    consumer.note = "more members than partitions"
    assert read(consumer) == []
    assert capsys.readouterr().err == "note: more members than partitions\n"


def test_no_more_is_taken_than_is_printed() -> None:
    consumer = FakeConsumer({A0: 9}, records(A0, 0, 1, 2), records(A0, 3, 4, 5))
    assert len(read(consumer, max_records=4)) == 4
    assert consumer.asked == [4, 1]
    assert consumer.committed == {A0: 4}


def test_nothing_is_committed_before_it_is_printed() -> None:
    consumer = FakeConsumer({A0: 9}, records(A0, 0, 1, 2))
    reading = GroupReading(cast(raftlog.Consumer, consumer), "a", follow=True)
    polls = reading.polls(0, None)
    next(polls)
    assert consumer.committed == {}
    next(polls, None)
    assert consumer.committed == {A0: 3}


def test_a_commit_that_comes_too_late_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    consumer = FakeConsumer({A0: 2}, records(A0, 0), records(A0, 1))
    consumer.refuse = PartitionNotOwned("a-0 has another owner")
    assert read(consumer) == [(0, 0), (0, 1)]
    assert "printed but not committed" in capsys.readouterr().err


def test_consuming_with_follow_goes_on_while_offsets_cannot_be_stored(capsys: pytest.CaptureFixture[str]) -> None:
    consumer = FakeConsumer({A0: 9, A1: 9}, records(A0, 0), records(A1, 0), [], records(A0, 1))
    reading = GroupReading(cast(raftlog.Consumer, consumer), "a", follow=True)
    consumer.refuse = CoordinatorNotAvailable("the disk is full")
    polls = reading.polls(None, 3)
    assert [len(next(polls)), len(next(polls))] == [1, 1]

    def with_space() -> Sequence[Record]:
        consumer.refuse = None
        return []

    consumer.polls.insert(0, with_space)
    assert len(next(polls)) == 1
    assert consumer.committed == {A0: 1, A1: 1}
    assert capsys.readouterr().err == (
        "note: records are printed but not committed yet; trying again: the disk is full\n"
    )
    assert list(polls) == []
    assert consumer.committed == {A0: 2, A1: 1}


@pytest.mark.parametrize("comes_back", [False, True])
def test_offsets_of_a_partition_that_went_to_others_are_not_committed_later(comes_back: bool) -> None:
    """The others have gone on there; and a refusal for that partition must not be one for the rest."""
    a2 = TopicPartition("a", 2)
    consumer = FakeConsumer({A0: 9, A1: 9, a2: 9}, records(A0, 0), records(A1, 0))
    reading = GroupReading(cast(raftlog.Consumer, consumer), "a", follow=True)
    consumer.refuse = CoordinatorNotAvailable("the disk is full")
    polls = reading.polls(None, 3)
    assert [len(next(polls)), len(next(polls))] == [1, 1]

    def rebalanced() -> Sequence[Record]:
        assert consumer.listener is not None
        consumer.refuse = None
        consumer.assigned = [A0, a2]
        consumer.listener.on_partitions_revoked([A1])
        if comes_back:
            consumer.committed[A1] = 5
            consumer.assigned = [A0, A1, a2]
        return []

    consumer.polls += [rebalanced, records(a2, 0)]
    assert len(next(polls)) == 1
    assert list(polls) == []
    assert consumer.committed == ({A0: 1, A1: 5, a2: 1} if comes_back else {A0: 1, a2: 1})


@pytest.mark.parametrize(
    ("follow", "max_records", "timeout_s"), [(True, 1, None), (True, None, 0.0), (False, None, None)]
)
def test_offsets_that_are_not_stored_in_the_end_are_an_error(
    follow: bool, max_records: int | None, timeout_s: float | None
) -> None:
    consumer = FakeConsumer({A0: 1}, records(A0, 0))
    consumer.refuse = CoordinatorNotAvailable("the disk is full")
    with pytest.raises(CoordinatorNotAvailable, match="the disk is full"):
        read(consumer, follow=follow, max_records=max_records, timeout_s=timeout_s)


def test_other_refusals_end_it() -> None:
    consumer = FakeConsumer({A0: 2}, records(A0, 0))
    consumer.refuse = RaftlogError("no")
    with pytest.raises(RaftlogError, match="no"):
        read(consumer)


def test_a_leader_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_reading, "_GROUP_STALLED_S", 0.01)
    with pytest.raises(LeaderNotAvailable, match="reading stopped before the end of a-1"):
        read(FakeConsumer({A0: 1, A1: 1}, records(A0, 0)))


def test_a_group_that_gives_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(group_reading, "_GROUP_STALLED_S", 0.01)
    assert read(FakeConsumer({})) == []
    assert "has assigned no partition to this member" in capsys.readouterr().err


def test_a_timeout_ends_it_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert read(FakeConsumer({A0: 5}, records(A0, 0)), follow=True, timeout_s=0.01) == [(0, 0)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("follow", [True, False])
def test_leaders_that_are_out_of_reach_are_named(follow: bool) -> None:
    consumer = FakeConsumer({A0: 1, A1: 1}, records(A0, 0))
    consumer.unreachable[A1] = "a-1: broker 2 does not answer"
    with pytest.raises(LeaderNotAvailable) as refused:
        read(consumer, follow=follow, timeout_s=0.05)
    assert str(refused.value) == ("no record came for 0.05 s; unreachable leaders: a-1: broker 2 does not answer")
    assert consumer.committed == {A0: 1}


def test_an_absent_leader_is_waited_for_once_and_holds_up_nothing_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_reading, "_GROUP_RETRY_S", 0.0)
    consumer = FakeConsumer({A0: 9, A1: 9}, [], [], records(A0, 0))
    consumer.unreachable[A1] = "a-1 has no leader"
    assert read(consumer, max_records=1) == [(0, 0)]
    first_s, *later_s = consumer.waited_s
    assert later_s
    assert first_s > 1 > max(later_s)


def test_without_following_unreachable_leaders_are_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_reading, "_GROUP_STALLED_S", 0.05)
    consumer = FakeConsumer({A0: 1, A1: 1}, records(A0, 0))
    consumer.unreachable[A1] = "a-1 has no leader"
    with pytest.raises(LeaderNotAvailable, match="unreachable leaders: a-1: a-1 has no leader"):
        read(consumer)


@pytest.mark.parametrize("follow", [True, False])
def test_who_is_no_member_any_more_says_so(follow: bool) -> None:
    consumer = FakeConsumer({})
    consumer.no_member = "group g: nobody coordinates"
    with pytest.raises(CoordinatorNotAvailable, match=r"no record came for 0\.01 s; group g: nobody coordinates"):
        read(consumer, follow=follow, timeout_s=0.01)


def test_the_timeout_counts_from_the_beginning_on(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = FakeConsumer({A0: 1})
    subscribe = FakeConsumer.subscribe

    def slowly(self: FakeConsumer, topic: str, listener: raftlog.RebalanceListener) -> None:
        time.sleep(0.3)
        subscribe(self, topic, listener)

    monkeypatch.setattr(FakeConsumer, "subscribe", slowly)
    assert read(consumer, follow=True, timeout_s=0.2) == []
    assert len(consumer.asked) == 1


def test_a_note_is_said_once_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    consumer = FakeConsumer({A0: 5, A1: 5})
    consumer.assigned = []
    consumer.note = "waits for 2 partitions"

    def given(*parts: TopicPartition) -> Callable[[], list[Record]]:
        def poll() -> list[Record]:
            consumer.assigned, consumer.note = list(parts), ""
            return []

        return poll

    consumer.polls = [[], given(), given(A0, A1), records(A0, 0)]
    read(consumer, follow=True, max_records=1)
    assert capsys.readouterr().err == "note: waits for 2 partitions\nnote: now reading a:0-1\n"


def test_lost_partitions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    consumer = FakeConsumer({A0: 0})
    read(consumer)
    assert consumer.listener is not None
    consumer.listener.on_partitions_lost([A0, A1])
    assert capsys.readouterr().err.startswith("note: lost a-0, a-1: other members of the group continue there")
