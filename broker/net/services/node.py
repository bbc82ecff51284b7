"""The `Node` service: a node describes itself, for `raftlog doctor` and support bundles.

The inter-node listener serves it from the start, while the node still waits for its quorum. On the client listener, a
broker also asks other nodes on a client's behalf, because clients cannot reach controllers.

Here as well: the entries of DescribeConfigs, with secrets hidden, and of DescribeLogDirs.
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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from broker.clock import Clock
from broker.config.config import BROKER_CONFIGS, BrokerConfig
from broker.observability.event_loop import LoopLagMonitor
from broker.observability.health import Health
from broker.security.caller import caller
from broker.turns import QUICK_AT_A_TIME, in_turns
from raftlog import __version__
from raftlog._client.connections import from_grpc, open_channel
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog._core.words import shown
from raftlog.config import ConfigKey
from raftlog.errors import (
    BrokerOverloaded,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    StorageError,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.v1 import node_pb2
from raftlog.v1.admin_pb2 import ConfigEntry, LogDirInfo, LogDirPartition, TopicConfigs
from raftlog.v1.records_pb2 import ConfigResource
from raftlog.v1.security_pb2 import Acl
from raftmeta.features import supported_ranges
from raftmeta.image import CLUSTER_DEFAULT, MetadataImage
from raftmeta.quorum.config import Endpoint
from raftmeta.quorum.description import RaftView
from raftmeta.topic_configs import BROKER_KEY_BY_TOPIC_KEY, DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS


def describe_topic(image: MetadataImage, topic: str, config: BrokerConfig) -> Iterator[ConfigEntry]:
    """Yield every topic key with the first value set: the topic's, the broker's dynamic, its file's, the default."""
    own = image.resource_configs(ConfigResource.TOPIC, topic)
    effective = {**config.topic_defaults, **image.topic_configs(topic, config.node_id)}
    dynamic = image.broker_configs(config.node_id)
    for key in TOPIC_CONFIGS:
        broker_key = BROKER_KEY_BY_TOPIC_KEY.get(key.name, "")
        if key.name in own:
            source = ConfigEntry.DYNAMIC_TOPIC
        else:
            source = _broker_source(broker_key, dynamic, config.static_keys)
        yield _entry(key, effective[key.name], source)


ONE_MORE_BYTES: Final = 8 << 10
"""Of a topic's own configs: so many bytes count as one more topic, by the time that it takes to describe them."""


async def describe_topics(
    image: MetadataImage, topics: Iterable[str], config: BrokerConfig, check: Callable[[str], None]
) -> list[TopicConfigs]:
    """Return the configs of many topics, without documentation; topics with the same configs share their entries.

    `check` raises the error of a topic that the caller may not see.
    """
    shared: dict[tuple[tuple[str, str], ...], TopicConfigs] = {}
    refused = []

    def weight(name: str) -> int:
        topic = image.topic(name)
        return 1 if topic is None else 1 + sum(map(len, topic.configs.values())) // ONE_MORE_BYTES

    async for name in in_turns(dict.fromkeys(topics), weight=weight):
        try:
            check(name)
            topic = image.topic(name)
            if topic is None:
                raise UnknownTopicOrPartition(f"there is no topic {name[:249]!r}")
        except RaftlogError as error:
            refused.append(TopicConfigs(topics=[name], error=to_wire(error)))
        else:
            own = tuple(sorted(topic.configs.items()))
            found = shared.get(own)
            if found is None:
                found = shared[own] = TopicConfigs(entries=describe_topic(image, name, config))
                for entry in found.entries:
                    entry.ClearField("documentation")
            found.topics.append(name)
    return [*shared.values(), *refused]


def describe_broker(image: MetadataImage, config: BrokerConfig) -> Iterator[ConfigEntry]:
    """Yield every server key of this broker."""
    dynamic = image.broker_configs(config.node_id)
    for key in BROKER_CONFIGS:
        value = dynamic.get(key.name, key.format(config.values[key.name]))
        yield _entry(key, value, _broker_source(key.name, dynamic, config.static_keys))


def describe_cluster_default(image: MetadataImage) -> Iterator[ConfigEntry]:
    """Yield the keys that can be set for all brokers together."""
    dynamic = image.resource_configs(ConfigResource.BROKER, CLUSTER_DEFAULT)
    for key in DYNAMIC_BROKER_CONFIGS:
        yield _entry(
            key, dynamic.get(key.name, key.format(key.default)), _broker_source(key.name, dynamic, frozenset())
        )


def _broker_source(
    broker_key: str, dynamic: Mapping[str, str], static_keys: frozenset[str]
) -> ConfigEntry.Source.ValueType:
    if broker_key in dynamic:
        return ConfigEntry.DYNAMIC_BROKER
    return ConfigEntry.STATIC_BROKER if broker_key in static_keys else ConfigEntry.DEFAULT


def _entry(key: ConfigKey, value: str, source: ConfigEntry.Source.ValueType) -> ConfigEntry:
    """Return an entry. A topic's values are numbers, choices and replicas, so secrets are sought in others only."""
    return ConfigEntry(
        key=key.name,
        value=value if key.name in TOPIC_CONFIGS else shown(key.name, value),
        source=source,
        read_only=not key.dynamic,
        documentation=key.doc,
    )


