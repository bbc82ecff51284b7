"""What Spark will not do on one host when asked: speculation, zombies, two drivers at once; on real servers.

The sink's classes are driven as Spark drives them (tests/support/spark_query.py), by several drivers at the same time.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from pyspark_raftlog import sink
from pyspark_raftlog.sink import OldCheckpoint, TaskWritten

import raftlog
from raftlog.errors import DeliveryTimeout, RetriableError, StageExpired
from raftlog.testing import Cluster
from tests.support.spark_query import Context, Query
from tests.support.steady import PATIENT

_ROWS = 40
_WAIT_S = 300.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("pyspark.TaskContext.get", Context.get)
    monkeypatch.setattr(sink, "_stagings", {})
    name = f"topic-{abs(hash(request.node.nodeid))}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=3, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60)
    yield name
    for staging in sink._stagings.values():
        staging.close()


def read_all(bootstrap: str, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    with raftlog.Consumer(bootstrap) as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        deadline_s = time.monotonic() + _WAIT_S
        while any(consumer.position(place) < ends[place] for place in places):
            assert time.monotonic() < deadline_s
            found.update(consumer.poll_arrow(0.5)["value"].to_pylist())
    return found


class Checkpoint:
    """Which batches were noted, as Spark's commit log: shared by drivers that should not be two."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.noted = -1

    def note(self, batch_id: int) -> None:
        with self.lock:
            self.noted = max(self.noted, batch_id)


class DriverThread(threading.Thread):
    """Writes the batches that come, dies at every point, and is started again at once."""

    def __init__(self, query: Query, checkpoint: Checkpoint, rng: random.Random, batches: int) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.failures: Counter[str] = Counter()
        self._query, self._checkpoint, self._rng, self._batches = query, checkpoint, rng, batches

    def run(self) -> None:
        try:
            while self._checkpoint.noted < self._batches - 1:
                try:
                    self._batch(self._checkpoint.noted + 1)
                except (StageExpired, RetriableError, DeliveryTimeout, OldCheckpoint) as error:
                    # the query fails, and is restarted; it is behind where others have gone on
                    self.failures[type(error).__name__] += 1
        except BaseException as error:
            self.error = error

    def _batch(self, batch_id: int) -> None:
        rng = self._rng
        rows = [f"{batch_id}-{number}" for number in range(_ROWS)]
        rng.shuffle(rows)
        parts = rng.randint(1, 3)
        messages: list[TaskWritten] = []
        for partition in range(parts):
            for attempt in range(rng.choice((1, 1, 1, 2))):  # the last one counts, the others are speculation
                found = self._query.task(batch_id, rows[partition::parts], partition=partition, attempt=attempt)
            messages.append(found)
        fate = rng.random()
        if fate < 0.1:
            return  # dies with everything staged
        if fate < 0.2:
            time.sleep(rng.uniform(0, 0.3))  # a zombie: others have gone on meanwhile
        if fate > 0.95:
            self._query.abort(batch_id, [*messages[:-1], None])
            self._query.restart()
            return
        self._query.commit(batch_id, messages)
        if rng.random() < 0.8:  # else it dies before it takes note
            self._checkpoint.note(batch_id)


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(2, True), *(pytest.param(seed, seed > 2, marks=pytest.mark.long) for seed in (1, 3, 4, 5))],
)
def test_drivers_on_one_checkpoint_write_every_row_once(cluster: Cluster, topic: str, seed: int, kills: bool) -> None:
    rng = random.Random(seed)
    checkpoint = Checkpoint()
    batches = 12 if kills else 25
    drivers = [
        DriverThread(
            Query(cluster.bootstrap, run_id=f"run-{number}", topic=topic),
            checkpoint,
            random.Random(seed + number),
            batches,
        )
        for number in range(3)
    ]
    for driver in drivers:
        driver.start()
    killed = 0
    deadline_s = time.monotonic() + _WAIT_S
    try:
        while any(driver.is_alive() for driver in drivers):
            assert time.monotonic() < deadline_s, (checkpoint.noted, [driver.failures for driver in drivers])
            if kills and killed < 10:
                victim = rng.choice(cluster.node_ids)
                cluster.kill(victim)
                killed += 1
                time.sleep(rng.uniform(0, 0.4))
                cluster.start(victim)
            time.sleep(rng.uniform(0.1, 0.6))
    finally:
        cluster.start_all()
        for driver in drivers:
            driver.join(_WAIT_S)
    assert [driver.error for driver in drivers] == [None] * 3
    wanted = Counter(f"{batch}-{number}".encode() for batch in range(batches) for number in range(_ROWS))
    until_s = time.monotonic() + 90
    while sum((found := read_all(cluster.bootstrap, topic)).values()) < sum(wanted.values()):
        assert time.monotonic() < until_s, (
            f"only {sum(found.values())} of {sum(wanted.values())} rows can be read after 90 s"
        )
        time.sleep(0.2)
    assert found == wanted
