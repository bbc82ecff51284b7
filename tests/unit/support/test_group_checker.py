"""The checker of consumer groups notices each anomaly, and accepts every behavior of a correct group."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import pytest

from tests.support.append_checker import describe
from tests.support.group_checker import (
    Commit,
    Given,
    History,
    Kind,
    Observation,
    Span,
    assert_sound,
    check,
)


def span(
    member: str, first_epoch: int, last_epoch: int, began_at: float, *given: tuple[float, tuple[int, ...]]
) -> Span:
    """A span of partition 0; each poll was called at a time, and its records were done with half a second later."""
    polls = [Given(at, at + 0.5, offsets) for at, offsets in given]
    return Span(member, 0, first_epoch, last_epoch, began_at, polls)


def commit(member: str, epoch: int, offset: int, at: float) -> Commit:
    return Commit(member, epoch, 0, offset, at, at + 0.2)


def observation(offset: int, at: float) -> Observation:
    return Observation(0, offset, at, at + 0.2)


def sound() -> History:
    """A reads two records and commits them, B takes over, in the next epoch, and reads two more."""
    return History(
        {0: 4},
        [span("a", 1, 2, 0.0, (1.0, (0,)), (2.0, (1,))), span("b", 3, 3, 10.0, (11.0, (2, 3)))],
        [commit("a", 2, 2, 3.0), commit("b", 3, 4, 12.0)],
        [observation(0, 0.0), observation(2, 5.0), observation(4, 15.0)],
    )


def kinds(history: History) -> set[Enum]:
    return {anomaly.kind for anomaly in check(history)}


def test_a_sound_history_is_accepted() -> None:
    assert_sound(sound())
    assert_sound(History({0: 0, 1: 0}))


def test_who_dies_before_the_commit_leaves_records_to_be_processed_again() -> None:
    history = sound()
    history.commits = [commit("a", 2, 1, 1.6), commit("b", 3, 4, 12.0)]
    history.observations = []
    history.spans[1].given = [Given(11.0, 11.5, (1, 2, 3))]
    assert_sound(history)


def test_a_member_may_finish_what_it_was_given_before_another_one_took_over() -> None:
    history = sound()
    history.spans[0].given[1] = Given(2.0, 60.0, (1,))  # it was frozen
    history.commits = [commit("a", 1, 1, 1.6), commit("b", 3, 4, 12.0)]
    history.observations = []
    history.spans[1].given = [Given(11.0, 11.5, (1, 2, 3))]
    assert_sound(history)


def test_a_partition_may_come_back_to_a_member_in_a_later_epoch() -> None:
    history = sound()
    history.spans.append(span("a", 4, 9, 20.0))
    assert_sound(history)


def static(member: str, epoch: int, began_at: float, *given: tuple[float, tuple[int, ...]]) -> Span:
    found = span(member, epoch, epoch, began_at, *given)
    found.instance = "s"
    return found


def test_a_static_member_that_is_back_goes_on_in_its_epoch() -> None:
    assert_sound(History({0: 2}, [static("a", 2, 0.0, (1.0, (0,))), static("b", 2, 5.0, (6.0, (1,)))]))


def test_a_static_member_that_was_replaced_is_over() -> None:
    history = History({0: 2}, [static("a", 2, 0.0, (1.0, (0,)), (7.0, (1,))), static("b", 2, 5.0, (6.0, (1,)))])
    assert kinds(history) == {Kind.AT_ONCE}


def test_a_static_member_is_no_owner_besides_others() -> None:
    history = History({0: 2}, [static("a", 2, 0.0, (1.0, (0,))), span("b", 2, 2, 5.0, (6.0, (1,)))])
    assert kinds(history) == {Kind.TWO_OWNERS}


def test_a_commit_and_an_observation_at_the_same_time_have_no_order() -> None:
    history = sound()
    history.observations.append(Observation(0, 0, 2.9, 4.0))
    history.observations.append(Observation(0, 2, 2.9, 4.0))
    assert_sound(history)


def test_partitions_do_not_meet() -> None:
    history = sound()
    history.ends[1] = 1
    history.spans.append(Span("c", 1, 1, 3, 0.0, [Given(1.0, 1.5, (0,))]))
    history.commits.append(Commit("c", 3, 1, 1, 30.0, 31.0))
    assert_sound(history)


def skip_and_repeat(history: History) -> None:
    history.spans[1].given = [Given(11.0, 11.2, (3,)), Given(11.3, 11.4, (2, 3))]
    history.spans[0].given = [Given(1.0, 1.1, (0,)), Given(1.2, 1.3, (2,)), Given(1.4, 1.5, (1,))]


def own_behind_one_another(history: History) -> None:
    history.spans.append(span("c", 4, 4, 20.0))
    history.spans[0].last_epoch = 4


PLANTED: list[tuple[str, Callable[[History], object], set[Kind]]] = [
    ("unprocessed", lambda h: h.ends.update({0: 5}), {Kind.UNPROCESSED}),
    ("invented", lambda h: (h.ends.update({0: 3}), h.commits.pop(), h.observations.pop()), {Kind.INVENTED}),
    ("two owners", lambda h: setattr(h.spans[1], "first_epoch", 2), {Kind.TWO_OWNERS}),
    ("two owners behind one another", own_behind_one_another, {Kind.TWO_OWNERS}),
    ("still reading", lambda h: h.spans[0].given.append(Given(10.5, 10.6, (2,))), {Kind.AT_ONCE}),
    ("stray", lambda h: h.strays.append("c was handed 0:3"), {Kind.NOT_OWNED}),
    ("epoch back", lambda h: setattr(h.spans[0], "last_epoch", 0), {Kind.EPOCH_WENT_BACK}),
    ("epoch back later", lambda h: h.spans.append(Span("b", 1, 2, 2, 20.0)), {Kind.EPOCH_WENT_BACK}),
    ("observed back", lambda h: h.observations.append(observation(0, 16.0)), {Kind.WENT_BACK}),
    ("commit lost", lambda h: h.observations.__setitem__(1, observation(0, 5.0)), {Kind.WENT_BACK}),
    ("committed back", lambda h: h.commits.append(commit("b", 3, 3, 13.0)), {Kind.WENT_BACK}),
    ("stale", lambda h: h.commits.append(Commit("a", 2, 0, 2, 10.1, 10.2)), {Kind.STALE_COMMIT}),
    ("ahead", lambda h: h.commits.__setitem__(0, commit("a", 2, 2, 2.1)), {Kind.AHEAD}),
    ("ahead by itself", lambda h: h.observations.append(observation(2, 2.0)), {Kind.AHEAD}),
    ("beyond", lambda h: h.observations.append(observation(9, 20.0)), {Kind.AHEAD}),
    ("behind", lambda h: h.spans[1].given.__setitem__(0, Given(11.0, 11.5, (0, 1, 2, 3))), {Kind.STARTED_BEHIND}),
    ("repeated", lambda h: h.spans[0].given.append(Given(3.5, 3.6, (1,))), {Kind.REPEATED}),
    ("skipped", skip_and_repeat, {Kind.SKIPPED, Kind.REPEATED}),
]


@pytest.mark.parametrize(("break_it", "found"), [each[1:] for each in PLANTED], ids=[each[0] for each in PLANTED])
def test_a_planted_anomaly_is_noticed(break_it: Callable[[History], None], found: set[Kind]) -> None:
    history = sound()
    break_it(history)
    assert kinds(history) == found
    with pytest.raises(AssertionError, match=next(iter(found)).name):
        assert_sound(history)


def test_every_kind_is_planted() -> None:
    assert set().union(*(found for _, _, found in PLANTED)) == set(Kind)


def test_some_of_many_are_described() -> None:
    history = sound()
    history.ends[0] = 40
    text = describe(check(history))
    assert text.splitlines()[0] == "36 x UNPROCESSED: a record was never processed"
    assert len(text.splitlines()) == 6
