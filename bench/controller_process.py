"""A bare controller: a voter of a quorum and nothing else. `python -m bench.controller_process ID VOTERS DIRECTORY`.

Reads commands from standard input and answers each with a line of JSON:

    status             {"active": bool, "offset": int}
    commits SECONDS N  commits as fast as N proposers in this process can: {"commits_per_s": ..., "p50_ms": ..., ...}
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import uvloop
from grpc import aio

from broker.clock import SystemClock
from raftlog.v1 import records_pb2
from raftmeta.port import MetadataPort
from raftmeta.quorum.config import SERVER_OPTIONS, Endpoint, QuorumConfig
from raftmeta.quorum.voter_metadata import QuorumMetadata, open_quorum

BROKER_ID = 1


def parse_voters(text: str) -> dict[int, Endpoint]:
    """Return the voters in "1@host:port,2@host:port"."""
    voters = {}
    for item in text.split(","):
        node_id, _, address = item.partition("@")
        host, _, port = address.rpartition(":")
        voters[int(node_id)] = Endpoint(host, int(port))
    return voters


def register() -> records_pb2.MetadataCommand:
    """Return the command that makes `allocate` possible."""
    return records_pb2.MetadataCommand(
        register_broker=records_pb2.RegisterBrokerCommand(
            broker_id=BROKER_ID, incarnation_id=b"bench" + bytes(11), host="127.0.0.1", port=1, directory_id=bytes(16)
        )
    )


def allocate(broker_epoch: int) -> records_pb2.MetadataCommand:
    """Return a small command that changes something each time."""
    return records_pb2.MetadataCommand(
        allocate_producer_ids=records_pb2.AllocateProducerIdsCommand(broker_id=BROKER_ID, broker_epoch=broker_epoch)
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of measurements."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def commits(metadata: MetadataPort, seconds: float, proposers: int) -> dict[str, float]:
    """Commit for a while and return the figures."""
    epoch = (await metadata.propose(register())).broker_epoch
    took_ms: list[float] = []
    until = time.perf_counter() + seconds

    async def propose() -> None:
        while (begun := time.perf_counter()) < until:
            await metadata.propose(allocate(epoch))
            took_ms.append((time.perf_counter() - begun) * 1e3)

    begun = time.perf_counter()
    await asyncio.gather(*(propose() for _ in range(proposers)))
    return {
        "commits_per_s": len(took_ms) / (time.perf_counter() - begun),
        "p50_ms": quantile(took_ms, 0.5),
        "p99_ms": quantile(took_ms, 0.99),
    }


async def _answer(metadata: QuorumMetadata, words: Sequence[str]) -> dict[str, float]:
    match words:
        case ["status"]:
            return {"active": metadata.is_active_controller, "offset": metadata.image.offset}
        case ["commits", seconds, proposers]:
            return await commits(metadata, float(seconds), int(proposers))
        case _:
            raise SystemExit(f"unknown command {words}")


async def serve(node_id: int, voters: dict[int, Endpoint], directory: str) -> None:
    """Run until standard input ends."""
    executor = ThreadPoolExecutor(2)
    config = QuorumConfig(node_id=node_id, directory=directory, cluster_id="bench", voters=voters)

    def fatal(error: BaseException) -> None:
        raise SystemExit(f"controller {node_id} failed: {error}")

    metadata = await open_quorum(config, executor, SystemClock(), fatal)
    server = aio.server(options=SERVER_OPTIONS)
    metadata.add_to_server(server)
    server.add_insecure_port(voters[node_id].address)
    await server.start()
    await metadata.start()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await _answer(metadata, line.decode().split())), flush=True)
    await server.stop(None)
    await metadata.close()
    executor.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    uvloop.run(serve(int(sys.argv[1]), parse_voters(sys.argv[2]), sys.argv[3]))
