"""A process that runs an application of the SDK, and one life of it after the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from raftlog.errors import RaftlogError
from tests.simulation.dataplane.loop import SimLoop
from tests.simulation.parts import Violation
from tests.simulation.process import Host, Process

if TYPE_CHECKING:
    from tests.simulation.cluster.book import Book
    from tests.simulation.cluster.schedule import ClusterSimulation

REST_S = (0.01, 0.3, 2.0)
"""How long after a death the next life begins."""
PAUSE_S = (0.2, 1.0, 3.0)
QUICK: dict[str, Any] = {
    "request_timeout_ms": 2_000,
    "metadata_max_age_ms": 2_000,
    "retry_backoff_ms": 20,
    "retry_backoff_max_ms": 200,
}
"""Options of all clients: what takes minutes with defaults shall happen within seconds."""


class Application:
    """One host of an application. `work` is the application; it may die or pause at any moment.

    A life that ends by itself is followed by another one; one that is still at work when the simulation winds down is
    to find its end: `finished` says so.
    """

    def __init__(self, simulation: ClusterSimulation, number: int, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.random = random.Random(simulation.random.random())
        self.host = Host(simulation, number)
        self.lives = 0
        self.finished = False
        self.mortal = True
        """Whether the faults may kill it."""
        self.process = Process(self.host)
        simulation.scheduler.after(self.random.uniform(0.0, 1.0), self._begin)

    def __str__(self) -> str:
        return f"{self.name} ({self.host.node_id})"

    @property
    def book(self) -> Book:
        """What applications were told."""
        return self.simulation.book

    @property
    def bootstrap(self) -> list[str]:
        """Addresses of brokers, in an order of its own."""
        return self.simulation.bootstrap(self.random)

    def _begin(self) -> None:
        if self.simulation.over:
            return
        self.lives += 1
        self.process = Process(self.host)
        self.process.after_each = self.look
        self._loop = SimLoop(self.process, self.random)
        self.simulation.loops.append(self._loop)  # no task of it may be collected while others run
        self.simulation.trace(self.host, f"{self.name} begins life {self.lives}")
        self.born()
        self.process.run(self._start, self.process)

    def _start(self, process: Process) -> None:
        task = self._loop.create_task(self.work())
        task.add_done_callback(lambda done: self._ended(process, done))

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            raise Violation(f"{self}: the task of the application was cancelled, though its process was not killed")
        error = task.exception()
        if error is not None:
            raise Violation(f"{self}: {type(error).__name__}: {error}") from error
        if self.process is process:
            self.simulation.trace(self.host, f"{self.name} ends")
            if self.winding_down:
                self.finished = True
            else:
                self._next_life()

    def _next_life(self) -> None:
        if self.process.alive:
            self.process.die(with_machine=False)
        self.simulation.scheduler.after(self.random.choice(REST_S), self._begin)

    @property
    def winding_down(self) -> bool:
        """Whether it is time to come to an end."""
        return self.simulation.winding_down

    # Misfortune

    def kill(self) -> bool:
        """End the process at once; another one begins after a while."""
        if not self.process.alive or not self.lives or self.finished or not self.mortal:
            return False
        self.simulation.trace(self.host, f"{self.name} is killed")
        self.simulation.counts["applications killed"] += 1
        self.died()
        self._next_life()
        return True

    def stand_still(self) -> bool:
        """Let the process stand still for a while."""
        process = self.process
        if not process.alive or process.paused or not self.lives:
            return False
        self.simulation.trace(self.host, f"{self.name} stands still")
        self.simulation.counts["applications stood still"] += 1
        process.pause()
        self.simulation.scheduler.after(self.random.choice(PAUSE_S), self._stir, process)
        return True

    def stir(self) -> None:
        """Resume, if it is paused."""
        self._stir(self.process)

    def _stir(self, process: Process) -> None:
        if process.alive and process.paused:
            self.simulation.trace(self.host, f"{self.name} goes on")
            process.resume()

    # For applications

    async def work(self) -> None:
        """Do what it is there for, until `winding_down` and everything is done."""
        raise NotImplementedError

    def born(self) -> None:
        """A life begins."""

    def died(self) -> None:
        """A life was ended by force."""

    def look(self) -> None:
        """Something has been done."""

    async def think(self, shortest_s: float = 0.0, longest_s: float = 0.2) -> None:
        """Do nothing for a while."""
        await asyncio.sleep(self.random.uniform(shortest_s, longest_s))

    async def attempt(self, call: Awaitable[object]) -> RaftlogError | None:
        """Return the error that refused a call; None: it succeeded."""
        try:
            await call
        except RaftlogError as error:
            self.count(f"{type(error).__name__}")
            return error
        return None

    def count(self, what: str) -> None:
        """Count something that has happened."""
        self.simulation.counts[f"{self.name}: {what}"] += 1
