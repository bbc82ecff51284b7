"""`raftlog role ...`: named sets of permissions, and the principals that have them.

Options that name permissions are those of `raftlog acl add`. A role has no host; each of its permissions has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer

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
    print_done,
    print_json,
    print_note,
    print_rows,
)
from raftlog.cli.security import acls
from raftlog.errors import ResourceNotFound
from raftlog.security import AclBinding, PatternType, Role

app = typer.Typer(no_args_is_help=True, help="Name sets of permissions as roles, and give them to users.")

COLUMNS: Final = ("role", "permissions", "principals")
_EVERYBODY: Final = "User:*"

RoleArgument = Annotated[str, typer.Argument(metavar="ROLE", show_default=False, help="The name of the role.")]
HostOption = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="ADDRESS", help="Only from this address, by default from all; may be repeated."),
]
DenyOption = Annotated[
    bool, typer.Option("--deny", metavar="", help="Deny it, despite other permissions of those that have the role.")
]
PrincipalsOption = Annotated[
    list[str],
    typer.Option("--principal", metavar="User:NAME", help="The user; User:* means all; may be repeated."),
]


@app.command()
def create(
    role: RoleArgument, bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE
) -> None:
    """Create an empty role: it has no permissions, and no principal has it.

    Example: raftlog role create clerk
    """
    with connect_admin(bootstrap) as admin:
        admin.create_role(role)
    print_done(f"role {role} created", {"role": role, "created": True}, output)


@app.command()
def delete(
    role: RoleArgument,
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a role, after a question. Its permissions and denials end at once for the principals that have it.

    Example: raftlog role delete clerk
    """
    with connect_admin(bootstrap) as admin:
        if not yes:
            admin.describe_cluster(linearizable=True)  # the next answers include every acknowledged change
            for each in admin.describe_roles(role):  # if there is none, the request fails without a question
                holders = counted(len(each.principals), "principal")
                confirm(f"delete role {role}, which {holders} may have now?", "not deleted")
        admin.delete_role(role)
    print_done(f"role {role} deleted", {"role": role, "deleted": True}, output)


@app.command()
def add(
    role: RoleArgument,
    deny: DenyOption = False,
    host: HostOption = None,
    operation: acls.OperationOption = None,
    topic: acls.TopicOption = None,
    group: acls.GroupOption = None,
    cluster: acls.ClusterOption = False,
    transactional_id: acls.TransactionalIdOption = None,
    pattern: acls.AddedPatternOption = acls.AddedPattern.LITERAL,
    producer: acls.ProducerOption = False,
    consumer: acls.ConsumerOption = False,
    idempotent: acls.IdempotentOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Add permissions to a role, at once for all principals that have it. The default of --operation is All.

    Example: raftlog role add clerk --consumer --topic orders --group billing

    Example: raftlog role add clerk --deny --operation Delete --topic '*'
    """
    wanted = _permissions(
        role, deny, host, operation, topic, group, cluster, transactional_id, pattern, producer, consumer, idempotent
    )
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)
        there = {acl for each in admin.describe_roles(role) for acl in each.permissions}
        admin.alter_role(role, add=wanted)
    _tell("added", [each for each in wanted if each not in there], [each for each in wanted if each in there], output)


@app.command()
def remove(
    role: RoleArgument,
    deny: DenyOption = False,
    host: HostOption = None,
    operation: acls.OperationOption = None,
    topic: acls.TopicOption = None,
    group: acls.GroupOption = None,
    cluster: acls.ClusterOption = False,
    transactional_id: acls.TransactionalIdOption = None,
    pattern: acls.AddedPatternOption = acls.AddedPattern.LITERAL,
    producer: acls.ProducerOption = False,
    consumer: acls.ConsumerOption = False,
    idempotent: acls.IdempotentOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove from a role exactly the permissions that the same options would add.

    Unlike raftlog acl remove, an option that is not given does not match everything.

    Example: raftlog role remove clerk --consumer --topic orders --group billing
    """
    wanted = _permissions(
        role, deny, host, operation, topic, group, cluster, transactional_id, pattern, producer, consumer, idempotent
    )
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)
        there = {acl for each in admin.describe_roles(role) for acl in each.permissions}
        admin.alter_role(role, remove=wanted)
    removed = [each for each in wanted if each in there]
    _tell("removed", removed, [each for each in wanted if each not in there], output)


