"""`raftlog up` and `raftlog server`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from raftlog._server_root import server_command, server_environment
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BOOTSTRAP_VARIABLE, key_value_pairs, print_error, print_note
from raftlog.testing import Cluster

_DEFAULT_PORT = int(BOOTSTRAP_DEFAULT.rpartition(":")[2])
_LOOK_AFTER_S = 0.5
_CLEANLY = "with exit code 0"
"""How a server ends that somebody asked to stop, with SIGTERM."""

InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure", metavar="", help="Allow a listener beyond loopback, where anyone who reaches it may do all."
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A server key, over any other source; may be repeated."),
]


def up(
    nodes: Annotated[int, typer.Option(min=1, help="How many servers.")] = 1,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the data is kept; without it, it is deleted at the end."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the first server, the others follow; 0 picks free ones.")
    ] = _DEFAULT_PORT,
    settings: SettingsOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Start a cluster on this machine; Ctrl-C stops it. With --data it is the same cluster again the next time.

    Example: raftlog up --nodes 3 --data ./my-data --set log.retention.ms=1d
    """
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, on_signal)
    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
    config: dict[str, str | bool] = {**key_value_pairs(settings or [])}
    if insecure:
        config["insecure"] = True
    with Cluster(nodes, directory=data, port=port, config=config) as cluster:
        _print_welcome(cluster, keeps_data=data is not None)
        ended: set[int] = set()
        told = 0
        failed = False
        while not stop.wait(_LOOK_AFTER_S):
            for node_id in cluster.node_ids:
                if node_id not in ended and not cluster.is_running(node_id):
                    ended.add(node_id)
                    cluster.config_file(node_id).with_name("ready.json").unlink(missing_ok=True)
                    if cluster.ending(node_id) == _CLEANLY:
                        print_note(f"server {node_id} has stopped")
                    else:
                        failed = True
                        print_note(cluster.log_tail(node_id))
                        print_error(
                            f"server {node_id} has ended {cluster.ending(node_id)}; above is the end of its log"
                        )
                    if len(ended) < nodes:
                        again = f"raftlog server --config {shlex.quote(str(cluster.config_file(node_id)))}"
                        print_note(f"to start it again, in another terminal: {again}")
            if len(ended) == nodes:
                raise typer.Exit(1 if failed else 0)
            if ended and len(ended) > told:
                told = len(ended)
                print_note(f"{nodes - told} of {nodes} servers run on")
        print_note("stopping")


def _print_welcome(cluster: Cluster, *, keeps_data: bool) -> None:
    address = cluster.bootstrap
    fate = "stays there" if keeps_data else "is deleted at the end (keep it with --data DIR)"
    print(f"raftlog is up at {address}, data in {cluster.directory} {fate}")
    if len(cluster.node_ids) > 1:
        print(f"{len(cluster.node_ids)} servers, {len(cluster.controller_ids)} of them controllers")
    if address != BOOTSTRAP_DEFAULT:
        print(f"\n  export {BOOTSTRAP_VARIABLE}={address}")
    print("\nTry in another terminal:\n")
    print("  raftlog topic create events --partitions 3")
    print("  echo hello | raftlog produce events")
    print("  raftlog consume events --from-beginning")
    print("\nCtrl-C stops it.", flush=True)


def server(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="TOML file with server keys.")
    ],
    settings: SettingsOption = None,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Written when the server is ready: JSON with its address.")
    ] = None,
    insecure: InsecureOption = False,
) -> None:
    """Run one server in this process; SIGTERM stops it cleanly.

    `raftlog config server-keys` lists what the configuration file may hold.

    Example: raftlog server --config /etc/raftlog/server.toml
    """
    arguments = ["--config", str(config)]
    for setting in settings or []:
        arguments += ["--set", setting]
    if ready_file is not None:
        arguments += ["--ready-file", str(ready_file)]
    if insecure:
        arguments.append("--insecure")
    command = server_command(*arguments)
    sys.stdout.flush()
    os.execve(command[0], command, server_environment())
