"""A broker's parts without its process: real logs on a real directory, a disk that waits when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from broker.clock import Clock, SystemClock
from broker.log.config import LogConfig
from broker.log.flush import GroupCommit
from broker.log.manager import LogManager
from broker.log.storage import OsStorage, Storage
from broker.replicas.replica_manager import ReplicaManager
from broker.server.lease import Wake
from raftlog.errors import RaftlogError
from raftlog.format.wire import Frame
from raftlog.v1 import log_pb2, records_pb2
from raftmeta.decide import CommandResult
from raftmeta.image import BrokerImage, MetadataImage, PartitionImage, TopicImage, partition_record
from replication.ports import FollowedPartition

T = TypeVar("T")
TOPIC_ID = b"topic-id-16bytes"
WAIT_S = 60.0


class HeldDisk(Executor):
    """Runs work at once, or keeps it until `release` while `held`."""

    def __init__(self) -> None:
        self.held = False
        self._kept: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take a piece of work."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if self.held:
            self._kept.append(run)
        else:
            run()
        return future

    @property
    def waiting(self) -> int:
        """How many calls are kept."""
        return len(self._kept)

    def release(self) -> None:
        """Run the kept calls, and run all later ones at once."""
        self.held = False
        kept, self._kept = self._kept, []
        for run in kept:
            run()


class SwitchedLease:
    """A lease that is there or not, as the test says."""

    def __init__(self) -> None:
        self._valid = True
        self._waiting: dict[Wake, None] = {}

    def valid(self) -> bool:
        """Whether the test lets the broker serve."""
        return self._valid

    def call_when_renewed(self, wake: Wake) -> None:
        """Call `wake` when the lease is back."""
        self._waiting[wake] = None

    def stop_waiting(self, wake: Wake) -> None:
        """Forget `wake`."""
        self._waiting.pop(wake, None)

    @property
    def waiting(self) -> int:
        """How many wait for the lease."""
        return len(self._waiting)

    def end(self) -> None:
        """Take the lease away."""
        self._valid = False

    def renew(self) -> None:
        """Give it back."""
        self._valid = True
        waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()


class Requests(Generic[T]):
    """The client's side of a stream."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()
        self.taken = 0

    def send(self, request: T) -> None:
        """Put a request on the stream."""
        self._queue.put_nowait(request)

    def end(self) -> None:
        """Half-close."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[T]:
        while (request := await self._queue.get()) is not None:
            self.taken += 1
            yield request


class Writer(Generic[T]):
    """The server's side: keeps the written messages; `stalled`: like a client that reads nothing."""

    def __init__(self) -> None:
        self.stalled = False
        self.written: list[T] = []
        self._changed = asyncio.Condition()

    async def write(self, message: T) -> None:
        """Take a message, and return when the client has it."""
        async with self._changed:
            self.written.append(message)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: not self.stalled)

    async def resume(self) -> None:
        """Read again."""
        async with self._changed:
            self.stalled = False
            self._changed.notify_all()

    async def wait_for(self, count: int) -> list[T]:
        """Return the written messages once there are `count` of them."""
        async with self._changed:
            async with asyncio.timeout(WAIT_S):
                await self._changed.wait_for(lambda: len(self.written) >= count)
            return self.written


class Followed:
    """Stands in for the fetchers: holds the partitions that the registry wants to follow now."""

    def __init__(self) -> None:
        self.now: dict[tuple[bytes, int], tuple[FollowedPartition, int]] = {}
        self.calls = 0

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Follow."""
        self.calls += 1
        self.now[partition.topic_id, partition.partition] = (partition, leader_id)

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Stop following."""
        self.now.pop((topic_id, partition), None)


