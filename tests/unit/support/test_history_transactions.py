"""The checker of transactions notices each anomaly, and accepts what correct ones may leave behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.append_checker import Entry, Log, Poll
from tests.support.history.model import Outcome
from tests.support.history.transactions import History, Transaction, check

A, B, C = b"a", b"b", b"c"
BOTH = (0, 1)


def transaction(value: bytes, number: int, outcome: Outcome = "ok", *, ending_at: float | None = None) -> Transaction:
    return Transaction("t", number, value, BOTH, outcome, ending_at)


def log(*values: bytes) -> list[Entry]:
    """Each transaction leaves a marker behind, which no reader is given."""
    return [Entry(2 * number, value) for number, value in enumerate(values)]


def poll(partition: int, *entries: Entry, at: float | None = None, reader: int = 1) -> Poll:
    return Poll(reader, partition, entries, None if at is None else at - 0.1, at)


def sound() -> History:
    """A committed, an aborted, and a present transaction of unknown outcome; one reader."""
    return History(
        [transaction(A, 0), transaction(B, 1, "failed"), transaction(C, 2, "unknown")],
        [poll(0, *log(A, C)), poll(1, *log(A, C))],
        {0: log(A, C), 1: log(A, C)},
    )


def names(history: History) -> set[str]:
    return {each.name for each in check(history)}


def test_a_sound_history_is_accepted() -> None:
    assert not check(sound())


def test_one_of_which_nobody_knows_may_be_gone() -> None:
    history = sound()
    history.polls, history.final = [], {0: log(A), 1: log(A)}
    assert not check(history)


def test_a_committed_transaction_that_is_gone() -> None:
    history = sound()
    history.polls, history.final = [], {0: log(C), 1: log(C)}
    assert names(history) == {"COMMIT_LOST"}


@pytest.mark.parametrize("value", [A, C])
def test_a_torn_transaction_whatever_its_producer_was_told(value: bytes) -> None:
    history = sound()
    history.polls = []
    history.final[1] = [entry for entry in log(A, C) if entry.value != value]
    assert names(history) == {"TORN"}


def test_an_aborted_record_that_is_there() -> None:
    history = sound()
    history.polls, history.final = [], {0: log(A, B, C), 1: log(A, B, C)}
    assert names(history) == {"ABORTED_READ"}


def test_an_aborted_record_that_was_read_and_is_gone() -> None:
    history = sound()
    history.polls.append(poll(0, Entry(1, B), reader=2))
    history.polls.insert(0, poll(0, Entry(0, A), reader=2))
    assert names(history) == {"ABORTED_READ", "VANISHED"}


def test_a_record_that_was_read_before_its_commit_was_asked_for() -> None:
    history = sound()
    history.transactions[0] = transaction(A, 0, ending_at=5.0)
    history.polls[0] = poll(0, *log(A, C), at=6.0)
    assert not check(history)
    history.polls[0] = poll(0, *log(A, C), at=4.0)
    assert names(history) == {"READ_TOO_EARLY"}


def test_two_readers_with_two_values_at_an_offset() -> None:
    history = sound()
    history.polls.append(poll(0, Entry(0, C), reader=2))
    assert "TWO_VALUES" in names(history)


def test_a_value_that_is_there_twice() -> None:
    history = sound()
    history.polls, history.final = [], {0: log(A, C, C), 1: log(A, C)}
    assert names(history) == {"DOUBLED"}


def test_transactions_of_a_producer_that_changed_places() -> None:
    history = sound()
    history.polls, history.final = [], {0: log(C, A), 1: log(A, C)}
    assert names(history) == {"REORDERED"}


def test_a_value_of_nobody() -> None:
    history = sound()
    history.transactions.pop()
    assert names(history) == {"INVENTED"}


def test_a_reader_that_passed_one_over_or_went_back() -> None:
    history = sound()
    history.polls = [poll(0, Entry(2, C))]
    assert names(history) == {"SKIPPED"}
    history.polls = [poll(0, *log(A, C)), poll(0, Entry(0, A))]
    assert names(history) == {"WENT_BACK"}


@st.composite
def correct(draw: st.DrawFn) -> History:
    """Any result of whole transactions, in the same order in all partitions."""
    outcomes: list[Outcome] = draw(st.lists(st.sampled_from(("ok", "failed", "unknown")), max_size=12))
    transactions = [transaction(b"%03d" % number, number, outcome) for number, outcome in enumerate(outcomes)]
    values = [
        each.value
        for each in transactions
        if each.outcome == "ok" or (each.outcome == "unknown" and draw(st.booleans()))
    ]
    final: Log = {}
    polls: list[Poll] = []
    for partition in BOTH:
        offset, entries = -1, []
        for value in values:
            offset += draw(st.integers(1, 4))
            entries.append(Entry(offset, value))
        final[partition] = entries
        at = draw(st.integers(0, len(entries)))
        polls += [poll(partition, *entries[:at]), poll(partition, *entries[at:])]
    return History(transactions, polls, final)


@given(correct())
def test_whole_transactions_are_accepted(history: History) -> None:
    assert not check(history)


@given(correct(), st.data())
def test_whatever_is_taken_out_of_one_partition_is_noticed(history: History, data: st.DataObject) -> None:
    if not history.final[0]:
        return
    gone = data.draw(st.sampled_from(history.final[0]))
    history.final[0] = [entry for entry in history.final[0] if entry != gone]
    assert {"TORN", "VANISHED"} <= names(history)


@given(correct(), st.data())
def test_whatever_turns_out_to_be_aborted_is_noticed(history: History, data: st.DataObject) -> None:
    if not history.final[0]:
        return
    read = data.draw(st.sampled_from(history.final[0])).value
    history.transactions = [
        replace(each, outcome="failed") if each.value == read else each for each in history.transactions
    ]
    assert names(history) == {"ABORTED_READ"}
