"""The rendered chart, examined as by a platform team: against Kubernetes' schemas, and the project's own rules."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import typer

from broker.config.config import BrokerConfig
from raftlog._client.options import SECURITY_KEYS
from raftlog.cli import client_config
from raftlog.cli.app import tree
from raftmeta.quorum.peer_identity import node_ids_named
from tests.support.chart import documents
from tools.helm import CHART, KUBERNETES, MANIFESTS

EXAMPLES = sorted(path.stem for path in MANIFESTS.glob("*.yaml"))
FOREIGN = {"ServiceMonitor", "PrometheusRule", "Certificate"}
"""Kinds of operators; Kubernetes has no schema of them."""
Manifest = dict[str, Any]


def load(example: str) -> list[Manifest]:
    return documents((MANIFESTS / f"{example}.yaml").read_text())


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    for each in manifests:
        if each["kind"] in ("StatefulSet", "Job"):
            yield each["spec"]["template"]["spec"]


@pytest.fixture(params=EXAMPLES)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return load(request.param)


def test_there_are_examples() -> None:
    assert EXAMPLES == ["dev", "production", "tls-external"]


def test_kubernetes_would_take_them(manifests: list[Manifest]) -> None:
    for each in manifests:
        if each["kind"] not in FOREIGN:
            kubernetes_validate.validate(each, KUBERNETES.rpartition(".")[0], strict=True)


def test_a_manifest_with_a_wrong_field_would_be_noticed() -> None:
    (budget,) = of_kind(load("production"), "PodDisruptionBudget")[:1]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**budget, "spec": {**budget["spec"], "maxUnavailible": 1}}, KUBERNETES.rpartition(".")[0], strict=True
        )


def test_pods_have_no_rights_that_they_do_not_need(manifests: list[Manifest]) -> None:
    found = list(pods(manifests))
    assert found
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            context = container["securityContext"]
            assert context == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"], container["name"]
            assert "cpu" not in container["resources"].get("limits", {}), (
                f"{container['name']} has a CPU limit, which would throttle its event loop until heartbeats are late"
            )


def test_probes_ask_what_they_are_for(manifests: list[Manifest]) -> None:
    for stateful in of_kind(manifests, "StatefulSet"):
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        asked = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        assert asked == {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}
        ports = {port["name"] for port in container["ports"]}
        assert container["livenessProbe"]["httpGet"]["port"] in ports


def test_a_quorum_can_form_before_anybody_is_ready(manifests: list[Manifest]) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "Service")}
    for stateful in of_kind(manifests, "StatefulSet"):
        assert stateful["spec"]["podManagementPolicy"] == "Parallel"
        headless = services[stateful["spec"]["serviceName"]]
        assert headless["clusterIP"] == "None"
        assert headless["publishNotReadyAddresses"] is True
        assert stateful["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"


def test_selectors_find_the_pods_that_they_mean(manifests: list[Manifest]) -> None:
    templates = [
        each["spec"]["template"]["metadata"]["labels"]
        for kind in ("StatefulSet", "Deployment")
        for each in of_kind(manifests, kind)
    ]
    selectors = [each["spec"]["selector"] for each in of_kind(manifests, "Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(manifests, "PodDisruptionBudget")]
    for selector in selectors:
        of_pod = {key: value for key, value in selector.items() if not key.startswith("statefulset.")}
        assert sum(of_pod.items() <= labels.items() for labels in templates) == 1, selector


def covers(name: str, host: str) -> bool:
    """Whether a name of a certificate stands for a host; `*` is one label."""
    return name == host or (name.startswith("*.") and name[2:] == host.partition(".")[2])


class Pod(NamedTuple):
    """The settings that a pod's start script passes to its server, and the files that it leaves for commands in the
    pod."""

    stateful: Manifest
    config: BrokerConfig
    environment_file: Path


@pytest.fixture
def started(manifests: list[Manifest], tmp_path: Path) -> list[Pod]:
    """Every pod's start script, run with a `raftlog` that says what it was given."""
    stub, rack = tmp_path / "raftlog", tmp_path / "rack"
    stub.write_text("#!/bin/sh\nenv\n")
    stub.chmod(0o755)
    rack.write_text("zone-a")
    configs = {
        each["metadata"]["name"]: each["data"]["server.toml"]
        for each in of_kind(manifests, "ConfigMap")
        if "server.toml" in each["data"]
    }
    found = []
    for stateful in of_kind(manifests, "StatefulSet"):
        name, count = stateful["metadata"]["name"], stateful["spec"]["replicas"]
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        for ordinal in range(count):
            kept = tmp_path / f"environment-{name}-{ordinal}"
            script = container["args"][0].replace("/run/raftlog/rack", str(rack))
            said = subprocess.run(
                ["/bin/sh", "-ec", script.replace("/run/raftlog/environment", str(kept))],
                env={"HOSTNAME": f"{name}-{ordinal}", "PATH": f"{stub.parent}:/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            environment = dict(line.split("=", 1) for line in said.splitlines() if line.startswith("RAFTLOG_"))
            file = tmp_path / f"{name}.toml"
            file.write_text(configs[name])
            found.append(Pod(stateful, BrokerConfig.load(file=file, environment=environment), kept))
    return found


def test_servers_take_the_configuration_that_is_written_for_them(started: list[Pod]) -> None:
    assert len({pod.config.node_id for pod in started}) == len(started)
    for pod in started:
        name, config = pod.stateful["metadata"]["name"], pod.config
        assert (config.node_id in config.controller_quorum_voters) == config.is_controller
        assert config.metrics_listener == ("0.0.0.0", 9464)
        if config.is_controller:
            host = config.controller_quorum_voters[config.node_id][0]
            ordinal = config.node_id % 1000
            assert host.startswith(f"{name}-{ordinal}.{pod.stateful['spec']['serviceName']}."), (
                f"the host {host} must be the pod's own name in DNS"
            )


def test_certificates_name_every_node_and_every_address_that_somebody_connects_to(
    manifests: list[Manifest], started: list[Pod]
) -> None:
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(manifests, "Certificate")}
    with_tls = [pod for pod in started if pod.config.ssl_keystore_location]
    assert bool(certificates) == bool(with_tls)
    for pod in with_tls:
        (secret,) = [
            each["secret"]["secretName"]
            for each in pod.stateful["spec"]["template"]["spec"]["volumes"]
            if each["name"] == "tls"
        ]
        certificate, config = certificates[secret], pod.config
        assert config.node_id in node_ids_named(certificate["uris"], [certificate["commonName"]])
        assert {"server auth", "client auth"} <= set(certificate["usages"]), (
            "the certificate must serve for servers and clients, as nodes are each other's clients"
        )
        names = [*certificate["dnsNames"], *certificate.get("ipAddresses", [])]
        told = [config.advertised_inter_node_listener]
        if config.is_controller:
            told.append(config.controller_quorum_voters[config.node_id])
        if config.is_broker:
            told += [config.advertised_listener, ("127.0.0.1", 0)]  # drain asks the broker in its own pod
            told += [
                (each["value"].rpartition(":")[0], 0) for each in _client_variables(manifests, "RAFTLOG_BOOTSTRAP")
            ]
        for address in told:
            assert address is not None
            assert any(covers(name, address[0]) for name in names), (address, names)


def _client_variables(manifests: list[Manifest], name: str) -> list[Manifest]:
    jobs = of_kind(manifests, "Job")
    return [
        each for job in jobs for each in job["spec"]["template"]["spec"]["containers"][0]["env"] if each["name"] == name
    ]


def test_a_broker_is_drained_before_it_stops(started: list[Pod], tmp_path: Path) -> None:
    """The script runs, with a `raftlog` that says what it was asked; the real command line takes that."""
    stub = tmp_path / "bin" / "raftlog"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "$RAFTLOG_NODE_ID $@"\n')
    stub.chmod(0o755)
    for pod in started:
        (container,) = pod.stateful["spec"]["template"]["spec"]["containers"]
        if not pod.config.is_broker:
            assert "lifecycle" not in container
            continue
        shell, flags, script = container["lifecycle"]["preStop"]["exec"]["command"]
        script = script.replace("/run/raftlog/environment", str(pod.environment_file))
        said = subprocess.run(
            [shell, flags, f"{script.replace('exec raftlog', f'exec {stub}')}"],
            env={"HOSTNAME": "other", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert said[:4] == [str(pod.config.node_id), "broker", "drain", "--self"]
        here = {"/etc/raftlog/server.toml": tmp_path / "raftlog", "/etc/raftlog/client.toml": tmp_path / "raftlog"}
        arguments = [str(here.get(each, each)) for each in said[3:]]
        command = typer.main.get_command(tree()).commands["broker"].commands["drain"]  # type: ignore[attr-defined]
        given = command.make_context("drain", arguments).params
        assert given["until_restart"] is True, "the drain must end at the restart, as no person undrains the broker"
        grace_s = pod.stateful["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert 0 < given["timeout_s"] < grace_s, (
            f"the drain may take {given['timeout_s']} s of {grace_s} s, but must leave time for the stop itself"
        )
        assert (given["client_config"] is not None) == bool(pod.config.ssl_keystore_location)


def test_jobs_speak_as_the_brokers_listen(manifests: list[Manifest], started: list[Pod]) -> None:
    wanted = {pod.config.listener_security_protocol for pod in started if pod.config.is_broker}
    for job in (*of_kind(manifests, "Job"), *of_kind(manifests, "Deployment")):
        pod = job["spec"]["template"]["spec"]
        said = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert {said.get("RAFTLOG_SECURITY_PROTOCOL", "plaintext")} == wanted
        assert client_config.of_environment(said).keys() <= {key.name for key in SECURITY_KEYS}
        files = {value for name, value in said.items() if name.endswith("_LOCATION")}
        mounts = {each["mountPath"] for each in pod["containers"][0].get("volumeMounts", ())}
        assert {str(Path(file).parent) for file in files} <= mounts


def policy_of_nodes(manifests: list[Manifest]) -> Manifest:
    (policy,) = [each for each in of_kind(manifests, "NetworkPolicy") if each["metadata"]["name"] == "raftlog"]
    return policy


def test_brokers_take_no_records_from_whom_the_policy_does_not_name() -> None:
    policy = policy_of_nodes(load("production"))
    sources = {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}
    own, named = sources["clients"]
    assert named == {"namespaceSelector": {"matchLabels": {"raftlog-clients": "yes"}}}
    assert own == {"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}
    (nodes,) = sources["nodes"]
    assert nodes["podSelector"]["matchLabels"] == policy["spec"]["podSelector"]["matchLabels"]
    assert nodes["podSelector"]["matchExpressions"] == policy["spec"]["podSelector"]["matchExpressions"]


def test_pods_that_are_clients_are_let_in(manifests: list[Manifest]) -> None:
    """Jobs, the console, and brokers with a preStop that asks others."""
    policy = policy_of_nodes(manifests)
    templates = [
        each["spec"]["template"] for kind in ("Job", "StatefulSet", "Deployment") for each in of_kind(manifests, kind)
    ]
    (clients,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == "clients"]
    assert templates
    for template in templates:
        labels = template["metadata"]["labels"]
        assert any(
            peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items()
            for peer in clients["from"]
            if set(peer) == {"podSelector"}
        )


def test_alerts_and_dashboard_ask_for_figures_that_there_are() -> None:
    shown = _figures_in_code()
    asked = set(re.findall(r"\braftlog_[a-z_]+", (CHART / "files" / "alerts.yaml").read_text()))
    panels = json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            asked |= set(re.findall(r"\braftlog_[a-z_]+", target["expr"]))
    unknown = {
        name
        for name in asked
        if re.sub(r"_(total|bucket|count|sum|info)$", "", name) not in shown and name not in shown
    }
    assert unknown == set()
    assert len(asked) > 15


def _figures_in_code() -> set[str]:
    """Return the names of families, from the sources: literals of the calls that make them."""
    sources = [path.read_text() for path in (CHART.parents[2] / "broker" / "observability").glob("*.py")]
    names = set()
    for source in sources:
        names |= {f"raftlog_{name}" for name in re.findall(r'"([a-z_]+)",\s*"[A-Z0-9]', source)}
        names |= {f"raftlog_{name}" for name in re.findall(r"\{PREFIX\}([a-z_]+)", source)}
    partition = {name.replace("raftlog_", "raftlog_partition_") for name in names}
    return names | partition | {"raftlog_process_resident_memory_bytes"}
