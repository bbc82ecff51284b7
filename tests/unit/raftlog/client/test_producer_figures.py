"""What a producer counts when something goes wrong."""

from __future__ import annotations

import threading
import time

from raftlog import Producer
from raftlog.errors import InvalidRecord, NotEnoughReplicas
from tests.support.fake_broker import FakeCluster


def counted(producer: Producer) -> dict[str, dict[str, float]]:
    """Return the figures once all that is done is in them."""
    with producer._lock:
        return producer.metrics()


def test_what_is_sent_again_counts_as_retried_and_what_fails_as_an_error() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.refuse = [NotEnoughReplicas("too few"), NotEnoughReplicas("too few")]
        with Producer(cluster.bootstrap, retry_backoff_ms=1, retry_backoff_max_ms=5) as producer:
            producer.send_batch("t", [b"a", b"b", b"c"]).result(30)
            shown = counted(producer)
            for name in ("producer-metrics", "producer-topic-metrics.t"):
                assert shown[name]["record-retry-total"] == 6, "three records, twice"
                assert shown[name]["record-send-total"] == 3
                assert shown[name]["record-error-total"] == 0
            cluster.faults.refuse.append(InvalidRecord("no"))
            assert producer.send("t", b"d").exception(30) is not None
            assert counted(producer)["producer-metrics"]["record-error-total"] == 1


def test_waits_for_room_and_what_is_under_way_are_seen() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.hold_acks()

        def release() -> None:
            deadline = time.monotonic() + 30
            while not producer._engine._room_alarms and time.monotonic() < deadline:
                time.sleep(0.001)
            while not any(each._waiters for each in producer._engine._room_alarms) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)
            cluster.release_acks()

        releasing = threading.Thread(target=release)
        with Producer(cluster.bootstrap, batch_size=2_048, buffer_memory=2_048, linger_ms=0) as producer:
            before = producer.metrics()["producer-metrics"]
            assert (before["bufferpool-wait-time-ns-total"], before["buffer-available-bytes"]) == (0, 2_048)
            first = producer.send("t", b"x" * 900)
            assert producer.metrics()["producer-metrics"]["buffer-available-bytes"] < 2_048
            releasing.start()
            producer.send("t", b"x" * 900).result(30)
            releasing.join()
            assert first.done()
            after = counted(producer)["producer-metrics"]
            assert after["bufferpool-wait-time-ns-total"] > 1_000_000, "the second one waited for the first"
            assert after["buffer-available-bytes"] == 2_048
