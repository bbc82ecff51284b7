"""Transactions through the SDK on a real cluster: whole or not at all, whichever process dies in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftlog import Admin, Consumer, Producer, TopicPartition, aio
from raftlog._client.keywords import IsolationLevel
from raftlog.errors import InvalidTransactionTimeout, ProducerFenced, TransactionAbortable
from raftlog.testing import Cluster
from tests.support.steady import PATIENT

NODES = (1, 2, 3)
PARTITIONS = 3
SESSION_MS = 3000
WAIT_S = 60.0
_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = {
        **PATIENT,
        "group.consumer.session.timeout.ms": SESSION_MS,
        "group.consumer.heartbeat.interval.ms": 300,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 4,
    }
    with Cluster(nodes=len(NODES), config=config) as made:
        yield made


@pytest.fixture(autouse=True)
def everyone_is_up(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.start_all()


def new_topic(cluster: Cluster, partitions: int = PARTITIONS) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60)
    return name


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic of its own for each test, so that no open transaction holds other tests up."""
    return new_topic(cluster)


def read(cluster: Cluster, topic: str, isolation: IsolationLevel = "read_committed") -> list[bytes | None]:
    """Return all that can be read now."""
    found: list[bytes | None] = []
    parts = [TopicPartition(topic, part) for part in range(PARTITIONS)]
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", isolation_level=isolation) as consumer:
        consumer.assign(parts)
        ends = consumer.end_offsets(parts)
        until = time.monotonic() + WAIT_S
        while any(consumer.position(part) < end for part, end in ends.items()):
            assert time.monotonic() < until, (
                f"after {WAIT_S:g} s {len(found)} values were read, and the ends {ends} are not reached"
            )
            found += [record.value for record in consumer.poll(0.2)]
    return found


def wait_until_read(cluster: Cluster, topic: str, expected: list[bytes]) -> None:
    """Wait until late markers, for which no commit waits, are written: then decided transactions are visible, and no
    others ever."""
    until = time.monotonic() + WAIT_S
    while (found := sorted(filter(None, read(cluster, topic)))) != sorted(expected):
        assert not Counter(found) - Counter(expected)
        assert time.monotonic() < until, f"only {len(found)} of {len(expected)} values can be read after {WAIT_S:g} s"
        time.sleep(0.1)


def wait_until_over(cluster: Cluster, topic: str) -> None:
    """Wait until no transaction is open: readers of committed records get as far as readers of all records."""
    parts = [TopicPartition(topic, part) for part in range(PARTITIONS)]
    with (
        Consumer(cluster.bootstrap, isolation_level="read_committed") as committed,
        Consumer(cluster.bootstrap, isolation_level="read_uncommitted") as everything,
    ):
        until = time.monotonic() + WAIT_S
        while committed.end_offsets(parts) != everything.end_offsets(parts):
            assert time.monotonic() < until, f"after {WAIT_S:g} s a transaction is still open"
            time.sleep(0.05)


def numbered(count: int, what: str = "v") -> list[bytes]:
    return [b"%s-%06d" % (what.encode(), number) for number in range(count)]


def send_all(producer: Producer, topic: str, values: list[bytes]) -> None:
    for index, value in enumerate(values):
        producer.send(topic, value, partition=index % PARTITIONS)


def coordinator_of(producer: Producer) -> int:
    """Return the server that coordinates the producer's transactions."""
    transactions = producer._engine.transactions
    assert transactions is not None
    known = transactions._calls.coordinators.known(transactions.state.transactional_id)
    assert known is not None
    return known.node_id


# Whole or not at all


def test_a_transaction_is_visible_as_a_whole_once_it_is_committed(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.bootstrap, transactional_id=topic) as producer:
        producer.begin_transaction()
        send_all(producer, topic, numbered(300))
        producer.flush()
        assert read(cluster, topic) == []
        assert len(read(cluster, topic, "read_uncommitted")) == 300
        producer.commit_transaction()
        wait_until_read(cluster, topic, numbered(300))


def test_an_aborted_transaction_is_never_visible_to_who_reads_what_is_committed(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.bootstrap, transactional_id=topic) as producer:
        with pytest.raises(KeyError), producer.transaction():
            send_all(producer, topic, numbered(30, "no"))
            producer.flush()
            raise KeyError("application")
        with producer.transaction():
            send_all(producer, topic, numbered(30, "yes"))
    wait_until_read(cluster, topic, numbered(30, "yes"))
    assert len(read(cluster, topic, "read_uncommitted")) == 60


def test_the_asynchronous_producer_and_consumer(cluster: Cluster, topic: str) -> None:
    async def run() -> list[bytes | None]:
        async with aio.Producer(cluster.bootstrap, transactional_id=topic) as producer:
            async with producer.transaction():
                for value in numbered(10, "yes"):
                    await producer.send(topic, value)
            with pytest.raises(KeyError):
                async with producer.transaction():
                    await (await producer.send(topic, b"no"))
                    raise KeyError("application")
        async with aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
            await consumer.assign([TopicPartition(topic, part) for part in range(PARTITIONS)])
            found: list[bytes | None] = []
            while len(found) < 10:
                found += [record.value for record in await consumer.poll(1)]
            return found + [record.value for record in await consumer.poll(0.3)]

    assert sorted(filter(None, asyncio.run(asyncio.wait_for(run(), WAIT_S)))) == numbered(10, "yes")


