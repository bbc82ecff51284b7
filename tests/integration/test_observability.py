"""What probes and Prometheus hear from real servers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.observability.metrics import catalogue
from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.errors import TopicAlreadyExists
from raftlog.testing import Cluster
from tests.support import patience
from tests.support.steady import PATIENT, STEADY

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def address(cluster: Cluster, node_id: int) -> str:
    ready = json.loads((cluster.config_file(node_id).parent / "ready.json").read_bytes())
    return str(ready["metrics"])


def probe(endpoint: str, page: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/{page}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def scrape(endpoint: str) -> Figures:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


def figure(figures: Figures, name: str, **labels: str) -> float:
    return figures[name, frozenset(labels.items())]


def total(everywhere: Iterable[Figures], name: str) -> float:
    """Return the sum of a figure over nodes; one that has none yet counts as 0."""
    return sum(figures.get((name, frozenset()), 0.0) for figures in everywhere)


until = partial(patience.until, within_s=30, pause_s=0.05)


def test_figures_follow_what_clients_do(tmp_path: Path) -> None:
    config: dict[str, str | int] = {**STEADY, "metrics.listener": "127.0.0.1:0"}
    with Cluster(nodes=3, directory=tmp_path, config=config) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", partitions=1, replication_factor=3, configs={"min.insync.replicas": 2})
            leader = admin.describe_topics(["orders"])[0].partitions[0].leader
            with pytest.raises(TopicAlreadyExists):
                admin.create_topic("orders")
        with Producer(cluster.bootstrap) as producer:
            for _ in range(100):
                producer.send("orders", b"x" * 50)
            producer.flush(30)
        with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition("orders", 0)])
            read = 0
            while read < 100:
                read += len(consumer.poll(5))

        def scrape_all() -> list[Figures]:
            return [scrape(address(cluster, node_id)) for node_id in (1, 2, 3)]

        def requests_are_counted() -> bool:
            found = scrape(address(cluster, leader))
            done = ("raftlog_requests_total", {"request": "Produce", "error": "NONE"})
            timed = ("raftlog_request_latency_seconds_count", {"request": "Produce", "stage": "remote"})
            return all(found.get((name, frozenset(labels.items())), 0) >= 1 for name, labels in (done, timed))

        until(requests_are_counted, "requests are counted when they are over")
        figures = scrape(address(cluster, leader))
        assert figure(figures, "raftlog_messages_in_total", topic="orders") == 100
        assert figure(figures, "raftlog_bytes_in_total", topic="orders") > 0
        assert figure(figures, "raftlog_bytes_out_total", topic="orders") == figure(
            figures, "raftlog_bytes_in_total", topic="orders"
        )
        assert figure(figures, "raftlog_leader_count") == 1
        assert figure(figures, "raftlog_under_replicated_partitions") == 0
        assert figure(figures, "raftlog_partition_high_watermark", topic="orders", partition="0") == 100

        def is_copied() -> bool:
            found = scrape_all()
            came, went = (total(found, f"raftlog_replication_bytes_{way}_total") for way in ("in", "out"))
            return went >= came >= 2 * figure(figures, "raftlog_bytes_in_total", topic="orders")

        until(is_copied, "two followers")
        until(lambda: total(scrape_all(), "raftlog_active_controller_count") == 1, "one controller is active")
        everywhere = scrape_all()
        assert total(everywhere, "raftlog_raft_commit_latency_seconds_count") > 3
        refused = [
            value
            for each in everywhere
            for (_, labels), value in each.items()
            if ("error", "TopicAlreadyExists") in labels
        ]
        assert refused == [1]
        known = {sample for families in catalogue().values() for family in families for sample in family.samples()}
        unknown = {name for name, _ in figures if not name.startswith(("raftlog_process_", "python_gc_"))} - known
        assert {name for name in unknown if not name.endswith("_created")} == set(), (
            "the documentation must name all metrics that are shown"
        )
        assert figure(figures, "raftlog_fetch_reads_total", source="page_cache") >= 1
        assert figure(figures, "raftlog_producer_states") == 1
        idle = ("produce_sessions", "produce_queue_depth", "pending_acks", "fetch_sessions", "metadata_lag_records")

        def is_idle() -> bool:
            found = scrape(address(cluster, leader))
            return all(figure(found, f"raftlog_{name}") == 0 for name in idle)

        until(is_idle, "clients are gone, and nothing is left of what they did")
        assert {probe(address(cluster, leader), page)[0] for page in ("livez", "startupz", "readyz")} == {200}


def test_readiness_follows_the_lease(tmp_path: Path) -> None:
    with Cluster(nodes=3, directory=tmp_path, config={**PATIENT, "metrics.listener": "127.0.0.1:0"}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", partitions=1, replication_factor=3, configs={"min.insync.replicas": 2})
        leader = cluster.leader("orders")
        assert {probe(address(cluster, leader), page)[0] for page in ("livez", "startupz", "readyz")} == {200}

        others = [node_id for node_id in (1, 2, 3) if node_id != leader]
        cluster.kill(others[0])
        until(
            lambda: figure(scrape(address(cluster, leader)), "raftlog_under_replicated_partitions") == 1,
            "the leader counts the replica that is gone",
        )
        assert figure(scrape(address(cluster, leader)), "raftlog_at_min_isr_partition_count") == 1
        assert probe(address(cluster, leader), "readyz")[0] == 200, (
            "the leader must be ready: a shrunk ISR does not concern readiness"
        )

        cluster.kill(others[1])  # no majority: no lease
        until(lambda: probe(address(cluster, leader), "readyz")[0] == 503, "without a lease nothing is served")
        assert "no lease" in probe(address(cluster, leader), "readyz")[1]["reason"]
        assert probe(address(cluster, leader), "livez")[0] == 200
        assert probe(address(cluster, leader), "startupz")[0] == 200


def test_a_controller_alone_is_ready_with_a_quorum_that_has_a_leader(tmp_path: Path) -> None:
    with Cluster(
        nodes=2,
        controllers=1,
        dedicated_controllers=True,
        directory=tmp_path,
        config={**STEADY, "metrics.listener": "127.0.0.1:0"},
    ) as cluster:
        endpoint = address(cluster, 1)
        assert probe(endpoint, "readyz") == (200, {"ready": True})
        figures = scrape(endpoint)
        assert figure(figures, "raftlog_active_controller_count") == 1
        assert figure(figures, "raftlog_active_broker_count") == 1
        assert figure(figures, "raftlog_raft_state", state="leader") == 1
        assert ("raftlog_partition_count", frozenset()) not in figures


def test_the_coordinator_of_a_group_tells_how_far_it_is_behind_wherever_the_partitions_are_led(tmp_path: Path) -> None:
    config: dict[str, str | int] = {**STEADY, "metrics.listener": "127.0.0.1:0", "metrics.group.lag.interval.ms": 100}
    with Cluster(nodes=3, directory=tmp_path, config=config) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", replica_assignment=[[1], [2], [3]])
        with Producer(cluster.bootstrap) as producer:
            for number in range(30):
                producer.send("orders", b"x", partition=number % 3)
            producer.flush(30)
        with Consumer(cluster.bootstrap, group_id="billing", enable_auto_commit=False) as consumer:
            consumer.assign([TopicPartition("orders", partition) for partition in range(3)])
            consumer.commit({TopicPartition("orders", partition): 4 for partition in range(3)})

        def lags(name: str) -> dict[str, float]:
            return {
                dict(labels)["partition"]: value
                for node_id in (1, 2, 3)
                for (sample, labels), value in scrape(address(cluster, node_id)).items()
                if sample == name and dict(labels).get("group") == "billing"
            }

        until(lambda: lags("raftlog_group_lag_records") == {"0": 6, "1": 6, "2": 6}, "every leader says where it ends")
        until(lambda: lags("raftlog_group_lag_seconds").keys() == {"0", "1", "2"}, "for how long is looked up, too")
        seconds = lags("raftlog_group_lag_seconds")
        assert all(0 < value < 60 for value in seconds.values()), (
            f"the lag must be the seconds since record 4 was written, above 0 and below 60, but is {seconds}"
        )
        with Consumer(cluster.bootstrap, group_id="billing", enable_auto_commit=False) as consumer:
            consumer.assign([TopicPartition("orders", partition) for partition in range(3)])
            consumer.commit({TopicPartition("orders", partition): 10 for partition in range(3)})
        until(lambda: lags("raftlog_group_lag_seconds") == {"0": 0, "1": 0, "2": 0}, "who has everything has no lag")
