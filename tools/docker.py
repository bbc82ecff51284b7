"""The container image: `./dev image [--base IMAGE] [--previous]`. Tests take theirs from here as well.

An image is tagged with a digest of all that it is made of, and built only when there is none with that tag; the newest
one is also `raftlog:dev`. The base is what the Dockerfile names, if the engine has it or a registry gives it; else one
is made of Debian's packages (tools/docker_base.py), and as a build reaches no package index then either, the wheels
that the locks name are downloaded beforehand (build/wheels).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools import docker_base
from tools.progress import Progress, StepFailed, run_logged

ROOT: Final = Path(__file__).resolve().parent.parent
HERE: Final = Path("deploy/docker")
PREVIOUS_RELEASE: Final = "e8d6b4ebcabcdfef82493a267e00c385d722d78a"
"""What is upgraded from: the commit of the release before this one."""
REPOSITORY: Final = "raftlog"
_WHEELS: Final = Path("build/wheels")
_LOCKS: Final = (HERE / "requirements.lock", HERE / "requirements-build.lock")
EXIT_NOT_HERE: Final = 3
_ANSWER_S: Final = 20.0
_PULL_S: Final = 180.0


class NoEngine(StepFailed):
    """Nothing runs containers here."""


@dataclass(frozen=True)
class Image:
    """An image that the engine has: its tag, and where what is in it comes from."""

    tag: str
    origin: str


def engine_problem() -> str | None:
    """Return why no container can be run here, and what to do; None where one can."""
    docker = shutil.which("docker")
    if docker is None:
        return "the command docker is missing; install Docker (on Debian, as root: apt-get install docker.io iptables)"
    try:
        asked = subprocess.run(
            [docker, "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the Docker engine did not answer within {_ANSWER_S:g} s"
    if asked.returncode != 0 or not asked.stdout.strip():
        reason = asked.stderr.strip().splitlines()
        return (
            f"no Docker engine answers ({reason[0] if reason else 'no reason given'}); start one (as root: dockerd), "
            "or set DOCKER_HOST to one"
        )
    return None


def ensure_image(base: str | None = None) -> Image:
    """Return the image of this checkout, built now if there is none of its content.

    Raises:
        StepFailed: it cannot be built; the message says what to do.
    """
    with _one_at_a_time(), Progress("image") as progress:
        return _ensure(ROOT, "this checkout", _base(base, progress), progress)


def ensure_previous_image(base: str | None = None) -> Image:
    """Return the image of the release before; of this checkout with a lower version, where a clone lacks that.

    Raises:
        StepFailed: as `ensure_image`.
    """
    with _one_at_a_time(), Progress("image") as progress, tempfile.TemporaryDirectory(prefix="raftlog-") as directory:
        tree = Path(directory)
        has_it = _git("cat-file", "-e", f"{PREVIOUS_RELEASE}^{{commit}}") is not None
        if has_it:
            archive = subprocess.run(["git", "archive", PREVIOUS_RELEASE], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
            origin = f"commit {PREVIOUS_RELEASE[:8]}"
        else:
            for name in _sources(ROOT):
                _copy(ROOT / name, tree / name)
            _lower_version(tree)
            origin = f"this checkout under a lower version, as the clone lacks commit {PREVIOUS_RELEASE[:8]}"
        _copy(ROOT / HERE, tree / HERE)
        _copy(ROOT / ".dockerignore", tree / ".dockerignore")
        return _ensure(tree, origin, _base(base, progress), progress)


def _ensure(tree: Path, origin: str, base: str, progress: Progress) -> Image:
    docker = _docker()
    tag = f"{REPOSITORY}:{_digest(tree, base)[:16]}"
    progress.say(f"{tag}, {origin}, on {base}")
    if not _has(tag):
        if base.startswith(f"{docker_base.REPOSITORY}:"):
            _fetch_wheels(base, progress)
            if tree != ROOT:
                shutil.copytree(ROOT / _WHEELS, tree / _WHEELS, copy_function=os.link, dirs_exist_ok=True)
        environment = dict(os.environ)
        if subprocess.run([docker, "buildx", "version"], capture_output=True, check=False).returncode != 0:
            environment["DOCKER_BUILDKIT"] = "0"  # which needs a plug-in of the client
        version = re.findall(r'^version = "(.*)"$', (tree / "pyproject.toml").read_text(), re.MULTILINE)[0]
        revision = (_git("rev-parse", "HEAD") or "").strip() or "unknown"
        progress.say(f"{tag}: building")
        arguments = {"BASE": base, "VERSION": version, "REVISION": revision if tree == ROOT else PREVIOUS_RELEASE}
        command = [docker, "build", "--file", str(tree / HERE / "Dockerfile"), "--tag", tag]
        command += [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        run_logged(
            progress,
            ["env", f"DOCKER_BUILDKIT={environment.get('DOCKER_BUILDKIT', '1')}", *command, str(tree)],
            log=_build_directory() / "image.log",
            cwd=ROOT,
        )
    if tree == ROOT:
        subprocess.run([docker, "tag", tag, f"{REPOSITORY}:dev"], check=True)
    return Image(tag, origin)


def _base(wanted: str | None, progress: Progress) -> str:
    """Return the base image: the one asked for, the Dockerfile's own, or one made here."""
    if wanted is not None:
        return wanted
    default = re.findall(r"^ARG BASE=(\S+)$", (ROOT / HERE / "Dockerfile").read_text(), re.MULTILINE)[0]
    if _has(default):
        return str(default)
    progress.say(f"base image: looking for {default}")
    try:
        pulled = subprocess.run([_docker(), "pull", default], capture_output=True, timeout=_PULL_S, check=False)
        if pulled.returncode == 0:
            return str(default)
    except subprocess.TimeoutExpired:
        pass
    return docker_base.ensure(progress, _docker())


