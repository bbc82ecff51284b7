"""What the options of kafka-acls stand for: permissions to add, or filters for those to list or remove. Pure.

--producer    Write, Describe and Create of the topics; Write and Describe of the transactional ids
--idempotent  with --producer: IdempotentWrite of the cluster
--consumer    Read and Describe of the topics; Read of the groups
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from raftlog.cli import acl_words
from raftlog.security import (
    CLUSTER_NAME,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermission,
    PatternType,
    ResourceType,
)

_PRODUCER: Final = {
    ResourceType.TOPIC: (AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.CREATE),
    ResourceType.TRANSACTIONAL_ID: (AclOperation.WRITE, AclOperation.DESCRIBE),
}
_CONSUMER: Final = {
    ResourceType.TOPIC: (AclOperation.READ, AclOperation.DESCRIBE),
    ResourceType.GROUP: (AclOperation.READ,),
}
_ANY_HOST: Final = "*"
_SHOWN: Final = 60


class Resource(NamedTuple):
    """What a permission is about."""

    type: ResourceType
    name: str


_CLUSTER: Final = Resource(ResourceType.CLUSTER, CLUSTER_NAME)


@dataclass(frozen=True, kw_only=True)
class AclOptions:
    """The options of a command, as they were given."""

    allow_principals: Sequence[str] = ()
    deny_principals: Sequence[str] = ()
    allow_hosts: Sequence[str] = ()
    deny_hosts: Sequence[str] = ()
    operations: Sequence[str] = ()
    topics: Sequence[str] = ()
    groups: Sequence[str] = ()
    cluster: bool = False
    transactional_ids: Sequence[str] = ()
    pattern: PatternType = PatternType.LITERAL
    producer: bool = False
    consumer: bool = False
    idempotent: bool = False

    def bindings(self) -> list[AclBinding]:
        """Return the permissions to add, each once.

        Raises:
            ValueError: the options do not say which; names them.
        """
        if not self.allow_principals and not self.deny_principals:
            raise ValueError("say who: --allow-principal User:NAME or --deny-principal User:NAME")
        if self.pattern not in (PatternType.LITERAL, PatternType.PREFIXED):
            raise ValueError(
                f"--resource-pattern-type {acl_words.word(self.pattern)} is for finding permissions, with raftlog acl "
                "list and remove; what is added is literal or prefixed"
            )
        self._check_conveniences()
        if not self._resources():
            raise ValueError("say what about: --topic, --group, --cluster or --transactional-id")
        found = [
            AclBinding(
                who, operation, resource.type, resource.name, self._pattern_of(resource), permission, host or _ANY_HOST
            )
            for permission, who, host in self._who()
            for resource, operation in self._pairs()
        ]
        return acl_words.in_order(found)

    def filters(self) -> list[AclFilter]:
        """Return which permissions to remove: what is not named stands for all.

        Raises:
            ValueError: nothing is named, or options contradict each other.
        """
        self._check_conveniences()
        pairs = list(self._pairs()) if self._resources() else []
        who = list(self._who())
        if not pairs and not who:
            raise ValueError(
                "say which: by --allow-principal, --deny-principal, --topic, --group, --cluster or --transactional-id"
            )
        everyone: list[tuple[AclPermission | None, str | None, str | None]] = [(None, None, None)]
        everything: list[tuple[Resource | None, AclOperation | None]] = [
            (None, each) for each in self._operations() or (None,)
        ]
        return [
            AclFilter(
                principal=principal,
                operation=operation,
                resource_type=None if resource is None else resource.type,
                resource_name=None if resource is None else resource.name,
                pattern_type=None if resource is None else self._pattern_of(resource),
                permission=permission,
                host=host,
            )
            for permission, principal, host in who or everyone
            for resource, operation in (self._found_pairs(pairs) if pairs else everything)
        ]

    def resource_filters(self, principals: Sequence[str]) -> list[AclFilter]:
        """Return which permissions to list: of these principals and resources, all where none are named."""
        return [
            AclFilter(
                principal=principal,
                resource_type=None if resource is None else resource.type,
                resource_name=None if resource is None else resource.name,
                pattern_type=None if resource is None else self._pattern_of(resource),
            )
            for principal in [acl_words.principal(each) for each in principals] or (None,)
            for resource in self._resources() or (None,)
        ]

    def _expands(self) -> bool:
        return self.producer or self.consumer

    def _resources(self) -> list[Resource]:
        found = [Resource(ResourceType.TOPIC, name) for name in self.topics]
        found += [Resource(ResourceType.GROUP, name) for name in self.groups]
        found += [_CLUSTER] if self.cluster else []
        found += [Resource(ResourceType.TRANSACTIONAL_ID, name) for name in self.transactional_ids]
        for each in found:
            try:
                acl_words.resource_name(each.name, self._pattern_of(each))
            except ValueError as error:
                raise ValueError(f"--{acl_words.word(each.type)} {each.name[:_SHOWN]!r}: {error}") from None
        return found

    def _pattern_of(self, resource: Resource) -> PatternType:
        """Return how its name is meant; that of the cluster is always literal."""
        return PatternType.LITERAL if resource.type is ResourceType.CLUSTER else self.pattern

    def _operations(self) -> list[AclOperation]:
        return [acl_words.operation(each) for each in self.operations]

    def _pairs(self) -> Iterator[tuple[Resource, AclOperation]]:
        """Yield what may be done with what; all of it, where no operation is named."""
        resources = self._resources()
        if not self._expands():
            for resource in resources:
                for operation in self._operations() or [AclOperation.ALL]:
                    acl_words.check_operation(operation, resource.type)
                    yield resource, operation
            return
        for wanted, operations in ((self.producer, _PRODUCER), (self.consumer, _CONSUMER)):
            if wanted:
                for resource in resources:
                    for operation in operations.get(resource.type, ()):
                        yield resource, operation
        if self.idempotent:
            yield _CLUSTER, AclOperation.IDEMPOTENT_WRITE

    def _found_pairs(
        self, pairs: Sequence[tuple[Resource, AclOperation]]
    ) -> Iterator[tuple[Resource | None, AclOperation | None]]:
        """Yield what stands for what in a filter: no operation named is any of them."""
        for resource, operation in pairs:
            yield resource, operation if self._expands() or self.operations else None

    def _who(self) -> Iterator[tuple[AclPermission, str, str | None]]:
        """Yield permission, principal and host; None: no host was named.

        Raises:
            ValueError: a host without a principal.
        """
        for permission, principals, hosts in (
            (AclPermission.ALLOW, self.allow_principals, self.allow_hosts),
            (AclPermission.DENY, self.deny_principals, self.deny_hosts),
        ):
            name = acl_words.word(permission)
            if hosts and not principals:
                raise ValueError(f"--{name}-host needs --{name}-principal; User:* is everybody")
            for principal in map(acl_words.principal, principals):
                for host in [acl_words.host(each) for each in hosts] or (None,):
                    yield permission, principal, host

    def _check_conveniences(self) -> None:
        """Check what goes with --producer, --consumer and --idempotent, as kafka-acls does.

        Raises:
            ValueError: something does not.
        """
        if self.idempotent and not self.producer:
            raise ValueError("--idempotent goes with --producer; else write --cluster --operation IdempotentWrite")
        if not self._expands():
            return
        name = "--producer" if self.producer else "--consumer"
        if self.operations or self.deny_principals or self.deny_hosts:
            raise ValueError(f"{name} says itself which operations are allowed: leave --operation and --deny-... out")
        if not self.topics:
            raise ValueError(f"{name} needs a --topic")
        if self.consumer and not self.groups:
            raise ValueError("--consumer needs a --group")
        if self.cluster:
            raise ValueError(f"{name} says nothing about the cluster: leave --cluster out")
        if self.transactional_ids and not self.producer:
            raise ValueError("--transactional-id goes with --producer, not with --consumer")
        if self.groups and not self.consumer:
            raise ValueError("--group goes with --consumer, not with --producer")
