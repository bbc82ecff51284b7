"""The ceiling: the least that a broker on this stack can do for a produced batch, and nothing else.

A gRPC stream of raw bytes; the server checks a CRC, appends to a file, syncs in groups when told to, and answers with a
counter. No protobuf, no Arrow, no topics. What raftlog reaches is judged as a share of this, in the same run.

    python -m bench.ceiling DIRECTORY PORT-FILE FSYNC(0|1)
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator
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
_FRONT = struct.Struct("<I")


def message(size: int) -> bytes:
    """Return a message of `size` bytes that the server accepts: CRC-32C, then the bytes it covers."""
    body = os.urandom(size - _FRONT.size)
    return _FRONT.pack(google_crc32c.value(body)) + body


class _AppendOnlyFile:
    def __init__(self, path: Path, fsync: bool) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND)
        self._fsync = fsync
        self._appended = self._synced = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._syncing = False
        self._thread = ThreadPoolExecutor(1)

    def append(self, data: bytes) -> asyncio.Future[None] | None:
        os.write(self._file, data)
        self._appended += 1
        if not self._fsync:
            return None
        loop = asyncio.get_running_loop()
        held: asyncio.Future[None] = loop.create_future()
        self._waiting.append((self._appended, held))
        if not self._syncing:
            self._syncing = True
            self._task = loop.create_task(self._sync())
        return held

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            target = self._appended
            await loop.run_in_executor(self._thread, os.fdatasync, self._file)
            while self._waiting and self._waiting[0][0] <= target:
                self._waiting.popleft()[1].set_result(None)
        self._syncing = False


async def _serve(directory: Path, port_file: Path, fsync: bool) -> None:
    log = _AppendOnlyFile(directory / "ceiling.log", fsync)

    async def produce(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        owed: asyncio.Queue[asyncio.Future[None] | None] = asyncio.Queue()
        done = object()

        async def read() -> None:
            async for data in requests:
                (expected,) = _FRONT.unpack_from(data)
                assert google_crc32c.value(pa.py_buffer(data).slice(_FRONT.size)) == expected
                owed.put_nowait(log.append(data))
            owed.put_nowait(done)  # type: ignore[arg-type] # the mark of the end

        reader = asyncio.create_task(read())
        count = 0
        while (held := await owed.get()) is not done:
            if held is not None:
                await held
            count += 1
            yield struct.pack("<Q", count)
        await reader

    server = aio.server(options=UNLIMITED)
    handler: Any = grpc.stream_stream_rpc_method_handler(produce)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ceiling", {"Produce": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    aside = port_file.with_suffix(".tmp")
    aside.write_text(str(port))
    aside.replace(port_file)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1"))
