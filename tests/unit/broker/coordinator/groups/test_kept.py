"""What the committed offsets of a user's groups take in memory is counted, and has a bound."""

from __future__ import annotations

import random

import pytest

from broker.coordinator.groups.commands import DeleteGroup
from broker.coordinator.groups.group import kept_bytes
from broker.coordinator.user_bound import OFFSET_BYTES
from raftlog.errors import PolicyViolation
from raftlog.v1 import group_pb2
from tests.support.group_driver import GroupDriver, Stream, topic_id

T = topic_id("t")


def by_hand(driver: GroupDriver) -> dict[str, int]:
    """The same, counted anew."""
    counts: dict[str, int] = {}
    for group in driver.core.groups.values():
        pending = [each.committed for offsets in group.pending.values() for each in offsets.values()]
        size = sum(map(kept_bytes, [*group.offsets.values(), *pending]))
        counts[group.user] = counts.get(group.user, 0) + size
    return {user: size for user, size in counts.items() if user and size}


def delete(driver: GroupDriver, group_id: str) -> None:
    call = Stream()
    driver.decide(DeleteGroup(call, group_id))
    assert call.got == [group_pb2.CommitOffsetResult()]


def test_offsets_count_for_the_user_that_made_their_group() -> None:
    driver = GroupDriver()
    driver.user = "User:a"
    driver.commit({(T, 0): 5, (T, 1): 6}, metadata="\u20acx")
    driver.user = "User:b"
    driver.commit({(T, 2): 7})
    driver.commit({(T, 0): 1}, group_id="h", metadata="m" * 100)
    assert driver.core.kept == by_hand(driver) == {"User:a": 3 * OFFSET_BYTES + 8, "User:b": OFFSET_BYTES + 100}
    driver.commit({(T, 0): 6}, metadata="")
    assert driver.core.kept["User:a"] == 3 * OFFSET_BYTES + 4, "a new offset takes the place of the old one"
    driver.restart()
    assert driver.core.kept == by_hand(driver) == {"User:a": 3 * OFFSET_BYTES + 4, "User:b": OFFSET_BYTES + 100}
    delete(driver, "g")
    assert driver.core.kept == by_hand(driver) == {"User:b": OFFSET_BYTES + 100}


def test_offsets_of_a_transaction_count_until_it_ends() -> None:
    driver = GroupDriver()
    driver.user = "User:a"
    driver.commit({(T, 0): 1})
    driver.commit_in_transaction((7, 0), {(T, 0): 5, (T, 1): 6})
    driver.commit_in_transaction((8, 0), {(T, 1): 9})
    assert driver.core.kept == by_hand(driver) == {"User:a": 4 * OFFSET_BYTES}
    driver.commit_in_transaction((7, 0), {(T, 1): 7})
    assert driver.core.kept == by_hand(driver) == {"User:a": 4 * OFFSET_BYTES}
    driver.mark((7, 0), commit=True)
    assert driver.core.kept == by_hand(driver) == {"User:a": 3 * OFFSET_BYTES}
    driver.mark((8, 0), commit=False)
    assert driver.core.kept == by_hand(driver) == {"User:a": 2 * OFFSET_BYTES}


def test_the_next_coordinator_counts_the_same_in_whatever_order_the_records_come() -> None:
    driver = GroupDriver()
    for number in range(6):
        driver.user = f"User:{number % 2}"
        driver.commit({(T, part): number for part in range(4)}, group_id=f"g{number}", metadata="m" * number)
    driver.commit_in_transaction((7, 0), {(T, 0): 5}, group_id="g0")
    kept = dict(driver.core.kept)
    for seed in range(5):
        shuffled = list(driver.log)
        random.Random(seed).shuffle(shuffled)  # each key is written once here
        driver.restart(shuffled)
        assert driver.core.kept == by_hand(driver) == kept


def test_a_user_whose_offsets_take_too_much_commits_no_more_of_them() -> None:
    """Nothing bounded them: 10,000 groups of 500 partitions with metadata of 4 KiB are 20 GB."""
    driver = GroupDriver(most_kept_bytes=4 * OFFSET_BYTES + 100)
    driver.user = "User:a"
    driver.commit({(T, 0): 1, (T, 1): 1})
    driver.commit({(T, 0): 1, (T, 1): 1}, group_id="h", metadata="m" * 50)
    with pytest.raises(PolicyViolation, match="User:a has made take 1300 bytes of this broker, and may take 1300: 300"):
        driver.commit({(T, 2): 1})
    with pytest.raises(PolicyViolation):
        driver.commit({(T, 0): 2}, metadata="m")
    with pytest.raises(PolicyViolation):
        driver.commit_in_transaction((7, 0), {(T, 0): 2})
    driver.commit({(T, 0): 2, (T, 1): 2})  # as before, of what is there
    driver.commit({(T, 0): 2, (T, 1): 2}, group_id="h", metadata="")
    driver.user = "User:b"
    driver.commit({(T, 0): 1}, group_id="other")
    with pytest.raises(PolicyViolation):
        driver.commit({(T, 2): 1, (T, 3): 1}, group_id="h")
    driver.user = "User:a"
    delete(driver, "g")
    driver.commit({(T, 2): 1}, group_id="h")
    driver.user = ""
    driver.commit({(T, part): 1 for part in range(4)}, group_id="without a user")
    driver.commit({(T, part): 1 for part in range(4)}, group_id="also without a user")
