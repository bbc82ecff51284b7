"""Members of Kafka's classic protocol in a group in which the coordinator assigns (KIP-848).

Such a member does not know of the other protocol. It joins, and is told that another member leads; it syncs, and gets
the partitions that the coordinator has for it. Its generation is its member epoch.

    JoinGroup     says which partitions the member reads; what it was to release and does not read any more is free. The
                  answer waits for the assignment of the group's epoch. The member is in that epoch once it has
                  released all that it was to release.
    SyncGroup     the partitions that it may read
    Heartbeat     REBALANCE_IN_PROGRESS while the group is in a later epoch, while the member has partitions to release,
                  and once all partitions are free for which it waits
    LeaveGroup    the member is gone

So an eager member releases everything and joins once, and a cooperative one joins a second time after it has released
some. The coordinator moves such a member only while it joins: its assignment is what it was last told.

A member that does not join, or sync, within its rebalance timeout is expelled: it has to join as another member, and
its partitions are free once its session is over, as of every member here that may still read (`membership`).
"""

from __future__ import annotations

from typing import assert_never

from broker.coordinator.groups.change import Change
from broker.coordinator.groups.checks import fenced_instance, unknown_member
from broker.coordinator.groups.classic import calls, migration
from broker.coordinator.groups.classic.commands import (
    Alive,
    ClassicCommand,
    HeartbeatClassic,
    JoinClassic,
    Joined,
    LeaveClassic,
    Left,
    SyncClassic,
    Synced,
)
from broker.coordinator.groups.classic.consumer import CONSUMER, read_said
from broker.coordinator.groups.classic.machine import MAX_BYTES, check_session_timeout, rebalancing
from broker.coordinator.groups.group import Assignment, ClassicPart, Member, Subscription
from broker.coordinator.groups.membership import fence, give_up, heard_of, say, take_over
from broker.coordinator.groups.sessions import NEVER, Session
from raftlog.errors import (
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequestError,
    MemberIdRequired,
    RaftlogError,
    UnknownMemberId,
)


def is_for(change: Change) -> bool:
    """Whether a command of a classic member meets a group in which the coordinator assigns."""
    return change.soft.classic is None and bool(change.draft.members)


def follow(change: Change, command: ClassicCommand) -> None:
    """Carry out a command.

    Raises:
        RaftlogError: it is refused; nothing has changed.
    """
    match command:
        case JoinClassic():
            _join(change, command)
        case SyncClassic():
            _sync(change, command)
        case HeartbeatClassic():
            _heartbeat(change, command)
        case LeaveClassic():
            _leave(change, command)
        case _:
            assert_never(command)


# Joining


def _join(change: Change, command: JoinClassic) -> None:
    calls.check_join(command)
    check_session_timeout(change.context.config.classic, command.session_timeout_ms)
    if command.member_id not in change.draft.members and not change.context.may_upgrade():
        raise InconsistentGroupProtocol(
            f"the coordinator assigns in {change.group_id!r}, and an older broker may take it over that would refuse "
            "classic members for good: upgrade all brokers, then run `raftlog cluster features upgrade`"
        )
    member, owned = _said(change, command)
    change.check_member(member)
    former = change.draft.instances.get(command.instance_id) if command.instance_id else None
    if command.member_id:
        if former is not None and former != command.member_id:
            raise fenced_instance(command.instance_id)
        known = change.draft.members.get(command.member_id)
        if known is None and owned:
            # It is no member any more, and others may have what it reads: it has to stop first.
            raise unknown_member(change.group_id, command.member_id)
        if known is None:
            change.check_room(len(change.draft.members))
        else:
            _check_known(change, known, command.instance_id)
    elif former is not None:
        _join_in_place_of(change, command, member, former)
        return
    else:
        change.check_room(len(change.draft.members))
        if command.requires_id and not command.instance_id:
            needed = MemberIdRequired(f"join again with the member id {member.member_id}")
            change.send(command.to, Joined(member.member_id, error=needed))
            return
    draft, sessions = change.draft, change.soft.sessions
    before = draft.members.get(member.member_id)
    say(change, member, Subscription() if before is None else before.subscription, is_new=before is None)
    if before is None:
        draft.set_assignment(member.member_id, Assignment())
    session = sessions.setdefault(member.member_id, Session(0.0))
    if session.joining is not None:  # sent again over another connection
        change.send(session.joining, rebalancing(change.group_id))
    _wait(change, command, session, frozenset(migration.partitions_of(change, owned)))


