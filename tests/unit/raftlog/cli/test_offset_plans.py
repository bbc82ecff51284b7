"""How offsets to go to are written."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.cli.groups.reset_offsets import (
    bounded,
    format_plan,
    parse_plan,
    parse_selection,
    parse_span_ms,
    parse_time_ms,
)
from raftlog.types import TopicPartition

A0 = TopicPartition("a", 0)


def test_topics_and_partitions() -> None:
    assert parse_selection(["a", "b:0,2", "b:5", "c:1", "c"]) == {"a": None, "b": {0, 2, 5}, "c": None}
    assert parse_selection(["c", "c:1"]) == {"c": None}
    assert parse_selection([]) == {}


@pytest.mark.parametrize("text", ["", ":0", "a:", "a:x", "a:0,", "a:-1", "a:0-3", "a:٣"])
def test_what_names_no_partition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="TOPIC:0,1"):
        parse_selection([text])


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-01T12:30:00Z", datetime(2026, 11, 1, 12, 30, tzinfo=UTC)),
        ("2026-11-01T12:30:00.250", datetime(2026, 11, 1, 12, 30, 0, 250_000, tzinfo=UTC)),
        ("2026-11-01T12:30:00+02:00", datetime(2026, 11, 1, 10, 30, tzinfo=UTC)),
        ("2026-11-01", datetime(2026, 11, 1, tzinfo=UTC)),
    ],
)
def test_times_are_utc_unless_they_say_otherwise(text: str, moment: datetime) -> None:
    assert parse_time_ms(text) == moment.timestamp() * 1000


@pytest.mark.parametrize(
    ("text", "span_ms"),
    [
        ("90m", 5_400_000),
        ("2d", 172_800_000),
        ("1500", 1_500),
        ("PT1H30M", 5_400_000),
        ("pt0.5s", 500),
        ("P1DT1S", 86_401_000),
        ("P2D", 172_800_000),
    ],
)
def test_durations(text: str, span_ms: int) -> None:
    assert parse_span_ms(text) == span_ms


@pytest.mark.parametrize("text", ["", "P", "PT", "P1H", "-5m", "soon", "1 fortnight", "PT1H30"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_span_ms(text)


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="not a time"):
        parse_time_ms("yesterday")


@given(
    st.dictionaries(
        st.builds(
            TopicPartition,
            st.text("abcXYZ019._-", min_size=1, max_size=20),
            st.integers(0, 2**31 - 1),
        ),
        st.integers(0, 2**63 - 1),
    )
)
def test_a_plan_comes_back_as_it_was_written(offsets: dict[TopicPartition, int]) -> None:
    assert parse_plan(format_plan(offsets)) == offsets


def test_a_plan_may_have_a_header_and_empty_lines() -> None:
    assert parse_plan("topic,partition,offset\n\na, 0, 5\n") == {A0: 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,0", r"line 1: 'a,0'"),
        ("a,0,5\na,x,5", r"line 2: 'a,x,5'"),
        ("a,0,-1", "line 1"),
        ("a,0,5\na,0,6", "line 2: a-0 is in the file twice"),
        (",0,1", "line 1"),
    ],
)
def test_a_line_that_is_no_offset_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_plan(text)


@pytest.mark.parametrize("topics", [100, 20_000])  # the longer one exceeds what the csv module takes as one field
def test_a_refused_line_is_shown_in_part(topics: int) -> None:
    document = '{"offsets": "' + "orders " * topics + '"}'
    with pytest.raises(
        ValueError, match=r"line 1: '\{\"offsets\": \"orders .*…': write topic,partition,offset"
    ) as refused:
        parse_plan(document)
    assert len(str(refused.value)) < 120


@given(st.integers(-100, 100), st.integers(0, 50), st.integers(0, 50))
def test_offsets_that_are_not_there_become_the_nearest(wanted: int, start: int, more: int) -> None:
    end = start + more
    found = bounded(A0, None, wanted, start, end)
    assert found.new == sorted([start, wanted, end])[1]
    assert (found.why is None) == (start <= wanted <= end)
