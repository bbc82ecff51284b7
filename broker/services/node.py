"""The `Node` service: what a node tells of itself, for `raftlog doctor` and support bundles.

It is there on the inter-node listener from the start, while the node still waits for its quorum, and on the client
listener of brokers, which ask other nodes on behalf of clients: nobody but nodes reaches a controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import resource
import shutil
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from broker.clock import Clock
from broker.config import BrokerConfig
from broker.loop_lag import LoopLagMonitor
from broker.observability.health import Health
from broker.security.caller import caller
from broker.services.configs import describe_broker
from broker.services.log_dirs import LogsView
from raftlog import __version__
from raftlog._client.connections import from_grpc, open_channel
from raftlog._core.redaction import shown
from raftlog.errors import BrokerOverloaded, InvalidRequestError, RaftlogError, RequestTimedOut, StorageError, to_wire
from raftlog.v1 import node_pb2
from raftlog.v1.admin_pb2 import ConfigEntry
from raftlog.v1.security_pb2 import Acl
from raftmeta.acls import CLUSTER_NAME
from raftmeta.features import supported_ranges
from raftmeta.image import MetadataImage
from raftmeta.quorum.config import Endpoint
from raftmeta.quorum.description import RaftView

logger = logging.getLogger(__name__)

SERVICE: Final = "raftlog.v1.Node"
METHOD: Final = "DescribeNode"
PASSED_ON_S: Final = 4.0
"""How long another node may take to answer; less than the client waits for the broker that asks it."""
MOST_PASSED_ON: Final = 16
"""Questions to other nodes that are under way; whoever asks more is told to come back."""
LOGS_AT_A_TIME: Final = 500
"""Logs whose sizes are added up until the event loop turns."""

Ask = Callable[[int], Awaitable[node_pb2.DescribeNodeResponse]]
AddressOf = Callable[[int], str | None]
"""Where a node listens for other nodes, as `host:port`; None while that is not known."""
_Context = aio.ServicerContext[Any, Any]


class Voter(Protocol):
    """What is asked of a node that has a vote."""

    def raft_view(self) -> RaftView: ...


class Certificate(Protocol):
    """What is asked of a node that speaks TLS."""

    @property
    def expires_ms(self) -> int: ...


class NodeFacts:
    """What is known of this node. The parts of a server add to it as they come up; on the event loop.

    `image`: the newest metadata. `voter`: None on a node without a vote. `tls`: None where no
    listener speaks it. `logs`: None before they are recovered, and on
    a node that keeps none. Listeners are `host:port`, "" where there is none.
    """

    def __init__(self, config: BrokerConfig, clock: Clock, loop_lag: LoopLagMonitor, health: Health) -> None:
        self._config = config
        self._clock = clock
        self._loop_lag = loop_lag
        self._health = health
        self._started_ms = clock.monotonic_ms()
        self.image: Callable[[], MetadataImage] = MetadataImage
        self.voter: Voter | None = None
        self.tls: Certificate | None = None
        self.logs: LogsView | None = None
        self.client_listener = ""
        self.inter_node_listener = ""
        self.metrics_listener = ""

    @property
    def node_id(self) -> int:
        """Of this node."""
        return self._config.node_id

    async def describe(self) -> node_pb2.NodeInfo:
        """Return everything; the clock is read last, so that the way back is all that makes it old."""
        config, image = self._config, self.image()
        info = await asyncio.to_thread(_process)
        info.MergeFrom(
            node_pb2.NodeInfo(
                node_id=config.node_id,
                cluster_id=image.cluster_id or config.cluster_id,
                version=__version__,
                roles=config.process_roles,
                not_ready=self._health.ready()[1].get("reason", ""),
                client_listener=self.client_listener,
                inter_node_listener=self.inter_node_listener,
                metrics_listener=self.metrics_listener,
                metadata_offset=image.offset,
                controller_id=image.controller_id,
                controller_epoch=image.controller_epoch,
                loop_lag=node_pb2.LoopLag(
                    measurements=sum(self._loop_lag.counts),
                    largest_ms=self._loop_lag.largest_ms,
                    share_above_10_ms=self._loop_lag.share_above(10),
                    share_above_100_ms=self._loop_lag.share_above(100),
                ),
                features=supported_ranges(),
                configs=[_without_secret(entry) for entry in describe_broker(image, config)],
            )
        )
        if self.tls is not None:
            info.certificate_expires_ms = self.tls.expires_ms
        if self.voter is not None:
            info.voter.CopyFrom(_voter(self.voter.raft_view()))
        info.log_dirs.extend(await self._log_dirs())
        info.uptime_ms = round(self._clock.monotonic_ms() - self._started_ms)
        info.wall_clock_ms = self._clock.now_ms()
        return info

    async def _log_dirs(self) -> list[node_pb2.NodeLogDir]:
        found: list[node_pb2.NodeLogDir] = []
        if self._config.is_broker:
            found += [node_pb2.NodeLogDir(path=path) for path in self._config.log_dirs]
        if self._config.is_controller:
            found.append(node_pb2.NodeLogDir(path=self._config.metadata_log_dir, metadata=True))
        offline: Mapping[str, object] = {} if self.logs is None else self.logs.offline_dirs
        reasons = {_normalized(path): reason for path, reason in offline.items()}
        for log_dir in found:
            reason = None if log_dir.metadata else reasons.get(_normalized(log_dir.path))
            if reason is None:
                try:
                    log_dir.total_bytes, log_dir.usable_bytes = await asyncio.to_thread(_space, log_dir.path)
                except OSError as error:
                    reason = error
            if reason is not None:
                log_dir.error.CopyFrom(to_wire(StorageError(f"log directory {log_dir.path} is offline: {reason}")))
        if self.logs is not None:
            await _add_logs({_normalized(each.path): each for each in found if not each.metadata}, self.logs)
        return found


class NodeService:
    """Answers for this node, and for others where it can `pass_on` the question to them."""

    def __init__(self, facts: NodeFacts, pass_on: Ask | None = None) -> None:
        self._facts = facts
        self._pass_on = pass_on

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handler."""
        describe = grpc.unary_unary_rpc_method_handler(
            self.DescribeNode,
            node_pb2.DescribeNodeRequest.FromString,
            node_pb2.DescribeNodeResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: describe})

    async def DescribeNode(
        self, request: node_pb2.DescribeNodeRequest, context: _Context
    ) -> node_pb2.DescribeNodeResponse:
        """Describe this node, or the one that is named; its configs to those who may describe configs."""
        response = await self._describe(request)
        if not caller.get().may(Acl.DESCRIBE_CONFIGS, Acl.CLUSTER, CLUSTER_NAME, log=False):
            response.node.ClearField("configs")
        return response

    async def _describe(self, request: node_pb2.DescribeNodeRequest) -> node_pb2.DescribeNodeResponse:
        wanted = request.node_id if request.HasField("node_id") else self._facts.node_id
        try:
            if wanted == self._facts.node_id:
                return node_pb2.DescribeNodeResponse(node=await self._facts.describe())
            if self._pass_on is None:
                raise InvalidRequestError(f"this is node {self._facts.node_id}, which was asked about node {wanted}")
            return await self._pass_on(wanted)
        except RaftlogError as error:
            return node_pb2.DescribeNodeResponse(error=to_wire(error))
        except Exception as error:  # a bug here must reach the client as an answer, not as a broken connection
            logger.exception("a node could not be described")
            return node_pb2.DescribeNodeResponse(error=to_wire(error))


