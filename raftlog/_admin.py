"""The admin client. `./dev aio` writes raftlog/aio/_admin.py from this file; tools/aio.py says how."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from raftlog._client.admin import AdminEngine
from raftlog._client.background import Client
from raftlog._client.keywords import AdminKeywords
from raftlog._client.options import AdminOptions, Bootstrap, taken_apart
from raftlog._core.descriptions import (
    MAX_TRANSACTION_TIMEOUT_MS,
    ClusterDescription,
    ConfigDescription,
    GroupDescription,
    GroupListing,
    HangingTransaction,
    LogDirDescription,
    NodeDescription,
    PartitionLag,
    PartitionProducers,
    PartitionReplicas,
    QuorumDescription,
    Reassignment,
    SinkDescription,
    SinkListing,
    StageDescription,
    TopicDescription,
    TransactionDescription,
    TransactionListing,
)
from raftlog.errors import RaftlogError
from raftlog.security import (
    DEFAULT_ITERATIONS,
    AclBinding,
    AclFilter,
    QuotaEntity,
    Role,
    ScramMechanism,
    UserScramCredential,
)
from raftlog.types import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition


class Admin(Client[AdminEngine]):
    """Manages a cluster: topics, groups, transactions, users, configs, logs. Thread-safe.

    >>> from raftlog import Admin
    >>> with Admin(cluster.bootstrap) as admin:
    ...     topic = admin.create_topic("payments", partitions=3, configs={"retention.ms": "3600000"})
    ...     [partition.leader for partition in topic.partitions]
    [1, 1, 1]

    Every method takes a `timeout` in seconds (by default `default.api.timeout.ms`) and retries retriable errors until
    it has passed. If no address has ever answered, a call gives up after 5 s.

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
    """

    # aio-doc: >>> import asyncio
    # aio-doc: >>> from raftlog import aio
    # aio-doc: >>> async def leaders():
    # aio-doc: ...     async with aio.Admin(cluster.bootstrap) as admin:
    # aio-doc: ...         topic = await admin.create_topic("invoices", partitions=2)
    # aio-doc: ...         return [partition.leader for partition in topic.partitions]
    # aio-doc: >>> asyncio.run(leaders())
    # aio-doc: [1, 1]

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        config: Mapping[str, object] | None = None,
        **options: Unpack[AdminKeywords],
    ) -> None:
        given = taken_apart(bootstrap, config, options)
        self._addresses = given.addresses
        self._options = AdminOptions.make(given.config, given.keywords)
        self._start()

    def _make(self, loop: asyncio.AbstractEventLoop) -> AdminEngine:
        return AdminEngine(self._addresses, self._options)

    def _abandon(self) -> None:  # sync
        self._engine.closed = True

    # Topics and brokers

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, Any] | None = None,
        *,
        replica_assignment: Sequence[Sequence[int]] | None = None,
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> TopicDescription | None:
        """Create a topic and return its description once brokers know it; None with `validate_only`.

        A number that is not given, or 0, is the broker's: `num.partitions` or `default.replication.factor`.
        `replica_assignment` lists the brokers of each partition, the preferred leader first, instead of the numbers of
        partitions and replicas. Without it the least loaded brokers get the replicas, spread over racks.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.create_topic("payments")
        Traceback (most recent call last):
        raftlog.errors.TopicAlreadyExists: ...

        Raises:
            TopicAlreadyExists, InvalidTopic, InvalidPartitions, InvalidReplicationFactor, InvalidReplicaAssignment,
            InvalidConfig: the cluster refuses the topic for this reason.
            BrokerUnavailable: no broker answers; the message names the addresses.
        """
        return self._thread.run(
            self._engine.create_topic(
                name,
                partitions or 0,
                replication_factor or 0,
                configs or {},
                replica_assignment,
                validate_only,
                timeout,
            )
        )

    def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic and its records.

        Raises:
            UnknownTopicOrPartition: there is no such topic.
        """
        self._thread.run(self._engine.delete_topic(name, timeout))

    def list_topics(self, *, internal: bool = False, timeout: float | None = None) -> list[str]:
        """Return the names of all topics, sorted; with `internal` also those that begin with two underscores.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     "payments" in admin.list_topics()
        True
        """
        return self._thread.run(self._engine.list_topics(internal, timeout))

    def describe_topic(
        self, name: str, *, include_authorized_operations: bool = False, timeout: float | None = None
    ) -> TopicDescription:
        """Return a topic's partitions: leaders, leader epochs, replicas, and which are in sync, moving or offline.

        With `include_authorized_operations` the answer also tells what this client may do with the topic (KIP-430).

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.describe_topic("payments").partitions[2].isr
        [1]

        Raises:
            UnknownTopicOrPartition: there is no such topic.
        """
        return self._thread.run(self._engine.describe_topic(name, include_authorized_operations, timeout))

    def describe_topics(
        self,
        names: Iterable[str] | None = None,
        *,
        internal: bool = False,
        include_authorized_operations: bool = False,
        timeout: float | None = None,
    ) -> list[TopicDescription]:
        """Describe these topics, or all topics in order of their names, in one request.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     [len(topic.partitions) for topic in admin.describe_topics(["payments"])]
        [3]

        Raises:
            UnknownTopicOrPartition: one of the topics does not exist.
        """
        return self._thread.run(self._engine.describe_topics(names, internal, include_authorized_operations, timeout))

    def describe_replicas(
        self,
        topics: Iterable[str] | None = None,
        *,
        silent: dict[int, RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> dict[TopicPartition, PartitionReplicas]:
        """Return the replicas of each partition as its leader sees them: log end offset, lag in records, in sync or
        not.

        Without `topics`, all topics. Partitions without a leader, or whose leader does not answer, are left out. If no
        leader answers at all, the call fails, unless `silent` is given: then `silent` receives, by broker, the reasons.

        >>> from raftlog import TopicPartition
        >>> with Admin(cluster.bootstrap) as admin:
        ...     replicas = admin.describe_replicas(["payments"])[TopicPartition("payments", 2)].replicas
        >>> [(replica.broker_id, replica.lag, replica.in_sync) for replica in replicas]
        [(1, 0, True)]

        Raises:
            UnknownTopicOrPartition: one of the topics does not exist.
        """
        return self._thread.run(self._engine.describe_replicas(topics, silent, timeout))

    def alter_reassignments(
        self, wanted: Mapping[TopicPartition, Sequence[int] | None], *, timeout: float | None = None
    ) -> None:
        """Move partitions to other brokers, the preferred leader first; None cancels a move in progress (KIP-455).

        Returns once the moves have begun: new replicas catch up, then the old ones are removed. `list_reassignments`
        shows moves in progress. `follower.replication.throttled.rate` and its like slow a move down; see
        docs/configuration.md.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_reassignments({TopicPartition("payments", 0): [1]})
        ...     admin.list_reassignments()
        {}

        Raises:
            InvalidReplicaAssignment, UnknownTopicOrPartition, NoReassignmentInProgress: the first refusal; moves that
                were not refused have begun.
        """
        self._thread.run(self._engine.alter_reassignments(wanted, timeout))

    def list_reassignments(self, *, timeout: float | None = None) -> dict[TopicPartition, Reassignment]:
        """Return the moves of partitions that are in progress."""
        return self._thread.run(self._engine.list_reassignments(timeout))

    def create_partitions(self, topic: str, total: int, *, timeout: float | None = None) -> None:
        """Raise the number of partitions to `total`. Keys may go to other partitions from then on.

        Raises:
            UnknownTopicOrPartition: there is no such topic.
            InvalidPartitions: the topic has that many partitions already.
        """
        self._thread.run(self._engine.create_partitions(topic, total, timeout))

    def describe_cluster(
        self,
        *,
        linearizable: bool = False,
        include_authorized_operations: bool = False,
        timeout: float | None = None,
    ) -> ClusterDescription:
        """Return the cluster's id, its controller and its brokers.

        Any broker answers from its copy of the metadata. With `linearizable` it asks the controllers first, so that
        the answer includes every change acknowledged before this call. With `include_authorized_operations` the answer
        also tells what this client may do with the cluster (KIP-430).

        >>> with Admin(cluster.bootstrap) as admin:
        ...     [broker.broker_id for broker in admin.describe_cluster().brokers]
        [1]
        """
        return self._thread.run(self._engine.describe_cluster(linearizable, include_authorized_operations, timeout))

    def describe_quorum(self, *, timeout: float | None = None) -> QuorumDescription:
        """Return the metadata quorum: its leader, the log end of each voter and broker, and its snapshot.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     [(voter.node_id, voter.state) for voter in admin.describe_quorum().voters]
        [(1, 'leader')]
        """
        return self._thread.run(self._engine.describe_quorum(timeout))

    def elect_leaders(
        self, topic: str, partitions: Iterable[int] = (), *, unclean: bool = False, timeout: float | None = None
    ) -> None:
        """Elect the preferred leader (the first replica) of these partitions, or of all partitions of the topic.

        With `unclean`, a partition without a leader gets a leader that may lack records: acknowledged records can be
        lost.

        Raises:
            UnknownTopicOrPartition: there is no such topic, or no such partition.
            ElectionNotNeeded: the partitions already have that leader.
            PreferredLeaderNotAvailable, EligibleLeadersNotAvailable: no replica that may lead is available.
        """
        self._thread.run(self._engine.elect_leaders(topic, partitions, unclean, timeout))

    def unregister_broker(self, broker_id: int, *, timeout: float | None = None) -> None:
        """Remove a broker that is gone for good from the cluster.

        Raises:
            InvalidRequestError: the broker is alive, or has replicas.
            BrokerIdNotRegistered: there is no such broker.
        """
        self._thread.run(self._engine.unregister_broker(broker_id, timeout))

    def alter_broker(
        self,
        broker_id: int,
        *,
        cordoned: bool | None = None,
        drained: bool | None = None,
        until_restart: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Cordon or drain a broker, or undo that; None changes nothing. `describe_cluster` shows both states.

        A cordoned broker gets no new replicas and keeps its present ones. A drained broker gets none either, and leads
        no partition that another in-sync replica can lead: the controller moves its leaderships after this call
        returns. Both states survive a restart of the broker, except `drained=True` with `until_restart`.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_broker(1, drained=True)
        ...     [(broker.broker_id, broker.drained) for broker in admin.describe_cluster().brokers]
        ...     admin.alter_broker(1, drained=False)
        [(1, True)]

        Raises:
            BrokerIdNotRegistered: there is no such broker.
            InvalidRequestError: no change was given, or a drained broker was to be uncordoned.
            UnsupportedVersion: the cluster's metadata.version is too low; see `update_feature`.
        """
        self._thread.run(self._engine.alter_broker(broker_id, cordoned, drained, until_restart, timeout))

    def update_feature(
        self, name: str, level: int, *, validate_only: bool = False, timeout: float | None = None
    ) -> None:
        """Raise the level of a feature. Every node must run a version that knows the level. It cannot be lowered again.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.update_feature("metadata.version", 11)
        ...     admin.describe_cluster().features
        {'metadata.version': 11}

        Raises:
            FeatureUpdateFailed: a node does not know the level, or it is below the present one.
        """
        self._thread.run(self._engine.update_feature(name, level, validate_only, timeout))

    def describe_configs(
        self,
        topic: str | None = None,
        broker: int | str | None = None,
        *,
        broker_logger: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, ConfigDescription]:
        """Return the config of a topic or of a broker, by key. `broker=""` means the default for all brokers.

        `broker_logger` takes a broker's id and returns the levels of its loggers.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.describe_configs(topic="payments")["retention.ms"].value
        '3600000'
        """
        return self._thread.run(self._engine.describe_configs(topic, broker, broker_logger, timeout))

    def describe_topic_configs(
        self, topics: Iterable[str], *, missing: dict[str, RaftlogError] | None = None, timeout: float | None = None
    ) -> dict[str, Mapping[str, ConfigDescription]]:
        """Return the configs of many topics at once, by topic and key, without documentation.

        If `missing` is given, topics with an error are left out, and `missing` receives the errors by topic. Without
        it, the first error is raised.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.describe_topic_configs(["payments"])["payments"]["retention.ms"].value
        '3600000'
        """
        return self._thread.run(self._engine.describe_topic_configs(topics, missing, timeout))

    def alter_configs(
        self,
        topic: str | None = None,
        broker: int | str | None = None,
        *,
        broker_logger: int | None = None,
        set: Mapping[str, Any] | None = None,
        unset: Iterable[str] = (),
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Set and unset config keys of a topic or of a broker. Other keys keep their values.

        `broker_logger` takes a broker's id and sets the levels of its loggers (`{"root": "DEBUG"}`) until it restarts.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_configs(topic="payments", set={"max.message.bytes": 2097152}, unset=["retention.ms"])
        ...     admin.describe_configs(topic="payments")["max.message.bytes"].value
        '2097152'

        Raises:
            InvalidConfig: an unknown key or a bad value; nothing was changed.
        """
        self._thread.run(
            self._engine.alter_configs(topic, broker, broker_logger, set or {}, unset, validate_only, timeout)
        )

    def describe_log_dirs(self, broker: int | None = None, *, timeout: float | None = None) -> list[LogDirDescription]:
        """Return the log directories of one broker, or of all: space, partitions, and why a directory is offline."""
        return self._thread.run(self._engine.describe_log_dirs(broker, timeout))

    def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """Delete the records below these offsets (-1: below the high watermark); return the new log start offsets.

        Raises:
            OffsetOutOfRange: an offset is above the high watermark.
        """
        return self._thread.run(self._engine.delete_records(before, timeout))

    # Groups

    def list_groups(
        self,
        states: Iterable[str] | None = None,
        *,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[GroupListing]:
        """Return all groups by id, or those in these states: empty, assigning, reconciling, stable,
        preparing_rebalance, completing_rebalance.

        Every broker is asked for the groups that it coordinates. If one cannot answer, that is an error, unless
        `missing` is given: then `missing` receives the reasons why the list may be incomplete.

        >>> from raftlog import Admin, TopicPartition
        >>> part = TopicPartition("orders", 0)
        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_group_offsets("billing", {part: 0})
        ...     [group.state for group in admin.list_groups() if group.group_id == "billing"]
        ['empty']

        Raises:
            CoordinatorLoadInProgress, CoordinatorNotAvailable, BrokerUnavailable: some coordinators did not answer
                within `timeout`; the message names them.
        """
        return self._thread.run(self._engine.list_groups(states, missing, timeout))

    def describe_group(
        self, group_id: str, *, include_authorized_operations: bool = False, timeout: float | None = None
    ) -> GroupDescription:
        """Return a group's state, its coordinator, and its members with their partitions.

        With `include_authorized_operations` the answer also tells what this client may do with the group (KIP-430).

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.describe_group("billing").members
        []

        Raises:
            GroupIdNotFound: there is no such group.
        """
        found = self.describe_groups(
            [group_id], include_authorized_operations=include_authorized_operations, timeout=timeout
        )
        return found[group_id]

    def describe_groups(
        self,
        group_ids: Iterable[str],
        *,
        include_authorized_operations: bool = False,
        timeout: float | None = None,
    ) -> dict[str, GroupDescription]:
        """Describe several groups, in the order given.

        Raises:
            GroupIdNotFound: one of the groups does not exist; the message names it.
        """
        return self._thread.run(self._engine.describe_groups(group_ids, include_authorized_operations, timeout))

    def group_offsets(self, group_id: str, *, timeout: float | None = None) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return a group's committed offsets (of the next records to read); empty if there is no such group.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.group_offsets("billing")[part].offset
        0
        """
        return self._thread.run(self._engine.group_offsets(group_id, timeout))

    def group_lag(self, group_id: str, *, timeout: float | None = None) -> dict[TopicPartition, PartitionLag]:
        """Return a group's lag, in records and in seconds, in each partition that it reads or has an offset for.

        If a leader does not answer within some seconds, the lags of its partitions are None, and `PartitionLag.error`
        says why.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.group_lag("billing")[part].lag
        0

        Raises:
            GroupIdNotFound: there is no such group.
        """
        return self._thread.run(self._engine.group_lag(group_id, timeout))

    def group_lags(
        self, group_ids: Iterable[str], *, missing: dict[str, RaftlogError] | None = None, timeout: float | None = None
    ) -> dict[str, dict[TopicPartition, PartitionLag]]:
        """Return the lag of many groups at once, as `group_lag`, by group.

        If `missing` is given, groups with an error are left out, and `missing` receives the errors by group. Without
        it, the first error is raised.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.group_lags(["billing"])["billing"][part].lag
        0
        """
        return self._thread.run(self._engine.group_lags(group_ids, missing, timeout))

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        timeout: float | None = None,
    ) -> None:
        """Commit offsets for a group without members; creates the group if there is none of that name.

        The call does not check that the offsets exist; `list_offsets` returns the range of each partition. Other
        partitions keep their committed offsets.

        Raises:
            NonEmptyGroup: the group has members.
            UnknownTopicOrPartition: one of the partitions does not exist.
            OffsetMetadataTooLarge: the metadata of an offset is longer than `offset.metadata.max.bytes`.
        """
        self._thread.run(self._engine.alter_group_offsets(group_id, offsets, timeout))

    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, timeout: float | None = None
    ) -> None:
        """Delete a group's committed offsets of these partitions; the group then begins there at `auto.offset.reset`.

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
            GroupIdNotFound, NonEmptyGroup: the first refusal; groups that were not refused are deleted.
        """
        self._thread.run(self._engine.delete_groups(group_ids, timeout))

    def list_offsets(
        self,
        partitions: Mapping[TopicPartition, int | str],
        *,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return offsets by name ("earliest", "latest", "max_timestamp") or by a time in ms since 1970.

        For a time, the answer is the first record with this or a later timestamp, or None if there is none. "latest" is
        the log end offset, even while a transaction is open below it.

        If `missing` is given, partitions whose leaders do not answer are left out, and `missing` receives the reasons.
        Without it such a partition is an error.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.list_offsets({part: "earliest"})[part].offset
        0

        Raises:
            UnknownTopicOrPartition: one of the partitions does not exist.
        """
        return self._thread.run(self._engine.list_offsets(partitions, missing, timeout))

    # Transactions, staged batches, producers

    def list_transactions(
        self,
        states: Iterable[str] | None = None,
        *,
        producer_ids: Iterable[int] | None = None,
        running_longer_than_ms: int = 0,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[TransactionListing]:
        """Return all transactional ids by id, then open stages by sink (KIP-664).

        `states` (empty, ongoing, prepare_commit, prepare_abort, complete_commit, complete_abort), `producer_ids` and
        `running_longer_than_ms` narrow the list. Every broker is asked for the ids that it coordinates. If one cannot
        answer, that is an error, unless `missing` is given: then `missing` receives the reasons why the list may be
        incomplete.

        >>> from raftlog import Admin
        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.list_transactions(["ongoing"])
        []

        Raises:
            CoordinatorLoadInProgress, CoordinatorNotAvailable, BrokerUnavailable: some coordinators did not answer
                within `timeout`.
        """
        return self._thread.run(
            self._engine.list_transactions(states, producer_ids, running_longer_than_ms, missing, timeout)
        )

    def describe_transaction(
        self, transactional_id: str, *, include_authorized_operations: bool = False, timeout: float | None = None
    ) -> TransactionDescription:
        """Return the last transaction of a transactional id: its state, its partitions, and which lack the end marker.

        Raises:
            TransactionalIdNotFound: no producer has used this id, or none for transactional.id.expiration.ms.
        """
        found = self.describe_transactions(
            [transactional_id], include_authorized_operations=include_authorized_operations, timeout=timeout
        )
        return found[transactional_id]

    def describe_transactions(
        self,
        transactional_ids: Iterable[str],
        *,
        include_authorized_operations: bool = False,
        timeout: float | None = None,
    ) -> dict[str, TransactionDescription]:
        """Describe several transactional ids, in the order given.

        Raises:
            TransactionalIdNotFound: one of the ids does not exist; the message names it.
        """
        return self._thread.run(
            self._engine.describe_transactions(transactional_ids, include_authorized_operations, timeout)
        )

    def abort_transaction(self, transactional_id: str, *, timeout: float | None = None) -> None:
        """Abort the open transaction of an id and fence its producer.

        A transaction whose outcome is decided cannot be aborted. `abort_hanging` ends one that no coordinator knows.

        Raises:
            TransactionalIdNotFound: there is no such id.
            InvalidTxnState: no transaction is open, or its outcome is decided.
        """
        self._thread.run(self._engine.abort_transaction(transactional_id, timeout))

    def list_sinks(
        self, *, missing: list[RaftlogError] | None = None, timeout: float | None = None
    ) -> list[SinkListing]:
        """Return the sinks of staged batches, by id: their topics and the last batch that each has committed.

        Raises:
            CoordinatorLoadInProgress, CoordinatorNotAvailable, BrokerUnavailable: as `list_transactions`.
        """
        return self._thread.run(self._engine.list_sinks(missing, timeout))

    def describe_sink(self, sink_id: str, *, timeout: float | None = None) -> SinkDescription:
        """Return a sink with its open stages.

        Raises:
            TransactionalIdNotFound: the sink has no committed batch and no open stage.
        """
        return self._thread.run(self._engine.describe_sink(sink_id, timeout))

    def abort_stages(
        self, sink_id: str, batch_id: int | None = None, *, timeout: float | None = None
    ) -> list[StageDescription]:
        """Abort the open stages of a sink, or of one of its batches, and return them.

        Use it for stages whose writer is gone: `read_committed` consumers wait behind an open stage until its timeout.
        A writer that is still alive fails with `StageExpired` when it commits, and writes the batch again. A stage
        that a commit has named is no longer open: this call leaves it as it is.

        Raises:
            TransactionalIdNotFound: the sink has no committed batch and no open stage.
        """
        return self._thread.run(self._engine.abort_stages(sink_id, batch_id, timeout))

    def describe_producers(
        self, topic: str, partition: int | None = None, *, timeout: float | None = None
    ) -> dict[TopicPartition, PartitionProducers]:
        """Return the producers that a partition, or each partition of a topic, remembers, and their open transactions.

        The answers come from the partitions' leaders.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     topic = admin.create_topic("refunds")
        ...     [known.producers for known in admin.describe_producers("refunds").values()]
        [[]]

        Raises:
            UnknownTopicOrPartition: there is no such topic or partition.
            LeaderNotAvailable, BrokerUnavailable: a leader did not answer within `timeout`.
        """
        return self._thread.run(self._engine.describe_producers(topic, partition, timeout))

    def find_hanging_transactions(
        self,
        topics: Iterable[str] | None = None,
        *,
        max_transaction_timeout_ms: int = MAX_TRANSACTION_TIMEOUT_MS,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[HangingTransaction]:
        """Return hanging transactions of these topics, or of all: open in a partition, unknown to every coordinator.

        A hanging transaction has been open for longer than `transaction.max.timeout.ms`, and `read_committed` consumers
        wait behind it for ever. If a leader does not answer, the call fails, unless `missing` is given: then `missing`
        receives the reasons. A coordinator that does not answer is always an error.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.find_hanging_transactions()
        []

        Raises:
            UnknownTopicOrPartition: one of the topics does not exist.
            RaftlogError: as `describe_producers` and `list_transactions`.
        """
        return self._thread.run(
            self._engine.find_hanging_transactions(topics, max_transaction_timeout_ms, missing, timeout)
        )

    def abort_hanging(
        self, topic: str, partition: int, start_offset: int, *, force: bool = False, timeout: float | None = None
    ) -> HangingTransaction:
        """End a hanging transaction in one partition with an abort marker, and return it.

        `start_offset` is the transaction's first offset in the partition. The call refuses a transaction that a
        coordinator knows, because its other partitions may be committed. With `force` it asks no coordinator.

        Raises:
            InvalidTxnState: no open transaction begins there, or it is not hanging: see `abort_transaction`.
            RaftlogError: as `describe_producers` and `list_transactions`.
        """
        part = TopicPartition(topic, partition)
        return self._thread.run(self._engine.abort_hanging(part, start_offset, force, timeout))

    # Nodes

    def describe_node(self, node_id: int, *, timeout: float | None = None) -> NodeDescription:
        """Return a node's description of itself: version, clock, directories, limits, configuration.

        A controller, or a broker that this client cannot reach, is asked through another broker.

        >>> from raftlog import Admin
        >>> with Admin(cluster.bootstrap) as admin:
        ...     node = admin.describe_node(1)
        >>> node.roles, node.not_ready, node.configs["node.id"].value
        (['broker', 'controller'], '', '1')

        Raises:
            InvalidRequestError: there is no such node.
            BrokerUnavailable, RequestTimedOut: the node did not answer within `timeout`.
            UnsupportedVersion: the node runs a version without this request.
        """
        return self._thread.run(self._engine.describe_node(node_id, timeout))

    # Users and ACLs

    def create_acls(self, bindings: AclBinding | Iterable[AclBinding], *, timeout: float | None = None) -> None:
        """Create ACLs, all of them or none. An ACL that already exists stays as it is.

            admin.create_acls(AclBinding("User:ada", AclOperation.READ, ResourceType.TOPIC, "payments"))

        Raises:
            InvalidRequestError: an ACL is impossible: its principal is not `User:NAME`, or the resource does not have
                the operation.
            ClusterAuthorizationFailed: this user may not create ACLs.
            SecurityDisabled: the brokers have no authorizer.
            UnsupportedVersion: metadata.version is too low.
        """
        self._thread.run(self._engine.create_acls(bindings, timeout))

    def describe_acls(self, filter: AclFilter | None = None, *, timeout: float | None = None) -> list[AclBinding]:
        """Return the ACLs that match the filter; without a filter, all ACLs.

        Raises:
            ClusterAuthorizationFailed: this user may not see ACLs.
        """
        return self._thread.run(self._engine.describe_acls(filter or AclFilter(), timeout))

    def delete_acls(
        self, filters: AclFilter | Iterable[AclFilter], *, validate_only: bool = False, timeout: float | None = None
    ) -> list[AclBinding]:
        """Delete the ACLs that match any of the filters, and return them; with `validate_only` only return them.

        If a response is lost, the client repeats the call, which returns only the ACLs that were still there.

        Raises:
            ClusterAuthorizationFailed: this user may not delete ACLs.
        """
        return self._thread.run(self._engine.delete_acls(filters, validate_only, timeout))

    def alter_user(
        self,
        name: str,
        password: str,
        mechanism: str | ScramMechanism = ScramMechanism.SCRAM_SHA_512,
        iterations: int = DEFAULT_ITERATIONS,
        *,
        only: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Create a user, or change its password; the user's connections have to log in again.

        The password does not leave this process: the brokers receive salted keys to check it with (RFC 5802).
        Credentials of other mechanisms stay, unless `only` is true.

        >>> from raftlog import Admin
        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_user("ada", "difference-engine")
        ...     admin.describe_users()
        ...     admin.delete_user("ada")
        [UserScramCredential(user='ada', mechanism=<ScramMechanism.SCRAM_SHA_512: 2>, iterations=8192)]

        Raises:
            UnacceptableCredential: the name, the password or the number of iterations is not allowed.
            ClusterAuthorizationFailed: this user may not change users.
            UnsupportedVersion: metadata.version is too low.
        """
        self._thread.run(self._engine.alter_user(name, password, mechanism, iterations, only, timeout))

    def delete_user(
        self, name: str, mechanism: str | ScramMechanism | None = None, *, timeout: float | None = None
    ) -> None:
        """Delete a user, or its credential of one mechanism. Brokers close the user's connections at once.

        Raises:
            ResourceNotFound: there is no such user.
            ClusterAuthorizationFailed: this user may not delete users.
        """
        self._thread.run(self._engine.delete_user(name, mechanism, timeout))

    def describe_users(
        self, names: str | Iterable[str] = (), *, timeout: float | None = None
    ) -> list[UserScramCredential]:
        """Return the credentials of these users, or of all users.

        Unknown names are left out, and so are the users in a broker's `sasl.users.location`, which only that broker
        knows.

        Raises:
            ClusterAuthorizationFailed: this user may not see users.
        """
        return self._thread.run(self._engine.describe_users(names, timeout))

    # Roles

    def create_role(
        self,
        name: str,
        permissions: AclBinding | Iterable[AclBinding] = (),
        principals: str | Iterable[str] = (),
        *,
        timeout: float | None = None,
    ) -> None:
        """Create a role with these permissions, and grant it to these principals.

            read = AclBinding("Role:clerk", AclOperation.READ, ResourceType.TOPIC, "payments")
            admin.create_role("clerk", read, "User:ada")

        A principal has the permissions of its roles beside its own ACLs; a denial in either wins.

        Raises:
            DuplicateResource: a role of that name already exists.
            InvalidRequestError: a name, a permission or a principal is not allowed.
            ClusterAuthorizationFailed: this user may not create roles.
            SecurityDisabled: the brokers have no authorizer.
            UnsupportedVersion: metadata.version is too low.
        """
        self._thread.run(self._engine.create_role(name, permissions, principals, timeout))

    def alter_role(
        self,
        name: str,
        *,
        add: AclBinding | Iterable[AclBinding] = (),
        remove: AclBinding | Iterable[AclBinding] = (),
        grant: str | Iterable[str] = (),
        revoke: str | Iterable[str] = (),
        timeout: float | None = None,
    ) -> None:
        """Change a role, all or nothing: add and remove permissions, grant it to principals and revoke it.

        Adding an existing permission or principal, or removing a missing one, changes nothing.

        Raises:
            ResourceNotFound: there is no such role.
            InvalidRequestError: a permission or a principal is not allowed.
            ClusterAuthorizationFailed: this user may not change roles.
        """
        self._thread.run(self._engine.alter_role(name, add, remove, grant, revoke, timeout))

    def delete_role(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a role; its principals lose the permissions that they had through it.

        Raises:
            ResourceNotFound: there is no such role.
            ClusterAuthorizationFailed: this user may not delete roles.
        """
        self._thread.run(self._engine.delete_role(name, timeout))

    def describe_roles(
        self, names: str | Iterable[str] = (), *, principal: str | None = None, timeout: float | None = None
    ) -> list[Role]:
        """Return these roles, or all, by name; unknown names are left out.

        With `principal`, return only the roles that this principal has, itself or through `User:*`.

        Raises:
            ClusterAuthorizationFailed: this user may not see roles.
        """
        return self._thread.run(self._engine.describe_roles(names, principal, timeout))

    # Quotas

    def alter_client_quotas(
        self,
        alterations: Mapping[QuotaEntity, Mapping[str, float | None]],
        *,
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Set quotas, all or none; a value of None removes that quota. Other quotas stay (KIP-546).

        Users and client ids have the keys `producer_byte_rate` and `consumer_byte_rate` (bytes per second),
        `request_percentage` (percent of one core) and `controller_mutation_rate` (mutations per second); addresses have
        `connection_creation_rate` (connections per second).

        >>> from raftlog import Admin, QuotaEntity
        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_client_quotas({QuotaEntity("ada"): {"producer_byte_rate": 1_000_000}})
        ...     admin.describe_client_quotas()
        ...     admin.alter_client_quotas({QuotaEntity("ada"): {"producer_byte_rate": None}})
        {QuotaEntity(user='ada', client_id=None, ip=None): {'producer_byte_rate': 1000000.0}}

        Raises:
            InvalidRequestError: an entity, a key or a value is not allowed.
            ClusterAuthorizationFailed: this user may not set quotas.
            UnsupportedVersion: metadata.version is too low.
        """
        self._thread.run(self._engine.alter_client_quotas(alterations, validate_only, timeout))

    def describe_client_quotas(
        self, filter: QuotaEntity | None = None, *, strict: bool = False, timeout: float | None = None
    ) -> dict[QuotaEntity, dict[str, float]]:
        """Return the quotas of all entities that have the names in the filter; without a filter, all quotas.

        With `strict`, entities that have further names are left out: `QuotaEntity("ada")` finds the quotas of the user,
        but not those of the user at single client ids.

        Raises:
            ClusterAuthorizationFailed: this user may not see quotas.
        """
        return self._thread.run(self._engine.describe_client_quotas(filter or QuotaEntity(), strict, timeout))

    # Metrics and the end

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of this client's requests, as `Producer.metrics`.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     _ = admin.describe_cluster()
        ...     admin.metrics()["admin-client-metrics"]["request-total"] >= 1
        True
        """
        # aio: if self._made is None:
        # aio:     return {}
        return self._engine.metrics()

    def close(self) -> None:
        """Close the connections. Closing twice is allowed."""
        # aio: self._closed = True
        if self._made is not None and not self._made.closed:
            self._thread.run(self._made.close())

    def __enter__(self) -> Admin:
        # aio: assert self._engine is not None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
