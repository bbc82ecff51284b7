"""What `./dev k8s` says where no cluster can run, and which programs it builds."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from tools.k8s import __main__ as command
from tools.k8s import build, cluster
from tools.progress import StepFailed


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing: no tools, no binaries, no state, and another user than root."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cluster, "_path", lambda: str(tmp_path))
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(cluster, "STATE", tmp_path / "cache" / "state")
    monkeypatch.setattr(command, "STATE", tmp_path / "cache" / "state")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return tmp_path


def test_everything_that_is_missing_is_named_at_once(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["up"]) == command.EXIT_NOT_HERE
    said = capsys.readouterr().err
    assert said.startswith("error: no Kubernetes can run here: ")
    for part in ("only root may", "containerd, ctr, runc", "apt-get install", "Go 1.25 or newer is missing"):
        assert part in said
    assert not (elsewhere / "cache").exists(), "nothing must be built where no cluster can run"


def test_arguments_of_the_tests_go_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[list[str]] = []

    def test(rest: list[str]) -> int:
        passed.append(rest)
        return 0

    monkeypatch.setattr(command, "_test", test)
    assert command.main(["test", "-k", "drained or lost", "-x"]) == 0
    assert passed == [["-k", "drained or lost", "-x"]]
    with pytest.raises(SystemExit):
        command.main(["up", "-x"])


def test_only_root_removes_a_cluster(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["down"]) == command.EXIT_NOT_HERE
    assert "only root may" in capsys.readouterr().err


def test_the_status_of_no_cluster(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["status"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("no cluster; its programs are not built yet\n")
    assert "only root may" in said


def test_an_old_go_is_told(elsewhere: Path) -> None:
    go = elsewhere / "go"
    go.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    go.chmod(0o755)
    assert "go1.19.8" in str(build.problem())
    go.write_text("#!/bin/sh\necho go version go1.26.1 linux/amd64\n")
    assert build.problem() is None


def test_other_sources_are_other_binaries(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.place()
    sources = elsewhere / "programs"
    sources.mkdir()
    for file in build.PROGRAMS.rglob("go.*"):
        (sources / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(build, "PROGRAMS", sources)
    after = build.place()
    assert after != before
    (sources / "go.mod").write_text((sources / "go.mod").read_text().replace("v1.34.2", "v1.34.1"))
    assert build.place() not in (before, after)


def test_a_build_that_fails_leaves_no_binaries(elsewhere: Path) -> None:
    with pytest.raises(StepFailed, match=r"Go 1\.25 or newer"):
        build.ensure()
    assert not build.is_built()


def test_the_versions_are_pinned() -> None:
    assert build.version_of("k8s.io/kubernetes").startswith("v1.")
    assert build.version_of("go.etcd.io/etcd/server/v3").startswith("v3.")


def test_the_image_of_one_program(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"a program")
    cluster._make_image(program, tmp_path / "pause.tar", cluster.PAUSE_IMAGE)
    with tarfile.open(tmp_path / "pause.tar") as image:
        names = image.getnames()
        manifest = image.extractfile("manifest.json")
        assert manifest is not None
        (described,) = json.load(manifest)
    assert described["RepoTags"] == [cluster.PAUSE_IMAGE]
    assert {described["Config"], *described["Layers"]} < set(names)


@pytest.mark.parametrize(("version", "file", "shares"), [(1, "cpu.shares", "4096"), (2, "cpu.weight", "400")])
def test_the_pods_of_a_node_get_more_cpu_time_than_one_other_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, file: str, shares: str
) -> None:
    monkeypatch.setattr(cluster, "_CGROUPS", tmp_path)
    root = tmp_path if version == 2 else tmp_path / "cpu"
    own = root / f"{cluster.NAME}-n1"
    own.mkdir(parents=True)
    (root / "cgroup.procs").touch()
    if version == 2:
        (root / "cgroup.controllers").write_text("cpu memory")
    (own / file).write_text("the normal share")
    cluster._make_cgroups("n1")
    assert (own / file).read_text() == shares
