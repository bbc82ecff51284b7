"""Whether a node traces. Without that OpenTelemetry is not even imported, and nobody asks twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.config import BrokerConfig
from raftlog.errors import InvalidConfig

if TYPE_CHECKING:
    from broker.observability.tracing import NodeTracing


def tracing_of(config: BrokerConfig) -> NodeTracing | None:
    """Return what makes a node's spans; None with `tracing.exporter=none`.

    Raises:
        InvalidConfig: OpenTelemetry is not installed.
    """
    if config.tracing_exporter == "none":
        return None
    try:
        from broker.observability.tracing import NodeTracing

        return NodeTracing(config)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise InvalidConfig(
            f"tracing.exporter={config.tracing_exporter}: OpenTelemetry is not installed ({error}); install it with "
            "pip install 'raftlog[otel]', or leave tracing.exporter out"
        ) from None
