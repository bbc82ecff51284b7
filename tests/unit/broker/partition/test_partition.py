"""A partition with idempotent producers and with transactions: what is appended, answered and refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.producer_state import Duplicate
from broker.log.transactions import NO_COORDINATOR
from broker.partition.leader_term import MAX_DENIED
from broker.partition.partition import ActiveProducer, Partition
from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas.heavy_work import HeavyWork
from broker.turns import SharedTurns
from raftlog.errors import (
    BrokerOverloaded,
    DuplicateSequence,
    FencedLeaderEpoch,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    NotEnoughReplicas,
    NotLeader,
    OutOfOrderSequence,
    RaftlogError,
    UnknownProducerId,
)
from raftlog.format import Attributes, BatchHeader, iter_headers, parse_header
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker, decode_control
from raftlog.format.wire import Produce
from raftlog.v1 import common_pb2, log_pb2
from replication.leader import Membership
from replication.ports import Accepted, Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, ProduceWriter, Requests, image_with
from tests.support.raw_client import RawClient
from tests.support.replica_link import settle

Answers = list[BaseException | None]
FOLLOWER = Replica(2, 1)


def on_change() -> None:
    """A stream that need not look."""


def batch(sequence: int, records: int = 1, *, epoch: int = 0, producer_id: int = 7, **fields: Any) -> bytes:
    values = [b"%d" % (sequence + number) for number in range(records)]
    return batch_of(
        *values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, timestamp_ms=5, **fields
    )


def produce(
    partition: Partition, sequence: int, records: int = 1, *, all_replicas: bool = True, **fields: Any
) -> tuple[tuple[int, int], Answers]:
    """Append; return the offset and time given, and the answers, which may come later."""
    answers: Answers = []
    data = batch(sequence, records, **fields)
    result = partition.append(data, partition.leader_epoch, answers.append, all_replicas=all_replicas)
    return result, answers


def open_follower(partition: Partition) -> None:
    """Take a follower on that has everything."""
    end = partition.log_end_offset
    answer = partition.open_replica(
        FOLLOWER,
        leader_epoch=partition.leader_epoch,
        fetch_offset=end,
        last_fetched_epoch=partition.log.leader_epochs.latest_epoch,
        durable_end_offset=end,
        on_change=on_change,
    )
    assert answer == Accepted()


def followed(partition: Partition) -> None:
    """The follower has everything now."""
    partition.replica_acked(FOLLOWER, on_change, partition.log_end_offset)


def run(tmp_path: Path, scenario: Callable[[Parts, Partition], Awaitable[None]], *, replicas: int = 2) -> None:
    """Run with partition 0 led by node 1; all replicas are in sync, none has been heard of."""

    async def main() -> None:
        parts = Parts(tmp_path)
        everyone = tuple(range(1, replicas + 1))
        parts.image = image_with(1, offset=1, replicas=everyone, isr=everyone)
        async with parts:
            partition = parts.registry.find(TOPIC_ID, 0)
            partition.lead(3, Membership(everyone, everyone, 1, replicas))
            await scenario(parts, partition)

    asyncio.run(main())


def test_a_batch_that_is_sent_again_gets_the_first_answer_again(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        produce(partition, 0, 2)
        produce(partition, 2, 3)
        await settle()
        for all_replicas in (True, False):
            (offset, timestamp_ms), answers = produce(partition, 0, 2, all_replicas=all_replicas)
            assert (offset, timestamp_ms, answers) == (0, -1, [None])
        assert partition.append(batch(2, 3), 3, None) == (2, -1)
        assert partition.log_end_offset == 5

    run(tmp_path, scenario, replicas=1)


def test_the_append_time_is_that_of_the_first_time(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        partition.log.update_config(LogConfig(message_timestamp_type="LogAppendTime"))
        (_, first_ms), _ = produce(partition, 0)
        assert first_ms > 1_000_000
        await asyncio.sleep(0.01)
        assert produce(partition, 0)[0] == (0, first_ms)

    run(tmp_path, scenario, replicas=1)


def test_it_is_answered_when_the_first_copy_is_committed(tmp_path: Path) -> None:
    """Also when others wait for more already; and with acks=1 as soon as the leader holds it."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        open_follower(partition)
        _, first = produce(partition, 0)
        _, later = produce(partition, 1)
        result, again = produce(partition, 0)
        assert result == (0, -1)
        await settle()
        assert (first, later, again) == ([], [], [])
        partition.replica_acked(FOLLOWER, on_change, 1)
        assert (first, later, again) == ([None], [], [None])
        _, single = produce(partition, 1, all_replicas=False)
        assert single == [None]
        followed(partition)
        assert later == [None]

    run(tmp_path, scenario)


