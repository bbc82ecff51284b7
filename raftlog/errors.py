"""Every error raftlog raises, in one tree.

    RaftlogError
     ├─ RetriableError              the same request may succeed later; clients retry these by themselves
     │   ├─ UnknownTopicOrPartition, UnknownTopicId, LeaderNotAvailable, NotLeader, UnknownLeaderEpoch
     │   ├─ RequestTimedOut, NotEnoughReplicas, NotEnoughReplicasAfterAppend, NotController, UnknownOutcome
     │   ├─ DuplicateBrokerRegistration, EligibleLeadersNotAvailable, PreferredLeaderNotAvailable
     │   ├─ StorageError, StorageFull, BrokerOverloaded, ShuttingDown, ChainBroken
     │   └─ BrokerUnavailable       no connection; local to the client
     ├─ FencedError                 somebody newer has taken over; never retried with the same epoch
     │   └─ FencedLeaderEpoch, FencedController, StaleBrokerEpoch, BrokerIdNotRegistered
     ├─ InvalidRequestError         the request can never succeed as it is
     │   ├─ InvalidTopic, TopicAlreadyExists, InvalidPartitions, InvalidReplicationFactor
     │   ├─ InvalidConfig, PolicyViolation, OffsetOutOfRange, MessageTooLarge, UnsupportedVersion
     │   ├─ InvalidReplicaAssignment, InvalidUpdateVersion, IneligibleReplica, ElectionNotNeeded
     │   ├─ NoReassignmentInProgress, FeatureUpdateFailed, InconsistentClusterId, InconsistentVoters
     │   └─ ClosedError             the client object was closed; local to the client
     ├─ CorruptRecordError          bytes that are not what they claim to be
     │   ├─ InvalidRecord           well-formed bytes with impossible contents
     │   ├─ BatchTooExpansive       inflates beyond `max.inflate.bytes` or the allowed ratio
     │   └─ UnsupportedCompression
     ├─ AuthorizationError
     ├─ BufferExhausted             `buffer.memory` stayed full for `max.block.ms`; local to the client
     ├─ DeliveryTimeout             `delivery.timeout.ms` passed; the record may or may not be in the log
     └─ InternalError               a bug on the other side; its log has the details

A class with a wire code carries it as `code`; the classes and the codes of `raftlog.v1.ErrorCode` map one to one.
Numbers follow Kafka's protocol error codes where Kafka has the condition.
"""

from __future__ import annotations

from typing import ClassVar

from raftlog.v1 import common_pb2


class RaftlogError(Exception):
    """Root of the tree. `code` is the wire code, or None for errors that never travel."""

    code: ClassVar[int | None] = None

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later."""
        return isinstance(self, RetriableError)


class RetriableError(RaftlogError):
    """The same request may succeed later."""


class FencedError(RaftlogError):
    """Somebody newer has taken over."""


class InvalidRequestError(RaftlogError):
    """The request can never succeed as it is."""

    code: ClassVar[int | None] = common_pb2.INVALID_REQUEST


class CorruptRecordError(RaftlogError):
    """Bytes that are not what they claim to be; the message names the reason."""

    code: ClassVar[int | None] = common_pb2.CORRUPT_MESSAGE


class AuthorizationError(RaftlogError):
    """The principal may not do this."""


class InternalError(RaftlogError):
    """The other side met a bug; its log has the details."""

    code: ClassVar[int | None] = common_pb2.INTERNAL


class UnknownTopicOrPartition(RetriableError):
    """There is no such topic or partition, as far as this broker knows."""

    code = common_pb2.UNKNOWN_TOPIC_OR_PARTITION


class UnknownTopicId(RetriableError):
    """The topic id is not known here: the topic was deleted, or this broker has not heard of it yet."""

    code = common_pb2.UNKNOWN_TOPIC_ID


class LeaderNotAvailable(RetriableError):
    """Nobody leads the partition at the moment."""

    code = common_pb2.LEADER_NOT_AVAILABLE


class NotLeader(RetriableError):
    """This broker does not lead the partition. `leader_id`, `leader_epoch` and address name who does, when known."""

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
    """The client is ahead of this broker, which has not heard of the leader epoch yet."""

    code = common_pb2.UNKNOWN_LEADER_EPOCH


class RequestTimedOut(RetriableError):
    """No answer in time; what was asked for may or may not have happened."""

    code = common_pb2.REQUEST_TIMED_OUT


class NotEnoughReplicas(RetriableError):
    """Fewer in-sync replicas than `min.insync.replicas`; nothing was appended."""

    code = common_pb2.NOT_ENOUGH_REPLICAS


class NotEnoughReplicasAfterAppend(RetriableError):
    """Appended, but the in-sync replicas then became fewer than `min.insync.replicas`; a retry may duplicate."""

    code = common_pb2.NOT_ENOUGH_REPLICAS_AFTER_APPEND


class NotController(RetriableError):
    """This node is not the active controller."""

    code = common_pb2.NOT_CONTROLLER


class UnknownOutcome(RetriableError):
    """The command may or may not be committed; asked again with the same client id and sequence it tells."""

    code = common_pb2.UNKNOWN_OUTCOME


class DuplicateBrokerRegistration(RetriableError):
    """Another process with this broker id is alive, or was so recently that it may still be."""

    code = common_pb2.DUPLICATE_BROKER_REGISTRATION


class EligibleLeadersNotAvailable(RetriableError):
    """No replica that has every committed record is up."""

    code = common_pb2.ELIGIBLE_LEADERS_NOT_AVAILABLE


class PreferredLeaderNotAvailable(RetriableError):
    """The partition's first replica is not up, or not in sync."""

    code = common_pb2.PREFERRED_LEADER_NOT_AVAILABLE


