"""Quotas as the metadata keeps them (KIP-13, KIP-124, KIP-257, KIP-546, KIP-599, KIP-612), and which one applies. Pure.

    key                         of             limits
    producer_byte_rate          user, client   bytes/s that are produced to one broker
    consumer_byte_rate          user, client   bytes/s that are fetched from one broker
    request_percentage          user, client   percent of the time of one broker's event loop
    controller_mutation_rate    user, client   changes of the metadata a second, by way of one broker
    connection_creation_rate    address        new connections a second at one broker

For a user at a client id, the first of these entities that has the key gives the quota. Its scope says which clients
share the rate: those of the user with that client id, all of the user's, or all with that client id.

    1  user, client id                   both
    2  user, default client id           both
    3  user                              user
    4  default user, client id           both
    5  default user, default client id   both
    6  default user                      user
    7  client id                         client id
    8  default client id                 client id
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final, NamedTuple

from raftlog._core.security.acls import canonical_host, why_no_name
from raftlog.errors import InvalidRequestError
from raftlog.security import quota_levels
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataRecord

DEFAULT: Final = ""
"""In place of a name: all that have no quota of their own."""

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"
CLIENT_KEYS: Final = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE, CONTROLLER_MUTATION_RATE)
IP_KEYS: Final = (CONNECTION_CREATION_RATE,)
MIN_VALUE: Final = 0.001
MAX_VALUE: Final = float(2**53)
"""Larger values would not be whole numbers of bytes any more."""


class QuotaEntity(NamedTuple):
    """The clients that a quota applies to. None: not part of the entity; DEFAULT: all without a quota of their own."""

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None

    @classmethod
    def from_wire(cls, wire: records_pb2.QuotaEntity) -> QuotaEntity:
        """Return the entity of a message, unchecked."""
        return cls(*(getattr(wire, name) if wire.HasField(name) else None for name in cls._fields))  # type: ignore[arg-type] # protobuf lists the names of fields

    def to_wire(self) -> records_pb2.QuotaEntity:
        """Return the wire form."""
        return records_pb2.QuotaEntity(user=self.user, client_id=self.client_id, ip=self.ip)

    def canonical(self) -> QuotaEntity:
        """Return the entity with its address in the form of `canonical_host`."""
        return self if self.ip is None else self._replace(ip=canonical_host(self.ip))

    def __str__(self) -> str:
        words = {"user": self.user, "client id": self.client_id, "address": self.ip}
        return ", ".join(
            f"{word} {name[:255]!r}" if name != DEFAULT else f"default {word}"
            for word, name in words.items()
            if name is not None
        )


def entity_order(entity: QuotaEntity) -> tuple[tuple[bool, str], ...]:
    """Return what entities are sorted by."""
    return tuple((name is not None, name or "") for name in entity)


def matches(entity: QuotaEntity, wanted: QuotaEntity, *, strict: bool) -> bool:
    """Whether an entity has all names of `wanted`, and with `strict` no others (KIP-546)."""
    named = all(wish is None or wish == name for wish, name in zip(wanted, entity, strict=True))
    return named and not (
        strict and any(wish is None and name is not None for wish, name in zip(wanted, entity, strict=True))
    )


def quota_record(entity: QuotaEntity, key: str, value: float | None) -> MetadataRecord:
    """Return the record that sets a quota, or removes it with None."""
    return MetadataRecord(quota=records_pb2.QuotaRecord(entity=entity.to_wire(), key=key, value=value))


def check_quota(entity: QuotaEntity, key: str, value: float | None) -> None:
    """Check that a canonical entity may have this quota; None stands for its removal.

    Raises:
        InvalidRequestError: it may not.
    """
    if entity == QuotaEntity():
        raise InvalidRequestError(
            "a quota applies to a user, a client id, both, or an address; the entity names none of them"
        )
    if entity.ip is not None and entity != QuotaEntity(ip=entity.ip):
        raise InvalidRequestError(f"{entity}: an address stands alone, without a user and a client id")
    keys = CLIENT_KEYS if entity.ip is None else IP_KEYS
    if key not in keys:
        raise InvalidRequestError(f"{key[:255]!r} is not a quota of {entity}; use {', '.join(keys)}")
    for what, name in (("a user", entity.user), ("a client id", entity.client_id)):
        why = why_no_name(name) if name else None
        if why is not None:
            raise InvalidRequestError(f"{entity}: not the name of {what}: {why}")
    if entity.ip and not _is_address(entity.ip):
        raise InvalidRequestError(f"{entity}: not an IP address; a quota does not resolve names")
    if value is not None and not (math.isfinite(value) and MIN_VALUE <= value <= MAX_VALUE):
        raise InvalidRequestError(f"{key}={value:g} of {entity}: a quota is a number from {MIN_VALUE:g} to 2^53")


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


class Limit(NamedTuple):
    """The quota of one client. All clients with this `scope` share its rate."""

    rate: float
    scope: QuotaEntity


def limit_of(quotas: Mapping[QuotaEntity, Mapping[str, float]], key: str, user: str, client_id: str) -> Limit | None:
    """Return what limits a user at a client id; None: nothing does. An empty client id has the default's quota."""
    for level in quota_levels(user, client_id):
        rate = quotas.get(QuotaEntity(level.user, level.client_id), {}).get(key)
        if rate is not None:
            of_user = None if level.user is None else user
            return Limit(rate, QuotaEntity(of_user, None if level.client_id is None else client_id))
    return None


def limit_of_ip(quotas: Mapping[QuotaEntity, Mapping[str, float]], ip: str) -> float | None:
    """Return how many connections a second an address may open, by its own quota or the default; None: any number."""
    for name in (ip, DEFAULT):
        rate = quotas.get(QuotaEntity(ip=name), {}).get(CONNECTION_CREATION_RATE)
        if rate is not None:
            return rate
    return None
