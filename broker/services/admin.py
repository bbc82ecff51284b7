"""The `Admin` service: topics, configs, log directories; `broker.services.cluster` has the cluster's part.

A request becomes a metadata command. It is answered once the command is committed and in effect on this broker, so
that a client which creates a topic and then writes to it finds the partitions there.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

from grpc import aio

from broker.clock import Clock
from broker.config import BrokerConfig
from broker.internal_topics import refuse_internal
from broker.log_levels import LogLevels
from broker.services.cluster import alter_broker_command, describe_cluster, election_commands
from broker.services.configs import describe_broker, describe_cluster_default, describe_topic
from broker.services.deadlines import in_time
from broker.services.log_dirs import LogsView, describe_log_dirs
from broker.services.metadata import image_from
from broker.services.reassignments import propose_reassignments
from broker.services.replicas import PartitionView, describe_replicas
from raftlog.errors import (
    InvalidRequestError,
    InvalidTopic,
    PolicyViolation,
    RaftlogError,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from raftlog.v1.records_pb2 import (
    AlterConfigsCommand,
    ConfigResource,
    CreatePartitionsCommand,
    CreateTopicCommand,
    DeleteTopicCommand,
    MetadataCommand,
    UnregisterBrokerCommand,
    UpdateFeatureCommand,
)
from raftmeta.decide import CommandResult
from raftmeta.image import CLUSTER_DEFAULT, INTERNAL_PREFIX, MetadataImage
from raftmeta.port import MetadataPort

CLEANUP_POLICY: Final = "cleanup.policy"
COMPACT: Final = "compact"

logger = logging.getLogger(__name__)

_Context = aio.ServicerContext[Any, Any]


class _Response(Protocol):
    """Every response of this service: it has an error to fill in."""

    @property
    def error(self) -> common_pb2.Error: ...


class _Commit(_Response, Protocol):
    """The response to a change: it says from which metadata offset on it is in effect."""

    metadata_offset: int


_R = TypeVar("_R", bound=_Response)
_C = TypeVar("_C", bound=_Commit)


class AdminService(admin_pb2_grpc.AdminServicer):
    """Answers with errors as values; a gRPC status means transport only.

    `wait_applied(metadata_offset)` returns once this broker acts on everything up to that offset. `partitions` returns
    what this broker holds.
    """

    def __init__(
        self,
        metadata: MetadataPort,
        config: BrokerConfig,
        logs: LogsView,
        wait_applied: Callable[[int], Awaitable[None]],
        partitions: Callable[[], Iterable[PartitionView]],
        clock: Clock,
    ) -> None:
        self._metadata = metadata
        self._config = config
        self._logs = logs
        self._wait_applied = wait_applied
        self._partitions = partitions
        self._clock = clock
        self._log_levels = LogLevels(config.log_level)

    async def CreateTopic(
        self, request: admin_pb2.CreateTopicRequest, context: _Context
    ) -> admin_pb2.CreateTopicResponse:
        """Create a topic; 0 partitions or replicas stand for the broker's defaults."""
        response = admin_pb2.CreateTopicResponse()
        return await self._answer_in_time(context, response, self._create_topic(request, response))

    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, context: _Context
    ) -> admin_pb2.DeleteTopicResponse:
        """Delete a topic and its records."""
        response = admin_pb2.DeleteTopicResponse()
        return await self._answer_in_time(context, response, self._delete_topic(request, response))

    async def CreatePartitions(
        self, request: admin_pb2.CreatePartitionsRequest, context: _Context
    ) -> admin_pb2.CreatePartitionsResponse:
        """Raise a topic's number of partitions."""
        response = admin_pb2.CreatePartitionsResponse()
        return await self._answer_in_time(context, response, self._create_partitions(request, response))

    async def DescribeConfigs(
        self, request: admin_pb2.DescribeConfigsRequest, context: _Context
    ) -> admin_pb2.DescribeConfigsResponse:
        """Return every config of a topic or broker: the value in effect, where it comes from, what it means."""
        response = admin_pb2.DescribeConfigsResponse()
        return await self._answer_in_time(context, response, self._describe_configs(request, response))

    async def AlterConfigs(
        self, request: admin_pb2.AlterConfigsRequest, context: _Context
    ) -> admin_pb2.AlterConfigsResponse:
        """Set and unset configs, all or none; what is not named stays as it is."""
        response = admin_pb2.AlterConfigsResponse()
        return await self._answer_in_time(context, response, self._alter_configs(request, response))

    async def DescribeLogDirs(
        self, request: admin_pb2.DescribeLogDirsRequest, context: _Context
    ) -> admin_pb2.DescribeLogDirsResponse:
        """Return this broker's log directories and what lies in them."""
        response = admin_pb2.DescribeLogDirsResponse()
        return await self._answer(response, self._describe_log_dirs(response))

    async def DescribeCluster(
        self, request: admin_pb2.DescribeClusterRequest, context: _Context
    ) -> admin_pb2.DescribeClusterResponse:
        """Return who is in the cluster; `linearizable`: no change is missed that was acknowledged before this call."""
        response = admin_pb2.DescribeClusterResponse()
        return await self._answer_in_time(context, response, self._describe_cluster(request, response))

    async def DescribeQuorum(
        self, request: admin_pb2.AdminDescribeQuorumRequest, context: _Context
    ) -> admin_pb2.AdminDescribeQuorumResponse:
        """Return the metadata quorum as its leader sees it."""
        response = admin_pb2.AdminDescribeQuorumResponse()
        return await self._answer_in_time(context, response, self._describe_quorum(response))

    async def ElectLeaders(
        self, request: admin_pb2.ElectLeadersRequest, context: _Context
    ) -> admin_pb2.ElectLeadersResponse:
        """Have partitions led by their first replica, or, `unclean`, by one that may miss records."""
        response = admin_pb2.ElectLeadersResponse()
        return await self._answer_in_time(context, response, self._elect_leaders(request, response))

    async def DescribeReplicas(
        self, request: admin_pb2.DescribeReplicasRequest, context: _Context
    ) -> admin_pb2.DescribeReplicasResponse:
        """Return how far the replicas are of the partitions that this broker leads."""
        response = admin_pb2.DescribeReplicasResponse()
        return await self._answer_in_time(context, response, self._describe_replicas(request, response))

    async def AlterReassignments(
        self, request: admin_pb2.AdminAlterReassignmentsRequest, context: _Context
    ) -> admin_pb2.AdminAlterReassignmentsResponse:
        """Begin, turn or cancel moves of partitions, each by itself; answered once they are begun."""
        response = admin_pb2.AdminAlterReassignmentsResponse()
        return await self._answer_in_time(context, response, self._alter_reassignments(request, response))

    async def UnregisterBroker(
        self, request: admin_pb2.AdminUnregisterBrokerRequest, context: _Context
    ) -> admin_pb2.AdminUnregisterBrokerResponse:
        """Forget a broker that is gone for good."""
        command = MetadataCommand(unregister_broker=UnregisterBrokerCommand(broker_id=request.broker_id))
        return await self._answer_commit(context, admin_pb2.AdminUnregisterBrokerResponse(), command)

    async def AlterBroker(
        self, request: admin_pb2.AdminAlterBrokerRequest, context: _Context
    ) -> admin_pb2.AdminAlterBrokerResponse:
        """Cordon or drain a broker, or take that back; answered before its leaderships have moved."""
        command = MetadataCommand(alter_broker=alter_broker_command(request))
        return await self._answer_commit(context, admin_pb2.AdminAlterBrokerResponse(), command)

    async def UpdateFeature(
        self, request: admin_pb2.AdminUpdateFeatureRequest, context: _Context
    ) -> admin_pb2.AdminUpdateFeatureResponse:
        """Raise the level of a feature that every registered broker knows."""
        asked = UpdateFeatureCommand(name=request.name, level=request.level, validate_only=request.validate_only)
        command = MetadataCommand(update_feature=asked)
        return await self._answer_commit(context, admin_pb2.AdminUpdateFeatureResponse(), command)

    async def _answer_commit(self, context: _Context, response: _C, command: MetadataCommand) -> _C:
        return await self._answer_in_time(context, response, self._commit_into(response, command))

    async def _commit_into(self, response: _Commit, command: MetadataCommand) -> CommandResult:
        result = await self._commit(command)
        response.metadata_offset = max(response.metadata_offset, result.offset)
        return result

    async def _answer_in_time(self, context: _Context, response: _R, work: Awaitable[object]) -> _R:
        """As `_answer`, before the caller stops listening: it shall hear what keeps the quorum from answering."""
        return await self._answer(response, in_time(work, context.time_remaining(), self._metadata.waiting_for))

    async def _answer(self, response: _R, work: Awaitable[object]) -> _R:
        """Do the work; what it raises becomes the response's error."""
        try:
            await work
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        except Exception as error:  # a bug here must reach the client as an answer, not as a broken connection
            logger.exception("an admin request failed")
            response.error.CopyFrom(to_wire(error))
        return response

    async def _commit(self, command: MetadataCommand) -> CommandResult:
        result = await self._metadata.propose(command)
        await self._wait_applied(result.offset)
        logger.info(
            "metadata command done",
            extra={"command": command.WhichOneof("command"), "metadata_offset": result.offset},
        )
        return result

    async def _create_topic(
        self, request: admin_pb2.CreateTopicRequest, response: admin_pb2.CreateTopicResponse
    ) -> None:
        if request.name.startswith(INTERNAL_PREFIX):
            raise InvalidTopic(
                f"topic name {request.name!r}: names that begin with {INTERNAL_PREFIX} are the cluster's own; "
                "choose another"
            )
        if request.assignments:
            if request.partitions or request.replication_factor:
                raise InvalidRequestError("name the replicas of each partition, or their numbers, not both")
            partitions, replication_factor = len(request.assignments), len(request.assignments[0].replicas)
        else:
            partitions = request.partitions or self._config.num_partitions
            replication_factor = request.replication_factor or self._config.default_replication_factor
        self._check_partitions(request.name, partitions, partitions * replication_factor)
        result = await self._commit_into(
            response,
            MetadataCommand(
                create_topic=CreateTopicCommand(
                    name=request.name,
                    topic_id=request.topic_id or uuid.uuid4().bytes,
                    partitions=partitions,
                    replication_factor=replication_factor,
                    configs=request.configs,
                    validate_only=request.validate_only,
                    assignments=request.assignments,
                )
            ),
        )
        if not request.validate_only:
            response.topic_id = result.topic_id

    async def _delete_topic(
        self, request: admin_pb2.DeleteTopicRequest, response: admin_pb2.DeleteTopicResponse
    ) -> None:
        refuse_internal(request.name, "not deleted")
        await self._commit_into(response, MetadataCommand(delete_topic=DeleteTopicCommand(name=request.name)))

    async def _create_partitions(
        self, request: admin_pb2.CreatePartitionsRequest, response: admin_pb2.CreatePartitionsResponse
    ) -> None:
        refuse_internal(request.topic, "its number of partitions stays as it is: it says who coordinates what")
        topic = self._metadata.image.topic(request.topic)
        if topic is not None:
            added = request.partitions - len(topic.partitions)
            self._check_partitions(request.topic, request.partitions, added * len(topic.partitions[0].replicas))
        command = CreatePartitionsCommand(topic=request.topic, partitions=request.partitions)
        await self._commit_into(response, MetadataCommand(create_partitions=command))

    def _check_partitions(self, topic: str, partitions: int, added_replicas: int) -> None:
        """Refuse what the limits in this broker's configuration do not allow."""
        limit = self._config.max_partitions_per_topic
        if partitions > limit:
            raise PolicyViolation(
                f"topic {topic[:249]!r} cannot have {partitions} partitions, max.partitions.per.topic={limit}"
            )
        if added_replicas <= 0:
            return
        image = self._metadata.image
        brokers = sum(not broker.fenced for broker in image.brokers.values())
        present = _replicas(image)
        allowed = self._config.max_partitions_per_broker * brokers
        if present + added_replicas > allowed:
            raise PolicyViolation(
                f"topic {topic[:249]!r} would bring the cluster from {present} to {present + added_replicas} replicas; "
                f"max.partitions.per.broker={self._config.max_partitions_per_broker} "
                f"allows {allowed} on {brokers} broker{'' if brokers == 1 else 's'}"
            )

    async def _alter_configs(
        self, request: admin_pb2.AlterConfigsRequest, response: admin_pb2.AlterConfigsResponse
    ) -> None:
        resource = request.resource
        if resource.type == ConfigResource.BROKER_LOGGER:
            self._check_own(resource.name)
            self._log_levels.alter(request.set, request.unset, validate_only=request.validate_only)
            return
        if resource.type == ConfigResource.TOPIC and resource.name.startswith(INTERNAL_PREFIX):
            policy = request.set.get(CLEANUP_POLICY, COMPACT).strip()
            if CLEANUP_POLICY in request.unset or policy != COMPACT:
                raise PolicyViolation(
                    f"topic {resource.name[:249]!r} keeps {CLEANUP_POLICY}={COMPACT}: groups are kept there, and with "
                    "any other policy their offsets would be deleted by age, or never"
                )
        command = AlterConfigsCommand(
            resource=resource, set=request.set, unset=request.unset, validate_only=request.validate_only
        )
        await self._commit_into(response, MetadataCommand(alter_configs=command))

    async def _describe_configs(
        self, request: admin_pb2.DescribeConfigsRequest, response: admin_pb2.DescribeConfigsResponse
    ) -> None:
        resource = request.resource
        image = await image_from(self._metadata, request.min_metadata_offset)
        if resource.type == ConfigResource.TOPIC:
            if image.topic(resource.name) is None:
                raise UnknownTopicOrPartition(f"there is no topic {resource.name[:249]!r}")
            response.entries.extend(describe_topic(image, resource.name, self._config))
        elif resource.type == ConfigResource.BROKER_LOGGER:
            self._check_own(resource.name)
            response.entries.extend(self._log_levels.describe())
        elif resource.type != ConfigResource.BROKER:
            raise InvalidRequestError(f"config resource type {resource.type} is not known here")
        elif resource.name == CLUSTER_DEFAULT:
            response.entries.extend(describe_cluster_default(image))
        else:
            self._check_own(resource.name)
            response.entries.extend(describe_broker(image, self._config))

    def _check_own(self, broker: str) -> None:
        if broker != str(self._config.node_id):
            raise InvalidRequestError(
                f"this is broker {self._config.node_id}, which does not know the configuration of broker "
                f"{broker[:20]!r}; ask that one"
            )

    async def _describe_log_dirs(self, response: admin_pb2.DescribeLogDirsResponse) -> None:
        response.log_dirs.extend(await describe_log_dirs(self._config.log_dirs, self._logs))

    # Cluster

    async def _describe_cluster(
        self, request: admin_pb2.DescribeClusterRequest, response: admin_pb2.DescribeClusterResponse
    ) -> None:
        if request.linearizable:
            await self._metadata.barrier()
        describe_cluster(await image_from(self._metadata, request.min_metadata_offset), response)

    async def _describe_quorum(self, response: admin_pb2.AdminDescribeQuorumResponse) -> None:
        response.quorum.CopyFrom(await self._metadata.describe_quorum())

    async def _elect_leaders(
        self, request: admin_pb2.ElectLeadersRequest, response: admin_pb2.ElectLeadersResponse
    ) -> None:
        for command in election_commands(self._metadata.image, request):
            await self._commit_into(response, command)

    # Replicas

    async def _describe_replicas(
        self, request: admin_pb2.DescribeReplicasRequest, response: admin_pb2.DescribeReplicasResponse
    ) -> None:
        await image_from(self._metadata, request.min_metadata_offset)
        now_ms = self._clock.monotonic_ms()
        response.partitions.extend(await describe_replicas(self._partitions(), set(request.topic_ids), now_ms))

    async def _alter_reassignments(
        self, request: admin_pb2.AdminAlterReassignmentsRequest, response: admin_pb2.AdminAlterReassignmentsResponse
    ) -> None:
        outcomes = await propose_reassignments(self._metadata, request.reassignments)
        for outcome in outcomes:
            result = response.results.add()
            if isinstance(outcome, RaftlogError):
                result.error.CopyFrom(to_wire(outcome))
            else:
                response.metadata_offset = max(response.metadata_offset, outcome)
        await self._wait_applied(response.metadata_offset)


def _replicas(image: MetadataImage) -> int:
    return sum(load.replicas for load in image.load.values())
