"""`raftlog apply FILE`: gives a cluster the topics, users and permissions of a file; a second run changes nothing.

{"topics": [{"name": "orders", "partitions": 6, "replicationFactor": 3, "config": {"retention.ms": "7d"}}],
 "users": [{"name": "orders", "passwordFile": "orders.password", "mechanism": "SCRAM-SHA-512", "iterations": 8192}],
 "acls": [{"principal": "User:orders", "permission": "allow", "operations": ["Read", "Describe"],
           "resource": {"type": "topic", "name": "orders", "pattern": "literal"}, "host": "*"}]}

A topic needs a name. A user needs a name and a passwordFile, a path relative to this file. A permission needs a
principal, operations and a resource with a type and, except for the cluster, a name. TOML has the same keys:
[[topics]], [[users]], [[acls]].

`read` checks the whole file. `make` compares it with the cluster and lets brokers validate the topics, but changes
nothing; then the command carries out the steps. A topic, user or permission that is not in the file stays.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

import raftlog
from raftlog._core.descriptions import ConfigDescription, TopicDescription
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    YesOption,
    print_error,
    print_note,
    print_rows,
)
from raftlog.cli.partitions import moving
from raftlog.cli.security import acls, users
from raftlog.cli.security.users import LEAST_ITERATIONS, MOST_ITERATIONS
from raftlog.config import parse_duration_ms, parse_size_bytes
from raftlog.errors import AuthorizationError, InvalidConfig, RaftlogError, SecurityDisabled
from raftlog.security import (
    CLUSTER_NAME,
    DEFAULT_ITERATIONS,
    AclBinding,
    AclPermission,
    PatternType,
    ResourceType,
    ScramMechanism,
    UserScramCredential,
)

T = TypeVar("T")

_TOPIC_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}", re.ASCII)
_SECTIONS: Final = ("topics", "users", "acls")
_RESERVED: Final = ("*", "ANONYMOUS")
_MAX_INT32: Final = (1 << 31) - 1


class FileMistakes(Exception):
    """All mistakes in a file, each with its place."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = list(mistakes)


@dataclass(frozen=True)
class WantedTopic:
    """A topic. A number that is None means the server's default for a new topic, and no change of an existing one."""

    place: str
    name: str
    partitions: int | None
    replication_factor: int | None
    config: dict[str, str]


@dataclass(frozen=True)
class WantedUser:
    """A user. A mechanism that is None means one that the user already has, or else SCRAM-SHA-512."""

    place: str
    name: str
    password: str = field(repr=False)
    mechanism: ScramMechanism | None
    iterations: int | None


@dataclass(frozen=True)
class Wanted:
    """The content of a file. `acls` is None if the file has no such key; an empty tuple means no permissions at all."""

    topics: tuple[WantedTopic, ...]
    users: tuple[WantedUser, ...]
    acls: tuple[AclBinding, ...] | None


def read(path: Path) -> Wanted:
    """Read a file and the password files that it names.

    Raises:
        FileMistakes: the file has mistakes; the exception lists all of them.
        OSError: the file cannot be read.
    """
    mistakes: list[str] = []
    document = _document(path, path.read_bytes())
    top = _Table(document, "", mistakes)
    top.only(_SECTIONS)
    topics = [_topic(each) for each in top.tables("topics")]
    users = [_user(each, path.parent) for each in top.tables("users")]
    bindings = [acl for each in top.tables("acls") for acl in _acls(each)]
    for places in (
        {each.place: each.name for each in topics if each is not None},
        {each.place: each.name for each in users if each is not None},
    ):
        first: dict[str, str] = {}
        for place, name in places.items():
            if first.setdefault(name, place) != place:
                mistakes.append(f"{place}.name: {name!r} is in {first[name]} already")
    if mistakes:
        raise FileMistakes(mistakes)
    return Wanted(
        tuple(each for each in topics if each is not None),
        tuple(each for each in users if each is not None),
        tuple(acls.in_order(bindings)) if "acls" in document else None,
    )


