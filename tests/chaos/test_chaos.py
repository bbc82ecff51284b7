"""A cluster of containers with clients at work, and one fault after the other; after each series, all is checked.

Nothing acknowledged may be lost, nothing that is idempotent be there twice, everything is in order, transactions are
whole or not there, committed offsets never go back, replicas are the same byte for byte, and writes pause no longer
than promised. All in one file, as the tests share a cluster, which begins as the release before and is upgraded by the
first of them. `test_matrix.py` has every fault with every victim, workload and form of cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import (
    ClockShift,
    Disconnect,
    Fault,
    FullDisk,
    Isolate,
    Kill,
    Loss,
    Mute,
    Pause,
    RollingRestart,
    SlowLink,
)
from tests.chaos.nodes import Node, NodeSet
from tests.chaos.run import PARTITIONS, at_work
from tests.chaos.spark_job import SparkJob
from tests.support.fresh import SEED, one_of
from tools.docker import Image

OF_SPARK: tuple[type[Fault], ...] = (Isolate, Pause, Mute)
"""What happens to servers while Spark writes, beside a kill: one that the run's seed picks, `--long` all."""
LEAST_FAULTS = 2
"""While Spark writes; it may be quick."""


@pytest.fixture(scope="module")
def nodes(previous_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSet]:
    """Three nodes, each both controller and broker, of the release before until a test upgrades them."""
    print(f"the release before is {previous_image.origin}")
    with NodeSet(previous_image.tag, tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture
def upgraded(nodes: NodeSet, image: Image) -> NodeSet:
    """The nodes, of this release, whichever tests ran before."""
    old = [node for node in nodes.nodes.values() if node.image != image.tag]
    nodes.each(Node.stop, old)
    nodes.each(lambda node: node.replace(image.tag), old)
    nodes.wait_ready()
    return nodes


def topic_of(request: pytest.FixtureRequest) -> str:
    """Return a name for the topic of a test."""
    return re.sub(r"[^a-zA-Z0-9.-]+", "-", request.node.name).strip("-")


SERIES: dict[str, tuple[Callable[[], Fault], ...]] = {
    "ends": (lambda: Kill("leader"), lambda: Kill("controller"), lambda: Pause("leader")),
    "cuts": (Isolate, Mute, Disconnect),
    "slowness": (Loss, SlowLink, lambda: ClockShift(3600.0), FullDisk),
}
"""The run's seed picks one, `--long` has all. `test_replication_chaos.py` has bridges and deaf leaders too,
`test_matrix.py` has everything."""


def test_rolling_upgrade(nodes: NodeSet, image: Image, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """From the release before, with clients at work; a client that retries hears no error."""
    with at_work(nodes, topic_of(request), tmp_path) as run:
        run.suffer(RollingRestart(image.tag))
    assert {node.image for node in nodes.nodes.values()} == {image.tag}


@pytest.mark.parametrize("series", one_of(list(SERIES)))
def test_faults(upgraded: NodeSet, series: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with at_work(upgraded, topic_of(request), tmp_path) as run:
        for make in SERIES[series]:
            run.suffer(make())


@pytest.mark.spark("own")
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((Kill, OF_SPARK[SEED % len(OF_SPARK)]), id="short"),
        pytest.param((Kill, *OF_SPARK), id="all", marks=pytest.mark.long),
    ],
)
def test_spark_writes_all_the_while(
    upgraded: NodeSet, tmp_path: Path, request: pytest.FixtureRequest, faults: tuple[type[Fault], ...]
) -> None:
    """A streaming query on local[2]: every row is there once, under faults of servers."""
    topic = topic_of(request)
    upgraded.make_topic(topic, PARTITIONS)
    suffered: Counter[str] = Counter()
    with SparkJob(upgraded.bootstrap, topic, tmp_path) as job:
        job.wait_for_batches(1)
        for make in faults:
            if not job.is_running:
                if len(suffered) >= LEAST_FAULTS:
                    break
                job.go_on()
                job.wait_for_batches(1)
            fault = make()
            try:
                fault.begin(upgraded, topic)
                job.wait_for_batches(1)
            finally:
                fault.end(upgraded)
            suffered[fault.name] += 1
            upgraded.wait_ready()
            upgraded.wait_in_sync(topic)
        job.finish()
        job.check()
