"""Streams of clients over their quotas, in virtual time: what is reported, what is held, and that others are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.log.partition_log import ReadResult
from broker.partition import produce_session
from broker.partition.fetch_session import FetchSession
from broker.partition.partition import Partition
from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas import client_quotas, manager
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.quotas.manager import LOOK_AGAIN_MS, QuotaManager, charge_here
from broker.security.caller import Caller
from broker.turns import SharedTurns
from raftlog.errors import ThrottlingQuotaExceeded
from raftlog.format import wire
from raftlog.v1 import log_pb2
from raftmeta.image import MetadataImage
from raftmeta.quotas import CONSUMER_BYTE_RATE, DEFAULT, PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE, QuotaEntity
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, FetchWriter, Parts, ProduceWriter, Requests
from tests.support.raw_client import RawClient
from tests.support.virtual_time import LoopClock, VirtualTimeLoop

WINDOW_MS = 1_000.0
BATCH = batch_of(b"x" * 10_000)
RATE = len(BATCH)
"""A quota of one batch a second."""


class Client:
    """One client's two streams at a broker."""

    def __init__(self, parts: Parts, quotas: QuotaManager, principal: str) -> None:
        who = Caller(principal)
        self.produce, self.answers = Requests[wire.Produce](), ProduceWriter()
        self.fetch, self.frames = Requests[log_pb2.FetchRequest](), FetchWriter()
        self._sent = 0
        produce = ProduceSession(
            parts.registry,
            SharedTurns(TURN_BYTES),
            HeavyWork(parts.disk),
            max_in_flight=100,
            default_timeout_ms=1_000_000,
            who=who,
            quotas=quotas,
        )
        fetch = FetchSession(
            parts.registry, DiskReads(parts.disk), max_frame_bytes=1, max_subscriptions=10, who=who, quotas=quotas
        )
        self.running = [
            asyncio.ensure_future(produce.run(aiter(self.produce), self.answers)),
            asyncio.ensure_future(fetch.run(aiter(self.fetch), self.frames)),
        ]

    def send(self, acks: log_pb2.Acks.ValueType = log_pb2.LEADER) -> None:
        self._sent += 1
        self.produce.send(RawClient.request(self._sent, [(TOPIC_ID, 0, 3, self._sent, BATCH)], acks))

    def read(self) -> None:
        self.fetch.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 30)))
        part = log_pb2.FetchPartition(subscription_id=1, topic_id=TOPIC_ID, leader_epoch=3)
        self.fetch.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part])))


class World:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.image = MetadataImage()
        self.quotas = QuotaManager(lambda: self.image, LoopClock(), WINDOW_MS)
        self.clients: list[Client] = []

    def client(self, principal: str) -> Client:
        self.clients.append(Client(self.parts, self.quotas, principal))
        return self.clients[-1]

    def set(self, entity: QuotaEntity, **values: float) -> None:
        self.image = replace(self.image, quotas={**self.image.quotas, entity: values})

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


@asynccontextmanager
async def world(path: Path) -> AsyncIterator[World]:
    async with Parts(path) as parts:
        made = World(parts)
        try:
            yield made
        finally:
            for client in made.clients:
                for task in client.running:
                    task.cancel()
                await asyncio.gather(*client.running, return_exceptions=True)


def run(path: Path, work: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with world(path) as made:
            await work(made)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_a_producer_over_its_quota_is_told_and_not_read(tmp_path: Path) -> None:
    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{PRODUCER_BYTE_RATE: RATE})
        greedy = made.client("User:greedy")
        for _ in range(5):
            greedy.send()
        answers = await greedy.answers.wait_for(2)
        assert [answer.throttle_time_ms for answer in answers] == [1, 1_000]
        assert greedy.produce.taken == 2
        await greedy.answers.wait_for(5)
        assert made.now_s == pytest.approx(3.0, abs=0.01)

    run(tmp_path, work)


def test_a_new_stream_does_not_end_the_debt_of_an_earlier_one(tmp_path: Path) -> None:
    """Else a client that opens a stream for each batch has no quota."""

    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{PRODUCER_BYTE_RATE: RATE})
        first = made.client("User:greedy")
        for _ in range(2):
            first.send()
        await first.answers.wait_for(2)
        for _ in range(3):
            late = made.client("User:greedy")
            late.send()
            await late.answers.wait_for(1)
        assert made.now_s == pytest.approx(3.0, abs=0.01)

    run(tmp_path, work)


