"""One trace through a cluster: producer, leader, followers, reader, consumer; and metadata changes in the quorum."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
from opentelemetry import trace

from raftlog import Admin, Consumer, Producer, Record, aio, tracing
from raftlog._core.traceparent import parse_traceparent
from raftlog.testing import Cluster
from tests.support.spans import Collected, Collector, application_span, recorded
from tests.support.steady import STEADY

GUIDE = Path(__file__).parents[2] / "docs" / "tracing.md"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms until spans are sent; OpenTelemetry's own setting
        with Cluster(
            3, kafka=True, config=STEADY, tracing_exporter="otlp", tracing_otlp_endpoint=collector.endpoint
        ) as cluster:
            yield cluster


def of_topic(spans: list[Collected], topic: str) -> list[Collected]:
    return [span for span in spans if span.name.endswith(f" {topic}")]


def of_trace(spans: list[Collected], trace_id: int) -> list[Collected]:
    return [span for span in spans if span.trace_id == trace_id]


def has(spans: list[Collected], names: list[str]) -> bool:
    """Whether spans of these names are there, each as often as it is named."""
    return Counter(span.name for span in spans) >= Counter(names)


def test_a_record_takes_its_trace_through_the_cluster(cluster: Cluster, collector: Collector) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("traced", 1, 3, timeout=60)
    with recorded() as exporter:
        with Producer(cluster.bootstrap, tracing=True) as producer, application_span() as span:
            trace_id = span.get_span_context().trace_id
            sent = producer.send("traced", b"hello", headers={"lang": b"en"}).result(timeout=60)
        with Consumer(cluster.bootstrap, auto_offset_reset="earliest", tracing=True) as consumer:
            consumer.subscribe("traced")
            (record,) = consumer.poll(timeout=60)
            with tracing.process(record):
                pass
        own = {span.name: span for span in exporter.get_finished_spans()}

    send, poll, process = own["send traced"], own["poll traced"], own["process traced"]
    assert send.context is not None
    assert send.parent is not None
    assert send.parent.span_id == own["application"].context.span_id
    assert (send.attributes or {})["raftlog.offset"] == sent.offset
    assert dict(record.headers)["lang"] == b"en"
    carried = parse_traceparent(dict(record.headers)["traceparent"])
    assert carried is not None
    assert (carried.trace_id, carried.span_id, carried.sampled) == (trace_id, send.context.span_id, True)
    assert [link.context.span_id for link in poll.links] == [send.context.span_id]
    assert process.parent is not None
    assert (process.parent.trace_id, process.parent.span_id) == (trace_id, send.context.span_id)

    names = ["append traced", "commit traced", "fetch traced", "replicate traced", "replicate traced"]
    spans = of_trace(collector.wait(lambda spans: has(of_trace(spans, trace_id), names)), trace_id)
    assert {span.name for span in spans} == set(names)
    append = next(span for span in spans if span.name.startswith("append"))
    assert append.parent_id == send.context.span_id
    assert {span.parent_id for span in spans if span is not append} == {append.span_id}
    followers = {span.node for span in spans if span.name.startswith("replicate")}
    assert followers | {append.node} == {"1", "2", "3"}
    assert append.attributes["messaging.destination.name"] == "traced"
    assert append.attributes["messaging.batch.message_count"] == 1
    assert append.attributes["raftlog.base_offset"] == sent.offset
    assert not any(span.failed for span in spans)


def test_a_record_of_a_kafka_client_takes_the_trace_of_its_header_along(cluster: Cluster, collector: Collector) -> None:
    """As OpenTelemetry's instrumentations of Kafka's clients write it."""
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("traced-kafka", 1, 3, timeout=60)
    servers = {"bootstrap.servers": cluster.kafka_bootstrap, "log_level": 0}
    producer = confluent_kafka.Producer({**servers, "linger.ms": 100, "compression.type": "lz4"})
    for number, flags in enumerate(("00", "01", "01")):  # two sampled spans of one trace: the first counts
        traceparent = f"00-{0xABC:032x}-{number + 1:016x}-{flags}"
        producer.produce("traced-kafka", b"%d" % number, headers=[("traceparent", traceparent)])
    assert producer.flush(60) == 0
    consumer = confluent_kafka.Consumer({**servers, "group.id": "unused"})
    consumer.assign([confluent_kafka.TopicPartition("traced-kafka", 0, 0)])
    assert consumer.poll(60) is not None
    consumer.close()

    names = ["append traced-kafka", "commit traced-kafka", "fetch traced-kafka", *["replicate traced-kafka"] * 2]
    spans = of_trace(collector.wait(lambda spans: has(of_trace(spans, 0xABC), names)), 0xABC)
    append = next(span for span in spans if span.name.startswith("append"))
    assert append.parent_id == 2
    assert append.attributes["messaging.batch.message_count"] == 3
    assert {span.parent_id for span in spans if span is not append} == {append.span_id}
    assert not any(span.failed for span in spans)


def test_what_nobody_samples_makes_no_spans(cluster: Cluster, collector: Collector) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("quiet", 1, 3, timeout=60)
    unsampled = trace.NonRecordingSpan(trace.SpanContext(7, 7, is_remote=False))
    with recorded() as exporter:
        with Producer(cluster.bootstrap, tracing=True) as producer:
            with trace.use_span(unsampled):
                producer.send("quiet", b"with a context that nobody samples")
            producer.send("quiet", b"without a span").result(timeout=60)
            with Consumer(cluster.bootstrap, auto_offset_reset="earliest", tracing=True) as consumer:
                consumer.subscribe("quiet")
                records: list[Record] = []
                while len(records) < 2:
                    records += consumer.poll(timeout=60)
            with application_span():  # what comes later arrives later: so nothing of the others is on its way any more
                producer.send("quiet", b"sampled").result(timeout=60)
        assert [span.name for span in exporter.get_finished_spans() if span.name != "application"] == ["send quiet"]

    assert [record.headers for record in records] == [
        (("traceparent", b"00-%032x-%016x-00" % (7, 7)),),
        (),
    ]
    names = ["append quiet", "commit quiet", "replicate quiet", "replicate quiet"]
    spans = of_topic(collector.wait(lambda spans: has(spans, names)), "quiet")
    assert len({span.trace_id for span in spans}) == 1
    assert all(span.attributes.get("raftlog.base_offset", 2) == 2 for span in spans)


def test_a_batch_of_many_traces_tells_of_each(cluster: Cluster, collector: Collector) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("mixed", 1, 3, timeout=60)
    with recorded(), Producer(cluster.bootstrap, tracing=True, linger_ms=60_000) as producer:
        producer.send("mixed", b"none")
        producer.flush(timeout=60)
        traces = []
        for number in range(3):
            with application_span() as span:
                traces.append(span.get_span_context().trace_id)
                for _ in range(5):
                    producer.send("mixed", b"%d" % number)
        producer.flush(timeout=60)

    names = ["append mixed", "commit mixed", "replicate mixed", "replicate mixed"]
    spans = collector.wait(lambda spans: all(has(of_trace(spans, trace_id), names) for trace_id in traces))
    assert {s.attributes["messaging.batch.message_count"] for s in spans if s.name == "append mixed"} == {15}


def test_send_batch_and_asyncio(cluster: Cluster, collector: Collector) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("columns", 1, 1, timeout=60)

    async def there_and_back() -> list[tuple[bytes | None, ...]]:
        async with aio.Producer(cluster.bootstrap, tracing=True) as producer:
            with application_span():
                await (await producer.send_batch("columns", [b"a", b"b"], headers={"n": b"1"}))
                await (await producer.send("columns", b"c"))
        async with aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest", tracing=True) as consumer:
            await consumer.subscribe("columns")
            rows: list[list[tuple[str, bytes | None]]] = []
            while len(rows) < 3:
                rows += (await consumer.poll_arrow(timeout=60)).column("headers").to_pylist()
        return [tuple(dict(pairs).values()) for pairs in rows]

    with recorded() as exporter:
        headers = asyncio.run(there_and_back())
        spans = exporter.get_finished_spans()
    batch, single = sorted(
        (span for span in spans if span.name == "send columns"), key=lambda span: span.start_time or 0
    )
    assert batch.context is not None
    assert single.context is not None
    of_batch, of_single = (b"-%016x-" % span.context.span_id for span in (batch, single))
    assert [[of_batch in (part or b"") for part in row] for row in headers] == [[False, True], [False, True], [False]]
    assert of_single in (headers[2][0] or b"")
    links = [link.context.span_id for span in spans if span.name == "poll columns" for link in span.links]
    assert links == [batch.context.span_id, single.context.span_id]
    collector.wait(lambda spans: sum(span.name == "append columns" for span in spans) == 2)


def test_a_metadata_change_is_a_quorum_commit(cluster: Cluster, collector: Collector) -> None:
    with recorded(), Admin(cluster.bootstrap) as admin, application_span() as span:
        trace_id = span.get_span_context().trace_id
        parent_id = span.get_span_context().span_id
        admin.create_topic("by-a-traced-call", 1, 3)
    names = ["raftlog.v1.Admin/CreateTopic", "quorum commit create_topic"]  # which may come from two nodes
    spans = of_trace(collector.wait(lambda spans: has(of_trace(spans, trace_id), names)), trace_id)
    commit = next(s for s in spans if s.name == "quorum commit create_topic")
    calls = {s.span_id: s for s in spans if s.name == "raftlog.v1.Admin/CreateTopic"}
    assert {s.parent_id for s in calls.values()} == {parent_id}
    assert commit.parent_id in calls
    assert commit.attributes["raftlog.metadata.offset"] > 0


def test_the_example_in_the_documentation(cluster: Cluster, collector: Collector) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    program = "\n".join(blocks)
    for there, here in (("127.0.0.1:9092", cluster.bootstrap), ("http://localhost:4317", collector.endpoint)):
        assert there in program
        program = program.replace(there, here)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout, done.returncode) == ("billed b'two apples'\n", 0), done.stderr

    names = ["append orders", "checkout", "commit orders", "fetch orders", "process orders", "send orders"]

    def of_the_example(spans: list[Collected]) -> list[Collected]:
        return of_trace(spans, next((span.trace_id for span in spans if span.name == "checkout"), 0))

    spans = of_the_example(collector.wait(lambda spans: has(of_the_example(spans), names)))
    assert {span.name for span in spans} == set(names)
