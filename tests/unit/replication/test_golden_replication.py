"""Stories of replication, told by the cores: tests/golden/replication_*.txt.

`RAFTLOG_REGENERATE_GOLDEN=1 ./dev test tests/unit/replication/test_golden_replication.py` rewrites them; review the
diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raftlog.errors import InvalidUpdateVersion, RaftlogError, UnknownOutcome
from replication.isr import IsrChange, Pending
from replication.leader import LeaderState, Membership
from replication.leader_epochs import check_prefix, truncation_offset
from replication.ports import Accepted, Diverging, OutOfRange, Replica
from tests.support.epoch_logs import EpochLog

GOLDEN = Path(__file__).parents[2] / "golden"


# Records are committed, the ISR shrinks and grows


class Term:
    """A leader's term, told event by event."""

    def __init__(self, leader_epoch: int, log_end_offset: int, high_watermark: int, membership: Membership) -> None:
        self.now_ms = 0.0
        self.active = {1: 10, 2: 20, 3: 30}
        self.state = LeaderState(
            leader_id=1,
            leader_epoch=leader_epoch,
            epoch_start_offset=log_end_offset,
            log_end_offset=log_end_offset,
            durable_end_offset=log_end_offset,
            high_watermark=high_watermark,
            membership=membership,
            now_ms=0.0,
            lag_time_max_ms=10_000.0,
        )

    def told(self, sentence: str, *events: Callable[[], object]) -> str:
        """Play events, and tell what is so afterwards."""
        lines = [f"{sentence}"]
        for event in events:
            try:
                event()
            except RaftlogError as error:
                lines.append(f"  refused: {error}")
        return "\n".join([*lines, *self.shown()]) + "\n"

    def shown(self) -> Iterator[str]:
        """Yield the state: the replicas' log ends, what the leader wants, and the outcome of its requests."""
        state = self.state
        places: dict[str, list[str]] = {"in sync": [], "joining": [], "out of sync": []}
        for view in state.progress(self.now_ms):
            place = "in sync" if view.in_sync else "joining" if view.broker_id in state.maximal_isr else "out of sync"
            places[place].append(f"{view.broker_id}:{'?' if view.durable_end_offset < 0 else view.durable_end_offset}")
        held = "; ".join(f"{place} {' '.join(who)}" for place, who in places.items() if who)
        confirmed = "" if state.has_confirmed else " (not confirmed)"
        yield f"  {self.now_ms / 1000:5.1f} s  high watermark {state.high_watermark}{confirmed}; {held}"
        if state.pending is not Pending.NONE:
            yield f"           asked: {state.pending.value}"
        wanted = state.wanted_isr(self.active, self.now_ms)
        if wanted is not None:
            yield f"           wants in sync: {' '.join(str(member.broker_id) for member in wanted.members)}"

    def later(self, seconds: float) -> Callable[[], None]:
        """Return an event: time passes."""

        def event() -> None:
            self.now_ms += seconds * 1000

        return event

    def append(self, count: int) -> Callable[[], None]:
        """Return an event: the leader appends, and its disk holds it."""

        def event() -> None:
            self.state.appended(self.state.log_end_offset + count, self.now_ms)
            self.state.flushed(self.state.log_end_offset, self.now_ms)

        return event

    def opens(self, broker_id: int, held: int, broker_epoch: int | None = None) -> Callable[[], None]:
        """Return an event: a follower opens."""
        replica = Replica(broker_id, broker_epoch or 10 * broker_id)
        return lambda: self.state.opened(replica, held, self.now_ms)

    def acks(self, broker_id: int, held: int, broker_epoch: int | None = None) -> Callable[[], None]:
        """Return an event: a follower acknowledges."""
        replica = Replica(broker_id, broker_epoch or 10 * broker_id)
        return lambda: self.state.acked(replica, held, self.now_ms)

    def asks(self) -> IsrChange:
        """Ask the controller for what is wanted."""
        change = self.state.wanted_isr(self.active, self.now_ms)
        assert change is not None
        self.state.proposed(change)
        return change

    def hears(self, isr: tuple[int, ...], partition_epoch: int) -> Callable[[], None]:
        """Return an event: newer metadata."""
        membership = Membership((1, 2, 3), isr, partition_epoch, self.state.membership.min_insync_replicas)
        return lambda: self.state.update_membership(membership, self.now_ms)


