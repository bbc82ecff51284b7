"""Rebalancing: the target assignment of a group, computed again whenever the group's epoch has risen (KIP-848).

A group also remembers which partitions are newer than its subscription (KAFKA-20030): a consumer that begins at the end
of a partition misses the records written before it noticed the partition. So partitions created after the group first
saw the topic, and topics that appear under a subscription, are read from their start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from broker.coordinator.groups.assignors import Assignor, GroupSpec, MemberSpec, StickyAssignor
from broker.coordinator.groups.change import Change
from broker.coordinator.groups.group import Head, Subscription
from broker.coordinator.groups.sessions import NEVER, Kind
from broker.coordinator.groups.topics import Topic, TopicPartition, TopicsView

MAX_PATTERNS: Final = 100
"""Remembered for a group; the oldest is forgotten first."""


def subscribed(
    head: Head, before: Subscription, after: Subscription, topics: TopicsView
) -> tuple[Mapping[bytes, int], tuple[str, ...]]:
    """Return the known topics and patterns once a member with one subscription has another.

    What exists when it is asked for is known with the partitions that it has. What is new under a pattern that the
    group knows was not there when the pattern was matched first: none of its partitions is known.
    """
    known = dict(head.known_topics)
    patterns = head.patterns
    pattern = after.pattern
    new_matches = pattern != "" and pattern in patterns
    already = set(before.topics) if before.pattern == pattern else set()
    for name in after.topics:
        topic = topics.by_name(name)
        if topic is not None and topic.topic_id not in known:
            # One that the member waited for by name is newer than the subscription, too.
            known[topic.topic_id] = 0 if new_matches or name in already else topic.partitions
    if pattern and not new_matches:
        patterns = (*patterns, pattern)[-MAX_PATTERNS:]
    return known, patterns


def appeared(head: Head, names: Iterable[str], topics: TopicsView) -> Mapping[bytes, int]:
    """Return the known topics once metadata has changed: subscribed ones that are not known yet are new."""
    known = {topic_id: count for topic_id, count in head.known_topics.items() if topics.by_id(topic_id) is not None}
    for name in names:
        topic = topics.by_name(name)
        if topic is not None:
            known.setdefault(topic.topic_id, 0)
    return known


logger = logging.getLogger(__name__)

PIECE = 100
"""Members that are reconciled in one go, at most."""
PIECE_PARTITIONS = 1000
"""The most partitions, assigned or in targets, of the members in one piece; at least one member is in it."""


class _Subscriptions:
    """The existing topics of each member's subscription; equal subscriptions share one set."""

    def __init__(self, change: Change) -> None:
        self.names: dict[str, Topic | None] = {}
        self._topics = change.context.topics
        self._ids: dict[tuple[str, ...], frozenset[bytes]] = {}
        self.of = {
            member_id: self._read(member.subscription.topics) for member_id, member in change.draft.members.items()
        }

    def _read(self, names: tuple[str, ...]) -> frozenset[bytes]:
        ids = self._ids.get(names)
        if ids is None:
            for name in names:
                if name not in self.names:
                    self.names[name] = self._topics.by_name(name)
            found = (self.names[name] for name in names)
            ids = self._ids[names] = frozenset(topic.topic_id for topic in found if topic is not None)
        return ids

    @property
    def topics(self) -> list[Topic]:
        """The subscribed topics, by name."""
        return [topic for _, topic in sorted(self.names.items()) if topic is not None]


def assign(change: Change) -> None:
    """Compute the target assignment of the group's epoch, and move members towards it."""
    change.soft.assign_due_ms = NEVER
    head = change.draft.head
    if head is None or head.assignment_epoch == head.group_epoch or not change.draft.members:
        return
    change.soft.assigned_at_ms = change.now.monotonic_ms
    subscriptions = _Subscriptions(change)
    spec = _spec(change, subscriptions)
    assignor = chosen(change)
    targets = _made(change, assignor, spec)
    for member_id in change.draft.members:
        change.draft.set_target(member_id, targets.get(member_id, frozenset()))
    change.draft.set_head(replace(head, assignment_epoch=head.group_epoch, assignor=assignor.name))
    reconcile_all(change)


def reconcile_all(change: Change) -> None:
    """Move every member towards its target; first those that are away, because they release partitions at once."""
    order = sorted(change.draft.assignments.items(), key=lambda item: (not item[1].away, item[0]), reverse=True)
    change.soft.to_reconcile = [member_id for member_id, _ in order]
    reconcile_some(change)


