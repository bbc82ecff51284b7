"""What the producer does with arguments, partitions, callbacks, Arrow data and codecs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from raftlog import Delivery, Producer
from raftlog.errors import (
    InvalidPartitions,
    InvalidRequestError,
    MessageTooLarge,
    RaftlogError,
)
from tests.support.fake_broker import FakeCluster

FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}


def numbered(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": "text"}, TypeError, r"value='text'\.encode\(\)"),
        ({"value": 5}, TypeError, "not int"),
        ({"key": "text"}, TypeError, r"key='text'\.encode\(\)"),
        ({"headers": [("a", "b")]}, TypeError, "header"),
        ({"headers": ["abc"]}, TypeError, "pairs"),
        ({"partition": "0"}, TypeError, "partition"),
        ({"partition": 9}, InvalidPartitions, "partitions 0 to 1"),
        ({"partition": -1}, InvalidPartitions, "partitions 0 to 1"),
        ({"timestamp_ms": 1.5}, TypeError, "milliseconds"),
        ({"timestamp_ms": -5}, InvalidRequestError, "negative"),
        ({"timestamp_ms": 253_402_300_800_000}, InvalidRequestError, "timestamp_ms 253402300800000 .* year 9999"),
        ({"value": b"x" * 2_000_000}, MessageTooLarge, r"2000\d{3} bytes.*max\.request\.size=1048576"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        with Producer(cluster.bootstrap) as producer:
            with pytest.raises(error, match=message):
                producer.send("t", **arguments)
            assert producer.send("t", b"fine").result(30).offset == 0


@pytest.mark.parametrize(
    ("timestamps", "message"),
    [
        (-5, "row 0 .*-5 is negative"),
        ([7, -5], "row 1 .*-5 is negative"),
        (pa.array([7, None, -5], pa.timestamp("ms")), "row 2 .*-5 is negative"),
        (pa.array([253_402_300_800_000, 7], pa.int64()), "row 0 .* year 9999"),
        (pa.array([7, 1 << 62], pa.timestamp("s")), "timestamp"),
    ],
)
def test_timestamps_of_many_records_are_checked_as_those_of_one(timestamps: Any, message: str) -> None:
    with FakeCluster() as cluster, Producer(cluster.bootstrap) as producer:
        cluster.create_topic("t")
        count = len(timestamps) if not isinstance(timestamps, int) else 2
        if isinstance(timestamps, pa.Array):
            data: Any = pa.table({"value": [b"v"] * count, "timestamp": timestamps})
            arguments: dict[str, Any] = {}
        else:
            data, arguments = [b"v"] * count, {"timestamp_ms": timestamps}
        with pytest.raises(InvalidRequestError, match=message):
            producer.send_batch("t", data, **arguments)
        producer.send_batch("t", [b"v"] * 2, timestamp_ms=[0, 253_402_300_799_999]).result(30)
        assert len(cluster.values("t")) == 2, "nothing of what was refused"


def test_records_without_a_key_go_to_all_partitions_in_turn() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        with Producer(cluster.bootstrap, batch_size=2000, linger_ms=60_000) as producer:
            for _ in range(4000):
                producer.send("t", b"x" * 10)
        counts = [len(cluster.values("t", partition)) for partition in range(4)]
        assert sum(counts) == 4000
        assert min(counts) > 900, counts


def test_callbacks_run_once_and_their_failures_harm_nobody() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        seen: list[Delivery] = []

        def fail(delivery: Delivery) -> None:
            seen.append(delivery)
            raise RuntimeError("mine")

        with Producer(cluster.bootstrap, **FAST) as producer:
            one, two = producer.send("t", b"1"), producer.send("t", b"2")
            one.add_done_callback(fail)
            two.add_done_callback(seen.append)
            producer.flush(30)
            two.add_done_callback(seen.append)  # at once: it is done
        assert seen == [one, two, two]


def test_waiting_inside_a_callback_is_refused_instead_of_a_deadlock() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        caught: list[RaftlogError] = []
        with Producer(cluster.bootstrap, **FAST) as producer:

            def wait_there(delivery: Delivery) -> None:
                try:
                    producer.send("t", b"2").result(30)
                except RaftlogError as error:
                    caught.append(error)

            delivery = producer.send("t", b"1")
            delivery.add_done_callback(wait_there)
            producer.flush(30)
        assert len(caught) == 1
        assert isinstance(caught[0], InvalidRequestError)


def test_send_batch_keeps_the_order_of_each_partition_and_reports_ranges() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        rows = 5000
        keys = [b"k%d" % (number % 17) for number in range(rows)]
        with Producer(cluster.bootstrap, max_request_size=20_000, batch_size=8000) as producer:
            single = {key: producer.send("t", b"", key).result(30).partition for key in set(keys)}
            start = [len(cluster.values("t", partition)) for partition in range(3)]
            table = pa.table({"key": keys, "value": numbered(rows)})
            ranges = producer.send_batch("t", table).result(30)
        assert sum(part.record_count for part in ranges) == rows
        for partition in range(3):
            expected = [value for key, value in zip(keys, numbered(rows), strict=True) if single[key] == partition]
            assert cluster.values("t", partition)[start[partition] :] == expected


def test_send_batch_follows_what_send_has_queued() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, linger_ms=1000) as producer:
            producer.send("t", b"1")
            producer.send_batch("t", [b"2", b"3"])
            producer.send("t", b"4")
        assert cluster.values("t") == [b"1", b"2", b"3", b"4"]


def test_send_batch_refuses_a_row_that_fits_nowhere_before_sending_any() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, max_request_size=10_000) as producer:
            with pytest.raises(MessageTooLarge, match=r"row 2 .*max\.request\.size=10000"):
                producer.send_batch("t", [b"1", b"2", b"x" * 20_000])
            with pytest.raises(InvalidPartitions):
                producer.send_batch("t", [b"1", b"2"], partition=[0, 7])
            assert producer.send_batch("t", []).result(1) == []
        assert cluster.values("t") == []


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_arrives(codec: str) -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, compression_type=codec, compression_level=None) as producer:
            producer.send_batch("t", [b"same" * 20] * 1000).result(30)
            producer.send("t", None, b"tombstone").result(30)
        assert cluster.values("t") == [b"same" * 20] * 1000 + [None]
        assert (sum(map(len, cluster.topics["t"].partitions[0].batches)) < 20_000) == (codec != "none")