def in_sync() -> Iterator[str]:
    """One term, from the election on."""
    term = Term(5, 100, 90, Membership((1, 2, 3), (1, 2, 3), 8, 2))
    change: IsrChange | None = None

    def asks() -> None:
        nonlocal change
        change = term.asks()

    def answered(error: RaftlogError | None) -> Callable[[], None]:
        return lambda: None if change is None else term.state.answered(change, error)

    yield "`3:110`: broker 3 holds everything below 110. min.insync.replicas=2, replica.lag.time.max.ms=10000.\n"
    yield term.told("Broker 1 is elected in epoch 5. As a follower it had heard of the high watermark 90.")
    yield term.told("Broker 2 opens; its log is the same. Nothing is known of broker 3 yet.", term.opens(2, 100))
    yield term.told("Broker 3 opens with two records less. What it holds everybody holds.", term.opens(3, 98))
    yield term.told("It fetches them: everything of earlier epochs is committed.", term.acks(3, 100))
    yield term.told("The leader appends 10 records, and has synced them.", term.later(1), term.append(10))
    yield term.told("Broker 2 has synced them too.", term.acks(2, 110))
    yield term.told("Broker 3 as well: they are committed.", term.acks(3, 110))
    yield term.told("10 more, which broker 3 does not take. Nothing is committed.", term.append(10), term.acks(2, 120))
    yield term.told("10 seconds later it is still silent.", term.later(10.1))
    yield term.told("The leader asks for an ISR without it. Until that is known to be so, broker 3 counts.", asks)
    yield term.told("The controller grants it. The metadata is on its way.", answered(None))
    yield term.told("Now it is known.", term.hears((1, 2), 9))
    yield term.told("Broker 3 is back, in the same process.", term.later(5), term.opens(3, 110))
    yield term.told("It catches up.", term.acks(3, 120))
    yield term.told("The leader asks to take it in. From now on it counts, since it may be elected.", asks)
    yield term.told("10 records wait for it as well.", term.append(10), term.acks(2, 130))
    yield term.told("The controller does not answer. So it goes on counting.", answered(UnknownOutcome("no answer")))
    yield term.told("A second later nobody knows more: the leader asks for the same again.", term.later(1), asks)
    refusal = InvalidUpdateVersion("the partition is at partition epoch 10, not 9")
    yield term.told("The first time had counted, says the answer.", answered(refusal))
    yield term.told("And so does the metadata.", term.hears((1, 2, 3), 10))
    yield term.told("Broker 3 holds them.", term.acks(3, 130))
    yield term.told("Broker 3 dies. Its next process opens; it has lost what was not synced.", term.opens(3, 125, 31))
    yield term.told("A word of the process before comes late.", term.acks(3, 130))
    term.active[3] = 31
    yield term.told("The controller knew of it when the new process registered.", term.hears((1, 2), 11))
    yield term.told("It catches up, and may join in its new life.", term.acks(3, 130, 31))
    del term.active[2]
    yield term.told("Broker 2 is fenced as well, before that is asked for.", term.hears((1,), 12))
    yield term.told("Alone is less than min.insync.replicas=2: nothing is committed.", term.append(5))
    yield term.told(
        "The leader asks to take broker 3 in, which takes the new records too.", term.acks(3, 135, 31), asks
    )
    yield term.told("Granted, and known: two are enough.", answered(None), term.hears((1, 3), 13))


# Logs that part


