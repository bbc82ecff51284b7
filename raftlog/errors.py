"""Every error raftlog raises, in one tree.

    RaftlogError
     ├─ RetriableError              the same request may succeed later; clients retry it by themselves
     │   ├─ UnknownTopicOrPartition, UnknownTopicId, LeaderNotAvailable, NotLeader, UnknownLeaderEpoch
     │   ├─ RequestTimedOut, NotEnoughReplicas, NotEnoughReplicasAfterAppend, NotController, UnknownOutcome
     │   ├─ DuplicateBrokerRegistration, EligibleLeadersNotAvailable, PreferredLeaderNotAvailable
     │   ├─ StorageError, StorageFull, BrokerOverloaded, ShuttingDown, ChainBroken
     │   ├─ CoordinatorLoadInProgress, CoordinatorNotAvailable, NotCoordinator, UnstableOffsetCommit
     │   ├─ UnreleasedInstanceId, ConcurrentTransactions
     │   ├─ ThrottlingQuotaExceeded
     │   └─ BrokerUnavailable       no connection; local to the client
     ├─ FencedError                 a newer owner has taken over; never retried with the same epoch
     │   ├─ FencedLeaderEpoch, FencedController, StaleBrokerEpoch, BrokerIdNotRegistered
     │   ├─ UnknownMemberId, FencedMemberEpoch, StaleMemberEpoch, FencedInstanceId, PartitionNotOwned
     │   ├─ IllegalGeneration
     │   ├─ InvalidProducerEpoch, ProducerFenced, InvalidProducerIdMapping
     │   ├─ RebalanceInProgress, MemberIdRequired    of classic groups: join again
     │   └─ StageExpired, BatchAlreadyCommitted
     ├─ SequenceError               a gap in a producer's sequence numbers; nothing was appended
     │   └─ OutOfOrderSequence, DuplicateSequence, UnknownProducerId
     ├─ InvalidRequestError         the request can never succeed as it is
     │   ├─ InvalidTopic, TopicAlreadyExists, InvalidPartitions, InvalidReplicationFactor
     │   ├─ InvalidConfig, PolicyViolation, OffsetOutOfRange, MessageTooLarge, UnsupportedVersion
     │   ├─ InvalidReplicaAssignment, InvalidUpdateVersion, IneligibleReplica, ElectionNotNeeded
     │   ├─ NoReassignmentInProgress, FeatureUpdateFailed, InconsistentClusterId, InconsistentVoters
     │   ├─ InvalidGroupId, GroupIdNotFound, NonEmptyGroup, GroupSubscribedToTopic, GroupMaxSizeReached
     │   ├─ UnsupportedAssignor, OffsetMetadataTooLarge, InconsistentGroupProtocol, InvalidSessionTimeout
     │   ├─ InvalidTxnState, InvalidTransactionTimeout, TransactionalIdNotFound, SinkMismatch
     │   ├─ SecurityDisabled, ResourceNotFound, DuplicateResource, UnacceptableCredential
     │   └─ ClosedError             the client object was closed; local to the client
     ├─ CorruptRecordError          the bytes contradict their checksum or format
     │   ├─ InvalidRecord           well-formed bytes with impossible contents
     │   ├─ BatchTooExpansive       inflates beyond `max.inflate.bytes` or the allowed ratio
     │   └─ UnsupportedCompression
     ├─ TransactionAbortable        the transaction can only be aborted
     ├─ AuthorizationError          the principal may not do this; never retried
     │   ├─ TopicAuthorizationFailed, GroupAuthorizationFailed, ClusterAuthorizationFailed
     │   ├─ TransactionalIdAuthorizationFailed
     │   └─ AuthenticationFailed    a wrong password, or an unknown user
     │       └─ TokenExpired        log in again
     ├─ BufferExhausted             `buffer.memory` stayed full for `max.block.ms`; local to the client
     ├─ DeliveryTimeout             `delivery.timeout.ms` passed; the record may or may not be in the log
     └─ InternalError               a bug on the other side; its log has the details

A class with a wire code carries it as `code`; the classes and the codes of `raftlog.v1.ErrorCode` map one to one.
Numbers follow Kafka's protocol error codes where Kafka has the condition.
"""

