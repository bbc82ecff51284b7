"""Users, permissions and topics as values of the chart, rendered by the real helm; and what it refuses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from broker.config.config import BrokerConfig
from raftlog._client.options import SECURITY_KEYS
from raftlog.cli import apply, client_config
from raftlog.cli.security import acls
from raftlog.security import AclBinding, AclOperation, AclPermission, ResourceType, ScramMechanism
from tests.support.chart import (
    ACLS,
    ADMIN,
    AUTH,
    CERT_MANAGER,
    TLS,
    WANTED,
    WITH_ACLS,
    Manifest,
    Render,
    Values,
    chart_with_notes,
    named,
    pod_of,
    renderer,
)
from tools import helm as tool
from tools.helm import KUBERNETES

MODES: dict[str, Values] = {
    "plaintext": {"insecure": True},
    "ssl": {"tls": TLS},
    "ssl, nobody shows a certificate": {"tls": {**TLS, "clientAuth": "none"}},
    "ssl with permissions": {"tls": TLS, "auth": {"authorizer": "acl", "admin": {"user": "chart"}}},
    "ssl of cert-manager with permissions": {"tls": CERT_MANAGER, "auth": {"authorizer": "acl"}},
    "sasl_ssl, prepared": {"insecure": True, "tls": TLS, "auth": {**AUTH, "migration": "prepare"}},
    "sasl_ssl": {"tls": TLS, "auth": AUTH},
    "sasl_ssl with permissions": {"tls": CERT_MANAGER, "auth": WITH_ACLS},
    "sasl_ssl without certificates": {
        "tls": {"enabled": True, "secrets": {"brokers": "a", "controllers": "b"}},
        "auth": {**WITH_ACLS, "mechanisms": ["SCRAM-SHA-256"], "superUsers": ["User:alice"]},
    },
    "sasl_ssl with certificates as well": {
        "tls": {**CERT_MANAGER, "clientAuth": "required"},
        "auth": WITH_ACLS,
        "controllers": {"mode": "combined"},
    },
}

ISSUER = "https://login.example/realms/main"
WITH_TOKENS: Values = {
    "tls": TLS,
    "auth": {**AUTH, "mechanisms": ["SCRAM-SHA-512", "OAUTHBEARER"]},
    "brokerConfig": {
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "sasl.oauthbearer.expected.audience": ["raftlog"],
        "sasl.oauthbearer.jwks.endpoint.url": f"{ISSUER}/certs",
        "sasl.oauthbearer.allowed.urls": [f"{ISSUER}/certs"],
    },
}


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    return renderer(tmp_path_factory.mktemp("values"))


def server_toml(manifests: list[Manifest], component: str = "broker") -> dict[str, Any]:
    return tomllib.loads(named(manifests, "ConfigMap", f"raftlog-{component}")["data"]["server.toml"])


def broker_config(manifests: list[Manifest], directory: Path) -> BrokerConfig:
    """What a broker takes it for; Raises: what it would not start with."""
    file = directory / "server.toml"
    file.write_text(named(manifests, "ConfigMap", "raftlog-broker")["data"]["server.toml"])
    environment = {
        "RAFTLOG_NODE_ID": "0",
        "RAFTLOG_ADVERTISED_LISTENERS": "b:9092",
        "RAFTLOG_ADVERTISED_INTER_NODE_LISTENER": "b:9093",
    }
    if "process.roles" not in server_toml(manifests):
        environment["RAFTLOG_PROCESS_ROLES"] = "broker,controller"
    return BrokerConfig.load(file=file, environment=environment)


def clients(manifests: list[Manifest]) -> Iterator[tuple[Manifest, dict[str, object]]]:
    """Every pod of the chart that is a client of the brokers, and its settings."""
    for kind, name in (("Job", "raftlog-apply"), ("Pod", "raftlog-test")):
        pod = pod_of(named(manifests, kind, name))
        environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        settings = client_config.of_environment(environment)
        assert len(settings) == len(environment) - 1, (
            "all environment variables but the address must be client settings"
        )
        yield pod, settings
    files = named(manifests, "ConfigMap", "raftlog-broker")["data"]
    brokers = pod_of(named(manifests, "StatefulSet", "raftlog-broker"))
    yield brokers, tomllib.loads(files.get("client.toml", ""))


@pytest.fixture(params=sorted(MODES))
def values(request: pytest.FixtureRequest) -> Values:
    mode = MODES[request.param]
    return {**WANTED, **(ACLS if mode.get("auth", {}).get("authorizer") == "acl" else {}), **mode}


def test_whoever_connects_in_the_name_of_the_chart_is_let_in(render: Render, values: Values, tmp_path: Path) -> None:
    """The job, `helm test`, and preStop: as the listener wants it, with files that are mounted there."""
    manifests = render(values)
    config = broker_config(manifests, tmp_path)
    prepared = values.get("auth", {}).get("migration") == "prepare"
    for pod, settings in clients(manifests):
        assert settings.keys() <= {key.name for key in SECURITY_KEYS}
        spoken = settings.get("security.protocol", "plaintext")
        assert spoken == ("ssl" if prepared else config.listener_security_protocol)
        mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        for name, file in settings.items():
            if name.endswith(".location"):
                secret = volumes[mounts[str(Path(str(file)).parent)]]["secret"]
                keys = {each["path"] for each in secret.get("items", ())} or {"tls.crt", "tls.key", "ca.crt"}
                assert Path(str(file)).name in keys
        if config.listener_security_protocol != "plaintext" and config.ssl_client_auth == "required":
            assert {"ssl.certificate.location", "ssl.key.location"} <= settings.keys()
        if spoken == "sasl_ssl":
            assert settings["sasl.mechanism"] in config.sasl_enabled_mechanisms
            assert settings["sasl.username"] == ADMIN["user"]
            assert volumes["admin"]["secret"]["items"] == [{"key": "it", "path": "root"}]


def test_the_charts_own_clients_may_do_all(render: Render, values: Values) -> None:
    manifests = render(values)
    config = server_toml(manifests)
    if config.get("authorizer") != "acl":
        return
    super_users = config["super.users"].split(";")
    job, settings = next(clients(manifests))
    if settings["security.protocol"] == "sasl_ssl":
        assert f"User:{settings['sasl.username']}" in super_users
        return
    (secret,) = [each["secret"]["secretName"] for each in job["volumes"] if each["name"] == "tls"]
    certificates = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Certificate"}
    common_name = certificates[secret]["commonName"] if certificates else values["auth"]["admin"]["user"]
    assert super_users == [f"User:{common_name}"]
    brokers = [settings for _, settings in clients(manifests)][-1]
    assert "ssl.certificate.location" in brokers, "preStop must use the broker's certificate, which names nodes"


def test_users_of_an_issuer_log_in_besides_those_with_passwords(render: Render, tmp_path: Path) -> None:
    manifests = render({**WANTED, **WITH_TOKENS})
    assert broker_config(manifests, tmp_path).sasl_enabled_mechanisms == ("SCRAM-SHA-512", "OAUTHBEARER")
    assert {settings["sasl.mechanism"] for _, settings in clients(manifests)} == {"SCRAM-SHA-512"}
    assert "sasl.enabled.mechanisms" not in server_toml(manifests, "controller")


def test_passwords_reach_nobody_else(render: Render, values: Values) -> None:
    """The admin's goes to brokers and to the chart's clients, those of users to the job alone, as files of Secrets."""
    secrets: dict[str, set[str]] = {}
    manifests = render(values)
    for each in manifests:
        if each["kind"] in ("StatefulSet", "Job", "Pod"):
            for volume in pod_of(each)["volumes"]:
                sources = [
                    volume.get("secret", {}).get("secretName"),
                    *(source["secret"]["name"] for source in volume.get("projected", {}).get("sources", ())),
                ]
                for secret in filter(None, sources):
                    secrets.setdefault(secret, set()).add(each["metadata"]["name"])
            container = pod_of(each)["containers"][0]
            assert "secretKeyRef" not in json.dumps(container), (
                "the container has a secret in its environment, which is easily shown"
            )
    assert secrets["of-shop"] == secrets["of-billing"] == {"raftlog-apply"}
    if values.get("auth", {}).get("enabled"):
        at_first = {"raftlog-broker"}
        spoken = values["auth"].get("migration") != "prepare"
        assert secrets["of-root"] == at_first | ({"raftlog-apply", "raftlog-test"} if spoken else set())
    else:
        assert "of-root" not in secrets


def test_kubernetes_would_take_them(render: Render, values: Values) -> None:
    for each in render(values):
        if each["kind"] != "Certificate":
            kubernetes_validate.validate(each, KUBERNETES.rpartition(".")[0], strict=True)


def test_the_job_reads_what_the_values_say(render: Render, tmp_path: Path) -> None:
    """Its file, and the Secrets where they are mounted, with the command's own reader."""
    for mechanisms, mechanism in (
        (["SCRAM-SHA-512"], None),
        (["SCRAM-SHA-256"], ScramMechanism.SCRAM_SHA_256),
        (["SCRAM-SHA-256", "SCRAM-SHA-512"], None),
    ):
        manifests = render({"tls": TLS, "auth": {**WITH_ACLS, "mechanisms": mechanisms}, **WANTED, **ACLS})
        pod = pod_of(named(manifests, "Job", "raftlog-apply"))
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        (passwords,) = [each["projected"] for each in pod["volumes"] if each["name"] == "passwords"]
        kept = {("of-shop", "password"): "of the shop", ("of-billing", "pw"): "of billing"}
        for source in passwords["sources"]:
            (item,) = source["secret"]["items"]
            (tmp_path / item["path"]).write_text(kept[source["secret"]["name"], item["key"]])
        text = named(manifests, "ConfigMap", "raftlog-apply")["data"]["apply.json"]
        (tmp_path / "apply.json").write_text(text.replace(mounts["passwords"], str(tmp_path)))
        wanted = apply.read(tmp_path / "apply.json")
        assert [(each.name, each.partitions, each.replication_factor, each.config) for each in wanted.topics] == [
            ("orders", 12, None, {"retention.ms": "604800000"})
        ]
        assert [(each.name, each.password, each.mechanism, each.iterations) for each in wanted.users] == [
            ("shop", "of the shop", mechanism, None),
            ("billing", "of billing", mechanism, 10_000),
        ]
        assert set(wanted.acls or ()) == {
            AclBinding("User:shop", AclOperation.WRITE, ResourceType.TOPIC, "orders"),
            AclBinding(
                "User:*",
                AclOperation.DESCRIBE,
                ResourceType.CLUSTER,
                "raftlog-cluster",
                permission=AclPermission.DENY,
            ),
        }


