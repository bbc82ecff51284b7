"""Users, permissions, roles and quotas as the admin clients speak of them (KIP-11, KIP-140, KIP-290, KIP-546, KIP-554).

Numbers are Kafka's, and those of `raftlog.v1.security_pb2`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

CLUSTER_NAME: Final = "raftlog-cluster"
"""The name of the one resource of type CLUSTER."""
DEFAULT_ITERATIONS: Final = 8192


class ResourceType(enum.IntEnum):
    """What a permission is about; ANY in filters only."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


class PatternType(enum.IntEnum):
    """How the name of a permission's resource is meant. In filters only: ANY, and MATCH, what applies to that name."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    """That name; `*` is every one."""
    PREFIXED = 4
    """Every name that begins so."""


class AclOperation(enum.IntEnum):
    """What may be done, or may not; ANY in filters only."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class AclPermission(enum.IntEnum):
    """Whether it may be done: a denial wins over all that allows. ANY in filters only."""

    ANY = 1
    DENY = 2
    ALLOW = 3


class ScramMechanism(enum.IntEnum):
    """How a password is checked (RFC 5802, RFC 7677)."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """The name that SASL has for it.

        >>> from raftlog import ScramMechanism
        >>> ScramMechanism.SCRAM_SHA_512.mechanism_name
        'SCRAM-SHA-512'
        """
        return self.name.replace("_", "-")

    @classmethod
    def of(cls, name: str | ScramMechanism) -> ScramMechanism:
        """Return the mechanism of that name, `SCRAM-SHA-512` or as the constant has it.

        Raises:
            InvalidConfig: there is none.
        """
        from raftlog.errors import InvalidConfig  # here: types of the package cost no protobuf when they are imported

        if isinstance(name, cls):
            return name
        found = cls.__members__.get(str(name).upper().replace("-", "_"))
        if found is None:
            known = ", ".join(each.mechanism_name for each in cls)
            raise InvalidConfig(f"there is no mechanism {name!r}; there are {known}")
        return found


@dataclass(frozen=True, slots=True)
class AclBinding:
    """One permission: what a principal may do with a resource, or may not, from a host.

    `host`: an address, a network such as 10.0.0.0/8, or `*` for every one. `principal`: `User:NAME`, or `User:*` for
    all users; in a role `Role:NAME`. The resource of the cluster is called `raftlog-cluster`.
    """

    principal: str
    operation: AclOperation
    resource_type: ResourceType
    resource_name: str
    pattern_type: PatternType = PatternType.LITERAL
    permission: AclPermission = AclPermission.ALLOW
    host: str = "*"


@dataclass(frozen=True, slots=True)
class AclFilter:
    """Which permissions are meant: all that have these fields; None stands for any."""

    principal: str | None = None
    operation: AclOperation | None = None
    resource_type: ResourceType | None = None
    resource_name: str | None = None
    pattern_type: PatternType | None = None
    permission: AclPermission | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """A named set of permissions, and the principals that have it beside their own ACLs."""

    name: str
    permissions: tuple[AclBinding, ...] = ()
    principals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class UserScramCredential:
    """That a user can log in with a mechanism; nothing of the password is in it."""

    user: str
    mechanism: ScramMechanism
    iterations: int


@dataclass(frozen=True, slots=True)
class QuotaEntity:
    """The clients that a quota applies to: a user, a client id, a user at a client id, or an address (KIP-546).

    None: not part of the entity. An empty name is the default, for all that have no quota of their own.
    """

    user: str | None = None
    """Without the prefix `User:`."""
    client_id: str | None = None
    ip: str | None = None


def quota_levels(user: str, client_id: str) -> Iterator[QuotaEntity]:
    """Yield the entities whose quotas limit this user at this client id; the first that has the key counts.

    The rate of an entity that names both is for this user at this client id, else for all clients of the one named.
    """
    for of_user in (user, ""):
        for of_client in (client_id, "", None):
            yield QuotaEntity(of_user, of_client)
    for of_client in (client_id, ""):
        yield QuotaEntity(client_id=of_client)
