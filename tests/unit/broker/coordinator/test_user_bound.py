"""Ids are counted by the user that made them, and no user makes more than it may."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.coordinator.user_bound import AT_A_TIME, NO_BOUND, Made, NamedGroups, UserBound
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
    named = NamedGroups("max.things.per.user", 2, kept_ms=900, open_ms=100, refused=refused.append)
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
    with pytest.raises(PolicyViolation):
        named.add("User:a", 7, ["i"], 1_099)  # a transaction that named "h" may have ended 100 ms later
    named.add("User:a", 7, ["i"], 1_100)  # "h" is forgotten, "g" was named since
    with pytest.raises(PolicyViolation):
        named.add("User:a", 7, ["h"], 1_599)
    named.add("User:a", 7, ["h"], 1_600)
    assert (named.count("User:a"), named.count("User:b"), named.count("")) == (2, 1, 0)


def test_a_refusal_leaves_nothing_of_a_user_that_has_named_nothing() -> None:
    named = NamedGroups("max.things.per.user", 2, kept_ms=900, open_ms=100)
    with pytest.raises(PolicyViolation):
        named.add("User:a", 7, ["g", "h", "i"], 0)
    assert not named._named


def test_many_groups_that_were_named_long_ago_are_forgotten_by_and_by() -> None:
    """No call takes long, and there is room for what it names."""
    most = 10 * AT_A_TIME
    named = NamedGroups("max.things.per.user", most, kept_ms=900, open_ms=100)
    for number in range(most):
        named.add("User:a", 7, [f"g-{number}"], 0)
    left = most
    for number in range(12):
        before = left
        named.add("User:a", 7, [f"h-{number}"], 1_000)
        left = named.count("User:a")
        assert before - left <= AT_A_TIME, "one call must not forget too many"
    assert left == 12


def test_what_users_named_that_are_gone_is_forgotten() -> None:
    named = NamedGroups("max.things.per.user", 2, kept_ms=900, open_ms=100)
    for user in ("User:a", "User:b", "User:c"):
        named.add(user, 7, ["g", "h"], 0)
    named.add("User:b", 7, ["g"], 500)
    for at_ms in (1_000, 1_001):
        named.add("User:d", 7, ["g"], at_ms)
    assert list(named._named) == ["User:b", "User:d"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["User:a", "User:b"]),
            st.integers(1, 2),
            st.frozensets(st.sampled_from("ghijk"), min_size=1, max_size=3),
            st.integers(0, 60),
        )
    )
)
def test_the_ends_that_groups_keep_never_exceed_the_bound(calls: list[tuple[str, int, frozenset[str], int]]) -> None:
    """Each transaction ends as late as it may; an end is kept for 90 ms."""
    named = NamedGroups("max.things.per.user", 4, kept_ms=90, open_ms=10)
    last = dict[tuple[str, int, str], int]()
    now_ms = 0
    for user, producer_id, group_ids, later_ms in calls:
        now_ms += later_ms
        kept = {each for each, at_ms in last.items() if each[0] == user and now_ms < at_ms + 100}
        wanted = {(user, producer_id, group_id) for group_id in group_ids}
        fits = len(kept | wanted) <= 4
        try:
            named.add(user, producer_id, group_ids, now_ms)
        except PolicyViolation:
            assert not fits, "what fits is not refused"
        else:
            assert fits
            last.update(dict.fromkeys(wanted, now_ms))
        assert named.count(user) <= 4
