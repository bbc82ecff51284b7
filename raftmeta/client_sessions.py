"""What clients of commands have been answered, so that a command asked for twice is done once.

A client that does not learn what became of a command (its controller died) asks again with the same client id and
sequence, and gets the first answer. Part of the replicated state: every replica keeps the same, and snapshots carry it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from raftlog.errors import InvalidRequestError, RaftlogError
from raftlog.v1.records_pb2 import ClientSession, CommandOutcome, MetadataCommand
from raftmeta.decide import CommandResult, outcome_from_wire, outcome_to_wire

MAX_CLIENTS = 10_000
MAX_OUTCOMES_PER_CLIENT = 1_000

_Kept = CommandResult | CommandOutcome
"""What was answered; errors as they travel, so that one that is raised never holds on to who raised it."""


@dataclass(slots=True)
class _Session:
    """One client. Invariant: `outcomes` has no sequence below `settled_below`."""

    settled_below: int = 0
    last_used_index: int = 0
    outcomes: dict[int, _Kept] = field(default_factory=dict)

    def settle(self, below: int) -> None:
        """Forget the outcomes of sequences below `below`."""
        if below - self.settled_below <= len(self.outcomes):
            for sequence in range(self.settled_below, below):
                self.outcomes.pop(sequence, None)
        else:
            self.outcomes = {sequence: kept for sequence, kept in self.outcomes.items() if sequence >= below}
        self.settled_below = below


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
        self, *, max_clients: int = MAX_CLIENTS, max_outcomes_per_client: int = MAX_OUTCOMES_PER_CLIENT
    ) -> None:
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._max_clients = max_clients
        self._max_outcomes = max_outcomes_per_client

    def __len__(self) -> int:
        return len(self._sessions)

    def answered(self, index: int, command: MetadataCommand) -> CommandResult | RaftlogError | None:
        """Return what the command was answered before; None if it has not been, and is to be decided now.

        A sequence that the client has settled comes from a message that was late, and nobody waits for its answer;
        it is refused, never done again.
        """
        session = self._sessions.get(command.client_id)
        if session is None:
            return None
        known = session.outcomes.get(command.sequence)
        if known is None and command.sequence >= session.settled_below:
            return None
        self._use(command.client_id, session, index)
        if known is None:
            return InvalidRequestError(
                f"sequence {command.sequence} of this client is settled, all below {session.settled_below} are"
            )
        return outcome_from_wire(known) if isinstance(known, CommandOutcome) else known

    def answer(self, index: int, command: MetadataCommand, outcome: CommandResult | RaftlogError) -> None:
        """Keep the answer to a command, and drop what its client says it does not need any more."""
        if not command.client_id:
            return
        session = self._sessions.get(command.client_id)
        if session is None:
            session = self._sessions[command.client_id] = _Session()
            if len(self._sessions) > self._max_clients:
                self._sessions.popitem(last=False)
        outcomes = session.outcomes
        outcomes[command.sequence] = outcome if isinstance(outcome, CommandResult) else outcome_to_wire(outcome)
        settled_below = command.settled_below
        if len(outcomes) > self._max_outcomes:
            settled_below = max(settled_below, sorted(outcomes)[-self._max_outcomes])
        if settled_below > session.settled_below:
            session.settle(settled_below)
        self._use(command.client_id, session, index)

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
        for wire in sorted(sessions, key=lambda each: each.last_used_index):
            session = _Session(wire.settled_below, wire.last_used_index)
            for sequence, kept in wire.outcomes.items():
                outcome = outcome_from_wire(kept)
                session.outcomes[sequence] = outcome if isinstance(outcome, CommandResult) else kept
            self._sessions[wire.client_id] = session


def _wire(kept: _Kept) -> CommandOutcome:
    return outcome_to_wire(kept) if isinstance(kept, CommandResult) else kept
