"""A topic that is deleted and made again has another id: who was told the old one asks again, and goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from raftlog import Producer, StagedWriter
from raftlog._client import metadata, transaction_calls
from raftlog._client import producer as producer_engine
from raftlog.errors import RaftlogError, TransactionAbortable, UnknownTopicId, UnknownTopicOrPartition
from tests.support.fake_stages import FakeStageCluster
from tests.support.fake_transactions import TransactionCluster

FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}
GRACE_S = 120.0
SOON_S = 40.0
"""Far below `GRACE_S`, and far above what it takes, some milliseconds."""


def test_a_transaction_goes_to_the_topic_that_has_taken_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (metadata, producer_engine, transaction_calls):
        monkeypatch.setattr(module, "UNKNOWN_TOPIC_GRACE_S", GRACE_S)
    with TransactionCluster(nodes=2) as cluster:
        cluster.create_topic("t", 2)
        with Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            with producer.transaction():
                producer.send("t", b"old", partition=0)
            cluster.delete_topic("t")
            cluster.create_topic("t", 2)
            started = time.monotonic()
            with producer.transaction():
                producer.send("t", b"new", partition=0)
                producer.send("t", b"new", partition=1)
            assert time.monotonic() - started < SOON_S, "no waiting for metadata.max.age.ms, nor for the grace"
        assert cluster.committed("t") == [b"new", b"new"]
        assert cluster.transactions.violations == []


def test_a_transaction_into_a_topic_that_is_gone_says_so() -> None:
    with TransactionCluster() as cluster:
        cluster.create_topic("t")
        cluster.create_topic("other")
        with Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            with producer.transaction():
                producer.send("t", b"old")
            cluster.delete_topic("t")
            with pytest.raises(TransactionAbortable) as failed, producer.transaction():
                producer.send("t", b"nowhere")
            assert isinstance(failed.value.__cause__, UnknownTopicOrPartition)
            with producer.transaction():
                producer.send("other", b"a")
        assert cluster.committed("other") == [b"a"]


def test_a_stage_goes_to_the_topic_that_has_taken_the_place_of_another() -> None:
    with FakeStageCluster(nodes=2) as cluster:
        cluster.create_topic("t", 2)

        def refuse(method: str, request: Any) -> RaftlogError | None:
            known = {each.topic_id for each in cluster.topics.values()}
            asked = {each.topic_id for each in request.partitions} if method in ("InitStage", "AddToStage") else set()
            return UnknownTopicId("not known here") if asked - known else None

        cluster.stages.refuse = refuse
        with StagedWriter(cluster.bootstrap, "sink", "t", **FAST) as writer:
            for number in range(2):
                with writer.stage(number) as stage:
                    stage.send("t", b"%d" % number, partition=0)
                    token = stage.finish(30)
                writer.commit(number, [token])
                if not number:
                    cluster.delete_topic("t")
                    cluster.create_topic("t", 2)
        assert cluster.committed("t") == [b"1"]
