"""The clients' spans, and the flag that a signal handler sets."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from raftlog import Consumer, Producer, Record, tracing
from raftlog._client.tracing_choice import call_metadata
from raftlog._core.traceparent import Traceparent, parse_traceparent
from raftlog._tracing import ProducerTracing, Sending
from raftlog.errors import InvalidConfig, MessageTooLarge
from raftlog.types import Header
from tests.support.spans import application_span, recorded

SENT = Traceparent(0xABC, 0x123, 1)
ADDRESS = "127.0.0.1:9"
"""No server listens there."""


def record(*headers: Header, topic: str = "orders", offset: int = 7) -> Record:
    return Record(topic, 3, offset, 0, None, b"value", headers)


def traced(parent: Traceparent = SENT) -> Record:
    return record(("traceparent", str(parent).encode()))


def begin(*headers: Header) -> Sending:
    return ProducerTracing("me").begin("orders", headers)


def test_without_a_current_span_headers_stay_as_they_are() -> None:
    mine: Header = ("traceparent", str(SENT).encode())
    with recorded() as exporter:
        assert begin().headers == ()
        assert begin().traceparent is None
        assert begin(("a", b"1"), mine).headers == (("a", b"1"), mine)
        assert begin(mine).traceparent == str(SENT), "a record that is passed on must keep its trace"
        assert begin(("traceparent", str(SENT._replace(flags=0)).encode())).traceparent is None
        assert begin(("traceparent", b"rubbish")).traceparent is None
        assert exporter.get_finished_spans() == ()


def test_a_current_span_takes_the_place_of_an_earlier_context() -> None:
    with recorded(), application_span() as span:
        sending = begin(("traceparent", str(SENT).encode()), ("tracestate", b"a=1"), ("b", b"2"))
    assert [name for name, _ in sending.headers] == ["b", "traceparent"]
    carried = parse_traceparent(sending.headers[1][1])
    assert carried is not None
    assert sending.span is not None
    assert carried.trace_id == span.get_span_context().trace_id
    assert carried.span_id == sending.span.get_span_context().span_id
    assert sending.traceparent == str(carried)


def test_what_is_not_sampled_travels_and_makes_no_span() -> None:
    state = TraceState([("vendor", "1")])
    current = NonRecordingSpan(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(0), trace_state=state))
    with recorded() as exporter, trace.use_span(current):
        sending = begin()
        assert exporter.get_finished_spans() == ()
    assert sending.headers == (
        ("traceparent", str(Traceparent(1, 2, 0)).encode()),
        ("tracestate", b"vendor=1"),
    )
    assert (sending.traceparent, sending.span) == (None, None)


def test_a_record_that_cannot_be_queued_ends_its_span_with_the_reason() -> None:
    with recorded() as exporter, Producer(ADDRESS, tracing=True) as producer:
        with application_span(), pytest.raises(MessageTooLarge):
            producer.send("orders", b"x" * (2 << 20))
        send, _ = exporter.get_finished_spans()
    assert send.name == "send orders"
    assert not send.status.is_ok
    assert (send.attributes or {})["error.type"] == "MessageTooLarge"


def test_a_record_names_its_context_and_a_link_to_it() -> None:
    assert tracing.context_of(record()) is None
    assert tracing.link_of(record(("traceparent", None))) is None
    link, context = tracing.link_of(traced()), tracing.context_of(traced())
    assert link is not None
    assert context is not None
    for found in (link.context, trace.get_current_span(context).get_span_context()):
        assert (found.trace_id, found.span_id, found.is_remote) == (SENT.trace_id, SENT.span_id, True)


def test_processing_goes_on_with_the_records_trace() -> None:
    with recorded() as exporter:
        with pytest.raises(ZeroDivisionError), tracing.process(traced(), "bill"):
            raise ZeroDivisionError
        (span,) = exporter.get_finished_spans()
    assert span.name == "bill orders"
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (SENT.trace_id, SENT.span_id)
    assert [link.context.span_id for link in span.links] == [SENT.span_id]
    assert not span.status.is_ok
    attributes = span.attributes or {}
    assert attributes["messaging.operation.type"] == "process"
    assert attributes["messaging.destination.partition.id"] == "3"
    assert attributes["raftlog.offset"] == 7


def test_processing_within_a_span_or_of_several_records_only_links() -> None:
    other = Traceparent(0xDEF, 0x456, 1)
    with recorded() as exporter:
        with application_span() as outer, tracing.process(traced()):
            pass
        with tracing.process([traced(), record(), traced(other)]):
            pass
        inner, _, several = exporter.get_finished_spans()
    assert inner.parent is not None
    assert inner.parent.span_id == outer.get_span_context().span_id
    assert [link.context.span_id for link in inner.links] == [SENT.span_id]
    assert several.parent is None
    assert [link.context.trace_id for link in several.links] == [SENT.trace_id, other.trace_id]
    assert (several.attributes or {})["messaging.batch.message_count"] == 3


def test_calls_carry_a_sampled_span_only() -> None:
    assert call_metadata() == ()
    with recorded(), application_span() as span:
        ((name, value),) = call_metadata()
        assert name == "traceparent"
        parent = parse_traceparent(value)
        assert parent is not None
        assert parent.span_id == span.get_span_context().span_id
    with trace.use_span(NonRecordingSpan(SpanContext(1, 2, is_remote=False))):
        assert call_metadata() == ()


def test_without_opentelemetry_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "raftlog._tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "raftlog.tracing")
    with pytest.raises(
        ModuleNotFoundError, match=r"raftlog\.tracing needs .* pip install '\.\[otel\]' in the checkout"
    ):
        importlib.import_module("raftlog.tracing")
    for client in (Producer, Consumer):
        with pytest.raises(InvalidConfig, match=r"tracing=true: .* pip install '\.\[otel\]' in the checkout"):
            client(ADDRESS, tracing=True)


def test_who_does_not_trace_does_not_load_opentelemetry() -> None:
    program = (
        "import sys, raftlog\n"
        f"raftlog.Producer({ADDRESS!r}).close(); raftlog.Consumer({ADDRESS!r}).close()\n"
        "import broker.server.server\n"
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


WAITS = 300
PATIENCE_S = 60
INTERRUPTED = f"""
import faulthandler, random, signal
from raftlog._delivery import Alarm

faulthandler.dump_traceback_later({PATIENCE_S}, exit=True)
chance = random.Random(1)
signal.signal(signal.SIGALRM, lambda number, frame: stop.set())
for _ in range({WAITS}):
    stop = Alarm()
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 2e-5))
    while not stop.wait(0.5):
        pass
print("every wait has ended")
"""


def test_a_signal_at_any_moment_ends_the_wait() -> None:
    """Also between a look at the flag and the wait itself: with `threading.Event` one of the first never ended."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "every wait has ended\n", "")