def tell_alignment(leader: EpochLog, follower: EpochLog) -> Iterator[str]:
    """Yield the dialogue of a follower with its leader."""
    yield f"    leader    {drawn(leader)}"
    yield f"    follower  {drawn(follower)}"
    while True:
        question = f"ends at {follower.end} with epoch {follower.last_epoch}"
        if not follower.epochs:
            question = f"is empty at {follower.end}"
        found = check_prefix(leader.cache, leader.start, leader.end, follower.end, follower.last_epoch)
        match found:
            case Accepted():
                yield f"    {question}: accepted"
                break
            case Diverging(epoch, end):
                offset = truncation_offset(follower.cache, follower.end, found)
                where = f"epoch {epoch} ends at {end}" if epoch >= 0 else f"nothing of that, the log starts at {end}"
                follower.truncate(offset)
                act = "starts over at" if follower.started_over else "truncates to"
                yield f"    {question}: {where}; {act} {offset}"
            case OutOfRange(start):
                follower.start_over(start)
                yield f"    {question}: the log starts at {start}; starts over there"
    follower.copy(leader, 1_000)
    yield f"    follower  {drawn(follower)}"
    follower.started_over = False


def drawn(log: EpochLog) -> str:
    """Return a log as the epochs of its records."""
    before = f"({log.start} gone) " if log.start else ""
    return before + (" ".join(map(str, log.epochs)) or "empty")


def diverging() -> Iterator[str]:
    """Yield every shape that the KIPs draw, and some more."""
    yield "A log is written as the leader epoch of each of its records.\n"
    for title, leader, follower in SHAPES:
        yield "\n".join([title, *tell_alignment(leader, follower)]) + "\n"


SHAPES = [
    (
        "KIP-101, scenario 1: the follower has not heard of the high watermark, and restarts.\n"
        "It keeps the second record; truncating to its high watermark would have lost it when it leads next.",
        EpochLog([0, 0]),
        EpochLog([0, 0]),
    ),
    (
        "KIP-101, scenario 2: power is lost everywhere; the one back first had not synced the second record,\n"
        "and writes another one at the same offset.",
        EpochLog([0, 1]),
        EpochLog([0, 0]),
    ),
    (
        "KIP-279, fast failovers: in epochs 1 and 2 each was leader without the other, both know only epoch 0.",
        EpochLog([0, 0, 2, 2]),
        EpochLog([0, 0, 1, 1, 1]),
    ),
    (
        "KIP-279, an epoch that the leader has never seen: it answers with the largest one below.",
        EpochLog([0, 0, 0, 3]),
        EpochLog([0, 0, 2, 2]),
    ),
    (
        "KIP-279, an epoch that the follower has never seen: the answer's epoch is not in its log either.",
        EpochLog([0, 0, 1, 1, 4]),
        EpochLog([0, 2, 2, 3, 3]),
    ),
    (
        "Several rounds: each answer is about one epoch.",
        EpochLog([0, 1, 1, 3, 3, 3, 6]),
        EpochLog([0, 1, 1, 1, 1, 2, 4]),
    ),
    ("Nothing in common.", EpochLog([2, 2]), EpochLog([1, 1, 1])),
    (
        "KAFKA-20961: the leader of epoch 4 has not written anything yet. The answer names an epoch that is there.",
        EpochLog([0, 0, 1]),
        EpochLog([0, 0, 1, 3]),
    ),
    ("The follower is longer, after an unclean election.", EpochLog([0, 0]), EpochLog([0, 0, 0, 0])),
    ("A new replica.", EpochLog([0, 0, 2]), EpochLog([])),
    ("Retention was quicker than the follower.", EpochLog([3, 3, 4], start=10), EpochLog([0, 0, 1])),
    (
        "The leader's log starts above all that the follower's epochs tell.",
        EpochLog([5, 5], start=10),
        EpochLog([1, 1, 2, 2], start=8),
    ),
    (
        "The follower's log starts above where they part.",
        EpochLog([0, 0, 0, 4, 4, 4]),
        EpochLog([2, 2], start=4),
    ),
    (
        "The leader is empty, its log starts where the follower's ends.",
        EpochLog([], start=4),
        EpochLog([1, 1], start=2),
    ),
]


@pytest.mark.parametrize("story", [in_sync, diverging])
def test_the_story(story: Callable[[], Iterator[str]]) -> None:
    text = "\n".join(story())
    file = GOLDEN / f"replication_{story.__name__}.txt"
    if os.environ.get("RAFTLOG_REGENERATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