@app.command()
def grant(
    role: RoleArgument,
    principal: PrincipalsOption,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a role to principals: users with passwords, and names of certificates and tokens.

    Example: raftlog role grant clerk --principal User:ada --principal User:bob
    """
    wanted = acls.said(lambda: [acls.as_principal(each) for each in principal])
    with connect_admin(bootstrap) as admin:
        admin.alter_role(role, grant=wanted)
    result = {"role": role, "granted": wanted}
    print_done(f"role {role} granted to {', '.join(wanted)}", result, output)


@app.command()
def revoke(
    role: RoleArgument,
    principal: PrincipalsOption,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Take a role from principals. What their own ACLs and other roles allow stays.

    Example: raftlog role revoke clerk --principal User:ada
    """
    wanted = acls.said(lambda: [acls.as_principal(each) for each in principal])
    with connect_admin(bootstrap) as admin:
        admin.alter_role(role, revoke=wanted)
        everybody_has_it = any(_EVERYBODY in each.principals for each in admin.describe_roles(role))
    print_done(f"role {role} revoked from {', '.join(wanted)}", {"role": role, "revoked": wanted}, output)
    if everybody_has_it and _EVERYBODY not in wanted:
        print_note(f"{', '.join(wanted)}: still has the role, which {_EVERYBODY} has")


@app.command("list")
def list_roles(
    principal: Annotated[
        str | None,
        typer.Option("--principal", metavar="User:NAME", help="Only roles of this principal.", show_default=False),
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the roles, with the numbers of their permissions and principals.

    Example: raftlog role list --principal User:ada
    """
    if principal is not None:
        acls.said(lambda: acls.as_principal(principal))
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)
        found = admin.describe_roles(principal=principal)
    rows: list[Row] = [
        {"role": each.name, "permissions": len(each.permissions), "principals": len(each.principals)} for each in found
    ]
    print_rows(rows, COLUMNS, output)


@app.command()
def describe(
    role: RoleArgument, bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE
) -> None:
    """Show what a role allows and denies, and which principals have it.

    Example: raftlog role describe clerk
    """
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)
        found = admin.describe_roles(role)
    if not found:
        raise ResourceNotFound(f"no role {role!r}; raftlog role list lists all")
    (known,) = found
    if output is Output.JSON:
        print_json(_as_json(known))
        return
    for each in acls.in_order(known.permissions):
        print(acls.sentence(each))
    if not known.permissions:
        print(f"role {role} has no permissions")
    print(f"granted to: {', '.join(known.principals) or 'no principal'}")


def _permissions(
    role: str,
    deny: bool,
    host: list[str] | None,
    operation: list[str] | None,
    topic: list[str] | None,
    group: list[str] | None,
    cluster: bool,
    transactional_id: list[str] | None,
    pattern: acls.AddedPattern,
    producer: bool,
    consumer: bool,
    idempotent: bool,
) -> list[AclBinding]:
    """Return the permissions that the options mean."""
    options = acls.AclOptions(
        allow_principals=() if deny else (_EVERYBODY,),
        deny_principals=(_EVERYBODY,) if deny else (),
        allow_hosts=() if deny else host or (),
        deny_hosts=host or () if deny else (),
        operations=operation or (),
        topics=topic or (),
        groups=group or (),
        cluster=cluster,
        transactional_ids=transactional_id or (),
        pattern=PatternType[pattern.name],
        producer=producer,
        consumer=consumer,
        idempotent=idempotent,
    )
    return [replace(each, principal=f"{acls.ROLE_PREFIX}{role}") for each in acls.said(options.bindings)]


def _tell(done: str, changed: Sequence[AclBinding], unchanged: Sequence[AclBinding], output: Output) -> None:
    if output is Output.JSON:
        print_json({done: acls.rows(changed), "unchanged": acls.rows(unchanged)})
        return
    for each in changed:
        print(f"{done}: {acls.sentence(each)}")
    for each in unchanged:
        print(f"{'exists already' if done == 'added' else 'not there'}: {acls.sentence(each)}")


def _as_json(role: Role) -> dict[str, object]:
    permissions = acls.rows(acls.in_order(role.permissions))
    return {"role": role.name, "permissions": permissions, "principals": list(role.principals)}
