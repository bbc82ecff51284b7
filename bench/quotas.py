"""Quotas: what a tenant over its quota takes from another one. `bench/security.py` measures what quotas cost.

An honest tenant produces alone, then beside one that sends ten times its quota, in pairs. What is left of the
honest one's rate, and how its latency grows, are ratios of the same run.
"""

from __future__ import annotations

import os
import threading
import time
from statistics import median
from typing import Final

from bench.report import Report, quantile
from raftlog import Admin, Producer, QuotaEntity
from raftlog.testing import Cluster

TOPIC: Final = "quotas"
BATCH_BYTES: Final = 64 << 10
VALUE: Final = os.urandom(BATCH_BYTES - 200)
FAIR_S: Final = 4.0
FAIR_ROUNDS: Final = 5
GREEDY_RATE: Final = 1_000_000.0
GREEDY_ATTEMPTS: Final = 10
SLOWER: Final = 1.25
"""Of the honest tenant's median latency: more than pairs of rounds without a greedy one differ by."""


def run(report: Report) -> None:
    """Use one server; fsyncs are the disk's own."""
    with Cluster(nodes=1, config={"quota.window.num": 1}) as cluster, Admin(cluster.bootstrap) as admin:
        admin.create_topic(TOPIC, partitions=1)
        _fairness(cluster, admin, report)


def _fairness(cluster: Cluster, admin: Admin, report: Report) -> None:
    admin.alter_client_quotas({QuotaEntity(client_id="greedy"): {"producer_byte_rate": GREEDY_RATE}})
    alone: list[float] = []
    beside: list[float] = []
    got: list[float] = []
    for number in range(FAIR_ROUNDS + 1):
        found = _honest(cluster)
        done = threading.Event()
        sent: list[int] = []
        greedy = threading.Thread(target=_greedy, args=(cluster, done, sent))
        greedy.start()
        begun_s = time.monotonic()
        with_other = _honest(cluster)
        done.set()
        greedy.join()
        if number:
            alone.append(quantile(found, 0.5))
            beside.append(quantile(with_other, 0.5))
            got.append(sum(sent) / (time.monotonic() - begun_s))
    ratio = median(theirs / own for theirs, own in zip(beside, alone, strict=True))
    report.add(
        "quotas",
        "an honest tenant's median latency beside a greedy one",
        f"{ratio:.2f} times, {1e3 * median(beside):.1f} ms",
        f"<= {SLOWER:g} times",
        ratio <= SLOWER,
    )
    report.add("quotas", "what the greedy one gets of its quota, burst included", f"{median(got) / GREEDY_RATE:.2f}")


def _honest(cluster: Cluster) -> list[float]:
    """Return the latencies of one record at a time, in s."""
    found = []
    with Producer(cluster.bootstrap, client_id="honest", linger_ms=0, compression_type="none") as producer:
        producer.send(TOPIC, VALUE[:1_000]).result(60)
        until_s = time.monotonic() + FAIR_S
        while (begun_s := time.monotonic()) < until_s:
            producer.send(TOPIC, VALUE[:1_000]).result(60)
            found.append(time.monotonic() - begun_s)
    return found


def _greedy(cluster: Cluster, done: threading.Event, sent: list[int]) -> None:
    """Send as fast as the broker lets it, from several producers; note the bytes that were acknowledged."""
    producers = [
        Producer(cluster.bootstrap, client_id="greedy", linger_ms=0, compression_type="none")
        for _ in range(GREEDY_ATTEMPTS)
    ]
    while not done.is_set():
        deliveries = [producer.send(TOPIC, VALUE) for producer in producers]
        for delivery in deliveries:
            delivery.result(120)
            sent.append(len(VALUE))
    for producer in producers:
        producer.close()
