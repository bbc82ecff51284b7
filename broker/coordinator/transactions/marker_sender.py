"""Writes the markers of decided transactions to partitions and groups, with retries until all are written.

    decision committed -> `MarkerDispatch` -> `MarkerSender`, gathered for one turn of the event loop
        by partition or group    led here: `LocalMarkers`; elsewhere: `marker_links.py`
        all are written          -> `MarkersWritten`, to the coordinator

A user has `MOST_TARGETS` partitions and groups under way at a time, and users take turns: one request may end a
transaction of 10,000 partitions, each of which costs its replicas an append and an fsync. The next ones follow as these
are answered, so what the brokers can do sets the pace (docs/adr/0053). Written markers count for the user's
`request_percentage` at the broker that coordinates the transaction: by their average cost, since other brokers bear
most of it (docs/adr/0057).

Markers for the same partition in one turn share a control batch. Markers are idempotent (docs/transactions.md), so
those not known to be written are sent again, to the leader by the newest metadata.

`LocalMarkers` writes into the logs that this broker leads, and to the coordinators of groups here, for this broker's
own coordinators and for those of others (`broker/net/services/markers.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

from google.protobuf.message import Message

from broker.coordinator.core import Notice, Reply
from broker.coordinator.groups.commands import EndTransactionOffsets
from broker.coordinator.groups.coordinators import GroupCoordinators
from broker.coordinator.shard import State
from broker.coordinator.transactions.commands import MarkersWritten, PendingMarkers
from broker.partition.partition import Partition
from raftlog.errors import (
    InternalError,
    InvalidProducerEpoch,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    RaftlogError,
    from_wire,
)
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker
from raftlog.v1 import transaction_pb2
from raftlog.v1.common_pb2 import NONE
from raftlog.v1.group_pb2 import CommitOffsetResult
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

Target: TypeAlias = tuple[bytes, int] | str
"""The target of a marker: (topic id, partition), or a group's id."""
Errors: TypeAlias = Sequence[RaftlogError | None]
"""One for each marker, in order; None: it is written and committed, or has nothing left to decide."""
Answer: TypeAlias = Callable[[Errors], None]


class RemoteMarkers(Protocol):
    """Sends markers to other brokers; see `broker.coordinator.transactions.marker_links.MarkerLinks`."""

    def put(self, broker_id: int, target: Target, markers: Sequence[Marker], answer: Answer) -> None:
        """Queue markers for the next `flush`; `answer` is called once, later."""
        ...

    def flush(self) -> None:
        """Send the queued markers, as far as there is room."""
        ...

    def on_metadata(self, image: MetadataImage) -> None:
        """Fail the markers for brokers that are fenced or gone."""
        ...

    async def close(self) -> None:
        """End all sending; no callback is called any more."""
        ...


def from_message(marker: transaction_pb2.Marker) -> Marker:
    """Return a marker as logs have it."""
    return Marker(marker.producer_id, marker.producer_epoch, marker.commit, marker.coordinator_epoch)


def check_possible(markers: Sequence[Marker]) -> None:
    """Check that these can be markers: what is written of them has to be read again.

    Raises:
        InvalidRequestError: one has a producer or an epoch that there is not.
    """
    for marker in markers:
        if marker.producer_id < 0 or not 0 <= marker.producer_epoch <= MAX_PRODUCER_EPOCH:
            raise InvalidRequestError(
                f"a marker of producer id {marker.producer_id} with epoch {marker.producer_epoch}: ids begin with 0, "
                f"and epochs go from 0 to {MAX_PRODUCER_EPOCH}"
            )


def to_message(marker: Marker) -> transaction_pb2.Marker:
    """Return a marker as it travels."""
    return transaction_pb2.Marker(
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        commit=marker.commit,
        coordinator_epoch=marker.coordinator_epoch,
    )


