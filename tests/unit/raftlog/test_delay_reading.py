"""The actions of a delay queue before and after a poll, and the offsets that it commits."""

from __future__ import annotations

from datetime import timedelta

import pytest

from raftlog import _delay_queue
from raftlog._core.delays import TARGET_HEADER, Level, Levels, SortedOut, stored_headers
from raftlog._delay_queue import DelayReading, Round, consumer_config, topic_configs
from raftlog.errors import InvalidRequestError
from raftlog.types import Record, TopicPartition

ZERO = TopicPartition("q.delay.1s", 0)
ONE = TopicPartition("q.delay.1s", 1)


@pytest.fixture
def at_ms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The wall clock, in a list of one."""
    clock = [0]
    monkeypatch.setattr(_delay_queue, "now_ms", lambda: clock[0])
    return clock


def record(offset: int, due_ms: int, partition: int = 0) -> Record:
    return Record("q.delay.1s", partition, offset, due_ms - 1000, None, b"v", stored_headers((), due_ms, None))


def test_a_poll_lasts_until_there_is_something_to_do(at_ms: list[int]) -> None:
    reading = DelayReading(Levels("q", [1]))
    assert reading.before_poll(None) == ([], [], None)
    assert reading.before_poll(3.0) == ([], [], 3.0)
    assert reading.after_poll([record(0, 500), record(1, 9000), record(0, 700, 1)]) == {ZERO: 1}
    assert reading.take(10) == []
    assert reading.before_poll(None) == ([], [], 0.5), "the caller has paused the partition where it was to seek"
    assert reading.before_poll(0.2) == ([], [], 0.2)
    at_ms[0] = 800
    taken = reading.take(10)
    assert [each.partition for each in taken] == [ZERO, ONE]
    reading.done(taken)
    assert reading.given == {ZERO: 1, ONE: 1}
    at_ms[0] = 8900
    assert reading.before_poll(None) == ([], [ZERO], None)


def test_what_could_not_be_handed_over_is_read_again(at_ms: list[int]) -> None:
    reading = DelayReading(Levels("q", [1]))
    reading.after_poll([record(3, 500), record(4, 500), record(7, 500, 1)])
    at_ms[0] = 500
    taken = reading.take(10)
    assert reading.put_back(taken, [ONE]) == {ONE: 7}, (
        "only the own partition must be put back, as the other has been given to another member"
    )
    assert reading.put_back(taken, [ZERO, ONE]) == {ZERO: 3, ONE: 7}
    assert reading.take(10) == []


@pytest.mark.parametrize("how", ["on_partitions_revoked", "on_partitions_lost"])
def test_what_others_read_is_forgotten(how: str, at_ms: list[int]) -> None:
    reading = DelayReading(Levels("q", [1]))
    reading.after_poll([record(0, 500), record(0, 500, 1)])
    getattr(reading, how)([ZERO])
    at_ms[0] = 500
    assert [each.partition for each in reading.take(10)] == [ONE]


def test_the_consumer_never_commits_by_itself() -> None:
    assert consumer_config(None) == {
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
    }
    assert consumer_config({"enable.auto.commit": True, "client.rack": "a"})["enable.auto.commit"] is False


def test_the_consumer_reads_what_is_committed_only() -> None:
    """A record that another worker was sending on to the next level when it died is not on its way twice."""
    for name in ("isolation.level", "isolation_level"):
        config = consumer_config({name: "read_uncommitted"})
        assert config["isolation.level"] == "read_committed"
        assert "isolation_level" not in config


def test_what_goes_on_and_what_is_for_a_worker_is_taken_one_after_the_other(at_ms: list[int]) -> None:
    """So that the offset behind what goes on can be committed with it."""
    reading = DelayReading(Levels("q", [1]))
    targets = ((TARGET_HEADER, b"t"),)
    mine = [record(0, 500), record(1, 500)._replace(headers=targets), record(2, 500)._replace(headers=targets)]
    reading.after_poll([*mine, record(3, 500), record(7, 500, 1)._replace(headers=targets)])
    at_ms[0] = 2500
    rounds = []
    for _ in range(3):
        taken = reading.take(10)
        reading.done(taken)
        rounds.append((reading.going_on(taken), reading.given))
    assert rounds == [({ONE: 8}, {ZERO: 1}), ({ZERO: 3}, {}), ({}, {ZERO: 4})]
    assert reading.take(10) == []


def test_what_waits_is_kept_until_it_is_due_and_for_a_while() -> None:
    assert topic_configs(Level(60_000), timedelta(seconds=1)) == {"retention.ms": "61000"}
    with pytest.raises(InvalidRequestError, match="retention"):
        topic_configs(Level(60_000), timedelta(seconds=-1))


def test_a_target_that_refuses_holds_up_its_own_partition_only(at_ms: list[int]) -> None:
    reading = DelayReading(Levels("q", [1]))
    reading.after_poll([record(0, 500), record(7, 500, 1)])
    at_ms[0] = 500
    round_ = Round(reading)
    round_.add(reading.take(10))
    both = round_.next()
    assert both is not None
    refusal = InvalidRequestError("no such target")
    assert round_.failed(both, refusal, in_doubt=False) == [], (
        "after a refusal of both, each record must be tried by itself"
    )
    first, second = round_.next(), round_.next()
    assert first is not None
    assert second is not None
    assert [each.partition for each in (*first, *second)] == [ZERO, ONE]
    assert round_.failed(first, refusal, in_doubt=False) == first
    round_.put_off()
    round_.done(second, SortedOut([], [], 1))
    assert (round_.handed_over, round_.error, round_.over) == (1, refusal, False)
    assert str(ZERO) in "".join(refusal.__notes__)
    assert reading.before_poll(None).pause == [ZERO], (
        "the partition with the refused record must pause, so that others go first"
    )