def _fetch_wheels(base: str, progress: Progress) -> None:
    """Fill build/wheels with what the locks name, for the interpreter that runs this."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = subprocess.run(
        [_docker(), "run", "--rm", "--network", "none", base, "python3", "-c",
         "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.stdout.strip() != own:
        raise docker_base.NoBaseImage(
            f"{base} has Python {asked.stdout.strip() or '?'} {asked.stderr.strip()} and .venv has {own}: wheels that "
            "are downloaded here do not fit there; make .venv with that Python, or name another image with --base"
        )
    wheels, stamp = ROOT / _WHEELS, _build_directory() / "wheels.stamp"
    wanted = hashlib.sha256(b"".join((ROOT / lock).read_bytes() for lock in _LOCKS) + own.encode()).hexdigest()
    if wheels.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    progress.say(f"{_WHEELS}: what {' and '.join(lock.name for lock in _LOCKS)} name")
    for lock in _LOCKS:
        run_logged(
            progress,
            [sys.executable, "-P", "-m", "pip", "--no-input", "download", "--require-hashes", "--no-deps",
             "--no-build-isolation", "--dest", str(wheels), "--requirement", str(ROOT / lock)],
            log=_build_directory() / "image.log", cwd=ROOT,
        )  # fmt: skip
    stamp.write_text(wanted)


def _digest(tree: Path, base: str) -> str:
    """Return a digest of the base and of every file that goes into the image."""
    state = hashlib.sha256(_base_id(base).encode())
    for name in _sources(tree):
        path = tree / name
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts:
                data = file.read_bytes()
                state.update(f"{file.relative_to(tree)}\0{len(data)}\0{file.stat().st_mode & 0o111}\0".encode() + data)
    return state.hexdigest()


def _sources(tree: Path) -> list[str]:
    """Return what .dockerignore lets into a build, but for the wheels: these follow from the locks."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line[1:] for line in lines if line.startswith("!") and Path(line[1:]) != _WHEELS]


def _lower_version(tree: Path) -> None:
    for name, pattern in (
        ("pyproject.toml", r'^(version = ").*(")$'),
        ("raftlog/__init__.py", r'^(__version__ = ").*(")$'),
    ):
        path = tree / name
        path.write_text(re.sub(pattern, r"\g<1>0.0.1\g<2>", path.read_text(), flags=re.MULTILINE))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)


def _docker() -> str:
    problem = engine_problem()
    if problem is not None:
        raise NoEngine(problem)
    return str(shutil.which("docker"))


def _has(image: str) -> bool:
    return subprocess.run([_docker(), "image", "inspect", image], capture_output=True, check=False).returncode == 0


def _base_id(base: str) -> str:
    asked = subprocess.run(
        [_docker(), "image", "inspect", "--format", "{{.Id}}", base], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or base  # one that the build will pull


def _git(*arguments: str) -> str | None:
    """Return what git prints, or None where it refuses, or is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _build_directory() -> Path:
    directory = ROOT / "build"
    directory.mkdir(exist_ok=True)
    return directory


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with (_build_directory() / "image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what is missing; print the tag, and nothing else on stdout.

    Returns the exit code: 1 when it cannot be built, 3 when that is for want of an engine or a base image.
    """
    parser = argparse.ArgumentParser(prog="./dev image", description="Build the container image of this checkout.")
    parser.add_argument("--base", metavar="IMAGE", help="what to build on, instead of the Dockerfile's default")
    parser.add_argument("--previous", action="store_true", help="build the release before this one, to upgrade from")
    options = parser.parse_args(arguments)
    try:
        image = (ensure_previous_image if options.previous else ensure_image)(options.base)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_HERE if isinstance(error, docker_base.NoBaseImage | NoEngine) else 1
    print(image.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
