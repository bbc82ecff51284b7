"""Spans of this process, kept in memory, and a collector for spans of servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import grpc
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACER = "application"


@cache
def _exporter() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)  # a process has one, once
    return exporter


@contextmanager
def recorded() -> Iterator[InMemorySpanExporter]:
    """Record every span of this process' global provider."""
    exporter = _exporter()
    exporter.clear()
    yield exporter
    exporter.clear()


def application_span(name: str = "application") -> Any:
    """Return a span as an application makes one, as a context manager."""
    return trace.get_tracer(TRACER).start_as_current_span(name)


class Collected(NamedTuple):
    """A span that a server sent."""

    node: str
    name: str
    trace_id: int
    span_id: int
    parent_id: int
    attributes: dict[str, Any]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes OTLP over gRPC on a loopback port."""

    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # generated without types
        add(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            named = (a.value.string_value for a in resource.resource.attributes if a.key == "service.instance.id")
            node = next(named, "")
            for scope in resource.scope_spans:
                self.spans += [_collected(node, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, enough: Callable[[list[Collected]], bool], timeout_s: float = 60.0) -> list[Collected]:
        """Return the spans once there are enough."""
        deadline_s = time.monotonic() + timeout_s
        while not enough(spans := list(self.spans)):
            assert time.monotonic() < deadline_s, (
                f"not all spans have come within {timeout_s:g} s; those that have: "
                f"{sorted((s.node, s.name) for s in spans)}"
            )
            time.sleep(0.02)
        return spans


def _collected(node: str, span: Any) -> Collected:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    number = int.from_bytes
    return Collected(
        node,
        span.name,
        number(span.trace_id, "big"),
        number(span.span_id, "big"),
        number(span.parent_span_id, "big"),
        attributes,
        span.status.code == 2,
    )