@pytest.mark.parametrize(("principal", "most"), [("User:greedy", 2), ("User:ANONYMOUS", 3)])
def test_few_streams_are_left_unread_and_further_ones_end_with_their_answers(
    principal: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client sends meanwhile stays in the broker's memory: 2 000 windows were a gigabyte."""
    monkeypatch.setattr(manager, "MAX_HELD_OF_USER", 2)
    monkeypatch.setattr(manager, "MAX_HELD", 3)

    async def work(made: World) -> None:
        user = principal.removeprefix("User:")
        made.set(QuotaEntity(user), **{PRODUCER_BYTE_RATE: RATE / 2})
        clients = [made.client(principal) for _ in range(most + 1)]
        await asyncio.sleep(0.0001)  # all of them read
        for client in clients:
            client.send()
        for client in clients:
            await client.answers.wait_for(1)
        await asyncio.sleep(0.0001)
        assert [client.running[0].done() for client in clients] == [False] * most + [True]
        assert isinstance(clients[-1].running[0].exception(), ThrottlingQuotaExceeded)
        assert made.quotas._held.total() == most
        late = made.client(principal)
        late.send()
        await asyncio.sleep(0.0001)
        assert isinstance(late.running[0].exception(), ThrottlingQuotaExceeded)
        assert late.produce.taken == 0
        await asyncio.sleep(60)
        assert not made.quotas._held
        again = made.client(principal)
        again.send()
        await again.answers.wait_for(1)

    run(tmp_path, work)


def test_a_producer_with_acks_0_is_not_read_either(tmp_path: Path) -> None:
    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{PRODUCER_BYTE_RATE: RATE})
        greedy = made.client("User:greedy")
        for _ in range(5):
            greedy.send(log_pb2.NO_ACK)
        greedy.send()
        await greedy.answers.wait_for(1)
        assert made.now_s == pytest.approx(4.0, abs=0.01)

    run(tmp_path, work)


def test_while_one_client_is_held_others_are_served(tmp_path: Path) -> None:
    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{PRODUCER_BYTE_RATE: RATE, CONSUMER_BYTE_RATE: RATE})
        greedy, honest = made.client("User:greedy"), made.client("User:honest")
        for _ in range(100):
            greedy.send()
            honest.send()
        honest.read()
        answers = await honest.answers.wait_for(100)
        frames = await honest.frames.wait_for(100)
        assert made.now_s == 0, "streams of another user must not wait at all"
        assert not any(answer.throttle_time_ms for answer in answers)
        assert not any(frame.head.throttle_time_ms for message in frames for frame in message)
        assert greedy.produce.taken <= 2

    run(tmp_path, work)


def test_the_rate_in_the_long_run_is_the_quota(tmp_path: Path) -> None:
    """A client that does not obey, and has many requests on their way, gets its quota within a percent."""

    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{PRODUCER_BYTE_RATE: 3.5 * RATE})
        greedy = made.client("User:greedy")
        for _ in range(1_000):
            greedy.send()
        for count in range(100, 1_001, 100):
            await greedy.answers.wait_for(count)
        burst = 3.5 * RATE * WINDOW_MS / 1_000
        assert (1_000 * RATE - burst) / made.now_s == pytest.approx(3.5 * RATE, rel=0.01)

    run(tmp_path, work)


def test_a_consumer_over_its_quota_is_told_and_gets_nothing_meanwhile(tmp_path: Path) -> None:
    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{CONSUMER_BYTE_RATE: RATE})
        writer, greedy = made.client("User:writer"), made.client("User:greedy")
        for _ in range(5):
            writer.send()
        await writer.answers.wait_for(5)
        greedy.read()
        messages = await greedy.frames.wait_for(2)
        assert [message[-1].head.throttle_time_ms for message in messages[:2]] == [1, 1_000]
        messages = await greedy.frames.wait_for(5)
        assert made.now_s == pytest.approx(3.0, abs=0.01)

    run(tmp_path, work)


def test_a_consumer_is_not_charged_for_the_time_in_which_a_thread_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """request_percentage is time of the event loop, which serves others while a thread waits for the disk."""
    read, read_s = Partition.read, 0.2

    def cold(self: Partition, *arguments: Any, blocking: bool, **options: Any) -> ReadResult | None:
        if not blocking:
            return None
        time.sleep(read_s)
        return read(self, *arguments, blocking=True, **options)

    monkeypatch.setattr(Partition, "read", cold)

    async def work(made: World) -> None:
        made.set(QuotaEntity("reader"), **{REQUEST_PERCENTAGE: 50.0})
        writer, reader = made.client("User:writer"), made.client("User:reader")
        writer.send()
        await writer.answers.wait_for(1)
        reader.read()
        await reader.frames.wait_for(1)
        (usage,) = made.quotas.usage()
        assert 0 < usage.used < read_s * 1_000, "ms"

    run(tmp_path, work)


