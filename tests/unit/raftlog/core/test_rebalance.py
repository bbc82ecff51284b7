"""Plans of where replicas had better be: what holds of every plan, beside examples that one can check by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.rebalance import SLACK, Balance, BrokerPlace, CannotPlace, Load, Placement, copied_bytes, loads, plan
from raftlog.types import TopicPartition


def part(number: int, topic: str = "a") -> TopicPartition:
    return TopicPartition(topic, number)


def placement(*replicas: tuple[int, ...]) -> dict[TopicPartition, tuple[int, ...]]:
    return {part(number): each for number, each in enumerate(replicas)}


def brokers(*ids: int) -> list[BrokerPlace]:
    return [BrokerPlace(broker_id) for broker_id in ids]


def held(placed: Placement) -> Counter[int]:
    return Counter(broker_id for replicas in placed.values() for broker_id in replicas)


def led(placed: Placement) -> Counter[int]:
    return Counter(replicas[0] for replicas in placed.values())


def copies(before: Placement, after: Placement) -> int:
    return sum(len(set(after[each]) - set(before[each])) for each in after)


# Examples


def test_what_is_even_stays_as_it_is() -> None:
    now = placement((1, 2), (2, 3), (3, 1))
    assert plan(now, brokers(1, 2, 3)) == now


def test_a_new_broker_gets_its_share_and_nothing_else_moves() -> None:
    now = placement(*[(number % 3 + 1, (number + 1) % 3 + 1) for number in range(12)])
    after = plan(now, brokers(1, 2, 3, 4))
    assert held(after) == {1: 6, 2: 6, 3: 6, 4: 6}
    assert led(after) == {1: 3, 2: 3, 3: 3, 4: 3}
    assert copies(now, after) == 6


def test_the_new_broker_gets_some_of_every_topic() -> None:
    now = {part(number, topic): (number % 2 + 1,) for topic in "abc" for number in range(6)}
    after = plan(now, brokers(1, 2, 3))
    for topic in "abc":
        assert held({each: replicas for each, replicas in after.items() if each.topic == topic}) == {1: 2, 2: 2, 3: 2}


def test_another_order_evens_leaders_out_without_a_copy() -> None:
    now = placement((1, 2, 3), (1, 2, 3), (1, 3, 2))
    after = plan(now, brokers(1, 2, 3))
    assert copies(now, after) == 0
    assert led(after) == {1: 1, 2: 1, 3: 1}


def test_what_cannot_go_directly_goes_over_others() -> None:
    """1 leads two and 3 none, and none is on both: 1 hands one to 2, and 2 one to 3."""
    places = [BrokerPlace(each, takes=False) for each in (1, 2, 3)]
    after = plan(placement((1, 2), (1, 2), (2, 3)), places)
    assert after == placement((2, 1), (1, 2), (3, 2))


def test_a_broker_that_leaves_keeps_nothing_and_nothing_else_moves() -> None:
    now = placement((4, 1), (1, 4), (2, 3), (3, 4))
    places = [*brokers(1, 2, 3), BrokerPlace(4, leaves=True)]
    after = plan(now, places, by=Balance.NOTHING)
    assert after == placement((1, 2), (1, 2), (2, 3), (3, 1))
    assert copies(now, after) == 3


@pytest.mark.parametrize("by", [Balance.NOTHING, Balance.REPLICAS])
def test_what_leaves_makes_room_for_what_can_go_to_one_broker_alone(by: Balance) -> None:
    """3 and 4 can only go to 1; so 1 or 2, which went there first, goes to 2 instead, and 0 stays."""
    now = placement((1,), (3,), (3,), (3, 2), (3, 2), (2,))
    after = plan(now, [*brokers(1, 2), BrokerPlace(3, leaves=True)], by=by)
    assert held(after) == {1: 4, 2: 4}
    assert copies(now, after) == 4
    assert after[part(0)] == (1,)


def test_without_a_broker_to_spare_nobody_can_leave() -> None:
    now = placement((1, 2, 3), (1, 2))
    places = [*brokers(1, 2), BrokerPlace(3, leaves=True)]
    with pytest.raises(CannotPlace, match=r"no broker is left that could hold another replica of a-0$") as refused:
        plan(now, places, by=Balance.NOTHING)
    assert refused.value.partitions == (part(0),)
    many = {part(number): (1, 2, 3) for number in range(9)}
    with pytest.raises(CannotPlace, match=r"of a-0, a-1, a-2, a-3, a-4 and 4 more$"):
        plan(many, places)


def test_who_is_cordoned_or_fenced_keeps_what_it_has_and_gets_nothing() -> None:
    now = placement(*[(1, 2)] * 4, (3,))
    places = [BrokerPlace(1), BrokerPlace(2), BrokerPlace(3, takes=False), BrokerPlace(4)]
    after = plan(now, places)
    assert held(after) == {1: 3, 2: 3, 4: 2, 3: 1}
    assert after[part(4)] == (3,)


def test_who_is_drained_gets_no_leadership() -> None:
    now = placement((1, 2), (1, 2), (1, 2), (1, 2))
    after = plan(now, [BrokerPlace(1), BrokerPlace(2, takes=False, leads=False)])
    assert after == now
    assert led(plan(now, [BrokerPlace(1), BrokerPlace(2, takes=False)])) == {1: 2, 2: 2}, (
        "a cordoned broker must still lead"
    )


def test_racks_come_apart_before_loads_are_even() -> None:
    racks = {1: "x", 2: "x", 3: "y"}
    now = placement(*[(1, 2)] * 4)
    after = plan(now, [BrokerPlace(each, rack) for each, rack in racks.items()])
    assert all(len({racks[each] for each in replicas}) == 2 for replicas in after.values())
    assert held(after) == {1: 2, 2: 2, 3: 4}, "the broker that is alone in its rack must get half of the replicas"


def test_the_last_broker_of_a_rack_may_leave() -> None:
    now = placement((1, 3), (2, 3))
    places = [BrokerPlace(1, "x"), BrokerPlace(2, "x"), BrokerPlace(3, "y", leaves=True)]
    assert plan(now, places) == placement((1, 2), (2, 1))


def test_a_broker_that_leaves_hands_its_rack_on_where_it_can() -> None:
    now = placement((1, 3), (2, 3), (1, 3))
    places = [BrokerPlace(1, "x"), BrokerPlace(2, "x"), BrokerPlace(3, "y", leaves=True), BrokerPlace(4, "y")]
    assert plan(now, places, by=Balance.NOTHING) == placement((1, 4), (2, 4), (1, 4))


def test_bytes_are_made_even_whatever_that_means_for_counts() -> None:
    now = placement((1,), (1,), (1,), (2,), (2,), (2,))
    sizes = {part(0): 600, part(1): 300, part(2): 300, part(3): 1, part(4): 1, part(5): 0}
    after = plan(now, brokers(1, 2), by=Balance.BYTES, sizes=sizes)
    assert {each: load.size_bytes for each, load in loads(after, (), sizes).items()} == {1: 600, 2: 602}
    assert copied_bytes(now, after, sizes) == 600


def test_loads_name_who_has_nothing_and_who_is_not_known() -> None:
    assert loads(placement((1, 9)), [1, 2], {part(0): 7}) == {1: Load(1, 1, 7), 2: Load(), 9: Load(1, 0, 7)}


def test_two_thousand_partitions_are_planned_in_seconds() -> None:
    now = {part(number): (number % 9 + 1, (number + 1) % 9 + 1, (number + 2) % 9 + 1) for number in range(2_000)}
    after = plan(now, brokers(*range(1, 11)))
    assert set(held(after).values()) == {600}
    assert copies(now, after) == 600
    assert max(led(after).values()) - min(led(after).values()) <= 1


# What holds of every plan


class Case(NamedTuple):
    """A cluster to be planned for."""

    placed: dict[TopicPartition, tuple[int, ...]]
    places: list[BrokerPlace]
    sizes: dict[TopicPartition, int]

    @property
    def takers(self) -> set[int]:
        """The brokers that may get replicas."""
        return {each.broker_id for each in self.places if each.takes and not each.leaves}

    @property
    def leaving(self) -> set[int]:
        """The brokers that keep no replica."""
        return {each.broker_id for each in self.places if each.leaves}

    @property
    def rack_of(self) -> dict[int, str]:
        """Where brokers stand; 9 is not known."""
        return {each.broker_id: each.rack for each in self.places} | {9: ""}


@st.composite
def cases(draw: st.DrawFn, racks: str = "xyz", states: bool = True) -> Case:
    """Up to six brokers, in racks and states, and one that is gone; up to 24 partitions of one to four replicas."""
    flags = st.booleans() if states else st.just(True)
    places = [
        BrokerPlace(
            broker_id, draw(st.sampled_from(racks)), takes := draw(flags), takes or draw(flags), not draw(flags)
        )
        for broker_id in range(1, draw(st.integers(1, 6)) + 1)
    ]
    ids = [each.broker_id for each in places] + ([9] if states else [])
    replicas = st.lists(st.sampled_from(ids), min_size=1, max_size=min(4, len(ids)), unique=True)
    drawn = draw(st.lists(st.tuples(st.sampled_from("ab"), replicas), max_size=24))
    placed = {part(number, topic): tuple(each) for number, (topic, each) in enumerate(drawn)}
    return Case(placed, places, {each: draw(st.integers(0, 1000)) for each in placed})


def planned(case: Case, by: Balance) -> dict[TopicPartition, tuple[int, ...]] | None:
    """Return the plan, or None if there cannot be one, which is checked."""
    try:
        return plan(case.placed, case.places, by=by, sizes=case.sizes)
    except CannotPlace as refused:
        for each in refused.partitions:
            stays = set(case.placed[each]) - case.leaving
            assert len(case.takers | stays) < len(case.placed[each]) or not case.takers - stays
        return None


@given(cases(), st.sampled_from(Balance))
def test_no_plan_breaks_what_a_partition_is_promised(case: Case, by: Balance) -> None:
    after = planned(case, by)
    if after is None:
        return
    assert after.keys() == case.placed.keys()
    for each, replicas in after.items():
        before = case.placed[each]
        assert len(set(replicas)) == len(replicas) == len(before)
        assert not set(replicas) & case.leaving
        assert set(replicas) - set(before) <= case.takers, (
            "a broker that is cordoned, drained or fenced must get no replicas"
        )
        kept_away = set(before) - case.takers - case.leaving
        assert kept_away <= set(replicas), "a broker that is cordoned or fenced must keep its replicas"
        racks_before = {case.rack_of[broker_id] for broker_id in before}
        possible = {case.rack_of[broker_id] for broker_id in case.takers | (set(before) - case.leaving)}
        racks_after = {case.rack_of[broker_id] for broker_id in replicas}
        assert len(racks_after) >= min(len(racks_before), len(racks_before & possible))
        if not set(before) & case.leaving:
            assert len(racks_after) >= len(racks_before)


@given(cases(), st.sampled_from(Balance))
def test_a_plan_is_the_same_every_time_and_nothing_is_left_to_do_after_it(case: Case, by: Balance) -> None:
    after = planned(case, by)
    if after is None:
        return
    shuffled = dict(reversed(case.placed.items()))
    assert plan(shuffled, case.places[::-1], by=by, sizes=case.sizes) == after
    if by is not Balance.BYTES:
        assert plan(after, case.places, by=by, sizes=case.sizes) == after


@given(cases())
def test_replicas_and_leaders_are_within_one_unless_no_single_step_is_allowed(case: Case) -> None:
    after = planned(case, Balance.REPLICAS)
    if after is None:
        return
    now = held(after)
    for from_, to in product(case.takers, repeat=2):
        if now[from_] - now[to] >= 2:
            for replicas in after.values():
                if from_ in replicas and to not in replicas:
                    racks = {case.rack_of[each] for each in replicas}
                    others = {case.rack_of[each] for each in replicas if each != from_} | {case.rack_of[to]}
                    assert len(others) < len(racks), (
                        "a replica could move and make the load more even, without fewer racks"
                    )
    leading = led(after)
    may_lead = {each.broker_id for each in case.places if each.leads and not each.leaves}
    for from_, to in product(may_lead, repeat=2):
        if leading[from_] - leading[to] >= 2:
            assert not any(replicas[0] == from_ and to in replicas for replicas in after.values())


@given(cases())
def test_who_leaves_costs_one_copy_for_each_of_its_replicas(case: Case) -> None:
    after = planned(case, Balance.NOTHING)
    if after is not None:
        assert copies(case.placed, after) == sum(held(case.placed)[each] for each in case.leaving)
        for each, replicas in after.items():
            assert replicas == case.placed[each] or set(case.placed[each]) & case.leaving


@given(cases(racks="x", states=False))
def test_with_one_rack_loads_are_within_one_for_the_fewest_copies(case: Case) -> None:
    after = plan(case.placed, case.places)
    now, before = held(after), held(case.placed)
    ids = sorted(case.takers)
    floor, more = divmod(sum(now.values()), len(ids))
    if case.placed:
        assert max(now[each] for each in ids) - min(now[each] for each in ids) <= 1
    most_first = sorted(ids, key=lambda each: -before[each])
    surplus = sum(max(0, before[each] - floor - (place < more)) for place, each in enumerate(most_first))
    assert copies(case.placed, after) == surplus


def every_placement(case: Case) -> Iterator[list[tuple[int, ...]]]:
    ids = [each.broker_id for each in case.places]
    yield from map(list, product(*(combinations(ids, len(replicas)) for replicas in case.placed.values())))


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Up to four brokers and partitions: few enough to try every way to place them."""
    places = brokers(*range(1, draw(st.integers(2, 4)) + 1))
    ids = [each.broker_id for each in places]
    replicas = st.lists(st.sampled_from(ids), min_size=1, max_size=3, unique=True).filter(lambda x: len(x) <= len(ids))
    drawn = draw(st.lists(replicas, min_size=1, max_size=4))
    return Case({part(number): tuple(each) for number, each in enumerate(drawn)}, places, {})


