"""The produce path of brokers beside the ceiling, with one replica and with three.

Broker and ceiling get the same client, window and batch sizes, by turns. The ceiling for three replicas is one leader
with two followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyarrow as pa
from grpc import aio

from bench import ceiling
from bench.report import Report
from raftlog import Admin
from raftlog.format import Columns, encode_batch, wire
from raftlog.testing import Cluster
from raftlog.v1 import log_pb2, metadata_pb2, metadata_pb2_grpc


class Run(NamedTuple):
    """The measurements of one run of a stream."""

    messages: int
    bytes: int
    seconds: float
    latencies_ms: list[float]

    @property
    def mb_per_second(self) -> float:
        """The payload in 10^6 bytes per second."""
        return self.bytes / self.seconds / 1e6

    def percentile_ms(self, share: float) -> float:
        """Return the latency in ms that a share of the messages does not exceed."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def keep_in_flight(
    call: Any, make: Callable[[int], Any], check: Callable[[Any], None], *, count: int, size: int, window: int
) -> Run:
    """Send `count` messages of `size` payload bytes with up to `window` unanswered, and time them."""
    room = asyncio.Semaphore(window)
    sent: deque[float] = deque()
    latencies = []

    async def receive() -> None:
        for _ in range(count):
            check(await call.read())
            latencies.append((time.perf_counter() - sent.popleft()) * 1e3)
            room.release()

    start = time.perf_counter()
    receiver = asyncio.create_task(receive())
    for number in range(count):
        await room.acquire()
        sent.append(time.perf_counter())
        await call.write(make(number))
    await receiver
    seconds = time.perf_counter() - start
    await call.done_writing()
    return Run(count, count * size, seconds, latencies)


ROUNDS = 5
SHARE = 0.6
"""The target: a share of the ceiling."""
UNSAFE = {"flush.messages": "1000000000"}
"""A topic's config without fsync before the acknowledgement."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A run of `count` batches of `size` bytes with `window` in flight."""

    name: str
    size: int
    count: int
    window: int


SHAPES = (Shape("64 KiB batches", 1 << 16, 4_000, 16), Shape("1 MiB batches", 1 << 20, 400, 5))
ONE_IN_FLIGHT = Shape("one 1 KB record in flight", 1_000, 2_000, 1)


