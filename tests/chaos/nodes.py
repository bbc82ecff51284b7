"""A cluster of containers, each node with an address of its own that clients on this machine reach as well."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import psutil
from docker import version as docker_sdk
from docker.types import EndpointConfig
from testcontainers.core.container import DockerContainer

from raftlog import Admin
from raftlog.errors import RaftlogError
from tests.chaos.clocks import MOUNTED_AT, Clocks
from tests.chaos.disks import Disk
from tests.chaos.host import share_of_processors
from tests.chaos.network import ChaosNetwork

T = TypeVar("T")
DATA: Final = "/var/lib/raftlog"
CLIENT_PORT: Final = 9092
INTER_NODE_PORT: Final = 9093
CONFIG: Final = {
    "replica.lag.time.max.ms": "2000",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
}
"""A follower that hears nothing leaves the ISR within the time that failover may take; internal topics are small."""
_READY_S: Final = 180.0
_STOP_S: Final = 120
_POLL_S: Final = 0.05


class Node:
    """One container after the other with the same address, disk and clock."""

    def __init__(self, node_id: int, roles: str, nodes: NodeSet, image: str, directory: Path) -> None:
        self.node_id = node_id
        self.roles = roles
        self.image = image
        self.address = nodes.network.address(node_id)
        self.disk = Disk(directory)
        self._nodes = nodes
        self._logs = directory / "server.log"
        self._container: DockerContainer | None = None

    @property
    def bootstrap(self) -> str:
        """Where clients reach it."""
        return f"{self.address}:{CLIENT_PORT}"

    @property
    def is_broker(self) -> bool:
        """Whether it serves clients."""
        return "broker" in self.roles

    @property
    def docker(self) -> Any:
        """The container, as the Docker SDK has it, with its present state."""
        assert self._container is not None, f"node {self.node_id} is used before its container was created"
        wrapped = self._container.get_wrapped_container()
        wrapped.reload()
        return wrapped

    @property
    def is_running(self) -> bool:
        """Whether its process is there; a paused one is."""
        return bool(self.docker.attrs["State"]["Running"])

    @property
    def pid(self) -> int:
        """The container's first process, as this machine numbers it."""
        pid = int(self.docker.attrs["State"]["Pid"])
        assert pid, f"node {self.node_id} is not running"
        return pid

    @property
    def server_pid(self) -> int:
        """The server's process: the first one, or what its init started."""
        first = psutil.Process(self.pid)
        return next((child.pid for child in first.children(recursive=True)), first.pid)

    def launch(self) -> None:
        """Create the container of `image`, and start it; returns before the node is ready."""
        container = DockerContainer(self.image, env=self._nodes.clocks.variables(self.node_id))
        container.with_command(self._command())
        container.with_volume_mapping(str(self.disk.path), DATA, "rw")
        container.with_volume_mapping(str(self._nodes.clocks.directory), MOUNTED_AT, "ro")
        container.with_network(self._nodes.network.network)
        endpoint = EndpointConfig(docker_sdk.__version__, ipv4_address=self.address)
        container.with_kwargs(
            networking_config={self._nodes.network.name: endpoint}, read_only=True, **self._nodes.share_of_processors
        )
        self._container = container.start()

    def _command(self) -> list[str]:
        voters = ",".join(
            f"{each}@{self._nodes.network.address(each)}:{INTER_NODE_PORT}" for each in self._nodes.voters
        )
        keys = {
            "node.id": str(self.node_id),
            "cluster.id": self._nodes.cluster_id,
            "process.roles": self.roles,
            "controller.quorum.voters": voters,
            "metadata.log.dir": f"{DATA}/metadata",
            **self._nodes.config,
        }
        if self.is_broker:
            keys |= {"log.dirs": f"{DATA}/logs", "listeners": self.bootstrap}
        if "controller" not in self.roles:
            keys["inter.node.listener"] = f"{self.address}:{INTER_NODE_PORT}"
            del keys["metadata.log.dir"]
        if self.is_broker and self.node_id in self._nodes.racks:
            keys["rack"] = self._nodes.racks[self.node_id]
        settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        return ["server", "--config", "/dev/null", "--insecure", *settings]

    def start(self) -> None:
        """Start the container again that was stopped or killed."""
        self.docker.start()

    def stop(self) -> None:
        """Stop the server cleanly (SIGTERM), and see that it was."""
        self.docker.stop(timeout=_STOP_S)
        code = self.docker.attrs["State"]["ExitCode"]
        assert code == 0, f"node {self.node_id} ended with exit code {code}:\n{self.log_tail()}"

    def replace(self, image: str) -> None:
        """Another image on the same data, for a node that is stopped."""
        self._keep_logs()
        assert self._container is not None
        self._container.stop()
        self.image = image
        self.launch()

    def log(self) -> str:
        """Return everything that it has logged."""
        earlier = self._logs.read_text() if self._logs.exists() else ""
        return earlier + bytes(self.docker.logs()).decode(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def _keep_logs(self) -> None:
        self._logs.write_text(self.log())

    def close(self) -> None:
        """Remove the container and the disk; the log stays."""
        if self._container is not None:
            self._keep_logs()
            self._container.stop()
        self.disk.close()


class NodeSet:
    """A cluster. Three nodes that are both controller and broker, or three of each.

    Args:
        image: what the nodes run.
        directory: where disks, clocks and logs go.
        dedicated: 3 controllers (1 to 3) and 3 brokers (4 to 6), instead of 3 nodes that are both.
    """

    def __init__(self, image: str, directory: Path, *, dedicated: bool = False) -> None:
        self.cluster_id = str(uuid.uuid4())
        self.voters = (1, 2, 3)
        self.racks = {5: "b", 6: "c"} if dedicated else {2: "b", 3: "c"}
        self.config = CONFIG
        self.clocks = Clocks(directory / "clocks")
        self.network = ChaosNetwork()
        roles = dict.fromkeys(self.voters, "controller" if dedicated else "broker,controller")
        roles |= dict.fromkeys((4, 5, 6) if dedicated else (), "broker")
        self.nodes = {each: Node(each, role, self, image, directory / f"node-{each}") for each, role in roles.items()}
        self.share_of_processors = share_of_processors()
        self._admin: Admin | None = None

    def __enter__(self) -> NodeSet:
        try:
            self.each(Node.launch)
            self.wait_ready()
        except BaseException as error:
            error.add_note(self.logs())
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything."""
        if self._admin is not None:
            self._admin.close()
        self.each(Node.close)
        self.network.close()

    def each(self, what: Callable[[Node], object], nodes: Iterable[Node] | None = None) -> None:
        """Do something with all nodes, at once."""
        chosen = list(self.nodes.values() if nodes is None else nodes)
        with ThreadPoolExecutor(len(chosen) or 1) as pool:
            list(pool.map(what, chosen))

    @property
    def brokers(self) -> list[Node]:
        """The nodes that serve clients."""
        return [node for node in self.nodes.values() if node.is_broker]

    @property
    def bootstrap(self) -> str:
        """Addresses for clients."""
        return ",".join(node.bootstrap for node in self.brokers)

    @property
    def addresses(self) -> dict[int, str]:
        """Where clients reach each broker."""
        return {node.node_id: node.bootstrap for node in self.brokers}

    @property
    def admin(self) -> Admin:
        """A client to ask things with."""
        if self._admin is None:
            self._admin = Admin(self.bootstrap, default_api_timeout_ms=30_000)
        return self._admin

    def others(self, node_id: int) -> list[int]:
        """Return all nodes but one."""
        return [each for each in self.nodes if each != node_id]

    # What there is to know

    def wait_for(self, ask: Callable[[Admin], T], what: str, timeout_s: float = _READY_S) -> T:
        """Return what `ask` does as soon as that is true; errors of the SDK count as not yet.

        Raises:
            AssertionError: not in time.
        """
        deadline_s = time.monotonic() + timeout_s
        seen: object = None
        while time.monotonic() < deadline_s:
            try:
                seen = found = ask(self.admin)
                if found:
                    return found
            except RaftlogError as error:
                seen = error
            time.sleep(_POLL_S)
        raise AssertionError(f"not within {timeout_s:g} s: {what}; the last was {seen!r}")

    def wait_ready(self) -> None:
        """Wait until every broker is up, as the cluster sees it."""

        def complete(admin: Admin) -> bool:
            up = [each.broker_id for each in admin.describe_cluster(linearizable=True).brokers if not each.fenced]
            return sorted(up) == [node.node_id for node in self.brokers]

        self.wait_for(complete, "every broker registered and unfenced")

    def make_topic(self, topic: str, partitions: int) -> None:
        """Create a topic with three replicas, as soon as three brokers are there; writes take two of them."""
        configs = {"min.insync.replicas": "2"}
        self.wait_for(
            lambda admin: (
                topic in admin.list_topics()
                or admin.create_topic(topic, partitions, replication_factor=3, configs=configs)
            ),
            f"topic {topic}",
        )

    def wait_in_sync(self, topic: str) -> None:
        """Wait until every replica of a topic is in sync."""

        def complete(admin: Admin) -> bool:
            return all(len(part.isr) == len(part.replicas) for part in admin.describe_topic(topic).partitions)

        self.wait_for(complete, f"every replica of {topic} in sync")

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the leader of a partition."""
        return self.wait_for(
            lambda admin: max(0, admin.describe_topic(topic).partitions[partition].leader),
            f"a leader of {topic}-{partition}",
        )

    def controller(self) -> int:
        """Return the active controller."""
        return self.wait_for(
            lambda admin: max(0, admin.describe_cluster(linearizable=True).controller_id), "a controller"
        )

    def logs(self) -> str:
        """Return the end of every node's log."""
        parts = []
        for node in self.nodes.values():
            try:
                parts.append(f"--- node {node.node_id} ({node.docker.status}), {node.image}\n{node.log_tail()}")
            except Exception as error:  # the rest is shown all the same
                parts.append(f"--- node {node.node_id}: {error}")
        return "\n".join(parts)
