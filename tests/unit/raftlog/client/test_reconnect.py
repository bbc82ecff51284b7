"""A broker that was away and is back is found by the reconnect backoff, however long retries would wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from raftlog import Consumer, Producer
from raftlog._client import producer as producer_ids
from raftlog.format import Columns, encode_batch
from tests.support.fake_broker import FakeCluster

PATIENT: dict[str, Any] = {"retry_backoff_ms": 120_000, "retry_backoff_max_ms": 120_000}
AWAY_S = 0.5
LIMIT_S = 40
"""Far above what it takes, far below the pause of a retry."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow broker is asked once for a producer id: the question is not one for a retry."""
    monkeypatch.setattr(producer_ids, "_ADDRESS_TIMEOUT_S", 60.0)


def test_a_producer_is_back_soon() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, **PATIENT) as producer:
            producer.send("t", b"before").result(30)
            cluster.kill(1)
            delivery = producer.send("t", b"while it is away")
            time.sleep(AWAY_S)
            cluster.restart(1)
            delivery.result(LIMIT_S)
        assert cluster.values("t") == [b"before", b"while it is away"]


def test_a_consumer_is_back_soon() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **PATIENT) as consumer:
            consumer.subscribe("t")
            cluster.kill(1)
            time.sleep(AWAY_S)
            cluster.restart(1)
            cluster.append("t", encode_batch(Columns(pa.array([b"after"])), 1))
            assert [record.value for record in consumer.poll(LIMIT_S)] == [b"after"]


def test_who_comes_first_waits_for_the_broker() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        bootstrap = cluster.bootstrap
        cluster.kill(1)
        with Producer(bootstrap, **PATIENT) as producer:
            back = threading.Timer(AWAY_S, cluster.restart, [1])
            back.start()
            started = time.monotonic()
            producer.send("t", b"first").result(LIMIT_S)
            assert time.monotonic() - started < LIMIT_S
            back.join()
