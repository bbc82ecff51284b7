"""The container image: `./dev image [--base IMAGE] [--previous]`; tests use it too.

The tag of an image is a digest of its content, and an image is built only if that tag does not exist; the newest one is
also `raftlog:dev`. The base is the one of the Dockerfile, if the engine has it or a registry serves it.

Otherwise a base is made of Debian's packages, for machines that reach a Debian mirror but no registry. The packages are
downloaded with `apt-get download` and unpacked but not configured, because an interpreter, a shell and their libraries
need only the few files that are written here. That takes seconds and needs no root; `debootstrap` takes a minute or
two. Such a build reaches no package index either, so the wheels of the lock files are downloaded first (build/wheels).
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

from tools.progress import Progress, StepFailed, run_logged

BASE_REPOSITORY: Final = "raftlog-base"
_RECIPE: Final = 2
"""Incremented with every change of the recipe, so that an older base is not reused."""
_WANTED: Final = ("base-files", "libc-bin", "dash", "coreutils", "tini", "python3", "python3-venv", "libstdc++6")
_UNCONFIGURED: Final = re.compile(
    r"(c?debconf|dpkg|perl.*|libperl.*|libfile-find-rule-perl|libnumber-compare-perl|libtext-.*|gawk|mawk|original-awk"
    r"|usrmerge|usr-is-merged|install-info|debianutils|init-system-helpers|libdebian-installer.*|libnewt.*|libslang.*)$"
)
"""Packages that only configure others, or are one of several alternatives."""
_MERGED: Final = ("bin", "sbin", "lib", "lib64")
_FILES: Final = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


class NoBaseImage(StepFailed):
    """No registry serves a base image, and this machine cannot make one; the checkout is not at fault."""


def ensure_base(progress: Progress, docker: str) -> str:
    """Return the tag of a base image with Python, made now unless one exists with the packages' current versions.

    Raises:
        NoBaseImage: this system is not Debian, or its mirror is unreachable.
    """
    for command in ("apt-cache", "apt-get", "dpkg-deb", "tar"):
        if shutil.which(command) is None:
            raise NoBaseImage(
                f"no registry is reachable, and making a base image of Debian's packages needs {command}, which is "
                "missing; name an image with Python 3.11 or newer that this engine has: ./dev image --base IMAGE"
            )
    progress.say("base image: listing its packages")
    files = _files_of(_closure())
    key = hashlib.sha256(repr((_RECIPE, _FILES, sorted(files))).encode()).hexdigest()[:12]
    tag = f"{BASE_REPOSITORY}:{key}"
    if subprocess.run([docker, "image", "inspect", tag], capture_output=True, check=False).returncode == 0:
        return tag
    progress.say(f"base image {tag} of {len(files)} Debian packages, as no registry is reachable")
    with tempfile.TemporaryDirectory(prefix="raftlog-base-") as directory:
        _build_base(Path(directory), [name for name, _ in files], progress)
        _import(Path(directory) / "root", docker, tag)
    return tag


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoBaseImage(
            f"{' '.join(command[:3])} ... failed: {(done.stderr or done.stdout).strip()[-600:]}\n"
            "If the package lists are missing or old: apt-get update"
        )
    return done.stdout


def _closure() -> list[str]:
    """Return the wanted packages with all their dependencies."""
    leave_out = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    output = _run("apt-cache", "depends", "--recurse", *leave_out, *_WANTED)
    names = {line for line in output.splitlines() if re.match(r"[a-z0-9]", line)}
    return sorted(name for name in names if not _UNCONFIGURED.match(name) and ":" not in name)


def _files_of(names: list[str]) -> list[tuple[str, str]]:
    """Return package=version and the hash of each; virtual packages are skipped."""
    policy = _run("apt-cache", "show", "--no-all-versions", *names)
    found = []
    for block in policy.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|SHA256): (\S+)$", block, re.MULTILINE))
        if fields.keys() >= {"Package", "Version", "SHA256"} and fields["Package"] in names:
            found.append((f"{fields['Package']}={fields['Version']}", fields["SHA256"]))
    return sorted(set(found))


def _build_base(directory: Path, packages: list[str], progress: Progress) -> None:
    archives, root = directory / "archives", directory / "root"
    archives.mkdir()
    root.mkdir()
    # apt changes to its own user, which has to write here.
    directory.chmod(0o755)
    archives.chmod(0o777)
    progress.detail("downloading packages")
    _run("apt-get", "download", *packages, cwd=archives)
    for name in _MERGED:  # Debian's merged /usr: packages still ship files in both places
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for archive in sorted(archives.glob("*.deb")):
        progress.detail(f"unpacking {archive.name}")
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as unpacked:
            subprocess.run(
                ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", root],
                stdin=unpacked.stdout,
                check=True,
            )
        if unpacked.returncode != 0:
            raise StepFailed(f"{archive.name} cannot be unpacked")
    for name, text in _FILES.items():
        (root / name).write_text(text)
    (root / "tmp").chmod(0o1777)
    for unwanted in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"):
        shutil.rmtree(root / unwanted, ignore_errors=True)


def _import(root: Path, docker: str, tag: str) -> None:
    with subprocess.Popen(
        ["tar", "-c", "--owner=0", "--group=0", "--numeric-owner", "-C", root, "."], stdout=subprocess.PIPE
    ) as packed:
        done = subprocess.run(
            [docker, "import", "--change", "ENV PATH=/usr/local/bin:/usr/bin:/bin", "-", tag],
            stdin=packed.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if packed.returncode != 0 or done.returncode != 0:
        raise StepFailed(f"docker import failed: {done.stderr.strip()}")


ROOT: Final = Path(__file__).resolve().parent.parent
HERE: Final = Path("deploy/docker")
PREVIOUS_RELEASE: Final = "e8d6b4ebcabcdfef82493a267e00c385d722d78a"
"""The commit of the previous release, from which tests upgrade."""
REPOSITORY: Final = "raftlog"
_WHEELS: Final = Path("build/wheels")
_LOCKS: Final = (HERE / "requirements.lock", HERE / "requirements-build.lock")
EXIT_NOT_HERE: Final = 3
_ANSWER_S: Final = 20.0
_PULL_S: Final = 180.0


class NoEngine(StepFailed):
    """This machine has no container engine."""


@dataclass(frozen=True)
class Image:
    """An image in the engine: its tag, and the origin of its content."""

    tag: str
    origin: str


def engine_problem() -> str | None:
    """Return why this machine cannot run containers, and what to do; None if it can."""
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
    """Return the image of this checkout, built now if it does not exist.

    Raises:
        StepFailed: it cannot be built; the message says what to do.
    """
    with _one_at_a_time(), Progress("image") as progress:
        return _ensure(ROOT, "this checkout", _base(base, progress), progress)


def ensure_previous_image(base: str | None = None) -> Image:
    """Return the image of the previous release; if the clone lacks its commit, of this checkout with a lower version.

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
        if base.startswith(f"{BASE_REPOSITORY}:"):
            _fetch_wheels(base, progress)
            if tree != ROOT:
                shutil.copytree(ROOT / _WHEELS, tree / _WHEELS, copy_function=os.link, dirs_exist_ok=True)
        environment = dict(os.environ)
        if subprocess.run([docker, "buildx", "version"], capture_output=True, check=False).returncode != 0:
            environment["DOCKER_BUILDKIT"] = "0"  # BuildKit needs a plug-in of the client
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
    """Return the base image: the wanted one, that of the Dockerfile, or one made here."""
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
    return ensure_base(progress, _docker())


