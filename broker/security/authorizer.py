"""Decides by the ACLs and roles in the metadata (KIP-11, KIP-290); a refusal names the missing permission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from shlex import quote
from typing import Final

from broker.security.audit import MAX_SHOWN, Audit
from broker.security.caller import Operation, ResourceType
from raftlog._core.security.acls import (
    INTERNAL_PREFIX,
    ROLE_PREFIX,
    WILDCARD,
    Acl,
    AclIndex,
    is_of_cluster,
    is_super_user,
    verdict,
)
from raftlog.errors import (
    AuthorizationError,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from raftlog.v1.security_pb2 import Acl as Wire
from raftmeta.image import MetadataImage

MAX_DECISIONS: Final = 10_000
"""Decisions that are cached until an ACL or a role changes."""
_ERRORS: Final[dict[int, type[AuthorizationError]]] = {
    Wire.TOPIC: TopicAuthorizationFailed,
    Wire.GROUP: GroupAuthorizationFailed,
    Wire.CLUSTER: ClusterAuthorizationFailed,
    Wire.TRANSACTIONAL_ID: TransactionalIdAuthorizationFailed,
}
_IMPLIED: Final = {
    Wire.TOPIC: "to consume or produce, add Read or Write instead, which imply Describe",
    Wire.TRANSACTIONAL_ID: "to produce with it, add Write instead, which implies Describe",
}
"""What a caller that lacks Describe will need next, as a rule: its clients ask for Describe first."""
_WORDS: Final = {Wire.TOPIC: "topic", Wire.GROUP: "group", Wire.TRANSACTIONAL_ID: "transactional id"}

_Question = tuple[str, str, Operation, ResourceType, str]


class AclAuthorizer:
    """The `Authorizer` of one broker. On the event loop only."""

    def __init__(
        self,
        image: Callable[[], MetadataImage],
        super_users: frozenset[str],
        audit: Audit,
        *,
        everyone_if_none: bool = False,
        refusals: Counter[str] | None = None,
    ) -> None:
        self._image = image
        self._super_users = super_users
        self._audit = audit
        self._everyone_if_none = everyone_if_none
        self._refusals: Counter[str] = Counter() if refusals is None else refusals
        self._acls, self._roles = image().acls, image().roles
        self._index = AclIndex(self._acls, self._roles)
        self._version = 0
        self._decided: dict[_Question, bool] = {}

    @property
    def version(self) -> int:
        """A number that rises when an ACL or a role changes."""
        self._follow()
        return self._version

    def may(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str, *, log: bool = True
    ) -> bool:
        """Whether the principal may; a refusal is logged in the audit log and counted, unless `log` is False."""
        self._follow()
        question = (principal, host, operation, resource, name)
        allowed = self._decided.get(question)
        if allowed is None:
            allowed = self._decide(question)
            if len(name) <= MAX_SHOWN:
                if len(self._decided) >= MAX_DECISIONS:
                    self._decided.clear()
                self._decided[question] = allowed
        if log and (not allowed or self._audit.shows_allowed):
            self._note(question, allowed)
        return allowed

    def _note(self, question: _Question, allowed: bool) -> None:
        principal, host, operation, resource, name = question
        operation_name, type_name = Wire.Operation.Name(operation), Wire.ResourceType.Name(resource)
        if allowed:
            self._audit.allowed(principal, host, operation_name, type_name, name)
        else:
            self._refusals[operation_name] += 1
            self._audit.refused(principal, host, operation_name, type_name, name)

    def may_any(self, principal: str, host: str, operation: Operation, resource: ResourceType) -> bool:
        """Whether the principal may with at least one resource of that type (KIP-679)."""
        self._follow()
        return self.is_super(principal) or self._index.may_any(
            principal, host, operation, resource, everyone_if_none=self._everyone_if_none
        )

    def is_super(self, principal: str) -> bool:
        """Whether the principal may do everything."""
        return is_super_user(principal, self._super_users)

    def refusal(
        self, principal: str, operation: Operation, resource: ResourceType, name: str, host: str = ""
    ) -> AuthorizationError:
        """Return the error that names the missing permission and the command that grants it.

        If an ACL denies the permission, the error names that ACL, since no other ACL can help. `host`: the caller's.
        """
        if resource == Wire.CLUSTER:
            what = "the cluster"
        else:
            what = f"{'to ' if operation == Wire.WRITE else ''}{_WORDS.get(resource, 'resource')} {name[:MAX_SHOWN]!r}"
        text = f"{principal} may not {Wire.Operation.Name(operation)} {what}; "
        return _ERRORS.get(resource, AuthorizationError)(
            text + self._remedy(principal, operation, resource, name, host)
        )

    def _remedy(self, principal: str, operation: Operation, resource: ResourceType, name: str, host: str) -> str:
        if is_of_cluster(operation, resource, name):
            return "the topic is internal, and only super users may; see super.users"
        if operation == Wire.IDEMPOTENT_WRITE:  # a producer has it with Write on any topic (KIP-679)
            denial = self._index.decide(principal, host, Wire.WRITE, Wire.TOPIC, WILDCARD).acl
            if denial is not None and denial.permission == Wire.DENY:
                return (
                    f"{_whose(denial)} denies Write on all topics: {_listing(Wire.TOPIC, WILDCARD)}; {_removal(denial)}"
                )
            return (
                "a producer needs Write on a topic: "
                f"raftlog acl add --allow-principal {quote(principal)} --operation Write --topic TOPIC"
            )
        denial = self._index.decide(principal, host, operation, resource, name).acl
        if denial is not None and denial.permission == Wire.DENY:
            return f"{_whose(denial)} denies it: {_listing(resource, name)}; {_removal(denial)}"
        allow = (
            f"raftlog acl add --allow-principal {quote(principal)} --operation {_spelled(operation)} "
            f"{_option(resource, name)}"
        )
        if resource == Wire.TOPIC and name.startswith(INTERNAL_PREFIX):
            return f"the topic is internal, and only super users may read or change it; to describe it: {allow}"
        if operation != Wire.DESCRIBE:
            return allow
        if resource == Wire.GROUP:  # a consumer's first request needs Describe, and its next one Read
            read = f"raftlog acl add --allow-principal {quote(principal)} --operation Read {_option(resource, name)}"
            return f"{read}; Describe is enough for commands that only show the group"
        return f"{allow}; {_IMPLIED[resource]}" if resource in _IMPLIED else allow

    def _decide(self, question: _Question) -> bool:
        everyone = self._everyone_if_none
        return verdict(self._index, self._super_users, *question, everyone_if_none=everyone).allowed

    def _follow(self) -> None:
        image = self._image()
        if image.acls is not self._acls or image.roles is not self._roles:
            self._acls, self._roles = image.acls, image.roles
            self._index = self._index.changed_to(image.acls, image.roles)
            self._decided.clear()
            self._version += 1


def _spelled(operation: Operation) -> str:
    """Return an operation as command-line options spell it: DescribeConfigs."""
    return Wire.Operation.Name(operation).replace("_", " ").title().replace(" ", "")


def _option(resource: ResourceType, name: str) -> str:
    """Return the command-line option that names a resource."""
    if resource == Wire.CLUSTER:
        return "--cluster"
    return f"--{_WORDS.get(resource, 'resource').replace(' ', '-')} {_for_shell(name[:MAX_SHOWN])}"


def _for_shell(name: str) -> str:
    """Return a name as a shell reads it, quoted once; a control character as an escape in $'...'."""
    if name.isprintable():
        return quote(name)
    return "$'" + name.encode("unicode_escape").decode("ascii").replace("'", "\\'") + "'"


def _listing(resource: ResourceType, name: str) -> str:
    """Return the command that lists all ACLs on a resource."""
    matching = "" if resource == Wire.CLUSTER else " --resource-pattern-type match"
    return f"raftlog acl list {_option(resource, name)}{matching}"


def _whose(denial: Acl) -> str:
    """Return what denies: an ACL, or a role."""
    if not denial.principal.startswith(ROLE_PREFIX):
        return "an ACL"
    return f"role {denial.principal.removeprefix(ROLE_PREFIX)!r}"


def _removal(denial: Acl) -> str:
    """Return the command that removes just this denial."""
    if denial.principal.startswith(ROLE_PREFIX):
        command = f"raftlog role remove {_for_shell(denial.principal.removeprefix(ROLE_PREFIX))} --deny"
        host = "--host"
    else:
        command, host = f"raftlog acl remove --deny-principal {quote(denial.principal)}", "--deny-host"
    if denial.host != WILDCARD:
        command += f" {host} {quote(denial.host)}"
    command += f" --operation {_spelled(denial.operation)} {_option(denial.resource_type, denial.resource_name)}"
    return command + (" --resource-pattern-type prefixed" if denial.pattern_type == Wire.PREFIXED else "")
