"""The engine of a consumer with a group: the coordinator assigns its partitions and keeps its committed offsets."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, cast

from raftlog._client.consumer import ConsumerEngine
from raftlog._client.coordinators import Coordinators
from raftlog._client.groups import (
    Claim,
    Claims,
    CommitQueue,
    Entry,
    GroupOffsets,
    GroupSession,
    Offsets,
    in_pieces,
    to_commit,
)
from raftlog._client.metadata import monotonic_ms
from raftlog._client.options import ConsumerOptions
from raftlog._core.cluster import TopicView
from raftlog._core.membership import Identity, Membership, MemberState
from raftlog._core.positions import PartitionState
from raftlog.errors import (
    AuthorizationError,
    ClosedError,
    InvalidConfig,
    InvalidRequestError,
    PartitionNotOwned,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
)
from raftlog.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from raftlog.v1 import common_pb2

logger = logging.getLogger(__name__)

COMMITTED: Final = "committed"
"""The reset of a partition that begins at the group's committed offset, if there is one."""


_PUSH_GRACE_S: Final = 0.5
"""How long the assignment may take after the coordinator has acknowledged a changed subscription."""

_MAY_PASS: Final = (AuthorizationError, InvalidConfig)
"""Refusals after which the next poll joins again, as Kafka's consumers do: meanwhile an administrator may have granted
the permission or replaced the password file."""


class Change(enum.Enum):
    """A change of a member's partitions."""

    LOST = "lost"
    REVOKED = "revoked"
    ASSIGNED = "assigned"


class Step(NamedTuple):
    """One change to tell the application of, in its own thread."""

    change: Change
    partitions: list[TopicPartition]


