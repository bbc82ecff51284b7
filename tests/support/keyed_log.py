"""A compacted log on a `MemoryStorage`, its cleaner, and what it must hold."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from random import Random
from typing import Self

import pyarrow as pa

from broker.log.cleaner import clean, plan_cleaning
from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from raftlog.format import Codec, Columns, decode_batch, encode_batch, iter_headers, validate_produced
from raftlog.format.batch import DecodedBatch
from tests.support.log_driver import TOPIC_ID, FakeClock, open_manager
from tests.support.memory_storage import MemoryStorage

Record = tuple[int, int, bytes | None, bytes | None]
"""(offset, timestamp, key, value)"""


def keyed_batch(
    rows: Sequence[tuple[bytes | None, bytes | None]],
    timestamps_ms: Sequence[int] | int = 1_000,
    *,
    codec: Codec = Codec.NONE,
    producer: tuple[int, int, int] = (-1, -1, -1),
) -> bytes:
    """Return a batch of (key, value) rows; `producer`: id, epoch, base sequence."""
    keys = pa.array([key for key, _ in rows], pa.binary())
    values = pa.array([value for _, value in rows], pa.binary())
    stamps = None if isinstance(timestamps_ms, int) else pa.array(timestamps_ms, pa.int64())
    base_ms = timestamps_ms if isinstance(timestamps_ms, int) else timestamps_ms[0]
    return encode_batch(
        Columns(values, None if keys.null_count == len(keys) else keys, stamps),
        base_ms,
        codec=codec,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
    )


def rows_of(decoded: DecodedBatch) -> list[Record]:
    """Return the records of a batch."""
    base = decoded.header.base_offset
    found = []
    for number, row in enumerate(decoded.columns.to_pylist()):
        offset = base + row.get("offset_delta", number)
        stamp = row.get("timestamp_ms", decoded.header.base_timestamp_ms)
        if decoded.header.attributes & 8:
            stamp = decoded.header.base_timestamp_ms
        found.append((offset, stamp, row.get("key"), row["value"]))
    return found


class KeyedLog:
    """The log of one compacted partition; every record that was ever appended is remembered in `written`."""

    def __init__(self, config: LogConfig, storage: MemoryStorage | None = None) -> None:
        self.storage = storage or MemoryStorage()
        self.config = config
        self.clock = FakeClock()
        self.written: list[Record] = []
        self.epoch = 1
        self.manager: LogManager
        self.log: PartitionLog
        self.open()

    def open(self) -> None:
        """Start the broker."""
        self.manager = open_manager(self.storage, config=self.config, clock=self.clock)
        self.log = self.manager.create("topic", TOPIC_ID, 0, self.config)
        self.log.high_watermark = self.log.log_end_offset

    def stopped(self) -> Self:
        """Return another machine in the same state, where nothing runs any more: `stop` starts it."""
        made = copy(self)
        made.storage, made.clock, made.written = self.storage.copy(), replace(self.clock), list(self.written)
        del made.manager, made.log
        return made

    def append(self, *rows: tuple[bytes | None, bytes | None], **fields: object) -> int:
        """Append one batch, not yet committed; return its base offset."""
        batch = keyed_batch(rows, fields.pop("timestamps_ms", self.clock.now), **fields)  # type: ignore[arg-type] # as given
        header = validate_produced(batch)
        found = decode_batch(batch)
        end = self.log.log_end_offset
        result = self.log.append(batch, header, leader_epoch=self.epoch, now_ms=self.clock.now)
        assert result.base_offset == end, f"the append got offset {result.base_offset}, but the log ended at {end}"
        self.written += [(end + offset, *rest) for offset, *rest in rows_of(found)]  # type: ignore[misc] # four again
        return end

    def commit(self) -> None:
        """Flush; everything is committed then."""
        self.log.flush()
        self.log.high_watermark = self.log.log_end_offset

    def clean(self, *, dedupe_bytes: int = 1 << 20, force: bool = True) -> bool:
        """Compact if it is due (`force`: if there is anything to do); return whether that was so."""
        plan = plan_cleaning(self.log, self.log.high_watermark, self.clock.now)
        if plan is None or not (plan.is_due or force):
            return False
        for _ in clean(plan, dedupe_bytes=dedupe_bytes, clock=self.clock.now_ms):
            pass
        return True

    def stop(self, dice: Random | None) -> None:
        """Lose power (None: kill -9) and start again."""
        self.storage.crash(dice)
        self.open()
        self.written = [record for record in self.written if record[0] < self.log.log_end_offset]

    def batches(self) -> list[DecodedBatch]:
        """Read the whole log; every batch begins where the one before ended, and passes its checksum."""
        found: list[DecodedBatch] = []
        offset = self.log.log_start_offset
        while offset < self.log.log_end_offset:
            result = self.log.read(offset, 300, self.log.log_end_offset, blocking=True)
            assert result is not None
            assert result.records, f"the log has no records at offset {offset}, below its end: {self.log}"
            for position, header in iter_headers(result.records):
                assert not found or header.base_offset == found[-1].header.next_offset, (
                    f"the batch at offset {header.base_offset} does not begin where the one before it ended"
                )
                found.append(decode_batch(memoryview(result.records)[position : position + header.size]))
            assert result.next_offset > offset, (
                f"a read at offset {offset} ended at {result.next_offset}, without any progress"
            )
            offset = result.next_offset
        return found

    def records(self) -> list[Record]:
        """Return what can be read."""
        return [row for batch in self.batches() for row in rows_of(batch)]

    def check(self, *, untouched_from: int | None = None) -> None:
        """Nothing is there that was not written, the last value of each key is, and nothing above the bound is gone."""
        found = self.records()
        kept, written = set(found), {record[0]: record for record in self.written}
        assert found == sorted(found), "the cleaner changed the order of records"
        assert all(written[record[0]] == record for record in found), "the cleaner changed a record"
        last: dict[bytes | None, Record] = {}
        for record in self.written:
            last[record[2]] = record
        for record in last.values():
            assert record in kept or record[3] is None or record[2] is None, (
                f"the cleaner removed the last record of its key: {record}"
            )
        seen: dict[bytes | None, Record] = {record[2]: record for record in found}
        for key, record in last.items():
            if record not in kept and key is not None:
                assert key not in seen, f"the cleaner brought a deleted key back: {seen[key]}"
        if untouched_from is not None:
            expected = [record for record in self.written if record[0] >= untouched_from]
            assert [record for record in found if record[0] >= untouched_from] == expected, (
                f"the cleaner removed or changed records from offset {untouched_from} on, which it must leave alone"
            )
        piece_start = self.log.log_start_offset
        while piece_start < self.log.log_end_offset:
            piece_start = self.log.check(piece_start, 1 << 20).next_offset
