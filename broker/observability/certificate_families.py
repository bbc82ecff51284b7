"""Until when the certificate of a node with TLS counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric

from broker.observability.broker_families import gauge


class CertificateFamilies:
    """A collector. `not_after_s`: of the certificate that new connections are shown, in seconds since 1970."""

    def __init__(self, not_after_s: Callable[[], float]) -> None:
        self._not_after_s = not_after_s

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield gauge(
            "certificate_not_after_seconds",
            "Unix time after which this node's certificate does not count any more.",
            self._not_after_s(),
        )