class LocalMarkers:
    """Writes markers on this broker; on the event loop.

    Each callback is called once, when the markers are committed, or when this attempt has failed for certain; perhaps
    before `write` or `write_group` returns, and perhaps never while too few replicas are in sync.

    If the producer has a newer epoch in the partition, a late marker counts as written: its transaction was decided
    before that epoch began (KIP-890). A marker that contradicts the decision in the log counts as written too, because
    a repetition would change nothing; it is logged as an error.
    """

    def __init__(self, find: Callable[[bytes, int], Partition], groups: GroupCoordinators) -> None:
        self._find = find
        self._groups = groups

    def write(self, topic_id: bytes, partition: int, markers: Sequence[Marker], answer: Answer) -> None:
        """Append the markers of a partition that this broker leads, as one control batch."""

        def answered(errors: Errors) -> None:
            answer([_settled(error, marker) for error, marker in zip(errors, markers, strict=True)])

        try:
            check_possible(markers)
            found = self._find(topic_id, partition)
            found.append_markers(markers, found.leader_epoch, answered)
        except RaftlogError as error:
            answer([error] * len(markers))
        except Exception as error:  # a bug must not keep a transaction open for ever: the sender tries again
            logger.exception("markers for partition %d of topic id %s failed", partition, topic_id.hex())
            answer([InternalError(f"{type(error).__name__}: {error}")] * len(markers))

    def write_group(self, group_id: str, markers: Sequence[Marker], answer: Answer) -> None:
        """Have the offsets of transactions committed or forgotten by a group that this broker coordinates."""
        try:
            check_possible(markers)
            shard = self._groups.shard_of(group_id)[1]
        except RaftlogError as error:
            answer([error] * len(markers))
            return

        def answered(errors: Errors) -> None:
            answer([_settled(error, marker) for error, marker in zip(errors, markers, strict=True)])

        answers = _Answers(len(markers), answered)
        for index, marker in enumerate(markers):
            to = _GroupAnswer(answers, index)
            epoch = marker.producer_epoch
            shard.submit(EndTransactionOffsets(to, group_id, marker.producer_id, epoch, marker.commit), to)


def _settled(error: RaftlogError | None, marker: Marker) -> RaftlogError | None:
    if isinstance(error, InvalidProducerEpoch):
        logger.warning("a marker comes too late and changes nothing: %s", error, extra={"marker": marker})
        return None
    if isinstance(error, InvalidTxnState):
        logger.error("A TRANSACTION IS NOT ATOMIC: %s", error, extra={"marker": marker})
        return None
    return error


class _Answers:
    """Gathers the answers of single markers."""

    def __init__(self, count: int, answer: Answer) -> None:
        self._errors: list[RaftlogError | None] = [None] * count
        self._left = count
        self._answer = answer

    def take(self, index: int, error: RaftlogError | None) -> None:
        self._errors[index] = error
        self._left -= 1
        if not self._left:
            self._answer(self._errors)


class _GroupAnswer:
    """A frame's recipient that is answered once: one marker for a group."""

    is_stream = False

    def __init__(self, answers: _Answers, index: int) -> None:
        self._answers: _Answers | None = answers
        self._index = index

    def deliver(self, message: Message | Reply | RaftlogError | None) -> None:
        """Take the answer; a second one is passed over."""
        answers, self._answers = self._answers, None
        if answers is None:
            return
        error = message if isinstance(message, RaftlogError) else None
        if isinstance(message, CommitOffsetResult) and message.error.code != NONE:
            error = from_wire(message.error)
        answers.take(self._index, error)


MAX_IN_BATCH: Final = 250
"""Markers in one control batch: a leader appends it in some 5 ms."""
MARKERS_OF_A_TARGET: Final = 50
"""So many markers in a batch cost as much as one target more."""
MOST_TARGETS: Final = 64
"""Partitions and groups to which markers of one user are under way at a time, fewer if they get many markers each.
Markers that wait meanwhile for the same target go there in one batch."""
BATCH_MS: Final = 0.25
MARKER_MS: Final = 0.02
"""How much a batch of markers, and each marker in it, counts for `request_percentage`: a leader takes 0.12 ms to append
a batch, and each follower appends it too."""
HOLDS_S: Final = 1.0
"""How long a target that does not answer counts for that. Its markers may be committed only when more replicas are in
sync."""
TURN_S: Final = 0.004
"""After so long others have their turn on the event loop."""
FIRST_RETRY_S: Final = 0.02
LAST_RETRY_S: Final = 0.5
SAID_AFTER: Final = (10, 100, 1_000)
"""Attempts after which the cause is logged: after seconds, a minute, several minutes."""

