"""Transactions that are interrupted, cancelled, or left open: what follows them goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftlog import DelayQueue, Producer, TopicPartition, aio
from raftlog._client import transactions
from raftlog._client.background import loop_thread
from raftlog._core.transaction_state import TransactionPhase
from raftlog._delay_moving import Mover, mover_config
from raftlog.errors import ClosedError, CoordinatorNotAvailable, InvalidConfig, InvalidRequestError, RaftlogError
from tests.support.fake_transactions import TransactionCluster
from tests.support.transactional_producers import END, FAST, make, transaction_cluster


@pytest.fixture
def cluster() -> Iterator[TransactionCluster]:
    with transaction_cluster() as cluster:
        yield cluster


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
        with pytest.raises(InvalidRequestError, match="offsets are a mapping"):
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
