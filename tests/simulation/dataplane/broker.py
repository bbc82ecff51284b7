"""One life of a whole broker: real logs, registry, partitions, group commit and lease; what `broker.broker_role` wires.

Registering, heartbeats and the watch of images are those of `tests.simulation.broker`. Clients come in by simulated
connections; what the sessions of the gRPC services do around `Partition` is done here in a few lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from broker.lease import ServingLease, without_lease
from broker.log.config import LogConfig
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.partition import Partition
from broker.registry import PartitionRegistry
from raftlog.errors import RaftlogError, ShuttingDown, UnknownOutcome
from raftlog.v1.records_pb2 import MetadataCommand, MetadataRecord, RemoveTopicRecord
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage, ResourceKey, broker_record, config_record, partition_record
from raftmeta.quorum.leases import BrokerLease
from replication.token_bucket import TokenBucket
from tests.simulation.broker import SimBroker
from tests.simulation.dataplane.disk import LOGS, SimExecutor
from tests.simulation.dataplane.loop import SimLoop
from tests.simulation.dataplane.messages import (
    Answer,
    Answered,
    Asked,
    DeleteRecords,
    Failed,
    Fetch,
    Fetched,
    PartitionKey,
    Produce,
    Produced,
    Request,
)
from tests.simulation.dataplane.streams import LeaderEnd, SimFetchers
from tests.simulation.network import Connection
from tests.simulation.parts import Violation
from tests.simulation.process import Host, Process
from tests.simulation.voter import Committed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.dataplane.schedule import DataSimulation

FETCH_BYTES = 4_000
HOUSEKEEPING_S = 0.5
PROPOSE_S = (0.5, 4.0)
"""How long a broker waits for the controllers' answer."""


class HostClock:
    """`broker.clock.Clock` of a host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def now_ms(self) -> int:
        """Time of day there."""
        return self._host.wall_ms()

    def monotonic_ms(self) -> float:
        """Time there."""
        return self._host.local_s() * 1_000


class _HeartbeatLease(BrokerLease):
    """The face that the simulated heartbeats see of the broker's lease."""

    def __init__(self, serving: ServingLease) -> None:
        super().__init__()
        self._serving = serving

    @property
    def expires_at_ms(self) -> float:
        return self._serving._lease.expires_at_ms

    def valid(self, now_ms: float) -> bool:
        return self._serving.valid()

    def sent(self, sequence: int, now_ms: float) -> None:
        self._serving.sent(sequence)

    def granted(self, sequence: int, lease_ms: float, now_ms: float) -> bool:
        self._serving.granted(sequence, lease_ms)
        return self._serving.valid()

    def revoke(self) -> None:
        self._serving.revoke("simulated")