def test_what_can_be_done_with_a_resource_is_what_the_command_takes(render: Render) -> None:
    def acl(kind: ResourceType, *operations: AclOperation) -> Values:
        resource = {"type": acls.word(kind)} | ({} if kind is ResourceType.CLUSTER else {"name": "x"})
        return {"principal": "User:a", "operations": [*map(acls.word, operations)], "resource": resource}

    every = {kind: {AclOperation.ALL, *possible} for kind, possible in acls.OPERATIONS.items()}
    render({"tls": TLS, "auth": WITH_ACLS, "acls": [acl(kind, *possible) for kind, possible in every.items()]})
    for kind, possible in every.items():
        impossible = next(each for each in AclOperation if each not in possible and each is not AclOperation.ANY)
        with pytest.raises(ValueError, match=f"a {acls.word(kind)} has only ") as refused:
            render({"tls": TLS, "auth": WITH_ACLS, "acls": [acl(kind, impossible)]})
        said = str(refused.value).rpartition(" has only ")[2].splitlines()[0].split(", ")
        assert set(said) == set(map(acls.word, possible))


def test_the_job_takes_away_and_overwrites_only_what_it_is_told_to(render: Render) -> None:
    def arguments(**job: bool) -> list[str]:
        manifests = render({"tls": TLS, "auth": WITH_ACLS, "job": job, **WANTED, **ACLS})
        (container,) = pod_of(named(manifests, "Job", "raftlog-apply"))["containers"]
        assert container["command"] == ["raftlog", "apply", "/etc/raftlog-apply/apply.json", "--accept-differences"]
        given: list[str] = container.get("args", [])
        return given

    assert arguments() == []
    assert arguments(setPasswords=True) == ["--set-passwords"]
    assert arguments(pruneAcls=True) == ["--prune-acls", "--force"]


