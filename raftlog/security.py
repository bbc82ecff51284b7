"""Users, ACLs, roles and quotas, as the admin clients take and return them (KIP-11, KIP-140, KIP-290, KIP-546,
KIP-554).

The numbers of the enumerations are Kafka's, and those of `raftlog.v1.security_pb2`.
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
    """The type of the resource that an ACL names. ANY is for filters only."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


class PatternType(enum.IntEnum):
    """How an ACL's resource name is matched (KIP-290). ANY and MATCH are for filters only; MATCH finds every ACL that
    applies to a resource of that name."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    """Exactly that name; `*` means every name."""
    PREFIXED = 4
    """Every name that begins with it."""


class AclOperation(enum.IntEnum):
    """The operation that an ACL allows or denies. ANY is for filters only."""

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
    """Whether an ACL allows or denies. A matching DENY wins over every ALLOW. ANY is for filters only."""

    ANY = 1
    DENY = 2
    ALLOW = 3


class ScramMechanism(enum.IntEnum):
    """The SCRAM mechanism by which a password is checked (RFC 5802, RFC 7677)."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """The mechanism's name in SASL.

        >>> from raftlog import ScramMechanism
        >>> ScramMechanism.SCRAM_SHA_512.mechanism_name
        'SCRAM-SHA-512'
        """
        return self.name.replace("_", "-")

    @classmethod
    def of(cls, name: str | ScramMechanism) -> ScramMechanism:
        """Return the mechanism of that name, written `SCRAM-SHA-512` or as the constant, `SCRAM_SHA_512`.

        Raises:
            InvalidConfig: there is no mechanism of that name.
        """
        from raftlog.errors import InvalidConfig  # here, so that importing these types does not load protobuf

        if isinstance(name, cls):
            return name
        found = cls.__members__.get(str(name).upper().replace("-", "_"))
        if found is None:
            known = ", ".join(each.mechanism_name for each in cls)
            raise InvalidConfig(f"there is no mechanism {name!r}; there are {known}")
        return found


@dataclass(frozen=True, slots=True)
class AclBinding:
    """One ACL: it allows or denies a principal one operation on a resource, from a host (KIP-11, KIP-290).

    `principal` is `User:NAME`, or `User:*` for all users; in a role it is `Role:NAME`. `host` is an address, a network
    such as 10.0.0.0/8, or `*` for every address. The resource of type CLUSTER is called `raftlog-cluster`.
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
    """Selects the ACLs that have all of these fields; a field that is None matches any value."""

    principal: str | None = None
    operation: AclOperation | None = None
    resource_type: ResourceType | None = None
    resource_name: str | None = None
    pattern_type: PatternType | None = None
    permission: AclPermission | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """A named set of permissions, and the principals (`User:NAME`) that have them in addition to their own ACLs."""

    name: str
    permissions: tuple[AclBinding, ...] = ()
    principals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class UserScramCredential:
    """A user's credential for one mechanism, without any secret: the user can log in with this mechanism."""

    user: str
    mechanism: ScramMechanism
    iterations: int


@dataclass(frozen=True, slots=True)
class QuotaEntity:
    """The clients that a quota applies to: a user, a client id, a user at a client id, or an address (KIP-546).

    A field that is None is not part of the entity. An empty name means the default: it applies to all names without a
    quota of their own.
    """

    user: str | None = None
    """The name without the prefix `User:`."""
    client_id: str | None = None
    ip: str | None = None


def quota_levels(user: str, client_id: str) -> Iterator[QuotaEntity]:
    """Yield the entities whose quotas may limit this user at this client id; the first that has a quota counts.

    If the entity names user and client id, the rate is for this pair; otherwise all clients of the user, or of the
    client id, share it.
    """
    for of_user in (user, ""):
        for of_client in (client_id, "", None):
            yield QuotaEntity(of_user, of_client)
    for of_client in (client_id, ""):
        yield QuotaEntity(client_id=of_client)
