"""A live group moves from Kafka's classic protocol to KIP-848 and back, with members of both in it."""

from __future__ import annotations

import struct

import pytest

from broker.coordinator.groups.classic.commands import Alive, Joined, Left, Synced
from broker.coordinator.groups.classic.consumer import assigned_partitions, read_said, written_assignment
from broker.coordinator.groups.classic.machine import ClassicConfig
from broker.coordinator.groups.commands import GroupConfig, Migration
from broker.coordinator.groups.coordinator import GroupCoordinator
from raftlog.errors import (
    FencedInstanceId,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMemberId,
)
from raftlog.v1 import common_pb2, group_pb2
from tests.support.group_driver import GroupDriver, Stream, partitions_of, topic_id
from tests.unit.broker.coordinator.groups.test_classic import (
    REBALANCE_MS,
    SESSION_MS,
    Client,
    assignment,
    driver_of,
    stable,
    subscription,
)

T = topic_id("t")


def said(*topics: str, owned: tuple[int, ...] = ()) -> bytes:
    """Return the protocol metadata of a cooperative consumer that reads `owned` of the topic t."""
    reads = struct.pack(">i", 0)
    if owned:
        reads = struct.pack(">ih", 1, 1) + b"t" + struct.pack(f">i{len(owned)}i", len(owned), *owned)
    return struct.pack(">h", 1) + subscription(*topics)[2:] + reads


def has(client: Client) -> set[int]:
    """Return the partitions of t that a classic member gets when it syncs."""
    synced = client.sync()
    assert isinstance(synced, Synced), synced
    return {*assigned_partitions("consumer", synced.assignment).get("t", [])}


def kind(driver: GroupDriver) -> str:
    return group_pb2.GroupType.Name(driver.described().type).removeprefix("GROUP_TYPE_").lower()


def joins_again(client: Client) -> None:
    """The member hears of the rebalance, and joins as an eager one: it reads nothing then."""
    assert isinstance(client.heartbeat(), RebalanceInProgress)
    assert isinstance(client.join(), Joined)


def given(stream: Stream) -> set[int]:
    return {number for _, number in partitions_of(stream.assignment)}


def test_the_first_member_that_lets_the_coordinator_assign_moves_a_live_group() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    new = driver.join("n", "t")
    assert kind(driver) == "consumer"
    assert given(new) <= {2, 3}, (
        "the new member must not get partitions 0 and 1 before the others, which read them, have joined again"
    )
    assert first.commit(1) == 0, "the classic member must be able to commit in its generation"
    joins_again(first)
    joins_again(second)
    driver.follow(new)
    parts = [has(first), has(second), given(new)]
    assert sorted(number for part in parts for number in part) == [0, 1, 2, 3]
    assert sorted(map(len, parts)) == [1, 1, 2]
    assert isinstance(first.heartbeat(), Alive)
    described = driver.described()
    assert described.state == group_pb2.STABLE
    assert {each.member_id: each.speaks_classic for each in described.members} == {
        first.member_id: True,
        second.member_id: True,
        "n": False,
    }


def test_the_group_goes_back_when_the_last_such_member_has_left() -> None:
    driver = driver_of()
    (first,) = stable(driver, "")
    new = driver.join("n", "t")
    joins_again(first)
    driver.follow(new)
    assert len(has(first)) == 2
    driver.leave(new)
    assert kind(driver) == "classic"
    assert isinstance(first.heartbeat(), RebalanceInProgress)
    assert first.commit(5) == 0, "the classic member must be able to commit before it joins again"
    joined = first.join()
    assert joined.leader == first.member_id
    assert joined.protocol == "range"
    assert first.sync({first.member_id: assignment("t", 0, 1, 2, 3)}).assignment == assignment("t", 0, 1, 2, 3)
    driver.restart()
    assert kind(driver) == "classic"
    assert isinstance(first.heartbeat(), Alive)


def test_the_group_goes_back_when_the_session_of_the_last_such_member_is_over() -> None:
    driver = driver_of()
    (first,) = stable(driver, "")
    new = driver.join("n", "t")
    joins_again(first)
    driver.follow(new)
    for _ in range(5):
        assert kind(driver) == "consumer"
        driver.wait(driver.config.session_timeout_ms / 5)
        first.heartbeat()
    assert kind(driver) == "classic"
    assert isinstance(new.error, UnknownMemberId)


