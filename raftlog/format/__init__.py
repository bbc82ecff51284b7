"""Record batch, format 1: the unit of produce, storage, replication and fetch (docs/format.md)."""

from raftlog.format.batch import (
    Columns,
    DecodedBatch,
    decode_batch,
    encode_batch,
    iter_headers,
    parse_batch,
    stamp_producer,
)
from raftlog.format.columns import HEADERS_TYPE, schema_for
from raftlog.format.compression import DEFAULT_LIMITS, InflateLimits
from raftlog.format.header import (
    HEADER_BYTES,
    LENGTH_END,
    MAGIC,
    STAMP_BYTES,
    Attributes,
    BatchHeader,
    Buffer,
    pack_stamp,
    parse_header,
    with_append_time,
)
from raftlog.format.validation import MAX_RECORDS, checking_cost_bytes, validate_produced
from raftlog.types import Codec

__all__ = [
    "DEFAULT_LIMITS",
    "HEADERS_TYPE",
    "HEADER_BYTES",
    "LENGTH_END",
    "MAGIC",
    "MAX_RECORDS",
    "STAMP_BYTES",
    "Attributes",
    "BatchHeader",
    "Buffer",
    "Codec",
    "Columns",
    "DecodedBatch",
    "InflateLimits",
    "checking_cost_bytes",
    "decode_batch",
    "encode_batch",
    "iter_headers",
    "pack_stamp",
    "parse_batch",
    "parse_header",
    "schema_for",
    "stamp_producer",
    "validate_produced",
    "with_append_time",
]
