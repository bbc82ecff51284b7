"""Faults: things with a begin and an end, done to a cluster of containers.

A fault picks its victim when it begins: who leads partition 0 of the topic, or who controls, at that moment. `end`
mends all that `begin` has broken, and is called even if that failed half-way.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from docker.errors import APIError

from tests.chaos.host import in_network
from tests.chaos.nodes import Node, NodeSet
from tests.support.patience import until

_GONE_S = 60.0
FAILOVER_S = 3.0
"""Promise 5: writes resume within so many seconds (p99) of a leader's end ..."""
FAILOVER_WITH_CONTROLLER_S = 5.0
"""... and within these when it was also the controller."""

Role = Literal["leader", "controller", "follower"]


class Fault(ABC):
    """One thing that breaks.

    Attributes:
        name: for reports.
        keeps_serving: the others are promised to go on while it lasts, within the time of a failover.
        heals_in_time: writes go on within the time of a failover once it is mended.
        hold_s: how long it lasts, once writes go on where others keep serving.
        victim: the node it was done to; None before, and where there is no one in particular.
    """

    keeps_serving: ClassVar[bool] = True
    heals_in_time: ClassVar[bool] = True
    hold_s: ClassVar[float] = 1.0

    def __init__(self, role: Role = "leader") -> None:
        self.role = role
        self.name = f"{type(self).__name__} {role}"
        self.victim: int | None = None
        self.hit_controller = False

    def begin(self, nodes: NodeSet, topic: str) -> None:
        """Break it."""
        leader, controller = nodes.leader(topic), nodes.controller()
        if self.role == "leader":
            self.victim = leader
        elif self.role == "controller":
            self.victim = controller
        else:
            self.victim = next(each.node_id for each in nodes.brokers if each.node_id not in (leader, controller))
        self.hit_controller = self.victim == controller
        self.do(nodes, nodes.nodes[self.victim])

    @abstractmethod
    def do(self, nodes: NodeSet, victim: Node) -> None:
        """Break it for this victim."""

    @abstractmethod
    def end(self, nodes: NodeSet) -> None:
        """Mend it."""

    @property
    def promised_s(self) -> float:
        """How long writes may pause when it begins."""
        return FAILOVER_WITH_CONTROLLER_S if self.hit_controller else FAILOVER_S

    def _node(self, nodes: NodeSet) -> Node | None:
        return None if self.victim is None else nodes.nodes[self.victim]


class Kill(Fault):
    """SIGKILL, and the container starts again."""

    def do(self, nodes: NodeSet, victim: Node) -> None:
        container = victim.docker
        container.kill()
        container.wait(timeout=_GONE_S)  # the engine may say for a moment that it runs

    def end(self, nodes: NodeSet) -> None:
        node = self._node(nodes)
        if node is not None and not node.is_running:
            node.start()


class Pause(Fault):
    """Pause all processes of the container (`docker pause`)."""

    def do(self, nodes: NodeSet, victim: Node) -> None:
        def paused() -> bool:
            try:
                victim.docker.pause()
            except APIError as error:
                if "unable to freeze" not in str(error):  # runc gives up while processes begin and end, and thaws them
                    raise
                return False
            return True

        until(paused, "the container can be frozen", within_s=_GONE_S)

    def end(self, nodes: NodeSet) -> None:
        node = self._node(nodes)
        if node is not None and node.docker.status == "paused":
            node.docker.unpause()


class Disconnect(Fault):
    """The container loses its network, other nodes and clients alike, and gets it back with the same address."""

    def do(self, nodes: NodeSet, victim: Node) -> None:
        nodes.network.disconnect(victim.docker)

    def end(self, nodes: NodeSet) -> None:
        node = self._node(nodes)
        if node is not None:
            with contextlib.suppress(APIError):  # it is connected
                nodes.network.connect(node.docker, node.node_id)


class Drops(Fault):
    """Packets between nodes are dropped where they come in; clients reach every node."""

    def __init__(self, role: Role = "leader") -> None:
        super().__init__(role)
        self._done: list[tuple[int, list[str]]] = []

    def drop(self, nodes: NodeSet, sender: int, receiver: int, *matches: str) -> None:
        """Let nothing that `sender` sends arrive at `receiver`, or only what does not match."""
        rule = ["INPUT", "--source", nodes.nodes[sender].address, *matches, "--jump", "DROP"]
        in_network(nodes.nodes[receiver].pid, "iptables", "--wait", "--append", *rule)
        self._done.append((receiver, rule))

    def cut(self, nodes: NodeSet, some: Sequence[int], others: Sequence[int]) -> None:
        """Let nothing pass between these and those."""
        for one in some:
            for other in others:
                self.drop(nodes, one, other)
                self.drop(nodes, other, one)

    def end(self, nodes: NodeSet) -> None:
        for receiver, rule in self._done:
            if nodes.nodes[receiver].is_running:
                in_network(nodes.nodes[receiver].pid, "iptables", "--wait", "--delete", *rule, check=False)
        self._done.clear()


class Mute(Drops):
    """No node hears the victim, which hears all others: one-way drops."""

    def do(self, nodes: NodeSet, victim: Node) -> None:
        for other in nodes.others(victim.node_id):
            self.drop(nodes, victim.node_id, other)


