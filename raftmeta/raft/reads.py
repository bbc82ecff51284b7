"""Linearizable reads without a log entry (Raft thesis, 6.4: ReadIndex), many to a round.

A round asks all followers whether they still follow in this term; once a majority with the leader has said so, no
newer leader had been elected when the round began, so the commit index of that moment is the newest there was. It
counts only once the first entry of the leader's own term is committed: before that its commit index may lag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

ReadDone = Callable[[int | None], None]


class ReadRounds:
    """The reads that wait, and the rounds under way. Pure; only for a leader."""

    def __init__(self, majority: int) -> None:
        self._needed = majority - 1
        self._waiting: list[ReadDone] = []
        self._rounds: deque[tuple[int, int, list[ReadDone]]] = deque()
        """(round, commit index when it began, who waits for it)"""
        self._confirmed: dict[int, int] = {}
        self._round = 0

    @property
    def waiting(self) -> bool:
        """Whether reads wait for a round to begin."""
        return bool(self._waiting)

    @property
    def under_way(self) -> bool:
        """Whether reads wait for answers."""
        return bool(self._rounds)

    def add(self, done: ReadDone) -> None:
        """Let a read wait for the next round."""
        self._waiting.append(done)

    def begin(self, commit_index: int) -> int:
        """Begin a round for all waiting reads and return its number, which answers have to name."""
        self._round += 1
        if self._waiting:
            self._rounds.append((self._round, commit_index, self._waiting))
            self._waiting = []
        return self._round

    def confirm(self, peer_id: int, round_number: int) -> None:
        """Note that a follower follows as of this round, and of all before."""
        if round_number > self._confirmed.get(peer_id, 0):
            self._confirmed[peer_id] = round_number

    def ready(self) -> list[tuple[int, list[ReadDone]]]:
        """Return (commit index, reads) of the rounds that a majority has confirmed."""
        found = []
        while self._rounds:
            round_number, commit_index, reads = self._rounds[0]
            if sum(confirmed >= round_number for confirmed in self._confirmed.values()) < self._needed:
                break
            self._rounds.popleft()
            found.append((commit_index, reads))
        return found

    def abandon(self) -> list[ReadDone]:
        """Forget everything, because this node leads no longer; returns who waited."""
        reads = [read for _, _, waiting in self._rounds for read in waiting] + self._waiting
        self._rounds.clear()
        self._confirmed.clear()
        self._waiting = []
        return reads
