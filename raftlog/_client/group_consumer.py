"""The consumer's engine as a member of a group: what it reads is what the coordinator gives it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from raftlog._client.fetcher import monotonic_ms
from raftlog._client.group_positions import COMMITTED, GroupPositions
from raftlog._client.group_session import GroupSession
from raftlog._client.options import ConsumerOptions
from raftlog._core.membership import MemberState
from raftlog._core.positions import PartitionState
from raftlog.errors import (
    AuthorizationError,
    ClosedError,
    InvalidConfig,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
)
from raftlog.types import GroupMetadata, TopicPartition
from raftlog.v1 import group_pb2

logger = logging.getLogger(__name__)

_PUSH_GRACE_S: Final = 0.5
"""How long after a changed subscription was heard the assignment that follows from it may take to come."""

_MAY_PASS: Final = (AuthorizationError, InvalidConfig)
"""Refusals after which the next poll asks once more, as Kafka's consumers do: a permission may be given, or a file with
a password, which cannot be read for a moment, be replaced."""


class Change(enum.Enum):
    """What happens to partitions of a member."""

    LOST = "lost"
    REVOKED = "revoked"
    ASSIGNED = "assigned"


class Step(NamedTuple):
    """One thing that the application is to be told of, in its own thread."""

    change: Change
    partitions: list[TopicPartition]


class GroupEngine(GroupPositions):
    """Subscriptions through the group's coordinator; `assign` with the group's offsets.

    The application's thread brings the assignment about, step by step: whenever `attention` is set it asks for
    `next_step`, tells the application, and calls `finish_step`; at `session_deadline_ms` it calls `look_again`. So
    nothing moves while the application works on records, and no record of a partition is handed out after its loss.
    """

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bootstrap, options, loop)
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
        """Whether the application's thread has something to see to."""
        self.polled_ms = math.inf
        """When the application was given something last; infinite while it waits for more."""
        self._overdue = False
        self._told: RaftlogError | None = None
        """The refusal that the application has heard last."""
        self._changed = asyncio.Event()
        self._note = ""

    # What to read

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """As `ConsumerEngine.assign`; begins where the group's offsets say, and is no member of the group."""
        await self._leave()
        await super().assign(partitions)

    async def unsubscribe(self) -> None:
        """Leave the group, and read nothing."""
        await self._leave()
        await super().unsubscribe()

    async def subscribe(self, names: Iterable[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Join the group, or tell it that something else is to be read; waits until it has answered.

        Raises:
            RaftlogError: the group refuses, or no broker or coordinator is there within `default.api.timeout.ms`; in
                the second case it is tried further on, and polls try it after what may pass.
        """
        self.check_open()
        self.polled_ms = math.inf  # who waits for the group is there; the caller says when that is over
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
        """Join with the subscription as it is; return how many assignments came before the one that is to follow from
        it, 0: none needs to."""
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
        """Wait until the coordinator has taken note of the subscription, and said what follows from it."""
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
                    return  # nothing followed
                refusal = membership.refusal or RequestTimedOut("its coordinator has not answered")
                raise type(refusal)(f"group {self.group_id}: {refusal}") from None

    async def something_to_read(self) -> None:
        """Wait a little for partitions that others have to let go first, if there are none and nobody says why."""
        membership = self.membership
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PUSH_GRACE_S):
                while membership.wants_stream and not membership.assigned and not membership.note:
                    self._changed.clear()
                    await self._changed.wait()

    def _resubscribe(self) -> bool:
        """Tell the membership what the subscription comes down to; return whether that is a change."""
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
        self._resubscribe()  # topics that come and go come and go with the assignment
        self._sync()

    # Membership

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
            "others get its partitions; it joins again at the next poll",
            self.group_id, self.options.max_poll_interval_ms / 1000,
        )  # fmt: skip
        self._overdue = True

    async def _leave(self) -> None:
        if self.subscribed:
            self.subscribed = self._overdue = False
            await self.session.leave()
            self.membership.told_of_loss(list(self.membership.lost))
            with self.lock:
                self._keep_only(set())
            self._look()

    @property
    def session_deadline_ms(self) -> float:
        """Until when it is certain that nobody else was given what is read here."""
        return self.membership.session_deadline_ms

    async def look_again(self) -> None:
        """See whether the session is over."""
        self.session.tick()

    async def next_step(self) -> Step | None:
        """Return what the application is to be told next; None: nothing.

        What is assigned is read from then on; what is revoked, until `finish_step`. Who has left, since the application
        stayed away, or was refused with what may pass, and the application knows, joins once more.
        """
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
        """The application knows."""
        self.figures.rebalanced(monotonic_ms() / 1_000)
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

    def assigned(self) -> list[TopicPartition]:
        """As `PartitionReader.assigned`; what was lost is named until the application was told."""
        with self.lock:
            lost = self.membership.lost.copy() if self.subscribed else set()
            return sorted(self.positions.states.keys() | lost)

    def failure(self) -> RaftlogError | None:
        """Return why the membership has failed, for the application to hear; what may pass is tried once more then."""
        self._told = self.membership.error if self.subscribed else None
        return self._told

    def group_metadata(self) -> GroupMetadata:
        """Return who this is in its group: nobody without a subscription; and no member until the application has heard
        that it has lost partitions, since what it holds of them is not to be committed in the epoch that follows."""
        identity, membership = self.membership.identity, self.membership
        epoch = membership.member_epoch if membership.is_member and not membership.lost else -1
        member_id = identity.member_id if self.subscribed else ""
        return GroupMetadata(identity.group_id, member_id, epoch, identity.instance_id)

    async def _commit_as_member(self, offsets: list[group_pb2.CommitOffset]) -> list[RaftlogError | None]:
        return await self.session.commit(offsets)

    # End

    async def leave(self, timeout_ms: float) -> None:
        """Stop being a member, once what is being committed is committed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                await self.commits.flush()
        await self._leave()

    async def close(self) -> None:
        """Leave the group, without a commit, and stop."""
        self.closed = self.closed or ClosedError("the consumer is closed")
        self.on_data()
        await self.session.close()
        await self.commits.close(self.closed)
        await self.coordinators.close()
        self._changed.set()
        await super().close()
