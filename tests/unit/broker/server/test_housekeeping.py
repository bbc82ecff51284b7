"""The rounds of a broker's periodic work, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any
from unittest.mock import create_autospec

from broker.config.config import BrokerConfig
from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.replicas.replica_manager import ReplicaManager
from broker.server.housekeeping import housekeep
from tests.support.log_driver import LOG_DIR, TOPIC_ID
from tests.support.memory_storage import MemoryStorage
from tests.support.virtual_time import LoopClock, run


class Inline(Executor):
    """Does the work of the disk threads at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Rounds(LogManager):
    """Notes when the rounds are."""

    rounds_s: list[int]

    def run_housekeeping_once(self, now_ms: int) -> None:
        self.rounds_s.append(round(asyncio.get_running_loop().time()))
        super().run_housekeeping_once(now_ms)


async def rounds_of_an_hour(full_from_s: int, full_until_s: int) -> list[int]:
    """Return the seconds at which rounds were, if writes are refused for want of space in a span of time."""
    clock = LoopClock()
    logs = Rounds(MemoryStorage(), [LOG_DIR], LogConfig(), clock)
    logs.rounds_s = []
    logs.open(cluster_id="cluster", node_id=1)
    log = logs.create("t", TOPIC_ID, 0)
    registry = create_autospec(ReplicaManager, instance=True)
    registry.flushes_by_time = registry.has_full_followers = False
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": [LOG_DIR], "log.cleaner.enable": False})
    work = asyncio.create_task(housekeep(config, clock, logs, registry, Inline()))
    for second in range(3_600):
        if full_from_s <= second < full_until_s:
            log.log_dir.judge(OSError(errno.ENOSPC, "no space"), "append")
        await asyncio.sleep(1)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    return logs.rounds_s


def test_retention_comes_round_sooner_while_the_disk_is_full() -> None:
    rounds_s = run(rounds_of_an_hour(1_000, 1_100))
    gaps_s = {later: later - earlier for earlier, later in itertools.pairwise(rounds_s)}
    assert 9 <= sum(1_000 <= at_s <= 1_110 for at_s in gaps_s) <= 11, rounds_s
    assert all(299 <= gap_s <= 302 for at_s, gap_s in gaps_s.items() if not 1_000 <= at_s <= 1_110)
