"""A `raftlog.testing.Cluster` whose servers lose power: they are killed, and all unsynced content is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

from raftlog.testing import Cluster
from raftlog.testing.layout import default_controllers, open_layout
from tests.support.power.disk import Loss, PoweredDisk, powered

_START_TIMEOUT_S: Final = 60.0


class PoweredCluster:
    """A running cluster, and the disks of its servers."""

    def __init__(self, cluster: Cluster, disks: Mapping[int, PoweredDisk], chance: Random) -> None:
        self.cluster = cluster
        self.losses: list[tuple[int, Loss]] = []
        self._disks = disks
        self._chance = chance

    def cut(self, *node_ids: int) -> list[Loss]:
        """Cut the power of servers, of all at once where none is named; they stay off."""
        off = node_ids or tuple(self._disks)
        self._kill(off)
        losses = [self._disks[node_id].cut(self._chance) for node_id in off]
        self.losses += zip(off, losses, strict=True)
        return losses

    def kill(self, *node_ids: int) -> None:
        """Kill servers; their disks keep all written content."""
        self._kill(node_ids)
        for node_id in node_ids:
            self._disks[node_id].settle()

    def _kill(self, node_ids: tuple[int, ...]) -> None:
        running = [node_id for node_id in node_ids if self.cluster.is_running(node_id)]
        for pid in [self.cluster.pid(node_id) for node_id in running]:
            os.kill(pid, signal.SIGKILL)
        while any(self.cluster.is_running(node_id) for node_id in running):
            time.sleep(0.002)

    def report(self) -> str:
        """Return the losses so far, for the message of a failed test."""
        return "\n".join(f"cut of server {node_id}: {loss}" for node_id, loss in self.losses)


@contextmanager
def powered_cluster(
    directory: Path,
    chance: Random,
    *,
    nodes: int = 3,
    lie: str = "",
    sync_us: int = 2_000,
    config: Mapping[str, str | int | float | bool] | None = None,
) -> Iterator[PoweredCluster]:
    """Give a cluster that runs in a directory; `lie` and `sync_us` as `powered` has them."""
    directory.mkdir(parents=True, exist_ok=True)
    open_layout(directory, nodes, default_controllers(nodes), False, 0)  # before there is anything else
    disks = {node_id: PoweredDisk(directory / f"node-{node_id}") for node_id in range(1, nodes + 1)}
    with (
        powered(sync_us=sync_us, lie=lie),
        Cluster(nodes=nodes, directory=directory, config=config, start_timeout_s=_START_TIMEOUT_S) as cluster,
    ):
        yield PoweredCluster(cluster, disks, chance)
