"""What is said where there is no engine, and which files make another image."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import docker
from tools.progress import Progress


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A path that has nothing else on it, to put commands on."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def fake(directory: Path, script: str) -> None:
    """Put a command docker on the path."""
    command = directory / "docker"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)


def test_a_missing_command_is_named_with_what_to_install(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "apt-get install docker.io" in str(docker.engine_problem())
    assert docker.main(["--base", "x"]) == docker.EXIT_NOT_HERE
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the command docker is missing")


def test_an_engine_that_does_not_answer_is_told_with_its_reason(commands: Path) -> None:
    fake(commands, "echo cannot connect >&2; exit 1")
    problem = str(docker.engine_problem())
    assert "cannot connect" in problem
    assert "DOCKER_HOST" in problem


def test_an_engine_that_answers_is_no_problem(commands: Path) -> None:
    fake(commands, "echo 20.10")
    assert docker.engine_problem() is None


def test_the_image_changes_with_what_goes_into_it_and_with_nothing_else(
    commands: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fake(commands, 'echo "id-of-$5"')
    tree = tmp_path_factory.mktemp("tree")
    for name in docker._sources(docker.ROOT):
        target = tree / name
        if (docker.ROOT / name).is_dir():
            target = target / "file"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(name)
    first = docker._digest(tree, "base")
    (tree / "broker" / "__pycache__").mkdir()
    (tree / "broker" / "__pycache__" / "x.pyc").touch()
    (tree / "notes").touch()
    assert docker._digest(tree, "base") == first
    assert docker._digest(tree, "another") != first
    (tree / "broker" / "file").write_text("else")
    changed = docker._digest(tree, "base")
    assert changed != first
    (tree / "broker" / "file").rename(tree / "broker" / "moved")
    assert docker._digest(tree, "base") not in (first, changed)


def test_a_lower_version_is_lower_everywhere(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "raftlog/types.py"):
        docker._copy(docker.ROOT / name, tmp_path / name)
    docker._lower_version(tmp_path)
    assert '\nversion = "0.0.1"\n' in (tmp_path / "pyproject.toml").read_text()
    assert '\nVERSION: Final = "0.0.1"\n' in (tmp_path / "raftlog" / "types.py").read_text()


def test_a_base_is_made_only_where_debian_is(commands: Path) -> None:
    with Progress("image") as progress, pytest.raises(docker.NoBaseImage, match="--base IMAGE"):
        docker.ensure_base(progress, "docker")
