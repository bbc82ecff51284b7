"""What connections cost a broker: memory of idle ones, and the event loop with very many producers connected.

    python -m bench.connections idle ADDRESS COUNT              the client's process: connections that never call
    python -m bench.connections producers ADDRESS TOPIC COUNT   the client's process: one producer on each connection

Memory is private memory, of the broker's process alone, before and after. The lag of the event loop is the broker's own
measurement; on a machine whose cores are busy it includes the wait for a core, so the row names the broker's share of
a core.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil
from grpc import aio

from bench.produce import batch_of
from bench.report import Report
from raftlog import Admin
from raftlog.format import wire
from raftlog.testing import Cluster
from raftlog.v1 import log_pb2, metadata_pb2, metadata_pb2_grpc

IDLE: Final = 10_000
LIMIT_BYTES: Final = 30_000
PRODUCERS: Final = 1_000
SECONDS: Final = 20
"""How long the producers send."""
EACH_S: Final = 2.0
"""How often each of them sends a record."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of an HTTP/2 client: the preface, and settings without any change."""
BATCH_BYTES: Final = 1_300
CONFIG: Final = {"max.connections.per.ip": 100_000, "max.streams.per.ip": 100_000}
"""All connections come from one address."""


# The client's process


def _more_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def idle(where: str, count: int) -> None:
    """Open connections, say so, hold them until there is a line on standard input, and say how many are still open."""
    _more_descriptors()
    host, _, port = where.rpartition(":")
    held = []
    for _ in range(count):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(PREFACE)
        assert connection.recv(9), "the broker closed the connection"  # its own settings
        held.append(connection)
    print(len(held), flush=True)
    sys.stdin.readline()
    print(sum(_is_open(connection) for connection in held), flush=True)
    sys.stdin.read()


def _is_open(connection: socket.socket) -> bool:
    """Whether the broker has not closed the connection; drops what it has said meanwhile."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def producers(where: str, topic: str, count: int) -> None:
    """Open a produce call on a connection of each producer, say so, wait for a line, and send for SECONDS."""
    _more_descriptors()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 60_000)]
    channels = [aio.insecure_channel(where, options=options) for _ in range(count)]
    stub = metadata_pb2_grpc.MetadataStub(channels[0])  # type: ignore[no-untyped-call,unused-ignore] # generated
    answer = await stub.Get(metadata_pb2.MetadataRequest(topics=[topic]))
    batch = batch_of(BATCH_BYTES)
    part = log_pb2.ProducePartition(topic_id=answer.topics[0].topic_id, leader_epoch=-1)
    latencies_ms: list[float] = []

    async def send(call: Any, number: int) -> None:
        begun_s = time.perf_counter()
        await call.write(wire.Produce(log_pb2.ProduceRequest(correlation_id=number), [wire.ProducePart(part, batch)]))
        answer = await call.read()
        assert not answer.results[0].HasField("error"), answer.results[0].error.message
        latencies_ms.append((time.perf_counter() - begun_s) * 1e3)

    calls = [
        channel.stream_stream(
            "/raftlog.v1.Log/Produce",
            request_serializer=wire.encode_produce,
            response_deserializer=log_pb2.ProduceResponse.FromString,
        )()
        for channel in channels
    ]
    for call in calls:
        await send(call, 0)
    print(len(calls), flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    latencies_ms.clear()
    until_s = time.monotonic() + SECONDS

    async def keep_sending(number: int, call: Any) -> None:
        await asyncio.sleep(EACH_S * number / count)
        while time.monotonic() < until_s:
            begun_s = time.monotonic()
            await send(call, 1)
            await asyncio.sleep(max(0.0, EACH_S - (time.monotonic() - begun_s)))

    await asyncio.gather(*(keep_sending(number, call) for number, call in enumerate(calls)))
    latencies_ms.sort()
    print(
        len(latencies_ms), latencies_ms[len(latencies_ms) // 2], latencies_ms[len(latencies_ms) * 99 // 100], flush=True
    )
    await loop.run_in_executor(None, sys.stdin.read)


# The measurement


@contextmanager
def _client(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.connections", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the client's process ended without an answer"
    return line.split()


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _memory(cluster: Cluster) -> int:
    private: int = psutil.Process(cluster.pid(1)).memory_full_info().uss
    return private


def _settled(cluster: Cluster) -> int:
    """Return the memory once it has stopped to grow."""
    before, now = 0, _memory(cluster)
    while abs(now - before) > 100_000:
        time.sleep(1.0)
        before, now = now, _memory(cluster)
    return now


def run(report: Report) -> None:
    """Open idle connections, then connections with a producer each, to one broker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(IDLE, hard // 2 - 500)  # a broker keeps half of its descriptors for files
    with Cluster(nodes=1, config=CONFIG) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("many", 1)
        before = _settled(cluster)
        with _client("idle", cluster.bootstrap, str(count)) as process:
            held = int(_line(process)[0])
            each = (_settled(cluster) - before) / held
            _go(process)
            still = int(_line(process)[0])
            assert still == held, f"the broker closed {held - still} of {held} connections that must stay open"
        report.add(
            "connections",
            f"{held:,} idle connections, the broker's memory for each",
            f"{each / 1e3:.1f} KB",
            f"<= {LIMIT_BYTES / 1e3:.0f} KB",
            each <= LIMIT_BYTES,
        )
    with Cluster(nodes=1, config=CONFIG) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("many", 1)
        before = _settled(cluster)
        broker = psutil.Process(cluster.pid(1))
        with _client("producers", cluster.bootstrap, "many", str(PRODUCERS)) as process:
            held = int(_line(process)[0])
            each = (_settled(cluster) - before) / held
            used_before = sum(broker.cpu_times()[:2])
            _go(process)
            sent, p50_ms, p99_ms = (float(word) for word in _line(process))
            used_s = sum(broker.cpu_times()[:2]) - used_before
        cluster.stop(1)
        lag = re.search(r"largest_ms=([\d.]+) share_above_10_ms=([\d.]+)", cluster.log_tail(1))
        assert lag is not None, "the broker's log lacks the lag of the event loop, which it writes when it stops"
    report.add("connections", f"{held:,} connections with a producer each, memory for each", f"{each / 1e3:.1f} KB")
    report.add(
        "connections",
        f"{held:,} connected producers, {sent / SECONDS:.0f} records a second in all",
        f"p50 {p50_ms:.2f} p99 {p99_ms:.2f} ms; {used_s / sent * 1e6:.0f} us of the broker's CPU each, "
        f"{used_s / SECONDS:.0%} of a core; its event loop was late by more than 10 ms {float(lag[2]):.2%} of the "
        f"time, at most {float(lag[1]):.0f} ms, opening the connections included",
    )


if __name__ == "__main__":
    if sys.argv[1] == "idle":
        idle(sys.argv[2], int(sys.argv[3]))
    else:
        import uvloop

        uvloop.run(producers(sys.argv[2], sys.argv[3], int(sys.argv[4])))