class _Table:
    """One object of the file: checks and returns its values, and collects mistakes with their places."""

    def __init__(self, values: dict[str, Any], place: str, mistakes: list[str]) -> None:
        self.values = values
        self.place = place
        self.mistakes = mistakes

    def wrong(self, key: str, why: str) -> None:
        """Add a mistake."""
        self.mistakes.append(f"{self.at(key)}: {why}")

    def at(self, key: str) -> str:
        """Return a key's place in the file."""
        return f"{self.place}.{key}" if self.place else key

    def only(self, keys: Sequence[str]) -> None:
        """Add a mistake for every other key."""
        for key in self.values:
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                guess = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(keys)}"
                self.wrong(key, f"unknown key; {guess}")

    def tables(self, key: str) -> list[_Table]:
        """Return the objects of a list; empty if the key is absent or wrong."""
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
        """Return a required object; None: it is absent or wrong."""
        found = self.values.get(key)
        if isinstance(found, dict):
            return _Table(found, self.at(key), self.mistakes)
        self.wrong(key, f"an object is needed, not {_shown(found)}" if key in self.values else "is needed")
        return None

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a text, or `default`; without a default the key is required. None: it is absent or wrong."""
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
        """Return `meaning` of a text. None: it is absent or wrong."""
        text = self.text(key, default)
        if text is None:
            return None
        try:
            return meaning(text)
        except (ValueError, InvalidConfig) as error:
            self.wrong(key, str(error))
            return None

    def number(self, key: str, least: int, most: int = _MAX_INT32) -> int | None:
        """Return a whole number. None: it is absent or wrong."""
        if key not in self.values:
            return None
        found = self.values[key]
        if type(found) is float and found.is_integer():  # some templates write large whole numbers as floats
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
        raise ValueError(f"{text!r} is not a topic name: use letters, digits, '.', '_' and '-', at most 249 of them")
    if text.startswith("__"):
        raise ValueError(f"{text!r}: names that begin with two underscores are reserved for the cluster's own topics")
    return text


def _config_text(value: object) -> str | None:
    """Return a setting as text for the server; None: it has a wrong type."""
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
        raise ValueError(f"{text!r}: write the name alone; the prefix User: belongs only in acls")
    if len(text) > acls.LONGEST_NAME or not text.isprintable() or text != text.strip():
        raise ValueError(
            f"{text[:60]!a} is not a user name: write at most {acls.LONGEST_NAME} characters, without space around them"
        )
    if text in _RESERVED:
        raise ValueError(f"{text!r} is reserved: User:* means every client, User:ANONYMOUS a client without a login")
    return text


def _password(path: Path) -> str:
    try:
        return users.from_file(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _acls(table: _Table) -> list[AclBinding]:
    """Return a permission for each operation; none if a common part is wrong."""
    table.only(("principal", "permission", "operations", "resource", "host"))
    principal = table.said("principal", acls.as_principal)
    permission = table.said(
        "permission",
        lambda text: acls.parse(AclPermission, text, (AclPermission.ALLOW, AclPermission.DENY)),
        "allow",
    )
    host = table.said("host", acls.as_host, acls.WILDCARD)
    resource = _resource(table)
    named = table.values.get("operations")
    if not isinstance(named, list) or not named:
        table.wrong("operations", 'a list such as ["Read", "Describe"] is needed')
        named = []
    operations = []
    for number, each in enumerate(named):
        try:
            operations.append(acls.operation(str(each), None if resource is None else resource[0]))
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
    kind = table.said("type", lambda text: acls.parse(ResourceType, text, acls.OPERATIONS))
    pattern = table.said(
        "pattern",
        lambda text: acls.parse(PatternType, text, (PatternType.LITERAL, PatternType.PREFIXED)),
        "literal",
    )
    name = table.said(
        "name",
        lambda text: acls.resource_name(text, pattern or PatternType.LITERAL),
        CLUSTER_NAME if kind is ResourceType.CLUSTER else None,
    )
    if kind is None or pattern is None or name is None:
        return None
    if kind is ResourceType.CLUSTER and (name, pattern) != (CLUSTER_NAME, PatternType.LITERAL):
        table.wrong(
            "name", f"the cluster's only name is {CLUSTER_NAME}, with pattern literal; leave name and pattern out"
        )
        return None
    return kind, name, pattern


def _document(path: Path, data: bytes) -> dict[str, Any]:
    """Return the parsed file; its suffix tells the format."""
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
            raise ValueError(f"the key {key!r} is twice in one object")
        found[key] = value
    return found


def _shown(value: object) -> str:
    """Return a value for a message, at most 60 characters of it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


