"""What the members of a user's groups take in memory is counted, and has a bound (docs/adr/0057)."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from typing import Any

import pytest

from broker.coordinator.groups.classic.commands import JoinClassic, Joined, Synced
from broker.coordinator.groups.classic.machine import NEW_MEMBER_TIMEOUT_MS, PENDING_BYTES, TIMER_BYTES, ClassicConfig
from broker.coordinator.groups.commands import GroupConfig, Heartbeat
from broker.coordinator.groups.group import ASSIGNED_BYTES, MEMBER_BYTES, NAME_BYTES, member_bytes
from raftlog.errors import PolicyViolation
from raftlog.v1 import group_pb2
from tests.support.group_driver import GroupDriver, Stream
from tests.unit.broker.coordinator.groups.test_classic import REBALANCE_MS, SESSION_MS, Client, subscription

DELAY_MS = 10
RANGE = "range"


def driver_of(most: int = 1 << 40, topics: dict[str, int] | None = None) -> GroupDriver:
    config = GroupConfig(classic=ClassicConfig(initial_rebalance_delay_ms=DELAY_MS))
    driver = GroupDriver(topics or {"t": 4}, config, most_members_bytes=most)
    driver.user = "User:a"
    return driver


def by_hand(driver: GroupDriver) -> dict[str, int]:
    """The same, counted anew."""
    counts: dict[str, int] = {}
    for group in driver.core.groups.values():
        size = sum(map(member_bytes, group.members.values()))
        soft = driver.core._soft.get(group.group_id)
        if soft is not None and soft.classic is not None:
            machine = soft.classic
            size += machine._assigned_bytes + PENDING_BYTES * len(machine.pending) + TIMER_BYTES * machine._timers
            size += sum(member.memory_bytes for member in machine.members.values())
        if group.head is None or group.head.classic is None:
            names = {name for member in group.members.values() for name in member.subscription.topics}
            topics = [driver.topics.by_name(name) for name in names]
            size += ASSIGNED_BYTES * sum(topic.partitions for topic in topics if topic is not None)
        counts[group.user] = counts.get(group.user, 0) + size
    return {user: size for user, size in counts.items() if user and size}


def classic(driver: GroupDriver, group_id: str, said: bytes) -> Any:
    """Let a member join a new classic group; return its answer once the group has its first generation."""
    call = Stream()
    member_id = f"m-{group_id}"
    protocols = ((RANGE, said),)
    join = JoinClassic(call, group_id, "", member_id, "", "c", "h", "consumer", protocols, SESSION_MS, REBALANCE_MS)
    driver.decide(join)
    driver.wait(2 * DELAY_MS)
    return call.got[-1]


def is_refused(stream: Stream) -> bool:
    return isinstance(stream.last, PolicyViolation)


def joined(client: Client, **changes: Any) -> None:
    client.join(**changes)
    client.driver.wait(2 * DELAY_MS)
    assert isinstance(client.answer(), Joined)


def test_what_members_of_classic_groups_say_counts_in_sum_for_the_user_that_made_the_groups() -> None:
    """Each group had a bound of 4 MiB, and a user may make 10,000 groups: 40 GB."""
    said = bytes(100_000)
    driver = driver_of(most=10 * 103_000)
    answers = [classic(driver, f"g{number}", said) for number in range(20)]
    assert [isinstance(answer, Joined) for answer in answers] == [True] * 10 + [False] * 10
    assert isinstance(answers[-1], PolicyViolation)
    assert "members of groups that User:a has made take" in str(answers[-1])
    assert driver.core.members_bytes == by_hand(driver)
    driver.user = "User:b"
    assert isinstance(classic(driver, "of another user", said), Joined)
    driver.user = ""
    for number in range(20):
        assert isinstance(classic(driver, f"without a user {number}", said), Joined)
    assert driver.core.members_bytes == by_hand(driver)
    assert driver.core.members_bytes.keys() == {"User:a", "User:b"}


def test_a_member_that_takes_no_more_than_before_is_never_refused() -> None:
    said = (("range", bytes(1_000)),)
    driver = driver_of()
    client = Client(driver, protocols=said)
    joined(client)
    assert isinstance(client.sync({client.member_id: bytes(500)}), Synced)
    assert driver.core.members_bytes == by_hand(driver)
    driver.members_bound._most = 1  # as if the user's other groups had grown
    joined(client)
    assert isinstance(client.sync({client.member_id: bytes(501)}), PolicyViolation)
    assert isinstance(client.sync({client.member_id: bytes(500)}), Synced)
    driver.restart()
    assert driver.core.members_bytes == by_hand(driver)
    joined(client)
    assert isinstance(client.sync({client.member_id: bytes(500)}), Synced)
    assert isinstance(client.join(protocols=(("range", bytes(1_001)),)), PolicyViolation)
    joined(client, protocols=(("range", bytes(999)),))
    client.leave()
    driver.wait(NEW_MEMBER_TIMEOUT_MS)
    assert driver.core.members_bytes == by_hand(driver) == {}


def test_timers_of_members_that_have_left_count_until_they_go_off() -> None:
    """An id whose client leaves at once keeps its timer, for up to half an hour: 450 MB, at the rate of calls."""
    driver = driver_of(most=20 * (PENDING_BYTES + TIMER_BYTES))
    answers = []
    for _ in range(100):
        client = Client(driver)
        answers.append(client.join(requires_id=True))
        if isinstance(answers[-1], Joined):
            client.leave()
    assert 20 < sum(isinstance(answer, Joined) for answer in answers) < 50
    assert isinstance(answers[-1], PolicyViolation)
    assert driver.core.members_bytes == by_hand(driver)
    driver.wait(SESSION_MS)
    assert driver.core.members_bytes == by_hand(driver) == {}


def test_what_a_leader_assigns_counts() -> None:
    driver = driver_of(most=MEMBER_BYTES * 2 + 10_000)
    client = Client(driver)
    joined(client)
    assert isinstance(client.sync({client.member_id: bytes(12_000)}), PolicyViolation)
    assert isinstance(client.sync({client.member_id: bytes(1_000)}), Synced)
    assert driver.core.members_bytes == by_hand(driver)


def test_ids_that_are_given_out_count_until_they_expire() -> None:
    """2,000 for each group, for up to half an hour: a GB, at the rate at which a user may call."""
    of_one = PENDING_BYTES + TIMER_BYTES
    driver = driver_of(most=10 * of_one)
    for _ in range(10):
        assert isinstance(Client(driver).join(requires_id=True), Joined)
    assert isinstance(Client(driver).join(requires_id=True), PolicyViolation)
    assert driver.core.members_bytes == by_hand(driver) == {"User:a": 10 * of_one}
    driver.wait(SESSION_MS)
    assert driver.core.members_bytes == by_hand(driver) == {}


def test_names_in_the_bytes_of_a_classic_member_count_before_they_are_read() -> None:
    """The record of a member has each name as text, which takes twenty times the bytes of a short one."""
    said = struct.pack(">hi", 0, 5_000) + b"\0\1x" * 5_000 + struct.pack(">i", -1)
    driver = driver_of()
    assert isinstance(classic(driver, "g", said), Joined)
    assert driver.core.members_bytes["User:a"] > 5_000 * NAME_BYTES
    assert isinstance(classic(driver, "h", struct.pack(">hi", 0, 1 << 30)), Joined), "no more than there may be"
    assert driver.core.members_bytes["User:a"] < 6_000 * NAME_BYTES


def test_subscriptions_of_members_count_in_sum_for_the_user_that_made_the_groups() -> None:
    """A group's members had a bound of a million names; a user had 2,000 members in groups of their own."""
    names = [f"topic-{number:04}" for number in range(1_000)]
    driver = driver_of(most=10 * 170_000)
    streams = [driver.join("a", *names, group_id=f"g{number}") for number in range(20)]
    refused = [is_refused(stream) for stream in streams]
    assert refused == [False] * 10 + [True] * 10
    assert driver.core.members_bytes == by_hand(driver)
    driver.wait(1)
    again = driver.join("a", *names, group_id="g0")
    assert not is_refused(again), "it takes no more than before"
    longer = group_pb2.Subscription(topics=[*names, *(f"more-{number:03}" for number in range(900))])
    driver.decide(Heartbeat(again, "g0", "a", group_pb2.GroupHeartbeat(member_epoch=0, subscription=longer)))
    assert is_refused(again)
    driver.wait(120_000)  # all are silent
    assert driver.core.members_bytes == by_hand(driver) == {}