def pass_on_to(address_of: AddressOf, open_to: Callable[[str], aio.Channel] = open_channel) -> Ask:
    """Return who asks other nodes, on their inter-node listeners. Asked rarely, so that no connection is kept."""

    room = asyncio.Semaphore(MOST_PASSED_ON)

    async def ask(node_id: int) -> node_pb2.DescribeNodeResponse:
        if room.locked():
            raise BrokerOverloaded(f"{MOST_PASSED_ON} questions to other nodes are under way; ask again a little later")
        async with room:
            return await ask_now(node_id)

    async def ask_now(node_id: int) -> node_pb2.DescribeNodeResponse:
        address = address_of(node_id)
        if address is None:
            raise InvalidRequestError(f"there is no node {node_id} in this cluster, or nobody knows where it listens")
        request = node_pb2.DescribeNodeRequest(node_id=node_id)
        async with open_to(address) as channel:
            call: Any = channel.unary_unary(
                f"/{SERVICE}/{METHOD}",
                request_serializer=node_pb2.DescribeNodeRequest.SerializeToString,
                response_deserializer=node_pb2.DescribeNodeResponse.FromString,
            )
            try:
                response: node_pb2.DescribeNodeResponse | None = await call(request, timeout=PASSED_ON_S)
            except aio.AioRpcError as error:
                failure = from_grpc(error, address)
                if failure.retriable:  # one that says so by itself: that there is no connection never travels
                    failure = RequestTimedOut(f"node {node_id} does not answer other nodes: {failure}")
                raise failure from None
        if response is None:
            raise RequestTimedOut(f"node {node_id} at {address} sends what is no answer")
        return response

    return ask


def _voter(view: RaftView) -> node_pb2.VoterInfo:
    return node_pb2.VoterInfo(
        role=view.role,
        term=view.term,
        leader_id=view.leader_id,
        commit_index=view.commit_index,
        applied_index=view.last_applied,
        last_index=view.last_index,
        snapshot_index=view.snapshot_index,
    )


def _without_secret(entry: ConfigEntry) -> ConfigEntry:
    return ConfigEntry(
        key=entry.key, value=shown(entry.key, entry.value), source=entry.source, read_only=entry.read_only
    )


def _normalized(path: str) -> str:
    return os.path.abspath(path)


def _space(path: str) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


async def _add_logs(dirs: Mapping[str, node_pb2.NodeLogDir], logs: LogsView) -> None:
    for number, log in enumerate(list(logs.logs())):
        log_dir = dirs.get(_normalized(os.path.dirname(os.fspath(log.directory))))
        if log_dir is not None:
            log_dir.partitions += 1
            log_dir.log_bytes += log.size_bytes
        if number % LOGS_AT_A_TIME == LOGS_AT_A_TIME - 1:
            await asyncio.sleep(0)


def _process() -> node_pb2.NodeInfo:
    """Return what the operating system says of this process; not on the event loop: it reads files."""
    return node_pb2.NodeInfo(
        hostname=socket.gethostname(),
        pid=os.getpid(),
        python_version=platform.python_version(),
        platform=platform.platform(),
        log_file=_log_file(),
        open_files=_open_files(),
    )


def _open_files() -> node_pb2.OpenFiles:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (-1 if limit == resource.RLIM_INFINITY else limit for limit in limits)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = -1
    return node_pb2.OpenFiles(used=used, soft_limit=soft, hard_limit=hard)


def _log_file() -> str:
    """Return the file that standard error goes to, which is where the server logs; "" when it is none."""
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):
            return os.readlink("/proc/self/fd/2")
    except OSError:
        pass
    return ""


def node_address(voters: Mapping[int, tuple[str, int]], of_broker: AddressOf, node_id: int) -> str | None:
    """Return where a node listens for others: a broker where it says, a controller where the list of voters does."""
    address = of_broker(node_id)
    if address is not None or node_id not in voters:
        return address
    return Endpoint(*voters[node_id]).address
