"""Ids are counted by the user that made them, and no user makes more than it may."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.coordinator.user_bound import NO_BOUND, Made, UserBound
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