def test_partitions_that_members_read_count() -> None:
    """One name stands for all partitions of a topic, each of which is in a target, an assignment and a session."""
    driver = driver_of(most=MEMBER_BYTES * 10 + ASSIGNED_BYTES * 2_500, topics={"large": 1_000, "small": 3})
    assert not is_refused(driver.join("a", "large", group_id="g0"))
    assert not is_refused(driver.join("b", "large", group_id="g0")), "they share the partitions"
    assert not is_refused(driver.join("a", "large", group_id="g1"))
    assert is_refused(driver.join("a", "large", group_id="g2"))
    assert not is_refused(driver.join("a", "small", group_id="g2"))
    driver.change_topics({"large": 1_100, "small": 3})
    assert driver.core.members_bytes == by_hand(driver)
    driver.change_topics({"small": 3})
    assert driver.core.members_bytes == by_hand(driver)
    driver.change_topics({"large": 10, "small": 3}, {"large": 1})
    assert driver.core.members_bytes == by_hand(driver)
    assert not is_refused(driver.join("a", "large", group_id="g3"))


def test_an_upgrade_of_a_classic_group_counts_the_partitions_that_its_members_read() -> None:
    driver = driver_of(topics={"large": 1_000, "small": 3})
    said = subscription("large")
    assert isinstance(classic(driver, "g", said), Joined)
    client = Client(driver)
    client.member_id, client.generation = "m-g", 1
    assert isinstance(client.sync({"m-g": b""}, group_id="g"), Synced)
    driver.members_bound._most = 2 * driver.core.members_bytes["User:a"] + 4 * MEMBER_BYTES
    assert is_refused(driver.join("new", "small"))
    driver.members_bound._most += 1_003 * ASSIGNED_BYTES
    assert not is_refused(driver.join("new", "small"))
    assert driver.core.members_bytes == by_hand(driver)


