"""Heartbeats as requests (KIP-848) against the coordinator's core: what each response says, and what a lost one may not
lead to."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from dataclasses import replace
from typing import Any, cast

import hypothesis
import pytest
from hypothesis import strategies as st

from broker.config.config import BrokerConfig
from broker.coordinator.core import Decision
from broker.coordinator.groups.assignors import BUILT_IN
from broker.coordinator.groups.commands import GroupConfig
from broker.coordinator.groups.coordinator import GroupCoordinator
from broker.kafka import consumer_groups, errors
from broker.kafka.codec import Fields
from broker.kafka.consumer_groups import ConsumerGroupApis
from broker.security.caller import Caller
from raftlog.errors import CoordinatorNotAvailable
from raftlog.v1 import common_pb2
from raftmeta.image import MetadataImage, TopicImage
from tests.support.group_driver import GroupDriver, Topics, topic_id

T = topic_id("t")
ALL = {*range(4)}


class Shard:
    """A coordinator whose decisions are committed at once; stands for the service, too."""

    def __init__(self) -> None:
        self.driver = GroupDriver({"t": 4})
        self.core = self.driver.core
        self.log: list[tuple[bytes, bytes | None]] = []
        self.held: list[tuple[Any, Any]] | None = None
        """Commands that wait for replicas, while there is a list."""

    def shard_of(self, group_id: str) -> Shard:
        return self

    def topic_name(self, topic: bytes) -> str:
        return "t"

    def submit(self, command: Any, recipient: Any) -> None:
        if self.held is not None:
            self.held.append((command, recipient))
            return
        self._apply(self.core.decide(command, self.driver.now))
        while (due_ms := self.core.next_deadline_ms()) is not None and due_ms <= self.driver.now_ms:
            self._apply(self.core.on_time(self.driver.now))

    def detach(self, recipient: Any) -> None:
        """Nothing is kept of it."""

    def _apply(self, decision: Decision) -> None:
        for key, value in decision.records:
            self.log.append((key, value))
            self.core.replay(key, value)
        for effect in decision.effects:
            cast(Any, effect.to).deliver(effect.message)

    def restart(self) -> None:
        """Another broker coordinates: it has the log."""
        self.core = GroupCoordinator(GroupConfig(), Topics({"t": 4}), BUILT_IN)
        for key, value in self.log:
            self.core.replay(key, value)
        self.core.loaded(self.driver.now)


class Broker:
    """The handlers of one broker."""

    def __init__(self, shard: Shard, **values: object) -> None:
        config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "unused", **values})
        self.image = MetadataImage()
        self.apis = ConsumerGroupApis(cast(Any, shard), config, cast(Any, None), lambda: self.image)

    async def heartbeat(self, member_id: str, epoch: int, owned: set[int] | None = None, **fields: Any) -> Fields:
        """Send a heartbeat over a connection of its own if it has all fields, else over the one that is there."""
        request: Fields = {
            "client_id": "client",
            "group_id": "g",
            "member_id": member_id,
            "member_epoch": epoch,
            "instance_id": None,
            "rack_id": None,
            "rebalance_timeout_ms": -1,
            "subscribed_topic_names": None,
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": None if owned is None else [{"topic_id": T, "partitions": sorted(owned)}],
            **fields,
        }
        handler = next(iter(self.apis.handlers.values()))
        return await handler(request, 1, Caller(host="10.0.0.1"))

    async def join(self, member_id: str, **fields: Any) -> Fields:
        return await self.heartbeat(member_id, 0, set(), subscribed_topic_names=["t"], **fields)


def given(response: Fields) -> set[int] | None:
    """Return the partitions of a response; None: they are as before."""
    assert response["error_code"] == 0, response
    assignment = response.get("assignment")
    if assignment is None:
        return None
    return {number for topic in assignment["topic_partitions"] for number in topic["partitions"]}


async def test_a_partition_moves_once_its_reader_has_said_that_it_stopped() -> None:
    broker = Broker(Shard())
    joined = await broker.join("a")
    assert given(joined) == ALL
    assert given(await broker.heartbeat("a", 1, ALL)) is None
    assert given(await broker.join("b")) == set()
    kept = given(await broker.heartbeat("a", 1))
    assert kept is not None
    assert len(kept) == 2
    assert not given(await broker.heartbeat("b", 2))
    told = await broker.heartbeat("a", 1, kept)
    assert told["member_epoch"] == 2
    assert given(await broker.heartbeat("b", 2)) == ALL - kept


async def test_a_lost_response_frees_no_partition_that_may_be_read() -> None:
    """The member has been given a partition and does not read it yet; the response that takes it away is lost."""
    broker = Broker(Shard())
    await broker.join("a")
    await broker.join("b")
    await broker.heartbeat("a", 1)  # lost: the client closes the connection, and says all that it has

    async def over_another_connection() -> set[int]:
        kept = given(await broker.heartbeat("a", 1, ALL, subscribed_topic_names=["t"]))
        assert kept is not None
        assert len(kept) == 2
        assert not given(await broker.heartbeat("b", 2)), (
            "the second member must get nothing, as the first still reads its partitions"
        )
        await broker.heartbeat("a", 1, kept)
        return kept

    kept = await asyncio.create_task(over_another_connection())
    assert given(await broker.heartbeat("b", 2)) == ALL - kept


async def test_a_member_that_says_everything_anew_frees_nothing_before_it_has_the_answer() -> None:
    broker = Broker(Shard())
    await broker.join("a")
    await broker.join("b")
    await broker.heartbeat("a", 1)  # lost, before the member has taken what it had been given

    async def over_another_connection() -> None:
        kept = given(await broker.heartbeat("a", 1, set(), subscribed_topic_names=["t"]))
        assert kept is not None
        assert not given(await broker.heartbeat("b", 2)), (
            "the second member must get nothing, as the first may not have got the response"
        )
        await broker.heartbeat("a", 1)
        assert not given(await broker.heartbeat("b", 2)), (
            "the second member must get nothing, as the first may be taking what it had been given"
        )
        await broker.heartbeat("a", 1, kept)
        assert given(await broker.heartbeat("b", 2)) == ALL - kept

    await asyncio.create_task(over_another_connection())


async def when_a_is_to_share() -> tuple[Broker, set[int]]:
    """Member a has reported that it reads everything; b has joined, and a was told what it keeps. Return that, too."""
    broker = Broker(Shard())
    await broker.join("a")
    await broker.heartbeat("a", 1, ALL)
    await broker.join("b")
    kept = given(await broker.heartbeat("a", 1))
    assert kept is not None
    return broker, kept


async def test_what_a_member_is_taking_goes_to_no_other_until_it_has_reported_it() -> None:
    """Its application is in a callback: its heartbeats go on, and it reports the partitions only once it reads them."""
    broker = Broker(Shard())
    assert given(await broker.join("a")) == ALL
    await broker.join("b")
    kept = given(await broker.heartbeat("a", 1))
    assert kept is not None
    assert len(kept) == 2
    for _ in range(3):
        assert given(await broker.heartbeat("a", 1)) is None
        assert not given(await broker.heartbeat("b", 2)), "the first member may begin to read all of them"
    await broker.heartbeat("a", 1, ALL)
    assert not given(await broker.heartbeat("b", 2)), "the first member reads all of them"
    await broker.heartbeat("a", 1, kept)
    assert given(await broker.heartbeat("b", 2)) == ALL - kept


async def test_what_a_member_was_never_told_of_need_not_be_reported() -> None:
    """Between two of its heartbeats it gets partitions, and they are taken away again: it hears of nothing new."""
    broker, kept = await when_a_is_to_share()
    epoch = (await broker.heartbeat("a", 1, kept))["member_epoch"]
    assert given(await broker.heartbeat("b", epoch)) == ALL - kept
    await broker.heartbeat("b", -1)
    await broker.join("c")
    for _ in range(3):
        told = await broker.heartbeat("a", epoch)
        assert given(told) in (None, kept), "the first member has what it reads, and has nothing to report"
        epoch = told["member_epoch"]
    assert given(await broker.heartbeat("c", epoch)) == ALL - kept


async def test_a_report_that_is_lost_is_made_up_for_by_what_the_member_says_anew() -> None:
    """It had reported what it stops to read, so it does not take it; and it reports nothing twice."""
    broker, kept = await when_a_is_to_share()
    for _ in range(2):  # the first response is lost, too

        async def over_another_connection() -> None:
            again = await broker.heartbeat("a", 1, kept, subscribed_topic_names=["t"])
            assert given(again) == kept
            assert not given(await broker.heartbeat("b", 2)), "the first member may not have got the response"

        await asyncio.create_task(over_another_connection())
    assert given(await broker.heartbeat("a", 1)) == kept
    assert given(await broker.heartbeat("b", 2)) == ALL - kept


async def test_a_member_that_joins_again_releases_the_partitions_it_had() -> None:
    """It reports nothing where it is given nothing, as its report would be the same as before."""
    broker = Broker(Shard())
    await broker.join("a")
    await broker.heartbeat("a", 1, ALL)
    assert given(await broker.join("a")) == set()
    again = await broker.heartbeat("a", 1)
    for _ in range(3):
        if again.get("assignment") is not None and given(again):
            break
        again = await broker.heartbeat("a", again["member_epoch"])
    assert given(again) == ALL


class Connection:
    """A connection to a broker: all requests over it come from one task."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[Any, asyncio.Future[Fields]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            request, answer = await self._requests.get()
            answer.set_result(await request)

    async def send(self, request: Any) -> Fields:
        answer: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((request, answer))
        return await answer

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Client:
    """A Kafka client as far as its partitions go: it takes one assignment after the other, each in its own time.

    `reports_the_same`: whether it reports an assignment that changes nothing, as Java's client does and librdkafka not.
    """

    def __init__(self, name: str, *, reports_the_same: bool) -> None:
        self.name = name
        self.reads: set[int] = set()
        self._reports_the_same = reports_the_same
        self._connection: Connection | None = None
        self._epoch = 0
        self._is_full = True
        self._told: set[int] | None = None
        self._taking: set[int] | None = None
        self._has: set[int] = set()
        self._owes_report = False

    async def beat(self, broker: Broker, *, is_lost: bool) -> None:
        """Send a heartbeat; the response may be lost."""
        if self._connection is None:
            self._connection, self._is_full = Connection(), True
        fields: dict[str, Any] = {}
        owned = None
        if self._is_full or self._owes_report:
            owned, self._owes_report = set(self._has), False
        if self._is_full:
            fields = {"subscribed_topic_names": ["t"]}
        response = await self._connection.send(broker.heartbeat(self.name, self._epoch, owned, **fields))
        if is_lost:
            await self.disconnect()
            return
        if response["error_code"] == common_pb2.COORDINATOR_NOT_AVAILABLE:
            self._is_full = True
        elif response["error_code"]:
            assert response["error_code"] in (common_pb2.FENCED_MEMBER_EPOCH, common_pb2.UNKNOWN_MEMBER_ID), response
            self.reads, self._has, self._taking, self._told = set(), set(), None, None
            self._epoch, self._is_full, self._owes_report = 0, True, False
        else:
            self._is_full = False
            self._epoch = response["member_epoch"]
            if (now := given(response)) is not None:
                self._told = now

    async def disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def begin(self) -> None:
        """Begin to take what it was told last: first it stops to read what is not in it."""
        if self._taking is not None or self._owes_report or self._told is None:
            return
        told, self._told = self._told, None
        if told != self._has or self._reports_the_same:
            self._taking = told
            self.reads &= told

    def finish(self) -> None:
        """The application has returned from its callback: read, and report."""
        if self._taking is not None:
            self.reads, self._has, self._taking = set(self._taking), set(self._taking), None
            self._owes_report = True


