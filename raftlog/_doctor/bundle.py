"""The files of a support bundle, made from a picture and a report. Pure.

It never asks for records. Values that look like secrets are hidden in every file, in addition to those that nodes hide
themselves. The metadata of committed offsets is left out, because it may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from raftlog._core.descriptions import ConfigDescription, LogDirDescription
from raftlog._core.words import document_without_secrets, log_lines_without_secrets, shown
from raftlog._doctor.picture import Picture
from raftlog._doctor.report import Report

Files = dict[str, bytes]

_ABOUT: Final = {
    "doctor.txt": "the report of raftlog doctor, as text",
    "doctor.json": "the same as JSON, with every place",
    "cluster.json": "brokers, features, the metadata quorum",
    "topics.json": "topics, their partitions and their settings",
    "replicas.json": "the progress of replicas, from their leaders",
    "groups.json": "consumer groups and their lags",
    "transactions.json": "transactions and stages, and hanging transactions",
    "log-dirs.json": "directories of brokers, and the sizes of partitions there",
    "nodes/": "each node: version, clock, limits, directories, settings",
    "metrics/": "metrics of nodes whose metrics.listener this machine can reach",
    "logs/": "the last lines of logs on this machine",
    "versions.json": "the versions of the software that made this bundle",
    "problems.txt": "what is missing in this bundle, and why",
}


def files_of(picture: Picture, report: Report, told: Iterable[str]) -> Files:
    """Return the files about the cluster. `told`: the lines of the report as text."""
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
    """Return brokers' log directories as a file."""
    return json_file(plain(log_dirs))


def log_file(lines: list[str]) -> bytes:
    """Return lines of a log as a file, with likely secrets hidden."""
    return _text(log_lines_without_secrets(lines))


def problems_of(picture: Picture) -> list[str]:
    """Return a line for each question without an answer."""
    return [str(each) for each in picture.unanswered]


def readme(name: str, made_at: str, files: Mapping[str, bytes], problems: Sequence[str]) -> bytes:
    """Return README.txt, which lists what the bundle contains and what it lacks."""
    lines = [
        f"{name}: a support bundle of a raftlog cluster, made {made_at}",
        "",
        "Contents",
        "",
    ]
    for path, about in _ABOUT.items():
        found = [each for each in files if each == path or (path.endswith("/") and each.startswith(path))]
        if found:
            size = sum(len(files[each]) for each in found)
            lines.append(f"  {path:<20}{about} ({size:,} bytes)")
    lines += [
        "",
        "It contains names of topics, groups, transactional ids, hosts, addresses and paths. Read it before you share "
        "it.",
        "It contains no records, no keys or values of records, and no metadata of committed offsets.",
        "Settings and log lines that look like passwords, keys or tokens are replaced by [hidden].",
        "",
        "Logs are from this machine only. Add those of other nodes with --log FILE; get them with",
        "  journalctl -u raftlog --since -1h        a systemd unit",
        "  kubectl logs POD --since=1h              Kubernetes",
        "  docker logs CONTAINER                    a container",
    ]
    if problems:
        lines += ["", "Missing files: see problems.txt", ""]
    return _text(lines)


def plain(value: Any) -> Any:
    """Return a value for JSON: named tuples at any depth as objects, errors and bytes as text."""
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
    """Return a document as a file, with likely secrets hidden."""
    return (json.dumps(document_without_secrets(value), indent=1, default=str) + "\n").encode()


def _configs(configs: Mapping[str, ConfigDescription]) -> dict[str, Any]:
    """Return settings by key, each with its value and source."""
    return {key: {"value": shown(key, each.value), "source": each.source} for key, each in sorted(configs.items())}


def _text(lines: Iterable[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode(errors="backslashreplace")
