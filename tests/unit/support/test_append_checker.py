"""The checker of appends and polls notices each anomaly, and accepts what a correct log may do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.append_checker import Append, Entry, History, Kind, Log, Poll, assert_sound, check

A, B, C, D = b"a", b"b", b"c", b"d"


def log(*values: bytes) -> Log:
    return {0: [Entry(offset, value) for offset, value in enumerate(values)]}


def acknowledged(value: bytes, number: int, offset: int, *, producer: int = 1, at: float | None = None) -> Append:
    at = float(number) if at is None else at
    return Append(producer, number, 0, value, at, at + 0.5, offset)


def unknown(value: bytes, number: int, *, producer: int = 1) -> Append:
    return Append(producer, number, 0, value, float(number))


def poll(*entries: tuple[int, bytes], consumer: int = 1) -> Poll:
    return Poll(consumer, 0, tuple(Entry(*entry) for entry in entries))


def sound() -> History:
    """Three appends that both replicas have, read by two consumers."""
    return History(
        [acknowledged(A, 0, 0), acknowledged(B, 1, 1), acknowledged(C, 2, 2)],
        [poll((0, A), (1, B)), poll((0, A), consumer=2), poll((2, C))],
        {1: log(A, B, C), 2: log(A, B, C)},
    )


def kinds(history: History) -> set[Kind]:
    return {anomaly.kind for anomaly in check(history)}


def test_a_sound_history_is_accepted() -> None:
    assert_sound(sound())


def test_what_has_no_answer_may_be_there_or_not() -> None:
    history = sound()
    history.appends += [unknown(D, 3), unknown(b"e", 4), unknown(b"f", 5)]
    history.final = {1: log(A, B, C, b"f"), 2: log(A, B, C, b"f")}
    assert_sound(history)


def test_retries_may_double_a_record_behind_its_first_occurrence() -> None:
    history = sound()
    history.appends = [acknowledged(A, 0, 0), acknowledged(B, 1, 3), acknowledged(C, 2, 4)]
    history.polls = []
    history.final = {1: log(A, B, A, B, C), 2: log(A, B, A, B, C)}
    assert_sound(history)


def test_overlapping_producers_have_no_order() -> None:
    first = Append(1, 0, 0, A, 0.0, 5.0, 1)
    second = Append(2, 0, 0, B, 1.0, 2.0, 0)
    assert_sound(History([first, second], [], {1: log(B, A)}))


def test_a_lost_acknowledged_record() -> None:
    history = sound()
    history.polls = []
    history.final = {1: log(A, B), 2: log(A, B)}
    assert kinds(history) == {Kind.LOST}


def test_one_replica_that_has_lost_a_record() -> None:
    history = sound()
    history.polls = []
    history.final[2] = log(A, B)
    assert kinds(history) == {Kind.LOST, Kind.REPLICAS_DIFFER}


def test_an_acknowledged_record_that_lies_elsewhere() -> None:
    history = sound()
    history.polls = []
    history.final = {1: log(A, C, B), 2: log(A, C, B)}
    assert {Kind.LOST, Kind.TWO_VALUES, Kind.REORDERED} <= kinds(history)


@pytest.mark.parametrize("who", ["two acknowledgements", "a poll", "a replica"])
def test_one_offset_with_two_values(who: str) -> None:
    history = sound()
    if who == "two acknowledgements":
        history.appends.append(replace(unknown(D, 3, producer=2), returned_at=9.0, offset=2))
    elif who == "a poll":
        history.appends.append(unknown(D, 3))
        history.polls.append(poll((0, A), (1, D), consumer=3))
    else:
        history.appends.append(unknown(D, 3))
        history.final[2] = log(A, B, D)
    assert Kind.TWO_VALUES in kinds(history)


def test_records_of_a_producer_that_have_changed_places() -> None:
    history = History([unknown(A, 0), unknown(B, 1)], [], {1: log(B, A)})
    assert kinds(history) == {Kind.REORDERED}


def test_a_record_that_lies_before_one_that_was_acknowledged_before_it_was_sent() -> None:
    early = acknowledged(A, 0, 1, at=0.0)
    late = acknowledged(B, 0, 0, at=1.0, producer=2)
    assert kinds(History([early, late], [], {1: log(B, A)})) == {Kind.BACK_IN_TIME}


def test_a_record_that_was_read_above_what_was_committed_and_vanished() -> None:
    history = sound()
    history.appends.append(unknown(D, 3))
    history.polls.append(poll((3, D)))
    assert kinds(history) == {Kind.VANISHED}


def test_a_record_that_nobody_sent() -> None:
    history = sound()
    history.final = {1: log(A, B, C, D), 2: log(A, B, C, D)}
    assert kinds(history) == {Kind.INVENTED}


def test_a_record_in_another_partition() -> None:
    history = sound()
    history.final = {1: {**log(A, B, C), 1: [Entry(0, A)]}}
    assert kinds(history) == {Kind.INVENTED}


@pytest.mark.parametrize("answered", [True, False])
def test_a_record_that_is_there_twice_though_it_was_sent_once(answered: bool) -> None:
    append = acknowledged(A, 0, 0) if answered else unknown(A, 0)
    assert kinds(History([replace(append, once=True)], [], {1: log(A, A)})) == {Kind.DOUBLED}


@pytest.mark.parametrize("again", [1, 0])
def test_a_consumer_that_goes_back(again: int) -> None:
    history = sound()
    history.polls.append(poll((again, (A, B)[again]), consumer=1))
    history.polls = [history.polls[0], history.polls[-1]]
    assert kinds(history) == {Kind.WENT_BACK}


@pytest.mark.parametrize("first", [True, False])
def test_a_consumer_that_passes_a_record_over(first: bool) -> None:
    history = sound()
    history.polls = [poll((1, B))] if first else [poll((0, A)), poll((2, C))]
    assert kinds(history) == {Kind.SKIPPED}


def test_an_offset_without_a_record() -> None:
    history = sound()
    history.polls, history.appends = [], [acknowledged(A, 0, 0), acknowledged(C, 1, 2)]
    history.final = {1: {0: [Entry(0, A), Entry(2, C)]}}
    assert kinds(history) == {Kind.GAP}


def test_the_text_names_what_happened() -> None:
    history = sound()
    history.final = {1: log(A, B), 2: log(A, B)}
    with pytest.raises(AssertionError, match=r"2 x LOST: .*\n    b'c' \(producer 1, number 2, partition 0, "):
        assert_sound(history)
