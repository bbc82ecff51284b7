"""The changes that people make in the console. Each checks a form, asks the cluster, and returns what happened.

This module refuses an action only for an incomplete form; the broker refuses actions for which a user has no
permission. `why_not` says beforehand which permission is missing, so that pages do not offer the action. Every attempt
goes into the audit log (logger `raftlog.console.audit`): the user, the action, its object, and the outcome.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Final

import raftlog
from raftlog._core.words import counted
from raftlog.cli.partitions.moving import Move
from raftlog.config import parse_size_bytes
from raftlog.console.messages import parse_headers
from raftlog.console.rebalance import AT_A_TIME, Rebalance
from raftlog.console.view import View
from raftlog.errors import ElectionNotNeeded, InvalidRequestError, RaftlogError
from raftlog.security import AclBinding, AclFilter, AclOperation, AclPermission, PatternType, ResourceType
from raftlog.types import TopicPartition

audit = logging.getLogger("raftlog.console.audit")
MOST_OF_NAME: Final = 300
"""Characters of a name in a line of the audit log; names of topics have 249 at most."""

Fields = Mapping[str, str]


def _name_safely(record: logging.LogRecord) -> bool:
    """Write names so that none looks like a line of its own: any visitor may type one into the login page."""
    if isinstance(record.args, tuple):
        record.args = tuple(_in_one_line(each) if isinstance(each, str) else each for each in record.args)
    return True


def _in_one_line(text: str) -> str:
    cut = text if len(text) <= MOST_OF_NAME else text[:MOST_OF_NAME] + "..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)


audit.addFilter(_name_safely)


def perform(name: str, view: View, fields: Fields, user: str, address: str) -> tuple[bool, str]:
    """Carry out an action, and return whether it succeeded and what to say.

    `user`, `address`: who asks, for the audit log.
    """
    target = next((fields[each] for each in _TARGETS if fields.get(each)), "")
    try:
        said = ACTIONS[name](view, fields)
    except RaftlogError as error:
        audit.warning("%s of %s by %s from %s was refused: %s", name, target, user, address, type(error).__name__)
        return False, str(error)
    finally:
        view.forget()
    audit.info("%s of %s by %s from %s", name, target, user, address)
    return True, said


_TARGETS: Final = ("topic", "group", "broker", "id", "user", "principal", "moves")


def _text(fields: Fields, name: str) -> str:
    found = fields.get(name, "").strip()
    if not found:
        raise InvalidRequestError(f"{name.replace('_', ' ')} is missing")
    return found


def _number(fields: Fields, name: str) -> int:
    found = _text(fields, name)
    if not re.fullmatch(r"-?\d{1,18}", found, re.ASCII):
        raise InvalidRequestError(f"{name.replace('_', ' ')} {found!r}: write a whole number")
    return int(found)


def _typed(fields: Fields, name: str) -> str:
    """Return the name of what is deleted, which the person has typed."""
    wanted = _text(fields, name)
    if fields.get("typed", "").strip() != wanted:
        raise InvalidRequestError(f"nothing was deleted: type the name {wanted} to confirm")
    return wanted


def create_topic(view: View, fields: Fields) -> str:
    """Create a topic, with configs in lines of key=value."""
    name = _text(fields, "topic")
    configs: dict[str, str] = {}
    for line in fields.get("configs", "").splitlines():
        if line.strip():
            key, equal, value = line.partition("=")
            if not equal:
                raise InvalidRequestError(f"config {line!r}: write key=value, one on each line")
            configs[key.strip()] = value.strip()
    view.admin.create_topic(name, _number(fields, "partitions"), _number(fields, "replication_factor"), configs)
    return f"Topic {name} was created."


def delete_topic(view: View, fields: Fields) -> str:
    """Delete a topic whose name was typed."""
    name = _typed(fields, "topic")
    view.admin.delete_topic(name)
    return f"Topic {name} was deleted."


def set_config(view: View, fields: Fields) -> str:
    """Set one key of a topic or a broker, or give it back its default."""
    key = _text(fields, "key")
    topic = fields.get("topic") or None
    broker = None if topic is not None else _number(fields, "broker")
    if fields.get("default"):
        view.admin.alter_configs(topic, broker, unset=[key])
        return f"{key} has its default again."
    value = fields.get("value", "").strip()
    view.admin.alter_configs(topic, broker, set={key: value})
    return f"{key} is {value} now."


def add_partitions(view: View, fields: Fields) -> str:
    """Raise the number of partitions."""
    topic, total = _text(fields, "topic"), _number(fields, "total")
    view.admin.create_partitions(topic, total)
    return f"Topic {topic} has {total} partitions now."


def elect(view: View, fields: Fields) -> str:
    """Let preferred replicas lead."""
    topic = _text(fields, "topic")
    try:
        view.admin.elect_leaders(topic)
    except ElectionNotNeeded:
        return f"The preferred replicas of {topic} lead already."
    return f"The preferred replicas of {topic} lead."


def reassign(view: View, fields: Fields) -> str:
    """Move one partition, or cancel its move."""
    part = TopicPartition(_text(fields, "topic"), _number(fields, "partition"))
    if fields.get("cancel"):
        view.admin.alter_reassignments({part: None})
        return f"The move of {part} was cancelled."
    replicas = _text(fields, "replicas")
    if not re.fullmatch(r"\d{1,9}(\s*,\s*\d{1,9})*", replicas, re.ASCII):
        raise InvalidRequestError(f"replicas {replicas!r}: write ids of brokers, the preferred leader first: 1,2,3")
    wanted = [int(each) for each in replicas.split(",")]
    view.admin.alter_reassignments({part: wanted})
    return f"{part} moves to brokers {', '.join(map(str, wanted))}."


def move(view: View, fields: Fields) -> str:
    """Carry out a plan as it was shown, with or without a throttle."""
    if view.rebalance is not None and view.rebalance.progress.runs:
        raise InvalidRequestError("a rebalance is under way; wait until it is done, or cancel it")
    wanted: dict[TopicPartition, list[int]] = {}
    for each in _text(fields, "moves").split():
        found = re.fullmatch(r"([\w.-]+):(\d{1,9}):(\d{1,9}(?:,\d{1,9})*)", each, re.ASCII)
        if found is None:
            raise InvalidRequestError("the plan is malformed; make it again")
        wanted[TopicPartition(found[1], int(found[2]))] = [int(replica) for replica in found[3].split(",")]
    throttle = fields.get("throttle", "").strip()
    try:
        rate = parse_size_bytes(throttle) if throttle else None
    except ValueError:
        raise InvalidRequestError(f"throttle {throttle!r}: write bytes per second, for example 20MiB") from None
    if rate is not None and rate < 1:
        raise InvalidRequestError(f"throttle {throttle!r}: write bytes per second, for example 20MiB")
    leaving = _number(fields, "leaving") if fields.get("leaving") else None
    moves = [Move(part, tuple(replicas)) for part, replicas in wanted.items()]
    rebalance = Rebalance(view.mover(), moves, leaving, rate)
    progress = rebalance.step()  # at once, so that a refusal is told at once
    if progress.state == "failed":
        raise InvalidRequestError(progress.waits)
    view.rebalance = rebalance
    rebalance.start()
    return f"The rebalance has begun: {counted(len(moves), 'move')}, {AT_A_TIME} at a time."


def cancel_rebalance(view: View, fields: Fields) -> str:
    """Begin no more moves of the plan, and cancel those under way."""
    if view.rebalance is None or not view.rebalance.progress.runs:
        raise InvalidRequestError("no rebalance of yours is under way")
    view.rebalance.cancel()
    return "The rebalance is being cancelled. Partitions that have moved stay where they are."


def delete_records(view: View, fields: Fields) -> str:
    """Delete the records of a partition below an offset; -1: all that are committed."""
    if fields.get("typed", "").strip() != _text(fields, "topic"):
        raise InvalidRequestError(f"nothing was deleted: type the name {fields['topic']} to confirm")
    part = TopicPartition(_text(fields, "topic"), _number(fields, "partition"))
    start = view.admin.delete_records({part: _number(fields, "before")})[part]
    return f"{part} begins at offset {start} now."


def produce(view: View, fields: Fields) -> str:
    """Send one record, with acks=all."""
    partition = fields.get("partition", "").strip()
    config = {**view.settings, "acks": "all", "delivery.timeout.ms": 10_000, "max.block.ms": 5_000}
    with raftlog.Producer(view.bootstrap, config=config) as producer:
        sent = producer.send(
            _text(fields, "topic"),
            None if fields.get("null_value") else fields.get("value", "").replace("\r\n", "\n").encode(),
            key=fields["key"].encode() if fields.get("key") else None,
            partition=_number(fields, "partition") if partition else None,
            headers=parse_headers(fields.get("headers", "")) or None,
        ).result(15)
    return f"The record is at offset {sent.offset} of {sent.topic}-{sent.partition}."


def reset_offsets(view: View, fields: Fields) -> str:
    """Set the offsets that the preview has shown."""
    group = _text(fields, "group")
    offsets: dict[TopicPartition, int] = {}
    for each in _text(fields, "offsets").split():
        found = re.fullmatch(r"([\w.-]+):(\d{1,9}):(\d{1,18})", each, re.ASCII)
        if found is None:
            raise InvalidRequestError("the offsets are malformed; make the preview again")
        offsets[TopicPartition(found[1], int(found[2]))] = int(found[3])
    view.admin.alter_group_offsets(group, dict(offsets))
    return f"{counted(len(offsets), 'offset')} of group {group} set."


def delete_group(view: View, fields: Fields) -> str:
    """Delete a group whose name was typed."""
    group = _typed(fields, "group")
    view.admin.delete_groups([group])
    return f"Group {group} was deleted."


def abort(view: View, fields: Fields) -> str:
    """Abort an open transaction."""
    name = _text(fields, "id")
    view.admin.abort_transaction(name)
    return f"The transaction of {name} is aborted, and its producer is fenced."


def abort_hanging(view: View, fields: Fields) -> str:
    """End a hanging transaction in its partition."""
    part = TopicPartition(_text(fields, "topic"), _number(fields, "partition"))
    view.admin.abort_hanging(part.topic, part.partition, _number(fields, "start_offset"))
    return f"The hanging transaction in {part} is aborted."


def alter_broker(view: View, fields: Fields) -> str:
    """Cordon, uncordon, drain, undrain a broker, or remove it from the cluster."""
    broker, change = _number(fields, "broker"), _text(fields, "change")
    match change:
        case "cordon" | "uncordon":
            view.admin.alter_broker(broker, cordoned=change == "cordon")
        case "drain" | "undrain":
            view.admin.alter_broker(broker, drained=change == "drain")
        case "remove":
            view.admin.unregister_broker(broker)
        case _:
            raise InvalidRequestError(f"{change!r} is no change of a broker")
    return {
        "cordon": f"Broker {broker} gets no new replicas.",
        "uncordon": f"Broker {broker} gets replicas again.",
        "drain": f"Broker {broker} is drained: its leaderships move to other in-sync replicas.",
        "undrain": f"Broker {broker} may lead again.",
        "remove": f"Broker {broker} has left the cluster.",
    }[change]


def set_user(view: View, fields: Fields) -> str:
    """Create a user, or change its password."""
    user = _text(fields, "user")
    if fields.get("password", "") != fields.get("repeated", ""):
        raise InvalidRequestError("the two passwords differ")
    view.admin.alter_user(user, fields.get("password", ""), fields.get("mechanism") or "SCRAM-SHA-512")
    return f"User {user} has this password now."


def delete_user(view: View, fields: Fields) -> str:
    """Delete a user whose name was typed."""
    user = _typed(fields, "user")
    view.admin.delete_user(user)
    return f"User {user} was deleted; its connections are closed."


def _acl(fields: Fields) -> AclBinding:
    try:
        return AclBinding(
            _text(fields, "principal"),
            AclOperation[_text(fields, "operation")],
            ResourceType[_text(fields, "resource_type")],
            _text(fields, "resource_name"),
            PatternType[fields.get("pattern_type") or "LITERAL"],
            AclPermission[fields.get("permission") or "ALLOW"],
            fields.get("host", "").strip() or "*",
        )
    except KeyError as error:
        raise InvalidRequestError(f"there is no {error.args[0]}") from None


def add_acl(view: View, fields: Fields) -> str:
    """Create an ACL."""
    acl = _acl(fields)
    view.admin.create_acls(acl)
    return f"{acl.principal} has the ACL now."


def delete_acl(view: View, fields: Fields) -> str:
    """Delete exactly one ACL."""
    acl = _acl(fields)
    exact = AclFilter(
        acl.principal, acl.operation, acl.resource_type, acl.resource_name, acl.pattern_type, acl.permission, acl.host
    )
    return "The ACL was deleted." if view.admin.delete_acls(exact) else "There was no such ACL any more."


ACTIONS: Final[Mapping[str, Callable[[View, Fields], str]]] = {
    "create-topic": create_topic,
    "delete-topic": delete_topic,
    "set-config": set_config,
    "add-partitions": add_partitions,
    "elect": elect,
    "reassign": reassign,
    "move": move,
    "cancel-rebalance": cancel_rebalance,
    "delete-records": delete_records,
    "produce": produce,
    "reset-offsets": reset_offsets,
    "delete-group": delete_group,
    "abort": abort,
    "abort-hanging": abort_hanging,
    "alter-broker": alter_broker,
    "set-user": set_user,
    "delete-user": delete_user,
    "add-acl": add_acl,
    "delete-acl": delete_acl,
}
"""The changes by name; a form posts to /do/NAME."""

_CLUSTER: Final = (ResourceType.CLUSTER, AclOperation.ALTER)
NEEDS: Final[Mapping[str, tuple[ResourceType, AclOperation]]] = {
    "delete-topic": (ResourceType.TOPIC, AclOperation.DELETE),
    "set-config": (ResourceType.TOPIC, AclOperation.ALTER_CONFIGS),
    "add-partitions": (ResourceType.TOPIC, AclOperation.ALTER),
    "elect": _CLUSTER,
    "reassign": _CLUSTER,
    "move": _CLUSTER,
    "cancel-rebalance": _CLUSTER,
    "delete-records": (ResourceType.TOPIC, AclOperation.DELETE),
    "produce": (ResourceType.TOPIC, AclOperation.WRITE),
    "reset-offsets": (ResourceType.GROUP, AclOperation.READ),
    "delete-group": (ResourceType.GROUP, AclOperation.DELETE),
    "abort": (ResourceType.TRANSACTIONAL_ID, AclOperation.WRITE),
    "abort-hanging": _CLUSTER,
    "alter-broker": _CLUSTER,
    "set-user": _CLUSTER,
    "delete-user": _CLUSTER,
    "add-acl": _CLUSTER,
    "delete-acl": _CLUSTER,
}
"""The permission that each change needs; docs/security.md. Not create-topic, which has a question of its own."""


def why_not(view: View, action: str, name: str = "") -> str | None:
    """Return why this user may not do that with the resource of that name; None: as far as is known, it may."""
    if action == "create-topic":
        return None if view.may_create_topics() else "You may not: this needs Create on the cluster, or on some topics."
    resource, operation = NEEDS[action]
    may = view.operations(resource, name)
    if may is None or operation in may:
        return None
    word = operation.name.replace("_", " ").title().replace(" ", "")
    what = "the cluster" if resource is ResourceType.CLUSTER else f"{resource.name.lower().replace('_', ' ')} {name}"
    return f"You may not: this needs {word} on {what}."
