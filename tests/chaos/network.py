"""A Docker network of the test's own, in which every node has an address that stays."""

from __future__ import annotations

import random
from typing import Any, Final

import docker
from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool
from testcontainers.core.network import Network

_TRIES: Final = 40
_FIRST_HOST: Final = 10


class ChaosNetwork:
    """A bridge network in a subnet that is otherwise unused here; this machine reaches the nodes as well."""

    def __init__(self) -> None:
        chance = random.SystemRandom()
        for remaining in reversed(range(_TRIES)):
            self._prefix = f"10.{chance.randrange(64, 224)}.{chance.randrange(256)}"
            pool = IPAMPool(subnet=f"{self._prefix}.0/24", gateway=f"{self._prefix}.1")
            self.network = Network(docker_network_kw={"ipam": IPAMConfig(pool_configs=[pool])})
            try:
                self.network.create()
                return
            except APIError:
                if not remaining:
                    raise

    @property
    def name(self) -> str:
        """What Docker calls it."""
        return self.network.name

    def address(self, node_id: int) -> str:
        """Return the address of a node."""
        return f"{self._prefix}.{_FIRST_HOST + node_id}"

    def disconnect(self, container: Any) -> None:
        """Take a container's network away."""
        self._docker_network.disconnect(container, force=True)

    def connect(self, container: Any, node_id: int) -> None:
        """Give it back, with the node's address."""
        self._docker_network.connect(container, ipv4_address=self.address(node_id))

    @property
    def _docker_network(self) -> Any:
        return docker.from_env().networks.get(self.name)

    def close(self) -> None:
        """Remove the network; no container may be in it any more."""
        self.network.remove()