def shuffled(log: Iterable[tuple[bytes, bytes | None]], seed: int) -> list[tuple[bytes, bytes | None]]:
    newest = list(dict(log).items())
    random.Random(seed).shuffle(newest)
    return newest


@pytest.mark.parametrize("seed", range(5))
def test_the_next_coordinator_counts_the_same_in_whatever_order_the_records_come(seed: int) -> None:
    driver = driver_of(topics={"t": 4, "u": 7})
    for number in range(6):
        driver.user = f"User:{number % 2}"
        driver.join("a", "t", "u", group_id=f"g{number}")
        driver.join("b", "u", "none", group_id=f"g{number}")
        classic(driver, f"c{number}", bytes(100 * number))
    driver.wait(REBALANCE_MS // 100)
    driver.restart(shuffled(driver.log, seed))
    assert driver.core.members_bytes == by_hand(driver)
    assert driver.core.members_bytes.keys() == {"User:0", "User:1"}


def test_a_topic_that_members_waited_for_does_not_bring_their_user_beyond_the_bound() -> None:
    """A name costs little before its topic is there, and its user may make the topic once all members wait."""
    most = 50 * MEMBER_BYTES + 3_500 * ASSIGNED_BYTES
    driver = driver_of(most=most, topics={"t": 4})
    streams = [driver.join(f"m{number}", "large", group_id=f"g{number % 10}") for number in range(30)]
    other = driver.join("bob", "t", group_id="small")
    driver.user = "User:b"
    beside = driver.join("a", "large", group_id="of another user")
    driver.change_topics({"t": 4, "large": 1_000})
    assert driver.core.members_bytes == by_hand(driver)
    assert 0 < driver.core.members_bytes["User:a"] < most
    gone = [stream for stream in streams if is_refused(stream)]
    assert 0 < len(gone) < len(streams)
    assert not is_refused(beside)
    assert not is_refused(other)
    assert sum(len(group.members) for group in driver.core.groups.values()) == 32 - len(gone)
    kept = [group_id for group_id, group in driver.core.groups.items() if group.user == "User:a" and group.members]
    assert 1 <= len(kept) - 1 <= 3, "beside the small one"
    driver.user = "User:a"
    for number in range(10):
        driver.join("later", "large", group_id=f"g{number}")
    assert driver.core.members_bytes == by_hand(driver)
    assert driver.core.members_bytes["User:a"] <= most


def test_a_large_group_is_emptied_in_pieces() -> None:
    driver = driver_of(most=200 * MEMBER_BYTES, topics={"t": 4})
    streams = [driver.join(f"m{number}", "large") for number in range(50)]
    driver.change_topics({"t": 4, "large": 1_000})
    assert all(map(is_refused, streams))
    assert not driver.core.groups["g"].members
    assert driver.core.members_bytes == by_hand(driver) == {}


def test_no_member_is_removed_for_topics_that_go() -> None:
    """A classic group counts twice once it is stored, so its user may have too much with no new topic."""
    driver = driver_of(topics={"t": 4, "u": 4})
    streams = [driver.join(f"m{number}", "t", "u") for number in range(3)]
    driver.members_bound._most = driver.core.members_bytes["User:a"] - 1 - 4 * ASSIGNED_BYTES
    driver.change_topics({"t": 4})
    assert not any(map(is_refused, streams))
    driver.change_topics({"t": 4, "u": 1})
    assert all(map(is_refused, streams)), "a topic has come"
