"""Members of groups: join, heartbeat, release of partitions, leave, expiry (KIP-848, KIP-345).

    (none)     --join-->                                                 member     epoch 0 until the next assignment
    member     --heartbeat-->                                            member     its session is extended
    member     --its stream ends-->                                      member     may return within its session
    member     --joins with its epoch-->                                 member     on a new stream, with its partitions
    member     --joins with epoch 0-->                                   member     reads nothing; is assigned anew
    member     --does not release within its rebalance timeout-->        expelled   is told; expires with its session
    expelled   --joins with epoch 0-->                                   member
    member     --leaves-->                                               (none)
    member     --static: leaves for a while-->                           away
    away       --another process joins with the instance id-->           (none)     which gets its partitions
    member, expelled, away   --silent for the session timeout-->         (none)

A member that speaks Kafka's classic protocol has calls in place of a stream; see `classic.embedded`.

Partitions that a member may still read are given to no other member. A member counts its session from when it *sent*
the last answered heartbeat, so it has stopped reading before it expires here. An expelled member may not know of it
yet, so it too keeps its partitions until its session expires.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from broker.coordinator.groups import rebalance
from broker.coordinator.groups.change import Change
from broker.coordinator.groups.checks import (
    check_join,
    check_owned,
    check_subscription,
    fenced_instance,
    read_partitions,
    unknown_member,
)
from broker.coordinator.groups.classic import migration
from broker.coordinator.groups.commands import Heartbeat, Join, Leave, Now
from broker.coordinator.groups.group import Assignment, Group, Member, Subscription
from broker.coordinator.groups.records import read_subscription
from broker.coordinator.groups.sessions import NEVER, GroupSessions, Session
from raftlog.errors import (
    FencedMemberEpoch,
    InvalidRequestError,
    RaftlogError,
    UnknownMemberId,
    UnreleasedInstanceId,
)
from raftlog.v1 import group_pb2


def join(change: Change, command: Join) -> None:
    """Handle the first message of a member's stream.

    Raises:
        RaftlogError: the member is refused; nothing has changed.
    """
    request = command.request
    check_join(request, change.context.assignors)
    change.check_member(_said(command))
    if (classic := change.soft.classic) is not None and not classic.is_idle:
        if request.member_epoch > 0:
            if classic.instances.get(request.instance_id, request.member_id) != request.member_id:
                raise fenced_instance(request.instance_id)
            raise unknown_member(change.group_id, request.member_id)
        migration.upgrade(change, request.member_id)
    known = change.draft.members.get(request.member_id)
    if known is not None and known.classic is not None:
        raise UnknownMemberId(f"{known.member_id} is a member of the classic protocol: use another member id")
    if request.member_epoch > 0:
        _come_back(change, command, known)
    elif known is not None:
        _join_again(change, command, known)
    elif request.instance_id and (former := change.draft.instances.get(request.instance_id)) is not None:
        _join_in_place_of(change, command, former)
    else:
        _join_anew(change, command)


def _said(command: Join) -> Member:
    request = command.request
    return Member(
        member_id=request.member_id,
        instance_id=request.instance_id,
        client_id=request.client_id,
        host=command.host,
        rack=request.rack,
        subscription=read_subscription(request.subscription),
        rebalance_timeout_ms=request.rebalance_timeout_ms,
    )


def say(change: Change, member: Member, before: Subscription, *, is_new: bool = False) -> None:
    """Store a member's description of itself; a new one, or a new subscription, needs a new assignment."""
    if is_new or member.subscription != before:
        _bump(change, before, member.subscription)
    change.draft.set_member(member.member_id, member)


def _bump(change: Change, before: Subscription, after: Subscription) -> None:
    known, patterns = rebalance.subscribed(change.head, before, after, change.context.topics)
    change.bump(known_topics=known, patterns=patterns)


