"""The ports of a Raft node: the state that it replicates, and the listener to its changes of role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class ReplicatedState(Protocol):
    """A deterministic state machine; every replica applies the same entries in the same order."""

    def apply(self, index: int, term: int, command: bytes) -> object:
        """Apply a committed command and return what its proposer is told.

        An exception means that this replica can no longer be trusted to agree with the others: the node stops. A
        command that is refused is therefore a result, not an exception.
        """
        ...

    def begin_term(self, index: int, term: int) -> None:
        """Note that the first entry of a leader's term was applied; it carries no command."""
        ...

    def capture(self) -> object:
        """Return the state as it is now: cheap, and unaffected by what is applied afterwards."""
        ...

    def encode(self, captured: object) -> bytes:
        """Return what `capture` returned as bytes, the same on every replica; may run in another thread."""
        ...

    def decode(self, data: bytes, index: int, term: int) -> object:
        """Read the state that was encoded as `data` after the entry at `index`; may run in another thread.

        Raises:
            RaftlogError: the bytes do not parse; the node stops.
        """
        ...

    def adopt(self, decoded: object) -> None:
        """Become the state that `decode` returned."""
        ...


class RaftListener(Protocol):
    """Told within `cycle`, on the thread that calls it."""

    def on_active(self, term: int) -> None:
        """This node leads in `term` and has applied everything that was committed before."""
        ...

    def on_inactive(self) -> None:
        """This node leads no longer."""
        ...

    def on_applied(self, index: int) -> None:
        """Entries up to `index` were applied in this cycle."""
        ...


@dataclass(frozen=True, slots=True)
class Applied:
    """The command was committed at `index` in `term`; `result` is what the state machine said."""

    index: int
    term: int
    result: object


@dataclass(frozen=True, slots=True)
class Unknown:
    """This node stopped leading before it knew: the command may still be committed, or may be lost."""


ProposalOutcome: TypeAlias = Applied | Unknown

Work: TypeAlias = Callable[[], None]
WorkDone: TypeAlias = Callable[[BaseException | None], None]
RunOffLoop: TypeAlias = Callable[[Work, WorkDone], None]
"""Runs `work` in another thread, then calls `done(error)` on the node's own thread, outside of `cycle`, and makes
sure that a cycle follows."""


def run_inline(work: Work, done: WorkDone) -> None:
    """Run the work at once, on the caller's thread."""
    try:
        work()
    except Exception as error:  # every error goes to `done`, as from another thread
        done(error)
    else:
        done(None)
