"""Fetch: committed records, in Kafka's format, as soon as there are `min_bytes` of them or `max_wait_ms` have passed.

A client that names its rack is redirected to a replica there (KIP-392), and a follower serves only clients that name
one, so a client with old metadata learns of the new leader.

Sessions (KIP-227). A client that reads the same partitions again and again opens a session; later requests name only
what they change, and responses only partitions that have changed:

    session id, epoch of the request     outcome
    0, 0; an id, 0                       all partitions are named; a session begins, and the one with that id ends.
                                         Where there is no room the answer's id is 0: the client goes on without
    0, -1; an id, -1                     all partitions are named, without a session; the one with that id ends
    an id, the next epoch                changes: named partitions are added or changed, forgotten ones leave
    an id, another epoch                 INVALID_FETCH_SESSION_EPOCH: the client begins another
    an id that is not known              FETCH_SESSION_ID_NOT_FOUND: likewise

A session belongs to the principal that has opened it, and outlives its connection. One has at most MAX_NAMED
partitions; there are at most MAX_SESSIONS, with MAX_CACHED partitions together. A new one takes the place of the one
that was unused for longest, if that is longer than EVICTION_S. Partitions whose records were sent go to the end of a
session, so that all have their turn.

Before a fetch reads, it takes room for what it may read, which it keeps until the client has taken the response.
Without room in time the response has no records.

Batches are converted on the event loop or in threads, by what they cost (`broker/quotas/heavy_work.py`), and until the
response has MAX_RESPONSE_BYTES or MAX_RESPONSE_RECORDS. Of a larger batch it has the pieces from the offset that the
client asks for, so one response after the other gets the client through it.

Like `broker/partition/fetch_session.py`, nothing leaves without a valid lease.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final

from broker.kafka import errors
from broker.kafka.codec import Fields
from broker.kafka.parts import MAX_NAMED, check_count
from broker.kafka.record_batches import LOOP_COST, STEP_COST, ToKafka
from broker.log.partition_log import ReadResult
from broker.partition.fetch_session import readable_end
from broker.partition.partition import Partition
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.quotas.room import Hold
from broker.replicas.replica_manager import ReplicaManager
from broker.security.caller import Caller, Decisions
from broker.turns import Budget, in_turns
from raftlog.errors import CorruptRecordError, NotLeader, RaftlogError, UnknownTopicId, UnknownTopicOrPartition
from raftlog.v1 import common_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage, TopicImage

logger = logging.getLogger(__name__)

MAX_RESPONSE_BYTES: Final = 8 << 20
"""Of the log in one response, and of batches in Kafka's format; a single larger batch still goes whole."""
MAX_WAIT_MS: Final = 60_000
LEAST_WAIT_S: Final = 0.5
"""For room, however short a wait a client asks for: else it would ask again at once."""
MAX_RESPONSE_RECORDS: Final = 500_000
"""In one response: converting them takes a second or less. A single larger batch or piece of one still goes whole."""
ON_LOOP_BYTES: Final = 64 << 10
"""Of the log: more are converted in a thread, without a look at what each batch costs."""
ZSTD_FROM: Final = 10
"""The first version whose clients know zstd (KIP-110)."""
IDS_FROM: Final = 13
"""The first version that names topics by id."""
NO_SESSION: Final = 0
FULL_EPOCH: Final = 0
"""Session epoch of a request that begins a session."""
NO_EPOCH: Final = -1
"""Session epoch of a request without a session."""
MAX_EPOCH: Final = (1 << 31) - 1
MAX_SESSIONS: Final = 1_000
"""As Kafka's max.incremental.fetch.session.cache.slots."""
MAX_CACHED: Final = 500_000
"""Partitions of all sessions together."""
EVICTION_S: Final = 120.0
"""As Kafka's min.incremental.fetch.session.eviction.ms."""

TakeRoom = Callable[[int, float], Awaitable[Hold | None]]
"""Waits for room for at most so many bytes, for at most so many seconds; None: there was none."""

Key = tuple[str | bytes, int]
"""A partition, by the topic's name or id."""


