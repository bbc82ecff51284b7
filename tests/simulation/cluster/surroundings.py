"""The clocks, ids and channels that the SDK and services use, replaced by those of the simulated process that runs.

The SDK gets these only from the module `time`, from `uuid.uuid4` and from `open_channel`. So their names are replaced
in all of its modules while a simulation runs; a new module is covered as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from grpc import aio

from raftlog._client.connections import use_channels
from tests.simulation.cluster.channel import SimChannel
from tests.simulation.dataplane.loop import SimLoop

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation

PACKAGES = ("raftlog.", "broker.")
ELSEWHERE = ("raftlog.cli", "raftlog.testing", "raftlog.v1")


class _Time:
    """The module `time`, as the process that runs sees it."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        self._simulation = simulation

    def monotonic(self) -> float:
        return self._simulation.clock_s()

    perf_counter = monotonic

    def time(self) -> float:
        return self._simulation.wall_ms() / 1_000

    def time_ns(self) -> int:
        return self._simulation.wall_ms() * 1_000_000


class _Ids:
    """The module `uuid`, of which `uuid4` is all that is asked for."""

    UUID = uuid.UUID

    def __init__(self, chance: random.Random) -> None:
        self._random = chance

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128), version=4)


def modules() -> Iterator[tuple[str, Any]]:
    """Yield the modules in which something is exchanged."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(PACKAGES) and not name.startswith(ELSEWHERE):
            yield name, module


@contextlib.contextmanager
def simulated(simulation: ClusterSimulation) -> Iterator[list[str]]:
    """Let clocks, ids and channels be the simulation's; gives the names of the replaced ones."""
    clock, ids = _Time(simulation), _Ids(random.Random(simulation.random.random()))
    stand_ins: list[tuple[Any, Any]] = [
        (time, clock),
        (time.time_ns, clock.time_ns),
        (time.monotonic, clock.monotonic),
        (uuid, ids),
        (uuid.uuid4, ids.uuid4),
    ]

    def open_channel(address: str) -> aio.Channel:
        loop = cast(SimLoop, asyncio.get_running_loop())
        return cast(aio.Channel, SimChannel(loop.process, simulation, address))

    undo: list[tuple[Any, str, Any]] = []
    before = use_channels(open_channel)
    try:
        for _, module in modules():
            for attribute, value in list(vars(module).items()):
                for real, stand_in in stand_ins:
                    if value is real:
                        undo.append((module, attribute, value))
                        setattr(module, attribute, stand_in)
        yield [f"{module.__name__}.{attribute}" for module, attribute, _ in undo]
    finally:
        use_channels(before)
        for module, attribute, value in undo:
            setattr(module, attribute, value)
