"""Bad input to a real broker: each has its error, and the next good request on the same stream succeeds."""

from __future__ import annotations

import asyncio
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from raftlog import Admin
from raftlog._installed import server_command, server_environment
from raftlog.errors import (
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidTopic,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from raftlog.format import HEADER_BYTES, Codec
from raftlog.format.compression import compress
from raftlog.format.header import build_batch, parse_header
from raftlog.format.wire import Frame
from raftlog.testing import Cluster
from raftlog.v1 import common_pb2, log_pb2
from tests.support.batches import batch_of
from tests.support.raw_client import TIMEOUT_S, RawClient, raw_client
from tests.support.steady import STEADY

GOOD = batch_of(b"good")
HEADER = parse_header(GOOD)
BODY = GOOD[HEADER_BYTES:]

BAD_BATCHES = {
    "empty": (b"", common_pb2.CORRUPT_MESSAGE),
    "truncated": (GOOD[:-5], common_pb2.CORRUPT_MESSAGE),
    "wrong checksum": (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), common_pb2.CORRUPT_MESSAGE),
    "wrong magic": (build_batch(HEADER._replace(magic=9), BODY), common_pb2.UNSUPPORTED_VERSION),
    "wrong count": (build_batch(HEADER._replace(record_count=2, last_offset_delta=1), BODY), common_pb2.INVALID_RECORD),
    "unknown codec": (build_batch(HEADER._replace(attributes=7), BODY), common_pb2.UNSUPPORTED_COMPRESSION_TYPE),
    "not Arrow": (build_batch(HEADER, b"certainly not an Arrow message....."), common_pb2.CORRUPT_MESSAGE),
    "control batch": (build_batch(HEADER._replace(attributes=1 << 5), BODY), common_pb2.INVALID_RECORD),
    "two batches": (GOOD + GOOD, common_pb2.CORRUPT_MESSAGE),
    "bomb": (
        build_batch(HEADER._replace(attributes=int(Codec.ZSTD)), compress(bytes(200 << 20), Codec.ZSTD)),
        common_pb2.BATCH_TOO_EXPANSIVE,
    ),
    "lying bomb": (
        build_batch(
            HEADER._replace(attributes=int(Codec.ZSTD)),
            struct.pack("<I", 100) + compress(bytes(200 << 20), Codec.ZSTD)[4:],
        ),
        common_pb2.CORRUPT_MESSAGE,
    ),
    "oversized": (batch_of(bytes(5 << 20)), common_pb2.MESSAGE_TOO_LARGE),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=1, config=STEADY) as running:
        with Admin(running.bootstrap) as admin:
            admin.create_topic("t", 1)
        yield running


async def assert_good_request_succeeds(client: RawClient, topic_id: bytes) -> None:
    result = await client.produce(topic_id, GOOD)
    assert not result.HasField("error"), result.error.message


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_is_refused_and_harms_nobody(cluster: Cluster, name: str) -> None:
    bad, code = BAD_BATCHES[name]

    async def scenario() -> None:
        async with raw_client(cluster.bootstrap) as client:
            topic_id = await client.topic_id("t")
            before = (await client.produce(topic_id, GOOD)).base_offset
            result = await client.produce(topic_id, bad)
            assert result.error.code == code, result.error
            assert len(result.error.message) > 15
            after = await client.produce(topic_id, GOOD)
            assert not after.HasField("error"), after.error.message
            assert after.base_offset == before + 1, (
                "the offset must be one higher than before, as nothing of the bad batch may be in the log"
            )

    asyncio.run(scenario())


