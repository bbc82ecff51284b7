"""The state machine of one classic group, as its live coordinator has it. Pure.

    EMPTY                  no members; perhaps ids that were given out (KIP-394)
    PREPARING_REBALANCE    members are asked to join again; the coordinator waits for all of them
    COMPLETING_REBALANCE   the members of the next generation are known; its leader makes the assignment
    STABLE                 every member has the assignment of its generation

    from         by                                                                to
    EMPTY        a member joins                                                    PREPARING, for the initial delay
    PREPARING    all members have joined, or the rebalance timeout is over:        COMPLETING, one generation on
                 dynamic members that have not joined are removed
    PREPARING    no member is left                                                 EMPTY, one generation on
    COMPLETING   the leader syncs                                                  STABLE
    COMPLETING   a member joins, changes or goes                                   PREPARING
    STABLE       a member joins, changes or goes, or the leader joins again        PREPARING
    STABLE       a static member is back and the protocol stays (KIP-345)          STABLE, with its new member id
    COMPLETING,  a member has not synced within the rebalance timeout: removed     PREPARING
    STABLE

A group without an entry in the coordinator is what Kafka calls Dead.

A generation is stored before its members hear of it, and its assignment before they get it: so a generation is given
out once, also by the next coordinator, and that one knows every assignment which a member may have. A coordinator that
finds a generation without assignment goes on with PREPARING_REBALANCE. Members that are joining are not stored: they
join again.

Invariants:
- a reply with generation g leaves only while the group's generation is g;
- in STABLE, and only there, assigned_generation == generation, and each member has what the leader of that generation
  gave it;
- members wait for a join only in PREPARING_REBALANCE, for a sync only in COMPLETING_REBALANCE;
- the leader is a member, and every member offers the chosen protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from broker.coordinator.core import Reply
from broker.coordinator.groups.checks import fenced_instance, unknown_member
from broker.coordinator.groups.classic.commands import (
    Alive,
    HeartbeatClassic,
    JoinClassic,
    Joined,
    LeaveClassic,
    Left,
    Protocols,
    SyncClassic,
    Synced,
)
from broker.coordinator.groups.classic.consumer import count_named
from broker.coordinator.groups.group import MEMBER_BYTES, NAME_BYTES, protocols_bytes
from raftlog.errors import (
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequestError,
    InvalidSessionTimeout,
    MemberIdRequired,
    RaftlogError,
    RebalanceInProgress,
    UnknownMemberId,
)

NEVER: Final = float("inf")
NEW_MEMBER_TIMEOUT_MS: Final = 300_000
"""How long a member that joins for the first time may wait: its client may be gone, and sends no heartbeats yet."""
MAX_BYTES: Final = 4 << 20
"""What the members of a group may say and get, all together: it is written as one batch."""
PENDING_BYTES: Final = 350
"""Memory of a member id that was given out (KIP-394), besides its timer."""
TIMER_BYTES: Final = 250
"""Memory of a timer until it fires. It fires when it is due, which may be in half an hour, even if its member has
left."""
WHOLE_GROUP: Final = ""
"""Stands for the group where a timer names a member."""


def no_bound(more_bytes: int) -> None:
    """Accept any size: the check of a group without a bound, as in tests."""


@dataclass(frozen=True, slots=True)
class ClassicConfig:
    """Bounds of classic groups; times in ms."""

    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 3_000
    max_size: int = 2_000


def check_session_timeout(config: ClassicConfig, session_timeout_ms: int) -> None:
    """Check the session timeout that a member asks for.

    Raises:
        InvalidSessionTimeout: it is out of bounds.
    """
    if not config.min_session_timeout_ms <= session_timeout_ms <= config.max_session_timeout_ms:
        raise InvalidSessionTimeout(
            f"the session timeout is {session_timeout_ms} ms; group.min.session.timeout.ms="
            f"{config.min_session_timeout_ms} and group.max.session.timeout.ms={config.max_session_timeout_ms}"
        )


def rebalancing(group_id: str) -> RebalanceInProgress:
    """Return the answer to a member that has to join again."""
    return RebalanceInProgress(f"the members of {group_id!r} are joining again")


class State(Enum):
    """See above; the values are Kafka's names."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"


class Store(Enum):
    """What has to be stored before the replies leave."""

    NOTHING = 0
    GENERATION = 1
    """The number of the generation."""
    ALL = 2
    """The members, too."""


