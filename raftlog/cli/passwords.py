"""Passwords as commands take them: from a file, from a pipe, or typed twice; never as an argument, which others see."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from raftlog.cli.output import print_note

_LONGEST: Final = 4096
"""Characters; more is another file than was meant."""

PasswordFileOption = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        show_default=False,
        help="The password is in this file; else it is read from standard input, or asked for at a terminal.",
    ),
]


def new_password(user: str, file: Path | None) -> str:
    """Return the password that a user is to have.

    Raises:
        typer.BadParameter: it is empty, has several lines, or was not typed the same way twice.
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
    """Return the password in a file. One line end behind it does not belong to it.

    Raises:
        ValueError: there is none, or what is there is none.
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
    """Return the password that a text is, without one line end behind it.

    Raises:
        ValueError: it is empty, or has several lines; what it is does not stand in the message.
    """
    password = text.removesuffix("\n").removesuffix("\r")
    if not password:
        raise ValueError(f"{source} is empty; a password has one character at least")
    if len(password) > _LONGEST:
        raise ValueError(f"{source} has more than {_LONGEST:,} characters; a password is one line")
    if len(password.splitlines()) != 1:
        raise ValueError(f"{source} has several lines; a password is one line")
    return password


def _typed(user: str) -> str:
    """Return what somebody types twice."""
    try:
        first = getpass.getpass(f"password of {user}: ", sys.stderr)
        if not first:
            raise typer.BadParameter("the password is empty; it has one character at least")
        if getpass.getpass("once more: ", sys.stderr) != first:
            raise typer.BadParameter("that was not the same twice; nothing was changed")
    except KeyboardInterrupt:
        print_note("")
        raise
    except EOFError:
        raise typer.BadParameter("no password was typed; nothing was changed") from None
    return first
