"""Followers and leaders over real gRPC on loopback, with partitions in memory."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from raftlog._client.tls import dial
from raftlog.errors import BrokerUnavailable, StaleBrokerEpoch, UnknownTopicId
from raftlog.testing.layout import free_ports
from raftlog.testing.proxy import Network
from raftlog.v1.replication_pb2 import ReplicaHello, ReplicateRequest
from replication.ports import Replica
from replication.shell import fetchers as fetchers_module
from replication.shell.fetchers import ReplicaFetchers
from replication.shell.service import LedPartitions, ReplicationService
from replication.token_bucket import TokenBucket
from tests.support.replica_parts import CLUSTER, FOLLOWER, LEADER, ME, OTHER, TOPIC, Followed, Led, MemoryLog

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
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
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
            assert dials <= before + 1, "the first call that finds it there succeeds"
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
