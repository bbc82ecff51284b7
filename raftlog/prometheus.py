"""Exports the metrics of clients to Prometheus, beside the application's own. Needs the extra `raftlog[prometheus]`.

    from prometheus_client import REGISTRY, start_http_server
    from raftlog.prometheus import ClientCollector

    REGISTRY.register(ClientCollector(billing=producer, orders=consumer))
    start_http_server(9400)

Each client has a name, which becomes the label `client`. A metric `record-send-rate` of the group `producer-metrics` is
`raftlog_producer_record_send_rate`. If the group's name has a topic, a partition or a node, these become labels, as in
`raftlog_producer_topic_record_send_rate` and `raftlog_consumer_partition_records_lag`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from raftlog._core.metrics import meaning_of
from raftlog._installed import is_of, needs

try:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ModuleNotFoundError as error:
    if not is_of(error, "prometheus"):
        raise
    raise ModuleNotFoundError(needs("raftlog.prometheus", error.name, "prometheus"), name=error.name) from None

__all__ = ["ClientCollector", "HasMetrics"]

_GROUP: Final = re.compile(
    r"(?P<kind>producer-topic|producer-node|producer|consumer-fetch-manager|consumer-coordinator|consumer|admin-client)"
    r"-metrics(?:\.(?P<of>.+))?"
)
_WITH_PARTITION: Final = "records-lag"
"""The only metric of partitions; all others with a name beside their group belong to topics or nodes."""


class HasMetrics(Protocol):
    """A producer, consumer or admin client, of `raftlog` or `raftlog.aio`."""

    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return metrics by group and name."""
        ...


class ClientCollector:
    """A collector of `prometheus_client` for named clients. A closed client shows its last metrics."""

    def __init__(self, **clients: HasMetrics) -> None:
        self._clients = dict(clients)

    def add(self, name: str, client: HasMetrics) -> None:
        """Add a client, or replace the client with this name."""
        self._clients[name] = client

    def remove(self, name: str) -> None:
        """Remove a client."""
        self._clients.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        families: dict[tuple[str, tuple[str, ...]], Metric] = {}
        for client, shown in sorted((name, made.metrics()) for name, made in self._clients.copy().items()):
            for group, metrics in shown.items():
                for metric, value in metrics.items():
                    name, labels = _name_and_labels(group, metric)
                    self._add(families, name, metric, {"client": client, **labels}, value)
        yield from families.values()

    @staticmethod
    def _add(
        families: dict[tuple[str, tuple[str, ...]], Metric],
        name: str,
        metric: str,
        labels: Mapping[str, str],
        value: float,
    ) -> None:
        names = tuple(labels)
        family = families.get((name, names))
        if family is None:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = families[name, names] = kind(name, meaning_of(metric), labels=names)
        family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined] # both kinds have it


def _name_and_labels(group: str, metric: str) -> tuple[str, dict[str, str]]:
    """Return a metric's name in Prometheus, and the labels from its group's name."""
    found = _GROUP.fullmatch(group)
    assert found is not None, f"a group of metrics is not known: {group}"
    kind, of = found["kind"], found["of"]
    labels: dict[str, str] = {}
    if kind == "producer-node":
        labels = {"node": of.removeprefix("node-")}
    elif of is not None and metric == _WITH_PARTITION:
        topic, _, partition = of.rpartition(".")
        kind, labels = "consumer-partition", {"topic": topic, "partition": partition}
    elif of is not None:
        kind, labels = kind.replace("fetch-manager", "topic"), {"topic": of}
    return f"raftlog_{kind}_{metric}".replace("-", "_"), labels
