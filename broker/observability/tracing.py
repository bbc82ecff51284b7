"""The tracing of one node: its exporter, and the spans of calls and of metadata changes.

Imported only if `tracing.exporter` is set, since it needs OpenTelemetry (the extra `raftlog[otel]`). The node has its
own tracer provider and leaves the process's global one alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, use_span

from broker.config.config import BrokerConfig
from broker.net.interceptors import RewrittenHandlers
from broker.observability.partition_traces import PartitionTraces, remote_parent
from raftlog import __version__
from raftlog._core.traceparent import TRACEPARENT, parse_traceparent
from raftlog._tracing import fail
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 5.0
"""Time-out of one export; a node that stops makes one more, with the remaining spans."""

Handler = Callable[[Any, Any], Awaitable[Any]]


class NodeTracing:
    """Makes the spans of one node; `close` exports the remaining ones.

    Spans of records and calls belong to traces that a client began and sampled. A metadata change outside of any trace
    is sampled by `tracing.sampling.ratio`.
    """

    def __init__(self, config: BrokerConfig, exporter: SpanExporter | None = None) -> None:
        """`exporter`: for tests; replaces the configured one, and receives each span at once."""
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.tracing_sampling_ratio)),
            resource=Resource.create(
                {
                    "service.name": config.tracing_service_name,
                    "service.version": __version__,
                    "service.instance.id": str(config.node_id),
                    "raftlog.node.id": config.node_id,
                }
            ),
            shutdown_on_exit=False,
        )
        if exporter is not None:
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        else:
            self._provider.add_span_processor(BatchSpanProcessor(_exporter(config)))
        self._tracer = self._provider.get_tracer("raftlog.server", __version__)

    def partition(self, topic: str, partition: int) -> PartitionTraces:
        """Return the tracing of one partition."""
        return PartitionTraces(self._tracer, topic, partition)

    def calls(self) -> CallTracer:
        """Return the interceptor that makes the spans of calls."""
        return CallTracer(self)

    async def call(self, method: str, handler: Handler, request: Any, context: Any) -> Any:
        """Answer a call, within a span if the caller sends a sampled trace; `method` is /package.Service/Method."""
        parent = _caller(context)
        if parent is None or not parent.sampled:
            return await handler(request, context)
        service, _, name = method.removeprefix("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        span = self._tracer.start_span(f"{service}/{name}", remote_parent(parent), SpanKind.SERVER, attributes)
        with use_span(span, end_on_exit=True):
            return await handler(request, context)

    async def propose(
        self, propose: Callable[[MetadataCommand], Awaitable[CommandResult]], command: MetadataCommand
    ) -> CommandResult:
        """Commit a metadata command within a span."""
        name = command.WhichOneof("command") or "nothing"
        span = self._tracer.start_span(f"quorum commit {name}", attributes={"raftlog.command": name})
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                result = await propose(command)
            except BaseException as error:
                fail(span, error)
                raise
            span.set_attribute("raftlog.metadata.offset", result.offset)
            return result

    def close(self) -> None:
        """Export the remaining spans, as far as the collector takes them, and make no more."""
        self._provider.shutdown()


class CallTracer(RewrittenHandlers):
    """Makes a span of each unary call whose caller sends a sampled `traceparent`."""

    def __init__(self, tracing: NodeTracing) -> None:
        super().__init__()
        self._tracing = tracing

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a span around it."""
        if handler.unary_unary is None:
            return handler
        call, tracing = handler.unary_unary, self._tracing

        async def traced(request: Any, context: Any) -> Any:
            return await tracing.call(method, call, request, context)

        return handler._replace(unary_unary=traced)


def _caller(context: Any) -> Any:
    for name, value in context.invocation_metadata() or ():
        if name == TRACEPARENT:
            return parse_traceparent(value)
    return None


def _exporter(config: BrokerConfig) -> SpanExporter:
    if config.tracing_exporter == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    endpoint = config.tracing_otlp_endpoint or None
    return OTLPSpanExporter(
        endpoint=endpoint,
        insecure=None if endpoint is None else endpoint.startswith("http://"),
        timeout=EXPORT_TIMEOUT_S,
    )
