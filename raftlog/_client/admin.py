"""The admin client's engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc

from raftlog._client.admin_calls import names_of
from raftlog._client.admin_nodes import NodeAdmin
from raftlog._client.admin_producers import ProducerAdmin
from raftlog._client.admin_security import SecurityAdmin
from raftlog._client.connections import from_grpc
from raftlog._client.trace_metadata import call_metadata
from raftlog._core.cluster import BrokerView
from raftlog._descriptions import (
    ClusterDescription,
    ConfigDescription,
    LogDirDescription,
    LogDirPartition,
    QuorumDescription,
    TopicDescription,
    describe,
    describe_cluster,
    describe_quorum,
)
from raftlog.errors import (
    ClosedError,
    EligibleLeadersNotAvailable,
    FencedError,
    InvalidPartitions,
    InvalidRequestError,
    LeaderNotAvailable,
    PreferredLeaderNotAvailable,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import admin_pb2, log_pb2, log_pb2_grpc, records_pb2


class AdminEngine(ProducerAdmin, NodeAdmin, SecurityAdmin):
    """What the admin clients do: topics, the cluster, configs, logs.

    Replicas and their moves are in `ReplicaAdmin`, groups in `GroupAdmin`, their lags in `LagAdmin`, transactions in
    `TransactionAdmin`, what partitions know of producers in `ProducerAdmin`, single nodes in `NodeAdmin`,
    users and permissions in `SecurityAdmin`.
    """

    # Topics

    async def create_topic(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        configs: Mapping[str, Any],
        replica_assignment: Sequence[Sequence[int]] | None,
        validate_only: bool,
        timeout: float | None,
    ) -> TopicDescription | None:
        """Create a topic and wait until brokers know it."""
        request = admin_pb2.CreateTopicRequest(
            name=name,
            partitions=0 if replica_assignment else partitions,
            replication_factor=0 if replica_assignment else replication_factor,
            assignments=[records_pb2.ReplicaAssignment(replicas=each) for each in replica_assignment or ()],
            configs={key: as_config(value) for key, value in configs.items()},
            validate_only=validate_only,
            topic_id=b"" if validate_only else uuid.uuid4().bytes,
        )
        await self._anyone("CreateTopic", request, timeout)
        return None if validate_only else await self.describe_topic(name, timeout)

    async def delete_topic(self, name: str, timeout: float | None) -> None:
        """Delete a topic."""
        request = admin_pb2.DeleteTopicRequest(name=name)
        await self._anyone("DeleteTopic", request, timeout, done=UnknownTopicOrPartition)

    async def create_partitions(self, topic: str, total: int, timeout: float | None) -> None:
        """Raise the number of partitions."""
        request = admin_pb2.CreatePartitionsRequest(topic=topic, partitions=total)
        await self._anyone("CreatePartitions", request, timeout, done=InvalidPartitions)

    async def list_topics(self, internal: bool, timeout: float | None) -> list[str]:
        """Return the names of all topics."""

        async def attempt(deadline: float) -> list[str]:
            return [view.name for view in await self._all_topics(internal)]

        return await self._retried(attempt, timeout)

    async def describe_topic(self, name: str, timeout: float | None) -> TopicDescription:
        """Return what a topic consists of."""
        if self.closed:
            raise ClosedError("the admin client is closed, or was made in another process")
        view = await self._metadata.topic(name, self._limit_s(timeout) * 1000, fresh=True)
        self._answered = True
        return describe(view)

    # Cluster

    async def describe_cluster(self, linearizable: bool, timeout: float | None) -> ClusterDescription:
        """Return who is in the cluster."""
        request = admin_pb2.DescribeClusterRequest(
            linearizable=linearizable, min_metadata_offset=self._metadata.min_offset
        )
        return describe_cluster(await self._anyone("DescribeCluster", request, timeout, in_turn=True))

    async def describe_quorum(self, timeout: float | None) -> QuorumDescription:
        """Return the metadata quorum as its leader sees it."""
        response: admin_pb2.AdminDescribeQuorumResponse = await self._anyone(
            "DescribeQuorum", admin_pb2.AdminDescribeQuorumRequest(), timeout
        )
        return describe_quorum(response.quorum)

    async def elect_leaders(self, topic: str, partitions: Iterable[int], unclean: bool, timeout: float | None) -> None:
        """Have partitions led by their first replica, or by one that may miss records."""
        request = admin_pb2.ElectLeadersRequest(topic=topic, partitions=list(partitions), unclean=unclean)
        refusals = (PreferredLeaderNotAvailable, EligibleLeadersNotAvailable)
        await self._anyone("ElectLeaders", request, timeout, at_once=refusals)

    async def unregister_broker(self, broker_id: int, timeout: float | None) -> None:
        """Have the cluster forget a broker."""
        request = admin_pb2.AdminUnregisterBrokerRequest(broker_id=broker_id)
        await self._anyone("UnregisterBroker", request, timeout)

    async def alter_broker(
        self,
        broker_id: int,
        cordoned: bool | None,
        drained: bool | None,
        until_restart: bool,
        timeout: float | None,
    ) -> None:
        """Cordon or drain a broker, or take that back."""
        request = admin_pb2.AdminAlterBrokerRequest(
            broker_id=broker_id, cordoned=cordoned, drained=drained, until_restart=until_restart
        )
        await self._anyone("AlterBroker", request, timeout)

    async def update_feature(self, name: str, level: int, validate_only: bool, timeout: float | None) -> None:
        """Raise the level of a feature."""
        request = admin_pb2.AdminUpdateFeatureRequest(name=name, level=level, validate_only=validate_only)
        await self._anyone("UpdateFeature", request, timeout)

    # Configs

    async def describe_configs(
        self, topic: str | None, broker: int | str | None, broker_logger: int | None, timeout: float | None
    ) -> dict[str, ConfigDescription]:
        """Return the config of a topic, of a broker, or of a broker's loggers, by key."""
        request = admin_pb2.DescribeConfigsRequest(
            resource=resource_of(topic, broker, broker_logger), min_metadata_offset=self._metadata.min_offset
        )
        asked = broker if broker_logger is None else broker_logger
        response: admin_pb2.DescribeConfigsResponse = await self._on_broker("DescribeConfigs", request, asked, timeout)
        return {
            entry.key: ConfigDescription(
                entry.key,
                entry.value,
                admin_pb2.ConfigEntry.Source.Name(entry.source).lower(),
                entry.read_only,
                entry.documentation,
            )
            for entry in response.entries
        }

    async def alter_configs(
        self,
        topic: str | None,
        broker: int | str | None,
        broker_logger: int | None,
        set_: Mapping[str, Any],
        unset: Iterable[str],
        validate_only: bool,
        timeout: float | None,
    ) -> None:
        """Change config keys of a topic or of a broker, or levels of a broker's loggers: that one itself is asked."""
        request = admin_pb2.AlterConfigsRequest(
            resource=resource_of(topic, broker, broker_logger),
            set={key: as_config(value) for key, value in set_.items()},
            unset=names_of(unset),
            validate_only=validate_only,
        )
        await self._on_broker("AlterConfigs", request, broker_logger, timeout)

    # Logs

    async def describe_log_dirs(self, broker: int | None, timeout: float | None) -> list[LogDirDescription]:
        """Return the log directories of one broker, or of all."""

        async def attempt(deadline: float) -> list[LogDirDescription]:
            await self._metadata.refresh()
            wanted = [found for found in self._metadata.view.brokers.values() if broker in (None, found.broker_id)]
            if not wanted:
                await self._ask_broker(broker or 0, "", None, deadline)  # raises
            answers = await asyncio.gather(*(self._log_dirs(found, deadline) for found in sorted(wanted)))
            return [log_dir for answer in answers for log_dir in answer]

        return await self._retried(attempt, timeout)

    async def _log_dirs(self, broker: BrokerView, deadline: float) -> list[LogDirDescription]:
        response: admin_pb2.DescribeLogDirsResponse = await self._call(
            broker.address, "DescribeLogDirs", admin_pb2.DescribeLogDirsRequest(), deadline
        )
        return [
            LogDirDescription(
                broker.broker_id,
                info.path,
                from_wire(info.error) if info.HasField("error") and info.error.code else None,
                info.total_bytes,
                info.usable_bytes,
                [
                    LogDirPartition(
                        part.topic,
                        part.partition,
                        part.size_bytes,
                        part.log_start_offset,
                        part.log_end_offset,
                        part.high_watermark,
                        part.segments,
                    )
                    for part in info.partitions
                ],
            )
            for info in response.log_dirs
        ]

    async def delete_records(
        self, before: Mapping[TopicPartition, int], timeout: float | None
    ) -> dict[TopicPartition, int]:
        """Delete what lies below the offsets (-1: everything committed); return the new log starts."""
        done: dict[TopicPartition, int] = {}

        async def attempt(deadline: float) -> dict[TopicPartition, int]:
            for part, offset in before.items():
                if TopicPartition(*part) not in done:
                    done[TopicPartition(*part)] = await self._delete_before(TopicPartition(*part), offset)
            return done

        return await self._retried(attempt, timeout)

    async def _delete_before(self, part: TopicPartition, offset: int) -> int:
        topic = await self._metadata.topic(part.topic, self._options.default_api_timeout_ms, fresh=True)
        if not 0 <= part.partition < len(topic.partitions):
            raise UnknownTopicOrPartition(f"{part} does not exist: the topic has {len(topic.partitions)} partitions")
        leader = self._metadata.leader(part)
        if leader is None:
            raise LeaderNotAvailable(f"{part} has no leader at the moment")
        request = log_pb2.DeleteRecordsRequest()
        request.partitions.add(topic_id=topic.topic_id, partition=part.partition, before_offset=offset)
        stub = log_pb2_grpc.LogStub(self._connections.channel(leader.address))
        try:
            with self._counted():
                response = await stub.DeleteRecords(
                    request, timeout=self._options.request_timeout_ms / 1000, metadata=call_metadata()
                )
        except grpc.RpcError as error:
            raise from_grpc(error, leader.address) from None
        result = response.results[0]
        if result.HasField("error") and result.error.code:
            refusal = from_wire(result.error)
            if isinstance(refusal, FencedError):
                raise LeaderNotAvailable(str(refusal))
            raise refusal
        return int(result.log_start_offset)


def as_config(value: Any) -> str:
    """Return a config value as text: true and false as Kafka writes them, lists with commas."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def resource_of(
    topic: str | None, broker: int | str | None, broker_logger: int | None = None
) -> records_pb2.ConfigResource:
    """Return the resource that is meant.

    Raises:
        InvalidRequestError: none of them is named, or more than one.
    """
    if sum(each is not None for each in (topic, broker, broker_logger)) != 1:
        raise InvalidRequestError(
            'name a topic, a broker or broker_logger, one of them; broker="" is the default for all brokers'
        )
    if broker_logger is not None:
        return records_pb2.ConfigResource(type=records_pb2.ConfigResource.BROKER_LOGGER, name=str(broker_logger))
    if topic is not None:
        return records_pb2.ConfigResource(type=records_pb2.ConfigResource.TOPIC, name=topic)
    return records_pb2.ConfigResource(type=records_pb2.ConfigResource.BROKER, name=str(broker))
