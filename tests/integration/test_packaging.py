"""The package as users get it: a wheel in a clean environment, an editable install, hostile working directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import files, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import raftlog

ROOT = Path(__file__).resolve().parents[2]
HOSTILE_NAMES = ["broker", "raftmeta", "replication", "spark", "grpc", "pyarrow", "numpy", "typer", "raftlog", "uvloop"]
_WAIT_S = 120.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = directory.glob("*.whl")
    return built


def install(directory: Path, *what: str, behind: str | None = None) -> Path:
    """Return the `bin` of a new environment that has this installed, and our own environment's packages behind it.

    Those come from a `.pth` file, and what such a file adds is not searched for `.pth` files again: the editable
    install in our own environment does not reach the new one. `behind` names another directory of packages.
    """
    venv.create(directory, symlinks=True, with_pip=False)
    binaries = directory / "bin"
    [packages] = directory.glob("lib/python3.*/site-packages")
    (packages / "dependencies.pth").write_text((behind or sysconfig.get_path("purelib")) + "\n")
    pip = [sys.executable, "-P", "-m", "pip", "--python", str(binaries / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", *what], check=True, cwd=directory)
    return binaries


@pytest.fixture(scope="module", params=["wheel", "editable"])
def binaries(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    what = [str(wheel)] if request.param == "wheel" else ["--editable", str(ROOT)]
    return install(directory / "venv", *what)


@pytest.fixture
def hostile_directory(tmp_path: Path) -> Path:
    for name in HOSTILE_NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the file {name}.py of the user was imported')\n")
    return tmp_path


def clean_environment() -> dict[str, str]:
    return {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RAFTLOG_", "VIRTUAL_ENV"))
    }


@contextmanager
def raftlog_up(binaries: Path, directory: Path) -> Iterator[str]:
    """Run `raftlog up` in a directory and give the address it prints; Ctrl-C must end it with exit code 0."""
    command = [str(binaries / "raftlog"), "up", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=directory, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        said = ""
        while "raftlog is up at " not in said and (line := process.stdout.readline()):
            said += line
        assert "raftlog is up at " in said, said
        yield said.split("raftlog is up at ")[1].split(",")[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(_WAIT_S) == 0, process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_wheel_puts_no_generic_name_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"raftlog", "pyspark_raftlog", f"raftlog-{raftlog.__version__}.dist-info"}
    assert {
        "raftlog/_server/broker/__main__.py",
        "raftlog/_server/raftmeta/decide/__init__.py",
        "raftlog/_server/replication/__init__.py",
        "raftlog/v1/log_pb2_grpc.py",
        "raftlog/py.typed",
        "pyspark_raftlog/__init__.py",
    } <= set(names)
    assert [name for name in names if "__pycache__" in name or "/tests/" in name] == []


def test_up_topic_produce_and_consume_work_among_hostile_files(binaries: Path, hostile_directory: Path) -> None:
    with raftlog_up(binaries, hostile_directory) as address:

        def command(*arguments: str, stdin: str = "") -> str:
            done = subprocess.run(
                [str(binaries / "raftlog"), *arguments, "--bootstrap", address],
                cwd=hostile_directory,
                env=clean_environment(),
                input=stdin,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        command("topic", "create", "events", "--partitions", "2")
        command("produce", "events", stdin="one\ntwo\n")
        printed = command("consume", "events", "--from-beginning", "--no-follow", "--output", "json")
        assert sorted(json.loads(line)["value"] for line in printed.splitlines()) == ["one", "two"]


def test_a_users_own_modules_are_not_broken(binaries: Path, tmp_path: Path) -> None:
    """`import broker` in a user's program finds the user's file, also where raftlog is installed from a wheel."""
    if not list(binaries.parent.glob("lib/python3.*/site-packages/raftlog/_server")):
        pytest.skip("an editable install puts the checkout, and so the server's packages, on the path")
    (tmp_path / "broker.py").write_text("NAME = 'mine'\n")
    (tmp_path / "program.py").write_text(
        "import importlib.util, broker, raftlog\n"
        "print(broker.NAME, importlib.util.find_spec('raftmeta'), importlib.util.find_spec('replication'))\n"
    )
    done = subprocess.run(
        [str(binaries / "python"), "program.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["mine", "None", "None"]


def test_the_server_of_a_killed_up_does_not_stay_behind(binaries: Path, tmp_path: Path) -> None:
    command = [str(binaries / "raftlog"), "up", "--port", "0", "--data", str(tmp_path / "data")]
    process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert "raftlog is up" in process.stdout.readline()
        server = int(json.loads((tmp_path / "data" / "node-1" / "ready.json").read_text())["pid"])
        os.kill(server, 0)
        process.kill()
        process.wait()
    deadline = time.monotonic() + _WAIT_S
    while runs(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def link_requirements(extra: str, into: Path) -> None:
    """Link what `pip install raftlog` installs, with this extra ("": none), and what those need in turn."""
    waiting, done = [("raftlog", extra)], set()
    while waiting:
        name, of_extra = waiting.pop()
        for line in requires(name) or []:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": of_extra}):
                waiting += [(canonicalize_name(wanted.name), each) for each in {"", *wanted.extras}]
        if name in done or name == "raftlog":
            continue
        done.add(name)
        for top in {file.parts[0] for file in files(name) or []} - {"..", "__pycache__"}:
            if not (into / top).exists():
                (into / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)


IMPORT_ALL = """
import importlib, pkgutil, raftlog
elsewhere = ("raftlog.cli", "raftlog.console", "raftlog._server", "raftlog.__main__", "raftlog.testing.pytest_plugin",
             "raftlog.prometheus", "raftlog.tracing", "raftlog._tracing")  # with extras, or pytest
for module in pkgutil.walk_packages(raftlog.__path__, "raftlog.", onerror=lambda name: None):
    if not module.name.startswith(elsewhere):
        importlib.import_module(module.name)
for name in raftlog.__all__:
    getattr(raftlog, name)
raftlog.Producer("127.0.0.1:9").close()
for start in (lambda: raftlog.testing.Cluster().start_all(), lambda: importlib.import_module("raftlog.prometheus")):
    try:
        start()
    except (raftlog.errors.InvalidConfig, ModuleNotFoundError) as error:
        print(error)
"""


def test_the_wheel_needs_extras_only_for_server_and_command_line(wheel: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    link_requirements("", packages)
    binaries = install(tmp_path / "venv", str(wheel), behind=str(packages))

    def said(*command: str, code: int = 0) -> str:
        line = [str(binaries / command[0]), *command[1:]]
        done = subprocess.run(
            line, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=False, timeout=_WAIT_S
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    server, prometheus = said("python", "-c", IMPORT_ALL).splitlines()
    assert "a raftlog server needs the package pysyncobj" in server
    assert "pip install '.[server]'" in server
    assert "pip install '.[prometheus]'" in prometheus
    [line] = said("raftlog", "topic", "list", code=1).splitlines()
    assert line.startswith("error: the command raftlog needs the package typer")
    assert "pip install '.[cli]' in the checkout, or pip install 'raftlog[cli] @ file:///WHEEL' of its wheel" in line

    link_requirements("cli", packages)
    assert "Usage: raftlog topic" in said("raftlog", "topic", "--help")
    [line] = said("raftlog", "up", "--port", "0", code=1).splitlines()
    assert line.startswith("error: a raftlog server needs the package pysyncobj")


def runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
