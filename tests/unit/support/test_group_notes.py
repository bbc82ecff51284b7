"""A member's notes become spans and commits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.group_notes import noted

Event = dict[str, Any]


def assigned(epoch: int, at: float, *partitions: int) -> Event:
    names = {"member": "abcdefgh0123", "instance": ""}
    return {"event": "assigned", **names, "epoch": epoch, "at": at, "partitions": list(partitions)}


def gone(how: str, at: float, *partitions: int) -> Event:
    return {"event": how, "at": at, "partitions": list(partitions)}


def polled(at: float, epoch: int, given: dict[str, list[int]] | None = None) -> Event:
    return {"event": "polled", "asked_at": at, "done_at": at + 1, "given": given or {}, "epoch": epoch}


def test_what_was_not_owned_is_a_stray() -> None:
    found = noted(
        [polled(0.0, -1, {"0": [7]}), assigned(1, 1.0, 0), gone("lost", 2.0, 0), polled(2.0, 1, {"0": [8]})], "m"
    )
    assert found.strays == ["m was handed 0:7 to 7", "m was handed 0:8 to 8"]
    found = noted([assigned(1, 1.0, 0), assigned(2, 1.0, 0), gone("lost", 1.0, 1)], "m")
    assert found.strays == ["m/abcdefgh was given 0 twice", "m was to give up 1, which it did not own"]


@pytest.mark.parametrize(("events", "last_epoch"), [
    ([polled(2.0, 4)], 3),  # unknown whether the application was told
    ([polled(2.0, 4), polled(3.0, 5)], 4),
    ([polled(2.0, 4), polled(3.0, 5), polled(4.0, 5)], 5),
    ([polled(2.0, 3), polled(3.0, 7), gone("lost", 4.0, 0), polled(4.0, 7)], 3),
    ([polled(2.0, 3), polled(3.0, 7), gone("lost", 4.0, 0), assigned(7, 4.0, 0), polled(4.0, 7)], 3),
])  # fmt: skip
def test_the_last_epoch_is_one_in_which_it_was_surely_owned(events: list[Event], last_epoch: int) -> None:
    assert noted([assigned(3, 1.0, 0), *events], "m").spans[0].last_epoch == last_epoch