def test_a_producer_is_charged_for_the_time_in_which_threads_check_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of some KB may inflate to 64 MiB: no bytes on the wire and no time of the event loop would count."""
    monkeypatch.setattr(produce_session, "CHECK_ON_LOOP_BYTES", 1)
    check = HeavyWork.check

    async def slow(self: HeavyWork, *arguments: Any) -> Any:
        charge_here(5_000.0)
        return await check(self, *arguments)

    monkeypatch.setattr(HeavyWork, "check", slow)

    async def work(made: World) -> None:
        made.set(QuotaEntity("writer"), **{REQUEST_PERCENTAGE: 50.0})
        writer = made.client("User:writer")
        for _ in range(2):
            writer.send()
        (answer, *_) = await writer.answers.wait_for(1)
        assert answer.throttle_time_ms >= 9_000, "ms: 5,000 at 500 in a second, without the burst"
        await writer.answers.wait_for(2)
        assert made.now_s >= 9.0

    run(tmp_path, work)


def test_an_open_stream_is_charged_by_the_quotas_of_the_moment(tmp_path: Path) -> None:
    """What a stream charges is looked up once, and again when a quota comes, changes or goes."""

    async def work(made: World) -> None:
        writer = made.client("User:writer")

        async def told_ms(count: int) -> int:
            writer.send()
            return (await writer.answers.wait_for(count))[-1].throttle_time_ms

        assert await told_ms(1) == 0
        made.set(QuotaEntity("writer"), **{PRODUCER_BYTE_RATE: RATE / 2})
        assert await told_ms(2) == pytest.approx(1_000, abs=1)
        made.set(QuotaEntity("writer"), **{PRODUCER_BYTE_RATE: RATE * 10})
        assert await told_ms(3) <= 100, "the wait must be what is left of the debt at the new rate"
        made.image = MetadataImage()
        for count in range(4, 30):
            assert await told_ms(count) == 0

    run(tmp_path, work)


def test_a_stream_goes_on_with_its_debt_after_another_clients_rate_has_ended_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are bounded, and old ones end: a stream that has remembered one does not charge one that has ended."""
    monkeypatch.setattr(client_quotas, "MAX_BUCKETS", 10)

    async def work(made: World) -> None:
        made.set(QuotaEntity(DEFAULT), **{PRODUCER_BYTE_RATE: RATE * 2})
        writer = made.client("User:writer")
        writer.send()
        await writer.answers.wait_for(1)
        for number in range(20):
            made.quotas.produced(Caller(f"User:other-{number}"), 1)
        writer.send()
        await writer.answers.wait_for(2)
        used = {usage.scope.user: usage.used for usage in made.quotas.usage()}
        assert used["writer"] == len(BATCH), "a new rate must count from the first message after it"
        assert len(used) <= 10

    run(tmp_path, work)


def test_new_fetch_streams_do_not_end_the_debt_of_an_earlier_one(tmp_path: Path) -> None:
    """A consumer over its quota that opens stream after stream would get a message of each; many at once, too."""

    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{CONSUMER_BYTE_RATE: RATE})
        writer = made.client("User:writer")
        for _ in range(5):
            writer.send()
        await writer.answers.wait_for(5)
        readers = [made.client("User:greedy") for _ in range(10)]
        for reader in readers:
            reader.read()
        await asyncio.sleep(3.0)
        later = [made.client("User:greedy") for _ in range(10)]
        for reader in later:
            reader.read()
        await asyncio.sleep(2.0)
        messages = sum(len(reader.frames.written) for reader in (*readers, *later))
        assert messages <= 1 + 5 + 1, (
            f"{messages} messages left: at most 1 of a second's burst, 5 in five seconds, and 1 that may exceed the "
            "rate"
        )

    run(tmp_path, work)


@pytest.mark.parametrize("kind", ["produce", "fetch"])
def test_a_removed_quota_lets_a_held_client_go_on(tmp_path: Path, kind: str) -> None:
    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{PRODUCER_BYTE_RATE: 1, CONSUMER_BYTE_RATE: 1})
        writer, greedy = made.client("User:writer"), made.client("User:greedy")
        for _ in range(5):
            (greedy if kind == "produce" else writer).send()
        if kind == "fetch":
            await writer.answers.wait_for(5)
            greedy.read()
        writing = greedy.answers if kind == "produce" else greedy.frames
        (first,) = await writing.wait_for(1)
        told_ms = (
            first.throttle_time_ms if isinstance(first, log_pb2.ProduceResponse) else first[-1].head.throttle_time_ms
        )
        assert told_ms > 1_000_000
        made.image = MetadataImage()
        await writing.wait_for(5)
        assert made.now_s <= LOOK_AGAIN_MS / 1_000

    run(tmp_path, work)


def test_a_client_that_leaves_while_it_is_held_leaves_nothing_behind(tmp_path: Path) -> None:
    async def work(made: World) -> None:
        made.set(QuotaEntity("greedy"), **{PRODUCER_BYTE_RATE: 1, CONSUMER_BYTE_RATE: 1})
        before = asyncio.all_tasks()
        greedy = made.client("User:greedy")
        greedy.send()
        greedy.read()
        await greedy.answers.wait_for(1)
        await greedy.frames.wait_for(1)
        greedy.fetch.end()
        await greedy.running[1]
        greedy.running[0].cancel()
        await asyncio.gather(*greedy.running, return_exceptions=True)
        assert asyncio.all_tasks() == before

    run(tmp_path, work)
