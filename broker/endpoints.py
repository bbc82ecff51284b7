"""Addresses as the configuration has them: `host:port`, and nodes with theirs, `id@host:port`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

DEFAULT_PORT: Final = 9092
VOTER_COUNTS: Final = (1, 3, 5)
"""An even number of voters survives no more failures than one less, and more than five make every commit slower."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`, `[::1]:port`, or `host` alone with the default port.

    Raises:
        ValueError: something else.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address stands in brackets, [::1]:9092")
    if not host or any(c.isspace() or c in "/,[]" for c in host):
        raise ValueError(f"{text!r} is not host:port")
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"{text!r}: the port is a number from 0 to 65535")
    return host, int(port)


def parse_nodes(items: Iterable[str]) -> dict[int, tuple[str, int]]:
    """Return the endpoints of nodes by node id, from `id@host:port` each.

    Raises:
        ValueError: something else, or an id or an address that stands twice.
    """
    nodes: dict[int, tuple[str, int]] = {}
    for item in items:
        number, at, address = item.partition("@")
        if not at or not number.isascii() or not number.isdecimal() or int(number) >= 1 << 31:
            raise ValueError(f"{item!r} is not id@host:port, for example 1@127.0.0.1:9093")
        host, port = parse_endpoint(address)
        if port == 0 or address.strip().rpartition(":")[2] != str(port):
            raise ValueError(f"{item!r}: the other nodes need to know the port, write id@host:port")
        if int(number) in nodes:
            raise ValueError(f"node {number} stands there twice")
        if (host, port) in nodes.values():
            raise ValueError(f"{host}:{port} stands there twice; every node listens at an address of its own")
        nodes[int(number)] = (host, port)
    return nodes


def parse_voters(items: Iterable[str]) -> dict[int, tuple[str, int]]:
    """Return the endpoints of the voters by node id, from `id@host:port` each.

    Raises:
        ValueError: as `parse_nodes`, or a number of voters that makes no sense.
    """
    voters = parse_nodes(items)
    if len(voters) not in (0, *VOTER_COUNTS):
        counts = ", ".join(map(str, VOTER_COUNTS))
        raise ValueError(f"{len(voters)} voters; a quorum has one of {counts}: another one more would help nobody")
    return voters
