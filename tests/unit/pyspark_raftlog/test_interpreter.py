"""The Python that Spark runs data sources with: named if it can be, and a word where it lacks the package."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyspark_raftlog
import pytest
from pyspark_raftlog import interpreter

MakePython = Callable[[str, str], str]
BARE = "echo \"['pyspark_raftlog', 'raftlog']\""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of Spark's, no JVM, and a python3 on the path that is not this Python."""
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.setenv(name, "")  # so that the test's end restores what the code sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(interpreter, "_jvm", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


@pytest.fixture
def python(tmp_path: Path) -> MakePython:
    """Return how to make a Python that answers the search for packages with the output of a shell script."""

    def make(name: str, script: str) -> str:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def warned(caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING, interpreter.__name__):
        interpreter.prepare()
    return caplog.text


def test_without_a_named_python_this_one_is_named(python: MakePython, caplog: pytest.LogCaptureFixture) -> None:
    python("python3", BARE)
    assert warned(caplog) == ""
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_a_python_on_the_path_that_is_this_one_stays_unnamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that the executors of a cluster keep their own python3."""
    own = tmp_path / "venv" / "python3.99"
    own.parent.mkdir()
    own.symlink_to(sys.executable)
    (own.parent / "python3").symlink_to(own)
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setenv("PATH", str(own.parent))
    assert warned(caplog) == ""
    assert "PYSPARK_PYTHON" not in os.environ


@pytest.mark.parametrize("name", ["PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"])
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (BARE, "does not have the package raftlog"),
        ("echo \"['raftlog']\"", "does not have the package raftlog"),
        ("echo broken >&2; exit 1", "fails: broken"),
    ],
)
def test_a_named_python_without_the_package_is_told(
    name: str,
    script: str,
    words: str,
    python: MakePython,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = python("other", script)
    monkeypatch.setenv(name, other)
    said = warned(caplog)
    assert f"Spark's Python is {other} (from {name})" in said
    assert words in said
    assert "DATA_SOURCE_NOT_FOUND" in said
    assert f"PYSPARK_PYTHON={sys.executable}" in said
    assert os.environ[name] == other, "a variable that the user has set must not be changed"


def test_a_named_python_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")
    assert "cannot run" in warned(caplog)


def test_a_named_python_that_has_the_package_needs_no_word(
    python: MakePython, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", python("other", "echo '[]'"))
    assert warned(caplog) == ""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert warned(caplog) == ""


def test_the_search_finds_the_packages_in_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real search, by a Python that is not taken for this one."""
    monkeypatch.setattr(interpreter, "_is_this_python", lambda python: False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    assert interpreter._problem_of(sys.executable, "x") is None
    monkeypatch.setattr(interpreter, "_PACKAGES", ("pyspark_raftlog", "no_such_package"))
    assert "does not have the package" in str(interpreter._problem_of(sys.executable, "x"))


def test_a_jvm_that_runs_already_is_asked_for_its_own_environment(
    python: MakePython, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"PYSPARK_PYTHON": python("other", BARE)}
    monkeypatch.setattr(interpreter, "_jvm", lambda: SimpleNamespace(System=SimpleNamespace(getenv=environment.get)))
    said = warned(caplog)
    assert f"{environment['PYSPARK_PYTHON']} (from PYSPARK_PYTHON)" in said
    assert "or call pyspark_raftlog.setup(spark)" in said
    assert "PYSPARK_PYTHON" not in os.environ, "the variable must not be set, as it is too late for that"
    caplog.clear()
    environment.clear()
    python("python3", BARE)
    assert "python3 (from the path)" in warned(caplog)


@pytest.mark.parametrize("name", ["pyspark.daemon", "pyspark.worker", "pyspark.sql.worker.lookup_data_sources"])
def test_processes_of_spark_and_drivers_of_spark_submit_are_left_alone(
    name: str, python: MakePython, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    python("python3", BARE)
    with monkeypatch.context() as patch:
        main = ModuleType("__main__")
        main.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment] # only the name is read
        patch.setitem(sys.modules, "__main__", main)
        assert warned(caplog) == ""
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert warned(caplog) == ""
    assert "PYSPARK_PYTHON" not in os.environ


class Session:
    """What `setup` needs of a session."""

    def __init__(self, python: str) -> None:
        self._jsparkSession = object()
        self.sparkContext = SimpleNamespace(pythonExec=python)
        self.dataSource = self
        self.registered: list[Any] = []

    def register(self, source: Any) -> None:
        self.registered.append(source)


def test_a_session_gets_the_source_if_its_python_has_the_package(python: MakePython) -> None:
    good = Session(sys.executable)
    pyspark_raftlog.setup(good)  # type: ignore[arg-type] # the part that is used
    assert good.registered == [pyspark_raftlog.DefaultSource]
    bad = Session(python("other", BARE))
    with pytest.raises(RuntimeError, match="does not have the package raftlog"):
        pyspark_raftlog.setup(bad)  # type: ignore[arg-type]
    assert bad.registered == []
    remote = Session("never asked")
    remote._jsparkSession = None
    pyspark_raftlog.setup(remote)  # type: ignore[arg-type]
    assert remote.registered == [pyspark_raftlog.DefaultSource]
