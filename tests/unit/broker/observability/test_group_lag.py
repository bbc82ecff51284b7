"""The lag of groups, from what they have committed and what leaders say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from broker.groups.group import Committed, Group, Head, Member
from broker.groups.topics import TopicPartition
from broker.observability import group_lag
from broker.observability.group_families import GroupFamilies
from broker.observability.group_lag import Ends, GroupLag, GroupLagSampler, GroupSize

TOPIC = b"t" * 16
WALL_MS = 1_700_000_000_000


class Time:
    def __init__(self) -> None:
        self.ms = 1_000_000.0

    def now_ms(self) -> int:
        return WALL_MS + int(self.ms)

    def monotonic_ms(self) -> float:
        return self.ms


class FakeLeaders:
    def __init__(self) -> None:
        self.places: dict[TopicPartition, Ends] = {}
        self.written: dict[TopicPartition, int] = {}
        self.looked_up: list[Mapping[TopicPartition, int]] = []

    async def ends(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Ends]:
        return {at: self.places[at] for at in partitions if at in self.places}

    async def written_ms(self, wanted: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        self.looked_up.append(wanted)
        return {at: self.written[at] for at in wanted if at in self.written}


def group(group_id: str, **committed: int) -> Group:
    made = Group(group_id)
    made.head = Head(group_epoch=1, assignment_epoch=1)
    for name, offset in committed.items():
        made.set_offset((TOPIC, int(name.removeprefix("p"))), Committed(offset, 0, "", 0, "orders"))
    return made


class Parts:
    def __init__(self, *groups: Group) -> None:
        self.groups = list(groups)
        self.leaders = FakeLeaders()
        self.time = Time()
        self.sampler = GroupLagSampler(lambda: self.groups, self.leaders, self.time, 5_000)

    def look(self, after_ms: float = 0) -> dict[tuple[str, int], GroupLag]:
        self.time.ms += after_ms
        asyncio.run(self.sampler.look())
        return {(lag.group, lag.partition): lag for lag in self.sampler.figures.lags}


def test_lag_counts_records_and_the_seconds_since_the_first_of_them() -> None:
    parts = Parts(group("billing", p0=100), group("audit", p0=40))
    parts.leaders.places[TOPIC, 0] = Ends(0, 100)
    parts.leaders.written[TOPIC, 0] = parts.time.now_ms() - 90_000
    lags = parts.look()
    assert lags["billing", 0] == GroupLag("billing", "orders", 0, 0, 0.0)
    assert lags["audit", 0] == GroupLag("audit", "orders", 0, 60, 90.0), "by the timestamp of record 40"
    assert parts.leaders.looked_up == [{(TOPIC, 0): 40}]

    parts.leaders.places[TOPIC, 0] = Ends(0, 150)
    lags = parts.look(after_ms=5_000)
    assert lags["billing", 0][3:] == (50, 5.0)
    lags = parts.look(after_ms=10_000)
    assert lags["billing", 0][3:] == (50, 15.0)
    assert lags["audit", 0][3:] == (110, 105.0)
    assert len(parts.leaders.looked_up) == 1, "what is known is not looked up again"


def test_records_that_are_deleted_are_not_behind() -> None:
    parts = Parts(group("audit", p0=10))
    parts.leaders.places[TOPIC, 0] = Ends(80, 100)
    assert parts.look()["audit", 0][3:] == (20, None), "the record cannot be looked up: the seconds are not known"
    parts.leaders.places[TOPIC, 0] = Ends(100, 100)
    assert parts.look(1_000)["audit", 0][3:] == (0, 0.0)


def test_what_no_leader_says_is_left_out_and_what_nobody_reads_is_forgotten() -> None:
    parts = Parts(group("audit", p0=10, p1=10))
    parts.leaders.places[TOPIC, 0] = Ends(0, 10)
    assert set(parts.look()) == {("audit", 0)}
    parts.groups = []
    assert parts.look(1_000) == {}
    assert parts.sampler._histories == {}


def test_sizes_name_the_state_of_a_group() -> None:
    empty, busy, fenced = group("empty"), group("busy"), Group("only fences")
    busy.set_member("a", Member("a"))
    parts = Parts(empty, busy, fenced)
    parts.look()
    assert parts.sampler.figures.sizes == [GroupSize("empty", "empty", 0), GroupSize("busy", "stable", 1)]


def test_more_than_a_scrape_bears_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_lag, "MAX_SERIES", 2)
    parts = Parts(*(group(f"g{n}", p0=n) for n in range(5)))
    parts.leaders.places[TOPIC, 0] = Ends(0, 10)
    assert set(parts.look()) == {("g0", 0), ("g1", 0)}, "the largest lags"
    families = {family.name: family for family in GroupFamilies(lambda: parts.sampler.figures).collect()}
    assert families["raftlog_group_series_left_out"].samples[0].value == 3 + 3
    shown = {sample.labels["group"]: sample.value for sample in families["raftlog_group_lag_records"].samples}
    assert shown == {"g0": 10, "g1": 9}
    assert families["raftlog_group_lag_seconds"].samples == [], "nothing is known of the time"


def test_a_round_that_fails_does_not_end_the_rounds() -> None:
    async def scenario() -> None:
        parts = Parts(group("audit", p0=10))
        calls, third = 0, asyncio.Event()

        async def broken(partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Ends]:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("once")
            if calls == 3:
                third.set()
            return {at: Ends(0, 12) for at in partitions}

        parts.leaders.ends = broken  # type: ignore[method-assign]
        sampler = GroupLagSampler(lambda: parts.groups, parts.leaders, parts.time, 1)
        sampler.start()
        async with asyncio.timeout(60):
            await third.wait()
        await sampler.close()
        assert sampler.figures.lags[0].records == 2

    asyncio.run(scenario())
