"""`raftlog doctor` reports a cluster's problems with remedies; `raftlog support-bundle` packs a file for diagnosis."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import platform
import shutil
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer

import raftlog
from raftlog._core.words import counted, without_secrets
from raftlog._doctor import bundle
from raftlog._doctor import collect as collecting
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.checks.permissions import NOT_ALL_SEEN
from raftlog._doctor.collect import INTERVAL_S, PATIENCE_S
from raftlog._doctor.picture import SEVERITIES, Finding, Picture, Unanswered
from raftlog._doctor.report import Report, examine
from raftlog.cli.client_config import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from raftlog.errors import RaftlogError

_STDOUT: Final = Path("-")
_PACKAGES: Final = ("grpcio", "protobuf", "pyarrow", "typer")


def support_bundle(
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FILE",
            help="The file to write, - for standard output; by default raftlog-support-TIME.tar.gz in this directory.",
        ),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Also include the end of this log file; may be repeated.",
        ),
    ] = None,
    log_lines: Annotated[
        int,
        typer.Option(
            "--log-lines", metavar="N", min=0, max=100_000, help="Lines from the end of each log; 0: no logs."
        ),
    ] = 2_000,
    interval_s: IntervalOption = INTERVAL_S,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write an archive for diagnosis: the doctor's findings, descriptions, settings, metrics and logs.

    It holds no records. Settings and log lines that look like secrets are hidden; names of topics, groups and hosts are
    not. README.txt in the archive lists its files. The command changes nothing in the cluster. Exit code 1: the cluster
    did not answer; the archive then holds only data of this machine.

    Example: raftlog support-bundle --to bundle.tar.gz --log /var/log/raftlog.log
    """
    made_at_s = time.time()
    name = time.strftime("raftlog-support-%Y%m%dT%H%M%SZ", time.gmtime(made_at_s))
    target = to if to is not None else Path(f"{name}.tar.gz")
    if target != _STDOUT and target.exists():  # checked before the cluster is asked; `_write` also fails on a file
        raise FileExistsError(17, "exists", str(target))
    files: bundle.Files = {}
    problems: list[str] = []
    no_answer: RaftlogError | None = None
    with connect_admin(bootstrap) as admin:
        try:
            picture = collecting.collect(admin, interval_s=interval_s)
        except RaftlogError as error:
            no_answer = error
            problems.append(f"the cluster at {bootstrap}: {error}")
        else:
            report = examine(picture, CHECKS)
            files |= bundle.files_of(picture, report, told(report, picture, _WIDEST, named=50, more="see doctor.json"))
            problems += bundle.problems_of(picture)
            _add_log_dirs(admin, picture, files, problems)
            _add_metrics(picture, files, problems)
            if log_lines:
                _add_local_logs(picture, log_lines, files, problems)
    if log_lines:
        _add_logs(logs or [], log_lines, files, problems)
    files["versions.json"] = bundle.json_file(_versions())
    problems = [without_secrets(problem) for problem in problems]
    if problems:
        files["problems.txt"] = ("\n".join(problems) + "\n").encode(errors="backslashreplace")
    made_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(made_at_s))
    files = {"README.txt": bundle.readme(name, made_at, files, problems), **files}
    if target == _STDOUT:
        _archive(sys.stdout.buffer, name, files, made_at_s)
        for problem in problems:
            print_note(f"not in it: {problem}")
    else:
        _write(target, name, files, made_at_s)
        _tell(target, files, problems, output)
    if no_answer is not None:
        print_error(str(no_answer))
        raise typer.Exit(1)


def _add_log_dirs(admin: raftlog.Admin, picture: Picture, files: bundle.Files, problems: list[str]) -> None:
    found = []
    for broker in picture.live_brokers():
        try:
            found += admin.describe_log_dirs(broker.broker_id, timeout=PATIENCE_S)
        except RaftlogError as error:
            problems.append(f"directories of broker {broker.broker_id}: {error}")
    files["log-dirs.json"] = bundle.log_dirs_file(found)