GONE: Final = -2
"""The topic was deleted, so there is no target."""
NOBODY: Final = -1
"""The target has no leader or coordinator at the moment."""


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


class MarkerDispatch:
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


class _Place:
    """What a batch takes of the targets that a user may have under way; given back once, by the answer or the time."""

    def __init__(self, give: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._give: Callable[[], None] | None = give
        self._timer = loop.call_later(HOLDS_S, self.give)

    def give(self) -> None:
        """Give it back, unless it was."""
        self._timer.cancel()
        give, self._give = self._give, None
        if give is not None:
            give()


class MarkerSender:
    """One for each broker; on the event loop.

    States of a target (a partition, or a group):
        idle    -> ready    there is a marker for it
        ready   -> sent     in one of the next turns, to its leader by the metadata
        ready   -> resting  it has no leader
        sent    -> idle     all markers are written, or the topic was deleted
        sent    -> resting  refused or unanswered; the pause grows
        resting -> ready    after the pause, or as soon as it has another leader

    `group_broker` returns the broker that coordinates a group, and raises if there is none. `charge` is called with a
    user, and the ms that its written markers count.
    """

    def __init__(
        self,
        node_id: int,
        image: Callable[[], MetadataImage],
        local: LocalMarkers,
        links: RemoteMarkers,
        group_broker: Callable[[str], int],
        *,
        charge: Callable[[str, float], object] = lambda user, ms: None,
        rng: random.Random | None = None,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._local = local
        self._links = links
        self._group_broker = group_broker
        self._charge = charge
        self._rng = rng or random.Random()
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[tuple[Coordinator, PendingMarkers], _Job] = {}
        self._waiting: dict[Target, Jobs] = {}
        self._ready: OrderedDict[str, OrderedDict[Target, None]] = OrderedDict()
        """By user of one of its markers, the user whose turn it is first; no user without any."""
        self._held: dict[str, OrderedDict[Target, None]] = {}
        """Likewise, of users with `MOST_TARGETS` under way."""
        self._under_way: Counter[str] = Counter()
        """By user, above 0."""
        self._resting: dict[Target, tuple[asyncio.TimerHandle, int]] = {}
        """Until when, and where the target was when it began to rest."""
        self._attempts: dict[Target, int] = {}
        self._scheduled = False
        self._closed = False

    def __len__(self) -> int:
        """The number of decisions whose markers are not all written."""
        return len(self._jobs)

    def left_of(self, transactional_id: str) -> frozenset[Target] | None:
        """Return the targets that still lack a transaction's marker; None if no markers of it are being sent."""
        for job in self._jobs.values():
            if job.pending.transactional_id == transactional_id:
                return frozenset(job.left)
        return None

    def send(self, pending: PendingMarkers, coordinator: Coordinator) -> None:
        """Send the markers of a decision, unless they are being sent already."""
        key = (coordinator, pending)
        if self._closed or key in self._jobs:
            return
        job = self._jobs[key] = _Job(pending, coordinator)
        if not job.left:
            self._finish(job)
            return
        user, ready = pending.user, self._ready_of(pending.user)
        for target in job.left:
            self._waiting.setdefault(target, []).append(job)
            if target not in self._resting:
                ready[target] = None
        if not ready:
            self._ready.pop(user, None)
            self._held.pop(user, None)
        self._schedule()

    def _wait(self, target: Target, jobs: Jobs) -> None:
        self._waiting.setdefault(target, []).extend(jobs)
        if target not in self._resting:
            self._make_ready(target, jobs)

    def _make_ready(self, target: Target, jobs: Jobs) -> None:
        for user in dict.fromkeys(job.pending.user for job in jobs):
            self._ready_of(user)[target] = None

    def _ready_of(self, user: str) -> OrderedDict[Target, None]:
        return (self._held if self._under_way[user] >= MOST_TARGETS else self._ready).setdefault(user, OrderedDict())

    def _take_place(self, user: str, markers: int) -> _Place:
        cost = 1 + markers // MARKERS_OF_A_TARGET
        self._under_way[user] += cost
        if self._under_way[user] >= MOST_TARGETS and user in self._ready:
            self._held[user] = self._ready.pop(user)
        return _Place(partial(self._give_place, user, cost), self._loop)

    def _give_place(self, user: str, cost: int) -> None:
        self._under_way[user] -= cost
        if not self._under_way[user]:
            del self._under_way[user]
        if user in self._held and self._under_way[user] < MOST_TARGETS:
            self._ready[user] = self._held.pop(user)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        until_s = self._loop.time() + TURN_S
        while self._ready and not self._closed:
            user, targets = next(iter(self._ready.items()))
            target, _ = targets.popitem(last=False)
            if targets:
                self._ready.move_to_end(user)
            else:
                del self._ready[user]
            self._send_to(target, user)
            if self._loop.time() > until_s:
                self._schedule()
                break
        self._links.flush()

    def _send_to(self, target: Target, user: str) -> None:
        """Send what waits for a target, which counts for `user` while it is under way."""
        if target in self._resting or target not in self._waiting:
            return  # another user's turn has sent it all
        waiting = self._living(self._waiting.pop(target))
        jobs, rest = waiting[:MAX_IN_BATCH], waiting[MAX_IN_BATCH:]
        place = self._place(target) if jobs else GONE
        if place == GONE:
            self._answered(target, jobs, [None] * len(jobs))
        elif place == NOBODY:
            error = LeaderNotAvailable("it has no leader at the moment")
            self._answered(target, jobs, [error] * len(jobs))
        else:
            self._hand_over(target, place, jobs, self._take_place(user, len(jobs)))
        if rest:
            self._wait(target, rest)

    def _hand_over(self, target: Target, place: int, jobs: Jobs, taken: _Place) -> None:
        markers = [job.marker for job in jobs]

        def answered(errors: Errors) -> None:
            taken.give()
            self._charge_written(jobs, errors)
            self._answered(target, jobs, errors)

        if place != self._node_id:
            self._links.put(place, target, markers, answered)
        elif isinstance(target, str):
            self._local.write_group(target, markers, answered)
        else:
            self._local.write(*target, markers, answered)

    def _living(self, jobs: Iterable[_Job]) -> Jobs:
        """Return the jobs whose coordinator is still on this broker, and drop the others."""
        living = []
        for job in jobs:
            if job.is_over:
                self._jobs.pop((job.coordinator, job.pending), None)
            else:
                living.append(job)
        return living

    def _place(self, target: Target) -> int:
        """Return the broker to send to, GONE or NOBODY.

        A topic that the image lacks was deleted: this broker's metadata is newer than that of the broker which added
        the topic to the transaction.
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

    def _charge_written(self, jobs: Jobs, errors: Errors) -> None:
        """Charge the markers that were written. A failed attempt is free: the users have not caused it."""
        users = [job.pending.user for job, error in zip(jobs, errors, strict=True) if error is None]
        for user, count in Counter(users).items():
            if user:
                self._charge(user, MARKER_MS * count + BATCH_MS * count / len(jobs))

    def _finish(self, job: _Job) -> None:
        if self._jobs.pop((job.coordinator, job.pending), None) is not None and not job.is_over:
            job.coordinator.tell(MarkersWritten(job.pending))

    def _rest(self, target: Target, jobs: Jobs, error: RaftlogError) -> None:
        if not jobs or self._closed:
            self._attempts.pop(target, None)
            return
        if target in self._resting or target in self._waiting:
            self._wait(target, jobs)
            return
        self._waiting[target] = jobs
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
        self._make_ready(target, self._waiting[target])
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
        self._held.clear()
        self._resting.clear()
        await self._links.close()
