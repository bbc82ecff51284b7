"""Making the checksums of damaged files good again, so that what lies behind them is looked at."""

from __future__ import annotations

import hashlib
from typing import Final

import google_crc32c
import numpy as np

from broker.log.index import OFFSET_ENTRY, TIME_ENTRY, TXN_ENTRY, seal_entries
from raftlog.format import HEADER_BYTES
from raftlog.format.header import LENGTH_END, build_batch, parse_header

_ENTRIES: Final = {".index": OFFSET_ENTRY, ".timeindex": TIME_ENTRY, ".txnindex": TXN_ENTRY}
_DIGEST_BYTES: Final = 32


def repair(path: str, data: bytes) -> bytes:
    """Return a file of a log directory with every checksum in it as its content calls for."""
    name = path.rpartition("/")[2]
    stem, dot, suffix = name.partition(".")
    if dot + suffix == ".log":
        return log_segment(data)
    if dot + suffix in _ENTRIES:
        entries = np.frombuffer(data, _ENTRIES[dot + suffix], count=len(data) // _ENTRIES[dot + suffix].itemsize).copy()
        base_offset = int(stem) if stem.isdecimal() and len(stem) <= 20 else 0
        sealed = seal_entries(min(base_offset, (1 << 63) - 1), entries)
        return sealed + data[len(sealed) :]
    return text_lines(data)


def log_segment(data: bytes) -> bytes:
    """Return a segment with the checksum of every batch made good, as far as headers lead from one to the next."""
    out, position = [], 0
    while len(data) - position >= HEADER_BYTES:
        header = parse_header(data, position)
        end = position + LENGTH_END + header.batch_length
        if header.size < HEADER_BYTES or end > len(data):
            break
        out.append(build_batch(header, data[position + HEADER_BYTES : end]))
        position = end
    return b"".join(out) + data[position:]


def text_lines(data: bytes) -> bytes:
    """Return a file of lines with the count and the checksum that its second line is to have."""
    head, _, rest = data.partition(b"\n")
    _, _, body = rest.partition(b"\n")
    return head + b"\n" + f"{body.count(10)} {google_crc32c.value(body):08x}\n".encode() + body


def metadata_snapshot(data: bytes) -> bytes:
    """Return a snapshot of the metadata with the digest that its content calls for."""
    body = data[:-_DIGEST_BYTES]
    return body + hashlib.sha256(body).digest()
