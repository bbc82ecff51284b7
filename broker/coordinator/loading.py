"""The log of a coordinator's partition, replayed into a core: read and taken apart off the event loop, in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, Protocol

from broker.coordinator.records import decode
from broker.log.partition_log import ReadResult
from raftlog.errors import CorruptRecordError, OffsetOutOfRange

PIECE_BYTES: Final = 1 << 20
REPLAY_SLICE_RECORDS: Final = 500
REPLAY_SLICE_S: Final = 0.004
"""After so many records replayed, or so long, others have their turn on the event loop."""


class ReadableLog(Protocol):
    """The part of a partition's log that loading needs."""

    @property
    def log_start_offset(self) -> int:
        """The first offset that can be read."""
        ...

    def read(self, offset: int, max_bytes: int, end_offset: int, *, blocking: bool) -> ReadResult | None:
        """Return whole batches from `offset` on, none at or above `end_offset`."""
        ...


async def load(
    log: ReadableLog, end_offset: int, replay: Callable[[bytes, bytes | None], None], executor: Executor
) -> int:
    """Replay every record from the log's start up to `end_offset` (exclusive); return how many there were.

    Raises:
        CorruptRecordError: bytes that do not check, or a record that `replay` refuses; names the offset.
        StorageError: the log directory is offline.
    """
    loop = asyncio.get_running_loop()
    position, count = log.log_start_offset, 0
    while position < end_offset:
        try:
            records, next_offset = await loop.run_in_executor(executor, _read, log, position, end_offset)
        except OffsetOutOfRange:
            if log.log_start_offset <= position:
                raise
            position = log.log_start_offset  # it has moved meanwhile
            continue
        number, until_s = 0, loop.time() + REPLAY_SLICE_S
        for offset, key, value in records:
            try:
                replay(key, value)
            except CorruptRecordError as error:
                raise CorruptRecordError(f"the record at offset {offset}: {error}") from error
            number += 1
            if number == REPLAY_SLICE_RECORDS or loop.time() > until_s:
                await asyncio.sleep(0)
                number, until_s = 0, loop.time() + REPLAY_SLICE_S
        count += len(records)
        if next_offset <= position:
            raise CorruptRecordError(f"nothing can be read at offset {position}, the log ends at {end_offset}")
        position = next_offset
    return count


def _read(log: ReadableLog, position: int, end_offset: int) -> tuple[list[tuple[int, bytes, bytes | None]], int]:
    result = log.read(position, PIECE_BYTES, end_offset, blocking=True)
    assert result is not None, "a blocking read waits"
    # The first batch may begin below the position: the log's start can lie within one.
    return [record for record in decode(result.records) if record[0] >= position], result.next_offset
