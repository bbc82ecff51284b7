"""One life of a whole broker: real logs, registry, lease, coordinators and services, wired as `broker_role` does it.

Registering, heartbeats and the watch of images are those of `tests.simulation.broker`. Clients come in by simulated
connections. Members of groups and readers of committed records use the real sessions; for other clients a few lines
here replace the work of the produce and fetch sessions around `Partition`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from broker.coordinator.groups.assignors import BUILT_IN
from broker.coordinator.groups.commands import FetchOffsets, GroupConfig
from broker.coordinator.groups.coordinators import GroupCoordinators, GroupShard
from broker.coordinator.transactions.commands import TransactionConfig
from broker.coordinator.transactions.coordinators import TransactionCoordinators
from broker.coordinator.transactions.marker_links import MarkerLinks
from broker.coordinator.transactions.marker_sender import MarkerSender
from broker.coordinator.transactions.producer_ids import ProducerIds
from broker.coordinator.transactions.verifier import TransactionVerifier
from broker.coordinator.user_bound import NamedGroups
from broker.log.config import LogConfig
from broker.log.flush import GroupCommit
from broker.log.manager import LogManager
from broker.net.services.groups import GroupService, GroupSession
from broker.net.services.markers import MarkerService
from broker.net.services.transactions import TransactionService
from broker.partition.fetch_session import FetchSession, readable_end
from broker.partition.partition import Partition
from broker.quotas.disk_reads import DiskReads
from broker.replicas.replica_manager import ReplicaManager
from broker.server.lease import ServingLease, without_lease
from raftlog.errors import InvalidTopic, RaftlogError, ShuttingDown, UnknownOutcome
from raftlog.format.control import Marker
from raftlog.format.wire import Frame
from raftlog.v1 import common_pb2
from raftlog.v1.group_pb2 import FetchOffsetsRequest, GroupRequest, GroupResponse
from raftlog.v1.log_pb2 import FetchRequest
from raftlog.v1.records_pb2 import MetadataCommand, MetadataRecord, RegisterBrokerCommand, RemoveTopicRecord
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage, ResourceKey, broker_record, config_record, partition_record
from raftmeta.quorum.sessions import BrokerLease
from replication.pacing import LiveTraffic
from replication.token_bucket import TokenBucket
from tests.simulation.broker import SimBroker
from tests.simulation.dataplane.disk import LOGS, SimExecutor
from tests.simulation.dataplane.loop import SimLoop
from tests.simulation.dataplane.markers import REQUESTS, CheckedMarkers, MarkerCall, SimMarkerLinks, SimVerifier
from tests.simulation.dataplane.messages import (
    Answer,
    Answered,
    Asked,
    DeleteRecords,
    Failed,
    Fetch,
    Fetched,
    FetchedStable,
    FetchStable,
    PartitionKey,
    Produce,
    Produced,
    Replied,
    Request,
    Rpc,
)
from tests.simulation.dataplane.streams import LeaderEnd, SimFetchers
from tests.simulation.dataplane.transaction_ledger import TransactionLedger
from tests.simulation.network import Connection
from tests.simulation.parts import Violation
from tests.simulation.process import Host, Process
from tests.simulation.voter import Committed

if TYPE_CHECKING:
    from broker.config.config import BrokerConfig
    from broker.coordinator.internal_topics import InternalTopics
    from tests.simulation.dataplane.schedule import DataSimulation

T = TypeVar("T")
FETCH_BYTES = 4_000
HOUSEKEEPING_S = 0.5
PROPOSE_S = (0.5, 4.0)
"""How long a broker waits for the controllers' answer."""


GROUP_CONFIG = GroupConfig(
    session_timeout_ms=1_500,
    heartbeat_interval_ms=300,
    rebalance_timeout_ms=2_500,
    offsets_retention_check_interval_ms=5_000,
)
TRANSACTION_CONFIG = TransactionConfig(max_timeout_ms=60_000)
REQUEST_TIMEOUT_MS = 2_000
CLIENT_WAITS_S = 2.0
FRAME_BYTES = 4_096


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


