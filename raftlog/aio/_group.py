"""What an asynchronous consumer with a group has more."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable
from typing import Any

from raftlog._client.fetcher import monotonic_ms
from raftlog._client.group_consumer import Change, GroupEngine, Step
from raftlog._consumer_arguments import Unread, as_partitions
from raftlog._group import LAST_COMMIT_MS, gone_already
from raftlog._group_listener import RebalanceListener
from raftlog._group_offsets import CommitArgument, CommitCallback, Progress, log_failure
from raftlog.errors import InvalidRequestError, RaftlogError
from raftlog.types import GroupMetadata, OffsetAndMetadata, TopicPartition

logger = logging.getLogger(__name__)


async def _called(result: object) -> None:
    """Wait for a listener's method, if it is a coroutine."""
    if inspect.isawaitable(result):
        await result


class GroupPart:
    """As `raftlog._group.GroupPart`, on the event loop."""

    def __init__(self, engine: GroupEngine, unread: Unread) -> None:
        self.engine = engine
        self.progress = Progress(engine, unread)
        self.listener = RebalanceListener()
        self._attending: asyncio.Task[Any] | None = None
        self._telling: Step | None = None
        self._ending = False
        self._free = asyncio.Lock()

    async def come_back(self) -> None:
        """The application asks for more.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        now_ms = monotonic_ms()
        if self.progress.come_back(now_ms):
            await self.attend(now_ms)

    async def look(self) -> None:
        """See to what there is to see to, while a poll waits, or out of another call: no record is done by it."""
        now_ms = monotonic_ms()
        if self.progress.wants_attention(now_ms):
            await self.attend(now_ms)

    async def attend(self, now_ms: float) -> None:
        """Tell of lost partitions, let revoked ones go, take new ones, commit.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        if self._attending is asyncio.current_task():  # out of a listener
            return
        async with self._free:
            self._attending = asyncio.current_task()
            try:
                engine = self.engine
                if now_ms >= engine.session_deadline_ms:
                    await engine.look_again()
                while engine.attention and (step := await engine.next_step()) is not None:
                    try:
                        await self._tell(step)
                    finally:
                        await engine.finish_step(step)
                self.progress.auto_commit(now_ms)
            finally:
                self._attending = None
            if (failure := engine.failure()) is not None:
                raise type(failure)(str(failure))

    async def _tell(self, step: Step) -> None:
        self._telling = step
        try:
            match step.change:
                case Change.LOST:
                    self.progress.drop(step.partitions, lost=True)
                    await _called(self.listener.on_partitions_lost(step.partitions))
                case Change.REVOKED:
                    if self.progress.auto:
                        await self._commit_now(step.partitions, self.engine.options.default_api_timeout_ms)
                    self.progress.drop(step.partitions, lost=False)
                    await _called(self.listener.on_partitions_revoked(step.partitions))
                case Change.ASSIGNED:
                    await _called(self.listener.on_partitions_assigned(step.partitions))
        finally:
            self._telling = None

    async def _commit_now(self, partitions: Iterable[TopicPartition] | None, timeout_ms: float) -> None:
        try:
            offsets = self.progress.done(partitions)
            await self.engine.commit_now(offsets, self.engine.claims(offsets), timeout_ms)
        except RaftlogError as error:
            logger.warning("group %s: committing before partitions go failed: %s", self.engine.group_id, error)

    async def end(self, *, clean: bool) -> None:
        """As `raftlog._group.GroupPart.end`."""
        if self._ending:
            return
        self._ending = True
        try:
            await self._end(clean)
        finally:
            self._ending = False

    async def _end(self, clean: bool) -> None:
        engine = self.engine
        if clean:
            self.progress.ending()
        if self.progress.auto:
            await self._commit_now(None, min(LAST_COMMIT_MS, engine.options.default_api_timeout_ms))
        if not engine.subscribed:
            return
        told = gone_already(self._telling)
        try:
            if lost := sorted(engine.membership.lost - told):
                await _called(self.listener.on_partitions_lost(lost))
            if owned := sorted(engine.positions.states.keys() - told):
                await _called(self.listener.on_partitions_revoked(owned))
        finally:
            await engine.leave(LAST_COMMIT_MS)
            self.progress.forget()

    # Calls

    async def commit(self, argument: CommitArgument) -> None:
        """See `Consumer.commit`."""
        if argument is None and (lost := self.progress.losses()) is not None:
            raise lost[1]
        await self.engine.commit_now(*self.progress.asked(argument))

    def commit_async(self, argument: CommitArgument, callback: CommitCallback | None) -> None:
        """See `Consumer.commit_async`."""
        self.engine.check_open()
        over = callback or log_failure
        if argument is None and (lost := self.progress.losses()) is not None:
            self.engine.commit_soon(lost[0], {}, over, refused=lost[1])
        else:
            self.engine.commit_soon(*self.progress.asked(argument), over)


class GroupCalls:
    """The methods of a consumer that need a group; see `raftlog._group.GroupCalls`."""

    def _made_group(self) -> GroupPart | None:
        """Return what this consumer has of a group."""
        raise NotImplementedError

    def _of_group(self, what: str) -> GroupPart:
        group = self._made_group()
        if group is None:
            raise InvalidRequestError(f"{what} needs a consumer with a group_id")
        group.engine.check_open()
        return group

    async def commit(self, offsets: CommitArgument = None) -> None:
        """As `raftlog.Consumer.commit`."""
        await self._of_group("commit").commit(offsets)

    def commit_async(self, offsets: CommitArgument = None, callback: CommitCallback | None = None) -> None:
        """As `raftlog.Consumer.commit_async`; the callback is called on the event loop."""
        self._of_group("commit_async").commit_async(offsets, callback)

    async def committed(
        self, *partitions: TopicPartition | Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """As `raftlog.Consumer.committed`."""
        engine = self._of_group("committed").engine
        wanted = as_partitions("committed", partitions) or sorted(engine.positions.states)
        return await engine.committed(wanted)

    def group_metadata(self) -> GroupMetadata:
        """As `raftlog.Consumer.group_metadata`."""
        return self._of_group("group_metadata").engine.group_metadata()

    def group_note(self) -> str:
        """As `raftlog.Consumer.group_note`."""
        return self._of_group("group_note").engine.membership.note
