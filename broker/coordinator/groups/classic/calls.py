"""Commands and deadlines of a classic group become operations of its machine, and its state becomes records.

The machine is soft state: the coordinator makes it from the records when it loads the log, and it goes with the
coordinator. What a reply tells is stored with the decision, so it leaves once the records are committed (ADR 0014).

A group is of one type at a time: it changes its type while it has no members, or as `migration` says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final, assert_never

from broker.coordinator.groups.change import Change
from broker.coordinator.groups.checks import MAX_ID
from broker.coordinator.groups.classic.commands import (
    ClassicCommand,
    HeartbeatClassic,
    JoinClassic,
    LeaveClassic,
    SyncClassic,
)
from broker.coordinator.groups.classic.consumer import subscribed_topics
from broker.coordinator.groups.classic.machine import ClassicConfig, ClassicGroup, ClassicMember, State, Store
from broker.coordinator.groups.group import ClassicHead, ClassicPart, Group, Head, Member, Subscription
from broker.coordinator.groups.sessions import Kind, Timers
from raftlog.errors import InvalidRequestError, UnknownMemberId

MAX_PROTOCOLS: Final = 100


def follow(change: Change, command: ClassicCommand) -> None:
    """Carry out a command.

    Raises:
        RaftlogError: it is refused; nothing has changed.
    """
    classic, now_ms = change.soft.classic, change.now.monotonic_ms
    check_bytes = partial(change.context.members.check, change.draft.user)
    if isinstance(command, JoinClassic):
        check_join(command)
        if classic is None:
            classic = _made(change)
        classic.join(command, now_ms, check_bytes)
        change.soft.classic = classic
    elif classic is None:
        raise UnknownMemberId(f"the group {change.group_id!r} has no such member: join again")
    else:
        match command:
            case SyncClassic():
                classic.sync(command, now_ms, check_bytes)
            case HeartbeatClassic():
                classic.heartbeat(command, now_ms)
            case LeaveClassic():
                classic.leave(command, now_ms)
            case _:
                assert_never(command)
    settle(change)


def on_deadline(change: Change, member_id: str) -> None:
    """Handle a timer of a classic group that has gone off."""
    classic = change.soft.classic
    if classic is not None:
        classic.on_deadline(member_id, change.now.monotonic_ms)
        settle(change)


def check_commit(change: Change, member: tuple[str, str, int], *, transactional: bool) -> None:
    """Check that offsets may be committed; see `ClassicGroup.check_commit`. `member`: its id, instance, generation."""
    classic = change.soft.classic
    assert classic is not None, "the group is a classic one"
    classic.check_commit(*member, change.now.monotonic_ms, transactional=transactional)
    settle(change)


def check_join(command: JoinClassic) -> None:
    """Check the sizes of what a member says.

    Raises:
        InvalidRequestError: it can never be accepted.
    """
    for what in ("member_id", "instance_id", "client_id", "protocol_type"):
        length = len(getattr(command, what))
        if length > MAX_ID:
            raise InvalidRequestError(f"{what} has {length} characters, at most {MAX_ID}")
    names = [name for name, _ in command.protocols]
    if len(names) > MAX_PROTOCOLS or len(set(names)) < len(names) or max(map(len, names), default=0) > MAX_ID:
        raise InvalidRequestError(
            f"a member names up to {MAX_PROTOCOLS} protocols of up to {MAX_ID} characters, each once"
        )


def _made(change: Change) -> ClassicGroup:
    """Return the machine of a group that becomes a classic one."""
    assert not change.draft.members, "members of a group in which the coordinator assigns join as `embedded` says"
    return ClassicGroup(change.group_id, change.context.config.classic, change.head.group_epoch)


def loaded(group: Group, config: ClassicConfig, now_ms: float, timers: Timers) -> ClassicGroup:
    """Return the machine of a group that the log has as a classic one; its timers run from now on."""
    head = group.head
    assert head is not None, "the group is a classic one"
    assert head.classic is not None, "the group is a classic one"
    chosen = head.classic
    members = []
    for member_id, member in group.members.items():
        part = member.classic
        if part is None:  # the last that let the coordinator assign: it has left, and its record is there as yet
            continue
        protocols = part.protocols or ((chosen.protocol, part.metadata),)
        members.append(
            ClassicMember(
                member_id,
                member.instance_id,
                member.client_id,
                member.host,
                part.session_timeout_ms,
                member.rebalance_timeout_ms,
                protocols,
                part.assignment,
            )
        )
    classic = ClassicGroup.loaded(
        group.group_id,
        config,
        head.group_epoch,
        head.assignment_epoch,
        (chosen.protocol_type, chosen.protocol, chosen.leader),
        members,
        now_ms,
    )
    for deadline_ms, member_id in classic.take().timers:
        timers.at(deadline_ms, Kind.CLASSIC, group.group_id, member_id)
    return classic


def settle(change: Change) -> None:
    """Carry out what the machine asks for: records, then replies and timers."""
    classic = change.soft.classic
    assert classic is not None, "the group is a classic one"
    effects = classic.take()
    head = change.draft.head
    if head is None or head.classic is None:  # so that the group is there from the first join on
        emptied_ms = change.now.wall_ms
        change.draft.set_head(
            Head(classic.generation, classic.generation, empty_since_ms=emptied_ms, classic=ClassicHead())
        )
    if effects.store is Store.ALL:
        _store_members(change, classic)
    elif effects.store is Store.GENERATION:
        change.draft.set_head(replace(change.head, group_epoch=classic.generation))
    for to, reply in effects.replies:
        change.send(to, reply)
    for deadline_ms, member_id in effects.timers:
        change.context.timers.at(deadline_ms, Kind.CLASSIC, change.group_id, member_id)


def _store_members(change: Change, classic: ClassicGroup) -> None:
    draft = change.draft
    for member_id in [each for each in draft.members if each not in classic.members]:
        draft.set_member(member_id, None)
    for member_id, member in classic.members.items():
        said = member.said(classic.protocol)
        draft.set_member(
            member_id,
            Member(
                member_id=member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                host=member.host,
                subscription=Subscription(subscribed_topics(classic.protocol_type, said)),
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                classic=ClassicPart(member.session_timeout_ms, said, member.assignment),
            ),
        )
    # Of the time in which the coordinator assigned; a member's record says from here on what it may read.
    for member_id in [*draft.targets]:
        draft.set_target(member_id, None)
    for member_id in [*draft.assignments]:
        draft.set_assignment(member_id, None)
    emptied_ms = (change.head.empty_since_ms or change.now.wall_ms) if classic.state is State.EMPTY else 0
    draft.set_head(
        replace(
            change.head,
            group_epoch=classic.generation,
            assignment_epoch=classic.assigned_generation,
            assignor=classic.protocol,
            empty_since_ms=emptied_ms,
            classic=ClassicHead(classic.protocol_type, classic.protocol, classic.leader),
        )
    )
