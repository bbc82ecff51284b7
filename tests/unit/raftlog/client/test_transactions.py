"""Transactions of a producer against a scripted coordinator: whole or not at all, and what passes on the way."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raftlog import GroupMetadata, Producer, TopicPartition, aio
from raftlog._client.options import ProducerOptions
from raftlog.errors import (
    BrokerUnavailable,
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    InvalidConfig,
    InvalidRequestError,
    InvalidTransactionTimeout,
    InvalidTxnState,
    RequestTimedOut,
    TransactionAbortable,
    UnsupportedVersion,
)
from raftlog.format import parse_header
from tests.support.fake_broker import FakeCluster
from tests.support.fake_transactions import TransactionCluster
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
    assert time.monotonic() - started < 40, "commit does not wait for linger.ms"


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
        ended = pytest.raises(InvalidTxnState, match=r"was ended inside of it.*leave that to the block")
        with ended, producer.transaction():
            producer.send("t", b"a", partition=0)
            producer.commit_transaction() if end == "commit" else producer.abort_transaction()
        with producer.transaction():
            producer.send("t", b"b", partition=0)

    async def asynchronous() -> None:
        async with aio.Producer(cluster.bootstrap, transactional_id="y", **FAST) as producer:
            with pytest.raises(InvalidTxnState, match=r"was ended inside of it.*leave that to the block"):
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


def test_nobody_answers() -> None:
    unreachable = pytest.raises((RequestTimedOut, BrokerUnavailable), match=r"no broker answers at 127\.0\.0\.1:1")
    no_second_try: dict[str, Any] = {"reconnect_backoff_ms": 120_000}
    with Producer("127.0.0.1:1", transactional_id="x", max_block_ms=30_000, **no_second_try) as producer, unreachable:
        producer.begin_transaction()