def _join_in_place_of(change: Change, command: JoinClassic, member: Member, former: str) -> None:
    """A static member is back: it gets a new member id, and the old one is fenced (KIP-345)."""
    if change.draft.members[former].classic is None and migration.goes_back(change, former):
        # The last member that let the coordinator assign has come back as a classic one.
        fence(change, former, command.instance_id)
        migration.downgrade(change, former)
        calls.follow(change, command)
        return
    take_over(change, member, former)
    session = change.soft.sessions[member.member_id] = Session(0.0)
    _wait(change, command, session, frozenset())


def _wait(change: Change, command: JoinClassic, session: Session, owned: frozenset[tuple[bytes, int]]) -> None:
    """Let a member wait for its place in the group's epoch; `reconcile` gives it, here or later."""
    member_id = command.member_id or command.new_member_id
    session.joining, session.owned, session.host, session.act_by_ms = command.to, owned, command.host, NEVER
    heard_of(change, member_id, session)
    change.touch(member_id)
    change.reconcile(member_id)


def _said(change: Change, command: JoinClassic) -> tuple[Member, dict[str, list[int]]]:
    """Return the member as it describes itself, and which partitions it reads, by topic."""
    if command.protocol_type != CONSUMER or not command.protocols:
        raise InconsistentGroupProtocol(
            f"the members of {change.group_id!r} are of type {CONSUMER!r}, not {command.protocol_type!r}"
        )
    try:
        said = read_said(command.protocols[0][1])
    except ValueError as error:
        raise InconsistentGroupProtocol(f"the coordinator assigns, and cannot read the subscription: {error}") from None
    member_id = command.member_id or command.new_member_id
    _check_protocols(change, member_id, command)
    member = Member(
        member_id=member_id,
        instance_id=command.instance_id,
        client_id=command.client_id,
        host=command.host,
        rack=said.rack,
        subscription=Subscription(said.topics),
        rebalance_timeout_ms=command.rebalance_timeout_ms,
        classic=ClassicPart(command.session_timeout_ms, protocols=command.protocols),
    )
    return member, {name: list(numbers) for name, numbers in said.owned.items()}


def _check_protocols(change: Change, member_id: str, command: JoinClassic) -> None:
    """The classic members need a protocol in common, for the day on which they are alone; all together are bounded.

    It looks at every member, which takes less than a millisecond of a join among 900.
    """
    common = {name for name, _ in command.protocols}
    size = sum(len(name) + len(said) for name, said in command.protocols)
    replaced = change.draft.instances.get(command.instance_id) if command.instance_id else None
    for other in change.draft.members.values():
        if other.classic is None or other.member_id in (member_id, replaced):
            continue
        common.intersection_update(name for name, _ in other.classic.protocols)
        size += sum(len(name) + len(said) for name, said in other.classic.protocols)
    if not common:
        raise InconsistentGroupProtocol(
            f"the other members of {change.group_id!r} offer none of {', '.join(name for name, _ in command.protocols)}"
        )
    if size > MAX_BYTES:
        raise InvalidRequestError(
            f"the members of {change.group_id!r} say more than {MAX_BYTES} bytes: use fewer topics or members"
        )


# Members


def _check_known(change: Change, member: Member, instance_id: str) -> None:
    session = change.soft.sessions.get(member.member_id)
    if member.classic is None or member.instance_id != instance_id or (session is not None and session.expelled):
        raise unknown_member(change.group_id, member.member_id)


def _member(change: Change, member_id: str, instance_id: str) -> tuple[Member, Session, Assignment]:
    holder = change.draft.instances.get(instance_id) if instance_id else None
    if holder is not None and holder != member_id:
        raise fenced_instance(instance_id)
    member = change.draft.members.get(member_id)
    session = change.soft.sessions.get(member_id)
    if member is None or session is None:
        raise unknown_member(change.group_id, member_id)
    _check_known(change, member, instance_id)
    return member, session, change.draft.assignments.get(member_id, Assignment())