def test_the_log_of_a_job_that_fails_stays(render: Render) -> None:
    """Kubernetes deletes the pod of a job that gives up, and with it the reason, unless the pod has failed for good."""
    manifests = render({"tls": TLS, "auth": WITH_ACLS, **WANTED, **ACLS})
    assert pod_of(named(manifests, "Job", "raftlog-apply"))["restartPolicy"] == "Never"


def test_there_is_no_job_for_nothing(render: Render) -> None:
    assert not [each for each in render({"tls": TLS, "auth": AUTH}) if each["kind"] == "Job"]


def test_topics_users_and_permissions_do_not_roll_the_pods(render: Render) -> None:
    def checksum(values: Values) -> object:
        pods = named(render({"tls": TLS, "auth": WITH_ACLS, **values}), "StatefulSet", "raftlog-broker")
        return pods["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({**WANTED, **ACLS})


def test_a_node_alone_with_its_users_needs_no_controllers_secret(render: Render, tmp_path: Path) -> None:
    manifests = render(MODES["sasl_ssl with certificates as well"])
    assert broker_config(manifests, tmp_path).listener_security_protocol == "sasl_ssl"
    assert not [each for each in manifests if each["metadata"]["name"] == "raftlog-controller"]


def test_controllers_know_no_passwords(render: Render) -> None:
    manifests = render({"tls": TLS, "auth": WITH_ACLS})
    config = server_toml(manifests, "controller")
    assert config["listener.security.protocol"] == "ssl"
    assert not {key for key in config if key.startswith("sasl.")}
    volumes = pod_of(named(manifests, "StatefulSet", "raftlog-controller"))["volumes"]
    assert "admin" not in {each["name"] for each in volumes}


def test_turning_it_on_has_neighbours_that_understand_each_other(render: Render, tmp_path: Path) -> None:
    """Brokers of the neighbouring steps accept the protocol of the chart's clients: they run side by side."""
    steps: list[Values] = [
        {"tls": TLS},
        {"tls": TLS, "auth": {**AUTH, "migration": "prepare"}},
        {"tls": TLS, "auth": AUTH},
        {"tls": TLS, "auth": WITH_ACLS, "brokerConfig": {"allow.everyone.if.no.acl.found": True}, **ACLS},
        {"tls": TLS, "auth": WITH_ACLS, **ACLS},
    ]
    rendered = [render({**WANTED, **step}) for step in steps]
    brokers = [broker_config(manifests, tmp_path) for manifests in rendered]
    assert [each.listener_security_protocol for each in brokers] == ["ssl", "ssl", "sasl_ssl", "sasl_ssl", "sasl_ssl"]
    for number, manifests in enumerate(rendered):
        for _, settings in clients(manifests):
            for broker in brokers[max(0, number - 1) : number + 1]:
                if settings["security.protocol"] == "sasl_ssl":
                    assert broker.sasl_users_location, "the broker must know the users that its clients log in as"
                    assert settings["sasl.mechanism"] in broker.sasl_enabled_mechanisms
                else:
                    assert broker.listener_security_protocol == "ssl"
                if broker.asks_for_certificates:
                    assert "ssl.certificate.location" in settings


def test_notes_say_who_may_do_what(render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "CHART", chart_with_notes(tmp_path))
    said = {
        mode: " ".join(named(render({**WANTED, **values}), "Notes", "notes")["text"].split())
        for mode, values in MODES.items()
    }
    everything = {mode for mode, text in said.items() if "any client that reaches the port may do everything" in text}
    assert everything == {"ssl, nobody shows a certificate"}
    assert {mode for mode, text in said.items() if "log in with name and password" in text} == {
        mode for mode in MODES if mode.startswith("sasl_ssl") and mode != "sasl_ssl, prepared"
    }
    assert "do not have to yet" in said["sasl_ssl, prepared"]
    inside = (
        "kubectl exec -n raftlog raftlog-broker-0 -- raftlog cluster describe --client-config /etc/raftlog/client.toml"
    )
    assert {mode for mode, text in said.items() if inside in text} == {mode for mode in MODES if "ssl" in mode}
    assert {mode for mode, text in said.items() if "kubectl run raftlog-cli" in text} == {"plaintext"}
    assert not [mode for mode, text in said.items() if "OAUTHBEARER" in text]
    assert "User:root and User:alice" not in said["sasl_ssl"]
    assert (
        "Users may do what ACLs allow; User:root, User:alice and nodes may do everything."
        in said["sasl_ssl without certificates"]
    )
    assert "User:raftlog-client and nodes may do everything." in said["ssl of cert-manager with permissions"]
    assert "clients need no password" in said["ssl"]


def test_notes_say_that_tokens_are_no_passwords(
    render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "CHART", chart_with_notes(tmp_path))
    text = " ".join(named(render(WITH_TOKENS), "Notes", "notes")["text"].split())
    assert "log in with name and password (SCRAM-SHA-512) or with a token (OAUTHBEARER)." in text


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"auth": AUTH}, "auth.enabled needs tls.enabled"),
        ({"tls": {**TLS, "migration": "switch"}, "auth": AUTH}, "end that migration first"),
        ({"tls": TLS, "auth": {"enabled": True}}, "auth.admin.user and auth.admin.secret are needed"),
        (
            {"tls": TLS, "auth": {"enabled": True, "admin": {"user": "root"}}},
            "auth.admin.user and auth.admin.secret are needed",
        ),
        ({"auth": {"migration": "prepare"}}, "auth.migration is prepare, and auth.enabled is false"),
        ({"auth": {"admin": ADMIN}}, "clients would need no password"),
        ({"auth": {"authorizer": "acl"}}, "auth.authorizer=acl needs users"),
        (
            {"tls": {**TLS, "clientAuth": "none"}, "auth": {"authorizer": "acl", "admin": {"user": "x"}}},
            "auth.authorizer=acl needs users",
        ),
        (
            {"tls": {**TLS, "migration": "switch"}, "auth": {"authorizer": "acl", "admin": {"user": "x"}}},
            "auth.authorizer=acl needs users",
        ),
        (
            {
                "tls": {**TLS, "clientAuth": "none"},
                "auth": {**WITH_ACLS, "migration": "prepare"},
            },
            "auth.authorizer=acl needs users",
        ),
        ({"tls": TLS, "auth": {"authorizer": "acl"}}, "auth.admin.user is empty"),
        ({"tls": TLS, "auth": {"superUsers": ["User:a"]}}, "auth.superUsers are named, and auth.authorizer is none"),
        ({"auth": {"superUsers": ["a"]}}, "does not match pattern"),
        ({"auth": {"superUsers": ["User:*"]}}, "does not match pattern"),
        ({"auth": {"superUsers": ["User:ANONYMOUS"]}}, "auth.superUsers.0"),
        ({"auth": {"admin": {"password": "secret"}}}, "additional properties 'password' not allowed"),
        ({"auth": {"admin": {"user": "../x"}}}, "does not match pattern"),
        ({"auth": {"mechanisms": []}}, "auth.mechanisms"),
        ({"auth": {"mechanisms": ["PLAIN"]}}, "auth.mechanisms.0"),
        ({"tls": TLS, "auth": {**AUTH, "mechanisms": ["OAUTHBEARER"]}}, "put a SCRAM mechanism before it"),
        (
            {"tls": TLS, "auth": {**AUTH, "mechanisms": ["SCRAM-SHA-512", "OAUTHBEARER"]}},
            "brokerConfig.sasl.oauthbearer.jwks.endpoint.url has to be set",
        ),
        ({"auth": {"authorizer": "simple"}}, "auth.authorizer"),
        ({"users": [{"name": "a", "password": "b"}]}, "additional properties 'password' not allowed"),
        ({"users": [{"name": "a"}]}, "missing property 'secret'"),
        ({"users": [{"name": "a/b", "secret": "s"}]}, "does not match pattern"),
        ({"users": [{"name": "a", "secret": "s", "iterations": 100}]}, "users.0.iterations"),
        ({"users": [{"name": "a", "secret": "s"}] * 2}, "users: a is named twice"),
        ({"tls": TLS, "auth": AUTH, "users": [{"name": "root", "secret": "s"}]}, "users: root is auth.admin"),
        (
            {"tls": TLS, "auth": AUTH, "users": [{"name": "a", "secret": "s", "mechanism": "SCRAM-SHA-256"}]},
            "not one of auth.mechanisms",
        ),
        (ACLS, "acls are listed, and auth.authorizer is none"),
        (
            {
                "tls": TLS,
                "auth": WITH_ACLS,
                "acls": [{"principal": "User:a", "operations": ["Read"], "resource": {"type": "topic"}}],
            },
            "has no resource.name",
        ),
        ({"acls": [{"principal": "a", "operations": ["Read"], "resource": {"type": "cluster"}}]}, "acls.0.principal"),
        (
            {"acls": [{"principal": "User:a", "operations": ["Reed"], "resource": {"type": "cluster"}}]},
            "acls.0.operations.0",
        ),
        (
            {"acls": [{"principal": "User:a", "operations": ["Read"], "resource": {"type": "cluster", "x": 1}}]},
            "additional properties 'x' not allowed",
        ),
        (
            {
                "tls": TLS,
                "auth": WITH_ACLS,
                "acls": [{"principal": "User:a", "operations": ["All"], "resource": {"type": "cluster", "name": "c"}}],
            },
            "leave resource.name and resource.pattern out",
        ),
        ({"job": {"pruneAcls": True}}, "would remove every ACL"),
        ({"config": {"authorizer": "acl"}}, "config.authorizer is set by the chart itself"),
        ({"config": {"super.users": "User:a"}}, "config.super.users is set by the chart itself"),
        (
            {"brokerConfig": {"sasl.users.location": "/x"}},
            "brokerConfig.sasl.users.location is set by the chart itself",
        ),
    ],
)
def test_users_that_nobody_can_be_and_rights_that_nobody_looks_at_are_not_rendered(
    render: Render, values: Values, reason: str
) -> None:
    with pytest.raises(ValueError) as refused:
        render({"insecure": True, **values})
    assert reason in str(refused.value).replace("/", ".")
