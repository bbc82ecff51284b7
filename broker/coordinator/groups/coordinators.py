"""The coordinators of groups on this broker: a shard of __consumer_offsets each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import ClassVar, Final, TypeAlias, cast

from broker.clock import Clock
from broker.coordinator.groups.assignors import Assignor
from broker.coordinator.groups.commands import Command, GroupConfig
from broker.coordinator.groups.coordinator import GroupCoordinator
from broker.coordinator.groups.group import Group
from broker.coordinator.groups.topics import TopicsView
from broker.coordinator.internal_topics import CONSUMER_OFFSETS
from broker.coordinator.shard import Shard
from broker.coordinator.shards import Coordination, Coordinators, java_hash, partition_for
from broker.coordinator.user_bound import kept_bound, members_bound
from broker.server.lease import Lease
from raftlog.errors import InvalidGroupId
from raftmeta.features import LIVE_GROUPS_LEVEL, metadata_version
from raftmeta.image import MetadataImage

__all__ = [
    "Coordination",
    "GroupCoordinators",
    "GroupShard",
    "check_group_id",
    "java_hash",
    "partition_for",
    "warn_of_timeouts",
]

logger = logging.getLogger(__name__)

GroupShard: TypeAlias = Shard[Command, TopicsView]
MAX_GROUP_ID_CHARACTERS: Final = 255


def check_group_id(group_id: str) -> None:
    """Check the length of a group id.

    Raises:
        InvalidGroupId: empty, or more than 255 characters.
    """
    if not 1 <= len(group_id) <= MAX_GROUP_ID_CHARACTERS:
        raise InvalidGroupId(
            f"group id {group_id[:40]!r} has {len(group_id)} characters, it may have 1 to {MAX_GROUP_ID_CHARACTERS}"
        )


def warn_of_timeouts(session_timeout_ms: int, replica_lag_time_max_ms: int) -> None:
    """Warn if one paused follower can cost members their sessions."""
    if session_timeout_ms <= replica_lag_time_max_ms:
        logger.warning(
            "group.consumer.session.timeout.ms=%d is not above replica.lag.time.max.ms=%d: while a follower of %s "
            "is paused for that long, members that wait for an assignment or let partitions go lose their sessions",
            session_timeout_ms,
            replica_lag_time_max_ms,
            CONSUMER_OFFSETS,
        )


class GroupCoordinators(Coordinators[Command, TopicsView]):
    """All shards of __consumer_offsets on this broker."""

    TOPIC: ClassVar[str] = CONSUMER_OFFSETS
    WHAT: ClassVar[str] = "group"
    LIMIT: ClassVar[str] = "max.groups.per.user"
    COUNTED: ClassVar[str] = "groups"

    def __init__(
        self,
        node_id: int,
        image: Callable[[], MetadataImage],
        config: GroupConfig,
        assignors: Mapping[str, Assignor],
        *,
        executor: Executor,
        clock: Clock,
        lease: Lease,
        most_of_user: int,
    ) -> None:
        self._config = config
        self._assignors = assignors
        self._kept_bound = kept_bound(self._kept_by)
        self._members_bound = members_bound(self._members_of)
        super().__init__(node_id, image, executor=executor, clock=clock, lease=lease, most_of_user=most_of_user)

    def groups(self) -> Iterator[Group]:
        """Yield the groups that are coordinated here, to be looked at only; none without a lease: others may do it."""
        for _, shard in self.shards() if self._lease.valid() else ():
            if shard.core is not None:
                yield from cast(GroupCoordinator, shard.core).groups.values()

    def _make_core(self, partition: int) -> GroupCoordinator:
        return GroupCoordinator(
            self._config,
            self._topics(),
            self._assignors,
            self._may_upgrade,
            self.bound,
            self._kept_bound,
            self._members_bound,
        )

    def _kept_by(self, user: str) -> int:
        return sum(core.kept.get(user, 0) for core in self._cores())

    def _members_of(self, user: str) -> int:
        return sum(core.members_bytes.get(user, 0) for core in self._cores())

    def _cores(self) -> Iterator[GroupCoordinator]:
        cores = (shard.core for _, shard in self.shards())
        return (core for core in cores if isinstance(core, GroupCoordinator))

    def _may_upgrade(self) -> bool:
        return metadata_version(self._newest_image()) >= LIVE_GROUPS_LEVEL

    def _topics(self) -> TopicsView:
        return self._image_topics()

    def _check(self, key: str) -> None:
        check_group_id(key)