from __future__ import annotations

from typing import ClassVar

from raftlog.v1 import common_pb2, options_pb2


class RaftlogError(Exception):
    """Root of the tree. `code` is the wire code, or None for errors that never cross the wire."""

    code: ClassVar[int | None] = None

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later."""
        return isinstance(self, RetriableError)


class RetriableError(RaftlogError):
    """The same request may succeed later."""


class FencedError(RaftlogError):
    """A newer owner has taken over."""


class InvalidRequestError(RaftlogError):
    """The request can never succeed as it is."""

    code: ClassVar[int | None] = common_pb2.INVALID_REQUEST


class CorruptRecordError(RaftlogError):
    """The bytes contradict their checksum or format; the message names the reason."""

    code: ClassVar[int | None] = common_pb2.CORRUPT_MESSAGE


class AuthorizationError(RaftlogError):
    """The principal may not do this."""


class TopicAuthorizationFailed(AuthorizationError):
    """The principal may not do this with the topic, or may not know whether it exists."""

    code = common_pb2.TOPIC_AUTHORIZATION_FAILED


class GroupAuthorizationFailed(AuthorizationError):
    """The principal may not do this with the group."""

    code = common_pb2.GROUP_AUTHORIZATION_FAILED


class ClusterAuthorizationFailed(AuthorizationError):
    """The principal may not do this with the cluster."""

    code = common_pb2.CLUSTER_AUTHORIZATION_FAILED


class TransactionalIdAuthorizationFailed(AuthorizationError):
    """The principal may not do this under the transactional id."""

    code = common_pb2.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


class AuthenticationFailed(AuthorizationError):
    """The user does not exist, or the password is wrong; brokers do not say which."""

    code = common_pb2.SASL_AUTHENTICATION_FAILED


class TokenExpired(AuthenticationFailed):
    """The token is not valid at this broker, or has expired: log in again. Clients do this by themselves."""

    code = common_pb2.TOKEN_EXPIRED


class InternalError(RaftlogError):
    """The other side met a bug; its log has the details."""

    code: ClassVar[int | None] = common_pb2.INTERNAL


class UnknownTopicOrPartition(RetriableError):
    """This broker does not know the topic or partition."""

    code = common_pb2.UNKNOWN_TOPIC_OR_PARTITION


class UnknownTopicId(RetriableError):
    """This broker does not know the topic id: the topic was deleted, or is too new."""

    code = common_pb2.UNKNOWN_TOPIC_ID


class LeaderNotAvailable(RetriableError):
    """The partition has no leader at the moment."""

    code = common_pb2.LEADER_NOT_AVAILABLE


class NotLeader(RetriableError):
    """This broker does not lead the partition. `leader_id`, `leader_epoch`, `host` and `port` name the known leader."""

    code = common_pb2.NOT_LEADER_OR_FOLLOWER

    def __init__(
        self, message: str = "", leader_id: int = -1, leader_epoch: int = -1, host: str = "", port: int = 0
    ) -> None:
        super().__init__(message)
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch
        self.host = host
        self.port = port


class UnknownLeaderEpoch(RetriableError):
    """This broker does not know the client's leader epoch yet."""

    code = common_pb2.UNKNOWN_LEADER_EPOCH


class RequestTimedOut(RetriableError):
    """No answer in time; the request may or may not have taken effect."""

    code = common_pb2.REQUEST_TIMED_OUT


class NotEnoughReplicas(RetriableError):
    """Fewer in-sync replicas than `min.insync.replicas`; nothing was appended."""

    code = common_pb2.NOT_ENOUGH_REPLICAS


class NotEnoughReplicasAfterAppend(RetriableError):
    """The leader appended the records, but then had fewer in-sync replicas than `min.insync.replicas`; a retry may
    write them twice, unless the producer is idempotent."""

    code = common_pb2.NOT_ENOUGH_REPLICAS_AFTER_APPEND


