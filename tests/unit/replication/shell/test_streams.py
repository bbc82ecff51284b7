"""Followers and leaders over real gRPC on loopback, with partitions in memory; streams that break or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from raftlog._client.security import dial
from raftlog.errors import BrokerUnavailable, RaftlogError, StaleBrokerEpoch, UnknownTopicId
from raftlog.format import iter_headers, wire
from raftlog.testing.layout import free_ports
from raftlog.testing.proxy import Network
from raftlog.v1 import replication_pb2
from raftlog.v1.replication_pb2 import ReplicaHello, ReplicateRequest
from replication.follower_session import FollowerOptions
from replication.pacing import LiveTraffic
from replication.ports import Replica
from replication.shell import fetchers as fetchers_module
from replication.shell import service as service_module
from replication.shell.fetchers import LeaderLink, ReplicaFetchers
from replication.shell.service import METHOD, SERVICE, WELCOME, LedPartitions, ReplicationService, now_ms
from replication.token_bucket import TokenBucket
from tests.support.batches import batch_of
from tests.support.held_timeouts import hold_timeouts
from tests.support.replica_parts import CLUSTER, FOLLOWER, LEADER, ME, OTHER, TOPIC, Followed, Led, MemoryLog
from tests.support.turns import counted_turns

SERVER_OPTIONS = [("grpc.so_reuseport", 0)]


class Leader:
    """A broker that leads, behind a real listener."""

    def __init__(self, *led: Led, me: int = LEADER) -> None:
        self.led = dict(enumerate(led))
        self.me = me
        self.refuse: Exception | None = None
        self.asked = 0
        self.service = ReplicationService()
        (self.port,) = free_ports(1)
        self._server: aio.Server | None = None
        self._reads = ThreadPoolExecutor(2)

    def _find(self, topic_id: bytes, partition: int) -> Led:
        if topic_id != TOPIC or partition not in self.led:
            raise UnknownTopicId("not here")
        return self.led[partition]

    def _check(self, replica: Replica) -> None:
        self.asked += 1
        if self.refuse is not None:
            raise self.refuse

    async def start(self, *, is_open: bool = True) -> None:
        self._server = aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self.service.handlers(),))
        assert self._server.add_insecure_port(self.address) == self.port
        await self._server.start()
        if is_open:
            self.open()

    def open(self) -> None:
        self.service.open(
            LedPartitions(
                me=self.me,
                cluster_id=CLUSTER,
                find=self._find,
                check_replica=self._check,
                reads=self._reads,
                max_frame_bytes=1 << 20,
                throttle=TokenBucket(),
            )
        )

    async def stop(self) -> None:
        self.service.close()
        if self._server is not None:
            async with asyncio.timeout(60):
                await self._server.stop(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def following(
    leader: Leader, *followed: Followed, address_of: Callable[[int], str | None] | None = None, me: Replica = ME
) -> AsyncIterator[ReplicaFetchers]:
    fetchers = ReplicaFetchers(me, CLUSTER, address_of or (lambda leader_id: leader.address), rng=random.Random(1))
    try:
        for one in followed:
            fetchers.follow(one, leader.me)
        yield fetchers
    finally:
        await fetchers.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(180):
            await scenario()

    asyncio.run(bounded())


def test_two_followers_copy_what_is_appended_and_it_is_committed() -> None:
    async def scenario() -> None:
        led = [Led(MemoryLog([1, 1]), live=(FOLLOWER, OTHER)) for _ in range(3)]
        mine = [Followed(MemoryLog(), partition=n) for n in range(3)]
        others = [Followed(MemoryLog(), partition=n) for n in range(3)]
        leader = Leader(*led)
        await leader.start()
        async with following(leader, *mine), following(leader, *others, me=Replica(OTHER, 30)):
            await until(lambda: all(one.high_watermark == 2 for one in led))
            for number in range(50):
                for one in led:
                    one.append(b"%d" % number)
                await asyncio.sleep(0)
            await until(lambda: all(one.high_watermark == 52 for one in led))
            for copy in (*mine, *others):
                assert copy.log.batches == led[copy.partition].log.batches
            await until(lambda: all(copy.high_watermark == 52 for copy in (*mine, *others)))
        await until(lambda: not leader.service)
        await leader.stop()
        assert all(one.open_by == {} for one in led)

    run(scenario)


def frame(subscription_id: int, *batches: bytes) -> wire.ReplicaFrame:
    head = replication_pb2.ReplicaFrame(subscription_id=subscription_id, high_watermark=7, traceparents=["00-1-2-01"])
    return wire.ReplicaFrame(head, memoryview(b"".join(batches)))


BATCHES = [batch_of(b"%d" % number) for number in range(10)]


def test_a_message_of_many_batches_is_taken_in_pieces() -> None:
    frames = [frame(1, *BATCHES[:1]), frame(2, *BATCHES[1:9]), frame(3), frame(4, BATCHES[9])]
    pieces = list(fetchers_module.in_pieces(frames, 3))
    assert [[(head.subscription_id, bytes(records)) for head, records in piece] for piece in pieces] == [
        [(1, BATCHES[0]), (2, b"".join(BATCHES[1:3]))],
        [(2, b"".join(BATCHES[3:6]))],
        [(2, b"".join(BATCHES[6:9]))],
        [(3, b""), (4, BATCHES[9])],
    ]
    heads = [head for piece in pieces for head, _ in piece]
    assert [len(head.traceparents) for head in heads] == [1, 1, 0, 0, 1, 1], "a span for each record, not more"
    assert {head.high_watermark for head in heads} == {7}


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6), st.integers(1, 5), st.binary(max_size=80))
def test_pieces_hold_what_came_and_no_more_batches_than_asked(chosen: list[list[int]], most: int, rest: bytes) -> None:
    """Also if the last batch is cut short, or is none."""
    frames = [frame(number, *(BATCHES[each] for each in some), rest) for number, some in enumerate(chosen)]
    pieces = list(fetchers_module.in_pieces(frames, most))
    whole = dict.fromkeys(range(len(frames)), b"")
    for piece in pieces:
        assert piece
        assert sum(sum(1 for _ in iter_headers(records)) for _, records in piece if not rest) <= most
        for head, records in piece:
            whole[head.subscription_id] += bytes(records)
    assert whole == {number: bytes(records) for number, (_, records) in enumerate(frames)}
    assert len(pieces) <= 1 + sum(max(1, len(some) + 2 * bool(rest)) for some in chosen) // most


def test_between_two_pieces_the_event_loop_does_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of 1 MiB may have 4,000 batches, and each is appended by itself."""

    async def scenario() -> None:
        taken: list[int] = []
        messages = [[frame(1, *BATCHES * 64)]]

        class Call:
            async def read(self) -> Any:
                return messages.pop() if messages else aio.EOF

        link = LeaderLink(
            ME,
            LEADER,
            CLUSTER,
            TokenBucket(),
            LiveTraffic(),
            FollowerOptions(),
            lambda leader_id: None,
            random.Random(1),
        )
        monkeypatch.setattr(fetchers_module, "_ending", lambda call: asyncio.sleep(0, BrokerUnavailable("ended")))
        async with counted_turns() as others:
            monkeypatch.setattr(link.session, "handle", lambda frames, now: taken.append(others.count))
            with pytest.raises(BrokerUnavailable, match="ended"):
                await link._read(Call())
        assert len(taken) == 10
        assert taken == list(range(taken[0], taken[0] + 10)), "each in another turn"

    run(scenario)


