"""Kafka's error codes for this broker's errors.

Kafka's number where Kafka has the condition (`raftlog.errors`). A condition that Kafka lacks gets the code at which
Kafka's clients do the right thing: look for the leader, try again, or fail. A wrong choice makes a client try for ever.
"""

from __future__ import annotations

from typing import Any, Final

from raftlog.errors import InternalError, RaftlogError, from_wire
from raftlog.v1 import common_pb2

NONE: Final = 0
UNKNOWN_SERVER_ERROR: Final = -1
UNKNOWN_TOPIC_OR_PARTITION: Final = 3
LEADER_NOT_AVAILABLE: Final = 5
NOT_LEADER_OR_FOLLOWER: Final = 6
REQUEST_TIMED_OUT: Final = 7
COORDINATOR_LOAD_IN_PROGRESS: Final = 14
COORDINATOR_NOT_AVAILABLE: Final = 15
NOT_ENOUGH_REPLICAS: Final = 19
INVALID_REQUIRED_ACKS: Final = 21
ILLEGAL_GENERATION: Final = 22
TOPIC_AUTHORIZATION_FAILED: Final = 29
GROUP_AUTHORIZATION_FAILED: Final = 30
UNSUPPORTED_SASL_MECHANISM: Final = 33
ILLEGAL_SASL_STATE: Final = 34
UNSUPPORTED_VERSION: Final = 35
INVALID_REQUEST: Final = 42
OUT_OF_ORDER_SEQUENCE_NUMBER: Final = 45
INVALID_PRODUCER_EPOCH: Final = 47
INVALID_PRODUCER_ID_MAPPING: Final = 49
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
OPERATION_NOT_ATTEMPTED: Final = 55
KAFKA_STORAGE_ERROR: Final = 56
SASL_AUTHENTICATION_FAILED: Final = 58
FETCH_SESSION_ID_NOT_FOUND: Final = 70
INVALID_FETCH_SESSION_EPOCH: Final = 71
LISTENER_NOT_FOUND: Final = 72
INVALID_RECORD: Final = 87
UNKNOWN_TOPIC_ID: Final = 100
STALE_MEMBER_EPOCH: Final = 113
FETCH_SESSION_TOPIC_ID_ERROR: Final = 106
INVALID_REGULAR_EXPRESSION: Final = 128

_OWN_FROM: Final = common_pb2.INTERNAL
"""The first of raftlog's own numbers."""
_FOR_OWN: Final[dict[int, int]] = {
    common_pb2.INTERNAL: UNKNOWN_SERVER_ERROR,
    common_pb2.STORAGE_FULL: KAFKA_STORAGE_ERROR,
    common_pb2.BATCH_TOO_EXPANSIVE: INVALID_RECORD,
    common_pb2.BROKER_OVERLOADED: REQUEST_TIMED_OUT,
    common_pb2.CHAIN_BROKEN: NOT_ENOUGH_REPLICAS,
    common_pb2.SHUTTING_DOWN: NOT_LEADER_OR_FOLLOWER,
    common_pb2.UNKNOWN_OUTCOME: REQUEST_TIMED_OUT,
    common_pb2.PARTITION_NOT_OWNED: STALE_MEMBER_EPOCH,
}
"""Codes with their meaning for a client; the others of raftlog's own stand for conditions that Kafka clients never
meet."""


def code_of(error: BaseException, *, by_name: bool = True, of_coordinator: bool = False) -> int:
    """Return Kafka's code for an error.

    `by_name`: the request names topics by name, so UNKNOWN_TOPIC_ID would tell the client nothing. `of_coordinator`:
    the request is one for a coordinator.
    """
    number = getattr(error, "code", None)
    if not isinstance(number, int):
        return UNKNOWN_SERVER_ERROR
    if number == common_pb2.UNKNOWN_TOPIC_ID:
        return UNKNOWN_TOPIC_OR_PARTITION if by_name else UNKNOWN_TOPIC_ID
    if number == common_pb2.SHUTTING_DOWN and of_coordinator:
        return COORDINATOR_NOT_AVAILABLE
    if number < _OWN_FROM:
        return number
    return _FOR_OWN.get(number, UNKNOWN_SERVER_ERROR)


def error_of(error: common_pb2.Error) -> RaftlogError:
    """Return the exception of an error in a gRPC service's answer."""
    return from_wire(error) if error.code else InternalError(error.message)


def code_in(answer: Any, *, of_coordinator: bool = False) -> int:
    """Return Kafka's code of the error in one answer among several; NONE: it has none."""
    return code_of(error_of(answer.error), of_coordinator=of_coordinator) if answer.HasField("error") else NONE