def reconcile_some(change: Change) -> None:
    """Reconcile some more members; the next piece follows after other groups had their turn."""
    waiting = change.soft.to_reconcile
    members, partitions = 0, 0
    while waiting and members < PIECE and partitions < PIECE_PARTITIONS:
        member_id = waiting.pop()
        members += 1
        partitions += _size(change, member_id)
        change.reconcile(member_id)
        change.touch(member_id)
    if waiting:
        change.context.timers.at(change.now.monotonic_ms, Kind.GROUP, change.group_id)


def _size(change: Change, member_id: str) -> int:
    """Return about how many partitions a member's records name."""
    current = change.draft.assignments.get(member_id)
    has = 0 if current is None else len(current.assigned) + len(current.pending_revocation)
    return has + len(change.draft.targets.get(member_id, ()))


def _spec(change: Change, subscriptions: _Subscriptions) -> GroupSpec:
    targets = change.draft.targets
    members = [
        MemberSpec(
            member_id,
            member.instance_id,
            member.rack,
            subscriptions.of[member_id],
            targets.get(member_id, frozenset()),
        )
        for member_id, member in change.draft.members.items()
    ]
    return GroupSpec(tuple(sorted(members, key=lambda member: member.place)), tuple(subscriptions.topics))


def chosen(change: Change) -> Assignor:
    """Return the assignor that most members ask for; the server's order breaks ties."""
    assignors = change.context.assignors
    wishes = Counter(member.subscription.assignor for member in change.draft.members.values())
    name = max(assignors, key=lambda name: wishes[name])  # the first of the most
    return assignors[name]


def _made(change: Change, assignor: Assignor, spec: GroupSpec) -> Mapping[str, frozenset[TopicPartition]]:
    """Return the assignor's targets, or those of `sticky` if they are invalid."""
    try:
        targets = {member_id: frozenset(target) for member_id, target in assignor.assign(spec).items()}
        wrong = _mistake(targets, spec)
    except Exception as error:  # a user's assignor may raise anything; the group has to go on
        wrong = f"it raised {type(error).__name__}: {error}"
    if not wrong:
        change.soft.warned = ""
        return targets
    if change.soft.warned != wrong:
        change.soft.warned = wrong
        logger.error("assignor %s failed, sticky is used: group=%s reason=%s", assignor.name, change.group_id, wrong)
    return {member_id: frozenset(target) for member_id, target in StickyAssignor().assign(spec).items()}


def _mistake(targets: Mapping[str, frozenset[TopicPartition]], spec: GroupSpec) -> str:
    """Return the rule that an assignor's result violates."""
    members = {member.member_id: member for member in spec.members}
    counts = {topic.topic_id: topic.partitions for topic in spec.topics}
    given: set[TopicPartition] = set()
    for member_id, target in targets.items():
        member = members.get(member_id)
        if member is None:
            return f"it gives partitions to {member_id!r}, which is no member"
        for topic_id, number in target:
            if topic_id not in member.topics or not 0 <= number < counts[topic_id]:
                return f"it gives partition {number} of {topic_id.hex()} to {member_id}, which cannot read it"
        if not given.isdisjoint(target):
            return "it gives a partition to two members"
        given |= target
    return ""


def on_topics(change: Change, names: Iterable[str]) -> None:
    """Subscribed topics have come, gone or grown: a new assignment is needed."""
    known = appeared(change.head, names, change.context.topics)
    change.bump(known_topics=known)


def after_load(change: Change) -> None:
    """Look whether the log ended, or the former coordinator did, before everything was done."""
    head = change.head
    for member_id in sorted({*change.draft.targets, *change.draft.assignments} - change.draft.members.keys()):
        change.remove(member_id)
    if not change.draft.members:
        if change.draft.head is not None and not head.empty_since_ms:
            change.leave_empty()
        return
    subscriptions = _Subscriptions(change)
    wanted = {(topic.topic_id, number) for topic in subscriptions.topics for number in range(topic.partitions)}
    targeted: set[TopicPartition] = set().union(*change.draft.targets.values())
    complete = change.draft.targets.keys() == change.draft.members.keys()
    if (
        wanted != targeted
        or not complete
        or any(topic.topic_id not in head.known_topics for topic in subscriptions.topics)
    ):
        on_topics(change, subscriptions.names)
    elif head.assignment_epoch < head.group_epoch:
        change.assign_soon()
    else:
        reconcile_all(change)