def test_a_cold_log_is_read_off_the_loop() -> None:
    async def scenario() -> None:
        led, followed = Led(MemoryLog()), Followed(MemoryLog())
        led.append(*(b"x" * 1000 for _ in range(5_000)))
        led.cold_below = led.log.end
        leader = Leader(led)
        await leader.start()
        async with following(leader, followed):
            await until(lambda: led.high_watermark == 5_000)
        assert followed.log.batches == led.log.batches
        await leader.stop()

    run(scenario)


def test_a_leader_that_comes_back_is_found_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dials = 0

    def counted(*arguments: Any) -> aio.Channel:
        nonlocal dials
        dials += 1
        return dial(*arguments)

    monkeypatch.setattr(fetchers_module, "dial", counted)

    async def scenario() -> None:
        led, followed = Led(MemoryLog()), Followed(MemoryLog())
        leader = Leader(led)
        await leader.start()
        async with following(leader, followed) as fetchers:
            led.append(b"a")
            await until(lambda: led.high_watermark == 1)
            await leader.stop()
            await until(lambda: bool(fetchers.troubles()))
            led.append(b"b")
            await asyncio.sleep(0.3)
            await leader.start()
            before = dials
            await until(lambda: led.high_watermark == 2)
            assert dials <= before + 1, (
                f"the first call after the leader came back must succeed, but {dials - before} were needed"
            )
            assert fetchers.troubles() == {}
        await leader.stop()

    run(scenario)


