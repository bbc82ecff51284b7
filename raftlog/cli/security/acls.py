"""`raftlog acl ...`: permissions of users on topics, groups, transactional ids and the cluster (KIP-11, KIP-290).

`AclOptions` turns options, which are those of kafka-acls, into permissions to add or filters to list and remove:

--producer    Write, Describe and Create of the topics; Write and Describe of the transactional ids
--idempotent  with --producer: IdempotentWrite of the cluster
--consumer    Read and Describe of the topics; Read of the groups
"""

from __future__ import annotations

import difflib
import enum
import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, TypeVar

import typer

import raftlog
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    Row,
    YesOption,
    confirm,
    print_json,
    print_note,
    print_rows,
)
from raftlog.errors import UnsupportedVersion
from raftlog.security import (
    CLUSTER_NAME,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermission,
    PatternType,
    ResourceType,
    Role,
)

COLUMNS: Final = ("principal", "permission", "operation", "resource_type", "resource_name", "pattern_type", "host")
WILDCARD: Final = "*"
LONGEST_NAME: Final = 255
"""The most characters in the name of a resource or a user."""
_PREFIX: Final = "User:"
ROLE_PREFIX: Final = "Role:"
"""Prefix of the principal of a role's permissions."""

OPERATIONS: Final = {
    ResourceType.TOPIC: (
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.CREATE,
        AclOperation.DESCRIBE,
        AclOperation.DELETE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (AclOperation.READ, AclOperation.DESCRIBE, AclOperation.DELETE),
    ResourceType.CLUSTER: (
        AclOperation.CREATE,
        AclOperation.CLUSTER_ACTION,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
        AclOperation.IDEMPOTENT_WRITE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE,
    ),
    ResourceType.TRANSACTIONAL_ID: (AclOperation.DESCRIBE, AclOperation.WRITE),
}
"""The operations on each kind of resource, besides ALL (Kafka's AclEntry.supportedOperations)."""

E = TypeVar("E", bound=enum.IntEnum)


def word(value: enum.IntEnum) -> str:
    """Return a value as a word: Read, DescribeConfigs; transactional-id, literal, allow."""
    if isinstance(value, AclOperation):
        return "".join(part.capitalize() for part in value.name.split("_"))
    return value.name.lower().replace("_", "-")


def parse(kind: type[E], text: str, allowed: Iterable[E]) -> E:
    """Return the value of a word; case, dashes and underscores do not matter.

    Raises:
        ValueError: the word is none of `allowed`; the message names these.
    """
    known = {_plain(each.name): each for each in allowed}
    found = known.get(_plain(text))
    if found is None:
        close = difflib.get_close_matches(_plain(text), known, n=1)
        guess = f"did you mean {word(known[close[0]])}? " if close else ""
        raise ValueError(f"{text!r}: {guess}write one of {', '.join(map(word, known.values()))}")
    return found


def operation(text: str, resource_type: ResourceType | None = None) -> AclOperation:
    """Return the operation of that name, after checking that the kind of resource has it.

    Raises:
        ValueError: it is unknown, or the resource does not have it.
    """
    every = [each for each in AclOperation if each is not AclOperation.ANY]
    found = parse(AclOperation, text, every)
    if resource_type is not None:
        check_operation(found, resource_type)
    return found


def check_operation(wanted: AclOperation, resource_type: ResourceType) -> None:
    """Check that a kind of resource has an operation.

    Raises:
        ValueError: the resource does not have the operation; the message names those that it has.
    """
    there = (AclOperation.ALL, *OPERATIONS[resource_type])
    if wanted not in there:
        raise ValueError(
            f"a {word(resource_type)} has no operation {word(wanted)}; it has {', '.join(map(word, there))}"
        )


def as_principal(text: str) -> str:
    """Return a principal.

    Raises:
        ValueError: it is not User:NAME.
    """
    if not text.startswith(_PREFIX) or text == _PREFIX:
        raise ValueError(f"{text!r}: write User:NAME, or User:* for all users")
    if not text.isprintable():
        raise ValueError(f"{text!a}: a name has no control characters")
    return text


def resource_name(text: str, pattern: PatternType) -> str:
    """Return the name or the prefix of a resource.

    Raises:
        ValueError: it is invalid.
    """
    if not 1 <= len(text) <= LONGEST_NAME:
        raise ValueError(f"it has {len(text)} characters; a name has 1 to {LONGEST_NAME}, and * means all")
    if text == WILDCARD and pattern is PatternType.PREFIXED:
        raise ValueError("* means all names, and only with pattern literal; write a prefix without it")
    return text


def as_host(text: str) -> str:
    """Return `*`, or an address or a network as brokers compare it: IPv4 within IPv6 as IPv4, without a zone.

    Raises:
        ValueError: it is neither.
    """
    if text == WILDCARD:
        return text
    if "/" in text:
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(f"{text!r}: write a network such as 10.0.0.0/8 ({error})") from None
        return str(network.network_address) if network.num_addresses == 1 else str(network)
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        raise ValueError(
            f"{text!r}: write an IP address, a network such as 10.0.0.0/8, or * for all; host names are not supported"
        ) from None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def row(acl: AclBinding) -> Row:
    """Return a permission as a row."""
    return {
        "principal": acl.principal,
        "permission": word(acl.permission),
        "operation": word(acl.operation),
        "resource_type": word(acl.resource_type),
        "resource_name": acl.resource_name,
        "pattern_type": word(acl.pattern_type),
        "host": acl.host,
    }


def sentence(acl: AclBinding) -> str:
    """Return a permission as a sentence: User:orders may Write topic orders."""
    allowed = acl.permission is AclPermission.ALLOW
    what = word(acl.operation)
    if acl.operation is AclOperation.ALL:
        what = f"do {'everything' if allowed else 'anything'} with"
    where = "" if acl.host == WILDCARD else f" from {acl.host}"
    return f"{acl.principal} may {'' if allowed else 'not '}{what} {_resource(acl)}{where}"


def exactly(acl: AclBinding) -> AclFilter:
    """Return the filter that matches only this permission."""
    return AclFilter(*astuple(acl))


def in_order(acls: Iterable[AclBinding]) -> list[AclBinding]:
    """Return permissions sorted by resource, then principal, with denials first."""
    return sorted(
        set(acls),
        key=lambda acl: (
            acl.resource_type,
            acl.resource_name,
            acl.pattern_type,
            acl.principal,
            acl.permission,
            acl.operation,
            acl.host,
        ),
    )


def _resource(acl: AclBinding) -> str:
    if acl.resource_type is ResourceType.CLUSTER and acl.resource_name == CLUSTER_NAME:
        return "the cluster"
    kind = word(acl.resource_type).replace("-", " ")
    if acl.pattern_type is PatternType.PREFIXED:
        return f"every {kind} that begins with {acl.resource_name}"
    return f"every {kind}" if acl.resource_name == WILDCARD else f"{kind} {acl.resource_name}"


def _plain(text: str) -> str:
    return text.replace("_", "").replace("-", "").lower()


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
    """The resource of a permission."""

    type: ResourceType
    name: str


_CLUSTER: Final = Resource(ResourceType.CLUSTER, CLUSTER_NAME)


@dataclass(frozen=True, kw_only=True)
class AclOptions:
    """The options of a command."""

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
            ValueError: options are missing or contradict each other; the message names them.
        """
        if not self.allow_principals and not self.deny_principals:
            raise ValueError("name a user: --allow-principal User:NAME or --deny-principal User:NAME")
        if self.pattern not in (PatternType.LITERAL, PatternType.PREFIXED):
            raise ValueError(
                f"--resource-pattern-type {word(self.pattern)} is only for raftlog acl list and remove; write literal "
                "or prefixed"
            )
        self._check_conveniences()
        if not self._resources():
            raise ValueError("name a resource: --topic, --group, --cluster or --transactional-id")
        found = [
            AclBinding(
                principal,
                operation,
                resource.type,
                resource.name,
                self._pattern_of(resource),
                permission,
                host or _ANY_HOST,
            )
            for permission, principal, host in self._principals()
            for resource, operation in self._pairs()
        ]
        return in_order(found)

    def filters(self) -> list[AclFilter]:
        """Return filters for the permissions to remove; an option that is not given matches all.

        Raises:
            ValueError: no principal or resource is named, or options contradict each other.
        """
        self._check_conveniences()
        pairs = list(self._pairs()) if self._resources() else []
        principals = list(self._principals())
        if not pairs and not principals:
            raise ValueError(
                "name some with --allow-principal, --deny-principal, --topic, --group, --cluster or --transactional-id"
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
            for permission, principal, host in principals or everyone
            for resource, operation in (self._found_pairs(pairs) if pairs else everything)
        ]

    def resource_filters(self, principals: Sequence[str]) -> list[AclFilter]:
        """Return filters for the permissions to list: of these principals and resources, by default of all."""
        return [
            AclFilter(
                principal=principal,
                resource_type=None if resource is None else resource.type,
                resource_name=None if resource is None else resource.name,
                pattern_type=None if resource is None else self._pattern_of(resource),
            )
            for principal in [as_principal(each) for each in principals] or (None,)
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
                resource_name(each.name, self._pattern_of(each))
            except ValueError as error:
                raise ValueError(f"--{word(each.type)} {each.name[:_SHOWN]!r}: {error}") from None
        return found

    def _pattern_of(self, resource: Resource) -> PatternType:
        """Return the pattern type of a resource; the cluster's is always literal."""
        return PatternType.LITERAL if resource.type is ResourceType.CLUSTER else self.pattern

    def _operations(self) -> list[AclOperation]:
        return [operation(each) for each in self.operations]

    def _pairs(self) -> Iterator[tuple[Resource, AclOperation]]:
        """Yield resources with operations; ALL if no operation is named."""
        resources = self._resources()
        if not self._expands():
            for resource in resources:
                for operation in self._operations() or [AclOperation.ALL]:
                    check_operation(operation, resource.type)
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
        """Yield resources with operations for filters; None, which matches all, if no operation is named."""
        for resource, operation in pairs:
            yield resource, operation if self._expands() or self.operations else None

    def _principals(self) -> Iterator[tuple[AclPermission, str, str | None]]:
        """Yield permission, principal and host; None if no host is named.

        Raises:
            ValueError: a host is named without a principal.
        """
        for permission, principals, hosts in (
            (AclPermission.ALLOW, self.allow_principals, self.allow_hosts),
            (AclPermission.DENY, self.deny_principals, self.deny_hosts),
        ):
            name = word(permission)
            if hosts and not principals:
                raise ValueError(f"--{name}-host needs --{name}-principal; User:* means all users")
            for principal in map(as_principal, principals):
                for host in [as_host(each) for each in hosts] or (None,):
                    yield permission, principal, host

    def _check_conveniences(self) -> None:
        """Check the options used with --producer, --consumer and --idempotent, as kafka-acls does.

        Raises:
            ValueError: an option is missing or not allowed with them.
        """
        if self.idempotent and not self.producer:
            raise ValueError("--idempotent needs --producer; without it write --cluster --operation IdempotentWrite")
        if not self._expands():
            return
        name = "--producer" if self.producer else "--consumer"
        if self.operations or self.deny_principals or self.deny_hosts:
            raise ValueError(f"{name} chooses the operations to allow: leave --operation and --deny-... out")
        if not self.topics:
            raise ValueError(f"{name} needs a --topic")
        if self.consumer and not self.groups:
            raise ValueError("--consumer needs a --group")
        if self.cluster:
            raise ValueError(f"{name} does not apply to the cluster: leave --cluster out")
        if self.transactional_ids and not self.producer:
            raise ValueError("--transactional-id needs --producer, not --consumer")
        if self.groups and not self.consumer:
            raise ValueError("--group needs --consumer, not --producer")


app = typer.Typer(no_args_is_help=True, help="Give users permissions, deny them, and list them.")

T = TypeVar("T")


class Pattern(StrEnum):
    """The values of `--resource-pattern-type`."""

    LITERAL = "literal"
    PREFIXED = "prefixed"
    MATCH = "match"
    ANY = "any"


class AddedPattern(StrEnum):
    """The values of `--resource-pattern-type` for `add`."""

    LITERAL = "literal"
    PREFIXED = "prefixed"


AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-principal", metavar="User:NAME", help="A user that is allowed; User:* means all; may be repeated."
    ),
]
DenyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--deny-principal",
        metavar="User:NAME",
        help="A user that is denied, despite other permissions; may be repeated.",
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host", metavar="ADDRESS", help="Allowed from this address, by default from all; may be repeated."
    ),
]
DenyHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--deny-host", metavar="ADDRESS", help="Denied from this address, by default from all; may be repeated."
    ),
]
OperationOption = Annotated[
    list[str] | None,
    typer.Option(
        "--operation",
        metavar="OPERATION",
        help="Read, Write, Describe, Create, Delete, Alter, DescribeConfigs, AlterConfigs, IdempotentWrite, "
        "ClusterAction, All; may be repeated.",
    ),
]
TopicOption = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="TOPIC", help="For this topic; '*' means all; may be repeated."),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option("--group", "-g", metavar="GROUP", help="For this consumer group; may be repeated."),
]
ClusterOption = Annotated[bool, typer.Option("--cluster", metavar="", help="For the cluster.")]
TransactionalIdOption = Annotated[
    list[str] | None,
    typer.Option("--transactional-id", metavar="ID", help="For this transactional id or sink; may be repeated."),
]
AddedPatternOption = Annotated[
    AddedPattern,
    typer.Option(
        "--resource-pattern-type", case_sensitive=False, help="prefixed: for all names that begin with the given one."
    ),
]
PatternOption = Annotated[
    Pattern,
    typer.Option(
        "--resource-pattern-type",
        metavar="TYPE",
        case_sensitive=False,
        help="literal: for this name only; prefixed: for this prefix only; match: all for this name; any: all.",
    ),
]
ProducerOption = Annotated[
    bool,
    typer.Option(
        "--producer",
        metavar="",
        help="What a producer needs: Write, Describe, Create on --topic; Write, Describe on --transactional-id.",
    ),
]
ConsumerOption = Annotated[
    bool,
    typer.Option("--consumer", metavar="", help="What a consumer needs: Read, Describe on --topic; Read on --group."),
]
IdempotentOption = Annotated[
    bool,
    typer.Option(
        "--idempotent",
        metavar="",
        help="With --producer: IdempotentWrite on the cluster. A user with Write on a topic does not need it.",
    ),
]


