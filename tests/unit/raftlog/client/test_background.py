"""The loop thread that all clients of a process share, and signals that come just when a wait begins."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raftlog import Admin, Consumer, Delivery, Producer
from raftlog._client.background import LoopThread, loop_thread
from raftlog._delivery import Alarm
from raftlog.errors import ClosedError
from raftlog.format import Columns, encode_batch
from tests.support import patience
from tests.support.fake_broker import FakeCluster

ROOT = Path(__file__).parents[4]
FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        yield cluster


until = partial(patience.until, within_s=30, pause_s=0.02)


@pytest.mark.parametrize("error", [SystemExit("mine"), KeyboardInterrupt()])
def test_a_callback_that_exits_ends_nothing(cluster: FakeCluster, error: BaseException) -> None:
    seen: list[Delivery] = []

    def leave(delivery: Delivery) -> None:
        raise error

    with Producer(cluster.bootstrap, **FAST) as producer:
        one, two = producer.send("t", b"1"), producer.send("t", b"2")
        one.add_done_callback(leave)
        two.add_done_callback(seen.append)
        assert two.result(30).offset == 1
        until(lambda: seen == [two])
        assert producer.send("t", b"3").result(30).offset == 2
    with Producer(cluster.bootstrap, **FAST) as another:
        assert another.send("t", b"4").result(30).offset == 3


def leave() -> None:
    raise SystemExit("from somewhere")


def test_the_loop_goes_on_when_something_on_it_exits() -> None:
    thread = LoopThread()
    thread.loop.call_soon_threadsafe(leave)
    assert thread.run(asyncio.sleep(0.01, "still here"), timeout=30) == "still here"
    thread.loop.call_soon_threadsafe(thread.loop.stop)


def test_a_loop_that_has_ended_is_refused_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = LoopThread()
    waiting = threading.Timer(0.2, lambda: ended.loop.call_soon_threadsafe(ended.loop.stop))
    waiting.start()
    with pytest.raises(ClosedError, match="make a new client"):
        ended.run(asyncio.sleep(60))
    with pytest.raises(ClosedError, match="make a new client"):
        ended.run(asyncio.sleep(0))
    monkeypatch.setattr("raftlog._client.background._current", ended)
    fresh = loop_thread()
    assert fresh is not ended
    assert fresh.run(asyncio.sleep(0, "new"), timeout=30) == "new"
    fresh.loop.call_soon_threadsafe(fresh.loop.stop)


def test_run_has_a_timeout_and_cancels() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    while not begun.is_set():  # what is cancelled before its first step does nothing
        with pytest.raises(TimeoutError):
            loop_thread().run(wait(), timeout=0.05)
    assert cancelled.wait(30)


def test_clients_that_nobody_closed_leave_nothing_behind(cluster: FakeCluster) -> None:
    def use() -> list[Any]:
        producer, consumer, admin = Producer(cluster.bootstrap), Consumer(cluster.bootstrap), Admin(cluster.bootstrap)
        producer.send("t", b"x").result(30)
        consumer.subscribe("t")
        return [producer._engine, consumer._engine, admin._engine]

    use()
    gc.collect()
    time.sleep(0.5)
    before = len(os.listdir("/proc/self/fd"))
    engines = [engine for _ in range(5) for engine in use()]
    gc.collect()
    until(lambda: all(engine.closed for engine in engines))
    engines.clear()  # gRPC keeps a closed channel's socket as long as an object of one of its calls is there
    gc.collect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


def test_a_delivery_outlives_its_producer(cluster: FakeCluster) -> None:
    cluster.faults.ack_delay_s = lambda: 0.2
    delivery = Producer(cluster.bootstrap, linger_ms=60_000).send("t", b"x")
    gc.collect()
    assert delivery.result(30).offset == 0
    until(lambda: delivery._batch.owner.closed is not None)


def ended(script: str, *arguments: str) -> tuple[int, str]:
    """Run a program; return its exit code and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_the_loop_does_not_outlive_the_interpreter() -> None:
    """The end of the process is held up for a second, after that of the interpreter; the loop has a timer then."""
    script = """if True:
        import asyncio, ctypes, sys, time
        libc = ctypes.CDLL(None)
        libc.on_exit(libc.sleep, None)  # of the exit code
        from raftlog._client.background import loop_thread
        thread = loop_thread()
        thread.loop.call_soon_threadsafe(thread.loop.call_later, 0.7, int)
        thread.run(asyncio.sleep(0))
        time.sleep(0.2)  # it waits for its timer
        sys.exit(1)
    """
    assert ended(script) == (1, "")


