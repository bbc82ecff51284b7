"""Quotas on a real server: clients obey, calls are refused, metrics tell, and other tenants are not concerned."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPartition

from raftlog import Admin, Consumer, Producer, QuotaEntity, TopicPartition
from raftlog.errors import ThrottlingQuotaExceeded
from raftlog.testing import Cluster
from tests.support.steady import STEADY

WAIT_S = 90.0
VALUE = b"x" * 100_000
RATE = 40_000.0
DELAY_S = 1.4
"""One value takes two and a half seconds of the quota, of which a second's is there at first."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One server, on which an idle client may use the quota of one second at once."""
    with Cluster(config={**STEADY, "quota.window.num": 1, "metrics.listener": "127.0.0.1:0"}, kafka=True) as cluster:
        yield cluster


def endpoint(cluster: Cluster) -> str:
    return str(json.loads((cluster.config_file(1).parent / "ready.json").read_bytes())["metrics"])


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as admin:
        yield admin
        for entity, values in admin.describe_client_quotas().items():
            admin.alter_client_quotas({entity: dict.fromkeys(values)})


def test_a_producer_obeys_its_quota_and_reports_the_delay(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("produced")
    admin.alter_client_quotas({QuotaEntity(client_id="greedy"): {"producer_byte_rate": RATE}})
    with Producer(cluster.bootstrap, client_id="greedy", linger_ms=0, compression_type="none") as producer:
        began_s = time.monotonic()
        for _ in range(2):
            producer.send("produced", VALUE).result(WAIT_S)
        took_s = time.monotonic() - began_s
        shown = producer.metrics()["producer-metrics"]
    assert took_s >= DELAY_S
    assert shown["produce-throttle-time-max"] > 0


def test_a_consumer_gets_its_quota_and_reports_the_delay(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("consumed")
    with Producer(cluster.bootstrap, compression_type="none") as producer:
        for _ in range(2):
            producer.send("consumed", VALUE).result(WAIT_S)
    admin.alter_client_quotas({QuotaEntity(client_id="reader"): {"consumer_byte_rate": RATE}})
    with Consumer(
        cluster.bootstrap, client_id="reader", auto_offset_reset="earliest", max_partition_fetch_bytes=10_000
    ) as consumer:
        consumer.assign([TopicPartition("consumed", 0)])
        began_s, seen = time.monotonic(), 0
        while seen < 2:
            assert time.monotonic() < began_s + WAIT_S
            seen += len(consumer.poll(1.0))
        took_s = time.monotonic() - began_s
        shown = consumer.metrics()["consumer-fetch-manager-metrics"]
    assert took_s >= DELAY_S
    assert shown["fetch-throttle-time-max"] > 0


def test_changes_of_the_metadata_beyond_the_rate_are_refused(cluster: Cluster, admin: Admin) -> None:
    """30 partitions at one a second: nothing more for half a minute, until the quota is removed."""
    admin.alter_client_quotas({QuotaEntity(client_id="creator"): {"controller_mutation_rate": 1}})
    with Admin(cluster.bootstrap, client_id="creator") as creator:
        creator.create_topic("first", partitions=30)
        with pytest.raises(ThrottlingQuotaExceeded, match="controller_mutation_rate") as refused:
            creator.create_topic("second", timeout=5.0)
        assert 0 < refused.value.throttle_time_ms <= 30_000
        admin.alter_client_quotas({QuotaEntity(client_id="creator"): {"controller_mutation_rate": None}})
        creator.create_topic("third", timeout=WAIT_S)
    assert "second" not in admin.list_topics()


def test_one_call_may_exceed_the_rate_whatever_it_is_made_of(cluster: Cluster, admin: Admin) -> None:
    """20 moves at one a second, of which eleven may come at once: all of them begin, and the next call is refused."""
    admin.create_topic("moved", partitions=20)
    (here,) = (broker.broker_id for broker in admin.describe_cluster().brokers)
    moves = {TopicPartition("moved", number): [here] for number in range(20)}
    admin.alter_client_quotas({QuotaEntity(client_id="mover"): {"controller_mutation_rate": 1}})
    with Admin(cluster.bootstrap, client_id="mover") as mover:
        mover.alter_reassignments(moves, timeout=WAIT_S)
        with pytest.raises(ThrottlingQuotaExceeded, match="controller_mutation_rate"):
            mover.alter_reassignments(moves, timeout=5.0)


def test_calls_beyond_the_share_of_time_are_refused(cluster: Cluster, admin: Admin) -> None:
    """A tenth of a millisecond a second: after some calls the debt lasts ten seconds, longer than a call may take."""
    admin.alter_client_quotas({QuotaEntity(client_id="caller"): {"request_percentage": 0.01}})
    with Admin(cluster.bootstrap, client_id="caller") as caller:
        with pytest.raises(ThrottlingQuotaExceeded, match="request_percentage"):
            for _ in range(1_000):
                caller.describe_cluster(timeout=9.0)
        admin.alter_client_quotas({QuotaEntity(client_id="caller"): {"request_percentage": None}})
        caller.describe_cluster(timeout=WAIT_S)


def test_metrics_tell_who_was_held(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("measured")
    admin.alter_client_quotas({QuotaEntity("ANONYMOUS", "counted"): {"producer_byte_rate": 80_000}})
    with Producer(cluster.bootstrap, client_id="counted", linger_ms=0, compression_type="none") as producer:
        for _ in range(2):
            producer.send("measured", VALUE).result(WAIT_S)
    with urlopen(f"http://{endpoint(cluster)}/metrics", timeout=WAIT_S) as page:
        text = page.read().decode()
    place = '{client_id="counted",quota="producer_byte_rate",user="ANONYMOUS"}'
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("raftlog_quota_"))
    assert float(values[f"raftlog_quota_used_total{place}"]) >= 2 * len(VALUE)
    assert float(values[f"raftlog_quota_throttle_seconds_total{place}"]) > 0


def test_kafka_clients_are_held_and_told(cluster: Cluster, admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    admin.create_topic("kafka")
    rates = {"producer_byte_rate": RATE, "consumer_byte_rate": RATE}
    admin.alter_client_quotas({QuotaEntity(client_id="kafka-greedy"): dict(rates)})
    producer = KafkaProducer(bootstrap_servers=cluster.kafka_bootstrap, client_id="kafka-greedy", linger_ms=0)
    try:
        began_s = time.monotonic()
        for _ in range(2):
            producer.send("kafka", VALUE).get(timeout=WAIT_S)
        assert time.monotonic() - began_s >= DELAY_S
        assert "ProduceResponse throttled by broker" in caplog.text
    finally:
        producer.close(timeout=WAIT_S)
    consumer = KafkaConsumer(
        bootstrap_servers=cluster.kafka_bootstrap,
        client_id="kafka-greedy",
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=10_000,
        fetch_max_bytes=10_000,
    )
    try:
        consumer.assign([KafkaPartition("kafka", 0)])
        began_s, seen = time.monotonic(), 0
        while seen < 2:
            assert time.monotonic() < began_s + WAIT_S
            seen += sum(map(len, consumer.poll(timeout_ms=1_000).values()))
        assert time.monotonic() - began_s >= DELAY_S
        assert "FetchResponse throttled by broker" in caplog.text
    finally:
        consumer.close(autocommit=False)