def test_a_broker_that_is_starting_is_asked_until_it_serves() -> None:
    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        leader = Leader(led)
        await leader.start(is_open=False)
        async with following(leader, followed) as fetchers:
            await until(lambda: "starting or stopping" in fetchers.troubles().get(LEADER, ""))
            leader.open()
            await until(lambda: led.high_watermark == 1)
        await leader.stop()

    run(scenario)


def test_a_follower_that_is_refused_says_why_once_and_keeps_asking(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetchers_module, "REFUSED_RETRY_S", 0.02)

    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        leader = Leader(led)
        leader.refuse = StaleBrokerEpoch("broker 2 has registered anew")
        await leader.start()
        async with following(leader, followed) as fetchers:
            await until(lambda: "has registered anew" in fetchers.troubles().get(LEADER, ""))
            await until(lambda: leader.asked >= 10)
            leader.refuse = BrokerUnavailable("not heard of yet")
            await until(lambda: "not heard of yet" in fetchers.troubles().get(LEADER, ""))
            leader.refuse = None
            await until(lambda: led.high_watermark == 1)
        await leader.stop()

    with caplog.at_level(logging.ERROR, "replication.shell.fetchers"):
        run(scenario)
    assert [record.getMessage() for record in caplog.records if record.name == fetchers_module.logger.name] == [
        "broker 1 refuses this broker as a follower: StaleBrokerEpoch: broker 2 has registered anew"
    ]


def test_a_leader_that_stays_unreachable_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetchers_module, "UNREACHABLE_AFTER_S", 0.2)

    def told() -> list[logging.LogRecord]:
        return [each for each in caplog.records if getattr(each, "event", "") == "leader_unreachable"]

    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        leader = Leader(led)
        async with following(leader, followed):
            await until(lambda: bool(told()))
            await asyncio.sleep(1.0)  # it dials again several times
            (record,) = told()
            assert record.levelname == "WARNING"
            assert f"cannot reach broker {LEADER} at {leader.address}" in record.message
            assert "advertised.inter.node.listener" in record.message
            await leader.start()
            await until(lambda: led.high_watermark == 1)
            await leader.stop()
            await until(lambda: len(told()) == 2)

    run(scenario)


def test_another_broker_at_the_leaders_address_is_noticed() -> None:
    async def scenario() -> None:
        leader = Leader(Led(MemoryLog([1])), me=OTHER)
        await leader.start()
        fetchers = ReplicaFetchers(ME, CLUSTER, lambda leader_id: leader.address)
        fetchers.follow(Followed(MemoryLog()), LEADER)
        await until(lambda: "took broker 3 for broker 1" in fetchers.troubles()[LEADER])
        await fetchers.close()
        await leader.stop()

    run(scenario)


