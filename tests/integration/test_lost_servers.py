"""What people see on the command line while servers of a cluster are dead."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest

from raftlog import Admin, Consumer, Producer
from raftlog._client import admin as admin_calls
from raftlog.cli import client_config
from raftlog.cli.app import main
from raftlog.cli.records import reading
from raftlog.errors import RequestTimedOut
from raftlog.testing import Cluster
from tests.support.patience import refusal
from tests.support.up_to_date import heard_everywhere

PARTITIONS = 6


def raftlog(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "raftlog", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, input=stdin)


def run_here(*arguments: str, patience_s: float = 600.0) -> tuple[object, str, str, float]:
    """Return how a command ends, what it prints on both outputs, and how many seconds it takes in this process.

    The start of another one takes what a busy machine takes, and says nothing of how long the command waits. What
    others than this command wait for in vain takes `patience_s`, so that it is seen when this one does.
    """
    out, err, started = io.StringIO(), io.StringIO(), time.monotonic()
    with (
        mock.patch.object(sys, "argv", ["raftlog", *arguments]),
        mock.patch.object(client_config, "_PATIENCE_MS", int(patience_s * 1000)),
        mock.patch.object(reading, "_STALLED_S", 600.0),
        mock.patch.object(reading, "_FIRST_PATIENCE_S", 60.0),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main()
    return left.value.code or 0, out.getvalue(), err.getvalue(), time.monotonic() - started


def failing_here(*arguments: str, patience_s: float = 600.0) -> tuple[str, str, float]:
    """Return the same of a command that fails."""
    code, out, err, seconds = run_here(*arguments, patience_s=patience_s)
    assert code == 1
    return out, err, seconds


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three servers, six partitions with a record each."""
    with Cluster(nodes=3, directory=tmp_path_factory.mktemp("three")) as cluster:
        with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
            admin.create_topic("ev", partitions=PARTITIONS, timeout=60)
            for partition in range(PARTITIONS):
                producer.send("ev", f"record of {partition}".encode(), partition=partition).result(60)
        heard_everywhere(cluster)
        yield cluster


@pytest.fixture(scope="module")
def lost(cluster: Cluster) -> list[int]:
    """The partitions that server 2 led, which is dead."""
    with Admin(cluster.bootstrap) as admin:
        led = [part.partition for part in admin.describe_topic("ev").partitions if part.replicas == [2]]
    assert 0 < len(led) < PARTITIONS
    cluster.kill(2)
    cluster.wait_for(
        lambda admin: all(part.leader != 2 for part in admin.describe_topic("ev").partitions), what="2 leads nothing"
    )
    return led


def test_partitions_without_a_leader_do_not_hold_up_the_others(cluster: Cluster, lost: list[int]) -> None:
    healthy = sorted(f"record of {partition}" for partition in range(PARTITIONS) if partition not in lost)
    at = ("-b", cluster.bootstrap)
    out, err, seconds = failing_here("consume", "ev", "--from-beginning", "--no-follow", *at)
    assert sorted(out.splitlines()) == healthy
    assert seconds < 60
    last = err.splitlines()[-1]
    assert last.startswith(f"error: cannot read {len(lost)} partition")
    assert all(f"ev-{partition} has no leader" in last for partition in lost)

    code, out, err, _ = run_here("consume", "ev", "--from-beginning", "--max", str(len(healthy)), *at)
    assert (code, sorted(out.splitlines())) == (0, healthy)
    assert "reading the other partitions and trying again" in err

    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        started = time.monotonic()
        consumer.subscribe("ev")
        found: list[str] = []
        while len(found) < len(healthy) and time.monotonic() - started < 60:
            found += [str(record.value, "utf-8") for record in consumer.poll(0.5) if record.value is not None]
        assert sorted(found) == healthy


def test_a_partition_that_comes_back_is_read_by_who_waits_for_it(cluster: Cluster, lost: list[int]) -> None:
    command = [sys.executable, "-P", "-m", "raftlog", "consume", "ev", "--from-beginning", "-b", cluster.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = {process.stdout.readline().strip() for _ in range(PARTITIONS - len(lost))}
        cluster.start(2)
        found |= {process.stdout.readline().strip() for _ in lost}
        process.terminate()
    assert found == {f"record of {partition}" for partition in range(PARTITIONS)}


def test_without_a_majority_clients_hear_what_is_missing(cluster: Cluster) -> None:
    port = {node_id: int(address.rpartition(":")[2]) for node_id, address in enumerate(cluster.bootstrap.split(","), 1)}
    alone = f"127.0.0.1:{port[1]}"
    for node_id in (2, 3):
        if cluster.is_running(node_id):
            cluster.kill(node_id)
    for command in (["topic", "create", "new"], ["cluster", "describe", "--linearizable"]):
        for patience_s in (2.0, 8.0, 8.0, 8.0):  # a command whose time is over before it was answered does not know why
            _, err, seconds = failing_here(*command, "-b", alone, patience_s=patience_s)
            if "the metadata quorum has no leader" in err:
                break
        assert "the metadata quorum has no leader" in err
        assert "controller 2 at" in err
        assert "controller 3 at" in err
        assert "Deadline Exceeded" not in err
        assert "failed to connect to all addresses" not in err
        assert "connection refused" in err
        assert "no broker answers" not in err
        assert seconds < 60
    done = raftlog("cluster", "quorum", "-b", alone)
    assert "no leader (as node 1 sees it) in epoch" in done.stdout
    started = time.monotonic()

    def create(limit_s: float) -> None:
        with Admin(alone, default_api_timeout_ms=int(limit_s * 1000)) as admin:
            admin.create_topic("new")

    with mock.patch.object(admin_calls, "_FIRST_CONTACT_S", 600.0):
        refusal(RequestTimedOut, "has no leader", create, 2.0, 5.0, 10.0)
    assert time.monotonic() - started < 30, (
        f"the calls took {time.monotonic() - started:.0f} s: they must use the timeout that was given, not the "
        "default of a minute"
    )
    with Admin(alone) as admin:
        led = [part.partition for part in admin.describe_topic("ev").partitions if part.replicas == [1]]
    settings = (
        "--config",
        "delivery.timeout.ms=5000",
        "--config",
        "request.timeout.ms=1000",
        "--config",
        "linger.ms=0",
    )
    line = f'{{"value": "v", "partition": {led[0]}}}'
    done = raftlog("produce", "ev", "-f", "json", *settings, "-b", alone, stdin=line)
    assert done.returncode == 1
    assert "waiting for acknowledgements: ev-" in done.stderr.splitlines()[0]


def test_a_listener_for_nodes_says_that_it_is_none_for_clients(cluster: Cluster) -> None:
    inter_node = next(
        line.partition(" = ")[2].strip('"')
        for line in cluster.config_file(1).read_text().splitlines()
        if line.startswith('"inter.node.listener"')
    )
    done = raftlog("cluster", "quorum", "-b", inter_node)
    assert done.returncode == 1
    assert "may be a node's inter.node.listener, while clients connect to its listeners" in done.stderr
