"""`raftlog user ...`: the users that log in with a name and a password (SCRAM, KIP-554).

Commands take passwords from a file, a pipe or the terminal, never as an argument, which other processes can see.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

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
    print_done,
    print_note,
    print_rows,
)
from raftlog.errors import InvalidRequestError, RaftlogError, ResourceNotFound
from raftlog.security import DEFAULT_ITERATIONS, AclFilter, ScramMechanism, UserScramCredential

_LONGEST: Final = 4096
"""The most characters of a password; a longer text is probably the wrong file."""

PasswordFileOption = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        show_default=False,
        help="The file with the password; by default it is read from standard input, or typed at a terminal.",
    ),
]


def new_password(user: str, file: Path | None) -> str:
    """Return a new password for a user.

    Raises:
        typer.BadParameter: it is empty or has several lines, or the two typed ones differ.
        OSError: the file cannot be read.
        KeyboardInterrupt: Ctrl-C.
    """
    try:
        if file is not None:
            return from_file(file)
        if not sys.stdin.isatty():
            return checked(sys.stdin.read(_LONGEST + 2), "standard input")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return _typed(user)


def from_file(path: Path) -> str:
    """Return the password in a file, without a line end after it.

    Raises:
        ValueError: the file has no valid password.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(4 * _LONGEST + 2)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    return checked(text, str(path))


def checked(text: str, source: str) -> str:
    """Return a text as a password, without a line end after it.

    Raises:
        ValueError: it is empty, too long, or has several lines; the message does not contain the text.
    """
    password = text.removesuffix("\n").removesuffix("\r")
    if not password:
        raise ValueError(f"{source} is empty; a password has at least one character")
    if len(password) > _LONGEST:
        raise ValueError(f"{source} has more than {_LONGEST:,} characters; a password is one line")
    if len(password.splitlines()) != 1:
        raise ValueError(f"{source} has several lines; a password is one line")
    return password


def _typed(user: str) -> str:
    """Return a password that the user types twice."""
    try:
        first = getpass.getpass(f"password of {user}: ", sys.stderr)
        if not first:
            raise typer.BadParameter("the password is empty; it needs at least one character")
        if getpass.getpass("repeat the password: ", sys.stderr) != first:
            raise typer.BadParameter("the passwords differ; nothing was changed")
    except KeyboardInterrupt:
        print_note("")
        raise
    except EOFError:
        raise typer.BadParameter("no password was typed; nothing was changed") from None
    return first


app = typer.Typer(no_args_is_help=True, help="Create, list, change and delete users who log in with a password.")

LEAST_ITERATIONS, MOST_ITERATIONS = 4_096, 1_000_000
_PREFIX = "User:"
_COLUMNS = ("user", "mechanism", "iterations")


class Mechanism(StrEnum):
    """The values of `--mechanism`."""

    SHA_256 = "SCRAM-SHA-256"
    SHA_512 = "SCRAM-SHA-512"


_MECHANISMS = " or ".join(Mechanism)


NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", show_default=False, help="The name alone, without the prefix User: of permissions."),
]
IterationsHelp = "Rounds of hashing: more rounds make guessing slower, and logins too."