CREATED: Final = "created"
CHANGED: Final = "changed"
UNCHANGED: Final = "unchanged"
DIFFERS: Final = "differs"
REMOVED: Final = "removed"
FAILED: Final = "failed"
NOT_TRIED: Final = "not tried"
AT_ONCE: Final = 500
"""Permissions in one request, which changes all or none; clusters accept up to 1,000."""


@dataclass
class Object:
    """A topic, a user or a permission, and its result; `details`: what changes, or why nothing does.

    `differs`: a difference from the file remains, because this command cannot change it. The result is `differs` if
    nothing else changes.
    """

    kind: str
    name: str
    result: str
    details: str = ""
    differs: bool = False


@dataclass(frozen=True)
class Step:
    """An action on all of these objects or none; `do` is None if they already are as the file says."""

    objects: Sequence[Object]
    do: Callable[[], object] | None = None


@dataclass(frozen=True)
class Plan:
    """All steps in order. `pruned`: permissions that are not in the file; the last steps remove them."""

    steps: Sequence[Step]
    pruned: Sequence[AclBinding]


def make(admin: raftlog.Admin, wanted: Wanted, *, set_passwords: bool, prune_acls: bool) -> Plan:
    """Return the plan that makes the cluster as the file says.

    Raises:
        FileMistakes: brokers would refuse part of the file from any user.
        RaftlogError: the cluster does not answer, or this user lacks the permission.
    """
    admin.describe_cluster(linearizable=True)  # the next answers include every acknowledged change
    steps: list[Step] = []
    mistakes: list[str] = []
    if wanted.topics:
        steps += _topics(admin, wanted.topics, mistakes)
    there: set[AclBinding] = set()
    if wanted.acls or (wanted.acls is not None and prune_acls):
        try:
            there = set(admin.describe_acls())
        except SecurityDisabled as error:
            mistakes.append(f"acls: {error}")
    if mistakes:
        raise FileMistakes(mistakes)
    if wanted.users:
        known = admin.describe_users()
        steps += [
            _user_steps(admin, user, [each for each in known if each.user == user.name], set_passwords)
            for user in wanted.users
        ]
    pruned: list[AclBinding] = []
    if wanted.acls is not None:
        steps += _permissions(admin, wanted.acls, there)
        pruned = acls.in_order(there.difference(wanted.acls)) if prune_acls else []
    if pruned:
        steps += [_removal(admin, part) for part in _parts(pruned)]
    return Plan(steps, pruned)


def _topics(admin: raftlog.Admin, wanted: Sequence[WantedTopic], mistakes: list[str]) -> list[Step]:
    """Return the steps for topics, without those that brokers would refuse: `mistakes` receives these."""
    there = {topic.name: topic for topic in admin.describe_topics()}
    steps: list[Step] = []
    for each in wanted:
        found = there.get(each.name)
        try:
            steps.append(_new_topic(admin, each) if found is None else _topic_steps(admin, each, found))
        except RaftlogError as error:
            if error.retriable or isinstance(error, AuthorizationError):  # not a mistake in the file
                raise
            mistakes.append(f"{each.place}: {error}")
    return steps


def _new_topic(admin: raftlog.Admin, wanted: WantedTopic) -> Step:
    numbers = (wanted.partitions or 0, wanted.replication_factor or 0)
    admin.create_topic(wanted.name, *numbers, wanted.config, validate_only=True)
    details = [] if wanted.partitions is None else [counted(wanted.partitions, "partition")]
    details += [] if wanted.replication_factor is None else [counted(wanted.replication_factor, "replica")]
    details += [f"{key}={value}" for key, value in wanted.config.items()]
    return Step(
        [Object("topic", wanted.name, CREATED, ", ".join(details))],
        lambda: admin.create_topic(wanted.name, *numbers, wanted.config),
    )


def _topic_steps(admin: raftlog.Admin, wanted: WantedTopic, found: TopicDescription) -> Step:
    """Return the step for an existing topic."""
    if wanted.config:
        admin.alter_configs(topic=wanted.name, set=wanted.config, validate_only=True)
    entries = admin.describe_configs(topic=wanted.name) if wanted.config else {}
    changes = {key: value for key, value in wanted.config.items() if not _is_set(entries, key, value)}
    has = len(found.partitions)
    total = wanted.partitions if wanted.partitions is not None and wanted.partitions > has else None
    details = [] if total is None else [f"{has} -> {counted(total, 'partition')}"]
    details += [f"{key}={value}" for key, value in changes.items()]
    other = "; ".join(_differences(wanted, found))
    if details:
        result = CHANGED
        if other:
            details[-1] += f"; {DIFFERS}: {other}"
    else:
        result = DIFFERS if other else UNCHANGED
        details = [other]
    said = Object("topic", wanted.name, result, ", ".join(details), bool(other))

    def do() -> None:
        if changes:
            admin.alter_configs(topic=wanted.name, set=changes)
        if total is not None:
            admin.create_partitions(wanted.name, total)

    return Step([said], do if result == CHANGED else None)