class Deafen(Drops):
    """The victim hears no node, and all others hear it: one-way drops."""

    def do(self, nodes: NodeSet, victim: Node) -> None:
        for other in nodes.others(victim.node_id):
            self.drop(nodes, other, victim.node_id)


class Isolate(Drops):
    """The victim is a minority, the rest a majority."""

    def do(self, nodes: NodeSet, victim: Node) -> None:
        self.cut(nodes, [victim.node_id], nodes.others(victim.node_id))


class Bridge(Drops):
    """The victim and one half of the rest do not reach each other; one node reaches both."""

    def do(self, nodes: NodeSet, victim: Node) -> None:
        others = nodes.others(victim.node_id)
        self.cut(nodes, [victim.node_id], others[: len(others) // 2])


class Shatter(Drops):
    """No node reaches another: there is no majority."""

    keeps_serving = False
    hold_s = 3.0

    def do(self, nodes: NodeSet, victim: Node) -> None:
        ids = list(nodes.nodes)
        for number, node_id in enumerate(ids):
            self.cut(nodes, [node_id], ids[number + 1 :])


class Loss(Drops):
    """A share of all packets between nodes is lost, at random."""

    keeps_serving = False
    hold_s = 3.0

    def __init__(self, share: float = 0.1, role: Role = "leader") -> None:
        super().__init__(role)
        self.name = f"{self.name} {share:.0%}"
        self._share = str(share)

    def do(self, nodes: NodeSet, victim: Node) -> None:
        for other in nodes.others(victim.node_id):
            for sender, receiver in ((victim.node_id, other), (other, victim.node_id)):
                self.drop(
                    nodes, sender, receiver, "--match", "statistic", "--mode", "random", "--probability", self._share
                )


def device_of(node: Node) -> str:
    """Return the network device of a node, which is another one whenever it was connected again."""
    shown = in_network(node.pid, "ip", "-oneline", "-4", "address", "show", "to", node.address)
    return shown.split()[1]


class SlowLink(Fault):
    """The victim's sending rate is limited (tbf): replication, answers to clients, and heartbeats alike."""

    keeps_serving = False
    hold_s = 3.0

    def __init__(self, rate: str = "256kbit", role: Role = "leader") -> None:
        super().__init__(role)
        self.name = f"{self.name} {rate}"
        self._rate = rate

    def do(self, nodes: NodeSet, victim: Node) -> None:
        bucket = ("root", "tbf", "rate", self._rate, "burst", "16kb", "latency", "300ms")
        in_network(victim.pid, "tc", "qdisc", "add", "dev", device_of(victim), *bucket)

    def end(self, nodes: NodeSet) -> None:
        node = self._node(nodes)
        if node is not None and node.is_running:
            in_network(node.pid, "tc", "qdisc", "del", "dev", device_of(node), "root", check=False)


class FullDisk(Fault):
    """Not a block is free on the victim's disk: what it leads takes no writes meanwhile."""

    keeps_serving = False
    hold_s = 3.0

    def do(self, nodes: NodeSet, victim: Node) -> None:
        victim.disk.fill()

    def end(self, nodes: NodeSet) -> None:
        node = self._node(nodes)
        if node is None:
            return
        node.disk.empty()
        if not node.is_running:
            node.start()


class ClockShift(Fault):
    """The victim's wall clock jumps."""

    def __init__(self, by_s: float, role: Role = "leader") -> None:
        super().__init__(role)
        self.name = f"{self.name} {by_s:+g} s"
        self._by_s = by_s

    def do(self, nodes: NodeSet, victim: Node) -> None:
        nodes.clocks.shift(victim.node_id, self._by_s)

    def end(self, nodes: NodeSet) -> None:
        if self.victim is not None:
            nodes.clocks.shift(self.victim, 0)


class Together(Fault):
    """Several faults at once, each with a victim of its own choice; mended in the order in which they began."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults[0].role)
        self.name = " + ".join(fault.name for fault in faults)
        self._faults = faults

    def begin(self, nodes: NodeSet, topic: str) -> None:
        for fault in self._faults:
            fault.begin(nodes, topic)
        self.victim = self._faults[0].victim
        self.hit_controller = any(fault.hit_controller for fault in self._faults)

    def do(self, nodes: NodeSet, victim: Node) -> None:
        raise AssertionError("each node must be the victim of one fault only")

    def end(self, nodes: NodeSet) -> None:
        for fault in self._faults:
            fault.end(nodes)


class RollingRestart(Fault):
    """Every node is stopped cleanly and started again, one after the other, the controller last.

    With an `image` each comes back with that one: a rolling upgrade.
    """

    def __init__(self, image: str | None = None) -> None:
        super().__init__("controller")
        self.name = "RollingRestart" if image is None else "RollingUpgrade"
        self._image = image
        self._topic = ""

    def begin(self, nodes: NodeSet, topic: str) -> None:
        self._topic = topic
        super().begin(nodes, topic)

    def do(self, nodes: NodeSet, victim: Node) -> None:
        for node_id in (*nodes.others(victim.node_id), victim.node_id):
            node = nodes.nodes[node_id]
            node.stop()
            if self._image is None:
                node.start()
            else:
                node.replace(self._image)
            nodes.wait_ready()
            nodes.wait_in_sync(self._topic)

    def end(self, nodes: NodeSet) -> None:
        nodes.each(Node.start, [node for node in nodes.nodes.values() if not node.is_running])
