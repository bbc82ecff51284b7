"""The `Admin` service: topics, configs, log directories, brokers, reassignments.

A change becomes a metadata command. The service answers once the command is committed and this broker acts on it, so
a client that creates a topic and then writes to it finds the partitions.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.coordinator.internal_topics import refuse_internal
from broker.descriptors import MAX_DESCRIPTORS
from broker.net.services.calls import Context, answered, author_of
from broker.net.services.metadata import MAX_NAMED, image_from
from broker.net.services.node import (
    LogsView,
    describe_broker,
    describe_cluster_default,
    describe_log_dirs,
    describe_topic,
    describe_topics,
)
from broker.quotas.manager import QuotaManager
from broker.security.audit import Fact, changes_noted
from broker.security.caller import Caller, Decisions, authorized_operations, caller
from broker.server.logging import LogLevels
from broker.turns import QUICK_AT_A_TIME, in_turns
from raftlog._core.security.acls import CLUSTER_NAME, INTERNAL_PREFIX
from raftlog.errors import (
    InvalidRequestError,
    InvalidTopic,
    PolicyViolation,
    RaftlogError,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.v1 import admin_pb2, admin_pb2_grpc
from raftlog.v1.admin_pb2 import PartitionReplicas, Reassignment
from raftlog.v1.records_pb2 import (
    AlterBrokerCommand,
    AlterConfigsCommand,
    AlterQuotasCommand,
    AlterReassignmentsCommand,
    ConfigResource,
    CreatePartitionsCommand,
    CreateTopicCommand,
    DeleteTopicCommand,
    ElectLeadersCommand,
    FeatureRange,
    MetadataCommand,
    PartitionRef,
    UnregisterBrokerCommand,
    UpdateFeatureCommand,
)
from raftlog.v1.security_pb2 import Acl
from raftmeta.decide import MAX_PARTITIONS_PER_COMMAND, CommandResult
from raftmeta.decide.security import MAX_SECURITY_CHANGES
from raftmeta.features import BASELINE, SUPPORTED, supports
from raftmeta.image import CLUSTER_DEFAULT, NO_LOAD, BrokerImage, MetadataImage
from raftmeta.port import MetadataPort
from raftmeta.quotas import QuotaEntity, entity_order, matches
from raftmeta.topic_configs import MAX_THROTTLED_REPLICAS, check_limits
from replication.leader import ReplicaView


def describe_cluster(image: MetadataImage, response: admin_pb2.DescribeClusterResponse) -> None:
    """Fill in the cluster's brokers with their load, and its features."""
    response.cluster_id = image.cluster_id
    response.controller_id = image.controller_id
    response.controller_epoch = image.controller_epoch
    response.metadata_offset = image.offset
    for broker_id, broker in sorted(image.brokers.items()):
        load = image.load.get(broker_id, NO_LOAD)
        response.brokers.add(
            broker_id=broker_id,
            host=broker.host,
            port=broker.port,
            rack=broker.rack,
            fenced=broker.fenced,
            in_controlled_shutdown=broker.in_controlled_shutdown,
            broker_epoch=broker.broker_epoch,
            leaderships=load.leaderships,
            replicas=load.replicas,
            cordoned=broker.cordoned or broker.drained,
            drained=broker.drained,
            drained_until_restart=broker.drained_until_restart,
            storage_full=broker.storage_full,
        )
    for name, level in {**BASELINE, **image.features}.items():
        response.features[name] = level
    response.supported_features.extend(supported_by_all(image.brokers.values()))


def may_create_topics(who: Caller) -> bool:
    """Whether there is a name under which the caller may create a topic."""
    return who.may(Acl.CREATE, Acl.CLUSTER, CLUSTER_NAME, log=False) or who.may_any(Acl.CREATE, Acl.TOPIC)


