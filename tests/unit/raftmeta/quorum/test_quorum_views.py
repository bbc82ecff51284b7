"""Whose view of the quorum is shown, and how long one is waited for."""

from __future__ import annotations

from collections.abc import Callable

from raftlog.v1.common_pb2 import QuorumInfo
from raftmeta.quorum.quorum_views import ask_all, better
from tests.support import virtual_time


def view(answered_by: int, leader_id: int = -1, end: int = 0, epoch: int = 0) -> QuorumInfo:
    return QuorumInfo(answered_by=answered_by, leader_id=leader_id, log_end_index=end, leader_epoch=epoch)


def test_the_leader_is_believed_and_without_one_who_has_the_longest_log() -> None:
    assert better([view(1, 2, 900), view(2, 2, 800)]).answered_by == 2
    assert better([view(1, 1, 900, epoch=3), view(2, 2, 800, epoch=4)]).answered_by == 2, "1 was deposed"
    assert better([view(1, -1, 1), view(2, -1, 800), view(3, 2, 700)]).answered_by == 2


def asked(answers: Callable[[int, int], QuorumInfo | None], timeout_s: float) -> tuple[list[int], int]:
    rounds = {1: 0, 2: 0}

    async def ask(target: int) -> QuorumInfo | None:
        rounds[target] += 1
        return answers(target, rounds[target])

    views = virtual_time.run(ask_all([1, 2], ask, timeout_s))
    return [each.answered_by for each in views], rounds[1]


def test_everybody_is_asked_once_where_nobody_leads() -> None:
    assert asked(lambda target, turn: view(target), 5) == ([1, 2], 1)
    assert asked(lambda target, turn: view(2) if target == 2 else None, 5) == ([2], 1)


def test_a_leader_that_somebody_names_is_waited_for() -> None:
    assert asked(lambda target, turn: view(target, 2) if (target, turn) != (2, 1) else None, 5) == ([1, 2], 2)


def test_it_ends_at_the_deadline_with_what_there_is() -> None:
    assert asked(lambda target, turn: view(1, 2) if target == 1 else None, 0) == ([1], 1)
    views, rounds = asked(lambda target, turn: None, 0.3)
    assert views == []
    assert 1 < rounds < 5
