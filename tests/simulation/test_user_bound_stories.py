"""Stories of users that make more ids than they may: each planted bug that lets them is noticed here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from broker.coordinator.groups.classic.commands import JoinClassic
from broker.coordinator.groups.commands import DeleteGroup, GroupConfig
from broker.coordinator.transactions.commands import InitProducer, TransactionConfig
from broker.coordinator.user_bound import NamedGroups
from raftlog.errors import PolicyViolation
from raftlog.v1 import transaction_pb2
from raftmeta.producer_ids import ProducerIdKey
from tests.simulation.parts import Parts
from tests.support.group_driver import GroupDriver, Stream, topic_id
from tests.support.transaction_driver import Call, TransactionDriver

TENANT, OTHER = "User:tenant", "User:other"
IDLE_MS, OPEN_MS = 60_000, 5_000


@pytest.fixture(name="parts")
def _parts() -> Parts:
    return Parts()


def driver_with(most: int) -> TransactionDriver:
    config = TransactionConfig(id_expiration_ms=IDLE_MS, expiration_check_interval_ms=1_000)
    return TransactionDriver(config, most_of_user=most)


def named_groups() -> NamedGroups:
    return NamedGroups("max.groups.per.user", 3, kept_ms=IDLE_MS, open_ms=OPEN_MS)


def is_refused(driver: TransactionDriver, ask: Callable[[], object]) -> bool:
    """Whether a request is refused; then nothing of it may be left."""
    before = list(driver.log), set(driver.core.transactions), set(driver.core.sinks)
    try:
        ask()
    except PolicyViolation:
        after = list(driver.log), set(driver.core.transactions), set(driver.core.sinks)
    else:
        return False
    assert after == before, "a refused request must change nothing"
    return True


def is_id_refused(driver: TransactionDriver, transactional_id: str) -> bool:
    """Whether the tenant is refused a transactional id."""
    return is_refused(driver, partial(driver.init, transactional_id, user=TENANT))


def test_a_user_makes_no_more_transactional_ids_than_it_may(parts: Parts) -> None:
    """What it has made it can use, also where it takes over from itself; and other users do not notice."""
    driver = driver_with(2)
    driver.init("a", user=TENANT)
    producer = driver.init("b", user=TENANT)
    assert is_id_refused(driver, "c"), "a third transactional id must be refused"
    assert driver.refused == [TENANT]
    driver.add(producer, 0)
    driver.ended(producer)
    assert driver.init("a", user=TENANT).producer_epoch == 1
    for number in range(3):
        driver.init(f"without a login {number}")
    driver.init("c", user=OTHER)
    driver.init("c", user=TENANT)  # an existing one, whosever it is
    driver.restart()
    assert is_id_refused(driver, "d"), "the next coordinator must count what was made before"
    assert driver.core.made.counts == {TENANT: 2, OTHER: 1}


def test_sinks_count_as_transactional_ids(parts: Parts) -> None:
    driver = driver_with(2)
    driver.init("a", user=TENANT)
    stage = driver.init_stage(0, sink_id="s", user=TENANT)
    assert is_refused(driver, partial(driver.init_stage, 0, sink_id="u", user=TENANT)), "a second sink must be refused"
    assert is_id_refused(driver, "b"), "a sink must count as a transactional id"
    driver.init_stage(0, sink_id="s", user=TENANT)
    assert driver.committed(0, stage).last_batch_id == 0
    driver.restart()
    assert driver.core.made.counts == {TENANT: 2}


def test_every_request_that_makes_a_sink_counts(parts: Parts) -> None:
    driver = driver_with(2)
    driver.fence(0, "q/", sink_id="fenced", user=TENANT)
    driver.commit(0, sink_id="empty", user=TENANT).answer(transaction_pb2.CommitBatchResponse)
    assert driver.core.made.counts == {TENANT: 2}

    def commit() -> None:
        driver.commit(0, sink_id="third", user=TENANT).answer(transaction_pb2.CommitBatchResponse)

    assert is_refused(driver, commit), "a sink must not be made by an empty batch"
    fence = partial(driver.fence, 0, "q/", *range(1_000), sink_id="third", user=TENANT)
    assert is_refused(driver, fence), "a sink must not be made by giving up attempts"
    driver.abort_stages(*range(1_000), sink_id="third")  # writes nothing about an unknown sink
    driver.fence(1, "q/", sink_id="fenced", user=TENANT)
    driver.restart()
    assert driver.core.made.counts == {TENANT: 2}


def test_what_expires_makes_room(parts: Parts) -> None:
    driver = driver_with(2)
    driver.init("a", user=TENANT)
    driver.init_stage(0, sink_id="s", user=TENANT, timeout_ms=1_000)
    assert is_id_refused(driver, "b")
    driver.wait(2_000)
    driver.write_markers()
    driver.wait(IDLE_MS + 2_000)
    assert not driver.core.transactions
    assert not driver.core.sinks
    assert not is_id_refused(driver, "b"), "ids that have expired must not count"
    driver.restart()
    assert driver.core.made.counts == {TENANT: 1}


def test_an_id_counts_for_its_user_whatever_becomes_of_it(parts: Parts) -> None:
    """It takes another producer id here, since that of before is not bound to it; and another user takes it over."""
    driver = driver_with(1)
    producer = driver.init("a", user=TENANT)
    call = Call()
    request = transaction_pb2.InitProducerIdRequest(transactional_id="a", transaction_timeout_ms=1)
    driver.submit(InitProducer(call, request, 9_000, ProducerIdKey(b"k" * 32, 0), OTHER))
    assert call.answer(transaction_pb2.InitProducerIdResponse).producer_id == 9_000 != producer.producer_id
    assert is_id_refused(driver, "b"), "an id with another producer id must count as before"
    driver.restart()
    assert driver.core.made.counts == {TENANT: 1}


def test_the_transactions_of_a_user_name_no_more_groups_than_they_may(parts: Parts) -> None:
    """What they have named they name again; the next coordinator counts on, since both are of one broker."""
    named = named_groups()
    driver = TransactionDriver(named=named)
    producers = [driver.init(name, user=TENANT) for name in "ab"]

    def transact(number: int, *groups: str) -> None:
        driver.add(producers[number], 0, groups=groups)
        producers[number] = driver.ended(producers[number])

    def is_name_refused(number: int, *groups: str) -> bool:
        return is_refused(driver, partial(driver.add, producers[number], 0, groups=groups))

    transact(0, "g", "h")
    transact(0, "h")
    transact(1, "g")
    assert is_name_refused(0, "i"), "a third group of a producer must be refused"
    assert is_name_refused(1, "h"), "a group that another producer has named must be refused: it keeps an end for each"
    driver.add(producers[1], 0, groups=["g"])
    assert is_name_refused(1, "i"), "a group must be refused to a transaction that has begun"
    producers[1] = driver.ended(producers[1])
    driver.restart()
    driver.write_markers()
    assert is_name_refused(0, "i"), "the next coordinator of the broker must go on counting"
    others = driver.init("c", user=OTHER), driver.init("without a login")
    for number, producer in enumerate(others):
        driver.add(producer, 0, groups=["i", "j", "k"])
        assert named.count((OTHER, "")[number]) == (3, 0)[number]
    driver.wait(IDLE_MS)
    assert is_name_refused(0, "i"), "a group must count until a transaction that named it has ended, and is forgotten"
    driver.wait(OPEN_MS)
    assert not is_name_refused(0, "i", "j", "k"), "what groups have forgotten must not count"
    assert named.count(TENANT) == 3


def test_groups_count_for_the_caller_where_a_transactional_id_has_no_user(parts: Parts) -> None:
    """Such as one that an earlier version made: else it would name any number of groups, for as long as it is used."""
    named = named_groups()
    driver = TransactionDriver(named=named)
    old, new = driver.init("old"), driver.init("new", user=OTHER)
    driver.add(old, 0, groups=["g", "h", "i"], user=TENANT)
    ask = partial(driver.add, old, 0, groups=["j"], user=TENANT)
    assert is_refused(driver, ask), "a fourth group of the caller must be refused"
    driver.add(new, 0, groups=["g"], user=TENANT)
    assert (named.count(TENANT), named.count(OTHER)) == (3, 1), "the user of a transactional id must stay its user"
    driver.add(old, 0, groups=["j"])
    assert named.count("") == 0


# Groups

P0 = topic_id("t"), 0


def groups_with(most: int, user: str = TENANT) -> GroupDriver:
    driver = GroupDriver(
        config=GroupConfig(offsets_retention_ms=IDLE_MS, offsets_retention_check_interval_ms=1_000), most_of_user=most
    )
    driver.user = user
    return driver


def is_group_refused(driver: GroupDriver, ask: Callable[[], object]) -> bool:
    """Whether a request is refused; then nothing of it may be left."""
    before = list(driver.log), set(driver.core.groups), set(driver.core._soft), driver.core.next_deadline_ms()
    try:
        answer = ask()
        if isinstance(answer, Stream) and isinstance(answer.last, PolicyViolation):
            raise answer.last
    except PolicyViolation:
        after = list(driver.log), set(driver.core.groups), set(driver.core._soft), driver.core.next_deadline_ms()
    else:
        return False
    assert after == before, "a refused request must change nothing"
    return True


def join_classic(driver: GroupDriver, group_id: str) -> Stream:
    call = Stream()
    protocols = (("range", b""),)
    driver.decide(JoinClassic(call, group_id, "", "c-1", "", "c", "10.0.0.1", "other", protocols, 10_000, 10_000))
    return call


def makers(driver: GroupDriver, group_id: str) -> list[Callable[[], object]]:
    """Return every way to make a group."""
    return [
        partial(driver.join, "m", "t", group_id=group_id),
        partial(join_classic, driver, group_id),
        partial(driver.commit, {P0: 1}, group_id=group_id),
        partial(driver.commit_in_transaction, (7, 0), {P0: 1}, group_id=group_id),
    ]


def test_a_user_makes_no_more_groups_than_it_may(parts: Parts) -> None:
    driver = groups_with(2)
    member = driver.join("m", "t", group_id="a")
    driver.follow(member, "a")
    driver.commit({P0: 1}, group_id="b")
    for ask in makers(driver, "c"):
        assert is_group_refused(driver, ask), "a third group must be refused"
    driver.join("n", "t", group_id="a")
    driver.commit({P0: 2}, group_id="b")
    driver.mark((9, 0), commit=True, group_id="marked")  # the cluster's own work
    driver.user = ""
    driver.commit({P0: 1}, group_id="without a login")
    driver.user = OTHER
    driver.commit({P0: 1}, group_id="c")
    driver.user = TENANT
    driver.commit({P0: 2}, group_id="c")  # an existing one, whosever it is
    driver.restart()
    for ask in makers(driver, "d"):
        assert is_group_refused(driver, ask), "the next coordinator must count what was made before"
    assert driver.core.made.counts == {TENANT: 2, OTHER: 1}


def test_whatever_makes_a_group_counts(parts: Parts) -> None:
    for number in range(len(makers(groups_with(1), "a"))):
        driver = groups_with(1)
        makers(driver, "a")[number]()
        assert driver.core.made.counts == {TENANT: 1}, "the group must count for its user"
        driver.restart()
        assert driver.core.made.counts == {TENANT: 1}, "the next coordinator must count it too"
        assert is_group_refused(driver, partial(driver.commit, {P0: 1}, group_id="b"))
        if driver.core.groups["a"].pending:
            driver.mark((7, 0), commit=True, group_id="a")
        driver.user = OTHER
        if not driver.core.groups["a"].head:
            driver.commit({P0: 2, (topic_id("t"), 1): 2}, group_id="a")
            driver.join("m", "t", group_id="a")
        driver.restart()
        assert driver.core.made.counts == {TENANT: 1}, "it must count for its user for as long as it exists"


def test_a_group_that_is_deleted_or_expires_makes_room(parts: Parts) -> None:
    """A group of which only the fences of transactions are left counts no more."""
    driver = groups_with(1)
    driver.commit_in_transaction((7, 0), {P0: 1}, group_id="a")
    driver.mark((7, 0), commit=True, group_id="a")
    driver.decide(DeleteGroup(Stream(), "a"))
    assert driver.core.groups["a"].fences
    assert driver.core.made.counts == {}, "a deleted group must not count"
    member = driver.join("m", "t", group_id="b")
    assert is_group_refused(driver, partial(driver.join, "m", "t", group_id="a"))
    driver.leave(member, group_id="b")
    driver.wait(IDLE_MS + 2_000)
    assert driver.core.made.counts == {}, "a group that has expired must not count"
    driver.user = OTHER
    driver.commit({P0: 1}, group_id="a")
    driver.restart()
    assert driver.core.made.counts == {OTHER: 1}
