"""What clients of commands have been answered, so that a command asked for twice is done once.

A client that does not learn what became of a command (its controller died) asks again with the same client id and
sequence, and gets the first answer. Part of the replicated state: every replica keeps the same, and snapshots carry it.

What is kept has a bound in bytes, so that no client can fill the memory of all controllers: at worst MAX_KEPT_BYTES,
as counted here, and in a process some two times that. The count does not depend on how long an error's words are:
replicas of different versions may word it differently, and must forget the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from raftlog.config import MAX_INT64
from raftlog.errors import RaftlogError, RequestTimedOut
from raftlog.v1.records_pb2 import ClientSession, CommandOutcome, MetadataCommand
from raftmeta.decide import CommandResult, outcome_from_wire, outcome_to_wire
from raftmeta.decide.outcome import MAX_ERROR_CHARACTERS

MAX_CLIENTS: Final = 10_000
MAX_OUTCOMES_PER_CLIENT: Final = 500
"""Clients keep the sequences that they have out within as many."""
MAX_KEPT_BYTES: Final = 64 << 20
SESSION_BYTES: Final = 512
OUTCOME_BYTES: Final = 256
ERROR_BYTES: Final = 2_048
"""What a session, a result without partitions, and an error count for."""

assert ERROR_BYTES >= 4 * MAX_ERROR_CHARACTERS, "a character has up to 4 bytes"
assert MAX_CLIENTS * (SESSION_BYTES + 2 * OUTCOME_BYTES) < MAX_KEPT_BYTES, "as many clients as allowed, with little out"
assert MAX_OUTCOMES_PER_CLIENT * ERROR_BYTES < MAX_KEPT_BYTES // 10, "one client alone drives nobody else out"

_Kept = CommandResult | CommandOutcome
"""What was answered; errors as they travel, so that one that is raised never holds on to who raised it."""


@dataclass(slots=True)
class _Session:
    """One client. Invariant: `outcomes` has no sequence below `settled_below`."""

    settled_below: int = 0
    last_used_index: int = 0
    outcomes: dict[int, _Kept] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """What the session counts for."""
        return SESSION_BYTES + sum(map(_cost, self.outcomes.values()))

    def settle(self, below: int) -> int:
        """Forget the outcomes of sequences below `below`; returns what they counted for."""
        outcomes = self.outcomes
        freed_bytes = 0
        if below - self.settled_below <= len(outcomes):
            for sequence in range(self.settled_below, below):
                kept = outcomes.pop(sequence, None)
                if kept is not None:
                    freed_bytes += _cost(kept)
        else:
            for sequence in [each for each in outcomes if each < below]:
                freed_bytes += _cost(outcomes.pop(sequence))
        self.settled_below = below
        return freed_bytes


@dataclass(frozen=True, slots=True)
class SessionsCapture:
    """All sessions at one index."""

    sessions: tuple[tuple[bytes, _Session], ...]

    def to_wire(self) -> Iterable[ClientSession]:
        """Yield the sessions as a snapshot holds them, by client id."""
        for client_id, session in sorted(self.sessions, key=lambda each: each[0]):
            yield ClientSession(
                client_id=client_id,
                settled_below=session.settled_below,
                last_used_index=session.last_used_index,
                outcomes={sequence: _wire(kept) for sequence, kept in session.outcomes.items()},
            )


class ClientSessions:
    """The sessions, bounded: the client that was silent longest goes first, then its retries are new commands.

    Invariant: sessions stand in the order of `last_used_index`, each of which belongs to one entry of the log.
    """

    def __init__(
        self,
        *,
        max_clients: int = MAX_CLIENTS,
        max_outcomes_per_client: int = MAX_OUTCOMES_PER_CLIENT,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._max_clients = max_clients
        self._max_outcomes = max_outcomes_per_client
        self._max_bytes = max_kept_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def kept_bytes(self) -> int:
        """What all that is kept counts for."""
        return self._bytes

    def answered(self, index: int, command: MetadataCommand) -> CommandResult | RaftlogError | None:
        """Return what the command was answered before; None if it has not been, and is to be decided now.

        A sequence that the client has settled comes from a message that was late, and nobody waits for its answer.
        One whose outcome was dropped for others may have been done or not. Neither is done now; the answer is final.
        """
        session = self._sessions.get(command.client_id)
        if session is None:
            return None
        known = session.outcomes.get(command.sequence)
        if known is None and command.sequence >= session.settled_below:
            return None
        self._use(command.client_id, session, index)
        if known is None:
            return RequestTimedOut(
                f"sequence {command.sequence} of this client is settled, as all below {session.settled_below}: the "
                "command may have been done before or not, and is not done now; see what is there, then decide"
            )
        return outcome_from_wire(known) if isinstance(known, CommandOutcome) else known

    def answer(self, index: int, command: MetadataCommand, outcome: CommandResult | RaftlogError) -> None:
        """Keep the answer to a command, and drop what its client says it does not need any more."""
        if not command.client_id:
            return
        session = self._sessions.get(command.client_id)
        if session is None:
            session = self._sessions[command.client_id] = _Session()
            self._bytes += SESSION_BYTES
            if len(self._sessions) > self._max_clients:
                self._drop_longest_silent()
        outcomes = session.outcomes
        assert command.sequence not in outcomes
        kept = outcome if isinstance(outcome, CommandResult) else outcome_to_wire(outcome)
        outcomes[command.sequence] = kept
        self._bytes += _cost(kept)
        settled_below = command.settled_below
        if len(outcomes) > self._max_outcomes:
            settled_below = max(settled_below, sorted(outcomes)[-self._max_outcomes])
        if settled_below > session.settled_below:
            self._bytes -= session.settle(settled_below)
        self._use(command.client_id, session, index)
        while self._bytes > self._max_bytes and len(self._sessions) > 1:
            self._drop_longest_silent()
        while self._bytes > self._max_bytes and session.outcomes:
            oldest = min(session.outcomes)
            self._bytes -= _cost(session.outcomes.pop(oldest))
            session.settled_below = max(session.settled_below, min(oldest + 1, MAX_INT64))

    def _drop_longest_silent(self) -> None:
        _, session = self._sessions.popitem(last=False)
        self._bytes -= session.size_bytes

    def _use(self, client_id: bytes, session: _Session, index: int) -> None:
        session.last_used_index = index
        self._sessions.move_to_end(client_id)

    def capture(self) -> SessionsCapture:
        """Return the sessions as they are now; they may go on changing."""
        return SessionsCapture(
            tuple(
                (client_id, _Session(session.settled_below, session.last_used_index, dict(session.outcomes)))
                for client_id, session in self._sessions.items()
            )
        )

    def restore(self, sessions: Iterable[ClientSession]) -> None:
        """Take the sessions of a snapshot in place of the present ones."""
        self._sessions.clear()
        self._bytes = 0
        for wire in sorted(sessions, key=lambda each: each.last_used_index):
            session = _Session(wire.settled_below, wire.last_used_index)
            for sequence, kept in wire.outcomes.items():
                outcome = outcome_from_wire(kept)
                session.outcomes[sequence] = outcome if isinstance(outcome, CommandResult) else kept
            self._sessions[wire.client_id] = session
            self._bytes += session.size_bytes


def _cost(kept: _Kept) -> int:
    if isinstance(kept, CommandOutcome):
        return ERROR_BYTES
    if not kept.partitions:
        return OUTCOME_BYTES
    return OUTCOME_BYTES + sum(partition.ByteSize() for partition in kept.partitions)


def _wire(kept: _Kept) -> CommandOutcome:
    return outcome_to_wire(kept) if isinstance(kept, CommandResult) else kept
