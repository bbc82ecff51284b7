"""The ceiling: a server with the least work that a broker on this stack needs for a produced batch.

It reads a gRPC stream of raw bytes, checks a CRC, appends to a file, optionally syncs in groups, and answers with a
counter. With followers it also pushes the bytes to each, and answers when all of them hold the bytes. It has no
protobuf, Arrow, topics or epochs. Brokers are measured as a share of this ceiling, in the same run.

    python -m bench.ceiling DIRECTORY READY-FILE FSYNC(0|1)                   a leader; READY-FILE gets its port
    python -m bench.ceiling DIRECTORY READY-FILE FSYNC(0|1) LEADER-ADDRESS    a follower
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pyarrow as pa
import uvloop
from grpc import aio

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
METHOD = "/ceiling/Produce"
_REPLICATE = "/ceiling/Replicate"
_FRONT = struct.Struct("<I")
_COUNT = struct.Struct("<Q")


def message(size: int) -> bytes:
    """Return a message of `size` bytes that the server accepts: CRC-32C, then the bytes it covers."""
    body = os.urandom(size - _FRONT.size)
    return _FRONT.pack(google_crc32c.value(body)) + body


class _AppendOnlyFile:
    """A file of messages; calls `on_durable` with the number of appended messages or, with `fsync`, of synced ones."""

    def __init__(self, path: Path, fsync: bool, on_durable: Callable[[int], None]) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND)
        self._fsync = fsync
        self._on_durable = on_durable
        self.appended = 0
        self._synced = 0
        self._syncing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1)

    def append(self, data: bytes) -> None:
        (expected,) = _FRONT.unpack_from(data)
        assert google_crc32c.value(pa.py_buffer(data).slice(_FRONT.size)) == expected
        os.write(self._file, data)
        self.appended += 1
        if not self._fsync:
            self._on_durable(self.appended)
        elif self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync())

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        while self._synced < self.appended:
            target = self.appended
            await loop.run_in_executor(self._thread, os.fdatasync, self._file)
            self._synced = target
            self._on_durable(target)
        self._syncing = None


class _Leader:
    def __init__(self, directory: Path, fsync: bool) -> None:
        self._held = {-1: 0}
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._followers: dict[int, asyncio.Queue[bytes]] = {}
        self._log = _AppendOnlyFile(directory / "ceiling.log", fsync, lambda count: self._advance(-1, count))

    def _advance(self, replica: int, count: int) -> None:
        self._held[replica] = count
        everywhere = min(self._held.values())
        while self._waiting and self._waiting[0][0] <= everywhere:
            self._waiting.popleft()[1].set_result(None)

    async def produce(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        owed: asyncio.Queue[asyncio.Future[None] | None] = asyncio.Queue()

        async def read() -> None:
            async for data in requests:
                held = asyncio.get_running_loop().create_future()
                self._waiting.append((self._log.appended + 1, held))
                owed.put_nowait(held)
                for queue in self._followers.values():
                    queue.put_nowait(data)
                self._log.append(data)
            owed.put_nowait(None)

        reader = asyncio.create_task(read())
        count = 0
        while (held := await owed.get()) is not None:
            await held
            count += 1
            yield _COUNT.pack(count)
        await reader

    async def replicate(self, acks: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        replica = len(self._followers)
        first = self._log.appended
        self._held[replica] = first
        queue = self._followers[replica] = asyncio.Queue()

        async def read() -> None:
            async for ack in acks:
                self._advance(replica, first + _COUNT.unpack(ack)[0])

        reader = asyncio.create_task(read())
        try:
            yield b""  # tells the follower that it is registered
            while True:
                yield await queue.get()
        finally:
            reader.cancel()


async def _lead(directory: Path, ready_file: Path, fsync: bool) -> None:
    leader = _Leader(directory, fsync)
    server = aio.server(options=UNLIMITED)
    handlers: dict[str, Any] = {
        METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(leader.produce),
        _REPLICATE.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(leader.replicate),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ceiling", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _say(ready_file, str(port))
    await server.wait_for_termination()


async def _follow(directory: Path, ready_file: Path, fsync: bool, leader: str) -> None:
    held = 0
    due = asyncio.Event()

    def on_durable(count: int) -> None:
        nonlocal held
        held = count
        due.set()

    log = _AppendOnlyFile(directory / "ceiling.log", fsync, on_durable)
    async with aio.insecure_channel(leader, options=UNLIMITED) as channel:
        call: Any = channel.stream_stream(_REPLICATE)()

        async def acknowledge() -> None:
            while True:
                await due.wait()
                due.clear()
                await call.write(_COUNT.pack(held))

        acknowledging = asyncio.create_task(acknowledge())
        await call.read()
        _say(ready_file, "following")
        while (data := await call.read()) is not aio.EOF:
            log.append(data)
        acknowledging.cancel()


def _say(ready_file: Path, text: str) -> None:
    aside = ready_file.with_suffix(".tmp")
    aside.write_text(text)
    aside.replace(ready_file)


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
    uvloop.run(_follow(*arguments, sys.argv[4]) if len(sys.argv) > 4 else _lead(*arguments))
