"""A group's offsets: asked for, and committed in the order of the calls."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from raftlog._client.coordinators import Coordinators
from raftlog._client.group_session import commit_errors
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S
from raftlog._client.offsets import LookupOptions
from raftlog.errors import (
    InternalError,
    InvalidRequestError,
    PartitionNotOwned,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    StaleMemberEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import OffsetAndMetadata, TopicPartition
from raftlog.v1 import group_pb2

T = TypeVar("T")

logger = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, OffsetAndMetadata]


class Claim(NamedTuple):
    """As whose, and as which topic's, an offset is committed: a later owner's position must not go back by it, and a
    later topic of the same name must not get it."""

    owner: object = None
    """Who reads the partition; None: it need not be anybody."""
    topic_id: bytes = b""
    """Empty: not known, the name says which."""


Claims = Mapping[TopicPartition, Claim]


class Entry(NamedTuple):
    """What is committed of one partition."""

    offset: OffsetAndMetadata
    topic_id: bytes


_PIECE_BYTES: Final = 256 * 1024
_PIECE_ENTRIES: Final = 2000
"""How much goes in one request; servers take 1 MiB, and 10 000 entries."""
_PIECE_TOPICS: Final = 500
_ENTRY_BYTES: Final = 16
"""What an entry takes beside its own fields, at most."""
_LEAST_S: Final = 0.05
"""Every commit is tried, however late."""
NOBODY: Final = ("", -1)
"""Member id and epoch of who is no member."""


def passes(error: RaftlogError, waited_s: float) -> bool:
    """Whether the same call may succeed later, after `waited_s` of trying.

    With StaleMemberEpoch the new epoch is on its way here. A topic that is denied for longer than a new one takes to
    get around does not exist.
    """
    if isinstance(error, (UnknownTopicOrPartition, UnknownTopicId)):
        return waited_s < UNKNOWN_TOPIC_GRACE_S
    return isinstance(error, (RetriableError, StaleMemberEpoch, InternalError))


def to_commit(entries: Iterable[tuple[TopicPartition, Entry]]) -> list[group_pb2.CommitOffset]:
    """Return offsets as they travel: the topic by its id, where that is known."""
    return [
        group_pb2.CommitOffset(
            topic_id=topic_id,
            topic="" if topic_id else part.topic,
            partition=part.partition,
            offset=offset.offset,
            leader_epoch=offset.leader_epoch,
            metadata=offset.metadata,
        )
        for part, (offset, topic_id) in entries
    ]


def in_pieces(offsets: Iterable[group_pb2.CommitOffset]) -> Iterator[list[group_pb2.CommitOffset]]:
    """Yield what goes in one request each, in order."""
    piece: list[group_pb2.CommitOffset] = []
    size = 0
    for offset in offsets:
        more = offset.ByteSize() + _ENTRY_BYTES
        if piece and (size + more > _PIECE_BYTES or len(piece) == _PIECE_ENTRIES):
            yield piece
            piece, size = [], 0
        piece.append(offset)
        size += more
    if piece:
        yield piece


def _asked_in_pieces(
    partitions: Mapping[TopicPartition, bytes],
) -> Iterator[tuple[list[TopicPartition], list[group_pb2.TopicPartitions]]]:
    """Yield what is asked for in one request each, by topic, and the partitions in the same order."""
    by_topic: dict[tuple[str, bytes], list[TopicPartition]] = {}
    for part, topic_id in partitions.items():
        by_topic.setdefault((part.topic, topic_id), []).append(part)
    asked: list[TopicPartition] = []
    topics: list[group_pb2.TopicPartitions] = []
    for (topic, topic_id), parts in by_topic.items():
        at = 0
        while at < len(parts):
            some = parts[at : at + _PIECE_ENTRIES - len(asked)]
            at += len(some)
            asked += some
            topics.append(
                group_pb2.TopicPartitions(
                    topic="" if topic_id else topic, topic_id=topic_id, partitions=[part.partition for part in some]
                )
            )
            if len(asked) == _PIECE_ENTRIES or len(topics) == _PIECE_TOPICS:
                yield asked, topics
                asked, topics = [], []
    if asked:
        yield asked, topics


class GroupOffsets:
    """Unary calls at the coordinator of one group; each is one attempt.

    `require_stable`: offsets that an open transaction may replace are refused, `UnstableOffsetCommit`, instead of told
    (KIP-447): who begins at one of those would read again what the transaction has dealt with.
    """

    def __init__(
        self, group_id: str, coordinators: Coordinators, options: LookupOptions, *, require_stable: bool
    ) -> None:
        self._group_id = group_id
        self._coordinators = coordinators
        self._options = options
        self._require_stable = require_stable

    async def fetch(
        self, partitions: Mapping[TopicPartition, bytes], member: tuple[str, int] = NOBODY
    ) -> dict[TopicPartition, OffsetAndMetadata | RaftlogError | None]:
        """Return what is committed for partitions, given with their topic ids (or b""), None where nothing is.

        Raises:
            RaftlogError: the coordinator is not there, or refuses all.
        """
        member_id, member_epoch = member
        found: dict[TopicPartition, OffsetAndMetadata | RaftlogError | None] = {}
        for asked, topics in _asked_in_pieces(partitions):
            request = group_pb2.FetchOffsetsRequest(
                group_id=self._group_id,
                member_id=member_id,
                member_epoch=member_epoch,
                partitions=topics,
                require_stable=self._require_stable,
            )
            response = await self._call("FetchOffsets", request)
            for part, offset in zip(asked, response.offsets, strict=True):
                if offset.HasField("error") and offset.error.code:
                    found[part] = from_wire(offset.error)
                elif offset.offset < 0:
                    found[part] = None
                else:
                    found[part] = OffsetAndMetadata(offset.offset, offset.metadata, offset.leader_epoch)
        return found

    async def commit(self, offsets: Sequence[group_pb2.CommitOffset]) -> list[RaftlogError | None]:
        """Commit once, as nobody's member; return what became of each.

        Raises:
            RaftlogError: the coordinator is not there, or refuses all.
        """
        member_id, member_epoch = NOBODY
        request = group_pb2.CommitOffsetsRequest(
            group_id=self._group_id,
            member_id=member_id,
            member_epoch=member_epoch,
            offsets=offsets,
            timeout_ms=int(self._options.request_timeout_ms),
        )
        response = await self._call("CommitOffsets", request)
        return commit_errors(None, response.results, len(offsets))

    async def retried(self, ask: Callable[[], Awaitable[T]], timeout_ms: float) -> T:
        """Return what `ask` does, asking again for `timeout_ms` while the refusal may pass.

        Raises:
            RaftlogError: the last refusal.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + timeout_ms / 1000
        failures = 0
        while True:
            error: RaftlogError
            try:
                async with asyncio.timeout_at(deadline):
                    return await ask()
            except RaftlogError as refused:
                error = refused
            except TimeoutError:
                raise RequestTimedOut(f"the coordinator of group {self._group_id} has not answered") from None
            failures += 1
            pause_s = self._options.pauses.after_ms(error, failures) / 1000
            if not passes(error, loop.time() - began) or loop.time() + pause_s >= deadline:
                raise error
            await asyncio.sleep(pause_s)

    async def _call(self, method: str, request: Any) -> Any:
        return await self._coordinators.call(self._group_id, method, request, self._options.request_timeout_ms / 1000)


