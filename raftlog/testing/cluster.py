"""A cluster of server processes as a context manager."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from raftlog._admin import Admin
from raftlog._core.words import counted
from raftlog.errors import InvalidConfig, RaftlogError, UnknownTopicOrPartition
from raftlog.testing.certificates import CertificateAuthority
from raftlog.testing.keywords import ServerKeywords
from raftlog.testing.layout import USERS_FILE, Layout, check_size, default_controllers, open_layout, write_users
from raftlog.testing.proxy import Network
from raftlog.testing.server_process import ConfigValue, ServerFailed, ServerProcess

T = TypeVar("T")

KAFKA_PORT_OFFSET = 100
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.02
_APPEARS_S = 5.0
"""How long `Cluster.leader` waits for a topic that is not there."""


class Cluster:
    """Real server processes on loopback, each with its own data; they never outlive this process.

    On Linux they are forked from processes that have imported the server already, so that only the first cluster waits
    for imports. With `RAFTLOG_SERVER_START=exec` in the environment, each server is a program of its own instead, as
    in production: for measurements, and for tools that go by command lines.

    Args:
        nodes: number of servers, with ids from 1. Each is a broker.
        controllers: number of servers with a vote in the metadata quorum, the first ones: 1, 3 or 5. None: 3 above 5
            nodes, otherwise the largest odd number.
        dedicated_controllers: the controllers are not brokers.
        directory: the directory of configurations, logs and data. It is kept: a later cluster of the same size in this
            directory continues it. None: a temporary directory, created at the first start and deleted at the end.
            Only one cluster at a time may run in a directory.
        port: the client port of the first broker; the others take the next ports. 0 picks free ports. A server keeps
            its port over restarts.
        can_be_partitioned: servers reach each other through proxies in this process, for `partition`.
        tls: clients and servers use TLS, with certificates of a CA for this cluster; clients use `client_config`. Needs
            the package `cryptography`.
        users: names and passwords of users that may log in; implies `tls`. Servers read them from a file
            (`sasl.users.location`), so they exist from the start; more can be added as in any cluster. Their
            permissions depend on `authorizer` and `super.users` in `config`.
        kafka: servers also listen for Kafka clients, see `kafka_bootstrap`; with `port`, at ports higher by 100. `tls`
            and `users` apply to this listener too.
        racks: racks of servers, by id (`{1: "a", 2: "b"}`); other servers have none.
        start_timeout_s: how long servers may take to become ready; those that recover logs may take longer, until they
            make no progress for ten minutes.
        config: server keys as in the configuration file (`{"log.segment.bytes": 1048576}`).
        **more_config: the same with underscores (`log_segment_bytes=1048576`).

    Raises:
        InvalidConfig: no such cluster is possible, or a keyword is neither a parameter nor a server key. At the start:
            the directory has a cluster of another size, or the extra `raftlog[server]` is not installed.
        ServerFailed: at the start: a server did not become ready, or another cluster runs in the directory.
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
        kafka: bool = False,
        racks: Mapping[int, str] | None = None,
        start_timeout_s: float = 60.0,
        config: Mapping[str, ConfigValue] | None = None,
        **more_config: Unpack[ServerKeywords],
    ) -> None:
        _check_keywords(more_config)
        self._controllers = default_controllers(nodes) if controllers is None else controllers
        check_size(nodes, self._controllers, dedicated_controllers)
        self._dedicated_controllers = dedicated_controllers
        self._can_be_partitioned = can_be_partitioned
        self._tls = tls or bool(users)
        self._users = dict(users or {})
        self._racks = dict(racks or {})
        self._kafka = kafka
        keywords: Mapping[str, Any] = more_config
        self._config = {**(config or {}), **{key.replace("_", "."): value for key, value in keywords.items()}}
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
                serves_kafka=kafka,
                outlives_cluster=not self._temporary,
            )
            for node_id in range(1, nodes + 1)
        }

    def __repr__(self) -> str:
        nodes = ", ".join(
            f"{node_id} {'running' if server.is_running else 'stopped'}" for node_id, server in self._servers.items()
        )
        return f"<Cluster in {self.directory}: nodes {nodes}; bootstrap {self.bootstrap or 'none yet'}>"

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
        """Stop every server, or kill it if it does not stop. Deletes a temporary directory."""
        with contextlib.suppress(ServerFailed):
            self.stop_all()
        for server in self._servers.values():
            if server.is_running:  # an earlier one did not stop cleanly
                server.kill()
            server.release()
        if self._network is not None:
            self._network.close()
            self._network = None
            self._layout = None
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    # Properties

    @property
    def bootstrap(self) -> str:
        """The addresses for clients (`host:port`, commas between) of all brokers that were started at least once."""
        ports = [self._servers[node_id].port for node_id in self.broker_ids]
        return ",".join(f"127.0.0.1:{port}" for port in ports if port)

    @property
    def kafka_bootstrap(self) -> str:
        """Addresses for Kafka clients (`bootstrap.servers`), as `host:port` with commas between; "" without `kafka`."""
        ports = [self._servers[node_id].kafka_port for node_id in self.broker_ids]
        return ",".join(f"127.0.0.1:{port}" for port in ports if port)

    @property
    def client_config(self) -> dict[str, str]:
        """The config that clients need besides `bootstrap`: pass `config=cluster.client_config`. Empty without TLS.

        With `users`, clients log in as the first one.
        """
        if self._users:
            return self.client_config_of(next(iter(self._users)))
        return self.authority.client_config() if self._tls else {}

    def client_config_of(self, user: str, password: str | None = None) -> dict[str, str]:
        """Return the config of a client of this user; the default password is the one in `users`.

        Raises:
            InvalidConfig: no password is given, and `users` does not have the user.
        """
        if password is None and user not in self._users:
            raise InvalidConfig(f"this cluster was not created with user {user!r}; give its password")
        return {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(self.authority.ca_file),
            "sasl.username": user,
            "sasl.password": self._users[user] if password is None else password,
        }

    @property
    def authority(self) -> CertificateAuthority:
        """The CA of the cluster, which can issue further certificates; created at the first access.

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
        """The ids of the servers with a vote in the metadata quorum."""
        return self.node_ids[: self._controllers]

    @property
    def broker_ids(self) -> list[int]:
        """The ids of the brokers."""
        return self.node_ids[self._controllers :] if self._dedicated_controllers else self.node_ids

    def pid(self, node_id: int) -> int:
        """Return the process id of a running server."""
        return self._server(node_id).pid

    def is_running(self, node_id: int) -> bool:
        """Return whether a server's process exists; that of a paused server does."""
        return self._server(node_id).is_running

    def log_dir(self, node_id: int) -> Path:
        """Return the directory with a server's data (its `log.dirs`)."""
        return self._server(node_id).data_directory

    def config_file(self, node_id: int) -> Path:
        """Return a server's configuration file, as of its last start."""
        return self._server(node_id).config_file

    def log_tail(self, node_id: int) -> str:
        """Return the last lines of a server's log since its last start."""
        return self._server(node_id).log_tail()

    def ending(self, node_id: int) -> str | None:
        """Return how a server ended: `with exit code 1`, `by SIGKILL`; None if it runs or never did."""
        return self._server(node_id).ending

    # Starting and stopping

    def start_all(self) -> None:
        """Start every server that does not run, in parallel, and wait until all are ready."""
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
        if failures:  # the error of a server that ended says more than that of one that waited for it
            raise min(failures, key=lambda failure: failure[0] is None or "SIGKILL" in failure[0])[1]

    def stop_all(self) -> None:
        """Stop all running servers cleanly (SIGTERM), in parallel; raise the first failure when all have ended."""
        stopping = [server for server in self._servers.values() if server.is_running]
        for server in stopping:
            with contextlib.suppress(ServerFailed):  # it has just ended by itself
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
        """Start a stopped server, with its data and port, and wait until it is ready.

        Without `wait` it returns at once; `start_all` or `wait_ready` can wait later. A server that needs others to
        become ready is started this way.
        """
        server = self._server(node_id)
        self._prepare()
        if wait:
            server.start(self._start_timeout_s)
        else:
            server.launch()

    def wait_ready(self, node_id: int) -> None:
        """Wait until a server is ready that was started without `wait`.

        Raises:
            ServerFailed: the server ended, or was not ready in time (`start_timeout_s` from now) and was killed.
        """
        self._server(node_id).wait_ready(time.monotonic() + self._start_timeout_s)

    def stop(self, node_id: int) -> None:
        """Stop a server cleanly (SIGTERM)."""
        self._server(node_id).stop(_STOP_TIMEOUT_S)

    def kill(self, node_id: int) -> None:
        """Kill a server (SIGKILL).

        Raises:
            ServerFailed: the server does not run.
        """
        self._server(node_id).kill()

    def configure(self, node_id: int, config: Mapping[str, ConfigValue]) -> None:
        """Set further keys of a server's configuration; they apply from its next start."""
        self._prepare()
        self._server(node_id).reconfigure(config)

    def pause(self, node_id: int) -> None:
        """Pause a server (SIGSTOP)."""
        self._server(node_id).pause()

    def resume(self, node_id: int) -> None:
        """Resume a paused server (SIGCONT)."""
        self._server(node_id).resume()

    def _prepare(self) -> None:
        """At the first start, create the directory and configure every server."""
        if self._layout is not None and self.directory.exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
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
            port = layout.client_ports.get(node_id, 0)
            server.configure(config, port, port + KAFKA_PORT_OFFSET if port and self._kafka else 0)
        self._layout = layout

    # The network between servers

    def partition(self, some: Iterable[int], others: Iterable[int], *, one_way: bool = False) -> None:
        """Cut the connections between `some` and `others`, for metadata and records; clients still reach all servers.

        With `one_way`, only bytes from `some` to `others` are held back; bytes in the other direction arrive. Servers
        on neither side reach all servers. Cuts add up until `heal`. With three servers:

            partition([1], [2, 3])                 1 is isolated, a minority
            partition([1], [2, 3], one_way=True)   1 receives everything, but nothing that it sends arrives
            partition([2, 3], [1], one_way=True)   1 receives nothing, but everything that it sends arrives
            partition([1], [2])                    1 and 2 do not reach each other, 3 reaches both
            partition([1], [2]); partition([2], [3]); partition([1], [3])    all are isolated

        Connections stay open but silent, as in a broken network; `heal` delivers the held bytes.

        Raises:
            InvalidConfig: the cluster was not created with `can_be_partitioned`, or has no such server.
        """
        sides = [[self._server(node_id).node_id for node_id in side] for side in (some, others)]
        self._cuttable().cut(*sides, one_way=one_way)

    def heal(self) -> None:
        """End all cuts; held bytes arrive late. Raises as `partition`."""
        self._cuttable().heal()

    def _cuttable(self) -> Network:
        if self._network is None:
            raise InvalidConfig(
                "the servers of this cluster reach each other directly; to cut them off, create it with Cluster(nodes, "
                "can_be_partitioned=True), and start it"
            )
        return self._network

    # Leaders

    def leader(self, topic: str, partition: int = 0, *, timeout_s: float = 60.0, other_than: int | None = None) -> int:
        """Wait until a running server (and not `other_than`) leads a partition, and return its id.

        Raises:
            ServerFailed: none leads it within `timeout_s`, or there is no such topic or partition.
        """
        gives_up_s = time.monotonic() + _APPEARS_S

        def ask(admin: Admin) -> int:
            try:
                found = admin.describe_topic(topic, timeout=timeout_s).partitions
            except UnknownTopicOrPartition as missing:
                if topic.startswith("__") or time.monotonic() < gives_up_s:  # a first client makes it, or just has
                    raise
                create = f"Admin(cluster.bootstrap).create_topic({topic!r})"
                raise LookupError(f"there is no topic {topic!r}; create it first: {create}") from missing
            if partition >= len(found):
                raise LookupError(
                    f"topic {topic!r} has no partition {partition}; it has {counted(len(found), 'partition')}"
                )
            return found[partition].leader

        try:
            return self._node(ask, f"leads {topic}-{partition}", timeout_s, other_than)
        except LookupError as error:
            raise ServerFailed(str(error)) from error

    def controller(self, *, timeout_s: float = 60.0, other_than: int | None = None) -> int:
        """Wait until a running server (and not `other_than`) is the active controller, and return its id."""

        def ask(admin: Admin) -> int:
            return admin.describe_cluster(linearizable=True, timeout=timeout_s).controller_id

        return self._node(ask, "is the active controller", timeout_s, other_than)

    def wait_for(self, condition: Callable[[Admin], T], *, timeout_s: float = 60.0, what: str = "that") -> T:
        """Call `condition` until its result is true, and return the result; SDK errors count as false.

        Raises:
            ServerFailed: the result was not true within `timeout_s`.
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
            raise InvalidConfig(f"no server {node_id}; this cluster has {', '.join(map(str, self._servers))}") from None


def _check_keywords(given: Iterable[str]) -> None:
    """Refuse a keyword that is neither a parameter of `Cluster` nor a key of servers.

    Raises:
        InvalidConfig: there is one; the message names the nearest valid keyword.
    """
    keys = ServerKeywords.__annotations__
    for name in given:
        if name not in keys:
            near = difflib.get_close_matches(name, [*inspect.signature(Cluster).parameters, *keys], n=1)
            raise InvalidConfig(
                f"{name!r} is neither a parameter of Cluster nor a server key"
                + (f"; did you mean {near[0]!r}?" if near else "; docs/configuration.md lists the server keys")
            )
