"""Checks of requests for transactions, before anything else is done with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from broker.coordinator.groups.checks import check_group_id
from broker.coordinator.groups.topics import TopicPartition
from broker.coordinator.transactions import records
from raftlog.errors import InvalidRequestError, InvalidTransactionTimeout
from raftlog.v1 import group_pb2, transaction_pb2

MAX_ID: Final = 255
MAX_ATTEMPT: Final = 255
MAX_TARGET: Final = 1024
MAX_PARTITIONS: Final = 10_000
"""The most partitions of a transaction or a stage."""
MAX_GROUPS: Final = 1_000
"""Of a transaction."""
MAX_STAGES: Final = 10_000
"""The most stages of a sink that are open or lack markers.

A batch is one record, so it is decided in one go: 3 to 6 microseconds of the event loop for each stage, some 5 ms for
2 000, and 30 to 60 ms for as many as this. Nothing else of a sink is done for all of its stages at once.
"""
MAX_NAMED: Final = 10_000
"""The most ids in one request of a tool."""


def check_id(what: str, value: str) -> None:
    """Check a transactional id, or a sink's: 1 to 255 characters.

    Raises:
        InvalidRequestError: it has another length.
    """
    if not 1 <= len(value) <= MAX_ID:
        raise InvalidRequestError(f"a {what} has 1 to {MAX_ID} characters, this one has {len(value)}")


def check_length(what: str, value: str, most: int) -> None:
    """Check the length of a text.

    Raises:
        InvalidRequestError: it is too long.
    """
    if len(value) > most:
        raise InvalidRequestError(f"{what} has {len(value)} characters, at most {most}")


def check_fence(request: transaction_pb2.AbortStagesRequest) -> None:
    """Check a fence: attempts at a batch, named by a prefix.

    Raises:
        InvalidRequestError: no attempt can have this prefix or batch.
    """
    check_length("what attempts begin with", request.fenced_attempts, MAX_ATTEMPT)
    check_batch_id(request.batch_id)


def check_batch_id(batch_id: int) -> None:
    """Check a batch's number, which begins with 0.

    Raises:
        InvalidRequestError: it is negative.
    """
    if batch_id < 0:
        raise InvalidRequestError(f"a batch id is 0 or above, not {batch_id}")


def check_timeout(timeout_ms: int, max_timeout_ms: int) -> None:
    """Check a transaction's timeout.

    Raises:
        InvalidTransactionTimeout: 0, or above transaction.max.timeout.ms.
    """
    if not 1 <= timeout_ms <= max_timeout_ms:
        raise InvalidTransactionTimeout(
            f"the timeout of a transaction is {timeout_ms} ms; it may be 1 to {max_timeout_ms} "
            "(transaction.max.timeout.ms)"
        )


def check_named(what: str, count: int, most: int) -> None:
    """Check the number of names in a request, before any work is done on them.

    Raises:
        InvalidRequestError: too many.
    """
    if count > most:
        raise InvalidRequestError(f"the request names {count} {what}, it may name {most}")


def count_of(topics: Iterable[group_pb2.TopicPartitions]) -> int:
    """Return how many partitions a request names."""
    return sum(len(topic.partitions) for topic in topics)


def read_partitions(topics: Collection[group_pb2.TopicPartitions]) -> frozenset[TopicPartition]:
    """Return the partitions that a request names.

    Raises:
        InvalidRequestError: too many, or they are named in a way that none can be.
    """
    check_named("topics", len(topics), MAX_PARTITIONS)
    count = count_of(topics)
    if count > MAX_PARTITIONS:
        raise InvalidRequestError(f"the request names {count} partitions, a transaction may have {MAX_PARTITIONS}")
    try:
        return records.read_partitions(topics)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def check_count(what: str, count: int, most: int) -> None:
    """Check the number of partitions of a transaction.

    Raises:
        InvalidRequestError: too many.
    """
    if count > most:
        raise InvalidRequestError(f"the transaction would have {count} {what}, it may have {most}")


def read_groups(group_ids: Collection[str]) -> frozenset[str]:
    """Return the groups that a request names.

    Raises:
        InvalidRequestError: too many. InvalidGroupId: a name that no group has.
    """
    check_named("groups", len(group_ids), MAX_GROUPS)
    found = frozenset(group_ids)
    for group_id in found:
        check_group_id(group_id)
    return found
