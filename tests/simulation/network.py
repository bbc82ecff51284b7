"""Connections between processes: each direction keeps its order; everything else may go wrong.

A message takes a random time that depends on the pair of hosts. While a direction is cut (an asymmetric partition cuts
one and not the other) nothing is lost: it arrives once the cut is healed, as TCP retransmits, unless the connection
breaks first. Messages in flight on a broken connection may still arrive, after messages on its successor, because the
receiver had them in its buffers. Each end hears of a break at its own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation

Deliver = Callable[[Any], None]
Hook = Callable[[int, int, object, Callable[[], None]], bool]
"""Sees (from, to, payload, deliver) of what is sent; False keeps it from being sent, `deliver` does it later."""
RETRANSMIT_S = 0.04
LATE_S = (0.0, 0.3, 1.5)
"""How much later it arrives what was under way on a connection that broke."""
KEEPALIVE_S = (0.5, 2.0)
"""When an end that gets no packets any more gives a connection up."""


@dataclass(eq=False)
class _Direction:
    """Messages under way to one end. Invariant: arrival times rise."""

    source: Process
    target: Process
    deliver: Deliver
    queue: deque[tuple[float, Any]] = field(default_factory=deque)
    last_arrival_s: float = 0.0
    pumping: bool = False

    def delay(self, seconds: float) -> None:
        """Let everything under way take so much longer."""
        self.queue = deque((arrival_s + seconds, payload) for arrival_s, payload in self.queue)
        self.last_arrival_s += seconds


class Connection:
    """A connection between two processes, `opener` and `acceptor`."""

    def __init__(self, network: Network, opener: Process, acceptor: Process) -> None:
        self._network = network
        self.broken = False
        self._ends = (opener, acceptor)
        self._directions = (
            _Direction(opener, acceptor, lambda payload: None),
            _Direction(acceptor, opener, lambda payload: None),
        )
        self._on_lost: list[Callable[[], None]] = [lambda: None, lambda: None]
        self._told = [False, False]

    def opener_hears(self, deliver: Deliver, lost: Callable[[], None]) -> None:
        """Set the opener's handlers of messages, and of the news that the connection broke."""
        self._directions[1].deliver, self._on_lost[0] = deliver, lost

    def acceptor_hears(self, deliver: Deliver, lost: Callable[[], None]) -> None:
        """Set the acceptor's handlers of messages, and of the news that the connection broke."""
        self._directions[0].deliver, self._on_lost[1] = deliver, lost

    @property
    def has_more_for_acceptor(self) -> bool:
        """Whether something is under way to the acceptor still, though it be late."""
        return bool(self._directions[0].queue)

    def send(self, payload: object) -> None:
        """Send from the opener to the acceptor."""
        self._send(self._directions[0], payload)

    def answer(self, payload: object) -> None:
        """Send from the acceptor to the opener."""
        self._send(self._directions[1], payload)

    def touches(self, source_id: int, target_id: int) -> bool:
        """Return whether it runs between the two hosts, in either direction."""
        return {end.host.node_id for end in self._ends} == {source_id, target_id}

    def end_died(self, process: Process, with_machine: bool) -> None:
        """One end is gone: what it sent arrives, then the other end hears of it; late if the machine went."""
        if self.broken:
            return
        self.broken = True
        self._network.forget(self)
        mine = self._ends.index(process)
        wait_s = self._network.random.uniform(*KEEPALIVE_S) if with_machine else 0.0
        outgoing = self._directions[mine]
        wait_s = max(wait_s, outgoing.last_arrival_s - self._network.now_s) + self._network.latency_s(outgoing)
        self._tell(1 - mine, wait_s)

    def break_now(self, late_s: float | None = None) -> None:
        """Reset it: what is under way is lost, or comes late; with `late_s`, so much later."""
        if self.broken:
            return
        self.broken = True
        self._network.forget(self)
        for direction in self._directions:
            if late_s is not None:
                direction.delay(late_s)
            elif self._network.random.random() >= self._network.late_share:
                self._network.counts["lost messages"] += len(direction.queue)
                direction.queue.clear()
            else:
                self._network.counts["late messages"] += len(direction.queue)
                direction.delay(self._network.random.choice(LATE_S))
        for end in (0, 1):
            incoming = self._directions[1 - end]
            silent = self._network.is_cut(incoming)
            self._tell(end, self._network.random.uniform(*(KEEPALIVE_S if silent else (0.0002, 0.05))))

    def _tell(self, end: int, wait_s: float) -> None:
        if not self._told[end]:
            self._told[end] = True
            self._ends[end].after(wait_s, self._on_lost[end])

    def _send(self, direction: _Direction, payload: object) -> None:
        if self.broken:
            return
        network = self._network
        if network.hook is not None:
            source, target = direction.source.host.node_id, direction.target.host.node_id
            if not network.hook(source, target, payload, partial(direction.target.run, direction.deliver, payload)):
                return
        arrival_s = network.now_s + network.latency_s(direction)
        direction.last_arrival_s = max(arrival_s, direction.last_arrival_s)
        direction.queue.append((direction.last_arrival_s, payload))
        if not direction.pumping:
            direction.pumping = True
            network.after(direction.last_arrival_s - network.now_s, self._pump, direction)

    def _pump(self, direction: _Direction) -> None:
        network = self._network
        cut = network.is_cut(direction)
        while (queue := direction.queue) and not cut and queue[0][0] <= network.now_s:
            direction.target.run(direction.deliver, queue.popleft()[1])
        if not direction.queue:
            direction.pumping = False
        elif cut:
            network.counts["messages held back by a cut"] += 1
            network.after(RETRANSMIT_S, self._pump, direction)
        else:
            network.after(direction.queue[0][0] - network.now_s, self._pump, direction)


