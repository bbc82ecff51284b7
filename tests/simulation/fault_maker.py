"""When faults come, and which; how they are left out, and how everything is mended: a core first, then the rest.

Faults have a stream of random numbers of their own, and each fault has one for itself. So a fault that is left out
(`Plan.without`) changes neither which faults come after it and when, nor what these draw.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.process import Host

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation

REBOOT_S = (0.01, 0.3, 2.0)
FIRST_CLIENT = 100
"""Hosts with a higher number are clients'; no fault of this module is about them."""

Fault = Callable[[], bool | None]
"""Does something bad; returns False if it has come to nothing, as there was nothing to do it to."""


class Drawn(NamedTuple):
    """A fault as it was drawn; `happened`: it was not left out, and had something to be done to."""

    number: int
    at_s: float
    name: str
    happened: bool


def name_of(fault: Fault) -> str:
    """Return what scenarios call a fault."""
    return fault.__name__.strip("_").replace("_", "-")


class FaultMaker:
    """Makes faults until `heal_core`, or `stop`; then it mends them. Subclasses define the faults."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._network = simulation.network
        self._plan = simulation.parts.plan
        self._chance = random.Random(f"faults {simulation.seed}")
        """Decides which faults come, and when."""
        self._random = self._chance
        """Of the fault that is being made."""
        self._stopped = False
        self._phase = 0
        """Of another phase nothing happens any more, neither mending nor breaking."""
        self._kinds: list[tuple[Fault, float]] = []
        self._weights: list[float] = []
        self._mean_pause_s = 0.5
        self.drawn: list[Drawn] = []

    def names(self) -> list[str]:
        """Return what scenarios may call the faults."""
        return [name_of(fault) for fault, _ in self._kinds]

    @property
    def counts(self) -> Counter[str]:
        """How often each fault has happened."""
        return Counter(f"fault {each.name}" for each in self.drawn if each.happened)

    def start(self) -> None:
        """Begin, after a while in which a first leader is elected."""
        if self._plan.weights is not None:
            self._weights = [self._plan.weights.get(name, 0.0) for name in self.names()]
        self._mean_pause_s = self._plan.pace_s or self._mean_pause_s
        if any(self._weights):
            self._after(self._chance.uniform(1.0, 3.0), self._next)

    def _next(self) -> None:
        if self._stopped:
            return
        [(fault, _)] = self._chance.choices(self._kinds, self._weights)
        pause_s = self._chance.expovariate(1 / self._mean_pause_s)
        number = len(self.drawn) + 1
        happened = number not in self._plan.without
        at_s = self._simulation.scheduler.now_s
        self.drawn.append(Drawn(number, at_s, name_of(fault), happened))  # before it is known what comes of it
        if happened:
            self._random = random.Random(f"fault {number} of {self._simulation.seed}")
            self._simulation.trace(None, f"fault {number}: {name_of(fault)}")
            if fault() is False:
                self.drawn[-1] = self.drawn[-1]._replace(happened=False)
        self._after(pause_s, self._next)

    def _after(self, delay_s: float, action: Callable[..., object], *arguments: object) -> None:
        self._simulation.scheduler.after(delay_s, self._if_still, self._phase, action, arguments)

    def _if_still(self, phase: int, action: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if phase == self._phase:
            action(*arguments)

    def _trace(self, host: Host | None, what: str) -> None:
        self._simulation.trace(host, what)

    # Mending

    def heal_core(self, core: Collection[int]) -> None:
        """Make no more faults, and mend a core: its hosts, and all paths between them.

        The others stay as broken as they are, and become so if they are not: down, powerless, standing still, out of
        reach, or with disks that fail.
        """
        self._stopped = True
        self._phase += 1
        self._random = random.Random(f"core of {self._simulation.seed}")
        self._network.heal_among(lambda node_id: node_id in core or node_id >= FIRST_CLIENT)
        for host in self._simulation.hosts:
            if host.node_id in core:
                self._heal(host)
        for host in self._simulation.hosts:
            if host.node_id not in core:
                self._break_for_good(host, core)

    def _break_for_good(self, host: Host, core: Collection[int]) -> None:
        how = self._random.choice(("down", "powerless", "standing still", "out of reach", "failing"))
        self._simulation.trace(host, f"not of the core: {how}")
        self._simulation.counts[f"outside the core: {how}"] += 1
        match how:
            case "down" | "powerless":
                host.held = True
                host.stop(f"stays {how}", power=how == "powerless")
            case "standing still" if host.process is not None:
                host.process.pause()
            case "failing":
                self._fail_disks(host)
            case _:
                for node_id in sorted(core):
                    self._network.cut(host.node_id, node_id)
                    self._network.cut(node_id, host.node_id)
                    self._network.break_between(host.node_id, node_id)

    @staticmethod
    def _fail_disks(host: Host) -> None:
        host.disk.broken = True

    def stop(self) -> None:
        """Make no more faults, and mend everything that lasts."""
        self._stopped = True
        self._phase += 1
        self._network.heal()
        for host in self._simulation.hosts:
            self._heal(host)

    def _heal(self, host: Host) -> None:
        """Mend what lasts on one host, and have it run."""
        host.held = False
        self._mend(host)
        if host.process is not None and host.process.paused:
            host.process.resume()
        self._after(self._random.choice(REBOOT_S), host.boot)

    @staticmethod
    def _mend(host: Host) -> None:
        """Mend its disks."""
        host.sync_s = (0.0002, 0.0005, 0.003)
        host.disk.full = host.disk.broken = False
