"""What `raftlog apply` has to do: what a file wants, held against what there is. It asks and checks, and does nothing.

A topic, user or permission that is not in the file stays. What brokers would refuse of topics is asked for beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import raftlog
from raftlog._core.words import counted
from raftlog._descriptions import ConfigDescription, TopicDescription
from raftlog.cli import acl_words, users
from raftlog.cli.apply_file import FileMistakes, Wanted, WantedTopic, WantedUser
from raftlog.config import parse_duration_ms, parse_size_bytes
from raftlog.errors import AuthorizationError, RaftlogError
from raftlog.security import (
    DEFAULT_ITERATIONS,
    AclBinding,
    ScramMechanism,
    UserScramCredential,
)

CREATED: Final = "created"
CHANGED: Final = "changed"
UNCHANGED: Final = "unchanged"
DIFFERS: Final = "differs"
REMOVED: Final = "removed"
FAILED: Final = "failed"
NOT_TRIED: Final = "not tried"
AT_ONCE: Final = 500
"""Permissions in one request, all or none of which are changed; clusters take up to 1,000."""


@dataclass
class Object:
    """A topic, a user or a permission, and what becomes of it; `details`: what changes, or why it does not.

    `differs`: something of it is not as wanted, and stays so. Its result says that where nothing else changes.
    """

    kind: str
    name: str
    result: str
    details: str = ""
    differs: bool = False


@dataclass(frozen=True)
class Step:
    """Something that is done to objects, to all of them or none; nothing to do: they are as wanted."""

    objects: Sequence[Object]
    do: Callable[[], object] | None = None


@dataclass(frozen=True)
class Plan:
    """All steps in their order. `pruned`: permissions that the file does not have; they go in the last step."""

    steps: Sequence[Step]
    pruned: Sequence[AclBinding]


def make(admin: raftlog.Admin, wanted: Wanted, *, set_passwords: bool, prune_acls: bool) -> Plan:
    """Return what has to be done.

    Raises:
        FileMistakes: brokers would refuse some of it, whoever asks.
        RaftlogError: nobody answers, or this user may not do it.
    """
    admin.describe_cluster(linearizable=True)  # what was acknowledged to anybody is seen
    steps: list[Step] = []
    if wanted.topics:
        steps += _topics(admin, wanted.topics)
    if wanted.users:
        known = admin.describe_users()
        steps += [
            _user(admin, user, [each for each in known if each.user == user.name], set_passwords)
            for user in wanted.users
        ]
    pruned: list[AclBinding] = []
    if wanted.acls or (wanted.acls is not None and prune_acls):
        there = set(admin.describe_acls())
        steps += _permissions(admin, wanted.acls, there)
        pruned = acl_words.in_order(there.difference(wanted.acls)) if prune_acls else []
    if pruned:
        steps += [_removal(admin, part) for part in _parts(pruned)]
    return Plan(steps, pruned)


def _topics(admin: raftlog.Admin, wanted: Sequence[WantedTopic]) -> list[Step]:
    there = {topic.name: topic for topic in admin.describe_topics()}
    steps: list[Step] = []
    refused: list[str] = []
    for each in wanted:
        found = there.get(each.name)
        try:
            steps.append(_new_topic(admin, each) if found is None else _topic(admin, each, found))
        except RaftlogError as error:
            if error.retriable or isinstance(error, AuthorizationError):  # nothing of the file
                raise
            refused.append(f"{each.place}: {error}")
    if refused:
        raise FileMistakes(refused)
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


def _topic(admin: raftlog.Admin, wanted: WantedTopic, found: TopicDescription) -> Step:
    """Return what a topic needs that is there."""
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
    """Yield what a topic has that is not as wanted, and that does not change here."""
    has = len(found.partitions)
    if wanted.partitions is not None and wanted.partitions < has:
        yield f"{counted(has, 'partition')}, the file says {wanted.partitions}; they never become fewer"
    factors = sorted({len(set(each.replicas) - set(each.removing_replicas)) for each in found.partitions})
    if wanted.replication_factor is not None and factors != [wanted.replication_factor]:
        yield (
            f"replication factor {' and '.join(map(str, factors))}, the file says {wanted.replication_factor}; "
            "see raftlog partition reassign"
        )


def _is_set(entries: Mapping[str, ConfigDescription], key: str, wanted: str) -> bool:
    """Whether a topic has this value of its own, however it is written."""
    found = entries.get(key)
    return found is not None and found.source == "dynamic_topic" and _meanings(found.value) & _meanings(wanted) != set()


def _meanings(text: str) -> set[Any]:
    """Return what a setting may mean: itself, a list, a duration in milliseconds, a size in bytes."""
    found: set[Any] = {text.strip().lower(), ",".join(each.strip() for each in text.split(","))}
    for parse in (parse_duration_ms, parse_size_bytes):
        try:
            found.add(parse(text))
        except ValueError:
            continue
    return found


def _user(admin: raftlog.Admin, wanted: WantedUser, known: Sequence[UserScramCredential], set_passwords: bool) -> Step:
    """Return what a user needs; one who is there keeps password and streams, unless `set_passwords`."""
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
    new = [each for each in wanted if each not in there]
    steps = [Step([_acl(each, UNCHANGED)]) for each in wanted if each in there]
    return [*steps, *(_addition(admin, part) for part in _parts(new))]


def _addition(admin: raftlog.Admin, acls: Sequence[AclBinding]) -> Step:
    return Step([_acl(each, CREATED) for each in acls], lambda: admin.create_acls(acls))


def _removal(admin: raftlog.Admin, acls: Sequence[AclBinding]) -> Step:
    filters = [acl_words.exactly(each) for each in acls]
    return Step([_acl(each, REMOVED) for each in acls], lambda: admin.delete_acls(filters))


def _parts(acls: Sequence[AclBinding]) -> Iterator[Sequence[AclBinding]]:
    """Yield as many at a time as go into one request."""
    for start in range(0, len(acls), AT_ONCE):
        yield acls[start : start + AT_ONCE]


def _acl(acl: AclBinding, result: str) -> Object:
    return Object("acl", acl_words.sentence(acl), result)