def _differences(wanted: WantedTopic, found: TopicDescription) -> Iterator[str]:
    """Yield a topic's differences from the file that this command does not change."""
    has = len(found.partitions)
    if wanted.partitions is not None and wanted.partitions < has:
        yield f"{counted(has, 'partition')}, the file says {wanted.partitions}; a topic cannot lose partitions"
    factors = sorted({len(set(each.replicas) - set(each.removing_replicas)) for each in found.partitions})
    if wanted.replication_factor is not None and factors != [wanted.replication_factor]:
        yield (
            f"replication factor {' and '.join(map(str, factors))}, the file says {wanted.replication_factor}; "
            "see raftlog partition reassign"
        )


def _is_set(entries: Mapping[str, ConfigDescription], key: str, wanted: str) -> bool:
    """Return whether this value, in any notation, is set on the topic itself."""
    found = entries.get(key)
    return found is not None and found.source == "dynamic_topic" and _meanings(found.value) & _meanings(wanted) != set()


def _meanings(text: str) -> set[Any]:
    """Return the possible meanings of a setting: text, list, duration in milliseconds, size in bytes."""
    found: set[Any] = {text.strip().lower(), ",".join(each.strip() for each in text.split(","))}
    for parse in (parse_duration_ms, parse_size_bytes):
        try:
            found.add(parse(text))
        except ValueError:
            continue
    return found


def _user_steps(
    admin: raftlog.Admin, wanted: WantedUser, known: Sequence[UserScramCredential], set_passwords: bool
) -> Step:
    """Return the step for a user; an existing one keeps its password and streams, unless `set_passwords`."""
    has = {each.mechanism for each in known}
    chosen = wanted.mechanism or (max(has) if has else ScramMechanism.SCRAM_SHA_512)
    if not known:
        iterations = wanted.iterations or DEFAULT_ITERATIONS
        return Step(
            [Object("user", wanted.name, CREATED, chosen.mechanism_name)],
            lambda: admin.alter_user(wanted.name, wanted.password, chosen, iterations),
        )
    names = " and ".join(each.mechanism_name for each in sorted(has | {chosen}))
    if set_passwords:
        return Step(
            [Object("user", wanted.name, CHANGED, f"password, for {names}")],
            lambda: users.set_passwords(
                admin, wanted.name, wanted.password, known, sorted(has | {chosen}), wanted.iterations
            ),
        )
    details = "" if chosen in has else f"cannot log in with {chosen.mechanism_name}; --set-passwords changes that"
    return Step([Object("user", wanted.name, UNCHANGED, details)])


def _permissions(admin: raftlog.Admin, wanted: Sequence[AclBinding], there: set[AclBinding]) -> list[Step]:
    def addition(bindings: Sequence[AclBinding]) -> Step:
        return Step([_acl(each, CREATED) for each in bindings], lambda: admin.create_acls(bindings))

    new = [each for each in wanted if each not in there]
    return [*(Step([_acl(each, UNCHANGED)]) for each in wanted if each in there), *map(addition, _parts(new))]


def _removal(admin: raftlog.Admin, bindings: Sequence[AclBinding]) -> Step:
    filters = [acls.exactly(each) for each in bindings]
    return Step([_acl(each, REMOVED) for each in bindings], lambda: admin.delete_acls(filters))


def _parts(bindings: Sequence[AclBinding]) -> Iterator[Sequence[AclBinding]]:
    """Yield the permissions in requests of at most `AT_ONCE`."""
    for start in range(0, len(bindings), AT_ONCE):
        yield bindings[start : start + AT_ONCE]


def _acl(acl: AclBinding, result: str) -> Object:
    return Object("acl", acls.sentence(acl), result)


_COLUMNS: Final = ("kind", "name", "result", "details")
_WRONG: Final = 2
"""The exit code for a wrong file, as for a wrong command line."""