def _fetch_wheels(base: str, progress: Progress) -> None:
    """Download the wheels of the lock files to build/wheels, for this interpreter."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = subprocess.run(
        [_docker(), "run", "--rm", "--network", "none", base, "python3", "-c",
         "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.stdout.strip() != own:
        raise NoBaseImage(
            f"{base} has Python {asked.stdout.strip() or '?'} {asked.stderr.strip()} and .venv has {own}, so wheels "
            "for .venv do not fit; make .venv with that Python, or name another image with --base"
        )
    wheels, stamp = ROOT / _WHEELS, _build_directory() / "wheels.stamp"
    wanted = hashlib.sha256(b"".join((ROOT / lock).read_bytes() for lock in _LOCKS) + own.encode()).hexdigest()
    if wheels.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    progress.say(f"{_WHEELS}: downloading {' and '.join(lock.name for lock in _LOCKS)}")
    for lock in _LOCKS:
        run_logged(
            progress,
            [sys.executable, "-P", "-m", "pip", "--no-input", "download", "--require-hashes", "--no-deps",
             "--no-build-isolation", "--dest", str(wheels), "--requirement", str(ROOT / lock)],
            log=_build_directory() / "image.log", cwd=ROOT,
        )  # fmt: skip
    stamp.write_text(wanted)


def _digest(tree: Path, base: str) -> str:
    """Return a digest of the base and of every file in the image."""
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
    """Return the paths that .dockerignore admits to a build, without the wheels, which follow from the lock files."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line[1:] for line in lines if line.startswith("!") and Path(line[1:]) != _WHEELS]


def _lower_version(tree: Path) -> None:
    for name, pattern in (
        ("pyproject.toml", r'^(version = ").*(")$'),
        ("raftlog/types.py", r'^(VERSION: Final = ").*(")$'),
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
    return asked.stdout.strip() or base  # the build will pull it


def _git(*arguments: str) -> str | None:
    """Return the output of git, or None if it fails or is missing."""
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
    """Build the image if it is missing; print its tag, and nothing else on stdout.

    Returns the exit code: 1 if the build fails, 3 if the machine lacks an engine or a base image.
    """
    parser = argparse.ArgumentParser(prog="./dev image", description="Build the container image of this checkout.")
    parser.add_argument("--base", metavar="IMAGE", help="what to build on, instead of the Dockerfile's default")
    parser.add_argument("--previous", action="store_true", help="build the release before this one, to upgrade from")
    options = parser.parse_args(arguments)
    try:
        image = (ensure_previous_image if options.previous else ensure_image)(options.base)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_HERE if isinstance(error, NoBaseImage | NoEngine) else 1
    print(image.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
