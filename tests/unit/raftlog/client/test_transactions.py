"""Transactions of a producer against a scripted coordinator: whole or not at all, under every failure."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftlog import DelayQueue, GroupMetadata, OffsetAndMetadata, Producer, TopicPartition, aio
from raftlog._client import producer as transactions
from raftlog._client.background import loop_thread
from raftlog._client.options import ProducerOptions
from raftlog._core.delays import Outgoing
from raftlog._core.transaction_state import TransactionPhase
from raftlog._delay_queue import Mover, mover_config
from raftlog.errors import (
    BrokerUnavailable,
    ClosedError,
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    FencedMemberEpoch,
    InvalidConfig,
    InvalidPartitions,
    InvalidRequestError,
    InvalidTransactionTimeout,
    InvalidTxnState,
    MessageTooLarge,
    NotLeader,
    OutOfOrderSequence,
    ProducerFenced,
    RaftlogError,
    RequestTimedOut,
    StaleMemberEpoch,
    TransactionAbortable,
    UnsupportedVersion,
)
from raftlog.format import parse_header
from raftlog.v1 import group_pb2, transaction_pb2
from tests.support.deliveries import expire
from tests.support.fake_broker import FakeCluster
from tests.support.fake_transactions import LAST_EPOCH, TransactionCluster
from tests.support.transactional_producers import ADD, END, FAST, INIT, make, transaction_cluster

SMALL: dict[str, Any] = {"batch_size": 1200, "max_request_size": 2048, **FAST}


@pytest.fixture
def cluster() -> Iterator[TransactionCluster]:
    with transaction_cluster() as cluster:
        yield cluster


def numbered(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


# Whole


def test_a_transaction_is_visible_as_a_whole(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        with producer.transaction():
            deliveries = [producer.send("t", b"%d" % number, partition=number % 3) for number in range(9)]
            producer.flush()
            assert cluster.committed("t") == []
        assert sorted(cluster.committed("t")) == [b"%d" % number for number in range(9)]  # type: ignore[type-var]
        assert [delivery.result(0).offset for delivery in deliveries] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert cluster.transactions.methods().count(END) == 1


def test_every_transaction_has_an_epoch_of_its_own_and_numbers_from_0(cluster: TransactionCluster) -> None:
    with make(cluster, linger_ms=60_000) as producer:
        for value in (b"a", b"b", b"c"):
            with producer.transaction():
                producer.send("t", value, partition=0)
                producer.send("t", value, partition=0)
    headers = [parse_header(batch) for batch in cluster.topics["t"].partitions[0].batches]
    assert [(each.producer_epoch, each.base_sequence) for each in headers] == [(0, 0), (1, 0), (2, 0)]
    assert all(each.is_transactional for each in headers)


def test_what_was_not_begun_costs_no_call(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        for _ in range(3):
            with producer.transaction():
                pass
            producer.begin_transaction()
            producer.abort_transaction()
    assert cluster.transactions.methods() == [INIT]


def test_many_partitions_are_added_in_few_calls(cluster: TransactionCluster) -> None:
    cluster.create_topic("wide", 40)
    with make(cluster) as producer:
        with producer.transaction():
            producer.send("wide", b"first", partition=0)
        before = cluster.transactions.methods().count(ADD)
        with producer.transaction():
            cluster.freeze(cluster.transactions.coordinator)  # else it may be quicker than this loop
            for part in range(40):
                producer.send("wide", b"a", partition=part)
            cluster.thaw(cluster.transactions.coordinator)
    assert cluster.transactions.methods().count(ADD) - before <= 3
    assert len(cluster.committed("wide")) == 41


def test_partitions_are_added_while_their_records_linger(cluster: TransactionCluster) -> None:
    with make(cluster, linger_ms=100_000) as producer, producer.transaction():
        producer.send("t", b"a", partition=0)
        deadline = time.monotonic() + 30
        while ADD not in cluster.transactions.methods():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
    assert time.monotonic() - started < 40, "the commit must not wait for linger.ms"


def test_an_aborted_transaction_is_never_visible(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        with pytest.raises(KeyError), producer.transaction():
            flushed = producer.send("t", b"no", partition=0)
            producer.flush()
            raise KeyError("application")
        with producer.transaction():
            producer.send("t", b"yes", partition=0)
        assert flushed.result(0).offset == 0
    assert cluster.committed("t") == [b"yes"]
    assert cluster.values("t") == [b"no", b"yes"]


def test_what_is_aborted_before_it_was_sent_fails_and_is_not_sent(cluster: TransactionCluster) -> None:
    with make(cluster, linger_ms=60_000) as producer:
        producer.begin_transaction()
        delivery = producer.send("t", b"no", partition=0)
        producer.abort_transaction()
        with pytest.raises(TransactionAbortable, match="was aborted before the record was acknowledged"):
            delivery.result(0)
        with producer.transaction():
            producer.send("t", b"yes", partition=0)
    assert cluster.values("t") == [b"yes"]


def test_an_abort_does_not_wait_for_a_partition_that_does_not_answer(cluster: TransactionCluster) -> None:
    """What is in flight of epoch e is refused after the marker, so the next transaction may begin."""
    with make(cluster, request_timeout_ms=120_000) as producer:
        cluster.faults.swallow_acks = 1
        producer.begin_transaction()
        swallowed = producer.send("t", b"no", partition=0)
        deadline = time.monotonic() + 30
        while cluster.faults.swallow_acks:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        producer.abort_transaction()
        assert time.monotonic() - started < 40
        with producer.transaction():
            producer.send("t", b"yes", partition=0)
        assert isinstance(swallowed.exception(0), TransactionAbortable)
    assert cluster.committed("t") == [b"yes"]


def test_batches_and_arrow_belong_to_transactions_too(cluster: TransactionCluster) -> None:
    with make(cluster, compression_type="zstd") as producer, producer.transaction():
        producer.send_batch("t", numbered(5000), partition=1)
    assert cluster.committed("t") == numbered(5000)


def test_closing_aborts_what_is_open(cluster: TransactionCluster) -> None:
    producer = make(cluster)
    producer.begin_transaction()
    producer.send("t", b"no", partition=0)
    producer.flush()
    producer.close()
    assert cluster.transactions.methods()[-1] == END
    assert cluster.committed("t") == []
    assert not cluster.transactions.known["x"].open


def test_a_producer_that_is_garbage_aborts_what_is_open(cluster: TransactionCluster) -> None:
    producer = make(cluster)
    producer.begin_transaction()
    producer.send("t", b"no", partition=0)
    producer.flush()
    del producer
    gc.collect()
    deadline = time.monotonic() + 30
    while END not in cluster.transactions.methods():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert cluster.committed("t") == []


def test_threads_send_into_the_same_transaction(cluster: TransactionCluster) -> None:
    with make(cluster, **SMALL) as producer:
        for _ in range(3):
            with producer.transaction():

                def send(part: int) -> None:
                    for value in numbered(300):
                        producer.send("t", value, partition=part)

                threads = [threading.Thread(target=send, args=[part]) for part in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
    assert cluster.committed("t") == 3 * (3 * numbered(300))


# In order


def test_nothing_is_sent_outside_of_a_transaction(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        for _ in range(2):
            with pytest.raises(InvalidTxnState, match=r"no transaction is open.*call begin_transaction"):
                producer.send("t", b"a")
            with pytest.raises(InvalidTxnState, match="no transaction is open"):
                producer.send_batch("t", [b"a"])
            with producer.transaction():
                producer.send("t", b"b")
    assert cluster.committed("t") == [b"b", b"b"]


def test_a_producer_without_transactional_id_says_how_to_get_one(cluster: TransactionCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as producer:
        for call in (producer.begin_transaction, producer.commit_transaction, producer.init_transactions):
            with pytest.raises(InvalidTxnState, match="make it with transactional_id="):
                call()


def test_calls_out_of_order_are_refused_and_change_nothing(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        with pytest.raises(InvalidTxnState, match="nothing to commit: call begin_transaction"):
            producer.commit_transaction()
        producer.begin_transaction()
        with pytest.raises(InvalidTxnState, match="commit or abort it first"):
            producer.begin_transaction()
        producer.send("t", b"a")
        producer.commit_transaction()
        with pytest.raises(InvalidTxnState, match="nothing to abort"):
            producer.abort_transaction()
    assert cluster.committed("t") == [b"a"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"acks": 1}, "transactional.id contradicts acks=1"),
        ({"retries": 0}, "transactional.id contradicts retries=0"),
        ({"max_in_flight_requests_per_connection": 6}, "transactional.id contradicts max.in.flight"),
        ({"enable_idempotence": False}, "transactional.id contradicts enable.idempotence=false"),
        ({"transactional_id": "x" * 256}, "1 to 255 characters, this one has 256"),
        ({"transaction_timeout_ms": 0}, "transaction.timeout.ms"),
    ],
)
def test_options_that_contradict_transactions(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        ProducerOptions.make({}, {"transactional_id": "x", **options})


def test_the_timeout_is_told_to_the_coordinator(cluster: TransactionCluster) -> None:
    with make(cluster, config={"transaction.timeout.ms": 1234}) as producer:
        producer.init_transactions()
    assert cluster.transactions.known["x"].timeout_ms == 1234


def test_what_the_coordinator_refuses_at_the_start_is_raised(cluster: TransactionCluster) -> None:
    refusals = [InvalidTransactionTimeout("above transaction.max.timeout.ms"), InvalidRequestError("no such thing")]
    with make(cluster) as producer:
        for refusal in refusals:
            cluster.transactions.refuse = [refusal]
            with pytest.raises(type(refusal), match=str(refusal)):
                producer.begin_transaction()
        with producer.transaction():
            producer.send("t", b"a")
    assert cluster.committed("t") == [b"a"]


def test_a_server_without_transactions_is_named() -> None:
    no_such_call = pytest.raises(UnsupportedVersion, match="this server has no transactions")
    with FakeCluster() as cluster, make(cluster) as producer, no_such_call:
        producer.begin_transaction()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_block_that_was_ended_inside_of_it_says_so(cluster: TransactionCluster, end: str) -> None:
    with make(cluster) as producer:
        ended = pytest.raises(InvalidTxnState, match=r"was ended inside its.*do not end the transaction yourself")
        with ended, producer.transaction():
            producer.send("t", b"a", partition=0)
            producer.commit_transaction() if end == "commit" else producer.abort_transaction()
        with producer.transaction():
            producer.send("t", b"b", partition=0)

    async def asynchronous() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="y", **FAST) as producer:
            with pytest.raises(InvalidTxnState, match=r"was ended inside its.*do not end the transaction yourself"):
                async with producer.transaction():
                    await (producer.commit_transaction() if end == "commit" else producer.abort_transaction())

    asyncio.run(asynchronous())
    assert cluster.committed("t") == ([b"a", b"b"] if end == "commit" else [b"b"])


# Failures that pass


@pytest.mark.parametrize("method", [INIT, ADD, END])
def test_refusals_that_pass_are_retried(cluster: TransactionCluster, method: str) -> None:
    at = [INIT, ADD, END].index(method)
    with make(cluster) as producer:
        cluster.transactions.refuse = [
            *[None] * at,
            ConcurrentTransactions("markers are on their way"),
            CoordinatorNotAvailable("nobody leads it"),
            ConcurrentTransactions("markers are on their way"),
        ]
        with producer.transaction():
            producer.send("t", b"a")
    assert cluster.transactions.methods().count(method) == 4
    assert cluster.committed("t") == [b"a"]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_lost_answers_change_nothing(cluster: TransactionCluster, before: int) -> None:
    """InitProducerId, AddToTransaction, EndTransaction: each is done once, and its answer lost."""
    with make(cluster) as producer:
        for value in (b"a", b"b"):
            if before == 0:
                cluster.transactions.mislaid_answers = 1
            producer.begin_transaction()
            if before == 1:
                cluster.transactions.mislaid_answers = 1
            producer.send("t", value, partition=0).result(30)
            if before == 2:
                cluster.transactions.mislaid_answers = 1
            producer.commit_transaction()
    assert cluster.committed("t") == [b"a", b"b"]


def test_the_coordinator_moves(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        for round_ in range(4):
            cluster.transactions.coordinator = 1 + round_ % 2
            with producer.transaction():
                producer.send("t", b"%d" % round_, partition=0).result(30)
                cluster.transactions.coordinator = 2 - round_ % 2
    assert cluster.committed("t") == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("moment", ["drop_produce_before_append", "drop_produce_after_append"])
def test_broken_streams_and_lost_answers_double_nothing(cluster: TransactionCluster, moment: str) -> None:
    with make(cluster, **SMALL) as producer:
        for part in range(4):
            setattr(cluster.faults, moment, 3)
            with producer.transaction():
                for value in numbered(300):
                    producer.send("t", value, partition=part % 2)
                    if value.endswith(b"50"):
                        time.sleep(0.002)
    assert cluster.committed("t") == 2 * numbered(300) + 2 * numbered(300)


def test_a_partition_that_moves_goes_on_in_the_same_transaction(cluster: TransactionCluster) -> None:
    with make(cluster, **SMALL) as producer, producer.transaction():
        for index, value in enumerate(numbered(600)):
            producer.send("t", value, partition=0)
            if index % 100 == 99:
                cluster.move_leader("t", 0, 1 + index // 100 % 2)
                time.sleep(0.005)
    assert cluster.committed("t") == numbered(600)
    assert cluster.topics["t"].partitions[0].batches


# Asynchronous


def test_the_asynchronous_producer_does_the_same(cluster: TransactionCluster) -> None:
    cluster.groups.add("readers")

    async def run() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            async with producer.transaction():
                await producer.send("t", b"a", partition=0)
                await producer.send_offsets_to_transaction(
                    {TopicPartition("in", 0): 5}, GroupMetadata("readers", "m-1", 5)
                )
            with pytest.raises(KeyError):
                async with producer.transaction():
                    await (await producer.send("t", b"no", partition=0))
                    raise KeyError("application")
            with pytest.raises(InvalidTxnState):
                await producer.send("t", b"b", partition=0)
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("t", b"b", partition=0)
            await producer.commit_transaction(timeout=30)
            await producer.begin_transaction()
            await producer.send("t", b"no", partition=0)
            await producer.abort_transaction()

    asyncio.run(run())
    assert cluster.committed("t") == [b"a", b"b"]
    assert cluster.groups.groups["readers"].offsets[TopicPartition("in", 0)].offset == 5


def test_a_cancelled_block_is_aborted(cluster: TransactionCluster) -> None:
    async def run() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:

            async def forever() -> None:
                async with producer.transaction():
                    await (await producer.send("t", b"no", partition=0))
                    await asyncio.sleep(60)

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(forever(), 1)
            async with producer.transaction():
                await producer.send("t", b"yes", partition=0)

    asyncio.run(run())
    assert cluster.committed("t") == [b"yes"]


def test_a_transaction_at_an_unreachable_broker_says_that_none_answers() -> None:
    unreachable = pytest.raises((RequestTimedOut, BrokerUnavailable), match=r"no broker answers at 127\.0\.0\.1:1")
    no_second_try: dict[str, Any] = {"reconnect_backoff_ms": 120_000}
    with Producer("127.0.0.1:1", transactional_id="x", max_block_ms=30_000, **no_second_try) as producer, unreachable:
        producer.begin_transaction()


# Failures that end the transaction


def test_a_record_that_fails_makes_the_transaction_one_to_abort(cluster: TransactionCluster) -> None:
    cluster.faults.refuse_when = lambda topic, partition, asked: (
        MessageTooLarge("too large for this topic") if partition == 1 else None
    )
    with make(cluster) as producer:
        producer.begin_transaction()
        fine = producer.send("t", b"a", partition=0)
        fine.result(30)
        failed = producer.send("t", b"b", partition=1)
        assert isinstance(failed.exception(30), MessageTooLarge)
        with pytest.raises(TransactionAbortable, match="too large for this topic; call abort_transaction"):
            producer.send("t", b"c", partition=0)
        with pytest.raises(TransactionAbortable, match="too large for this topic") as raised:
            producer.commit_transaction()
        assert isinstance(raised.value.__cause__, MessageTooLarge)
        producer.abort_transaction()
        with producer.transaction():
            producer.send("t", b"d", partition=0)
    assert cluster.committed("t") == [b"d"]


def test_a_commit_that_finds_a_failure_is_aborted_by_the_context_manager(cluster: TransactionCluster) -> None:
    cluster.faults.refuse = [MessageTooLarge("too large for this topic")]
    with make(cluster) as producer:
        with pytest.raises(TransactionAbortable, match="too large for this topic"), producer.transaction():
            producer.send("t", b"a", partition=0)
        with producer.transaction():
            producer.send("t", b"b", partition=0)
    assert cluster.committed("t") == [b"b"]


def test_once_it_has_failed_nothing_more_of_it_is_sent(cluster: TransactionCluster) -> None:
    """Else it would send bytes that are never read."""
    with make(cluster, linger_ms=60_000) as producer:
        producer.begin_transaction()
        waiting = producer.send("t", b"waits", partition=1)
        cluster.faults.refuse = [MessageTooLarge("too large for this topic")]
        assert producer.send("t", b"a", partition=0).exception(30) is not None
        assert isinstance(waiting.exception(30), TransactionAbortable)
        producer.abort_transaction()
    assert cluster.topics["t"].partitions[1].batches == []


def test_a_missing_batch_is_never_numbered_anew(cluster: TransactionCluster) -> None:
    """What was acknowledged in this transaction is gone (an unclean election): half of it must not be committed."""
    with make(cluster) as producer:
        producer.begin_transaction()
        producer.send("t", b"a", partition=0).result(30)
        cluster.faults.refuse = [OutOfOrderSequence("sequence 1 instead of 0")]
        assert isinstance(producer.send("t", b"b", partition=0).exception(30), OutOfOrderSequence)
        with pytest.raises(TransactionAbortable, match="sequence 1 instead of 0"):
            producer.commit_transaction()
        producer.abort_transaction()
    assert cluster.committed("t") == []


def test_a_transaction_that_times_out_is_one_to_abort_and_the_next_one_works(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        for value in (b"a", b"b"):
            producer.begin_transaction()
            producer.send("t", b"late", partition=0).result(30)
            cluster.transactions.time_out("x")
            with pytest.raises(TransactionAbortable, match="timed out after 60000 ms"):
                producer.commit_transaction()
            producer.abort_transaction()
            with producer.transaction():
                producer.send("t", value, partition=0)
    assert cluster.committed("t") == [b"a", b"b"]


@pytest.mark.parametrize("part", [0, 1], ids=["to a partition it has", "to another one"])
def test_a_timeout_that_a_partition_tells_of_is_called_a_timeout(cluster: TransactionCluster, part: int) -> None:
    with make(cluster) as producer:
        producer.begin_transaction()
        producer.send("t", b"late", partition=0).result(30)
        cluster.transactions.time_out("x")
        error = producer.send("t", b"later", partition=part).exception(30)
        assert isinstance(error, TransactionAbortable)
        assert "timed out after 60000 ms" in str(error)
        with pytest.raises(TransactionAbortable, match="timed out after 60000 ms"):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send("t", b"a", partition=part)
    assert cluster.committed("t") == [b"a"]


def test_why_a_transaction_is_over_is_asked_until_somebody_knows(cluster: TransactionCluster) -> None:
    """The record whose partition says so waits for the answer; an abort does not."""
    with make(cluster) as producer:
        producer.begin_transaction()
        producer.send("t", b"late", partition=0).result(30)
        cluster.transactions.time_out("x")
        cluster.transactions.refuse = [CoordinatorNotAvailable("nobody leads it")] * 10_000
        waiting = producer.send("t", b"later", partition=0)
        deadline = time.monotonic() + 30
        while len(cluster.transactions.refuse) == 10_000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        with pytest.raises(TransactionAbortable, match="can only be aborted"):
            producer.send("t", b"later still", partition=1)
        cluster.transactions.refuse = []
        with pytest.raises(TransactionAbortable, match="timed out after 60000 ms"):
            waiting.result(30)
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send("t", b"late", partition=0).result(30)
        cluster.transactions.time_out("x")
        cluster.transactions.refuse = [CoordinatorNotAvailable("nobody leads it")] * 10
        waiting = producer.send("t", b"later", partition=0)
        producer.abort_transaction()
        assert isinstance(waiting.exception(30), TransactionAbortable)
        with producer.transaction():
            producer.send("t", b"a", partition=0)
    assert cluster.committed("t") == [b"a"]


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception]]] = {
    "too large": ("send", {"value": b"b" * 5000}, MessageTooLarge),
    "no such partition": ("send", {"value": b"b", "partition": 9}, InvalidPartitions),
    "no bytes": ("send", {"value": "text"}, TypeError),
    "a row too large": ("send_batch", {"values": [b"b" * 5000]}, MessageTooLarge),
    "rows of different lengths": ("send_batch", {"values": [b"b"], "key": [b"c", b"d"]}, InvalidRequestError),
}
"""The method, what it is called with, and what it raises at once."""


@pytest.mark.parametrize("how", REFUSED)
def test_a_record_that_was_refused_at_once_is_missed_by_the_commit(cluster: TransactionCluster, how: str) -> None:
    """As in Kafka: an application that swallows the error of `send` cannot commit the rest."""
    method, call, kind = REFUSED[how]
    with make(cluster, max_request_size=2048) as producer:
        send = getattr(producer, method)
        with pytest.raises((kind, InvalidTxnState)):
            send("t", **call)  # before anything is open it spoils nothing
        with pytest.raises(TransactionAbortable, match="can only be aborted") as raised, producer.transaction():
            producer.send("t", b"a", partition=0)
            with pytest.raises(kind) as refused:
                send("t", **call)
        assert str(refused.value) in str(raised.value)
        with producer.transaction():
            producer.send("t", b"c", partition=0)
    assert cluster.committed("t") == [b"c"]


@pytest.mark.parametrize("how", REFUSED)
def test_a_record_that_was_refused_at_once_is_missed_by_the_commit_of_asyncio_too(
    cluster: TransactionCluster, how: str
) -> None:
    method, call, kind = REFUSED[how]

    async def run() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="x", max_request_size=2048, **FAST) as producer:
            with pytest.raises(TransactionAbortable, match="can only be aborted"):
                async with producer.transaction():
                    await producer.send("t", b"a", partition=0)
                    with pytest.raises(kind):
                        await getattr(producer, method)("t", **call)
            async with producer.transaction():
                await producer.send("t", b"c", partition=0)

    asyncio.run(run())
    assert cluster.committed("t") == [b"c"]


def test_a_transaction_that_timed_out_unnoticed_is_aborted_by_the_context_manager(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        with pytest.raises(TransactionAbortable, match="timed out"), producer.transaction():
            producer.send("t", b"late", partition=0).result(30)
            cluster.transactions.time_out("x")
        with producer.transaction():
            producer.send("t", b"a", partition=0)
    assert cluster.committed("t") == [b"a"]


# Fencing


def test_a_second_producer_fences_the_first_and_aborts_what_it_left_open(cluster: TransactionCluster) -> None:
    with make(cluster) as zombie, make(cluster) as heir:
        zombie.begin_transaction()
        zombie.send("t", b"zombie", partition=0).result(30)
        with heir.transaction():
            heir.send("t", b"heir", partition=0)
        with pytest.raises(ProducerFenced, match=r"'x' no longer belongs.*another producer.*close this producer"):
            zombie.commit_transaction()
        for call in (zombie.begin_transaction, zombie.abort_transaction, zombie.commit_transaction):
            with pytest.raises(ProducerFenced):
                call()
        with pytest.raises(ProducerFenced):
            zombie.send("t", b"more")
        with heir.transaction():
            heir.send("t", b"heir", partition=0)
    assert cluster.committed("t") == [b"heir", b"heir"]


@pytest.mark.parametrize("part", [0, 1], ids=["to a partition it has", "to another one"])
def test_a_zombie_that_goes_on_sending_hears_of_it(cluster: TransactionCluster, part: int) -> None:
    with make(cluster) as zombie, make(cluster) as heir:
        zombie.begin_transaction()
        zombie.send("t", b"zombie", partition=0).result(30)
        heir.init_transactions()
        error = zombie.send("t", b"zombie", partition=part).exception(30)
        assert isinstance(error, ProducerFenced)
        assert "another producer" in str(error)
        with pytest.raises(ProducerFenced, match="another producer"):
            zombie.commit_transaction()
        with heir.transaction():
            heir.send("t", b"heir", partition=0)
    assert cluster.committed("t") == [b"heir"]


def test_a_fenced_block_raises_that_it_is_fenced(cluster: TransactionCluster) -> None:
    with make(cluster) as zombie, make(cluster) as heir:
        with pytest.raises(ProducerFenced), zombie.transaction():
            zombie.send("t", b"zombie", partition=0).result(30)
            heir.init_transactions()
        with pytest.raises(KeyError) as raised, heir.transaction():
            heir.send("t", b"heir", partition=0).result(30)
            with make(cluster) as third:
                third.init_transactions()
            raise KeyError("application")
        assert "aborting the transaction failed" in raised.value.__notes__[0]


def test_a_restarted_producer_waits_until_what_it_left_is_aborted(cluster: TransactionCluster) -> None:
    producer = make(cluster)
    producer.begin_transaction()
    producer.send("t", b"left", partition=0).result(30)
    producer._engine.transactions.close = _nothing  # type: ignore[union-attr,method-assign] # as if it were killed
    producer.close()
    with make(cluster) as again, again.transaction():
        again.send("t", b"again", partition=0)
    assert cluster.committed("t") == [b"again"]


async def _nothing(timeout: float | None = None) -> None:
    pass


# Epochs run out


def test_used_up_epochs_are_followed_by_another_producer_id(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        with producer.transaction():
            producer.send("t", b"a", partition=0)
        cluster.call(lambda: setattr(cluster.transactions.known["x"], "epoch", LAST_EPOCH - 1))
        with make(cluster) as heir:
            for value in (b"b", b"c", b"d"):
                with heir.transaction():
                    heir.send("t", value, partition=0)
    headers = [parse_header(batch) for batch in cluster.topics["t"].partitions[0].batches]
    assert [(each.producer_id, each.producer_epoch) for each in headers] == [
        (1001, 0),
        (1001, LAST_EPOCH),
        (1002, 0),
        (1002, 1),
    ]
    assert cluster.committed("t") == [b"a", b"b", b"c", b"d"]
    inits = [request for method, request in cluster.transactions.calls if method == INIT]
    assert isinstance(inits[-1], transaction_pb2.InitProducerIdRequest)
    assert (inits[-1].producer_id, inits[-1].producer_epoch) == (1001, LAST_EPOCH + 1)


# Outcomes that are not known


NO_SECOND_TRY: dict[str, Any] = {"retry_backoff_ms": 120_000}
"""A call whose first attempt is refused has no time for another one."""


def test_a_commit_without_an_answer_is_asked_again_and_nothing_else_is_allowed(cluster: TransactionCluster) -> None:
    with make(cluster, **NO_SECOND_TRY) as producer:
        producer.begin_transaction()
        producer.send("t", b"a", partition=0).result(30)
        cluster.transactions.refuse = [CoordinatorNotAvailable("nobody leads it")] * 10_000
        with pytest.raises(RequestTimedOut, match=r"is not known: call commit_transaction\(\) again"):
            producer.commit_transaction(timeout=30)
        for call in (producer.begin_transaction, producer.abort_transaction):
            with pytest.raises(InvalidTxnState, match=r"call commit_transaction\(\) again"):
                call()
        with pytest.raises(InvalidTxnState, match="being committed"):
            producer.send("t", b"b", partition=0)
        cluster.transactions.refuse = []
        producer.commit_transaction()
        assert cluster.committed("t") == [b"a"]
        with producer.transaction():
            producer.send("t", b"b", partition=0)
    assert cluster.committed("t") == [b"a", b"b"]


def test_an_abort_without_an_answer_is_asked_again(cluster: TransactionCluster) -> None:
    with make(cluster, **NO_SECOND_TRY) as producer:
        producer.begin_transaction()
        producer.send("t", b"a", partition=0).result(30)
        cluster.transactions.refuse = [CoordinatorNotAvailable("nobody leads it")] * 10_000
        with pytest.raises(RequestTimedOut, match=r"call abort_transaction\(\) again"):
            producer.abort_transaction(timeout=30)
        with pytest.raises(InvalidTxnState, match="call abort_transaction"):
            producer.commit_transaction()
        cluster.transactions.refuse = []
        producer.abort_transaction()
        with producer.transaction():
            producer.send("t", b"b", partition=0)
    assert cluster.committed("t") == [b"b"]


def test_a_commit_whose_flush_takes_too_long_decides_nothing(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        producer.begin_transaction()
        cluster.move_leader("t", 0, -1)
        producer.send("t", b"a", partition=0)
        with pytest.raises(RequestTimedOut, match=r"it is not committed: call commit_transaction\(\) again, or abort"):
            producer.commit_transaction(timeout=0.2)
        assert END not in cluster.transactions.methods()
        producer.send("t", b"b", partition=0)
        cluster.move_leader("t", 0, 1)
        producer.commit_transaction()
    assert cluster.committed("t") == [b"a", b"b"]


def test_partitions_that_cannot_be_added_say_why_nothing_gets_through(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        producer.init_transactions()
        cluster.transactions.refuse = [CoordinatorNotAvailable("nobody leads __transaction_state-3")] * 10_000
        producer.begin_transaction()
        delivery = producer.send("t", b"a", partition=0)
        transactions = producer._engine.transactions
        assert transactions is not None
        deadline = time.monotonic() + 30
        while transactions.last_error is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        expire(producer, delivery)
        error = delivery.exception(30)
        assert "nobody leads __transaction_state-3" in str(error)
        assert "certainly not in the log" in str(error)
        cluster.transactions.refuse = []
        producer.abort_transaction()


def test_a_late_call_cannot_begin_the_next_transaction(cluster: TransactionCluster) -> None:
    """Aborted before AddToTransaction was answered, the coordinator says that there is nothing, and gives the same
    epoch again: the call that is still on its way would begin a transaction in it. So the epoch is left behind."""
    with make(cluster) as producer:
        producer.init_transactions()
        cluster.transactions.delay_s = lambda method: 0.5 if method == ADD else 0.0
        producer.begin_transaction()
        producer.send("t", b"no", partition=0)
        deadline = time.monotonic() + 30
        while ADD not in cluster.transactions.methods():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        producer.abort_transaction()
        cluster.transactions.delay_s = lambda method: 0.0
        with producer.transaction():
            time.sleep(0.6)
            producer.send("t", b"yes", partition=1)
        epochs = [request.producer_epoch for method, request in cluster.transactions.calls if method == ADD]  # type: ignore[attr-defined]
    assert epochs[0] < epochs[-1]
    assert cluster.committed("t") == [b"yes"]


def test_adding_that_is_cancelled_before_its_first_step_holds_up_nothing(cluster: TransactionCluster) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            async with producer.transaction():
                await producer.send("t", b"first", partition=0)
            for steps in range(6):  # in one of these turns of the loop adding is spawned, and has not begun
                await producer.begin_transaction()
                await producer.send("t", b"no", partition=0)
                for _ in range(steps):
                    await asyncio.sleep(0)
                await producer.abort_transaction()
                async with asyncio.timeout(60), producer.transaction():
                    await producer.send("t", b"yes", partition=0)

    asyncio.run(main())
    assert cluster.committed("t") == [b"first", *[b"yes"] * 6]


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)


def interrupt_once(ready: Callable[[], bool]) -> threading.Thread:
    """Interrupt the main thread once that is so."""

    def interrupt() -> None:
        wait_until(ready)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_an_interrupt_while_a_commit_flushes_aborts_the_transaction(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        cluster.faults.swallow_acks = 1
        with pytest.raises(KeyboardInterrupt), producer.transaction():
            producer.send("t", b"no", partition=0)
            state = producer._engine.transactions.state  # type: ignore[union-attr]
            thread = interrupt_once(
                lambda: state.phase is TransactionPhase.FLUSHING and not cluster.faults.swallow_acks
            )
        thread.join()
        assert END in cluster.transactions.methods()
        with producer.transaction():
            producer.send("t", b"yes", partition=0)
    assert cluster.committed("t") == [b"yes"]


def test_an_interrupt_once_a_decision_was_sent_leaves_it_and_says_how_to_learn_of_it(
    cluster: TransactionCluster,
) -> None:
    with make(cluster) as producer:
        cluster.transactions.delay_s = lambda method: 100.0 if method == END else 0.0
        with pytest.raises(KeyboardInterrupt) as interrupted, producer.transaction():
            producer.send("t", b"yes", partition=0)
            thread = interrupt_once(lambda: END in cluster.transactions.methods())
        thread.join()
        assert "call commit_transaction() again" in "".join(interrupted.value.__notes__)
        cluster.transactions.delay_s = lambda method: 0.0
        producer.commit_transaction()
    assert cluster.committed("t") == [b"yes"]


def test_a_cancel_while_a_commit_flushes_aborts_the_transaction(cluster: TransactionCluster) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            async with producer.transaction():
                await producer.send("t", b"first", partition=0)
            cluster.faults.swallow_acks = 1
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), producer.transaction():
                    await producer.send("t", b"no", partition=0)
            cluster.faults.swallow_acks = 0
            async with producer.transaction():
                await producer.send("t", b"yes", partition=0)

    asyncio.run(main())
    assert cluster.committed("t") == [b"first", b"yes"]


def test_a_cancel_once_a_decision_was_sent_leaves_it_and_says_how_to_learn_of_it(cluster: TransactionCluster) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            cluster.transactions.delay_s = lambda method: 100.0 if method == END else 0.0

            async def work() -> None:
                async with producer.transaction():
                    await producer.send("t", b"yes", partition=0)

            task = asyncio.create_task(work())
            await asyncio.to_thread(wait_until, lambda: END in cluster.transactions.methods())
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            assert "call commit_transaction() again" in "".join(cancelled.value.__notes__)
            cluster.transactions.delay_s = lambda method: 0.0
            await producer.commit_transaction()

    asyncio.run(main())
    assert cluster.committed("t") == [b"yes"]


def test_a_commit_that_was_forgotten_is_not_silent(
    cluster: TransactionCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with make(cluster) as producer:
        producer.begin_transaction()
        producer.send("t", b"no", partition=0)
    assert [each.levelname for each in caplog.records if "was open when its producer was closed" in each.message] == [
        "WARNING"
    ]


@pytest.mark.parametrize("how", [{"transactional_id": ""}, {"config": {"transactional.id": ""}}])
def test_an_empty_transactional_id_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="1 to 255 characters, this one has 0"):
        Producer("127.0.0.1:1", **how)


def test_offsets_that_are_no_mapping_are_refused(cluster: TransactionCluster) -> None:
    with make(cluster) as producer:
        producer.begin_transaction()
        with pytest.raises(InvalidRequestError, match="are not a mapping"):
            producer.send_offsets_to_transaction([TopicPartition("t", 0)], "group")  # type: ignore[arg-type] # on purpose


def test_what_another_thread_closes_says_that_it_is_closed() -> None:
    thread = loop_thread()
    started = threading.Event()
    tasks: list[asyncio.Task[Any] | None] = []

    async def wait() -> None:
        tasks.append(asyncio.current_task())
        started.set()
        await asyncio.sleep(60)

    def close() -> None:
        started.wait(30)
        thread.loop.call_soon_threadsafe(tasks[0].cancel)  # type: ignore[union-attr]

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedError, match="closed by another thread"):
        thread.run(wait())
    closing.join()


def test_a_delay_queue_s_producer_config_may_have_underscores() -> None:
    config = mover_config("q", {"transaction_timeout_ms": 20_000, "acks": 1, "linger_ms": 1})
    assert config.pop("transactional.id") != ""
    assert config == {"transaction.timeout.ms": 20_000, "linger.ms": 1}


def test_a_delay_queue_has_transactional_ids_of_its_own() -> None:
    for config in ({"transactional_id": "mine"}, {"transactional.id": "mine"}):
        with pytest.raises(InvalidConfig, match=r"has a transactional\.id"):
            DelayQueue("127.0.0.1:1", "q", producer_config=config)
        with pytest.raises(InvalidConfig, match=r"has a transactional\.id"):
            aio.DelayQueue("127.0.0.1:1", "q", producer_config=config)


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_closing_takes_its_timeout_at_most(cluster: TransactionCluster, kind: str) -> None:
    cluster.transactions.delay_s = lambda method: 120.0 if method == END else 0.0
    if kind == "sync":
        producer = make(cluster)
        producer.begin_transaction()
        producer.send("t", b"no", partition=0).result(30)
        started = time.monotonic()
        producer.close(0.3)
        took_s = time.monotonic() - started
    else:

        async def main() -> float:
            producer = aio.Producer(cluster.bootstrap, transactional_id="x", **FAST)
            await producer.begin_transaction()
            await (await producer.send("t", b"no", partition=0))
            started = time.monotonic()
            await producer.close(0.3)
            return time.monotonic() - started

        took_s = asyncio.run(main())
    assert took_s < 40


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_closing_ends_what_another_has_under_way(cluster: TransactionCluster, kind: str) -> None:
    """A commit, whose coordinator is gone: else it would go on for `max.block.ms`."""
    nobody: list[RaftlogError | None] = [CoordinatorNotAvailable("nobody leads it")] * 100_000
    if kind == "sync":
        producer = make(cluster)
        producer.begin_transaction()
        producer.send("t", b"a", partition=0).result(30)
        cluster.transactions.refuse = nobody
        raised: list[Exception] = []

        def commit() -> None:
            try:
                producer.commit_transaction()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        wait_until(lambda: END in cluster.transactions.methods())
        producer.close(0.3)
        thread.join(40)
        assert not thread.is_alive()
        (error,) = raised
    else:

        async def main() -> BaseException:
            producer = aio.Producer(cluster.bootstrap, transactional_id="x", **FAST)
            await producer.begin_transaction()
            await (await producer.send("t", b"a", partition=0))
            cluster.transactions.refuse = nobody
            task = asyncio.create_task(producer.commit_transaction())
            await asyncio.to_thread(wait_until, lambda: END in cluster.transactions.methods())
            await producer.close(0.3)
            async with asyncio.timeout(40):
                (error,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(error, BaseException)
            return error

        error = asyncio.run(main())  # type: ignore[assignment] # asserted below
    assert isinstance(error, ClosedError)
    assert "was closed while a call on the transaction of 'x' was under way" in str(error)


def test_closing_lets_a_commit_come_to_its_end(cluster: TransactionCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "LAST_ABORT_S", 60.0)
    with make(cluster) as producer:
        producer.begin_transaction()
        producer.send("t", b"a", partition=0).result(30)
        cluster.transactions.delay_s = lambda method: 0.5 if method == END else 0.0
        thread = threading.Thread(target=producer.commit_transaction)
        thread.start()
        wait_until(lambda: END in cluster.transactions.methods())
    thread.join(60)
    assert not thread.is_alive()
    assert cluster.committed("t") == [b"a"]


def test_a_delay_queue_that_is_closed_while_it_hands_over_has_forgotten_nothing(
    cluster: TransactionCluster, caplog: pytest.LogCaptureFixture
) -> None:
    mover = Mover(cluster.bootstrap, "q", FAST)
    mover._producer.begin_transaction()
    mover._producer.send("t", b"no", partition=0).result(30)
    mover.close()
    assert cluster.transactions.methods().count(END) == 1
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == []


GROUP = GroupMetadata("readers", "m-1", 5)


def test_a_delay_queue_that_is_interrupted_once_it_has_committed_hands_nothing_over_twice(
    cluster: TransactionCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.groups.add("readers")
    mover = Mover(cluster.bootstrap, "q", FAST)
    commit = mover._producer.commit_transaction

    def commit_and_be_interrupted(timeout: float | None = None) -> None:
        commit(timeout)
        raise KeyboardInterrupt

    with contextlib.closing(mover):
        monkeypatch.setattr(mover._producer, "commit_transaction", commit_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            mover.move([Outgoing("t", b"yes", None, (), 0)], {TopicPartition("q", 0): 1}, GROUP)
        monkeypatch.undo()
        mover.settle()  # raises what means that nothing was handed over
        assert cluster.committed("t") == [b"yes"]
        mover.move([Outgoing("t", b"next", None, (), 0)], {TopicPartition("q", 0): 2}, GROUP)
    assert Counter(cluster.committed("t")) == {b"yes": 1, b"next": 1}


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
