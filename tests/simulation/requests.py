"""Asking the controllers until there is an answer: hints, retries with the same sequence, other nodes."""

from __future__ import annotations

import random
from collections.abc import Callable

from raftlog.errors import FencedController
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.image import MetadataImage
from tests.simulation.network import Connection
from tests.simulation.process import Process
from tests.simulation.voter import Committed, Elsewhere, Propose, Read, Refused

ATTEMPT_S = (0.3, 1.0)
"""An attempt that is not answered in such a time is given up; its request may be under way still."""
BACKOFF_S = (0.01, 0.1)
STALE_SHARE = 0.03
"""How often an attempt is one that was delayed since an earlier controller epoch."""
LOST_ANSWERS_SHARE = 0.05
"""How often an answer is not heard, although everything else is well."""


class Requester:
    """Sends the requests of one process, each until it is answered. Requests of a requester may overlap."""

    def __init__(self, process: Process, chance: random.Random) -> None:
        self._process = process
        self._simulation = process.simulation
        self._random = chance
        self._hint = -1
        self._client_id = chance.randbytes(16)
        self._sequence = -1
        self._open: set[int] = set()

    def propose(self, command: MetadataCommand, done: Callable[[Committed], None]) -> None:
        """Have a command committed once, with retries; `done` hears its outcome, which may be a refusal."""
        self._sequence += 1
        sequence = self._sequence
        self._open.add(sequence)
        command.client_id = self._client_id
        command.sequence = sequence
        command.settled_below = min(self._open)

        def answered(answer: object) -> bool:
            if isinstance(answer, Committed) and not isinstance(answer.outcome, FencedController):
                self._open.discard(sequence)
                done(answer)
                return True
            return False

        def request() -> object:
            return Propose(command, stale_epoch=self._random.random() < STALE_SHARE)

        self._attempt(request, answered)

    def read(self, done: Callable[[MetadataImage], None]) -> None:
        """Get an image that is as new as everything acknowledged before this call."""

        def answered(answer: object) -> bool:
            if isinstance(answer, MetadataImage):
                done(answer)
                return True
            return False

        self._attempt(Read, answered)

    def _attempt(self, request: Callable[[], object], answered: Callable[[object], bool]) -> None:
        """Send it to a controller, and go on with its answer or after a time-out, whichever comes first."""
        simulation = self._simulation
        target = self._hint if self._hint >= 0 else self._random.choice(simulation.voters)
        self._hint = -1
        voter = simulation.voter_on(target)
        connection = None if voter is None else simulation.network.connect(self._process, voter.process)
        over: list[bool] = []

        def again(after_s: float | None = None) -> None:
            if not over:
                over.append(True)
                if connection is not None:
                    connection.break_now()
                wait_s = self._random.uniform(*BACKOFF_S) if after_s is None else after_s
                self._process.after(wait_s, self._attempt, request, answered)

        def hear(answer: object) -> None:
            if over or self._random.random() < LOST_ANSWERS_SHARE:
                return
            if answered(answer):
                over.append(True)
                self._hint = target
                assert connection is not None
                connection.break_now()
            elif isinstance(answer, Elsewhere):
                self._hint = answer.hint if answer.hint != target else -1
                again()
            else:
                assert isinstance(answer, Committed | Refused)
                again()

        if connection is None or voter is None:
            again()
            return
        opened: Connection = connection
        opened.opener_hears(hear, again)
        opened.acceptor_hears(lambda each: voter.serve(each, opened.answer), lambda: None)
        opened.send(request())
        self._process.after(self._random.uniform(*ATTEMPT_S), again)
