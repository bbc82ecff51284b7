"""What goes wrong for clients besides: their processes, and their paths to brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.cluster.client import Application
from tests.simulation.dataplane.faults import DataFaults
from tests.simulation.faults import CUT_S

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation


class ClusterFaults(DataFaults):
    """Faults of whole brokers, and these. Records are not deleted: a partition knows its producers by its records."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        super().__init__(simulation)
        self._cluster = simulation
        keep = self._random.choice((1.0, 0.5))
        for fault, weight in (
            (self._kill_client, 8.0),
            (self._pause_client, 8.0),
            (self._cut_client, 8.0),
            (self._break_client, 8.0),
            (self._slow_client, 3.0),
        ):
            self._kinds.append((fault, weight))
            self._weights.append(weight * (self._random.random() < keep))

    def _delete_records(self) -> bool:
        return self._elect_preferred()

    def _pick_client(self) -> Application:
        return self._random.choice(self._cluster.applications)

    def _kill_client(self) -> bool:
        return self._pick_client().kill()

    def _pause_client(self) -> bool:
        return self._pick_client().stand_still()

    def _cut_client(self) -> bool:
        """Cut an application off from some brokers, in one direction or both."""
        client = self._pick_client().host.node_id
        some = [broker for broker in self._simulation.broker_ids if self._random.random() < 0.6]
        paths = [(client, broker) for broker in some] + [(broker, client) for broker in some]
        if not paths:
            return False
        paths = self._random.choice((paths, paths[: len(some)], paths[len(some) :]))
        self._trace(None, f"cut-client {paths}")
        for path in paths:
            self._network.cut(*path)
        if self._random.random() < 0.5:
            for path in paths:
                self._network.break_between(*path)
        self._after(self._random.choice(CUT_S), self._mend_paths, paths)
        return True

    def _break_client(self) -> bool:
        """Reset the connections of an application, and what is under way may come late."""
        client = self._pick_client().host.node_id
        for broker in self._simulation.broker_ids:
            if self._random.random() < 0.7:
                self._network.break_between(client, broker)
        return True

    def _slow_client(self) -> bool:
        client, broker = self._pick_client().host.node_id, self._random.choice(self._simulation.broker_ids)
        pair = self._random.choice(((client, broker), (broker, client)))
        latency_s = self._random.choice((0.005, 0.05, 0.3))
        self._trace(None, f"slow path {pair}: {latency_s} s")
        self._network.slow_s[pair] = latency_s
        return True
