"""Which member gets which partition: balance, few moves, and Kafka's examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.coordinator.groups.assignors import BUILT_IN, Assignor, GroupSpec, MemberSpec, StickyAssignor
from broker.coordinator.groups.topics import Topic, TopicPartition
from tests.support.fresh import examples

Target = Mapping[str, frozenset[TopicPartition]]
Steps = list[tuple[dict[str, str], dict[str, int]]]
NONE: frozenset[TopicPartition] = frozenset()


def spec(
    subscriptions: Mapping[str, str], counts: Mapping[str, int], targets: Target | None = None, static: str = ""
) -> GroupSpec:
    """Topics have one letter each; `static`: the members that have an instance id (their own in reverse order)."""
    members = [
        MemberSpec(
            member_id=member_id,
            instance_id=chr(ord("z") - ord(member_id[0])) if member_id in static else "",
            rack="",
            topics=frozenset(topic.encode() for topic in topics),
            target=(targets or {}).get(member_id, NONE),
        )
        for member_id, topics in subscriptions.items()
    ]
    read = set("".join(subscriptions.values()))
    topics = tuple(Topic(name.encode(), name, count) for name, count in sorted(counts.items()) if name in read)
    return GroupSpec(tuple(sorted(members, key=lambda member: member.place)), topics)


def assigned(assignor: Assignor, group: GroupSpec) -> dict[str, frozenset[TopicPartition]]:
    """Assign, and check what holds for every assignor that gives out everything."""
    result = {member_id: list(target) for member_id, target in assignor.assign(group).items()}
    everything = [partition for target in result.values() for partition in target]
    assert sorted(everything) == sorted((topic.topic_id, n) for topic in group.topics for n in range(topic.partitions))
    topics = {member.member_id: member.topics for member in group.members}
    assert all(topic_id in topics[member_id] for member_id, target in result.items() for topic_id, _ in target)
    assert result == {member_id: list(target) for member_id, target in assignor.assign(group).items()}
    return {member_id: frozenset(result.get(member_id, ())) for member_id in topics}


def short(assignment: Target) -> dict[str, str]:
    return {
        member_id: " ".join(f"{topic_id.decode()}{number}" for topic_id, number in sorted(target))
        for member_id, target in assignment.items()
    }


# Kafka's examples


def test_range_cuts_each_topic() -> None:
    group = spec({"c0": "st", "c1": "st"}, {"s": 3, "t": 3})
    assert short(assigned(BUILT_IN["range"], group)) == {"c0": "s0 s1 t0 t1", "c1": "s2 t2"}


def test_range_with_more_members_than_partitions() -> None:
    group = spec({"c0": "s", "c1": "s", "c2": "s"}, {"s": 2})
    assert short(assigned(BUILT_IN["range"], group)) == {"c0": "s0", "c1": "s1", "c2": ""}


def test_roundrobin_goes_on_from_topic_to_topic() -> None:
    group = spec({"c0": "st", "c1": "st"}, {"s": 3, "t": 3})
    assert short(assigned(BUILT_IN["roundrobin"], group)) == {"c0": "s0 s2 t1", "c1": "s1 t0 t2"}


def test_roundrobin_passes_over_who_does_not_subscribe() -> None:
    group = spec({"c0": "r", "c1": "rs", "c2": "rst"}, {"r": 1, "s": 2, "t": 3})
    assert short(assigned(BUILT_IN["roundrobin"], group)) == {"c0": "r0", "c1": "s0", "c2": "s1 t0 t1 t2"}


def test_static_members_stand_in_the_order_of_their_instance_ids() -> None:
    group = spec({"a": "s", "b": "s", "c": "s"}, {"s": 3}, static="bc")
    assert short(assigned(BUILT_IN["range"], group)) == {"c": "s0", "b": "s1", "a": "s2"}


def test_sticky_keeps_what_may_be_kept() -> None:
    before = assigned(StickyAssignor(), spec({"a": "s", "b": "s"}, {"s": 6}))
    after = assigned(StickyAssignor(), spec({"a": "s", "b": "s", "c": "s"}, {"s": 6}, before))
    assert short(after) == {"a": "s0 s1", "b": "s3 s4", "c": "s2 s5"}


# Properties


GROUPS = [st.sampled_from(["".join(names) for names in combinations("abcdefg", size)]) for size in range(1, 8)]
SUBSCRIPTIONS = st.sampled_from(["".join(names) for size in range(4) for names in combinations("stu", size)])
COUNTS = st.fixed_dictionaries({name: st.integers(0, 7) for name in "stu"})


@st.composite
def histories(draw: st.DrawFn) -> Steps:
    """Subscriptions and partition counts, one after the other, in few draws: drawing is what takes the time."""
    equal = draw(st.booleans())
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        members = draw(GROUPS[draw(st.integers(0, 6))])
        topics = [draw(SUBSCRIPTIONS)] * len(members) if equal else [draw(SUBSCRIPTIONS) for _ in members]
        steps.append((dict(zip(members, topics, strict=True)), draw(COUNTS)))
    return steps


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=examples(1.5), deadline=None)
@given(steps=histories())
def test_everything_is_given_to_one_who_may_read_it(
    name: str, steps: list[tuple[dict[str, str], dict[str, int]]]
) -> None:
    targets: Target = {}
    for subscriptions, counts in steps:
        targets = assigned(BUILT_IN[name], spec(subscriptions, counts, targets))


@settings(max_examples=examples(4), deadline=None)
@given(steps=histories())
def test_sticky_is_balanced_and_moves_nothing_without_a_reason(
    steps: Steps,
) -> None:
    targets: Target = {}
    for subscriptions, counts in steps:
        group = spec(subscriptions, counts, targets)
        after = assigned(StickyAssignor(), group)
        for topics in set(subscriptions.values()):
            loads = [len(after[member]) for member, read in subscriptions.items() if read == topics]
            assert max(loads) - min(loads) <= 1
        for giver, taker in product(after, after):
            movable = [topic_id for topic_id, _ in after[giver] if topic_id.decode() in subscriptions[taker]]
            assert not movable or len(after[giver]) - len(after[taker]) <= 1
        targets = after
        assert assigned(StickyAssignor(), spec(subscriptions, counts, targets)) == targets, (
            "an assignment that is balanced already must not change"
        )


def moves(before: Target, after: Target) -> int:
    """Return how many partitions moved away from members that stay."""
    return sum(len(target - after[member_id]) for member_id, target in before.items() if member_id in after)


def shared(partitions: list[TopicPartition], owners: Iterable[str], names: Iterable[str]) -> Target:
    """Return the partitions of each member, given the owner of each partition."""
    pairs = list(zip(partitions, owners, strict=True))
    return {name: frozenset(partition for partition, owner in pairs if owner == name) for name in names}


def balanced(members: Iterable[str], partitions: list[TopicPartition]) -> list[Target]:
    """Return every balanced assignment."""
    names = list(members)
    found: list[Target] = []
    for owners in product(names, repeat=len(partitions)):
        loads = [owners.count(name) for name in names]
        if max(loads) - min(loads) <= 1:
            found.append(
                {
                    name: frozenset(p for p, owner in zip(partitions, owners, strict=True) if owner == name)
                    for name in names
                }
            )
    return found


@settings(max_examples=examples(0.8), deadline=None)
@given(
    before=st.lists(st.sampled_from("abcx"), min_size=1, max_size=6),
    members=st.sets(st.sampled_from("abc"), min_size=1),
)
def test_sticky_moves_as_few_as_any_balanced_assignment(before: list[str], members: set[str]) -> None:
    partitions = [(b"s", number) for number in range(len(before))]
    targets = shared(partitions, before, "abcx")
    group = spec(dict.fromkeys(sorted(members), "s"), {"s": len(before)}, targets)
    after = assigned(StickyAssignor(), group)
    assert moves(targets, after) == min(moves(targets, other) for other in balanced(members, partitions))


def test_sticky_is_quick_enough_for_large_groups() -> None:
    counts = {"s": 5000, "t": 5000}
    subscriptions = {f"m{index:05}": "st" if index % 3 else "s" for index in range(2000)}
    group = spec(subscriptions, counts)
    after = assigned(StickyAssignor(), group)
    del subscriptions["m00001"]
    again = assigned(StickyAssignor(), spec(subscriptions, counts, after))
    assert moves(after, again) == 0
