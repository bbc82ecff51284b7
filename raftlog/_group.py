"""What a consumer with a group has more, in the thread that polls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final

from raftlog._client.background import LoopThread
from raftlog._client.fetcher import monotonic_ms
from raftlog._client.group_consumer import Change, GroupEngine, Step
from raftlog._consumer_arguments import Unread, as_partitions
from raftlog._group_listener import RebalanceListener
from raftlog._group_offsets import CommitArgument, CommitCallback, Progress, log_failure
from raftlog.errors import InvalidRequestError, RaftlogError
from raftlog.types import GroupMetadata, OffsetAndMetadata, TopicPartition

logger = logging.getLogger(__name__)

LAST_COMMIT_MS: Final = 5000.0
"""How long the commit may take with which a member leaves."""


class GroupPart:
    """Brings about what the coordinator wants, and tells the application's listener."""

    def __init__(self, engine: GroupEngine, thread: LoopThread, unread: Unread) -> None:
        self.engine = engine
        self.progress = Progress(engine, unread)
        self.listener = RebalanceListener()
        self._thread = thread
        self._attending = threading.RLock()
        self._busy = False
        self._telling: Step | None = None
        self._ending = False
        self._poller: int | None = None
        """The thread that has polled last."""

    def come_back(self) -> None:
        """The application asks for more.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        now_ms = monotonic_ms()
        self._poller = threading.get_ident()
        if self.progress.come_back(now_ms):
            self.attend(now_ms)

    def look(self) -> None:
        """See to what there is to see to, while a poll waits, or out of another call: no record is done by it."""
        now_ms = monotonic_ms()
        if self.progress.wants_attention(now_ms):
            self.attend(now_ms)

    def attend(self, now_ms: float) -> None:
        """Tell of lost partitions, let revoked ones go, take new ones, commit.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        with self._attending:
            if self._busy:  # out of a listener
                return
            self._busy = True
            try:
                engine = self.engine
                if now_ms >= engine.session_deadline_ms:
                    self._thread.run(engine.look_again())
                while engine.attention and (step := self._thread.run(engine.next_step())) is not None:
                    try:
                        self._tell(step)
                    finally:
                        self._thread.run(engine.finish_step(step))
                self.progress.auto_commit(now_ms)
            finally:
                self._busy = False
            if (failure := engine.failure()) is not None:
                raise type(failure)(str(failure))

    def _tell(self, step: Step) -> None:
        self._telling = step
        try:
            match step.change:
                case Change.LOST:
                    self.progress.drop(step.partitions, lost=True)
                    self.listener.on_partitions_lost(step.partitions)
                case Change.REVOKED:
                    if self.progress.auto:
                        self._commit_now(step.partitions, self.engine.options.default_api_timeout_ms)
                    self.progress.drop(step.partitions, lost=False)
                    self.listener.on_partitions_revoked(step.partitions)
                case Change.ASSIGNED:
                    self.listener.on_partitions_assigned(step.partitions)
        finally:
            self._telling = None

    def _commit_now(self, partitions: Iterable[TopicPartition] | None, timeout_ms: float) -> None:
        try:
            with self.engine.lock:
                offsets = self.progress.done(partitions)
                claims = self.engine.claims(offsets)
            self._thread.run(self.engine.commit_now(offsets, claims, timeout_ms))
        except RaftlogError as error:
            logger.warning("group %s: committing before partitions go failed: %s", self.engine.group_id, error)

    def end(self, *, clean: bool) -> None:
        """Commit what is done, tell the listener, and leave. Not `clean`: out of an exception.

        What the last poll has returned counts as done only when it is clean, and this is the thread that polled. Out of
        a listener that is being told of the end there is nothing to do.
        """
        if self._ending:
            return
        self._ending = True
        try:
            self._end(clean and self._poller in (None, threading.get_ident()))
        finally:
            self._ending = False

    def _end(self, clean: bool) -> None:
        engine = self.engine
        if clean:
            self.progress.ending()
        if self.progress.auto:
            self._commit_now(None, min(LAST_COMMIT_MS, engine.options.default_api_timeout_ms))
        if not engine.subscribed:
            return
        told = gone_already(self._telling)
        try:
            if lost := sorted(engine.membership.lost - told):
                self.listener.on_partitions_lost(lost)
            if owned := sorted(engine.positions.states.keys() - told):
                self.listener.on_partitions_revoked(owned)
        finally:
            self._thread.run(engine.leave(LAST_COMMIT_MS))
            self.progress.forget()

    # Calls

    def commit(self, argument: CommitArgument) -> None:
        """See `Consumer.commit`."""
        if argument is None and (lost := self.progress.losses()) is not None:
            raise lost[1]
        self._thread.run(self.engine.commit_now(*self.progress.asked(argument)))

    def commit_async(self, argument: CommitArgument, callback: CommitCallback | None) -> None:
        """See `Consumer.commit_async`."""
        self.engine.check_open()
        over = callback or log_failure
        if argument is None and (lost := self.progress.losses()) is not None:
            self.engine.commit_soon(lost[0], {}, over, refused=lost[1])
        else:
            self.engine.commit_soon(*self.progress.asked(argument), over)


