"""Heartbeats bring the lease, say how far the broker is, and end it when the cluster has it no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from broker.heartbeats import HeartbeatOptions, Heartbeats
from broker.lease import ServingLease
from raftlog.errors import (
    BrokerIdNotRegistered,
    BrokerUnavailable,
    InconsistentClusterId,
    NotController,
    RaftlogError,
    StaleBrokerEpoch,
)
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from tests.support import virtual_time
from tests.support.memory_metadata import FakeHeartbeats, MemoryMetadata
from tests.support.virtual_time import LoopClock

WAIT_S = 10.0


class Sender:
    """Heartbeats of broker 1, and what the test sees of them."""

    def __init__(self, interval_ms: int, answer_timeout_ms: int) -> None:
        self.metadata = MemoryMetadata()
        self.lease = ServingLease(LoopClock())
        self.applied_offset = 7
        self.fatal: list[RaftlogError] = []
        options = HeartbeatOptions(
            broker_id=1,
            broker_epoch=3,
            cluster_id="test",
            interval_ms=interval_ms,
            answer_timeout_ms=answer_timeout_ms,
        )
        self.heartbeats = Heartbeats(self.metadata, self.lease, options, lambda: self.applied_offset, self.fatal.append)

    async def stream(self) -> FakeHeartbeats:
        """Accept the next stream."""
        stream = FakeHeartbeats()
        self.metadata.streams.put_nowait(stream)
        return stream


def run(work: Callable[[Sender], Awaitable[None]], *, interval_ms: int = 50, answer_timeout_ms: int = 300) -> None:
    async def main() -> None:
        sender = Sender(interval_ms, answer_timeout_ms)
        sender.heartbeats.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await work(sender)
        finally:
            await sender.heartbeats.close()

    virtual_time.run(main())


def granted(request: HeartbeatRequest, lease_ms: int = 1200, **more: bool) -> HeartbeatResponse:
    return HeartbeatResponse(sequence=request.sequence, lease_ms=lease_ms, **more)  # type: ignore[arg-type] # flags


def test_a_lease_is_there_once_the_controller_grants_one() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        first = await stream.sent.get()
        assert (first.broker_id, first.broker_epoch, first.applied_offset, first.cluster_id) == (1, 3, 7, "test")
        stream.answer(granted(first, 0, fenced=True))
        sender.applied_offset = 9
        second = await stream.sent.get()
        assert (second.sequence, second.applied_offset) == (first.sequence + 1, 9)
        assert not sender.lease.valid()
        assert sender.heartbeats.fenced
        stream.answer(granted(second))
        await sender.heartbeats.wait_serving()
        assert sender.lease.valid()

    run(work)


def test_being_fenced_ends_the_lease_at_once() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        stream.answer(granted(await stream.sent.get()))
        await sender.heartbeats.wait_serving()
        stream.answer(granted(await stream.sent.get(), 0, fenced=True))
        await stream.sent.get()
        assert not sender.lease.valid()

    run(work)


def test_a_silent_controller_is_left_for_another_stream_and_sequences_rise_over_all_of_them() -> None:
    async def work(sender: Sender) -> None:
        silent = await sender.stream()
        first = await silent.sent.get()
        other = await sender.stream()
        second = await other.sent.get()
        assert silent.closed
        assert second.sequence > first.sequence
        other.answer(granted(second))
        await sender.heartbeats.wait_serving()

    run(work)


def test_a_newer_controller_is_followed_at_once_and_an_older_one_is_not() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        response = granted(await stream.sent.get())
        response.controller_epoch = 5
        stream.answer(response)
        await sender.heartbeats.wait_serving()
        sender.heartbeats.follow(5)
        await stream.sent.get()
        stayed = not stream.closed
        other = await sender.stream()
        sender.heartbeats.follow(6)
        await other.sent.get()
        assert stayed
        assert stream.closed

    run(work, answer_timeout_ms=60_000)  # its silence does not tell within the test


@pytest.mark.parametrize(
    "error",
    [
        NotController("another one leads"),
        BrokerUnavailable("broken"),
        asyncio.CancelledError(),  # gRPC's word for a call that another task has cancelled
        KeyError("a bug"),
    ],
)
def test_an_error_that_passes_opens_the_next_stream(error: BaseException) -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        await stream.sent.get()
        stream.answer(error)
        other = await sender.stream()
        other.answer(granted(await other.sent.get()))
        await sender.heartbeats.wait_serving()
        assert not sender.fatal

    run(work)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StaleBrokerEpoch("x"), "another process has registered as broker 1"),
        (BrokerIdNotRegistered("x"), "broker 1 was unregistered"),
        (InconsistentClusterId("x"), "another cluster"),
    ],
)
def test_a_broker_that_the_cluster_has_no_more_says_why_and_stops_serving(error: RaftlogError, words: str) -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        stream.answer(granted(await stream.sent.get()))
        await sender.heartbeats.wait_serving()
        stream.answer(error)
        while not sender.fatal:  # noqa: ASYNC110 # nobody announces it
            await asyncio.sleep(0.001)
        assert words in str(sender.fatal[0])
        assert type(sender.fatal[0]) is type(error)
        assert not sender.lease.valid()

    run(work)


def test_stopping_waits_until_others_have_taken_over_then_gives_the_lease_up() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        stream.answer(granted(await stream.sent.get()))
        await sender.heartbeats.wait_serving()
        leaving = asyncio.ensure_future(sender.heartbeats.shut_down(5.0))
        while not (request := await stream.sent.get()).wants_shutdown:
            stream.answer(granted(request))
        stream.answer(granted(request))
        request = await stream.sent.get()
        assert not leaving.done()
        stream.answer(granted(request, may_shut_down=True))
        assert await leaving
        releasing = asyncio.ensure_future(sender.heartbeats.release())
        while not (request := await stream.sent.get()).lease_released:
            stream.answer(granted(request))
        assert not sender.lease.valid()
        stream.answer(granted(request, fenced=True))
        await releasing
        assert not sender.lease.valid()

    run(work)


def test_stopping_without_a_controller_does_not_take_long() -> None:
    async def work(sender: Sender) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert not await sender.heartbeats.shut_down(0.4)
        await sender.heartbeats.release()
        assert loop.time() - began_s < 2.0

    run(work)


def test_what_the_controller_waits_for_is_told_early() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        await stream.sent.get()
        sender.heartbeats.kick()
        await stream.sent.get()

    run(work, interval_ms=60_000, answer_timeout_ms=90_000)  # the next one in turn does not come within the test
