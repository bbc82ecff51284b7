"""Compression of a batch's body.

A compressed body is the inflated size as u32, then the codec's own framing: gzip (RFC 1952), snappy raw block,
LZ4 frame, Zstandard frame. The size in front lets a reader refuse a bomb before it inflates a byte, and inflate
into a buffer of the right size at once (docs/adr/0002).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from raftlog.errors import BatchTooExpansive, CorruptRecordError
from raftlog.format.header import HEADER_BYTES, Buffer
from raftlog.types import Codec

_SIZE = struct.Struct("<I")
_NAMES: Final = {Codec.GZIP: "gzip", Codec.SNAPPY: "snappy", Codec.LZ4: "lz4", Codec.ZSTD: "zstd"}


@dataclass(frozen=True, slots=True)
class InflateLimits:
    """The limits for inflating a compressed body: its inflated bytes, and the ratio of inflated to compressed bytes.

    The ratio applies only above `ratio_floor_bytes`, so that a small batch of repetitive records is accepted.
    """

    max_bytes: int = 64 << 20
    max_ratio: int = 1024
    ratio_floor_bytes: int = 1 << 20

    def refusal(self, inflated_size: int, packed_size: int) -> str | None:
        """Return why a body of `packed_size` bytes may not inflate to `inflated_size`, or None."""
        if inflated_size > self.max_bytes:
            return (
                f"the batch inflates to {inflated_size} bytes, more than max.inflate.bytes={self.max_bytes}; "
                "send smaller batches"
            )
        if inflated_size > self.ratio_floor_bytes and inflated_size > self.max_ratio * packed_size:
            return f"the batch inflates {packed_size} bytes to {inflated_size}, more than {self.max_ratio} to one"
        return None


DEFAULT_LIMITS: Final = InflateLimits()


def compress(body: Buffer, codec: Codec, level: int | None = None) -> bytes:
    """Return the compressed `body`; `level` of the codec (gzip 1-9, zstd 1-22), None for its default."""
    if codec is Codec.NONE:
        return bytes(body)
    name = _NAMES[codec]
    if level is not None and pa.Codec.supports_compression_level(name):
        packed = pa.Codec(name, compression_level=level).compress(body, asbytes=True)
    else:
        packed = pa.compress(body, codec=name, asbytes=True)
    return _SIZE.pack(len(body)) + bytes(packed)


def _snappy_size(packed: Any) -> int:
    """Return the size in a raw snappy block's preamble, a varint of at most 32 bits."""
    size = 0
    for position, byte in enumerate(bytes(packed.slice(0, 5))):
        size |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return size
    raise ValueError("the block has no size in front")


def claimed_inflated_size(batch: Buffer, codec_bits: int) -> int:
    """Return the inflated size that the batch claims, or 0 if it is not compressed or too short."""
    if codec_bits == Codec.NONE or len(batch) < HEADER_BYTES + _SIZE.size:
        return 0
    return int(_SIZE.unpack_from(batch, HEADER_BYTES)[0])


def inflate(body: Any, codec: Codec, limits: InflateLimits = DEFAULT_LIMITS) -> Any:
    """Return the inflated body as a `pyarrow.Buffer`; `body` is a `pyarrow.Buffer` too.

    Raises:
        BatchTooExpansive: the claimed size exceeds `limits`; nothing was inflated.
        CorruptRecordError: the body does not inflate, or not to the claimed size.
    """
    if codec is Codec.NONE:
        return body
    if body.size < _SIZE.size:
        raise CorruptRecordError(f"a compressed body has at least {_SIZE.size} bytes, this one {body.size}")
    (inflated_size,) = _SIZE.unpack_from(body)
    packed = body.slice(_SIZE.size)
    refusal = limits.refusal(inflated_size, packed.size)
    if refusal is not None:
        raise BatchTooExpansive(refusal)
    try:
        if codec is Codec.SNAPPY:
            if _snappy_size(packed) != inflated_size:
                raise ValueError("the block claims another size than the batch")
            whole = pa.decompress(packed, inflated_size, codec="snappy")
        else:  # one byte more than claimed shows a body that is longer than it says
            stream = pa.CompressedInputStream(pa.BufferReader(packed), _NAMES[codec])
            whole = stream.read_buffer(inflated_size + 1)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise CorruptRecordError(f"the {codec.name.lower()} body does not inflate: {error}") from None
    if whole.size != inflated_size:
        raise CorruptRecordError(
            f"the {codec.name.lower()} body does not inflate to the {inflated_size} bytes it claims"
        )
    return whole
