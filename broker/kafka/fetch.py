"""Fetch: committed records, in Kafka's format, as soon as there are `min_bytes` of them or `max_wait_ms` have passed.

Every request names all its partitions: the answer's session id is 0, with which a broker declines incremental fetch
sessions (KIP-227). A client that names its rack is redirected to a replica there (KIP-392), and a follower serves only
clients that name one, so a client with old metadata learns of the new leader.

Like `broker/partition/fetch_session.py`, nothing leaves without a valid lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, NamedTuple

from broker.kafka import errors
from broker.kafka.codec import Fields
from broker.kafka.record_batches import to_kafka
from broker.log.partition_log import ReadResult
from broker.partition.fetch_session import readable_end
from broker.partition.partition import Partition
from broker.replicas.replica_manager import ReplicaManager
from broker.security.caller import Caller, Decisions
from raftlog.errors import CorruptRecordError, NotLeader, RaftlogError, UnknownTopicOrPartition
from raftlog.v1 import common_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

MAX_RESPONSE_BYTES: Final = 8 << 20
"""Of the log in one response; a single larger batch still goes whole."""
MAX_WAIT_MS: Final = 60_000
AT_A_TIME: Final = 200
"""Partitions between two turns of the event loop."""
ON_LOOP_BYTES: Final = 64 << 10
"""Converting this many bytes takes about a millisecond; more are converted on a disk thread."""
ZSTD_FROM: Final = 10
"""The first version whose clients know zstd (KIP-110)."""
NO_SESSION: Final = 0
FETCH_SESSION_ID_NOT_FOUND: Final = 70


class _Wanted(NamedTuple):
    """One partition of a request, and its part of the response."""

    topic: str
    partition: int
    leader_epoch: int
    offset: int
    max_bytes: int
    result: Fields


class Fetch:
    """The API of one broker."""

    def __init__(self, replica_manager: ReplicaManager, image: Callable[[], MetadataImage], disk: Executor) -> None:
        self._replica_manager = replica_manager
        self._image = image
        self._disk = disk
        self._lease = replica_manager.lease
        self._counters = replica_manager.counters

    async def serve(self, request: Fields, version: int, who: Caller) -> Fields:
        """Return the response."""
        if request["session_id"] != NO_SESSION:
            return {"error_code": FETCH_SESSION_ID_NOT_FOUND, "session_id": NO_SESSION, "responses": []}
        attempt = _Attempt(self, request, version, who)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + max(0, min(request["max_wait_ms"], MAX_WAIT_MS)) / 1_000
        changed = asyncio.Event()
        try:
            while True:
                await attempt.read(changed.set)
                remaining_s = deadline_s - loop.time()
                if attempt.is_final or attempt.bytes >= request["min_bytes"] or remaining_s <= 0:
                    break
                try:
                    async with asyncio.timeout(remaining_s):
                        await changed.wait()
                except TimeoutError:
                    pass
                changed.clear()
        finally:
            attempt.stop_waiting(changed.set)
        await attempt.convert()
        attempt.withhold_without_lease()
        return {"session_id": NO_SESSION, "responses": attempt.responses}

    async def read_one(
        self, wanted: _Wanted, isolation: common_pb2.IsolationLevel.ValueType, rack: str, room: int, *, whole: bool
    ) -> tuple[Partition, ReadResult, bool] | int:
        """Read one partition; return it with what was read and whether as a follower, or a nearer replica's broker id.

        `whole`: a first batch that is larger than the room goes whole, so that the client gets on.

        Raises:
            RaftlogError: this partition is refused.
        """
        found = self._image().topic(wanted.topic)
        if found is None:
            raise UnknownTopicOrPartition(f"there is no topic {wanted.topic[:249]!r}")
        partition = self._replica_manager.find(found.topic_id, wanted.partition)
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
                result = await asyncio.get_running_loop().run_in_executor(self._disk, partial(read, blocking=True))
                assert result is not None, "a blocking read waits"
            elif result.records:
                self._counters.reads_from_cache += 1
        except CorruptRecordError:
            partition.suspect(wanted.offset)
            raise
        if len(result.records) > limit and not whole:
            return partition, ReadResult(b"", wanted.offset), from_follower
        return partition, result, from_follower

    async def aborted(self, partition: Partition, offset: int, end: int) -> list[Fields]:
        """Return the aborted transactions that may have records between the offsets."""
        found = partition.log.aborted_transactions(offset, end, blocking=False)
        if found is None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._disk, partition.log.aborted_transactions, offset, end)
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
        is_final: whether a partition is refused or redirected, which the client has to learn at once.
    """

    def __init__(self, api: Fetch, request: Fields, version: int, who: Caller) -> None:
        self._api = api
        self._request = request
        self._version = version
        committed = request["isolation_level"] == 1
        self._isolation: common_pb2.IsolationLevel.ValueType = (
            common_pb2.READ_COMMITTED if committed else common_pb2.READ_UNCOMMITTED
        )
        self._who = who
        self._reads = Decisions.of(who, Acl.READ, Acl.TOPIC)
        self._read: list[tuple[_Wanted, Partition, ReadResult]] = []
        self._waited: list[Partition] = []
        self.bytes = 0
        self.is_final = False
        self.responses: list[Fields] = []
        self._wanted: list[_Wanted] = []
        for topic in request["topics"]:
            parts: list[Fields] = []
            self.responses.append({"topic": topic["topic"], "partitions": parts})
            for part in topic["partitions"]:
                result: Fields = {"partition_index": part["partition"]}
                parts.append(result)
                self._wanted.append(
                    _Wanted(
                        topic["topic"],
                        part["partition"],
                        part["current_leader_epoch"],
                        part["fetch_offset"],
                        part["partition_max_bytes"],
                        result,
                    )
                )

    async def read(self, wake: Callable[[], None]) -> None:
        """Read every partition, and have `wake` called when one of them changes."""
        self.stop_waiting(wake)
        self._read.clear()
        self.bytes, self.is_final = 0, False
        room = min(max(self._request["max_bytes"], 1), MAX_RESPONSE_BYTES)
        if not self._api.has_lease:
            self._api.call_when_renewed(wake)
            return
        rack = self._request["rack_id"]
        for number, wanted in enumerate(self._wanted, 1):
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)
            try:
                if self._reads is not None:
                    self._reads.check(wanted.topic)
                found = await self._api.read_one(wanted, self._isolation, rack, room, whole=not self.bytes)
            except RaftlogError as error:
                self._refuse(wanted, error)
                continue
            if isinstance(found, int):
                wanted.result.update(
                    error_code=errors.NONE, high_watermark=-1, preferred_read_replica=found, records=b""
                )
                self.is_final = True
                continue
            partition, result, from_follower = found
            room -= len(result.records)
            self.bytes += len(result.records)
            self._read.append((wanted, partition, result))
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
        takes_zstd = self._version >= ZSTD_FROM
        loop = asyncio.get_running_loop()
        for wanted, partition, result in self._read:
            try:
                records: list[bytes] = []
                aborted: list[Fields] | None = None
                if self._isolation == common_pb2.READ_COMMITTED:
                    aborted = []
                if result.records:
                    convert = partial(to_kafka, result.records, takes_zstd=takes_zstd)
                    if len(result.records) <= ON_LOOP_BYTES:
                        records = convert()
                    else:
                        records = await loop.run_in_executor(self._api._disk, convert)
                    if aborted is not None:
                        aborted = await self._api.aborted(partition, wanted.offset, result.next_offset)
                    self._api.count(wanted.topic, len(result.records))
            except RaftlogError as error:
                if isinstance(error, CorruptRecordError):
                    partition.suspect(wanted.offset)
                self._refuse(wanted, error)
                continue
            wanted.result.update(
                error_code=errors.NONE,
                high_watermark=partition.high_watermark,
                last_stable_offset=partition.last_stable_offset,
                log_start_offset=partition.log.log_start_offset,
                aborted_transactions=aborted,
                preferred_read_replica=-1,
                records=records,
            )

    def withhold_without_lease(self) -> None:
        """Refuse everything if the lease has expired: another broker may lead by now."""
        if self._api.has_lease:
            return
        for wanted in self._wanted:
            self._refuse(wanted, NotLeader("this broker has no lease; refresh metadata"))

    def _refuse(self, wanted: _Wanted, error: RaftlogError) -> None:
        self.is_final = True
        refused: dict[str, Any] = {
            "error_code": errors.code_of(error),
            "high_watermark": -1,
            "last_stable_offset": -1,
            "log_start_offset": -1,
            "aborted_transactions": None,
            "preferred_read_replica": -1,
            "records": b"",
        }
        wanted.result.update(refused)
