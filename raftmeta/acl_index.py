"""Decisions on permissions from all ACLs of a cluster, in microseconds. Pure.

    (principal, resource type) ─ patterns ─┬ literal   name  ─┐
                                           └ prefixed  start ─┴ host ─ (operations allowed, operations denied)

A decision looks up the principal and `User:*`; under each the name itself, `*`, and the name's beginnings of the
lengths that prefixes there have; under each of those the host and `*`. How many other ACLs there are does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from raftlog.v1.security_pb2 import Acl as WireAcl
from raftmeta.acls import (
    CLUSTER_NAME,
    EVERYBODY,
    IMPLIED_BY,
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    ResourceType,
)

V = TypeVar("V")


class Decision(NamedTuple):
    """Whether it is allowed, and the ACL that says so; without one nobody has said anything, and it is not allowed."""

    allowed: bool
    acl: Acl | None


_NOTHING_SAID: Final = Decision(False, None)


class _Operations(NamedTuple):
    """Bit `1 << operation` is set in what an operation is allowed or denied by; ALL is one of them."""

    allowed: int = 0
    denied: int = 0


_NONE: Final = _Operations()
_NAMED: Final = [number for number in WireAcl.Operation.values() if number >= WireAcl.ALL]
_ALLOWED_BY: Final = {
    number: sum(1 << each for each in {number, WireAcl.ALL, *IMPLIED_BY.get(number, ())}) for number in _NAMED
}
"""What has to be allowed for an operation to be allowed; any one of them."""
_DENIED_BY: Final = {number: 1 << number | 1 << WireAcl.ALL for number in _NAMED}

_Hosts = dict[str, _Operations]
_Holder = tuple[str, ResourceType]


class _Patterns(Generic[V]):
    """Something for each pattern of names, of one type of resource. Not written to once it belongs to an index.

    Invariant: `lengths` are those of the keys of `prefixed`, rising.
    """

    __slots__ = ("lengths", "literal", "prefixed")

    def __init__(self, base: _Patterns[V] | None = None) -> None:
        self.literal: dict[str, V] = {} if base is None else dict(base.literal)
        self.prefixed: dict[str, V] = {} if base is None else dict(base.prefixed)
        self.lengths: tuple[int, ...] = () if base is None else base.lengths

    def of(self, pattern_type: PatternType) -> dict[str, V]:
        return self.literal if pattern_type == WireAcl.LITERAL else self.prefixed

    def starts_of(self, name: str) -> list[str]:
        """Return the prefixes with which a name begins, the shortest first."""
        prefixed, longest = self.prefixed, len(name)
        return [start for length in self.lengths if length <= longest and (start := name[:length]) in prefixed]

    def matching(self, name: str) -> Iterator[tuple[PatternType, str, V]]:
        """Yield (type of pattern, name in it, what it stands for) of the patterns that a name matches."""
        for each in (name, WILDCARD):
            found = self.literal.get(each)
            if found is not None:
                yield WireAcl.LITERAL, each, found
        for start in self.starts_of(name):
            yield WireAcl.PREFIXED, start, self.prefixed[start]


class AclIndex:
    """All ACLs, ready for decisions; immutable, so threads may share it.

    Whoever asks writes hosts as `raftmeta.acls.canonical_host` does, and names one operation and type of resource.
    """

    __slots__ = ("_acls", "_held", "_resources")

    def __init__(self, acls: Iterable[Acl] = ()) -> None:
        self._acls = frozenset(acls)
        edit = _Edit({}, {})
        for acl in self._acls:
            edit.add(acl)
        self._held, self._resources = edit.done()

    def changed_to(self, acls: frozenset[Acl]) -> AclIndex:
        """Return the index of other ACLs; takes little when most of them are in this one as well."""
        if acls is self._acls:
            return self
        edit = _Edit(self._held, self._resources)
        for acl in self._acls - acls:
            edit.remove(acl)
        for acl in acls - self._acls:
            edit.add(acl)
        index = AclIndex.__new__(AclIndex)
        index._acls = acls
        index._held, index._resources = edit.done()
        return index

    def decide(
        self, principal: str, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> Decision:
        """Decide whether a principal at an address may do that. A denial wins; what nothing allows is not allowed."""
        allowing, denying = _ALLOWED_BY[operation], _DENIED_BY[operation]
        allowed: Acl | None = None
        for who in (principal, EVERYBODY):
            patterns = self._held.get((who, resource_type))
            if patterns is None:
                continue
            for pattern_type, pattern, hosts in patterns.matching(name):
                for where in (host, WILDCARD):
                    said = hosts.get(where)
                    if said is None:
                        continue
                    if by := said.denied & denying:
                        return Decision(
                            False, Acl(resource_type, pattern, pattern_type, who, where, _lowest(by), WireAcl.DENY)
                        )
                    if allowed is None and (by := said.allowed & allowing):
                        allowed = Acl(resource_type, pattern, pattern_type, who, where, _lowest(by), WireAcl.ALLOW)
        return _NOTHING_SAID if allowed is None else Decision(True, allowed)

    def has_acls(self, resource_type: ResourceType, name: str) -> bool:
        """Whether any ACL is about that resource, whoever it is for."""
        resources = self._resources.get(resource_type)
        return resources is not None and next(resources.matching(name), None) is not None

    def may_any(
        self,
        principal: str,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        *,
        everyone_if_none: bool = False,
    ) -> bool:
        """Whether there is any name of a resource with which a principal may do that (KIP-679).

        Denials of more than one name do not count against a wider permission, as no number of them covers it.
        `everyone_if_none`: resources that no ACL is about are open to everybody.
        """
        if resource_type == WireAcl.CLUSTER:
            if everyone_if_none and not self.has_acls(resource_type, CLUSTER_NAME):
                return True
            return self.decide(principal, host, operation, resource_type, CLUSTER_NAME).allowed
        resources = self._resources.get(resource_type)
        if everyone_if_none and (resources is None or WILDCARD not in resources.literal):
            return True
        allowing, denying = _ALLOWED_BY[operation], _DENIED_BY[operation]
        held = [each for who in (principal, EVERYBODY) if (each := self._held.get((who, resource_type))) is not None]
        if any(_at(each.literal.get(WILDCARD), host).denied & denying for each in held):
            return False

        def denied_below(name: str) -> bool:
            return any(
                _at(each.prefixed[start], host).denied & denying for each in held for start in each.starts_of(name)
            )

        def denied(name: str) -> bool:
            return denied_below(name) or any(_at(each.literal.get(name), host).denied & denying for each in held)

        return any(
            _at(hosts, host).allowed & allowing and (name == WILDCARD or not denied(name))
            for each in held
            for name, hosts in each.literal.items()
        ) or any(
            _at(hosts, host).allowed & allowing and not denied_below(start)
            for each in held
            for start, hosts in each.prefixed.items()
        )


class _Edit:
    """Changes to an index, under way: copies what it writes to, never writes to what it began with."""

    def __init__(self, held: dict[_Holder, _Patterns[_Hosts]], resources: dict[ResourceType, _Patterns[int]]) -> None:
        self._held = dict(held)
        self._resources = dict(resources)
        self._own_held: dict[_Holder, set[tuple[PatternType, str]]] = {}
        """What has been copied: holders, and the patterns of each."""
        self._own_resources: set[ResourceType] = set()

    def add(self, acl: Acl) -> None:
        hosts = self._hosts(acl)
        said = hosts.get(acl.host, _NONE)
        bit = 1 << acl.operation
        if acl.permission == WireAcl.ALLOW:
            hosts[acl.host] = _Operations(said.allowed | bit, said.denied)
        else:
            hosts[acl.host] = _Operations(said.allowed, said.denied | bit)
        counts = self._counts(acl)
        counts[acl.resource_name] = counts.get(acl.resource_name, 0) + 1

    def remove(self, acl: Acl) -> None:
        hosts = self._hosts(acl)
        said = hosts[acl.host]
        bit = 1 << acl.operation
        if acl.permission == WireAcl.ALLOW:
            assert said.allowed & bit, acl
            said = _Operations(said.allowed & ~bit, said.denied)
        else:
            assert said.denied & bit, acl
            said = _Operations(said.allowed, said.denied & ~bit)
        if said == _NONE:
            del hosts[acl.host]
        else:
            hosts[acl.host] = said
        counts = self._counts(acl)
        counts[acl.resource_name] -= 1
        if not counts[acl.resource_name]:
            del counts[acl.resource_name]

    def done(self) -> tuple[dict[_Holder, _Patterns[_Hosts]], dict[ResourceType, _Patterns[int]]]:
        """Return what came of it; the edit is done with."""
        for holder, written in self._own_held.items():
            patterns = self._held[holder]
            for pattern_type, name in written:
                named = patterns.of(pattern_type)
                if not named[name]:
                    del named[name]
            if patterns.literal or patterns.prefixed:
                patterns.lengths = _lengths(patterns.prefixed)
            else:
                del self._held[holder]
        for resource_type in self._own_resources:
            resources = self._resources[resource_type]
            resources.lengths = _lengths(resources.prefixed)
        return self._held, self._resources

    def _hosts(self, acl: Acl) -> _Hosts:
        """Return what is said of one principal and pattern, to be written to."""
        holder = acl.principal, acl.resource_type
        written = self._own_held.get(holder)
        if written is None:
            written = self._own_held[holder] = set()
            self._held[holder] = _Patterns(self._held.get(holder))
        named = self._held[holder].of(acl.pattern_type)
        place = acl.pattern_type, acl.resource_name
        if place not in written:
            written.add(place)
            named[acl.resource_name] = dict(named.get(acl.resource_name, ()))
        return named[acl.resource_name]

    def _counts(self, acl: Acl) -> dict[str, int]:
        """Return how many ACLs there are by pattern, to be written to."""
        if acl.resource_type not in self._own_resources:
            self._own_resources.add(acl.resource_type)
            self._resources[acl.resource_type] = _Patterns(self._resources.get(acl.resource_type))
        return self._resources[acl.resource_type].of(acl.pattern_type)


def _lengths(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(set(map(len, names))))


def _lowest(bits: int) -> Operation:
    """Return the first operation of a set."""
    return _OPERATION_OF[bits & -bits]


_OPERATION_OF: Final = {1 << number: number for number in _NAMED}


def _at(hosts: _Hosts | None, host: str) -> _Operations:
    """Return what is said of an address."""
    if hosts is None:
        return _NONE
    here, everywhere = hosts.get(host), hosts.get(WILDCARD, _NONE)
    if here is None:
        return everywhere
    return _Operations(here.allowed | everywhere.allowed, here.denied | everywhere.denied)
