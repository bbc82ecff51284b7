"""The chart's pods as processes: what helm renders runs here, with a real broker, real certificates and real passwords.

Paths of containers become directories of the test, addresses in Kubernetes become loopback; the rest is as it is
rendered. What a kubelet and a DNS do is not looked at.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from raftlog.testing import CertificateAuthority
from tests.support.chart import Manifest, Values, named, pod_of, renderer
from tests.support.quorum import free_ports

PATIENCE_S = 120.0
PASSWORDS = {"raftlog-admin": 'the "first" \\ of = all', "raftlog-shop": "of the shop", "raftlog-billing": "of billing"}
PATHS = re.compile(r"/(etc/raftlog|var/lib/raftlog|run/raftlog|tmp/)")
ADDRESSES = re.compile(
    r"\$HOSTNAME\.raftlog-broker\.raftlog\.svc|raftlog-broker-0\.raftlog-broker\.raftlog\.svc|raftlog\.raftlog\.svc|0\.0\.0\.0"
)
ALONE: Values = {
    "controllers": {"mode": "combined", "replicas": 1},
    "brokers": {"replicas": 1},
    "config": {"default.replication.factor": 1, "min.insync.replicas": 1},
    "preStop": {"timeoutSeconds": 60},
    "podDisruptionBudget": {"enabled": False},
    "topics": [{"name": "orders", "partitions": 3, "config": {"retention.ms": 604800000}}],
}
USERS: Values = {
    "users": [{"name": "shop", "secret": "raftlog-shop"}, {"name": "billing", "secret": "raftlog-billing"}],
}
ACLS: Values = {
    "acls": [
        {"principal": "User:shop", "operations": ["Write"], "resource": {"type": "topic", "name": "orders"}},
        {"principal": "User:billing", "operations": ["Read"], "resource": {"type": "topic", "name": "orders"}},
    ],
}
TLS: Values = {
    "enabled": True,
    "secrets": {"brokers": "of-brokers", "controllers": "of-brokers", "clients": "of-clients"},
}
AUTH: Values = {"enabled": True, "admin": {"user": "root", "secret": "raftlog-admin"}}


class Release:
    """One release of the chart: its Secrets, and the pods of the last rendering."""

    def __init__(self, directory: Path) -> None:
        self._render = renderer(directory)
        self._directory = directory
        clients, nodes, metrics = free_ports(3)
        self._ports = {"clients": clients, "nodes": nodes, "metrics": metrics}
        self.bootstrap = f"127.0.0.1:{clients}"
        self.authority = CertificateAuthority(directory / "ca")
        self._secrets = {name: {"password": f"{password}\n"} for name, password in PASSWORDS.items()}
        self._secrets["of-brokers"] = self._certificate("broker", node_ids=[0])
        self._secrets["of-clients"] = self._certificate("jobs")
        self._manifests: list[Manifest] = []
        binary = directory / "bin" / "raftlog"
        binary.parent.mkdir()
        binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m raftlog "$@"\n')
        binary.chmod(0o755)

    def _certificate(self, name: str, node_ids: list[int] | None = None) -> dict[str, str]:
        content = self.authority.issue(name, node_ids=node_ids or ()).read_bytes()
        key = serialization.load_pem_private_key(content, password=None)
        return {
            "tls.crt": content.decode(),
            "tls.key": key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ).decode(),
            "ca.crt": self.authority.ca_file.read_text(),
        }

    def upgrade(self, values: Values) -> None:
        """Render anew, as `helm upgrade` does."""
        self._manifests = self._render({**ALONE, "ports": self._ports, **values})

    # Pods

    def _pod(self, kind: str, name: str) -> tuple[Path, Manifest, dict[str, str]]:
        """Mount a pod's volumes; return its root, its container and its environment."""
        spec = pod_of(named(self._manifests, kind, name))
        root = self._directory / name
        volumes = {each["name"]: each for each in spec["volumes"]}
        (container,) = spec["containers"]
        for mount in container["volumeMounts"]:
            at = root / mount["mountPath"].lstrip("/")
            at.mkdir(parents=True, exist_ok=True)
            for file, content in self._files(volumes.get(mount["name"], {})).items():
                (at / file).write_text(self._here(root, content))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAFTLOG_")}
        environment |= {each["name"]: self._here(root, each["value"]) for each in container.get("env", ())}
        environment["PATH"] = f"{self._directory / 'bin'}:{environment['PATH']}"
        environment["HOSTNAME"] = f"{name}-0"
        return root, container, environment

    def _files(self, volume: Manifest) -> dict[str, str]:
        if "configMap" in volume:
            found: dict[str, str] = named(self._manifests, "ConfigMap", volume["configMap"]["name"])["data"]
            return found
        sources = [source["secret"] for source in volume.get("projected", {}).get("sources", ())]
        if "secret" in volume:
            sources = [{**volume["secret"], "name": volume["secret"]["secretName"]}]
        files: dict[str, str] = {}
        for source in sources:
            content = self._secrets[source["name"]]
            items = source.get("items") or [{"key": key, "path": key} for key in content]
            files |= {item["path"]: content[item["key"]] for item in items}
        return files

    @staticmethod
    def _here(root: Path, text: str) -> str:
        return PATHS.sub(lambda found: f"{root}{found.group()}", ADDRESSES.sub("127.0.0.1", text))

    @contextmanager
    def broker(self) -> Iterator[None]:
        """Run the broker's pod until it has been asked to stop, as Kubernetes does: preStop, then SIGTERM."""
        root, container, environment = self._pod("StatefulSet", "raftlog-broker")
        command = [*container["command"], *(self._here(root, each) for each in container["args"])]
        with (
            (root / "log").open("ab") as log,
            subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=root) as process,
        ):
            try:
                self._wait_ready(process, root / "log")
                yield
                process.terminate()
                assert process.wait(PATIENCE_S) == 0, (root / "log").read_text()[-3000:]
            finally:
                process.kill()

    def _wait_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._ports['metrics']}/readyz", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline_s, log.read_text()[-3000:]
                time.sleep(0.1)

    def pre_stop(self) -> subprocess.CompletedProcess[str]:
        """Run the preStop command of the broker's pod, with the files that are mounted now."""
        root, container, environment = self._pod("StatefulSet", "raftlog-broker")
        command = [self._here(root, each) for each in container["lifecycle"]["preStop"]["exec"]["command"]]
        return _run(command, environment)

    def run(self, kind: str, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Run a job's pod, or one of `helm test`, with `more` arguments."""
        root, container, environment = self._pod(kind, name)
        command = [self._here(root, each) for each in (*container["command"], *container.get("args", ()), *more)]
        return _run(command, environment)

    def client(
        self, *arguments: str, user: str | None = None, certificate: str | None = None, records: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user."""
        file = self._directory / f"password-of-{user}"
        settings = {"RAFTLOG_BOOTSTRAP": self.bootstrap, "RAFTLOG_SSL_CA_LOCATION": str(self.authority.ca_file)}
        settings["RAFTLOG_SECURITY_PROTOCOL"] = "ssl" if user is None else "sasl_ssl"
        if user is not None:
            file.write_text(PASSWORDS[f"raftlog-{user}"])
            settings |= {"RAFTLOG_SASL_USERNAME": user, "RAFTLOG_SASL_PASSWORD_LOCATION": str(file)}
        if certificate is not None:
            issued = self.authority.issue(certificate, hosts=())
            settings |= {"RAFTLOG_SSL_CERTIFICATE_LOCATION": str(issued), "RAFTLOG_SSL_KEY_LOCATION": str(issued)}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAFTLOG_")}
        return _run([sys.executable, "-P", "-m", "raftlog", *arguments], {**environment, **settings}, records)


def _run(command: list[str], environment: dict[str, str], records: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, input=records, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


def took_place(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_the_charts_own_clients_log_in(release: Release) -> None:
    release.upgrade({"tls": TLS, "auth": {**AUTH, "authorizer": "acl"}, **USERS, **ACLS})
    with release.broker():
        took_place(release.run("Job", "raftlog-apply"))
        assert "is drained" in took_place(release.pre_stop())


@pytest.mark.long
def test_users_with_passwords_and_permissions(release: Release) -> None:
    release.upgrade({"tls": TLS, "auth": {**AUTH, "authorizer": "acl"}, **USERS, **ACLS})
    with release.broker():
        assert "created" in took_place(release.run("Job", "raftlog-apply", "--dry-run"))
        took_place(release.run("Job", "raftlog-apply"))
        again = json.loads(took_place(release.run("Job", "raftlog-apply", "-o", "json")))
        assert {each["result"] for each in again["objects"]} == {"unchanged"}
        assert {each["kind"] for each in again["objects"]} >= {"topic", "user"}
        assert "three records" in took_place(release.run("Pod", "raftlog-test"))
        took_place(release.client("produce", "orders", user="shop", records="a\n"))
        assert "User:billing may not" in refusal(release.client("produce", "orders", user="billing", records="b\n"))
        assert "sasl_ssl" in refusal(release.client("topic", "list"))


@pytest.mark.long
def test_certificates_as_users_with_permissions(release: Release) -> None:
    release.upgrade({"tls": TLS, "auth": {"authorizer": "acl", "admin": {"user": "jobs"}}, **ACLS})
    with release.broker():
        took_place(release.run("Job", "raftlog-apply"))
        took_place(release.run("Pod", "raftlog-test"))
        took_place(release.client("produce", "orders", certificate="shop", records="a\n"))
        assert "User:billing may not" in refusal(
            release.client("produce", "orders", certificate="billing", records="b\n")
        )
        assert "is drained" in took_place(release.pre_stop())


@pytest.mark.long
def test_users_are_turned_on_in_steps_that_leave_nobody_out(release: Release) -> None:
    """The steps of the chart's README. A broker and what is rendered for its neighbours understand each other."""
    prepared = {**AUTH, "migration": "prepare"}
    everyone = {"brokerConfig": {"allow.everyone.if.no.acl.found": True}}
    steps: list[Values] = [
        {"tls": TLS},
        {"tls": TLS, "auth": prepared, **USERS},
        {"tls": TLS, "auth": AUTH, **USERS},
        {"tls": TLS, "auth": {**AUTH, "authorizer": "acl"}, **USERS, **ACLS, **everyone},
        {"tls": TLS, "auth": {**AUTH, "authorizer": "acl"}, **USERS, **ACLS},
    ]
    for number, step in enumerate(steps):
        release.upgrade(step)
        with release.broker():
            took_place(release.run("Job", "raftlog-apply"))
            if number in (0, 1):
                took_place(release.client("produce", "orders", certificate="shop", records="a\n"))
            if number == 1:
                took_place(release.client("produce", "orders", user="shop", certificate="shop", records="a\n"))
            if number in (2, 4):
                took_place(release.client("produce", "orders", user="shop", records="a\n"))
            if number == 2:
                refusal(release.client("produce", "orders", certificate="shop", records="a\n"))
            if number + 1 < len(steps):
                release.upgrade(steps[number + 1])  # the next files are mounted while this broker still runs
                assert "is drained" in took_place(release.pre_stop())
                done = release.run("Job", "raftlog-apply")
                meets_no_acls = "acls" in steps[number + 1] and "acls" not in step
                assert (done.returncode != 0) == meets_no_acls, done.stderr
                release.upgrade(step)