class Network:
    """All connections, and what is wrong with the paths between hosts."""

    def __init__(self, simulation: Simulation) -> None:
        self._scheduler = simulation.scheduler
        self.counts = simulation.counts
        self.random = simulation.random
        self.after = simulation.scheduler.after
        self.cuts: dict[tuple[int, int], int] = {}
        """(from, to) -> how many faults cut it at the moment."""
        self.slow_s: dict[tuple[int, int], float] = {}
        self.base_s = 0.0005
        self.late_share = simulation.chosen("late_share", self.random.choice((0.0, 0.3, 1.0)))
        """How often what was under way on a broken connection arrives nevertheless."""
        self.hook: Hook | None = None
        self._connections: list[Connection] = []

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._scheduler.now_s

    def connect(self, opener: Process, acceptor: Process | None) -> Connection | None:
        """Open a connection; None if the other process is down, or packets get lost in one of the directions."""
        if acceptor is None:
            return None
        there = (opener.host.node_id, acceptor.host.node_id)
        if there in self.cuts or there[::-1] in self.cuts:
            return None
        connection = Connection(self, opener, acceptor)
        self._connections.append(connection)
        for end in (opener, acceptor):
            end.on_death.append(partial(connection.end_died, end))
        return connection

    def forget(self, connection: Connection) -> None:
        """It is broken."""
        self._connections.remove(connection)

    def cut(self, source_id: int, target_id: int) -> None:
        """Let no packets through in one direction."""
        self.cuts[source_id, target_id] = self.cuts.get((source_id, target_id), 0) + 1

    def mend(self, source_id: int, target_id: int) -> None:
        """Take one `cut` back."""
        left = self.cuts.pop((source_id, target_id), 0) - 1
        if left > 0:
            self.cuts[source_id, target_id] = left

    def break_between(self, source_id: int, target_id: int, late_s: float | None = None) -> None:
        """Reset every connection between two hosts; with `late_s`, what is under way comes so much later."""
        for connection in [each for each in self._connections if each.touches(source_id, target_id)]:
            connection.break_now(late_s)

    def heal(self) -> None:
        """Make every path good and fast."""
        self.cuts.clear()
        self.slow_s.clear()

    def heal_among(self, inside: Callable[[int], bool]) -> None:
        """Make the paths between these hosts good and fast."""
        for paths in (self.cuts, self.slow_s):
            for path in [path for path in paths if inside(path[0]) and inside(path[1])]:
                del paths[path]

    def is_cut(self, direction: _Direction) -> bool:
        """Return whether packets get through to the direction's target."""
        return (direction.source.host.node_id, direction.target.host.node_id) in self.cuts

    def latency_s(self, direction: _Direction) -> float:
        """Return how long the next message takes."""
        pair = (direction.source.host.node_id, direction.target.host.node_id)
        return self.slow_s.get(pair, self.base_s) * self.random.uniform(0.5, 2)
