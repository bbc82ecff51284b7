"""`raftlog doctor`, `raftlog support-bundle` and what nodes say of themselves, on real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raftlog import Admin, Producer, TopicPartition, __version__
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.collect import collect
from raftlog._doctor.report import examine
from raftlog.errors import BrokerUnavailable, InvalidRequestError, RequestTimedOut
from raftlog.testing import Cluster
from tests.support.steady import STEADY

VALUE = b"a-value-that-nobody-else-shall-see"
CONTROLLER, BROKERS = 1, [2, 3, 4]
CLOCK_MS = 250.0
"""All nodes have the same clock; more than that would be the estimate's."""
WAIT_S = 90.0
API_MS = 600_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A controller alone and three brokers, with a topic, a group, and figures for Prometheus."""
    with Cluster(
        nodes=4,
        controllers=1,
        dedicated_controllers=True,
        directory=tmp_path_factory.mktemp("doctor"),
        offsets_topic_replication_factor=3,
        offsets_topic_num_partitions=4,
        metrics_listener="127.0.0.1:0",
        config={**STEADY, "broker.session.timeout.ms": 6_000, "broker.lease.ms": 5_000},
    ) as cluster:
        with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
            admin.create_topic("orders", 3, 3, {"min.insync.replicas": "2"})
            for _ in range(20):
                producer.send("orders", VALUE, partition=0)
            producer.flush()
            admin.alter_group_offsets("billing", {TopicPartition("orders", 0): 5})
            admin.alter_configs(topic="__consumer_offsets", set={"min.insync.replicas": 2})
        yield cluster


def raftlog(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "raftlog", *arguments, "--bootstrap", cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("RAFTLOG_")},
    )


def doctor(
    cluster: Cluster, *arguments: str, finds: set[str], perhaps: frozenset[str] = frozenset()
) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the findings by check, once every check is made and finds this: a node that is busy for
    seconds is found to be silent, and may not have heard of everything."""
    busy = ("--ignore", "event-loop-late")  # as the machine may be
    deadline_s = time.monotonic() + WAIT_S
    while True:
        done = raftlog(cluster, "doctor", "--output", "json", *busy, *arguments)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        skipped = [each["check"] for each in report["checks"] if each["result"] == "skipped"]
        found = {each["check"]: each for each in report["findings"]}
        if skipped == (["group-lag"] if "0" in arguments else []) and found.keys() - perhaps == finds:
            return done.returncode, found
        assert time.monotonic() < deadline_s, (skipped, report["unanswered"], found)


def test_every_node_describes_itself_also_one_that_serves_no_clients(cluster: Cluster) -> None:
    cluster.wait_for(
        lambda admin: all(
            log_dir.partitions == 3 + 4 for broker_id in BROKERS for log_dir in admin.describe_node(broker_id).log_dirs
        ),
        what="every broker has its replicas",
    )
    with Admin(cluster.bootstrap) as admin:
        nodes = {node_id: admin.describe_node(node_id) for node_id in cluster.node_ids}
        brokers = {f"{broker.host}:{broker.port}" for broker in admin.describe_cluster().brokers}
        with pytest.raises(InvalidRequestError, match="node 77 is not in this cluster"):
            admin.describe_node(77)
    for node_id, node in nodes.items():
        assert (node.node_id, node.version, node.not_ready) == (node_id, __version__, "")
        assert node.pid == cluster.pid(node_id)
        assert node.log_file == str(cluster.directory / f"node-{node_id}" / "server.log")
        assert node.configs["node.id"].value == str(node_id)
        assert abs(node.clock_offset_ms) - node.clock_uncertainty_ms < CLOCK_MS
        assert node.uptime_ms > 0
        assert node.metrics_listener.startswith("127.0.0.1:")
    controller = nodes[CONTROLLER]
    assert controller.roles == ["controller"]
    assert (controller.client_listener, controller.asked_through in brokers) == ("", True)
    assert controller.voter is not None
    assert (controller.voter.role, controller.voter.leader_id) == ("leader", CONTROLLER)
    assert [log_dir.metadata for log_dir in controller.log_dirs] == [True]
    for broker_id in BROKERS:
        broker = nodes[broker_id]
        assert (broker.roles, broker.voter) == (["broker"], None)
        assert broker.client_listener == broker.asked_through
        [log_dir] = broker.log_dirs
        assert (log_dir.metadata, log_dir.partitions) == (False, 3 + 4)
        assert log_dir.log_bytes > 20 * len(VALUE)


