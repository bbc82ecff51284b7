"""The lag of groups, from their committed offsets and the leaders' answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.coordinator.groups.group import Committed, Group, Head, Member
from broker.coordinator.groups.topics import TopicPartition
from broker.net.services.log import EARLIEST
from broker.observability import group_lag
from broker.observability.group_lag import MAX_MARKS, Ends, GroupLag, GroupLagSampler, GroupSize, WatermarkHistory
from broker.observability.leader_offsets import AT_A_TIME, LeaderOffsets
from broker.observability.metrics import GroupMetrics
from raftlog.errors import NotLeader, to_wire
from raftlog.v1 import log_pb2
from raftmeta.image import NO_LEADER, MetadataImage

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
        return {(lag.group, lag.partition): lag for lag in self.sampler.latest.lags}


def test_lag_counts_records_and_the_seconds_since_the_first_of_them() -> None:
    parts = Parts(group("billing", p0=100), group("audit", p0=40))
    parts.leaders.places[TOPIC, 0] = Ends(0, 100)
    parts.leaders.written[TOPIC, 0] = parts.time.now_ms() - 90_000
    lags = parts.look()
    assert lags["billing", 0] == GroupLag("billing", "orders", 0, 0, 0.0)
    assert lags["audit", 0] == GroupLag("audit", "orders", 0, 60, 90.0), (
        "the lag in seconds must come from the timestamp of record 40"
    )
    assert parts.leaders.looked_up == [{(TOPIC, 0): 40}]

    parts.leaders.places[TOPIC, 0] = Ends(0, 150)
    lags = parts.look(after_ms=5_000)
    assert lags["billing", 0][3:] == (50, 5.0)
    lags = parts.look(after_ms=10_000)
    assert lags["billing", 0][3:] == (50, 15.0)
    assert lags["audit", 0][3:] == (110, 105.0)
    assert len(parts.leaders.looked_up) == 1, "a timestamp that is known must not be looked up again"


def test_records_that_are_deleted_are_not_behind() -> None:
    parts = Parts(group("audit", p0=10))
    parts.leaders.places[TOPIC, 0] = Ends(80, 100)
    assert parts.look()["audit", 0][3:] == (20, None), "without the record the lag in seconds must be unknown"
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
    assert parts.sampler.latest.sizes == [GroupSize("empty", "empty", 0), GroupSize("busy", "stable", 1)]


def test_more_than_a_scrape_bears_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_lag, "MAX_SERIES", 2)
    parts = Parts(*(group(f"g{n}", p0=n) for n in range(5)))
    parts.leaders.places[TOPIC, 0] = Ends(0, 10)
    assert set(parts.look()) == {("g0", 0), ("g1", 0)}, (
        "of more groups than fit, those with the largest lags must be shown"
    )
    families = {family.name: family for family in GroupMetrics(lambda: parts.sampler.latest).collect()}
    assert families["raftlog_group_series_left_out"].samples[0].value == 3 + 3
    shown = {sample.labels["group"]: sample.value for sample in families["raftlog_group_lag_records"].samples}
    assert shown == {"g0": 10, "g1": 9}
    assert families["raftlog_group_lag_seconds"].samples == [], "no lag in seconds must be shown where it is unknown"


def test_one_user_with_very_many_large_lags_hides_no_lags_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_lag, "MAX_SERIES", 6)
    hostile = [group(f"h{number}", p0=0) for number in range(20)]
    few, several = [group("few", p0=9)], [group(f"s{number}", p0=7 + number % 2) for number in range(4)]
    for user, groups in (("User:h", hostile), ("User:f", few), ("User:s", several)):
        for each in groups:
            each.user = user
    parts = Parts(*hostile, *several, *few)
    parts.leaders.places[TOPIC, 0] = Ends(0, 10)
    shown = [name for name, _ in parts.look()]
    assert sorted(shown) == ["few", "h0", "h1", "h2", "s0", "s2"]
    assert {each.group for each in parts.sampler.latest.sizes} >= {"few", "s0", "s1"}
    assert parts.sampler.latest.left_out == 2 * (25 - 6)


async def test_a_round_that_fails_does_not_end_the_rounds() -> None:
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
    assert sampler.latest.lags[0].records == 2


def history(*looks: tuple[int, float]) -> WatermarkHistory:
    made = WatermarkHistory()
    for high_watermark, now_ms in looks:
        made.seen(high_watermark, now_ms)
    return made


def test_who_has_everything_has_no_lag_and_who_was_overtaken_between_two_looks_has_it_since_then() -> None:
    seen = history((100, 0), (100, 4_000), (200, 5_000), (200, 9_000))
    assert seen.lag_s(200, 9_000) == 0
    assert seen.lag_s(100, 9_000) == 5, (
        "the lag must count from 4 s, when the partition was last seen without records above 100"
    )
    assert seen.lag_s(150, 9_000) == 4.5, (
        "the lag must count from half-way between 4 s and 5 s, as 150 is half-way from 100 to 200"
    )
    assert seen.lag_s(99, 9_000) is None, "the lag must be unknown for an offset that was passed before the first look"
    assert WatermarkHistory().lag_s(0, 0) is None


def test_what_nobody_saw_pass_counts_from_when_the_record_there_was_written() -> None:
    seen = history((100, 60_000))
    seen.began(40, 10_000)
    assert seen.known_from == 40
    assert seen.lag_s(40, 70_000) == 60
    assert seen.lag_s(70, 70_000) == 35
    seen.began(50, 0)  # it is known already
    assert seen.lag_s(50, 70_000) == pytest.approx(60 - 50 / 6)
    late = history((100, 1_000))
    late.began(10, 5_000)  # a clock ahead: written after it was seen
    assert late.lag_s(10, 1_000) == 0


def test_a_high_watermark_that_went_back_takes_what_was_above_it_along() -> None:
    seen = history((100, 0), (200, 1_000), (150, 2_000), (300, 3_000))
    assert seen.lag_s(150, 3_000) == 1
    assert seen.lag_s(300, 3_000) == 0


def test_what_no_group_asks_for_any_more_is_forgotten() -> None:
    seen = history(*((10 * n, 1_000.0 * n) for n in range(10)))
    seen.forget_below(55)
    assert seen.known_from == 50
    assert len(seen) == 5
    seen.forget_below(1_000)
    assert len(seen) == 1


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 60_000)), min_size=1, max_size=4 * MAX_MARKS),
    st.data(),
)
def test_lag_is_between_that_of_the_looks_around_it_and_the_history_stays_small(
    steps: list[tuple[int, float]], data: st.DataObject
) -> None:
    looks: list[tuple[int, float]] = []
    offset, now_ms = 0, 0.0
    for grown, passed_ms in steps:
        offset, now_ms = offset + grown, now_ms + passed_ms
        looks.append((offset, now_ms))
    seen = history(*looks)
    assert len(seen) <= MAX_MARKS
    assert seen.known_from == looks[0][0]
    committed = data.draw(st.integers(looks[0][0], offset))
    lag_s = seen.lag_s(committed, now_ms)
    assert lag_s is not None
    if committed == offset:
        assert lag_s == 0
        return
    above = [at for high_watermark, at in looks if high_watermark > committed]
    not_above = [at for high_watermark, at in looks if high_watermark <= committed]
    if len({high_watermark for high_watermark, _ in looks}) <= MAX_MARKS:  # nothing was left out
        least, most = (now_ms - above[0]) / 1_000, (now_ms - not_above[-1]) / 1_000
        assert least - 1e-6 <= lag_s <= most + 1e-6
    assert 0 <= lag_s <= (now_ms - looks[0][1]) / 1_000 + 1e-6
    assert lag_s >= (seen.lag_s(min(offset, committed + 1), now_ms) or 0) - 1e-6, (
        "a group that is further behind must not have a shorter lag in seconds"
    )


LEADERS = {0: 1, 1: 1, 2: 2, 3: NO_LEADER}


def image() -> MetadataImage:
    def partition(topic_id: bytes, number: int) -> Any:
        return SimpleNamespace(leader=LEADERS.get(number, 1)) if topic_id == TOPIC else None

    return cast(MetadataImage, SimpleNamespace(partition=partition))


class Here:
    """Broker 1: every partition has offsets 5 to 5 + its number; number 1 is refused."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def answer(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        self.sizes.append(len(request.partitions))
        response = log_pb2.ListOffsetsResponse()
        for part in request.partitions:
            if part.partition == 1:
                response.results.add(error=to_wire(NotLeader("not any more")))
            elif part.HasField("at_offset"):
                response.results.add(offset=part.at_offset, timestamp_ms=1_000 if part.at_offset < 9 else -1)
            else:
                response.results.add(offset=5 if part.timestamp_ms == EARLIEST else 5 + part.partition)
        return response


