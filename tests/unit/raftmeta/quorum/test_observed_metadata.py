"""An observer takes images whole or not at all, never an older one, and never one of another cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from grpc import aio

from raftlog.errors import BrokerUnavailable
from raftlog.v1 import metadata_pb2, metadata_pb2_grpc
from raftlog.v1.controller_pb2 import HeartbeatResponse
from raftlog.v1.metadata_pb2 import WatchResponse
from raftmeta.image import MetadataImage
from raftmeta.quorum import image_feed, observed_metadata
from raftmeta.quorum.config import Endpoint, ObserverConfig
from raftmeta.quorum.observed_metadata import ObservedMetadata, open_observed
from tests.support.metadata import claim, image_after, register
from tests.support.quorum import eventually, free_ports, run


class FakeController(metadata_pb2_grpc.MetadataServicer):
    """Sends the messages in the test's queue to every watcher."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[WatchResponse] = asyncio.Queue()
        self.asked_from: list[int] = []
        self.watching = 0
        """How many watch now: what is in the queue goes to any of them."""

    async def Get(self, request: object, context: object) -> metadata_pb2.MetadataResponse:
        raise NotImplementedError

    async def ApiVersions(self, request: object, context: object) -> metadata_pb2.ApiVersionsResponse:
        raise NotImplementedError

    async def Watch(self, request: metadata_pb2.WatchRequest, context: Any) -> AsyncIterator[WatchResponse]:
        self.asked_from.append(request.from_offset)
        self.watching += 1
        try:
            while True:
                yield await self.queue.get()
        finally:
            self.watching -= 1

    def snapshot(self, image: MetadataImage, pieces: int = 1) -> None:
        records = list(image.to_records())
        size = -(-len(records) // pieces)
        for start in range(0, len(records), size):
            self.queue.put_nowait(
                WatchResponse(
                    controller_epoch=image.controller_epoch,
                    metadata_offset=image.offset,
                    snapshot=True,
                    more=start + size < len(records),
                    records=records[start : start + size],
                )
            )


def observe(scenario: Callable[[ObservedMetadata, FakeController], Awaitable[None]], cluster_id: str = "test") -> None:
    async def whole() -> None:
        (port,) = free_ports(1)
        controller = FakeController()
        server = aio.server()
        metadata_pb2_grpc.add_MetadataServicer_to_server(controller, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        with ThreadPoolExecutor(1) as executor:
            config = ObserverConfig(9, {1: Endpoint("127.0.0.1", port)}, cluster_id)
            observer = await open_observed(config, executor)
            await observer.start()
            await scenario(observer, controller)
            await observer.close()
        await server.stop(None)

    run(whole)


OLD = image_after(claim(), register(1))
NEW = image_after(claim(), register(1), register(2))
LATER_EPOCH = image_after(claim(), register(1), claim(epoch=2))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("inline", [True, False])
def test_a_snapshot_is_taken_when_its_last_piece_is_there(
    pieces: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_metadata, "INLINE_RECORDS", 1_000 if inline else 0)

    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        told: list[object] = []
        observer.subscribe(lambda image, records: told.append(records))
        assert observer.waiting_for() != ""
        controller.snapshot(NEW, pieces)
        await eventually(lambda: observer.image == NEW, "the image")
        assert told == [None]
        assert controller.asked_from == [-1]
        assert observer.waiting_for() == ""

    observe(scenario)


def test_changes_are_applied_in_order_and_known_ones_passed_over() -> None:
    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        offsets: list[int] = []
        observer.subscribe(lambda image, records: offsets.append(image.offset))
        controller.snapshot(OLD)
        record = next(each for each in NEW.to_records() if each.broker.broker_id == 2)
        for offset in (OLD.offset, 7, 7, 6, 12):
            controller.queue.put_nowait(WatchResponse(controller_epoch=1, metadata_offset=offset, records=[record]))
        await eventually(lambda: observer.image.offset == 12, "the last change")
        assert offsets == [OLD.offset, 7, 12]
        changes = observer.changes_since(7)
        assert changes is not None
        assert [change.offset for change in changes] == [12]
        assert observer.changes_since(OLD.offset - 1) is None

    observe(scenario)


@pytest.mark.parametrize("older", [OLD, image_after(claim())])
def test_an_older_snapshot_is_refused_and_asked_for_again(
    older: MetadataImage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        controller.snapshot(NEW)
        await eventually(lambda: observer.image == NEW, "the image")
        controller.snapshot(older)
        await eventually(lambda: "older than" in caplog.text, "a refusal")
        assert observer.image == NEW
        await eventually(lambda: controller.asked_from[-1] == NEW.offset, "another watch, from there on")

    observe(scenario)


def test_a_watch_on_which_nothing_happens_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_metadata, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(observed_metadata, "BEHIND_S", 0.1)

    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        controller.snapshot(OLD)
        await eventually(lambda: observer.image == OLD, "the image")
        controller.snapshot(image_after(claim()))  # ends the watch
        await eventually(lambda: len(controller.asked_from) == 2, "another watch")
        await asyncio.sleep(1)
        assert controller.asked_from == [-1, OLD.offset]
        assert observer.waiting_for() == ""

    observe(scenario)


def test_controllers_that_stay_behind_are_given_more_and_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand brokers that left slow controllers every 0.3 s kept them slow for good (test_crowd.py)."""
    monkeypatch.setattr(observed_metadata, "BEHIND_S", 0.05)
    monkeypatch.setattr(observed_metadata, "MOST_BEHIND_S", 0.8)

    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        controller.snapshot(OLD)
        await eventually(lambda: observer.image == OLD, "the image")
        observer._on_heartbeat(HeartbeatResponse(metadata_offset=NEW.offset))
        asked_s = []
        for number in range(2, 7):
            await eventually(lambda number=number: len(controller.asked_from) == number, "another watch")  # type: ignore[misc]
            asked_s.append(time.monotonic())
        assert asked_s[-1] - asked_s[-2] > 0.5
        controller.snapshot(NEW)
        await eventually(lambda: observer.image == NEW, "the image")

    observe(scenario)


def test_an_epoch_never_goes_back() -> None:
    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        controller.snapshot(LATER_EPOCH)
        await eventually(lambda: observer.image.controller_epoch == 2, "the image")
        first_epoch = next(each for each in OLD.to_records() if each.HasField("controller"))
        controller.queue.put_nowait(WatchResponse(controller_epoch=1, metadata_offset=50, records=[first_epoch]))
        await eventually(lambda: len(controller.asked_from) > 1, "the watch is left")
        assert observer.image.controller_epoch == 2
        assert observer.image.offset == LATER_EPOCH.offset

    observe(scenario)


def test_another_cluster_is_refused_with_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_metadata, "CONNECT_TIMEOUT_S", 60.0)  # else that is a trouble of its own

    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        for _ in range(4):
            await eventually(lambda: controller.watching == 1, "the watch before is over")
            attempts = len(controller.asked_from)
            controller.snapshot(NEW)
            await eventually(lambda attempts=attempts: len(controller.asked_from) > attempts, "an attempt")  # type: ignore[misc]
        assert observer.image.offset == 0
        assert "'test'" in observer.waiting_for()
        assert "cluster.id" in observer.waiting_for()
        refusals = [
            record
            for record in caplog.records
            if record.levelno >= logging.ERROR and record.name == observed_metadata.logger.name
        ]
        assert len(refusals) == 1

    observe(scenario, cluster_id="mine")


@pytest.mark.parametrize("answers", [None, asyncio.CancelledError()])
def test_a_watch_that_gives_nonsense_or_is_cancelled_is_left_for_another_one(answers: object) -> None:
    class Call:
        async def read(self) -> object:
            if isinstance(answers, BaseException):
                raise answers
            return answers  # what gRPC gives for bytes that are no message

    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        with pytest.raises(BrokerUnavailable):
            await observer._follow(Call(), 1)

    observe(scenario)


def test_waiting_to_be_ready_pauses_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(observer: ObservedMetadata, controller: FakeController) -> None:
        loop = asyncio.get_running_loop()
        asked_s: list[float] = []

        async def barrier(timeout_s: float | None = None) -> int:
            asked_s.append(loop.time())
            raise BrokerUnavailable("at once")

        monkeypatch.setattr(observer._channel, "barrier", barrier)
        waiting = asyncio.create_task(observer.wait_ready())
        await eventually(lambda: len(asked_s) == 4, "attempts")
        waiting.cancel()
        pauses_s = [after - before for before, after in pairwise(asked_s)]
        assert min(pauses_s) > 0.9 * image_feed.READY_RETRY_S

    observe(scenario)
