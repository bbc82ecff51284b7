"""The partitions of this broker, kept as the metadata image says.

    on_metadata -> queue -> each partition that a change touches (`_touch`):
        at once          partitions that are no longer this broker's are closed, roles begin (`RoleChanges`)
        after the disk   logs are made, deleted, set aside (`DiskWork`), and the role begins, by the metadata as it is
                         by then

`ReplicaManager` finds partitions for the services and sessions, and acts on what partitions report: failed disks,
damaged logs, followers that may join the ISR. `partition_logs.py` opens and removes the logs, `isr.py` carries ISR
changes and offline replicas to the controller.

A log whose topic the image does not know is set aside and reported, never deleted: the image may be wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from broker.clock import Clock
from broker.log.config import LogConfig
from broker.log.flush import GroupCommit
from broker.log.integrity import Suspicions
from broker.log.log_dir import PartitionKey
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.observability.counters import Counters
from broker.partition.partition import Host, Partition
from broker.quotas.new_producers import NewProducers
from broker.replicas.isr import FullStorage, IsrChanges, OfflineReplicas, Propose
from broker.replicas.partition_logs import Leaving, PartitionLogs
from broker.server.lease import Lease
from raftlog.errors import (
    CorruptRecordError,
    InvalidRequestError,
    NotLeader,
    RaftlogError,
    RetriableError,
    StorageError,
    UnknownTopicId,
)
from raftlog.v1 import records_pb2
from raftmeta.elections import why_leaderless
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage
from raftmeta.topic_configs import THROTTLED_REPLICAS_OF_FOLLOWER, THROTTLED_REPLICAS_OF_LEADER
from replication.leader import Membership
from replication.ports import FollowedPartition

if TYPE_CHECKING:
    from broker.observability.partition_traces import PartitionTraces

logger = logging.getLogger(__name__)

TOPIC_ID_BYTES: Final = 16
MIN_INSYNC_REPLICAS = "min.insync.replicas"
MAX_AT_THE_DISK: Final = 4
"""Logs that are made or removed at a time."""
SLICE_S: Final = 0.004
"""How long metadata is applied before other tasks get a turn on the event loop."""
LINES: Final = 100
"""Leaderships gained and lost in one second that are logged at level info; further ones at level debug."""


class Fetchers(Protocol):
    """Keeps the partitions that this broker follows in step with their leaders."""

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Fetch from this leader; the same leader in the same `partition.leader_epoch` as before changes nothing."""
        ...

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Stop fetching a partition; one that is not followed is ignored."""
        ...


class NoFetchers:
    """Fetches nothing: in place until `ReplicaManager.serve`."""

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Do nothing."""

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Do nothing."""


class TopicRules(NamedTuple):
    """What a topic's configs say to its partitions."""

    log: LogConfig
    min_insync_replicas: int
    throttled_leaders: str
    throttled_followers: str


def topic_rules(
    image: MetadataImage,
    topic: TopicImage,
    topic_defaults: Mapping[str, str],
    broker_id: int,
    min_segment_bytes: int = 0,
) -> TopicRules:
    """Return the rules of a topic on one broker; `topic_defaults` come from the broker's config file.

    min.insync.replicas is never less than the controllers' value, whatever that file says (KAFKA-16540).

    Raises:
        InvalidConfig: a value that is not allowed.
    """
    configs = {**topic_defaults, **image.topic_configs(topic.name, broker_id)}
    return TopicRules(
        LogConfig.from_topic_configs(configs).within_limits(
            min_segment_bytes, image.max_inflate_bytes(broker_id, topic_defaults)
        ),
        max(image.min_insync_replicas(topic), int(configs.get(MIN_INSYNC_REPLICAS, "1"))),
        configs.get(THROTTLED_REPLICAS_OF_LEADER, ""),
        configs.get(THROTTLED_REPLICAS_OF_FOLLOWER, ""),
    )


def refusal(image: MetadataImage, topic: TopicImage, part: PartitionImage) -> NotLeader:
    """Return the error for a client that takes this broker for the leader: it names the leader and its address."""
    what = f"{topic.name}-{part.partition}"
    if part.leader == NO_LEADER:
        why = why_leaderless(image, topic.name, part)
        return NotLeader(
            f"{what} has no leader at the moment{'' if why is None else f': {why}'}", NO_LEADER, part.leader_epoch
        )
    leader = image.brokers.get(part.leader)
    host, port = (leader.host, leader.port) if leader is not None else ("", 0)
    return NotLeader(
        f"broker {part.leader} leads {what} in epoch {part.leader_epoch}, not this one",
        part.leader,
        part.leader_epoch,
        host,
        port,
    )


def _replica_damaged(topic_partition: str, error: CorruptRecordError) -> StorageError:
    """Return the error for clients, a retriable one: their requests are valid, and another replica may lead."""
    return StorageError(f"the replica of {topic_partition} on this broker is closed: {error}")


