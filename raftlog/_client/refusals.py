"""What the codes say with which brokers refuse a batch."""

from __future__ import annotations

from typing import Final

from raftlog.v1 import common_pb2

LEADER_ERRORS: Final = frozenset(
    {
        common_pb2.NOT_LEADER_OR_FOLLOWER,
        common_pb2.FENCED_LEADER_EPOCH,
        common_pb2.UNKNOWN_LEADER_EPOCH,
        common_pb2.UNKNOWN_TOPIC_ID,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.LEADER_NOT_AVAILABLE,
        common_pb2.STORAGE_ERROR,
        common_pb2.SHUTTING_DOWN,
    }
)
"""Somebody else may lead."""
CERTAIN: Final = frozenset(
    {
        common_pb2.FENCED_LEADER_EPOCH,
        common_pb2.UNKNOWN_LEADER_EPOCH,
        common_pb2.UNKNOWN_TOPIC_ID,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.LEADER_NOT_AVAILABLE,
        common_pb2.NOT_ENOUGH_REPLICAS,
        common_pb2.STORAGE_FULL,
        common_pb2.BROKER_OVERLOADED,
    }
)
"""With these a broker says that it has appended nothing. Others, NotLeader too, may come after the append."""
