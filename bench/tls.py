"""What TLS costs: the same producer against a cluster with it and one without, in turn."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from bench.report import Report
from raftlog import Admin, Producer
from raftlog.testing import Cluster

NODES = 3
ROUNDS = 4
VALUE = os.urandom(1_000)
BYTES_PER_ROUND = 96 << 20
BATCH_BYTES = 64 << 10
SINGLES = 300
"""Records sent one after the other, each once the one before is acknowledged."""


def _megabytes_per_s(producer: Producer) -> float:
    values = [VALUE] * (BATCH_BYTES // len(VALUE))
    begun_s = time.monotonic()
    for _ in range(BYTES_PER_ROUND // BATCH_BYTES):
        producer.send_batch("tls", values)
    producer.flush(120)
    return BYTES_PER_ROUND / (time.monotonic() - begun_s) / 1e6


def _milliseconds_each(producer: Producer) -> float:
    begun_s = time.monotonic()
    for _ in range(SINGLES):
        producer.send("tls", VALUE, partition=0).result(30)
    return (time.monotonic() - begun_s) / SINGLES * 1_000


def run(report: Report) -> None:
    """Produce with acks=all to three replicas: throughput, and one record at a time."""
    with ExitStack() as stack:
        producers = {}
        for name, tls in (("plaintext", False), ("TLS", True)):
            cluster = stack.enter_context(Cluster(NODES, tls=tls))
            with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
                admin.create_topic("tls", partitions=NODES, replication_factor=NODES)
            config = {"batch.size": BATCH_BYTES, **cluster.client_config}
            producers[name] = stack.enter_context(Producer(cluster.bootstrap, config=config))
        rates: dict[str, list[float]] = {name: [] for name in producers}
        waits: dict[str, list[float]] = {name: [] for name in producers}
        for number in range(ROUNDS + 1):
            order = list(producers.items())
            for name, producer in order if number % 2 else reversed(order):
                rate, wait = _megabytes_per_s(producer), _milliseconds_each(producer)
                if number:  # the first one warms up
                    rates[name].append(rate)
                    waits[name].append(wait)
    for name in producers:
        figure = f"{max(rates[name]):.0f} MB/s"
        if name != "plaintext":
            figure += f", {max(rates[name]) / max(rates['plaintext']):.2f} of plaintext"
        report.add("tls", f"{name}, {NODES} replicas, acks=all, 64 KiB batches", figure)
    for name in producers:
        report.add("tls", f"{name}, one 1 KB record at a time", f"{min(waits[name]):.2f} ms each")
