"""Strategies and shortcuts for record batches in tests."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from raftlog.format import HEADERS_TYPE, Codec, Columns, encode_batch


def batch_of(*values: bytes | None, timestamp_ms: int = 1_000, codec: Codec = Codec.NONE, **fields: Any) -> bytes:
    """Return a batch with these values and nothing else."""
    return encode_batch(Columns(pa.array(values, pa.binary())), timestamp_ms, codec=codec, **fields)


payloads = st.one_of(st.none(), st.binary(max_size=40))
header_lists = st.lists(st.tuples(st.text(max_size=8), payloads), max_size=3)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Columns, int]:
    """Columns of one to eight rows with any of the optional ones, and a base timestamp."""
    rows = draw(st.integers(1, 8))

    def column(elements: st.SearchStrategy[Any], kind: Any) -> Any:
        return pa.array(draw(st.lists(elements, min_size=rows, max_size=rows)), kind)

    base = draw(st.integers(0, 2**41))
    return (
        Columns(
            value=column(payloads, pa.binary()),
            key=column(payloads, pa.binary()) if draw(st.booleans()) else None,
            timestamp_ms=column(st.integers(0, 2**41), pa.int64()) if draw(st.booleans()) else None,
            headers=column(header_lists, HEADERS_TYPE) if draw(st.booleans()) else None,
        ),
        base,
    )


codecs = st.sampled_from(list(Codec))
