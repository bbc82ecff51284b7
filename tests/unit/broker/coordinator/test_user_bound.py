"""Ids are counted by the user that made them, and no user makes more than it may."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.coordinator.user_bound import NO_BOUND, Made, NamedGroups, UserBound
from raftlog.errors import PolicyViolation


@given(st.lists(st.tuples(st.sampled_from("ijk"), st.sampled_from(["", "User:a", "User:b"]))))
def test_each_id_counts_once_for_the_user_that_it_has(changes: list[tuple[str, str]]) -> None:
    made, users = Made(), dict[str, str]()
    for name, user in changes:
        made.changed(users.get(name, ""), user)
        users[name] = user
        assert made.counts == Counter(each for each in users.values() if each)


def test_beyond_the_bound_a_user_is_refused_and_told_what_to_do() -> None:
    counts, refused = {"User:a": 1, "User:b": 3}, list[str]()
    bound = UserBound("max.things.per.user", "things", 2, lambda user: counts.get(user, 0), refused.append)
    bound.check("User:a")
    bound.check("User:c")
    assert not refused
    with pytest.raises(PolicyViolation, match=r"^User:b has made 3 things .* may make 2 \(max\.things\.per\.user\)\."):
        bound.check("User:b")
    counts["User:a"] = 2
    with pytest.raises(PolicyViolation, match="raise the limit"):
        bound.check("User:a")
    assert refused == ["User:b", "User:a"]


def test_what_is_no_single_user_has_no_bound() -> None:
    UserBound("max.things.per.user", "things", 1, lambda user: 5).check("")
    NO_BOUND.check("User:a")


def test_groups_that_are_named_again_count_once_until_they_were_named_long_ago() -> None:
    refused: list[str] = []
    named = NamedGroups("max.things.per.user", 2, 1_000, refused.append)
    named.add("User:a", 7, ["g"], 0)
    named.add("User:a", 7, ["h"], 100)
    named.add("User:a", 7, ["g"], 600)
    with pytest.raises(PolicyViolation, match=r"^transactions of User:a have named 2 groups .* 1 s \(max\.things"):
        named.add("User:a", 8, ["g"], 700)
    with pytest.raises(PolicyViolation, match="raise the limit"):
        named.add("User:a", 7, ["g", "i"], 700)
    assert refused == ["User:a", "User:a"]
    named.add("User:a", 7, [], 700)
    named.add("User:b", 7, ["i"], 700)
    named.add("", 7, ["g", "h", "i"], 700)
    named.add("User:a", 7, ["i"], 1_100)  # "h" is forgotten, "g" was named since
    with pytest.raises(PolicyViolation):
        named.add("User:a", 7, ["h"], 1_599)
    named.add("User:a", 7, ["h"], 1_600)
    assert (named.count("User:a"), named.count("User:b"), named.count("")) == (2, 1, 0)


def test_a_refusal_leaves_nothing_of_a_user_that_has_named_nothing() -> None:
    named = NamedGroups("max.things.per.user", 2, 1_000)
    with pytest.raises(PolicyViolation):
        named.add("User:a", 7, ["g", "h", "i"], 0)
    assert not named._named
