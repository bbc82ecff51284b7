"""Proposals of a leader, from the moment they are taken on until their outcome is known."""

from __future__ import annotations

from collections.abc import Callable

from raftmeta.raft.ports import Applied, ProposalOutcome, Unknown
from raftmeta.raft.wal import ENTRY_OVERHEAD_BYTES, WriteAheadLog

ProposalDone = Callable[[ProposalOutcome], None]
COMMAND = b"\x00"
"""Before the command in its entry's data."""


class Proposals:
    """Waiting to be appended, or appended and waiting to be applied."""

    def __init__(self, wal: WriteAheadLog) -> None:
        self._wal = wal
        self.waiting: list[tuple[bytes, ProposalDone]] = []
        self._waiting_bytes = 0
        self._pending: dict[int, tuple[int, ProposalDone]] = {}
        """Index → (term, who waits)."""
        self._abandoned: list[ProposalDone] = []

    def add(self, command: bytes, done: ProposalDone) -> bool:
        """Take a command on; False if there is no room for it on the disk."""
        size = len(command) + len(COMMAND) + ENTRY_OVERHEAD_BYTES
        if not self._wal.has_room(self._waiting_bytes + size):
            return False
        self._waiting_bytes += size
        self.waiting.append((command, done))
        return True

    def append(self, term: int) -> None:
        """Move what waits into the log."""
        waiting, self.waiting, self._waiting_bytes = self.waiting, [], 0
        index = self._wal.last_index
        add, pending = self._wal.add, self._pending
        for command, done in waiting:
            index += 1
            add(COMMAND + command, index, term)
            pending[index] = (term, done)

    def applied(self, index: int, term: int, result: object) -> None:
        """Tell whoever proposed the entry at `index`."""
        if not self._pending:
            return
        waiting = self._pending.pop(index, None)
        if waiting is None:
            return
        if waiting[0] == term:
            waiting[1](Applied(index, term, result))
        else:
            self._abandoned.append(waiting[1])

    def abandon(self) -> None:
        """This node leads no longer: nobody will know."""
        self._abandoned += [done for _, done in self._pending.values()]
        self._abandoned += [done for _, done in self.waiting]
        self._pending.clear()
        self.waiting, self._waiting_bytes = [], 0

    def tell_abandoned(self) -> None:
        """Tell those whose outcome is unknown."""
        abandoned, self._abandoned = self._abandoned, []
        for done in abandoned:
            done(Unknown())
