"""A broker's registration, and the heartbeats that keep it.

`register` repeats the registration while an earlier process of this broker may still be alive. Heartbeats renew the
lease and report how far this broker has applied the metadata.

There is one heartbeat stream at a time, to the active controller. The broker leaves it when the metadata names a newer
controller, or when no answer has come for longer than a lease lasts: a paused or partitioned controller keeps its
connections open and stays silent. It does not leave earlier, since a late answer may still renew the lease, and since
the stream itself notices most silences and then avoids that controller.

Stop: `shut_down` asks the controller to move this broker's leaderships. `release` gives up the lease and reports it, so
that the controller need not wait until the lease has expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from broker.server.lease import ServingLease
from raftlog.errors import (
    BrokerIdNotRegistered,
    DuplicateBrokerRegistration,
    FencedError,
    InconsistentClusterId,
    InvalidRequestError,
    RaftlogError,
    StaleBrokerEpoch,
)
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand, RegisterBrokerCommand
from raftmeta.decide.brokers import MAX_UNSYNCED_TOPICS
from raftmeta.features import supported_ranges
from raftmeta.port import HeartbeatStream, MetadataPort

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.25
LAST_RETRY_S: Final = 2.0
"""Bound on the pause between attempts; every attempt adds an entry to the metadata log."""
PATIENCE_SESSIONS: Final = 2
"""Sessions to wait for: a controller elected meanwhile grants the earlier process another one."""
PATIENCE_MARGIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Registration:
    """A broker's registration. `lock_identity`: see `broker.server.broker_role.lock_identity`.

    `directory_id` is the id of the first working log directory, `other_directory_ids` are those of the others.
    `previous_broker_epoch`: from the mark of a clean shutdown; None if the last stop was not clean. The inter-node
    address and that for Kafka clients may be empty. `synced_broker_epoch` and `unsynced_topic_ids`: from
    `broker.log.log_dir.Served`.
    """

    broker_id: int
    host: str
    port: int
    rack: str
    directory_id: bytes
    lock_identity: bytes
    previous_broker_epoch: int | None
    inter_node_host: str = ""
    inter_node_port: int = 0
    other_directory_ids: tuple[bytes, ...] = ()
    synced_broker_epoch: int | None = None
    unsynced_topic_ids: frozenset[bytes] = frozenset()
    kafka_host: str = ""
    kafka_port: int = 0

    def command(self, incarnation_id: bytes) -> MetadataCommand:
        """Return the command that registers this process.

        With more topics than a registration may name, it vouches for none.
        """
        vouches = len(self.unsynced_topic_ids) <= MAX_UNSYNCED_TOPICS
        return MetadataCommand(
            register_broker=RegisterBrokerCommand(
                broker_id=self.broker_id,
                incarnation_id=incarnation_id,
                host=self.host,
                port=self.port,
                rack=self.rack,
                directory_id=self.directory_id,
                other_directory_ids=self.other_directory_ids,
                lock_identity=self.lock_identity,
                inter_node_host=self.inter_node_host,
                inter_node_port=self.inter_node_port,
                kafka_host=self.kafka_host,
                kafka_port=self.kafka_port,
                previous_broker_epoch=self.previous_broker_epoch,
                synced_broker_epoch=self.synced_broker_epoch if vouches else None,
                unsynced_topic_ids=sorted(self.unsynced_topic_ids) if vouches else (),
                features=supported_ranges(),
            )
        )


async def register(
    metadata: MetadataPort,
    registration: Registration,
    session_timeout_ms: int,
    on_wait: Callable[[str], None] = lambda awaited: None,
) -> int:
    """Register and return the broker epoch; `on_wait` is called with a description of what the broker waits for.

    Raises:
        DuplicateBrokerRegistration: another process with this id stays alive; the error names its address.
        RaftlogError: the registration is refused for another reason.
    """
    loop = asyncio.get_running_loop()
    incarnation_id = uuid.uuid4().bytes
    deadline_s = loop.time() + PATIENCE_SESSIONS * session_timeout_ms / 1000 + PATIENCE_MARGIN_S
    pause_s = 0.0
    while True:
        try:
            result = await metadata.propose(registration.command(incarnation_id))
        except DuplicateBrokerRegistration as error:
            known = metadata.image.brokers.get(registration.broker_id)
            where = f"{known.host}:{known.port}" if known is not None else "an unknown address"
            if loop.time() >= deadline_s:
                raise DuplicateBrokerRegistration(
                    f"another process runs as broker {registration.broker_id} at {where} and stays alive; "
                    "stop it, or give this node its own node.id and directories"
                ) from error
            if not pause_s:
                on_wait(f"the session of the process registered as broker {registration.broker_id} at {where} to end")
                logger.warning(
                    "broker %d is registered already, at %s; waiting for that process's session to end",
                    registration.broker_id,
                    where,
                )
            pause_s = min(max(FIRST_RETRY_S, 2 * pause_s), LAST_RETRY_S)
            await asyncio.sleep(max(0.0, min(pause_s, deadline_s - loop.time())))
        else:
            return result.broker_epoch


RECONNECT_S: Final = 0.05
SHORTEST_GAP_S: Final = 0.005
"""Minimum between two heartbeats."""
LEAVING_INTERVAL_S: Final = 0.02
"""Between two heartbeats of a broker that waits for permission to shut down."""
RELEASE_S: Final = 0.4
"""How long a stopping broker waits for the controller to confirm the released lease."""


@dataclass(frozen=True, slots=True)
class HeartbeatOptions:
    """The broker, and its timing. `answer_timeout_ms`: a stream that is silent for so long is left."""

    broker_id: int
    broker_epoch: int
    cluster_id: str
    interval_ms: int
    answer_timeout_ms: int

    def __post_init__(self) -> None:
        assert self.answer_timeout_ms > self.interval_ms, "an answer needs longer than an interval"


class Heartbeats:
    """States: new -> running (`start`) -> closed; running -> failed when the cluster refuses this broker for good.

    `applied_offset` returns the metadata offset up to which this broker acts. `on_fatal` is called at most once.
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
        """Whether the last answer fenced this broker; True before the first."""
        return self._fenced.is_set()

    def start(self) -> None:
        """Start sending heartbeats."""
        self._answered_at_s = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run(), name="heartbeats")

    def kick(self) -> None:
        """Send a heartbeat now."""
        self._due.set()

    def follow(self, controller_epoch: int) -> None:
        """Leave the stream to a controller with an older epoch."""
        if controller_epoch > self._answered_epoch:
            self._moved.set()

    async def wait_serving(self) -> None:
        """Return once this broker is unfenced and has its first lease."""
        await self._serving.wait()

    # Stop

    async def shut_down(self, timeout_s: float) -> bool:
        """Ask the controller to move this broker's leaderships; return whether it has. Ends early without answers."""
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
        """Give up the lease, and report it to the controller; this broker must have stopped serving."""
        self._lease.give_up()
        if not self._connected or self._fenced.is_set():
            return
        self._lease_released = True
        self.kick()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self._fenced.wait()

    async def close(self) -> None:
        """Stop sending heartbeats."""
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
                # gRPC raises CancelledError in the reader of a cancelled call; this task itself is not cancelled
                self._lost(_Silent("the stream was broken off"))
            except Exception as error:  # after a bug, too, the broker has to go on sending heartbeats
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
        tasks = (receiving, leaving, sending)  # in this order: an answer explains more than a failed write
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
                said = f"another process has since registered as broker {broker_id}; every node needs its own id"
            case BrokerIdNotRegistered():
                said = f"broker {broker_id} was unregistered; restart it to make it part of the cluster again"
            case InconsistentClusterId():
                said = "the controllers belong to another cluster"
            case _:
                said = f"the controller refuses the heartbeats of broker {broker_id}"
        self._on_fatal(type(error)(f"{said} ({error})"))


class _Silent(RaftlogError):
    """A controller that does not answer. Never sent over the wire."""
