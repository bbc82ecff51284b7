"""A thousand brokers and three controllers that take time for what they do: what holds, and what breaks first.

Elsewhere in the simulation a process needs no time. Here each message costs the controller that takes or sends it what
`./dev bench scale` measures (docs/quorum.md), one message after the other as in an event loop. A run with a tenth of
the brokers and ten times the costs has the same load, and is the short form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from raftmeta.image import MetadataImage
from raftmeta.quorum.sessions import BrokerSessions
from raftmeta.raft import consensus
from tests.simulation import broker
from tests.simulation.controller import Heartbeat
from tests.simulation.parts import Parts
from tests.simulation.schedule import Simulation

HEARTBEAT_COST_S: Final = 380e-6
COSTS_S: Final[dict[type, float]] = {
    Heartbeat: HEARTBEAT_COST_S,
    MetadataImage: 110e-6,  # of a change, for each broker that watches
    type(None): 8e-3,  # a broker begins to watch: all that it costs when one comes to another controller
}
"""What a message costs its controller, in CPU time."""
PATIENCE_S: Final = 60.0
CALM_S: Final = 10.0
TAKES_OVER_S: Final = 30.0
STEP_S: Final = 0.1


class Crowd:
    """A cluster of `brokers`, of which `played` are simulated, each with the costs of several.

    Heartbeats come every `heartbeat_s`; sessions and leases have the defaults' ratios to that.
    """

    def __init__(self, brokers: int, heartbeat_s: float, played: int, seed: int) -> None:
        parts = Parts(sessions=lambda: BrokerSessions(5_000 * heartbeat_s, 4_000 * heartbeat_s))
        self.simulation = Simulation(seed, parts=parts, broker_ids=range(1, played + 1))
        self.simulation.network.hook = self._hook
        self._slow = brokers / played
        self._free_at_s: dict[int, float] = defaultdict(float)
        """By controller, when it has done what it has been given."""
        self._newest: dict[tuple[int, int], Callable[[], None]] = {}
        """By controller and watching broker, what delivers the image that waits; a newer one takes its place."""
        self.busy_s: dict[int, float] = defaultdict(float)
        """By controller, the CPU time that it has used."""

    @classmethod
    @contextmanager
    def of(cls, brokers: int, heartbeat_s: float, played: int, seed: int) -> Iterator[Crowd]:
        """Start the cluster in virtual time."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HEARTBEAT_S", "EAGER_HEARTBEAT_S"):  # a real broker has one interval
                patch.setattr(broker, name, heartbeat_s)
            crowd = cls(brokers, heartbeat_s, played, seed)
            before = consensus.use_clock(crowd.simulation.clock_s)
            try:
                crowd.simulation.start()
                yield crowd
            finally:
                consensus.use_clock(before)

    def _hook(self, source: int, target: int, payload: object, deliver: Callable[[], None]) -> bool:
        """Let a controller take its time for what it receives, and for images that it sends."""
        controllers, scheduler = self.simulation.voters, self.simulation.scheduler
        sends = isinstance(payload, MetadataImage)
        controller = source if sends else target
        if controller not in controllers:
            return True
        if sends:
            waits = (source, target) in self._newest
            self._newest[source, target] = deliver
            if waits:
                return False
        cost_s = self._slow * COSTS_S.get(type(payload), 0.0)
        self.busy_s[controller] += cost_s
        self._free_at_s[controller] = free_at_s = max(self._free_at_s[controller], scheduler.now_s) + cost_s
        turn = (lambda: self._newest.pop((source, target))()) if sends else deliver
        scheduler.after(free_at_s - scheduler.now_s + self.simulation.network.base_s, turn)
        return False

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.simulation.scheduler.run_until(self.simulation.scheduler.now_s + seconds)

    def without_lease(self) -> int:
        """Return how many brokers may not acknowledge now."""
        leased = 0
        for each in self.simulation.brokers.values():
            self.simulation.enter(each.host)
            leased += each.has_lease()
        return len(self.simulation.broker_ids) - leased

    def fenced(self) -> int:
        """Return how many brokers are fenced."""
        return sum(each.fenced for each in self.simulation.invariants.truth.brokers.values())

    def kill_the_controller(self) -> None:
        """Kill the process of the active controller, for good."""
        leader = self.simulation.leader()
        assert leader is not None
        leader.host.held = True
        leader.host.stop("killed")

    def without_leases(self, seconds: float) -> list[int]:
        """Run; return how many brokers had no lease after each step."""
        found = []
        for _ in range(round(seconds / STEP_S)):
            self.run(STEP_S)
            found.append(self.without_lease())
        return found

    def until_leased(self) -> float:
        """Run until all brokers have leases; return the virtual seconds."""
        begun_s = self.simulation.scheduler.now_s
        while self.without_lease() > 0:
            assert self.simulation.scheduler.now_s < begun_s + PATIENCE_S, (
                f"{self.without_lease()} brokers still have no lease after {PATIENCE_S:g} s of virtual time"
            )
            self.run(STEP_S)
        return self.simulation.scheduler.now_s - begun_s


@pytest.mark.parametrize(
    ("brokers", "heartbeat_s", "played", "seed"),
    [
        (300, 0.3, 100, 1),
        (1_000, 1.0, 100, 1),
        *(pytest.param(1_000, 1.0, 100, seed, marks=pytest.mark.long) for seed in (2, 3)),
        pytest.param(1_000, 1.0, 1_000, 1, marks=pytest.mark.long),
    ],
)
def test_one_controller_serves_so_many_and_another_takes_over(
    brokers: int, heartbeat_s: float, played: int, seed: int
) -> None:
    """All start at once. If brokers soon left a controller that was behind, a thousand never came into service."""
    with Crowd.of(brokers, heartbeat_s, played, seed) as crowd:
        started_s = crowd.until_leased()
        before = dict(crowd.busy_s)
        crowd.run(CALM_S)
        busiest = max((crowd.busy_s[each] - before[each]) / CALM_S for each in before)
        assert (crowd.without_lease(), crowd.fenced()) == (0, 0)
        assert busiest == pytest.approx(brokers / heartbeat_s * HEARTBEAT_COST_S, rel=0.1)
        crowd.kill_the_controller()
        without = crowd.without_leases(TAKES_OVER_S)
        assert without[-1] == crowd.fenced() == 1, (
            "only the broker that ran beside the controller must be fenced and without a lease"
        )
        took_over_s = STEP_S * max(step for step, missing in enumerate(without) if missing > 1)
        print(
            f"{brokers}: up in {started_s:.1f} s, then busy {busiest:.0%}; without the controller at most "
            f"{max(without)} of {played} have no lease, and 1 after {took_over_s:.1f} s"
        )


def test_heartbeats_are_what_breaks_first() -> None:
    """A controller with more than it can take grants nothing wrong (the invariants look), but too few leases."""
    with Crowd.of(brokers=1_000, heartbeat_s=0.3, played=100, seed=1) as crowd:
        crowd.run(2 * CALM_S)
        without = crowd.without_leases(2 * CALM_S)
        print(f"at least {min(without)} of 100 have no lease")
        assert min(without) > 25