async def _moves_partitions(rng: random.Random) -> None:
    shard = Shard()
    broker = Broker(shard)
    clients = [Client(name, reports_the_same=rng.random() < 0.5) for name in ("a", "b", "c")]
    away: set[Client] = set(clients[1:])

    def check() -> None:
        there = [each for each in clients if each not in away]
        for one, other in itertools.combinations(there, 2):
            assert not one.reads & other.reads, "no partition may have two readers"

    async def leave(client: Client) -> None:
        await client.disconnect()
        clients[clients.index(client)] = restarted = Client(client.name, reports_the_same=rng.random() < 0.5)
        away.add(restarted)
        await broker.heartbeat(client.name, -1)

    for _ in range(60):
        client = rng.choice(clients)
        what = rng.random()
        if client in away:
            away.discard(client)
        elif what < 0.04:
            await leave(client)
        elif what < 0.06:
            shard.restart()
            broker = Broker(shard)
        elif what < 0.08:
            await client.disconnect()
        elif what < 0.5:
            await client.beat(broker, is_lost=rng.random() < 0.05)
        elif what < 0.75:
            client.begin()
        else:
            client.finish()
        check()
    away.clear()
    for _ in range(300):
        for client in clients:
            await client.beat(broker, is_lost=False)
            client.begin()
            client.finish()
            check()
        shard.driver.now_ms += 1_000
    assert set().union(*(each.reads for each in clients)) == ALL, "every partition must have a reader in the end"
    for client in clients:
        await client.disconnect()