def test_what_does_not_exist_is_named(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with raw_client(cluster.bootstrap) as client:
            topic_id = await client.topic_id("t")
            for bad_id, partition, code in (
                (b"\7" * 16, 0, common_pb2.UNKNOWN_TOPIC_ID),
                (b"short", 0, common_pb2.INVALID_REQUEST),
                (b"x" * 1_000_000, 0, common_pb2.INVALID_REQUEST),
                (topic_id, 1, common_pb2.UNKNOWN_TOPIC_ID),
                (topic_id, -1, common_pb2.UNKNOWN_TOPIC_ID),
            ):
                result = await client.produce(bad_id, GOOD, partition=partition)
                assert result.error.code == code
                assert len(result.error.message) < 300
            ahead = await client.produce(topic_id, GOOD, leader_epoch=1_000)
            assert ahead.error.code == common_pb2.UNKNOWN_LEADER_EPOCH
            await assert_good_request_succeeds(client, topic_id)

    asyncio.run(scenario())


def test_later_batches_of_a_chain_are_refused_until_the_client_begins_another(cluster: Cluster) -> None:
    bad = BAD_BATCHES["wrong checksum"][0]

    async def scenario() -> None:
        async with raw_client(cluster.bootstrap) as client:
            topic_id = await client.topic_id("t")
            call = client.produce_call()
            for number, (chain, batch) in enumerate([(5, GOOD), (5, bad), (5, GOOD), (4, GOOD), (6, GOOD)]):
                await call.write(client.request(number, [(topic_id, 0, -1, chain, batch)]))
            answers: dict[int, log_pb2.ProduceResult] = {}
            while len(answers) < 5:
                response = await asyncio.wait_for(call.read(), TIMEOUT_S)
                answers[response.correlation_id] = response.results[0]
            codes = [answers[number].error.code for number in range(5)]
            broken = common_pb2.CHAIN_BROKEN
            assert codes == [common_pb2.NONE, common_pb2.CORRUPT_MESSAGE, broken, broken, common_pb2.NONE]
            assert answers[4].base_offset == answers[0].base_offset + 1
            call.cancel()

    asyncio.run(scenario())


def test_a_stream_that_is_not_protobuf_ends_and_others_live_on(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with raw_client(cluster.bootstrap) as client:
            topic_id = await client.topic_id("t")
            garbage: Any = client.channel.stream_stream("/raftlog.v1.Log/Produce")()
            await garbage.write(b"\xff\xff\xff\xff")
            assert await asyncio.wait_for(garbage.code(), TIMEOUT_S) != grpc.StatusCode.OK
            await assert_good_request_succeeds(client, topic_id)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "requests",
    [
        [log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=1))],
        [log_pb2.FetchRequest(open=log_pb2.OpenFetchSession()), log_pb2.FetchRequest(open=log_pb2.OpenFetchSession())],
        [
            log_pb2.FetchRequest(open=log_pb2.OpenFetchSession()),
            log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=-5)),
        ],
        [log_pb2.FetchRequest()],
    ],
)
def test_a_client_that_breaks_the_fetch_protocol_is_told(
    cluster: Cluster, requests: list[log_pb2.FetchRequest]
) -> None:
    async def scenario() -> None:
        async with raw_client(cluster.bootstrap) as client:
            call = client.fetch_call()
            for request in requests:
                await call.write(request)
            assert await asyncio.wait_for(call.code(), TIMEOUT_S) == grpc.StatusCode.INVALID_ARGUMENT
            assert "InvalidRequestError" in await call.details()

    asyncio.run(scenario())