class DataBroker(SimBroker):
    """One life of a broker with its logs."""

    simulation: DataSimulation

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        host, simulation = process.host, cast("DataSimulation", process.simulation)
        assert host.log_disk is not None
        self.life = (host.node_id, host.boots)
        self.touched = True
        """Something has been done to a partition since the ledger looked."""
        self._loop = SimLoop(process, self._random)
        asyncio._set_running_loop(self._loop.as_loop)
        self._known = MetadataImage()
        """The newest image; what is in effect is the registry's."""
        self._clock = HostClock(host)
        self._serving_lease = ServingLease(self._clock)
        self._serving_lease._lease = simulation.parts.lease()
        self.lease = _HeartbeatLease(self._serving_lease)
        self.executor = SimExecutor(process, host.log_disk, self._random)
        self.logs = LogManager(host.log_disk.storage, [LOGS], LogConfig(), self._clock)
        self.logs.open(cluster_id=simulation.cluster_id, node_id=host.node_id)
        host.clean_mark = self.logs.clean_broker_epoch
        self._group_commit = GroupCommit(self.executor)
        self.fetchers = SimFetchers(self, self._random)
        self._throttle = TokenBucket(None)
        self.registry = self._new_registry()
        self.logs.on_dir_offline = self.registry.on_dir_offline
        self._starts = self._started = self._serves = False
        process.after_each = self._look
        process.after(self._random.uniform(0, HOUSEKEEPING_S), self._housekeep)
        process.after(self._random.uniform(0, HOUSEKEEPING_S), self._tick)

    def _new_registry(self) -> PartitionRegistry:
        return PartitionRegistry(
            self.broker_id,
            self.logs,
            self._group_commit,
            self._clock,
            {},
            self.executor,
            self._serving_lease,
        )

    def begin_leading(self) -> None:
        """It leads by what it is asked."""

    def now_ms(self) -> float:
        """Return what its clock measures with."""
        return self._clock.monotonic_ms()

    def _look(self) -> None:
        if self.touched:
            self.touched = False
            self.simulation.ledger.look(self)

    def check_loop(self) -> None:
        """Raise what a task of the product failed with.

        Raises:
            Violation: it did.
        """
        for context in self._loop.errors:
            raise Violation(f"{self.host}: {context.get('message')}: {context.get('exception')!r}")

    # Metadata

    @property
    def image(self) -> MetadataImage:
        """The newest image that it knows."""
        return self._known

    @image.setter
    def image(self, image: MetadataImage) -> None:
        self._known = image

    @property
    def applied_offset(self) -> int:
        """The metadata offset up to which it acts."""
        return self.registry.applied_offset

    def partitions(self) -> list[Partition]:
        """Return the partitions that are open."""
        return self.registry.partitions()

    def find(self, key: PartitionKey) -> Partition | None:
        """Return a partition if it is open."""
        try:
            return self.registry.find(*key)
        except RaftlogError:
            return None

    def led(self) -> dict[PartitionKey, int]:
        """Return the leader epochs of the partitions that it leads, whatever its lease says."""
        return {(each.log.topic_id, each.log.partition): each.leader_epoch for each in self.partitions() if each.leads}

    def begin_heartbeats(self) -> None:
        """It is registered: once it has an image that says so, its roles begin, and then the heartbeats."""
        self._starts = True
        self._start_registry()

    def _start_registry(self) -> None:
        if not self._starts or self._started or self._known.offset < self.broker_epoch:
            return
        self._started = True
        self.registry.serve(
            broker_epoch=self.broker_epoch,
            propose=self._propose,
            fetchers=self.fetchers,
            replica_lag_time_max_ms=self.simulation.lag_time_max_ms,
        )
        self.registry.on_applied = self._kick
        self.registry.start(self._known)
        self._loop.create_task(self._begin(self._known.offset))

    async def _begin(self, offset: int) -> None:
        await self.registry.wait_applied(offset)
        await self.registry.report_offline_replicas()
        self._serves = True
        super().begin_heartbeats()

    def _kick(self, leaderships_changed: bool) -> None:
        if self._serves and leaderships_changed:
            self.send_heartbeat()

    async def _propose(self, command: MetadataCommand) -> CommandResult:
        """Ask the controllers, for a while; what is asked may be done later all the same."""
        answered: asyncio.Future[Committed] = self._loop.create_future()

        def done(answer: Committed) -> None:
            self.touched = True
            if not answered.done():
                answered.set_result(answer)

        self._requester.propose(command, done)
        try:
            async with asyncio.timeout(self._random.uniform(*PROPOSE_S)):
                outcome = (await answered).outcome
        except TimeoutError:
            raise UnknownOutcome("nobody has answered") from None
        if isinstance(outcome, RaftlogError):
            raise outcome
        assert isinstance(outcome, CommandResult)
        return outcome

    def sees(self, image: MetadataImage) -> None:
        """Take a committed image."""
        before = self._known
        if image.offset <= before.offset:
            return
        super().sees(image)
        me = image.brokers.get(self.broker_id)
        if self._starts and (me is None or me.fenced or me.broker_epoch != self.broker_epoch):
            self._serving_lease.revoke("the image says that it is fenced")
        self.touched = True
        if self._started:
            self.registry.on_metadata(image, list(_changes(before, image)))
        self._start_registry()

    # Housekeeping

    def _housekeep(self) -> None:
        self.process.after(self.simulation.checkpoint_s * self._random.uniform(0.5, 1.5), self._housekeep)
        self.touched = True
        self.registry.retry_failed()
        self.executor.submit(self.logs.run_housekeeping_once, self._clock.now_ms())

    def _tick(self) -> None:
        self.process.after(self.simulation.lag_time_max_ms / 4_000, self._tick)
        self.touched = True
        for partition in self.partitions():
            partition.housekeep()
        self.registry.check_isr()

    def leave(self) -> None:
        """Stop cleanly: nobody is answered any more, everything is flushed, and a mark says so."""
        self.registry.close_all(ShuttingDown("the broker is stopping"))
        self.logs.close(broker_epoch=self.broker_epoch)
        self.host.stop("stops cleanly")

    # Streams of followers, and clients

    def accept_replica(self, connection: Connection) -> None:
        """Take the stream of a follower."""
        LeaderEnd(self, connection, self._throttle)

    def accept_client(self, connection: Connection) -> None:
        """Take the stream of a client."""

        def take(asked: Asked) -> None:
            self.touched = True
            try:
                self._serve(asked.request, lambda answer: connection.answer(Answered(asked.number, answer)))
            except RaftlogError as error:
                connection.answer(Answered(asked.number, Failed(error)))

        connection.acceptor_hears(take, lambda: None)

    def _serve(self, request: Request, answer: Callable[[Answer], None]) -> None:
        match request:
            case Produce():
                self._produce_batch(request, answer)
            case Fetch():
                self._fetch(request, answer)
            case DeleteRecords():
                self._delete_records(request, answer)

    def _produce_batch(self, request: Produce, answer: Callable[[Answer], None]) -> None:
        partition = self.registry.find(*request.key)
        base_offsets: list[int] = []
        early: list[None] = []
        leader_epoch = partition.leader_epoch

        def held(error: BaseException | None) -> None:
            self.touched = True
            if error is not None:
                assert isinstance(error, RaftlogError)
                answer(Failed(error))
            elif base_offsets:
                self.simulation.ledger.acknowledges(
                    self, request.key, leader_epoch, base_offsets[0], request.batch, all_replicas=request.all_replicas
                )
                answer(Produced(base_offsets[0]))
            else:
                early.append(None)

        base_offset, _ = partition.append(
            request.batch,
            request.leader_epoch,
            held,
            all_replicas=request.all_replicas,
            checked=request.header,
        )
        base_offsets.append(base_offset)
        if early:
            held(None)

    def _fetch(self, request: Fetch, answer: Callable[[Answer], None]) -> None:
        partition = self.registry.find(*request.key)
        partition.check_leader_epoch(request.leader_epoch, from_follower=request.from_follower)
        if not self._serving_lease.valid():
            raise without_lease(str(partition.topic_partition))
        end = partition.high_watermark
        read = partition.read(request.offset, FETCH_BYTES, end, blocking=True, from_follower=request.from_follower)
        assert read is not None
        records = bytes(read.records)
        self.simulation.ledger.serves(self, request.key, request.offset, records)
        answer(Fetched(records, read.next_offset, end, partition.log.log_start_offset))

    def _delete_records(self, request: DeleteRecords, answer: Callable[[Answer], None]) -> None:
        partition = self.registry.find(*request.key)
        target = partition.delete_target(request.before_offset)
        start = partition.log.delete_records(target)
        partition.log_start_moved()
        answer(Fetched(b"", start, partition.high_watermark, start))


def _changes(before: MetadataImage, after: MetadataImage) -> Iterator[MetadataRecord]:
    """Yield records that lead from one image to the other, as far as a registry looks at them."""
    for topic_id in before.topics:
        if topic_id not in after.topics:
            yield MetadataRecord(remove_topic=RemoveTopicRecord(topic_id=topic_id))
    for broker_id, broker in after.brokers.items():
        if before.brokers.get(broker_id) != broker:
            yield broker_record(broker)
    for resource, configs in after.configs.items():
        if before.configs.get(resource) != configs:
            for key, value in configs.items():
                yield config_record(ResourceKey(resource.type, resource.name), key, value)
    if after.topics is before.topics:
        return
    for topic_id, topic in after.topics.items():
        old = before.topics.get(topic_id)
        if old is topic:
            continue
        for number, part in enumerate(topic.partitions):
            if old is None or number >= len(old.partitions) or old.partitions[number] != part:
                yield partition_record(topic_id, part)
