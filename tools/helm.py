"""Finds `helm`, or builds it with Go, and renders the chart's examples: `./dev chart`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.environment import ROOT
from tools.progress import StepFailed

VERSION: Final = "v3.19.0"
MODULE: Final = f"helm.sh/helm/v3/cmd/helm@{VERSION}"
KUBERNETES: Final = "1.30.0"
"""The version to render for; the oldest that the chart supports is in Chart.yaml."""
CHART: Final = ROOT / "deploy" / "k8s" / "raftlog"
EXAMPLES: Final = ROOT / "deploy" / "k8s" / "examples"
MANIFESTS: Final = ROOT / "deploy" / "k8s" / "manifests"
BUILT: Final = ROOT / "build" / "helm" / VERSION / "helm"


def find() -> Path | None:
    """Return the path of helm: from HELM, from PATH, or built earlier; None without one."""
    named = os.environ.get("HELM") or shutil.which("helm")
    return Path(named) if named else BUILT if BUILT.exists() else None


def find_or_build() -> Path:
    """Return the path of helm; if there is none, build it, which takes some minutes.

    Raises:
        StepFailed: there is no helm, and no Go to build it, or the build failed.
    """
    found = find()
    if found is not None:
        return found
    go = shutil.which("go")
    if go is None:
        raise StepFailed(
            "helm is missing: install it, set HELM to its path, or install Go (1.24 or newer) to build it here"
        )
    print(f"building {MODULE}, once", file=sys.stderr, flush=True)
    built = subprocess.run(
        [go, "install", MODULE], env={**os.environ, "GOBIN": str(BUILT.parent), "GOFLAGS": ""}, check=False
    )
    if built.returncode:
        raise StepFailed(f"go install {MODULE} failed; see above")
    return BUILT


def render(helm: Path, *arguments: str, release: str = "raftlog") -> subprocess.CompletedProcess[str]:
    """Run `helm template` on the chart."""
    return subprocess.run(
        [
            *(str(helm), "template", release, str(CHART), "--namespace", "raftlog"),
            *("--kube-version", KUBERNETES, "--skip-tests", *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Write deploy/k8s/manifests from the examples."""
    helm = find_or_build()
    for example in sorted(EXAMPLES.glob("*.yaml")):
        done = render(helm, "--values", str(example))
        if done.returncode:
            raise StepFailed(f"{example.name}: {done.stderr.strip()}")
        (MANIFESTS / example.name).write_text(done.stdout)
        print(f"deploy/k8s/manifests/{example.name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StepFailed as error:
        sys.exit(f"error: {error}")