@pytest.mark.parametrize("offset", [-1, 10**9])
def test_a_fetch_out_of_range_is_an_error_of_that_partition_alone(cluster: Cluster, offset: int) -> None:
    async def scenario() -> None:
        async with raw_client(cluster.bootstrap) as client:
            topic_id = await client.topic_id("t")
            await assert_good_request_succeeds(client, topic_id)
            call = client.fetch_call()
            await call.write(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 20)))

            async def subscribed(subscription_id: int, offset: int) -> Frame:
                part = log_pb2.FetchPartition(
                    subscription_id=subscription_id, topic_id=topic_id, offset=offset, leader_epoch=-1
                )
                await call.write(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part])))
                frame: Frame = (await asyncio.wait_for(call.read(), TIMEOUT_S))[0]
                assert frame.head.subscription_id == subscription_id
                return frame

            refused = await subscribed(1, offset)
            assert refused.head.error.code == common_pb2.OFFSET_OUT_OF_RANGE
            assert str(offset) in refused.head.error.message
            assert len((await subscribed(2, 0)).records) > 0
            call.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "request_bytes"),
    [
        ("Log/ListOffsets", b"\x0a\x00" * 600_000),
        ("Log/DeleteRecords", b"\x0a\x00" * 600_000),
        ("Metadata/Get", b"\x0a\x00" * 600_000),
        ("Admin/CreateTopic", b"\x0a" + b"\x80\x80\x80\x01" + b"n" * (1 << 21)),
    ],
)
def test_a_request_with_very_many_empty_entries_is_refused(cluster: Cluster, method: str, request_bytes: bytes) -> None:

    async def scenario() -> None:
        async with raw_client(cluster.bootstrap) as client:
            topic_id = await client.topic_id("t")
            call_method: Any = client.channel.unary_unary(f"/raftlog.v1.{method}")
            call = call_method(request_bytes)
            assert await asyncio.wait_for(call.code(), TIMEOUT_S) != grpc.StatusCode.OK
            await assert_good_request_succeeds(client, topic_id)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", ".", "..", "no spaces", "slash/es", "x" * 250, "ünicode", "new\nline"])
def test_bad_topic_names(cluster: Cluster, name: str) -> None:
    with Admin(cluster.bootstrap) as admin:
        with pytest.raises(InvalidTopic):
            admin.create_topic(name)
        assert "t" in admin.list_topics()


def test_bad_topic_settings(cluster: Cluster) -> None:
    with Admin(cluster.bootstrap) as admin:
        with pytest.raises(InvalidConfig, match=r"retention\.ms"):
            admin.create_topic("u", configs={"retention.msec": "5"})
        with pytest.raises(InvalidConfig, match=r"segment\.bytes"):
            admin.create_topic("u", configs={"segment.bytes": "many"})
        with pytest.raises(InvalidPartitions):
            admin.create_topic("u", partitions=-3)
        with pytest.raises(InvalidReplicationFactor):
            admin.create_topic("u", replication_factor=2)
        with pytest.raises(TopicAlreadyExists):
            admin.create_topic("t")
        with pytest.raises(UnknownTopicOrPartition):
            admin.delete_topic("never-there")
        admin.create_topic("u")


def run_server(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        server_command("--config", str(config)),
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_two_servers_on_one_log_directory(tmp_path: Path) -> None:
    config = tmp_path / "second.toml"
    with Cluster(nodes=1, directory=tmp_path / "cluster") as cluster:
        config.write_text(
            f'"node.id" = 1\n"listeners" = "127.0.0.1:0"\n"log.dirs" = "{cluster.log_dir(1)}"\n'
            f'"metadata.log.dir" = "{tmp_path / "meta"}"\n'
        )
        second = run_server(config)
        assert second.returncode == 1
        assert "in use by another process" in second.stderr or "another" in second.stderr
        assert "Traceback" not in second.stderr
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("still-fine")


def test_a_data_directory_of_a_newer_format(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    with Cluster(nodes=1, directory=directory) as cluster:
        log_dir = cluster.log_dir(1)
    properties = log_dir / "meta.properties"
    text = properties.read_text()
    newer = text.replace("log-dir 1\n", "log-dir 99\n", 1)
    assert newer != text
    properties.write_text(newer)
    config = next(directory.rglob("*.toml"))
    refused = run_server(config)
    assert refused.returncode == 1
    assert "99" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert properties.read_text() == newer, f"a server that refuses to start must not change {properties.name}"
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"log.retention.msec" = 5', "log.retention.ms"),
        ('"listeners" = "0.0.0.0:9092"', "insecure"),
        ('"node.id" = "one"', "node.id"),
        ("this is no TOML", "TOML"),
    ],
)
def test_a_bad_server_configuration(tmp_path: Path, line: str, words: str) -> None:
    config = tmp_path / "server.toml"
    node_id = "" if "node.id" in line else '"node.id" = 1\n'
    config.write_text(f'"log.dirs" = "{tmp_path / "data"}"\n{node_id}{line}\n')
    refused = run_server(config)
    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "data").exists()