@hypothesis.given(st.integers(0, (1 << 64) - 1))
def test_however_slowly_clients_take_partitions_none_has_two_readers(seed: int) -> None:
    asyncio.run(_moves_partitions(random.Random(seed)))


async def test_another_coordinator_takes_a_member_back() -> None:
    shard = Shard()
    first = Broker(shard)
    await first.join("a")
    await first.heartbeat("a", 1, ALL)
    shard.restart()
    second = Broker(shard)
    unknown = await second.heartbeat("a", 1)
    assert unknown["error_code"] == common_pb2.COORDINATOR_NOT_AVAILABLE
    back = await second.heartbeat("a", 1, ALL, subscribed_topic_names=["t"])
    assert (given(back), back["member_epoch"]) == (ALL, 1)
    late = await second.heartbeat("c", 1, ALL, subscribed_topic_names=["t"])
    assert late["error_code"] == common_pb2.UNKNOWN_MEMBER_ID


async def test_a_static_member_comes_back_to_its_partitions() -> None:
    broker = Broker(Shard())
    await broker.join("a", instance_id="i")
    await broker.join("b")
    kept = given(await broker.heartbeat("a", 1, ALL))
    assert kept is not None
    await broker.heartbeat("a", 1, kept)
    early = await broker.join("a2", instance_id="i")
    assert early["error_code"] == common_pb2.UNRELEASED_INSTANCE_ID
    left = await broker.heartbeat("a", -2, instance_id="i")
    assert (left["error_code"], left["member_epoch"]) == (0, -2)
    back = await broker.join("a2", instance_id="i")
    assert given(back) == kept