def test_a_cooperative_member_reads_on_and_releases_what_others_get() -> None:
    driver = driver_of()
    protocols = (("cooperative-sticky", said("t")),)
    client = Client(driver, protocols=protocols)
    client.join()
    driver.wait(20)
    client.sync({client.answer().member_id: assignment("t", 0, 1, 2, 3)})
    new = driver.join("n", "t")
    assert isinstance(client.heartbeat(), RebalanceInProgress)
    generation = client.generation
    client.protocols = (("cooperative-sticky", said("t", owned=(0, 1, 2, 3))),)
    assert client.join().generation == generation, "the generation must stay until the member has released partitions"
    kept = has(client)
    assert len(kept) == 2
    assert given(new) == set(), "the new member must get nothing that the classic member may still read"
    assert isinstance(client.heartbeat(), RebalanceInProgress)
    client.protocols = (("cooperative-sticky", said("t", owned=tuple(sorted(kept)))),)
    assert client.join().generation > generation
    assert has(client) == kept
    assert given(new) == {0, 1, 2, 3} - kept
    assert isinstance(client.heartbeat(), Alive)


def test_what_a_cooperative_member_is_still_to_release_is_given_to_nobody() -> None:
    """The member still reads these partitions. Until it has stopped and joins again, nobody else may read them."""
    driver = driver_of()

    def owning(*partitions: int) -> tuple[tuple[str, bytes], ...]:
        return (("cooperative-sticky", said("t", owned=partitions)),)

    first, second = Client(driver, protocols=owning()), Client(driver, protocols=owning())
    first.join()
    driver.wait(20)
    first.answer()
    first.sync({first.member_id: assignment("t", 0, 1, 2, 3)})
    second.join()
    first.protocols = owning(0, 1, 2, 3)
    first.join()
    second.answer()
    first.sync({first.member_id: assignment("t", 0, 1), second.member_id: b""})
    newcomer = driver.join("n", "t")
    assert not given(newcomer)
    assert first.commit(7, partition=2) == common_pb2.NONE


def test_a_classic_member_joins_a_group_in_which_the_coordinator_assigns() -> None:
    driver = driver_of()
    new = driver.join("n", "t")
    driver.follow(new)
    client = Client(driver)
    required = client.join(requires_id=True)
    assert isinstance(required.error, MemberIdRequired)
    joined = client.join(requires_id=True)
    assert (joined.leader, joined.protocol, joined.members) == ("", "range", ())
    assert has(client) == set()
    driver.follow(new)
    assert isinstance(client.heartbeat(), RebalanceInProgress), (
        "the classic member must be told to rebalance, as the partition that it waited for is free"
    )
    client.join()
    assert has(client) == {0, 1, 2, 3} - given(new)
    assert isinstance(client.leave(), Left)
    assert given(new) == {0, 1, 2, 3}


def test_a_member_that_is_gone_joins_anew_and_reads_nothing_then() -> None:
    driver = driver_of()
    driver.join("n", "t")
    client = Client(driver, member_id="was-one")
    client.protocols = (("cooperative-sticky", said("t", owned=(0,))),)
    assert isinstance(client.join(), UnknownMemberId)
    client.protocols = (("cooperative-sticky", said("t")),)
    assert isinstance(client.join(), Joined)


def test_a_member_that_does_not_join_again_is_expelled_and_keeps_its_partitions_until_its_session_is_over() -> None:
    driver = driver_of()
    (client,) = stable(driver, "")
    new = driver.join("n", "t")
    refused = None
    for _ in range(int(REBALANCE_MS / 2_000) + 1):
        answer = client.heartbeat()
        driver.heartbeat(new, new.assignment.member_epoch)
        if isinstance(answer, UnknownMemberId):
            refused = answer
            break
        driver.wait(2_000)
    assert refused is not None
    assert 0 not in given(new)
    for _ in range(int(SESSION_MS / 2_000)):
        driver.heartbeat(new, new.assignment.member_epoch)
        driver.wait(2_000)
    driver.follow(new)
    assert given(new) == {0, 1, 2, 3}