class GroupEngine(ConsumerEngine):
    """A member of a group, or with `assign` a consumer that only uses the group's offsets.

    The polling thread applies an assignment step by step: whenever `attention` is set it calls `next_step`, tells the
    application, and calls `finish_step`; at `session_deadline_ms` it calls `look_again`. So partitions do not change
    while the application works on records, and no poll returns records of a lost partition.
    """

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bootstrap, options, loop)
        self.group_id = options.group_id
        self.coordinators = Coordinators(self.metadata, self.connections, options)
        self.membership = Membership(
            Identity(
                group_id=options.group_id,
                member_id=uuid.uuid4().hex,
                instance_id=options.group_instance_id,
                client_id=options.client_id,
                rack=options.client_rack,
                rebalance_timeout_ms=int(options.max_poll_interval_ms),
                assignor=options.group_remote_assignor,
            )
        )
        self.offsets = GroupOffsets(
            options.group_id,
            self.coordinators,
            options,
            require_stable=options.isolation_level == common_pb2.READ_COMMITTED,
        )
        self.commits = CommitQueue(
            self._send_commit,
            claim=self._claim,
            pause_ms=options.pauses.after_ms,
            on_committed=self._on_committed,
        )
        self.committed_offsets: dict[TopicPartition, int] = {}
        """The committed offsets of assigned partitions, as far as this consumer knows."""
        self._resets: dict[TopicPartition, str] = {}
        """Where partitions without a committed offset begin."""
        self.session = GroupSession(
            self.membership,
            self.coordinators,
            self.connections,
            options.pauses,
            on_change=self._on_change,
            is_overdue=lambda now_ms: now_ms - self.polled_ms > options.max_poll_interval_ms,
            on_overdue=self._on_overdue,
        )
        self.attention = False
        """Whether the polling thread must call `next_step`."""
        self.polled_ms = math.inf
        """When the last poll returned; infinite while a poll waits."""
        self._overdue = False
        self._told: RaftlogError | None = None
        """The last refusal that the application was told."""
        self._changed = asyncio.Event()
        self._note = ""

    # Assignment and subscription

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """As `ConsumerEngine.assign`, but begin at the group's committed offsets; leave the group."""
        await self._leave()
        await super().assign(partitions)

    async def unsubscribe(self) -> None:
        """Leave the group, and read nothing."""
        await self._leave()
        await super().unsubscribe()

    async def subscribe(self, names: Iterable[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Join the group, or change the subscription; wait until the coordinator has answered.

        Raises:
            RaftlogError: the group refuses, or no broker or coordinator answers within `default.api.timeout.ms`. In
                the second case the engine keeps trying. After `_MAY_PASS` errors the next poll joins again.
        """
        self.check_open()
        self.polled_ms = math.inf  # waiting for the group counts as polling; the caller sets the time afterwards
        deadline = self._api_deadline()
        if not self.subscribed:
            with self.lock:
                self._keep_only(set())
        self._names = set(names) if names is not None else None
        self._pattern = pattern
        self._followed = None
        self.subscribed = True
        self.metadata.all_topics = pattern is not None
        if self._names is not None:
            self.metadata.wanted |= self._names
        try:
            await self._first_metadata(deadline)
        except (RetriableError, *_MAY_PASS):
            self._join()
            raise
        await self._answered(self._join(), deadline)
        self._raise_denied()

    def _join(self) -> int:
        """Join with the current subscription; return how many assignments have arrived before the one that follows
        from it, or 0 if the subscription has not changed."""
        assignments = self.membership.assignments
        if not self._resubscribe():
            assignments = 0
        self._overdue = False
        self.membership.join()
        self.session.wake()
        return assignments

    async def _first_metadata(self, deadline: float) -> None:
        failures = 0
        while True:
            try:
                return await self.metadata.refresh()
            except RetriableError as error:
                if self.loop.time() > deadline:
                    raise
                failures += 1
                await asyncio.sleep(self.options.pauses.after_ms(error, failures) / 1000)

    async def _answered(self, assignments: int, deadline: float) -> None:
        """Wait until the coordinator has acknowledged the subscription and sent the assignment."""
        membership = self.membership
        until = deadline
        while True:
            heard = membership.is_member and membership.answered_changes >= membership.changes
            if (failure := self.failure()) is not None:
                raise type(failure)(str(failure))
            if heard and membership.follows and (not assignments or membership.assignments != assignments):
                return
            if heard:
                until = min(until, self.loop.time() + _PUSH_GRACE_S)
            self.check_open()
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                if heard:
                    return  # the assignment has not changed
                refusal = membership.refusal or RequestTimedOut("its coordinator has not answered")
                raise type(refusal)(f"group {self.group_id}: {refusal}") from None

    async def something_to_read(self) -> None:
        """Wait a little for partitions that other members must release first, unless the coordinator says why not."""
        membership = self.membership
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PUSH_GRACE_S):
                while membership.wants_stream and not membership.assigned and not membership.note:
                    self._changed.clear()
                    await self._changed.wait()

    def _resubscribe(self) -> bool:
        """Pass the topics of the subscription to the membership; return whether they have changed."""
        topics = self.metadata.view.topics
        if self._pattern is not None:
            matching = {name for name, view in topics.items() if self._matches(name, view)}
            changed = self.membership.subscribe(matching, self._pattern.pattern)
        else:
            changed = self.membership.subscribe(self._names or (), "")
        if changed and self.membership.is_member:
            self.session.wake()
        return changed

    def _on_metadata(self) -> None:
        if not self.subscribed:
            super()._on_metadata()
            return
        self._resubscribe()  # the coordinator assigns new topics and drops deleted ones
        self._sync()

    # Membership

    async def next_step(self) -> Step | None:
        """Return the next change to tell the application of, or None.

        Assigned partitions are read from then on, revoked ones until `finish_step`. A member that has left because the
        application did not poll joins again; so does one whose `_MAY_PASS` refusal the application has been told.
        """
        self.session.tick()  # after a pause the session may be over, and its assignment another member's
        membership = self.membership
        refused = membership.state is MemberState.FAILED and membership.error is self._told
        if self._overdue or (refused and isinstance(membership.error, _MAY_PASS)):
            self._overdue = False
            self.polled_ms = math.inf
            membership.join()
            self.session.wake()
        step = None
        if membership.lost:
            step = Step(Change.LOST, sorted(membership.lost))
        elif release := membership.to_release():
            step = Step(Change.REVOKED, release)
        elif take := membership.to_take():
            self._take(take)
            step = Step(Change.ASSIGNED, take)
        self._look()
        return step

    async def finish_step(self, step: Step) -> None:
        """Complete a step that the application has been told of."""
        self.counters.rebalanced(monotonic_ms() / 1_000)
        membership = self.membership
        if step.change is Change.REVOKED:
            await self.commits.flush()
            with self.lock:
                self._keep_only(self.positions.states.keys() - set(step.partitions))
            membership.released(step.partitions)
        if step.change is not Change.ASSIGNED:
            membership.told_of_loss(step.partitions)
            for part in step.partitions:
                self.committed_offsets.pop(part, None)
            self.session.wake()
            self._sync()
        logger.info(
            "group %s: partitions %s (epoch %d): %s",
            self.group_id, step.change.value, membership.member_epoch, ", ".join(map(str, step.partitions)),
        )  # fmt: skip
        self._look()

    def _take(self, partitions: list[TopicPartition]) -> None:
        taken = self.membership.taken(partitions)
        self.metadata.wanted.update(part.topic for part in taken)
        with self.lock:
            for part, assigned in taken.items():
                newer = part.partition >= assigned.first_new_partition
                self._resets[part] = "earliest" if newer else self.options.auto_offset_reset
                self.positions.add(PartitionState(part, assigned.topic_id, COMMITTED))
        self.session.wake()
        self._sync()

    def _on_change(self) -> None:
        membership = self.membership
        if membership.lost and self.subscribed:
            with self.lock:
                self._keep_only(set(membership.owned))
            self.request_sync()
        if membership.note != self._note:
            self._note = membership.note
            if self._note:
                level = logging.WARNING if "exist" in self._note else logging.INFO
                logger.log(level, "group %s: %s", self.group_id, self._note)
        self._look()
        self._changed.set()

    def _look(self) -> None:
        membership = self.membership
        self.attention = bool(
            membership.lost
            or self._overdue
            or membership.state is MemberState.FAILED
            or membership.to_release()
            or membership.to_take()
        )
        if self.attention:
            self.on_data()

    def _on_overdue(self) -> None:
        logger.warning(
            "group %s: the application has not polled for %g s (max.poll.interval.ms): leaving the group, so that "
            "other members get its partitions; it joins again at the next poll",
            self.group_id, self.options.max_poll_interval_ms / 1000,
        )  # fmt: skip
        self._overdue = True

    @property
    def session_deadline_ms(self) -> float:
        """Until when no other member can own these partitions."""
        return self.membership.session_deadline_ms

    async def look_again(self) -> None:
        """Check whether the session is over."""
        self.session.tick()

    def assigned(self) -> list[TopicPartition]:
        """As `ConsumerEngine.assigned`, with lost partitions until the application is told."""
        with self.lock:
            lost = self.membership.lost.copy() if self.subscribed else set()
            return sorted(self.positions.states.keys() | lost)

    def place(self, topic_partition: TopicPartition, offset: int) -> None:
        """As `ConsumerEngine.place`; a lost partition that the application has not been told of is left alone."""
        if not self._is_lost(topic_partition):
            super().place(topic_partition, offset)

    def pause(self, partitions: Iterable[TopicPartition], paused: bool) -> None:
        """As `ConsumerEngine.pause`, without lost partitions that the application has not been told of."""
        super().pause([part for part in partitions if not self._is_lost(part)], paused)

    def _is_lost(self, topic_partition: TopicPartition) -> bool:
        self.check_open()
        with self.lock:
            part = TopicPartition(*topic_partition)
            return self.subscribed and part in self.membership.lost and part not in self.positions.states

    def failure(self) -> RaftlogError | None:
        """Return why the membership has failed, and note that the application is told."""
        self._told = self.membership.error if self.subscribed else None
        return self._told

    def group_metadata(self) -> GroupMetadata:
        """Return the member's place in its group, without member id if it has no subscription.

        The epoch is -1 for a non-member, and until the application is told of lost partitions: it must not commit
        offsets of these in the next epoch.
        """
        identity, membership = self.membership.identity, self.membership
        epoch = membership.member_epoch if membership.is_member and not membership.lost else -1
        member_id = identity.member_id if self.subscribed else ""
        return GroupMetadata(identity.group_id, member_id, epoch, identity.instance_id)

    # Where partitions begin

    def _add(self, view: TopicView, partition: int, reset: str) -> None:
        topic_partition = TopicPartition(view.name, partition)
        self._resets[topic_partition] = reset
        self.positions.add(PartitionState(topic_partition, view.topic_id, COMMITTED))

    def _start_placing(self, states: list[PartitionState]) -> None:
        asked = [state for state in states if state.reset == COMMITTED and state not in self._asking]
        if asked:
            self._asking.update(asked)
            task = self.loop.create_task(self._place_committed(asked))
            self._placing[task] = None
            task.add_done_callback(self._placing.pop)
        super()._start_placing([state for state in states if state.reset != COMMITTED])

    async def _place_committed(self, states: list[PartitionState]) -> None:
        wanted = {state.topic_partition: state.topic_id for state in states}
        found: Mapping[TopicPartition, OffsetAndMetadata | RaftlogError | None]
        try:
            member = ("", -1)
            if self.subscribed:
                member = (self.membership.identity.member_id, self.membership.member_epoch)
            found = await self.offsets.fetch(wanted, member)
        except RaftlogError as error:
            found = dict.fromkeys(wanted, error)
        except Exception as bug:  # a bug of ours must not strand the partitions
            logger.exception("group %s: asking for committed offsets failed", self.group_id)
            found = dict.fromkeys(wanted, RetriableError(f"asking for committed offsets failed: {bug!r}"))
        finally:
            self._asking.difference_update(states)
        with self.lock:
            for state in states:
                part = state.topic_partition
                if self.positions.states.get(part) is not state or not state.unplaced or state.reset != COMMITTED:
                    continue  # a seek came first, or another member has it now
                answer = found[part]
                if isinstance(answer, RaftlogError):
                    self._start_refused(state, answer)
                    continue
                state.failures = 0
                state.missing_since_ms = None
                if answer is None:
                    state.reset = self._resets[part]
                else:
                    state.position, state.last_epoch = answer.offset, answer.leader_epoch
                    self.committed_offsets[part] = answer.offset
        self.request_sync()

    async def _place(self, node_id: int, states: list[PartitionState]) -> list[PartitionState]:
        placed = await super()._place(node_id, states)
        if not self.subscribed:
            return placed
        # Commit the start: else, after a crash before the first commit, the next member would begin at a later end.
        found = {
            state.topic_partition: OffsetAndMetadata(state.position)
            for state in placed
            if state.reset == "latest" and state.position is not None
            if state.topic_partition not in self.committed_offsets
        }
        self.commit(found, self.claims(found), self.options.default_api_timeout_ms)
        return placed

    # Commits

    def claims(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Claim]:
        """Return the owner and the topic id of each partition, for `commit`; from any thread.

        Raises:
            PartitionNotOwned: a partition is not assigned to this member.
        """
        found: dict[TopicPartition, Claim] = {}
        with self.lock:
            for part in partitions:
                claim = found[part] = self._claim(part)
                if self.subscribed and claim.owner is None:
                    raise PartitionNotOwned(f"{part} is not, or no longer, assigned to this member of {self.group_id}")
        return found

    def _claim(self, part: TopicPartition) -> Claim:
        state = self.positions.states.get(part)
        if state is not None:
            return Claim(state if self.subscribed else None, state.topic_id)
        topic = self.metadata.view.topics.get(part.topic)
        return Claim(None, topic.topic_id if topic is not None else b"")

    def commit(self, offsets: Offsets, claims: Claims, timeout_ms: float) -> asyncio.Future[None]:
        """Queue a commit behind the earlier ones."""
        if self.closed is not None:
            raise ClosedError("the consumer is closed")
        return self.commits.put(offsets, claims, timeout_ms)

    async def commit_now(self, offsets: Offsets, claims: Claims, timeout_ms: float | None = None) -> None:
        """Commit, and wait for the result.

        Raises:
            RaftlogError: the error of a partition, if it is final or lasts until the timeout.
        """
        self.check_open()
        await asyncio.shield(
            self.commit(offsets, claims, self.options.default_api_timeout_ms if timeout_ms is None else timeout_ms)
        )

    def commit_soon(
        self,
        offsets: dict[TopicPartition, OffsetAndMetadata],
        claims: Claims,
        over: Callable[[dict[TopicPartition, OffsetAndMetadata], RaftlogError | None], object],
        refused: RaftlogError | None = None,
    ) -> None:
        """Commit in the background, in the order of the calls, from any thread; call `over` on the event loop.

        With `refused` it commits nothing and passes that error to `over`.
        """

        def start() -> None:
            if self.closed is not None or refused is not None:
                finish(refused or self.closed)
                return
            future = self.commit(offsets, claims, self.options.default_api_timeout_ms)
            future.add_done_callback(
                lambda done: finish(None if done.cancelled() else cast("RaftlogError | None", done.exception()))
            )

        def finish(error: RaftlogError | None) -> None:
            try:
                over(offsets, error)
            except Exception:  # the application's callback may raise anything
                logger.exception("a commit callback failed")

        if self._on_loop():  # before the caller continues
            start()
        else:
            self._call_soon(start)

    def _on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    async def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offsets.

        Raises:
            RaftlogError: the coordinator refuses, or does not answer within `default.api.timeout.ms`.
        """
        self.check_open()
        wanted = {TopicPartition(*part): b"" for part in partitions}
        if not wanted:
            return {}

        async def ask() -> dict[TopicPartition, OffsetAndMetadata | None]:
            found: dict[TopicPartition, OffsetAndMetadata | None] = {}
            for part, answer in (await self.offsets.fetch(wanted)).items():
                if isinstance(answer, RaftlogError):
                    raise answer
                found[part] = answer
            return found

        return await self.offsets.retried(ask, self.options.default_api_timeout_ms)

    async def _send_commit(self, entries: Mapping[TopicPartition, Entry]) -> dict[TopicPartition, RaftlogError | None]:
        """Make one attempt to commit, in as many requests as needed; a failed request fails the rest of the attempt."""
        errors: list[RaftlogError | None] = []
        began_ms = monotonic_ms()
        for piece in in_pieces(to_commit(entries.items())):
            try:
                errors += await (self.session.commit(piece) if self.subscribed else self.offsets.commit(piece))
            except InvalidRequestError as refused:
                errors += [refused] * len(piece)
            except RaftlogError as refused:
                errors += [refused] * (len(entries) - len(errors))
                break
        now_ms = monotonic_ms()
        self.counters.committed(now_ms - began_ms, now_ms / 1_000, failed=any(errors))
        return dict(zip(entries, errors, strict=True))

    def _on_committed(self, offsets: Offsets) -> None:
        for part, offset in offsets.items():
            if part in self.positions.states:
                self.committed_offsets[part] = offset.offset

    # End

    async def leave(self, timeout_ms: float) -> None:
        """Leave the group after pending commits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                await self.commits.flush()
        await self._leave()

    async def _leave(self) -> None:
        if self.subscribed:
            self.subscribed = self._overdue = False
            await self.session.leave()
            self.membership.told_of_loss(list(self.membership.lost))
            with self.lock:
                self._keep_only(set())
            self._look()

    async def close(self) -> None:
        """Leave the group, without a commit, and stop."""
        self.closed = self.closed or ClosedError("the consumer is closed")
        self.on_data()
        await self.session.close()
        await self.commits.close(self.closed)
        await self.coordinators.close()
        self._changed.set()
        await super().close()
