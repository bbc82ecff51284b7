"""The golden vectors of docs/format.md: bytes that another implementation must read, and that must never change.

`RAFTLOG_REGENERATE_GOLDEN=1 ./dev test tests/unit/raftlog/format/test_golden.py` rewrites them; review the diff.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raftlog.format import (
    HEADERS_TYPE,
    STAMP_BYTES,
    Attributes,
    Codec,
    Columns,
    decode_batch,
    encode_batch,
    pack_stamp,
    parse_batch,
    parse_header,
)
from raftlog.format.control import Marker, decode_control, encode_control

FILE = Path(__file__).parents[3] / "golden" / "record_batches.json"


def stamped(batch: bytes, base_offset: int, leader_epoch: int) -> bytes:
    return pack_stamp(base_offset, parse_header(batch).batch_length, leader_epoch) + batch[STAMP_BYTES:]


def vectors() -> dict[str, bytes]:
    two = pa.array([b"hello", None], pa.binary())
    full = Columns(
        value=pa.array([b"one", None, b"three"], pa.binary()),
        key=pa.array([b"k", b"", None], pa.binary()),
        timestamp_ms=pa.array([1_700_000_000_000, 1_700_000_000_007, 1_700_000_000_003], pa.int64()),
        headers=pa.array([[("trace", b"1"), ("empty", None)], [], None], HEADERS_TYPE),
    )
    base = 1_700_000_000_000
    named = {
        "one value": encode_batch(Columns(pa.array([b"hello"], pa.binary())), base),
        "a value and a tombstone": encode_batch(Columns(two), base),
        "every column": encode_batch(full, base),
        "stamped by a leader": stamped(encode_batch(Columns(two), base), 4_294_967_296, 7),
        "idempotent producer": encode_batch(Columns(two), base, producer_id=12, producer_epoch=3, base_sequence=40),
        "sparse offsets": encode_batch(
            Columns(two, offset_delta=pa.array([1, 5], pa.uint32())),
            base,
            base_offset=10,
            last_offset_delta=9,
        ),
    }
    named["transactional"] = encode_batch(
        Columns(two), base, attributes=int(Attributes.TRANSACTIONAL), producer_id=12, producer_epoch=3, base_sequence=0
    )
    markers = [Marker(12, 4, True, 9, 40), Marker(70_000, 32_767, False, -1)]
    named["control batch"] = stamped(encode_control(markers, base), 50, 7)
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        named[f"{codec.name.lower()}"] = encode_batch(full, base, codec=codec)
    return named


def described(batch: bytes) -> dict[str, Any]:
    decoded = decode_batch(batch)
    header = {k: v for k, v in decoded.header._asdict().items() if k != "reserved"}
    rows = [
        {
            name: value.hex()
            if isinstance(value, bytes)
            else [[k, v.hex() if v is not None else None] for k, v in value]
            if isinstance(value, list)
            else value
            for name, value in row.items()
        }
        for row in decoded.columns.to_pylist()
    ]
    return {"bytes": batch.hex(), "header": header, "rows": rows}


if os.environ.get("RAFTLOG_REGENERATE_GOLDEN"):
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({name: described(batch) for name, batch in vectors().items()}, indent=1) + "\n")

GOLDEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_decode_to_what_is_written_beside_them(name: str) -> None:
    batch = bytes.fromhex(GOLDEN[name]["bytes"])
    parse_batch(batch)
    assert described(batch) == GOLDEN[name]


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in ("gzip", "snappy", "lz4", "zstd")])
def test_encoding_gives_the_golden_bytes(name: str) -> None:
    assert vectors()[name].hex() == GOLDEN[name]["bytes"]


def test_the_golden_markers_read() -> None:
    batch = bytes.fromhex(GOLDEN["control batch"]["bytes"])
    assert decode_control(batch) == [Marker(12, 4, True, 9, 40), Marker(70_000, 32_767, False, -1, -1)]


def test_no_vector_is_missing() -> None:
    assert set(GOLDEN) == set(vectors())