def test_commits_of_a_classic_member_are_of_its_generation_and_its_partitions() -> None:
    driver = driver_of()
    (client,) = stable(driver, "")  # it has partition 0
    new = driver.join("n", "t")
    joins_again(client)
    driver.follow(new)
    kept = has(client)
    assert 0 < len(kept) < 4
    for number in range(4):
        assert client.commit(3, number) == (0 if number in kept else common_pb2.ILLEGAL_GENERATION)
    client.generation -= 1
    assert client.commit(4) == common_pb2.ILLEGAL_GENERATION
    assert isinstance(client.heartbeat(), IllegalGeneration)


@pytest.mark.parametrize("policy", [Migration.DISABLED, Migration.DOWNGRADE])
def test_a_policy_may_keep_a_classic_group_as_it_is(policy: Migration) -> None:
    driver = GroupDriver({"t": 4}, GroupConfig(classic=ClassicConfig(initial_rebalance_delay_ms=10), migration=policy))
    (client,) = stable(driver, "")
    assert isinstance(driver.join("n", "t").error, InconsistentGroupProtocol)
    assert kind(driver) == "classic"
    assert isinstance(client.heartbeat(), Alive)


def test_no_live_group_moves_up_while_a_broker_may_not_know_such_groups() -> None:
    driver = driver_of()
    known = False
    driver.core = GroupCoordinator(driver.config, driver.topics, driver.assignors, lambda: known)
    driver.core.loaded(driver.now)
    (client,) = stable(driver, "")
    assert isinstance(driver.join("n", "t").error, InconsistentGroupProtocol)
    assert kind(driver) == "classic"
    assert isinstance(client.heartbeat(), Alive)
    known = True
    driver.join("n", "t")
    assert kind(driver) == "consumer"


def test_no_classic_member_joins_where_the_coordinator_assigns_while_a_broker_may_not_know_such_groups() -> None:
    driver = driver_of()
    known = False
    driver.core = GroupCoordinator(driver.config, driver.topics, driver.assignors, lambda: known)
    driver.core.loaded(driver.now)
    new = driver.join("n", "t")
    client, static = Client(driver), Client(driver, "a")
    for each in (client, static):
        assert isinstance(each.join(requires_id=True), InconsistentGroupProtocol)
    assert [each.member_id for each in driver.described().members] == ["n"]
    assert given(new) == {0, 1, 2, 3}
    known = True
    client.join()
    known = False
    driver.follow(new)
    assert isinstance(client.answer(), Joined)
    assert isinstance(client.join(), Joined), "a member of the group must stay one when it joins again"


def test_a_policy_may_keep_a_group_in_which_the_coordinator_assigns() -> None:
    config = GroupConfig(classic=ClassicConfig(initial_rebalance_delay_ms=10), migration=Migration.UPGRADE)
    driver = GroupDriver({"t": 4}, config)
    (client,) = stable(driver, "")
    new = driver.join("n", "t")
    joins_again(client)
    driver.follow(new)
    driver.leave(new)
    assert kind(driver) == "consumer"
    joins_again(client)
    assert has(client) == {0, 1, 2, 3}


def test_a_group_of_another_type_stays_as_it_is() -> None:
    driver = driver_of()
    worker = Client(driver, protocols=(("default", b"x"),))
    worker.join(protocol_type="connect")
    driver.wait(20)
    assert isinstance(driver.join("n", "t").error, InconsistentGroupProtocol)
    assert isinstance(worker.answer(), Joined)
    other = driver.join("o", "t", group_id="h")
    assert other.assignments
    stranger = Client(driver)
    assert isinstance(stranger.join(group_id="h", protocol_type="connect"), InconsistentGroupProtocol)
    assert isinstance(stranger.join(group_id="h", protocols=(("range", b"?"),)), InconsistentGroupProtocol)


def test_a_group_may_be_too_large_to_move() -> None:
    config = GroupConfig(classic=ClassicConfig(initial_rebalance_delay_ms=10), max_size=1)
    driver = GroupDriver({"t": 4}, config)
    (client,) = stable(driver, "")
    assert isinstance(driver.join("n", "t").error, GroupMaxSizeReached)
    assert isinstance(client.heartbeat(), Alive)


