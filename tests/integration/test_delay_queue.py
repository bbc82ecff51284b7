"""Delay queues on a real cluster: when records become visible, which consumer gets them, and what survives."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from raftlog import Admin, Consumer, DelayQueue, Producer, Record, TopicPartition, aio
from raftlog.errors import (
    ClosedError,
    CoordinatorNotAvailable,
    InvalidRequestError,
    PartitionNotOwned,
    RaftlogError,
    RetriableError,
    UnknownTopicOrPartition,
)
from raftlog.testing import Cluster
from tests.support.steady import STEADY

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0
SHORT_SESSIONS = {"group.consumer.session.timeout.ms": 2_000, "group.consumer.heartbeat.interval.ms": 300}
"""For tests in which a member is missed; in other tests a member that is paused for seconds keeps its partitions."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=1, config=STEADY, group_consumer_session_timeout_ms=60_000) as cluster:
        yield cluster


def take(queue: DelayQueue, count: int) -> list[tuple[float, Record]]:
    """Poll until there are so many records; return each with the time at which it came."""
    found: list[tuple[float, Record]] = []
    until = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < until, f"the queue gave only {len(found)} of {count} records within {WAIT_S:g} s"
        records = queue.poll(timeout=0.5)
        found += [(time.time(), record) for record in records]
    return found


