"""The file of `raftlog apply`: what a cluster is to have, read and checked as a whole.

{"topics": [{"name": "orders", "partitions": 6, "replicationFactor": 3, "config": {"retention.ms": "7d"}}],
 "users": [{"name": "orders", "passwordFile": "orders.password", "mechanism": "SCRAM-SHA-512", "iterations": 8192}],
 "acls": [{"principal": "User:orders", "permission": "allow", "operations": ["Read", "Describe"],
           "resource": {"type": "topic", "name": "orders", "pattern": "literal"}, "host": "*"}]}

Needed are a topic's name; a user's name and passwordFile, which is looked for beside this file; principal, operations
and the type of the resource, with a name but for the cluster. TOML has the same keys: [[topics]], [[users]], [[acls]].
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from raftlog.cli import acl_words, passwords
from raftlog.cli.users import LEAST_ITERATIONS, MOST_ITERATIONS
from raftlog.errors import InvalidConfig
from raftlog.security import (
    CLUSTER_NAME,
    AclBinding,
    AclPermission,
    PatternType,
    ResourceType,
    ScramMechanism,
)

T = TypeVar("T")

_TOPIC_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}", re.ASCII)
_SECTIONS: Final = ("topics", "users", "acls")
_RESERVED: Final = ("*", "ANONYMOUS")
_MAX_INT32: Final = (1 << 31) - 1


class FileMistakes(Exception):
    """What is wrong with a file, each with its place."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = list(mistakes)


@dataclass(frozen=True)
class WantedTopic:
    """A topic; None for a number: the server's default, or as it is."""

    place: str
    name: str
    partitions: int | None
    replication_factor: int | None
    config: dict[str, str]


@dataclass(frozen=True)
class WantedUser:
    """A user; None for the mechanism: any that the user has, or the default."""

    place: str
    name: str
    password: str = field(repr=False)
    mechanism: ScramMechanism | None
    iterations: int | None


@dataclass(frozen=True)
class Wanted:
    """What a file says. `acls` is None where it says nothing of any, which is not the same as that there are none."""

    topics: tuple[WantedTopic, ...]
    users: tuple[WantedUser, ...]
    acls: tuple[AclBinding, ...] | None


def read(path: Path) -> Wanted:
    """Read a file and the passwords that it names.

    Raises:
        FileMistakes: all that is wrong.
        OSError: the file cannot be read.
    """
    mistakes: list[str] = []
    document = _document(path, path.read_bytes())
    top = _Table(document, "", mistakes)
    top.only(_SECTIONS)
    topics = [_topic(each) for each in top.tables("topics")]
    users = [_user(each, path.parent) for each in top.tables("users")]
    acls = [acl for each in top.tables("acls") for acl in _acls(each)]
    for places in (
        {each.place: each.name for each in topics if each is not None},
        {each.place: each.name for each in users if each is not None},
    ):
        first: dict[str, str] = {}
        for place, name in places.items():
            if first.setdefault(name, place) != place:
                mistakes.append(f"{place}.name: {name!r} stands in {first[name]} already")
    if mistakes:
        raise FileMistakes(mistakes)
    return Wanted(
        tuple(each for each in topics if each is not None),
        tuple(each for each in users if each is not None),
        tuple(acl_words.in_order(acls)) if "acls" in document else None,
    )


class _Table:
    """One object of the file: takes values out, and notes what is wrong with them, with the place."""

    def __init__(self, values: dict[str, Any], place: str, mistakes: list[str]) -> None:
        self.values = values
        self.place = place
        self.mistakes = mistakes

    def wrong(self, key: str, why: str) -> None:
        """Note a mistake."""
        self.mistakes.append(f"{self.at(key)}: {why}")

    def at(self, key: str) -> str:
        """Return where a key stands."""
        return f"{self.place}.{key}" if self.place else key

    def only(self, keys: Sequence[str]) -> None:
        """Note keys that are none of these."""
        for key in self.values:
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                guess = f"did you mean {close[0]}?" if close else f"there are {', '.join(keys)}"
                self.wrong(key, f"there is no such key; {guess}")

    def tables(self, key: str) -> list[_Table]:
        """Return the objects of a list."""
        found = self.values.get(key, [])
        if not isinstance(found, list):
            self.wrong(key, f"a list is needed, not {_shown(found)}")
            return []
        tables = []
        for number, each in enumerate(found):
            place = f"{self.at(key)}[{number}]"
            if isinstance(each, dict):
                tables.append(_Table(each, place, self.mistakes))
            else:
                self.mistakes.append(f"{place}: an object is needed, not {_shown(each)}")
        return tables

    def table(self, key: str) -> _Table | None:
        """Return an object that is needed."""
        found = self.values.get(key)
        if isinstance(found, dict):
            return _Table(found, self.at(key), self.mistakes)
        self.wrong(key, f"an object is needed, not {_shown(found)}" if key in self.values else "is needed")
        return None

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a text; without a default it is needed. None: it is wrong."""
        if key not in self.values:
            if default is None:
                self.wrong(key, "is needed")
            return default
        found = self.values[key]
        if isinstance(found, str) and found:
            return found
        self.wrong(key, f"a text is needed, not {_shown(found)}")
        return None

    def said(self, key: str, meaning: Callable[[str], T], default: str | None = None) -> T | None:
        """Return what a text stands for. None: it is wrong."""
        text = self.text(key, default)
        if text is None:
            return None
        try:
            return meaning(text)
        except (ValueError, InvalidConfig) as error:
            self.wrong(key, str(error))
            return None

    def number(self, key: str, least: int, most: int = _MAX_INT32) -> int | None:
        """Return a whole number. None: it is not there, or wrong."""
        if key not in self.values:
            return None
        found = self.values[key]
        if type(found) is float and found.is_integer():  # templates make such ones of large numbers
            found = int(found)
        if type(found) is int and least <= found <= most:
            return found
        upper = "" if most == _MAX_INT32 else f" to {most:,}"
        self.wrong(key, f"a whole number from {least:,}{upper or ' on'} is needed, not {_shown(found)}")
        return None


def _topic(table: _Table) -> WantedTopic | None:
    table.only(("name", "partitions", "replicationFactor", "config"))
    name = table.said("name", _topic_name)
    partitions = table.number("partitions", 1)
    replication_factor = table.number("replicationFactor", 1, 32_767)
    config = {}
    if "config" in table.values and (entries := table.table("config")) is not None:
        for key, value in entries.values.items():
            text = _config_text(value)
            if text is None:
                entries.wrong(key, f"a text, a number or true or false is needed, not {_shown(value)}")
            else:
                config[key] = text
    return None if name is None else WantedTopic(table.place, name, partitions, replication_factor, config)


def _topic_name(text: str) -> str:
    if _TOPIC_NAME.fullmatch(text) is None or text in (".", ".."):
        raise ValueError(f"{text!r} is no name of a topic: letters, digits, '.', '_' and '-', at most 249 of them")
    if text.startswith("__"):
        raise ValueError(f"{text!r}: topics that begin with two underscores are the cluster's own")
    return text


def _config_text(value: object) -> str | None:
    """Return a setting as it is given to a server; None: nothing that can be one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return None