def test_calls_that_wait_are_asked_to_join_again() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    third = Client(driver)
    assert third.join() is None
    assert isinstance(first.heartbeat(), RebalanceInProgress)
    driver.join("n", "t")
    assert isinstance(third.answer(), RebalanceInProgress)
    assert isinstance(third.join(), Joined)
    for client in (first, second):
        joins_again(client)
    assert not has(first) & has(second)


def test_a_static_member_that_changes_its_protocol_keeps_its_partitions() -> None:
    driver = driver_of()
    first, second = stable(driver, "a", "b")
    new = driver.join("n", "t", instance="a")
    assert given(new) - {2, 3} == {0}, "the static member must get the partition of its former process at once"
    assert isinstance(first.heartbeat(), FencedInstanceId)
    joins_again(second)
    driver.follow(new)
    assert given(new) | has(second) == {0, 1, 2, 3}
    driver.leave(new, keep=True)
    again = Client(driver, "a")
    again.join()
    assert kind(driver) == "classic", (
        "the group must be classic again, as its last member of the other protocol has come back as a classic one"
    )
    assert isinstance(second.heartbeat(), RebalanceInProgress)


def test_a_static_member_that_changes_its_protocol_fences_its_former_process_as_the_group_goes_back() -> None:
    driver = driver_of()
    stable(driver, "")
    new = driver.join("n", "t", instance="a")
    driver.follow(new)
    Client(driver, "a").join()
    assert kind(driver) == "classic"
    assert isinstance(new.error, FencedInstanceId)
    back = driver.join("n", "t", epoch=new.assignment.member_epoch, instance="a")
    assert isinstance(back.error, FencedInstanceId), (
        "a static member that was replaced must be fenced even if its stream had ended before"
    )


def test_the_coordinator_changes_between_any_two_records() -> None:
    """Whatever was written of the move up and down, members of the group go on, and no partition has two of them."""
    driver = driver_of()
    (first,) = stable(driver, "")
    before_up, before = len(driver.log), first.generation
    new = driver.join("n", "t")
    after_up = len(driver.log)
    joins_again(first)
    driver.follow(new)
    reads = has(first)
    before_down, after = len(driver.log), first.generation
    driver.leave(new)
    log = list(driver.log)
    cuts = [(cut, before, {0}) for cut in range(before_up, after_up + 1)]
    cuts += [(cut, after, reads) for cut in range(before_down, len(log) + 1)]
    for cut, first.generation, reads in cuts:
        driver.restart(log[:cut])
        driver.log = log[:cut]
        answer = first.heartbeat()
        assert isinstance(answer, Alive | RebalanceInProgress), (cut, answer)
        late = driver.join("late", "t")
        assert not reads & given(late), cut


def test_what_consumers_say_is_read_and_written() -> None:
    assert read_said(said("u", "t", owned=(2, 0))) == read_said(said("t", "u", owned=(0, 2)))
    read = read_said(said("t", owned=(1,)))
    assert (read.version, read.topics, dict(read.owned)) == (1, ("t",), {"t": [1]})
    newest = said("t")[2:] + struct.pack(">ih", 7, 3) + b"r-1"
    assert read_said(struct.pack(">h", 9) + newest).rack == "r-1"
    assert assigned_partitions("consumer", written_assignment(1, {"t": [0, 3]})) == {"t": [0, 3]}
    for wrong in (b"", b"\0", said("t")[:-1], struct.pack(">hi", 0, -5)):
        with pytest.raises(ValueError, match=r"bytes|version|elements"):
            read_said(wrong)


def test_topics_come_in_the_turn_in_which_the_group_goes_back() -> None:
    driver = driver_of()
    (first,) = stable(driver, "")
    new = driver.join("n", "t")
    joins_again(first)
    driver.follow(new)
    last_heard_ms = driver.now_ms
    for _ in range(4):
        driver.wait(driver.config.session_timeout_ms / 5)
        first.heartbeat()
    assert kind(driver) == "consumer"
    driver.now_ms = last_heard_ms + driver.config.session_timeout_ms + 1
    driver.change_topics({"t": 8})
    assert kind(driver) == "classic"
    driver.restart()
    assert kind(driver) == "classic", "a new coordinator must read from the records that the group is classic"
    assert isinstance(first.heartbeat(), RebalanceInProgress)
    joined = first.join()
    assert isinstance(joined, Joined)
    assert joined.leader == first.member_id
