"""The broker's produce path beside the ceiling: same client, same window, same batch sizes, turn and turn about."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pyarrow as pa
from grpc import aio

from bench import ceiling
from bench.report import Report
from bench.stream import Run, keep_in_flight
from raftlog import Admin, wire
from raftlog.format import Columns, encode_batch
from raftlog.testing import Cluster
from raftlog.v1 import log_pb2, metadata_pb2, metadata_pb2_grpc

ROUNDS = 5
SHARE = 0.6
"""The part of the ceiling that the broker is to keep."""
UNSAFE = {"flush.messages": "1000000000"}
"""Topic config without fsync before the answer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Batches of `size` bytes, `window` of them in flight, `count` in a run."""

    name: str
    size: int
    count: int
    window: int


SHAPES = (Shape("64 KiB batches", 1 << 16, 4_000, 16), Shape("1 MiB batches", 1 << 20, 400, 5))
ONE_IN_FLIGHT = Shape("one 1 KB record in flight", 1_000, 2_000, 1)


def batch_of(size: int) -> bytes:
    """Return a batch of about `size` bytes, of records of 1 000 bytes."""
    values = [os.urandom(1_000) for _ in range(max(1, (size - 300) // 1_004))]
    return encode_batch(Columns(pa.array(values, pa.binary())), 1_700_000_000_000)


@contextlib.contextmanager
def ceiling_servers(*, fsync: bool, followers: int = 0) -> Iterator[str]:
    """Run a leader of the ceiling with its followers, each a process, and yield its address."""
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
    """Send one shape to the ceiling."""
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
    """Send one shape to a partition's leader, with acks=all."""
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
    """Send every shape to the ceiling at `top` and to a topic's `leader`, in turn; `p50_ms` is for one in flight."""
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
