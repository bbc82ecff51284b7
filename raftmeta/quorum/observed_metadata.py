"""`MetadataPort` on a node without the role controller: it watches the quorum.

One controller is watched at a time, any of them. Changes are applied in order; what is older than the image at hand is
never taken, wherever it comes from. The node turns to another controller when the one it watches breaks off, belongs
to another cluster, or stays behind what is known to be committed: it may be cut off from the others without noticing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, Final

import grpc

from raftlog._client.connections import from_grpc
from raftlog._client.security import dial
from raftlog.errors import BrokerUnavailable, InconsistentClusterId, InvalidRecord, RaftlogError, ShuttingDown
from raftlog.v1 import metadata_pb2, metadata_pb2_grpc
from raftlog.v1.common_pb2 import QuorumInfo
from raftlog.v1.controller_pb2 import HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand, MetadataRecord
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage
from raftmeta.port import Change, HeartbeatStream, Listener, Unsubscribe
from raftmeta.quorum.channel import ControllerChannel
from raftmeta.quorum.config import CHANNEL_OPTIONS, ObserverConfig
from raftmeta.quorum.image_feed import ImageFeed
from raftmeta.replay import image_from_records, replay_all

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.02
LAST_RETRY_S: Final = 0.3
BEHIND_S: Final = 0.3
"""After this time without the known committed changes the node leaves a controller for another one."""
MOST_BEHIND_S: Final = 5.0
"""If each controller in turn is behind, each gets twice the time of the previous one, up to this. They may be slow
rather than cut off, and every node that changes to them makes them slower."""
CONNECT_TIMEOUT_S: Final = 2.0
MAX_SNAPSHOT_RECORDS: Final = 10_000_000
INLINE_RECORDS: Final = 2_000
"""Up to this many records are applied on the event loop; a larger image is built in a thread."""


class ObservedMetadata:
    """States: new -> running (`start`) -> closed (`close`)."""

    def __init__(self, config: ObserverConfig, executor: Executor, rng: random.Random) -> None:
        self._config = config
        self._executor = executor
        self._rng = rng
        self._feed = ImageFeed()
        self._channel = ControllerChannel(
            config.node_id,
            config.controllers,
            lambda: self.cluster_id,
            timeout_ms=config.request_timeout_ms,
            on_heartbeat=self._on_heartbeat,
            rng=rng,
            tls=config.tls,
        )
        self._feed.subscribe(lambda image, _: self._channel.follow(image.controller_id, image.controller_epoch))
        order = sorted(config.controllers)
        rng.shuffle(order)
        self._rotation = itertools.cycle(order)
        self._task: asyncio.Task[None] | None = None
        self._watched: int | None = None
        self._troubles: dict[int, str] = {}
        self._committed_offset = -1
        self._behind_since_s: float | None = None
        self._patience_s = BEHIND_S
        self._closed = False

    # MetadataPort

    @property
    def image(self) -> MetadataImage:
        """The newest committed image that this node has received."""
        return self._feed.image

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command; see `MetadataPort`."""
        result = await self._channel.propose(command)
        await self._reached(result.offset)
        return result

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change from now on."""
        return self._feed.subscribe(listener)

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`, or None when they are not all kept."""
        return self._feed.changes_since(offset)

    async def barrier(self) -> int:
        """Return a metadata offset that covers all acknowledged before this call, once `image` shows it."""
        offset = await self._channel.barrier()
        await self._reached(offset)
        return offset

    async def describe_quorum(self) -> QuorumInfo:
        """Return the leader's view of the quorum, or another controller's while there is no leader."""
        return await self._channel.describe_quorum()

    async def open_heartbeats(self) -> HeartbeatStream:
        """Open a stream of heartbeats to the active controller; see `MetadataPort`."""
        return await self._channel.open_heartbeats()

    async def wait_ready(self) -> None:
        """Return once an active controller has been heard and `image` is as new as what it had committed by then."""

        async def barrier(timeout_s: float) -> int:
            offset = await self._channel.barrier(timeout_s)
            self._note_committed(offset)
            return offset

        await self._feed.wait_ready(
            barrier, lambda error: self._closed or (isinstance(error, RaftlogError) and not error.retriable)
        )

    def waiting_for(self) -> str:
        """Return the unreachable controllers as text for a log line; "" while one is watched."""
        if self._watched is not None and self._feed.image.controller_epoch > 0:
            return ""
        said = (f"{self._name(each)}: {why}" for each, why in sorted(self._troubles.items()))
        return "; ".join(said) or "an answer of a controller"

    @property
    def cluster_id(self) -> str:
        """As configured, or else of the image; "" before there is one."""
        return self._config.cluster_id or self._feed.image.cluster_id

    # Start and end

    async def start(self) -> None:
        """Begin to watch."""
        assert self._task is None
        self._task = asyncio.create_task(self._run(), name="watch-metadata")

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self._feed.close(ShuttingDown("this node is stopping; try another one"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    # What is known to be committed

    async def _reached(self, offset: int) -> None:
        self._note_committed(offset)
        await self._feed.reached(offset)

    def _on_heartbeat(self, response: HeartbeatResponse) -> None:
        self._note_committed(response.metadata_offset)

    def _note_committed(self, offset: int) -> None:
        self._committed_offset = max(self._committed_offset, offset)

    def _is_behind(self) -> bool:
        """Whether the watched controller has not shown for `_patience_s` what is known to be committed."""
        if self._feed.image.offset >= self._committed_offset:
            self._behind_since_s, self._patience_s = None, BEHIND_S
            return False
        now_s = time.monotonic()
        if self._behind_since_s is None:
            self._behind_since_s = now_s
        return now_s - self._behind_since_s > self._patience_s

    # Watching

    async def _run(self) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            target = next(self._rotation)
            try:
                await self._watch(target)
            except RaftlogError as error:
                if self._watched == target:
                    delay_s = FIRST_RETRY_S
                self._not_watched(target, error)
            except Exception as error:  # a bug, or an image that cannot be; another controller may have a better one
                logger.exception("watching %s failed", self._name(target))
                self._not_watched(target, InvalidRecord(f"{type(error).__name__}: {error}"))
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.5))
            delay_s = min(delay_s * 1.7, LAST_RETRY_S)

    def _not_watched(self, target: int, error: RaftlogError) -> None:
        why = str(error)
        if self._watched == target:
            self._watched = None
            logger.info(
                "stopped watching the metadata of %s: %s",
                self._name(target),
                why,
                extra={"event": "metadata_unwatched", "peer": target, "reason": why},
            )
        elif not error.retriable and self._troubles.get(target) != why:
            logger.error("%s cannot be watched: %s", self._name(target), why)
        self._troubles[target] = why

    async def _watch(self, target: int) -> None:
        """Follow one controller until it ends or is left.

        Raises:
            RaftlogError: always, with the reason.
        """
        where = self._name(target)
        channel = dial(self._config.controllers[target].address, CHANNEL_OPTIONS, self._config.tls)
        call: Any = None
        self._behind_since_s = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await channel.channel_ready()  # the call itself says nothing before there is a change
            offset = self._feed.image.offset if self._feed.image.controller_epoch > 0 else -1
            call = metadata_pb2_grpc.MetadataStub(channel).Watch(metadata_pb2.WatchRequest(from_offset=offset))
            if offset >= 0:
                self._now_watching(target)
            await self._follow(call, target)
        except TimeoutError:
            raise BrokerUnavailable("no connection") from None
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error, where) from None
        except asyncio.InvalidStateError:
            raise BrokerUnavailable("it closed the connection") from None
        finally:
            if call is not None:
                call.cancel()
            await channel.close()

    def _now_watching(self, target: int) -> None:
        if self._watched != target:
            self._watched = target
            self._troubles.pop(target, None)
            logger.info(
                "watching the metadata of %s",
                self._name(target),
                extra={"event": "metadata_watched", "peer": target, "metadata_offset": self._feed.image.offset},
            )

    async def _follow(self, call: Any, target: int) -> None:
        snapshot: list[MetadataRecord] | None = None
        pending: asyncio.Task[Any] | None = None
        try:
            while True:
                if pending is None:
                    pending = asyncio.create_task(call.read())
                # The read goes on while we look at the time: cancelling it would end the call.
                done, _ = await asyncio.wait((pending,), timeout=BEHIND_S / 2)
                if not done:
                    if self._is_behind():
                        self._patience_s = min(2 * self._patience_s, MOST_BEHIND_S)
                        raise BrokerUnavailable(
                            f"it stays at offset {self._feed.image.offset}, but {self._committed_offset} is committed"
                        )
                    continue
                if pending.cancelled():  # with the call, not by this task
                    raise BrokerUnavailable("the watch was cancelled")
                response, pending = pending.result(), None
                if response is grpc.aio.EOF:
                    raise BrokerUnavailable("it ended the watch")
                if response is None:
                    raise BrokerUnavailable("it sent a message that is not a metadata change")
                snapshot = await self._take(response, snapshot)
                if snapshot is None and self._feed.image.controller_epoch > 0:
                    self._now_watching(target)
        finally:
            if pending is not None:
                pending.cancel()

    async def _take(
        self, response: metadata_pb2.WatchResponse, snapshot: list[MetadataRecord] | None
    ) -> list[MetadataRecord] | None:
        """Apply a response; returns the records of a snapshot that goes on in the next one."""
        if response.snapshot:
            snapshot = snapshot or []
            snapshot.extend(response.records)
            if len(snapshot) > MAX_SNAPSHOT_RECORDS:
                raise InvalidRecord(f"a snapshot of more than {MAX_SNAPSHOT_RECORDS} records")
            if response.more:
                return snapshot
            await self._take_snapshot(snapshot, response.metadata_offset)
            return None
        if snapshot is not None:
            raise InvalidRecord("a change came in the middle of a snapshot")
        self._take_change(response)
        return None

    async def _take_snapshot(self, records: list[MetadataRecord], offset: int) -> None:
        if len(records) <= INLINE_RECORDS:
            image = image_from_records(records, offset)
        else:
            loop = asyncio.get_running_loop()
            image = await loop.run_in_executor(self._executor, image_from_records, records, offset)
        self._check_cluster(image)
        present = self._feed.image
        if (image.controller_epoch, image.offset) < (present.controller_epoch, present.offset) or (
            image.offset < present.offset
        ):
            raise BrokerUnavailable(
                f"it has offset {image.offset} of epoch {image.controller_epoch}, older than {present.offset} of epoch "
                f"{present.controller_epoch} here"
            )
        if image.offset > present.offset:
            self._feed.reset(image)

    def _take_change(self, response: metadata_pb2.WatchResponse) -> None:
        present = self._feed.image
        if response.metadata_offset <= present.offset:
            return  # known already
        image = replay_all(present, response.records, response.metadata_offset)
        if image.controller_epoch < present.controller_epoch:
            raise InvalidRecord(
                f"a change at offset {image.offset} goes back from epoch {present.controller_epoch} to "
                f"{image.controller_epoch}"
            )
        self._feed.publish(image, Change(image.offset, response.controller_epoch, tuple(response.records)))

    def _check_cluster(self, image: MetadataImage) -> None:
        if self.cluster_id and image.cluster_id and image.cluster_id != self.cluster_id:
            raise InconsistentClusterId(
                f"it belongs to the cluster {image.cluster_id!r} and this node to {self.cluster_id!r}: correct "
                "cluster.id, or the address in controller.quorum.voters"
            )

    def _name(self, target: int) -> str:
        return f"controller {target} at {self._config.controllers[target].address}"


async def open_observed(
    config: ObserverConfig, executor: Executor, *, rng: random.Random | None = None
) -> ObservedMetadata:
    """Return the observer; `start` it, then wait until it is ready."""
    return ObservedMetadata(config, executor, rng or random.Random())