def test_a_leader_that_moves_is_followed_to_its_new_address() -> None:
    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        first, second = Leader(led), Leader(led)
        await first.start()
        await second.start()
        address: list[str | None] = [None]
        async with following(first, followed, address_of=lambda leader_id: address[0]) as fetchers:
            await until(lambda: "not known where broker 1 listens" in fetchers.troubles()[LEADER])
            for leader in (first, second):
                address[0] = leader.address
                fetchers.endpoints_changed()
                await until(lambda leader=leader: len(leader.service) == 1)  # type: ignore[misc] # of this round
                led.append(b"x")
                await until(lambda: led.high_watermark == led.log.end)
            await until(lambda: len(first.service) == 0)
        await first.stop()
        await second.stop()

    run(scenario)


def test_a_partition_that_changes_its_leader_is_taken_from_one_stream_to_the_other() -> None:
    async def scenario() -> None:
        first, second = Leader(Led(MemoryLog([1]))), Leader(Led(MemoryLog([1, 2, 2]), 2), me=OTHER)
        second.led[0].live = {FOLLOWER}
        await first.start()
        await second.start()
        addresses = {LEADER: first, OTHER: second}
        followed = Followed(MemoryLog())
        async with following(first, followed, address_of=lambda who: addresses[who].address) as fetchers:
            await until(lambda: first.led[0].high_watermark == 1)
            followed.leader_epoch = 2
            fetchers.follow(followed, OTHER)
            await until(lambda: second.led[0].high_watermark == 3)
            await until(lambda: first.led[0].open_by == {})
            assert followed.log.batches == second.led[0].log.batches
        await first.stop()
        await second.stop()

    run(scenario)


def test_a_link_that_nobody_needs_any_more_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers_module, "LINGER_S", 0.05)

    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        leader = Leader(led)
        await leader.start()
        async with following(leader, followed) as fetchers:
            await until(lambda: led.high_watermark == 1)
            fetchers.unfollow(TOPIC, 0)
            fetchers.unfollow(TOPIC, 0)
            fetchers.follow(followed, LEADER)
            await asyncio.sleep(0.1)
            assert len(leader.service) == 1
            fetchers.unfollow(TOPIC, 0)
            await until(lambda: len(leader.service) == 0)
            fetchers.follow(followed, LEADER)
            await until(lambda: len(leader.service) == 1)
        await leader.stop()

    run(scenario)


def test_a_leader_that_falls_silent_is_given_up_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers_module, "HELLO_TIMEOUT_S", 1.0)
    monkeypatch.setattr(fetchers_module, "SILENCE_S", 2.0)

    async def scenario() -> None:
        led, followed = Led(MemoryLog()), Followed(MemoryLog())
        leader = Leader(led)
        await leader.start()
        network = Network([FOLLOWER], {LEADER: leader.port})
        port = network.ports[FOLLOWER][LEADER]
        try:
            async with following(leader, followed, address_of=lambda who: f"127.0.0.1:{port}") as fetchers:
                led.append(b"a")
                await until(lambda: led.high_watermark == 1)
                network.cut([FOLLOWER], [LEADER])
                led.append(b"b")
                await until(lambda: bool(fetchers.troubles()))
                network.heal()
                await until(lambda: led.high_watermark == 2)
        finally:
            await asyncio.to_thread(network.close)
        await leader.stop()

    run(scenario)


def test_the_empty_messages_of_an_idle_leader_keep_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "SIGN_OF_LIFE_MS", 50.0)
    monkeypatch.setattr(fetchers_module, "SILENCE_S", 0.5)

    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        leader = Leader(led)
        await leader.start()
        with caplog.at_level(logging.INFO, logger=fetchers_module.__name__):
            async with following(leader, followed):
                await until(lambda: led.high_watermark == 1)
                caplog.clear()
                await asyncio.sleep(1.5)
                assert "it has sent nothing" not in caplog.text
        await leader.stop()

    run(scenario)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (ReplicateRequest(live_credit_bytes=1), "says hello"),
        (ReplicateRequest(hello=ReplicaHello(cluster_id="other", leader_id=LEADER)), "InconsistentClusterId"),
        (ReplicateRequest(hello=ReplicaHello(cluster_id=CLUSTER, leader_id=LEADER), close=[1]), "never opened"),
        (b"\xff\xff\xff", ""),
    ],
)
def test_who_breaks_the_protocol_has_the_stream_ended_with_the_reason(
    first: ReplicateRequest | bytes, words: str
) -> None:
    async def scenario() -> None:
        leader = Leader(Led(MemoryLog()))
        await leader.start()
        async with aio.insecure_channel(leader.address) as channel:
            call: Any = channel.stream_stream("/raftlog.v1.Replication/Replicate")()
            await call.write(first if isinstance(first, bytes) else first.SerializeToString())
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert words in (caught.value.details() or "")
            assert caught.value.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL)
        await until(lambda: len(leader.service) == 0)
        await leader.stop()

    run(scenario)


