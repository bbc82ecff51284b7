"""A broker is added to a real cluster and gets its share, then it is decommissioned; producers and readers go on."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import raftlog
from raftlog.errors import RaftlogError
from raftlog.testing import Cluster
from tests.support.steady import STEADY
from tests.support.up_to_date import up_to_date

TOPIC = "events"
PARTITIONS = 12
ADDED = 4


class Writer:
    """Sends numbers one after the other, and records which were acknowledged and which were refused."""

    def __init__(self, bootstrap: str) -> None:
        self.acknowledged: list[int] = []
        self.errors: list[RaftlogError] = []
        self._bootstrap = bootstrap
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with raftlog.Producer(self._bootstrap, acks="all", linger_ms=5) as producer:
            number = 0
            while not self._ending.is_set():
                sent = [(each, producer.send(TOPIC, str(each).encode())) for each in range(number, number + 50)]
                number += 50
                for each, delivery in sent:
                    try:
                        delivery.result(150)
                    except RaftlogError as error:
                        self.errors.append(error)
                    else:
                        self.acknowledged.append(each)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join(180)
        assert not self._thread.is_alive()


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "raftlog", *arguments]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory() as directory,  # for the plan that undoes a long one
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=directory) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def run(cluster: Cluster, *arguments: str) -> str:
    with started(*arguments, "-b", cluster.bootstrap) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def held(admin: raftlog.Admin) -> Counter[int]:
    """Return how many replicas each broker has, internal topics included."""
    topics = up_to_date(admin).describe_topics(internal=True)
    return Counter(replica for topic in topics for part in topic.partitions for replica in part.replicas)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three brokers with a topic on them, and a fourth one that the cluster has never heard of."""
    with Cluster(nodes=4, config=STEADY, offsets_topic_num_partitions=4) as cluster:
        cluster.stop(ADDED)
        cluster.wait_for(
            lambda admin: all(each.fenced for each in admin.describe_cluster().brokers if each.broker_id == ADDED),
            what=f"broker {ADDED} fenced",
        )
        run(cluster, "cluster", "unregister-broker", str(ADDED))
        run(cluster, "topic", "create", TOPIC, "-p", str(PARTITIONS), "-r", "3", "-c", "min.insync.replicas=2")
        yield cluster


def test_a_broker_comes_gets_its_share_and_leaves(cluster: Cluster) -> None:
    with Writer(cluster.bootstrap) as writer, raftlog.Admin(cluster.bootstrap) as admin:
        cluster.start(ADDED)
        plan = json.loads(run(cluster, "cluster", "rebalance", "-o", "json"))
        assert held(admin)[ADDED] == 0, "a plan that was only shown must not have moved replicas"
        assert sum(ADDED in each["replicas"] for each in plan["partitions"]) >= PARTITIONS * 3 // 4

        run(cluster, "cluster", "rebalance", "--execute", "--batch", "4", "--throttle", "100MiB")
        counts = held(admin)
        assert set(counts) == {1, 2, 3, ADDED}
        assert max(counts.values()) - min(counts.values()) <= 1
        assert admin.describe_configs(broker=1)["leader.replication.throttled.rate"].source == "default"
        assert admin.describe_configs(topic=TOPIC)["leader.replication.throttled.replicas"].value == ""
        cluster.wait_for(
            lambda admin: Counter(part.leader for part in admin.describe_topic(TOPIC).partitions)[ADDED] > 0,
            what=f"broker {ADDED} leads",
        )
        with started("broker", "decommission", str(ADDED), "--wait", "-b", cluster.bootstrap) as leaving:
            assert leaving.stderr is not None
            said = ""
            while "stop its process" not in said and leaving.poll() is None:
                said += leaving.stderr.readline()
            assert held(admin)[ADDED] == 0, said
            cluster.stop(ADDED)
            out, err = leaving.communicate(timeout=180)
        assert (leaving.returncode, out) == (0, "broker 4 has no replicas, has stopped, and is unregistered\n"), err
        assert [each.broker_id for each in admin.describe_cluster(linearizable=True).brokers] == [1, 2, 3]
        cluster.wait_for(
            lambda admin: all(sorted(part.isr) == [1, 2, 3] for part in admin.describe_topic(TOPIC).partitions),
            what="the others in sync",
        )
    assert writer.errors == []
    assert values(cluster, len(writer.acknowledged)) == writer.acknowledged


def values(cluster: Cluster, count: int) -> list[int]:
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(TOPIC)
        found: list[int] = []
        while records := consumer.poll(60.0 if len(found) < count else 0.5):
            found += [int(record.value or b"-1") for record in records]
    return sorted(found)
