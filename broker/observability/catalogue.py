"""Every family that a node can show, without values: for the documentation, and to check alerts against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import Metric

from broker.clock import SystemClock
from broker.loop_lag import LoopLagMonitor
from broker.observability.broker_families import BrokerFamilies
from broker.observability.certificate_families import CertificateFamilies
from broker.observability.counters import Counters
from broker.observability.group_families import GroupFamilies
from broker.observability.group_lag import GroupFigures
from broker.observability.load_families import LoadFamilies
from broker.observability.quorum_families import NodeFamilies
from broker.observability.security_families import SecurityFamilies
from raftmeta.image import MetadataImage
from raftmeta.quorum.description import RaftView


class Described(NamedTuple):
    """A family: its name in the text format, its kind, its labels and what it tells."""

    name: str
    kind: str
    labels: Sequence[str]
    doc: str

    def samples(self) -> set[str]:
        """Return the names that its samples have."""
        if self.kind == "histogram":
            return {f"{self.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")}
        return {self.name}


class _Nothing:
    """A voter that leads, logs that hold nothing, and a cache that is empty."""

    is_active_controller = True
    offline_dirs: Mapping[str, object] = {}
    index_bytes = 0

    def raft_view(self) -> RaftView:
        return RaftView("leader", 0, 0, 0, 0, 0, 0, {})

    def __len__(self) -> int:
        return 0


def catalogue() -> dict[str, list[Described]]:
    """Return all families by the kind of node that shows them, in the order in which they are shown."""
    counters, image, nothing = Counters(), MetadataImage(), _Nothing()
    return {
        "Every node; what is said of the quorum by controllers, and of the whole cluster by the active one": _described(
            NodeFamilies(0, "", lambda: image, LoopLagMonitor(SystemClock()), nothing, counters)
        ),
        "Every node with TLS": _described(CertificateFamilies(float)),
        "Brokers: topics, requests, replicas, disks": _described(
            BrokerFamilies(0, counters, lambda: image, lambda: (), nothing, (), lambda: True)
        ),
        "Brokers: what is under way, and caches": _described(
            LoadFamilies(counters, lambda: (), {}, dict, nothing, lambda: 0)
        ),
        "Brokers with TLS or an authorizer: users and permissions": _described(SecurityFamilies(counters, int)),
        "Brokers, of the groups that they coordinate": _described(GroupFamilies(GroupFigures)),
    }


def _described(collector: Any) -> list[Described]:
    return [_of(family) for family in collector.collect()]


def _of(family: Metric) -> Described:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = getattr(family, "_labelnames", ())
    if family.type == "info":
        labels = tuple(family.samples[0].labels)
    return Described(family.name + suffix, family.type, labels, family.documentation)