def test_a_program_ends_with_clients_that_nobody_has_closed(cluster: FakeCluster) -> None:
    script = """if True:
        import sys
        from raftlog import Admin, Consumer, Producer
        producer, consumer, admin = Producer(sys.argv[1]), Consumer(sys.argv[1]), Admin(sys.argv[1])
        producer.send("t", b"x").result(30)
        consumer.subscribe("t")
    """
    assert ended(script, cluster.bootstrap) == (0, "")


def test_a_program_that_ends_before_its_records_are_acknowledged_says_so(cluster: FakeCluster) -> None:
    script = """if True:
        import sys
        from raftlog import Producer
        producer = Producer(sys.argv[1])
        producer.send_batch("t", [b"x", b"y"])
        producer.send("t", b"z")
    """
    cluster.hold_acks()
    code, output = ended(script, cluster.bootstrap)
    assert code == 0, output
    assert "not all acknowledged, 3 may be lost" in output


BEFORE_S = 0.3
"""Time enough for the wait to begin."""
RESCUE_S = 30.0
"""So long after it what is waited for comes, for a wait that has missed the signal."""


class Signalled(Exception):
    """The exception that the handler raises."""


@pytest.fixture
def quiet_cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=1) as quiet_cluster:
        quiet_cluster.create_topic("t")
        yield quiet_cluster


@contextmanager
def unnoticed(rescue: Callable[[], object], begun: Callable[[], object] = lambda: True) -> Iterator[None]:
    """While this thread waits, a signal comes; another thread takes it, so that no system call is interrupted."""

    def raise_it(*_: object) -> None:
        raise Signalled

    over, rescued = threading.Event(), threading.Event()

    def send() -> None:
        deadline = time.monotonic() + RESCUE_S
        while not begun() and time.monotonic() < deadline:
            time.sleep(0.01)
        over.wait(BEFORE_S)
        os.kill(os.getpid(), signal.SIGUSR1)
        if not over.wait(RESCUE_S):
            rescued.set()
            rescue()

    before = signal.signal(signal.SIGUSR1, raise_it)
    sender = threading.Thread(target=send)
    try:
        sender.start()  # before this thread blocks the signal: it would inherit that
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        yield
    finally:
        over.set()
        sender.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, before)
        assert not rescued.is_set(), "the signal must end the wait, but the rescue after it did"


def test_a_signal_ends_the_wait_for_an_alarm() -> None:
    alarm = Alarm()
    with pytest.raises(Signalled), unnoticed(alarm.set):
        alarm.wait()
    assert not alarm._waiters


def test_a_consumer_that_waits_for_a_record(quiet_cluster: FakeCluster) -> None:
    record = encode_batch(Columns(pa.array([b"x"], pa.binary())), 1000)
    with Consumer(quiet_cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        with pytest.raises(Signalled), unnoticed(lambda: quiet_cluster.append("t", record)):
            next(consumer)
        quiet_cluster.append("t", record)
        assert next(consumer).value == b"x"


def test_a_delivery_that_is_waited_for(quiet_cluster: FakeCluster) -> None:
    with Producer(quiet_cluster.bootstrap) as producer:
        quiet_cluster.hold_acks()
        delivery = producer.send("t", b"x")
        with pytest.raises(Signalled), unnoticed(quiet_cluster.release_acks):
            delivery.result()
        quiet_cluster.release_acks()
        assert delivery.result(30).offset == 0


def test_a_producer_that_waits_for_memory(quiet_cluster: FakeCluster) -> None:
    with Producer(quiet_cluster.bootstrap, buffer_memory=100_000, batch_size=50_000, max_block_ms=600_000) as producer:
        quiet_cluster.hold_acks()
        alarms = producer._engine._room_alarms
        with (
            pytest.raises(Signalled),
            unnoticed(quiet_cluster.release_acks, lambda: any(each._waiters for each in alarms)),
        ):
            for _ in range(10):
                producer.send("t", bytes(40_000))
        quiet_cluster.release_acks()
        producer.flush(30)
        assert producer.send("t", bytes(40_000)).result(30).offset > 0


def test_a_call_on_the_loop() -> None:
    thread = loop_thread()
    over = asyncio.Event()
    with pytest.raises(Signalled), unnoticed(lambda: thread.loop.call_soon_threadsafe(over.set)):
        thread.run(over.wait())
    assert thread.run(asyncio.sleep(0, "another one")) == "another one"
