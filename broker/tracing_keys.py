"""The server's keys for OpenTelemetry traces."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from raftlog.config import ConfigKey, Value

EXPORTERS: Final = ("none", "otlp", "console")


def _endpoint(value: Value) -> str | None:
    if not value:
        return None
    try:
        parts = urlsplit(str(value))
        if parts.scheme in ("http", "https") and parts.hostname and parts.port:
            return None
    except ValueError:
        pass
    return "expected http://host:port, or https://host:port for TLS, of a collector that takes OTLP over gRPC"


TRACING_KEYS: Final = (
    ConfigKey(
        name="tracing.exporter",
        kind="string",
        default="none",
        choices=EXPORTERS,
        own=True,
        doc="Where the spans of this node go: to a collector (otlp), to its standard output (console), or nowhere, "
        "which is free. The others need the extra `raftlog[otel]`; docs/tracing.md says what is traced.",
    ),
    ConfigKey(
        name="tracing.otlp.endpoint",
        kind="string",
        default="",
        own=True,
        check=_endpoint,
        doc="The collector, as http://host:port, or https://host:port for TLS, that takes OTLP over gRPC; empty: what "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, or http://localhost:4317.",
    ),
    ConfigKey(
        name="tracing.service.name",
        kind="string",
        default="raftlog",
        own=True,
        doc="Under which name (`service.name`) this node's spans appear.",
    ),
    ConfigKey(
        name="tracing.sampling.ratio",
        kind="float",
        default=0.0,
        minimum=0,
        maximum=1,
        own=True,
        doc="Share of the metadata changes of this node that begin a trace of their own, where nobody who asked for "
        "them has. Records are traced as their producers say.",
    ),
)
