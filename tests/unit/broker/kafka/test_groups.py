"""Offsets that a classic consumer commits."""

from __future__ import annotations

import asyncio

from broker.kafka.groups import offsets_in
from broker.turns import AT_A_TIME


async def test_a_commit_of_very_many_offsets_lets_the_event_loop_do_other_work() -> None:
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    parts = [
        {"partition_index": each, "committed_offset": each, "committed_leader_epoch": 1, "committed_metadata": None}
        for each in range(20 * AT_A_TIME)
    ]
    other = asyncio.create_task(other_work())
    try:
        found = await offsets_in({"topics": [{"name": "t", "partitions": parts}]})
    finally:
        other.cancel()
    assert [each.offset for each in found] == [*range(len(parts))]
    assert turns >= 20