def _add_metrics(picture: Picture, files: bundle.Files, problems: list[str]) -> None:
    brokers = picture.brokers()
    for node_id, node in sorted((picture.nodes or {}).items()):
        address = collecting.metrics_address(node, brokers.get(node_id), picture.quorum)
        if address is None:
            problems.append(f"metrics of node {node_id}: it has no metrics.listener")
            continue
        try:
            files[f"metrics/node-{node_id}.txt"] = collecting.read_metrics(*address)
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"metrics of node {node_id} at {address[0]}:{address[1]}: {error}")


def _add_local_logs(picture: Picture, lines: int, files: bundle.Files, problems: list[str]) -> None:
    for node_id, node in sorted((picture.nodes or {}).items()):
        try:
            path = collecting.local_log(node)
            if path is not None:
                files[f"logs/node-{node_id}.log"] = bundle.log_file(collecting.last_lines(path, lines))
                continue
            why = f"it is on {node.hostname}" if node.log_file else f"the node on {node.hostname} logs to no file"
        except OSError as error:
            why = str(error)
        problems.append(f"log of node {node_id}: {why}; add it with --log FILE")


def _add_logs(logs: list[Path], lines: int, files: bundle.Files, problems: list[str]) -> None:
    for number, path in enumerate(logs, 1):
        try:
            files[f"logs/given-{number}-{path.name}"] = bundle.log_file(collecting.last_lines(path, lines))
        except OSError as error:
            problems.append(f"log {path}: {error}")


def _versions() -> dict[str, Any]:
    packages = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package)
    return {
        "raftlog": raftlog.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
    }


