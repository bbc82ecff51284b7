"""What goes into a support bundle: files by name, made of a picture and a report. Pure.

No records, keys or values of records are ever asked for; what looks like a secret is hidden in everything, once more
than where it was told. Metadata that consumers commit beside their offsets is left out: nobody knows what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from raftlog._core.redaction import document_without_secrets, log_lines_without_secrets, shown
from raftlog._descriptions import ConfigDescription, LogDirDescription
from raftlog._doctor.picture import Picture
from raftlog._doctor.report import Report

Files = dict[str, bytes]

_ABOUT: Final = {
    "doctor.txt": "what raftlog doctor found, for people",
    "doctor.json": "the same for programs, with every place",
    "cluster.json": "brokers, features, the metadata quorum",
    "topics.json": "topics, their partitions and their settings",
    "replicas.json": "how far replicas are, as leaders see it",
    "groups.json": "consumer groups and how far they have read",
    "transactions.json": "transactions and stages, and those that nobody ends",
    "log-dirs.json": "directories of brokers, and the sizes of partitions there",
    "nodes/": "each node: version, clock, limits, directories, settings",
    "metrics/": "figures of nodes whose metrics.listener is reached from here",
    "logs/": "the last lines of logs on this machine",
    "versions.json": "what made this bundle",
    "problems.txt": "what could not be had, and why",
}


def files_of(picture: Picture, report: Report, told: Iterable[str]) -> Files:
    """Return what is known of the cluster. `told`: the report for people, line by line."""
    files = {
        "doctor.txt": _text(told),
        "doctor.json": json_file(report.document()),
        "cluster.json": json_file({"cluster": plain(picture.cluster), "quorum": plain(picture.quorum)}),
        "topics.json": json_file(
            [
                {
                    **plain(topic),
                    "topic_id": topic.topic_id.hex(),
                    "configs": _configs((picture.configs or {}).get(topic.name, {})),
                }
                for topic in picture.topics or ()
            ]
        ),
        "replicas.json": json_file([plain(each) for each in (picture.replicas or {}).values()]),
        "groups.json": json_file(
            [
                {
                    **plain(group),
                    "partitions": [
                        {**part._asdict(), **{key: value for key, value in lag._asdict().items() if key != "metadata"}}
                        for part, lag in (picture.lags or {}).get(group.group_id, {}).items()
                    ],
                }
                for group in picture.groups or ()
            ]
        ),
        "transactions.json": json_file(
            {"transactions": plain(picture.transactions or ()), "hanging": plain(picture.hanging or ())}
        ),
    }
    for node_id, node in sorted((picture.nodes or {}).items()):
        files[f"nodes/node-{node_id}.json"] = json_file({**plain(node), "configs": _configs(node.configs)})
    return files


def log_dirs_file(log_dirs: Sequence[LogDirDescription]) -> bytes:
    """Return the directories of brokers as a file."""
    return json_file(plain(log_dirs))


def log_file(lines: list[str]) -> bytes:
    """Return the end of a log as a file, without what looks like a secret."""
    return _text(log_lines_without_secrets(lines))


def problems_of(picture: Picture) -> list[str]:
    """Return what nobody answered, a line each."""
    return [str(each) for each in picture.unanswered]


def readme(name: str, made_at: str, files: Mapping[str, bytes], problems: Sequence[str]) -> bytes:
    """Return the page that says what is in the bundle, and what is not."""
    lines = [
        f"{name}: a support bundle of a raftlog cluster, made {made_at}",
        "",
        "What is in it",
        "",
    ]
    for path, about in _ABOUT.items():
        found = [each for each in files if each == path or (path.endswith("/") and each.startswith(path))]
        if found:
            size = sum(len(files[each]) for each in found)
            lines.append(f"  {path:<20}{about} ({size:,} bytes)")
    lines += [
        "",
        "It names topics, groups, transactional ids, hosts, addresses and paths. Look through it before you give it to",
        "others. It holds no records, no keys or values of records, and nothing that consumers commit beside offsets.",
        "Settings and log lines that look like passwords, keys or tokens are replaced by [hidden].",
        "",
        "Logs are taken from this machine only. For other nodes add them with --log FILE, from",
        "  journalctl -u raftlog --since -1h        a systemd unit",
        "  kubectl logs POD --since=1h              Kubernetes",
        "  docker logs CONTAINER                    a container",
    ]
    if problems:
        lines += ["", "What could not be had: see problems.txt", ""]
    return _text(lines)


def plain(value: Any) -> Any:
    """Return named tuples as objects, whatever they lie in; errors and bytes as text."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: plain(each) for key, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, BaseException) else value


def json_file(value: Any) -> bytes:
    """Return a document as a file, without what looks like a secret."""
    return (json.dumps(document_without_secrets(value), indent=1, default=str) + "\n").encode()


def _configs(configs: Mapping[str, ConfigDescription]) -> dict[str, Any]:
    """Return settings by key: the value, and where it comes from."""
    return {key: {"value": shown(key, each.value), "source": each.source} for key, each in sorted(configs.items())}


def _text(lines: Iterable[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode(errors="backslashreplace")
