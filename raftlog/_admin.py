"""The synchronous admin client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from raftlog._admin_groups import GroupAdmin
from raftlog._admin_nodes import NodeAdmin
from raftlog._admin_security import SecurityAdmin
from raftlog._admin_transactions import TransactionAdmin
from raftlog._client.admin import AdminEngine
from raftlog._client.background import abandon_after_fork, loop_thread
from raftlog._client.options import AdminOptions
from raftlog._core.bootstrap import parse_bootstrap
from raftlog._descriptions import (
    ClusterDescription,
    ConfigDescription,
    LogDirDescription,
    PartitionReplicas,
    QuorumDescription,
    Reassignment,
    TopicDescription,
)
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition


class Admin(GroupAdmin, TransactionAdmin, NodeAdmin, SecurityAdmin):
    """Manages topics, configs and logs of a cluster. Thread-safe.

    >>> from raftlog import Admin
    >>> with Admin(cluster.bootstrap) as admin:
    ...     topic = admin.create_topic("payments", partitions=3, configs={"retention.ms": "3600000"})
    ...     [partition.leader for partition in topic.partitions]
    [1, 1, 1]

    Every method takes a `timeout` in seconds, `default.api.timeout.ms` by default; errors that may pass are retried
    until then. Addresses that have never answered are given up after 5 s.

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
    """

    def __init__(
        self, bootstrap: str | Sequence[str], *, config: Mapping[str, object] | None = None, **options: object
    ) -> None:
        addresses = parse_bootstrap(bootstrap)
        resolved = AdminOptions.make(config, options)
        self._thread = loop_thread()

        async def make() -> AdminEngine:
            return AdminEngine(addresses, resolved)

        self._engine = self._thread.run(make())
        abandon_after_fork(self)

    def _abandon(self) -> None:
        self._engine.closed = True

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return what this client counts of its requests, as `Producer.metrics`.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     _ = admin.describe_cluster()
        ...     admin.metrics()["admin-client-metrics"]["request-total"] >= 1
        True
        """
        return self._engine.metrics()

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 1,
        configs: Mapping[str, Any] | None = None,
        *,
        replica_assignment: Sequence[Sequence[int]] | None = None,
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> TopicDescription | None:
        """Create a topic and return its description once brokers know it; None with `validate_only`.

        `replica_assignment` has the brokers of each partition, the preferred leader first, in place of the numbers of
        partitions and replicas; else brokers that have least get them, in racks of their own. 0 partitions or replicas
        are as many as the brokers' `num.partitions` and `default.replication.factor` say.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.create_topic("payments")
        Traceback (most recent call last):
        raftlog.errors.TopicAlreadyExists: ...

        Raises:
            TopicAlreadyExists, InvalidTopic, InvalidPartitions, InvalidReplicationFactor, InvalidReplicaAssignment,
            InvalidConfig: refused.
            BrokerUnavailable: no broker answers; names the addresses.
        """
        return self._thread.run(
            self._engine.create_topic(
                name, partitions, replication_factor, configs or {}, replica_assignment, validate_only, timeout
            )
        )

    def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic and its records.

        Raises:
            UnknownTopicOrPartition: there is none of that name.
        """
        self._thread.run(self._engine.delete_topic(name, timeout))

    def list_topics(self, *, internal: bool = False, timeout: float | None = None) -> list[str]:
        """Return the names of all topics, in order; with `internal` also those that begin with two underscores.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     "payments" in admin.list_topics()
        True
        """
        return self._thread.run(self._engine.list_topics(internal, timeout))

    def describe_topic(self, name: str, *, timeout: float | None = None) -> TopicDescription:
        """Return partitions, leaders, leader epochs, replicas, and which of them are in sync, moved, or offline.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.describe_topic("payments").partitions[2].isr
        [1]

        Raises:
            UnknownTopicOrPartition: there is none of that name.
        """
        return self._thread.run(self._engine.describe_topic(name, timeout))

    def describe_topics(
        self, names: Iterable[str] | None = None, *, internal: bool = False, timeout: float | None = None
    ) -> list[TopicDescription]:
        """Return what topics consist of, in one request: all of them by name, or those that are named.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     [len(topic.partitions) for topic in admin.describe_topics(["payments"])]
        [3]

        Raises:
            UnknownTopicOrPartition: one is not there.
        """
        return self._thread.run(self._engine.describe_topics(names, internal, timeout))

    def describe_replicas(
        self,
        topics: Iterable[str] | None = None,
        *,
        silent: dict[int, RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> dict[TopicPartition, PartitionReplicas]:
        """Return how far the replicas of partitions are, as their leaders see it; of all topics, or of these.

        Partitions that nobody leads, or whose leader does not answer, are missing. That no leader answers at all is an
        error, but where `silent` is given: it gets, by broker, why leaders did not answer.

        >>> from raftlog import TopicPartition
        >>> with Admin(cluster.bootstrap) as admin:
        ...     replicas = admin.describe_replicas(["payments"])[TopicPartition("payments", 2)].replicas
        >>> [(replica.broker_id, replica.lag, replica.in_sync) for replica in replicas]
        [(1, 0, True)]

        Raises:
            UnknownTopicOrPartition: one of the topics is not there.
        """
        return self._thread.run(self._engine.describe_replicas(topics, silent, timeout))

    def alter_reassignments(
        self, wanted: Mapping[TopicPartition, Sequence[int] | None], *, timeout: float | None = None
    ) -> None:
        """Have partitions move to other brokers, the preferred leader first; None cancels the move under way.

        Returns once the moves have begun: new replicas catch up, then the others go. `list_reassignments` shows what
        is under way. `follower.replication.throttled.rate` and the like hold a move back; see docs/configuration.md.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_reassignments({TopicPartition("payments", 0): [1]})
        ...     admin.list_reassignments()
        {}

        Raises:
            InvalidReplicaAssignment, UnknownTopicOrPartition, NoReassignmentInProgress: some were refused, the others
                have begun; the error is that of the first one.
        """
        self._thread.run(self._engine.alter_reassignments(wanted, timeout))

    def list_reassignments(self, *, timeout: float | None = None) -> dict[TopicPartition, Reassignment]:
        """Return the moves of partitions that are under way."""
        return self._thread.run(self._engine.list_reassignments(timeout))

    def create_partitions(self, topic: str, total: int, *, timeout: float | None = None) -> None:
        """Raise the number of partitions to `total`; keys may land elsewhere from then on.

        Raises:
            UnknownTopicOrPartition, InvalidPartitions: no such topic, or it has as many already.
        """
        self._thread.run(self._engine.create_partitions(topic, total, timeout))

    def describe_cluster(self, *, linearizable: bool = False, timeout: float | None = None) -> ClusterDescription:
        """Return the cluster's id, its controller and its brokers.

        Any broker answers from what it knows; with `linearizable` it asks the controllers first, so that no change is
        missed which was acknowledged to anybody before this call.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     [broker.broker_id for broker in admin.describe_cluster().brokers]
        [1]
        """
        return self._thread.run(self._engine.describe_cluster(linearizable, timeout))

    def describe_quorum(self, *, timeout: float | None = None) -> QuorumDescription:
        """Return the metadata quorum: who leads, how far its voters and the brokers are, its snapshot.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     [(voter.node_id, voter.state) for voter in admin.describe_quorum().voters]
        [(1, 'leader')]
        """
        return self._thread.run(self._engine.describe_quorum(timeout))

    def elect_leaders(
        self, topic: str, partitions: Iterable[int] = (), *, unclean: bool = False, timeout: float | None = None
    ) -> None:
        """Have partitions (all of the topic, where none is named) led by their first replica.

        `unclean`: partitions that nobody leads are led by a replica that may miss records. Acknowledged records can
        be lost by that.

        Raises:
            UnknownTopicOrPartition: there is no such topic, or no such partition of it.
            ElectionNotNeeded: they are led as was asked for.
            PreferredLeaderNotAvailable, EligibleLeadersNotAvailable: nobody is there who could lead.
        """
        self._thread.run(self._engine.elect_leaders(topic, partitions, unclean, timeout))

    def unregister_broker(self, broker_id: int, *, timeout: float | None = None) -> None:
        """Have the cluster forget a broker that is gone for good.

        Raises:
            InvalidRequestError: it is alive, or partitions have a replica on it.
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
        """Cordon or drain a broker, or take that back; None leaves it as it is. `describe_cluster` shows both.

        A cordoned broker gets no new replicas, and keeps those that it has. A drained one does not get any either, and
        leads nothing that another replica in sync can lead: the controller moves its leaderships, after this returns,
        and gives it none. Both stay when it is started again, but for `until_restart`, which `drained=True` may have.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_broker(1, drained=True)
        ...     [(broker.broker_id, broker.drained) for broker in admin.describe_cluster().brokers]
        ...     admin.alter_broker(1, drained=False)
        [(1, True)]

        Raises:
            BrokerIdNotRegistered: there is no such broker.
            InvalidRequestError: nothing is asked for, or it is to be uncordoned while it is drained.
            UnsupportedVersion: the cluster's metadata.version does not have it yet; see `update_feature`.
        """
        self._thread.run(self._engine.alter_broker(broker_id, cordoned, drained, until_restart, timeout))

    def update_feature(
        self, name: str, level: int, *, validate_only: bool = False, timeout: float | None = None
    ) -> None:
        """Raise the level of a feature, after every node runs a version that knows it. There is no way back.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.update_feature("metadata.version", 3)
        ...     admin.describe_cluster().features
        {'metadata.version': 3}

        Raises:
            FeatureUpdateFailed: a broker or the controller does not know the level, or it is below the present one.
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
        """Return the config of a topic or of a broker, by key; `broker=""` is the default of all brokers.

        `broker_logger`, a broker's id: the levels of that broker's loggers.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.describe_configs(topic="payments")["retention.ms"].value
        '3600000'
        """
        return self._thread.run(self._engine.describe_configs(topic, broker, broker_logger, timeout))

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
        """Set and unset config keys of a topic or of a broker; keys that are not named stay as they are.

        `broker_logger`, a broker's id: the levels of that broker's loggers (`{"root": "DEBUG"}`), until it restarts.

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
        """Return the log directories of one broker, or of all: space, partitions, and why one is offline."""
        return self._thread.run(self._engine.describe_log_dirs(broker, timeout))

    def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """Delete the records below the given offsets (-1: all that are committed); return the new log starts.

        Raises:
            OffsetOutOfRange: above the high watermark.
        """
        return self._thread.run(self._engine.delete_records(before, timeout))

    def close(self) -> None:
        """Close the connections. Closing twice is allowed."""
        if not self._engine.closed:
            self._thread.run(self._engine.close())

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