def test_a_cluster_in_order_and_one_that_is_not(cluster: Cluster) -> None:
    in_order = {"nodes-on-one-machine", "group-empty-with-lag"}
    options = ("--interval", "0", "--ignore", "quorum-size", "--fail-on", "warning")
    code, found = doctor(cluster, *options, finds=in_order)
    assert code == 0, found
    assert found["group-empty-with-lag"]["where"][0].startswith("orders-0: lag 15")

    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("single", 1, 1)
        admin.create_topic("tight", 1, 3, {"min.insync.replicas": "3"})
        admin.alter_configs(broker=2, set={"leader.replication.throttled.rate": 1000})
        admin.alter_configs(topic="orders", set={"unclean.leader.election.enable": "true"})
        cluster.kill(4)
        cluster.wait_for(lambda admin: any(broker.fenced for broker in admin.describe_cluster().brokers))
    with Admin(cluster.bootstrap, default_api_timeout_ms=API_MS) as admin:
        until_s = time.monotonic() + WAIT_S
        why = ""
        while "connection refused" not in why:  # in a second there may be time for nothing
            assert time.monotonic() < until_s, why
            with pytest.raises((BrokerUnavailable, RequestTimedOut)) as refused:
                admin.describe_node(4, timeout=1)
            why = str(refused.value)
        assert time.monotonic() < until_s, "a call with a timeout of 1 s has waited for default.api.timeout.ms"
    not_in_order = {
        "broker-fenced",
        "group-empty-with-lag",
        "nodes-on-one-machine",
        "partition-under-min-isr",
        "partition-under-replicated",
        "quorum-size",
        "throttle-forgotten",
        "topic-no-slack",
        "topic-single-replica",
        "topic-unclean-election",
    }
    where_the_one_replica_was = frozenset({"partition-offline"})
    code, found = doctor(cluster, "--interval", "1", finds=not_in_order, perhaps=where_the_one_replica_was)
    assert code == 1
    assert found["broker-fenced"]["severity"] == "error"
    assert found["partition-under-min-isr"]["where"][0].startswith("tight-0 (in sync: ")
    assert found["partition-under-replicated"]["remedy"] == "start broker 4 again, which is down"


@pytest.mark.long
def test_with_tls_controllers_are_asked_by_brokers_that_show_their_certificate() -> None:
    with (
        Cluster(nodes=2, controllers=1, dedicated_controllers=True, tls=True, config=STEADY) as cluster,
        Admin(cluster.bootstrap, config=cluster.client_config) as admin,
    ):
        nodes = [admin.describe_node(node_id) for node_id in cluster.node_ids]
        assert [node.roles for node in nodes] == [["controller"], ["broker"]]
        for node in nodes:
            assert node.certificate_expires_ms > time.time() * 1000
            assert node.configs["listener.security.protocol"].value == "ssl"
        report = examine(collect(admin, interval_s=0), CHECKS)
        assert [found.check for found in report.findings if found.severity == "error"] == []


def bundled(cluster: Cluster, path: Path) -> dict[str, bytes]:
    """Return the files of a new bundle."""
    done = raftlog(cluster, "support-bundle", "--interval", "0", "--to", str(path))
    assert done.returncode == 0, done.stderr
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            opened = archive.extractfile(member)
            assert opened is not None
            files[member.name.partition("/")[2]] = opened.read()
    return files


def is_complete(cluster: Cluster, files: dict[str, bytes]) -> bool:
    """Whether every node that runs has answered, which is not waited for beyond seconds."""
    wanted = {"groups.json", "log-dirs.json"}
    for node_id in filter(cluster.is_running, cluster.node_ids):
        wanted |= {f"nodes/node-{node_id}.json", f"metrics/node-{node_id}.txt", f"logs/node-{node_id}.log"}
    return wanted <= files.keys() and json.loads(files["groups.json"]) != []


def test_a_support_bundle_has_what_helps_and_nothing_of_the_records(cluster: Cluster, tmp_path: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    path = tmp_path / "bundle.tar.gz"
    while not is_complete(cluster, files := bundled(cluster, path)):
        assert time.monotonic() < deadline_s, files.keys()
        path = path.with_name(f"again-{path.name}")
    assert {"README.txt", "doctor.txt", "doctor.json", "topics.json", "groups.json", "log-dirs.json"} <= files.keys()
    for node_id in cluster.node_ids:
        if not cluster.is_running(node_id):
            continue
        assert json.loads(files[f"nodes/node-{node_id}.json"])["node_id"] == node_id
        assert b"raftlog_build_info" in files[f"metrics/node-{node_id}.txt"]
        assert b"node ready" in files[f"logs/node-{node_id}.log"]
    assert VALUE not in b"".join(files.values())
    assert json.loads(files["groups.json"])[0]["group_id"] == "billing"
    assert not list(tmp_path.glob("*.tmp"))
