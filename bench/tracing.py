"""What tracing costs a producer, beside none, by turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext

from bench.report import Report
from raftlog import Admin, Producer
from raftlog._core.arguments import HeadersLike
from raftlog._delivery import Delivery
from raftlog.testing import Cluster

TRACING_ROUNDS = 9
SENDS = 20_000
"""Sends of one client in one round."""
TRACED_VALUE = os.urandom(100)
TOLERANCE = 1.03
"""More than two runs of the same client differ by."""


class _WithoutTracing(Producer):
    """The producer without any code for tracing."""

    def _send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
    ) -> Delivery:
        try:
            return self._place(topic, value, key, partition, headers, timestamp_ms)
        except Exception as error:
            self._engine.not_sent(error)
            raise


@contextmanager
def _no_span() -> Iterator[None]:
    yield


def _span(flags: int) -> Callable[[], object]:
    return lambda: trace.use_span(NonRecordingSpan(SpanContext(7, 7, False, trace.TraceFlags(flags))))


def _cost_s(producer: Producer, key: bytes | None, current: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread for SENDS sends, without the loop's thread."""
    producer.flush(30)
    with current():  # type: ignore[attr-defined] # each is a context manager
        begun_s = time.thread_time()
        for _ in range(SENDS):
            producer.send("traced", TRACED_VALUE, key)
        spent_s = time.thread_time() - begun_s
    producer.flush(30)
    return spent_s


def run(report: Report) -> None:
    """Measure `send` without tracing code, with tracing off, and with tracing on, by sampling."""
    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))  # records spans, but exports none
    with Cluster(1, tracing_exporter="none") as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("traced", 1, 1)
        with (
            _WithoutTracing(cluster.bootstrap) as without,
            Producer(cluster.bootstrap) as untraced,
            Producer(cluster.bootstrap, tracing=True) as traced,
        ):
            for key, what in ((None, "value only"), (b"key", "with a key")):
                ways: dict[str, tuple[Producer, Callable[[], object]]] = {
                    "no tracing code": (without, _no_span),
                    "tracing=false": (untraced, _no_span),
                    "tracing=true, no span": (traced, _no_span),
                    "tracing=true, span not sampled": (traced, _span(0)),
                    "tracing=true, span sampled": (traced, _span(1)),
                }
                rounds: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(TRACING_ROUNDS):
                    order = list(ways.items())
                    for name, (producer, current) in order if number % 2 else reversed(order):
                        rounds[name].append(_cost_s(producer, key, current))
                _judge(report, what, rounds)


def _judge(report: Report, what: str, rounds: dict[str, list[float]]) -> None:
    (_, base), *others = rounds.items()
    for name, costs in others:
        ratio = min(costs) / min(base)  # the least disturbed runs: the work is the same each time
        figure = f"{ratio:.2f} times, {1e9 * min(costs) / SENDS:.0f} ns a record"
        target = name == "tracing=false"
        report.add(
            "tracing",
            f"send, {what}, {name}",
            figure,
            f"<= {TOLERANCE:g} times" if target else "",
            ratio <= TOLERANCE if target else None,
        )
