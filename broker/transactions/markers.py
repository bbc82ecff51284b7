"""What was decided and is not recorded as told: whose markers are to be sent, were sent, and are written.

    decided (replayed) -> unsent -> sent -> written -> completed (replayed)

`unsent` follows the records, so that after a load it holds whatever the former coordinator left undone. `written` is
known to this coordinator only: the next one sends the markers again, which does nothing. The record that ends it waits
a moment for others, and for a transaction that begins anew it is never written: that one's own record says as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import Message

from broker.coordinator.core import Send


class Owner(NamedTuple):
    """Who has something open or decided: a transactional id, or a stage of a sink."""

    transactional_id: str
    sink_id: str = ""
    producer_id: int = -1


class Undone:
    """Owners with a decision that is not completed; in order."""

    def __init__(self) -> None:
        self.unsent: dict[Owner, None] = {}
        self.written: dict[Owner, float] = {}
        """With when it is to be recorded, in monotonic ms; ascending."""

    def decided(self, owner: Owner) -> None:
        """A decision was replayed."""
        self.unsent[owner] = None

    def completed(self, owner: Owner) -> None:
        """Nothing is decided and not told, by the records."""
        self.unsent.pop(owner, None)
        self.written.pop(owner, None)


@dataclass(slots=True)
class _Parked:
    to: object
    answer: Message
    due_ms: float
    missing: set[Owner] = field(default_factory=set)
    answered: bool = False

    def release(self) -> Send:
        self.answered = True
        return Send(self.to, self.answer)


class ParkedAnswers:
    """Answers that wait until all markers are written, or for a while: all for the same, so they are due in order."""

    def __init__(self) -> None:
        self._queue: deque[_Parked] = deque()
        self._waiting: dict[Owner, list[_Parked]] = {}

    def park(self, to: object, answer: Message, missing: Iterable[Owner], due_ms: float) -> None:
        """Answer once the markers of all `missing` are written; at least one is."""
        parked = _Parked(to, answer, due_ms, set(missing))
        assert parked.missing, "there is nothing to wait for"
        assert not self._queue or self._queue[-1].due_ms <= due_ms
        self._queue.append(parked)
        for owner in parked.missing:
            self._waiting.setdefault(owner, []).append(parked)

    def written(self, owner: Owner) -> list[Send]:
        """Return the answers that waited for nothing else any more."""
        sends = []
        for parked in self._waiting.pop(owner, ()):
            parked.missing.discard(owner)
            if not parked.missing and not parked.answered:
                sends.append(parked.release())
        return sends

    def next_ms(self) -> float | None:
        """Return when `due` has to be called next; there may be nothing then."""
        return self._queue[0].due_ms if self._queue else None

    def due(self, now_ms: float) -> list[Send]:
        """Return the answers that have waited for long enough."""
        sends = []
        while self._queue and self._queue[0].due_ms <= now_ms:
            parked = self._queue.popleft()
            if not parked.answered:
                sends.append(parked.release())
                self._forget(parked)
        return sends

    def _forget(self, parked: _Parked) -> None:
        for owner in parked.missing:
            others = [other for other in self._waiting[owner] if other is not parked]
            if others:
                self._waiting[owner] = others
            else:
                del self._waiting[owner]