def values(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


def content(cluster: Cluster, *topics: str) -> list[Record]:
    """Return what is committed in the topics now."""
    found: list[Record] = []
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([part for topic in topics for part in consumer.partitions_for(topic)])
        ends = consumer.end_offsets(consumer.assignment())
        until = time.monotonic() + WAIT_S
        while any(consumer.position(part) < end for part, end in ends.items()):
            assert time.monotonic() < until, (
                f"after {WAIT_S:g} s {len(found)} records were read, and the ends {ends} are not reached"
            )
            found += consumer.poll(0.2)
    return found


def content_once_there(cluster: Cluster, count: int, *topics: str) -> list[Record]:
    """Return what is committed in the topics once there are so many records: markers may come late."""
    until = time.monotonic() + WAIT_S
    while len(found := content(cluster, *topics)) < count:
        assert time.monotonic() < until, f"only {len(found)} of {count} records can be read after {WAIT_S:g} s"
    return found


def forward_all(cluster: Cluster, queue: DelayQueue, topic: str, count: int) -> None:
    """Hand over until a topic has so many records; what passes may come in between."""
    until = time.monotonic() + WAIT_S
    while len(content(cluster, topic)) < count:
        assert time.monotonic() < until
        with contextlib.suppress(RetriableError):
            queue.forward(timeout=0.5)


def refusal(queue: DelayQueue) -> UnknownTopicOrPartition:
    """Hand over until a missing target is reported; the broker that reports it may not answer at first."""
    until = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < until, f"the missing target was not reported within {WAIT_S:g} s"
        try:
            queue.forward(timeout=5)
        except UnknownTopicOrPartition as error:
            return error
        except RetriableError:
            continue


def test_records_become_visible_when_they_are_due(cluster: Cluster) -> None:
    delays = {b"zero": 0.0, b"short": 0.1, b"level": 0.3, b"between": 1.4, b"long": 2.6, b"span": 0.6}
    with DelayQueue(cluster.bootstrap, "due", levels=[0.3, 1, 2]) as queue:
        assert queue.levels == [timedelta(seconds=each) for each in (0.3, 1, 2)]
        queue.create()
        queue.send(b"before", 0).result(timeout=WAIT_S)
        take(queue, 1)  # it is a member of its group now
        due = {}
        for value, delay in delays.items():
            before = time.time()
            queue.send(value, delay=timedelta(seconds=delay) if value == b"span" else delay, key=b"k").result(
                timeout=30
            )
            due[value] = before + delay
        came = {record.value: at for at, record in take(queue, len(delays))}
    assert came.keys() == delays.keys()
    for value, at in due.items():
        late_s = came[value] - at
        assert late_s > 0, f"{value!r} came {-late_s:.6f} s before it was due"
        assert late_s < 5, f"{value!r} came {late_s:.3f} s after it was due, more than 5 s"


def test_the_topics_of_the_levels(cluster: Cluster) -> None:
    with DelayQueue(cluster.bootstrap, "made", levels=[5, 90, 3600]) as queue, Admin(cluster.bootstrap) as admin:
        assert queue.create(partitions=2, retention=timedelta(hours=1)) == [
            f"made.delay.{each}" for each in ("5s", "90s", "1h")
        ]
        assert queue.create() == []
        assert len(admin.describe_topic("made.delay.90s").partitions) == 2
        assert admin.describe_configs(topic="made.delay.90s")["retention.ms"].value == "3690000"


def test_same_key_and_delay_stay_in_order(cluster: Cluster) -> None:
    with DelayQueue(cluster.bootstrap, "ordered", levels=[0.5]) as queue:
        queue.create(partitions=3)
        for number in range(900):
            queue.send(b"%d" % number, 0.5, key=b"%d" % (number % 7))
        queue.flush()
        came = [record for _, record in take(queue, 900)]
    for key in range(7):
        mine = [int(record.value or b"") for record in came if record.key == b"%d" % key]
        assert mine == sorted(mine)
    assert len({record.value for record in came}) == 900


def test_what_a_worker_has_not_come_back_from_is_given_again(cluster: Cluster) -> None:
    with DelayQueue(cluster.bootstrap, "again", levels=[0.1]) as queue:
        for number in range(3):
            queue.send(b"%d" % number, 0.1).result(timeout=WAIT_S)
        assert len(take(queue, 1)) >= 1
    with DelayQueue(cluster.bootstrap, "again", levels=[0.1]) as queue:
        assert values([record for _, record in take(queue, 3)]) == [b"0", b"1", b"2"]
        queue.commit()
    with DelayQueue(cluster.bootstrap, "again", levels=[0.1]) as queue:
        assert queue.poll(timeout=1) == []
        queue.send(b"3", 0.1)
        assert values(queue.poll(timeout=WAIT_S)) == [b"3"]


def test_a_session_that_is_over_by_the_time_of_the_next_poll() -> None:
    """Partitions are gone already when the queue wants to read them again, and it has not been told of it."""
    with (
        Cluster(nodes=1, config=SHORT_SESSIONS) as cluster,
        DelayQueue(cluster.bootstrap, "frozen", levels=[4]) as queue,
    ):
        while True:
            before = time.time()
            queue.send(b"%f" % before, 4).result(timeout=WAIT_S)
            if not queue.poll(timeout=0.5):  # else all that took so long that it was due
                break
            queue.commit()
        cluster.pause(1)
        consumer = queue._consumer
        assert consumer is not None
        until = time.monotonic() + WAIT_S
        while consumer._engine.positions.states:
            assert time.monotonic() < until, (
                f"the session has ended, but the queue still has its partitions after {WAIT_S:g} s"
            )
            time.sleep(0.05)
        cluster.resume(1)
        last = b"%f" % before
        came: dict[bytes | None, float] = {}
        while last not in came:
            came |= {record.value: at for at, record in take(queue, 1)}
    assert came[last] >= before + 4


def test_nothing_is_fetched_while_everything_waits(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand records that are due in a while: they are looked at once, and left alone until then."""
    polled: list[int] = []
    poll = Consumer.poll

    def counted(self: Consumer, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        records = poll(self, timeout, max_records)
        polled.append(len(records))
        return records

    monkeypatch.setattr(Consumer, "poll", counted)
    with DelayQueue(cluster.bootstrap, "quiet", levels=[14]) as queue:
        queue.create()
        first_due = time.time() + 14
        for number in range(1000):
            queue.send(b"%d" % number, 14)
        queue.flush()
        while time.time() < first_due - 8:
            assert queue.poll(timeout=0.5) == []
        looked_at, calls = sum(polled), len(polled)
        assert looked_at <= 2000
        assert calls <= 40
        assert len(take(queue, 1000)) == 1000
        assert sum(polled) <= looked_at + 4000


def test_a_commit_that_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that may pass comes out of the call, and the next one tries again; one that came too late is logged."""
    refusals: list[RaftlogError] = [CoordinatorNotAvailable("it moves"), PartitionNotOwned("it has moved")]
    committed: list[object] = []
    commit = Consumer.commit

    def refused(self: Consumer, offsets: dict[TopicPartition, int]) -> None:
        committed.append(offsets)
        if refusals:
            raise refusals.pop(0)
        commit(self, offsets)

    monkeypatch.setattr(Consumer, "commit", refused)
    with DelayQueue(cluster.bootstrap, "refused", levels=[0.2]) as queue:
        queue.send(b"0", 0.2).result(timeout=WAIT_S)
        assert values(queue.poll(timeout=WAIT_S)) == [b"0"]
        with pytest.raises(CoordinatorNotAvailable, match="it moves"):
            queue.poll(timeout=0)
        assert queue.poll(timeout=0) == []
        assert "another worker has refused.delay.200ms-0" in caplog.text
        queue.send(b"1", 0.2).result(timeout=WAIT_S)
        assert values(queue.poll(timeout=WAIT_S)) == [b"1"]
        queue.commit()
    assert committed == [{TopicPartition("refused.delay.200ms", 0): offset} for offset in (1, 1, 2)]


def test_due_records_go_to_their_target(cluster: Cluster) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("orders", partitions=2)
        admin.create_topic("mails", partitions=1)
    with DelayQueue(cluster.bootstrap, "forwarded", levels=[0.2, 1], target="orders") as queue:
        before = time.time()
        queue.send(b"one", 0.2, key=b"k", headers={"a": b"b"})
        queue.send(b"two", 1.3, key=b"k")
        queue.send(b"mail", 0.2, target="mails")
        queue.flush()
        forwarded = 0
        while forwarded < 3:
            forwarded += queue.forward(timeout=WAIT_S)
    found = {record.value: record for record in content_once_there(cluster, 3, "orders", "mails")}
    assert found.keys() == {b"one", b"two", b"mail"}
    assert (found[b"one"].topic, found[b"one"].key, found[b"one"].headers) == ("orders", b"k", (("a", b"b"),))
    assert found[b"two"].timestamp_ms >= (before + 1.3) * 1000 - 1  # it is rounded down
    assert found[b"mail"].topic == "mails"


def test_a_target_that_is_not_there_holds_up_its_own_partition_only(cluster: Cluster) -> None:
    options = {"max.block.ms": 3000, "delivery.timeout.ms": 3000, "request.timeout.ms": 1000}
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("stays")
        admin.create_topic("is-deleted")
        with DelayQueue(cluster.bootstrap, "one-bad", levels=[0.2, 0.4], producer_config=options) as queue:
            queue.create()
            with pytest.raises(UnknownTopicOrPartition, match="no-such-topic"):
                queue.send(b"v", 0.2, target="no-such-topic")
            queue.send(b"bad", 0.2, target="is-deleted").result(timeout=WAIT_S)
            for number in range(10):
                queue.send(b"good %d" % number, 0.4, target="stays").result(timeout=WAIT_S)
            admin.delete_topic("is-deleted")
            time.sleep(1)  # all are due at once
            assert "one-bad.delay.200ms-0" in "".join(refusal(queue).__notes__)
            forward_all(cluster, queue, "stays", 10)
            assert values(content(cluster, "stays")) == [b"good %d" % number for number in range(10)]
            admin.create_topic("is-deleted")
            forward_all(cluster, queue, "is-deleted", 1)
    assert values(content(cluster, "is-deleted")) == [b"bad"]


def test_what_is_for_workers_is_not_forwarded_and_not_lost(cluster: Cluster) -> None:
    with DelayQueue(cluster.bootstrap, "for-workers", levels=[0.2]) as queue:
        queue.send(b"v", 0.2).result(timeout=WAIT_S)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match=r"for-workers.delay.200ms-0 has no target.*poll"):
                queue.forward(timeout=WAIT_S)
        assert values(queue.poll(timeout=WAIT_S)) == [b"v"]


def test_run_goes_on_until_it_is_told_to_stop_or_closed(cluster: Cluster) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("run-target")
    for by_event in (True, False):
        queue = DelayQueue(cluster.bootstrap, "run", levels=[0.2], target="run-target")
        stop = threading.Event()
        failed: list[BaseException] = []

        def run(queue: DelayQueue = queue, stop: threading.Event = stop, failed: list[BaseException] = failed) -> None:
            try:
                queue.run(stop)
            except BaseException as error:  # the test shows it
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        queue.send(b"v", 0.2).result(timeout=WAIT_S)
        with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.subscribe("run-target")
            while consumer.position(TopicPartition("run-target", 0)) < (1 if by_event else 2):
                consumer.poll(timeout=0.2)
        if by_event:
            stop.set()
            thread.join(WAIT_S)
        queue.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert not failed


@pytest.mark.long
def test_closing_ends_what_hands_over_though_the_cluster_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(nodes=1) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("taken")
        queue = DelayQueue(cluster.bootstrap, "closed-without-cluster", levels=[1], target="taken")
        running = threading.Thread(target=queue.run)
        running.start()
        for number in range(40):
            queue.send(b"%d" % number, delay=1 + number * 0.05)
        queue.flush()
        time.sleep(1.5)
        cluster.kill(1)
        time.sleep(0.5)
        queue.close(timeout=1)
        running.join(5)
        assert not running.is_alive()
    assert [each.message for each in caplog.records if "commit it before" in each.message] == []


def test_workers_share_a_queue(cluster: Cluster) -> None:
    with (
        DelayQueue(cluster.bootstrap, "shared", levels=[0.3]) as first,
        DelayQueue(cluster.bootstrap, "shared", levels=[0.3]) as second,
    ):
        first.create(partitions=2)
        came: dict[bytes | None, int] = {}
        took = [0, 0]
        over = threading.Event()

        def work(number: int, queue: DelayQueue) -> None:
            while not over.is_set():
                for record in queue.poll(timeout=0.2):
                    came[record.value] = came.get(record.value, 0) + 1
                    took[number] += 1
            queue.commit()

        threads = [threading.Thread(target=work, args=each) for each in enumerate((first, second))]
        for thread in threads:
            thread.start()
        sent, until = 0, time.monotonic() + WAIT_S
        while (min(took) == 0 or len(came) < sent) and time.monotonic() < until:
            if min(took) == 0:
                first.send(b"%d" % sent, 0.3, key=b"%d" % sent).result(timeout=WAIT_S)
                sent += 1
            time.sleep(0.01)
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert min(took) > 0
    assert len(came) == sent


_FORWARDER = """
import sys
from raftlog import DelayQueue
queue = DelayQueue(sys.argv[1], "moved", levels=[0.2, 1], target="moved-to")
print("up", flush=True)
queue.run()
"""


@pytest.mark.parametrize("batches", [4, pytest.param(8, marks=pytest.mark.long)])
def test_due_records_reach_their_target_exactly_once_whoever_is_killed(batches: int) -> None:
    """Two workers hand over; one or the other is killed at any moment, and comes again."""
    config = {**SHORT_SESSIONS, "transaction.state.log.num.partitions": 4}
    count = 300
    with Cluster(nodes=1, config=config) as cluster, Admin(cluster.bootstrap) as admin:
        admin.create_topic("moved-to", partitions=2)
        args = [sys.executable, "-c", _FORWARDER, cluster.bootstrap]
        workers = [subprocess.Popen(args, stdout=subprocess.DEVNULL, cwd=ROOT) for _ in range(2)]
        try:
            with DelayQueue(cluster.bootstrap, "moved", levels=[0.2, 1], target="moved-to") as queue:
                queue.create(partitions=4)
                for batch in range(batches):
                    for number in range(batch * count, (batch + 1) * count):
                        queue.send(b"%d" % number, 0.2 + number % 10 / 10, key=b"%d" % number)
                        if number % 50 == 0:
                            time.sleep(0.1)
                    at = batch % 2
                    workers[at].kill()
                    workers[at].wait()
                    workers[at] = subprocess.Popen(args, stdout=subprocess.DEVNULL, cwd=ROOT)
                queue.flush()
            found: list[int] = []
            until = time.monotonic() + 300
            with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
                consumer.assign([TopicPartition("moved-to", part) for part in range(2)])
                while len(found) < count * batches and time.monotonic() < until:
                    found += [int(record.value or b"") for record in consumer.poll(0.5)]
                found += [int(record.value or b"") for record in consumer.poll(2)]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert sorted(found) == list(range(count * batches))


def test_refusals(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequestError, match="no levels"):
        DelayQueue(cluster.bootstrap, "none", levels=[])
    queue = DelayQueue(cluster.bootstrap, "refuses", levels=[1])
    with pytest.raises(InvalidRequestError, match="between 0 and a hundred years"):
        queue.send(b"v", -1)
    with pytest.raises(InvalidRequestError, match=r"raftlog\.delay\.due"):
        queue.send(b"v", 1, headers={"raftlog.delay.due": b"1"})
    with pytest.raises(TypeError):
        queue.send("text", 1)  # type: ignore[arg-type] # that is the point
    queue.close()
    queue.close()
    for refused in (queue.poll, queue.forward, queue.commit, lambda: queue.send(b"v", 1)):
        with pytest.raises(ClosedError):
            refused()


def test_a_level_that_was_taken_away_is_still_read(cluster: Cluster) -> None:
    with DelayQueue(cluster.bootstrap, "changes", levels=[0.2, 0.7]) as queue:
        queue.send(b"old", 0.7).result(timeout=WAIT_S)
    with DelayQueue(cluster.bootstrap, "changes", levels=[0.2]) as queue:
        assert values(queue.poll(timeout=WAIT_S)) == [b"old"]


def test_what_others_put_into_a_levels_topic_does_not_stop_it(cluster: Cluster) -> None:
    with DelayQueue(cluster.bootstrap, "foreign", levels=[0.2]) as queue:
        queue.create()
        with Producer(cluster.bootstrap) as producer:
            producer.send("foreign.delay.200ms", b"plain")
            producer.send("foreign.delay.200ms", b"senseless", headers={"raftlog.delay.due": b"\xff"})
        queue.send(b"mine", 0.2).result(timeout=WAIT_S)
        assert values([record for _, record in take(queue, 3)]) == [b"plain", b"senseless", b"mine"]


def test_the_same_on_an_event_loop(cluster: Cluster) -> None:
    async def work() -> list[bytes | None]:
        found: list[bytes | None] = []
        async with aio.Admin(cluster.bootstrap) as admin:
            await admin.create_topic("aio-target")
        async with aio.DelayQueue(cluster.bootstrap, "aio", levels=[0.2, 1]) as queue:
            await (await queue.send(b"one", 0.2))
            await (await queue.send(b"two", 1.3))
            await (await queue.send(b"sent on", 0.2, target="aio-target"))
            while len(found) < 2:
                found += values(await queue.poll(timeout=WAIT_S))
            await queue.commit()
            stop = asyncio.Event()
            running = asyncio.create_task(queue.run(stop))
            await (await queue.send(b"sent on by run", 0.2, target="aio-target"))
            async with aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
                await consumer.subscribe("aio-target")
                while len(found) < 4:
                    found += values(await consumer.poll(timeout=WAIT_S))
            stop.set()
            await running
        return found

    assert asyncio.run(asyncio.wait_for(work(), 2 * WAIT_S)) == [b"one", b"two", b"sent on", b"sent on by run"]