def test_with_acks_1_it_waits_for_the_disk(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.disk.held = True
        produce(partition, 0)
        _, again = produce(partition, 0, all_replicas=False)
        await settle()
        assert again == []
        parts.disk.release()
        await settle()
        assert again == [None]

    run(tmp_path, scenario, replicas=1)


def test_what_was_appended_long_before_is_said_when_all_of_it_is_committed(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        open_follower(partition)
        for sequence in range(6):
            produce(partition, sequence)
        result, answers = produce(partition, 0)
        await settle()
        assert result == (-1, -1)
        assert answers == []
        followed(partition)
        assert isinstance(answers[0], DuplicateSequence)
        assert "t-0" in str(answers[0])
        with pytest.raises(DuplicateSequence):
            partition.append(batch(0), 3, None)
        assert partition.log_end_offset == 6

    run(tmp_path, scenario)


def test_who_is_forgotten_while_it_is_answered_hears_it_when_all_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Housekeeping forgets idle producers in another thread, also right after this one was looked up."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        open_follower(partition)
        for sequence in range(6):
            produce(partition, sequence)
        log = partition.log
        check = log.check_producer

        def check_and_forget(header: BatchHeader, now_ms: int, session_epoch: int) -> Duplicate | None:
            try:
                return check(header, now_ms, session_epoch)
            finally:
                log.expire_producers(now_ms + 2 * log.producers.limits.expiration_ms)

        monkeypatch.setattr(log, "check_producer", check_and_forget)
        result, answers = produce(partition, 0)
        assert log.producers.get(7) is None
        await settle()
        assert (result, answers) == ((-1, -1), [])
        followed(partition)
        assert isinstance(answers[0], DuplicateSequence)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"sequence": 3}, OutOfOrderSequence),
        ({"sequence": 1, "epoch": 1}, OutOfOrderSequence),
        ({"sequence": 1, "producer_id": 8}, UnknownProducerId),
        ({"sequence": 0, "epoch": -5}, InvalidRecord),
        ({"sequence": -7}, InvalidRecord),
        ({"sequence": 0, "producer_id": -2}, InvalidRecord),
        ({"sequence": 4, "epoch": -1, "producer_id": -1}, InvalidRecord),
        ({"sequence": -1, "epoch": 2, "producer_id": -1}, InvalidRecord),
    ],
)
@pytest.mark.parametrize("answered", [True, False])
def test_what_is_refused_changes_nothing(
    tmp_path: Path, fields: dict[str, int], refusal: type[Exception], answered: bool
) -> None:
    """With any acks."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        produce(partition, 0)
        answers: Answers = []
        with pytest.raises(refusal):
            partition.append(batch(**fields), 3, answers.append if answered else None, all_replicas=answered)
        assert answers == []
        assert partition.log_end_offset == 1
        assert produce(partition, 0)[0] == (0, -1)

    run(tmp_path, scenario, replicas=1)


def test_a_new_leader_denies_nothing_until_all_in_sync_have_opened(tmp_path: Path) -> None:
    """Not even where its high watermark says that its term is confirmed."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        partition.check_confirmed()
        with pytest.raises(LeaderNotAvailable, match="a replica in sync may have the missing batch"):
            produce(partition, 1)
        open_follower(partition)
        with pytest.raises(UnknownProducerId):
            produce(partition, 1)
        produce(partition, 0, epoch=1)
        partition.lead(4, Membership((1, 2), (1, 2), 2, 2))
        for sequence, epoch in ((2, 1), (0, 0)):
            with pytest.raises(LeaderNotAvailable):
                produce(partition, sequence, epoch=epoch)
        open_follower(partition)
        await settle()
        with pytest.raises(OutOfOrderSequence):
            produce(partition, 2, epoch=1)
        with pytest.raises(InvalidProducerEpoch):
            produce(partition, 0)

    run(tmp_path, scenario)


def test_with_too_few_in_sync_nothing_is_denied(tmp_path: Path) -> None:
    """Replicas outside of the ISR may be elected then (KIP-966)."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        open_follower(partition)
        partition.lead(3, Membership((1, 2), (1,), 2, 2))
        with pytest.raises(NotEnoughReplicas):
            produce(partition, 1)
        with pytest.raises(LeaderNotAvailable):
            produce(partition, 1, all_replicas=False)

    run(tmp_path, scenario)


def test_a_refusal_stays_true(tmp_path: Path) -> None:
    """The producer numbers anew after it, so that no late copy of its epoch may get in, also in order."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        produce(partition, 0)
        with pytest.raises(OutOfOrderSequence):
            produce(partition, 2)
        for sequence in (1, 2):
            with pytest.raises(OutOfOrderSequence):
                produce(partition, sequence)
        assert produce(partition, 0)[0] == (0, -1), "a batch that is in the log must still be acknowledged"
        assert produce(partition, 0, epoch=1)[0] == (1, -1)
        assert produce(partition, 1, epoch=1)[0] == (2, -1)
        with pytest.raises(InvalidProducerEpoch):
            produce(partition, 1)

    run(tmp_path, scenario, replicas=1)


