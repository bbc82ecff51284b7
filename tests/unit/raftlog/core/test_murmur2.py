"""Kafka's hash: its own known values, and the column against the single key."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.murmur2 import key_hash, murmur2, murmur2_column

KNOWN = {  # Apache Kafka, UtilsTest.testMurmur2
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), KNOWN.items())
def test_known_values(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected
    assert murmur2_column(pa.array([key])).tolist() == [expected]
    assert key_hash(key) == expected & 0x7FFFFFFF


@given(st.lists(st.binary(max_size=40), max_size=60))
def test_a_column_hashes_as_its_keys_do(keys: list[bytes]) -> None:
    assert murmur2_column(pa.array(keys, pa.binary())).tolist() == [murmur2(key) for key in keys]


@given(st.binary(min_size=1, max_size=30), st.integers(1, 50), st.integers(0, 40))
def test_keys_of_one_length_and_slices(key: bytes, rows: int, skip: int) -> None:
    keys = [bytes([row]) + key for row in range(rows)]
    column = pa.array(keys, pa.binary()).slice(skip)
    assert murmur2_column(column).tolist() == [murmur2(item) for item in keys[skip:]]


def test_one_very_long_key_among_short_ones() -> None:
    keys = [b"short%d" % number for number in range(100)]
    keys[41] = bytes(range(256)) * 400
    assert murmur2_column(pa.array(keys)).tolist() == [murmur2(key) for key in keys]


def test_nulls_hash_as_something_and_do_not_disturb_the_others() -> None:
    hashes = murmur2_column(pa.array([b"abc", None, b"21"]))
    assert (hashes[0], hashes[2]) == (KNOWN[b"abc"], KNOWN[b"21"])