class StorageError(RetriableError):
    """The log directory of the partition is offline on this broker."""

    code = common_pb2.STORAGE_ERROR


class StorageFull(RetriableError):
    """No space is left in the log directory; reads go on, writes resume when there is space again."""

    code = common_pb2.STORAGE_FULL


class BrokerOverloaded(RetriableError):
    """A bound of the broker (streams, memory, connections) is reached; try later or elsewhere."""

    code = common_pb2.BROKER_OVERLOADED


class ShuttingDown(RetriableError):
    """The broker is stopping."""

    code = common_pb2.SHUTTING_DOWN


class ChainBroken(RetriableError):
    """An earlier batch of the same partition and stream was refused; sent again in order it may succeed."""

    code = common_pb2.CHAIN_BROKEN


class BrokerUnavailable(RetriableError):
    """No connection to the broker. Never travels: the client finds out by itself."""


class FencedLeaderEpoch(FencedError):
    """The leader epoch of the request is older than the partition's; refresh metadata."""

    code = common_pb2.FENCED_LEADER_EPOCH


class FencedController(FencedError):
    """The command was proposed in a controller epoch that is over; it changed nothing."""

    code = common_pb2.STALE_CONTROLLER_EPOCH


class StaleBrokerEpoch(FencedError):
    """The broker has registered anew since, or was fenced; register again."""

    code = common_pb2.STALE_BROKER_EPOCH


class BrokerIdNotRegistered(FencedError):
    """The cluster does not know a broker of that id; register first."""

    code = common_pb2.BROKER_ID_NOT_REGISTERED


class InvalidTopic(InvalidRequestError):
    """The topic name is not allowed."""

    code = common_pb2.INVALID_TOPIC


class TopicAlreadyExists(InvalidRequestError):
    """A topic of that name is there already."""

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
    """The magic of a batch, or the format of a file, is newer than this version reads."""

    code = common_pb2.UNSUPPORTED_VERSION


class InvalidReplicaAssignment(InvalidRequestError):
    """The list of replicas is empty, names a broker twice, or one that is not registered."""

    code = common_pb2.INVALID_REPLICA_ASSIGNMENT


class InvalidUpdateVersion(InvalidRequestError):
    """The partition has changed since: its partition epoch is another one."""

    code = common_pb2.INVALID_UPDATE_VERSION


class IneligibleReplica(InvalidRequestError):
    """A replica that is fenced, shutting down, or of another broker epoch cannot join the ISR (KIP-903)."""

    code = common_pb2.INELIGIBLE_REPLICA


class ElectionNotNeeded(InvalidRequestError):
    """The partition has the leader already that was asked for."""

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
    """The other side has another list of voters, or is another node than was expected there."""

    code = common_pb2.INCONSISTENT_VOTERS


class ClosedError(InvalidRequestError):
    """The client object was closed before. Never travels."""

    code = None


class InvalidRecord(CorruptRecordError):
    """A batch that parses but contradicts itself: counts, offsets, timestamps."""

    code = common_pb2.INVALID_RECORD


class BatchTooExpansive(CorruptRecordError):
    """A compressed batch that claims to inflate beyond the limits."""

    code = common_pb2.BATCH_TOO_EXPANSIVE


class UnsupportedCompression(CorruptRecordError):
    """The codec number is not assigned."""

    code = common_pb2.UNSUPPORTED_COMPRESSION_TYPE


class BufferExhausted(RaftlogError):
    """`buffer.memory` stayed full for `max.block.ms`. Never travels."""


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


def from_wire(error: common_pb2.Error) -> RaftlogError:
    """Return the exception for an error value; an unknown code becomes `InternalError` that names it."""
    cls = _BY_CODE.get(error.code)
    if cls is None:
        return InternalError(f"unknown error code {error.code}: {error.message}")
    if cls is NotLeader:
        hint = error.leader if error.HasField("leader") else None
        if hint is None:
            return NotLeader(error.message)
        return NotLeader(error.message, hint.leader_id, hint.leader_epoch, hint.host, hint.port)
    return cls(error.message)


def to_wire(error: BaseException) -> common_pb2.Error:
    """Return the error value for an exception; one that has no wire code travels as `INTERNAL`."""
    code = error.code if isinstance(error, RaftlogError) else None
    if code is None:
        return common_pb2.Error(code=common_pb2.INTERNAL, message=f"{type(error).__name__}: {error}")
    wire = common_pb2.Error(code=code, message=str(error))  # type: ignore[arg-type] # int of a known enum value
    if isinstance(error, NotLeader) and error.leader_epoch >= 0:
        wire.leader.leader_id = error.leader_id
        wire.leader.leader_epoch = error.leader_epoch
        wire.leader.host, wire.leader.port = error.host, error.port
    return wire
