"""A signal that comes just when a wait begins, so that the interpreter hears of it only after the wait: it ends the
wait all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from raftlog import Consumer, Producer
from raftlog._alarm import Alarm
from raftlog._client.background import loop_thread
from raftlog.format import Columns, encode_batch
from tests.support.fake_broker import FakeCluster

BEFORE_S = 0.3
"""Time enough for the wait to begin."""
RESCUE_S = 30.0
"""So long after it what is waited for comes, for a wait that has missed the signal."""


class Signalled(Exception):
    """What the handler raises."""


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=1) as cluster:
        cluster.create_topic("t")
        yield cluster


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
        assert not rescued.is_set(), "the wait did not end by the signal"


def test_an_alarm() -> None:
    alarm = Alarm()
    with pytest.raises(Signalled), unnoticed(alarm.set):
        alarm.wait()
    assert not alarm._waiters


def test_a_consumer_that_waits_for_a_record(cluster: FakeCluster) -> None:
    record = encode_batch(Columns(pa.array([b"x"], pa.binary())), 1000)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        with pytest.raises(Signalled), unnoticed(lambda: cluster.append("t", record)):
            next(consumer)
        cluster.append("t", record)
        assert next(consumer).value == b"x"


def test_a_delivery_that_is_waited_for(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap) as producer:
        cluster.hold_acks()
        delivery = producer.send("t", b"x")
        with pytest.raises(Signalled), unnoticed(cluster.release_acks):
            delivery.result()
        cluster.release_acks()
        assert delivery.result(30).offset == 0


def test_a_producer_that_waits_for_memory(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, buffer_memory=100_000, batch_size=50_000, max_block_ms=600_000) as producer:
        cluster.hold_acks()
        alarms = producer._engine._room_alarms
        with pytest.raises(Signalled), unnoticed(cluster.release_acks, lambda: any(each._waiters for each in alarms)):
            for _ in range(10):
                producer.send("t", bytes(40_000))
        cluster.release_acks()
        producer.flush(30)
        assert producer.send("t", bytes(40_000)).result(30).offset > 0


def test_a_call_on_the_loop() -> None:
    thread = loop_thread()
    over = asyncio.Event()
    with pytest.raises(Signalled), unnoticed(lambda: thread.loop.call_soon_threadsafe(over.set)):
        thread.run(over.wait())
    assert thread.run(asyncio.sleep(0, "another one")) == "another one"
