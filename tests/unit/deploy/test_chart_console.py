"""The console as values of the chart, rendered by the real helm: who may do what in it, and over what it is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from typer.testing import CliRunner

from raftlog.cli.app import tree
from tests.support.chart import AUTH, TLS, Manifest, Render, Values, named, renderer
from tools.helm import KUBERNETES

PLAIN: Values = {"insecure": True, "console": {"enabled": True}}
USERS: Values = {"tls": TLS, "auth": AUTH, "console": {"enabled": True}}
HOST = "logs.example.org"
INGRESS: Values = {"enabled": True, "host": HOST, "tls": {"secret": "of-ingress"}}


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    return renderer(tmp_path_factory.mktemp("chart"))


def console(render: Render, values: Values) -> dict[str, Any]:
    """Return the container of the console."""
    [container] = deployment(render, values)["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def deployment(render: Render, values: Values) -> Manifest:
    [found] = [each for each in render(values) if each["kind"] == "Deployment"]
    return found


def test_there_is_none_unless_it_is_wanted(render: Render) -> None:
    assert not [each for each in render({"insecure": True}) if "console" in each["metadata"]["name"]]


def test_without_users_it_is_read_only_unless_told(render: Render) -> None:
    assert {"--read-only", "--insecure"} <= set(console(render, PLAIN)["args"])
    told: Values = {"insecure": True, "console": {"enabled": True, "readOnly": False}}
    assert "--read-only" not in console(render, told)["args"]


def test_with_users_people_log_in_themselves(render: Render) -> None:
    """The console has no user of its own: the admin's password is not in its pod."""
    container = console(render, USERS)
    assert "--read-only" not in container["args"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["RAFTLOG_SECURITY_PROTOCOL"] == "sasl_ssl"
    assert not [name for name in environment if "USERNAME" in name or "PASSWORD" in name]
    [tls] = [
        each
        for each in deployment(render, USERS)["spec"]["template"]["spec"]["volumes"]
        if each.get("secret", {}).get("secretName") == "of-brokers"
    ]
    assert tls["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "a broker's key stays with brokers"
    assert "of-root" not in str(deployment(render, USERS))


def test_where_certificates_are_required_it_shows_that_of_the_charts_clients(render: Render) -> None:
    container = console(render, {"tls": TLS, "console": {"enabled": True}})
    assert "--read-only" in container["args"], "everybody who opens it would have its permissions"
    assert {"RAFTLOG_SSL_CERTIFICATE_LOCATION", "RAFTLOG_SSL_KEY_LOCATION"} <= {
        each["name"] for each in container["env"]
    }


@pytest.mark.parametrize("values", [PLAIN, USERS], ids=["plaintext", "users"])
def test_an_ingress_and_its_network(render: Render, values: Values) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]
    wanted = {**values, "console": {"enabled": True, "ingress": INGRESS, "networkPolicy": {"from": peers}}}
    manifests = render(wanted)
    for each in manifests:
        if each["metadata"]["name"].endswith("-console"):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    [ingress] = [each for each in manifests if each["kind"] == "Ingress"]
    assert ingress["spec"]["tls"] == [{"hosts": [HOST], "secretName": "of-ingress"}]
    service = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert named(manifests, "Service", service["name"])["spec"]["ports"][0]["name"] == service["port"]["name"]
    policy = named(manifests, "NetworkPolicy", service["name"])["spec"]
    assert policy["ingress"][0]["from"] == peers
    container = console(render, wanted)
    assert "--behind-https" in container["args"]
    assert container["args"][container["args"].index("--allowed-host") :].count(HOST) == 1
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        headers = container[probe]["httpGet"]["httpHeaders"]
        assert headers == [{"name": "Host", "value": "localhost"}], "other names are refused"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"insecure": True, "console": {"ingress": {"enabled": True}}}, "console.enabled is false"),
        ({**PLAIN, "console": {"enabled": True, "ingress": {"enabled": True}}}, "console.ingress.host is empty"),
        (
            {**USERS, "console": {"enabled": True, "ingress": {"enabled": True, "host": HOST}}},
            "passwords would travel in plaintext",
        ),
    ],
)
def test_what_it_refuses(render: Render, values: Values, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render(values)


def test_the_command_line_takes_every_option(render: Render, tmp_path: Path) -> None:
    """The options that the chart writes are those of `raftlog console`."""
    page = CliRunner().invoke(tree(), ["console", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    for values in (PLAIN, {**USERS, "console": {"enabled": True, "ingress": INGRESS}}):
        for option in console(render, values)["args"]:
            assert not option.startswith("--") or option in page