def apply(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", dir_okay=False, show_default=False, help="A .json or .toml file.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", metavar="", help="Show what would change; change nothing.")] = (
        False
    ),
    set_passwords: Annotated[
        bool,
        typer.Option(
            "--set-passwords",
            metavar="",
            help="Also set the passwords of existing users, which then have to log in again.",
        ),
    ] = False,
    prune_acls: Annotated[
        bool,
        typer.Option("--prune-acls", metavar="", help="Remove permissions that are not in the file, after a question."),
    ] = False,
    yes: YesOption = False,
    accept_differences: Annotated[
        bool,
        typer.Option(
            "--accept-differences",
            metavar="",
            help="Exit with 0 despite differences that this command does not change.",
        ),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give the cluster the topics, users and permissions of a file.

    The whole file is checked first; with any mistake in it, nothing changes. Topics, settings and users that are not in
    the file stay; so do permissions, unless --prune-acls is given. Topics get more partitions, never fewer.
    docs/security.md has an example.

    Exit code 0: the cluster is as the file says, with or without changes. 1: part of it is not, because a change was
    refused, or because this command does not make such a change (of the replication factor, or to fewer partitions). 2:
    the file has mistakes, or brokers would refuse part of it; nothing was changed.

    Example: raftlog apply cluster.toml --dry-run
    """
    try:
        wanted = read(file)
    except FileMistakes as error:
        _refuse(file, error)
    if prune_acls and wanted.acls is None:
        raise typer.BadParameter(f"--prune-acls needs acls in {file}; an empty list there removes all permissions")
    with connect_admin(bootstrap) as admin:
        try:
            plan = make(admin, wanted, set_passwords=set_passwords, prune_acls=prune_acls)
        except FileMistakes as error:
            _refuse(file, error)
        if not dry_run:
            if plan.pruned and not yes:
                acls.ask(plan.pruned, "nothing was changed")
            _carry_out(admin, plan.steps)
    objects = [each for step in plan.steps for each in step.objects]
    documents = {"dry_run": dry_run, "objects": [vars(each) for each in objects]}
    rows = [_row(each, dry_run) for each in objects]
    print_rows(rows, _COLUMNS, output, documents=documents, optional=("details",))
    if output is not Output.JSON:
        print_note(_summary(objects, dry_run))
    for each in objects:
        if each.result == FAILED:
            print_error(f"{each.kind} {each.name}: {each.details}")
    if any(each.result in (FAILED, NOT_TRIED) or (each.differs and not accept_differences) for each in objects):
        raise typer.Exit(1)


def _refuse(file: Path, error: FileMistakes) -> None:
    what = counted(len(error.mistakes), "mistake")
    print_error("\n".join([f"{what} in {file}; nothing was changed", *error.mistakes]))
    raise typer.Exit(_WRONG)


def _carry_out(admin: raftlog.Admin, steps: Sequence[Step]) -> None:
    """Do all steps. A refused one does not stop the others; a cluster that does not answer does."""
    away = ""
    for step in steps:
        if step.do is None:
            continue
        if away:
            _note(step.objects, NOT_TRIED, away)
            continue
        try:
            step.do()
        except RaftlogError as error:
            _note(step.objects, FAILED, str(error))
            away = str(error) if error.retriable else ""
    done = [each for step in steps for each in step.objects if each.kind == "topic"]
    names = [
        each.name for each in done if each.result == CREATED or (each.result == CHANGED and moving.KEY in each.details)
    ]
    if names and not away:
        moving.warn_of_topics(admin, names)


def _note(objects: Iterable[Object], result: str, details: str) -> None:
    for each in objects:
        each.result, each.details = result, details


def _row(found: Object, dry_run: bool) -> dict[str, object]:
    would = dry_run and found.result in (CREATED, CHANGED, REMOVED)
    return {**vars(found), "result": f"would be {found.result}" if would else found.result}


def _summary(objects: Sequence[Object], dry_run: bool) -> str:
    counts = Counter(each.result for each in objects)
    counts[DIFFERS] = sum(each.differs for each in objects)
    said = [
        f"{counts[each]:,} {each}"
        for each in (CREATED, CHANGED, REMOVED, UNCHANGED, DIFFERS, FAILED, NOT_TRIED)
        if counts[each] or each == UNCHANGED
    ]
    return f"{', '.join(said)}{'; nothing was changed, this was a dry run' if dry_run else ''}"