class Proposals:
    """Stands in for the controller: keeps what it is asked for, and answers as the test says."""

    def __init__(self) -> None:
        self.commands: list[records_pb2.MetadataCommand] = []
        self.refusal: RaftlogError | None = None

    async def __call__(self, command: records_pb2.MetadataCommand) -> CommandResult:
        """Take a command."""
        self.commands.append(command)
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        return CommandResult(1 << 40)  # no image of these tests comes so far


class Parts:
    """Logs, group commit and registry of one node, with one topic. Make it inside a running loop."""

    def __init__(
        self,
        root: Path,
        *,
        partitions: int = 1,
        storage: Storage | None = None,
        dirs: int = 1,
        node_id: int = 1,
        lag_time_max_ms: float = 10_000.0,
        clock: Clock | None = None,
    ) -> None:
        self.disk = HeldDisk()
        self.clock: Clock = clock or SystemClock()
        self.logs = LogManager(
            storage or OsStorage(), [f"{root}/logs-{number}" for number in range(dirs)], LogConfig(), self.clock
        )
        self.logs.open(cluster_id="test", node_id=node_id)
        self.lease = SwitchedLease()
        self.registry = ReplicaManager(
            node_id, self.logs, GroupCommit(self.disk), self.clock, {}, self.disk, self.lease
        )
        self.followed = Followed()
        self.proposals = Proposals()
        self.registry.serve(
            broker_epoch=1,
            propose=self.proposals,
            fetchers=self.followed,
            replica_lag_time_max_ms=lag_time_max_ms,
        )
        self.logs.on_dir_offline = self.registry.on_dir_offline
        self.image = image_with(partitions, offset=1)

    async def __aenter__(self) -> Parts:
        self.registry.start(self.image)
        await self.registry.wait_applied(self.image.offset)
        return self

    async def apply(self, image: MetadataImage, *, whole: bool = False) -> None:
        """Have the registry act on another image: on its partitions' records, or on all of it."""
        self.registry.on_metadata(image, None if whole else partition_records(image))
        await self.registry.wait_applied(image.offset)

    async def __aexit__(self, *exception: object) -> None:
        self.disk.release()
        await self.registry.stop()
        self.logs.close()


def image_with(
    partitions: int,
    *,
    offset: int,
    leader_epoch: int = 3,
    leader: int = 1,
    replicas: tuple[int, ...] = (1,),
    isr: tuple[int, ...] | None = None,
    partition_epoch: int = 0,
) -> MetadataImage:
    """Return an image with one topic, all partitions of which `leader` leads, and brokers 1 to 3.

    `isr`: all replicas unless it is given.
    """
    topic = TopicImage(
        "t",
        TOPIC_ID,
        tuple(
            PartitionImage(
                number,
                replicas=replicas,
                isr=replicas if isr is None else isr,
                leader=leader,
                leader_epoch=leader_epoch,
                partition_epoch=partition_epoch,
            )
            for number in range(partitions)
        ),
    )
    brokers = {number: BrokerImage(number, bytes(16), 1, f"broker-{number}", 9090 + number) for number in (1, 2, 3)}
    return MetadataImage(offset=offset, brokers=brokers, topics={TOPIC_ID: topic}, topic_id_by_name={"t": TOPIC_ID})


def partition_records(image: MetadataImage) -> list[records_pb2.MetadataRecord]:
    """Return the records that create the topic's partitions as they are in the image."""
    return [partition_record(TOPIC_ID, part) for part in image.topics[TOPIC_ID].partitions]


def removal() -> records_pb2.MetadataRecord:
    """Return the record that removes the topic."""
    return records_pb2.MetadataRecord(remove_topic=records_pb2.RemoveTopicRecord(topic_id=TOPIC_ID))


def records_of(frames: list[list[Frame]]) -> list[tuple[int, bytes]]:
    """Return (subscription id, records) of all frames that carry records."""
    return [(f.head.subscription_id, bytes(f.records)) for message in frames for f in message if len(f.records)]


ProduceWriter = Writer[log_pb2.ProduceResponse]
FetchWriter = Writer[list[Frame]]