class _Part:
    """One partition that a client reads."""

    __slots__ = ("leader_epoch", "max_bytes", "offset", "partition", "sent", "topic")

    def __init__(self, topic: str | bytes, part: Fields) -> None:
        self.topic = topic
        self.partition: int = part["partition"]
        self.sent: tuple[int, int, int] | None = None
        """High watermark, last stable offset and log start offset that the client was told; None: it must hear them."""
        self.change(part)

    def change(self, part: Fields) -> None:
        """Take what a request says."""
        self.leader_epoch: int = part["current_leader_epoch"]
        self.offset: int = part["fetch_offset"]
        self.max_bytes: int = part["partition_max_bytes"]

    def is_news(self, result: Fields) -> bool:
        """Whether a result has to be sent in a session; notes what the client knows then."""
        told = (result["high_watermark"], result["last_stable_offset"], result["log_start_offset"])
        news = bool(result["records"]) or result["preferred_read_replica"] >= 0 or told != self.sent
        if result["error_code"]:
            self.sent = None
            return True
        self.sent = told
        return news


class _Session:
    """What a client reads, in the order of its turns."""

    __slots__ = ("by_id", "epoch", "id", "parts", "principal", "used_s")

    def __init__(self, session_id: int, principal: str, parts: OrderedDict[Key, _Part], *, by_id: bool) -> None:
        self.id = session_id
        self.principal = principal
        self.parts = parts
        self.by_id = by_id
        self.epoch = 1
        """Of the next request."""
        self.used_s = 0.0