def squares(counts: Mapping[int, int]) -> int:
    return sum(count * count for count in counts.values())


@given(small_cases())
def test_no_other_placement_is_more_even_or_as_even_for_fewer_copies(case: Case) -> None:
    after = plan(case.placed, case.places)
    best = min(
        (
            squares(Counter(each for replicas in other for each in replicas)),
            copies(case.placed, dict(zip(case.placed, other, strict=True))),
        )
        for other in every_placement(case)
    )
    assert (squares(held(after)), copies(case.placed, after)) == best
    least = min(squares(Counter(order)) for order in product(*after.values()))
    assert squares(led(after)) == least


@given(cases(racks="x", states=False))
def test_bytes_end_closer_than_they_began(case: Case) -> None:
    after = plan(case.placed, case.places, by=Balance.BYTES, sizes=case.sizes)
    ids = case.takers
    before = {each: load.size_bytes for each, load in loads(case.placed, ids, case.sizes).items()}
    now = {each: load.size_bytes for each, load in loads(after, ids, case.sizes).items()}
    assert squares(now) <= squares(before)
    slack = SLACK * sum(now.values()) / len(ids)
    if max(before.values()) - min(before.values()) <= slack:
        assert copies(case.placed, after) == 0, "replicas were moved, though the load was even enough"
