"""A plan of moves that the console carries out by itself: some at a time, until all are done, or a person cancels it.

    waiting  -- begin -->  under way  -- the new replicas are in sync -->  done
                                      -- cancelled, here or by others -->  cancelled

`Rebalance.step` looks at the cluster once, and begins as many moves as there is room for. A thread of its own takes a
step every two seconds, with the rights of the user who began it. Brokers that do not answer are waited for; a refusal
ends the rebalance. A console that stops begins no more moves; those under way continue without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import raftlog
from raftlog._core.descriptions import TopicDescription
from raftlog.cli.partitions.moving import (
    DONE,
    GONE,
    UNDER_WAY,
    Move,
    all_topics,
    goal_of,
    holding,
    lead_as_wanted,
    partition_of,
    put_on,
    state_of,
    take_off,
    take_off_forgotten,
)
from raftlog.errors import NoReassignmentInProgress, RaftlogError
from raftlog.types import TopicPartition

logger = logging.getLogger(__name__)

AT_A_TIME: Final = 20
EVERY_S: Final = 2.0


class Progress(NamedTuple):
    """How far a rebalance is. `state`: running, cancelling, done, cancelled, failed. `waits`: why it does not go on."""

    state: str
    total: int
    done: int
    under_way: int
    waiting: int
    cancelled: int
    waits: str

    @property
    def runs(self) -> bool:
        """Whether it is not over."""
        return self.state in ("running", "cancelling")


class Rebalance:
    """The moves of one plan. `leaving`: a broker that gets no new replicas from now on. `rate`: bytes per second."""

    def __init__(
        self, admin: raftlog.Admin, moves: Sequence[Move], leaving: int | None = None, rate: int | None = None
    ) -> None:
        self._admin = admin
        self._moves = list(moves)
        self._leaving = leaving
        self._rate = rate
        self._prepared = False
        self._begun: set[TopicPartition] = set()
        self._wake = threading.Event()
        self._cancel = False
        self._stopped = False
        self._progress = Progress("running", len(self._moves), 0, 0, len(self._moves), 0, "")

    @property
    def progress(self) -> Progress:
        """Return how far it was at the last step."""
        return self._progress

    def start(self) -> None:
        """Carry it out in a thread of its own."""
        threading.Thread(target=self._run, name="console-rebalance", daemon=True).start()

    def cancel(self) -> None:
        """Begin no more moves, and cancel those under way; what is done stays."""
        self._cancel = True
        if self._progress.runs:
            self._progress = self._progress._replace(state="cancelling")
        self._wake.set()

    def stop(self) -> None:
        """Begin no more moves: the console stops."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped and self._progress.runs:
            self.step()
            self._wake.wait(EVERY_S)
            self._wake.clear()

    def step(self) -> Progress:
        """Look at the cluster, begin the next moves, and return how far it is."""
        try:
            self._step()
        except RaftlogError as error:
            state = self._progress.state if error.retriable else "failed"
            self._progress = self._progress._replace(state=state, waits=str(error))
            if not error.retriable:
                logger.warning("the rebalance has failed: %s", error)
                if self._rate is not None:
                    with suppress(RaftlogError):  # what refused the rebalance may refuse this
                        take_off_forgotten(self._admin)
        return self._progress

    def _step(self) -> None:
        topics = all_topics(self._admin)
        if not self._prepared:
            if self._leaving is not None:
                self._admin.alter_broker(self._leaving, cordoned=True)
            if self._rate is not None:
                put_on(
                    self._admin, list(holding(topics.values())), {move.part: move for move in self._moves}, self._rate
                )
            self._prepared = True
        states = {move.part: state_of(move, topics) for move in self._moves}
        moving = [move for move in self._moves if states[move.part] == UNDER_WAY]
        left = [move for move in self._moves if states[move.part] not in (DONE, GONE, UNDER_WAY)]
        waiting = [move for move in left if move.part not in self._begun]
        if self._cancel:
            ours = [move for move in moving if move.part in self._begun and self._goes_there(move, topics)]
            with suppress(NoReassignmentInProgress):  # a move has just ended; the others are cancelled all the same
                self._admin.alter_reassignments({move.part: None for move in ours})
            self._end("cancelled", topics.keys())
            done = len(self._moves) - len(ours) - len(left)
            self._note("cancelled", done, 0, 0, len(self._moves) - done)
            return
        room = waiting[: max(0, AT_A_TIME - len(moving))]
        if room:
            self._admin.alter_reassignments({move.part: move.replicas for move in room})
            self._begun |= {move.part for move in room}
        lost = len(left) - len(waiting)  # begun, and cancelled by others
        done = len(self._moves) - len(moving) - len(left)
        if not moving and not waiting:
            lead_as_wanted(self._admin, [move for move in self._moves if states[move.part] == DONE])
            self._end("done", topics.keys())
            self._note("done", done, 0, 0, lost)
        else:
            self._note("running", done, len(moving) + len(room), len(waiting) - len(room), lost)

    @staticmethod
    def _goes_there(move: Move, topics: Mapping[str, TopicDescription]) -> bool:
        part = partition_of(move, topics)
        return part is not None and goal_of(part) == move.replicas

    def _end(self, how: str, topics: Iterable[str]) -> None:
        if self._rate is not None:
            take_off(self._admin, {move.part.topic for move in self._moves}.intersection(topics))
        logger.info("the rebalance is %s", how)

    def _note(self, state: str, done: int, under_way: int, waiting: int, cancelled: int) -> None:
        self._progress = Progress(state, len(self._moves), done, under_way, waiting, cancelled, "")
