"""A cluster of server processes as a context manager."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from raftlog._admin import Admin
from raftlog.errors import InvalidConfig, RaftlogError
from raftlog.testing.certificates import CertificateAuthority
from raftlog.testing.layout import USERS_FILE, Layout, check_size, default_controllers, open_layout, write_users
from raftlog.testing.proxy import Network
from raftlog.testing.server_process import ConfigValue, ServerFailed, ServerProcess

T = TypeVar("T")

_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Cluster:
    """Real server processes on loopback, each with its own data; they end with this process at the latest.

    Args:
        nodes: how many servers, numbered from 1. Each is a broker.
        controllers: how many of them, the first ones, have a vote in the metadata quorum: 1, 3 or 5. None: all, as far
            as that makes a quorum; 3 where there are more than 5 nodes.
        dedicated_controllers: the controllers are no brokers.
        directory: where configurations, logs and data go; it stays, and a cluster of as many nodes that is made there
            later is the same one. None: a temporary directory, made by the first start, that goes. One cluster at a
            time may run in a directory.
        port: of the first broker, the others' follow; 0 picks free ones. A server keeps its port over restarts.
        can_be_partitioned: servers reach each other through proxies of this process, so that `partition` works.
        tls: clients and servers speak TLS, with certificates of a CA that is made for this cluster; clients take
            `client_config`. Needs the package `cryptography`.
        users: who may log in, by name, and the passwords; implies `tls`. Servers have them in a file of their own
            (`sasl.users.location`), so that they are there from the start; others can be added as in any cluster.
            What they may do is up to `authorizer` and `super.users` in `config`.
        racks: where servers stand, by id (`{1: "a", 2: "b"}`); the others stand nowhere.
        start_timeout_s: how long servers may take until they serve.
        config: server keys as the configuration file has them (`{"log.segment.bytes": 1048576}`).
        **more_config: the same with underscores (`log_segment_bytes=1048576`).

    Raises:
        InvalidConfig: there is no such cluster, or the directory has one of another size (when it starts).
        ServerFailed: a server did not come up, or another cluster runs in the directory (`start`, or entering the
            context).
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        controllers: int | None = None,
        dedicated_controllers: bool = False,
        directory: str | Path | None = None,
        port: int = 0,
        can_be_partitioned: bool = False,
        tls: bool = False,
        users: Mapping[str, str] | None = None,
        racks: Mapping[int, str] | None = None,
        start_timeout_s: float = 60.0,
        config: Mapping[str, ConfigValue] | None = None,
        **more_config: ConfigValue,
    ) -> None:
        self._controllers = default_controllers(nodes) if controllers is None else controllers
        check_size(nodes, self._controllers, dedicated_controllers)
        self._dedicated_controllers = dedicated_controllers
        self._can_be_partitioned = can_be_partitioned
        self._tls = tls or bool(users)
        self._users = dict(users or {})
        self._racks = dict(racks or {})
        self._config = {**(config or {}), **{key.replace("_", "."): value for key, value in more_config.items()}}
        self._temporary = directory is None
        temporary = Path(tempfile.gettempdir()) / f"raftlog-{secrets.token_hex(8)}"
        self.directory = (temporary if directory is None else Path(directory)).resolve()
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._layout: Layout | None = None
        self._network: Network | None = None
        self._servers = {
            node_id: ServerProcess(
                node_id,
                self.directory / f"node-{node_id}",
                self._config,
                serves_clients=not dedicated_controllers or node_id > self._controllers,
            )
            for node_id in range(1, nodes + 1)
        }

    def __enter__(self) -> Cluster:
        try:
            self.start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop every server; one that does not stop by itself is killed. Deletes a temporary directory."""
        with contextlib.suppress(ServerFailed):
            self.stop_all()
        for server in self._servers.values():
            if server.is_running:  # the one before it did not stop cleanly
                server.kill()
            server.release()
        if self._network is not None:
            self._network.close()
            self._network = None
            self._layout = None
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    # What is there

    @property
    def bootstrap(self) -> str:
        """Addresses for clients, as `host:port` with commas between."""
        return ",".join(f"127.0.0.1:{self._servers[node_id].port}" for node_id in self.broker_ids)

    @property
    def client_config(self) -> dict[str, str]:
        """What clients are told besides `bootstrap`, as `config=cluster.client_config`; empty without TLS.

        With `users` the first one logs in.
        """
        if self._users:
            return self.client_config_of(next(iter(self._users)))
        return self.authority.client_config() if self._tls else {}

    def client_config_of(self, user: str, password: str | None = None) -> dict[str, str]:
        """Return what a client of this user is told besides `bootstrap`; without a password as `users` has it.

        Raises:
            InvalidConfig: it is none of `users`, and has no password here.
        """
        if password is None and user not in self._users:
            raise InvalidConfig(f"user {user!r} is not among the users of this cluster; give its password")
        return {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(self.authority.ca_file),
            "sasl.username": user,
            "sasl.password": self._users[user] if password is None else password,
        }

    @property
    def authority(self) -> CertificateAuthority:
        """The CA of the cluster's certificates, which issues further ones; made when it is first asked for.

        Raises:
            InvalidConfig: the package `cryptography` is missing.
        """
        return CertificateAuthority(self.directory / "tls")

    @property
    def node_ids(self) -> list[int]:
        """The ids of all servers, running or not."""
        return list(self._servers)

    @property
    def controller_ids(self) -> list[int]:
        """The ids of the servers that have a vote in the metadata quorum."""
        return self.node_ids[: self._controllers]

    @property
    def broker_ids(self) -> list[int]:
        """The ids of the servers that serve clients."""
        return self.node_ids[self._controllers :] if self._dedicated_controllers else self.node_ids

    def pid(self, node_id: int) -> int:
        """Return the process id of a running server."""
        return self._server(node_id).pid

    def is_running(self, node_id: int) -> bool:
        """Whether a server's process is there; a paused one is."""
        return self._server(node_id).is_running

    def log_dir(self, node_id: int) -> Path:
        """Return the directory with a server's data (its `log.dirs`)."""
        return self._server(node_id).data_directory

    def config_file(self, node_id: int) -> Path:
        """Return a server's configuration file, as it was started with last."""
        return self._server(node_id).config_file

    def log_tail(self, node_id: int) -> str:
        """Return the last lines that a server logged since it was started last."""
        return self._server(node_id).log_tail()

    def ending(self, node_id: int) -> str | None:
        """Return how a server ended, `with exit code 1` or `by SIGKILL`; None for one that runs or never did."""
        return self._server(node_id).ending

    # Starting and stopping

    def start_all(self) -> None:
        """Start every server that does not run, all at once, and return when all are ready."""
        self._prepare()
        waiting = list(self._servers.values())
        for server in waiting:
            if not server.is_running:
                server.launch()
        deadline_s = time.monotonic() + self._start_timeout_s
        failures = []
        for server in waiting:
            try:
                server.wait_ready(deadline_s)
            except ServerFailed as failure:
                failures.append((server.ending, failure))
        if failures:  # one that ended says more than one that waited for it
            raise min(failures, key=lambda failure: failure[0] is None or "SIGKILL" in failure[0])[1]

    def stop_all(self) -> None:
        """Stop every server that runs, all at once, cleanly (SIGTERM); raises the first failure when all have ended."""
        stopping = [server for server in self._servers.values() if server.is_running]
        for server in stopping:
            with contextlib.suppress(ServerFailed):  # it ended by itself just now
                server.terminate()
        failures = []
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for server in stopping:
            try:
                server.wait_stopped(max(0.1, deadline_s - time.monotonic()))
            except ServerFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def start(self, node_id: int, *, wait: bool = True) -> None:
        """Start a server that is stopped and return when it serves; its data and its port are those it had.

        Without `wait` it returns at once: one that needs others to serve comes up with them, and `start_all` waits, or
        `wait_ready`.
        """
        server = self._server(node_id)
        self._prepare()
        if wait:
            server.start(self._start_timeout_s)
        else:
            server.launch()

    def wait_ready(self, node_id: int) -> None:
        """Return when a server serves that was started without waiting for it.

        Raises:
            ServerFailed: it ended, or does not serve within `start_timeout_s` from now, and was killed.
        """
        self._server(node_id).wait_ready(time.monotonic() + self._start_timeout_s)

    def stop(self, node_id: int) -> None:
        """Stop a server cleanly (SIGTERM)."""
        self._server(node_id).stop(_STOP_TIMEOUT_S)

    def kill(self, node_id: int) -> None:
        """Kill a server (SIGKILL).

        Raises:
            ServerFailed: it does not run.
        """
        self._server(node_id).kill()

    def configure(self, node_id: int, config: Mapping[str, ConfigValue]) -> None:
        """Set keys of a server's configuration over those that it has; they count when it is started next."""
        self._prepare()
        self._server(node_id).reconfigure(config)

    def pause(self, node_id: int) -> None:
        """Freeze a server (SIGSTOP)."""
        self._server(node_id).pause()

    def resume(self, node_id: int) -> None:
        """Let a frozen server go on (SIGCONT)."""
        self._server(node_id).resume()

    def _prepare(self) -> None:
        """Make the directory, and give every server its place in the cluster, at the first start."""
        if self._layout is not None and self.directory.exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700 if self._temporary else 0o777)
        layout = open_layout(
            self.directory, len(self._servers), self._controllers, self._dedicated_controllers, self._port
        )
        if self._can_be_partitioned and layout.inter_node_ports:
            self._network = Network(self._servers, layout.all_inter_node_ports)
        for node_id, server in self._servers.items():
            reached_at = self._network.ports[node_id] if self._network is not None else {}
            config: dict[str, ConfigValue] = {**layout.config(node_id, reached_at)}
            if self._tls:
                config |= self.authority.node_config(node_id)
            if self._users:
                config |= {
                    "listener.security.protocol": "sasl_ssl",
                    "sasl.users.location": str(write_users(self.directory / USERS_FILE, self._users)),
                }
            config |= self._config
            if node_id in self._racks:
                config["rack"] = self._racks[node_id]
            server.configure(config, layout.client_ports.get(node_id, 0))
        self._layout = layout

    # The network between servers

    def partition(self, some: Iterable[int], others: Iterable[int], *, one_way: bool = False) -> None:
        """Let nothing pass between these servers and those, metadata and records; clients reach all of them still.

        In both directions, or with `one_way` only what `some` send is held and what `others` send arrives: they hear
        of those that do not hear them. Servers that stand on neither side reach all, and cuts add up until `heal`. Of
        three servers:

            partition([1], [2, 3])                 1 is alone, a minority
            partition([1], [2, 3], one_way=True)   nobody hears 1, which hears everybody
            partition([2, 3], [1], one_way=True)   1 hears nobody, and everybody hears it
            partition([1], [2])                    1 and 2 do not reach one another, 3 is the bridge between them
            partition([1], [2]); partition([2], [3]); partition([1], [3])    everybody is alone

        Connections stay open and silent, as with a broken network; `heal` lets go on what was held.

        Raises:
            InvalidConfig: the cluster was not made with `can_be_partitioned`, or has no such server.
        """
        sides = [[self._server(node_id).node_id for node_id in side] for side in (some, others)]
        self._cuttable().cut(*sides, one_way=one_way)

    def heal(self) -> None:
        """Let everything pass again; what was sent meanwhile arrives late. Raises as `partition`."""
        self._cuttable().heal()

    def _cuttable(self) -> Network:
        if self._network is None:
            raise InvalidConfig(
                "the servers of this cluster reach each other directly; make it with Cluster(nodes, "
                "can_be_partitioned=True), and start it, to cut them off from one another"
            )
        return self._network

    # Who leads

    def leader(self, topic: str, partition: int = 0, *, timeout_s: float = 60.0, other_than: int | None = None) -> int:
        """Return the server that leads a partition, as soon as one does that runs (and is not `other_than`)."""

        def ask(admin: Admin) -> int:
            return admin.describe_topic(topic, timeout=timeout_s).partitions[partition].leader

        return self._node(ask, f"leads {topic}-{partition}", timeout_s, other_than)

    def controller(self, *, timeout_s: float = 60.0, other_than: int | None = None) -> int:
        """Return the server that is the active controller, as soon as one is that runs (and is not `other_than`)."""

        def ask(admin: Admin) -> int:
            return admin.describe_cluster(linearizable=True, timeout=timeout_s).controller_id

        return self._node(ask, "is the active controller", timeout_s, other_than)

    def wait_for(self, condition: Callable[[Admin], T], *, timeout_s: float = 60.0, what: str = "that") -> T:
        """Return what `condition` does as soon as that is true; it may raise errors of the SDK until then.

        Raises:
            ServerFailed: it was not true in time.
        """
        deadline_s = time.monotonic() + timeout_s
        seen: object = None
        settings = {"default.api.timeout.ms": int(timeout_s * 1000), **self.client_config}
        with Admin(self.bootstrap, config=settings) as admin:
            while True:
                try:
                    seen = found = condition(admin)
                    if found:
                        return found
                except RaftlogError as error:
                    seen = error
                if time.monotonic() >= deadline_s:
                    raise ServerFailed(f"{what} did not come true within {timeout_s:g} s; the last was {seen!r}")
                time.sleep(_POLL_S)

    def _node(self, ask: Callable[[Admin], int], what: str, timeout_s: float, other_than: int | None) -> int:
        def live(admin: Admin) -> list[int]:
            node_id = ask(admin)
            return [node_id] if node_id != other_than and node_id in self._servers and self.is_running(node_id) else []

        return self.wait_for(live, timeout_s=timeout_s, what=f"some server {what}:")[0]

    def _server(self, node_id: int) -> ServerProcess:
        try:
            return self._servers[node_id]
        except KeyError:
            raise InvalidConfig(
                f"there is no server {node_id}; this cluster has {', '.join(map(str, self._servers))}"
            ) from None