@dataclass(slots=True)
class ClassicMember:
    """A member. `joining`, `syncing`: the call that waits, if any. `is_new`: it has not been in a generation yet."""

    member_id: str
    instance_id: str
    client_id: str
    host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    deadline_ms: float = NEVER
    timer_ms: float = NEVER
    joining: object | None = None
    syncing: object | None = None
    is_new: bool = False

    def said(self, protocol: str) -> bytes:
        """Return what the member says with a protocol; nothing if it does not offer it."""
        return next((said for name, said in self.protocols if name == protocol), b"")

    @property
    def size(self) -> int:
        """How many bytes it says and has got."""
        return protocols_bytes(self.protocols) + len(self.assignment)

    @property
    def memory_bytes(self) -> int:
        """About how much memory it takes, without its assignment."""
        return member_memory_bytes(self.protocols)


def member_memory_bytes(protocols: Protocols) -> int:
    """Return about how much memory a member takes that offers these protocols, here or in its record."""
    names = max((count_named(said) for _, said in protocols), default=0)
    return MEMBER_BYTES + NAME_BYTES * names + protocols_bytes(protocols)


@dataclass(slots=True)
class Effects:
    """What an operation asks for: replies to calls, timers (deadline, member id), and what is to be stored first."""

    replies: list[tuple[object, Reply | RaftlogError]] = field(default_factory=list)
    timers: list[tuple[float, str]] = field(default_factory=list)
    store: Store = Store.NOTHING


