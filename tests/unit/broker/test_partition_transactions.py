"""A partition and transactions: what is produced into it, which markers are appended, and when they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.log.transactions import NO_COORDINATOR
from broker.partition import Partition
from broker.partition_transactions import ActiveProducer
from raftlog.errors import (
    BrokerOverloaded,
    FencedLeaderEpoch,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    NotEnoughReplicas,
    NotLeader,
    RaftlogError,
)
from raftlog.format import Attributes, iter_headers, parse_header
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker, decode_control
from replication.leader import Membership
from tests.support.broker_parts import Parts
from tests.support.replica_link import settle
from tests.unit.broker.test_idempotence import Answers, batch, followed, open_follower, produce, run

TRANSACTIONAL = int(Attributes.TRANSACTIONAL)
MarkerAnswers = list[list[RaftlogError | None]]


def send(partition: Partition, sequence: int, **fields: Any) -> tuple[tuple[int, int], Answers]:
    """Append one record of a transaction."""
    return produce(partition, sequence, attributes=TRANSACTIONAL, **fields)


def mark(partition: Partition, *markers: Marker, leader_epoch: int = -1) -> MarkerAnswers:
    """Append markers; return the answers, which may come later."""
    answers: MarkerAnswers = []
    partition.append_markers(markers, leader_epoch, answers.append)
    return answers


def ended(producer_id: int = 7, epoch: int = 1, *, commit: bool = True) -> Marker:
    return Marker(producer_id, epoch, commit, 0)


def batches(partition: Partition) -> Sequence[Any]:
    read = partition.log.read(partition.log_start_offset, 1 << 20, partition.log_end_offset, blocking=True)
    assert read is not None
    return [(header, read.records[at : at + header.size]) for at, header in iter_headers(read.records)]


# Produce


def test_a_transactional_batch_needs_all_replicas(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        with pytest.raises(InvalidRecord, match="acks=all"):
            send(partition, 0, all_replicas=False)
        assert partition.log_end_offset == 0
        send(partition, 0)
        assert partition.log_end_offset == 1

    run(tmp_path, scenario, replicas=1)


def test_internal_topics_have_no_transactions(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        partition.is_internal = True
        with pytest.raises(InvalidRecord, match="internal"):
            send(partition, 0)
        with pytest.raises(InvalidRequestError, match="internal"):
            mark(partition, ended())
        assert partition.log_end_offset == 0

    run(tmp_path, scenario, replicas=1)


@pytest.mark.parametrize("fields", [{"epoch": 1}, {"attributes": 0, "sequence": 1}])
def test_what_is_no_part_of_the_open_transaction_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """And is not taken for a loss, after which the producer would number anew."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        send(partition, 0)
        given = {"sequence": 0, "attributes": TRANSACTIONAL} | fields
        with pytest.raises(LeaderNotAvailable, match="transaction"):
            produce(partition, **given)
        open_follower(partition)
        followed(partition)
        await settle()
        with pytest.raises(InvalidTxnState, match="transaction"):
            produce(partition, **given)
        send(partition, 1)
        mark(partition, ended())
        send(partition, 0, epoch=1)
        assert partition.log_end_offset == 4

    run(tmp_path, scenario)