@app.command()
def create(
    name: NameArgument,
    mechanism: Annotated[
        Mechanism,
        typer.Option("--mechanism", metavar="NAME", case_sensitive=False, help=f"The SCRAM mechanism: {_MECHANISMS}."),
    ] = Mechanism.SHA_512,
    iterations: Annotated[
        int, typer.Option("--iterations", min=LEAST_ITERATIONS, max=MOST_ITERATIONS, help=IterationsHelp)
    ] = DEFAULT_ITERATIONS,
    password_file: PasswordFileOption = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", metavar="", help="Succeed when the user exists already.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a user. The password is typed twice, or comes from --password-file or standard input.

    The password does not leave this process: brokers receive only keys to verify it. If brokers have an authorizer, the
    new user has no permissions; raftlog acl add grants them.

    Example: raftlog user create orders

    Example: raftlog user create orders --password-file orders.password
    """
    _check_name(name)
    with connect_admin(bootstrap) as admin:
        created = not credentials(admin, name)
        if not created and not if_not_exists:
            raise InvalidRequestError(f"the user {name!r} exists already; raftlog user passwd changes the password")
        if created:
            admin.alter_user(name, new_password(name, password_file), mechanism.value, iterations)
    result: dict[str, object] = {"user": name, "created": created}
    if created:
        result |= {"mechanism": mechanism.value, "iterations": iterations}
    print_done(f"user {name} {'created' if created else 'exists already'}", result, output)


@app.command()
def passwd(
    name: NameArgument,
    mechanism: Annotated[
        Mechanism | None,
        typer.Option(
            "--mechanism",
            metavar="NAME",
            case_sensitive=False,
            help=f"Only for this mechanism, which may be new for the user: {_MECHANISMS}; by default for all that the "
            "user has.",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations", min=LEAST_ITERATIONS, max=MOST_ITERATIONS, help=f"{IterationsHelp} By default unchanged."
        ),
    ] = None,
    password_file: PasswordFileOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change a user's password. Clients that are logged in have to log in again with the new one.

    Example: raftlog user passwd orders
    """
    _check_name(name)
    with connect_admin(bootstrap) as admin:
        known = credentials(admin, name)
        if not known:
            raise ResourceNotFound(f"no user {name!r}; raftlog user create creates one")
        chosen = [ScramMechanism.of(mechanism.value)] if mechanism is not None else [each.mechanism for each in known]
        set_passwords(admin, name, new_password(name, password_file), known, chosen, iterations)
    names = [each.mechanism_name for each in chosen]
    print_done(
        f"password of user {name} changed for {' and '.join(names)}", {"user": name, "mechanisms": names}, output
    )
    others = sorted({each.mechanism.mechanism_name for each in known} - set(names))
    if others:
        print_note(f"the old password is still valid for {' and '.join(others)}; without --mechanism all are changed")


@app.command("list")
def list_users(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="By default all.", show_default=False)
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the users and their mechanisms. Users of a broker's sasl.users.location are known only to that broker.

    Example: raftlog user list
    """
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)  # the next answers include every acknowledged change
        found = admin.describe_users(names or ())
    missing = [each for each in dict.fromkeys(names or ()) if each not in {credential.user for credential in found}]
    if missing:
        raise ResourceNotFound(f"no user {missing[0]!r}; raftlog user list lists all")
    print_rows([_row(each) for each in found], _COLUMNS, output)


@app.command()
def delete(
    name: NameArgument,
    mechanism: Annotated[
        Mechanism | None,
        typer.Option(
            "--mechanism",
            metavar="NAME",
            case_sensitive=False,
            help=f"Only remove this mechanism of the user: {_MECHANISMS}.",
        ),
    ] = None,
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a user, after a question. Brokers log its clients out at once.

    The user's permissions stay; see raftlog acl remove.

    Example: raftlog user delete orders
    """
    _check_name(name)
    what = f"user {name}" if mechanism is None else f"user {name} with {mechanism.value}"
    with connect_admin(bootstrap) as admin:
        if not yes and credentials(admin, name):  # otherwise the request fails, without a question
            confirm(f"delete {what}? its clients are logged out at once", "not deleted")
        admin.delete_user(name, None if mechanism is None else mechanism.value)
        left = _permissions(admin, name) if mechanism is None else 0
        roles = _roles(admin, name) if mechanism is None else []
    result: dict[str, object] = {"user": name, "deleted": True}
    if mechanism is not None:
        result["mechanism"] = mechanism.value
    print_done(f"{what} deleted", result, output)
    if left:
        principal = f"{_PREFIX}{name}"
        print_note(
            f"{counted(left, 'permission')} of {principal} left, also for a new user of that name; to remove: "
            f"raftlog acl remove --allow-principal {principal} --deny-principal {principal}"
        )
    for role in roles:
        print_note(
            f"a new user of that name would have role {role}; to revoke: "
            f"raftlog role revoke {role} --principal {_PREFIX}{name}"
        )


def credentials(admin: raftlog.Admin, name: str) -> list[UserScramCredential]:
    """Return a user's credentials from the controllers; empty if the user does not exist."""
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
    """Set a user's password for the chosen mechanisms; iterations stay as they were, unless given."""
    before = {each.mechanism: each.iterations for each in known}
    for mechanism in chosen:
        admin.alter_user(name, password, mechanism, iterations or before.get(mechanism, DEFAULT_ITERATIONS))


def _permissions(admin: raftlog.Admin, name: str) -> int:
    """Return the number of a user's permissions; 0 if brokers do not tell, for example without an authorizer."""
    try:
        return len(admin.describe_acls(AclFilter(principal=f"{_PREFIX}{name}")))
    except RaftlogError:
        return 0


def _roles(admin: raftlog.Admin, name: str) -> list[str]:
    """Return the roles that a user was granted itself; empty if brokers do not tell."""
    principal = f"{_PREFIX}{name}"
    try:
        return [each.name for each in admin.describe_roles(principal=principal) if principal in each.principals]
    except RaftlogError:
        return []


def _check_name(name: str) -> None:
    """Raise BadParameter for a principal instead of a name."""
    if name.startswith(_PREFIX):
        raise typer.BadParameter(f"{name!r}: write the name alone, {name.removeprefix(_PREFIX) or 'orders'!r}")


def _row(credential: UserScramCredential) -> Row:
    return {
        "user": credential.user,
        "mechanism": credential.mechanism.mechanism_name,
        "iterations": credential.iterations,
    }
