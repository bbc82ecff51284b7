"""The checker of appends and polls notices each anomaly, and accepts every behavior of a correct log."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

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


def kinds(history: History) -> set[Enum]:
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


def changed(polls: list[Poll], final: dict[int, Log] | None = None, *more: Append) -> History:
    """The sound history with other polls, another end, and more appends."""
    history = sound()
    return History([*history.appends, *more], polls, final or history.final)


@pytest.mark.parametrize(
    ("history", "found"),
    [
        pytest.param(changed([], {1: log(A, B), 2: log(A, B)}), {Kind.LOST}, id="lost"),
        pytest.param(
            changed([], {1: log(A, B, C), 2: log(A, B)}), {Kind.LOST, Kind.REPLICAS_DIFFER}, id="lost by one replica"
        ),
        pytest.param(History([unknown(A, 0), unknown(B, 1)], [], {1: log(B, A)}), {Kind.REORDERED}, id="reordered"),
        pytest.param(
            History([acknowledged(A, 0, 1, at=0.0), acknowledged(B, 0, 0, at=1.0, producer=2)], [], {1: log(B, A)}),
            {Kind.BACK_IN_TIME},
            id="before a record that was acknowledged before this one was sent",
        ),
        pytest.param(
            changed([*sound().polls, poll((3, D))], None, unknown(D, 3)), {Kind.VANISHED}, id="read above the end"
        ),
        pytest.param(
            changed(sound().polls, {1: log(A, B, C, D), 2: log(A, B, C, D)}), {Kind.INVENTED}, id="sent by no producer"
        ),
        pytest.param(
            changed(sound().polls, {1: {**log(A, B, C), 1: [Entry(0, A)]}}), {Kind.INVENTED}, id="another partition"
        ),
        pytest.param(
            History([replace(acknowledged(A, 0, 0), once=True)], [], {1: log(A, A)}), {Kind.DOUBLED}, id="doubled"
        ),
        pytest.param(
            History([replace(unknown(A, 0), once=True)], [], {1: log(A, A)}), {Kind.DOUBLED}, id="doubled, no answer"
        ),
        pytest.param(changed([poll((0, A), (1, B)), poll((1, B))]), {Kind.WENT_BACK}, id="read again"),
        pytest.param(changed([poll((0, A), (1, B)), poll((0, A))]), {Kind.WENT_BACK}, id="read an earlier one"),
        pytest.param(changed([poll((1, B))]), {Kind.SKIPPED}, id="the first one is skipped"),
        pytest.param(changed([poll((0, A)), poll((2, C))]), {Kind.SKIPPED}, id="one is skipped"),
        pytest.param(
            History([acknowledged(A, 0, 0), acknowledged(C, 1, 2)], [], {1: {0: [Entry(0, A), Entry(2, C)]}}),
            {Kind.GAP},
            id="an offset without a record",
        ),
    ],
)
def test_an_anomaly_is_noticed(history: History, found: set[Kind]) -> None:
    assert kinds(history) == found


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


def test_the_text_names_what_happened() -> None:
    history = sound()
    history.final = {1: log(A, B), 2: log(A, B)}
    with pytest.raises(AssertionError, match=r"2 x LOST: .*\n    b'c' \(producer 1, number 2, partition 0, "):
        assert_sound(history)
