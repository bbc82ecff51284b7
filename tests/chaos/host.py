"""The tools that the tests need on this machine, and access to a container's network from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import docker

from tools.docker import engine_problem

_COMMANDS: Final = {
    "nsenter": "util-linux",
    "iptables": "iptables",
    "tc": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "gcc": "gcc",
}
_AUTOGROUP: Final = Path("/proc/sys/kernel/sched_autogroup_enabled")
_SHARES_BESIDE_SESSIONS: Final = 1024
"""Linux can make a group of each session (`sched(7)`, autogroup), which weighs 1024 in all. All clients, and Spark, are
in one session."""
_SHARES_BESIDE_THREADS: Final = 4096
"""Without these groups, each single thread weighs 1024."""


def missing() -> str | None:
    """Return why containers cannot be tormented here; None where they can."""
    if sys.platform != "linux":
        return "the tests reach containers at their own addresses, which needs Linux"
    problem = engine_problem()
    if problem is not None:
        return problem
    if not os.environ.get("DOCKER_HOST", "unix://").startswith("unix://"):
        return "the Docker engine runs on another machine (DOCKER_HOST)"
    if os.geteuid() != 0:
        return "faults need root: iptables and tc in a container's network, loop devices"
    for command, package in _COMMANDS.items():
        if shutil.which(command) is None:
            return f"the command {command} is missing (Debian: apt-get install {package})"
    return None


def share_of_processors() -> dict[str, object]:
    """Return what gives each container as much of a busy core as all clients together have, or as a few threads.

    Docker puts all containers into one group, and that group weighs no more than one single thread beside it.
    """
    if docker.from_env().info()["CgroupDriver"] != "cgroupfs":  # with systemd's, groups are arranged by systemd
        return {}
    grouped = _AUTOGROUP.exists() and _AUTOGROUP.read_text().strip() == "1"
    return {"cgroup_parent": "/", "cpu_shares": _SHARES_BESIDE_SESSIONS if grouped else _SHARES_BESIDE_THREADS}


def run(*command: str, check: bool = True) -> str:
    """Run a command and return what it printed.

    Raises:
        AssertionError: it failed, and `check`.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr or done.stdout}"
    return done.stdout


def in_network(pid: int, *command: str, check: bool = True) -> str:
    """Run a command of this machine's in the network of a container's process. Raises as `run`."""
    return run("nsenter", "--target", str(pid), "--net", "--", *command, check=check)
