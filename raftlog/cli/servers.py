"""`raftlog up` and `raftlog server`."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from raftlog._server_root import server_command, server_environment
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BOOTSTRAP_VARIABLE, key_value_pairs, print_error, print_note
from raftlog.cli.signals import AskedToEnd, StopFlag
from raftlog.testing import Cluster, ServerFailed

_HOST, _, _PORT = BOOTSTRAP_DEFAULT.rpartition(":")
_DEFAULT_PORT = int(_PORT)
_LOOK_AFTER_S = 0.5
_CONNECT_S = 0.2
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
    stop = StopFlag()
    starting = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped = stop.is_set()
        stop.set()
        if starting and not stopped:  # nothing looks at the event meanwhile
            raise KeyboardInterrupt if number == signal.SIGINT else AskedToEnd(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, on_signal)
    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
    config: dict[str, str | bool] = {**key_value_pairs(settings or [])}
    if insecure:
        config["insecure"] = True
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(nodes, directory=data, port=port, config=config))
        except AskedToEnd as asked:
            raise typer.Exit(asked.exit_code) from None
        except ServerFailed as failed:
            if "cannot listen on" in str(failed) and (taken := _taken(range(port, port + nodes) if port else ())):
                raise ServerFailed(
                    f"somebody else listens at {taken}, another cluster perhaps; choose other ports with --port, "
                    "0 for free ones"
                ) from failed
            raise
        starting = False
        _print_welcome(cluster, keeps_data=data is not None)
        watch = _Watch(cluster)
        while not stop.wait(_LOOK_AFTER_S):
            watch.look()
            if not watch.running:
                raise typer.Exit(1 if watch.failed else 0)
        print_note("stopping")
        watch.tell_who_runs_on()


def _taken(ports: Iterable[int]) -> str:
    """Return the addresses that nobody can listen at now, with commas between."""
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
                probe.listen()
            except OSError:
                found.append(f"{_HOST}:{port}")
    return ", ".join(found)


class _Watch:
    """The servers of a cluster: who runs, who has ended, and who was started again by hand.

    runs -> ended    its process is gone
    ended -> again   somebody listens at its port: raftlog server with its configuration, in another terminal
    again -> ended   nobody does any more

    Attributes:
        running: how many serve, by whomever they were started.
        failed: whether one ended that nobody had asked to.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.failed = False
        self._cluster = cluster
        self._addresses = dict(zip(cluster.node_ids, cluster.bootstrap.split(","), strict=True))
        self._ended: set[int] = set()
        self._again: set[int] = set()

    @property
    def running(self) -> int:
        """How many serve."""
        return len(self._addresses) - len(self._ended) + len(self._again)

    def look(self) -> None:
        """Say what has changed."""
        before = (len(self._ended), len(self._again))
        gone = [node_id for node_id in self._addresses if node_id not in self._ended]
        gone = [node_id for node_id in gone if not self._cluster.is_running(node_id)]
        for node_id in sorted(self._ended):
            listens = _listens(self._addresses[node_id])
            if listens and node_id not in self._again:
                self._again.add(node_id)
                print_note(f"server {node_id} runs again, started by hand")
            elif not listens and node_id in self._again:
                self._again.discard(node_id)
                print_note(f"server {node_id} has ended again")
        for node_id in gone:
            self._ended.add(node_id)
            self._tell_end(node_id)
        if self.running and (len(self._ended), len(self._again)) != before:
            total = len(self._addresses)
            print_note(
                f"all {total} servers run" if self.running == total else f"{self.running} of {total} servers run on"
            )

    def _tell_end(self, node_id: int) -> None:
        cluster = self._cluster
        cluster.config_file(node_id).with_name("ready.json").unlink(missing_ok=True)
        if cluster.ending(node_id) == _CLEANLY:
            print_note(f"server {node_id} has stopped")
        else:
            self.failed = True
            print_note(cluster.log_tail(node_id))
            print_error(f"server {node_id} has ended {cluster.ending(node_id)}; above is the end of its log")
        if self.running:
            again = f"raftlog server --config {shlex.quote(str(cluster.config_file(node_id)))}"
            print_note(f"to start it again, in another terminal: {again}")

    def tell_who_runs_on(self) -> None:
        """Say which servers do not stop with this command."""
        if self._again:
            one = len(self._again) == 1
            print_note(
                f"server{'' if one else 's'} {', '.join(map(str, sorted(self._again)))} run{'s' if one else ''} on, "
                f"started by hand: stop {'it' if one else 'them'} in {'its' if one else 'their'} terminal"
            )


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S):
            return True
    except OSError:
        return False


def _print_welcome(cluster: Cluster, *, keeps_data: bool) -> None:
    address = cluster.bootstrap
    fate = "stays there" if keeps_data else "is deleted at the end (keep it with --data DIR)"
    print(f"raftlog is up at {address}, data in {cluster.directory} {fate}")
    if len(cluster.node_ids) > 1:
        print(f"{len(cluster.node_ids)} servers, {len(cluster.controller_ids)} of them controllers")
    if address != BOOTSTRAP_DEFAULT:
        print(f"\n  export {BOOTSTRAP_VARIABLE}={address}")
    print("\nTry in another terminal:\n")
    replicas = min(3, len(cluster.broker_ids))
    print(f"  raftlog topic create events --partitions 3{f' --replication-factor {replicas}' * (replicas > 1)}")
    print("  echo hello | raftlog produce events")
    print("  raftlog consume events --from-beginning")
    print("\nCtrl-C stops it.", flush=True)


def server(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="TOML file with server keys; what it lacks comes from RAFTLOG_* variables.",
        ),
    ] = None,
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
    arguments = [] if config is None else ["--config", str(config)]
    for setting in settings or []:
        arguments += ["--set", setting]
    if ready_file is not None:
        arguments += ["--ready-file", str(ready_file)]
    if insecure:
        arguments.append("--insecure")
    command = server_command(*arguments)
    sys.stdout.flush()
    os.execve(command[0], command, server_environment())