async def test_who_leaves_is_gone_and_the_others_get_its_partitions() -> None:
    broker = Broker(Shard())
    await broker.join("a")
    await broker.heartbeat("a", 1, ALL)
    await broker.join("b")
    assert (await broker.heartbeat("a", -1))["error_code"] == 0
    assert given(await broker.heartbeat("b", 2)) == ALL
    assert (await broker.heartbeat("a", -1))["error_code"] == common_pb2.UNKNOWN_MEMBER_ID


async def test_refusals() -> None:
    broker = Broker(Shard())
    await broker.join("a")
    assert (await broker.heartbeat("a", 9))["error_code"] == common_pb2.FENCED_MEMBER_EPOCH
    pattern = await broker.join("b", subscribed_topic_regex="t(.*")
    assert pattern["error_code"] == errors.INVALID_REGULAR_EXPRESSION
    assert "missing )" in pattern["error_message"]
    backreference = await broker.join("b", subscribed_topic_regex=r"(a)\1")
    assert backreference["error_code"] == errors.INVALID_REGULAR_EXPRESSION, (
        "a pattern with a backreference must be refused, as by Kafka's engine, RE2"
    )
    long = await broker.join("b", subscribed_topic_regex="a" * 1_001)
    assert long["error_code"] == common_pb2.INVALID_REQUEST
    other = await broker.join("b", server_assignor="none")
    assert other["error_code"] == common_pb2.UNSUPPORTED_ASSIGNOR
    assert given(await broker.join("b", server_assignor="uniform")) is not None


