"""Producers and consumers that append to and poll a real cluster, and note their observations for `append_checker`."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raftlog import Consumer, Delivery, Producer, TopicPartition, aio
from raftlog.errors import RaftlogError
from raftlog.format import decode_batch
from raftlog.v1 import log_pb2, metadata_pb2
from tests.support.append_checker import Append, Entry, History, Log, Poll
from tests.support.raw_client import RawClient, raw_client

TOPIC = "chaos"
_WINDOW = 40
"""Records that a producer has unanswered at most: so many may have an unknown end at a fault."""
_PAUSE_S = 0.04
"""Between two records of a producer: clients that take the whole machine starve the servers."""
_DRAIN_S = 150.0
_READ_TIMEOUT_S = 90.0
_BEHIND_S = 10.0
"""So long a replica may take to get to the end that its leader has told."""


class _Appender(threading.Thread):
    """Sends numbered values to random partitions with acks=all, several at a time.

    With `retries` it goes on until its records are acknowledged, `idempotent` or not; else each is sent once.
    """

    def __init__(
        self, number: int, bootstrap: str, topic: str, partitions: int, *, retries: bool, idempotent: bool
    ) -> None:
        super().__init__(name=f"appender-{number}", daemon=True)
        self.number = number
        self._topic = topic
        self.retries = retries
        self.once = idempotent or not retries
        self.over = threading.Event()
        self.appends: list[Append] = []
        """Records whose outcome is known."""
        self.unanswered: dict[bytes, Append] = {}
        """The others, by value."""
        self.errors: list[RaftlogError] = []
        self.acknowledged_at: list[float] = []
        self.longest_s = 0.0
        self._partitions = partitions
        self._chance = random.Random(number)
        options: dict[str, Any] = {} if retries else {"retries": 0, "delivery_timeout_ms": 10_000}
        options["enable_idempotence"] = idempotent
        self._producer = Producer(bootstrap, acks="all", linger_ms=1, **options)
        self._open = threading.Semaphore(_WINDOW)

    def run(self) -> None:
        sent = 0
        numbers = [0] * self._partitions
        with self._producer as producer:
            while not self.over.is_set():
                self._open.acquire()
                partition = self._chance.randrange(self._partitions)
                value = b"%d-%d" % (self.number, sent)
                append = Append(self.number, numbers[partition], partition, value, time.monotonic(), once=self.once)
                sent += 1
                numbers[partition] += 1
                self.unanswered[value] = append
                try:
                    delivery = producer.send(self._topic, value, partition=partition)
                except RaftlogError as error:  # not sent at all, and its number is passed over
                    del self.unanswered[value]
                    self.errors.append(error)
                    self._open.release()
                    continue
                delivery.add_done_callback(lambda done, append=append: self._note(append, done))  # type: ignore[misc] # bound now
                time.sleep(_PAUSE_S)
            producer.flush(_DRAIN_S)

    def _note(self, append: Append, delivery: Delivery) -> None:
        now = time.monotonic()
        error = delivery.exception(0)
        if error is None:
            offset = delivery.result(0).offset
            fields = (append.producer, append.number, append.partition, append.value, append.invoked_at)
            append = Append(*fields, returned_at=now, offset=offset, once=append.once)
            self.acknowledged_at.append(now)
            self.longest_s = max(self.longest_s, now - append.invoked_at)
        else:
            append = replace(append, returned_at=now)
            self.errors.append(error)
        del self.unanswered[append.value]
        self.appends.append(append)
        self._open.release()


class _Poller(threading.Thread):
    """Reads the topic from its start, at leaders or at the replicas of a rack."""

    def __init__(self, number: int, bootstrap: str, topic: str, rack: str) -> None:
        super().__init__(name=f"poller-{number}", daemon=True)
        self.number = number
        self._topic = topic
        self.over = threading.Event()
        self.polls: list[Poll] = []
        self.errors: list[RaftlogError] = []
        self.broken: BaseException | None = None
        self.read = 0
        # A broker that does not know an offset has it start over, and the checker sees that it went back.
        self._consumer = Consumer(bootstrap, auto_offset_reset="earliest", client_rack=rack)

    def run(self) -> None:
        try:
            with self._consumer as consumer:
                consumer.subscribe(self._topic)
                while not self.over.is_set():
                    asked_at = time.monotonic()
                    try:
                        records = consumer.poll(0.1)
                    except RaftlogError as error:
                        self.errors.append(error)
                        continue
                    told_at = time.monotonic()
                    by_partition: dict[int, list[Entry]] = {}
                    for record in records:
                        assert record.value is not None
                        by_partition.setdefault(record.partition, []).append(Entry(record.offset, record.value))
                    self.polls += [
                        Poll(self.number, part, tuple(found), asked_at, told_at) for part, found in by_partition.items()
                    ]
                    self.read += len(records)
        except BaseException as error:  # the test shows it
            self.broken = error


class AppendWorkload:
    """`start`, break things, `stop`; then `history` with the final reads of `read_replicas`."""

    def __init__(
        self, bootstrap: str, partitions: int, *, racks: Mapping[int, str], appenders: int = 4, topic: str = TOPIC
    ) -> None:
        # Two of four are idempotent, one sends nothing again: what they sent is there once at most.
        self.appenders = [
            _Appender(number, bootstrap, topic, partitions, retries=number % 4 != 2, idempotent=number % 4 in (0, 3))
            for number in range(appenders)
        ]
        self.pollers = [_Poller(number, bootstrap, topic, rack) for number, rack in enumerate(["", *racks.values()])]

    def start(self) -> None:
        """Begin."""
        for thread in (*self.appenders, *self.pollers):
            thread.start()

    @property
    def acknowledged(self) -> int:
        """How many records were acknowledged so far."""
        return sum(len(each.acknowledged_at) for each in self.appenders)

    def wait_for_progress(self, records: int = 50, timeout_s: float = 30.0) -> float:
        """Return the seconds until every producer that retries had `records` more acknowledged.

        Raises:
            AssertionError: not in time.
        """
        started = time.monotonic()
        waiting = {each: len(each.acknowledged_at) + records for each in self.appenders if each.retries}
        while any(len(each.acknowledged_at) < wanted for each, wanted in waiting.items()):
            assert time.monotonic() - started < timeout_s, (
                f"within {timeout_s:g} s not every writer had {records} more records acknowledged; writer, "
                "acknowledged and wanted: "
                f"{[(each.name, len(each.acknowledged_at), wanted) for each, wanted in waiting.items()]}"
            )
            time.sleep(0.005)
        return time.monotonic() - started

    def stop(self) -> None:
        """Send no more, and wait until everything is answered and every consumer has read everything."""
        for appender in self.appenders:
            appender.over.set()
        for appender in self.appenders:
            appender.join(_DRAIN_S + 10)
            assert not appender.is_alive(), (
                f"{appender.name} still waits for acknowledgements {_DRAIN_S + 10:g} s after its last record"
            )

    def stop_pollers(self, final: Log) -> None:
        """End the consumers, each once it has read everything.

        Raises:
            AssertionError: one does not get to the end.
        """
        wanted = sum(len(entries) for entries in final.values())
        deadline_s = time.monotonic() + _READ_TIMEOUT_S
        for poller in self.pollers:
            while poller.read < wanted and poller.is_alive():
                assert time.monotonic() < deadline_s, (
                    f"{poller.name} has read {poller.read} of {wanted} records after {_READ_TIMEOUT_S:g} s"
                )
                time.sleep(0.02)
            poller.over.set()
            poller.join(_READ_TIMEOUT_S)
            if poller.broken is not None:
                raise poller.broken

    def history(self, final: Mapping[int, Log]) -> History:
        """Return everything that was noted."""
        return History(
            [append for each in self.appenders for append in each.appends],
            [poll for each in self.pollers for poll in each.polls],
            dict(final),
        )


class RefusedRead(AssertionError):
    """A replica says that a partition is not to be read from it, now."""


async def read_replicas(
    addresses: Mapping[int, str], partitions: int, topic: str = TOPIC
) -> tuple[dict[int, Log], dict[int, list[bytes]]]:
    """Read every partition from its start to its end at each broker, leader or follower.

    A follower hears of the leader's high watermark a little later, and is given `_BEHIND_S` for it; what it does not
    have then it does not have.

    Returns the records, and the bytes of each partition's log as the broker sent them.
    """
    parts = [TopicPartition(topic, partition) for partition in range(partitions)]
    async with aio.Consumer(",".join(addresses.values())) as consumer:
        ends = await consumer.end_offsets(parts)
    logs: dict[int, Log] = {}
    raw: dict[int, list[bytes]] = {}
    for node_id, address in addresses.items():
        async with raw_client(address) as client:
            raw[node_id] = [await read_partition(client, node_id, part, ends[part]) for part in parts]
        logs[node_id] = {partition: _entries(data) for partition, data in enumerate(raw[node_id])}
    return logs, raw


async def read_partition(
    client: RawClient, node_id: int, part: TopicPartition, until: int, behind_s: float = _BEHIND_S
) -> bytes:
    """Return the log of a replica up to its high watermark, once that is at `until`, or what there is after a while.

    Raises:
        RefusedRead: the replica goes on refusing for as long.
    """
    deadline_s = time.monotonic() + behind_s
    while True:
        try:
            return await _read_to_the_end(client, node_id, part, until, deadline_s)
        except RefusedRead:  # its role may just be changing
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(0.1)


async def _read_to_the_end(
    client: RawClient, node_id: int, part: TopicPartition, until: int, deadline_s: float
) -> bytes:
    topic = (await client.metadata(metadata_pb2.MetadataRequest(topics=[part.topic]))).topics[0]
    view = topic.partitions[part.partition]
    call = client.fetch_call()
    await call.write(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 40)))
    wanted = log_pb2.FetchPartition(
        subscription_id=1,
        topic_id=topic.topic_id,
        partition=part.partition,
        offset=0,
        leader_epoch=view.leader_epoch,
        last_fetched_epoch=-1,
        from_follower=view.leader != node_id,
    )
    await call.write(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[wanted])))
    data, position, end = b"", 0, -1
    try:
        while end < 0 or position < max(until, end):
            try:
                async with asyncio.timeout(None if end < 0 else max(0.0, deadline_s - time.monotonic())):
                    frames = await client.read_frames(call)
            except TimeoutError:
                if end < 0:
                    raise
                break  # it does not get there: the checker says what is missing
            for frame in frames:
                if frame.head.error.code:
                    raise RefusedRead(f"replica {node_id}, {part}: {frame.head.error.message}")
                data += bytes(frame.records)
                end = max(end, frame.head.high_watermark)
            if found := _entries(data):
                position = found[-1].offset + 1
    finally:
        call.cancel()
    return data


def _entries(data: bytes) -> list[Entry]:
    found: list[Entry] = []
    at = 0
    while at < len(data):
        decoded = decode_batch(data, at)
        values = decoded.columns.column("value").to_pylist()
        found += [Entry(decoded.header.base_offset + index, value) for index, value in enumerate(values)]
        at += decoded.header.size
    return found
