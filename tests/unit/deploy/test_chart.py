"""The chart itself, rendered by the real helm; skipped, with the reason, only where helm cannot be had."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from broker.config.config import BROKER_CONFIGS
from raftlog.config import ConfigDef, ConfigKey
from raftmeta.topic_configs import TOPIC_CONFIGS
from tests.support.chart import documents
from tools import helm as tool
from tools.go_programs import HELM
from tools.helm import CHART, EXAMPLES, KUBERNETES, MANIFESTS
from tools.progress import StepFailed


@pytest.fixture(scope="module")
def helm() -> Path:
    try:
        return HELM.find_or_build()
    except StepFailed as error:
        pytest.skip(f"THE CHART IS NOT TESTED: {error}")


def refusal_of(helm: Path, tmp_path: Path, values: dict[str, object]) -> str:
    """Return why the chart does not render these values."""
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps({"insecure": True, **values}))
    done = tool.render(helm, "--values", str(file))
    assert done.returncode != 0
    return done.stderr


def test_helm_finds_nothing_to_complain_of(helm: Path) -> None:
    for example in EXAMPLES.glob("*.yaml"):
        done = subprocess.run(
            [helm, "lint", "--strict", "--kube-version", KUBERNETES, "--values", example, CHART],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_the_committed_manifests_are_what_the_chart_renders(helm: Path, example: str) -> None:
    done = tool.render(helm, "--values", str(EXAMPLES / example))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (MANIFESTS / example).read_text(), f"{example} is out of date; ./dev chart writes it anew"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"insecure": False}, "without tls.enabled the listeners are plaintext"),
        ({"tls": {"enabled": True}}, "tls.secrets.brokers is empty"),
        ({"tls": {"enabled": True, "secrets": {"brokers": "a"}}}, "tls.secrets.controllers is empty"),
        (
            {"tls": {"enabled": True, "secrets": {"brokers": "a", "controllers": "b"}}},
            "need a certificate as every client does",
        ),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuerRef.name is empty"),
        ({"tls": {"secrets": {"brokers": "a"}}}, "tls.enabled is false, but certificates are named"),
        (
            {
                "insecure": False,
                "tls": {"enabled": True, "migration": "switch", "secrets": {"brokers": "a", "controllers": "b"}},
            },
            "tls.migration accepts plaintext as well",
        ),
        ({"config": {"ssl.client.auth": "none"}}, "config.ssl.client.auth is set by the chart itself"),
        ({"config": {"ssl.client.auth": "none"}}, "remove it, and set tls.clientAuth in the values"),
        ({"brokers": {"replica": 3}}, "additional properties 'replica' not allowed"),
        ({"brokerz": {}}, "additional properties 'brokerz' not allowed"),
        ({"controllers": {"replicas": 2}}, "value must be one of 1, 3, 5"),
        ({"controllers": {"replicas": 5, "mode": "combined"}}, "only 3 pods"),
        ({"podDisruptionBudget": {"controllersMaxUnavailable": 2}}, "3 controllers survive the loss of 1 only"),
        ({"podDisruptionBudget": {"brokersMaxUnavailable": 2}}, "writes survive the loss of 1 only"),
        (
            {
                "controllers": {"mode": "combined"},
                "config": {"min.insync.replicas": 1},
                "podDisruptionBudget": {"brokersMaxUnavailable": 2},
            },
            "have the votes as well",
        ),
        ({"brokers": {"replicas": 2}}, "no topic could be created"),
        ({"config": {"min.insync.replicas": 3}}, "leave one replica of slack"),
        ({"config": {"min.insync.replicas": 4}}, "writes with acks=all would always be refused"),
        ({"config": {"node.id": 3}}, "config.node.id is set by the chart itself"),
        ({"brokerConfig": {"log.dirs": ["/x"]}}, "brokerConfig.log.dirs is set by the chart itself"),
        ({"externalAccess": {"enabled": True}}, "0 names for 3 brokers"),
        (
            {"externalAccess": {"enabled": True, "type": "NodePort", "hosts": ["a"], "nodePorts": [30001]}},
            "1 ports for 3 brokers",
        ),
        ({"clusterId": "no spaces"}, "does not match pattern"),
        ({"topics": [{"name": "or ders"}]}, "does not match pattern"),
        ({"topics": [{"name": "a", "replicationFactor": 4}]}, "topic a: replicationFactor is 4, more than brokers"),
        ({"preStop": {"timeoutSeconds": 120}}, "preStop.timeoutSeconds is 120, and the pod is killed after 120"),
        ({"tls": {"migration": "switch"}}, "tls.migration is switch, and tls.enabled is false"),
    ],
)
def test_what_would_lose_its_quorum_or_refuse_writes_is_not_rendered(
    helm: Path, tmp_path: Path, values: dict[str, object], reason: str
) -> None:
    assert reason in refusal_of(helm, tmp_path, values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"config": {"log.retention.days": 8}}, "config.log.retention.days: unknown server config; docs/"),
        ({"config": {"log.retention.days": 8}}, "the nearest are log.retention.bytes, log.retention.check.interval.ms"),
        ({"brokerConfig": {"log.retention.hours": 8}}, "log.retention.ms takes units, such as log.retention.ms=7d"),
        ({"controllerConfig": {"log_retention_ms": 8}}, "write it with dots, as log.retention.ms"),
        ({"config": {"min": {"insync": {"replicas": 2}}}}, 'config.min is a table'),
        ({"config": {"min": {"insync": {"replicas": 2}}}}, 'a key is one name with dots: write "min.insync.replicas"'),
        ({"config": {"log.retention.ms": "soon"}}, "config.log.retention.ms=soon: expected milliseconds, or a number"),
        ({"config": {"log.retention.ms": "7 weeks"}}, "config.log.retention.ms=7 weeks: expected milliseconds"),
        ({"config": {"broker.session.timeout.ms": "1h"}}, "5m, 2h or 7d, from 100 to 600000"),
        ({"config": {"num.partitions": 0}}, "config.num.partitions=0: expected a whole number, from 1 to"),
        ({"config": {"num.partitions": 1.5}}, "config.num.partitions=1.5: expected a whole number"),
        ({"config": {"log.format": "yaml"}}, "config.log.format=yaml: expected one of text, json"),
        ({"config": {"log.level": 10}}, "config.log.level=10: expected one of"),
        ({"config": {"auto.leader.rebalance.enable": "yes"}}, "expected true or false"),
        ({"topics": [{"name": "a", "config": {"retention.hours": 1}}]}, "topics: a: config.retention.hours: unknown"),
        ({"topics": [{"name": "a", "config": {"segment.jitter.ms": 1}}]}, "segments of partitions roll by"),
        ({"topics": [{"name": "a", "config": {"cleanup.policy": "compress"}}]}, "cleanup.policy=compress: expected"),
    ],
)  # fmt: skip
def test_a_key_or_value_that_the_servers_would_refuse_is_not_rendered(
    helm: Path, tmp_path: Path, values: dict[str, object], reason: str
) -> None:
    assert reason in refusal_of(helm, tmp_path, values)


@pytest.mark.parametrize("release", ["logs.prod", "2logs"])
def test_a_release_whose_name_no_service_can_have_is_not_rendered(helm: Path, release: str) -> None:
    """Helm allows such names; Kubernetes would refuse the Services after other objects have been made."""
    done = tool.render(helm, "--set", "insecure=true", release=release)
    assert done.returncode != 0
    assert f"{release}-raftlog cannot be the name of a Service" in done.stderr
    assert "set fullnameOverride" in done.stderr
    assert tool.render(helm, "--set", "insecure=true,fullnameOverride=logs", release=release).returncode == 0


def written_by_the_chart() -> frozenset[str]:
    found = re.search(r"range \$key, \$value := dict (.*?) -\}\}", (CHART / "templates" / "_helpers.tpl").read_text())
    assert found is not None
    return frozenset(re.findall(r'"([a-z.]+)" "', found[1]))


@pytest.mark.parametrize("spelling", ["defaults", "texts", "least", "most"])
def test_every_value_that_the_servers_take_is_rendered(helm: Path, tmp_path: Path, spelling: str) -> None:
    """The chart knows forms and ranges from files/keys.json; it must not refuse what a server would accept."""

    def written(key: ConfigKey) -> object:
        value = key.default
        if spelling == "least" and key.minimum is not None:
            value = key.minimum
        if spelling == "most" and key.maximum is not None:
            value = key.maximum
        if spelling == "texts":
            return key.format(value).upper() if key.ignore_case else key.format(value)
        return list(value) if isinstance(value, tuple) else value

    def config(keys: ConfigDef) -> dict[str, object]:
        found = {key.name: written(key) for key in keys if key.name not in written_by_the_chart()}
        keys.parse(found)
        return found

    values = {
        "insecure": True,
        "config": config(BROKER_CONFIGS) | {"default.replication.factor": 3, "min.insync.replicas": 2},
        "topics": [{"name": "orders", "config": config(TOPIC_CONFIGS)}],
    }
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(values))
    done = tool.render(helm, "--values", str(file))
    assert done.returncode == 0, done.stderr


def rolled(helm: Path, tmp_path: Path, chart: Path = CHART, **values: object) -> dict[str, str]:
    """Return what decides whether pods of each set are replaced: their template."""
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps({"insecure": True, **values}))
    done = tool.render(helm, "--values", str(file), chart=chart)
    assert done.returncode == 0, done.stderr
    rendered = [each for each in documents(done.stdout) if each["kind"] == "StatefulSet"]
    return {each["metadata"]["name"]: json.dumps(each["spec"]["template"], sort_keys=True) for each in rendered}


def test_a_change_of_the_configuration_rolls_the_pods_that_have_it(helm: Path, tmp_path: Path) -> None:
    before = rolled(helm, tmp_path)
    assert rolled(helm, tmp_path) == before
    both = rolled(helm, tmp_path, config={"log.retention.ms": "1d"})
    assert [name for name in before if both[name] != before[name]] == ["raftlog-broker", "raftlog-controller"]
    brokers = rolled(helm, tmp_path, brokerConfig={"log.retention.ms": "1d"})
    assert [name for name in before if brokers[name] != before[name]] == ["raftlog-broker"]
    controllers = rolled(helm, tmp_path, controllerConfig={"log.retention.ms": "1d"})
    assert [name for name in before if controllers[name] != before[name]] == ["raftlog-controller"]


def test_a_new_version_of_the_chart_alone_rolls_no_pod(helm: Path, tmp_path: Path) -> None:
    newer = tmp_path / "raftlog"
    shutil.copytree(CHART, newer)
    described = newer / "Chart.yaml"
    described.write_text(re.sub(r"^version: .*", "version: 99.0.0", described.read_text(), flags=re.MULTILINE))
    assert rolled(helm, tmp_path, newer) == rolled(helm, tmp_path)


@pytest.mark.parametrize(
    ("values", "policy"),
    [
        ({"type": "NodePort", "hosts": ["nodes.example.org"], "nodePorts": [30001, 30002, 30003]}, "Cluster"),
        ({"type": "LoadBalancer", "hosts": ["a.example.org", "b.example.org", "c.example.org"]}, "Local"),
        (
            {"type": "LoadBalancer", "hosts": ["a.example.org", "b.example.org", "c.example.org"],
             "trafficPolicy": "Cluster"},
            "Cluster",
        ),
    ],
)  # fmt: skip
def test_a_node_port_is_answered_by_every_node_and_a_load_balancer_finds_the_right_one(
    helm: Path, tmp_path: Path, values: dict[str, object], policy: str
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps({"insecure": True, "externalAccess": {"enabled": True, **values}}))
    rendered = documents(tool.render(helm, "--values", str(file)).stdout)
    external = [each for each in rendered if each["metadata"]["name"].endswith("-external")]
    assert [each["spec"]["externalTrafficPolicy"] for each in external] == [policy] * 3


def test_node_ports_are_told_to_clients(helm: Path, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    ports = [30001, 30002, 30003]
    access = {"enabled": True, "type": "NodePort", "hosts": ["n.example.org"], "nodePorts": ports}
    file.write_text(json.dumps({"insecure": True, "externalAccess": access}))
    rendered = tool.render(helm, "--values", str(file)).stdout
    for ordinal, port in enumerate(ports):
        assert f'{ordinal}) export RAFTLOG_ADVERTISED_LISTENERS="n.example.org:{port}" ;;' in rendered
        assert f"nodePort: {port}" in rendered


def test_a_given_secret_is_mounted_and_jobs_without_a_certificate_get_the_ca_alone(helm: Path, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    secrets = {"brokers": "of-brokers", "controllers": "of-controllers"}
    tls = {"enabled": True, "clientAuth": "none", "secrets": secrets}
    file.write_text(json.dumps({"tls": tls, "topics": [{"name": "orders"}]}))
    done = tool.render(helm, "--values", str(file))
    assert done.returncode == 0, done.stderr
    rendered = documents(done.stdout)
    assert not [each for each in rendered if each["kind"] == "Certificate"]
    mounted = {
        each["metadata"]["name"]: volume["secret"]
        for each in rendered
        if each["kind"] in ("StatefulSet", "Job")
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert mounted["raftlog-broker"]["secretName"] == "of-brokers"
    assert mounted["raftlog-controller"]["secretName"] == "of-controllers"
    assert mounted["raftlog-apply"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], (
        "the pod must mount the CA's certificate only, not the brokers' key"
    )


def test_controllers_can_be_rolled_after_the_brokers(helm: Path) -> None:
    done = tool.render(helm, "--set", "insecure=true,controllers.partition=5")
    sets = [each for each in documents(done.stdout) if each["kind"] == "StatefulSet"]
    partitions = {each["metadata"]["name"]: each["spec"]["updateStrategy"]["rollingUpdate"] for each in sets}
    assert partitions == {"raftlog-broker": {"partition": 0}, "raftlog-controller": {"partition": 5}}


def test_tls_is_turned_on_in_steps_in_which_nodes_understand_each_other(helm: Path, tmp_path: Path) -> None:
    """Each pair of neighbouring steps runs side by side in a rolling upgrade: each accepts the protocol that the other
    uses."""
    secrets = {"brokers": "a", "controllers": "b", "clients": "c"}
    steps: list[dict[str, object]] = [
        {"insecure": True},
        *(
            {"insecure": True, "tls": {"enabled": True, "migration": step, "secrets": secrets}}
            for step in ("prepare", "switch")
        ),
        {"tls": {"enabled": True, "secrets": secrets}},
    ]
    taken: list[set[str]] = []
    spoken: list[str] = []
    for values in steps:
        file = tmp_path / "values.yaml"
        file.write_text(json.dumps(values))
        done = tool.render(helm, "--values", str(file), "--show-only", "templates/configmap.yaml")
        assert done.returncode == 0, done.stderr
        config = tomllib.loads(documents(done.stdout)[0]["data"]["server.toml"])
        spoken.append(config.get("listener.security.protocol", "plaintext"))
        taken.append({"plaintext", "ssl"} if config.get("listener.security.migration") else {spoken[-1]})
    assert (spoken[0], spoken[-1]) == ("plaintext", "ssl")
    assert taken[-1] == {"ssl"}
    for here in range(len(steps) - 1):
        assert spoken[here] in taken[here + 1]
        assert spoken[here + 1] in taken[here]


def test_topics_users_and_acls_are_applied_after_a_rollback_as_well(helm: Path, tmp_path: Path) -> None:
    """`helm rollback` brings back the older ConfigMap; without the job, topics would keep the newer configuration."""
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps({"insecure": True, "topics": [{"name": "orders"}]}))
    (job,) = [each for each in documents(tool.render(helm, "--values", str(file)).stdout) if each["kind"] == "Job"]
    hooks = job["metadata"]["annotations"]["helm.sh/hook"].split(",")
    assert set(hooks) == {"post-install", "post-upgrade", "post-rollback"}


COMMANDS_OF_THE_IMAGE = ("cat", "date", "rm", "sort", "touch", "tr")
"""Of coreutils; the image has neither diffutils nor findutils nor grep."""
FAKE_RAFTLOG = """#!/bin/sh
case "$1 $2" in
"topic create") touch "$BROKER/$3" ;;
"topic delete") rm "$BROKER/$3" ;;
"produce "*) cat > "$BROKER/$2" ;;
"consume "*) cat "$BROKER/$2"; if [ -n "$EXTRA" ]; then echo "$EXTRA"; fi ;;
esac
"""


@pytest.mark.parametrize("extra", ["", "four"])
def test_helm_test_needs_only_what_the_image_has_and_leaves_no_topic_behind(
    helm: Path, tmp_path: Path, extra: str
) -> None:
    done = tool.render(helm, "--set", "insecure=true", "--skip-tests=false")
    (pod,) = [
        each for each in documents(done.stdout) if (each["kind"], each["metadata"]["name"]) == ("Pod", "raftlog-test")
    ]
    commands, broker = tmp_path / "bin", tmp_path / "broker"
    commands.mkdir()
    broker.mkdir()
    for name in COMMANDS_OF_THE_IMAGE:
        found = shutil.which(name)
        assert found is not None
        (commands / name).symlink_to(found)
    (commands / "raftlog").write_text(FAKE_RAFTLOG)
    (commands / "raftlog").chmod(0o755)
    (container,) = pod["spec"]["containers"]
    ran = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": str(commands), "BROKER": str(broker), "EXTRA": extra},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode == 0) is (extra == ""), ran.stderr
    assert ("three records went in and came out" in ran.stdout) is (extra == "")
    assert list(broker.iterdir()) == []