class NotController(RetriableError):
    """This node is not the active controller."""

    code = common_pb2.NOT_CONTROLLER


class UnknownOutcome(RetriableError):
    """The command may or may not be committed; a retry with the same client id and sequence returns its outcome."""

    code = common_pb2.UNKNOWN_OUTCOME


class DuplicateBrokerRegistration(RetriableError):
    """Another process with this broker id is alive, or may still be."""

    code = common_pb2.DUPLICATE_BROKER_REGISTRATION


class EligibleLeadersNotAvailable(RetriableError):
    """No replica that has every committed record is alive."""

    code = common_pb2.ELIGIBLE_LEADERS_NOT_AVAILABLE


class PreferredLeaderNotAvailable(RetriableError):
    """The partition's preferred leader, its first replica, is not alive or not in sync."""

    code = common_pb2.PREFERRED_LEADER_NOT_AVAILABLE


class StorageError(RetriableError):
    """The log directory of the partition is offline on this broker."""

    code = common_pb2.STORAGE_ERROR


class StorageFull(RetriableError):
    """The log directory is full; reads continue, and writes resume when there is space."""

    code = common_pb2.STORAGE_FULL


class BrokerOverloaded(RetriableError):
    """The broker has reached a limit (streams, memory, connections); try later or another broker."""

    code = common_pb2.BROKER_OVERLOADED


class ThrottlingQuotaExceeded(RetriableError):
    """The client is over a quota (KIP-599). The request was not carried out; repeat it after `throttle_time_ms`."""

    code = common_pb2.THROTTLING_QUOTA_EXCEEDED

    def __init__(self, message: str = "", throttle_time_ms: int = 0) -> None:
        super().__init__(message)
        self.throttle_time_ms = throttle_time_ms


class ShuttingDown(RetriableError):
    """The broker is stopping."""

    code = common_pb2.SHUTTING_DOWN


class ChainBroken(RetriableError):
    """An earlier batch of the same partition and stream was refused; sending all of them again in order may succeed."""

    code = common_pb2.CHAIN_BROKEN


class CoordinatorLoadInProgress(RetriableError):
    """The coordinator is still loading its log."""

    code = common_pb2.COORDINATOR_LOAD_IN_PROGRESS


class CoordinatorNotAvailable(RetriableError):
    """There is no coordinator at the moment: its partition has no leader, is being created, or is unreadable."""

    code = common_pb2.COORDINATOR_NOT_AVAILABLE


class NotCoordinator(RetriableError):
    """Another broker coordinates the group; look it up."""

    code = common_pb2.NOT_COORDINATOR


class UnstableOffsetCommit(RetriableError):
    """An open transaction may replace the committed offset."""

    code = common_pb2.UNSTABLE_OFFSET_COMMIT


class RebalanceInProgress(FencedError):
    """The classic group is between two assignments: join again."""

    code = common_pb2.REBALANCE_IN_PROGRESS


class MemberIdRequired(FencedError):
    """The coordinator has given the member an id: join again with it (KIP-394)."""

    code = common_pb2.MEMBER_ID_REQUIRED


class UnreleasedInstanceId(RetriableError):
    """Another member with this instance id is alive; it must leave first, or its session must end."""

    code = common_pb2.UNRELEASED_INSTANCE_ID


class BrokerUnavailable(RetriableError):
    """No connection to the broker. Raised by the client, never sent."""


class FencedLeaderEpoch(FencedError):
    """The leader epoch of the request is older than the partition's; refresh metadata."""

    code = common_pb2.FENCED_LEADER_EPOCH


class FencedController(FencedError):
    """The command was proposed in an earlier controller epoch; it had no effect."""

    code = common_pb2.STALE_CONTROLLER_EPOCH


class StaleBrokerEpoch(FencedError):
    """The broker has registered again since, or was fenced; register again."""

    code = common_pb2.STALE_BROKER_EPOCH


class BrokerIdNotRegistered(FencedError):
    """The broker id is not registered; register first."""

    code = common_pb2.BROKER_ID_NOT_REGISTERED


