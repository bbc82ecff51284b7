"""`raftlog user ...`: who can log in by name and password (SCRAM, KIP-554)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

import raftlog
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    Row,
    confirmed,
    counted,
    print_done,
    print_note,
    print_rows,
)
from raftlog.cli.passwords import PasswordFileOption, new_password
from raftlog.errors import InvalidRequestError, RaftlogError, ResourceNotFound
from raftlog.security import DEFAULT_ITERATIONS, AclFilter, ScramMechanism, UserScramCredential

app = typer.Typer(no_args_is_help=True, help="Create, list, change and delete users who log in with a password.")

LEAST_ITERATIONS, MOST_ITERATIONS = 4_096, 1_000_000
_PREFIX = "User:"
_COLUMNS = ("user", "mechanism", "iterations")


class Mechanism(StrEnum):
    """What `--mechanism` takes."""

    SHA_256 = "SCRAM-SHA-256"
    SHA_512 = "SCRAM-SHA-512"


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="Without User:, as it stands in front in permissions.")
]
IterationsHelp = "Rounds of hashing: more is slower to guess, and to log in with."


@app.command()
def create(
    name: NameArgument,
    mechanism: Annotated[
        Mechanism, typer.Option("--mechanism", case_sensitive=False, help="How the password is checked.")
    ] = Mechanism.SHA_512,
    iterations: Annotated[
        int, typer.Option("--iterations", min=LEAST_ITERATIONS, max=MOST_ITERATIONS, help=IterationsHelp)
    ] = DEFAULT_ITERATIONS,
    password_file: PasswordFileOption = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", metavar="", help="No error when there is one of that name.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a user. The password is asked for twice, or comes from --password-file or standard input.

    It does not leave this process: brokers get what they check one with. The user may do nothing yet where brokers
    have an authorizer; raftlog acl add allows it.

    Example: raftlog user create orders

    Example: raftlog user create orders --password-file orders.password
    """
    _check_name(name)
    with connect_admin(bootstrap) as admin:
        created = not credentials(admin, name)
        if not created and not if_not_exists:
            raise InvalidRequestError(f"there is a user {name!r} already; raftlog user passwd changes the password")
        if created:
            admin.alter_user(name, new_password(name, password_file), mechanism.value, iterations)
    result: dict[str, object] = {"user": name, "created": created}
    if created:
        result |= {"mechanism": mechanism.value, "iterations": iterations}
    print_done(f"user {name} {'created' if created else 'was there already'}", result, output)


@app.command()
def passwd(
    name: NameArgument,
    mechanism: Annotated[
        Mechanism | None,
        typer.Option(
            "--mechanism",
            case_sensitive=False,
            help="Only for this one, which the user need not have yet; else for all that the user has.",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations", min=LEAST_ITERATIONS, max=MOST_ITERATIONS, help=f"{IterationsHelp} Else as it was."
        ),
    ] = None,
    password_file: PasswordFileOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a user another password. Whoever is logged in with the old one has to log in again, and cannot with that.

    Example: raftlog user passwd orders
    """
    _check_name(name)
    with connect_admin(bootstrap) as admin:
        known = credentials(admin, name)
        if not known:
            raise ResourceNotFound(f"there is no user {name!r}; raftlog user create makes one")
        chosen = [ScramMechanism.of(mechanism.value)] if mechanism is not None else [each.mechanism for each in known]
        set_passwords(admin, name, new_password(name, password_file), known, chosen, iterations)
    names = [each.mechanism_name for each in chosen]
    print_done(
        f"user {name} has another password, for {' and '.join(names)}", {"user": name, "mechanisms": names}, output
    )
    others = sorted({each.mechanism.mechanism_name for each in known} - set(names))
    if others:
        print_note(f"the old password still counts for {' and '.join(others)}; without --mechanism all are changed")


@app.command("list")
def list_users(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="All, if none is named.", show_default=False)
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the users, and how they log in. Those of a broker's sasl.users.location are known to that broker alone.

    Example: raftlog user list
    """
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)  # what was acknowledged to anybody is seen
        found = admin.describe_users(names or ())
    missing = [each for each in dict.fromkeys(names or ()) if each not in {credential.user for credential in found}]
    if missing:
        raise ResourceNotFound(f"there is no user {missing[0]!r}; raftlog user list has all")
    print_rows([_row(each) for each in found], _COLUMNS, output)


@app.command()
def delete(
    name: NameArgument,
    mechanism: Annotated[
        Mechanism | None,
        typer.Option("--mechanism", case_sensitive=False, help="Only that the user logs in with this one."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Do not ask.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a user, after asking. Whoever is logged in as it is put out at once.

    Its permissions stay; see raftlog acl remove.

    Example: raftlog user delete orders
    """
    _check_name(name)
    what = f"user {name}" if mechanism is None else f"user {name} with {mechanism.value}"
    with connect_admin(bootstrap) as admin:
        if not force and credentials(admin, name):  # else it is refused, which needs no question
            _ask(what)
        admin.delete_user(name, None if mechanism is None else mechanism.value)
        left = _permissions(admin, name) if mechanism is None else 0
    result: dict[str, object] = {"user": name, "deleted": True}
    if mechanism is not None:
        result["mechanism"] = mechanism.value
    print_done(f"{what} deleted", result, output)
    if left:
        principal = f"{_PREFIX}{name}"
        print_note(
            f"{counted(left, 'permission')} of {principal} {'is' if left == 1 else 'are'} left, for whoever gets that "
            f"name: raftlog acl remove --allow-principal {principal} --deny-principal {principal}"
        )


def credentials(admin: raftlog.Admin, name: str) -> list[UserScramCredential]:
    """Return how a user logs in, as the controllers have it now; nothing: there is no such user."""
    admin.describe_cluster(linearizable=True)
    try:
        return admin.describe_users([name])
    except ResourceNotFound:
        return []


def set_passwords(
    admin: raftlog.Admin,
    name: str,
    password: str,
    known: Sequence[UserScramCredential],
    chosen: Sequence[ScramMechanism],
    iterations: int | None,
) -> None:
    """Set a user's password for the mechanisms that are chosen; the iterations are those of before, unless given."""
    before = {each.mechanism: each.iterations for each in known}
    for mechanism in chosen:
        admin.alter_user(name, password, mechanism, iterations or before.get(mechanism, DEFAULT_ITERATIONS))


def _ask(what: str) -> None:
    """Ask whether a user is to go.

    Raises:
        typer.Exit: the answer is no.
        typer.BadParameter: there is nobody to ask.
    """
    try:
        agreed = confirmed(f"delete {what}? whoever is logged in is put out at once", "--force")
    except KeyboardInterrupt:
        print_note("not deleted")
        raise
    if not agreed:
        print_note("not deleted")
        raise typer.Exit(1)


def _permissions(admin: raftlog.Admin, name: str) -> int:
    """Return how many permissions name a user; 0 where they are not told, since there is no authorizer for one."""
    try:
        return len(admin.describe_acls(AclFilter(principal=f"{_PREFIX}{name}")))
    except RaftlogError:
        return 0


def _check_name(name: str) -> None:
    """Raise a BadParameter for a principal in place of a name."""
    if name.startswith(_PREFIX):
        raise typer.BadParameter(f"{name!r}: write the name alone, {name.removeprefix(_PREFIX) or 'orders'!r}")


def _row(credential: UserScramCredential) -> Row:
    return {
        "user": credential.user,
        "mechanism": credential.mechanism.mechanism_name,
        "iterations": credential.iterations,
    }