@app.command()
def add(
    allow_principal: AllowOption = None,
    deny_principal: DenyOption = None,
    allow_host: AllowHostOption = None,
    deny_host: DenyHostOption = None,
    operation: OperationOption = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionalIdOption = None,
    pattern: AddedPatternOption = AddedPattern.LITERAL,
    producer: ProducerOption = False,
    consumer: ConsumerOption = False,
    idempotent: IdempotentOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Add permissions: all of them or, after an error, none. The default of --operation is All.

    Example: raftlog acl add --allow-principal User:orders --producer --topic orders

    Example: raftlog acl add --allow-principal User:billing --consumer --topic orders --group billing

    Example: raftlog acl add --allow-principal User:ops --operation Describe --cluster
    """
    wanted = said(
        AclOptions(
            allow_principals=allow_principal or (),
            deny_principals=deny_principal or (),
            allow_hosts=allow_host or (),
            deny_hosts=deny_host or (),
            operations=operation or (),
            topics=topic or (),
            groups=group or (),
            cluster=cluster,
            transactional_ids=transactional_id or (),
            pattern=PatternType[pattern.name],
            producer=producer,
            consumer=consumer,
            idempotent=idempotent,
        ).bindings
    )
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)
        there = set(admin.describe_acls())
        admin.create_acls(wanted)
    added = [each for each in wanted if each not in there]
    before = [each for each in wanted if each in there]
    if output is Output.JSON:
        print_json({"added": rows(added), "unchanged": rows(before)})
        return
    for each in added:
        print(f"added: {sentence(each)}")
    for each in before:
        print(f"exists already: {sentence(each)}")


@app.command()
def remove(
    allow_principal: AllowOption = None,
    deny_principal: DenyOption = None,
    allow_host: AllowHostOption = None,
    deny_host: DenyHostOption = None,
    operation: OperationOption = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionalIdOption = None,
    pattern: PatternOption = Pattern.LITERAL,
    producer: ProducerOption = False,
    consumer: ConsumerOption = False,
    idempotent: IdempotentOption = False,
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove all permissions that match the options; an option that is not given matches everything.

    The command shows the permissions and asks first. It removes permissions for all operations without --operation, for
    all hosts without a host, of all users without a principal, and for all resources without a topic, group or other
    resource.

    Example: raftlog acl remove --allow-principal User:orders --operation Write --topic orders

    Example: raftlog acl remove --topic orders --resource-pattern-type any --yes
    """
    filters = said(
        AclOptions(
            allow_principals=allow_principal or (),
            deny_principals=deny_principal or (),
            allow_hosts=allow_host or (),
            deny_hosts=deny_host or (),
            operations=operation or (),
            topics=topic or (),
            groups=group or (),
            cluster=cluster,
            transactional_ids=transactional_id or (),
            pattern=PatternType[pattern.name],
            producer=producer,
            consumer=consumer,
            idempotent=idempotent,
        ).filters
    )
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)  # the next answers include every acknowledged change
        if not yes:
            would_go = in_order(admin.delete_acls(filters, validate_only=True))
            if not would_go:
                _tell_removed([], output)
                return
            ask(would_go, "not removed")
            filters = [exactly(each) for each in would_go]
        removed = in_order(admin.delete_acls(filters))
    _tell_removed(removed, output)


