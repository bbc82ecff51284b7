"""The move of a group with members from the classic protocol to KIP-848, and back, as Kafka does it.

    upgrade      a member that lets the coordinator assign joins a classic group: the members keep what they may
                 read, in the epoch that was the generation, and go on as `embedded` says
    downgrade    the last member that lets the coordinator assign leaves, or its session ends: what the others may
                 read is told to the classic machine, which asks them to join again

`group.consumer.migration.policy` allows both, one, or none. The members must be consumers (protocol type `consumer`).
No group moves up while the cluster may have brokers that do not know such groups (`LIVE_GROUPS_LEVEL`).

A coordinator may die with only the first records of a decision written. So the group is a classic one as long as not
all of its members have an assignment that the coordinator knows: on the way up the head of the group is written last,
on the way down first. A group that is loaded in between is a classic one whose members go on, or join again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from broker.coordinator.groups.change import Change
from broker.coordinator.groups.classic import calls
from broker.coordinator.groups.classic.consumer import CONSUMER, assigned_partitions, read_said, written_assignment
from broker.coordinator.groups.classic.machine import ClassicGroup, ClassicMember, Store, rebalancing
from broker.coordinator.groups.group import Assignment, ClassicHead, ClassicPart, Member, Subscription
from broker.coordinator.groups.records import by_topic
from broker.coordinator.groups.sessions import NEVER, Session
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import InconsistentGroupProtocol, UnknownMemberId


def partitions_of(change: Change, topics: Mapping[str, Sequence[int]]) -> Iterable[TopicPartition]:
    """Yield partitions by topic id, of the topics that exist."""
    for name, numbers in topics.items():
        topic = change.context.topics.by_name(name)
        if topic is not None:
            yield from ((topic.topic_id, number) for number in numbers if 0 <= number < topic.partitions)


def assignment_bytes(
    change: Change, protocols: tuple[tuple[str, bytes], ...], partitions: Iterable[TopicPartition]
) -> bytes:
    """Return partitions as a classic member is told of them, in the version in which it speaks."""
    by_name = {change.names[topic_id]: numbers for topic_id, numbers in by_topic(partitions).items()}
    return written_assignment(read_said(protocols[0][1]).version, {name: by_name[name] for name in by_name if name})


# Up


def upgrade(change: Change, member_id: str) -> None:
    """Make a classic group with members one in which the coordinator assigns, for a member that is to join.

    Raises:
        InconsistentGroupProtocol, GroupMaxSizeReached, UnknownMemberId: it may not; nothing has changed.
    """
    machine = change.soft.classic
    assert machine is not None, "the group is a classic one"
    _check_upgrade(change, machine, member_id)
    stay = [member for member in machine.members.values() if not member.is_new]
    assignments = {member.member_id: _stored_assignment(change, member) for member in stay}
    may_read = {member_id: _may_read(change, member_id, told) for member_id, told in assignments.items()}
    # A cooperative member reads on until it joins again, also what it is to release and no member was given yet.
    given_before = set().union(*may_read.values())
    for member in stay:
        may_read[member.member_id] |= {*partitions_of(change, read_said(member.protocols[0][1]).owned)} - given_before
    _forget_machine(change, machine, assignments)
    given: set[TopicPartition] = set()
    draft, topics, generation = change.draft, change.context.topics, machine.generation
    known = dict(change.head.known_topics)
    for member in stay:
        said = read_said(member.protocols[0][1])
        owned = may_read[member.member_id] - given
        given |= owned
        for name in said.topics:
            if (topic := topics.by_name(name)) is not None:
                known.setdefault(topic.topic_id, topic.partitions)
        _store(change, member, assignments[member.member_id], Subscription(said.topics), said.rack)
        draft.set_target(member.member_id, frozenset(owned))
        draft.set_assignment(member.member_id, Assignment(generation, generation, dict.fromkeys(owned, generation), {}))
        due_ms = change.now.monotonic_ms + member.session_timeout_ms
        session = change.soft.sessions[member.member_id] = Session(due_ms, host=member.host)
        session.heard_of_ms = change.now.monotonic_ms
        change.watch(session, member.member_id)
    draft.set_head(
        replace(
            change.head,
            group_epoch=generation + 1,
            assignment_epoch=generation,
            assignor="",
            known_topics=known,
            classic=None,
        )
    )
    change.assign_soon()


def _check_upgrade(change: Change, machine: ClassicGroup, member_id: str) -> None:
    config, group_id = change.context.config, change.group_id
    upgrades = config.migration.upgrades and change.context.may_upgrade()
    if not upgrades or machine.protocol_type not in (CONSUMER, ""):
        raise InconsistentGroupProtocol(
            f"the group {group_id!r} has members of another kind: Kafka clients that assign by themselves "
            f"({machine.protocol_type}); stop them, or use another group"
        )
    if member_id in machine.members:
        raise UnknownMemberId(f"{member_id} is a member of {group_id!r} that assigns by itself: use another member id")
    change.check_room(len(machine.members))
    for member in machine.members.values():
        try:
            read_said(member.protocols[0][1])
        except ValueError as error:
            raise InconsistentGroupProtocol(
                f"the member {member.member_id} of {group_id!r} says to its leader what the coordinator cannot read "
                f"({error}): stop it first"
            ) from None


def _stored_assignment(change: Change, member: ClassicMember) -> bytes:
    stored = change.draft.members.get(member.member_id)
    return member.assignment if stored is None or stored.classic is None else stored.classic.assignment


def _may_read(change: Change, member_id: str, told: bytes) -> set[TopicPartition]:
    """Return what a member may read: the last assignment that it was told, until it joins again.

    If only the first records of a downgrade were written, the coordinator's stored assignment counts too.
    """
    left = change.draft.assignments.get(member_id, Assignment())
    return {*partitions_of(change, assigned_partitions(CONSUMER, told)), *left.assigned, *left.pending_revocation}


def _forget_machine(change: Change, machine: ClassicGroup, stay: Iterable[str]) -> None:
    machine.dissolve()
    for to, reply in machine.take().replies:
        change.send(to, reply)
    change.soft.classic = None
    draft = change.draft
    for member_id in [*draft.targets]:  # of an upgrade of which only the first records were written
        draft.set_target(member_id, None)
    for member_id in [*draft.assignments]:
        draft.set_assignment(member_id, None)
    for member_id in sorted(draft.members.keys() - set(stay)):
        draft.set_member(member_id, None)


def _store(change: Change, member: ClassicMember, assignment: bytes, subscription: Subscription, rack: str) -> None:
    change.draft.set_member(
        member.member_id,
        Member(
            member_id=member.member_id,
            instance_id=member.instance_id,
            client_id=member.client_id,
            host=member.host,
            rack=rack,
            subscription=subscription,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            classic=ClassicPart(
                member.session_timeout_ms,
                # Still what a classic group needs: the head that makes it another one is not written yet.
                member.protocols[0][1],
                assignment,
                member.protocols,
            ),
        ),
    )


# Down


def goes_back(change: Change, leaving: str) -> bool:
    """Whether the group becomes a classic one once a member has left: all others speak the classic protocol."""
    members, config = change.draft.members, change.context.config
    if change.soft.classic is not None or not config.migration.downgrades:
        return False
    if any(member.classic is None for member_id, member in members.items() if member_id != leaving):
        return False
    others = len(members) - (leaving in members)
    return 0 < others <= config.classic.max_size and _common(change, leaving) != set()


def _common(change: Change, leaving: str) -> set[str]:
    offered = [
        {name for name, _ in member.classic.protocols}
        for member_id, member in change.draft.members.items()
        if member_id != leaving and member.classic is not None
    ]
    return set.intersection(*offered) if offered else set()


def downgrade(change: Change, leaving: str) -> None:
    """Make it a classic group, without `leaving`, in which all members are asked to join again.

    The generation is the group's epoch: members that have reached it go on until they have joined, and the others are
    told that theirs is an old one.
    """
    draft, soft = change.draft, change.soft
    members = []
    for member_id, member in draft.members.items():
        if member_id == leaving:
            continue
        assert member.classic is not None, "all others speak the classic protocol"
        session = soft.sessions.get(member_id)
        if session is not None and session.joining is not None:
            change.send(session.joining, rebalancing(change.group_id))
        current = draft.assignments.get(member_id, Assignment())
        may_read = {**current.assigned, **current.pending_revocation}
        members.append(
            ClassicMember(
                member_id,
                member.instance_id,
                member.client_id,
                member.host,
                member.classic.session_timeout_ms,
                member.rebalance_timeout_ms,
                member.classic.protocols,
                assignment_bytes(change, member.classic.protocols, may_read),
            )
        )
    epoch = change.head.group_epoch
    machine = ClassicGroup.loaded(
        change.group_id,
        change.context.config.classic,
        epoch,
        epoch - 1,
        (CONSUMER, "", members[0].member_id),
        members,
        change.now.monotonic_ms,
    )
    chosen = ClassicHead(CONSUMER, machine.protocol, machine.leader)
    draft.set_head(replace(change.head, assignment_epoch=epoch - 1, assignor=machine.protocol, classic=chosen))
    soft.sessions.clear()
    soft.to_reconcile.clear()
    soft.assign_due_ms, soft.check = NEVER, False
    soft.classic = machine
    machine.effects.store = Store.ALL
    calls.settle(change)
