"""Committed records only: what a reader gets of frames that name aborted transactions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.fetched import Rows
from raftlog._core.positions import Fetched, PartitionState, Positions
from raftlog.errors import CorruptRecordError
from raftlog.format import iter_headers
from raftlog.format.aborted import AbortedRanges
from raftlog.types import TopicPartition
from tests.support.transactional_batches import Aborted, TransactionalLog, transactional_logs

T0 = TopicPartition("t", 0)


def placed(position: int) -> tuple[PartitionState, Positions]:
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(position)
    state.subscription_id = 1
    positions = Positions()
    positions.add(state)
    return state, positions


def offsets_of(taken: list[Rows]) -> list[int]:
    records = [record for rows in taken for record in rows.records()]
    assert all(record.value == b"%d" % record.offset for record in records)
    return [record.offset for record in records]


def read(log: TransactionalLog, position: int, data: st.DataObject, *, committed: bool) -> tuple[list[int], int]:
    """Read in frames that begin and end where they like; return the offsets of the records and the position."""
    state, positions = placed(position)
    end = log.last_stable_offset if committed else log.end_offset
    there = [(base, batch) for base, batch in log.batches if base < end]
    taken: list[Rows] = []
    spent: list[Fetched] = []
    start = sum(1 for base, _ in there if base <= position) - 1 if there else 0
    while 0 <= start < len(there):
        stop = data.draw(st.integers(start + 1, len(there)))
        assert state.position is not None
        bound = there[stop][0] if stop < len(there) else end
        aborted = AbortedRanges(log.overlapping(state.position, bound)) if committed else None
        records = b"".join(batch for _, batch in there[start:stop])
        assert positions.receive(state, Fetched(1, records, None, aborted))
        while rows := positions.take(data.draw(st.integers(1, 9)), spent, check_crcs=True):
            taken += rows
        start = stop
    assert state.error is None
    assert not positions.doubtful
    assert state.position is not None
    return offsets_of(taken), state.position


@given(transactional_logs(), st.data())
def test_records_of_committed_transactions_and_no_others(log: TransactionalLog, data: st.DataObject) -> None:
    end = log.last_stable_offset
    position = data.draw(st.integers(0, end))
    found, reached = read(log, position, data, committed=True)
    assert found == [offset for offset in log.committed if position <= offset < end]
    assert reached == max(end, position), "markers and what was aborted are behind it as well"


@given(transactional_logs(), st.data())
def test_a_reader_of_uncommitted_records_gets_all_but_the_markers(log: TransactionalLog, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, log.end_offset))
    found, reached = read(log, position, data, committed=False)
    assert found == [offset for offset in log.records if offset >= position]
    assert reached == log.end_offset


def test_the_epoch_of_what_was_passed_over_is_remembered() -> None:
    """KIP-320: a reader that has read nothing but dropped batches still finds out that they were truncated."""
    log = TransactionalLog()
    log.produce(2, 7, transactional=True)
    log.end({7: False})
    state, positions = placed(0)
    records = b"".join(batch for _, batch in log.batches)
    frame = Fetched(1, records, None, AbortedRanges(log.aborted))
    assert positions.receive(state, frame)
    spent: list[Fetched] = []
    assert positions.take(10, spent, check_crcs=True) == []
    assert (state.position, state.last_epoch) == (3, 3)
    assert spent == [frame], "its credit goes back"


def test_the_next_transaction_of_the_producer_is_another_one() -> None:
    log = TransactionalLog()
    log.produce(2, 7, transactional=True)
    log.end({7: False})
    log.produce(1, 7, transactional=True)
    log.produce(1, 7)  # not transactional, within the range of nothing
    log.end({7: True})
    log.produce(3, 7, transactional=True)
    log.end({7: False})
    ranges = AbortedRanges(log.aborted)
    held = [ranges.hold(header) for _, batch in log.batches for _, header in iter_headers(batch)]
    assert held == [True, False, False, False, False, True, False]
    assert not AbortedRanges([])


def test_a_batch_of_the_producer_that_is_no_transaction_s_stays() -> None:
    """Compaction takes the mark off batches whose transaction is decided; a range that is still named says nothing."""
    log = TransactionalLog()
    log.produce(2, 7)
    ranges = AbortedRanges([Aborted(7, 0, 5)])
    assert [ranges.hold(header) for _, batch in log.batches for _, header in iter_headers(batch)] == [False]


@pytest.mark.parametrize("byte", [21, 47, 51, -1])
def test_what_says_that_a_batch_is_passed_over_is_checked(byte: int) -> None:
    """Neither a flipped bit in the attributes nor one in the producer id may make records vanish."""
    log = TransactionalLog()
    log.produce(2, 7, transactional=True)
    damaged = bytearray(log.batches[0][1])
    damaged[byte] ^= 1 << 5
    state, _ = placed(0)
    ranges = AbortedRanges([Aborted(7, 0, 5), Aborted(7 | 1 << 37, 0, 5), Aborted(7 | 1 << 5, 0, 5)])
    state.frames.append(Fetched(1, bytes(damaged), None, ranges))
    with pytest.raises(CorruptRecordError, match="checksum"):
        state.take(10, [], check_crcs=True)
    assert state.position == 0
