"""Offsets of a group that a transaction commits, or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raftlog import GroupMetadata, OffsetAndMetadata, TopicPartition
from raftlog.errors import (
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    FencedMemberEpoch,
    InvalidRequestError,
    InvalidTxnState,
    NotLeader,
    StaleMemberEpoch,
    TransactionAbortable,
)
from raftlog.v1 import group_pb2
from tests.support.fake_transactions import TransactionCluster
from tests.support.transactional_producers import ADD, make, transaction_cluster


@pytest.fixture
def cluster() -> Iterator[TransactionCluster]:
    with transaction_cluster() as cluster:
        yield cluster


GROUP = GroupMetadata("readers", "m-1", 5)


def test_offsets_count_with_the_transaction(cluster: TransactionCluster) -> None:
    group = cluster.groups.add("readers")
    part = TopicPartition("in", 0)
    with make(cluster) as producer:
        with producer.transaction():
            producer.send("t", b"a", partition=0)
            producer.send_offsets_to_transaction({part: 5}, GROUP)
            producer.send_offsets_to_transaction({part: OffsetAndMetadata(6, "why", 3)}, GROUP)
            assert group.pending == {part}
            assert group.offsets == {}
        assert group.offsets[part] == group_pb2.CommitOffset(
            topic="in", partition=0, offset=6, metadata="why", leader_epoch=3
        )
        with pytest.raises(KeyError), producer.transaction():
            producer.send_offsets_to_transaction({part: 7}, "readers")
            raise KeyError("application")
    assert group.offsets[part].offset == 6
    assert group.pending == set()
    added = [request.group_ids for method, request in cluster.transactions.calls if method == ADD]  # type: ignore[attr-defined]
    assert [list(each) for each in added if each] == [["readers"], ["readers"]]


def test_offsets_alone_are_a_transaction(cluster: TransactionCluster) -> None:
    group = cluster.groups.add("readers")
    with make(cluster) as producer, producer.transaction():
        producer.send_offsets_to_transaction({TopicPartition("in", 0): 5}, GROUP)
        producer.send_offsets_to_transaction({}, GROUP)
    assert group.offsets[TopicPartition("in", 0)].offset == 5


def test_offsets_are_retried_and_the_group_s_coordinator_is_found_again(cluster: TransactionCluster) -> None:
    group = cluster.groups.add("readers", coordinator=2)
    with make(cluster) as producer:
        cluster.groups.refuse = [CoordinatorNotAvailable("nobody"), ConcurrentTransactions("wait"), NotLeader("no")]
        cluster.groups.mislaid_answers = 1
        with producer.transaction():
            producer.send_offsets_to_transaction({TopicPartition("in", 0): 5}, GROUP)
        cluster.groups.move("readers", 1)
        with producer.transaction():
            producer.send_offsets_to_transaction({TopicPartition("in", 0): 6}, GROUP)
    assert group.offsets[TopicPartition("in", 0)].offset == 6


@pytest.mark.parametrize("refusal", [FencedMemberEpoch("join again"), StaleMemberEpoch("epoch 6 has begun")])
def test_a_member_that_is_over_can_only_abort(cluster: TransactionCluster, refusal: Any) -> None:
    group = cluster.groups.add("readers")
    with make(cluster) as producer:
        producer.begin_transaction()
        producer.send("t", b"a", partition=0)
        cluster.groups.refuse = [refusal]
        with pytest.raises(type(refusal)):
            producer.send_offsets_to_transaction({TopicPartition("in", 0): 5}, GROUP)
        with pytest.raises(TransactionAbortable, match=str(refusal)):
            producer.commit_transaction()
        producer.abort_transaction()
    assert cluster.committed("t") == []
    assert group.offsets == {}


def test_offsets_belong_to_a_transaction_and_to_a_group(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        with pytest.raises(InvalidTxnState, match="no transaction is open"):
            producer.send_offsets_to_transaction({TopicPartition("in", 0): 5}, GROUP)
        producer.begin_transaction()
        for group in ("", None, 5):
            with pytest.raises(InvalidRequestError, match=r"consumer\.group_metadata"):
                producer.send_offsets_to_transaction({TopicPartition("in", 0): 5}, group)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="has no offset -1"):
            producer.send_offsets_to_transaction({TopicPartition("in", 0): -1}, GROUP)
        producer.abort_transaction()
