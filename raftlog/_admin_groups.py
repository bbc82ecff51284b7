"""The synchronous admin client's part that deals with consumer groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from raftlog._client.admin import AdminEngine
from raftlog._group_descriptions import GroupDescription, GroupListing, PartitionLag
from raftlog.errors import RaftlogError
from raftlog.types import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition

if TYPE_CHECKING:
    from raftlog._client.background import LoopThread


class GroupAdmin:
    """Consumer groups: who is in them, how far they have read, and setting them back or forward.

    >>> from raftlog import Admin, TopicPartition
    >>> part = TopicPartition("orders", 0)
    >>> with Admin(cluster.bootstrap) as admin:
    ...     admin.alter_group_offsets("billing", {part: 0})
    ...     [group.state for group in admin.list_groups() if group.group_id == "billing"]
    ['empty']
    """

    _engine: AdminEngine
    _thread: LoopThread

    def list_groups(
        self,
        states: Iterable[str] | None = None,
        *,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[GroupListing]:
        """Return all groups by id; of these states only, where they are named: empty, assigning, reconciling, stable.

        All brokers are asked for the groups that they coordinate. That one of them cannot say is an error, but where
        `missing` is given: it gets, then, why there may be more groups.

        Raises:
            CoordinatorLoadInProgress, CoordinatorNotAvailable, BrokerUnavailable: some groups are not known, until
                `timeout`; says which coordinators are the reason.
        """
        return self._thread.run(self._engine.list_groups(states, missing, timeout))

    def describe_group(self, group_id: str, *, timeout: float | None = None) -> GroupDescription:
        """Return a group's state, its coordinator, and its members with what they read.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.describe_group("billing").members
        []

        Raises:
            GroupIdNotFound: there is no such group.
        """
        return self.describe_groups([group_id], timeout=timeout)[group_id]

    def describe_groups(self, group_ids: Iterable[str], *, timeout: float | None = None) -> dict[str, GroupDescription]:
        """Return several groups by id, in the order given.

        Raises:
            GroupIdNotFound: there is no such group; names one that is not there.
        """
        return self._thread.run(self._engine.describe_groups(group_ids, timeout))

    def group_offsets(self, group_id: str, *, timeout: float | None = None) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed offsets, of the next records to be read; none if there is no such group.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.group_offsets("billing")[part].offset
        0
        """
        return self._thread.run(self._engine.group_offsets(group_id, timeout))

    def group_lag(self, group_id: str, *, timeout: float | None = None) -> dict[TopicPartition, PartitionLag]:
        """Return how far a group is behind in each partition that it reads or has committed an offset for.

        Leaders that do not answer within some seconds leave their numbers out; `PartitionLag.error` says so.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.group_lag("billing")[part].lag
        0

        Raises:
            GroupIdNotFound: there is no such group.
        """
        return self._thread.run(self._engine.group_lag(group_id, timeout))

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        timeout: float | None = None,
    ) -> None:
        """Commit offsets for a group without members, which begins there when it has some; makes the group, if need be.

        The offsets are taken as they are, also where the partitions do not have them; `list_offsets` says what they
        have. Partitions that are not named keep theirs.

        Raises:
            NonEmptyGroup: the group has members.
            UnknownTopicOrPartition: one of the partitions is not there.
            OffsetMetadataTooLarge: see offset.metadata.max.bytes.
        """
        self._thread.run(self._engine.alter_group_offsets(group_id, offsets, timeout))

    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, timeout: float | None = None
    ) -> None:
        """Have a group forget how far it has read; it begins at `auto.offset.reset` there.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.delete_group_offsets("billing", [part])
        ...     admin.group_offsets("billing")
        {}

        Raises:
            GroupIdNotFound: there is no such group.
            GroupSubscribedToTopic: members are subscribed to the topic.
        """
        self._thread.run(self._engine.delete_group_offsets(group_id, partitions, timeout))

    def delete_groups(self, group_ids: Iterable[str], *, timeout: float | None = None) -> None:
        """Delete groups that have no members, with their offsets.

        Raises:
            GroupIdNotFound, NonEmptyGroup: some were refused, the others are deleted; the error is that of the first.
        """
        self._thread.run(self._engine.delete_groups(group_ids, timeout))

    def list_offsets(
        self, partitions: Mapping[TopicPartition, int | str], *, timeout: float | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return offsets by name ("earliest", "latest", "max_timestamp") or by a time in ms: the first record
        that is not older, None when no record is that new.

        "latest" is where the next record goes, also while a transaction is open below.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.list_offsets({part: "earliest"})[part].offset
        0

        Raises:
            UnknownTopicOrPartition: one of the partitions is not there.
        """
        return self._thread.run(self._engine.list_offsets(partitions, timeout))