def _connect(change: Change, command: Join, owned: frozenset[tuple[bytes, int]]) -> None:
    """Make this stream the member's, and begin its session anew."""
    member_id = command.request.member_id
    session = change.soft.sessions.get(member_id)
    if session is None:
        session = change.soft.sessions[member_id] = Session(0.0)
    if session.to is not None and session.to is not command.to:
        change.send(session.to, FencedMemberEpoch(f"the member {member_id} is back on another stream"))
    current = Assignment()
    if command.reports_late and command.request.member_epoch > 0:
        current = change.draft.assignments.get(member_id, current)
    session.connect(command.to, command.host, owned, reports_late=command.reports_late, told=current)
    heard_of(change, member_id, session)


def heard_of(change: Change, member_id: str, session: Session) -> None:
    """Begin a member's session anew."""
    timeout_ms = change.context.config.session_timeout_ms_of(change.draft.members[member_id])
    session.deadline_ms = change.now.monotonic_ms + timeout_ms
    session.heard_of_ms = change.now.monotonic_ms
    change.watch(session, member_id)


def _join_anew(change: Change, command: Join) -> None:
    change.check_room(len(change.draft.members))
    member = _said(command)
    change.soft.classic = None
    say(change, member, Subscription(), is_new=True)
    change.draft.set_assignment(member.member_id, Assignment())
    _connect(change, command, frozenset())


def _join_again(change: Change, command: Join, known: Member) -> None:
    """Join a member that has lost its session, or has had no answer yet: it reads nothing.

    The request may be one that was given up and comes late. So what it had is let go as always, by a heartbeat on the
    same stream. It is given anew in a higher epoch: commits under way from before are recognized.
    """
    if known.instance_id != command.request.instance_id:
        raise InvalidRequestError(f"the member {known.member_id} has the instance id {known.instance_id!r}")
    member = _said(command)
    current = change.draft.assignments.get(member.member_id, Assignment())
    if current.away:
        # It left for a while, and no other process has joined with its instance id.
        current = Assignment(current.previous_member_epoch, current.previous_member_epoch, current.assigned, {})
    has = {**current.assigned, **current.pending_revocation}
    if has or member.subscription != known.subscription:
        _bump(change, known.subscription, member.subscription)
    change.draft.set_member(member.member_id, member)
    change.draft.set_assignment(member.member_id, replace(current, assigned={}, pending_revocation=has))
    _connect(change, command, frozenset())
    change.soft.sessions[member.member_id].let_go_by.clear()
    if has or current.member_epoch > 0:
        change.touch(member.member_id)
    if not has:  # no heartbeat is waited for; its target may have changed while it was away
        change.reconcile(member.member_id)


def _come_back(change: Change, command: Join, known: Member | None) -> None:
    """Continue a member on a new stream, with the partitions that it reports, if it may have them."""
    request = command.request
    holder = change.draft.instances.get(request.instance_id) if request.instance_id else None
    if holder is not None and holder != request.member_id:
        raise fenced_instance(request.instance_id)
    if known is None:
        raise unknown_member(change.group_id, request.member_id)
    session = change.soft.sessions.get(request.member_id)
    if session is not None and session.expelled:
        raise FencedMemberEpoch("the member has not let go of its partitions in time: join again")
    current = change.draft.assignments.get(request.member_id, Assignment())
    check_owned(request.owned, len(current.assigned) + len(current.pending_revocation))
    owned = read_partitions(request.owned)
    if current.away or request.member_epoch > current.member_epoch:
        raise FencedMemberEpoch(
            f"the member epoch is {current.member_epoch}, and the member says {request.member_epoch}: join again"
        )
    for partition in owned:
        since = current.since_epoch(partition)
        if since is None or since > request.member_epoch:
            raise FencedMemberEpoch(
                f"the member reads partition {partition[1]} of {change.names[partition[0]] or partition[0].hex()}, "
                f"which is not its own in epoch {request.member_epoch}: join again"
            )
    member = replace(_said(command), instance_id=known.instance_id)
    say(change, member, known.subscription)
    _connect(change, command, owned)
    change.touch(member.member_id)
    change.reconcile(member.member_id)


