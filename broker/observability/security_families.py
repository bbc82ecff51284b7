"""Who has authenticated on a broker, who could not, and who may not do what they asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from broker.observability.broker_families import PREFIX, counter, gauge
from broker.observability.counters import Counters


class SecurityFamilies:
    """A collector. `streams`: how many stand that came with a token."""

    def __init__(self, counters: Counters, streams: Callable[[], int]) -> None:
        self._counters = counters
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        authentications = CounterMetricFamily(
            f"{PREFIX}authentications",
            "Exchanges of names and passwords that ended, by how.",
            labels=("mechanism", "outcome"),
        )
        for (mechanism, outcome), count in sorted(self._counters.authentications.copy().items()):
            authentications.add_metric([mechanism, outcome], count)
        yield authentications
        yield counter(
            "unauthenticated_calls",
            "Calls that were refused because nobody knew who called, or did not any more.",
            self._counters.unauthenticated_calls,
        )
        refusals = CounterMetricFamily(
            f"{PREFIX}authorization_refusals", "What somebody may not do, by operation.", labels=("operation",)
        )
        for operation, count in sorted(self._counters.authorization_refusals.copy().items()):
            refusals.add_metric([operation], count)
        yield refusals
        yield gauge("authenticated_streams", "Open streams of clients with a token.", self._streams())
