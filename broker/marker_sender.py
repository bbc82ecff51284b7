"""Tells partitions and groups what transaction coordinators on this broker have decided, as often as it takes.

    decision committed -> `MarkerDesk` -> `MarkerSender`, gathered for one turn of the event loop
        by partition or group    led here: `marker_writing.py`; elsewhere: `marker_links.py`
        all of them have it      -> `MarkersWritten`, to the coordinator

What waits for the same partition in one turn shares a control batch. Markers are idempotent (docs/transactions.md), so
whatever is not known to be written is sent again, to whoever leads by the newest metadata.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol, TypeAlias

from broker.coordinator.core import Notice
from broker.coordinator.shard import State
from broker.marker_writing import Errors, LocalMarkers, RemoteMarkers, Target
from broker.transactions.commands import MarkersWritten, PendingMarkers
from raftlog.errors import LeaderNotAvailable, RaftlogError
from raftlog.format.control import Marker
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

MAX_IN_BATCH: Final = 1_000
"""Markers in one control batch: some 40 KB."""
TURN_S: Final = 0.004
"""After so long others have their turn on the event loop."""
FIRST_RETRY_S: Final = 0.02
LAST_RETRY_S: Final = 0.5
SAID_AFTER: Final = (10, 100, 1_000)
"""Attempts after which the log says what is in the way: seconds, a minute, several minutes."""

GONE: Final = -2
"""Where nobody is to be told: the topic was deleted."""
NOBODY: Final = -1


class Coordinator(Protocol):
    """The shard that a decision comes from; see `broker.coordinator.shard.Shard`."""

    @property
    def leader_epoch(self) -> int:
        """Its term, which markers carry as the coordinator's epoch."""
        ...

    @property
    def state(self) -> State:
        """Whether it is there still."""
        ...

    def tell(self, command: MarkersWritten) -> None:
        """Have the command decided."""
        ...


class MarkerDesk:
    """Where one coordinator leaves what it has decided: the token that it is made with."""

    def __init__(self, sender: MarkerSender, coordinator: Callable[[], Coordinator | None]) -> None:
        self._sender = sender
        self._coordinator = coordinator

    def notify(self, notice: Notice) -> None:
        """Take what has to be told."""
        assert isinstance(notice, PendingMarkers), "nothing else is left here"
        coordinator = self._coordinator()
        if coordinator is not None:
            self._sender.send(notice, coordinator)


class _Job:
    """One decision, on its way to the targets in `left`."""

    __slots__ = ("coordinator", "left", "marker", "pending")

    def __init__(self, pending: PendingMarkers, coordinator: Coordinator) -> None:
        self.pending = pending
        self.coordinator = coordinator
        self.marker = Marker(pending.producer_id, pending.producer_epoch, pending.commit, coordinator.leader_epoch)
        self.left: dict[Target, None] = dict.fromkeys([*sorted(pending.partitions), *sorted(pending.group_ids)])
        """In an order that is the same in every process."""

    @property
    def is_over(self) -> bool:
        """Whether another broker coordinates it by now; it reads the decision in the log, and tells it again."""
        return self.coordinator.state is State.GONE


Jobs: TypeAlias = list[_Job]


