"""A host, and the process that runs on it: its clock, its disk, and how the process dies, pauses and resumes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.disk import SimDisk
from tests.simulation.parts import Violation
from tests.support.memory_storage import PowerLoss

if TYPE_CHECKING:
    from tests.simulation.dataplane.disk import LogDisk
    from tests.simulation.schedule import Simulation

Action = Callable[..., object]


class ProcessGone(Exception):
    """Ends the work of a process that died in the middle of it."""


class Process:
    """One life of a host's process. Everything that reaches it, messages and timers, comes in through `run`.

    running --pause--> paused --resume--> running; either --(kill, power cut, fail-stop)--> dead
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.simulation = host.simulation
        self.alive = True
        self.paused = False
        self.on_death: list[Callable[[bool], None]] = []
        """Told whether the machine went down, too: then the peers get no goodbye."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that runs in it, for parts of the product that ask for one."""
        self.after_each: Callable[[], None] | None = None
        """Looks at the process whenever it has done something."""
        self._waiting: deque[tuple[Action, tuple[Any, ...]]] = deque()

    def run(self, action: Action, *arguments: object) -> None:
        """Let the process do something now, or as soon as it goes on."""
        if not self.alive:
            return
        if self.paused:
            self._waiting.append((action, arguments))
            return
        self.simulation.enter(self.host)
        if self.loop is not None:
            asyncio._set_running_loop(self.loop)
        try:
            action(*arguments)
            if self.after_each is not None and self.alive:
                self.after_each()
        except (ProcessGone, PowerLoss):
            pass
        except Violation:
            raise
        except Exception as error:  # the process decides what it survives: it stops at what reaches this place
            if not self.host.disk_is_dead:
                self.simulation.process_failed(self.host, error)
            self.host.stop(f"stopped by {type(error).__name__}: {error}")
            return
        finally:
            if self.loop is not None:
                asyncio._set_running_loop(None)
        if self.host.disk_is_dead and self.alive:
            self.host.stop("died within a disk operation")

    def after(self, delay_s: float, action: Action, *arguments: object) -> None:
        """Run `action` in this process once `delay_s` has passed, if it still lives."""
        self.simulation.scheduler.after(delay_s, self.run, action, *arguments)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: timers that are due and messages that wait come first, in the order in which they came."""
        self.paused = False
        while self._waiting and self.alive and not self.paused:
            action, arguments = self._waiting.popleft()
            self.run(action, *arguments)

    def die(self, with_machine: bool) -> None:
        """End the process; none of its work continues."""
        self.alive = False
        self._waiting.clear()
        for action in self.on_death:
            action(with_machine)


class Host:
    """One machine: what outlives its processes. Its clock runs a little fast or slow and shows any time."""

    def __init__(self, simulation: Simulation, node_id: int) -> None:
        chance = simulation.random
        self.simulation = simulation
        self.node_id = node_id
        self.disk = SimDisk(f"/node-{node_id}")
        self.process: Process | None = None
        self.boots = 0
        self.drift = chance.uniform(-500e-6, 500e-6)
        self._clock_starts_s = chance.uniform(10, 10_000)
        self.wall_offset_ms = chance.choice((0, 0, 1, -1)) * chance.randrange(3_600_000)
        self.sync_s: tuple[float, ...] = (0.0002, 0.0005, 0.003)
        """How long a sync takes: one of these."""
        self.held = False
        """It stays down until it is released."""
        self.clean_mark: int | None = None
        """The broker epoch of a process that stopped cleanly, for the next one."""
        self.log_disk: LogDisk | None = None
        """Where a whole broker has its logs."""

    def __str__(self) -> str:
        return f"node {self.node_id}"

    @property
    def alive(self) -> bool:
        """Whether a process runs or is paused here."""
        return self.process is not None

    @property
    def running(self) -> bool:
        """Whether a process runs here."""
        return self.process is not None and not self.process.paused

    @property
    def disk_is_dead(self) -> bool:
        """Whether the process has been stopped by one of its disks, in the midst of an operation."""
        return self.disk.dead or (self.log_disk is not None and self.log_disk.dead)

    def local_s(self) -> float:
        """Return the time of this host's monotonic clock."""
        return self._clock_starts_s + self.simulation.scheduler.now_s * (1 + self.drift)

    def wall_ms(self) -> int:
        """Return the time of day on this host, which may be an hour off."""
        return int(1_700_000_000_000 + self.wall_offset_ms + self.local_s() * 1_000)

    def boot(self) -> None:
        """Start a process, if there is none."""
        if self.process is not None or self.held:
            return
        self.boots += 1
        self.process = Process(self)
        self.simulation.trace(self, "boots")
        self.process.run(self.simulation.start_process, self.process)

    def stop(self, why: str, power: bool = False) -> None:
        """End the process; with `power`, the machine loses unsynced bytes."""
        process, self.process = self.process, None
        if process is None:
            return
        self.simulation.trace(self, why)
        process.die(power)
        if power:
            self.disk.lose_power(self.simulation.random)
        else:
            self.disk.process_died()
        if self.log_disk is not None:
            self.log_disk.process_died(power)
        self.simulation.process_ended(self)