async def test_what_is_not_answered_is_left_out() -> None:
    leaders = LeaderOffsets(1, image, Here().answer, lambda broker_id: None)
    wanted = [(TOPIC, number) for number in (0, 1, 2, 3)]
    assert await leaders.ends([*wanted, (b"g" * 16, 0), (TOPIC, 4)]) == {
        (TOPIC, 0): Ends(5, 5),
        (TOPIC, 4): Ends(5, 9),
    }, (
        "only partitions 0 and 4 must be answered: 1 is refused, 2 has an unknown leader, 3 none, and the other "
        "topic is gone"
    )
    found = await leaders.written_ms({(TOPIC, 0): 7, (TOPIC, 1): 7, (TOPIC, 4): 9})
    assert found == {(TOPIC, 0): 1_000}, "no timestamp must be given for offset 9, where no record is left"
    await leaders.close()


async def test_a_leader_is_asked_in_pieces() -> None:
    here = Here()
    leaders = LeaderOffsets(1, image, here.answer, lambda broker_id: None)
    found = await leaders.ends([(TOPIC, number) for number in range(4, 4 + AT_A_TIME)])
    assert len(found) == AT_A_TIME
    assert here.sizes == [AT_A_TIME, AT_A_TIME], "the partitions must be asked for in two requests"