def supported_by_all(brokers: Iterable[BrokerImage]) -> Iterator[FeatureRange]:
    """Yield the levels of each feature that this version and all brokers support."""
    registered = list(brokers)
    for name, known in sorted(SUPPORTED.items()):
        levels = [
            level
            for level in range(known.min_level, known.max_level + 1)
            if all(supports(broker.features, name, level) for broker in registered)
        ]
        if levels:
            yield FeatureRange(name=name, min_level=levels[0], max_level=levels[-1])


def alter_broker_command(request: admin_pb2.AdminAlterBrokerRequest) -> AlterBrokerCommand:
    """Return the command for AlterBroker; a field that the request does not set stays unset."""
    return AlterBrokerCommand(
        broker_id=request.broker_id,
        cordoned=request.cordoned if request.HasField("cordoned") else None,
        drained=request.drained if request.HasField("drained") else None,
        until_restart=request.until_restart,
    )


def election_commands(image: MetadataImage, request: admin_pb2.ElectLeadersRequest) -> Iterator[MetadataCommand]:
    """Yield the commands that elect leaders for the named partitions, or for all partitions if none is named.

    Raises:
        UnknownTopicOrPartition: the topic or the partition does not exist.
    """
    topic = image.topic(request.topic)
    if topic is None:
        raise UnknownTopicOrPartition(f"there is no topic {request.topic[:249]!r}")
    partitions = sorted(set(request.partitions)) or range(len(topic.partitions))
    for partition in partitions:
        if not 0 <= partition < len(topic.partitions):
            raise UnknownTopicOrPartition(
                f"topic {topic.name!r} has {len(topic.partitions)} partitions and none numbered {partition}"
            )
    election = ElectLeadersCommand.UNCLEAN if request.unclean else ElectLeadersCommand.PREFERRED
    for start in range(0, len(partitions), MAX_PARTITIONS_PER_COMMAND):
        refs = [
            PartitionRef(topic_id=topic.topic_id, partition=partition)
            for partition in partitions[start : start + MAX_PARTITIONS_PER_COMMAND]
        ]
        yield MetadataCommand(elect_leaders=ElectLeadersCommand(partitions=refs, type=election))


MAX_REASSIGNMENTS: Final = 1_000
AT_A_TIME: Final = 16
"""Concurrent commands of one request, so that this broker's other proposals are not starved."""


async def propose_reassignments(
    metadata: MetadataPort, reassignments: Sequence[Reassignment]
) -> list[int | RaftlogError]:
    """Propose a command for each reassignment; return, in order, its metadata offset or its error (KIP-455).

    Raises:
        InvalidRequestError: too many reassignments, or one partition twice.
    """
    if len(reassignments) > MAX_REASSIGNMENTS:
        raise InvalidRequestError(
            f"the request has {len(reassignments)} reassignments, at most {MAX_REASSIGNMENTS} are allowed; split it"
        )
    named: set[tuple[str, int]] = set()
    for each in reassignments:
        if (each.topic, each.partition) in named:
            raise InvalidRequestError(f"{each.topic[:249]}-{each.partition} is named twice in one request")
        named.add((each.topic, each.partition))
    limit = asyncio.Semaphore(AT_A_TIME)

    async def propose(each: Reassignment) -> int | RaftlogError:
        command = AlterReassignmentsCommand(topic=each.topic, partition=each.partition, replicas=each.replicas)
        async with limit:
            try:
                return (await metadata.propose(MetadataCommand(alter_reassignments=command))).offset
            except RaftlogError as error:
                return error

    return list(await asyncio.gather(*map(propose, reassignments)))


