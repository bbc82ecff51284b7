"""Programs that are found on the path, or else built once from their Go module, of a pinned version.

Run as a module, it makes sure of helm, without anything that `./dev setup` installs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.environment import ROOT
from tools.progress import StepFailed


@dataclass(frozen=True)
class GoProgram:
    """A program; `variable` is the environment variable that may name its path."""

    name: str
    package: str
    version: str
    variable: str

    @property
    def built(self) -> Path:
        """Where it is built."""
        return ROOT / "build" / self.name / self.version / self.name

    def find(self) -> Path | None:
        """Return its path: from the variable, from PATH, or built earlier; None without one."""
        named = os.environ.get(self.variable) or shutil.which(self.name)
        return Path(named) if named else self.built if self.built.exists() else None

    def find_or_build(self) -> Path:
        """Return its path; if there is none, build it, which takes some minutes.

        Raises:
            StepFailed: there is none and no Go to build it, or the build failed.
        """
        found = self.find()
        if found is not None:
            return found
        go = shutil.which("go")
        if go is None:
            raise StepFailed(
                f"{self.name} is missing: install it, set {self.variable} to its path, or install Go (1.24 or newer), "
                "which builds it here"
            )
        self.built.parent.mkdir(parents=True, exist_ok=True)
        with (self.built.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests on several workers ask for it at once
            if not self.built.exists():
                self._build(go)
        return self.built

    def _build(self, go: str) -> None:
        module = f"{self.package}@{self.version}"
        print(f"building {module}, once", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=self.built.parent) as place:
            # `go install` refuses modules with directives like `exclude`, as Compose's is.
            for command in (["mod", "init", "build"], ["get", module], ["build", "-o", self.name, self.package]):
                environment = {**os.environ, "GOFLAGS": "", "CGO_ENABLED": "0"}  # one file that runs in any container
                if subprocess.run([go, *command], cwd=place, env=environment, check=False).returncode:
                    raise StepFailed(f"go {' '.join(command)} failed; see above")
            (Path(place) / self.name).replace(self.built)


HELM: Final = GoProgram("helm", "helm.sh/helm/v3/cmd/helm", "v3.19.0", "HELM")
COMPOSE: Final = GoProgram("docker-compose", "github.com/docker/compose/v2/cmd", "v2.40.3", "DOCKER_COMPOSE")
"""Compose as a program of its own, not only as a plugin of docker."""


if __name__ == "__main__":
    try:
        HELM.find_or_build()
    except StepFailed as error:
        sys.exit(f"error: {error}")