class StreamEnded:
    """The last thing on a connection: the server has ended the stream."""


class _Writer:
    """The server's side of a stream."""

    def __init__(self, broker: DataBroker, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection

    async def write(self, message: GroupResponse) -> None:
        """Send."""
        self._broker.touched = True
        self._connection.answer(message)


class _Call:
    """A frame's recipient that is answered once."""

    is_stream = False

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def deliver(self, message: Any) -> None:
        """Answer."""
        self._connection.answer(message)


class _FrameWriter:
    """The server's side of a stream of frames."""

    def __init__(self, broker: DataBroker, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection

    async def write(self, message: list[Frame]) -> None:
        """Send."""
        self._broker.touched = True
        for head, records in message:
            self._connection.answer(Frame(head, bytes(records)))
        await asyncio.sleep(0)


class _Context:
    """What services ask of a gRPC context."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wait_s: float) -> None:
        self._loop = loop
        self._end_s = loop.time() + wait_s

    def time_remaining(self) -> float:
        """How long the caller waits."""
        return max(0.0, self._end_s - self._loop.time())


class _Topics:
    """The internal topics are there from the start, or soon."""

    async def consumer_offsets(self) -> None:
        """Nothing has to be made."""

    async def transaction_state(self) -> None:
        """Nothing has to be made."""


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
        self._group_commit = GroupCommit(self.executor, monotonic_s=lambda: self._clock.monotonic_ms() / 1000)
        self.fetchers = SimFetchers(self, self._random)
        self._throttle = TokenBucket(None)
        self.live = LiveTraffic()
        """Shared by the streams of both kinds, as in a broker."""
        self.registry = self._new_registry()
        self.logs.on_dir_offline = self.registry.on_dir_offline
        self._starts = self._started = self._serves = False
        self._failures: list[BaseException] = []
        process.after_each = self._look
        process.after(self._random.uniform(0, HOUSEKEEPING_S), self._housekeep)
        process.after(self._random.uniform(0, HOUSEKEEPING_S), self._tick)
        self.coordinators = GroupCoordinators(
            self.broker_id,
            lambda: self.image,
            GROUP_CONFIG,
            BUILT_IN,
            executor=self.executor,
            clock=self._clock,
            lease=self._serving_lease,
            most_of_user=10_000,
        )
        self.registry.on_term.append(self.coordinators.on_term)
        if simulation.has_transactions:
            self._coordinate_transactions()

    def _coordinate_transactions(self) -> None:
        self.producer_ids = ProducerIds(
            self.broker_id, self._propose, lambda: self.image, self._image_from, lambda: self._random.randbytes(32)
        )
        local = CheckedMarkers(self)
        self.markers = MarkerSender(
            self.broker_id,
            lambda: self.image,
            local,
            self.new_marker_links(),
            lambda group_id: self.coordinators.find(group_id).broker.broker_id,
            rng=random.Random(self._random.random()),
        )
        self.transactions = TransactionCoordinators(
            self.broker_id,
            lambda: self.image,
            TRANSACTION_CONFIG,
            self.markers,
            executor=self.executor,
            clock=self._clock,
            lease=self._serving_lease,
            most_of_user=10_000,
            named=NamedGroups(
                self.coordinators.LIMIT,
                10_000,
                kept_ms=GROUP_CONFIG.producer_id_expiration_ms,
                open_ms=TRANSACTION_CONFIG.max_timeout_ms,
            ),
        )
        self.registry.on_term.append(self.transactions.on_term)
        self._verifier = self.new_verifier()
        self._local_markers = local
        self._marker_service = MarkerService()
        config, topics = self.new_config(), self.new_topics()
        self._services = (
            TransactionService(
                self.transactions,
                self.markers,
                self.producer_ids,
                topics,
                config,
                lambda: self.image,
                self.registry.find,
            ),
            GroupService(self.coordinators, topics, config, self._verifier),
        )

    def new_marker_links(self) -> MarkerLinks:
        """Make the way of markers to other brokers."""
        return SimMarkerLinks(self)

    def new_verifier(self) -> TransactionVerifier:
        """Make the verifier, which asks other brokers which transactions are open."""
        return SimVerifier(self, self.transactions, self._clock)

    def new_config(self) -> BrokerConfig:
        """Make the services' configuration."""
        known = SimpleNamespace(request_timeout_ms=REQUEST_TIMEOUT_MS, max_streams=100, node_id=self.broker_id)
        return cast("BrokerConfig", known)

    def new_topics(self) -> InternalTopics:
        """Make the creator of internal topics."""
        return cast("InternalTopics", _Topics())

    def _new_registry(self) -> ReplicaManager:
        return ReplicaManager(
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
        if self._failures:
            failure = self._failures[0]
            raise Violation(f"{self.host}: {type(failure).__name__}: {failure}") from failure

    def check_loop(self) -> None:
        """Check that no task of the product has failed.

        Raises:
            Violation: one has.
        """
        for context in self._loop.errors:
            raise Violation(f"{self.host}: {context.get('message')}: {context.get('exception')!r}")

    def check_decided(self, markers: Sequence[Marker]) -> None:
        """A marker is about to be written: its decision has to be committed.

        Raises:
            Violation: it is not.
        """
        self.touched = True
        ledger = self.simulation.ledger
        assert isinstance(ledger, TransactionLedger)
        wrong = ledger.undecided(self, markers)
        if wrong is not None:
            self._failures.append(Violation(wrong))

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

    def vouch(self, registration: RegisterBrokerCommand) -> None:
        """Add to a registration the logs' information about the process before: its epoch, and topics with unsynced
        logs."""
        if self.logs.synced_broker_epoch is not None:
            registration.synced_broker_epoch = self.logs.synced_broker_epoch
            registration.unsynced_topic_ids.extend(sorted(self.logs.unsynced_topic_ids))

    def begin_heartbeats(self) -> None:
        """It is registered: once it has an image that says so, its roles begin, and then the heartbeats."""
        if self.simulation.has_transactions:
            self.producer_ids.serve(self.broker_epoch)
            self._marker_service.open(self._local_markers, self._verifier.verify_here)
        self._starts = True
        self._start_registry()

    def _start_registry(self) -> None:
        if not self._starts or self._started or self._known.offset < self.broker_epoch:
            return
        self._started = True
        self.logs.serve(self.broker_epoch)
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

    async def _image_from(self, offset: int) -> MetadataImage:
        await self.registry.wait_applied(offset)
        return self.image

    async def _propose(self, command: MetadataCommand) -> CommandResult:
        """Send a command to the controllers, for a limited time; it may take effect later even so."""
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
        changes = list(_changes(before, image))
        if self._started:
            self.registry.on_metadata(image, changes)
        self._start_registry()
        self.coordinators.on_metadata(image, changes)
        if self.simulation.has_transactions:
            self.transactions.on_metadata(image, changes)

    # Housekeeping

    def _housekeep(self) -> None:
        self.process.after(self.simulation.checkpoint_s * self._random.uniform(0.5, 1.5), self._housekeep)
        self.touched = True
        self.registry.retry_failed()
        self.executor.submit(self.logs.run_housekeeping_once, self._clock.now_ms())

    def _tick(self) -> None:
        self.process.after(self.simulation.lag_time_max_ms / 4_000, self._tick)
        self.touched = True
        self.registry.housekeep()
        self.registry.check_isr()

    def leave(self) -> None:
        """Stop cleanly: stop answering clients, flush everything, and write the mark of a clean stop."""
        self.touched = True
        self._look()  # the answer that lets it stop may have renewed its lease, so that acknowledgements have just left
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
        if isinstance(request, Produce | DeleteRecords) and self.registry.find(*request.key).is_internal:
            raise InvalidTopic("clients read internal topics, no more")  # as the services have it
        match request:
            case Rpc():
                self._loop.create_task(self._call(request, answer))
            case FetchStable():
                self._fetch_stable(request, answer)
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

    async def _call(self, request: Rpc, answer: Callable[[Answer], None]) -> None:
        service = next(each for each in self._services if hasattr(each, request.method))
        try:
            context = _Context(self._loop.as_loop, CLIENT_WAITS_S)
            response = await getattr(service, request.method)(request.message, context)
        except Exception as error:  # a service answers with errors as values
            self._failures.append(error)
            return
        self.touched = True
        answer(Replied(response))

    def _fetch_stable(self, request: FetchStable, answer: Callable[[Answer], None]) -> None:
        """What `FetchSession` does for a reader of committed records."""
        partition: Partition = self.registry.find(*request.key)
        partition.check_leader_epoch(request.leader_epoch, from_follower=request.from_follower)
        if not self._serving_lease.valid():
            raise without_lease(str(partition.topic_partition))
        end = readable_end(partition, common_pb2.READ_COMMITTED)
        read = partition.read(request.offset, FETCH_BYTES, end, blocking=True, from_follower=request.from_follower)
        assert read is not None
        records = bytes(read.records)
        aborted = partition.log.aborted_transactions(request.offset, read.next_offset) if records else ()
        self.simulation.ledger.serves(self, request.key, request.offset, records)
        answer(FetchedStable(records, read.next_offset, end, partition.leader_epoch, tuple(aborted)))

    def accept_reader(self, connection: Connection) -> None:
        """Take the stream of a consumer: a real fetch session."""
        requests: asyncio.Queue[FetchRequest | None] = asyncio.Queue()

        def take(request: FetchRequest) -> None:
            self.touched = True
            requests.put_nowait(request)

        connection.acceptor_hears(take, lambda: requests.put_nowait(None))
        self._loop.create_task(self._serve_reader(connection, requests))

    async def _serve_reader(self, connection: Connection, requests: asyncio.Queue[FetchRequest | None]) -> None:
        session = FetchSession(
            self.registry, DiskReads(self.executor), max_frame_bytes=FRAME_BYTES, max_subscriptions=10
        )
        try:
            await session.run(_each(requests), _FrameWriter(self, connection))
        except Exception as error:  # refusals are frames
            self._failures.append(error)
        finally:
            connection.answer(StreamEnded())

    def accept_markers(self, connection: Connection) -> None:
        """Take another broker's calls of the service `Markers`."""

        def take(asked: MarkerCall) -> None:
            self.touched = True
            self._loop.create_task(self._serve_broker(connection, asked))

        connection.acceptor_hears(take, lambda: None)

    async def _serve_broker(self, connection: Connection, asked: MarkerCall) -> None:
        try:
            context = cast(Any, _Context(self._loop.as_loop, 2.0))
            request = REQUESTS[asked.method].FromString(asked.payload)
            response = await getattr(self._marker_service, asked.method)(request, context)
        except Exception as error:  # a service answers with errors as values
            self._failures.append(error)
            return
        self.touched = True
        connection.answer(asked._replace(payload=response.SerializeToString()))

    # Members of groups

    def accept_member(self, connection: Connection) -> None:
        """Take the stream of a member, and the calls that it makes beside it."""
        requests: asyncio.Queue[GroupRequest | None] = asyncio.Queue()

        def take(request: GroupRequest | FetchOffsetsRequest) -> None:
            self.touched = True
            if isinstance(request, GroupRequest):
                requests.put_nowait(request)
                return
            call = _Call(connection)
            try:
                self._shard_of(request.group_id).submit(FetchOffsets(call, request), call)
            except RaftlogError as error:
                call.deliver(error)

        connection.acceptor_hears(take, lambda: requests.put_nowait(None))
        self._loop.create_task(self._serve_member(connection, requests))

    async def _serve_member(self, connection: Connection, requests: asyncio.Queue[GroupRequest | None]) -> None:
        session = GroupSession(self._shard_of, "simulated")
        try:
            await session.run(_each(requests), _Writer(self, connection))
        finally:
            connection.answer(StreamEnded())

    def _shard_of(self, group_id: str) -> GroupShard:
        return self.coordinators.shard_of(group_id)[1]


async def _each(requests: asyncio.Queue[T | None]) -> AsyncIterator[T]:
    while (request := await requests.get()) is not None:
        yield request


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