def batch_of(size: int) -> bytes:
    """Return a batch of about `size` bytes, with records of 1,000 bytes."""
    values = [os.urandom(1_000) for _ in range(max(1, (size - 300) // 1_004))]
    return encode_batch(Columns(pa.array(values, pa.binary())), 1_700_000_000_000)


@contextlib.contextmanager
def ceiling_servers(*, fsync: bool, followers: int = 0) -> Iterator[str]:
    """Run a leader of the ceiling with its followers, each in a process, and yield its address."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raftlog-ceiling-")))

        def start(name: str, *leader: str) -> str:
            (directory / name).mkdir()
            ready_file = directory / f"{name}.ready"
            command = [sys.executable, "-m", "bench.ceiling", str(directory / name), str(ready_file), str(int(fsync))]
            server = subprocess.Popen([*command, *leader])
            stack.callback(server.wait)
            stack.callback(server.kill)
            while not ready_file.exists():
                assert server.poll() is None, f"the ceiling's {name} ended with exit code {server.returncode}"
                time.sleep(0.02)
            return ready_file.read_text()

        address = f"127.0.0.1:{start('leader')}"
        for number in range(followers):
            start(f"follower-{number}", address)
        yield address


async def ceiling_run(channel: aio.Channel, shape: Shape) -> Run:
    """Send a shape to the ceiling."""
    data = ceiling.message(shape.size)
    return await keep_in_flight(
        channel.stream_stream(ceiling.METHOD)(),
        lambda _: data,
        lambda _: None,
        count=shape.count,
        size=shape.size,
        window=shape.window,
    )


async def broker_run(channel: aio.Channel, topic: str, shape: Shape) -> Run:
    """Send a shape to a partition's leader, with acks=all."""
    got = await metadata_pb2_grpc.MetadataStub(channel).Get(metadata_pb2.MetadataRequest(topics=[topic]))
    topic_id = got.topics[0].topic_id
    batch = batch_of(shape.size)
    call = channel.stream_stream(
        "/raftlog.v1.Log/Produce",
        request_serializer=wire.encode_produce,
        response_deserializer=log_pb2.ProduceResponse.FromString,
    )()

    def request(number: int) -> wire.Produce:
        head = log_pb2.ProducePartition(topic_id=topic_id, partition=0, leader_epoch=-1)
        return wire.Produce(log_pb2.ProduceRequest(correlation_id=number), [wire.ProducePart(head, batch)])

    def check(response: log_pb2.ProduceResponse) -> None:
        assert not response.results[0].HasField("error"), response.results[0].error.message

    return await keep_in_flight(call, request, check, count=shape.count, size=len(batch), window=shape.window)


async def compare(report: Report, suite: str, label: str, *, top: str, leader: str, topic: str, p50_ms: float) -> None:
    """Send every shape to the ceiling at `top` and to a topic's `leader`, by turns; `p50_ms`: target for one in "
    "flight."""
    async with (
        aio.insecure_channel(top, options=ceiling.UNLIMITED) as bare,
        aio.insecure_channel(leader, options=ceiling.UNLIMITED) as channel,
    ):
        for shape in SHAPES:
            most, ours = [], []
            for _ in range(ROUNDS):
                most.append((await ceiling_run(bare, shape)).mb_per_second)
                ours.append((await broker_run(channel, topic, shape)).mb_per_second)
            ratio = median(mine / top for mine, top in zip(ours, most, strict=True))
            report.add(
                suite,
                f"{label}, {shape.name}",
                f"{median(ours):.0f} MB/s, {ratio:.0%} of the ceiling's {median(most):.0f}",
                f">= {SHARE:.0%}",
                ratio >= SHARE,
            )
        most_ms = (await ceiling_run(bare, ONE_IN_FLIGHT)).percentile_ms(0.5)
        one = await broker_run(channel, topic, ONE_IN_FLIGHT)
        report.add(
            suite,
            f"{label}, {ONE_IN_FLIGHT.name}",
            f"p50 {one.percentile_ms(0.5):.2f} ms, p99 {one.percentile_ms(0.99):.2f} ms (ceiling p50 {most_ms:.2f})",
            f"p50 < {p50_ms:g} ms",
            one.percentile_ms(0.5) < p50_ms,
        )


def run(report: Report) -> None:
    """Produce with and without fsync, beside the ceiling."""
    started = time.perf_counter()
    with Cluster(nodes=1, config={"log.retention.bytes": 1 << 30}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("unsafe", configs=UNSAFE)
            admin.create_topic("safe")
        for label, fsync, topic in (("no fsync", False, "unsafe"), ("with fsync", True, "safe")):
            with ceiling_servers(fsync=fsync) as top:
                where = {"top": top, "leader": cluster.bootstrap, "topic": topic}
                asyncio.run(compare(report, "produce", f"RF=1 {label}", **where, p50_ms=1.0))
    report.add("produce", "took", f"{time.perf_counter() - started:.0f} s")


BROKERS = 3
MANY_PARTITIONS = 2_000
FLAT = 0.8
"""The target: the share of batches per second that remains with 2,000 partitions instead of one."""
SMALL_BATCHES = Shape("4 KiB batches", 1 << 12, 6_000, 64)


def address(cluster: Cluster, node_id: int) -> str:
    """Return a broker's address for clients."""
    return cluster.bootstrap.split(",")[cluster.broker_ids.index(node_id)]


def run_replicated(report: Report) -> None:
    """Measure throughput and latency with three replicas, and with many partitions."""
    started = time.perf_counter()
    with Cluster(nodes=BROKERS, config={"log.retention.bytes": 1 << 30}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("unsafe", replication_factor=BROKERS, configs=UNSAFE)
            admin.create_topic("safe", replication_factor=BROKERS)
        for label, fsync, topic in (("no fsync", False, "unsafe"), ("with fsync", True, "safe")):
            with ceiling_servers(fsync=fsync, followers=BROKERS - 1) as top:
                leader = address(cluster, cluster.leader(topic))
                what = f"RF=3 acks=all {label}"
                asyncio.run(compare(report, "replicate", what, top=top, leader=leader, topic=topic, p50_ms=2.0))
        _compare_sizes(report, cluster)
    report.add("replicate", "took", f"{time.perf_counter() - started:.0f} s")


def _compare_sizes(report: Report, cluster: Cluster) -> None:
    """The same load on one partition, while the cluster has nothing else and while it has 2 000 partitions more."""
    leader = address(cluster, cluster.leader("safe"))
    few = asyncio.run(_batches_per_second(leader))
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("many", MANY_PARTITIONS, replication_factor=BROKERS, timeout=120)
    time.sleep(5)  # until all are followed and nothing is left to do
    many = asyncio.run(_batches_per_second(leader))
    report.add(
        "replicate",
        f"RF=3 with fsync, {SMALL_BATCHES.name}: 1 partition, and with {MANY_PARTITIONS:,} more",
        f"{few:,.0f} and {many:,.0f} batches/s, {many / few:.0%}",
        f">= {FLAT:.0%}",
        many / few >= FLAT,
    )


async def _batches_per_second(leader: str) -> float:
    async with aio.insecure_channel(leader, options=ceiling.UNLIMITED) as channel:
        runs = [await broker_run(channel, "safe", SMALL_BATCHES) for _ in range(ROUNDS)]
    return median(run.messages / run.seconds for run in runs)
