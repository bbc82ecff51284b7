"""W3C trace context, https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.accumulator import Batch, PartitionQueue
from raftlog._core.traceparent import MAX_TRACES, TRACE_ID, Traceparent, parse_traceparent, sampled_traces

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_example_of_the_recommendation() -> None:
    parent = parse_traceparent(EXAMPLE)
    assert parent == Traceparent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
    assert str(parent) == EXAMPLE
    assert parent.sampled
    assert parse_traceparent(EXAMPLE.encode()) == parent
    assert EXAMPLE[TRACE_ID] == "4bf92f3577b34da6a3ce929d0e0e4736"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_what_is_written_is_read(trace_id: int, span_id: int, flags: int) -> None:
    parent = Traceparent(trace_id, span_id, flags)
    assert parse_traceparent(str(parent)) == parent


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        b"\xff" * 55,
        EXAMPLE[:-1],
        EXAMPLE.upper(),
        EXAMPLE + "-more",  # "version 00 [...] MUST be 55 characters"
        "ff" + EXAMPLE[2:],  # "Version ff is invalid"
        "00-" + "0" * 32 + EXAMPLE[35:],  # "All bytes as zero is considered an invalid value"
        EXAMPLE[:36] + "0" * 16 + EXAMPLE[52:],
        "01" + EXAMPLE[2:] + "-" + "x" * 1000,
        EXAMPLE.replace("4bf9", "４bf9"),
    ],
)
def test_what_is_malformed_says_nothing(text: str | bytes | None) -> None:
    assert parse_traceparent(text) is None


@given(st.binary(max_size=80))
def test_no_bytes_are_too_strange(content: bytes) -> None:
    parent = parse_traceparent(content)
    assert parent is None or (parent.trace_id and parent.span_id)


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    """ "[...] the vendor will parse the first 55 characters, [...] if they are not at the end, a dash follows"."""
    assert parse_traceparent("cc" + EXAMPLE[2:] + "-what-the-future-brings") == parse_traceparent(EXAMPLE)
    assert parse_traceparent("cc" + EXAMPLE[2:] + ".what-the-future-brings") is None


def traceparent(number: int, *, sampled: bool = True) -> str:
    return str(Traceparent(1000 + number // 10, number + 1, int(sampled)))


def test_each_sampled_trace_counts_once_and_no_more_than_so_many() -> None:
    given_ = [traceparent(0), traceparent(1), "rubbish", traceparent(10), traceparent(20, sampled=False)]
    assert [parent.trace_id for parent in sampled_traces(given_)] == [1000, 1001]
    assert [parent.span_id for parent in sampled_traces(given_)] == [1, 11]
    endless = (traceparent(10 * number) for number in itertools.count())
    assert len(sampled_traces(endless)) == MAX_TRACES
    assert sampled_traces(itertools.repeat("rubbish")) == []


def test_a_batch_remembers_one_span_of_each_trace() -> None:
    batch = Batch(PartitionQueue("topic", 0), (0,), 1 << 20, 0.0, 0.0)
    for number in (*range(15), *range(20, 1000)):
        batch.trace(traceparent(number))
    assert batch.traces is not None
    assert len(batch.traces) == MAX_TRACES
    assert list(batch.traces.values())[:3] == [traceparent(0), traceparent(10), traceparent(20)]
