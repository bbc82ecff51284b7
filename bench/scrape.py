"""How long a scrape of 2,000 partitions takes, idle and under load, and how it affects producers."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from statistics import median, quantiles

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from bench.report import Report
from raftlog import Admin, Producer
from raftlog.testing import Cluster

PARTITIONS = 2_000
ROUNDS = 15
LIMIT_S = 0.5
TOPIC = "scraped"


def _endpoint(cluster: Cluster, node_id: int) -> str:
    ready = json.loads((cluster.config_file(node_id).parent / "ready.json").read_bytes())
    return f"http://{ready['metrics']}/metrics"


def _scrapes(url: str) -> tuple[list[float], bytes]:
    """Return the seconds of each scrape, and the text of the last one."""
    took, body = [], b""
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = answer.read()
        took.append(time.perf_counter() - began)
    return took, body


class _Known:
    """A collector of as many labelled samples as a scrape had, whose values are constants."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def collect(self) -> list[GaugeMetricFamily]:
        family = GaugeMetricFamily("known", "Known before.", labels=("topic", "partition"))
        for number in range(self._samples):
            family.add_metric([TOPIC, str(number)], number)
        return [family]


def _ceiling(samples: int) -> float:
    """Return the seconds that prometheus_client needs to write that many samples."""
    registry = CollectorRegistry()
    registry.register(_Known(samples))
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        generate_latest(registry)
        took.append(time.perf_counter() - began)
    return median(took)


def _latencies(bootstrap: str, stop: threading.Event, found: list[float]) -> None:
    with Producer(bootstrap, linger_ms=0) as producer:
        number = 0
        while not stop.is_set():
            began = time.perf_counter()
            producer.send(TOPIC, b"x" * 500, partition=number % PARTITIONS).result(30)
            found.append(time.perf_counter() - began)
            number += 7


def _under_load(cluster: Cluster, url: str, *, scraped: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of scrapes, if `scraped`, and of concurrent produces."""
    stop, latencies = threading.Event(), list[float]()
    load = threading.Thread(target=_latencies, args=(cluster.bootstrap, stop, latencies))
    load.start()
    took: list[float] = []
    if scraped:
        for _ in range(ROUNDS // 3):
            time.sleep(1)
            began = time.perf_counter()
            with urllib.request.urlopen(url, timeout=30) as answer:
                answer.read()
            took.append(time.perf_counter() - began)
    else:
        time.sleep(ROUNDS // 3)
    stop.set()
    load.join()
    return took, latencies


def run(report: Report) -> None:
    """Scrape a broker with 2,000 replicas, half of which it leads."""
    config: dict[str, str | int] = {"metrics.listener": "127.0.0.1:0"}
    with Cluster(nodes=2, config=config) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS, 2, timeout=120)
        url = _endpoint(cluster, 1)
        took, body = _scrapes(url)
        samples = sum(not line.startswith(b"#") for line in body.splitlines())
        ceiling = _ceiling(samples)
        report.add(
            "scrape",
            f"{PARTITIONS} partitions, {samples} figures",
            f"{median(took):.3f} s, at most {max(took):.3f} s ({median(took) / ceiling:.1f} times as long as writing "
            "as many known figures)",
            f"< {LIMIT_S} s",
            median(took) < LIMIT_S,
        )
        _, quiet = _under_load(cluster, url, scraped=False)
        took, busy = _under_load(cluster, url, scraped=True)
        report.add(
            "scrape",
            "the same while a producer writes",
            f"{median(took):.3f} s, at most {max(took):.3f} s",
            f"< {LIMIT_S} s",
            median(took) < LIMIT_S,
        )
        report.add(
            "scrape",
            "p99 of one produce at a time, acks=all",
            f"{_p99(busy) * 1e3:.1f} ms with a scrape each second, {_p99(quiet) * 1e3:.1f} ms without",
        )


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]
