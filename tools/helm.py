"""Renders the chart's examples: `./dev chart`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.environment import ROOT
from tools.go_programs import HELM
from tools.progress import StepFailed

KUBERNETES: Final = "1.30.0"
"""The version to render for; the oldest that the chart supports is in Chart.yaml."""
CHART: Final = ROOT / "deploy" / "k8s" / "raftlog"
EXAMPLES: Final = ROOT / "deploy" / "k8s" / "examples"
MANIFESTS: Final = ROOT / "deploy" / "k8s" / "manifests"


def render(
    helm: Path, *arguments: str, release: str = "raftlog", chart: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `helm template` on the chart."""
    return subprocess.run(
        [
            *(str(helm), "template", release, str(chart or CHART), "--namespace", "raftlog"),
            *("--kube-version", KUBERNETES, "--skip-tests", *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Write deploy/k8s/manifests from the examples."""
    helm = HELM.find_or_build()
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