def _join_in_place_of(change: Change, command: Join, former: str) -> None:
    """A static member started anew, once the former process has left.

    Where either of the two speaks the classic protocol the former one is fenced at once: a static member of that
    protocol does not say that it leaves, its next process takes its place (KIP-345).
    """
    if change.draft.members[former].classic is None and not change.draft.assignments.get(former, Assignment()).away:
        raise UnreleasedInstanceId(
            f"the member {former} has the instance id {command.request.instance_id!r}; it has to leave, or be silent "
            f"for {change.context.config.session_timeout_ms} ms"
        )
    member = _said(command)
    take_over(change, member, former)
    _connect(change, command, frozenset())
    change.touch(member.member_id)
    change.reconcile(member.member_id)


def fence(change: Change, former: str, instance_id: str) -> None:
    """Tell a static member's former process that another one has its place."""
    session = change.soft.sessions.pop(former, None)
    if session is not None:
        for to in (session.to, session.joining):
            if to is not None:
                change.send(to, fenced_instance(instance_id))


def take_over(change: Change, member: Member, former: str) -> None:
    """Give a static member that started anew the partitions of its former process, without a rebalance."""
    draft = change.draft
    left = draft.assignments.get(former, Assignment())
    before = draft.members[former].subscription
    target = draft.targets.get(former, frozenset())
    if member.subscription != before:
        _bump(change, before, member.subscription)
    fence(change, former, member.instance_id)
    # One after the other; no partition that is free in between goes to another member.
    draft.set_member(former, None)
    draft.set_target(former, None)
    freed = draft.set_assignment(former, None)
    epoch = left.previous_member_epoch if left.away else left.member_epoch
    draft.set_member(member.member_id, member)
    draft.set_target(member.member_id, target)
    draft.set_assignment(member.member_id, Assignment(epoch, epoch, left.assigned, {}))
    change.reconcile_waiting([partition for partition in freed if partition not in left.assigned], member.member_id)


def session_of(change: Change, to: object, member_id: str) -> Session:
    """Return the session of the member that has this stream.

    Raises:
        UnknownMemberId: it is not a member, or no longer.
        FencedMemberEpoch: it has another stream.
    """
    session = change.soft.sessions.get(member_id)
    if session is None:
        raise unknown_member(change.group_id, member_id)
    if session.to is not to:
        raise FencedMemberEpoch("this stream is not the member's any more")
    return session


def heartbeat(change: Change, command: Heartbeat) -> None:
    """Handle a heartbeat.

    Raises:
        RaftlogError: its membership is over, or what it says can never be accepted.
    """
    request, member_id = command.request, command.member_id
    session = session_of(change, command.to, member_id)
    current = change.draft.assignments.get(member_id, Assignment())
    if request.member_epoch > current.member_epoch:
        raise FencedMemberEpoch(f"the member epoch is {current.member_epoch}, not {request.member_epoch}")
    said: Member | None = None
    if request.HasField("subscription"):
        check_subscription(request.subscription, change.context.assignors)
        said = replace(change.draft.members[member_id], subscription=read_subscription(request.subscription))
        change.check_member(said)
    check_owned(request.owned.partitions, len(current.assigned) + len(current.pending_revocation))
    heard_of(change, member_id, session)
    if said is not None:
        say(change, said, change.draft.members[member_id].subscription)
    owned = read_partitions(request.owned.partitions) if request.HasField("owned") else None
    session.was_told(command.told)
    let_go = session.heard(owned, current.pending_revocation.keys())
    if let_go:
        change.reconcile(member_id, let_go)
    if current.pending_revocation:
        change.touch(member_id)
    change.finish()
    epoch = change.draft.assignments.get(member_id, Assignment()).member_epoch
    change.send(command.to, group_pb2.GroupResponse(heartbeat=group_pb2.HeartbeatAnswer(member_epoch=epoch)))
    session.answered()


