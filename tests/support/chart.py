"""The chart, rendered by the real helm from values, and what is found in that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import helm as tool
from tools.go_programs import HELM
from tools.progress import StepFailed

Manifest = dict[str, Any]
Values = dict[str, Any]
Render = Callable[[Values], list[Manifest]]

SECRETS = {"brokers": "of-brokers", "controllers": "of-controllers", "clients": "of-clients"}
TLS: Values = {"enabled": True, "secrets": SECRETS}
CERT_MANAGER: Values = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}
ADMIN: Values = {"user": "root", "secret": "of-root", "key": "it"}
AUTH: Values = {"enabled": True, "admin": ADMIN}
WITH_ACLS: Values = {**AUTH, "authorizer": "acl"}
WANTED: Values = {
    "topics": [{"name": "orders", "partitions": 12, "config": {"retention.ms": 604800000}}],
    "users": [
        {"name": "shop", "secret": "of-shop"},
        {"name": "billing", "secret": "of-billing", "key": "pw", "iterations": 10000},
    ],
}
ACLS: Values = {
    "acls": [
        {"principal": "User:shop", "operations": ["Write"], "resource": {"type": "topic", "name": "orders"}},
        {"principal": "User:*", "operations": ["Describe"], "resource": {"type": "cluster"}, "permission": "deny"},
    ],
}


def documents(text: str) -> list[Manifest]:
    """Return the documents of a text in YAML, without empty ones; libyaml reads them, ten times as fast as Python."""
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def renderer(directory: Path) -> Render:
    """Return what renders the chart, tests among it; it raises ValueError where helm refuses.

    Skips the test, with the reason, only where helm cannot be had.
    """
    try:
        helm = HELM.find_or_build()
    except StepFailed as error:
        pytest.skip(f"THE CHART IS NOT TESTED: {error}")
    file = directory / "values.yaml"
    known: dict[tuple[Path, str], str] = {}

    def rendered(values: Values) -> list[Manifest]:
        text = json.dumps(values)
        if (tool.CHART, text) not in known:
            known[tool.CHART, text] = run(text)
        return documents(known[tool.CHART, text])

    def run(values: str) -> str:
        file.write_text(values)
        done = tool.render(helm, "--values", str(file), "--skip-tests=false")
        if done.returncode:
            raise ValueError(done.stderr)
        return done.stdout

    return rendered


def chart_with_notes(directory: Path) -> Path:
    """Return a copy of the chart that has its NOTES as the text of a manifest; `helm template` leaves NOTES out."""
    chart = directory / "raftlog"
    shutil.copytree(tool.CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        f'{{{{- define "raftlog.notes" }}}}{notes}{{{{ end -}}}}\n'
        'kind: Notes\nmetadata: {name: notes}\ntext: {{ include "raftlog.notes" . | toJson }}\n'
    )
    return chart


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the manifest of that kind and name."""
    (found,) = [each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(manifest: Manifest) -> Manifest:
    """Return the specification of the pod that it is, or makes."""
    spec: Manifest = manifest["spec"]
    return spec["template"]["spec"] if "template" in spec else spec