class DiskWork:
    """One task for each partition that has to wait for the disk, `MAX_AT_THE_DISK` of them at a time.

    States of a partition: idle -> working (`ask`) -> idle, or working once more if `ask` was called meanwhile; `work`
    reads the newest metadata each time. `on_done` is called whenever a partition is idle again.
    """

    def __init__(self, work: Callable[[PartitionKey], Awaitable[None]], on_done: Callable[[], None]) -> None:
        self._work = work
        self._on_done = on_done
        self._room = asyncio.Semaphore(MAX_AT_THE_DISK)
        self._tasks: dict[PartitionKey, asyncio.Task[None]] = {}
        self._again: set[PartitionKey] = set()
        self._since: dict[PartitionKey, int] = {}
        """The metadata offset of the first `ask`. Offsets only rise, so the first entry is the least."""

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._tasks

    @property
    def keys(self) -> list[PartitionKey]:
        return list(self._tasks)

    @property
    def oldest_offset(self) -> int | None:
        """The least metadata offset whose work is not done yet."""
        return next(iter(self._since.values()), None)

    def ask(self, key: PartitionKey, offset: int | None) -> None:
        """Have the work done for the metadata at `offset`; None: no caller waits for it. Returns at once."""
        if offset is not None:
            self._since.setdefault(key, offset)
        if key in self._tasks:
            self._again.add(key)
        else:
            self._tasks[key] = asyncio.get_running_loop().create_task(self._run(key), name="partition-disk-work")

    async def _run(self, key: PartitionKey) -> None:
        try:
            async with self._room:
                while True:
                    self._again.discard(key)
                    await self._work(key)
                    if key not in self._again:
                        break
        except Exception:  # a bug: `work` handles its own errors
            logger.exception("work at the disk failed")
        finally:
            self._tasks.pop(key, None)
            self._since.pop(key, None)
        self._on_done()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RoleChanges:
    """Gives partitions their roles; never waits.

    A role ends at once. The next one begins at once too, unless a truncation of the former role is under way: then the
    partition waits, and `look_again` is called once the truncation has ended.

    This process never leads an epoch a second time after it gave up leading it: it has forgotten which followers it
    proposed for the ISR, and the controller may have added them.
    """

    def __init__(self, node_id: int, look_again: Callable[[PartitionKey, Partition], None]) -> None:
        self.fetchers: Fetchers = NoFetchers()
        self.gained = self.lost = 0
        """Leaderships gained and lost since the replica manager reset these to 0."""
        self._node_id = node_id
        self._look_again = look_again
        self._led: dict[PartitionKey, int] = {}
        """The last epoch that this process has led."""
        self._unclean: dict[PartitionKey, int] = {}
        """The epoch that began with an unclean election, until this broker leads in it."""
        self._log_lost: set[PartitionKey] = set()
        """Partitions logged as leaderless because this broker's disk was replaced."""
        self._cut: dict[Partition, asyncio.Task[None]] = {}
        self._lines, self._lines_since_s = 0, float("-inf")

    def note_election(self, record: records_pb2.PartitionRecord) -> None:
        """Remember that an unclean election made this broker the leader, if the record says so."""
        if record.unclean_election and record.leader == self._node_id:
            self._unclean[record.topic_id, record.partition] = record.leader_epoch

    def forget(self, key: PartitionKey) -> None:
        """Drop what is known of a deleted partition."""
        self._led.pop(key, None)
        self._unclean.pop(key, None)
        self._log_lost.discard(key)

    def take(
        self,
        image: MetadataImage,
        topic: TopicImage,
        part: PartitionImage,
        partition: Partition,
        min_insync_replicas: int,
    ) -> None:
        """Have a partition lead, follow or wait as the metadata says."""
        key = (topic.topic_id, part.partition)
        leads_here, epoch = part.leader == self._node_id, part.leader_epoch
        self._note_log_lost(key, image, topic, part)
        # The leadership of a fenced broker is one of an earlier life, and about to be taken from it: in the same epoch
        # that life may have given out offsets that this one does not know.
        me = image.brokers.get(self._node_id)
        if part.leader == NO_LEADER or (leads_here and me is not None and me.fenced):
            self._wait(key, part, partition, refusal(image, topic, part))
            return
        if epoch > partition.leader_epoch or not (partition.leads or partition.following):
            self.fetchers.unfollow(*key)
            if partition.is_cut:
                what = f"{topic.name}-{part.partition}: leader epoch {epoch} begins here once the log is truncated"
                self._wait(key, part, partition, NotLeader(what, NO_LEADER if leads_here else part.leader, epoch))
                if partition not in self._cut:
                    self._cut[partition] = asyncio.get_running_loop().create_task(
                        self._after_cut(key, partition), name="role-after-cut"
                    )
                return
        if leads_here:
            self._lead(key, image, topic, part, partition, min_insync_replicas)
            return
        if partition.follow(epoch, part.leader, refusal(image, topic, part)):
            self._note_lost(partition, part)
        if partition.following is not None:
            self.fetchers.follow(partition.following, part.leader)

    def _lead(
        self,
        key: PartitionKey,
        image: MetadataImage,
        topic: TopicImage,
        part: PartitionImage,
        partition: Partition,
        min_insync_replicas: int,
    ) -> None:
        epoch = part.leader_epoch
        if not partition.leads and epoch <= self._led.get(key, -1):
            what = f"{topic.name}-{part.partition}: this broker has given leader epoch {epoch} up; wait for the next"
            self._wait(key, part, partition, NotLeader(what, NO_LEADER, epoch))
            return
        if partition.lead(epoch, Membership(part.replicas, part.isr, part.partition_epoch, min_insync_replicas)):
            self.gained += 1
            fields = {"partition": str(partition.topic_partition), "leader_epoch": epoch, "isr": list(part.isr)}
            logger.log(self._level(), "leads", extra={"event": "leader_gained", **fields})
            self._led[key] = epoch
            if self._unclean.pop(key, -1) == epoch:
                logger.warning(
                    "leads %s after an unclean election from offset %d: committed records may be lost",
                    partition.topic_partition,
                    partition.log_end_offset,
                    extra={"event": "unclean_leader_gained", "partition": str(partition.topic_partition)},
                )
        if part.offline_replicas or partition.has_offline_replicas:
            offline = (broker_id for broker_id, _ in part.offline_replicas if image.is_offline(part, broker_id))
            partition.replicas_offline(frozenset(offline))

    def _wait(self, key: PartitionKey, part: PartitionImage, partition: Partition, reason: NotLeader) -> None:
        self.fetchers.unfollow(*key)
        if partition.resign(part.leader_epoch, reason, keep_waiting=part.replicas == (self._node_id,)):
            self._note_lost(partition, part)

    def _note_lost(self, partition: Partition, part: PartitionImage) -> None:
        self.lost += 1
        fields = {"partition": str(partition.topic_partition), "leader_epoch": part.leader_epoch, "leader": part.leader}
        logger.log(self._level(), "leads no longer", extra={"event": "leader_lost", **fields})

    def _level(self) -> int:
        """Return the level of the next line; only the first `LINES` in a second are at level info."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._lines_since_s >= 1.0:
            self._lines, self._lines_since_s = 0, now_s
        self._lines += 1
        return logging.INFO if self._lines <= LINES else logging.DEBUG

    def _note_log_lost(self, key: PartitionKey, image: MetadataImage, topic: TopicImage, part: PartitionImage) -> None:
        if part.leader != NO_LEADER:
            self._log_lost.discard(key)
        elif part.lost_replicas and self._node_id in part.isr and key not in self._log_lost:
            why = why_leaderless(image, topic.name, part)
            if why is not None:
                self._log_lost.add(key)
                name = f"{topic.name}-{part.partition}"
                logger.error("%s has no leader: %s", name, why, extra={"event": "replica_log_lost", "partition": name})

    async def _after_cut(self, key: PartitionKey, partition: Partition) -> None:
        await partition.settled()
        del self._cut[partition]
        self._look_again(key, partition)

    async def close(self) -> None:
        """Begin no further role after a truncation."""
        for task in self._cut.values():
            task.cancel()
        await asyncio.gather(*self._cut.values(), return_exceptions=True)


_Step = tuple[MetadataImage, Sequence[records_pb2.MetadataRecord] | None]
"""An image and the records that led to it; None: everything in it may be new."""


class ReplicaManager:
    """Maps (topic id, partition) to `Partition`, and keeps the partitions in step with the image.

    States: made -> `serve` (optional: with replication) -> `start` -> applying -> `stop`. A partition that cannot be
    served has an error in `_failed` instead of a `Partition`: with a retriable one it is opened again later
    (`retry_failed`), one in `_given_up` stays closed until the restart.
    """

    def __init__(
        self,
        node_id: int,
        logs: LogManager,
        group_commit: GroupCommit,
        clock: Clock,
        topic_defaults: Mapping[str, str],
        disk: Executor,
        lease: Lease,
        min_segment_bytes: int = 0,
    ) -> None:
        self.lease = lease
        self.counters = Counters()
        """Shared with the sessions that use this manager."""
        self.new_producers = NewProducers(clock.monotonic_ms)
        """Likewise: the bound on the producers that a user begins."""
        self.on_applied: Callable[[bool], None] | None = None
        """Called after every change that is in effect; True when leaderships were gained or lost."""
        self.on_term: list[Callable[[Partition], None]] = []
        """Called within the change when a partition's term as leader begins or ends here; must not wait."""
        self.traces: Callable[[str, int], PartitionTraces | None] = lambda topic, partition: None
        """Makes the `PartitionTraces` of a partition; set before the first one is opened."""
        self._node_id = node_id
        self._logs = logs
        self._partition_logs = PartitionLogs(node_id, logs, disk)
        self._topic_defaults = topic_defaults
        self._min_segment_bytes = min_segment_bytes
        self._loop = asyncio.get_running_loop()
        self._suspicions = Suspicions(disk, clock, self.on_damaged)
        self._host = Host(
            node_id,
            group_commit,
            clock,
            lease,
            disk,
            on_storage_error=self._on_storage_error,
            on_isr_wish=self._on_isr_wish,
            on_suspicion=self._suspicions.suspect,
            on_damaged=self.on_damaged,
            on_chore=self._on_chore,
            on_term=self._on_term,
            traces=lambda topic, partition: self.traces(topic, partition),
            count_replicated=lambda bytes_in, bytes_out: self.counters.replicated(bytes_in, bytes_out),
        )
        self._isr_changes: IsrChanges | None = None
        self._offline_replicas: OfflineReplicas | None = None
        self._full_storage: FullStorage | None = None
        self._partitions: dict[PartitionKey, Partition] = {}
        self._chores: dict[Partition, None] = {}
        """The partitions that housekeeping has to look at: few or none of thousands."""
        self._failed: dict[PartitionKey, RaftlogError] = {}
        self._given_up: set[PartitionKey] = set()
        self._leaving: dict[PartitionKey, Leaving] = {}
        self._damaged: dict[PartitionKey, tuple[PartitionLog, CorruptRecordError]] = {}
        """Found to be damaged, and not yet marked so in the log manager."""
        self._damage_served: dict[PartitionKey, str] = {}
        """The damage logged last, of logs that are served because no other replica has the records."""
        self._rules: dict[bytes, tuple[tuple[object, ...], TopicRules]] = {}
        """Rules by topic id, with the config objects that they were made from."""
        self._image = MetadataImage()
        self._active: dict[int, int] = {}
        self._full: frozenset[int] = frozenset()
        self._roles = RoleChanges(node_id, self._look_again)
        self._disk_work = DiskWork(self._at_the_disk, self._tell)
        self._first_offset = self._applied_offset = -1
        self._broker_epoch: int | None = None
        """The metadata offset of this process's registration; None before it."""
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Callers of `wait_applied`, and the offset that each waits for."""
        self._turn_ends_s = self._loop.time()
        self._queue: asyncio.Queue[_Step] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def serve(self, *, broker_epoch: int, propose: Propose, fetchers: Fetchers, replica_lag_time_max_ms: float) -> None:
        """Take part in replication, in this life of the broker; before `start`."""
        assert self._task is None, "partitions opened earlier would lack what is given here"
        self._broker_epoch = broker_epoch
        self._host = replace(self._host, replica_lag_time_max_ms=replica_lag_time_max_ms)
        self._roles.fetchers = fetchers
        self._isr_changes = IsrChanges(
            self._node_id,
            broker_epoch,
            propose,
            lambda: self._active,
            lambda: self._full,
            self.lease.valid,
            lambda: self._image,
            self.counters,
        )
        self._offline_replicas = OfflineReplicas(
            self._node_id, broker_epoch, propose, self._lost_replicas, lambda: self._image
        )
        self._full_storage = FullStorage(
            self._node_id,
            broker_epoch,
            propose,
            lambda: self._logs.times_full,
            lambda: self._image,
            self._host.clock.monotonic_ms,
        )

    def start(self, image: MetadataImage) -> None:
        """Start applying, beginning with everything in `image`."""
        self._first_offset = image.offset
        self._queue.put_nowait((image, None))
        self._task = asyncio.create_task(self._apply_loop(), name="apply-metadata")

    async def stop(self) -> None:
        """Stop applying; the partitions stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for part in (self._disk_work, self._roles, self._isr_changes, self._offline_replicas, self._full_storage):
            if part is not None:
                await part.close()

    def close_all(self, reason: RaftlogError) -> None:
        """Close every partition, with `reason` for all waiting and later requests."""
        for partition in self._partitions.values():
            partition.close(reason)

    # Look-ups

    def find(self, topic_id: bytes, partition: int) -> Partition:
        """Return the partition.

        Raises:
            InvalidRequestError: a topic id of another length than 16 bytes.
            NotLeader: the partition is on other brokers; names the leader.
            UnknownTopicId: no such partition, or it is not on this broker yet.
            StorageError: its log directory is offline, or its log is damaged or missing.
        """
        key = (topic_id, partition)
        found = self._partitions.get(key)
        if found is not None:
            return found
        if len(topic_id) != TOPIC_ID_BYTES:
            raise InvalidRequestError(f"a topic id has {TOPIC_ID_BYTES} bytes, this one has {len(topic_id)}")
        failed = self._failed.get(key)
        if failed is not None:
            raise failed
        topic, part = self._image.topics.get(topic_id), self._image.partition(*key)
        if topic is None or part is None or part.leader == self._node_id:
            raise UnknownTopicId(
                f"topic id {topic_id.hex()} partition {partition} is not on this broker: "
                "deleted, moved, or not created yet"
            )
        raise refusal(self._image, topic, part)

    def topic_name(self, topic_id: bytes, partition: int) -> str | None:
        """Return the name of a partition's topic; None: neither this broker nor its image knows the topic."""
        found = self._partitions.get((topic_id, partition))
        if found is not None:
            return found.log.topic
        topic = self._image.topics.get(topic_id)
        return None if topic is None else topic.name

    def partitions(self) -> list[Partition]:
        return list(self._partitions.values())

    def __len__(self) -> int:
        return len(self._partitions)

    def durable_on_all(self, log: PartitionLog) -> int:
        """Return the end (exclusive) of what every replica of a log holds durably; 0 where this broker cannot know."""
        partition = self._partitions.get((log.topic_id, log.partition))
        return partition.durable_on_all if partition is not None and partition.log is log else 0

    def preferred_replica(self, partition: Partition, rack: str) -> int | None:
        """Return the follower in `rack` for a reader there (KIP-392); None: the reader stays with this broker."""
        brokers = self._image.brokers.values()
        return partition.nearer_replica({b.broker_id for b in brokers if b.active and b.rack == rack})

    # Housekeeping

    def housekeep(self) -> None:
        for partition in list(self._chores):
            try:
                partition.housekeep()
            except Exception:  # a bug in one partition must not keep the others from their housekeeping
                logger.exception("housekeeping of %s failed", partition.topic_partition)
            if not partition.needs_housekeeping:
                del self._chores[partition]
        if self._full_storage is not None:
            self._full_storage.look()

    @property
    def flushes_by_time(self) -> bool:
        """Whether a partition has `flush.ms` set, so that housekeeping has to run often."""
        return any(partition.flushes_by_time for partition in self._chores)

    @property
    def has_full_followers(self) -> bool:
        """Whether the disk of another broker is full, so that its replicas may have to leave the ISR soon."""
        return bool(self._full - {self._node_id})

    def check_isr(self) -> None:
        """Propose the ISR changes that are due by time alone."""
        if self._isr_changes is not None:
            self._isr_changes.look_at_all(self._partitions.values())

    def retry_failed(self) -> None:
        """Open partitions again whose error is retriable, and retry the removal of logs; returns at once."""
        again = [
            key for key, error in self._failed.items() if isinstance(error, RetriableError) and self._may_open(key)
        ]
        for key in (*self._leaving, *again):
            if key not in self._disk_work:
                self._disk_work.ask(key, None)
        if self._offline_replicas is not None and self._failed:
            self._offline_replicas.report_soon()

    # Applying metadata

    def on_metadata(self, image: MetadataImage, records: Sequence[records_pb2.MetadataRecord] | None) -> None:
        """Take a committed change; returns at once. Without records everything may have changed."""
        self._queue.put_nowait((image, records))

    @property
    def applied_offset(self) -> int:
        """The metadata offset up to which this broker has let go of all that is not its own; -1 before any image.

        Logs may still be made, and roles begin a little later.
        """
        return self._applied_offset

    async def wait_applied(self, metadata_offset: int) -> None:
        """Return once every change up to `metadata_offset` is in effect, except roles that wait for truncations."""
        if self._done_offset() >= metadata_offset:
            return
        reached = self._loop.create_future()
        self._waiting[reached] = metadata_offset
        try:
            await reached
        finally:
            self._waiting.pop(reached, None)

    def _done_offset(self) -> int:
        oldest = self._disk_work.oldest_offset
        return self._applied_offset if oldest is None else min(self._applied_offset, oldest - 1)

    def _tell(self, *, always: bool = False) -> None:
        """Wake callers of `wait_applied`, and call `on_applied` if leaderships were gained or lost, or `always`."""
        roles = self._roles
        changed = bool(roles.gained or roles.lost)
        if changed:
            logger.log(
                logging.INFO if roles.gained + roles.lost > 1 else logging.DEBUG,  # a single one has its own line
                "leaderships changed",
                extra={
                    "event": "leaderships_changed",
                    "gained": roles.gained,
                    "lost": roles.lost,
                    "metadata_offset": self._image.offset,
                },
            )
            roles.gained = roles.lost = 0
        if self._waiting:
            done_offset = self._done_offset()
            for reached, offset in self._waiting.items():
                if offset <= done_offset and not reached.done():
                    reached.set_result(None)
        if self.on_applied is not None and (changed or always):
            self.on_applied(changed)

    async def _apply_loop(self) -> None:
        while True:
            image, records = await self._queue.get()
            if image.offset < self._image.offset:
                logger.error("metadata at offset %d came after %d; it is ignored", image.offset, self._image.offset)
                continue
            before, self._image = self._image, image
            self._active = {b.broker_id: b.broker_epoch for b in image.brokers.values() if b.active}
            self._full = frozenset(b.broker_id for b in image.brokers.values() if b.active and b.storage_full)
            try:
                touched = self._everything(image) if records is None else self._touched(before, image, records)
            except Exception:  # the image is valid even if its records cannot be read
                logger.exception("metadata records cannot be read at offset %d", image.offset)
                touched = self._everything(image)
            for key in sorted(touched, key=self._keeps):  # leaderships end first: other brokers wait for them
                self._touch(key)
                await self._give_way()
            self._applied_offset = image.offset
            try:
                self._tell(always=True)
            except Exception:  # the change is in effect; a failed listener must not stop the next one
                logger.exception("a listener failed at metadata offset %d", image.offset)
            await self._give_way()

    async def _give_way(self) -> None:
        """Let other tasks run, at most every `SLICE_S`."""
        if self._loop.time() >= self._turn_ends_s:
            await asyncio.sleep(0)
            self._turn_ends_s = self._loop.time() + SLICE_S

    def _everything(self, image: MetadataImage) -> dict[PartitionKey, None]:
        """Return every partition that is on this broker, or is to be; logs that are no replica leave."""
        touched = dict.fromkeys(
            (topic.topic_id, part.partition)
            for topic in image.topics.values()
            for part in topic.partitions
            if self._node_id in part.replicas
        )
        try:
            strays = self._partition_logs.strays(image)
        except Exception:  # the stray logs stay in place; roles matter more
            logger.exception("logs without a replica on this broker cannot be listed")
            strays = []
        for key in strays:
            self._leaving.setdefault(key, Leaving.SET_ASIDE)
        return touched | dict.fromkeys((*strays, *self._here()))

    def _here(self) -> list[PartitionKey]:
        return [*self._partitions, *self._failed, *self._disk_work.keys]

    def _touched(
        self, before: MetadataImage, image: MetadataImage, records: Sequence[records_pb2.MetadataRecord]
    ) -> dict[PartitionKey, None]:
        """Return the partitions that `records` change; those deleted or moved away leave."""
        touched: dict[PartitionKey, None] = {}
        for record in records:
            match record.WhichOneof("record"):
                case "remove_topic":
                    topic = before.topics.get(record.remove_topic.topic_id)
                    numbers = range(len(topic.partitions)) if topic is not None else ()
                    removed = [(record.remove_topic.topic_id, number) for number in numbers]
                    if topic is None:  # created and removed in the same records, or an image was skipped
                        removed = [key for key in self._here() if key[0] == record.remove_topic.topic_id]
                    touched.update(dict.fromkeys(removed))
                    for key in removed:
                        self._delete(key)
                case "partition":
                    key = (record.partition.topic_id, record.partition.partition)
                    touched[key] = None
                    self._roles.note_election(record.partition)
                    if self._node_id not in record.partition.replicas:
                        self._delete(key)
                case "config" if record.config.resource.type == records_pb2.ConfigResource.TOPIC:
                    topic = image.topic(record.config.resource.name)
                    keys = ((topic.topic_id, part.partition) for part in topic.partitions) if topic is not None else ()
                    touched.update(dict.fromkeys(key for key in keys if key in self._partitions))
                case "broker" if record.broker.broker_id == self._node_id:  # no longer fenced, it may lead more
                    touched.update(dict.fromkeys(key for key, part in self._partitions.items() if not part.leads))
                case "config":  # a broker's default applies to every topic without a value of its own
                    touched.update(dict.fromkeys(self._partitions))
                case _:
                    pass
        return touched

    def _delete(self, key: PartitionKey) -> None:
        if key in self._partitions or key in self._failed or key in self._disk_work:
            self._leaving[key] = Leaving.DELETED

    def _keeps(self, key: PartitionKey) -> bool:
        """Whether this broker does not lose the leadership of a partition."""
        partition = self._partitions.get(key)
        if partition is None or not partition.leads:
            return True
        part = self._image.partition(*key)
        return part is not None and part.leader == self._node_id and key not in self._leaving

    # One partition, by the newest metadata

    def _touch(self, key: PartitionKey) -> None:
        """Apply the newest metadata to a partition, as far as that needs no waiting; `DiskWork` does the rest."""
        try:
            self._bring_up(key)
        except Exception as error:  # one partition that fails must not keep the metadata from the others
            self._give_up(key, error)

    def _bring_up(self, key: PartitionKey) -> None:
        image = self._image
        topic, part = image.topics.get(key[0]), image.partition(*key)
        if topic is None or part is None or self._node_id not in part.replicas or key in self._leaving:
            if topic is None or part is None:
                self._forget(key, UnknownTopicId(f"topic id {key[0].hex()} partition {key[1]} was deleted"))
                self._roles.forget(key)
                self._rules.pop(key[0], None)
            else:
                self._forget(key, refusal(image, topic, part))
            if key in self._leaving:
                self._disk_work.ask(key, image.offset)
            return
        partition = self._partitions.get(key)
        if partition is None:
            self._open(key)
            return
        rules = self._rules_of(topic)
        if partition.log.config != rules.log:
            partition.log.update_config(rules.log)
            partition.apply_config()
        partition.throttle(rules.throttled_leaders, rules.throttled_followers)
        self._check_epoch(part, partition)
        self._roles.take(image, topic, part, partition, rules.min_insync_replicas)

    def _check_epoch(self, part: PartitionImage, partition: Partition) -> None:
        """Set a follower's log aside if its last batch is of a later leader epoch than the partition has reached.

        Such a batch is damaged; its checksum does not cover the epoch. The leader refuses the log, because to the
        leader this could also mean that a newer one was elected. This broker can tell: all records that its log had at
        the start of the process were written before it registered, so metadata from after the registration contain all
        their epochs. Later records were checked when they were appended. A member of the ISR keeps its log, because it
        may have records that no other replica has, for example after the quorum has lost metadata.
        """
        last_epoch = partition.log.leader_epochs.latest_epoch
        if last_epoch <= part.leader_epoch or part.leader == NO_LEADER or self._node_id in part.isr:
            return
        if self._broker_epoch is not None and self._image.offset >= self._broker_epoch:
            what = f"its last batch is of leader epoch {last_epoch}, and the partition is in epoch {part.leader_epoch}"
            self.on_damaged(partition.log, CorruptRecordError(f"the log of {partition.topic_partition}: {what}"))

    def _rules_of(self, topic: TopicImage) -> TopicRules:
        """Return a topic's rules, made again only if a config changed: images share unchanged config objects.

        Raises:
            InvalidConfig: a value that is not allowed.
        """
        sources = (topic.configs, self._image.configs, self._topic_defaults)
        known = self._rules.get(topic.topic_id)
        if known is not None and all(now is then for now, then in zip(sources, known[0], strict=True)):
            return known[1]
        rules = topic_rules(self._image, topic, self._topic_defaults, self._node_id, self._min_segment_bytes)
        self._rules[topic.topic_id] = (sources, rules)
        return rules

    def _look_again(self, key: PartitionKey, partition: Partition) -> None:
        if self._partitions.get(key) is partition:
            self._touch(key)
            self._tell()

    def _forget(self, key: PartitionKey, reason: RaftlogError) -> None:
        self._failed.pop(key, None)
        self._given_up.discard(key)
        self._damaged.pop(key, None)
        self._damage_served.pop(key, None)
        self._close(key, reason)

    def _close(self, key: PartitionKey, reason: RaftlogError) -> None:
        partition = self._partitions.pop(key, None)
        try:
            if partition is not None:
                self._roles.lost += partition.leads
                partition.close(reason)
            self._roles.fetchers.unfollow(*key)
        except Exception:  # a callback failed; the partition is closed all the same, and the caller closes others
            logger.exception("closing partition %d of topic id %s failed", key[1], key[0].hex())

    def _give_up(self, key: PartitionKey, error: Exception) -> None:
        """Close a partition until the restart: the metadata that failed may have taken its leadership away."""
        name = f"{key[0].hex()}-{key[1]}"
        topic = self._image.topics.get(key[0])
        if topic is not None:
            name = f"{topic.name}-{key[1]}"
        logger.error("applying the metadata of %s failed", name, exc_info=error)
        reason = StorageError(f"this broker cannot apply the metadata of partition {name}: {error}; restart it")
        self._close_until_restart(key, reason)

    def _close_until_restart(self, key: PartitionKey, reason: RaftlogError) -> None:
        self._failed[key] = reason
        self._given_up.add(key)
        self._close(key, reason)
        self._report_soon()

    # Logs

    def _may_open(self, key: PartitionKey) -> bool:
        part = self._image.partition(*key)
        return part is not None and key not in self._given_up and not self._partition_logs.is_hopeless(key, part)

    def _open(self, key: PartitionKey) -> None:
        if key in self._failed and not self._may_open(key):
            if self._offline_replicas is not None and self._offline_replicas.is_news(key):
                self._offline_replicas.report_soon()
            return
        log = self._partition_logs.online(key)
        if log is None or key in self._disk_work:
            self._disk_work.ask(key, self._image.offset)
        else:
            self._take_in(key, log)

    async def _at_the_disk(self, key: PartitionKey) -> None:
        """Do for one partition what waits for the disk: mark damage, remove a log that leaves, open or make a log."""
        try:
            damaged = self._damaged.pop(key, None)
            if damaged is not None:
                await self._partition_logs.mark_corrupt(*damaged)
                self._report_soon()
            await self._take_away(key)
            topic, part = self._image.topics.get(key[0]), self._image.partition(*key)
            if topic is None or part is None or self._node_id not in part.replicas:
                return
            if key in self._partitions or (key in self._failed and not self._may_open(key)):
                return
            log = await self._partition_logs.open(topic, part, self._rules_of(topic).log)
        except Exception as error:
            self._not_opened(key, error)
            return
        self._take_in(key, log)

    async def _take_away(self, key: PartitionKey) -> None:
        leaving = self._leaving.get(key)
        if leaving is None:
            return
        try:
            await self._partition_logs.take_away(key, leaving, self._image)
        except RaftlogError as error:
            logger.error(
                "the log of topic id %s partition %d cannot be %s: %s", key[0].hex(), key[1], leaving.value, error
            )
            if self._partition_logs.online(key) is not None:
                raise  # the log is still in place: it must not be opened as this partition's
        self._leaving.pop(key, None)

    def _not_opened(self, key: PartitionKey, error: Exception) -> None:
        part = self._image.partition(*key)
        if part is None or self._node_id not in part.replicas:
            logger.error("the log of topic id %s partition %d cannot be removed: %s", key[0].hex(), key[1], error)
            return
        if not isinstance(error, RaftlogError):
            logger.error("opening partition %d of %s failed", key[1], key[0].hex(), exc_info=error)
            error = StorageError(f"the log of partition {key[1]} of topic id {key[0].hex()} cannot be opened: {error}")
        elif isinstance(error, CorruptRecordError):
            error = _replica_damaged(f"{self._image.topics[key[0]].name}-{key[1]}", error)
        if str(error) != str(self._failed.get(key)):
            logger.error("partition %s-%d cannot be opened: %s", self._image.topics[key[0]].name, key[1], error)
        self._failed[key] = error
        if self._done_offset() >= self._first_offset:  # until then `report_offline_replicas` reports it
            self._report_soon()

    def _take_in(self, key: PartitionKey, log: PartitionLog) -> None:
        """Make the `Partition` of an open log, and apply the metadata to it."""
        topic, part = self._image.topics.get(key[0]), self._image.partition(*key)
        if topic is None or part is None or self._node_id not in part.replicas or key in self._leaving:
            self._leaving.setdefault(key, Leaving.SET_ASIDE)  # it left while the log was opened
            self._disk_work.ask(key, None)
            return
        try:
            log.update_config(self._rules_of(topic).log)
            partition = Partition(log, self._host)
        except Exception as error:
            self._give_up(key, error)
            return
        self._failed.pop(key, None)
        if self._offline_replicas is not None:
            self._offline_replicas.restored(key)
        self._partitions[key] = partition
        self._touch(key)

    # What partitions report

    def _on_term(self, partition: Partition) -> None:
        for listener in self.on_term:
            listener(partition)

    def _on_chore(self, partition: Partition) -> None:
        self._chores[partition] = None

    def _on_isr_wish(self, partition: Partition) -> None:
        if self._isr_changes is not None:
            self._isr_changes.look(partition)

    def _on_storage_error(self, log: PartitionLog, error: BaseException) -> None:
        """Take out of service what a failed flush has put in doubt: the log directory, or only this log.

        After an OSError the kernel may have lost pages of other logs in the directory too. Any other error is a bug in
        this program: no fsync has failed, and nothing unflushed was counted as durable, so the other logs are intact.
        Only this log's state in memory is not to be trusted.
        """
        if isinstance(error, OSError):
            self._logs.mark_dir_offline(self._logs.dir_of(log), error)
            return
        key = (log.topic_id, log.partition)
        partition = self._partitions.get(key)
        if partition is None or partition.log is not log:
            return
        logger.error("flushing %s failed; it is closed until the restart", partition.topic_partition, exc_info=error)
        reason = StorageError(f"{partition.topic_partition}: a flush failed: {error!r}; restart this broker")
        self._close_until_restart(key, reason)
        self._tell()

    def on_dir_offline(self, path: str, error: BaseException, logs: Sequence[PartitionLog]) -> None:
        """Close every partition of a log directory that failed; from any thread, returns at once."""
        self._loop.call_soon_threadsafe(self._close_dir, path, error, logs)

    def _close_dir(self, path: str, error: BaseException, logs: Sequence[PartitionLog]) -> None:
        reason = StorageError(f"log directory {path} is offline: {error}; repair the disk and restart the broker")
        for log in logs:
            key = (log.topic_id, log.partition)
            partition, part = self._partitions.get(key), self._image.partition(*key)
            if partition is not None and partition.log is not log:
                continue
            if part is not None and self._node_id in part.replicas and key not in self._given_up:
                self._failed[key] = reason
            self._close(key, reason)
        self._report_soon()
        self._tell()

    def on_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        """Take a log with a damaged batch out of service; from any thread, returns at once.

        A replica that no other can replace (the only one, or the last in sync) goes on serving its intact records.
        """
        self._loop.call_soon_threadsafe(self._close_damaged, log, error)

    def _close_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        key = (log.topic_id, log.partition)
        partition, part = self._partitions.get(key), self._image.partition(*key)
        if partition is None or partition.log is not log or part is None:
            return
        if part.replicas == (self._node_id,) or part.isr == (self._node_id,):
            if self._damage_served.get(key) != str(error):  # one line, however many readers report it
                self._damage_served[key] = str(error)
                logger.error(
                    "the log of %s is damaged and no other replica can replace it; its intact records are served: %s",
                    partition.topic_partition,
                    error,
                )
            return
        reason = _replica_damaged(f"{partition.topic_partition}", error)
        self._failed[key] = reason
        self._damaged[key] = (log, error)
        self._close(key, reason)
        self._disk_work.ask(key, None)
        self._tell()

    # Offline replicas

    async def report_offline_replicas(self) -> None:
        """Tell the controller of the replicas that have no working log; before the first heartbeat."""
        if self._offline_replicas is not None:
            await self._offline_replicas.report()

    def _report_soon(self) -> None:
        if self._offline_replicas is not None:
            self._offline_replicas.report_soon()

    def _lost_replicas(self) -> list[PartitionKey]:
        """Return the replicas without a working log, or closed until the restart, of partitions with other replicas."""
        return [
            key
            for key in self._failed
            if (key in self._given_up or self._partition_logs.is_lost(key))
            and (part := self._image.partition(*key)) is not None
            and self._node_id in part.replicas
            and len(part.replicas) > 1
        ]
