"""Which offsets a consumer commits: what it was told to, or what the application has come back from."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from raftlog._client.commit_arguments import checked
from raftlog._client.fetcher import monotonic_ms
from raftlog._client.group_consumer import GroupEngine
from raftlog._client.group_offsets import Claim
from raftlog._client.options import ConsumerOptions
from raftlog._consumer_arguments import Unread
from raftlog._core.positions import Mark, PartitionState
from raftlog.errors import InvalidConfig, InvalidGroupId, InvalidRequestError, PartitionNotOwned, RaftlogError
from raftlog.types import OffsetAndMetadata, Record, TopicPartition

logger = logging.getLogger(__name__)

CommitArgument = Record | Mapping[TopicPartition, int | OffsetAndMetadata] | None
"""What `commit` takes: everything that was handed out, one record, or offsets by partition."""
CommitCallback = Callable[[dict[TopicPartition, OffsetAndMetadata], RaftlogError | None], object]

_MAX_GROUP_ID: Final = 255
_SHORTEST_WAIT_S: Final = 0.05


def check_group_id(group_id: str | None) -> None:
    """Refuse what is no name for a group.

    Raises:
        InvalidGroupId: not text, or not 1 to 255 characters.
    """
    if group_id is None:
        return
    name = f"a group id is a string of 1 to {_MAX_GROUP_ID} characters"
    if not isinstance(group_id, str):
        raise InvalidGroupId(f"{name}, {group_id!r} is not a string")
    if not 1 <= len(group_id) <= _MAX_GROUP_ID:
        raise InvalidGroupId(f"{name}, this one has {len(group_id)}")


def check_group_options(resolved: ConsumerOptions, *given: Mapping[str, object]) -> None:
    """Refuse options of groups that mean nothing as they are; `given` is what the caller wrote.

    Raises:
        InvalidGroupId: as `check_group_id`. InvalidConfig: a group.instance.id that is empty, or without a group.id.
    """
    check_group_id(resolved.group_id or None)
    names = ("group.instance.id", "group_instance_id")
    named = any(options.get(name) is not None for options in given for name in names)
    if named and not resolved.group_instance_id:
        raise InvalidConfig("group.instance.id is empty; leave it out, or name the one member that this process is")
    if resolved.group_instance_id and not resolved.group_id:
        raise InvalidConfig("group.instance.id names a member of a group: set group.id, too")


def offsets_of(
    argument: Record | Mapping[TopicPartition, int | OffsetAndMetadata],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the offsets that are to be committed.

    Raises:
        InvalidRequestError: not a record, nor offsets by partition, or a value that can be no offset.
    """
    if isinstance(argument, Record):
        return checked({TopicPartition(argument.topic, argument.partition): argument.offset + 1})
    if not isinstance(argument, Mapping):
        raise InvalidRequestError(f"commit takes a record, or offsets by partition, not a {type(argument).__name__}")
    return checked(argument)


