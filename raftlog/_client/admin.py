"""The admin client's engine: one request at a time, retried until its timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.metadata import MetadataCache
from raftlog._client.options import AdminOptions
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
    BrokerUnavailable,
    ClosedError,
    FencedError,
    InvalidRequestError,
    LeaderNotAvailable,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    ShuttingDown,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import admin_pb2, admin_pb2_grpc, log_pb2, log_pb2_grpc, records_pb2

T = TypeVar("T")

_ADDRESS_TIMEOUT_S: Final = 5.0
_DEADLINE_MARGIN_S: Final = 0.1
_METADATA_MAX_AGE_MS: Final = 300_000
_FIRST_CONTACT_S: Final = 5.0
"""Addresses that have never answered are more likely wrong than late: no need to wait `default.api.timeout.ms`."""


class AdminEngine:
    """Calls any broker; the broker finds the controller.

    Whoever answers is asked again first, and nobody is believed who knows less than what this client has changed: every
    change says at which metadata offset it is in effect, and questions ask for no older metadata.
    """

    def __init__(self, bootstrap: list[str], options: AdminOptions) -> None:
        self._options = options
        self._connections = Connections()
        self._metadata = MetadataCache(
            self._connections,
            bootstrap,
            max_age_ms=_METADATA_MAX_AGE_MS,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self.closed = False
        self._answered = False
        self._last_address = ""

    async def _retried(self, attempt: Callable[[float], Awaitable[T]], timeout: float | None) -> T:
        if self.closed:
            raise ClosedError("the admin client is closed, or was made in another process")
        loop = asyncio.get_running_loop()
        limit_s = self._options.default_api_timeout_ms / 1000 if timeout is None else timeout
        if timeout is None and not self._metadata.view.brokers and not self._answered:
            limit_s = min(limit_s, _FIRST_CONTACT_S)
        deadline = loop.time() + limit_s
        failures = 0
        last: RaftlogError = RequestTimedOut(f"no answer within {limit_s:g} s")
        while True:
            try:
                async with asyncio.timeout_at(deadline + _DEADLINE_MARGIN_S):
                    result = await attempt(deadline)
                self._answered = True
                return result
            except TimeoutError:
                raise last from None
            except RetriableError as error:
                last = error
                failures += 1
                pause_s = self._options.pauses.after_ms(error, failures) / 1000
                final = isinstance(error, UnknownTopicOrPartition) and failures > 3
                if final or loop.time() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)

    async def _anyone(self, method: str, request: Any, timeout: float | None) -> Any:
        """Call a method of the Admin service on the first broker that can answer; none may take beyond the deadline."""
        cause: RaftlogError | None = None  # what a broker said that was reached: it tells more than a time that is up

        async def attempt(deadline: float) -> Any:
            nonlocal cause
            known = [broker.address for broker in self._metadata.view.brokers.values() if not broker.fenced]
            addresses = list(dict.fromkeys([*known, *self._metadata.bootstrap]))
            addresses.sort(key=lambda address: address != self._last_address)  # stable
            reasons = []
            for address in addresses:
                try:
                    response = await self._response(address, method, request, deadline)
                except (BrokerUnavailable, RequestTimedOut, ShuttingDown) as error:
                    reasons.append(str(error))
                    continue
                try:
                    self._check(response)
                except (BrokerUnavailable, RequestTimedOut, ShuttingDown) as error:  # another one may know better
                    cause = type(error)(f"{address}: {error}")
                    continue
                self._last_address = address
                return response
            raise cause or BrokerUnavailable(
                f"no broker answers at {', '.join(addresses)}; check that the cluster runs, that the addresses and "
                f"ports are right and that no firewall is between ({'; '.join(reasons)})"
            )

        return await self._retried(attempt, timeout)

    async def _call(self, address: str, method: str, request: Any, deadline: float) -> Any:
        response = await self._response(address, method, request, deadline)
        self._check(response)
        return response

    async def _response(self, address: str, method: str, request: Any, deadline: float) -> Any:
        """Return what a broker answers, whatever it says."""
        left_s = max(_DEADLINE_MARGIN_S, deadline - asyncio.get_running_loop().time())
        stub = admin_pb2_grpc.AdminStub(self._connections.channel(address))
        try:
            return await getattr(stub, method)(
                request, timeout=min(_ADDRESS_TIMEOUT_S, self._options.request_timeout_ms / 1000, left_s)
            )
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None

    def _check(self, response: Any) -> None:
        if response.HasField("error") and response.error.code:
            raise from_wire(response.error)
        changed_at = getattr(response, "metadata_offset", 0)
        self._metadata.min_offset = max(self._metadata.min_offset, changed_at)

    # Topics

    async def create_topic(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        configs: Mapping[str, Any],
        validate_only: bool,
        timeout: float | None,
    ) -> TopicDescription | None:
        """Create a topic and wait until brokers know it."""
        request = admin_pb2.CreateTopicRequest(
            name=name,
            partitions=partitions,
            replication_factor=replication_factor,
            configs={key: as_config(value) for key, value in configs.items()},
            validate_only=validate_only,
        )
        await self._anyone("CreateTopic", request, timeout)
        return None if validate_only else await self.describe_topic(name, timeout)

    async def delete_topic(self, name: str, timeout: float | None) -> None:
        """Delete a topic."""
        await self._anyone("DeleteTopic", admin_pb2.DeleteTopicRequest(name=name), timeout)

    async def create_partitions(self, topic: str, total: int, timeout: float | None) -> None:
        """Raise the number of partitions."""
        await self._anyone(
            "CreatePartitions", admin_pb2.CreatePartitionsRequest(topic=topic, partitions=total), timeout
        )

    async def list_topics(self, internal: bool, timeout: float | None) -> list[str]:
        """Return the names of all topics."""

        async def attempt(deadline: float) -> list[str]:
            self._metadata.all_topics = True
            try:
                await self._metadata.refresh()
            finally:
                self._metadata.all_topics = False
            return sorted(view.name for view in self._metadata.view.topics.values() if internal or not view.internal)

        return await self._retried(attempt, timeout)

    async def describe_topic(self, name: str, timeout: float | None) -> TopicDescription:
        """Return what a topic consists of."""
        if self.closed:
            raise ClosedError("the admin client is closed, or was made in another process")
        limit_s = self._options.default_api_timeout_ms / 1000 if timeout is None else timeout
        if timeout is None and not self._answered:
            limit_s = min(limit_s, _FIRST_CONTACT_S)
        view = await self._metadata.topic(name, limit_s * 1000, fresh=True)
        self._answered = True
        return describe(view)

    # Cluster

    async def describe_cluster(self, linearizable: bool, timeout: float | None) -> ClusterDescription:
        """Return who is in the cluster."""
        request = admin_pb2.DescribeClusterRequest(
            linearizable=linearizable, min_metadata_offset=self._metadata.min_offset
        )
        return describe_cluster(await self._anyone("DescribeCluster", request, timeout))

    async def describe_quorum(self, timeout: float | None) -> QuorumDescription:
        """Return the metadata quorum as its leader sees it."""
        response: admin_pb2.AdminDescribeQuorumResponse = await self._anyone(
            "DescribeQuorum", admin_pb2.AdminDescribeQuorumRequest(), timeout
        )
        return describe_quorum(response.quorum)

    async def elect_leaders(self, topic: str, partitions: Iterable[int], unclean: bool, timeout: float | None) -> None:
        """Have partitions led by their first replica, or by one that may miss records."""
        request = admin_pb2.ElectLeadersRequest(topic=topic, partitions=list(partitions), unclean=unclean)
        await self._anyone("ElectLeaders", request, timeout)

    async def unregister_broker(self, broker_id: int, timeout: float | None) -> None:
        """Have the cluster forget a broker."""
        request = admin_pb2.AdminUnregisterBrokerRequest(broker_id=broker_id)
        await self._anyone("UnregisterBroker", request, timeout)

    # Configs

    async def describe_configs(
        self, topic: str | None, broker: int | str | None, timeout: float | None
    ) -> dict[str, ConfigDescription]:
        """Return the config of a topic or of a broker, by key."""
        request = admin_pb2.DescribeConfigsRequest(
            resource=resource_of(topic, broker), min_metadata_offset=self._metadata.min_offset
        )
        response: admin_pb2.DescribeConfigsResponse = await self._on_broker("DescribeConfigs", request, broker, timeout)
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
        set_: Mapping[str, Any],
        unset: Iterable[str],
        validate_only: bool,
        timeout: float | None,
    ) -> None:
        """Change config keys of a topic or of a broker."""
        request = admin_pb2.AlterConfigsRequest(
            resource=resource_of(topic, broker),
            set={key: as_config(value) for key, value in set_.items()},
            unset=list(unset),
            validate_only=validate_only,
        )
        await self._anyone("AlterConfigs", request, timeout)

    async def _on_broker(self, method: str, request: Any, broker: int | str | None, timeout: float | None) -> Any:
        """Call the broker itself where its own settings are asked for."""
        if not isinstance(broker, int):
            return await self._anyone(method, request, timeout)
        return await self._retried(lambda deadline: self._ask_broker(broker, method, request, deadline), timeout)

    async def _ask_broker(self, broker: int, method: str, request: Any, deadline: float) -> Any:
        await self._metadata.refresh()
        found = self._metadata.view.brokers.get(broker)
        if found is None:
            known = ", ".join(str(broker_id) for broker_id in sorted(self._metadata.view.brokers))
            raise InvalidRequestError(f"there is no broker {broker}; the cluster has {known}")
        return await self._call(found.address, method, request, deadline)

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
            response = await stub.DeleteRecords(request, timeout=self._options.request_timeout_ms / 1000)
        except grpc.RpcError as error:
            raise from_grpc(error, leader.address) from None
        result = response.results[0]
        if result.HasField("error") and result.error.code:
            refusal = from_wire(result.error)
            if isinstance(refusal, FencedError):
                raise LeaderNotAvailable(str(refusal))
            raise refusal
        return int(result.log_start_offset)

    async def close(self) -> None:
        """Close the connections."""
        self.closed = True
        await self._metadata.close()
        await self._connections.close()


def as_config(value: Any) -> str:
    """Return a config value as text: true and false as Kafka writes them, lists with commas."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def resource_of(topic: str | None, broker: int | str | None) -> records_pb2.ConfigResource:
    """Return the resource that is meant.

    Raises:
        InvalidRequestError: neither a topic nor a broker, or both.
    """
    if (topic is None) == (broker is None):
        raise InvalidRequestError('name a topic or a broker, one of the two; broker="" is the default for all brokers')
    if topic is not None:
        return records_pb2.ConfigResource(type=records_pb2.ConfigResource.TOPIC, name=topic)
    return records_pb2.ConfigResource(type=records_pb2.ConfigResource.BROKER, name=str(broker))
