"""The chart on a real Kubernetes of three nodes: installed in each mode, and disturbed while records flow.

Runs only with `--long`, as root on Linux (`./dev k8s test`). A cluster that runs already is used and stays; otherwise
one is started, and removed at the end. A pod produces with acks=all and reads in a group through every step. At the end
every acknowledged record was read at the place that was acknowledged, no record is in the log twice, and neither client
saw an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kafka
import pyspark
import pytest
import yaml
from cryptography.hazmat.primitives import serialization

from raftlog.testing import CertificateAuthority
from raftlog.testing.layout import free_ports
from tools import docker, java
from tools.go_programs import HELM
from tools.helm import CHART, EXAMPLES
from tools.k8s.cluster import NODES, Cluster, NotHere
from tools.progress import StepFailed

pytestmark = pytest.mark.long

Values = dict[str, Any]
RATE = 200
PLANNED_S = 5.0
"""The longest gap between two acknowledgements while pods are stopped in order, on a busy machine; gRPC's own pauses
between look-ups of a name were 8 to 10 s."""
UNPLANNED_S = 15.0
"""The same after a pod or a node has vanished: time-outs of a broker's session, of an election and of the clients."""
STORM_S = 30.0
"""The same while pods are deleted so often that two brokers or controllers are away at a time."""
PATIENCE_S = 300.0
IMAGE = "raftlog:0.1.0"
PREVIOUS = "raftlog:previous"
TOPIC: Values = {"name": "live", "partitions": 6}
SMALL: Values = {"requests": {"cpu": "50m", "memory": "128Mi"}}
BASE: Values = {
    "controllers": {"resources": SMALL},
    "brokers": {"resources": SMALL},
    "affinity": {"antiAffinity": "soft"},  # the fourth broker of the test that scales has a node to share
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    was_up = found.admin.exists() and found.missing() == []
    try:
        image = docker.ensure_image()
        found.up()
        found.load(image.tag, IMAGE)
    except (NotHere, docker.NoEngine, docker.NoBaseImage) as error:
        pytest.skip(f"THE CHART IS NOT RUN: {error}")
    try:
        yield found
    finally:
        if not was_up:
            found.down()


class Release:
    """A release of the chart in a namespace of its own, and a pod with a workload in it."""

    def __init__(self, cluster: Cluster, namespace: str, values: Values, directory: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.client: Values = {}
        """What the workload's pod gets besides: environment, mounts and volumes."""
        self.acked = 0
        """Records of the last workload."""
        self._values = merged({"insecure": True}, BASE, values)
        self._before = self._values
        """The values of the revision before."""
        self._file = directory / f"{namespace}.json"
        self._helm = str(HELM.find_or_build())

    # The chart

    def helm(self, *arguments: str) -> str:
        done = subprocess.run(
            [self._helm, "--namespace", self.namespace, *arguments],
            env=self.cluster.variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StepFailed(f"helm {' '.join(arguments)}: {done.stderr}{done.stdout}\n{self.trouble()}")
        return done.stdout

    def install(self) -> None:
        self.upgrade({}, "--install", "--create-namespace", "--wait", "--wait-for-jobs")

    def upgrade(self, values: Values, *arguments: str, chart: Path = CHART) -> None:
        self._before, self._values = self._values, merged(self._values, values)
        self._file.write_text(json.dumps(self._values))
        self.helm("upgrade", "logs", str(chart), "--values", str(self._file), "--timeout", "300s", *arguments)

    def rollback(self) -> None:
        """Go back to the revision before the last upgrade."""
        self.helm("rollback", "logs", "--wait", "--wait-for-jobs", "--timeout", "300s")
        self._values = self._before

    def test(self) -> None:
        """Run `helm test`, which leaves no topic behind."""
        self.helm("test", "logs", "--timeout", "240s")

    def uninstall(self) -> None:
        """Remove the release, and wait until its pods are gone; the claims of volumes stay."""
        self.helm("uninstall", "logs", "--wait", "--timeout", "300s")
        self.kubectl("wait", "--for=delete", "pod", "--selector=app.kubernetes.io/instance=logs", "--timeout=300s")

    def remove(self) -> None:
        """Uninstall, and delete the claims as well."""
        with contextlib.suppress(StepFailed):
            self.uninstall()
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=true", "--timeout=300s", check=False)
        self.cluster.recycle_volumes()

    # Kubernetes

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, check=check)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def address_of(self, pod: str) -> str:
        return str(self.get("pod", pod)["status"]["podIP"])

    def uid_of(self, pod: str) -> str:
        return str(self.get("pod", pod)["metadata"]["uid"])

    def pods(self) -> dict[str, tuple[str, int]]:
        """Return the ids of the servers' pods, with their restarts: the same as before if none was touched."""
        found = self.get("pods", "--selector", "app.kubernetes.io/component in (broker, controller)")["items"]
        return {
            each["metadata"]["name"]: (
                each["metadata"]["uid"],
                each["status"]["containerStatuses"][0]["restartCount"],
            )
            for each in found
        }

    def rolled_out(self, *sets: str) -> None:
        """Wait for these sets, or for all."""
        names = [f"logs-raftlog-{each}" for each in sets]
        for name in names or [each["metadata"]["name"] for each in self.get("statefulset")["items"]]:
            self.kubectl("rollout", "status", f"statefulset/{name}", f"--timeout={PATIENCE_S:g}s")

    def restart(self, name: str) -> None:
        self.kubectl("rollout", "restart", f"statefulset/logs-raftlog-{name}")
        self.rolled_out(name)

    def trouble(self) -> str:
        """Return what helps to see why something failed."""
        pods = self.kubectl("get", "pods,pvc", "-o", "wide", check=False)
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False).splitlines()[-15:]
        return pods + "\n".join(events)

    # The workload

    def start_workload(self) -> None:
        name = "workload"
        programs = {each: (Path(__file__).parent / each).read_text() for each in ("workload.py", "kafka_workload.py")}
        container = {
            "name": name,
            "image": IMAGE,
            "command": ["/opt/raftlog/bin/python", "/work/workload.py", "live", str(RATE), "8000"],
            "resources": {"requests": {"cpu": "500m"}},  # else a server that starts beside it takes its time
            "env": [
                {"name": "RAFTLOG_BOOTSTRAP", "value": f"logs-raftlog.{self.namespace}.svc:9092"},
                {"name": "PYTHONPATH", "value": "/packages"},
                *self.client.get("env", ()),
            ],
            "volumeMounts": [
                {"name": "work", "mountPath": "/work"},
                {"name": "kafka", "mountPath": "/packages/kafka", "readOnly": True},
                *self.client.get("mounts", ()),
            ],
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "nodeName": NODES[0],  # the faults are elsewhere
                "terminationGracePeriodSeconds": 1,
                "enableServiceLinks": False,
                "containers": [container],
                "volumes": [
                    {"name": "work", "configMap": {"name": name}},
                    {"name": "kafka", "hostPath": {"path": str(Path(kafka.__file__).parent)}},
                    *self.client.get("volumes", ()),
                ],
            },
        }
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "namespace": self.namespace},
                "data": programs,
            },
            pod,
        )
        self.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s")
        until("the workload's first records", lambda: self.ask("step")["acked"] > 0)
        time.sleep(5)
        self.ask("step")

    def ask(self, what: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address_of('workload')}:8000/{what}", timeout=400) as answer:
            return json.load(answer)

    def raftlog(self, *arguments: str) -> str:
        """Run a command in the workload's pod."""
        return self.kubectl("exec", "workload", "--", "raftlog", *arguments)

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """Begin a command in the workload's pod."""
        exec_ = ("kubectl", "--namespace", self.namespace, "exec", "workload", "--")
        return subprocess.Popen([*exec_, *command], env=self.cluster.variables(), stdout=subprocess.PIPE, text=True)

    def healthy(self) -> None:
        """Wait until every pod is ready and every partition has all replicas in sync."""
        self.rolled_out()
        until(
            "all replicas in sync",
            lambda: self.raftlog("topic", "describe", "--under-replicated", "-o", "json") == "[]\n",
        )

    def finish(self) -> None:
        """End the workload; check what it has seen."""
        result = self.ask("finish")
        print(f"\n{self.namespace}: {json.dumps(result)}")
        self.acked = int(result["acked"])
        assert self.acked > 0
        assert self.acked == result["sent"]
        assert result["errors"] == []
        assert result["lost"] == 0, result["first_lost"]
        assert result["duplicates"] == 0
        self.kubectl("delete", "pod", "workload", "--wait=true")