class UnknownMemberId(FencedError):
    """The group does not have this member, or has removed it: join again."""

    code = common_pb2.UNKNOWN_MEMBER_ID


class FencedMemberEpoch(FencedError):
    """The coordinator has removed the member, or never issued this epoch: join again."""

    code = common_pb2.FENCED_MEMBER_EPOCH


class StaleMemberEpoch(FencedError):
    """The request has an earlier member epoch, in which the member did not yet own the partition."""

    code = common_pb2.STALE_MEMBER_EPOCH


class IllegalGeneration(FencedError):
    """The classic group is in another generation: join again."""

    code = common_pb2.ILLEGAL_GENERATION


class FencedInstanceId(FencedError):
    """Another process has taken over the group instance id."""

    code = common_pb2.FENCED_INSTANCE_ID


class PartitionNotOwned(FencedError):
    """The member does not own the partition, so it may not commit its offset."""

    code = common_pb2.PARTITION_NOT_OWNED


class InvalidProducerEpoch(FencedError):
    """A newer epoch of this producer id has written to the partition."""

    code = common_pb2.INVALID_PRODUCER_EPOCH


class ProducerFenced(FencedError):
    """Another producer uses the transactional id now, and has fenced this one."""

    code = common_pb2.PRODUCER_FENCED


class InvalidProducerIdMapping(FencedError):
    """The transactional id has another producer id, or the coordinator has forgotten it: make a new producer."""

    code = common_pb2.INVALID_PRODUCER_ID_MAPPING


class StageExpired(FencedError):
    """A stage of the batch was aborted or has timed out: write the batch again."""

    code = common_pb2.STAGE_EXPIRED


class BatchAlreadyCommitted(FencedError):
    """The sink has already committed this batch or a later one."""

    code = common_pb2.BATCH_ALREADY_COMMITTED


class ConcurrentTransactions(RetriableError):
    """The last transaction of this producer is still ending; try again."""

    code = common_pb2.CONCURRENT_TRANSACTIONS


class TransactionAbortable(RaftlogError):
    """The transaction can only be aborted; abort it and begin another one (KIP-890)."""

    code = common_pb2.TRANSACTION_ABORTABLE


class SequenceError(RaftlogError):
    """A batch does not continue the producer's sequence numbers in the partition; it was not appended."""


class OutOfOrderSequence(SequenceError):
    """Batches before this one are missing in the log."""

    code = common_pb2.OUT_OF_ORDER_SEQUENCE_NUMBER


class DuplicateSequence(SequenceError):
    """The batch was appended so long ago that the broker no longer knows its offset."""

    code = common_pb2.DUPLICATE_SEQUENCE_NUMBER


class UnknownProducerId(SequenceError):
    """The partition does not know this producer, and the batch is not its first one."""

    code = common_pb2.UNKNOWN_PRODUCER_ID


class InvalidTxnState(InvalidRequestError):
    """The state of the transaction does not allow this: none has begun, or it is over."""

    code = common_pb2.INVALID_TXN_STATE


class InvalidTransactionTimeout(InvalidRequestError):
    """The transaction's timeout is 0, or above transaction.max.timeout.ms."""

    code = common_pb2.INVALID_TRANSACTION_TIMEOUT


class TransactionalIdNotFound(InvalidRequestError):
    """No producer with this transactional id is known."""

    code = common_pb2.TRANSACTIONAL_ID_NOT_FOUND


class SinkMismatch(InvalidRequestError):
    """The sink id has another target: two queries use the same id."""

    code = common_pb2.SINK_MISMATCH


class SecurityDisabled(InvalidRequestError):
    """The brokers have no authorizer configured."""

    code = common_pb2.SECURITY_DISABLED


class ResourceNotFound(InvalidRequestError):
    """The user or the role does not exist."""

    code = common_pb2.RESOURCE_NOT_FOUND


class DuplicateResource(InvalidRequestError):
    """A role of that name already exists."""

    code = common_pb2.DUPLICATE_RESOURCE


