"""`raftlog up` and `raftlog server`, and how other commands use the server's packages."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer

from raftlog._delivery import Alarm
from raftlog._installed import dependent_command, missing_from, needs, server_command, server_environment
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BOOTSTRAP_VARIABLE,
    AskedToEnd,
    key_value_pairs,
    print_error,
    print_note,
)
from raftlog.errors import InvalidConfig
from raftlog.testing import Cluster, ServerFailed
from raftlog.testing.cluster import KAFKA_PORT_OFFSET

_HOST, _, _PORT = BOOTSTRAP_DEFAULT.rpartition(":")
_DEFAULT_PORT = int(_PORT)
CONSOLE_PORT: Final = 8080
REPLICAS: Final = 3
"""The most replicas of a topic of `raftlog up`, unless it is created with a number: one on each server, up to this."""
_FACTOR = "default.replication.factor"
_METRICS = "metrics.listener"
_LOOK_AFTER_S = 0.5
_TELL_EVERY_S = 5.0
_CONNECT_S = 0.2
_CLEANLY = "with exit code 0"
"""The ending of a server after SIGTERM."""

InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        metavar="",
        help="Allow listeners beyond loopback without TLS or users: every client may do everything.",
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A server key, which wins over every other source; may be repeated."
    ),
]


def up(
    nodes: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 1,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the data; without it the data is deleted at the end."),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of the first server, the others take the next ones; 0 picks free ports."
        ),
    ] = _DEFAULT_PORT,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of the first server's HTTP endpoint for metrics and probes, the others take the next ones; by "
            "default there is none.",
        ),
    ] = None,
    settings: SettingsOption = None,
    console_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="Port of the console, 0 for a free one; by default 8080, or a free one if that is taken.",
        ),
    ] = None,
    with_console: Annotated[
        bool | None,
        typer.Option(
            "--console/--no-console",
            show_default=False,
            help="Serve the console, a page to look at the cluster; the default where its packages are installed.",
        ),
    ] = None,
    insecure: InsecureOption = False,
) -> None:
    """Start a cluster on this machine; Ctrl-C stops it. With --data the next start brings the same cluster back.

    A topic has a replica on each server, three at most, unless its creator says otherwise.

    Example: raftlog up --nodes 3 --data ./my-data --metrics-port 9101 --set log.retention.ms=1d
    """
    package = missing_from("console")
    no_console = None if package is None else needs("the console", package, "console")
    if with_console and no_console is not None:
        raise InvalidConfig(no_console)
    if console_port and with_console is not False and no_console is None and (taken := _taken([console_port])):
        raise ServerFailed(f"another process listens at {taken}; choose another --console-port, or 0 for a free one")
    stop = Alarm()
    starting = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped = stop.is_set()
        stop.set()
        if starting and not stopped:  # no code checks `stop` during the start
            raise KeyboardInterrupt if number == signal.SIGINT else AskedToEnd(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup: stays ignored
            signal.signal(number, on_signal)
    if data is not None:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
    config: dict[str, str | bool] = {_FACTOR: str(min(nodes, REPLICAS)), **key_value_pairs(settings or [])}
    if insecure:
        config["insecure"] = True
    if _METRICS in config and (metrics_port is not None or nodes > 1):
        raise typer.BadParameter(
            f"{_METRICS} cannot be the same for every server; give --metrics-port instead of --set"
        )
    kafka_port = port + KAFKA_PORT_OFFSET
    ports = [*range(port, port + nodes), *range(kafka_port, kafka_port + nodes)] if port else []
    os.environ.setdefault("RAFTLOG_SERVER_START", "exec")  # `ps` then shows which server a process is
    with ExitStack() as stack:
        try:
            cluster = Cluster(nodes, directory=data, port=port, kafka="listeners" not in config, config=config)
            if metrics_port is not None:
                for at, node_id in enumerate(cluster.node_ids, start=metrics_port):
                    cluster.configure(node_id, {_METRICS: f"{_HOST}:{at}"})
                    ports.append(at)
            with _telling_what_takes_long(cluster):
                stack.enter_context(cluster)
        except AskedToEnd as asked:
            raise typer.Exit(asked.exit_code) from None
        except ServerFailed as failed:
            if "address already in use" in str(failed) and (taken := _taken(ports)):
                raise ServerFailed(
                    f"another process, perhaps another cluster, listens at {taken}; choose other ports with "
                    f"--port, 0 for free ones{'' if metrics_port is None else ', and with --metrics-port'}"
                ) from failed
            raise
        page = no_console if with_console is None else None
        if with_console is not False and no_console is None:
            page = f"Console: {stack.enter_context(_console_beside(cluster.bootstrap, console_port))}"
        starting = False
        _print_welcome(cluster, page, keeps_data=data is not None, metrics_port=metrics_port)
        watch = _Watch(cluster)
        while not stop.wait(_LOOK_AFTER_S):
            watch.look()
            if not watch.running:
                raise typer.Exit(1 if watch.failed else 0)
        print_note("stopping")
        watch.tell_still_running()


@contextmanager
def _telling_what_takes_long(cluster: Cluster) -> Iterator[None]:
    """Print, every five seconds within the block, the last log line of each server that runs and is not ready."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_TELL_EVERY_S):
            for node_id in cluster.node_ids:
                if not cluster.is_running(node_id) or _ready_file(cluster, node_id).exists():
                    continue
                if last := cluster.log_tail(node_id).rpartition("\n")[2]:
                    print_note(f"server {node_id} is not ready yet; its log ends with: {last}")

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _ready_file(cluster: Cluster, node_id: int) -> Path:
    """Return the file that a server has while it is ready."""
    return cluster.config_file(node_id).with_name("ready.json")