class ClassicGroup:
    """One group. Every operation either raises, and has changed nothing, or leaves its consequences in `effects`."""

    def __init__(self, group_id: str, config: ClassicConfig, generation: int = 0) -> None:
        self.group_id = group_id
        self.config = config
        self.state = State.EMPTY
        self.generation = generation
        """The last one that was given out."""
        self.assigned_generation = generation
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, ClassicMember] = {}
        """By member id, in the order in which they joined."""
        self.instances: dict[str, str] = {}
        """Member ids by instance id."""
        self.pending: dict[str, float] = {}
        """Member ids that were given out, and until when a member may join with them."""
        self.unsynced: set[str] = set()
        """Members of this generation that have not asked for its assignment."""
        self.effects = Effects()
        self._size = 0
        """Of all members. Like the following sums it is kept, so that a join looks at no other member."""
        self._memory_bytes = 0
        """Of all members, without their assignments."""
        self._timers = 0
        """How many timers have not fired yet."""
        self._assigned_bytes = 0
        """Of the last assignments: their records stay until the next ones replace them."""
        self._offered: Counter[str] = Counter()
        """By how many members each protocol is offered."""
        self._joining = 0
        """How many members wait for their join's reply."""
        self._checked = State.EMPTY
        """In which state the invariants of all members were checked last."""
        self._due_ms = NEVER
        """When the group stops to wait: for joins, or for syncs."""
        self._initial_left_ms: int | None = None
        """While the first rebalance is delayed: how much longer it may be."""
        self._has_grown = False
        """Whether a member has joined in the present delay."""

    @classmethod
    def loaded(
        cls,
        group_id: str,
        config: ClassicConfig,
        generation: int,
        assigned_generation: int,
        chosen: tuple[str, str, str],
        members: Iterable[ClassicMember],
        now_ms: float,
    ) -> ClassicGroup:
        """Return a group as the log has it; `chosen`: protocol type, protocol and leader. Sessions begin anew."""
        group = cls(group_id, config, generation)
        group.protocol_type, group.protocol, group.leader = chosen
        for member in members:
            group.members[member.member_id] = member
            group._count(member, 1)
            group._assigned_bytes += len(member.assignment)
            if member.instance_id:
                group.instances[member.instance_id] = member.member_id
            group._heard(member, now_ms)
        if not group.members:
            group.protocol = group.leader = ""
            return group
        if group.leader not in group.members:
            group.leader = next(iter(group.members))
        group.protocol = group.protocol or group._select()
        group.assigned_generation = assigned_generation
        group.state = State.STABLE
        if assigned_generation < generation:
            group.state = State.PREPARING_REBALANCE
            group._set_due(now_ms + group.rebalance_timeout_ms)
        group._check_invariants()
        return group

    def take(self) -> Effects:
        """Return the effects of the operations since the last call."""
        effects, self.effects = self.effects, Effects()
        self._timers += len(effects.timers)
        return effects

    def dissolve(self) -> None:
        """Ask the members whose calls wait to join again: the group is not a classic one from now on."""
        for member in self.members.values():
            if member.joining is not None:
                self._reply(member.joining, rebalancing(self.group_id))
                member.joining = None
            self._give_up_sync(member, rebalancing(self.group_id))
        self._joining = 0

    @property
    def rebalance_timeout_ms(self) -> int:
        """How long the slowest member may take."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    @property
    def memory_bytes(self) -> int:
        """How much memory the members take, including those that have only been given an id."""
        of_members = self._memory_bytes + self._assigned_bytes + PENDING_BYTES * len(self.pending)
        return of_members + TIMER_BYTES * self._timers

    @property
    def is_idle(self) -> bool:
        """Whether there is no member and none about to join."""
        return not self.members and not self.pending

    # Operations

    def join(self, command: JoinClassic, now_ms: float, check_bytes: Callable[[int], None] = no_bound) -> None:
        """Handle a member that joins, or joins again.

        Raises:
            InvalidSessionTimeout, InconsistentGroupProtocol, GroupMaxSizeReached: it may not, as it is.
            PolicyViolation: from `check_bytes`, which gets how many more bytes of memory the members would take.
            UnknownMemberId, FencedInstanceId: it is not, or no longer, the member that it says to be.
        """
        self._check_join(command, check_bytes)
        if command.member_id:
            self._join_known(command, now_ms)
        elif command.instance_id in self.instances:
            self._replace(command, now_ms)
        elif command.requires_id and not command.instance_id:
            self.pending[command.new_member_id] = now_ms + command.session_timeout_ms
            self.effects.timers.append((now_ms + command.session_timeout_ms, command.new_member_id))
            needed = MemberIdRequired(f"join again with the member id {command.new_member_id}")
            self._reply(command.to, Joined(command.new_member_id, error=needed))
        else:
            self._add(command, command.new_member_id, now_ms)
        self._check_invariants()

    def sync(self, command: SyncClassic, now_ms: float, check_bytes: Callable[[int], None] = no_bound) -> None:
        """Handle a member that asks for its assignment; the leader brings those of all members.

        Raises:
            UnknownMemberId, FencedInstanceId, IllegalGeneration, InconsistentGroupProtocol, RebalanceInProgress
            PolicyViolation: from `check_bytes`, which gets how many more bytes of memory the members would take.
        """
        member = self._member(command.member_id, command.instance_id)
        self._check_generation(command.generation)
        if command.protocol_type is not None and command.protocol_type != self.protocol_type:
            raise InconsistentGroupProtocol(
                f"the members of {self.group_id!r} are of type {self.protocol_type!r}, not {command.protocol_type!r}"
            )
        if command.protocol is not None and command.protocol != self.protocol:
            raise InconsistentGroupProtocol(
                f"generation {self.generation} of {self.group_id!r} uses {self.protocol!r}, not {command.protocol!r}"
            )
        if self.state is State.PREPARING_REBALANCE:
            raise rebalancing(self.group_id)
        if self.state is State.COMPLETING_REBALANCE:
            if member.member_id == self.leader:
                assigned_bytes = sum(map(len, command.assignments.values()))
                self._check_size(assigned_bytes)
                check_bytes(assigned_bytes - self._assigned_bytes)
            self._give_up_sync(member, rebalancing(self.group_id))  # sent again over another connection
            member.syncing = command.to
            self.unsynced.discard(member.member_id)
            if member.member_id == self.leader:
                self._assign(command.assignments, now_ms)
        else:
            assert self.state is State.STABLE, "a group with members is in one of three states"
            self.unsynced.discard(member.member_id)
            self._reply(command.to, Synced(self.protocol_type, self.protocol, member.assignment))
            self._heard(member, now_ms)
        if not self.unsynced and self.state is State.STABLE:
            self._due_ms = NEVER
        self._check_invariants()

    def heartbeat(self, command: HeartbeatClassic, now_ms: float) -> None:
        """Handle a sign of life.

        Raises:
            UnknownMemberId, FencedInstanceId, IllegalGeneration: it is no member now.
        """
        member = self._member(command.member_id, command.instance_id)
        self._check_generation(command.generation)
        self._heard(member, now_ms)
        is_over = self.state is State.PREPARING_REBALANCE
        self._reply(command.to, rebalancing(self.group_id) if is_over else Alive())

    def leave(self, command: LeaveClassic, now_ms: float) -> None:
        """Handle members that leave, or that an administrator removes."""
        errors: list[RaftlogError | None] = []
        gone = []
        for member_id, instance_id in command.members:
            try:
                if instance_id and not member_id:
                    member_id = self.instances.get(instance_id, "")
                    if not member_id:
                        raise UnknownMemberId(f"{self.group_id!r} has no member with the instance id {instance_id!r}")
                if self.pending.pop(member_id, None) is None:
                    gone.append(self._member(member_id, instance_id))
                    self._remove(gone[-1], UnknownMemberId("the member has left"))
                errors.append(None)
            except RaftlogError as error:
                errors.append(error)
        self._go_on(now_ms, changed=bool(gone))
        self._reply(command.to, Left(tuple(errors)))
        self._check_invariants()

    def on_deadline(self, member_id: str, now_ms: float) -> None:
        """Handle a timer that has gone off; the deadline may have moved meanwhile."""
        self._timers = max(0, self._timers - 1)  # a timer of an earlier group with this id may fire here
        if member_id == WHOLE_GROUP:
            self._on_due(now_ms)
        elif member_id in self.pending:
            if self.pending[member_id] <= now_ms:
                del self.pending[member_id]
                self._go_on(now_ms)
        elif (member := self.members.get(member_id)) is not None:
            self._on_silence(member, now_ms)
        self._check_invariants()

    def check_commit(
        self, member_id: str, instance_id: str, generation: int, now_ms: float, *, transactional: bool
    ) -> None:
        """Check that offsets may be committed: by a member in its generation, or without members by any client.

        In a transaction (`transactional`) its producer is fenced instead: old clients name no member there.

        Raises:
            UnknownMemberId, FencedInstanceId, IllegalGeneration: not by this client.
            RebalanceInProgress: not before the generation has its assignment.
        """
        if not member_id and not instance_id and generation < 0:
            if self.members and not transactional:
                raise UnknownMemberId(
                    f"the group {self.group_id!r} has {len(self.members)} members, and only they commit offsets"
                )
            return
        member = self._member(member_id, instance_id)
        self._check_generation(generation)
        if self.state is State.COMPLETING_REBALANCE and not transactional:
            raise rebalancing(self.group_id)
        self._heard(member, now_ms)

    # Joining

    def _check_join(self, command: JoinClassic, check_bytes: Callable[[int], None]) -> None:
        check_session_timeout(self.config, command.session_timeout_ms)
        if not command.protocol_type or not command.protocols:
            raise InconsistentGroupProtocol("a member names its protocol type, and at least one protocol")
        if self.members:
            if command.protocol_type != self.protocol_type:
                raise InconsistentGroupProtocol(
                    f"the members of {self.group_id!r} are of type {self.protocol_type!r}, not "
                    f"{command.protocol_type!r}"
                )
            common = self._common_protocols()
            if not any(name in common for name, _ in command.protocols):
                raise InconsistentGroupProtocol(
                    f"all members of {self.group_id!r} offer {', '.join(sorted(common))}; this one only "
                    f"{', '.join(name for name, _ in command.protocols)}"
                )
        self._check_room(command)
        known = self.members.get(command.member_id or self.instances.get(command.instance_id, ""))
        before = 0 if known is None else known.size - len(known.assignment)
        self._check_size(protocols_bytes(command.protocols) - before)
        more_bytes = member_memory_bytes(command.protocols) - (0 if known is None else known.memory_bytes)
        if known is None and not command.member_id and command.requires_id and not command.instance_id:
            more_bytes = PENDING_BYTES + TIMER_BYTES
        check_bytes(more_bytes)

    def _check_room(self, command: JoinClassic) -> None:
        most = self.config.max_size
        known = self.members.get(command.member_id)
        if command.instance_id in self.instances:
            return
        if self.state is State.PREPARING_REBALANCE:  # those that do not come again have no place
            is_full = self._joining >= most and (known is None or known.joining is None)
        else:
            is_full = known is None and len(self.members) >= most
        if is_full or (not command.member_id and len(self.pending) >= most):
            raise GroupMaxSizeReached(
                f"the group {self.group_id!r} has {len(self.members)} members and {len(self.pending)} about to join; "
                f"group.max.size={most}"
            )

    def _check_size(self, more: int) -> None:
        if self._size + more > MAX_BYTES:
            raise InvalidRequestError(
                f"the members of {self.group_id!r} say and get more than {MAX_BYTES} bytes: use fewer topics or members"
            )

    def _common_protocols(self) -> set[str]:
        return {name for name, count in self._offered.items() if count == len(self.members)}

    def _count(self, member: ClassicMember, by: int) -> None:
        """Count what a member says and whether it waits; `by` -1: it is about to change, or is gone."""
        self._size += by * member.size
        self._memory_bytes += by * member.memory_bytes
        self._joining += by * (member.joining is not None)
        for name, _ in member.protocols:
            self._offered[name] += by
            if not self._offered[name]:
                del self._offered[name]

    def _join_known(self, command: JoinClassic, now_ms: float) -> None:
        if self.pending.pop(command.member_id, None) is not None:
            self._add(command, command.member_id, now_ms)
            return
        member = self._member(command.member_id, command.instance_id)
        is_changed = member.protocols != command.protocols
        if self.state is State.PREPARING_REBALANCE:
            self._update(member, command)
            self._go_on(now_ms)
        elif is_changed or (self.state is State.STABLE and member.member_id == self.leader):
            self._update(member, command)
            self._go_on(now_ms, changed=True)
        else:  # its reply was lost, or nothing is new
            self._reply(command.to, self._joined(member))
            self._heard(member, now_ms)

    def _add(self, command: JoinClassic, member_id: str, now_ms: float) -> None:
        member = ClassicMember(
            member_id,
            command.instance_id,
            command.client_id,
            command.host,
            command.session_timeout_ms,
            command.rebalance_timeout_ms,
            command.protocols,
            joining=command.to,
            is_new=True,
        )
        if not self.members:
            self.protocol_type, self.leader = command.protocol_type, member_id
        self.members[member_id] = member
        self._count(member, 1)
        if member.instance_id:
            self.instances[member.instance_id] = member_id
        self._has_grown = True
        self._wait_for(member, now_ms + NEW_MEMBER_TIMEOUT_MS)
        self._go_on(now_ms, changed=True)

    def _update(self, member: ClassicMember, command: JoinClassic) -> None:
        if member.joining is not None:  # sent again over another connection
            self._reply(member.joining, rebalancing(self.group_id))
        self._count(member, -1)
        member.joining = command.to
        member.protocols = command.protocols
        self._count(member, 1)
        member.client_id, member.host = command.client_id, command.host
        member.session_timeout_ms = command.session_timeout_ms
        member.rebalance_timeout_ms = command.rebalance_timeout_ms

    def _replace(self, command: JoinClassic, now_ms: float) -> None:
        """A static member is back: it gets a new member id, and the old one is fenced (KIP-345)."""
        old = self.members[self.instances[command.instance_id]]
        fenced = fenced_instance(command.instance_id)
        was_leader, former_leader = old.member_id == self.leader, self.leader
        self._count(old, -1)
        self._give_up_sync(old, fenced)
        if old.joining is not None:
            self._reply(old.joining, fenced)
            old.joining = None
        member = ClassicMember(
            command.new_member_id,
            command.instance_id,
            command.client_id,
            command.host,
            command.session_timeout_ms,
            command.rebalance_timeout_ms,
            command.protocols,
            assignment=old.assignment,
        )
        self.members = {
            each.member_id: each for each in (member if each is old else each for each in self.members.values())
        }
        self._count(member, 1)
        self.instances[member.instance_id] = member.member_id
        if old.member_id in self.unsynced:
            self.unsynced.discard(old.member_id)
            self.unsynced.add(member.member_id)
        if was_leader:
            self.leader = member.member_id
        if self.state is State.STABLE and self._select() == self.protocol:
            self.effects.store = Store.ALL
            self._heard(member, now_ms)
            reply = self._joined(member)
            if was_leader and not command.can_skip_assignment:
                # It would make an assignment. So it is told that another member does: the one that it was.
                reply = self._joined(member, leader=former_leader)
            elif was_leader:
                reply = self._joined(member, skip_assignment=True)
            self._reply(command.to, reply)
            return
        member.joining = command.to
        self._joining += 1
        self._heard(member, now_ms)
        self._go_on(now_ms, changed=True)

    # Rebalancing

    def _go_on(self, now_ms: float, *, changed: bool = False) -> None:
        """Act on a change: a rebalance begins, or ends because all members have joined."""
        if self.state is State.PREPARING_REBALANCE:
            self._join_if_all(now_ms)
        elif changed and (self.members or self.state is not State.EMPTY):
            self._prepare(now_ms)

    def _prepare(self, now_ms: float) -> None:
        """Ask all members to join again."""
        if self.state is State.COMPLETING_REBALANCE:
            for member in self.members.values():
                if member.syncing is not None:
                    # While it waits, the end of its session is ignored. So the session begins anew, as in Kafka.
                    self._heard(member, now_ms)
                self._give_up_sync(member, rebalancing(self.group_id))
        self.unsynced.clear()
        first = self.state is State.EMPTY
        self.state = State.PREPARING_REBALANCE
        if first:
            delay_ms = self.config.initial_rebalance_delay_ms
            self._initial_left_ms = max(self.rebalance_timeout_ms - delay_ms, 0)
            self._has_grown = False
            self._set_due(now_ms + delay_ms)
            return
        self._initial_left_ms = None
        self._set_due(now_ms + self.rebalance_timeout_ms)
        self._join_if_all(now_ms)

    def _join_if_all(self, now_ms: float) -> None:
        is_all = not self.pending and self._joining == len(self.members)
        if not self.members or (is_all and self._initial_left_ms is None):
            self._complete_join(now_ms)

    def _on_due(self, now_ms: float) -> None:
        if self._due_ms > now_ms:
            return
        self._due_ms = NEVER
        if self.state is State.PREPARING_REBALANCE:
            if self._initial_left_ms and self._has_grown:
                delay_ms = min(self.config.initial_rebalance_delay_ms, self._initial_left_ms)
                self._initial_left_ms -= delay_ms
                self._has_grown = False
                self._set_due(now_ms + delay_ms)
            else:
                self._complete_join(now_ms)
        elif self.unsynced:
            late = [self.members[each] for each in sorted(self.unsynced)]
            for member in late:
                self._remove(member, UnknownMemberId("the member has not synced within the rebalance timeout"))
            self._go_on(now_ms, changed=True)

    def _complete_join(self, now_ms: float) -> None:
        """Begin the next generation, with those that have joined and the static members that may be back."""
        silent = [each for each in self.members.values() if each.joining is None and not each.instance_id]
        for member in silent:
            self._remove(member, UnknownMemberId("the member has not joined within the rebalance timeout"))
        leader = self.members.get(self.leader)
        if leader is None or leader.joining is None:
            leader = next((each for each in self.members.values() if each.joining is not None), None)
        if self.members and leader is None:  # static ones only, and none of them is there: until their sessions end
            self._set_due(now_ms + self.rebalance_timeout_ms)
            return
        self.generation += 1
        self._initial_left_ms = None
        self._due_ms = NEVER
        self.unsynced.clear()
        if leader is None:
            self.state = State.EMPTY
            self._assigned_bytes = 0
            self.assigned_generation = self.generation
            self.protocol = self.leader = ""
            self.effects.store = Store.ALL
            return
        self.leader = leader.member_id
        self.protocol = self._select()
        self.state = State.COMPLETING_REBALANCE
        if self.effects.store is Store.NOTHING:
            self.effects.store = Store.GENERATION
        self._set_due(now_ms + self.rebalance_timeout_ms)
        self._joining = 0
        for member in self.members.values():
            self._size -= len(member.assignment)
            member.assignment = b""
            if member.joining is not None:
                self.unsynced.add(member.member_id)
                self._reply(member.joining, self._joined(member))
                member.joining, member.is_new = None, False
                self._heard(member, now_ms)

    def _select(self) -> str:
        """Return the protocol that most members prefer among those that all offer."""
        common = self._common_protocols()
        votes: Counter[str] = Counter()
        for member in self.members.values():
            votes[next(name for name, _ in member.protocols if name in common)] += 1
        return max(sorted(votes), key=lambda name: votes[name])

    def _assign(self, assignments: Mapping[str, bytes], now_ms: float) -> None:
        self.state = State.STABLE
        self.assigned_generation = self.generation
        self.effects.store = Store.ALL
        self._assigned_bytes = 0
        for member in self.members.values():
            member.assignment = assignments.get(member.member_id, b"")
            self._size += len(member.assignment)
            self._assigned_bytes += len(member.assignment)
            if member.syncing is not None:
                self._reply(member.syncing, Synced(self.protocol_type, self.protocol, member.assignment))
                member.syncing = None
                self._heard(member, now_ms)

    # Members

    def _joined(self, member: ClassicMember, *, leader: str | None = None, skip_assignment: bool = False) -> Joined:
        leader = self.leader if leader is None else leader
        members: tuple[tuple[str, str, bytes], ...] = ()
        if leader == member.member_id:
            members = tuple(
                (each.member_id, each.instance_id, each.said(self.protocol)) for each in self.members.values()
            )
        return Joined(
            member.member_id, self.generation, self.protocol_type, self.protocol, leader, members, skip_assignment
        )

    def _member(self, member_id: str, instance_id: str) -> ClassicMember:
        if instance_id:
            known = self.instances.get(instance_id)
            if known is not None and known != member_id:
                raise fenced_instance(instance_id)
        member = self.members.get(member_id)
        if member is None or (instance_id and member.instance_id != instance_id):
            raise unknown_member(self.group_id, member_id)
        return member

    def _check_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise IllegalGeneration(f"{self.group_id!r} is in generation {self.generation}, not {generation}")

    def _remove(self, member: ClassicMember, why: RaftlogError) -> None:
        """Remove a member, and tell its call; what follows for the group is up to the caller."""
        if member.joining is not None:
            self._reply(member.joining, why)
        self._give_up_sync(member, why)
        self._count(member, -1)
        del self.members[member.member_id]
        self.unsynced.discard(member.member_id)
        if self.instances.get(member.instance_id) == member.member_id:
            del self.instances[member.instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), "")

    def _give_up_sync(self, member: ClassicMember, why: RaftlogError) -> None:
        if member.syncing is not None:
            self._reply(member.syncing, why)
            member.syncing = None

    def _on_silence(self, member: ClassicMember, now_ms: float) -> None:
        if member.timer_ms <= now_ms:
            member.timer_ms = NEVER
        if member.deadline_ms > now_ms:
            self._wait_for(member, member.deadline_ms)
        elif member.is_new or (member.joining is None and member.syncing is None):
            self._remove(member, UnknownMemberId(f"nothing was heard of the member for {member.session_timeout_ms} ms"))
            self._go_on(now_ms, changed=True)
        # Else it waits for the others, which is a sign of life: its session goes on with the reply.

    def _heard(self, member: ClassicMember, now_ms: float) -> None:
        if not member.is_new:
            self._wait_for(member, now_ms + member.session_timeout_ms)

    def _wait_for(self, member: ClassicMember, deadline_ms: float) -> None:
        member.deadline_ms = deadline_ms
        if deadline_ms < member.timer_ms:
            member.timer_ms = deadline_ms
            self.effects.timers.append((deadline_ms, member.member_id))

    def _set_due(self, due_ms: float) -> None:
        self._due_ms = due_ms
        self.effects.timers.append((due_ms, WHOLE_GROUP))

    def _reply(self, to: object, reply: Reply | RaftlogError) -> None:
        self.effects.replies.append((to, reply))

    def _check_invariants(self) -> None:
        assert (self.state is State.EMPTY) == (not self.members), "an empty group has no members, and no other"
        assert self.state is not State.STABLE or self.assigned_generation == self.generation, "stable: assigned"
        assert not self.members or self.leader in self.members, "the leader is a member"
        if self.state is self._checked:  # what follows looks at every member, and each of them joins and syncs
            return
        self._checked = self.state
        assert self.unsynced <= self.members.keys(), "only members sync"
        assert self._size == sum(member.size for member in self.members.values()), "kept as it is"
        assert self._memory_bytes == sum(member.memory_bytes for member in self.members.values()), "kept as it is"
        assert self._joining == sum(member.joining is not None for member in self.members.values()), "kept as it is"
        assert self._offered == Counter(name for member in self.members.values() for name, _ in member.protocols)
        for member in self.members.values():
            assert member.joining is None or self.state is State.PREPARING_REBALANCE, "joins wait while preparing"
            assert member.syncing is None or self.state is State.COMPLETING_REBALANCE, "syncs wait while completing"
        assert len(self.instances) == sum(bool(each.instance_id) for each in self.members.values())
