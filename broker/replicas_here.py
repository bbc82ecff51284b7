"""The replicas on this broker: from what the metadata says of one of them to an open partition with its role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from broker.clock import Clock
from broker.isr_changes import IsrChanges
from broker.lease import Lease
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.observability.counters import Counters
from broker.offline_replicas import OfflineReplicas
from broker.partition import Host, Partition
from broker.partition_logs import Leaving, PartitionKey, PartitionLogs
from broker.partition_roles import PartitionRoles
from broker.registry_parts import DiskWork, OffsetWaiters, RulesCache
from broker.role_changes import RoleChanges, refusal
from broker.suspicion import Suspicions
from raftlog.errors import CorruptRecordError, InternalError, RaftlogError, StorageError, UnknownTopicId
from raftmeta.image import MetadataImage

if TYPE_CHECKING:
    from broker.observability.partition_traces import PartitionTraces

logger = logging.getLogger(__name__)


class ReplicasHere:
    """The ground floor of `PartitionRegistry`, which says what to look at (`_touch`) and when.

    States of a replica:

        leaving   it is not this broker's any more, or has to begin anew (`_leaving`): closed, its log goes next
        at disk   its log is being made or taken away (`_disk_work`); what comes after that looks at the newest metadata
        open      in `_partitions`, with the role that the metadata gives it
        failed    in `_failed`, with the reason; `retry_failed` tries again where that may help
        given up  failed until the restart, since applying its metadata, or a flush, failed by a bug (`_given_up`)

    Whatever fails, what has to let go has let go before the metadata offset counts as applied: closing comes first and
    waits for nothing, the disk afterwards.
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
    ) -> None:
        self.lease = lease
        self.on_applied: Callable[[bool], None] | None = None
        """Called after every change that is in effect; True when leaderships came or went."""
        self.counters = Counters()
        """Where the registry, and the sessions that use it, count."""
        self.on_term: list[Callable[[PartitionRoles], None]] = []
        """Called with a partition whose term as leader begins or ends here, in the midst of that; they do not wait."""
        self.traces: Callable[[str, int], PartitionTraces | None] = lambda topic, partition: None
        """Makes what makes the spans of a partition; set before the first one is opened."""
        self._node_id = node_id
        self._logs = logs
        self._partition_logs = PartitionLogs(node_id, logs, disk)
        self._topic_defaults = topic_defaults
        self._loop = asyncio.get_running_loop()
        self._host = Host(
            node_id,
            group_commit,
            clock,
            lease,
            disk,
            on_storage_error=self._on_storage_error,
            on_isr_wish=self._on_isr_wish,
            on_suspicion=self._on_suspicion,
            on_damaged=self.on_damaged,
            on_term=self._on_term,
            traces=lambda topic, partition: self.traces(topic, partition),
            count_replicated=lambda bytes_in, bytes_out: self.counters.replicated(bytes_in, bytes_out),
        )
        self._suspicions = Suspicions(disk, clock, self.on_damaged)
        self._isr_changes: IsrChanges | None = None
        self._offline_replicas: OfflineReplicas | None = None
        self._partitions: dict[PartitionKey, Partition] = {}
        self._failed: dict[PartitionKey, RaftlogError] = {}
        self._given_up: set[PartitionKey] = set()
        self._leaving: dict[PartitionKey, Leaving] = {}
        self._damaged: dict[PartitionKey, tuple[PartitionLog, CorruptRecordError]] = {}
        """Found to be damaged; the log manager does not know it yet."""
        self._damage_served: dict[PartitionKey, str] = {}
        """What is damaged in logs that nobody can stand in for, as it was logged last."""
        self._image = MetadataImage()
        self._active: dict[int, int] = {}
        self._rules = RulesCache(node_id)
        self._roles = RoleChanges(node_id, self._look_again)
        self._disk_work = DiskWork(self._at_the_disk, self._tell)
        self._first_offset = self._applied_offset = -1
        self._waiters = OffsetWaiters(self._done_offset)

    # How far

    def _done_offset(self) -> int:
        oldest = self._disk_work.oldest_offset
        return self._applied_offset if oldest is None else min(self._applied_offset, oldest - 1)

    def _tell(self, *, always: bool = False) -> None:
        """Tell who waits how far metadata is applied, and the controller's client that leaderships came or went."""
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
        self._waiters.moved()
        if self.on_applied is not None and (changed or always):
            self.on_applied(changed)

    # What the metadata says

    def _touch(self, key: PartitionKey) -> None:
        """Make a partition what the newest metadata says, as far as that needs no waiting; the rest follows."""
        try:
            self._bring_up(key)
        except Exception as error:  # one partition that fails must not take those after it along
            self._give_up(key, error)

    def _bring_up(self, key: PartitionKey) -> None:
        image = self._image
        topic, part = image.topics.get(key[0]), image.partition(*key)
        if topic is None or part is None or self._node_id not in part.replicas or key in self._leaving:
            if topic is None or part is None:
                self._forget(key, UnknownTopicId(f"topic id {key[0].hex()} partition {key[1]} was deleted"))
                self._roles.forget(key)
                self._rules.forget(key[0])
            else:
                self._forget(key, refusal(image, topic, part))
            if key in self._leaving:
                self._disk_work.ask(key, image.offset)
            return
        partition = self._partitions.get(key)
        if partition is None:
            self._open(key)
            return
        rules = self._rules.rules(image, topic, self._topic_defaults)
        if partition.log.config != rules.log:
            partition.log.update_config(rules.log)
            partition.apply_config()
        partition.throttle(rules.throttled_leaders, rules.throttled_followers)
        self._roles.take(image, topic, part, partition, rules.min_insync_replicas)

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
        except Exception:  # somebody who waited failed; the partition is closed all the same, and so must others be
            logger.exception("closing partition %d of topic id %s failed", key[1], key[0].hex())

    def _give_up(self, key: PartitionKey, error: Exception) -> None:
        """Close a partition until the restart: what was not applied may have taken its leadership away."""
        name = f"{key[0].hex()}-{key[1]}"
        topic = self._image.topics.get(key[0])
        if topic is not None:
            name = f"{topic.name}-{key[1]}"
        logger.error("applying the metadata of %s failed", name, exc_info=error)
        reason = InternalError(f"this broker cannot apply the metadata of partition {name}: {error}; restart it")
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
                self._report_soon()
            return
        log = self._partition_logs.online(key)
        if log is None or key in self._disk_work:
            self._disk_work.ask(key, self._image.offset)
        else:
            self._take_in(key, log)

    async def _at_the_disk(self, key: PartitionKey) -> None:
        """Do for one partition what waits for the disk: what is damaged, or leaves, and then the log that it needs."""
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
            rules = self._rules.rules(self._image, topic, self._topic_defaults)
            log = await self._partition_logs.open(topic, part, rules.log)
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
            self._partition_logs.cannot_leave(key, leaving, error)
            if self._partition_logs.online(key) is not None:
                raise  # not gone yet: nothing may be made of it
        self._leaving.pop(key, None)

    def _not_opened(self, key: PartitionKey, error: Exception) -> None:
        part = self._image.partition(*key)
        if part is None or self._node_id not in part.replicas:
            logger.error("the log of topic id %s partition %d cannot be taken away: %s", key[0].hex(), key[1], error)
            return
        if not isinstance(error, RaftlogError):
            logger.error("opening partition %d of %s failed", key[1], key[0].hex(), exc_info=error)
            error = StorageError(f"the log of partition {key[1]} of topic id {key[0].hex()} cannot be opened: {error}")
        if str(error) != str(self._failed.get(key)):
            logger.error("partition %s-%d cannot be opened: %s", self._image.topics[key[0]].name, key[1], error)
        self._failed[key] = error
        if self._done_offset() >= self._first_offset:  # until then `report_offline_replicas` is to come
            self._report_soon()

    def _take_in(self, key: PartitionKey, log: PartitionLog) -> None:
        topic, part = self._image.topics.get(key[0]), self._image.partition(*key)
        if topic is None or part is None or self._node_id not in part.replicas or key in self._leaving:
            self._leaving.setdefault(key, Leaving.SET_ASIDE)  # since it was asked for
            self._disk_work.ask(key, None)
            return
        try:
            log.update_config(self._rules.rules(self._image, topic, self._topic_defaults).log)
            partition = Partition(log, self._host)
        except Exception as error:
            self._give_up(key, error)
            return
        self._failed.pop(key, None)
        if self._offline_replicas is not None:
            self._offline_replicas.restored(key)
        self._partitions[key] = partition
        self._touch(key)

    # What partitions tell their host

    def _on_term(self, partition: PartitionRoles) -> None:
        for listener in self.on_term:
            listener(partition)

    def _on_isr_wish(self, partition: object) -> None:
        if self._isr_changes is not None:
            assert isinstance(partition, Partition)
            self._isr_changes.look(partition)

    # Disk trouble

    async def report_offline_replicas(self) -> None:
        """Tell the controller of the replicas that have no working log; before the first heartbeat."""
        if self._offline_replicas is not None:
            await self._offline_replicas.report()

    def _report_soon(self) -> None:
        if self._offline_replicas is not None:
            self._offline_replicas.report_soon()

    def _lost_replicas(self) -> list[PartitionKey]:
        """Return the replicas without a working log, or closed until the restart, that have others beside them."""
        return [
            key
            for key in self._failed
            if (key in self._given_up or self._partition_logs.is_lost(key))
            and (part := self._image.partition(*key)) is not None
            and self._node_id in part.replicas
            and len(part.replicas) > 1
        ]

    def _on_storage_error(self, log: PartitionLog, error: BaseException) -> None:
        """Take out of service what a flush has failed in: the directory, or what only this log is to blame for.

        After an error of the operating system pages may be lost that other logs count on. Any other one is a bug: no
        fsync has failed, and nothing that was not flushed was counted, so the other logs in the directory are as good
        as before; what this one's memory says is not to be trusted any more.
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
        self._failed[key] = reason
        self._given_up.add(key)
        self._close(key, reason)
        self._report_soon()
        self._tell()

    def on_dir_offline(self, path: str, error: BaseException, logs: Sequence[PartitionLog]) -> None:
        """Close every partition of a log directory that failed; may be called from any thread, in any place."""
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

    def _on_suspicion(self, log: PartitionLog, offset: int) -> None:
        self._suspicions.suspect(log, offset)

    def on_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        """Take a log out of service in which a damaged batch was found; may be called from any thread, in any place.

        A replica that nobody can stand in for (the only one, or the last in sync) goes on serving what is whole.
        """
        self._loop.call_soon_threadsafe(self._close_damaged, log, error)

    def _close_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        key = (log.topic_id, log.partition)
        partition, part = self._partitions.get(key), self._image.partition(*key)
        if partition is None or partition.log is not log or part is None:
            return
        if part.replicas == (self._node_id,) or part.isr == (self._node_id,):
            if self._damage_served.get(key) != str(error):  # once, however many readers come across it
                self._damage_served[key] = str(error)
                logger.error(
                    "the log of %s is damaged and nobody can stand in for it; what is whole is served: %s",
                    partition.topic_partition,
                    error,
                )
            return
        self._failed[key] = error
        self._damaged[key] = (log, error)
        self._close(key, error)
        self._disk_work.ask(key, None)
        self._tell()