class Refusal(Exception):
    """A request as a whole is refused."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Sessions:
    """The sessions of one broker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        """By id, the longest unused first."""
        self._cached = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def cached(self) -> int:
        """How many partitions all sessions have."""
        return self._cached

    def enter(self, request: Fields, version: int, principal: str) -> tuple[_Session | None, list[_Part]]:
        """Return the session of a request, and the partitions to read.

        Raises:
            Refusal: the session is not known, or is at another epoch.
            InvalidRequestError: too many partitions are named.
        """
        check_count(sum(len(topic["partitions"]) for topic in request["topics"]), "partitions")
        by_id = version >= IDS_FROM
        session_id, epoch = request["session_id"], request["session_epoch"]
        known = self._sessions.get(session_id)
        if known is not None and known.principal != principal:
            known = None
        if epoch in (FULL_EPOCH, NO_EPOCH):
            if known is not None:
                self._end(known)
            parts = OrderedDict(_named(request, by_id=by_id))
            begun = None if epoch == NO_EPOCH or not parts else self._begin(parts, principal, by_id=by_id)
            return begun, list(parts.values())
        if known is None:
            raise Refusal(errors.FETCH_SESSION_ID_NOT_FOUND)
        if known.by_id != by_id:
            raise Refusal(errors.FETCH_SESSION_TOPIC_ID_ERROR)
        if epoch != known.epoch:
            raise Refusal(errors.INVALID_FETCH_SESSION_EPOCH)
        known.epoch = 1 if epoch == MAX_EPOCH else epoch + 1
        self._change(known, request)
        self._used(known)
        return known, list(known.parts.values())

    def _change(self, session: _Session, request: Fields) -> None:
        before = len(session.parts)
        for topic in request["forgotten_topics_data"]:
            name = topic["topic_id"] if session.by_id else topic["topic"]
            for number in topic["partitions"]:
                session.parts.pop((name, number), None)
        for topic in request["topics"]:
            name = topic["topic_id"] if session.by_id else topic["topic"]
            for part in topic["partitions"]:
                found = session.parts.get((name, part["partition"]))
                if found is None:
                    session.parts[name, part["partition"]] = _Part(name, part)
                else:
                    found.change(part)
        self._cached += len(session.parts) - before
        if self._cached > MAX_CACHED or len(session.parts) > MAX_NAMED:
            self._end(session)
            raise Refusal(errors.FETCH_SESSION_ID_NOT_FOUND)

    def _begin(self, parts: OrderedDict[Key, _Part], principal: str, *, by_id: bool) -> _Session | None:
        while len(self._sessions) >= MAX_SESSIONS or self._cached + len(parts) > MAX_CACHED:
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or self._clock() - oldest.used_s < EVICTION_S:
                return None
            self._end(oldest)
        session_id = NO_SESSION
        while session_id == NO_SESSION or session_id in self._sessions:
            session_id = secrets.randbelow(MAX_EPOCH) + 1
        begun = self._sessions[session_id] = _Session(session_id, principal, parts, by_id=by_id)
        self._cached += len(parts)
        self._used(begun)
        return begun

    def _used(self, session: _Session) -> None:
        session.used_s = self._clock()
        self._sessions.move_to_end(session.id)

    def _end(self, session: _Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._cached -= len(session.parts)


def _named(request: Fields, *, by_id: bool) -> Iterable[tuple[Key, _Part]]:
    for topic in request["topics"]:
        name = topic["topic_id"] if by_id else topic["topic"]
        for part in topic["partitions"]:
            yield (name, part["partition"]), _Part(name, part)


class Fetch:
    """The API of one broker."""

    def __init__(
        self,
        replica_manager: ReplicaManager,
        image: Callable[[], MetadataImage],
        disk_reads: DiskReads,
        heavy_work: HeavyWork,
    ) -> None:
        self.sessions = Sessions(time.monotonic)
        self._replica_manager = replica_manager
        self._image = image
        self._disk_reads = disk_reads
        self.heavy_work = heavy_work
        self._lease = replica_manager.lease
        self._counters = replica_manager.counters

    async def serve(self, request: Fields, version: int, who: Caller, take: TakeRoom) -> Fields:
        """Return the response. `take`: gives room for records, which is the response's until it has left.

        Raises:
            InvalidRequestError: too many partitions are named.
        """
        try:
            session, parts = self.sessions.enter(request, version, who.principal)
        except Refusal as refusal:
            return {"error_code": refusal.code, "session_id": NO_SESSION, "responses": []}
        request["topics"] = request["forgotten_topics_data"] = ()  # it may wait long, and has what it needs
        attempt = _Attempt(self, request, parts, version, who)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + max(0, min(request["max_wait_ms"], MAX_WAIT_MS)) / 1_000
        changed = asyncio.Event()
        most = min(max(request["max_bytes"], 1), MAX_RESPONSE_BYTES)
        try:
            while True:
                room = await take(most, max(deadline_s - loop.time(), LEAST_WAIT_S))
                begun_s = time.monotonic()
                await attempt.read(changed.set, 0 if room is None else room.size)
                if room is not None:
                    room.resize(attempt.bytes)
                remaining_s = deadline_s - loop.time()
                if attempt.is_final or attempt.bytes >= request["min_bytes"] or remaining_s <= 0:
                    break
                try:
                    async with asyncio.timeout(remaining_s):
                        await changed.wait()
                except TimeoutError:
                    pass
                changed.clear()
                if room is not None:
                    room.give()
        finally:
            attempt.stop_waiting(changed.set)
        await attempt.convert()
        if room is not None and attempt.bytes:
            room.resize(attempt.converted_bytes)
        attempt.withhold_without_lease()
        attempt.trace(begun_s)
        is_first = request["session_epoch"] in (FULL_EPOCH, NO_EPOCH)
        return {
            "session_id": NO_SESSION if session is None else session.id,
            "responses": attempt.responses(session, everything=is_first),
        }

    def held(self, request: Fields, version: int, who: Caller) -> Fields:
        """Return the response to a client that is over its quota: it has no records, and a session goes on (KIP-219).

        A request that would begin a session begins none; clients take the empty answer for what it is, and ask again.
        """
        session_id = NO_SESSION
        if request["session_epoch"] not in (FULL_EPOCH, NO_EPOCH):
            try:
                session, _ = self.sessions.enter(request, version, who.principal)
            except Refusal as refusal:
                return {"error_code": refusal.code, "session_id": NO_SESSION, "responses": []}
            assert session is not None, "only a full request is without one"
            session_id = session.id
        return {"session_id": session_id, "responses": []}

    async def read_one(
        self,
        wanted: _Part,
        topic: TopicImage,
        isolation: common_pb2.IsolationLevel.ValueType,
        rack: str,
        room: int,
        who: Caller,
        *,
        whole: bool,
    ) -> tuple[Partition, ReadResult, bool] | int:
        """Read one partition; return it with what was read and whether as a follower, or a nearer replica's broker id.

        `whole`: a first batch that is larger than the room goes whole, so that the client gets on.

        Raises:
            RaftlogError: this partition is refused.
        """
        partition = self._replica_manager.find(topic.topic_id, wanted.partition)
        from_follower = bool(rack) and partition.following is not None
        partition.check_leader_epoch(wanted.leader_epoch, from_follower=from_follower)
        if rack and not from_follower:
            nearer = self._replica_manager.preferred_replica(partition, rack)
            if nearer is not None:
                return nearer
        limit = min(room, wanted.max_bytes)
        end = readable_end(partition, isolation)
        if limit <= 0 and not whole:
            return partition, ReadResult(b"", wanted.offset), from_follower
        read = partial(partition.read, wanted.offset, max(1, limit), end, from_follower=from_follower)
        try:
            result = read(blocking=False)
            if result is None:  # not in the page cache
                self._counters.reads_from_disk += 1
                result = await self._disk_reads.read(who.share, partial(read, blocking=True))
                assert result is not None, "a blocking read waits"
            elif result.records:
                self._counters.reads_from_cache += 1
        except CorruptRecordError:
            partition.suspect(wanted.offset)
            raise
        if len(result.records) > limit and not whole:
            return partition, ReadResult(b"", wanted.offset), from_follower
        return partition, result, from_follower

    def topic(self, named: str | bytes, reads: Decisions | None) -> TopicImage:
        """Return a topic that the client may read. Raises RaftlogError."""
        if isinstance(named, bytes):
            found = self._image().topics.get(named)
            if found is None:
                raise UnknownTopicId(f"there is no topic with the id {named.hex()}")
            if reads is not None:
                reads.check(found.name, named)
            return found
        if reads is not None:
            reads.check(named)
        found = self._image().topic(named)
        if found is None:
            raise UnknownTopicOrPartition(f"there is no topic {named[:249]!r}")
        return found

    async def aborted(self, partition: Partition, offset: int, end: int, who: Caller) -> list[Fields]:
        """Return the aborted transactions that may have records between the offsets."""
        found = partition.log.aborted_transactions(offset, end, blocking=False)
        if found is None:
            found = await self._disk_reads.read(who.share, partition.log.aborted_transactions, offset, end)
        return [{"producer_id": each.producer_id, "first_offset": each.first_offset} for each in found]

    def count(self, topic: str, size: int) -> None:
        """Count bytes that leave."""
        self._counters.topic(topic).bytes_out += size

    @property
    def has_lease(self) -> bool:
        """Whether this broker may serve at this moment."""
        return self._lease.valid()

    def call_when_renewed(self, wake: Callable[[], None]) -> None:
        """As `Lease.call_when_renewed`."""
        self._lease.call_when_renewed(wake)

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        """As `Lease.stop_waiting`."""
        self._lease.stop_waiting(wake)


class _Attempt:
    """One request: read again and again until it has enough, then converted once.

    Attributes:
        bytes: of the log, read in the last round.
        converted_bytes: what they are in the response.
        is_final: whether a partition is refused or redirected, which the client has to learn at once.
    """

    def __init__(self, api: Fetch, request: Fields, parts: list[_Part], version: int, who: Caller) -> None:
        self._api = api
        self._request = request
        self._version = version
        committed = request["isolation_level"] == 1
        self._isolation: common_pb2.IsolationLevel.ValueType = (
            common_pb2.READ_COMMITTED if committed else common_pb2.READ_UNCOMMITTED
        )
        self._who = who
        self._reads = Decisions.of(who, Acl.READ, Acl.TOPIC)
        self._read: list[tuple[_Part, Fields, str, Partition, ReadResult, bool]] = []
        self._waited: list[Partition] = []
        self.bytes = self.converted_bytes = self._converted_records = 0
        self.is_final = False
        self._wanted: list[tuple[_Part, Fields]] = [(each, {"partition_index": each.partition}) for each in parts]

    async def read(self, wake: Callable[[], None], room: int) -> None:
        """Read every partition, and have `wake` called when one of them changes.

        `room`: bytes to read; a first batch that is larger is read whole, unless there is no room at all.
        """
        self.stop_waiting(wake)
        self._read.clear()
        self.bytes, self.is_final = 0, False
        has_room = room > 0
        if not self._api.has_lease:
            self._api.call_when_renewed(wake)
            return
        rack = self._request["rack_id"]
        async for wanted, answer in in_turns(self._wanted):
            try:
                topic = self._api.topic(wanted.topic, self._reads)
                whole = has_room and not self.bytes
                found = await self._api.read_one(wanted, topic, self._isolation, rack, room, self._who, whole=whole)
            except RaftlogError as error:
                self._refuse(answer, error)
                continue
            if isinstance(found, int):
                answer.update(
                    error_code=errors.NONE,
                    high_watermark=-1,
                    last_stable_offset=-1,
                    log_start_offset=-1,
                    preferred_read_replica=found,
                    records=b"",
                )
                self.is_final = True
                continue
            partition, result, from_follower = found
            room -= len(result.records)
            self.bytes += len(result.records)
            self._read.append((wanted, answer, topic.name, partition, result, from_follower))
            partition.wait(wake, from_follower=from_follower)
            self._waited.append(partition)

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        """Have `wake` called no more."""
        for partition in self._waited:
            partition.stop_waiting(wake)
        self._waited.clear()
        self._api.stop_waiting(wake)

    async def convert(self) -> None:
        """Turn what was read into the response."""
        turns = Budget(LOOP_COST)
        async for wanted, answer, topic, partition, result, _ in in_turns(self._read):
            try:
                records: list[bytes] = []
                aborted: list[Fields] | None = None
                if self._isolation == common_pb2.READ_COMMITTED:
                    aborted = []
                # batches that leave uncompressed may grow much, and a few bytes may be very many records
                most_bytes = MAX_RESPONSE_BYTES - self.converted_bytes
                most_records = MAX_RESPONSE_RECORDS - self._converted_records
                if result.records and most_bytes > 0 and most_records > 0:
                    conversion = ToKafka(
                        result.records,
                        takes_zstd=self._version >= ZSTD_FROM,
                        most_bytes=most_bytes,
                        most_records=most_records,
                        from_offset=wanted.offset,
                    )
                    records = await self._converted(conversion, turns, on_loop=len(result.records) <= ON_LOOP_BYTES)
                    if aborted is not None:
                        aborted = await self._api.aborted(partition, wanted.offset, result.next_offset, self._who)
                    self._api.count(topic, len(result.records))
                    self.converted_bytes += conversion.size
                    self._converted_records += conversion.records
            except RaftlogError as error:
                if isinstance(error, CorruptRecordError):
                    partition.suspect(wanted.offset)
                self._refuse(answer, error)
                continue
            answer.update(
                error_code=errors.NONE,
                high_watermark=partition.high_watermark,
                last_stable_offset=partition.last_stable_offset,
                log_start_offset=partition.log.log_start_offset,
                aborted_transactions=aborted,
                preferred_read_replica=-1,
                records=records,
            )

    async def _converted(self, conversion: ToKafka, turns: Budget, *, on_loop: bool) -> list[bytes]:
        """Return the batches of one partition. Raises RaftlogError."""
        records: list[bytes] = []
        while on_loop and not conversion.is_done and conversion.cost <= LOOP_COST:
            before = conversion.spent
            records += conversion.step(LOOP_COST)
            await turns.spend(conversion.spent - before)
        while not conversion.is_done:
            async with self._api.heavy_work.conversion(self._who.share, conversion.cost) as run:
                records += await run(conversion.step, STEP_COST)
                while conversion.is_within_batch and not conversion.is_done:
                    records += await run(conversion.step, STEP_COST)
        return records

    def withhold_without_lease(self) -> None:
        """Refuse everything if the lease has expired: another broker may lead by now."""
        if self._api.has_lease:
            return
        for _, answer in self._wanted:
            self._refuse(answer, NotLeader("this broker has no lease; refresh metadata"))

    def trace(self, begun_s: float) -> None:
        """Make the spans of the records that leave; their read began at `begun_s`."""
        for wanted, answer, _, partition, result, from_follower in self._read:
            if partition.traces and answer["records"]:
                size = len(result.records)
                partition.traces.fetched(wanted.offset, result.next_offset, size, begun_s, from_follower=from_follower)

    def responses(self, session: _Session | None, *, everything: bool) -> list[Fields]:
        """Return the results by topic; in a session those with news, unless `everything` is wanted."""
        by_topic: dict[str | bytes, list[Fields]] = {}
        for part, answer in self._wanted:
            if (session is not None and not part.is_news(answer)) and not everything:
                continue
            by_topic.setdefault(part.topic, []).append(answer)
            if session is not None and answer["records"] and (part.topic, part.partition) in session.parts:
                session.parts.move_to_end((part.topic, part.partition))
        name = "topic_id" if self._version >= IDS_FROM else "topic"
        return [{name: topic, "partitions": parts} for topic, parts in by_topic.items()]

    def _refuse(self, answer: Fields, error: RaftlogError) -> None:
        self.is_final = True
        refused: dict[str, Any] = {
            "error_code": errors.code_of(error, by_name=self._version < IDS_FROM),
            "high_watermark": -1,
            "last_stable_offset": -1,
            "log_start_offset": -1,
            "aborted_transactions": None,
            "preferred_read_replica": -1,
            "records": b"",
        }
        answer.update(refused)
