"""The console as values of the chart, rendered by the real helm: who may do what in it, and over what it is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from typer.testing import CliRunner

from raftlog.cli.app import tree
from raftlog.console import __main__ as process
from raftlog.console.app import Settings
from tests.support.chart import AUTH, TLS, Manifest, Render, Values, chart_with_notes, named, renderer
from tools import helm as tool
from tools.helm import KUBERNETES

PLAIN: Values = {"insecure": True, "console": {"enabled": True}}
USERS: Values = {"tls": TLS, "auth": AUTH, "console": {"enabled": True}}
HOST = "logs.example.org"
INGRESS: Values = {"enabled": True, "host": HOST, "tls": {"secret": "of-ingress"}}
BY_CERTIFICATE: Values = {"enabled": True, "certificateLogins": True, "tls": {"secret": "of-console"}}
CERTIFICATES: Values = {
    "tls": TLS,
    "auth": {"authorizer": "acl", "admin": {"user": "chart"}},
    "console": BY_CERTIFICATE,
}


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
    assert tls["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], (
        "the pod must mount the CA's certificate only, not a broker's key"
    )
    assert "of-root" not in str(deployment(render, USERS))


def test_where_certificates_are_required_it_shows_that_of_the_charts_clients(render: Render) -> None:
    container = console(render, {"tls": TLS, "console": {"enabled": True}})
    assert "--read-only" in container["args"], (
        "the console must be read-only: all who open it would share its permissions"
    )
    assert {"RAFTLOG_SSL_CERTIFICATE_LOCATION", "RAFTLOG_SSL_KEY_LOCATION"} <= {
        each["name"] for each in container["env"]
    }


def test_people_log_in_with_their_certificates_where_that_is_wanted(render: Render) -> None:
    """The console has no certificate of a client, so nothing is done in the name of the chart's own."""
    container = console(render, CERTIFICATES)
    assert "--certificate-logins" in container["args"]
    assert not {"--read-only", "--insecure"} & set(container["args"])
    assert {each["name"]: each["value"] for each in container["env"]} == {
        "RAFTLOG_BOOTSTRAP": "raftlog.raftlog.svc:9092",
        "RAFTLOG_SECURITY_PROTOCOL": "ssl",
        "RAFTLOG_SSL_CA_LOCATION": "/etc/raftlog-tls/ca.crt",
    }
    volumes = deployment(render, CERTIFICATES)["spec"]["template"]["spec"]["volumes"]
    [ca] = [each["secret"] for each in volumes if each["name"] == "tls"]
    assert ca["items"] == [{"key": "ca.crt", "path": "ca.crt"}], (
        "the pod must mount the CA's certificate only, not a private key of the cluster"
    )
    assert "of-clients" not in str(volumes)
    read_only = {**CERTIFICATES, "console": {**BY_CERTIFICATE, "readOnly": True}}
    assert {"--read-only", "--certificate-logins"} <= set(console(render, read_only)["args"])


@pytest.mark.parametrize(
    "console_values",
    [BY_CERTIFICATE, {"enabled": True, "certificateLogins": True, "ingress": INGRESS}],
    ids=["https of the pod", "https of the ingress"],
)
def test_raftlog_console_takes_what_the_chart_gives_it(
    render: Render, console_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command line and environment, except for the files' directories."""
    started: list[Settings] = []
    monkeypatch.setattr(process, "become", lambda settings, *_: started.append(settings))
    files = {"/etc/raftlog-console-tls/": tmp_path, "/etc/raftlog-tls/": tmp_path}
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).touch()

    def here(text: str) -> str:
        for directory, real in files.items():
            text = text.replace(directory, f"{real}/")
        return text

    container = console(render, {**CERTIFICATES, "console": console_values})
    environment = {each["name"]: here(each["value"]) for each in container["env"]}
    ran = CliRunner().invoke(tree(), [here(each) for each in container["args"]], env=environment)
    assert ran.exit_code == 0, ran.output
    [settings] = started
    assert (settings.with_login, settings.certificates, settings.read_only, settings.tls) == (True, True, False, True)
    assert settings.acts_as == ""


def test_notes_say_where_the_console_is_and_how_people_log_in(
    render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "CHART", chart_with_notes(tmp_path))

    def said(values: Values) -> str:
        text = named(render(values), "Notes", "notes")["text"]
        return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Console")), "")

    forward = "kubectl port-forward -n raftlog service/raftlog-console 8080, then"
    assert said({"insecure": True}) == ""
    assert said(PLAIN) == f"{forward} http://localhost:8080/ (no login)"
    assert said(USERS | {"console": {"enabled": True, "ingress": INGRESS}}) == (
        f"https://{HOST}/ (log in with name and password)"
    )
    assert said(CERTIFICATES) == f"{forward} https://localhost:8080/ (log in with a certificate and its private key)"


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
        assert headers == [{"name": "Host", "value": "localhost"}], (
            "the probe must name the host localhost, as other names are refused"
        )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"insecure": True, "console": {"ingress": {"enabled": True}}}, "console.enabled is false"),
        ({**PLAIN, "console": {"enabled": True, "ingress": {"enabled": True}}}, "console.ingress.host is empty"),
        (
            {**USERS, "console": {"enabled": True, "ingress": {"enabled": True, "host": HOST}}},
            "passwords would travel in plaintext",
        ),
        ({"tls": TLS, "console": {"certificateLogins": True}}, "set console.enabled=true"),
        ({**PLAIN, "console": BY_CERTIFICATE}, "set tls.enabled=true with tls.clientAuth=required"),
        ({"tls": {**TLS, "clientAuth": "none"}, "console": BY_CERTIFICATE}, "with tls.clientAuth=required"),
        (
            {"insecure": True, "tls": {**TLS, "migration": "prepare"}, "console": BY_CERTIFICATE},
            "complete tls.migration=prepare first",
        ),
        ({**USERS, "console": BY_CERTIFICATE}, "set console.certificateLogins=false"),
        ({"tls": TLS, "console": {"enabled": True, "certificateLogins": True}}, "private keys would travel"),
        (
            {"tls": TLS, "console": {**BY_CERTIFICATE, "tls": {}, "ingress": {"enabled": True, "host": HOST}}},
            "in console.tls.secret, or in console.ingress.tls.secret",
        ),
        ({"tls": TLS, "console": {**BY_CERTIFICATE, "certificateLogins": "yes"}}, "certificateLogins"),
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