_ANYBODY: Final = Claim()


class _Commit:
    """One call: what is left of it, and what went wrong."""

    def __init__(self, offsets: Offsets, claims: Claims, timeout_ms: float, done: asyncio.Future[None]) -> None:
        self.left = {part: Entry(offset, claims.get(part, _ANYBODY).topic_id) for part, offset in offsets.items()}
        self.claims = claims
        self.began_s = done.get_loop().time()
        self.deadline_s = self.began_s + timeout_ms / 1000
        self.done = done
        self.first_error: RaftlogError | None = None

    def settle(self, part: TopicPartition, error: RaftlogError | None) -> None:
        """This partition is decided."""
        if self.left.pop(part, None) is not None and error is not None and self.first_error is None:
            text = str(error)
            self.first_error = type(error)(text if str(part) in text else f"{part}: {text}")

    def finish(self) -> None:
        """Tell who waits, if everything is decided and he still does."""
        if self.done.done():
            return
        if self.first_error is not None:
            self.done.set_exception(self.first_error)
            self.done.exception()  # not everybody asks
        else:
            self.done.set_result(None)


class CommitQueue:
    """Commits in order: one is under way at a time, and what was asked for meanwhile goes together with the next.

    So a later commit is never overtaken by an earlier one, however often that is sent again. `send` commits once;
    `claim` says who reads a partition now, and of which topic: what was asked for by an earlier owner, or of a topic
    that has been replaced since, is refused here.
    """

    def __init__(
        self,
        send: Callable[[Mapping[TopicPartition, Entry]], Awaitable[dict[TopicPartition, RaftlogError | None]]],
        claim: Callable[[TopicPartition], Claim],
        pause_ms: Callable[[RaftlogError, int], float],
        on_committed: Callable[[Offsets], None],
    ) -> None:
        self._send = send
        self._claim = claim
        self._pause_ms = pause_ms
        self._on_committed = on_committed
        self._waiting: deque[_Commit] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, offsets: Offsets, claims: Claims, timeout_ms: float) -> asyncio.Future[None]:
        """Queue a commit; the future fails with the first error."""
        loop = asyncio.get_running_loop()
        commit = _Commit(offsets, claims, timeout_ms, loop.create_future())
        if not offsets:
            commit.done.set_result(None)
            return commit.done
        self._waiting.append(commit)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return commit.done

    async def flush(self) -> None:
        """Wait until what was queued before is done, whatever became of it."""
        while self._waiting:
            await asyncio.wait([self._waiting[-1].done])

    async def close(self, error: RaftlogError) -> None:
        """Give up what waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            done = self._waiting.popleft().done
            if not done.done():
                done.set_exception(error)
                done.exception()  # not everybody asks

    async def _run(self) -> None:
        failures = 0
        while self._waiting:
            batch = list(self._waiting)
            merged: dict[TopicPartition, Entry] = {}
            for commit in batch:
                self._refuse_disowned(commit)
                merged |= commit.left
            again = await self._attempt(merged, batch) if merged else None
            for commit in batch:
                if not commit.left:
                    self._waiting.remove(commit)
                    commit.finish()
            failures = 0 if again is None else failures + 1
            if again is not None:
                await asyncio.sleep(self._pause_ms(again, failures) / 1000)

    async def _attempt(self, merged: dict[TopicPartition, Entry], batch: list[_Commit]) -> RaftlogError | None:
        """Send once; settle what is decided, and return an error that wants another attempt for the rest."""
        loop = asyncio.get_running_loop()
        until = min(commit.deadline_s for commit in batch)
        results: dict[TopicPartition, RaftlogError | None]
        try:
            async with asyncio.timeout(max(until - loop.time(), _LEAST_S)):
                results = await self._send(merged)
        except RaftlogError as refused:
            results = dict.fromkeys(merged, refused)
        except TimeoutError:
            results = dict.fromkeys(merged, RequestTimedOut("the group's coordinator has not answered in time"))
        except Exception as bug:  # one of ours: those who wait for their commits must not wait for ever
            logger.exception("committing failed")
            results = dict.fromkeys(merged, InvalidRequestError(f"committing failed: {bug!r}"))
        self._on_committed({part: entry.offset for part, entry in merged.items() if results[part] is None})
        again: RaftlogError | None = None
        for commit in batch:
            now_s = loop.time()
            for part in list(commit.left):
                error = results[part]
                if error is not None and now_s < commit.deadline_s and passes(error, now_s - commit.began_s):
                    again = error
                else:
                    commit.settle(part, error)
        return again

    def _refuse_disowned(self, commit: _Commit) -> None:
        for part in list(commit.left):
            then, now = commit.claims.get(part, _ANYBODY), self._claim(part)
            if then.owner is not None and now.owner is not then.owner:
                commit.settle(
                    part, PartitionNotOwned(f"{part} was taken from this consumer before its offset was committed")
                )
            elif then.topic_id and now.topic_id and now.topic_id != then.topic_id:
                commit.settle(
                    part,
                    UnknownTopicId(
                        f"{part}: the topic was deleted and made again before its offset was committed, which means "
                        "nothing in the new one"
                    ),
                )
