"""The listener for Kafka clients as values of the chart, rendered by the real helm: as secure as the other listener."""

from __future__ import annotations

import re
import tomllib

import kubernetes_validate
import pytest

from broker.config.config import BrokerConfig
from tests.support.chart import AUTH, CERT_MANAGER, TLS, Manifest, Render, Values, named, pod_of, renderer
from tools.helm import KUBERNETES

ON: Values = {"enabled": True}
PLAINTEXT: Values = {"insecure": True, "kafka": ON}
WITH_TLS: Values = {"tls": TLS, "kafka": ON}
WITH_USERS: Values = {"tls": TLS, "auth": AUTH, "kafka": {"enabled": True, "plain": True}}
EXTERNAL: Values = {"enabled": True, "hosts": ["a.example.org", "b.example.org", "c.example.org"]}
NODE_PORTS: Values = {
    "enabled": True,
    "type": "NodePort",
    "hosts": ["n.example.org"],
    "nodePorts": [30000, 30001, 30002],
}


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    return renderer(tmp_path_factory.mktemp("chart"))


def brokers(manifests: list[Manifest]) -> str:
    """Return the command of the brokers' pods."""
    (found,) = [each["metadata"]["name"] for each in manifests if each["kind"] == "StatefulSet" and _is_broker(each)]
    return str(pod_of(named(manifests, "StatefulSet", found))["containers"][0]["args"][0])


def _is_broker(manifest: Manifest) -> bool:
    return str(manifest["metadata"]["name"]).endswith("-broker")


def config(manifests: list[Manifest]) -> BrokerConfig:
    """Return the configuration of the first broker, checked as a server checks it."""
    (found,) = [each for each in manifests if each["kind"] == "ConfigMap" and _is_broker(each)]
    advertised = re.findall(r'RAFTLOG_ADVERTISED_LISTENERS="([^"]*)"', brokers(manifests))[0].replace("$self", "b")
    environment = {
        "RAFTLOG_NODE_ID": "0",
        "RAFTLOG_ADVERTISED_LISTENERS": advertised,
        "RAFTLOG_ADVERTISED_INTER_NODE_LISTENER": "b:9093",
    }
    values = tomllib.loads(found["data"]["server.toml"])
    return BrokerConfig.from_values({**values, **{_key(name): value for name, value in environment.items()}})


def _key(variable: str) -> str:
    return variable.removeprefix("RAFTLOG_").replace("_", ".").lower()


@pytest.mark.parametrize(
    ("values", "protocol", "mechanisms"),
    [
        (PLAINTEXT, "plaintext", None),
        (WITH_TLS, "ssl", None),
        (WITH_USERS, "sasl_ssl", ("SCRAM-SHA-512", "PLAIN")),
        ({**WITH_USERS, "kafka": ON}, "sasl_ssl", ("SCRAM-SHA-512",)),
    ],
    ids=["plaintext", "tls", "users-plain", "users"],
)
def test_it_is_as_secure_as_the_other_listener(
    render: Render, values: Values, protocol: str, mechanisms: tuple[str, ...] | None
) -> None:
    made = config(render(values))
    assert made.kafka_security_protocol == made.listener_security_protocol == protocol
    assert made.kafka_listener == ("0.0.0.0", 9192)
    assert made.advertised_kafka_listener == ("b", 9192)
    if mechanisms is not None:
        assert made.sasl_enabled_mechanisms == mechanisms
        assert not made.asks_kafka_for_certificates


def test_there_is_none_unless_it_is_wanted(render: Render) -> None:
    manifests = render({"insecure": True})
    assert config(manifests).kafka_listener is None
    assert not [each for each in manifests if each["metadata"]["name"].endswith("-kafka")]
    assert "kafka" not in str(manifests)


def test_it_has_a_service_of_its_own_and_its_port_is_open(render: Render) -> None:
    manifests = render(PLAINTEXT)
    (service,) = [
        each for each in manifests if each["kind"] == "Service" and each["metadata"]["name"].endswith("-kafka")
    ]
    assert service["spec"]["ports"] == [{"name": "kafka", "port": 9192, "targetPort": "kafka"}]
    (policy,) = [each for each in manifests if each["kind"] == "NetworkPolicy"]
    (rule,) = [each for each in policy["spec"]["ingress"] if {"port": "kafka", "protocol": "TCP"} in each["ports"]]
    assert {"port": "clients", "protocol": "TCP"} in rule["ports"]
    for each in manifests:
        if each["kind"] in ("Service", "StatefulSet", "NetworkPolicy"):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_brokers_tell_external_addresses(render: Render) -> None:
    balanced = render({**WITH_TLS, "externalAccess": EXTERNAL})
    assert 'LISTENERS="b.example.org:9092,kafka+ssl://b.example.org:9192"' in brokers(balanced)
    assert config(balanced).advertised_kafka_listener == ("a.example.org", 9192)
    kafka = {"enabled": True, "externalNodePorts": [30100, 30101, 30102]}
    by_node = render({"insecure": True, "kafka": kafka, "externalAccess": NODE_PORTS})
    assert 'LISTENERS="n.example.org:30002,kafka://n.example.org:30102"' in brokers(by_node)
    external = next(each for each in by_node if each["metadata"]["name"].endswith("-2-external"))
    assert [each["nodePort"] for each in external["spec"]["ports"]] == [30002, 30102]


def test_the_certificate_names_the_service(render: Render) -> None:
    certificates = [each for each in render({"tls": CERT_MANAGER, "kafka": ON}) if each["kind"] == "Certificate"]
    (of_brokers,) = [
        each for each in certificates if each["metadata"]["labels"]["app.kubernetes.io/component"] == "broker"
    ]
    assert any(re.search(r"-kafka\.[^.]+\.svc$", name) for name in of_brokers["spec"]["dnsNames"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"insecure": True, "kafka": {"plain": True}}, "kafka.plain is true"),
        ({"tls": TLS, "kafka": {"enabled": True, "plain": True}}, "kafka.plain is true"),
        ({"insecure": True, "kafka": ON, "externalAccess": NODE_PORTS}, "kafka.externalNodePorts has 0 ports"),
        (
            {"insecure": True, "kafka": {"enabled": True, "externalPort": 9092}, "externalAccess": EXTERNAL},
            "are both 9092",
        ),
        ({"insecure": True, "kafka": {"protocol": "ssl"}}, "protocol"),
    ],
)
def test_what_cannot_work_is_refused(render: Render, values: Values, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        render(values)