def _write(target: Path, name: str, files: bundle.Files, made_at_s: float) -> None:
    """Write the archive, readable by its owner only; remove it again if that fails.

    Raises:
        FileExistsError: `target` exists.
    """
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            _archive(file, name, files, made_at_s)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _archive(to: IO[bytes], name: str, files: bundle.Files, made_at_s: float) -> None:
    with tarfile.open(fileobj=to, mode="w|gz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mtime, entry.mode = len(content), int(made_at_s), 0o600
            archive.addfile(entry, io.BytesIO(content))
    to.flush()


def _tell(target: Path, files: bundle.Files, problems: list[str], output: Output) -> None:
    if output is Output.JSON:
        sizes = {path: len(content) for path, content in files.items()}
        print_json({"file": str(target), "bytes": target.stat().st_size, "files": sizes, "problems": problems})
        return
    print(f"{target}: {counted(target.stat().st_size, 'byte')}, {counted(len(files), 'file')}")
    for path, content in files.items():
        print(f"  {path:<32}{len(content):>12,}")
    for problem in problems:
        print_note(f"not in it: {problem}")
    print("what looks like a secret is hidden; names of topics, groups and hosts are not: check it before you share it")


NAMED: Final = 8
"""How many places of a finding a terminal shows; JSON has all."""
_WIDEST: Final = 120
_LABEL: Final = 9

IntervalOption = Annotated[
    float,
    typer.Option(
        "--interval",
        metavar="SECONDS",
        min=0,
        max=600,
        help="Time between two readings, which show whether groups and moves make progress; 0: read once.",
    ),
]


class FailOn(StrEnum):
    """The values of `--fail-on`."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    NEVER = "never"


def doctor(
    interval_s: IntervalOption = INTERVAL_S,
    ignored: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CHECK", help="Skip this check; may be repeated."),
    ] = None,
    fail_on: Annotated[
        FailOn,
        typer.Option(
            metavar="SEVERITY",
            help="Exit with 1 on findings of this severity or worse: error, warning, note; or never.",
        ),
    ] = FailOn.WARNING,
    list_checks: Annotated[
        bool, typer.Option("--list", metavar="", help="List the checks, without asking the cluster.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Look for problems of a cluster, and say what to do about each.

    It only reads, and changes nothing. An error: something does not work, or records are lost. A warning: one more
    failure, or some time, will lead to an error. A note: the state may be intended.

    Exit code 0: it found nothing, or only notes. 1: it found errors or warnings, or the cluster does not answer. A
    check that cannot get the answers that it needs counts as a warning.

    Example: raftlog doctor --output json --fail-on error
    """
    known = {check.id for check in CHECKS}
    for each in ignored or ():
        if each not in known:
            raise typer.BadParameter(f"unknown check {each!r}; raftlog doctor --list names them")
    if list_checks:
        print_rows([{"check": check.id, "about": check.about} for check in CHECKS], ("check", "about"), output)
        return
    with connect_admin(bootstrap) as admin:
        picture = collecting.collect(admin, interval_s=interval_s)
    report = examine(picture, CHECKS, ignored=ignored or ())
    if output is Output.JSON:
        print_json(report.document())
    else:
        print("\n".join(told(report, picture, width(), more="--output json has all")))
    if is_bad(report, fail_on):
        raise typer.Exit(1)


def is_bad(report: Report, fail_on: FailOn) -> bool:
    """Return whether a finding is as severe as `fail_on` or worse; an incomplete report counts as a warning."""
    found = {each.severity for each in report.findings} | (set() if report.is_whole() else {"warning"})
    if fail_on is FailOn.NEVER:
        return False
    return any(severity in found for severity in SEVERITIES[: SEVERITIES.index(fail_on.value) + 1])


def width() -> int:
    """Return the width of text: the terminal's, from 60 to 120 columns."""
    if not sys.stdout.isatty():
        return _WIDEST
    return max(60, min(_WIDEST, shutil.get_terminal_size().columns))


def told(report: Report, picture: Picture, columns: int, *, named: int = NAMED, more: str = "") -> Iterator[str]:
    """Yield the report as text: each finding, the checks that could not be made, and a summary."""
    for found in report.findings:
        yield from _finding(found, columns, named, more)
        yield ""
    skipped = report.skipped()
    for why in dict.fromkeys(check.why for check in skipped):
        names = ", ".join(check.check for check in skipped if check.why == why)
        yield from _wrapped("skipped", f"{names}: {why}", columns)
    told_of = any(found.check == NOT_ALL_SEEN for found in report.findings)
    unknown = [each for each in report.unanswered if not (each.refused and told_of)]
    for label, text, reasons in _gaps(unknown):
        yield from _wrapped(label, text, columns)
        yield from _places(reasons, columns, named, more)
    if skipped or unknown:
        yield ""
    yield _summary(report, picture)


def _finding(found: Finding, columns: int, named: int, more: str) -> Iterator[str]:
    yield from _wrapped(found.severity, f"{found.check}: {found.what}", columns)
    yield from _places(found.where, columns, named, more)
    yield from _wrapped("  do", found.remedy, columns)


def _places(where: Sequence[str], columns: int, named: int, more: str) -> Iterator[str]:
    for number, place in enumerate(_some(where, named, more)):
        yield from _wrapped("  where" if number == 0 else "", place, columns)


def _gaps(unanswered: Sequence[Unanswered]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the label and the text of each question without an answer; those that left gaps in one list are one, with
    their reasons."""
    groups: dict[tuple[object, ...], list[Unanswered]] = {}
    for each in unanswered:
        groups.setdefault((each.part, each.refused) if each.who == "some" else (each,), []).append(each)
    for alike in groups.values():
        label = "refused" if alike[0].refused else "unknown"
        if len(alike) == 1:
            yield label, str(alike[0]), []
        else:
            yield (
                label,
                f"some of the {alike[0].words}: {len(alike)} questions have no answer",
                [each.why for each in alike],
            )


def _some(where: Sequence[str], named: int, more: str) -> Iterator[str]:
    yield from where[:named]
    if len(where) > named:
        yield f"and {len(where) - named:,} more{f'; {more}' if more else ''}"


def _wrapped(label: str, text: str, columns: int) -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(report: Report, picture: Picture) -> str:
    brokers = len(picture.brokers())
    nodes = len(picture.nodes or {}) + len(picture.silent_nodes)
    topics = picture.topics
    has = [counted(nodes, "node"), counted(brokers, "broker")]
    if topics is not None:
        total = len(topics) + len(picture.hidden_topics)
        shown = f"{len(topics)} of " if picture.hidden_topics else ""
        has += [
            f"{shown}{counted(total, 'topic')}",
            counted(sum(len(topic.partitions) for topic in topics), "partition"),
        ]
    results = [counted(report.count(severity), severity) for severity in SEVERITIES if report.count(severity)]
    made = sum(each.result in ("ok", "found") for each in report.checked)
    said = ", ".join(results) or ("all fine" if report.is_whole() else "nothing found, but not all is known")
    return f"cluster {report.cluster_id}: {', '.join(has)}; {counted(made, 'check')}: {said}"
