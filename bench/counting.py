"""The ceiling of Spark's sinks and sources: a server that only counts, a sink that only sends, a source in memory.

    python -m bench.counting    the server; prints its port

Both use what the connector uses, PySpark's Arrow interfaces and gRPC streams, without a log.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

SLICE_BYTES: Final = 1 << 20
IN_FLIGHT: Final = 8
_METHOD: Final = "/raftlog.bench.Counting/Count"
SOURCE_SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
)


# The server


async def serve() -> None:
    """Count the bytes of messages until standard input ends."""
    import grpc
    from grpc import aio

    async def count(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        received = 0
        async for message in messages:
            received += len(message)
            yield received.to_bytes(8, "little")

    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = aio.server(options=unlimited)
    _, service, method = _METHOD.split("/")
    handler: Any = grpc.stream_stream_rpc_method_handler(count)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


# The sink

_channels: dict[tuple[int, str], Any] = {}


def _channel(address: str) -> Any:
    import grpc

    key = (os.getpid(), address)
    if key not in _channels:
        _channels.clear()
        _channels[key] = grpc.insecure_channel(
            address, [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        )
    return _channels[key]


@dataclass
class Sent(WriterCommitMessage):
    """The bytes that a task has sent."""

    size: int


class CountingSink(DataSourceStreamArrowWriter):
    """Sends each Arrow batch, in slices, as Arrow IPC."""

    def __init__(self, address: str) -> None:
        self._address = address

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send all rows, at most IN_FLIGHT slices ahead of the server."""
        import threading

        may_send = threading.Semaphore(IN_FLIGHT)
        sent = 0

        def messages() -> Iterator[bytes]:
            nonlocal sent
            for batch in iterator:
                rows = max(1, batch.num_rows * SLICE_BYTES // max(1, batch.nbytes))
                for start in range(0, batch.num_rows, rows):
                    data = batch.slice(start, rows).serialize().to_pybytes()
                    may_send.acquire()
                    sent += len(data)
                    yield data

        for _ in _channel(self._address).stream_stream(_METHOD)(messages()):
            may_send.release()
        return Sent(sent)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing."""


class Counting(DataSource):
    """`format("counting")`: the sink, with the option `address`."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "counting"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the sink."""
        return CountingSink(self.options["address"])


# The source


@dataclass
class Rows(InputPartition):
    """Rows [`start`, `end`) of one of the partitions."""

    number: int
    start: int
    end: int


class MemoryReader(DataSourceStreamReader):
    """Yields the same batch of rows again and again, with increasing offsets."""

    def __init__(self, rows_per_trigger: int, partitions: int, batch_rows: int, value_bytes: int) -> None:
        self._rows_per_trigger = rows_per_trigger
        self._partitions = partitions
        self._batch_rows = batch_rows
        self._value_bytes = value_bytes

    def initialOffset(self) -> dict[str, int]:
        """Begin at 0."""
        return {"row": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return an end one trigger further."""
        return {"row": start["row"] + self._rows_per_trigger}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Divide the rows."""
        share = (end["row"] - start["row"]) // self._partitions
        return [
            Rows(number, start["row"] + number * share, start["row"] + (number + 1) * share)
            for number in range(self._partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows as Arrow batches with the columns of a log."""
        import numpy as np
        import pyarrow as pa

        assert isinstance(partition, Rows)
        rows, size = self._batch_rows, self._value_bytes
        value = pa.Array.from_buffers(
            pa.binary(),
            rows,
            [
                None,
                pa.py_buffer(np.arange(0, (rows + 1) * size, size, dtype=np.int32)),
                pa.py_buffer(bytes(rows * size)),
            ],
        )
        fixed = [
            pa.nulls(rows, pa.binary()),
            value,
            pa.array(["memory"]).take(pa.array(np.zeros(rows, dtype=np.int32))),
            pa.array(np.full(rows, partition.number, dtype=np.int32)),
        ]
        times = pa.array(np.full(rows, 1_700_000_000_000_000, dtype=np.int64)).cast(pa.timestamp("us", "UTC"))
        kind = pa.array(np.zeros(rows, dtype=np.int32))
        names = [column.split()[0] for column in SOURCE_SCHEMA.split(", ")]
        for first in range(partition.start, partition.end, rows):
            offsets = pa.array(np.arange(first, first + rows, dtype=np.int64))
            batch = pa.RecordBatch.from_arrays([*fixed, offsets, times, kind], names=names)
            yield batch.slice(0, min(rows, partition.end - first))


class Memory(DataSource):
    """`format("memory_rows")`: the source."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "memory_rows"

    def schema(self) -> str:
        """Return the columns of a log."""
        return SOURCE_SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the source; the option `shape` has its arguments as JSON."""
        return MemoryReader(**json.loads(self.options["shape"]))


if __name__ == "__main__":
    asyncio.run(serve())
