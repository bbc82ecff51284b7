"""What the registry works with: who fetches for it, what a topic's configs say, and work that waits for the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, Protocol

from broker.log.config import LogConfig
from broker.partition_logs import PartitionKey
from raftmeta.image import MetadataImage, TopicImage
from raftmeta.topic_configs import THROTTLED_REPLICAS_OF_FOLLOWER, THROTTLED_REPLICAS_OF_LEADER
from replication.ports import FollowedPartition

logger = logging.getLogger(__name__)

MIN_INSYNC_REPLICAS = "min.insync.replicas"
MAX_AT_THE_DISK: Final = 4
"""Logs that are made or taken away at a time."""
SLICE_S: Final = 0.004
"""How long metadata is applied before others have their turn on the event loop."""


class Fetchers(Protocol):
    """Who keeps the partitions that this broker follows in step with their leaders."""

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Fetch from this leader; the same leader in the same `partition.leader_epoch` as before changes nothing."""
        ...

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Fetch no more; what is not followed is passed over."""
        ...


class NoFetchers:
    """Until `serve`: a broker that fetches nothing."""

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Do nothing."""

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Do nothing."""


class TopicRules(NamedTuple):
    """What a topic's configs say to its partitions."""

    log: LogConfig
    min_insync_replicas: int
    throttled_leaders: str
    throttled_followers: str


def topic_rules(
    image: MetadataImage, topic: TopicImage, topic_defaults: Mapping[str, str], broker_id: int
) -> TopicRules:
    """Return the rules of a topic on one broker; `topic_defaults` come from its file.

    min.insync.replicas is what the controllers judge by, or more, whatever that file says (KAFKA-16540).

    Raises:
        InvalidConfig: a value that is not allowed.
    """
    configs = {**topic_defaults, **image.topic_configs(topic.name, broker_id)}
    return TopicRules(
        LogConfig.from_topic_configs(configs),
        max(image.min_insync_replicas(topic), int(configs.get(MIN_INSYNC_REPLICAS, "1"))),
        configs.get(THROTTLED_REPLICAS_OF_LEADER, ""),
        configs.get(THROTTLED_REPLICAS_OF_FOLLOWER, ""),
    )


class RulesCache:
    """The rules of topics, worked out again only when a config has changed: images share what has not."""

    def __init__(self, broker_id: int) -> None:
        self._broker_id = broker_id
        self._known: dict[bytes, tuple[tuple[object, ...], TopicRules]] = {}

    def rules(self, image: MetadataImage, topic: TopicImage, topic_defaults: Mapping[str, str]) -> TopicRules:
        """Return what `topic_rules` does.

        Raises:
            InvalidConfig: a value that is not allowed.
        """
        sources = (topic.configs, image.configs, topic_defaults)
        known = self._known.get(topic.topic_id)
        if known is not None and all(now is then for now, then in zip(sources, known[0], strict=True)):
            return known[1]
        rules = topic_rules(image, topic, topic_defaults, self._broker_id)
        self._known[topic.topic_id] = (sources, rules)
        return rules

    def forget(self, topic_id: bytes) -> None:
        """Drop what is known of a topic that is gone."""
        self._known.pop(topic_id, None)


class DiskWork:
    """One task for each partition that has to wait for the disk, `MAX_AT_THE_DISK` of them at a time.

    States of a partition: idle -> working (`ask`) -> idle, or working once more when it was asked for meanwhile: `work`
    looks at the newest metadata each time. `on_done` is called whenever one of them is idle again.
    """

    def __init__(self, work: Callable[[PartitionKey], Awaitable[None]], on_done: Callable[[], None]) -> None:
        self._work = work
        self._on_done = on_done
        self._room = asyncio.Semaphore(MAX_AT_THE_DISK)
        self._tasks: dict[PartitionKey, asyncio.Task[None]] = {}
        self._again: set[PartitionKey] = set()
        self._since: dict[PartitionKey, int] = {}
        """The metadata offset that asked first; they only rise, so the first one here is the least."""

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._tasks

    @property
    def keys(self) -> list[PartitionKey]:
        """The partitions that are worked on."""
        return list(self._tasks)

    @property
    def oldest_offset(self) -> int | None:
        """The least metadata offset of which something is not done yet."""
        return next(iter(self._since.values()), None)

    def ask(self, key: PartitionKey, offset: int | None) -> None:
        """Have the work done, for the metadata at `offset`; None: nobody waits for it. Returns at once."""
        if offset is not None:
            self._since.setdefault(key, offset)
        if key in self._tasks:
            self._again.add(key)
        else:
            self._tasks[key] = asyncio.get_running_loop().create_task(self._run(key), name="partition-disk-work")

    async def _run(self, key: PartitionKey) -> None:
        try:
            async with self._room:
                while True:
                    self._again.discard(key)
                    await self._work(key)
                    if key not in self._again:
                        break
        except Exception:  # a bug: `work` answers for its own errors
            logger.exception("work at the disk failed")
        finally:
            self._tasks.pop(key, None)
            self._since.pop(key, None)
        self._on_done()

    async def close(self) -> None:
        """Stop all of it."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class OffsetWaiters:
    """Who waits until an offset that only rises has come far enough."""

    def __init__(self, offset: Callable[[], int]) -> None:
        self._offset = offset
        self._waiting: dict[asyncio.Future[None], int] = {}

    async def wait(self, offset: int) -> None:
        """Return once it has reached `offset`."""
        if self._offset() >= offset:
            return
        reached = asyncio.get_running_loop().create_future()
        self._waiting[reached] = offset
        try:
            await reached
        finally:
            self._waiting.pop(reached, None)

    def moved(self) -> None:
        """Look who has waited long enough."""
        if not self._waiting:
            return
        now = self._offset()
        for reached, offset in self._waiting.items():
            if offset <= now and not reached.done():
                reached.set_result(None)


class Pace:
    """Gives others their turn on the event loop, every `SLICE_S`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._until = loop.time()

    async def keep(self) -> None:
        """Return at once, or in the next loop round when it has been long."""
        if self._loop.time() >= self._until:
            await asyncio.sleep(0)
            self._until = self._loop.time() + SLICE_S