def test_what_is_remembered_of_refusals_is_bounded(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        leading = partition._leading
        assert leading is not None
        for producer_id in range(MAX_DENIED + 1):
            leading.deny(producer_id, 3)
        assert len(leading._denied) == MAX_DENIED
        assert leading.has_denied(MAX_DENIED, 3)
        assert not leading.has_denied(MAX_DENIED, 4)
        leading.deny(MAX_DENIED, 1)
        assert leading.has_denied(MAX_DENIED, 3)

    run(tmp_path, scenario, replicas=1)


def test_on_a_stream_repetitions_are_answered_like_the_first_time(tmp_path: Path) -> None:
    """And what was appended long before by name; neither is appended, and the stream lives on."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        requests, writer = Requests[Produce](), ProduceWriter()
        session = ProduceSession(
            parts.registry, SharedTurns(TURN_BYTES), HeavyWork(parts.disk), max_in_flight=100, default_timeout_ms=30_000
        )
        running = asyncio.create_task(session.run(requests.__aiter__(), writer))
        sent = [*((sequence, 0) for sequence in (*range(7), 3, 6, 0, 9)), (0, 1)]
        for number, (sequence, epoch) in enumerate(sent):
            part = (TOPIC_ID, 0, 3, number, batch(sequence, epoch=epoch))
            requests.send(RawClient.request(number, [part], log_pb2.ALL))
        responses = await writer.wait_for(len(sent))
        requests.end()
        await running
        results = {response.correlation_id: response.results[0] for response in responses}
        offsets = [results[number].base_offset for number in range(len(sent))]
        assert offsets == [*range(7), 3, 6, -1, -1, 7]
        assert results[9].error.code == common_pb2.DUPLICATE_SEQUENCE_NUMBER
        assert results[10].error.code == common_pb2.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert partition.log_end_offset == 8

    run(tmp_path, scenario, replicas=1)


def test_what_was_appended_long_before_leaves_its_chain_whole(tmp_path: Path) -> None:
    """The client takes it for a success, so that what follows it need not be sent once more."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        requests, writer = Requests[Produce](), ProduceWriter()
        session = ProduceSession(
            parts.registry, SharedTurns(TURN_BYTES), HeavyWork(parts.disk), max_in_flight=100, default_timeout_ms=30_000
        )
        running = asyncio.create_task(session.run(requests.__aiter__(), writer))
        for number, sequence in enumerate([*range(6), 0, 6]):
            chain = 0 if number < 6 else 1
            requests.send(RawClient.request(number, [(TOPIC_ID, 0, 3, chain, batch(sequence))], log_pb2.ALL))
            await writer.wait_for(number + 1)  # so that the refusal is there before what follows it
        responses = await writer.wait_for(8)
        requests.end()
        await running
        results = {response.correlation_id: response.results[0] for response in responses}
        assert results[6].error.code == common_pb2.DUPLICATE_SEQUENCE_NUMBER
        assert (results[7].error.code, results[7].base_offset) == (common_pb2.NONE, 6)

    run(tmp_path, scenario, replicas=1)


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
        assert partition.log_end_offset == 2, "a repeated marker must not be appended"
        assert partition.last_stable_offset == 0
        followed(partition)
        await settle()
        assert answers == again == [[None]]
        assert partition.last_stable_offset == partition.high_watermark == 2
        assert mark(partition, ended()) == [[None]], "a marker that is committed must be acknowledged at once"
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
        assert isinstance(refusal, InvalidTxnState), (
            "a marker that contradicts the decision must be refused, not taken for a repetition"
        )
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
        assert mark(partition, ended(commit=False)) == [[None]], (
            "a marker must be acknowledged if a coordinator sends one after all"
        )
        [[refusal]] = mark(partition, ended())
        assert isinstance(refusal, InvalidTxnState)
        assert "has aborted the transaction here" in str(refusal)
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
        assert partition.last_stable_offset == 0, "a late marker of the previous transaction must not end this one"
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
    assert "no coordinator decides on the earlier one" in caplog.text


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
        assert woken == [2], "the reader must be woken, as the log has no records of the open transaction any more"

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
