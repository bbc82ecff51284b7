"""`raftlog support-bundle`: what helps to find out what a cluster has, in one file that others may see."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import platform
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer

import raftlog
from raftlog._core.redaction import without_secrets
from raftlog._doctor import bundle, local
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.collect import INTERVAL_S, PATIENCE_S, collect
from raftlog._doctor.picture import Picture
from raftlog._doctor.report import examine
from raftlog.cli.clients import connect_admin
from raftlog.cli.doctor import IntervalOption, told
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    print_error,
    print_json,
    print_note,
)
from raftlog.errors import RaftlogError

_COLUMNS: Final = 120
_STDOUT: Final = Path("-")
_PACKAGES: Final = ("grpcio", "protobuf", "pyarrow", "typer")


def support_bundle(
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FILE",
            help="Where it goes, - for standard output; else raftlog-support-TIME.tar.gz in this directory.",
        ),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Take the end of this log along; may be repeated.",
        ),
    ] = None,
    log_lines: Annotated[
        int, typer.Option("--log-lines", metavar="N", min=0, max=100_000, help="Lines of each log's end; 0: no logs.")
    ] = 2_000,
    interval_s: IntervalOption = INTERVAL_S,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a file with what helps others to help: what the doctor finds, descriptions, settings, figures, logs.

    It holds no records; settings and log lines that look like secrets are hidden; topics, groups and hosts are named.
    README.txt in it says what is there. It changes nothing in the cluster. Exit code 1: nobody answered; what is on
    this machine is in the file.

    Example: raftlog support-bundle --to bundle.tar.gz --log /var/log/raftlog.log
    """
    made_at_s = time.time()
    name = time.strftime("raftlog-support-%Y%m%dT%H%M%SZ", time.gmtime(made_at_s))
    target = to if to is not None else Path(f"{name}.tar.gz")
    if (
        target != _STDOUT and target.exists()
    ):  # before the cluster is asked; `_write` takes care of what comes meanwhile
        raise FileExistsError(17, "exists", str(target))
    files: bundle.Files = {}
    problems: list[str] = []
    nobody: RaftlogError | None = None
    with connect_admin(bootstrap) as admin:
        try:
            picture = collect(admin, interval_s=interval_s)
        except RaftlogError as error:
            nobody = error
            problems.append(f"the cluster at {bootstrap}: {error}")
        else:
            report = examine(picture, CHECKS)
            files |= bundle.files_of(picture, report, told(report, picture, _COLUMNS, named=50, more="see doctor.json"))
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
    if nobody is not None:
        print_error(str(nobody))
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
        address = local.metrics_address(node, brokers.get(node_id), picture.quorum)
        if address is None:
            problems.append(f"metrics of node {node_id}: it has no metrics.listener")
            continue
        try:
            files[f"metrics/node-{node_id}.txt"] = local.read_metrics(*address)
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"metrics of node {node_id} at {address[0]}:{address[1]}: {error}")


def _add_local_logs(picture: Picture, lines: int, files: bundle.Files, problems: list[str]) -> None:
    for node_id, node in sorted((picture.nodes or {}).items()):
        try:
            path = local.local_log(node)
            if path is not None:
                files[f"logs/node-{node_id}.log"] = bundle.log_file(local.last_lines(path, lines))
                continue
            why = f"it is on {node.hostname}" if node.log_file else f"it does not go to a file there ({node.hostname})"
        except OSError as error:
            why = str(error)
        problems.append(f"log of node {node_id}: {why}; add it with --log FILE")


def _add_logs(logs: list[Path], lines: int, files: bundle.Files, problems: list[str]) -> None:
    for number, path in enumerate(logs, 1):
        try:
            files[f"logs/given-{number}-{path.name}"] = bundle.log_file(local.last_lines(path, lines))
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
    """Write the archive, readable by its owner alone; nothing is left of one that could not be written.

    Raises:
        FileExistsError: there is something at `target`.
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
    print("what looks like a secret is hidden; it names topics, groups and hosts: look before you pass it on")
