"""The history of changes: without gaps, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.history import ChangeHistory
from raftmeta.port import Change


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 8),
)
def test_it_returns_exactly_what_is_above_an_offset_or_nothing(
    start: int, steps: list[tuple[int, int]], max_changes: int, max_records: int
) -> None:
    """Offsets have gaps: entries of the log that changed nothing."""
    history = ChangeHistory(start, max_changes=max_changes, max_records=max_records)
    added: list[Change] = []
    end = start
    for gap, size in steps:
        end += gap
        added.append(Change(end, 1, [MetadataRecord()] * size))
        history.add(added[-1])
        assert history.end_offset == end
        kept = [known for offset in range(end) if (known := history.since(offset)) is not None]
        longest = kept[0] if kept else []
        assert len(longest) <= max_changes
        assert sum(len(known.records) for known in longest) <= max_records or len(longest) == 1
    assert history.since(end) == []
    assert history.since(end + 1) == [], "a watcher that is ahead has nothing to get here"
    for offset in range(-1, end):
        since = history.since(offset)
        assert since is None or since == [change for change in added if change.offset > offset]
        if offset < start:
            assert since is None


def test_the_newest_change_is_kept_however_large_it_is() -> None:
    history = ChangeHistory(0, max_records=1)
    history.add(Change(1, 1, [MetadataRecord()] * 5))
    assert history.since(0) is not None


@pytest.mark.parametrize("offset", [4, 5])
def test_metadata_never_goes_back(offset: int) -> None:
    with pytest.raises(AssertionError):
        ChangeHistory(5).add(Change(offset, 1, []))