def _user(table: _Table, beside: Path) -> WantedUser | None:
    table.only(("name", "passwordFile", "mechanism", "iterations"))
    name = table.said("name", _user_name)
    password = table.said("passwordFile", lambda text: _password(beside / text))
    mechanism = table.said("mechanism", ScramMechanism.of) if "mechanism" in table.values else None
    iterations = table.number("iterations", LEAST_ITERATIONS, MOST_ITERATIONS)
    if name is None or password is None:
        return None
    return WantedUser(table.place, name, password, mechanism, iterations)


def _user_name(text: str) -> str:
    if text.startswith("User:"):
        raise ValueError(f"{text!r}: write the name alone; User: stands in front of it in acls")
    if len(text) > acl_words.LONGEST_NAME or not text.isprintable() or text != text.strip():
        raise ValueError(f"{text[:60]!a} is no name: at most {acl_words.LONGEST_NAME} characters, no space around them")
    if text in _RESERVED:
        raise ValueError(f"{text!r} stands for others: User:* is everybody, User:ANONYMOUS who did not log in")
    return text


def _password(path: Path) -> str:
    try:
        return passwords.from_file(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _acls(table: _Table) -> list[AclBinding]:
    """Return a permission for each operation; nothing where something is wrong."""
    table.only(("principal", "permission", "operations", "resource", "host"))
    principal = table.said("principal", acl_words.principal)
    permission = table.said(
        "permission",
        lambda text: acl_words.parse(AclPermission, text, (AclPermission.ALLOW, AclPermission.DENY)),
        "allow",
    )
    host = table.said("host", acl_words.host, acl_words.WILDCARD)
    resource = _resource(table)
    named = table.values.get("operations")
    if not isinstance(named, list) or not named:
        table.wrong("operations", 'a list such as ["Read", "Describe"] is needed')
        named = []
    operations = []
    for number, each in enumerate(named):
        try:
            operations.append(acl_words.operation(str(each), None if resource is None else resource[0]))
        except ValueError as error:
            table.wrong(f"operations[{number}]", str(error))
    if principal is None or permission is None or host is None or resource is None:
        return []
    kind, name, pattern = resource
    return [AclBinding(principal, operation, kind, name, pattern, permission, host) for operation in operations]


def _resource(acl: _Table) -> tuple[ResourceType, str, PatternType] | None:
    table = acl.table("resource")
    if table is None:
        return None
    table.only(("type", "name", "pattern"))
    kind = table.said("type", lambda text: acl_words.parse(ResourceType, text, acl_words.OPERATIONS))
    pattern = table.said(
        "pattern",
        lambda text: acl_words.parse(PatternType, text, (PatternType.LITERAL, PatternType.PREFIXED)),
        "literal",
    )
    name = table.said(
        "name",
        lambda text: acl_words.resource_name(text, pattern or PatternType.LITERAL),
        CLUSTER_NAME if kind is ResourceType.CLUSTER else None,
    )
    if kind is None or pattern is None or name is None:
        return None
    if kind is ResourceType.CLUSTER and (name, pattern) != (CLUSTER_NAME, PatternType.LITERAL):
        table.wrong("name", f"the cluster is called {CLUSTER_NAME}, literally; leave name and pattern out")
        return None
    return kind, name, pattern


def _document(path: Path, data: bytes) -> dict[str, Any]:
    """Return what a file says, which its suffix tells how to read."""
    try:
        text = data.decode()
        if path.suffix.lower() == ".toml":
            return tomllib.loads(text)
        if path.suffix.lower() != ".json":
            raise FileMistakes([f"a file whose name ends in .json or .toml is needed, not {path.name}"])
        found = json.loads(text, object_pairs_hook=_each_key_once)
    except UnicodeDecodeError:
        raise FileMistakes(["it is not UTF-8 text"]) from None
    except (ValueError, RecursionError) as error:
        raise FileMistakes([f"it is not valid {path.suffix[1:].upper()}: {error}"]) from None
    if not isinstance(found, dict):
        raise FileMistakes([f"an object with {', '.join(_SECTIONS)} is needed, not {_shown(found)}"])
    return found


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def _shown(value: object) -> str:
    """Return a value in a message, no longer than it helps."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."