def merged(*values: Values) -> Values:
    """Return values with later ones over earlier ones; None removes a key."""
    found: Values = {}
    for each in values:
        for name, value in each.items():
            if value is None:
                found.pop(name, None)
                continue
            inner = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = merged(found[name], value) if inner else value
    return found


def until(what: str, holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError, StepFailed):
            if holds():
                return
        assert time.monotonic() < end_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.5)


@contextlib.contextmanager
def step(release: Release, name: str, longest_gap_s: float) -> Iterator[None]:
    """Run one disturbance, wait until the cluster is healthy again, and check the clients' observations."""
    release.healthy()
    release.ask("step")
    begun_s = time.monotonic()
    yield
    release.healthy()
    time.sleep(2)
    seen = release.ask("step")
    print(f"\n{name}: {time.monotonic() - begun_s:.0f} s, {json.dumps(seen)}")
    assert seen["errors"] == []
    assert seen["acked"] > 0
    assert seen["gap_s"] <= longest_gap_s


# Three controllers and three brokers, apart


@pytest.fixture(scope="module")
def apart(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    values: Values = {
        "topics": [TOPIC, {"name": "kafka", "partitions": 3}],
        "kafka": {"enabled": True},
        "console": {"enabled": True},
        "brokers": {"resources": {"limits": {"memory": "1Gi"}}},
    }
    release = Release(cluster, "apart", values, tmp_path_factory.mktemp("apart"))
    release.install()
    try:
        release.test()
        release.start_workload()
        yield release
        release.finish()
    finally:
        release.remove()


def test_the_chart_is_installed_and_tested(apart: Release) -> None:
    apart.healthy()
    topics = {each.split("\t")[0] for each in apart.raftlog("topic", "list", "-o", "table").splitlines()}
    assert not [name for name in topics if name.startswith("helm-test")]


def test_the_console_shows_the_cluster(apart: Release) -> None:
    address = "http://logs-raftlog-console:8080/topics"
    program = f"import urllib.request; print(urllib.request.urlopen({address!r}, timeout=60).read().decode())"
    assert 'href="/topics/live"' in apart.kubectl("exec", "workload", "--", "/opt/raftlog/bin/python", "-c", program)


def test_other_volumes_are_refused_until_the_set_is_made_anew(apart: Release) -> None:
    """Kubernetes refuses them too, but only after other objects were changed, and without saying what to do.

    This test runs before those with `kubectl rollout restart`: the new set lacks the annotation of such a restart, and
    would roll the pods once.
    """
    before = apart.pods()
    smaller: Values = {"brokers": {"storage": {"size": "90Gi"}}}
    with step(apart, "the brokers' StatefulSet made anew for other volumes", PLANNED_S):
        with pytest.raises(StepFailed, match=r"StatefulSet logs-raftlog-broker was made with size 100Gi"):
            apart.upgrade(smaller)
        apart.upgrade({"brokers": {"storage": {"size": "102400Mi"}}})  # the same in other words
        apart.kubectl("delete", "statefulset", "logs-raftlog-broker", "--cascade=orphan")
        apart.upgrade(smaller)
        apart.rolled_out("broker")
    assert apart.pods() == before


PORTS = {"clients": 9092, "kafka": 9192, "nodes": 9093, "metrics": 9464}
CONNECT = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def reach(place):
    address, _, port = place.partition(":")
    try:
        socket.create_connection((address, int(port)), timeout=5).close()
    except OSError:
        return None
    return place
print(*filter(None, ThreadPoolExecutor(16).map(reach, sys.argv[1:])))
"""


def reached(cluster: Cluster, namespace: str, pod: str, places: dict[str, str]) -> set[str]:
    """Return the names of the places to which a pod can connect."""
    python = ("exec", pod, "--", "/opt/raftlog/bin/python", "-c", CONNECT)
    answered = cluster.kubectl("--namespace", namespace, *python, *places.values()).split()
    return {name for name, place in places.items() if place in answered}


def test_enforced_policies_keep_strangers_out(apart: Release) -> None:
    cluster, namespace, name = apart.cluster, "strangers", "stranger"
    container = {"name": name, "image": IMAGE, "command": ["sleep", "infinity"]}
    spec = {"nodeName": "n2", "terminationGracePeriodSeconds": 1, "containers": [container]}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec},
    )
    broker, controller = (apart.address_of(f"logs-raftlog-{each}-1") for each in ("broker", "controller"))
    places = {f"broker {each}": f"{broker}:{port}" for each, port in PORTS.items()}
    places |= {f"controller {each}": f"{controller}:{PORTS[each]}" for each in ("nodes", "metrics")}
    try:
        cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")
        assert reached(cluster, namespace, name, places) == places.keys(), (
            "without network policies every port must be reachable from another pod"
        )
        with step(apart, "policies enforced, broker-2 deleted by force", UNPLANNED_S), cluster.policies():
            until("policy that holds", lambda: not reached(cluster, namespace, name, places))
            clients = {"broker clients", "broker kafka", "broker metrics", "controller metrics"}
            assert reached(cluster, apart.namespace, "workload", places) == clients
            apart.kubectl("delete", "pod", "logs-raftlog-broker-2", "--force", "--grace-period=0")
            apart.healthy()
            assert not reached(cluster, namespace, name, places)
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=true")


def test_kafka_clients_go_on_when_a_broker_dies(apart: Release) -> None:
    with step(apart, "broker-2 deleted by force under Kafka clients", UNPLANNED_S):
        python = ("/opt/raftlog/bin/python", "/work/kafka_workload.py", "logs-raftlog-kafka:9192", "kafka", "20")
        with apart.begin(*python) as clients:
            time.sleep(8)
            apart.kubectl("delete", "pod", "logs-raftlog-broker-2", "--force", "--grace-period=0")
            result = json.loads(clients.communicate()[0])
    print(f"\nKafka clients: {json.dumps(result)}")
    assert result["acked"] == result["sent"] > 0
    assert (result["lost"], result["duplicates"], result["errors"]) == (0, 0, [])


@pytest.mark.parametrize("pod", ["broker-1", "broker-2"])
def test_a_broker_is_deleted_by_force(apart: Release, pod: str) -> None:
    with step(apart, f"{pod} deleted by force", UNPLANNED_S):
        apart.kubectl("delete", "pod", f"logs-raftlog-{pod}", "--force", "--grace-period=0")


def test_pods_are_deleted_by_force_again_and_again(apart: Release) -> None:
    seed = random.randrange(1 << 32)
    print(f"\nseed {seed}")
    rng = random.Random(seed)
    with step(apart, "a pod deleted by force every few seconds, for a minute", STORM_S):
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            pod = f"logs-raftlog-{rng.choice(['broker', 'broker', 'controller'])}-{rng.randrange(3)}"
            apart.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--ignore-not-found")
            time.sleep(rng.uniform(2, 8))


def test_a_broker_that_runs_out_of_memory_comes_back(apart: Release) -> None:
    pod = "logs-raftlog-broker-1"
    eaters = """for each in $(seq 16); do
        /opt/raftlog/bin/python -c "import time; held = b'x' * 90_000_000; time.sleep(60)" &
    done; wait"""

    def reason() -> str:
        (container,) = apart.get("pod", pod)["status"]["containerStatuses"]
        return str(container["lastState"].get("terminated", {}).get("reason"))

    with step(apart, "broker-1 out of memory", UNPLANNED_S):
        # Each is smaller than the broker, which the kernel therefore chooses.
        apart.kubectl("exec", pod, "--", "sh", "-c", eaters, check=False)
        until("broker that was killed", lambda: reason() == "OOMKilled")


def test_probes_are_answered_under_load(apart: Release) -> None:
    before = apart.pods()
    perf = ("raftlog", "perf", "produce", "load", "--create", "--partitions", "6", "--replication-factor", "3")
    with step(apart, "two producers without a bound for 30 s", UNPLANNED_S):
        loads = [apart.begin(*perf, "--seconds", "30", "--records", "100000000", "-o", "json") for _ in range(2)]
        rates = [json.loads(each.communicate()[0]) for each in loads]
        assert [each.returncode for each in loads] == [0, 0]
    print(f"\nload: {json.dumps(rates)}")
    apart.raftlog("topic", "delete", "load")
    assert apart.pods() == before


def test_the_active_controller_is_deleted_by_force(apart: Release) -> None:
    with step(apart, "active controller deleted by force", UNPLANNED_S):
        leader = json.loads(apart.raftlog("quorum", "describe", "-o", "json"))["leader_id"]
        apart.kubectl("delete", "pod", f"logs-raftlog-controller-{leader - 1000}", "--force", "--grace-period=0")


def test_brokers_and_controllers_are_restarted_one_by_one(apart: Release) -> None:
    for name in ("broker", "controller"):
        with step(apart, f"rollout restart of {name}s", PLANNED_S):
            apart.restart(name)


def test_an_upgrade_of_the_configuration_rolls_both_at_once(apart: Release) -> None:
    with step(apart, "upgrade of the configuration", PLANNED_S):
        apart.upgrade({"config": {"log.retention.ms": "200h"}})
        apart.rolled_out()


def test_a_wrong_configuration_stops_at_the_first_pods_and_is_taken_back(apart: Release) -> None:
    # A broker and a controller crash again and again, so this is no orderly restart.
    with step(apart, "wrong configuration, and the right one again", UNPLANNED_S):
        with pytest.raises(StepFailed, match=r"config\.log\.retention\.days: unknown server config"):
            apart.upgrade({"config": {"log.retention.days": 8}})
        # Only the server compares keys with one another.
        apart.upgrade({"config": {"log.retention.days": None, "broker.lease.ms": "9s"}})
        until("broker that refuses its configuration", lambda: "broker.lease.ms=9000" in last_words(apart, "broker-2"))
        time.sleep(30)
        assert [each["status"]["readyReplicas"] for each in apart.get("statefulset")["items"]] == [2, 2]
        apart.upgrade({"config": {"broker.lease.ms": None}})


def test_a_rollback_takes_back_the_configuration_and_that_of_topics(apart: Release) -> None:
    with step(apart, "upgrade, and rollback in the middle of it", UNPLANNED_S):
        apart.upgrade({"topics": [TOPIC, {"name": "kept", "config": {"retention.ms": "3h"}}]})
        apart.upgrade(
            {
                "topics": [TOPIC, {"name": "kept", "config": {"retention.ms": "1h"}}],
                "config": {"broker.lease.ms": "9s"},
            }
        )
        assert "3600000" in apart.raftlog("config", "describe", "topic", "kept")
        until("broker that refuses its configuration", lambda: "broker.lease.ms=9000" in last_words(apart, "broker-2"))
        apart.rollback()
        apart.rolled_out()
        assert "10800000" in apart.raftlog("config", "describe", "topic", "kept")


def test_a_job_that_fails_leaves_the_servers_alone(apart: Release) -> None:
    before = apart.pods()
    with step(apart, "topics that are refused, and more partitions", PLANNED_S):
        wrong = {"name": "wrong", "config": {"leader.replication.throttled.replicas": "some"}}
        with pytest.raises(StepFailed, match="post-upgrade hooks failed"):
            apart.upgrade({"topics": [TOPIC, wrong], "job": {"backoffLimit": 1}})
        assert "'some' is not a replica" in apart.kubectl("logs", "job/logs-raftlog-apply")
        apart.upgrade({"topics": [{**TOPIC, "partitions": 8}, {"name": "right", "config": {"retention.ms": "3h"}}]})
        (described,) = json.loads(apart.raftlog("topic", "describe", "live", "-o", "json"))
        assert len(described["partitions"]) == 8
        assert "10800000" in apart.raftlog("config", "describe", "topic", "right")
    assert apart.pods() == before


def test_a_drain_that_fails_does_not_hold_up_the_stop(apart: Release) -> None:
    pod = "logs-raftlog-broker-2"
    with step(apart, "preStop of broker-2 fails", PLANNED_S):
        apart.kubectl("exec", pod, "--", "rm", "/run/raftlog/environment")
        apart.kubectl("delete", "pod", pod)
        assert pod in apart.kubectl("get", "events", "--field-selector=reason=FailedPreStopHook")


def test_a_new_version_of_the_chart_leaves_the_pods_alone(apart: Release, tmp_path: Path) -> None:
    chart = tmp_path / CHART.name
    shutil.copytree(CHART, chart)
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**described, "version": "99.0.0"}))
    before = apart.pods()
    with step(apart, "upgrade of the chart's version", PLANNED_S):
        apart.upgrade({}, chart=chart)
        assert [each["chart"] for each in json.loads(apart.helm("list", "-o", "json"))] == ["raftlog-99.0.0"]
    assert apart.pods() == before


def last_words(release: Release, pod: str) -> str:
    return release.kubectl("logs", f"logs-raftlog-{pod}", "--tail=3", check=False)


def test_pods_go_on_without_their_kubelet(apart: Release) -> None:
    with step(apart, "kubelet of n2 stopped for 70 s", 2.0):
        apart.cluster.stop_kubelet("n2")
        try:
            time.sleep(70)  # the node becomes NotReady after 50
            nodes = json.loads(apart.cluster.kubectl("get", "node", "n2", "-o", "json"))
            ready = [each["status"] for each in nodes["status"]["conditions"] if each["type"] == "Ready"]
            assert ready == ["Unknown"]
        finally:
            apart.cluster.start_kubelet("n2")
        apart.cluster.kubectl("wait", "--for=condition=Ready", "node/n2", "--timeout=120s")


def test_pods_that_are_deleted_by_force_on_a_lost_node_go_on_until_it_is_back(apart: Release) -> None:
    """Kubernetes forgets the pods, but nothing stops their containers."""
    with step(apart, "kubelet of n3 stopped, its pods deleted by force", UNPLANNED_S):
        names = [each["metadata"]["name"] for each in apart.get("pods", "--field-selector=spec.nodeName=n3")["items"]]
        pods = [each for each in names if each in apart.pods()]
        assert pods
        before = {each: apart.uid_of(each) for each in pods}
        apart.cluster.stop_kubelet("n3")
        try:
            apart.kubectl("delete", "pod", *pods, "--force", "--grace-period=0")
            time.sleep(20)
            brokers = json.loads(apart.raftlog("broker", "list", "-o", "json"))
            assert {each["state"] for each in brokers} == {"active"}
        finally:
            apart.cluster.start_kubelet("n3")
        apart.cluster.kubectl("wait", "--for=condition=Ready", "node/n3", "--timeout=120s")
        for each in pods:
            until(f"another {each}", partial(is_another, apart, each, before[each]))


def is_another(release: Release, pod: str, uid: str) -> bool:
    """Whether a pod was made anew, and runs."""
    found = release.get("pod", pod)
    return bool(found["metadata"]["uid"] != uid and found["status"]["phase"] == "Running")


def test_a_node_is_cut_off_from_the_network(apart: Release) -> None:
    with step(apart, "n3 cut off for 30 s", UNPLANNED_S):
        apart.cluster.cut_off("n3")
        try:
            time.sleep(30)
        finally:
            apart.cluster.cut_off("n3", off=False)


def test_a_second_node_is_not_drained_beside_the_first(apart: Release) -> None:
    drain = ("--ignore-daemonsets", "--delete-emptydir-data", "--pod-selector=app.kubernetes.io/name=raftlog")
    with step(apart, "n3 drained, and n2 refused", PLANNED_S):
        try:
            apart.cluster.kubectl("drain", "n3", *drain, "--timeout=240s")
            with pytest.raises(StepFailed, match="disruption budget"):
                apart.cluster.kubectl("drain", "n2", *drain, "--timeout=20s")
        finally:
            for node in ("n2", "n3"):
                apart.cluster.kubectl("uncordon", node)


def test_a_fourth_broker_takes_its_share_has_a_full_volume_and_leaves_again(apart: Release) -> None:
    pod, claim = "logs-raftlog-broker-3", "data-logs-raftlog-broker-3"
    apart.cluster.offer_small_volume("small", "n2", 256 << 20)
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        "volumeName": "small",
        "resources": {"requests": {"storage": "100Gi"}},
    }
    metadata = {"name": claim, "namespace": apart.namespace}
    apart.cluster.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})
    with step(apart, "three brokers to four, rebalanced", PLANNED_S):
        apart.upgrade({"brokers": {"replicas": 4}})
        apart.rolled_out("broker")
        apart.raftlog("cluster", "rebalance", "--execute")
        assert replicas_on(apart, 3) > 0
    with step(apart, "volume of broker-3 full", UNPLANNED_S):
        for size in ("1M", "4k"):
            dd = ("dd", "if=/dev/zero", "of=/var/lib/raftlog/filler", f"bs={size}", "oflag=append", "conv=notrunc")
            apart.kubectl("exec", pod, "--", *dd, check=False)
        until("broker that refuses writes", lambda: is_full(apart))
        time.sleep(20)
        apart.kubectl("exec", pod, "--", "rm", "/var/lib/raftlog/filler")
        until("broker with space", lambda: not is_full(apart))
    with step(apart, "four brokers to three, decommissioned", PLANNED_S):
        decommission = apart.begin("raftlog", "broker", "decommission", "3", "--wait")
        until("broker without replicas", lambda: replicas_on(apart, 3) == 0)
        apart.upgrade({"brokers": {"replicas": 3}})
        assert decommission.wait(PATIENCE_S) == 0
        apart.kubectl("delete", "pvc", claim)


def test_two_brokers_are_added_at_once_taken_away_by_a_rollback_and_leave_in_order(apart: Release) -> None:
    with step(apart, "three brokers to five at once, rebalanced", PLANNED_S):
        apart.upgrade({"brokers": {"replicas": 5}})
        apart.rolled_out("broker")
        apart.raftlog("cluster", "rebalance", "--execute")
        assert min(replicas_on(apart, each) for each in (3, 4)) > 0
    with step(apart, "both taken away with their replicas by a rollback, and back", PATIENCE_S):
        apart.rollback()
        for each in (3, 4):
            apart.kubectl("wait", "--for=delete", f"pod/logs-raftlog-broker-{each}", "--timeout=180s")
        assert apart.raftlog("topic", "describe", "--under-min-isr", "-o", "json") != "[]\n"
        apart.upgrade({"brokers": {"replicas": 5}})
        apart.rolled_out("broker")
    for each in (4, 3):
        with step(apart, f"broker-{each} decommissioned", PLANNED_S):
            decommission = apart.begin("raftlog", "broker", "decommission", str(each), "--wait")
            until("broker without replicas", partial(is_empty, apart, each))
            apart.upgrade({"brokers": {"replicas": each}})
            assert decommission.wait(PATIENCE_S) == 0
            apart.kubectl("delete", "pvc", f"data-logs-raftlog-broker-{each}")


def is_empty(release: Release, broker_id: int) -> bool:
    """Whether a broker has no replicas."""
    return replicas_on(release, broker_id) == 0


def is_full(release: Release) -> bool:
    """Whether a broker refuses writes because its disk is full."""
    report = json.loads(release.raftlog("doctor", "--interval", "0", "--fail-on", "never", "-o", "json"))
    return "disk-full" in {each["check"] for each in report["findings"]}


def replicas_on(release: Release, broker_id: int) -> int:
    """Return how many replicas a broker has, of internal topics too."""
    listed = json.loads(release.raftlog("broker", "list", "-o", "json"))
    return next(int(each["replicas"]) for each in listed if each["broker_id"] == broker_id)


def test_a_broker_whose_volume_is_lost_is_filled_again(apart: Release) -> None:
    with step(apart, "volume of broker-2 lost", PLANNED_S):
        apart.kubectl("delete", "pvc", "data-logs-raftlog-broker-2", "--wait=false")
        apart.kubectl("delete", "pod", "logs-raftlog-broker-2")
        apart.rolled_out("broker")


def test_spark_copies_exactly_once_while_a_broker_and_an_executor_die(apart: Release) -> None:
    """Spark's own scheduler for Kubernetes: the driver's pod starts the executors' pods."""
    begin_spark(apart)
    until("rows that Spark has copied", lambda: spark_phase(apart) == "Running" and records_in(apart, SPARK) > 0)
    with step(apart, "broker-1 and an executor deleted by force under Spark", UNPLANNED_S):
        apart.kubectl("delete", "pod", "logs-raftlog-broker-1", "--force", "--grace-period=0")
        apart.healthy()
        (first, *_) = executors(apart)
        apart.kubectl("delete", "pod", first, "--force", "--grace-period=0")
        until("another executor", lambda: len(executors(apart) - {first}) == 2)
        before = records_in(apart, SPARK)
        until("further rows", lambda: records_in(apart, SPARK) > before)
    apart.kubectl("exec", SPARK, "--", "touch", "/tmp/stop")
    until("end of the driver", lambda: spark_phase(apart) == "Succeeded")
    log = apart.kubectl("logs", SPARK).splitlines()
    said = next((line for line in log if line.startswith("{")), None)
    assert said is not None, "\n".join(log[-40:])
    print(f"\nSpark: {said}")
    found = json.loads(said)
    assert found["copied"] == found["source"] > 0
    assert (found["missing"], found["doubled_or_wrong"]) == (0, 0)
    apart.kubectl("delete", "pod", SPARK)


SPARK = "spark"
"""The driver's pod, its account, and the topic that it writes."""


def begin_spark(release: Release) -> None:
    """Start the driver of `spark_job.py`, with Spark and Java of this machine, which raftlog's image lacks."""
    found = java.find()
    if found is None:
        pytest.skip("SPARK IS NOT RUN: no Java")
    of_machine = {"/packages": Path(pyspark.__file__).parents[1], "/java": found.home}
    of_machine |= {str(each): each for each in Path("/etc").glob("java-*")}  # where Debian has Java's settings
    release.healthy()  # a topic with three replicas needs three brokers that are up
    release.raftlog("topic", "create", SPARK, "--partitions", "3", "--replication-factor", "3")
    metadata = {"name": SPARK, "namespace": release.namespace}
    places = [(f"machine-{number}", *place) for number, place in enumerate(of_machine.items())]
    mounts = [{"name": name, "mountPath": mounted, "readOnly": True} for name, mounted, _ in places]
    volumes: list[Values] = [{"name": name, "hostPath": {"path": str(path)}} for name, _, path in places]
    both: Values = {
        "command": ["/opt/raftlog/bin/python", "/work/spark_job.py"],
        "workingDir": "/tmp",
        "volumeMounts": [*mounts, {"name": "work", "mountPath": "/work"}],
        "env": [{"name": "JAVA_HOME", "value": "/java"}, {"name": "SPARK_HOME", "value": "/packages/pyspark"}],
    }
    volumes.append({"name": "work", "configMap": {"name": SPARK}})
    executor = {"containers": [{**both, "name": "executor"}], "volumes": volumes}
    driver = {
        **both,
        "name": SPARK,
        "image": IMAGE,
        "args": [TOPIC["name"], SPARK],
        "env": [
            *both["env"],
            {"name": "IMAGE", "value": IMAGE},
            {"name": "MASTER", "value": "k8s://https://kubernetes.default.svc"},
            {"name": "PYTHONPATH", "value": "/packages"},
            {"name": "RAFTLOG_BOOTSTRAP", "value": f"logs-raftlog.{release.namespace}.svc:9092"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
    }
    release.cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {
                "spark_job.py": (Path(__file__).parent / "spark_job.py").read_text(),
                "executor.json": json.dumps({"apiVersion": "v1", "kind": "Pod", "spec": executor}),
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {
                "serviceAccountName": SPARK,
                "restartPolicy": "Never",
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": 1,
                "containers": [driver],
                "volumes": volumes,
            },
        },
    )


def spark_phase(release: Release) -> str:
    """Return the phase of the driver's pod, which does not fail."""
    phase = str(release.get("pod", SPARK)["status"]["phase"])
    assert phase != "Failed", release.kubectl("logs", SPARK, "--tail=60")
    return phase


def executors(release: Release) -> set[str]:
    """Return the names of the executors' pods that run."""
    selector = ("--selector=spark-role=executor", "--field-selector=status.phase=Running")
    return {each["metadata"]["name"] for each in release.get("pods", *selector)["items"]}


def records_in(release: Release, topic: str) -> int:
    """Return the sum of the ends of a topic's partitions."""
    return sum(int(each["offset"]) for each in json.loads(release.raftlog("topic", "offsets", topic, "-o", "json")))


def test_volumes_outlive_the_release(apart: Release) -> None:
    apart.finish()
    before = bound_volumes(apart)
    begun_s = time.monotonic()
    apart.uninstall()
    gone_s = time.monotonic() - begun_s
    apart.install()
    print(f"\nuninstalled in {gone_s:.0f} s, installed again in {time.monotonic() - begun_s - gone_s:.0f} s")
    assert bound_volumes(apart) == before
    apart.start_workload()
    apart.healthy()
    command = "raftlog consume live --from-beginning --no-follow --max {} | wc -l"
    assert int(apart.kubectl("exec", "workload", "--", "sh", "-c", command.format(apart.acked))) == apart.acked


def bound_volumes(release: Release) -> set[str]:
    return {each["spec"]["volumeName"] for each in release.get("pvc")["items"]}


# TLS, users and ACLs


def secret(namespace: str, name: str, content: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": content,
    }


def certificate(authority: CertificateAuthority, name: str, hosts: list[str], node_ids: list[int]) -> dict[str, str]:
    content = authority.issue(name, hosts=hosts, node_ids=node_ids).read_bytes()
    key = serialization.load_pem_private_key(content, password=None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {"tls.crt": content.decode(), "tls.key": key.decode(), "ca.crt": authority.ca_file.read_text()}


def secrets(
    authority: CertificateAuthority, namespace: str, passwords: str, *outside: str
) -> dict[str, dict[str, str]]:
    """Return new certificates of brokers and controllers, and the passwords of two users.

    `outside`: further names of the brokers, for clients outside of Kubernetes.
    """
    hosts = [f"logs-raftlog.{namespace}.svc", f"*.logs-raftlog-broker.{namespace}.svc", "127.0.0.1", *outside]
    controllers = [f"*.logs-raftlog-controller.{namespace}.svc"]
    return {
        "brokers": certificate(authority, "brokers", hosts, [0, 1, 2]),
        "controllers": certificate(authority, "controllers", controllers, [1000, 1001, 1002]),
        "admin": {"password": f"{passwords} of the admin"},
        "shop": {"password": f"{passwords} of the shop"},
    }


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secured(
    cluster: Cluster, authority: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    """The values of `examples/production.yaml`, with three brokers and certificates from Secrets."""
    directory = tmp_path_factory.mktemp("secured")
    namespace = "secured"
    acl = {"principal": "User:shop", "operations": ["All"]}
    values: Values = {
        "insecure": False,
        "tls": {"enabled": True, "secrets": {"brokers": "brokers", "controllers": "controllers"}},
        "auth": {"enabled": True, "authorizer": "acl", "admin": {"user": "admin", "secret": "admin"}},
        "rack": {"enabled": True},
        "topics": [TOPIC],
        "users": [{"name": "shop", "secret": "shop"}],
        "acls": [
            {**acl, "resource": {"type": "topic", "name": "live"}},
            {**acl, "resource": {"type": "group", "name": "live-readers"}},
        ],
    }
    release = Release(cluster, namespace, values, directory)
    release.client = {
        "env": [
            {"name": f"RAFTLOG_{name}", "value": value}
            for name, value in {
                "SECURITY_PROTOCOL": "sasl_ssl",
                "SSL_CA_LOCATION": "/ca/ca.crt",
                "SASL_MECHANISM": "SCRAM-SHA-512",
                "SASL_USERNAME": "shop",
                "SASL_PASSWORD_LOCATION": "/password/password",
            }.items()
        ],
        "mounts": [{"name": "ca", "mountPath": "/ca"}, {"name": "password", "mountPath": "/password"}],
        "volumes": [
            {"name": "ca", "secret": {"secretName": "brokers", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"name": "password", "secret": {"secretName": "shop"}},
        ],
    }
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    cluster.apply(*(secret(namespace, *each) for each in secrets(authority, namespace, "first").items()))
    release.install()
    try:
        release.test()
        release.start_workload()
        yield release
        release.finish()
    finally:
        release.remove()


def test_a_secured_cluster_is_restarted_one_by_one(secured: Release) -> None:
    with step(secured, "rollout restart of secured brokers and controllers", PLANNED_S):
        secured.restart("broker")
        secured.restart("controller")


def test_certificates_and_passwords_are_rotated(secured: Release, authority: CertificateAuthority) -> None:
    new = secrets(authority, secured.namespace, "second")
    before = secured.pods()
    listeners = {
        f"{secured.address_of(f'logs-raftlog-{name}-{ordinal}')}:{port}": f"{name}s"
        for name, port in (("broker", 9092), ("broker", 9093), ("controller", 9093))
        for ordinal in range(3)
    }
    show = "import ssl, sys; print(*(ssl.get_server_certificate(each.split(':')) for each in sys.argv[1:]), sep=',')"

    def presented() -> bool:
        python = ("exec", "logs-raftlog-broker-0", "--", "/opt/raftlog/bin/python", "-c", show)
        shown = secured.kubectl(*python, *listeners).split(",")
        return all(each.strip() in new[name]["tls.crt"] for name, each in zip(listeners.values(), shown, strict=True))

    def mounted() -> bool:
        files = {f"logs-raftlog-broker-{each}": ("/etc/raftlog-admin/admin", "admin") for each in range(3)}
        files["workload"] = ("/password/password", "shop")
        return all(
            secured.kubectl("exec", pod, "--", "cat", file) == new[name]["password"]
            for pod, (file, name) in files.items()
        )

    with step(secured, "certificates and passwords rotated", PLANNED_S):
        secured.cluster.apply(*(secret(secured.namespace, *each) for each in new.items()))
        until("new secrets in all pods", mounted)
        until("new certificates at all listeners", presented)
        secured.upgrade({"job": {"setPasswords": True}})
        secured.test()  # as the admin
    assert secured.pods() == before


def test_a_broker_of_a_secured_cluster_is_deleted_by_force(secured: Release) -> None:
    with step(secured, "secured broker-1 deleted by force", UNPLANNED_S):
        secured.kubectl("delete", "pod", "logs-raftlog-broker-1", "--force", "--grace-period=0")


def test_a_stranger_may_nothing(secured: Release) -> None:
    with pytest.raises(StepFailed, match="User:shop may not"):
        secured.raftlog("topic", "create", "other")


# Clients outside of Kubernetes


def test_clients_outside_go_on_through_restarts(
    cluster: Cluster, authority: CertificateAuthority, tmp_path: Path
) -> None:
    """Each broker at a port of a node, with TLS and users; the workload is a process of this machine."""
    namespace, ports = "outside", (31001, 31002, 31003)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    (node,) = [
        each["address"]
        for each in json.loads(cluster.kubectl("get", "node", NODES[1], "-o", "json"))["status"]["addresses"]
        if each["type"] == "InternalIP"
    ]
    given = secrets(authority, namespace, "first", node)
    cluster.apply(*(secret(namespace, *each) for each in given.items()))
    acl = {"principal": "User:shop", "operations": ["All"]}
    values: Values = {
        "insecure": False,
        "tls": {"enabled": True, "secrets": {"brokers": "brokers", "controllers": "controllers"}},
        "auth": {"enabled": True, "authorizer": "acl", "admin": {"user": "admin", "secret": "admin"}},
        "externalAccess": {"enabled": True, "type": "NodePort", "hosts": [node], "nodePorts": ports},
        "topics": [TOPIC],
        "users": [{"name": "shop", "secret": "shop"}],
        "acls": [
            {**acl, "resource": {"type": "topic", "name": "live"}},
            {**acl, "resource": {"type": "group", "name": "live-readers"}},
        ],
    }
    release = Release(cluster, namespace, values, tmp_path)
    (tmp_path / "password").write_text(given["shop"]["password"])
    of_client = {
        "BOOTSTRAP": ",".join(f"{node}:{port}" for port in ports[:2]),
        "SECURITY_PROTOCOL": "sasl_ssl",
        "SSL_CA_LOCATION": str(authority.ca_file),
        "SASL_MECHANISM": "SCRAM-SHA-512",
        "SASL_USERNAME": "shop",
        "SASL_PASSWORD_LOCATION": str(tmp_path / "password"),
    }
    (port,) = free_ports(1)
    command = [sys.executable, str(Path(__file__).parent / "workload.py"), "live", str(RATE), str(port)]
    environment = {**os.environ, **{f"RAFTLOG_{name}": value for name, value in of_client.items()}}

    def ask(what: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}", timeout=400) as answer:
            return json.load(answer)

    try:
        release.install()
        release.test()
        with (
            (tmp_path / "workload.log").open("w") as log,
            subprocess.Popen(command, env=environment, stderr=log) as workload,
        ):
            try:
                until("the workload's first records", lambda: ask("step")["acked"] > 0)
                release.restart("broker")
                restarted = ask("step")
                before = release.uid_of("logs-raftlog-broker-1")
                release.kubectl("delete", "pod", "logs-raftlog-broker-1", "--force", "--grace-period=0")
                until("the broker's new pod", lambda: release.uid_of("logs-raftlog-broker-1") != before)
                release.rolled_out("broker")
                deleted = ask("step")
                result = ask("finish")
            finally:
                workload.terminate()
        print(f"\noutside: {json.dumps([restarted, deleted, result])}")
        assert restarted["gap_s"] <= PLANNED_S
        assert deleted["gap_s"] <= UNPLANNED_S
        assert result["acked"] == result["sent"] > 0
        assert (result["lost"], result["duplicates"], result["errors"]) == (0, 0, [])
    finally:
        release.remove()


# Both roles in each pod


def test_the_previous_image_is_upgraded(cluster: Cluster, tmp_path: Path) -> None:
    cluster.load(docker.ensure_previous_image().tag, PREVIOUS)
    values: Values = {"image": {"tag": "previous"}, "controllers": {"mode": "combined"}, "topics": [TOPIC]}
    release = Release(cluster, "combined", values, tmp_path)
    try:
        release.install()
        release.start_workload()
        with step(release, "upgrade of the image", PLANNED_S):
            release.upgrade({"image": {"tag": IMAGE.partition(":")[2]}})
            release.rolled_out()
        with step(release, "upgrade of the features", PLANNED_S):
            release.raftlog("cluster", "features", "upgrade")
        release.test()
        release.finish()
    finally:
        release.remove()


# One node, to try things


def test_one_pod_with_both_roles(cluster: Cluster, tmp_path: Path) -> None:
    release = Release(cluster, "alone", yaml.safe_load((EXAMPLES / "dev.yaml").read_text()), tmp_path)
    try:
        release.install()
        release.test()
    finally:
        release.remove()