def test_offsets_count_with_the_transaction(cluster: Cluster, topic: str) -> None:
    group, part = f"g-{topic}", TopicPartition(topic, 0)
    with (
        Producer(cluster.bootstrap, transactional_id=topic) as producer,
        Consumer(cluster.bootstrap, group_id=group) as consumer,
    ):
        with producer.transaction():
            producer.send(topic, b"a", partition=1)
            producer.send_offsets_to_transaction({part: 5}, consumer.group_metadata())
        assert consumer.committed(part)[part] == (5, "", -1)
        with pytest.raises(KeyError), producer.transaction():
            producer.send_offsets_to_transaction({part: 9}, group)
            raise KeyError("application")
        assert consumer.committed(part)[part] == (5, "", -1)


def test_a_timeout_above_the_server_s_is_refused(cluster: Cluster) -> None:
    with (
        Producer(cluster.bootstrap, transactional_id="patient", transaction_timeout_ms=900_001) as producer,
        pytest.raises(InvalidTransactionTimeout, match="900001"),
    ):
        producer.init_transactions()


# Fenced and late producers


def test_a_zombie_is_fenced_and_what_it_left_open_is_aborted(cluster: Cluster, topic: str) -> None:
    with (
        Producer(cluster.bootstrap, transactional_id=topic) as zombie,
        Producer(cluster.bootstrap, transactional_id=topic) as heir,
    ):
        zombie.begin_transaction()
        send_all(zombie, topic, numbered(3, "zombie"))
        zombie.flush()
        with heir.transaction():
            send_all(heir, topic, numbered(3, "heir"))
        assert isinstance(zombie.send(topic, b"zombie", partition=0).exception(WAIT_S), ProducerFenced)
        with pytest.raises(ProducerFenced, match="another producer uses this transactional id"):
            zombie.commit_transaction()
        with heir.transaction():
            send_all(heir, topic, numbered(3, "again"))
    wait_until_read(cluster, topic, numbered(3, "heir") + numbered(3, "again"))


def test_a_transaction_that_times_out_is_aborted_and_the_producer_goes_on(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.bootstrap, transactional_id=topic, transaction_timeout_ms=500) as producer:
        producer.begin_transaction()
        with contextlib.suppress(TransactionAbortable):  # later still
            send_all(producer, topic, numbered(3, "late"))
            producer.flush()
        wait_until_over(cluster, topic)
        with pytest.raises(TransactionAbortable, match="timed out after 500 ms"):
            producer.commit_transaction()
        producer.abort_transaction()
        committed = False
        while not committed:
            with contextlib.suppress(TransactionAbortable):  # late again
                with producer.transaction():
                    send_all(producer, topic, numbered(3))
                committed = True
    wait_until_read(cluster, topic, numbered(3))


LEAVES_IT_OPEN = """
import sys, time
from raftlog import Producer
from raftlog.errors import RaftlogError
producer = Producer(sys.argv[1], transactional_id=sys.argv[2], transaction_timeout_ms=2000)
while True:
    begun_s = time.monotonic()
    producer.begin_transaction()
    try:
        for delivery in [producer.send(sys.argv[2], b"left", partition=part) for part in range(3)]:
            delivery.result(60)
        break
    except RaftlogError:  # it was over before everything was there
        producer.abort_transaction()
print(begun_s, flush=True)
time.sleep(600)
"""
LEFT_OPEN_S = 2.0
"""Its timeout."""


def test_what_a_killed_process_left_open_is_aborted_after_the_timeout(cluster: Cluster, topic: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES_IT_OPEN, cluster.bootstrap, topic], cwd=_ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    begun_s = float(process.stdout.readline())
    process.kill()
    process.communicate()
    with Producer(cluster.bootstrap, transactional_id=f"other-{topic}") as producer:
        with producer.transaction():
            send_all(producer, topic, numbered(3))
        found = read(cluster, topic)
        assert found == [] or time.monotonic() >= begun_s + LEFT_OPEN_S, (
            "records behind an open transaction must not be read before its timeout"
        )
        wait_until_read(cluster, topic, numbered(3))


# Deaths in the middle of transactions


@pytest.mark.parametrize("whom", ["leader", "coordinator"])
@pytest.mark.parametrize("moment", ["before it is written to", "before it is committed", "while it is committed"])
def test_a_server_dies_in_the_middle(cluster: Cluster, topic: str, whom: str, moment: str) -> None:
    with Producer(cluster.bootstrap, transactional_id=topic, retry_backoff_max_ms=100) as producer:
        with producer.transaction():
            send_all(producer, topic, numbered(30, "a"))
        victim = coordinator_of(producer) if whom == "coordinator" else cluster.leader(topic, 0)
        producer.begin_transaction()
        if moment == "before it is written to":
            cluster.kill(victim)
        send_all(producer, topic, numbered(30, "b"))
        if moment == "before it is committed":
            producer.flush()
            cluster.kill(victim)
        if moment == "while it is committed":
            producer.flush()
            with contextlib.closing(_KillSoon(cluster, victim)):
                producer.commit_transaction()
        else:
            producer.commit_transaction()
        wait_until_read(cluster, topic, numbered(30, "a") + numbered(30, "b"))
        with producer.transaction():
            send_all(producer, topic, numbered(30, "c"))
        cluster.start_all()
        wait_until_read(cluster, topic, numbered(30, "a") + numbered(30, "b") + numbered(30, "c"))