def _taken(ports: Iterable[int]) -> str:
    """Return the addresses that are taken, with commas between."""
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
    """The servers of a cluster: which run, which have ended, and which were started again by hand.

    runs -> ended    its process is gone
    ended -> again   a process listens at its port: raftlog server with its configuration, in another terminal
    again -> ended   no process listens there any more

    Attributes:
        failed: whether a server ended with an error.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.failed = False
        self._cluster = cluster
        self._addresses = dict(zip(cluster.node_ids, cluster.bootstrap.split(","), strict=True))
        self._ended: set[int] = set()
        self._again: set[int] = set()

    @property
    def running(self) -> int:
        """How many servers run, those started by hand included."""
        return len(self._addresses) - len(self._ended) + len(self._again)

    def look(self) -> None:
        """Check all servers, and print what has changed."""
        before = (len(self._ended), len(self._again))
        gone = [node_id for node_id in self._addresses if node_id not in self._ended]
        gone = [node_id for node_id in gone if not self._cluster.is_running(node_id)]
        for node_id in sorted(self._ended):
            listens = _listens(self._addresses[node_id])
            if listens and node_id not in self._again:
                self._again.add(node_id)
                print_note(f"server {node_id} runs again; it was started by hand")
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
        _ready_file(cluster, node_id).unlink(missing_ok=True)
        if cluster.ending(node_id) == _CLEANLY:
            print_note(f"server {node_id} has stopped")
        else:
            self.failed = True
            print_note(cluster.log_tail(node_id))
            print_error(f"server {node_id} has ended {cluster.ending(node_id)}; above is the end of its log")
        if self.running:
            again = f"raftlog server --config {shlex.quote(str(cluster.config_file(node_id)))}"
            print_note(f"to start it again, in another terminal: {again}")

    def tell_still_running(self) -> None:
        """Print which servers this command does not stop, as they were started by hand."""
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


@contextmanager
def _console_beside(bootstrap: str, port: int | None) -> Iterator[str]:
    """Serve a console from a process of its own within the block, at the address that the block gets.

    `port`: None: 8080, or a free one if that is taken. The address answers some moments later.
    """
    chosen = port or _free(CONSOLE_PORT if port is None else 0)
    command = dependent_command("raftlog", "console", "--port", str(chosen), "--bootstrap", bootstrap)
    with subprocess.Popen(  # in a process group of its own, so that Ctrl-C reaches only the process that ends it
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
    ) as process:
        try:
            yield f"http://127.0.0.1:{chosen}/"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _free(port: int) -> int:
    """Return this port of the loopback address, or another one if it is taken."""
    for each in (port, 0):
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", each))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return port


def _print_welcome(cluster: Cluster, page: str | None, *, keeps_data: bool, metrics_port: int | None) -> None:
    address = cluster.bootstrap
    fate = "stays there" if keeps_data else "is deleted at the end (keep it with --data DIR)"
    print(f"raftlog is up at {address}, data in {cluster.directory} {fate}")
    if cluster.kafka_bootstrap:
        print(f"Kafka clients: {cluster.kafka_bootstrap}")
    if len(cluster.node_ids) > 1:
        print(f"{len(cluster.node_ids)} servers, {len(cluster.controller_ids)} of them controllers")
    if page is not None:
        print(page)
    if metrics_port is not None:
        last = metrics_port + len(cluster.node_ids) - 1
        others = "" if last == metrics_port else f", the others at the next ports up to {last}"
        print(f"metrics at http://{_HOST}:{metrics_port}/metrics{others}")
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
            help="TOML file with server keys; keys that it lacks come from RAFTLOG_* variables.",
        ),
    ] = None,
    settings: SettingsOption = None,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server writes it when it is ready: JSON with its address.")
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
    # Ctrl-C stays pending until the server can handle it: during its imports Python would print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execve(command[0], command, server_environment())


def ask_server_packages(code: str, *arguments: str) -> Any:
    """Run Python code in a process with the server's packages, and return the JSON that it prints.

    Raises:
        InvalidConfig: it failed; the message is what it printed on stderr.
    """
    command = [sys.executable, "-P", "-c", code, *arguments]
    asked = subprocess.run(command, env=server_environment(), capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        told = asked.stderr.strip()
        raise InvalidConfig(told.splitlines()[-1] if told.startswith("Traceback") else told)
    return json.loads(asked.stdout)
