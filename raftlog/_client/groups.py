"""A consumer's traffic with its group: `GroupSession` is the member's stream to the coordinator, `GroupOffsets` makes
unary calls for offsets, and `CommitQueue` commits in the order of the calls. `checked` refuses invalid offsets before
they are sent, because one of them would fail all offsets of its request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import grpc

from raftlog._client.connections import Connections, from_grpc, is_task_cancelled
from raftlog._client.coordinators import Coordinators
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S, LookupOptions, monotonic_ms
from raftlog._core.backoff import Pauses
from raftlog._core.membership import Membership, MemberState
from raftlog.errors import (
    AuthorizationError,
    BrokerUnavailable,
    CoordinatorNotAvailable,
    InternalError,
    InvalidRequestError,
    OffsetMetadataTooLarge,
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
from raftlog.v1 import group_pb2, group_pb2_grpc

logger = logging.getLogger(__name__)

LEAVE_S: Final = 2.0
"""How long a leave may take; after that the coordinator notices by the session timeout."""
_LONGEST_TICK_MS: Final = 500.0


class GroupSession:
    """Runs a `Membership` against the coordinator, on the event loop.

    It calls `on_change` after every change of the membership. If `is_overdue` says that the application has not polled
    for too long, it calls `on_overdue` and leaves the group.
    """

    def __init__(
        self,
        membership: Membership,
        coordinators: Coordinators,
        connections: Connections,
        pauses: Pauses,
        *,
        on_change: Callable[[], None],
        is_overdue: Callable[[float], bool],
        on_overdue: Callable[[], None],
    ) -> None:
        self.membership = membership
        self._coordinators = coordinators
        self._connections = connections
        self._pauses = pauses
        self._on_change = on_change
        self._is_overdue = is_overdue
        self._on_overdue = on_overdue
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._call: Any = None
        self._given_up: RaftlogError | None = None
        """Why this client has ended the stream."""
        self._leaving: asyncio.Event | None = None
        """Set when the stream that carried the leave has ended."""
        self._heard = False
        """Whether the stream brought any response other than an authorization error; without one, the pauses grow."""
        self._closed = False
        self._out: deque[group_pb2.GroupRequest] = deque()
        self._ready = asyncio.Event()
        self._commits: dict[int, asyncio.Future[group_pb2.SessionCommitResult]] = {}
        self._next_correlation_id = 0

    def wake(self) -> None:
        """Follow a change of the membership."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._wake.set()
        self.tick()

    async def commit(self, offsets: Sequence[group_pb2.CommitOffset]) -> list[RaftlogError | None]:
        """Commit as this member, over its stream; return the error of each offset, or None.

        Raises:
            CoordinatorNotAvailable: there is no stream, or it broke and the outcome is not known.
            RaftlogError: the coordinator refuses all offsets.
        """
        if self._call is None or self._leaving is not None or self.membership.state is not MemberState.MEMBER:
            raise CoordinatorNotAvailable("there is no connection to the group's coordinator at the moment")
        self._next_correlation_id += 1
        correlation_id = self._next_correlation_id
        answer = self._commits[correlation_id] = asyncio.get_running_loop().create_future()
        self._send(
            group_pb2.GroupRequest(
                commit=group_pb2.SessionCommit(
                    correlation_id=correlation_id, member_epoch=self.membership.member_epoch, offsets=offsets
                )
            )
        )
        try:
            result = await answer
        finally:
            self._commits.pop(correlation_id, None)
        return commit_errors(result.error if result.HasField("error") else None, result.results, len(offsets))

    async def leave(self) -> None:
        """Leave the group, and tell the coordinator if there is a stream."""
        ended = self._start_leaving()
        if ended is not None:
            await ended.wait()

    def _start_leaving(self) -> asyncio.Event | None:
        request = self.membership.leave()
        ended = self._leaving
        if request is not None and self._call is not None and ended is None:
            ended = self._leaving = asyncio.Event()
            self._send(request)
            asyncio.get_running_loop().call_later(LEAVE_S, self._end_stream, self._call, RequestTimedOut("no answer"))
        elif ended is None:
            self._end_stream(self._call, CoordinatorNotAvailable("the consumer is no member any more"))
        self._on_change()
        return ended

    async def close(self) -> None:
        """Leave, and stop."""
        try:
            await self.leave()
        finally:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    # Time

    def tick(self) -> None:
        """Do what is due, and set the timer for the next time."""
        now_ms = monotonic_ms()
        membership = self.membership
        if membership.wants_stream and self._is_overdue(now_ms):
            self._on_overdue()
            self._start_leaving()
        if membership.expire(now_ms):
            lost = RequestTimedOut("no answer from the coordinator within the session timeout")
            logger.warning(
                "group %s: %s; partitions lost: %d; joining again",
                membership.identity.group_id, lost, len(membership.lost),
            )  # fmt: skip
            self._end_stream(self._call, lost)
            self._on_change()
        elif membership.is_silent(now_ms):
            self._end_stream(self._call, RequestTimedOut("the group's coordinator does not answer"))
        elif (heartbeat := membership.heartbeat(now_ms)) is not None:
            self._send(heartbeat)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if membership.wants_stream:
            pause_ms = min(_LONGEST_TICK_MS, max(1.0, membership.next_ms() - now_ms))
            self._timer = asyncio.get_running_loop().call_later(pause_ms / 1000, self.tick)

    # The stream

    async def _run(self) -> None:
        group_id = self.membership.identity.group_id
        failures = 0
        while not self._closed:
            while not self.membership.wants_stream:
                self._wake.clear()
                await self._wake.wait()
            self._heard = False
            error = await self._one_stream(group_id)
            state = self.membership.state
            failures = 1 if self._heard else failures + 1
            self._coordinators.forget(group_id)
            self.membership.closed()
            if not self._left():
                self.membership.on_error(error)
                level = logging.INFO if self.membership.error is not None else logging.DEBUG  # the next call raises it
                logger.log(level, "group %s: session (%s) ended: %s", group_id, state.value, error)
            self._on_change()
            self.tick()
            await asyncio.sleep(self._pauses.after_ms(error, failures) / 1000)

    def _left(self) -> bool:
        """Whether the ended stream carried the leave."""
        if self._leaving is None:
            return False
        self._leaving.set()
        self._leaving = None
        return True

    async def _one_stream(self, group_id: str) -> RaftlogError:
        """Open a stream and read it; return why it ended."""
        address = "the cluster"
        self._given_up = None
        try:
            address = (await self._coordinators.find_once(group_id)).address
            if not self.membership.wants_stream:
                return CoordinatorNotAvailable("the consumer is no member any more")
            return await self._stream(address)
        except asyncio.CancelledError:
            if (why := self._why()) is not None:
                return why
            if is_task_cancelled():
                raise
            return BrokerUnavailable(f"the channel to {address} was replaced")
        except (grpc.RpcError, asyncio.InvalidStateError, RaftlogError) as broke:
            return self._why() or from_grpc(broke, address)
        except Exception as bug:  # a bug of ours must not end the membership
            logger.exception("group %s: session failed", group_id)
            return from_grpc(bug, address)

    def _why(self) -> RaftlogError | None:
        """Return why this client has ended the stream, unless it is closed or has not."""
        return None if self._closed else self._given_up

    async def _stream(self, address: str) -> RaftlogError:
        stub = group_pb2_grpc.GroupStub(self._connections.channel(address))
        call: Any = stub.Session()
        self._call = call
        self._out.clear()
        writer = asyncio.get_running_loop().create_task(self._write(call))
        self._send(self.membership.opened(monotonic_ms()))
        self.tick()
        try:
            while True:
                try:
                    response = await call.read()
                except grpc.RpcError as broke:
                    if not _is_final(broke.code(), broke.details()):
                        raise
                    return self._ended(broke.code(), broke.details())
                if response is grpc.aio.EOF:
                    code = await call.code()
                    if code is grpc.StatusCode.OK:
                        return BrokerUnavailable(f"{address} closed the group's session")
                    return self._ended(code, await call.details())
                if self._given_up is not None:
                    return self._given_up  # the response was read already, and belongs to the former session
                error = self._on_response(response)
                self._heard = self._heard or not isinstance(error, AuthorizationError)
                if error is not None:
                    if error.retriable:
                        self._fail_commits(
                            CoordinatorNotAvailable(f"the group's coordinator ended its stream: {error}")
                        )
                    return error
        finally:
            self._call = None
            call.cancel()
            writer.cancel()
            self._fail_commits()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await writer

    def _on_response(self, response: group_pb2.GroupResponse) -> RaftlogError | None:
        kind = response.WhichOneof("response")
        if kind == "commit":
            answer = self._commits.get(response.commit.correlation_id)
            if answer is not None and not answer.done():
                answer.set_result(response.commit)
        elif kind == "error":
            return from_wire(response.error)
        elif self._leaving is None:
            if kind == "assignment":
                self.membership.on_assignment(response.assignment, monotonic_ms())
            elif kind == "heartbeat":
                self.membership.on_heartbeat(response.heartbeat)
            self.tick()  # first: after a pause the session may be over
            self._on_change()
        return None

    def _ended(self, code: grpc.StatusCode, details: str | None) -> RaftlogError:
        """Return why the coordinator has ended the stream.

        A request that it cannot accept would fail again. If that may be a commit, the pending commits fail and the
        membership continues; otherwise it is the join or a heartbeat.
        """
        said = f"the group's session ended: {code.name}: {details}"
        if not _is_final(code, details):
            return BrokerUnavailable(said)
        if not self._commits:
            return InvalidRequestError(said)
        self._fail_commits(InvalidRequestError(said))
        return BrokerUnavailable(said)

    def _fail_commits(self, error: RaftlogError | None = None) -> None:
        for answer in self._commits.values():
            if not answer.done():
                answer.set_exception(error or CoordinatorNotAvailable("the stream to the group's coordinator broke"))
        self._commits.clear()

    async def _write(self, call: Any) -> None:
        while True:
            while self._out:
                await call.write(self._out.popleft())
            self._ready.clear()
            await self._ready.wait()

    def _send(self, request: group_pb2.GroupRequest) -> None:
        self._out.append(request)
        self._ready.set()

    def _end_stream(self, call: Any, why: RaftlogError) -> None:
        if call is not None and call is self._call:
            self._given_up = self._given_up or why
            call.cancel()


