"""What a broker asks the controller for, and when it keeps quiet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from broker.isr_changes import IsrChanges
from broker.partition import Partition
from raftlog.v1 import records_pb2


class _Lagging:
    """A partition whose follower has not been heard of for too long."""

    asked = 0

    def wanted_isr(self, active: Mapping[int, int]) -> None:
        self.asked += 1


def test_a_leader_without_a_lease_asks_for_nothing() -> None:
    """It may be one that hears nobody, and is heard: its followers are as they should be, and it would put them out
    of the ISR one moment before somebody else has to be elected from it."""

    async def propose(command: records_pb2.MetadataCommand) -> Any:
        raise AssertionError("nothing is wanted")

    lease = [True]
    partition = _Lagging()
    changes = IsrChanges(1, 1, propose, dict, lambda: lease[0])

    async def look() -> None:
        changes.look(cast(Partition, partition))
        changes.look_at_all([cast(Partition, partition)])

    asyncio.run(look())
    assert partition.asked == 2
    lease[0] = False
    asyncio.run(look())
    assert partition.asked == 2