def gone_already(step: Step | None) -> set[TopicPartition]:
    """Return partitions whose going the listener is being told of at this moment."""
    return set() if step is None or step.change is Change.ASSIGNED else set(step.partitions)


class GroupCalls:
    """The methods of a consumer that need a group."""

    _group: GroupPart | None

    def _of_group(self, what: str) -> GroupPart:
        if self._group is None:
            raise InvalidRequestError(f"{what} needs a consumer with a group_id")
        self._group.engine.check_open()
        return self._group

    def commit(self, offsets: CommitArgument = None) -> None:
        """Commit and wait until the group has it: where its members go on after a failure, or a rebalance.

        Without argument, all that was handed out: by `poll`, or by iteration up to and with the record yielded last.
        If some of that was not committed when its partition was lost, nothing is committed and that is raised, once:
        others go on with it. With a `Record`, the offset after it; with offsets by partition, exactly these.

        >>> from raftlog import Consumer, TopicPartition
        >>> with Consumer(cluster.bootstrap, group_id="readers", auto_offset_reset="earliest") as consumer:
        ...     consumer.subscribe("orders")
        ...     record = consumer.poll(timeout=10, max_records=1)[0]
        ...     consumer.commit(record)
        ...     consumer.committed(TopicPartition("orders", 0))[TopicPartition("orders", 0)].offset
        1

        Raises:
            PartitionNotOwned: the partition is not this member's, or not any more: somebody else goes on with it.
            FencedError: the group has given this member up.
            InvalidRequestError: no group, or no offsets. OffsetMetadataTooLarge: as it says.
            RaftlogError: what was refused last, after `default.api.timeout.ms` of trying.
        """
        self._of_group("commit").commit(offsets)

    def commit_async(self, offsets: CommitArgument = None, callback: CommitCallback | None = None) -> None:
        """Commit in the background. Commits take effect in the order of the calls, whatever has to be tried again.

        `callback(offsets, error)` is called in the client's own thread: be quick there, never wait. Without one a
        failure is logged.

        Raises:
            PartitionNotOwned: an offset of a partition that is not this member's. InvalidRequestError: as `commit`.
                Everything else the callback is told.
        """
        self._of_group("commit_async").commit_async(offsets, callback)

    def committed(
        self, *partitions: TopicPartition | Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return what the group has committed for these partitions, by default for the assigned ones; None: nothing.

        Raises:
            RaftlogError: the coordinator refuses, or is not there within `default.api.timeout.ms`.
        """
        group = self._of_group("committed")
        wanted = as_partitions("committed", partitions) or sorted(group.engine.positions.states)
        return group._thread.run(group.engine.committed(wanted))

    def group_metadata(self) -> GroupMetadata:
        """Return who this consumer is in its group."""
        return self._of_group("group_metadata").engine.group_metadata()

    def group_note(self) -> str:
        """Return why the group has nothing for this member, or which topics it waits for; empty: all is well."""
        return self._of_group("group_note").engine.membership.note
