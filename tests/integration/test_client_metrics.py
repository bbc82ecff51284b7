"""What clients count of their own work, against a real cluster."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from raftlog import Admin, Consumer, Producer, TopicPartition, aio
from raftlog.errors import GroupIdNotFound, MessageTooLarge
from raftlog.prometheus import ClientCollector
from raftlog.testing import Cluster
from tests.support import patience
from tests.support.steady import STEADY

WAIT_S = 90.0


until = partial(patience.until, within_s=WAIT_S, pause_s=0.02)


def test_a_producer_a_consumer_and_an_admin_client_count_what_they_did(tmp_path: Path) -> None:
    with Cluster(nodes=1, directory=tmp_path, config=STEADY) as cluster, Admin(cluster.bootstrap) as admin:
        began = time.monotonic()
        admin.create_topic("orders.eu", configs={"max.message.bytes": 4_000})
        calls = admin.metrics()["admin-client-metrics"]
        assert calls["request-total"] >= 1
        assert calls["request-latency-max"] >= calls["request-latency-avg"] > 0
        for asks in (admin.list_groups, admin.list_transactions, lambda: admin.describe_node(1)):
            before = admin.metrics()["admin-client-metrics"]["request-total"]
            asks()
            assert admin.metrics()["admin-client-metrics"]["request-total"] > before, (
                "request-total of the admin client must count calls of this service"
            )
        before = admin.metrics()["admin-client-metrics"]["request-total"]
        with pytest.raises(GroupIdNotFound):
            admin.describe_groups(["billing"])
        assert admin.metrics()["admin-client-metrics"]["request-total"] > before, (
            "request-total of the admin client must count calls to coordinators"
        )
        with (
            Producer(cluster.bootstrap, batch_size=8_000, linger_ms=60_000) as producer,
            Consumer(cluster.bootstrap, "billing", "earliest", enable_auto_commit=False) as consumer,
        ):
            for _ in range(100):
                producer.send("orders.eu", b"x" * 100)
            producer.flush(WAIT_S)
            with pytest.raises(MessageTooLarge):
                producer.send("orders.eu", b"y" * 5_000).result(WAIT_S)
            until(lambda: producer.metrics()["producer-metrics"]["record-error-total"] == 1, "the last answer counts")
            shown = producer.metrics()
            sent = shown["producer-metrics"]
            assert (sent["record-send-total"], sent["record-error-total"]) == (100, 1)
            assert sent["batch-split-total"] >= 1, "batches of 8,000 bytes must be split, as the topic takes 4,000"
            assert sent["request-latency-max"] >= sent["request-latency-avg"] > 0
            assert (time.monotonic() - began) * 1000 > sent["record-queue-time-max"] > 0
            assert sent["record-send-rate"] > 0
            assert (
                sent["buffer-available-bytes"] == sent["buffer-total-bytes"] == producer._engine.options.buffer_memory
            )
            assert sent["requests-in-flight"] == 0
            assert shown["producer-topic-metrics.orders.eu"]["record-send-total"] == 100
            assert shown["producer-topic-metrics.orders.eu"]["byte-total"] == sent["outgoing-byte-total"]
            assert shown["producer-node-metrics.node-1"]["request-total"] == sent["request-total"]

            consumer.subscribe("orders.eu")
            assert consumer.metrics()["consumer-metrics"]["last-poll-seconds-ago"] == -1
            read = 0
            while read < 60:
                read += len(consumer.poll(5, max_records=60 - read))
            consumer.commit()

            def bytes_fetched() -> float:
                return consumer.metrics()["consumer-fetch-manager-metrics"]["bytes-consumed-total"]

            until(lambda: bytes_fetched() > 10_000, "the batches behind have been fetched as well")
            shown = consumer.metrics()
            fetched = shown["consumer-fetch-manager-metrics"]
            assert (fetched["records-consumed-total"], fetched["records-lag-max"]) == (60, 40)
            assert fetched["fetch-total"] >= 1
            assert shown["consumer-fetch-manager-metrics.orders.eu.0"] == {"records-lag": 40}
            group = shown["consumer-coordinator-metrics"]
            assert (group["assigned-partitions"], group["commit-total"], group["rebalance-total"]) == (1, 1, 1)
            assert group["commit-latency-max"] > 0
            assert 0 <= shown["consumer-metrics"]["last-poll-seconds-ago"] < time.monotonic() - began

            registry = CollectorRegistry()
            registry.register(ClientCollector(out=producer, back=consumer, admin=admin))
            text = generate_latest(registry).decode()  # type: ignore[no-untyped-call] # as it is shipped
            samples = {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call] # refuses what comes twice
                for sample in family.samples
            }
            of_topic = ("topic", "orders.eu")
            assert samples["raftlog_producer_record_send_total", ("client", "out")] == 100
            assert samples["raftlog_producer_topic_record_send_total", ("client", "out"), of_topic] == 100
            assert samples["raftlog_consumer_topic_records_consumed_total", ("client", "back"), of_topic] == 60
            assert (
                samples["raftlog_consumer_partition_records_lag", ("client", "back"), ("partition", "0"), of_topic]
                == 40
            )
            assert samples["raftlog_admin_client_request_total", ("client", "admin")] >= 1
        assert producer.metrics()["producer-metrics"]["record-send-total"] == 100, (
            "a closed producer must show its last metrics"
        )


def test_clients_of_asyncio_count_as_well(tmp_path: Path) -> None:
    async def scenario(bootstrap: str) -> None:
        idle = aio.Producer(bootstrap)
        assert idle.metrics() == {}
        async with aio.Admin(bootstrap) as admin:
            await admin.create_topic("orders")
            assert admin.metrics()["admin-client-metrics"]["request-total"] >= 1
        async with aio.Producer(bootstrap) as producer, aio.Consumer(bootstrap, None, "earliest") as consumer:
            await (await producer.send("orders", b"x"))
            assert producer.metrics()["producer-metrics"]["record-send-total"] == 1
            await consumer.assign([TopicPartition("orders", 0)])
            until = time.monotonic() + WAIT_S
            while not await consumer.poll(5):
                assert time.monotonic() < until
            assert consumer.metrics()["consumer-fetch-manager-metrics"]["records-consumed-total"] == 1

    with Cluster(nodes=1, directory=tmp_path, config=STEADY) as cluster:
        asyncio.run(scenario(cluster.bootstrap))


def test_a_figure_of_an_unknown_group_is_a_bug() -> None:
    class Odd:
        def metrics(self) -> dict[str, dict[str, float]]:
            return {"mystery-metrics": {"x": 1.0}}

    with pytest.raises(AssertionError, match="mystery"):
        list(ClientCollector(odd=Odd()).collect())
