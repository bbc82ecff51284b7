"""The coordinators of one internal topic on this broker: a shard for each partition that it leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar, cast

from broker.clock import Clock
from broker.coordinator.core import Core
from broker.coordinator.shard import Shard
from broker.lease import Lease
from broker.partition import Partition
from broker.partition_roles import PartitionRoles

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
TopicsT = TypeVar("TopicsT")


class Shards(Generic[CommandT, TopicsT]):
    """Makes a shard when a term as leader begins, and ends it with the term. `on_term` is the registry's hook."""

    def __init__(
        self,
        topic: str,
        make_core: Callable[[int], Core[CommandT, TopicsT]],
        topics: Callable[[], TopicsT],
        *,
        executor: Executor,
        clock: Clock,
        lease: Lease,
    ) -> None:
        self.topic = topic
        self._make_core = make_core
        self._topics = topics
        self._executor = executor
        self._clock = clock
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._shards: dict[int, Shard[CommandT, TopicsT]] = {}

    def find(self, partition: int) -> Shard[CommandT, TopicsT] | None:
        """Return the shard of a partition; None: this broker does not lead it."""
        return self._shards.get(partition)

    def shards(self) -> list[tuple[int, Shard[CommandT, TopicsT]]]:
        """Return (partition, shard) of all that are here, by partition."""
        return sorted(self._shards.items())

    def on_term(self, partition: PartitionRoles) -> None:
        """Look at a partition of any topic whose term as leader began or ended; returns at once.

        What comes of it happens in the next round of the loop: the partition is in the midst of a change.
        """
        if partition.log.topic == self.topic:
            self._loop.call_soon(self._take, cast(Partition, partition))

    def _take(self, partition: Partition) -> None:
        number = partition.log.partition
        shard = self._shards.get(number)
        if shard is not None and shard.partition is partition and shard.leader_epoch == partition.leader_epoch:
            if partition.leads:
                return
        elif shard is not None and shard.partition is not partition and not partition.leads:
            return  # the end of a partition that another one has followed already
        if shard is not None:
            del self._shards[number]
            shard.end()
        if partition.leads:
            begun = Shard(
                partition,
                lambda: self._make_core(number),
                self._topics,
                executor=self._executor,
                clock=self._clock,
                lease=self._lease,
            )
            self._shards[number] = begun
            begun.begin()

    def topics_changed(self) -> None:
        """Have every coordinator look at the cluster's topics again."""
        for shard in self._shards.values():
            shard.topics_changed()

    def close(self) -> None:
        """End all of them."""
        shards, self._shards = self._shards, {}
        for shard in shards.values():
            shard.end()