class UnacceptableCredential(InvalidRequestError):
    """A user's name, salt, keys or number of iterations are not allowed."""

    code = common_pb2.UNACCEPTABLE_CREDENTIAL


class InvalidTopic(InvalidRequestError):
    """The topic name is not allowed."""

    code = common_pb2.INVALID_TOPIC


class TopicAlreadyExists(InvalidRequestError):
    """A topic of that name already exists."""

    code = common_pb2.TOPIC_ALREADY_EXISTS


class InvalidPartitions(InvalidRequestError):
    """The number of partitions is not allowed."""

    code = common_pb2.INVALID_PARTITIONS


class InvalidReplicationFactor(InvalidRequestError):
    """The replication factor is below 1 or above the number of brokers."""

    code = common_pb2.INVALID_REPLICATION_FACTOR


class InvalidConfig(InvalidRequestError):
    """A config key is unknown, or its value is not allowed."""

    code = common_pb2.INVALID_CONFIG


class PolicyViolation(InvalidRequestError):
    """The cluster's policy forbids it."""

    code = common_pb2.POLICY_VIOLATION


class OffsetOutOfRange(InvalidRequestError):
    """The offset is below the log start or above the log end."""

    code = common_pb2.OFFSET_OUT_OF_RANGE


class MessageTooLarge(InvalidRequestError):
    """The batch is larger than the topic's `max.message.bytes`."""

    code = common_pb2.MESSAGE_TOO_LARGE


class UnsupportedVersion(InvalidRequestError):
    """The magic of a batch or the format of a file is newer than this version supports."""

    code = common_pb2.UNSUPPORTED_VERSION


class InvalidReplicaAssignment(InvalidRequestError):
    """The list of replicas is empty, or names a broker twice or an unregistered one."""

    code = common_pb2.INVALID_REPLICA_ASSIGNMENT


class InvalidUpdateVersion(InvalidRequestError):
    """The partition has changed since the request was made: its partition epoch differs."""

    code = common_pb2.INVALID_UPDATE_VERSION


class IneligibleReplica(InvalidRequestError):
    """A replica whose broker is fenced, shutting down, or has another epoch cannot join the ISR (KIP-903)."""

    code = common_pb2.INELIGIBLE_REPLICA


class ElectionNotNeeded(InvalidRequestError):
    """The partition already has the requested leader."""

    code = common_pb2.ELECTION_NOT_NEEDED


class NoReassignmentInProgress(InvalidRequestError):
    """There is no reassignment to cancel."""

    code = common_pb2.NO_REASSIGNMENT_IN_PROGRESS


class FeatureUpdateFailed(InvalidRequestError):
    """The feature level is not supported by every registered broker, or cannot be lowered."""

    code = common_pb2.FEATURE_UPDATE_FAILED


class InconsistentClusterId(InvalidRequestError):
    """The other side belongs to another cluster."""

    code = common_pb2.INCONSISTENT_CLUSTER_ID


class InconsistentVoters(InvalidRequestError):
    """The other side has another list of voters, or is not the expected node."""

    code = common_pb2.INCONSISTENT_VOTERS


class InvalidGroupId(InvalidRequestError):
    """The group id does not have 1 to 255 characters."""

    code = common_pb2.INVALID_GROUP_ID


class InconsistentGroupProtocol(InvalidRequestError):
    """The group is of another type, or its members have no assignor in common with this one."""

    code = common_pb2.INCONSISTENT_GROUP_PROTOCOL


class InvalidSessionTimeout(InvalidRequestError):
    """The session timeout is outside of what the broker allows."""

    code = common_pb2.INVALID_SESSION_TIMEOUT


class GroupIdNotFound(InvalidRequestError):
    """The group does not exist."""

    code = common_pb2.GROUP_ID_NOT_FOUND


class NonEmptyGroup(InvalidRequestError):
    """The group has members; stop them first."""

    code = common_pb2.NON_EMPTY_GROUP


class GroupSubscribedToTopic(InvalidRequestError):
    """A member of the group reads the topic, so the offsets cannot be deleted."""

    code = common_pb2.GROUP_SUBSCRIBED_TO_TOPIC