@app.command("list")
def list_acls(
    principal: Annotated[
        list[str] | None,
        typer.Option("--principal", metavar="User:NAME", help="Only permissions of this principal; may be repeated."),
    ] = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionalIdOption = None,
    pattern: PatternOption = Pattern.LITERAL,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List permissions, by default all, or those of the named principals (with their roles) and resources.

    A permission of a role has the principal Role:NAME; raftlog role describe shows which users have the role.

    Example: raftlog acl list --topic orders --resource-pattern-type match

    Example: raftlog acl list --principal User:orders
    """
    options = AclOptions(
        topics=topic or (),
        groups=group or (),
        cluster=cluster,
        transactional_ids=transactional_id or (),
        pattern=PatternType[pattern.name],
    )
    filters = said(lambda: options.resource_filters(principal or ()))
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)  # the next answers include every acknowledged change
        found = in_order(acl for each in filters for acl in admin.describe_acls(each))
        roles = [role for each in principal or (None,) for role in _roles_of(admin, each)]
    of_roles = {acl for role in roles for acl in role.permissions if any(is_about(each, acl) for each in filters)}
    found += in_order(of_roles)
    print_rows(rows(found), COLUMNS, output)
    if (topic or group or transactional_id) and pattern is Pattern.LITERAL:
        print_note(
            "only those for exactly that name; --resource-pattern-type match adds prefixes and * that apply to it"
        )


def _roles_of(admin: raftlog.Admin, principal: str | None) -> list[Role]:
    try:
        return admin.describe_roles(principal=principal)
    except UnsupportedVersion:  # brokers that know no roles
        return []


def is_about(wanted: AclFilter, acl: AclBinding) -> bool:
    """Whether a permission is about the resources of a filter of `AclOptions`, whatever its principal."""
    if wanted.resource_type not in (None, acl.resource_type):
        return False
    if wanted.pattern_type not in (None, PatternType.ANY, PatternType.MATCH, acl.pattern_type):
        return False
    name = wanted.resource_name
    if name is None or wanted.pattern_type is not PatternType.MATCH:
        return name in (None, acl.resource_name)
    if acl.pattern_type is PatternType.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in (name, WILDCARD)


def ask(would_go: Sequence[AclBinding], otherwise: str) -> None:
    """Show the permissions to remove, and ask.

    Raises:
        typer.Exit: the answer is no; `otherwise` is printed.
        typer.BadParameter: standard input is no terminal.
    """
    for each in would_go:
        print_note(f"to remove: {sentence(each)}")
    confirm(f"remove {counted(len(would_go), 'permission')}?", otherwise)


def _tell_removed(removed: Sequence[AclBinding], output: Output) -> None:
    if output is Output.JSON:
        print_json({"removed": rows(removed)})
        return
    for each in removed:
        print(f"removed: {sentence(each)}")
    if not removed:
        print("nothing to do: no permission matches")


def rows(acls: Iterable[AclBinding]) -> list[dict[str, object]]:
    """Return permissions as rows."""
    return [dict(row(each)) for each in acls]


def said(options: Callable[[], T]) -> T:
    """Return the result of `options`.

    Raises:
        typer.BadParameter: the options are invalid.
    """
    try:
        return options()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