async def _no_time() -> None:
    """Take none."""


class Breaker:
    """A leader that welcomes its followers and breaks their streams off after a while."""

    def __init__(self) -> None:
        self.dials: list[float] = []
        self.lasts: Callable[[], Awaitable[None]] = _no_time
        self.port = 0
        self._server = aio.server()

    async def _replicate(self, request_iterator: object, context: aio.ServicerContext[Any, Any]) -> None:
        self.dials.append(asyncio.get_running_loop().time())
        await context.read()
        await context.send_initial_metadata((WELCOME,))
        await self.lasts()
        await context.abort(grpc.StatusCode.INTERNAL, "a bug that hits every stream")

    async def __aenter__(self) -> Breaker:
        handler = grpc.stream_stream_rpc_method_handler(
            self._replicate, replication_pb2.ReplicateRequest.FromString, wire.encode_replicate
        )
        handlers: dict[str, Any] = {METHOD: handler}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        async with asyncio.timeout(60):
            await self._server.stop(None)


def fetchers_of(port: int) -> ReplicaFetchers:
    return ReplicaFetchers(ME, CLUSTER, lambda broker_id: f"127.0.0.1:{port}")


def test_a_leader_that_welcomes_and_breaks_every_stream_is_dialled_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetchers_module, "OF_USE_S", 60.0)  # however long breaking one off takes

    async def scenario() -> None:
        async with Breaker() as leader:
            fetchers = fetchers_of(leader.port)
            fetchers.follow(Followed(MemoryLog()), LEADER)
            await until(lambda: len(leader.dials) >= 9)
            await fetchers.close()
            pauses = [after - before for before, after in pairwise(leader.dials)]
            assert max(pauses[4:]) >= 0.14, "the longest pause must be at least half of what it has grown to"
            assert leader.dials[8] - leader.dials[0] >= 0.45, (
                "the pauses together must be at least half of what they may be"
            )

    run(scenario)


class Hesitant:
    """A leader that accepts connections at once, and each stream only after a while, as one without CPU time does."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.asked = 0
        (self.port,) = free_ports(1)
        self._server: aio.Server | None = None

    async def Replicate(self, request_iterator: object, context: aio.ServicerContext[Any, Any]) -> None:
        self.asked += 1
        await asyncio.sleep(self.pause_s)
        await context.send_initial_metadata((WELCOME,))
        await asyncio.sleep(600)

    async def __aenter__(self) -> Hesitant:
        self._server = aio.server(options=SERVER_OPTIONS)
        stream = grpc.stream_stream_rpc_method_handler(self.Replicate, ReplicateRequest.FromString, bytes)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: stream}),))
        assert self._server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        await self._server.stop(0)


def test_a_leader_that_is_slow_to_answer_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is asked anew again and again, and the partition waits until its followers have left the ISR."""
    monkeypatch.setattr(fetchers_module, "HELLO_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with Hesitant(0.5) as leader:
            fetchers = fetchers_of(leader.port)
            fetchers.follow(Followed(MemoryLog()), LEADER)
            await until(lambda: fetchers.troubles() == {})
            assert leader.asked > 1
            await fetchers.close()

    run(scenario)


def test_a_leader_that_moves_before_it_has_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers_module, "HELLO_TIMEOUT_S", 600.0)

    async def scenario() -> None:
        led = Led(MemoryLog([1]))
        leader = Leader(led)
        await leader.start()
        async with Hesitant(600) as before:
            address = [f"127.0.0.1:{before.port}"]
            async with following(leader, Followed(MemoryLog()), address_of=lambda leader_id: address[0]) as fetchers:
                await until(lambda: before.asked > 0)
                address[0] = leader.address
                fetchers.endpoints_changed()
                await until(lambda: led.high_watermark == 1)
        await leader.stop()

    run(scenario)


