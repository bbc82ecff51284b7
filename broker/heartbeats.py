"""A broker's heartbeats: they keep it registered, bring its lease, and say how far it has applied the metadata.

One stream to the active controller at a time, given up for another one as soon as the metadata names a newer
controller, or when no answer has come for longer than a lease lasts: a controller that is paused or cut off keeps its
connections open and says nothing. Not earlier, since an answer that is late may still bring a lease, and since the
stream itself notices most silences and then avoids that controller.

Stopping: `shut_down` asks for others to take the leaderships over, `release` gives the lease up and says so, and then
the controller need not wait for it to run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from broker.lease import ServingLease
from raftlog.errors import (
    BrokerIdNotRegistered,
    FencedError,
    InconsistentClusterId,
    InvalidRequestError,
    RaftlogError,
    StaleBrokerEpoch,
)
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from raftmeta.port import HeartbeatStream, MetadataPort

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 0.05
SHORTEST_GAP_S: Final = 0.005
"""Between two heartbeats, however much there is to tell."""
LEAVING_INTERVAL_S: Final = 0.02
"""Between two heartbeats of a broker that waits to be let go."""
RELEASE_S: Final = 0.4
"""How long a broker that stops waits to hear that the controller knows."""


@dataclass(frozen=True, slots=True)
class HeartbeatOptions:
    """Whose heartbeats they are, and how often. `answer_timeout_ms`: a stream silent for so long is given up."""

    broker_id: int
    broker_epoch: int
    cluster_id: str
    interval_ms: int
    answer_timeout_ms: int

    def __post_init__(self) -> None:
        assert self.answer_timeout_ms > self.interval_ms, "an answer has to have the time to come"


class Heartbeats:
    """States: new -> running (`start`) -> closed; running or failed, when the cluster has this broker no more.

    `applied_offset` returns the metadata offset up to which this broker acts. `on_fatal` is told once.
    """

    def __init__(
        self,
        metadata: MetadataPort,
        lease: ServingLease,
        options: HeartbeatOptions,
        applied_offset: Callable[[], int],
        on_fatal: Callable[[RaftlogError], None],
    ) -> None:
        self._metadata = metadata
        self._lease = lease
        self._options = options
        self._applied_offset = applied_offset
        self._on_fatal = on_fatal
        self._sequence = 0
        self._wants_shutdown = False
        self._lease_released = False
        self._may_shut_down = asyncio.Event()
        self._fenced = asyncio.Event()
        self._fenced.set()
        self._serving = asyncio.Event()
        self._due = asyncio.Event()
        self._moved = asyncio.Event()
        self._answered_epoch = -1
        self._answered_at_s = float("-inf")
        self._connected: bool | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def fenced(self) -> bool:
        """Whether the last answer said so; true before the first."""
        return self._fenced.is_set()

    def start(self) -> None:
        """Begin."""
        self._answered_at_s = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run(), name="heartbeats")

    def kick(self) -> None:
        """Send a heartbeat now: there is something to tell."""
        self._due.set()

    def follow(self, controller_epoch: int) -> None:
        """The metadata names a controller of this epoch: leave a stream to an older one."""
        if controller_epoch > self._answered_epoch:
            self._moved.set()

    async def wait_serving(self) -> None:
        """Return once this broker is unfenced and has its first lease."""
        await self._serving.wait()

    # The end

    async def shut_down(self, timeout_s: float) -> bool:
        """Have others take over what they can; return whether they have. Gives up early when no controller answers."""
        self._wants_shutdown = True
        self.kick()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not self._may_shut_down.is_set():
            silent_since_s = max(self._answered_at_s, deadline_s - timeout_s)
            until_s = min(deadline_s, silent_since_s + timeout_s / 2)
            if loop.time() >= until_s or self._task is None or self._task.done():
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_s - loop.time()):
                    await self._may_shut_down.wait()
        return True

    async def release(self) -> None:
        """Give the lease up, and tell the controller; nothing may be served any more."""
        self._lease.give_up()
        if not self._connected or self._fenced.is_set():
            return
        self._lease_released = True
        self.kick()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self._fenced.wait()

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # Streams

    async def _run(self) -> None:
        while True:
            try:
                await self._one_stream()
            except RaftlogError as error:
                if isinstance(error, (FencedError, InvalidRequestError)):
                    self._end(error)
                    return
                self._lost(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # gRPC says so to whoever reads from a call that somebody has cancelled; nobody has cancelled us
                self._lost(_Silent("the stream was broken off"))
            except Exception as error:  # a bug must not leave a broker behind that is never heard of again
                logger.exception("heartbeats failed")
                self._lost(error)
            await asyncio.sleep(RECONNECT_S)

    async def _one_stream(self) -> None:
        stream = await self._metadata.open_heartbeats()
        try:
            await self._exchange(stream)
        finally:
            with contextlib.suppress(RaftlogError):
                await stream.close()

    async def _exchange(self, stream: HeartbeatStream) -> None:
        """Send and receive until one of the two fails; raises its error."""
        self._moved.clear()
        sending = asyncio.create_task(self._send(stream))
        receiving = asyncio.create_task(self._receive(stream))
        leaving = asyncio.create_task(self._leave_older())
        tasks = (receiving, leaving, sending)  # what the controller says tells more than a write that failed
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done and not task.cancelled():
                    task.result()
            raise _Silent("the stream was broken off")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave_older(self) -> None:
        await self._moved.wait()
        raise _Silent("another controller was elected")

    async def _send(self, stream: HeartbeatStream) -> None:
        while True:
            self._due.clear()
            self._sequence += 1
            request = HeartbeatRequest(
                broker_id=self._options.broker_id,
                broker_epoch=self._options.broker_epoch,
                sequence=self._sequence,
                applied_offset=self._applied_offset(),
                wants_shutdown=self._wants_shutdown,
                cluster_id=self._options.cluster_id,
                lease_released=self._lease_released,
            )
            self._lease.sent(self._sequence)
            await stream.send(request)
            await asyncio.sleep(SHORTEST_GAP_S)
            with contextlib.suppress(TimeoutError):
                pause_s = LEAVING_INTERVAL_S if self._wants_shutdown else self._options.interval_ms / 1000
                async with asyncio.timeout(pause_s - SHORTEST_GAP_S):
                    await self._due.wait()

    async def _receive(self, stream: HeartbeatStream) -> None:
        while True:
            try:
                async with asyncio.timeout(self._options.answer_timeout_ms / 1000):
                    response = await stream.receive()
            except TimeoutError:
                raise _Silent(f"no answer to a heartbeat for {self._options.answer_timeout_ms} ms") from None
            self._take(response)

    def _take(self, response: HeartbeatResponse) -> None:
        self._answered_at_s = asyncio.get_running_loop().time()
        self._answered_epoch = response.controller_epoch
        if self._connected is not True:
            self._connected = True
            logger.info(
                "heartbeats are answered",
                extra={"event": "heartbeats_answered", "controller_epoch": response.controller_epoch},
            )
        if response.fenced:
            self._fenced.set()
            self._lease.revoke("the controller has fenced this broker")
        else:
            self._fenced.clear()
            if not self._lease_released:
                self._lease.granted(response.sequence, response.lease_ms)
        if response.may_shut_down and self._wants_shutdown:
            self._may_shut_down.set()
        if self._lease.valid():
            self._serving.set()

    def _lost(self, error: BaseException) -> None:
        if self._connected is not False:
            logger.warning(
                "no heartbeats to a controller: %s; trying again",
                error,
                extra={"event": "heartbeats_lost", "reason": str(error)},
            )
        self._connected = False

    def _end(self, error: RaftlogError) -> None:
        self._lease.revoke(str(error))
        broker_id = self._options.broker_id
        match error:
            case StaleBrokerEpoch():
                said = f"another process has registered as broker {broker_id} since; every node needs an id of its own"
            case BrokerIdNotRegistered():
                said = f"broker {broker_id} was unregistered; start it again if it is to be part of the cluster"
            case InconsistentClusterId():
                said = "the controllers belong to another cluster"
            case _:
                said = f"the controller refuses the heartbeats of broker {broker_id}"
        self._on_fatal(type(error)(f"{said} ({error})"))


class _Silent(RaftlogError):
    """A controller that says nothing. Never travels."""