class Progress:
    """What was handed out of a group's consumer, in the application's thread, and what it has come back from.

    A record counts as done when the application asks for the next ones: with `poll`, all that the one before returned;
    while iterating, the one that was yielded.
    """

    def __init__(self, engine: GroupEngine, unread: Unread) -> None:
        self._engine = engine
        self._membership = engine.membership
        self._unread = unread
        self.out: dict[PartitionState, Mark] = {}
        """Where partitions stood before the poll that is under way, or the last one, took something of them.

        Marked before anything is taken, so that whatever interrupts a poll, nothing counts as done by it.
        """
        self._last: tuple[PartitionState, int] | None = None
        """What iteration has yielded last: its offset."""
        self._read: dict[PartitionState, int] = {}
        """Partitions of which something was handed out, and where the first of it was."""
        self._lost: dict[TopicPartition, OffsetAndMetadata] = {}
        """What was handed out and not committed of partitions that were lost, and no commit has told yet."""
        options = engine.options
        self._auto = options.enable_auto_commit
        self._interval_ms = options.auto_commit_interval_ms
        self._due_ms = monotonic_ms() + self._interval_ms if self._auto else math.inf
        self._under_way = False

    @property
    def auto(self) -> bool:
        """Whether it commits by itself."""
        return self._auto

    def come_back(self, now_ms: float) -> bool:
        """The application asks for more; return whether there is something else to see to before."""
        self._engine.settle()
        self._engine.polled_ms = now_ms
        self._last = None
        if self.out:
            self._let_go()
        return self.wants_attention(now_ms)

    def _let_go(self) -> None:
        """What is out counts as done, or waits in the iteration."""
        for state, mark in self.out.items():
            self._read.setdefault(state, mark.position)
        self.out = {}

    def wants_attention(self, now_ms: float) -> bool:
        """Whether there is something to see to: commits, or what has become of the membership."""
        return self._engine.attention or now_ms >= self._due_ms or now_ms >= self._membership.session_deadline_ms

    def ending(self) -> None:
        """The application has come back to end it all: what a poll returned is done, what was yielded may not be."""
        self._engine.settle()
        self._let_go()

    def handed_records(self, records: Iterable[Record]) -> None:
        """A poll returns these, which waited in the iteration."""
        states = self._engine.positions.states
        for record in records:
            state = states.get(TopicPartition(record.topic, record.partition))
            if state is not None and state not in self.out:
                self.out[state] = Mark(record.offset, -1, state.topic_id)

    def yielded(self, record: Record) -> None:
        """Iteration is about to yield this one; what else was polled for it waits."""
        state = self._engine.positions.states.get(TopicPartition(record.topic, record.partition))
        self._last = None if state is None else (state, record.offset)
        if self.out:
            self._let_go()

    def drop(self, partitions: Iterable[TopicPartition], *, lost: bool) -> None:
        """Do not yield what waits of these partitions, which go: the position goes back to it, if they are not lost."""
        gone = set(partitions)
        if lost:
            self._note_losses()
        self._unread.drop(gone, None if lost else self._engine)
        for state in [*self._read, *self.out]:
            if state.topic_partition in gone:
                self._read.pop(state, None)
                self.out.pop(state, None)

    def forget(self) -> None:
        """There is another subscription, or none: what was handed out before does not matter any more."""
        self.out, self._last = {}, None
        self._read.clear()
        self._lost.clear()

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return for assigned partitions the offset after what was handed out."""
        return self._positions(None, {})

    def done(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return for assigned partitions the offset after what the application has come back from."""
        out = {state: OffsetAndMetadata(mark.position, "", mark.last_epoch) for state, mark in self.out.items()}
        if self._last is not None:
            out[self._last[0]] = OffsetAndMetadata(self._last[1])
        found = self._positions(partitions, out)
        known = self._engine.committed_offsets
        return {part: offset for part, offset in found.items() if known.get(part) != offset.offset}

    def _positions(
        self, partitions: Iterable[TopicPartition] | None, out: Mapping[PartitionState, OffsetAndMetadata]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        engine = self._engine
        engine.settle()
        wanted = None if partitions is None else set(partitions)
        unread = self._unread.first_offsets()
        found: dict[TopicPartition, OffsetAndMetadata] = {}
        with engine.lock:
            for part, state in engine.positions.states.items():
                if state.position is None or (wanted is not None and part not in wanted):
                    continue
                offset = OffsetAndMetadata(state.position, "", state.last_epoch)
                if part in unread and unread[part] < offset.offset:
                    offset = OffsetAndMetadata(unread[part])
                if state in out and out[state].offset < offset.offset:
                    offset = out[state]
                found[part] = offset
        return found

    # What the application asks for

    def asked(
        self, argument: CommitArgument
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, Claim]]:
        """Return what a call of `commit` is to commit, and as whose.

        Raises:
            InvalidRequestError: as `offsets_of`. PartitionNotOwned: somebody else's.
        """
        with self._engine.lock:
            offsets = self.positions() if argument is None else offsets_of(argument)
            return offsets, self._engine.claims(offsets)

    def losses(self) -> tuple[dict[TopicPartition, OffsetAndMetadata], PartitionNotOwned] | None:
        """Return what was handed out and is lost without a commit, and what to say of it; once."""
        self._note_losses()
        if not self._lost:
            return None
        lost, self._lost = self._lost, {}
        return lost, PartitionNotOwned(
            f"this member of {self._engine.group_id} has lost {', '.join(map(str, sorted(lost)))} before what it was "
            "given of them was committed: whoever reads them next is given it again"
        )

    def _note_losses(self) -> None:
        engine = self._engine
        unread = self._unread.first_offsets()
        read = self._read | {state: self._read.get(state, mark.position) for state, mark in self.out.items()}
        with engine.lock:
            for state, first in read.items():
                part = state.topic_partition
                if not engine.subscribed or engine.positions.states.get(part) is state:
                    continue
                self._read.pop(state, None)
                self.out.pop(state, None)
                if state.position is None:
                    continue
                end = min(state.position, unread.get(part, state.position))
                if end > max(first, engine.committed_offsets.get(part, -1)):
                    self._lost[part] = OffsetAndMetadata(end)

    # By itself

    def wait_s(self, left_s: float | None) -> float | None:
        """Return how long a poll may wait at most before it looks again; `left_s` is what its caller allows."""
        until_ms = min(self._due_ms, self._engine.session_deadline_ms)
        if until_ms == math.inf:
            return left_s
        wait_s = max(_SHORTEST_WAIT_S, (until_ms - monotonic_ms()) / 1000)
        return wait_s if left_s is None else min(wait_s, left_s)

    def auto_commit(self, now_ms: float) -> None:
        """Commit in the background what is done, if it is time."""
        engine = self._engine
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + self._interval_ms
        if self._under_way:
            return
        with engine.lock:
            offsets = self.done()
            claims = engine.claims(offsets)
        if offsets:
            self._under_way = True
            engine.commit_soon(offsets, claims, self._over)

    def _over(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], error: RaftlogError | None) -> None:
        self._under_way = False
        if error is not None and self._engine.closed is None:
            logger.warning("group %s: automatic commit failed: %s", self._engine.group_id, error)


def log_failure(offsets: Mapping[TopicPartition, OffsetAndMetadata], error: RaftlogError | None) -> None:
    """What becomes of an asynchronous commit whose caller does not want to know."""
    if error is not None:
        logger.warning("a commit of %d partitions failed: %s", len(offsets), error)
