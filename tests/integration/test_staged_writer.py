"""Staged batches on real servers: no reader gets staged records, every reader gets committed ones, once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

import raftlog
from raftlog import Admin, Consumer, Producer, StagedWriter, StageToken
from raftlog._client.keywords import IsolationLevel
from raftlog.errors import RaftlogError, RetriableError, SinkMismatch, StageExpired
from raftlog.testing import Cluster
from raftlog.v1 import transaction_pb2
from tests.support import patience
from tests.support.steady import PATIENT

_WAIT_S = 60.0
_PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = f"topic-{abs(hash(request.node.nodeid))}"
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(
            name, partitions=_PARTITIONS, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60
        )
    return name


def read(bootstrap: str, topic: str, *, isolation_level: IsolationLevel = "read_committed") -> list[bytes]:
    """Return every value that is readable now."""
    found: list[bytes] = []
    with Consumer(bootstrap, isolation_level=isolation_level) as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        deadline_s = time.monotonic() + _WAIT_S
        while any(consumer.position(place) < ends[place] for place in places):
            assert time.monotonic() < deadline_s, f"the end of the topic was not reached within {_WAIT_S:g} s"
            found += [record.value for record in consumer.poll(0.5) if record.value is not None]
    return found


wait_until = partial(patience.until, within_s=_WAIT_S, pause_s=0.05)


def wait_until_read(bootstrap: str, topic: str, expected: list[bytes]) -> None:
    """Wait until markers are where they were late, which no commit waits for: all is readable, and nothing else is."""
    deadline_s = time.monotonic() + _WAIT_S
    while (found := Counter(read(bootstrap, topic))) != (wanted := Counter(expected)):
        assert not found - wanted, found - wanted
        assert time.monotonic() < deadline_s, (
            f"only {found.total()} of {wanted.total()} values can be read after {_WAIT_S:g} s"
        )
        time.sleep(0.05)


def staged(writer: StagedWriter, topic: str, batch_id: int, values: list[bytes]) -> StageToken:
    """Stage values in all partitions, in turn."""
    with writer.stage(batch_id) as stage:
        stage.send_batch(topic, values, partition=[number % _PARTITIONS for number in range(len(values))])
        return stage.finish(_WAIT_S)


def coordinator_of(cluster: Cluster, sink_id: str) -> int:
    """Return the node that coordinates a sink."""
    import grpc

    from raftlog.v1 import transaction_pb2_grpc

    deadline_s = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline_s:
        for address in cluster.bootstrap.split(","):
            with grpc.insecure_channel(address) as channel:
                stub = transaction_pb2_grpc.TransactionStub(channel)
                request = transaction_pb2.FindTransactionCoordinatorRequest(id=sink_id)
                try:
                    answer = stub.FindCoordinator(request, timeout=5)
                except grpc.RpcError:
                    continue
                if not answer.error.code:
                    return int(answer.node_id)
        time.sleep(0.05)
    raise AssertionError(f"no node has answered which one coordinates {sink_id}")


def test_a_batch_is_read_by_nobody_before_its_commit_and_by_all_after(cluster: Cluster, topic: str) -> None:
    with StagedWriter(cluster.bootstrap, f"sink-{topic}", topic) as writer:
        tokens = [staged(writer, topic, 0, [b"%d-%d" % (part, n) for n in range(50)]) for part in range(3)]
        assert len(read(cluster.bootstrap, topic, isolation_level="read_uncommitted")) == 150
        assert read(cluster.bootstrap, topic) == []
        assert writer.commit(0, tokens) == (0, False, 150)
        wait_until_read(cluster.bootstrap, topic, [b"%d-%d" % (p, n) for p in range(3) for n in range(50)])
        assert writer.last_batch() == 0
        assert writer.commit(0, tokens).records in (0, 150), (
            "a repeated commit must report no rows, or those of the first one"
        )
        again = staged(writer, topic, 0, [b"again"])
        assert again.already_committed
        assert writer.commit(0, [again]).already_committed


def test_what_is_dropped_does_not_hold_readers_up(cluster: Cluster, topic: str) -> None:
    """Open stages keep read_committed consumers from records that were written behind them."""
    with StagedWriter(cluster.bootstrap, f"sink-{topic}", topic) as writer, Producer(cluster.bootstrap) as producer:
        dropped = staged(writer, topic, 0, [b"dropped"] * 9)
        for partition in range(_PARTITIONS):
            producer.send(topic, b"behind", partition=partition).result(_WAIT_S)
        assert read(cluster.bootstrap, topic) == []
        writer.abort([dropped])
        wait_until(lambda: read(cluster.bootstrap, topic) == [b"behind"] * _PARTITIONS, "readers are held up")
        with pytest.raises(StageExpired):
            writer.commit(0, [dropped])
        loser, winner = staged(writer, topic, 1, [b"loser"] * 9), staged(writer, topic, 1, [b"winner"])
        writer.commit(1, [winner])
        wait_until(lambda: len(read(cluster.bootstrap, topic)) == _PARTITIONS + 1, "the loser holds readers up")
        with pytest.raises(RaftlogError):
            writer.commit(2, [loser._replace(batch_id=2)])


def test_a_stage_that_nobody_names_expires(cluster: Cluster, topic: str) -> None:
    with (
        StagedWriter(cluster.bootstrap, f"sink-{topic}", topic, transaction_timeout_ms=1000) as hasty,
        StagedWriter(cluster.bootstrap, f"sink-{topic}", topic) as writer,
    ):
        token: StageToken | None = None
        while token is None:
            with suppress(StageExpired):  # before it was finished
                token = staged(hasty, topic, 0, [b"a"])
        with Producer(cluster.bootstrap) as producer:
            for partition in range(_PARTITIONS):
                producer.send(topic, b"behind", partition=partition).result(_WAIT_S)
        wait_until(lambda: len(read(cluster.bootstrap, topic)) == _PARTITIONS, "the stage did not expire")
        with pytest.raises(StageExpired):
            hasty.commit(0, [token])
        assert writer.last_batch() == -1
        writer.commit(0, [staged(writer, topic, 0, [b"b"])])
    wait_until_read(cluster.bootstrap, topic, [b"b"] + [b"behind"] * _PARTITIONS)


def test_a_sink_is_bound_to_its_target(cluster: Cluster, topic: str) -> None:
    with (
        StagedWriter(cluster.bootstrap, f"sink-{topic}", topic) as writer,
        StagedWriter(cluster.bootstrap, f"sink-{topic}", "elsewhere") as other,
    ):
        writer.commit(0, [staged(writer, topic, 0, [b"a"])])
        with pytest.raises(SinkMismatch):
            other.last_batch()
        with pytest.raises(SinkMismatch):
            staged(other, topic, 1, [b"b"])
        with pytest.raises(SinkMismatch):
            other.commit(1, [])


def test_a_missing_topic_and_a_deleted_one_are_told(cluster: Cluster, topic: str) -> None:
    with (
        StagedWriter(cluster.bootstrap, f"sink-{topic}", topic, max_block_ms=500) as hasty,
        pytest.raises(RaftlogError, match="nowhere"),
        hasty.stage(0) as stage,
    ):
        stage.send("nowhere", b"a")
    with StagedWriter(cluster.bootstrap, f"sink-{topic}", topic) as writer:
        token = staged(writer, topic, 0, [b"a"])
        with Admin(cluster.bootstrap) as admin:
            admin.delete_topic(topic)
        assert writer.commit(0, [token]).batch_id == 0, "the commit must succeed, as the deleted topic needs no markers"
        assert writer.last_batch() == 0


def test_twenty_writers_stage_one_batch(cluster: Cluster, topic: str) -> None:
    with StagedWriter(cluster.bootstrap, f"sink-{topic}", topic) as writer, ThreadPoolExecutor(20) as pool:
        for batch_id in range(3):
            parts = [[b"%d-%d-%d" % (batch_id, part, n) for n in range(200)] for part in range(20)]
            tokens = list(pool.map(lambda values, b=batch_id: staged(writer, topic, b, values), parts))
            assert writer.commit(batch_id, tokens).records == 4000
    wanted = [b"%d-%d-%d" % (b, part, n) for b in range(3) for part in range(20) for n in range(200)]
    wait_until_read(cluster.bootstrap, topic, wanted)


@pytest.mark.parametrize("when", ["before the stage", "while staging", "before the commit", "after the commit"])
def test_the_coordinator_dies_at_every_step(cluster: Cluster, topic: str, when: str) -> None:
    sink_id = f"sink-{topic}"
    with StagedWriter(cluster.bootstrap, sink_id, topic) as writer:
        writer.commit(0, [staged(writer, topic, 0, [b"first"])])
        victim = coordinator_of(cluster, sink_id)

        def die(now: str) -> None:
            if now == when:
                cluster.kill(victim)

        try:
            die("before the stage")
            with writer.stage(1) as stage:
                stage.send(topic, b"a", partition=0)
                die("while staging")
                stage.send(topic, b"b", partition=1)
                token = stage.finish(_WAIT_S)
            die("before the commit")
            assert writer.commit(1, [token]).batch_id == 1
            die("after the commit")
            assert writer.last_batch() == 1
            again = writer.commit(1, [token])
            assert (again.already_committed, again.records) in ((True, 0), (False, 2))
            wait_until_read(cluster.bootstrap, topic, [b"a", b"b", b"first"])
        finally:
            cluster.start_all()


@pytest.mark.parametrize(
    ("seed", "least_s"), [(1, 10), *(pytest.param(seed, 20, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_servers_die_all_the_time_and_every_batch_is_there_once(
    topic: str, cluster: Cluster, seed: int, least_s: float
) -> None:
    """After a commit of unknown outcome the driver writes the batch again, in other parts, as Spark does."""
    rng = random.Random(seed)
    stop = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        while not stop.wait(rng.uniform(0.2, 1.0)):
            node = rng.choice(cluster.node_ids)
            cluster.kill(node)
            kills += 1
            stop.wait(rng.uniform(0.0, 0.5))
            cluster.start(node)

    killer = threading.Thread(target=kill)
    killer.start()
    batches, undecided = 0, False
    until_s = time.monotonic() + least_s
    replays = 0
    try:
        with StagedWriter(cluster.bootstrap, f"sink-{topic}", topic, delivery_timeout_ms=30_000) as writer:
            while time.monotonic() < until_s or batches < 5 or kills < 3 or undecided:
                rows = [b"%d-%d" % (batches, n) for n in range(60)]
                rng.shuffle(rows)
                parts = rng.randint(1, 4)
                try:
                    if writer.last_batch() < batches:
                        tokens = [staged(writer, topic, batches, rows[part::parts]) for part in range(parts)]
                        writer.commit(batches, tokens, timeout=rng.choice((0.02, 10.0, 30.0)))
                except (RetriableError, StageExpired, raftlog.errors.DeliveryTimeout):
                    replays, undecided = replays + 1, True  # the batch may be committed: not the moment to end
                    continue
                batches, undecided = batches + 1, False
    finally:
        stop.set()
        killer.join(2 * _WAIT_S)
        cluster.start_all()
    wanted = Counter(b"%d-%d" % (batch, n) for batch in range(batches) for n in range(60))
    wait_until_read(cluster.bootstrap, topic, list(wanted.elements()))
    assert kills >= 3, (batches, replays, kills)
