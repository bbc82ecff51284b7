"""The history of changes: without gaps, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.history import ChangeHistory
from raftmeta.port import Change


@given(st.integers(0, 9), st.lists(st.integers(0, 4), max_size=30), st.integers(1, 5), st.integers(1, 8))
def test_it_returns_exactly_what_is_above_an_offset_or_nothing(
    start: int, sizes: list[int], max_changes: int, max_records: int
) -> None:
    history = ChangeHistory(start, max_changes=max_changes, max_records=max_records)
    added = [Change(offset, 1, [MetadataRecord()] * size) for offset, size in enumerate(sizes, start + 1)]
    for change in added:
        history.add(change)
        kept = [known for offset in range(change.offset) if (known := history.since(offset)) is not None]
        longest = kept[0] if kept else []
        assert len(longest) <= max_changes
        assert sum(len(known.records) for known in longest) <= max_records or len(longest) == 1
    end = start + len(sizes)
    assert history.since(end) == []
    assert history.since(end + 1) is None
    for offset in range(-1, end):
        since = history.since(offset)
        assert since is None or since == added[len(added) - (end - offset) :]


def test_the_newest_change_is_kept_however_large_it_is() -> None:
    history = ChangeHistory(0, max_records=1)
    history.add(Change(1, 1, [MetadataRecord()] * 5))
    assert history.since(0) is not None


def test_a_gap_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        ChangeHistory(0).add(Change(2, 1, []))
