"""A process that is started as a dependent one does not outlive its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from raftlog import _installed
from raftlog.errors import InternalError
from tests.support import patience

PARENT = """
import subprocess, sys, time
from raftlog._installed import dependent_command
child = subprocess.Popen(dependent_command("dependent_child", *sys.argv[1:]))
time.sleep(600)
"""
CHILD = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1] + ".new").write_text(f"{os.getpid()} {__name__} {sys.argv[2]}")
os.replace(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
_WAIT_S = 60.0


wait_for = partial(patience.until, within_s=_WAIT_S, pause_s=0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_dependent_process_dies_with_a_killed_parent_even_when_stopped(tmp_path: Path, stopped: bool) -> None:
    (tmp_path / "dependent_child.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_installed.server_root())])}
    told = tmp_path / "told"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(told), "argument"], env=environment)
    try:
        wait_for(told.exists)
        pid_text, name, argument = told.read_text().split()
        assert (name, argument) == ("__main__", "argument")
        pid = int(pid_text)
        assert not is_gone(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: is_gone(pid))


def test_the_server_root_is_the_checkout_or_the_wheels_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (_installed.server_root() / "broker" / "__main__.py").exists()
    package = tmp_path / "raftlog"
    package.mkdir()
    monkeypatch.setattr(_installed, "__file__", str(package / "_installed.py"))
    with pytest.raises(InternalError, match="install raftlog again"):
        _installed.server_root()
    for name in ("broker", "raftmeta"):
        bundled = package / "_server" / name
        bundled.mkdir(parents=True)
        (bundled / "__init__.py").touch()
    assert _installed.server_root() == package / "_server"


def test_a_server_does_not_get_the_clients_setting_and_finds_its_root_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFTLOG_BOOTSTRAP", "a:1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    environment = _installed.server_environment()
    assert "RAFTLOG_BOOTSTRAP" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(_installed.server_root()), "elsewhere"]


IMPORTED_AS = {"grpcio_health_checking": "grpc_health", "grpcio_reflection": "grpc_reflection", "google_re2": "re2"}


@pytest.mark.parametrize("extra", _installed.PACKAGES)
def test_the_packages_of_an_extra_are_those_of_the_project(extra: str) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra]
    names = {Requirement(line).name.replace("-", "_") for line in lines} - {"raftlog"}
    assert {IMPORTED_AS.get(name, name) for name in names} == set(_installed.PACKAGES[extra])
    assert _installed.missing_from(extra) is None


def test_a_dependent_process_says_nothing_of_its_own(tmp_path: Path) -> None:
    """Its output is the first thing in a server's log, and in what `raftlog up` quotes of it."""
    (tmp_path / "dependent_child.py").write_text("print('here')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_installed.server_root())])}
    ran = subprocess.run(
        _installed.dependent_command("dependent_child"), env=environment, capture_output=True, text=True, check=True
    )
    assert (ran.stdout, ran.stderr) == ("here\n", "")
