"""A cluster in memory that speaks the client's wire contract, with faults on demand.

It keeps the contract's rules where clients depend on them (chains, credit, subscription ids, leader epochs) and is
scripted through `Faults`. It runs its nodes in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

import grpc

from broker.log.producer_state import ProducerStates
from raftlog.errors import (
    FencedLeaderEpoch,
    NotLeader,
    RaftlogError,
    UnknownLeaderEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.format import Buffer, decode_batch, pack_stamp, parse_header, validate_produced
from raftlog.v1 import (
    admin_pb2_grpc,
    group_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2_grpc,
    transaction_pb2_grpc,
)
from tests.support.fake_groups import FakeGroups, GroupNode
from tests.support.fake_services import AdminNode, MetadataNode, Node, TransactionNode

T = TypeVar("T")

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Faults:
    """What goes wrong. Counters count down; zero is no fault."""

    def __init__(self) -> None:
        self.refuse: list[RaftlogError] = []
        """Errors for the next batches, one each, instead of appending them."""
        self.late_headers = False
        """The headers of produce calls come once `acks_released`."""
        self.refuse_produce_calls = 0
        """So many calls end before the broker has said anything, once `acks_released`."""
        self.refuse_when: Callable[[str, int, int], RaftlogError | None] = lambda topic, partition, count: None
        """(topic, partition, batches asked so far) -> a refusal."""
        self.refuse_offsets: dict[int, RaftlogError] = {}
        """By partition: what `ListOffsets` says instead of an offset."""
        self.offsets_delay_s: dict[int, float] = {}
        """By node: how long `ListOffsets` takes."""
        self.drop_produce_before_append = 0
        self.drop_produce_after_append = 0
        """Break the stream at this many requests to come: before, or after appending without an answer."""
        self.drop_fetch_after_frames = 0
        self.ack_delay_s: Callable[[], float] = lambda: 0.0
        self.swallow_acks = 0
        self.max_message_bytes = 1 << 20
        self.duplicate_frames = False
        self.corrupt_frames = 0
        self.corrupt_partitions: set[int] = set()
        """Partitions that are damaged for good."""
        self.metadata_down = False
        self.refuse_producer_ids: list[RaftlogError] = []
        """Errors for the next requests for a producer id, one each."""
        self.producer_ids_delay_s: dict[int, float] = {}
        """By node: how long it takes to give a producer id."""
        self.refuse_followers: list[RaftlogError] = []
        """Errors for the next subscriptions at followers, one each."""


class Partition:
    """One log: stamped batches in order."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.leader_epoch = 0
        self.batches: list[bytes] = []
        self.start = 0
        self.end = 0
        self.truncated: tuple[int, int] | None = None
        """The last leader epoch of the records that were truncated, and from which offset on."""
        self.asked = 0
        self.duplicates = 0
        """Batches that were recognised as sent again."""
        self.changed = asyncio.Event()
        self.producers = ProducerStates()

    def append(self, batch: Buffer) -> int:
        header = validate_produced(batch)
        base = self.end
        duplicate = self.producers.check(header, 0)
        if duplicate is not None:
            self.duplicates += 1
            return duplicate.base_offset
        self.producers.note(header._replace(base_offset=base), 0)
        self.batches.append(pack_stamp(base, header.batch_length, self.leader_epoch) + bytes(batch[16:]))
        self.end = base + header.last_offset_delta + 1
        self.touch()
        return base

    def append_raw(self, batch: bytes) -> None:
        """Append a batch unchanged, for batches that no producer may send; it carries its own offsets."""
        self.batches.append(batch)
        self.end = parse_header(batch).next_offset
        self.touch()

    def touch(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def values(self) -> list[bytes | None]:
        """Every value, in order."""
        return [value for batch in self.batches for value in decode_batch(batch).columns.column("value").to_pylist()]


class Topic:
    def __init__(self, name: str, partitions: int, nodes: list[int]) -> None:
        self.name = name
        self.topic_id = uuid.uuid4().bytes
        self.partitions = [Partition(nodes[index % len(nodes)]) for index in range(partitions)]
        self.configs: dict[str, str] = {}


class FakeCluster:
    """Context manager: `with FakeCluster(nodes=2) as cluster: ... cluster.bootstrap`.

    All nodes share one log for a partition, so that every replica is always in sync; `racks` says where nodes stand.
    """

    transaction_node: type[TransactionNode] = TransactionNode  # type: ignore[type-abstract,unused-ignore] # generated stubs
    group_node: type[GroupNode] = GroupNode  # type: ignore[type-abstract,unused-ignore] # generated stubs

    def __init__(self, nodes: int = 1, racks: Mapping[int, str] | None = None) -> None:
        self.node_ids = list(range(1, nodes + 1))
        self.topics: dict[str, Topic] = {}
        self.faults = Faults()
        self.groups = FakeGroups()
        self.ports: dict[int, int] = {}
        self.requests: list[tuple[int, int]] = []
        """(node, batches) of each produce request."""
        self.messages: list[int] = []
        """How many requests each produce message had."""
        self.left_lanes: list[int] = []
        """The lanes that produce messages have named as left."""
        self.produce_calls: list[int] = []
        """The node of each produce call that was begun."""
        self.serves_many = True
        """Whether several producers may share a produce call; nodes of earlier versions serve one."""
        self.answered = 0
        """Produce requests whose answer was sent."""
        self.granted: dict[int, int] = {}
        """Credit granted minus bytes sent, by fetch stream."""
        self.least_credit = 0
        self.racks = dict(racks or {})
        self.last_producer_id = 1000
        self.metadata_offset = 0
        self.metadata_asked: list[int] = []
        """The node of each request for metadata that was answered."""
        self.topics_asked: list[list[str]] = []
        """The topics of each of these requests."""
        self.subscribed: list[tuple[int, log_pb2.FetchPartition]] = []
        """(node, what was asked for) of each subscription."""
        self._behind: dict[int, tuple[int, dict[str, list[tuple[int, int]]]]] = {}
        self._thawed: dict[int, asyncio.Event] = {}
        self._acks_released: asyncio.Event | None = None
        self._servers: dict[int, grpc.aio.Server] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the cluster's loop."""

        async def wrapped() -> T:
            return function()

        return self.run(wrapped())

    def __enter__(self) -> Self:
        self._thread.start()
        for node in self.node_ids:
            self.run(self._start(node))
        return self

    def __exit__(self, *exception: object) -> None:
        for node in list(self._servers):
            self.kill(node)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _start(self, node: int) -> None:
        server = grpc.aio.server(options=_OPTIONS)
        service = Node(self, node)
        log_pb2_grpc.add_LogServicer_to_server(service, server)  # type: ignore[no-untyped-call,unused-ignore] # generated
        metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataNode(self, node), server)  # type: ignore[no-untyped-call,unused-ignore] # generated
        admin_pb2_grpc.add_AdminServicer_to_server(AdminNode(self), server)  # type: ignore[no-untyped-call,unused-ignore] # generated
        transaction_pb2_grpc.add_TransactionServicer_to_server(self.transaction_node(self, node), server)  # type: ignore[no-untyped-call,unused-ignore] # generated
        group_pb2_grpc.add_GroupServicer_to_server(self.group_node(self, node), server)  # type: ignore[no-untyped-call,unused-ignore] # generated
        self.ports[node] = server.add_insecure_port(f"127.0.0.1:{self.ports.get(node, 0)}")
        await server.start()
        self._servers[node] = server

    def kill(self, node: int) -> None:
        """Stop a node at once."""
        server = self._servers.pop(node)
        self.run(server.stop(0))

    def restart(self, node: int) -> None:
        """Start a killed node again, on the same port."""
        self.run(self._start(node))

    def freeze(self, node: int) -> None:
        """Let a node answer nothing, with its connections open, as a process does that got SIGSTOP."""
        self.call(lambda: self._thawed.__setitem__(node, asyncio.Event()))

    def thaw(self, node: int) -> None:
        """Let a frozen node go on with what it was sent meanwhile."""
        self.call(lambda: self._thawed.pop(node).set())

    async def awake(self, node: int) -> None:
        """Wait while a node is frozen."""
        while node in self._thawed:
            await self._thawed[node].wait()

    def hold_acks(self) -> None:
        """Let no node answer produce requests; the batches are appended nevertheless."""
        self.call(lambda: setattr(self, "_acks_released", asyncio.Event()))

    def release_acks(self) -> None:
        """Send the withheld answers, and answer at once from now on."""

        def release() -> None:
            assert self._acks_released is not None, "release_acks was called, but acknowledgements are not withheld"
            self._acks_released.set()
            self._acks_released = None

        self.call(release)

    async def acks_released(self) -> None:
        """Wait while acks are held back."""
        if self._acks_released is not None:
            await self._acks_released.wait()

    def fall_behind(self, node: int) -> None:
        """Let a node receive no further changes of the metadata."""

        def note() -> None:
            self._behind[node] = self.metadata_of(node)

        self.call(note)

    def metadata_of(self, node: int) -> tuple[int, dict[str, list[tuple[int, int]]]]:
        """Return the metadata offset a node is at, and by topic leader and leader epoch of each partition."""
        if node in self._behind:
            return self._behind[node]
        leaders = {
            name: [(part.leader, part.leader_epoch) for part in topic.partitions] for name, topic in self.topics.items()
        }
        return self.metadata_offset, leaders

    def new_topic(self, name: str, partitions: int) -> Topic:
        return Topic(name, partitions, self.node_ids)

    def create_topic(self, name: str, partitions: int = 1) -> Topic:
        def create() -> Topic:
            self.metadata_offset += 1
            topic = self.topics[name] = Topic(name, partitions, self.node_ids)
            return topic

        return self.call(create)

    def delete_topic(self, name: str) -> None:
        def delete() -> None:
            self.metadata_offset += 1
            for partition in self.topics.pop(name).partitions:
                partition.touch()

        self.call(delete)

    def make_topic_again(self, name: str) -> Topic:
        """Delete a topic and create another one of its name, in one step."""

        def make() -> Topic:
            self.metadata_offset += 1
            former = self.topics[name]
            made = self.topics[name] = Topic(name, len(former.partitions), self.node_ids)
            for partition in former.partitions:
                partition.touch()
            return made

        return self.call(make)

    def add_partitions(self, name: str, total: int) -> None:
        def add() -> None:
            self.metadata_offset += 1
            topic = self.topics[name]
            while len(topic.partitions) < total:
                topic.partitions.append(Partition(self.node_ids[len(topic.partitions) % len(self.node_ids)]))

        self.call(add)

    def truncate(self, name: str, partition: int, offset: int, *batches: bytes) -> None:
        """Elect the leader anew, uncleanly: other batches follow from the offset on, where a batch begins."""

        def cut() -> None:
            self.metadata_offset += 1
            part = self.topics[name].partitions[partition]
            part.batches = [batch for batch in part.batches if parse_header(batch).base_offset < offset]
            part.end, part.truncated = offset, (part.leader_epoch, offset)
            part.leader_epoch += 1
            part.touch()
            for batch in batches:
                part.append(batch)

        self.call(cut)

    def move_leader(self, name: str, partition: int, node: int) -> None:
        """Elect a leader; -1: there is none."""

        def move() -> None:
            self.metadata_offset += 1
            part = self.topics[name].partitions[partition]
            part.leader = node
            part.leader_epoch += 1
            part.touch()

        self.call(move)

    def values(self, name: str, partition: int = 0) -> list[bytes | None]:
        return self.call(self.topics[name].partitions[partition].values)

    def append(self, name: str, batch: bytes, partition: int = 0) -> None:
        """Append a produced batch directly."""
        self.call(lambda: self.topics[name].partitions[partition].append(batch))

    def append_raw(self, name: str, batch: bytes, partition: int = 0) -> None:
        """Append a stamped batch directly."""
        self.call(lambda: self.topics[name].partitions[partition].append_raw(batch))

    def named(self, topic_id: bytes, name: str) -> str:
        """Return the name of a topic that is known by its id, or by its name where the id is empty."""
        if not topic_id:
            return name
        found = (each.name for each in self.topics.values() if each.topic_id == topic_id)
        return next(found, topic_id.hex())

    def find(
        self, node: int, topic_id: bytes, index: int, leader_epoch: int, *, from_follower: bool = False
    ) -> tuple[Topic, Partition]:
        for topic in self.topics.values():
            if topic.topic_id == topic_id:
                break
        else:
            raise UnknownTopicId(f"no topic has the id {topic_id.hex()}")
        if index >= len(topic.partitions):
            raise UnknownTopicOrPartition(f"{topic.name}-{index}")
        partition = topic.partitions[index]
        if partition.leader != node and not from_follower:
            raise NotLeader(
                f"{topic.name}-{index} is led by {partition.leader}", partition.leader, partition.leader_epoch
            )
        if leader_epoch >= 0 and leader_epoch < partition.leader_epoch:
            raise FencedLeaderEpoch(f"epoch {leader_epoch} is over")
        if leader_epoch > partition.leader_epoch:
            raise UnknownLeaderEpoch(f"epoch {leader_epoch} is not known")
        return topic, partition