def echo(
    group: Group, soft: GroupSessions, command: Heartbeat, now: Now, session_timeout_ms: int
) -> group_pb2.GroupResponse | None:
    """Return the answer to a heartbeat that only extends the session; None: the heartbeat must be decided.

    Unlike all other answers, it leaves before uncommitted records are committed (docs/adr/0014). This is safe because
    it contains no new information: it repeats the epoch that the member sent, and the member got that epoch from an
    answer that had waited. The promised time needs no record either. The caller is a member here, and in every log that
    another coordinator may read it has at least the partitions of that epoch; uncommitted records take nothing from it
    that it has not released. The next coordinator begins only after this broker's lease, and gives it a later session.

    While something is to be let go the heartbeat counts for that, and its answer shows what had been pushed
    (`Session.heard`): those wait as all others do.
    """
    request, session = command.request, soft.sessions.get(command.member_id)
    current = group.assignments.get(command.member_id)
    if session is None or session.to is not command.to or current is None or soft.check:
        return None
    if request.HasField("subscription") or request.HasField("owned") or current.pending_revocation:
        return None
    if current.away or not 0 <= request.member_epoch <= current.member_epoch:
        return None
    # The timer goes off as before, and looks again.
    session.deadline_ms = now.monotonic_ms + session_timeout_ms
    session.heard_of_ms = now.monotonic_ms
    session.was_told(command.told)
    return group_pb2.GroupResponse(heartbeat=group_pb2.HeartbeatAnswer(member_epoch=request.member_epoch))


def leave(change: Change, command: Leave) -> None:
    """A member says that it has stopped.

    Raises:
        RaftlogError: it is no member any more, or this is not its stream.
    """
    session = session_of(change, command.to, command.member_id)
    member = change.draft.members[command.member_id]
    current = change.draft.assignments.get(command.member_id, Assignment())
    change.send(command.to, None)
    if command.request.keep_assignment and member.instance_id and current.member_epoch > 0:
        session.to = None
        heard_of(change, command.member_id, session)
        change.put_away(command.member_id, current)
    else:
        give_up(change, command.member_id)


def disconnected(change: Change, to: object, member_id: str) -> None:
    """A stream has ended: the member has its session's time to come back."""
    session = change.soft.sessions.get(member_id)
    if session is not None and session.to is to:
        session.to = None


def give_up(change: Change, member_id: str) -> None:
    """Remove a member. The others get its partitions, or join again if the group becomes a classic one."""
    if migration.goes_back(change, member_id):
        migration.downgrade(change, member_id)
        return
    change.bump()
    change.remove(member_id)
    change.leave_empty()


def expel_some(change: Change, why: RaftlogError, most: int) -> bool:
    """Remove up to `most` members, and tell them why; return whether others are left."""
    some = list(islice(change.draft.members, most))
    if not some:
        return False
    change.bump()
    for member_id in some:
        session = change.soft.sessions.get(member_id)
        for to in () if session is None else (session.to, session.joining):
            if to is not None:
                change.send(to, why)
        change.remove(member_id)
    change.leave_empty()
    return bool(change.draft.members)


def on_deadline(change: Change, member_id: str, timer_ms: float) -> None:
    """A member's timer has gone off."""
    session = change.soft.sessions.get(member_id)
    if session is None or session.timer_ms != timer_ms:
        return
    now_ms = change.now.monotonic_ms
    session.timer_ms = NEVER
    if session.joining is not None:  # it waits for the assignment, and sends nothing before
        timeout_ms = change.context.config.session_timeout_ms_of(change.draft.members[member_id])
        session.deadline_ms = max(session.deadline_ms, now_ms + timeout_ms)
    if session.deadline_ms <= now_ms:
        if session.to is not None:
            timeout_ms = change.context.config.session_timeout_ms
            change.send(session.to, UnknownMemberId(f"nothing was heard of the member for {timeout_ms} ms: join again"))
        give_up(change, member_id)
        return
    if min(session.rebalance_deadline_ms, session.act_by_ms) <= now_ms and not session.expelled:
        session.expelled = True
        if session.to is not None:
            pending = len(change.draft.assignments[member_id].pending_revocation)
            change.send(
                session.to,
                FencedMemberEpoch(f"{pending} partitions were not let go within the rebalance timeout: join again"),
            )
            session.to = None
    change.watch(session, member_id)
