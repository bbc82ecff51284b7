"""Offsets in the checkpoint, limits of a trigger, and tasks of a batch."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_raftlog.ranges import Offsets, Range, lag, limited, split

from raftlog.types import TopicPartition

PARTS = [TopicPartition("a", 0), TopicPartition("a", 10), TopicPartition("a", 2), TopicPartition("b", 0)]


def test_offsets_are_written_as_kafka_does_with_the_ids_of_the_topics() -> None:
    offsets = Offsets(dict(zip(PARTS, (1, 2, 3, 4), strict=True)), {"b": "bb", "a": "aa", "gone": "xx"})
    text = json.dumps(offsets.to_json())
    assert text == '{"a": {"0": 1, "2": 3, "10": 2}, "b": {"0": 4}, "@topic_ids": {"a": "aa", "b": "bb"}}'
    back = Offsets.from_json(json.loads(text))
    assert back.positions == offsets.positions
    assert json.dumps(back.to_json()) == text, "the text must stay the same, as Spark compares offsets as text"


def test_offsets_of_kafkas_form_have_no_ids() -> None:
    offsets = Offsets.from_json({"a": {"0": 1}})
    assert (offsets.positions, offsets.topic_ids) == ({PARTS[0]: 1}, {})


@pytest.mark.parametrize(
    "found", [{"logOffset": 3}, {"a": {"x": 1}}, {"a": {"0": "y"}}, {"a": {"0": 1}, "@topic_ids": 5}]
)
def test_what_are_no_offsets_is_said_to_be_of_another_query(found: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="checkpointLocation"):
        Offsets.from_json(found)


sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=len(PARTS))


@given(sizes=sizes, max_rows=st.integers(1, 2000))
def test_a_trigger_is_limited_and_always_gets_on(sizes: list[int], max_rows: int) -> None:
    start = {part: 7 * index for index, part in enumerate(PARTS[: len(sizes)])}
    end = {part: start[part] + size for part, size in zip(start, sizes, strict=True)}
    found = limited(start, end, max_rows)
    assert found.keys() == end.keys()
    assert all(start[part] <= found[part] <= end[part] for part in end)
    read = sum(found[part] - start[part] for part in end)
    hardly_behind = sum(size > 0 and max_rows * size < sum(sizes) for size in sizes)
    assert read <= max_rows + hardly_behind, (
        "at most one offset more than the limit may be read for each partition that would get none"
    )
    assert read >= min(sum(sizes), max(1, max_rows - len(sizes)))
    assert all(found[part] > start[part] for part in end if end[part] > start[part]), (
        "each partition with new records must get some of them"
    )


def test_a_trigger_is_shared_out_by_how_far_partitions_are_behind() -> None:
    start = dict.fromkeys(PARTS, 100)
    end = dict(zip(PARTS, (1000, 400, 101, 100), strict=True))
    assert limited(start, end, 120) == dict(zip(PARTS, (189, 129, 101, 100), strict=True))
    assert limited(start, end, 10_000) == end


@given(sizes=sizes, min_partitions=st.none() | st.integers(1, 50), max_records=st.none() | st.integers(1, 500))
def test_a_batch_is_cut_without_gap_or_overlap(
    sizes: list[int], min_partitions: int | None, max_records: int | None
) -> None:
    ranges = [Range(*part, 5, 5 + size, "id") for part, size in zip(PARTS, sizes, strict=False)]
    found = split(ranges, min_partitions, max_records)
    for whole in ranges:
        offsets = [offset for part in found if part.topic_partition == whole.topic_partition
                   for offset in range(part.start, part.end)]  # fmt: skip
        assert offsets == list(range(whole.start, whole.end))
    assert all(part.size > 0 and part.topic_id == "id" for part in found)
    if max_records is not None:
        assert all(part.size <= max_records for part in found)


def test_large_partitions_are_cut_and_small_ones_stay_whole() -> None:
    """As Kafka's source, SPARK-36576: small ranges must not use up the tasks of the large one."""
    ranges = [Range("a", 0, 0, 10_000), Range("a", 1, 0, 1), Range("a", 2, 0, 1), Range("a", 3, 0, 0)]
    found = split(ranges, 5, None)
    assert [part.partition for part in found] == [0, 0, 0, 1, 2]
    assert [part.size for part in found[:3]] == [3333, 3333, 3334]
    assert split(ranges, None, None) == ranges[:3]
    assert split(ranges, 2, None) == ranges[:3]
    assert split([], 5, 5) == []


@pytest.mark.parametrize("text", [json.dumps, dict])
def test_a_progress_tells_the_lag_of_raftlogs_partitions_and_passes_other_sources_over(text: Any) -> None:
    ids = {"@topic_ids": {"t": "00"}}
    ours = SimpleNamespace(
        endOffset=text({"t": {"0": 10, "1": 5}, **ids}), latestOffset=text({"t": {"0": 30, "1": 5, "2": 7}, **ids})
    )
    files = SimpleNamespace(endOffset=text({"logOffset": 3}), latestOffset="null")
    kafkas = SimpleNamespace(endOffset=text({"t": {"0": 10}}), latestOffset=text({"t": {"0": 11}}))
    nothing_yet = SimpleNamespace(endOffset=text({"t": {"0": 1}, **ids}), latestOffset=None)
    no_end = SimpleNamespace(endOffset="null", latestOffset=text({"t": {"0": 1}, **ids}))
    progress: Any = SimpleNamespace(sources=[files, ours, kafkas, nothing_yet, no_end])
    assert lag(progress) == {TopicPartition("t", 0): 20, TopicPartition("t", 1): 0, TopicPartition("t", 2): 7}