def check_commit(change: Change, member_id: str, instance_id: str, generation: int) -> None:
    """Check that a classic member may commit offsets.

    Raises:
        UnknownMemberId, FencedInstanceId, IllegalGeneration: it is no member now.
    """
    _, _, current = _member(change, member_id, instance_id)
    _check_generation(current, generation)


def _check_generation(current: Assignment, generation: int) -> None:
    if generation != current.member_epoch:
        raise IllegalGeneration(f"the member is in generation {current.member_epoch}, not {generation}")


def _sync(change: Change, command: SyncClassic) -> None:
    member, session, current = _member(change, command.member_id, command.instance_id)
    _check_generation(current, command.generation)
    assert member.classic is not None, "a classic member"
    protocol = member.classic.protocols[0][0]
    if command.protocol_type not in (None, CONSUMER) or command.protocol not in (None, protocol):
        raise InconsistentGroupProtocol(
            f"the member joined with {protocol!r} of type {CONSUMER!r}, not {command.protocol!r} of "
            f"{command.protocol_type!r}"
        )
    is_behind = change.head.group_epoch > current.member_epoch and not current.pending_revocation
    if session.joining is not None or is_behind:
        _ask_to_join(change, member, session)
        raise rebalancing(change.group_id)
    session.act_by_ms = NEVER
    heard_of(change, member.member_id, session)
    assignment = migration.assignment_bytes(change, member.classic.protocols, current.assigned)
    change.send(command.to, Synced(CONSUMER, protocol, assignment))


def _heartbeat(change: Change, command: HeartbeatClassic) -> None:
    member, session, current = _member(change, command.member_id, command.instance_id)
    _check_generation(current, command.generation)
    heard_of(change, member.member_id, session)
    if _has_to_join(change, member.member_id, current):
        _ask_to_join(change, member, session)
        change.send(command.to, rebalancing(change.group_id))
    else:
        change.send(command.to, Alive())


def _has_to_join(change: Change, member_id: str, current: Assignment) -> bool:
    if current.member_epoch < change.head.group_epoch or current.pending_revocation:
        return True
    missing = change.draft.targets.get(member_id, frozenset()) - current.assigned.keys()
    return bool(missing) and not any(partition in change.draft.owners for partition in missing)


def _ask_to_join(change: Change, member: Member, session: Session) -> None:
    """Begin the time within which the member has to join; it does not begin anew with each heartbeat."""
    if session.act_by_ms == NEVER and session.joining is None:
        session.act_by_ms = change.now.monotonic_ms + change.rebalance_timeout_ms(member)
        change.watch(session, member.member_id)


def _leave(change: Change, command: LeaveClassic) -> None:
    errors: list[RaftlogError | None] = []
    for member_id, instance_id in command.members:
        try:
            _let_go(change, member_id, instance_id)
            errors.append(None)
        except RaftlogError as error:
            errors.append(error)
    change.send(command.to, Left(tuple(errors)))


def _let_go(change: Change, member_id: str, instance_id: str) -> None:
    if change.soft.classic is not None:  # an earlier member of this call was the last that let it assign
        raise rebalancing(change.group_id)
    draft = change.draft
    holder = draft.instances.get(instance_id) if instance_id else None
    if instance_id and member_id and holder not in (None, member_id):
        raise fenced_instance(instance_id)
    member = draft.members.get(member_id or holder or "")
    if member is None or member.instance_id != (instance_id or member.instance_id):
        raise unknown_member(change.group_id, member_id or instance_id)
    away = draft.assignments.get(member.member_id, Assignment()).away
    if member.classic is None and not away:
        # It may read on until it hears of it, and nothing but its own leave or silence says that it does not.
        raise UnknownMemberId(f"{member.member_id} is a member that lets the coordinator assign: stop it instead")
    session = change.soft.sessions.get(member.member_id)
    if session is not None and session.joining is not None:
        change.send(session.joining, UnknownMemberId("the member has left"))
    give_up(change, member.member_id)