def test_a_late_batch_of_an_ended_transaction_is_refused(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        send(partition, 0)
        mark(partition, ended())
        await settle()
        for sequence in (0, 1):
            with pytest.raises(InvalidProducerEpoch):
                send(partition, sequence)
        send(partition, 0, epoch=1)

    run(tmp_path, scenario, replicas=1)


# Markers


def test_markers_go_into_one_control_batch_with_where_their_transactions_begin(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        send(partition, 0)
        send(partition, 1)
        send(partition, 0, producer_id=8)
        answers = mark(partition, ended(8, commit=False), ended(), ended(9))
        await settle()
        assert answers == [[None, None, None]]
        header, data = batches(partition)[-1]
        assert header.is_control
        assert header.leader_epoch == 3
        assert header.base_offset == 3
        assert decode_control(data) == [
            Marker(8, 1, False, 0, 2),
            Marker(7, 1, True, 0, 0),
            Marker(9, 1, True, 0, -1),
        ]
        assert partition.log.aborted_transactions(0, 6) == [(8, 2, 3, 0)]

    run(tmp_path, scenario, replicas=1)


def test_markers_are_answered_when_they_are_committed(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        open_follower(partition)
        send(partition, 0)
        answers = mark(partition, ended())
        again = mark(partition, ended())
        await settle()
        assert answers == again == []
        assert partition.log_end_offset == 2, "a repeat is not appended"
        assert partition.last_stable_offset == 0
        followed(partition)
        await settle()
        assert answers == again == [[None]]
        assert partition.last_stable_offset == partition.high_watermark == 2
        assert mark(partition, ended()) == [[None]], "at once"
        assert partition.log_end_offset == 2

    run(tmp_path, scenario)


def test_a_late_marker_touches_nothing(tmp_path: Path) -> None:
    """Of the transaction before (KIP-890): not the one that is open now."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        send(partition, 0)
        mark(partition, ended())
        send(partition, 0, epoch=1)
        await settle()
        assert mark(partition, ended()) == [[None]]
        [[refusal]] = mark(partition, ended(commit=False))
        assert isinstance(refusal, InvalidTxnState), "the other decision is no repeat"
        (late,) = mark(partition, ended(epoch=0, commit=False), ended(epoch=1))
        assert [type(error) for error in late] == [InvalidProducerEpoch, type(None)]
        assert partition.log_end_offset == 3
        assert partition.last_stable_offset == 2
        answers = mark(partition, ended(epoch=1), ended(epoch=0), ended(epoch=2), ended(8))
        await settle()
        assert [type(error) for error in answers[0]] == [type(None), InvalidProducerEpoch, type(None), type(None)]
        assert partition.log_end_offset == 5
        assert partition.last_stable_offset == 5

    run(tmp_path, scenario, replicas=1)


def test_who_waits_for_markers_hears_that_the_term_is_over(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        open_follower(partition)
        send(partition, 0)
        fresh = mark(partition, ended(), ended(8))
        repeated = mark(partition, ended())
        partition.follow(4, 2, NotLeader("node 2 leads"))
        assert [[type(error) for error in errors] for errors in fresh + repeated] == [[NotLeader] * 2, [NotLeader]]
        with pytest.raises(NotLeader):
            mark(partition, ended())

    run(tmp_path, scenario)


def test_markers_are_refused_as_batches_are(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        with pytest.raises(FencedLeaderEpoch):
            mark(partition, ended(), leader_epoch=2)
        for wrong in (Marker(-1, 0, True, 0), Marker(7, -1, True, 0), Marker(7, 32_768, True, 0)):
            with pytest.raises(InvalidRequestError):
                mark(partition, ended(), wrong)
        partition.lead(3, Membership((1, 2), (1,), 2, 2))
        with pytest.raises(NotEnoughReplicas):
            mark(partition, ended())
        assert partition.log_end_offset == 0

    run(tmp_path, scenario)


def test_no_markers_are_answered_with_nothing(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        assert mark(partition) == [[]]

    run(tmp_path, scenario, replicas=1)


# Tools


def test_producers_are_described(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        send(partition, 0)
        produce(partition, 0, 3, producer_id=8, all_replicas=True)
        send(partition, 0, producer_id=9, epoch=2)
        mark(partition, ended(9, 3))
        seven, eight, nine = partition.describe_producers()
        assert seven == ActiveProducer(7, 0, 0, seven.last_append_ms, 0, seven.last_append_ms)
        assert eight == ActiveProducer(8, 0, 2, eight.last_append_ms, -1, 0)
        assert nine == ActiveProducer(9, 3, -1, nine.last_append_ms, -1, 0)
        assert seven.last_append_ms > 1_000_000

    run(tmp_path, scenario, replicas=1)


def test_a_hanging_transaction_is_aborted_if_it_is_the_one_that_is_meant(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        produce(partition, 0, producer_id=8)
        send(partition, 0)
        await settle()
        answers: Answers = []
        for named in ((7, 0, 0), (7, 1, 1), (8, 0, 0), (9, 0, 1)):
            with pytest.raises(InvalidTxnState, match="describe"):
                partition.abort_hanging(*named, answers.append)
        assert partition.last_stable_offset == 1
        partition.abort_hanging(7, 0, 1, answers.append)
        await settle()
        assert answers == [None]
        assert partition.last_stable_offset == 3
        assert partition.log.aborted_transactions(0, 3) == [(7, 1, 2, 3)]
        assert mark(partition, ended(commit=False)) == [[None]], "should a coordinator know of it after all"
        [[refusal]] = mark(partition, ended())
        assert isinstance(refusal, InvalidTxnState)
        assert "was aborted here" in str(refusal)
        with pytest.raises(InvalidTxnState):
            partition.abort_hanging(7, 0, 1, answers.append)

    run(tmp_path, scenario, replicas=1)


def test_a_transaction_of_the_last_epoch_is_refused(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        with pytest.raises(InvalidRecord, match="used up"):
            send(partition, 0, epoch=MAX_PRODUCER_EPOCH)
        produce(partition, 0, epoch=MAX_PRODUCER_EPOCH, producer_id=8)
        send(partition, 0, epoch=MAX_PRODUCER_EPOCH - 1)
        assert mark(partition, ended(epoch=MAX_PRODUCER_EPOCH)) == []
        await settle()
        assert partition.last_stable_offset == partition.high_watermark == 3

    run(tmp_path, scenario, replicas=1)


def test_a_transaction_of_the_last_epoch_that_is_there_can_be_aborted(tmp_path: Path) -> None:
    """By an earlier version it was taken."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        old = batch(0, epoch=MAX_PRODUCER_EPOCH, attributes=TRANSACTIONAL)
        partition.log.append(old, parse_header(old), leader_epoch=partition.leader_epoch, now_ms=0)
        produce(partition, 0, producer_id=8)
        await settle()
        assert partition.last_stable_offset == 0
        mark(partition, ended(epoch=MAX_PRODUCER_EPOCH))
        await settle()
        assert partition.last_stable_offset == 0, "a late marker of the transaction before is none of this one"
        answers: Answers = []
        partition.abort_hanging(7, MAX_PRODUCER_EPOCH, 0, answers.append)
        await settle()
        assert answers == [None]
        assert partition.last_stable_offset == partition.high_watermark == 3
        assert partition.log.aborted_transactions(0, 3) == [(7, 0, 2, 3)]

    run(tmp_path, scenario, replicas=1)


def test_a_marker_does_not_commit_an_earlier_transaction_that_nobody_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        send(partition, 0)
        mark(partition, ended(epoch=4))
        await settle()
        assert partition.last_stable_offset == partition.high_watermark == 3
        assert partition.log.aborted_transactions(0, 3) == [(7, 0, 1, 2)]
        markers = decode_control(batches(partition)[1][1])
        assert markers == [Marker(7, 1, False, NO_COORDINATOR, 0), Marker(7, 4, True, 0, -1)]
        assert partition.log.producers.get(7).epoch == 4  # type: ignore[union-attr] # it is known

    run(tmp_path, scenario, replicas=1)
    assert "nobody decides on the earlier one" in caplog.text


# Readers


def test_readers_of_committed_records_are_woken_when_the_marker_is_committed(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        open_follower(partition)
        send(partition, 0)
        followed(partition)
        await settle()
        assert (partition.last_stable_offset, partition.high_watermark) == (0, 1)
        woken: list[int] = []
        partition.wait(lambda: woken.append(partition.last_stable_offset))
        mark(partition, ended())
        await settle()
        assert woken == []
        followed(partition)
        await settle()
        assert woken == [2]

    run(tmp_path, scenario)


def test_readers_are_woken_when_what_they_wait_for_is_deleted(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        send(partition, 0)
        produce(partition, 0, producer_id=8)
        await settle()
        assert (partition.last_stable_offset, partition.high_watermark) == (0, 2)
        woken: list[int] = []
        partition.wait(lambda: woken.append(partition.last_stable_offset))
        partition.log.delete_records(partition.delete_target(-1))
        partition.log_start_moved()
        assert woken == [2], "the transaction is open still, but what is left of it is not here"

    run(tmp_path, scenario, replicas=1)


def test_the_bounds_of_producer_ids_hold_for_markers(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        limits = partition.log.producers.limits
        object.__setattr__(limits, "max_ids", 2)
        send(partition, 0)
        answers = mark(partition, ended(), ended(8), ended(9))
        await settle()
        assert [type(error) for error in answers[0]] == [type(None), type(None), BrokerOverloaded]

    run(tmp_path, scenario, replicas=1)
