"""Roles and ports of the servers of a cluster, stored in a file so that the cluster can be started again.

DIRECTORY/cluster.json      the cluster's id, its controllers and every port
DIRECTORY/users.toml        the users that servers know from the start, if any
DIRECTORY/node-N/           configuration, log and data of server N
"""

from __future__ import annotations

import json
import os
import random
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from raftlog.errors import InvalidConfig

LAYOUT_FILE: Final = "cluster.json"
USERS_FILE: Final = "users.toml"
_PORT_RANGE: Final = (10_000, 32_000)
"""The ports to choose from: below those of outgoing connections, which could otherwise take one of them."""
_MAX_ALL_CONTROLLERS: Final = 5


@dataclass
class Layout:
    """The nodes of a cluster.

    The ports of inter-node listeners are in `inter_node_ports` for controllers and in `broker_only_ports` for others;
    both are empty for a single node.
    """

    nodes: int
    cluster_id: str = ""
    dedicated_controllers: bool = False
    inter_node_ports: dict[int, int] = field(default_factory=dict)
    broker_only_ports: dict[int, int] = field(default_factory=dict)
    client_ports: dict[int, int] = field(default_factory=dict)

    def roles(self, node_id: int) -> list[str]:
        """Return a node's roles."""
        if not self.inter_node_ports or (node_id in self.inter_node_ports and not self.dedicated_controllers):
            return ["broker", "controller"]
        return ["controller"] if node_id in self.inter_node_ports else ["broker"]

    def is_broker(self, node_id: int) -> bool:
        """Return whether a node is a broker."""
        return "broker" in self.roles(node_id)

    @property
    def all_inter_node_ports(self) -> dict[int, int]:
        """The ports of all inter-node listeners."""
        return {**self.inter_node_ports, **self.broker_only_ports}

    def config(self, node_id: int, reached_at: Mapping[int, int]) -> dict[str, str | bool]:
        """Return the config that makes a node part of this cluster.

        `reached_at` has the ports at which this node reaches others, for example those of proxies; the default is the
        others' own ports.
        """
        if not self.inter_node_ports:
            return {}
        own = self.all_inter_node_ports
        voters = {other: reached_at.get(other, port) for other, port in self.inter_node_ports.items()}
        config: dict[str, str | bool] = {
            "cluster.id": self.cluster_id,
            "process.roles": ",".join(self.roles(node_id)),
            "controller.quorum.voters": _nodes(voters),
            "inter.node.listener": f"127.0.0.1:{own[node_id]}",
        }
        routes = {other: port for other, port in reached_at.items() if port != own.get(other)}
        if routes:
            config["inter.node.routes"] = _nodes(routes)
        return config

    def store(self, directory: Path) -> None:
        """Write the layout to its file."""
        aside = directory / f"{LAYOUT_FILE}.tmp"
        with open(aside, "w", encoding="utf-8", opener=private) as out:
            out.write(json.dumps(asdict(self), indent=2) + "\n")
        aside.replace(directory / LAYOUT_FILE)


def private(path: str, flags: int) -> int:
    """Open a file as `open` does with this `opener`: a new one is its owner's alone, as a server's files are."""
    return os.open(path, flags, 0o600)


def write_users(file: Path, users: Mapping[str, str]) -> Path:
    """Write users and passwords to a file for the server key `sasl.users.location`; return the file."""
    # JSON strings are TOML strings if there are no surrogates and DEL is escaped.
    lines = [
        f"{json.dumps(user, ensure_ascii=False)} = {json.dumps(users[user], ensure_ascii=False)}" for user in users
    ]
    aside = file.with_suffix(".tmp")
    with open(aside, "w", encoding="utf-8", opener=private) as out:
        out.write("\n".join(lines).replace("\x7f", "\\u007f") + "\n")
    aside.replace(file)
    return file


def _nodes(ports: Mapping[int, int]) -> str:
    return ",".join(f"{node_id}@127.0.0.1:{port}" for node_id, port in ports.items())


def default_controllers(nodes: int) -> int:
    """Return the default number of controllers: 3 above 5 nodes, otherwise the largest odd number."""
    if nodes > _MAX_ALL_CONTROLLERS:
        return 3
    return nodes if nodes % 2 else nodes - 1


def check_size(nodes: int, controllers: int, dedicated_controllers: bool) -> None:
    """Check the size of a cluster.

    Raises:
        InvalidConfig: no such cluster is possible.
    """
    if nodes < 1:
        raise InvalidConfig(f"nodes={nodes}: a cluster has at least one node")
    if controllers not in (1, 3, 5) or controllers > nodes:
        raise InvalidConfig(f"controllers={controllers} of nodes={nodes}: a quorum has 1, 3 or 5 controllers")
    if dedicated_controllers and controllers == nodes:
        raise InvalidConfig(f"dedicated_controllers with {nodes} controllers of {nodes} nodes leaves no broker")


def open_layout(directory: Path, nodes: int, controllers: int, dedicated_controllers: bool, port: int) -> Layout:
    """Return the layout of the cluster in a directory, or create one. `port`: the client port of the first broker.

    Raises:
        InvalidConfig: the directory has a cluster of another size.
    """
    found = _read(directory)
    if found is None and nodes > 1 and (directory / "node-1").exists():
        found = Layout(nodes=1)
    if found is not None:
        kept = (found.nodes, len(found.inter_node_ports) or 1, found.dedicated_controllers)
        if kept != (nodes, controllers, dedicated_controllers):
            raise InvalidConfig(
                f"{directory} has a cluster of {kept[0]} nodes, {kept[1]} of them controllers"
                f"{' only' if kept[2] else ''}; start it with this size, or use another directory"
            )
        layout = found
    else:
        layout = Layout(nodes, dedicated_controllers=dedicated_controllers)
        if nodes > 1:
            layout.cluster_id = str(uuid.uuid4())
            layout.inter_node_ports = dict(zip(range(1, controllers + 1), free_ports(controllers), strict=True))
    if nodes > 1:
        unplaced = [node_id for node_id in range(1, nodes + 1) if node_id not in layout.all_inter_node_ports]
        layout.broker_only_ports |= dict(zip(unplaced, free_ports(len(unplaced)), strict=True))
    if port:
        brokers = [node_id for node_id in range(1, nodes + 1) if layout.is_broker(node_id)]
        layout.client_ports = {node_id: port + number for number, node_id in enumerate(brokers)}
    layout.store(directory)
    return layout


def _read(directory: Path) -> Layout | None:
    path = directory / LAYOUT_FILE
    try:
        kept = json.loads(path.read_text())
        kept = {"broker_only_ports": {}, **kept}  # absent in layouts of earlier versions
        ports = {name: {int(node): port for node, port in kept[name].items()} for name in _PORT_FIELDS}
        return Layout(**{**kept, **ports})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"{path} is damaged: {error}; restore it, or use another directory") from None


_PORT_FIELDS: Final = ("inter_node_ports", "broker_only_ports", "client_ports")


def free_ports(count: int) -> list[int]:
    """Return unused ports on loopback."""
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            candidate = socket.socket()
            try:
                candidate.bind(("127.0.0.1", random.randint(*_PORT_RANGE)))
            except OSError:
                candidate.close()
                continue
            held.append(candidate)
        return [int(each.getsockname()[1]) for each in held]
    finally:
        for each in held:
            each.close()
