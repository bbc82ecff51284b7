"""The hand-cut messages and the protobuf runtime agree on every byte that matters, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import InvalidRequestError
from raftlog.format import wire
from raftlog.format.header import Buffer
from raftlog.format.wire import (
    MAX_PARTS,
    MAX_REQUESTS,
    SMALL_BYTES,
    Frame,
    Produce,
    ProducePart,
    ReplicaFrame,
    decode_fetch,
    decode_produce,
    decode_replicate,
    encode_fetch,
    encode_produce,
    encode_replicate,
)
from raftlog.v1 import common_pb2, log_pb2, replication_pb2


@pytest.fixture(scope="module", params=[SMALL_BYTES, 0], ids=["small ones by the runtime", "all cut"], autouse=True)
def _small_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SMALL_BYTES", request.param)
        yield


int32 = st.integers(-1, 2**31 - 1)
payloads = st.one_of(st.binary(max_size=300), st.just(b"x" * 20_000))
parts = st.builds(
    ProducePart,
    st.builds(
        log_pb2.ProducePartition,
        topic_id=st.binary(max_size=16),
        partition=int32,
        leader_epoch=int32,
        chain=st.integers(0, 2**32 - 1),
    ),
    payloads,
)
requests = st.builds(
    Produce,
    st.builds(
        log_pb2.ProduceRequest,
        correlation_id=st.integers(0, 2**64 - 1),
        acks=st.sampled_from(log_pb2.Acks.values()),
        timeout_ms=st.integers(0, 2**32 - 1),
        lane=st.integers(0, 2**32 - 1),
    ),
    st.lists(parts, max_size=4),
    st.just(()),
)
frames = st.builds(
    Frame,
    st.builds(
        log_pb2.FetchFrame,
        subscription_id=st.integers(0, 2**32 - 1),
        error=st.one_of(st.none(), st.builds(common_pb2.Error, message=st.text(max_size=9))),
        high_watermark=st.integers(-1, 2**62),
    ),
    payloads,
)

replica_frames = st.builds(
    ReplicaFrame,
    st.builds(
        replication_pb2.ReplicaFrame,
        subscription_id=st.integers(0, 2**32 - 1),
        error=st.one_of(st.none(), st.builds(common_pb2.Error, message=st.text(max_size=9))),
        diverging=st.one_of(st.none(), st.builds(replication_pb2.DivergingEpoch, leader_epoch=int32)),
        high_watermark=st.integers(-1, 2**62),
        catch_up=st.booleans(),
    ),
    payloads,
)


def whole_request(request: Produce) -> log_pb2.ProduceRequest:
    message = log_pb2.ProduceRequest()
    message.CopyFrom(request.head)
    for part in request.parts:
        added = message.partitions.add()
        added.CopyFrom(part.head)
        added.records = bytes(part.records)
    message.more.extend(whole_request(each) for each in request.more)
    return message


@given(requests)
def test_produce_requests_agree_with_the_runtime(request: Produce) -> None:
    message = whole_request(request)
    assert log_pb2.ProduceRequest.FromString(encode_produce(request)) == message
    back = decode_produce(message.SerializeToString())
    assert whole_request(back) == message
    assert back.head == request.head


@given(requests, st.lists(requests, max_size=4))
def test_requests_in_one_message_agree_with_the_runtime(first: Produce, more: list[Produce]) -> None:
    request = first._replace(more=more)
    message = whole_request(request)
    assert log_pb2.ProduceRequest.FromString(encode_produce(request)) == message
    back = decode_produce(message.SerializeToString())
    assert whole_request(back) == message
    assert [each.head for each in (back, *back.more)] == [each.head for each in (first, *more)]


@pytest.mark.parametrize("size", [1, SMALL_BYTES])
def test_requests_are_nested_once(size: int) -> None:
    def one(*more: Produce) -> Produce:
        return Produce(log_pb2.ProduceRequest(), [ProducePart(log_pb2.ProducePartition(), bytes(size))], more)

    assert len(decode_produce(encode_produce(one(one(), one()))).more) == 2
    message = whole_request(one())
    message.more.append(whole_request(one(one())))
    with pytest.raises(InvalidRequestError, match="has `more` of its own"):
        decode_produce(message.SerializeToString())


@given(st.lists(frames, max_size=4))
def test_fetch_responses_agree_with_the_runtime(drawn: list[Frame]) -> None:
    message = log_pb2.FetchResponse()
    for frame in drawn:
        added = message.frames.add()
        added.CopyFrom(frame.head)
        added.records = bytes(frame.records)
    assert log_pb2.FetchResponse.FromString(encode_fetch(drawn)) == message
    back = decode_fetch(message.SerializeToString())
    assert [(frame.head, bytes(frame.records)) for frame in back] == [(f.head, bytes(f.records)) for f in drawn]


@given(st.lists(replica_frames, max_size=4))
def test_replicate_responses_agree_with_the_runtime(drawn: list[ReplicaFrame]) -> None:
    message = replication_pb2.ReplicateResponse()
    for frame in drawn:
        added = message.frames.add()
        added.CopyFrom(frame.head)
        added.records = bytes(frame.records)
    assert replication_pb2.ReplicateResponse.FromString(encode_replicate(drawn)) == message
    back = decode_replicate(message.SerializeToString())
    assert [(frame.head, bytes(frame.records)) for frame in back] == [(f.head, bytes(f.records)) for f in drawn]


def test_payloads_of_large_messages_are_views() -> None:
    data = encode_fetch([Frame(log_pb2.FetchFrame(subscription_id=1), b"y" * 1000)])
    (frame,) = decode_fetch(data)
    assert isinstance(frame.records, memoryview)
    assert frame.records.obj is data
    data = encode_replicate([ReplicaFrame(replication_pb2.ReplicaFrame(subscription_id=1), b"y" * SMALL_BYTES)])
    (replica_frame,) = decode_replicate(data)
    assert isinstance(replica_frame.records, memoryview)
    assert replica_frame.records.obj is data


@given(requests, st.data())
def test_a_message_cut_short_is_refused_or_shorter_never_a_crash(request: Produce, data: st.DataObject) -> None:
    whole = encode_produce(request)
    cut = whole[: data.draw(st.integers(0, max(0, len(whole) - 1)))]
    try:
        got = decode_produce(cut)
    except InvalidRequestError:
        return
    assert whole_request(got) == log_pb2.ProduceRequest.FromString(cut)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_the_runtime_reads_them_or_refused(data: bytes) -> None:
    try:
        got = decode_produce(data)
    except InvalidRequestError:
        return
    whole_request(got)


def test_unknown_fields_are_skipped() -> None:
    unknown = bytes([15 << 3 | 0, 5, 14 << 3 | 1]) + bytes(8) + bytes([13 << 3 | 5]) + bytes(4)
    known = encode_produce(
        Produce(log_pb2.ProduceRequest(correlation_id=7), [ProducePart(log_pb2.ProducePartition(), b"r")])
    )
    back = decode_produce(unknown + known)
    assert back.head.correlation_id == 7
    assert [bytes(part.records) for part in back.parts] == [b"r"]


@pytest.mark.parametrize("data", [b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b"])
def test_garbage_is_refused_with_a_reason(data: bytes) -> None:
    for decode in (decode_fetch, decode_replicate):
        with pytest.raises(InvalidRequestError, match="the message is not"):
            decode(data)


def test_a_message_of_very_many_tiny_parts_is_refused_before_they_are_built() -> None:
    whole = b"\x22\x00" * MAX_PARTS
    assert len(decode_produce(whole).parts) == MAX_PARTS
    with pytest.raises(InvalidRequestError, match="at most"):
        decode_produce(whole + b"\x22\x00")


@pytest.mark.parametrize("parts", [150, MAX_PARTS])
def test_the_parts_of_all_requests_of_a_message_count_together(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    built: list[bytes] = []

    class Counting(wire.ProducePart):
        def __new__(cls, head: log_pb2.ProducePartition, records: Buffer) -> Counting:
            built.append(b"")
            return super().__new__(cls, head, records)

    monkeypatch.setattr(wire, "ProducePart", Counting)
    further = b"\x22\x00" * parts
    prefix = b"\x42" + wire._varint(len(further))
    with pytest.raises(InvalidRequestError, match="at most 10000 parts"):
        decode_produce((prefix + further) * 100)
    assert len(built) <= MAX_PARTS, (
        f"{len(built)} parts were built, though more than {MAX_PARTS} must be refused before they are"
    )


def test_a_message_holds_so_many_requests() -> None:
    padding = bytes([15 << 3 | 2]) + wire._varint(SMALL_BYTES) + bytes(SMALL_BYTES)  # an unknown field: the large path
    for front in (b"", padding):
        assert len(decode_produce(front + b"\x42\x00" * (MAX_REQUESTS - 1)).more) == MAX_REQUESTS - 1
        with pytest.raises(InvalidRequestError, match="at most 1000 requests"):
            decode_produce(front + b"\x42\x00" * MAX_REQUESTS)


@pytest.mark.parametrize("within", [False, True])
def test_a_request_of_many_parts_is_decoded_in_small_steps(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    class Counted(ProducePart):
        def __new__(cls, *fields: Any) -> Any:
            nonlocal made
            made += 1
            return ProducePart(*fields)

    request = log_pb2.ProduceRequest()
    for _ in range(10 if within else 1):
        each = request.more.add() if within else request
        each.partitions.extend([log_pb2.ProducePartition(records=b"x" * 100)] * (100 if within else 1_000))
    data = request.SerializeToString()
    whole = decode_produce(data)
    monkeypatch.setattr(wire, "ProducePart", Counted)
    begun, most, steps = wire.begin_produce(data), made, 1
    while not isinstance(begun, Produce):
        before, steps = made, steps + 1
        try:
            next(begun)
        except StopIteration as end:
            begun = end.value
        most = max(most, made - before)
    assert begun == whole
    assert made == 1_000
    assert most <= wire.STEP_PARTS + 100
    assert steps >= 4


def test_a_request_of_few_parts_is_decoded_at_once() -> None:
    request = log_pb2.ProduceRequest(partitions=[log_pb2.ProducePartition(records=b"x" * 10_000)] * 100)
    assert isinstance(wire.begin_produce(request.SerializeToString()), Produce)