def _is_final(code: grpc.StatusCode, details: str | None) -> bool:
    """Whether the request can never be accepted."""
    return code is grpc.StatusCode.INVALID_ARGUMENT or "larger than max" in (details or "")


def commit_errors(
    error_of_all: Any, results: Sequence[group_pb2.CommitOffsetResult], count: int
) -> list[RaftlogError | None]:
    """Return the error of each offset of a commit, or None.

    Raises:
        RaftlogError: the coordinator refused all offsets.
    """
    if error_of_all is not None and error_of_all.code:
        raise from_wire(error_of_all)
    errors = [from_wire(result.error) if result.HasField("error") and result.error.code else None for result in results]
    assert len(errors) == count, "one result for each offset"
    return errors


MAX_METADATA_BYTES: Final = 128 * 1024
"""The client's limit of metadata: it fits into one request. Servers allow a few thousand bytes
(offset.metadata.max.bytes)."""
_MOST: Final = {
    "partition": (1 << 31) - 1,
    "offset": (1 << 63) - 1,
    "leader epoch": (1 << 31) - 1,
    "time": (1 << 63) - 1,
}


def checked(offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return offsets for a commit, after checking them without the server.

    Raises:
        InvalidRequestError: a key is not a partition, or a value not an offset, epoch or text.
        OffsetMetadataTooLarge: the metadata is larger than any server allows.
    """
    if not isinstance(offsets, Mapping):
        raise InvalidRequestError(f"offsets {offsets!r} are not a mapping such as {{TopicPartition('orders', 0): 5}}")
    found: dict[TopicPartition, OffsetAndMetadata] = {}
    for given, value in offsets.items():
        part = as_partition(given)
        wanted = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
        offset, leader_epoch = as_number("offset", wanted.offset), as_number("leader epoch", wanted.leader_epoch)
        if offset is None or offset < 0:
            raise InvalidRequestError(
                f"{part} has no offset {wanted.offset!r}: it takes a number from 0, or OffsetAndMetadata"
            )
        if leader_epoch is None or leader_epoch < -1:
            raise InvalidRequestError(f"{part}: {wanted.leader_epoch!r} is no leader epoch; -1: not known")
        if not isinstance(wanted.metadata, str):
            raise InvalidRequestError(f"{part}: metadata is text, not {wanted.metadata!r}")
        try:
            size = len(wanted.metadata.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{part}: metadata cannot be written as UTF-8: {error}") from None
        if size > MAX_METADATA_BYTES:
            raise OffsetMetadataTooLarge(f"{part}: metadata has {size} bytes, no server takes more than a few thousand")
        found[part] = OffsetAndMetadata(offset, wanted.metadata, leader_epoch)
    return found


def as_partition(given: object) -> TopicPartition:
    """Return a partition from a pair of topic and number.

    Raises:
        InvalidRequestError: it is not such a pair.
    """
    if isinstance(given, tuple) and len(given) == 2:
        topic, partition = given
        number = as_number("partition", partition)
        if isinstance(topic, str) and number is not None and number >= 0:
            return TopicPartition(topic, number)
    raise InvalidRequestError(f"{given!r} is not a partition such as TopicPartition('orders', 0)")


def as_number(what: str, value: Any) -> int | None:
    """Return a whole number, one of NumPy too, as an int; None: it is none, or too large for what it is."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number <= _MOST[what] else None


T = TypeVar("T")


Offsets = Mapping[TopicPartition, OffsetAndMetadata]


class Claim(NamedTuple):
    """The owner and the topic that an offset is committed for.

    The commit must not reset the position of a later owner, nor reach a later topic of the same name.
    """

    owner: object = None
    """The state of the partition that is read; None: the commit needs no owner."""
    topic_id: bytes = b""
    """Empty: not known; the topic is identified by name."""


Claims = Mapping[TopicPartition, Claim]


class Entry(NamedTuple):
    """The offset to commit for one partition, and its topic id."""

    offset: OffsetAndMetadata
    topic_id: bytes


_PIECE_BYTES: Final = 256 * 1024
_PIECE_ENTRIES: Final = 2000
"""Limits of one request; servers accept 1 MiB and 10 000 entries."""
_PIECE_TOPICS: Final = 500
_ENTRY_BYTES: Final = 16
"""An upper bound of the bytes that an entry adds to a request beside its own fields."""
_LEAST_S: Final = 0.05
"""Every commit gets one attempt of at least this long, even past its deadline."""
NOBODY: Final = ("", -1)
"""Member id and epoch of a consumer that is not a member."""


def passes(error: RaftlogError, waited_s: float) -> bool:
    """Whether the same call may succeed later, after `waited_s` of trying.

    After StaleMemberEpoch the new epoch is on its way to the member. A topic that stays unknown for longer than
    UNKNOWN_TOPIC_GRACE_S does not exist.
    """
    if isinstance(error, (UnknownTopicOrPartition, UnknownTopicId)):
        return waited_s < UNKNOWN_TOPIC_GRACE_S
    return isinstance(error, (RetriableError, StaleMemberEpoch, InternalError))


def to_commit(entries: Iterable[tuple[TopicPartition, Entry]]) -> list[group_pb2.CommitOffset]:
    """Return offsets for a request, with the topic id if it is known, else the name."""
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
    """Yield the offsets of one request each, in order."""
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
    """Yield for each request its partitions, and the same partitions by topic, in the same order."""
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
    """Unary calls to the coordinator of one group; each is one attempt.

    `require_stable`: an offset that an open transaction may replace is an error, `UnstableOffsetCommit` (KIP-447): a
    consumer that began there would read records again that the transaction has processed.
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
        """Return the committed offset of each partition, its error, or None. `partitions`: topic ids, b"" if unknown.

        Raises:
            RaftlogError: the coordinator does not answer, or refuses all.
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
        """Commit once, without being a member; return the error of each offset, or None.

        Raises:
            RaftlogError: the coordinator does not answer, or refuses all.
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
        """Return the result of `ask`, retried within `timeout_ms` while its error may pass.

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
    """One commit call: its undecided partitions, and its first error."""

    def __init__(self, offsets: Offsets, claims: Claims, timeout_ms: float, done: asyncio.Future[None]) -> None:
        self.left = {part: Entry(offset, claims.get(part, _ANYBODY).topic_id) for part, offset in offsets.items()}
        self.claims = claims
        self.began_s = done.get_loop().time()
        self.deadline_s = self.began_s + timeout_ms / 1000
        self.done = done
        self.first_error: RaftlogError | None = None

    def settle(self, part: TopicPartition, error: RaftlogError | None) -> None:
        """Record the outcome of a partition."""
        if self.left.pop(part, None) is not None and error is not None and self.first_error is None:
            text = str(error)
            self.first_error = type(error)(text if str(part) in text else f"{part}: {text}")

    def finish(self) -> None:
        """Complete the future, unless the caller has cancelled it."""
        if self.done.done():
            return
        if self.first_error is not None:
            self.done.set_exception(self.first_error)
            self.done.exception()  # retrieved: not every caller waits for it
        else:
            self.done.set_result(None)


class CommitQueue:
    """Commits in order: one is under way at a time, and commits that arrive meanwhile join the next one.

    So an earlier commit never overtakes a later one, however often it is retried. `send` makes one attempt. `claim`
    returns the current owner and topic of a partition: commits of an earlier owner, or for a topic that was created
    again, fail here.
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
        """Wait until all queued commits are done, successfully or not."""
        while self._waiting:
            await asyncio.wait([self._waiting[-1].done])

    async def close(self, error: RaftlogError) -> None:
        """Fail all queued commits with this error."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            done = self._waiting.popleft().done
            if not done.done():
                done.set_exception(error)
                done.exception()  # retrieved: not every caller waits for it

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
        """Make one attempt and settle its final results; return an error if the rest needs another attempt."""
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
        except Exception as bug:  # a bug of ours must not leave callers waiting
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
                        f"{part}: the topic was deleted and created again before its offset was committed; the offset "
                        "means nothing in the new topic"
                    ),
                )
