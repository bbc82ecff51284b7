"""The programs of the cluster, built from Go modules once and cached by their source.

`programs/go.mod` pins the versions. The cache is `~/.cache/raftlog-dev/k8s/`, one directory for each state of
`programs/`; a build takes about ten minutes of CPU time and 2.4 GB of memory, and 210 MB of disk are kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tools.go_programs import GoProgram
from tools.progress import Progress, StepFailed, run_logged

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raftlog-dev" / "k8s"
PROGRAMS: Final = Path(__file__).parent / "programs"
COMPONENTS: Final = ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubelet")
POLICIES: Final = GoProgram(
    "kube-network-policies", "sigs.k8s.io/kube-network-policies/cmd", "v0.8.0", "KUBE_NETWORK_POLICIES"
)
"""Built separately, and only if policies are to be enforced: its client of Kubernetes is an older one."""
OLDEST_GO: Final = (1, 25)
_GOGC: Final = os.environ.get("GOGC", "400")
"""The compiler's garbage collection target (GOGC): with Go's default the build takes longer, but less memory."""
_PLUGINS: Final = "github.com/containernetworking/plugins/plugins"
_PACKAGES: Final = {
    "kube": "./kube",
    "coredns": "./coredns",
    "pause": "./pause",
    "etcd": "go.etcd.io/etcd/server/v3",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "cni/bridge": f"{_PLUGINS}/main/bridge",
    "cni/loopback": f"{_PLUGINS}/main/loopback",
    "cni/host-local": f"{_PLUGINS}/ipam/host-local",
}


def version_of(module: str) -> str:
    """Return the version of a module that go.mod pins."""
    found = re.search(rf"^\s+{re.escape(module)} (v\S+)", (PROGRAMS / "go.mod").read_text(), re.MULTILINE)
    assert found, f"go.mod has no version of {module}"
    return found[1]


def place() -> Path:
    """Return the directory of the binaries of this source, whether they are built or not."""
    state = hashlib.sha256()
    for file in sorted(each for each in PROGRAMS.rglob("*") if each.is_file()):
        data = file.read_bytes()
        state.update(f"{file.relative_to(PROGRAMS)}\0{len(data)}\0".encode() + data)
    return CACHE / state.hexdigest()[:16]


def is_built() -> bool:
    """Whether the binaries of this source are in the cache."""
    return place().exists()


def problem() -> str | None:
    """Return why nothing can be built here, or None."""
    go = shutil.which("go")
    asked = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout if go else ""
    found = re.search(r"go(\d+)\.(\d+)", asked)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_GO:
        wanted = ".".join(map(str, OLDEST_GO))
        return f"Go {wanted} or newer is missing ({asked.strip() or 'no go on the path'}); it builds Kubernetes, once"
    return None


def ensure() -> Path:
    """Return the directory of the binaries; build them if they are missing.

    Raises:
        StepFailed: there is no Go, or the build failed.
    """
    if is_built():
        return place()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built():
            _build()
    return place()


def _build() -> None:
    missing = problem()
    if missing is not None:
        raise StepFailed(missing)
    version = version_of("k8s.io/kubernetes")
    major, minor = version.removeprefix("v").split(".")[:2]
    stamped = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    flags = ["-s", "-w"] + [f"-X k8s.io/component-base/version.{name}={value}" for name, value in stamped.items()]
    with (
        Progress("k8s") as progress,
        tempfile.TemporaryDirectory(prefix="building-", dir=CACHE) as directory,
    ):
        for name, package in _PACKAGES.items():
            progress.say(f"building {name} of Kubernetes {version}, once; the first takes ten minutes of CPU time")
            settings = ["CGO_ENABLED=0", "GOFLAGS=-trimpath -mod=readonly -buildvcs=false", f"GOGC={_GOGC}"]
            output = Path(directory) / name
            run_logged(
                progress,
                ["env", *settings, "nice", "go", "build", "-o", str(output), "-ldflags", " ".join(flags), package],
                log=CACHE / "build.log",
                cwd=PROGRAMS,
            )
        for component in COMPONENTS:
            (Path(directory) / component).symlink_to("kube")
        Path(directory).chmod(0o755)
        shutil.copytree(directory, place().with_suffix(".new"), symlinks=True)
    place().with_suffix(".new").rename(place())