def test_what_is_open_outlives_all_servers(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.bootstrap, transactional_id=topic, transaction_timeout_ms=600_000) as producer:
        with producer.transaction():
            send_all(producer, topic, numbered(3, "a"))
        producer.begin_transaction()
        send_all(producer, topic, numbered(3, "b"))
        producer.flush()
        for node in NODES:
            cluster.kill(node)
        cluster.start_all()
        producer.commit_transaction()
    wait_until_read(cluster, topic, numbered(3, "a") + numbered(3, "b"))


def test_a_topic_that_is_deleted_holds_no_transaction_up(cluster: Cluster, topic: str) -> None:
    gone = new_topic(cluster)
    with Producer(cluster.bootstrap, transactional_id=topic, transaction_timeout_ms=600_000) as producer:
        with producer.transaction():
            send_all(producer, topic, numbered(3, "a"))
            send_all(producer, gone, numbered(3, "gone"))
            producer.flush()
            with Admin(cluster.bootstrap) as admin:
                admin.delete_topic(gone)
        with producer.transaction():
            send_all(producer, topic, numbered(3, "b"))
    wait_until_read(cluster, topic, numbered(3, "a") + numbered(3, "b"))


class _KillSoon:
    """Kills a server in a few milliseconds."""

    def __init__(self, cluster: Cluster, node_id: int) -> None:
        def kill() -> None:
            time.sleep(0.003)
            cluster.kill(node_id)

        self._thread = threading.Thread(target=kill)
        self._thread.start()

    def close(self) -> None:
        self._thread.join()


# Consume, transform, produce


class _Worker:
    """A process that works until it is killed."""

    def __init__(self, cluster: Cluster, name: str, source: str, target: str, output: Path) -> None:
        self.name = name
        self.output = output
        args = [cluster.bootstrap, f"work-{source}", name, source, target]
        with output.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.transform_worker", *args], cwd=_ROOT, stdout=log, stderr=log
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self, for_s: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(for_s)
        self.process.send_signal(signal.SIGCONT)


def committed_counts(cluster: Cluster, topic: str) -> Counter[bytes]:
    return Counter(filter(None, read(cluster, topic)))


@pytest.mark.parametrize("rounds", [6, pytest.param(10, marks=pytest.mark.long)])
def test_consume_transform_produce_is_exactly_once_whoever_is_killed(
    cluster: Cluster, tmp_path: Path, rounds: int
) -> None:
    """Three workers of one group; every second one of them, or a server, dies at any moment and is started again, or
    a worker is frozen until its session and its transaction are over, and wakes up in the middle of its work."""
    source, target = new_topic(cluster), new_topic(cluster)
    values = numbered(1000 + 200 * rounds)
    chance = random.Random(6)
    with Producer(cluster.bootstrap) as producer:
        for index, value in enumerate(values[:1000]):
            producer.send(source, value, key=b"%d" % (index % 50))
    workers = [_Worker(cluster, f"w{index}-{source}", source, target, tmp_path / f"w{index}") for index in range(3)]
    try:
        with Producer(cluster.bootstrap) as producer:
            for round_ in range(rounds):
                for index, value in enumerate(values[1000 + round_ * 200 : 1200 + round_ * 200]):
                    producer.send(source, value, key=b"%d" % (index % 50))
                    time.sleep(0.005)
                if round_ % 3 == 2:
                    node = chance.choice(NODES)
                    cluster.kill(node)
                    time.sleep(1)
                    cluster.start(node)
                    continue
                at = chance.randrange(len(workers))
                if round_ in (4, 7):
                    workers[at].freeze(SESSION_MS / 1000 + 1)
                else:
                    workers[at].kill()
                    workers[at] = _Worker(cluster, workers[at].name, source, target, workers[at].output)
        until = time.monotonic() + 4 * WAIT_S
        while sum((found := committed_counts(cluster, target)).values()) < len(values):
            for worker in workers:
                assert worker.process.poll() is None, worker.output.read_text()[-3000:]
            assert time.monotonic() < until, "only {} of {} values were copied in time: {}".format(
                len(found), len(values), "\n".join(worker.output.read_text()[-1000:] for worker in workers)
            )
            time.sleep(0.5)
        time.sleep(1)
        found = committed_counts(cluster, target)
    finally:
        for worker in workers:
            worker.kill()
    assert sorted(found) == values
    assert set(found.values()) == {1}, [value for value, times in found.items() if times > 1][:10]
