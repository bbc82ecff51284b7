"""Addresses as text. Imports nothing of gRPC: Spark checks options in processes that fork."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any

from raftlog.errors import InvalidConfig


def parse_bootstrap(bootstrap: str | Sequence[str]) -> list[str]:
    """Return the addresses in "host:port,host:port" or in a list of such.

    Raises:
        InvalidConfig: an address without a port, or none at all, or something that is not text.
    """
    items: Any = bootstrap.split(",") if isinstance(bootstrap, str) else bootstrap
    given = list(items) if isinstance(items, Iterable) else [items]
    if not all(isinstance(item, str) for item in given):
        raise InvalidConfig(f"bootstrap is {bootstrap!r}: give host:port, or a list of such, as text")
    addresses = [item.strip() for item in given if item.strip()]
    if not addresses:
        raise InvalidConfig("bootstrap is empty; name at least one broker as host:port")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidConfig(f"bootstrap address {address!r} is not host:port, for example 127.0.0.1:9092")
    return addresses


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