class GroupMaxSizeReached(InvalidRequestError):
    """The group already has `group.consumer.max.size` members."""

    code = common_pb2.GROUP_MAX_SIZE_REACHED


class UnsupportedAssignor(InvalidRequestError):
    """The coordinator has no assignor of that name."""

    code = common_pb2.UNSUPPORTED_ASSIGNOR


class OffsetMetadataTooLarge(InvalidRequestError):
    """The text committed with an offset is longer than `offset.metadata.max.bytes`."""

    code = common_pb2.OFFSET_METADATA_TOO_LARGE


class ClosedError(InvalidRequestError):
    """The client object is closed. Raised by the client, never sent."""

    code = None


class InvalidRecord(CorruptRecordError):
    """A batch parses, but its counts, offsets or timestamps contradict each other."""

    code = common_pb2.INVALID_RECORD


class BatchTooExpansive(CorruptRecordError):
    """A compressed batch would inflate beyond the limits, as its header says."""

    code = common_pb2.BATCH_TOO_EXPANSIVE


class UnsupportedCompression(CorruptRecordError):
    """No codec has this number."""

    code = common_pb2.UNSUPPORTED_COMPRESSION_TYPE


class BufferExhausted(RaftlogError):
    """`buffer.memory` stayed full for `max.block.ms`. Raised by the client, never sent."""


class DeliveryTimeout(RaftlogError):
    """`delivery.timeout.ms` passed before an acknowledgement; the record may or may not be in the log."""


def _classes(root: type[RaftlogError]) -> list[type[RaftlogError]]:
    found = [root]
    for sub in root.__subclasses__():
        found += _classes(sub)
    return found


_BY_CODE: dict[int, type[RaftlogError]] = {
    cls.__dict__["code"]: cls for cls in _classes(RaftlogError) if cls.__dict__.get("code") is not None
}


_RETRIES: dict[int, options_pb2.Retry.ValueType] = {
    value.number: value.GetOptions().Extensions[options_pb2.retry]
    for value in common_pb2.ErrorCode.DESCRIPTOR.values
    if value.number != common_pb2.NONE
}


def class_of(code: int) -> type[RaftlogError]:
    """Return the class of an assigned wire code."""
    return _BY_CODE[code]


def retry_of(code: int) -> options_pb2.Retry.ValueType:
    """Return what the wire contract asks of a client that receives this code; an unknown code is final."""
    return _RETRIES.get(code, options_pb2.RETRY_FINAL)


def from_wire(error: common_pb2.Error) -> RaftlogError:
    """Return the exception for an error value; an unknown code becomes an `InternalError` that names it."""
    cls = _BY_CODE.get(error.code)
    if cls is None:
        return InternalError(f"unknown error code {error.code}: {error.message}")
    if cls is NotLeader:
        hint = error.leader if error.HasField("leader") else None
        if hint is None:
            return NotLeader(error.message)
        return NotLeader(error.message, hint.leader_id, hint.leader_epoch, hint.host, hint.port)
    if cls is ThrottlingQuotaExceeded:
        return ThrottlingQuotaExceeded(error.message, error.throttle_time_ms)
    return cls(error.message)


def to_wire(error: BaseException) -> common_pb2.Error:
    """Return the error value for an exception; an exception without a wire code becomes `INTERNAL`."""
    code = error.code if isinstance(error, RaftlogError) else None
    if code is None:
        return common_pb2.Error(code=common_pb2.INTERNAL, message=f"{type(error).__name__}: {error}")
    wire = common_pb2.Error(code=code, message=str(error))  # type: ignore[arg-type] # int of a known enum value
    if isinstance(error, NotLeader) and error.leader_epoch >= 0:
        wire.leader.leader_id = error.leader_id
        wire.leader.leader_epoch = error.leader_epoch
        wire.leader.host, wire.leader.port = error.host, error.port
    if isinstance(error, ThrottlingQuotaExceeded):
        wire.throttle_time_ms = error.throttle_time_ms
    return wire
