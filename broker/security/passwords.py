"""What `sasl.users.location` names: a TOML file with a line `name = "password"` for each user.

Or a directory with a file for each, whose name is the user's and whose text, less one newline at its end, is the
password: a mounted Secret. Names that begin with a dot are passed over. No message shows a password.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from raftlog.errors import InvalidConfig
from raftmeta.user_names import why_no_user

MAX_USERS: Final = 1_000
MAX_BYTES: Final = 1 << 20
_SHOWN: Final = 100

Stamp = tuple[tuple[str, int, int, int], ...]


def read_passwords(path: Path) -> dict[str, str]:
    """Return the users and their passwords, in the order in which they stand there; a directory's by name.

    Raises:
        InvalidConfig: it cannot be read, or is not what it should be.
    """
    try:
        found = _of_directory(path) if path.is_dir() else _of_file(path)
    except OSError as error:
        raise refusal(path, f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise refusal(path, "it is not UTF-8 text") from None
    if len(found) > MAX_USERS:
        raise refusal(path, f"{len(found)} users; {MAX_USERS} at most, make others with `raftlog user create`")
    for user, password in found.items():
        why = why_no_user(user)
        if why is not None:
            raise refusal(path, f"there cannot be a user {user[:_SHOWN]!r}: {why}")
        if not password:
            raise refusal(path, f"user {user!r} has no password")
    return found


def _of_file(path: Path) -> dict[str, str]:
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise refusal(path, f"it has more than {MAX_BYTES} bytes")
    try:
        found = tomllib.loads(content.decode())
    except tomllib.TOMLDecodeError as error:
        _, at, where = str(error).rpartition(" (at ")  # what stands before may be part of a password
        raise refusal(path, f'it is no TOML{at}{where}; write a line name = "password" for each user') from None
    for user, password in found.items():
        if not isinstance(password, str):
            raise refusal(path, f"{user[:_SHOWN]!r} has no password in quotes; names with a dot stand in quotes, too")
    return found


def _of_directory(path: Path) -> dict[str, str]:
    found = {}
    for each in _files(path):
        with open(each, "rb") as file:
            found[each.name] = file.read(MAX_BYTES).decode().removesuffix("\n").removesuffix("\r")
    return found


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if not each.name.startswith(".") and each.is_file())


def is_there(path: Path) -> bool:
    """Whether there is anything, be it no good; a link to nothing is nothing."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def stamp_of(path: Path) -> Stamp:
    """Return what tells whether anything has changed; empty when nothing can be read."""
    try:
        found = [(each.name, os.stat(each)) for each in (path, *(_files(path) if path.is_dir() else ()))]
    except OSError:
        return ()
    return tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in found)


def refusal(path: Path, why: str) -> InvalidConfig:
    """Return the error that says what is wrong there."""
    return InvalidConfig(f"sasl.users.location={str(path)!r}: {why}")


def administrator(path: Path, super_users: frozenset[str]) -> Mapping[str, str]:
    """Return the client's settings of the first super user there, or of the first user if there are no super users.

    Raises:
        InvalidConfig: as `read_passwords`.
    """
    for user, password in read_passwords(path).items():
        if not super_users or f"User:{user}" in super_users:
            return {"sasl.username": user, "sasl.password": password}
    return {}
