"""Reads a topic from its beginning to its current end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

import raftlog

_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """The records of one partition, summed up."""

    partition: int
    records: int
    value_bytes: int
    keys: int
    """Distinct keys."""
    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class ReadBack:
    """All records of the topic, and a summary of each partition."""

    records: pa.Table
    partitions: list[PartitionRead]
    seconds: float


def read_back(bootstrap: str, topic: str, timeout_s: float) -> ReadBack:
    """Return every record of a topic.

    Raises:
        TimeoutError: the end was not reached in time; the message names the positions.
    """
    started = time.monotonic()
    tables = []
    with raftlog.Consumer(bootstrap) as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        while any(consumer.position(place) < ends[place] for place in places):
            if time.monotonic() > started + timeout_s:
                where = ", ".join(f"{place}: {consumer.position(place)} of {ends[place]}" for place in places)
                raise TimeoutError(f"the end of {topic} was not reached in {timeout_s:g} s; {where}")
            tables.append(consumer.poll_arrow(_POLL_S))
    seconds = time.monotonic() - started
    records = pa.concat_tables(table for table in tables if table.num_rows)
    return ReadBack(records, [_summary(records, place.partition) for place in places], seconds)


def _summary(records: pa.Table, partition: int) -> PartitionRead:
    mine = records.filter(pc.equal(records["partition"], partition))
    extremes = pc.min_max(mine["offset"]).as_py()
    return PartitionRead(
        partition=partition,
        records=mine.num_rows,
        value_bytes=pc.sum(pc.binary_length(mine["value"])).as_py() or 0,
        keys=pc.count_distinct(mine["key"]).as_py(),
        first_offset=extremes["min"] if mine.num_rows else 0,
        next_offset=extremes["max"] + 1 if mine.num_rows else 0,
    )
