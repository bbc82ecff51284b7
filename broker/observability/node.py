"""What one node keeps to tell of itself, and the endpoint that tells it."""

from __future__ import annotations

import asyncio
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from broker.clock import Clock
from broker.config import BrokerConfig
from broker.loop_lag import LoopLagMonitor
from broker.observability.counters import Counters
from broker.observability.health import Health
from broker.observability.http import ObservabilityServer
from broker.observability.tracing_choice import tracing_of


class Observability:
    """Counters and health for the parts of a node to write to; `open`, then `address`, and `close`.

    The endpoint is there before anything else is, so that a probe hears how far the recovery is.
    """

    def __init__(self, config: BrokerConfig, clock: Clock) -> None:
        self._config: Final = config
        self._server: ObservabilityServer | None = None
        self.counters = Counters()
        self.health = Health(clock, config.liveness_timeout_ms)
        self.loop_lag = LoopLagMonitor(clock, self.health.beat)
        self.registry = CollectorRegistry()
        self.tracing = tracing_of(config)
        """What makes this node's spans; None: it makes none."""
        self.address = ""
        """host:port of the endpoint; "" while there is none."""

    def open(self) -> None:
        """Measure the loop from now on, and answer at `metrics.listener`, if that is set.

        Raises:
            BrokerUnavailable: the port cannot be had.
        """
        self.loop_lag.start()
        if self._config.metrics_listener is None:
            return
        ProcessCollector(namespace="raftlog", registry=self.registry)
        GCCollector(registry=self.registry)
        host, port = self._config.metrics_listener
        self._server = ObservabilityServer(host, port, self.health, self.registry)
        self._server.start()
        self.address = f"{host}:{self._server.port}"

    async def close(self, *, report: bool) -> None:
        """End it; with `report` the log says how late the event loop was."""
        await self.loop_lag.stop(report=report)
        if self._server is not None:
            self._server.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