async def test_a_regular_expression_is_matched_again_while_topics_come(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(Shard())

    def there(*names: str) -> None:
        topics = {topic_id(each): TopicImage(each, topic_id(each)) for each in names}
        broker.image = replace(
            broker.image, topics=topics, topic_id_by_name={each.name: key for key, each in topics.items()}
        )

    there("u", "__t")
    joined = await broker.heartbeat("a", 0, set(), subscribed_topic_regex="t|__t|x.*")
    assert given(joined) == set()
    there("u", "__t", "t", "tt")
    assert given(await broker.heartbeat("a", 1)) is None, (
        "the pattern must not be matched anew within some seconds of the last time"
    )
    monkeypatch.setattr(consumer_groups, "REGEX_EVERY_S", 0.0)
    epoch = joined["member_epoch"]
    for _ in range(3):
        answer = await broker.heartbeat("a", epoch)
        epoch = answer["member_epoch"]
        if (now := given(answer)) is not None:
            break
    assert now == ALL
    assert list(broker.apis._matches._found.values())[-1][1] == ("t",), (
        "a pattern must match whole names, and no internal topics"
    )
    assert given(await broker.heartbeat("a", epoch, ALL, subscribed_topic_regex="u")) == set()


async def test_an_expression_that_takes_long_to_match_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    image = MetadataImage(topics={T: TopicImage("t", T)}, topic_id_by_name={"t": T})
    matches = consumer_groups.Matches(lambda: image)
    with pytest.raises(consumer_groups.InvalidRegularExpression, match="too large: RE2 makes 5"):
        await matches.of("(.{1,30}){1,20}x")
    assert await matches.of("|".join(["t", *(f"topic-{number:x}-of-many" for number in range(45))])) == ("t",)
    monkeypatch.setattr(consumer_groups, "MAX_MATCH_S", -1.0)
    with pytest.raises(consumer_groups.InvalidRegularExpression, match="too long to match"):
        await matches.of("t+")
    monkeypatch.undo()
    with pytest.raises(consumer_groups.InvalidRegularExpression, match="too long to match"):
        await matches.of("t+")  # not tried again while the topics are these


async def test_an_expression_waits_for_others_for_a_while_only_and_not_if_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(Shard())
    matches = broker.apis._matches
    assert await matches.of("known.*") == ()
    begun, go_on, matching = threading.Event(), threading.Event(), consumer_groups._matching

    def slow(regex: str, image: MetadataImage) -> tuple[str, ...]:
        begun.set()
        go_on.wait(60)
        return matching(regex, image)

    monkeypatch.setattr(consumer_groups, "_matching", slow)
    monkeypatch.setattr(consumer_groups, "MAX_WAIT_S", 0.01)
    first = asyncio.create_task(matches.of("slow.*"))
    try:
        await asyncio.to_thread(begun.wait, 60)
        async with asyncio.timeout(30):
            assert await matches.of("known.*") == ()
            other = await broker.join("a", subscribed_topic_regex="other.*")
            assert other["error_code"] == common_pb2.COORDINATOR_NOT_AVAILABLE, (
                "the join must be answered with COORDINATOR_NOT_AVAILABLE, so that the client tries again"
            )
            first.cancel()
            await asyncio.wait([first])
            with pytest.raises(CoordinatorNotAvailable):
                await matches.of("other.*")  # the thread still runs
    finally:
        go_on.set()
    monkeypatch.setattr(consumer_groups, "MAX_WAIT_S", 30.0)
    assert await matches.of("other.*") == ()
    assert [*matches._found] == ["known.*", "slow.*", "other.*"]


async def test_a_silent_member_joins_anew() -> None:
    shard = Shard()
    broker = Broker(shard)
    await broker.join("a")
    shard.driver.now_ms += 20_000
    await broker.join("b")
    silent = await broker.heartbeat("a", 1, ALL, subscribed_topic_names=["t"])
    assert silent["error_code"] == common_pb2.UNKNOWN_MEMBER_ID
    assert given(await broker.join("a")) is not None


async def test_a_late_answer_is_not_taken_for_that_of_the_next_heartbeat() -> None:
    shard = Shard()
    broker = Broker(shard, **{"request.timeout.ms": 50})
    await broker.join("a")
    held: list[tuple[Any, Any]] = []
    shard.held = held
    assert (await broker.heartbeat("a", 1))["error_code"] == 15, (
        "the heartbeat must be answered with COORDINATOR_NOT_AVAILABLE (15), as it waits for replicas"
    )
    again = asyncio.ensure_future(broker.heartbeat("a", 1))
    await asyncio.sleep(0)
    shard.held = None
    shard.submit(*held[0])
    assert (await again)["error_code"] == 15, (
        "the next heartbeat must be answered with COORDINATOR_NOT_AVAILABLE (15), so that the client repeats everything"
    )
    told = await broker.heartbeat("a", 1, ALL, subscribed_topic_names=["t"])
    assert (told["error_code"], told["member_epoch"]) == (0, 1)