def test_a_stream_that_was_of_use_is_dialled_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers_module, "OF_USE_S", 0.2)
    monkeypatch.setattr(fetchers_module, "FIRST_RETRY_S", 600.0)
    monkeypatch.setattr(fetchers_module, "LAST_RETRY_S", 600.0)

    async def scenario() -> None:
        async with Breaker() as leader:
            fetchers = fetchers_of(leader.port)
            fetchers.follow(Followed(MemoryLog()), LEADER)
            link = fetchers._links[LEADER]
            leader.lasts = lambda: until(lambda: link._up and now_ms() - link._up_ms > 300)
            await until(lambda: len(leader.dials) >= 4)
            await fetchers.close()

    run(scenario)


def test_a_stream_that_never_says_hello_ends_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_STREAMS", 3)
    hellos = hold_timeouts(monkeypatch, service_module)

    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        leader = Leader(led)
        await leader.start()
        async with aio.insecure_channel(leader.address) as channel:
            method: Any = channel.stream_stream(
                f"/{SERVICE}/{METHOD}",
                request_serializer=replication_pb2.ReplicateRequest.SerializeToString,
                response_deserializer=wire.decode_replicate,
            )
            calls = [method() for _ in range(3)]
            await until(lambda: len(leader.service) == 3)
            async with following(leader, followed) as fetchers:
                await until(lambda: "streams" in fetchers.troubles().get(LEADER, ""))
                hellos.expire()
                await until(lambda: led.high_watermark == 1)
                await until(lambda: len(leader.service) == 1)
                for call in calls:
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
                    assert "no hello came" in await call.details()
        await leader.stop()

    run(scenario)


def test_a_stream_that_does_not_end_holds_up_no_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetchers_module, "CLEAN_UP_S", 0.1)

    async def scenario() -> None:
        may_end = asyncio.Event()

        async def stubborn(link: LeaderLink) -> RaftlogError:
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()
            await may_end.wait()
            raise asyncio.CancelledError

        monkeypatch.setattr(LeaderLink, "_one_stream", stubborn)
        fetchers = fetchers_of(1)
        fetchers.follow(Followed(MemoryLog()), LEADER)
        await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await fetchers.close()
        assert any("do not end" in message for message in caplog.messages)
        may_end.set()

    run(scenario)


def test_a_connection_that_does_not_close_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers_module, "CLEAN_UP_S", 0.05)

    async def scenario() -> None:
        may_end = asyncio.Event()
        dials = []
        insecure_channel = aio.insecure_channel

        def dial(address: str, options: Any) -> Any:
            if address != "127.0.0.1:1":  # the channel of another client in this process
                return insecure_channel(address, options)
            dials.append(address)
            return StuckChannel(may_end)

        monkeypatch.setattr(aio, "insecure_channel", dial)
        fetchers = fetchers_of(1)
        fetchers.follow(Followed(MemoryLog()), LEADER)
        await until(lambda: len(dials) >= 3)
        async with asyncio.timeout(60):
            await fetchers.close()
        may_end.set()

    run(scenario)


class StuckChannel:
    """A channel on which no call is possible, and which does not close."""

    def __init__(self, may_end: asyncio.Event) -> None:
        self._may_end = may_end

    def stream_stream(self, *method: object, **options: object) -> Any:
        raise BrokerUnavailable("no call is possible")

    async def close(self) -> None:
        await self._may_end.wait()