class DescriptionView(Protocol):
    """A partition as its leader sees it, with the leader's own replica first."""

    @property
    def leader_epoch(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def replicas(self) -> Iterable[ReplicaView]: ...


class LogIdentity(Protocol):
    """The partition that a log belongs to."""

    @property
    def topic_id(self) -> bytes: ...
    @property
    def partition(self) -> int: ...


class PartitionView(Protocol):
    """A partition of this broker; `describe_replicas` raises RaftlogError if this broker does not lead it."""

    @property
    def log(self) -> LogIdentity: ...
    def describe_replicas(self) -> DescriptionView: ...


async def describe_replicas(
    partitions: Iterable[PartitionView], topic_ids: Collection[bytes], now_ms: float
) -> list[PartitionReplicas]:
    """Return the partitions that this broker leads, of the named topics or of all; sorted by topic id and number."""
    found = []
    async for partition in in_turns(partitions):
        if topic_ids and partition.log.topic_id not in topic_ids:
            continue
        try:
            led = partition.describe_replicas()
        except RaftlogError:
            continue  # this broker does not lead it
        found.append(_described(partition.log, led, now_ms))
    return sorted(found, key=lambda each: (each.topic_id, each.partition))


def _quota_changes(request: admin_pb2.AlterClientQuotasRequest, principal: str, host: str) -> Iterator[Fact]:
    """Yield a line of the audit log for each quota; none if the quorum refuses so many."""
    if len(request.alterations) > MAX_SECURITY_CHANGES:
        return
    for each in request.alterations:
        what = f"{QuotaEntity.from_wire(each.entity)} {each.key}"
        operation, what = ("ALTER", f"{what}={each.value:g}") if each.HasField("value") else ("DELETE", what)
        yield principal, host, operation, "QUOTA", what


def _described(partition: LogIdentity, led: DescriptionView, now_ms: float) -> PartitionReplicas:
    described = PartitionReplicas(
        topic_id=partition.topic_id,
        partition=partition.partition,
        leader_epoch=led.leader_epoch,
        log_start_offset=led.log_start_offset,
        high_watermark=led.high_watermark,
        log_end_offset=led.log_end_offset,
    )
    for replica in led.replicas:
        known = replica.last_caught_up_ms >= 0
        described.replicas.add(
            broker_id=replica.broker_id,
            log_end_offset=replica.durable_end_offset,
            lag=replica.lag,
            last_caught_up_ms=max(0, int(now_ms - replica.last_caught_up_ms)) if known else -1,
            in_sync=replica.in_sync,
        )
    return described


CLEANUP_POLICY: Final = "cleanup.policy"
COMPACT: Final = "compact"

logger = logging.getLogger(__name__)


class _Committed(Protocol):
    """The response to a change: `metadata_offset` is where the change is in effect."""

    metadata_offset: int


class AdminService(admin_pb2_grpc.AdminServicer):
    """Answers with errors as values; a gRPC status means a failure of the transport only.

    `wait_applied(metadata_offset)` returns once this broker acts on all changes up to that offset. `partitions` returns
    the partitions on this broker. `max_replicas`: how many replicas the descriptors of a broker suffice for; those of
    the others are taken to be like this one's.
    """

    def __init__(
        self,
        metadata: MetadataPort,
        config: BrokerConfig,
        logs: LogsView,
        wait_applied: Callable[[int], Awaitable[None]],
        partitions: Callable[[], Iterable[PartitionView]],
        clock: Clock,
        quotas: QuotaManager | None = None,
        max_replicas: int = MAX_DESCRIPTORS,
    ) -> None:
        self._metadata = metadata
        self._max_replicas = max_replicas
        self._quotas = quotas
        self._config = config
        self._logs = logs
        self._wait_applied = wait_applied
        self._partitions = partitions
        self._clock = clock
        self._log_levels = LogLevels(config.log_level)
        self._under_way = 0
        """Replicas that this broker's commands in flight will add."""
        self._under_way_of: Counter[str] = Counter()
        """Likewise the partitions of each user's topics, above 0."""

    @answered(admin_pb2.CreateTopicResponse)
    async def CreateTopic(
        self, request: admin_pb2.CreateTopicRequest, context: Context, response: admin_pb2.CreateTopicResponse
    ) -> None:
        """Create a topic; 0 partitions or replicas stand for the broker's defaults."""
        if request.name.startswith(INTERNAL_PREFIX):
            raise InvalidTopic(
                f"topic name {request.name!r}: names that begin with {INTERNAL_PREFIX} are the cluster's own; "
                "choose another"
            )
        if request.assignments:
            if request.partitions or request.replication_factor:
                raise InvalidRequestError("give `assignments`, or `partitions` and `replication_factor`, not both")
            partitions, replication_factor = len(request.assignments), len(request.assignments[0].replicas)
        else:
            partitions = request.partitions or self._config.num_partitions
            replication_factor = request.replication_factor or self._config.default_replication_factor
        self._check_configs(request.configs, partitions)
        user = caller.get().user
        command = CreateTopicCommand(
            name=request.name,
            topic_id=request.topic_id or uuid.uuid4().bytes,
            partitions=partitions,
            replication_factor=replication_factor,
            configs=request.configs,
            validate_only=request.validate_only,
            assignments=request.assignments,
            user=user,
        )
        with self._adding(request.name, partitions, partitions, replication_factor, user):
            result = await self._commit_into(response, MetadataCommand(create_topic=command))
        if not request.validate_only:
            response.topic_id = result.topic_id

    @answered(admin_pb2.DeleteTopicResponse)
    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, context: Context, response: admin_pb2.DeleteTopicResponse
    ) -> None:
        """Delete a topic and its records."""
        refuse_internal(request.name, "not deleted")
        command = DeleteTopicCommand(name=request.name, topic_id=request.topic_id)
        await self._commit_into(response, MetadataCommand(delete_topic=command))

    @answered(admin_pb2.CreatePartitionsResponse)
    async def CreatePartitions(
        self, request: admin_pb2.CreatePartitionsRequest, context: Context, response: admin_pb2.CreatePartitionsResponse
    ) -> None:
        """Raise a topic's number of partitions."""
        refuse_internal(request.topic, "its number of partitions is fixed: it decides which broker coordinates a group")
        topic = self._metadata.image.topic(request.topic)
        command = MetadataCommand(
            create_partitions=CreatePartitionsCommand(topic=request.topic, partitions=request.partitions)
        )
        if topic is None:
            await self._commit_into(response, command)
            return
        added, replication_factor = request.partitions - len(topic.partitions), len(topic.partitions[0].replicas)
        with self._adding(topic.name, request.partitions, added, replication_factor, topic.user):
            await self._commit_into(response, command)

    @answered(admin_pb2.DescribeConfigsResponse)
    async def DescribeConfigs(
        self, request: admin_pb2.DescribeConfigsRequest, context: Context, response: admin_pb2.DescribeConfigsResponse
    ) -> None:
        """Return every config of a topic or broker: its effective value, its source, its meaning."""
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

    @answered(admin_pb2.DescribeTopicConfigsResponse)
    async def DescribeTopicConfigs(
        self,
        request: admin_pb2.DescribeTopicConfigsRequest,
        context: Context,
        response: admin_pb2.DescribeTopicConfigsResponse,
    ) -> None:
        """Return the configs of many topics; each topic that is refused has an error of its own."""
        if len(request.topics) > MAX_NAMED:
            raise InvalidRequestError(
                f"a request names at most {MAX_NAMED} topics, not {len(request.topics)}: split it"
            )
        image = await image_from(self._metadata, request.min_metadata_offset)
        allowed = Decisions.of(caller.get(), Acl.DESCRIBE_CONFIGS, Acl.TOPIC)
        check = allowed.check if allowed is not None else lambda topic: None
        response.configs.extend(await describe_topics(image, request.topics, self._config, check))

    @answered(admin_pb2.AlterConfigsResponse)
    async def AlterConfigs(
        self, request: admin_pb2.AlterConfigsRequest, context: Context, response: admin_pb2.AlterConfigsResponse
    ) -> None:
        """Set and unset configs, all or none; configs that the request does not name stay."""
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
        topic = self._metadata.image.topic(resource.name) if resource.type == ConfigResource.TOPIC else None
        is_of_brokers = resource.type == ConfigResource.BROKER
        self._check_configs(request.set, 0 if topic is None else len(topic.partitions), is_of_brokers=is_of_brokers)
        command = AlterConfigsCommand(
            resource=resource, set=request.set, unset=request.unset, validate_only=request.validate_only
        )
        await self._commit_into(response, MetadataCommand(alter_configs=command))

    @answered(admin_pb2.DescribeLogDirsResponse, asks_quorum=False)
    async def DescribeLogDirs(
        self, request: admin_pb2.DescribeLogDirsRequest, context: Context, response: admin_pb2.DescribeLogDirsResponse
    ) -> None:
        """Return this broker's log directories and their partitions."""
        response.log_dirs.extend(await describe_log_dirs(self._config.log_dirs, self._logs))

    @answered(admin_pb2.DescribeClusterResponse)
    async def DescribeCluster(
        self, request: admin_pb2.DescribeClusterRequest, context: Context, response: admin_pb2.DescribeClusterResponse
    ) -> None:
        """Return the cluster's brokers; `linearizable`: with every change acknowledged before this call."""
        if request.linearizable:
            await self._metadata.barrier()
        describe_cluster(await image_from(self._metadata, request.min_metadata_offset), response)
        if request.include_authorized_operations:
            who = caller.get()
            response.authorized_operations = authorized_operations(who, Acl.CLUSTER, CLUSTER_NAME)
            response.may_create_topics = may_create_topics(who)

    @answered(admin_pb2.AdminDescribeQuorumResponse)
    async def DescribeQuorum(
        self,
        request: admin_pb2.AdminDescribeQuorumRequest,
        context: Context,
        response: admin_pb2.AdminDescribeQuorumResponse,
    ) -> None:
        """Return the metadata quorum as its leader sees it."""
        response.quorum.CopyFrom(await self._metadata.describe_quorum())

    @answered(admin_pb2.ElectLeadersResponse)
    async def ElectLeaders(
        self, request: admin_pb2.ElectLeadersRequest, context: Context, response: admin_pb2.ElectLeadersResponse
    ) -> None:
        """Elect the first replica of each partition, or, if `unclean`, one that may lack committed records."""
        commands = list(election_commands(self._metadata.image, request))
        self._admit(*commands)
        for command in commands:
            await self._propose_into(response, command)

    @answered(admin_pb2.DescribeReplicasResponse)
    async def DescribeReplicas(
        self, request: admin_pb2.DescribeReplicasRequest, context: Context, response: admin_pb2.DescribeReplicasResponse
    ) -> None:
        """Return the replicas' progress, for the partitions that this broker leads."""
        await image_from(self._metadata, request.min_metadata_offset)
        now_ms = self._clock.monotonic_ms()
        response.partitions.extend(await describe_replicas(self._partitions(), set(request.topic_ids), now_ms))

    @answered(admin_pb2.AdminAlterReassignmentsResponse)
    async def AlterReassignments(
        self,
        request: admin_pb2.AdminAlterReassignmentsRequest,
        context: Context,
        response: admin_pb2.AdminAlterReassignmentsResponse,
    ) -> None:
        """Begin, change or cancel reassignments, each independently; answered once they have begun."""
        moves = (AlterReassignmentsCommand(topic=each.topic) for each in request.reassignments)
        self._admit(*(MetadataCommand(alter_reassignments=each) for each in moves))
        outcomes = await propose_reassignments(self._metadata, request.reassignments)
        for outcome in outcomes:
            result = response.results.add()
            if isinstance(outcome, RaftlogError):
                result.error.CopyFrom(to_wire(outcome))
            else:
                response.metadata_offset = max(response.metadata_offset, outcome)
        await self._wait_applied(response.metadata_offset)

    @answered(admin_pb2.DescribeClientQuotasResponse)
    async def DescribeClientQuotas(
        self,
        request: admin_pb2.DescribeClientQuotasRequest,
        context: Context,
        response: admin_pb2.DescribeClientQuotasResponse,
    ) -> None:
        """Return the quotas that the filter selects, sorted by entity and key."""
        image = await image_from(self._metadata, request.min_metadata_offset)
        wanted = QuotaEntity.from_wire(request.filter).canonical()
        async for entity in in_turns(sorted(image.quotas, key=entity_order), QUICK_AT_A_TIME):
            if matches(entity, wanted, strict=request.strict):
                wire = entity.to_wire()
                for key, value in sorted(image.quotas[entity].items()):
                    response.quotas.add(entity=wire, key=key, value=value)

    @answered(admin_pb2.AlterClientQuotasResponse)
    async def AlterClientQuotas(
        self,
        request: admin_pb2.AlterClientQuotasRequest,
        context: Context,
        response: admin_pb2.AlterClientQuotasResponse,
    ) -> None:
        """Set and remove quotas, all or none; brokers apply them at once."""
        command = AlterQuotasCommand(alterations=request.alterations, validate_only=request.validate_only)
        changes = () if request.validate_only else _quota_changes(request, *author_of(context))
        await self._commit_into(response, MetadataCommand(alter_quotas=command), changes)

    @answered(admin_pb2.AdminUnregisterBrokerResponse)
    async def UnregisterBroker(
        self,
        request: admin_pb2.AdminUnregisterBrokerRequest,
        context: Context,
        response: admin_pb2.AdminUnregisterBrokerResponse,
    ) -> None:
        """Forget a broker that is gone for good."""
        command = UnregisterBrokerCommand(broker_id=request.broker_id)
        await self._commit_into(response, MetadataCommand(unregister_broker=command))

    @answered(admin_pb2.AdminAlterBrokerResponse)
    async def AlterBroker(
        self, request: admin_pb2.AdminAlterBrokerRequest, context: Context, response: admin_pb2.AdminAlterBrokerResponse
    ) -> None:
        """Cordon or drain a broker, or undo that; answered before its leaderships have moved."""
        await self._commit_into(response, MetadataCommand(alter_broker=alter_broker_command(request)))

    @answered(admin_pb2.AdminUpdateFeatureResponse)
    async def UpdateFeature(
        self,
        request: admin_pb2.AdminUpdateFeatureRequest,
        context: Context,
        response: admin_pb2.AdminUpdateFeatureResponse,
    ) -> None:
        """Raise the level of a feature; every registered broker has to support it."""
        command = UpdateFeatureCommand(name=request.name, level=request.level, validate_only=request.validate_only)
        await self._commit_into(response, MetadataCommand(update_feature=command))

    async def _commit_into(
        self, response: _Committed, command: MetadataCommand, changes: Iterable[Fact] = ()
    ) -> CommandResult:
        """Commit `command`, wait until this broker acts on it, and note its offset in `response`.

        `changes`: what it changes, for the audit log.

        Raises:
            ThrottlingQuotaExceeded: the caller is over its controller_mutation_rate; nothing was proposed.
        """
        self._admit(command)
        return await self._propose_into(response, command, changes)

    async def _propose_into(
        self, response: _Committed, command: MetadataCommand, changes: Iterable[Fact] = ()
    ) -> CommandResult:
        """As `_commit_into`, of a command that was admitted before."""
        with changes_noted(changes):
            result = await self._metadata.propose(command)
        await self._wait_applied(result.offset)
        logger.info(
            "metadata command done",
            extra={"command": command.WhichOneof("command"), "metadata_offset": result.offset},
        )
        response.metadata_offset = max(response.metadata_offset, result.offset)
        return result

    def _admit(self, *commands: MetadataCommand) -> None:
        """Check that the caller may make these changes. Raises ThrottlingQuotaExceeded."""
        if self._quotas is not None:
            self._quotas.admit_commands(caller.get(), *commands)

    @contextmanager
    def _adding(self, topic: str, partitions: int, added: int, replication_factor: int, user: str) -> Iterator[None]:
        """Enforce the limits of this broker's configuration, and count the added partitions during the block.

        At its end the image has them. Otherwise concurrent calls could each pass. `user`: the creator of the topic.

        Raises:
            PolicyViolation: the topic, the cluster or the user would have too many.
        """
        replicas = max(0, added * replication_factor)
        self._check_partitions(topic, partitions, replicas)
        self._check_user(topic, added, user)
        self._under_way += replicas
        self._under_way_of[user] += max(0, added)
        try:
            yield
        finally:
            self._under_way -= replicas
            self._under_way_of[user] -= max(0, added)
            if not self._under_way_of[user]:
                del self._under_way_of[user]

    def _check_user(self, topic: str, added: int, user: str) -> None:
        """Check `max.partitions.per.user`, or raise PolicyViolation. It bounds neither user "" nor administrators."""
        who = caller.get()
        if not user or added <= 0 or who.may(Acl.ALTER, Acl.CLUSTER, CLUSTER_NAME, log=False):
            return
        topics = self._metadata.image.topics.values()
        present = sum(len(each.partitions) for each in topics if each.user == user) + self._under_way_of[user]
        limit = self._config.max_partitions_per_user_overrides.get(user, self._config.max_partitions_per_user)
        if present + added > limit:
            raise PolicyViolation(
                f"topic {topic[:249]!r} would bring {user} from {present} to {present + added} partitions of topics "
                f"that it has made, max.partitions.per.user={limit}: delete topics that are not needed, use fewer "
                "partitions, or ask an administrator to raise the limit or to make the topic"
            )

    def _check_partitions(self, topic: str, partitions: int, added_replicas: int) -> None:
        """Check the limits on the partitions of a topic, and of the cluster. Raises PolicyViolation."""
        limit = self._config.max_partitions_per_topic
        if partitions > limit:
            raise PolicyViolation(
                f"topic {topic[:249]!r} cannot have {partitions} partitions, max.partitions.per.topic={limit}"
            )
        if added_replicas <= 0:
            return
        image = self._metadata.image
        brokers = sum(not broker.fenced for broker in image.brokers.values())
        present = sum(load.replicas for load in image.load.values()) + self._under_way
        for limit, reason in (
            (self._config.max_partitions_per_broker, "max.partitions.per.broker={}"),
            (self._max_replicas, "the limit of open files (ulimit -n), for {} replicas per broker,"),
        ):
            allowed = limit * brokers
            if present + added_replicas > allowed:
                raise PolicyViolation(
                    f"topic {topic[:249]!r} would bring the cluster from {present} to {present + added_replicas} "
                    f"replicas; {reason.format(limit)} allows {allowed} on {brokers} broker"
                    f"{'' if brokers == 1 else 's'}"
                )

    def _check_configs(self, configs: Mapping[str, str], partitions: int, *, is_of_brokers: bool = False) -> None:
        """Refuse values that would burden the brokers. `partitions`: of the topic; 0 if unknown.

        Those of brokers are for all topics, and only administrators set them.

        Raises:
            InvalidConfig: see `check_limits`.
        """
        image, config = self._metadata.image, self._config
        named = max(1, len(image.brokers)) * partitions or MAX_THROTTLED_REPLICAS
        check_limits(
            configs,
            min_segment_bytes=config.min_segment_bytes,
            max_throttled_replicas=min(named, MAX_THROTTLED_REPLICAS),
            max_inflate_bytes=None if is_of_brokers else image.max_inflate_bytes(config.node_id, config.topic_defaults),
        )

    def _check_own(self, broker: str) -> None:
        if broker != str(self._config.node_id):
            raise InvalidRequestError(
                f"this is broker {self._config.node_id}, which does not know the configuration of broker "
                f"{broker[:20]!r}; ask that one"
            )

    # Cluster

    # Replicas