class LogView(Protocol):
    """The described properties of one partition's log."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def directory(self) -> str | os.PathLike[str]: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def segment_count(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...


class LogsView(Protocol):
    """All logs of this broker; `offline_dirs` maps a directory to the reason why it is offline."""

    @property
    def offline_dirs(self) -> Mapping[str, object]: ...
    def logs(self) -> Iterable[LogView]: ...


async def describe_log_dirs(paths: Sequence[str], logs: LogsView) -> list[LogDirInfo]:
    """Return each directory, in the order of the configuration; an offline one carries the reason."""
    partitions: dict[str, list[LogView]] = {}
    for log in logs.logs():
        partitions.setdefault(_normalized(os.path.dirname(os.fspath(log.directory))), []).append(log)
    offline = {_normalized(path): reason for path, reason in logs.offline_dirs.items()}
    infos = []
    for path in paths:
        info = LogDirInfo(path=path)
        reason = offline.get(_normalized(path))
        if reason is None:
            try:
                info.total_bytes, info.usable_bytes = await asyncio.to_thread(_space, path)
            except OSError as error:
                reason = error
        if reason is not None:
            info.error.CopyFrom(to_wire(StorageError(f"log directory {path} is offline: {reason}")))
        here = sorted(partitions.get(_normalized(path), []), key=lambda log: (log.topic, log.partition))
        async for log in in_turns(here, QUICK_AT_A_TIME):
            info.partitions.append(_partition(log))
        infos.append(info)
    return infos


def _partition(log: LogView) -> LogDirPartition:
    return LogDirPartition(
        topic=log.topic,
        partition=log.partition,
        size_bytes=log.size_bytes,
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        high_watermark=log.high_watermark,
        segments=log.segment_count,
    )


def _space(path: str) -> tuple[int, int]:
    """Return the total and the free bytes of the path's file system."""
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def _normalized(path: str) -> str:
    return os.path.abspath(path)


logger = logging.getLogger(__name__)

SERVICE: Final = "raftlog.v1.Node"
METHOD: Final = "DescribeNode"
PASSED_ON_S: Final = 4.0
"""How long another node may take to answer; less than the client's timeout for the broker that asks it."""
MOST_PASSED_ON: Final = 16
"""Concurrent requests to other nodes; further ones are refused with BrokerOverloaded."""

Ask = Callable[[int], Awaitable[node_pb2.DescribeNodeResponse]]
AddressOf = Callable[[int], str | None]
"""Returns where a node listens for other nodes, as `host:port`; None if unknown."""
_Context = aio.ServicerContext[Any, Any]


class Voter(Protocol):
    """A node's vote in the metadata quorum."""

    def raft_view(self) -> RaftView: ...


class Certificate(Protocol):
    """A node's certificate."""

    @property
    def expires_ms(self) -> int: ...


class NodeFacts:
    """The description of this node; each part of the server adds its own as it starts. For the event loop only.

    `image`: returns the newest metadata. `voter`: None on a node without a vote. `tls`: None if no listener uses TLS.
    `logs`: None until they are recovered, and on a pure controller. Listeners are `host:port`, "" if absent.
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
        """This node's id."""
        return self._config.node_id

    async def describe(self) -> node_pb2.NodeInfo:
        """Return the description. The clock is read last, so its only error is the response's way back."""
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
    """Describes this node; with `pass_on`, asks other nodes to describe themselves."""

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
        """Describe this node or the named one; with its configs if the caller may describe configs."""
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
                raise InvalidRequestError(
                    f"this is node {self._facts.node_id}, it cannot describe node {wanted}; ask that node, or a broker"
                )
            return await self._pass_on(wanted)
        except RaftlogError as error:
            return node_pb2.DescribeNodeResponse(error=to_wire(error))
        except Exception as error:  # a bug here must reach the client as an answer, not as a broken connection
            logger.exception("a node could not be described")
            return node_pb2.DescribeNodeResponse(error=to_wire(error))


def pass_on_to(address_of: AddressOf, open_to: Callable[[str], aio.Channel] = open_channel) -> Ask:
    """Return a function that asks other nodes on their inter-node listeners, over a new connection each time."""

    room = asyncio.Semaphore(MOST_PASSED_ON)

    async def ask(node_id: int) -> node_pb2.DescribeNodeResponse:
        if room.locked():
            raise BrokerOverloaded(f"{MOST_PASSED_ON} requests to other nodes are under way; try again later")
        async with room:
            return await ask_now(node_id)

    async def ask_now(node_id: int) -> node_pb2.DescribeNodeResponse:
        address = address_of(node_id)
        if address is None:
            raise InvalidRequestError(f"node {node_id} is not in this cluster, or its address is not known here")
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
                if failure.retriable:  # errors of a connection are never sent on
                    failure = RequestTimedOut(f"node {node_id} does not answer other nodes: {failure}")
                raise failure from None
        if response is None:
            raise RequestTimedOut(f"node {node_id} at {address} sent a response that cannot be parsed")
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


async def _add_logs(dirs: Mapping[str, node_pb2.NodeLogDir], logs: LogsView) -> None:
    async for log in in_turns(list(logs.logs())):
        log_dir = dirs.get(_normalized(os.path.dirname(os.fspath(log.directory))))
        if log_dir is not None:
            log_dir.partitions += 1
            log_dir.log_bytes += log.size_bytes


def _process() -> node_pb2.NodeInfo:
    """Return the operating system's facts about this process; reads files, so not for the event loop."""
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
    """Return the file that standard error, the server's log, is redirected to; "" if it is not a file."""
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):
            return os.readlink("/proc/self/fd/2")
    except OSError:
        pass
    return ""


def node_address(voters: Mapping[int, tuple[str, int]], of_broker: AddressOf, node_id: int) -> str | None:
    """Return where a node listens for other nodes: a broker's own address, else the list of voters' (a controller)."""
    address = of_broker(node_id)
    if address is not None or node_id not in voters:
        return address
    return Endpoint(*voters[node_id]).address
