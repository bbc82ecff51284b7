"""Transactions that can only be aborted, producers that are fenced, and outcomes that are not known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raftlog import aio
from raftlog.errors import (
    CoordinatorNotAvailable,
    InvalidPartitions,
    InvalidRequestError,
    InvalidTxnState,
    MessageTooLarge,
    OutOfOrderSequence,
    ProducerFenced,
    RequestTimedOut,
    TransactionAbortable,
)
from raftlog.format import parse_header
from raftlog.v1 import transaction_pb2
from tests.support.deliveries import expire
from tests.support.fake_transactions import LAST_EPOCH, TransactionCluster
from tests.support.transactional_producers import ADD, END, FAST, INIT, make, transaction_cluster


@pytest.fixture
def cluster() -> Iterator[TransactionCluster]:
    with transaction_cluster() as cluster:
        yield cluster


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
    """Which would be bytes that nobody ever reads."""
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
    """As in Kafka: who swallows the error of `send` does not commit the rest."""
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
        with pytest.raises(ProducerFenced, match=r"'x' is not this producer's.*another producer.*close this one"):
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
        with pytest.raises(RequestTimedOut, match=r"nothing is decided: call commit_transaction\(\) again, or abort"):
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
