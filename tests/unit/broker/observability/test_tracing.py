"""The spans of records on brokers: what begins and ends them, in which order, and that nothing is left open."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from broker.config.config import BrokerConfig
from broker.observability.node import tracing_of
from broker.observability.partition_traces import MAX_RANGES, PartitionTraces
from broker.observability.tracing import EXPORT_TIMEOUT_S, NodeTracing
from broker.partition.fetch_session import FetchSession
from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.turns import SharedTurns
from raftlog._core.traceparent import MAX_TRACES, Traceparent
from raftlog.errors import CorruptRecordError, InvalidConfig, NotLeader, UnknownTopicId
from raftlog.format import wire
from raftlog.v1 import log_pb2
from raftlog.v1.records_pb2 import CreateTopicCommand, DeleteTopicCommand, MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage
from replication.ports import Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import (
    TOPIC_ID,
    FetchWriter,
    Parts,
    ProduceWriter,
    Requests,
    image_with,
)
from tests.support.replica_link import ReplicaLink, settle
from tests.support.spans import Collector

PRODUCER = Traceparent(0xABC, 0x123, 1)
OTHER = Traceparent(0xDEF, 0x456, 1)


def config(**values: object) -> BrokerConfig:
    return BrokerConfig.from_values(
        {"node.id": 1, "log.dirs": "/a", **{name.replace("_", "."): value for name, value in values.items()}}
    )


class Traced:
    """A tracing of one node, and what it has made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = NodeTracing(config(), self.exporter)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The finished spans, in the order of their ends."""
        return list(self.exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        """Of the finished spans."""
        return [span.name for span in self.spans]


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


def image(offset: int, leader: int, epoch: int) -> MetadataImage:
    return image_with(1, offset=offset, leader=leader, leader_epoch=epoch, replicas=(1, 2), partition_epoch=offset)


@asynccontextmanager
async def pair(tmp_path: Path, traced: Traced) -> AsyncIterator[tuple[Parts, Parts]]:
    """Two nodes with a replica each of a partition that node 1 leads in epoch 1."""
    async with AsyncExitStack() as stack:
        nodes = []
        for number in (1, 2):
            parts = Parts(tmp_path / str(number), node_id=number)
            parts.registry.traces = traced.tracing.partition
            parts.image = image(0, -1, 0)
            await stack.enter_async_context(parts)
            await parts.apply(image(1, 1, 1))
            nodes.append(parts)
        yield nodes[0], nodes[1]


def produce(number: int, *traceparents: object, acks: int = log_pb2.ALL, epoch: int = 1) -> wire.Produce:
    head = log_pb2.ProducePartition(
        topic_id=TOPIC_ID, leader_epoch=epoch, chain=1, traceparents=[str(parent) for parent in traceparents]
    )
    request = log_pb2.ProduceRequest(correlation_id=number, acks=acks, timeout_ms=30_000)  # type: ignore[arg-type] # a number
    return wire.Produce(request, [wire.ProducePart(head, batch_of(b"%d" % number))])


@asynccontextmanager
async def producing(parts: Parts) -> AsyncIterator[tuple[Requests[wire.Produce], ProduceWriter]]:
    requests, writer = Requests[wire.Produce](), ProduceWriter()
    session = ProduceSession(
        parts.registry, SharedTurns(TURN_BYTES), HeavyWork(parts.disk), max_in_flight=5, default_timeout_ms=30_000
    )
    running = asyncio.create_task(session.run(requests.__aiter__(), writer))
    try:
        yield requests, writer
        requests.end()
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()


async def joined(leader: Parts, follower: Parts) -> ReplicaLink:
    following = follower.registry.find(TOPIC_ID, 0).following
    assert following is not None
    link = ReplicaLink(leader.registry.find(TOPIC_ID, 0), following, Replica(2, 1))
    await link.open()
    await link.pump()
    return link


async def test_one_record_on_its_leader_and_its_follower(tmp_path: Path) -> None:
    traced = Traced()
    async with pair(tmp_path, traced) as (leader, follower), producing(leader) as (requests, _):
        link = await joined(leader, follower)
        requests.send(produce(1, PRODUCER))
        await settle()
        assert traced.names == [], "no span must end before the record is on disk"
        traces = leader.registry.find(TOPIC_ID, 0).traces
        assert traces is not None
        (told,) = traces.between(0, 1)
        read = link.leader.read_for_replica(link.on_change, 0, 1 << 20, blocking=True)
        assert read is not None
        follower.disk.held = True
        link.follower.append_replicated(read.records, 1, link.on_durable, [told])
        await settle()
        assert traced.names == [], "no span must end while the record is only in the follower's log, not on its disk"
        follower.disk.release()
        await settle()
        assert traced.names == ["replicate t", "commit t", "append t"]
        replicate, commit, append = traced.spans
        assert {span.context.trace_id for span in traced.spans if span.context} == {PRODUCER.trace_id}
        assert parent_id(append) == PRODUCER.span_id
        assert parent_id(commit) == parent_id(replicate) == span_id(append)
        assert append.kind is SpanKind.SERVER
        for name, value in {
            "messaging.system": "raftlog",
            "messaging.destination.name": "t",
            "messaging.destination.partition.id": "0",
            "messaging.batch.message_count": 1,
            "raftlog.base_offset": 0,
            "raftlog.leader_epoch": 1,
            "raftlog.acks": "all",
        }.items():
            assert attribute(append, name) == value
        later = follower.registry.find(TOPIC_ID, 0).traces
        assert later is not None
        assert later.between(0, 1) == [told], (
            "the follower must know the trace, so that it can tell its followers when it leads"
        )


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_reads_what_is_traced(tmp_path: Path, leaves: bool) -> None:
    """Also a client that leaves once it has the records: its call may end before the message counts as written."""
    traced = Traced()
    async with Parts(tmp_path) as parts:
        parts.registry.traces = traced.tracing.partition
        partition = parts.registry.find(TOPIC_ID, 0)
        partition.traces = traced.tracing.partition("t", 0)
        async with producing(parts) as (requests, _):
            requests.send(produce(1, epoch=3))
            requests.send(produce(2, PRODUCER, OTHER, epoch=3))
            await settle()
        traced.exporter.clear()
        fetching, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
        session = FetchSession(parts.registry, DiskReads(parts.disk), max_frame_bytes=1, max_subscriptions=10)
        running = asyncio.create_task(session.run(fetching.__aiter__(), writer))
        fetching.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 20)))
        part = log_pb2.FetchPartition(subscription_id=1, topic_id=TOPIC_ID, offset=int(leaves), leader_epoch=3)
        writer.stalled = leaves
        fetching.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part])))
        await settle()
        if leaves:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            fetching.end()
            await asyncio.wait_for(running, 60)
        assert traced.names == ["fetch t", "fetch t"]
        assert [span.context.trace_id for span in traced.spans if span.context] == [
            PRODUCER.trace_id,
            OTHER.trace_id,
        ]
        assert attribute(traced.spans[0], "raftlog.offset.end") == 2


async def test_a_batch_that_is_refused_says_why(tmp_path: Path) -> None:
    traced = Traced()
    async with pair(tmp_path, traced) as (leader, _), producing(leader) as (requests, _):
        requests.send(produce(1, PRODUCER, epoch=7))
        await settle()
        (append,) = traced.spans
        assert append.name == "append t"
        assert not append.status.is_ok
        assert attribute(append, "error.type") == "UnknownLeaderEpoch"


async def test_a_batch_that_is_not_committed_ends_with_the_term(tmp_path: Path) -> None:
    traced = Traced()
    async with pair(tmp_path, traced) as (leader, _), producing(leader) as (requests, _):
        requests.send(produce(1, PRODUCER))
        await settle()
        leader.registry.find(TOPIC_ID, 0).close(NotLeader("somebody else leads"))
        assert traced.names == ["commit t", "append t"]
        assert {attribute(span, "error.type") for span in traced.spans} == {"NotLeader"}


async def test_what_a_follower_does_not_come_to_hold_says_so(tmp_path: Path) -> None:
    traced = Traced()
    async with pair(tmp_path, traced) as (leader, follower), producing(leader) as (requests, _):
        link = await joined(leader, follower)
        requests.send(produce(1, acks=log_pb2.NO_ACK))
        await settle()
        read = link.leader.read_for_replica(link.on_change, 0, 1 << 20, blocking=True)
        assert read is not None
        damaged = bytes([*read.records[:-1], read.records[-1] ^ 1])
        with pytest.raises(CorruptRecordError):
            link.follower.append_replicated(damaged, 1, link.on_durable, [str(PRODUCER)])
        assert traced.names == ["replicate t"]
        assert attribute(traced.spans[0], "error.type") == "CorruptRecordError"
        follower.disk.held = True
        link.follower.append_replicated(read.records, 1, link.on_durable, [str(PRODUCER)])
        await settle()
        assert len(traced.spans) == 1
        await follower.apply(image(2, 2, 2))
        assert traced.names == ["replicate t", "replicate t"]
        assert not traced.spans[1].status.is_ok


@pytest.mark.parametrize("acks", [log_pb2.LEADER, log_pb2.NO_ACK])
async def test_who_does_not_wait_for_all_ends_earlier(tmp_path: Path, acks: int) -> None:
    traced = Traced()
    async with pair(tmp_path, traced) as (leader, _), producing(leader) as (requests, _):
        requests.send(produce(1, PRODUCER, acks=acks))
        await settle()
        assert "append t" in traced.names
        assert {attribute(span, "raftlog.acks") for span in traced.spans if span.name == "append t"} == {"leader"}


async def test_what_is_malformed_or_not_sampled_is_appended_without_a_span(tmp_path: Path) -> None:
    traced = Traced()
    async with pair(tmp_path, traced) as (leader, _), producing(leader) as (requests, _):
        unsampled = PRODUCER._replace(flags=0)
        requests.send(produce(1, "nonsense", unsampled, "x" * 100_000, acks=log_pb2.LEADER))
        await settle()
        partition = leader.registry.find(TOPIC_ID, 0)
        assert partition.log_end_offset == 1
        assert traced.spans == []
        assert not partition.traces


async def test_a_client_cannot_have_more_spans_made_than_so_many(tmp_path: Path) -> None:
    traced = Traced()
    async with pair(tmp_path, traced) as (leader, _), producing(leader) as (requests, _):
        many = [Traceparent(number, number, 1) for number in range(1, 5000)]
        requests.send(produce(1, *many, acks=log_pb2.NO_ACK))
        await settle()
        assert len(traced.spans) == MAX_TRACES


def test_ranges_are_bounded_found_by_offset_and_cut_with_the_log() -> None:
    traces: PartitionTraces = Traced().tracing.partition("t", 0)
    for number in range(MAX_RANGES + 10):
        traces.note(number * 10, number * 10 + 5, [str(number)])
    assert len(traces) == MAX_RANGES
    last = MAX_RANGES + 9
    assert traces.between(last * 10, last * 10 + 1) == [str(last)]
    assert traces.between(last * 10 + 4, last * 10 + 100) == [str(last)]
    assert traces.between(last * 10 - 5, last * 10) == [], "no trace must be found for offsets between two batches"
    assert traces.between(last * 10 - 6, last * 10 + 1) == [str(last), str(last - 1)]
    assert len(traces.between(0, last * 10 + 5)) == MAX_TRACES
    traces.note(last * 10 - 10, last * 10 - 9, ["after a truncation"])
    assert traces.between(last * 10 - 10, 1 << 60) == ["after a truncation"]


def test_without_an_exporter_nothing_traces() -> None:
    assert tracing_of(config()) is None


def test_without_opentelemetry_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "broker.observability.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(InvalidConfig, match=r"tracing\.exporter=otlp: .* pip install '\.\[otel\]' in the checkout"):
        tracing_of(config(tracing_exporter="otlp"))


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "http://host:port"])
def test_an_endpoint_says_its_scheme_and_port(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="http://host:port"):
        config(tracing_otlp_endpoint=endpoint)


async def proposed(command: MetadataCommand) -> CommandResult:
    if command.WhichOneof("command") == "delete_topic":
        raise UnknownTopicId("no such topic")
    return CommandResult(offset=17)


def test_what_is_left_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.observability.tracing.EXPORT_TIMEOUT_S", 60.0)
    with Collector() as collector:
        tracing = tracing_of(
            config(tracing_exporter="otlp", tracing_otlp_endpoint=collector.endpoint, tracing_sampling_ratio=1.0)
        )
        assert tracing is not None
        asyncio.run(tracing.propose(proposed, MetadataCommand(create_topic=CreateTopicCommand())))
        with pytest.raises(UnknownTopicId):
            asyncio.run(tracing.propose(proposed, MetadataCommand(delete_topic=DeleteTopicCommand())))
        tracing.close()
        made, refused = collector.spans
    assert (made.node, made.name, made.failed) == ("1", "quorum commit create_topic", False)
    assert made.attributes["raftlog.metadata.offset"] == 17
    assert (refused.name, refused.failed) == ("quorum commit delete_topic", True)
    assert refused.attributes["error.type"] == "UnknownTopicId"


def test_metadata_changes_that_nobody_traces_are_sampled_by_ratio() -> None:
    traced = Traced()  # with the default ratio
    asyncio.run(traced.tracing.propose(proposed, MetadataCommand(create_topic=CreateTopicCommand())))
    assert traced.spans == []


@pytest.mark.long
def test_a_collector_that_is_away_keeps_nobody() -> None:
    """There is no listener: the end of a node waits for one more attempt at most."""
    tracing = tracing_of(
        config(tracing_exporter="otlp", tracing_otlp_endpoint="http://127.0.0.1:9", tracing_sampling_ratio=1.0)
    )
    assert tracing is not None
    asyncio.run(tracing.propose(proposed, MetadataCommand(create_topic=CreateTopicCommand())))
    begun_s = time.monotonic()
    tracing.close()
    assert time.monotonic() - begun_s < 4 * EXPORT_TIMEOUT_S
