"""Addresses in the configuration: `host:port`, and `id@host:port` for nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

Endpoint = tuple[str, int]
"""A host and a port."""

DEFAULT_PORT: Final = 9092
VOTER_COUNTS: Final = (1, 3, 5)
"""The allowed numbers of voters. An even number tolerates no more failures than one voter less; more than five slow
every commit down."""


def parse_endpoint(text: str) -> Endpoint:
    """Return host and port of `host:port`, `[::1]:port`, or `host` alone with the default port.

    Raises:
        ValueError: not of that form.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [::1]:9092")
    if not host or any(c.isspace() or c in "/,[]" for c in host):
        raise ValueError(f"{text!r} is not host:port")
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"{text!r}: the port is a number from 0 to 65535")
    return host, int(port)


def endpoint_or_none(text: str) -> Endpoint | None:
    """Return the endpoint, None for an empty text. Raises ValueError as `parse_endpoint`."""
    return parse_endpoint(text) if text else None


RAFTLOG: Final = "raftlog"
KAFKA: Final = "kafka"
PLAINTEXT: Final = "plaintext"
SSL: Final = "ssl"
SASL_PLAINTEXT: Final = "sasl_plaintext"
SASL_SSL: Final = "sasl_ssl"
KAFKA_PROTOCOLS: Final = {
    KAFKA: PLAINTEXT,
    "kafka+ssl": SSL,
    "kafka+sasl": SASL_PLAINTEXT,
    "kafka+sasl+ssl": SASL_SSL,
}
"""Kafka's security protocol of each way to name a listener for Kafka clients."""


def listener_of(items: Sequence[str]) -> Endpoint:
    """Return the endpoint for raftlog's clients of a list of listeners.

    Raises:
        ValueError: as `listener_or_none`, or there is none.
    """
    found = listener_or_none(items)
    if found is None:
        raise ValueError("expected host:port, for example 127.0.0.1:9092")
    return found


def listener_or_none(items: Sequence[str]) -> Endpoint | None:
    """Return the endpoint for raftlog's clients of a list of listeners, None if it has none.

    Raises:
        ValueError: as `by_protocol`.
    """
    return by_protocol(items).get(RAFTLOG)


def by_protocol(items: Sequence[str]) -> dict[str, Endpoint]:
    """Return the endpoints of `host:port`, `raftlog://host:port` and `kafka://host:port`, one of each at most.

    RAFTLOG and KAFKA are the keys, whatever the security of the listener for Kafka clients: see `kafka_protocol`.

    Raises:
        ValueError: as `parse_endpoint`, another protocol, or two endpoints of one.
    """
    found: dict[str, Endpoint] = {}
    for item in items:
        protocol, address = _split(item)
        clients = KAFKA if protocol in KAFKA_PROTOCOLS else protocol
        if clients != RAFTLOG and clients != KAFKA:
            known = ", ".join((RAFTLOG, *KAFKA_PROTOCOLS))
            raise ValueError(f"{item!r}: the protocol {protocol} is unknown; there are {known}")
        if clients in found:
            raise ValueError(f"one listener for {clients} clients is supported, and {item!r} is the second")
        found[clients] = parse_endpoint(address)
    return found


def kafka_protocol(items: Sequence[str]) -> str:
    """Return the protocol of a list's listener for Kafka clients, such as `kafka+ssl`; "" without one."""
    return next((protocol for protocol, _ in map(_split, items) if protocol in KAFKA_PROTOCOLS), "")


def _split(item: str) -> tuple[str, str]:
    protocol, separator, address = item.strip().rpartition("://")
    return protocol.lower() if separator else RAFTLOG, address


def parse_nodes(items: Iterable[str]) -> dict[int, Endpoint]:
    """Return the endpoints of nodes by node id, from `id@host:port` each.

    Raises:
        ValueError: not of that form, or an id or an address is given twice.
    """
    nodes: dict[int, Endpoint] = {}
    for item in items:
        number, at, address = item.partition("@")
        if not at or not number.isascii() or not number.isdecimal() or int(number) >= 1 << 31:
            raise ValueError(f"{item!r} is not id@host:port, for example 1@127.0.0.1:9093")
        host, port = parse_endpoint(address)
        if port == 0 or address.strip().rpartition(":")[2] != str(port):
            raise ValueError(f"{item!r}: the other nodes need to know the port, write id@host:port")
        if int(number) in nodes:
            raise ValueError(f"node {number} is given twice")
        if (host, port) in nodes.values():
            raise ValueError(f"{host}:{port} is given twice; every node needs its own address")
        nodes[int(number)] = (host, port)
    return nodes


def parse_voters(items: Iterable[str]) -> dict[int, Endpoint]:
    """Return the endpoints of the voters by node id, from `id@host:port` each.

    Raises:
        ValueError: as `parse_nodes`, or the number of voters is not 0, 1, 3 or 5.
    """
    voters = parse_nodes(items)
    if len(voters) not in (0, *VOTER_COUNTS):
        counts = ", ".join(map(str, VOTER_COUNTS))
        raise ValueError(
            f"{len(voters)} voters; a quorum has {counts}: other numbers tolerate no more failures, or slow commits "
            "down"
        )
    return voters
