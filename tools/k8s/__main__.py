"""`./dev k8s`: a real Kubernetes of three nodes on this machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tools.environment import ROOT
from tools.k8s import build
from tools.k8s.cluster import NODES, STATE, Cluster, NotHere, problems
from tools.progress import StepFailed

EXIT_NOT_HERE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 3 where this machine cannot run a Kubernetes."""
    parser = argparse.ArgumentParser(
        prog="./dev k8s",
        description="A real Kubernetes of three nodes on this machine, for root on Linux. Its programs are built from "
        f"Go modules once, and kept in {build.CACHE}.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="start it, and print how kubectl finds it")
    commands.add_parser("down", help="remove it with its volumes, also after a crash; the built programs stay")
    commands.add_parser("status", help="show its parts, nodes and pods")
    load = commands.add_parser("load", help="give an image of the local Docker engine to all nodes")
    load.add_argument("image", help="for example raftlog:dev")
    load.add_argument("name", nargs="?", help="the name on the nodes, for example raftlog:0.1.0")
    commands.add_parser(
        "test", help="run the tests on it, with arguments for pytest; a cluster that they start they also remove"
    )
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "test":
        parser.error(f"{options.command} does not take {' '.join(rest)}")
    cluster = Cluster()
    try:
        match options.command:
            case "up":
                cluster.up()
                print(f"export PATH={cluster.binaries}:$PATH KUBECONFIG={cluster.admin}")
            case "down":
                cluster.down()
            case "status":
                return _status(cluster)
            case "load":
                cluster.load(options.image, options.name)
            case _:
                return _test(rest)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_HERE if isinstance(error, NotHere) else 1
    return 0


def _status(cluster: Cluster) -> int:
    if not STATE.exists():
        lacking = problems()
        built = "its programs are built" if build.is_built() else "its programs are not built yet"
        print(f"no cluster; {built}" + "".join(f"\n  {each}" for each in lacking))
        return 1
    missing = cluster.missing()
    print(
        f"{len(NODES)} nodes, logs in {STATE / 'log'}; "
        + (f"not running: {', '.join(missing)}" if missing else "all runs")
    )
    print(cluster.kubectl("get", "nodes,pods", "--all-namespaces", "-o", "wide", check=False))
    return 1 if missing else 0


def _test(arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-rfEs", "-v", "--capture=no", "tests/live"]
    return subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