class MarkerSender:
    """One for each broker; on the event loop.

    States of a target (a partition, or a group):
        idle    -> ready    a decision has to be told there
        ready   -> sent     in the next turn, to its leader by the metadata
        ready   -> resting  it has none
        sent    -> idle     all is written, or the topic was deleted
        sent    -> resting  refused, or unanswered; for a while, which grows
        resting -> ready    after that while, or as soon as it has another leader

    `group_broker` returns which broker coordinates a group, and raises where nobody does.
    """

    def __init__(
        self,
        node_id: int,
        image: Callable[[], MetadataImage],
        local: LocalMarkers,
        links: RemoteMarkers,
        group_broker: Callable[[str], int],
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._local = local
        self._links = links
        self._group_broker = group_broker
        self._rng = rng or random.Random()
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[tuple[Coordinator, PendingMarkers], _Job] = {}
        self._waiting: dict[Target, Jobs] = {}
        self._ready: dict[Target, None] = {}
        self._resting: dict[Target, tuple[asyncio.TimerHandle, int]] = {}
        """Until when, and where the target was when it began to rest."""
        self._attempts: dict[Target, int] = {}
        self._scheduled = False
        self._closed = False

    def __len__(self) -> int:
        """How many decisions are on their way."""
        return len(self._jobs)

    def left_of(self, transactional_id: str) -> frozenset[Target] | None:
        """Return who is still to be told how a transaction has ended; None: nothing of it is on its way."""
        for job in self._jobs.values():
            if job.pending.transactional_id == transactional_id:
                return frozenset(job.left)
        return None

    def send(self, pending: PendingMarkers, coordinator: Coordinator) -> None:
        """Tell what a coordinator has decided; what is on its way already is not sent twice."""
        key = (coordinator, pending)
        if self._closed or key in self._jobs:
            return
        job = self._jobs[key] = _Job(pending, coordinator)
        if not job.left:
            self._finish(job)
            return
        for target in job.left:
            self._wait(target, [job])
            if target not in self._resting:
                self._ready[target] = None
        self._schedule()

    def _wait(self, target: Target, jobs: Jobs) -> None:
        self._waiting.setdefault(target, []).extend(jobs)

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        until_s = self._loop.time() + TURN_S
        while self._ready and not self._closed:
            target = next(iter(self._ready))
            del self._ready[target]
            self._send_to(target)
            if self._loop.time() > until_s:
                self._schedule()
                break
        self._links.flush()

    def _send_to(self, target: Target) -> None:
        waiting = self._living(self._waiting.pop(target, []))
        jobs, rest = waiting[:MAX_IN_BATCH], waiting[MAX_IN_BATCH:]
        place = self._place(target) if jobs else GONE
        if place == GONE:
            self._answered(target, jobs, [None] * len(jobs))
        elif place == NOBODY:
            error = LeaderNotAvailable("nobody leads it at the moment")
            self._answered(target, jobs, [error] * len(jobs))
        else:
            self._hand_over(target, place, jobs)
        if rest:
            self._wait(target, rest)
            if target not in self._resting:
                self._ready[target] = None

    def _hand_over(self, target: Target, place: int, jobs: Jobs) -> None:
        markers = [job.marker for job in jobs]
        answered = partial(self._answered, target, jobs)
        if place != self._node_id:
            self._links.put(place, target, markers, answered)
        elif isinstance(target, str):
            self._local.write_group(target, markers, answered)
        else:
            self._local.write(*target, markers, answered)

    def _living(self, jobs: Iterable[_Job]) -> Jobs:
        """Return those whose coordinator is this broker still, and let go of the others."""
        living = []
        for job in jobs:
            if job.is_over:
                self._jobs.pop((job.coordinator, job.pending), None)
            else:
                living.append(job)
        return living

    def _place(self, target: Target) -> int:
        """Return which broker is to be told, GONE or NOBODY.

        A topic that the image lacks was deleted: this broker coordinates by newer metadata than that of the broker
        which added it to the transaction.
        """
        if isinstance(target, str):
            try:
                return self._group_broker(target)
            except RaftlogError:
                return NOBODY
        part = self._image().partition(*target)
        if part is None:
            return GONE
        return part.leader if part.leader >= 0 else NOBODY

    # Answers

    def _answered(self, target: Target, jobs: Jobs, errors: Errors) -> None:
        failed: Jobs = []
        first: RaftlogError | None = None
        for job, error in zip(jobs, errors, strict=True):
            if error is not None:
                first = first or error
                failed.append(job)
                continue
            job.left.pop(target, None)
            if not job.left:
                self._finish(job)
        if first is not None:
            self._rest(target, self._living(failed), first)
        else:
            self._attempts.pop(target, None)

    def _finish(self, job: _Job) -> None:
        if self._jobs.pop((job.coordinator, job.pending), None) is not None and not job.is_over:
            job.coordinator.tell(MarkersWritten(job.pending))

    def _rest(self, target: Target, jobs: Jobs, error: RaftlogError) -> None:
        if not jobs or self._closed:
            self._attempts.pop(target, None)
            return
        self._wait(target, jobs)
        if target in self._resting or target in self._ready:
            return
        attempts = self._attempts[target] = self._attempts.get(target, 0) + 1
        if attempts in SAID_AFTER:
            logger.warning(
                "%d transactions cannot be ended on %s after %d attempts: %s",
                len(self._waiting[target]),
                self._name(target),
                attempts,
                error,
            )
        delay_s = min(FIRST_RETRY_S * 1.7 ** min(attempts - 1, 20), LAST_RETRY_S) * self._rng.uniform(0.5, 1.5)
        timer = self._loop.call_later(delay_s, self._rested, target)
        self._resting[target] = (timer, self._place(target))

    def _rested(self, target: Target) -> None:
        timer, _ = self._resting.pop(target)
        timer.cancel()
        self._ready[target] = None
        self._schedule()

    def _name(self, target: Target) -> str:
        if isinstance(target, str):
            return f"group {target!r}"
        topic = self._image().topics.get(target[0])
        return f"{topic.name if topic is not None else target[0].hex()}-{target[1]}"

    # What changes

    def on_metadata(self, image: MetadataImage) -> None:
        """Go to new leaders at once, and wait for no answer of brokers that are gone."""
        self._links.on_metadata(image)
        moved = [target for target, (_, place) in self._resting.items() if self._place(target) != place]
        for target in moved:
            self._rested(target)

    async def close(self) -> None:
        """Send nothing more; coordinators elsewhere do."""
        self._closed = True
        for timer, _ in self._resting.values():
            timer.cancel()
        self._jobs.clear()
        self._waiting.clear()
        self._ready.clear()
        self._resting.clear()
        await self._links.close()
