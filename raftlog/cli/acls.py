"""`raftlog acl ...`: who may do what with which topics, groups and transactional ids (KIP-11, KIP-290)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from raftlog.cli import acl_words
from raftlog.cli.acl_options import AclOptions
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    confirmed,
    counted,
    print_json,
    print_note,
    print_rows,
)
from raftlog.security import AclBinding, PatternType

app = typer.Typer(no_args_is_help=True, help="Allow and deny users to do things, and list what they may do.")

T = TypeVar("T")


class Pattern(StrEnum):
    """What `--resource-pattern-type` takes."""

    LITERAL = "literal"
    PREFIXED = "prefixed"
    MATCH = "match"
    ANY = "any"


class AddedPattern(StrEnum):
    """What it takes where permissions are added."""

    LITERAL = "literal"
    PREFIXED = "prefixed"


AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow-principal", metavar="User:NAME", help="Who may; User:* is everybody; may be repeated."),
]
DenyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--deny-principal", metavar="User:NAME", help="Who may not, whatever else allows it; may be repeated."
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="ADDRESS", help="From there only; else from everywhere; may be repeated."),
]
DenyHostOption = Annotated[
    list[str] | None, typer.Option("--deny-host", metavar="ADDRESS", help="The same for --deny-principal.")
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
    typer.Option("--topic", "-t", metavar="TOPIC", help="About this topic; '*' is every one; may be repeated."),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option("--group", "-g", metavar="GROUP", help="About this consumer group; may be repeated."),
]
ClusterOption = Annotated[bool, typer.Option("--cluster", metavar="", help="About the cluster.")]
TransactionalIdOption = Annotated[
    list[str] | None,
    typer.Option("--transactional-id", metavar="ID", help="About this transactional id, or sink; may be repeated."),
]
AddedPatternOption = Annotated[
    AddedPattern,
    typer.Option(
        "--resource-pattern-type", case_sensitive=False, help="prefixed: all whose names begin with what is named."
    ),
]
PatternOption = Annotated[
    Pattern,
    typer.Option(
        "--resource-pattern-type",
        case_sensitive=False,
        help="Those for just that name, for just that prefix, whatever applies to that name (match), or any of them.",
    ),
]
ProducerOption = Annotated[
    bool,
    typer.Option(
        "--producer",
        metavar="",
        help="What a producer needs: Write, Describe, Create of --topic; Write, Describe of --transactional-id.",
    ),
]
ConsumerOption = Annotated[
    bool,
    typer.Option("--consumer", metavar="", help="What a consumer needs: Read, Describe of --topic, Read of --group."),
]
IdempotentOption = Annotated[
    bool,
    typer.Option(
        "--idempotent",
        metavar="",
        help="With --producer: IdempotentWrite of the cluster. Not needed by who may write to a topic.",
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
    """Allow or deny; all of it or, if something is refused, nothing. Without --operation it is All.

    Example: raftlog acl add --allow-principal User:orders --producer --topic orders

    Example: raftlog acl add --allow-principal User:billing --consumer --topic orders --group billing

    Example: raftlog acl add --allow-principal User:ops --operation Describe --cluster
    """
    wanted = _said(
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
        print_json({"added": _rows(added), "unchanged": _rows(before)})
        return
    for each in added:
        print(f"added: {acl_words.sentence(each)}")
    for each in before:
        print(f"was there already: {acl_words.sentence(each)}")


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
    force: Annotated[bool, typer.Option("--force", metavar="", help="Do not ask.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove permissions: all that are like what is named, and what is not named may be anything.

    It shows what would go, and asks. Without --operation it is every operation, without a host every host, without
    a principal everybody, without a topic, group or the like everything that the principal has.

    Example: raftlog acl remove --allow-principal User:orders --operation Write --topic orders

    Example: raftlog acl remove --topic orders --resource-pattern-type any --force
    """
    filters = _said(
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
        admin.describe_cluster(linearizable=True)  # what was acknowledged to anybody is seen
        if not force:
            would_go = acl_words.in_order(admin.delete_acls(filters, validate_only=True))
            if not would_go:
                _tell_removed([], output)
                return
            ask(would_go, "not removed")
            filters = [acl_words.exactly(each) for each in would_go]
        removed = acl_words.in_order(admin.delete_acls(filters))
    _tell_removed(removed, output)


@app.command("list")
def list_acls(
    principal: Annotated[
        list[str] | None,
        typer.Option("--principal", metavar="User:NAME", help="Only what names this one; may be repeated."),
    ] = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionalIdOption = None,
    pattern: PatternOption = Pattern.LITERAL,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List permissions: all, or those of principals and about resources that are named.

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
    filters = _said(lambda: options.resource_filters(principal or ()))
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)  # what was acknowledged to anybody is seen
        found = acl_words.in_order(acl for each in filters for acl in admin.describe_acls(each))
    print_rows(_rows(found), acl_words.COLUMNS, output)
    if (topic or group or transactional_id) and pattern is Pattern.LITERAL:
        print_note("those for just that name; --resource-pattern-type match also has prefixes and * that apply to it")


def ask(would_go: Sequence[AclBinding], otherwise: str) -> None:
    """Show permissions that are to be removed, and ask.

    Raises:
        typer.Exit: the answer is no, and `otherwise` is printed.
        typer.BadParameter: there is nobody to ask.
    """
    for each in would_go:
        print_note(f"goes: {acl_words.sentence(each)}")
    try:
        agreed = confirmed(f"remove {counted(len(would_go), 'permission')}?", "--force")
    except KeyboardInterrupt:
        print_note(otherwise)
        raise
    if not agreed:
        print_note(otherwise)
        raise typer.Exit(1)


def _tell_removed(removed: Sequence[AclBinding], output: Output) -> None:
    if output is Output.JSON:
        print_json({"removed": _rows(removed)})
        return
    for each in removed:
        print(f"removed: {acl_words.sentence(each)}")
    if not removed:
        print("nothing to do: there is no such permission")


def _rows(acls: Sequence[AclBinding]) -> list[dict[str, object]]:
    return [dict(acl_words.row(each)) for each in acls]


def _said(options: Callable[[], T]) -> T:
    """Return what options stand for.

    Raises:
        typer.BadParameter: nothing that can be.
    """
    try:
        return options()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
