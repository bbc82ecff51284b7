"""Delay levels, the stored form of a delayed record, and the records and pauses of a reader."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.delays import (
    DUE_HEADER,
    HELD_MAX,
    HORIZON_MS,
    LEAD_MS,
    TARGET_HEADER,
    Delayed,
    Level,
    Levels,
    Outgoing,
    Reading,
    Waits,
    as_delay_ms,
    by_partition,
    delayed_send,
    ends_of,
    level_of,
    sort_out,
    starts_of,
    stored_headers,
    understood,
)
from raftlog.errors import InvalidRequestError
from raftlog.types import Header, Record, TopicPartition

ZERO = TopicPartition("q.delay.1s", 0)
ONE = TopicPartition("q.delay.1s", 1)


def record(offset: int = 0, headers: tuple[Header, ...] = (), timestamp_ms: int = 0, partition: int = 0) -> Record:
    return Record("q.delay.1s", partition, offset, timestamp_ms, b"k", b"v", headers)


def delayed(offset: int, ready_ms: int, partition: int = 0, due_ms: int | None = None) -> Delayed:
    return Delayed(record(offset, partition=partition), ready_ms if due_ms is None else due_ms, ready_ms, None)


# Levels


@pytest.mark.parametrize(
    ("delay", "ms"), [(1, 1000), (0.25, 250), (timedelta(minutes=5), 300_000), (0, 0), (1e-4, 1), (1.1, 1100)]
)
def test_delays_are_seconds_or_timedeltas_and_never_rounded_down(delay: float | timedelta, ms: int) -> None:
    assert as_delay_ms(delay) == ms


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 1e12, timedelta(seconds=-1), timedelta.max])
def test_a_delay_that_cannot_be(delay: float | timedelta) -> None:
    with pytest.raises(InvalidRequestError, match="between 0 and a hundred years"):
        as_delay_ms(delay)


@pytest.mark.parametrize("delay", ["5s", None, True, b"1"])
def test_a_delay_of_a_wrong_type(delay: object) -> None:
    with pytest.raises(TypeError, match="seconds or a timedelta"):
        as_delay_ms(delay)  # type: ignore[arg-type] # that is the point


@pytest.mark.parametrize(
    ("delay_ms", "name"),
    [(250, "250ms"), (1000, "1s"), (90_000, "90s"), (60_000, "1m"), (5_400_000, "90m"), (86_400_000, "1d")],
)
def test_levels_have_the_shortest_exact_name_and_are_known_by_it(delay_ms: int, name: str) -> None:
    assert str(Level(delay_ms)) == name
    assert level_of(f"q.delay.{name}", "q") == Level(delay_ms)


@pytest.mark.parametrize(
    "topic", ["q.delay.60s", "q.delay.", "q.delay.5", "q.delay.01s", "p.delay.1s", "1s", "q.delay.0s"]
)
def test_topics_that_are_no_level_of_the_queue(topic: str) -> None:
    assert level_of(topic, "q") is None


def test_a_queue_reads_levels_that_it_has_had_before() -> None:
    levels = Levels("q", [60, 1])
    assert levels.topics == ["q.delay.1s", "q.delay.1m"]
    levels.found({"q.delay.1s", "q.delay.30s", "q", "q.delay.notes", "r.delay.5s"})
    assert levels.topics == ["q.delay.1s", "q.delay.1m", "q.delay.30s"]
    assert levels.of("q.delay.30s") == Level(30_000)
    assert levels.for_rest(30_000) == Level(1000), "no record must be sent to a level that is no longer configured"


@pytest.mark.parametrize("delays", [[], [0], [1, 0.0]])
def test_levels_that_are_none(delays: list[float]) -> None:
    with pytest.raises(InvalidRequestError):
        Levels("q", delays)


@given(st.lists(st.integers(1, 10**7), min_size=1), st.integers(0, 10**9))
def test_the_level_for_a_delay_is_the_largest_that_is_not_too_long(all_ms: list[int], rest_ms: int) -> None:
    levels = Levels("q", [timedelta(milliseconds=each) for each in all_ms])
    chosen = levels.for_rest(rest_ms).delay_ms
    assert chosen == max((each for each in all_ms if each <= rest_ms), default=min(all_ms))


@given(st.lists(st.integers(1, 10**6), min_size=1), st.floats(0, 1_000))
def test_a_record_that_is_sent_on_level_after_level_becomes_due_exactly_in_time(
    all_ms: list[int], rounds: float
) -> None:
    delay = int(rounds * min(all_ms))  # at most a thousand times the shortest level
    levels = Levels("q", [timedelta(milliseconds=each) for each in all_ms])
    due_ms, now_ms, hops = delay, 0, 0
    while now_ms < due_ms:
        level = levels.for_rest(due_ms - now_ms)
        waiting = understood(record(headers=stored_headers((), due_ms, None), timestamp_ms=now_ms), level)
        assert now_ms < waiting.ready_ms <= due_ms
        assert waiting.due_ms == due_ms
        now_ms = waiting.ready_ms
        hops += 1
        assert hops <= 1 + due_ms // min(all_ms)
    assert now_ms == due_ms


# What is stored


def test_a_record_keeps_its_own_headers() -> None:
    headers = stored_headers((("lang", b"fr"), ("lang", None)), 5000, "orders")
    waiting = understood(record(headers=headers, timestamp_ms=1000), Level(3000))
    assert waiting.record.headers == (("lang", b"fr"), ("lang", None))
    assert (waiting.due_ms, waiting.ready_ms, waiting.target) == (5000, 4000, "orders")
    assert understood(record(headers=stored_headers((), 5000, None)), Level(3000)).target is None


@pytest.mark.parametrize("name", [DUE_HEADER, TARGET_HEADER])
def test_the_queues_own_headers_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        stored_headers(((name, b"1"),), 5000, None)


@pytest.mark.parametrize("due", [None, b"", b"soon", b"-5", b"1e9", b"9" * 400])
def test_a_record_with_a_senseless_time_waits_for_its_level(due: bytes | None) -> None:
    waiting = understood(record(headers=((DUE_HEADER, due),), timestamp_ms=1000), Level(3000))
    assert (waiting.due_ms, waiting.ready_ms) == (4000, 4000)


def test_a_record_that_somebody_else_put_there() -> None:
    found = record(headers=(("a", b"b"),), timestamp_ms=1000)
    assert understood(found, Level(3000)) == Delayed(found, 4000, 4000, None)
    assert understood(record(headers=((TARGET_HEADER, None),)), Level(1)).target is None
    assert understood(record(headers=((TARGET_HEADER, b"\xff"),)), Level(1)).target == "\ufffd"


# One round


def test_where_a_round_begins_and_ends() -> None:
    taken = [delayed(3, 0), delayed(9, 0, 1), delayed(4, 0), delayed(11, 0, 1)]
    assert starts_of(taken) == {ZERO: 3, ONE: 9}
    assert ends_of(taken) == {ZERO: 5, ONE: 12}
    assert [each.offset for each in by_partition([each.record for each in taken])[ONE]] == [9, 11]


def test_what_is_ready_goes_on_to_its_target_or_to_a_worker() -> None:
    levels = Levels("q", [1, 60])
    rest, target = delayed(0, 1000, due_ms=1400), delayed(1, 1000)._replace(target="t")
    worker = delayed(2, 1000)
    found = sort_out(levels, [rest, target, worker], 1010, forwards=False)
    assert found.given == [worker.record]
    assert found.handed_over == 1
    assert found.outgoing == [
        Outgoing("q.delay.1s", b"v", b"k", ((DUE_HEADER, b"1400"),), 1010),
        Outgoing("t", b"v", b"k", (), None),
    ]
    late = sort_out(levels, [rest], 1400, forwards=False)
    assert late.given == [rest.record], "the record must be given, as it was due before it was looked at"


def test_a_target_is_kept_from_level_to_level() -> None:
    sent = delayed_send(Levels("q", [1, 60]), b"v", None, (("a", b"b"),), 100_000, "t", 5000)
    assert sent == Outgoing(
        "q.delay.1m", b"v", None, (("a", b"b"), (DUE_HEADER, b"100000"), (TARGET_HEADER, b"t")), 5000
    )
    waiting = understood(record(headers=sent.headers, timestamp_ms=5000), Level(60_000))
    again = sort_out(Levels("q", [1, 60]), [waiting], waiting.ready_ms, forwards=True).outgoing[0]
    assert (again.topic, again.headers) == ("q.delay.1s", sent.headers)


def test_what_is_meant_for_a_worker_is_not_forwarded() -> None:
    levels = Levels("q", [1])
    sort_out(levels, [delayed(3, 0, due_ms=50), delayed(4, 0)._replace(target="t")], 10, forwards=True)
    with pytest.raises(InvalidRequestError, match=r"offset 3 of q.delay.1s-0 has no target.*poll"):
        sort_out(levels, [delayed(3, 0, due_ms=50)], 50, forwards=True)


def delayed_frame(offset: int, ready_ms: int, partition: int = 0) -> Delayed:
    return Delayed(Record("q.delay.1s", partition, offset, 0, b"k", b"v"), ready_ms, ready_ms, None)


def offsets(taken: list[Delayed]) -> list[int]:
    return [each.record.offset for each in taken]


def test_what_is_due_is_taken_in_order_and_the_rest_is_kept() -> None:
    waits = Waits()
    assert waits.offer(ZERO, [delayed_frame(0, 100), delayed_frame(1, 200), delayed_frame(2, 300)], 0) is None
    assert waits.take(99, 10) == []
    assert waits.next_at_ms() == 100
    assert offsets(waits.take(200, 10)) == [0, 1]
    assert waits.next_at_ms() == 300
    assert waits.reading(200) == Reading([], []), "the partition must be read on while its next record waits"


def test_a_record_behind_a_later_one_waits_for_it() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed_frame(0, 900), delayed_frame(1, 100)], 0)
    assert waits.take(500, 10) == []
    assert offsets(waits.take(900, 10)) == [0, 1]


def test_what_is_far_off_is_not_kept_but_fetched_again_in_time() -> None:
    waits = Waits()
    far = HORIZON_MS + 500
    assert waits.offer(ZERO, [delayed_frame(7, 100), delayed_frame(8, far), delayed_frame(9, far)], 0) == 8
    assert waits.reading(0) == Reading([], []), "the partition must be paused only once"
    assert offsets(waits.take(100, 10)) == [7]
    assert waits.next_at_ms() == far - LEAD_MS
    assert waits.reading(far - LEAD_MS - 1) == Reading([], [])
    assert waits.reading(far - LEAD_MS) == Reading([], [ZERO])
    assert waits.next_at_ms() is None
    assert waits.offer(ZERO, [delayed_frame(8, far), delayed_frame(9, far)], far - LEAD_MS) is None
    assert waits.take(far - 1, 10) == []
    assert offsets(waits.take(far, 10)) == [8, 9]


def test_a_reader_that_comes_back_late_fetches_what_was_far_off() -> None:
    """Between two polls it may hand records over for seconds."""
    waits = Waits()
    far = HORIZON_MS + 500
    assert waits.offer(ZERO, [delayed_frame(8, far)], 0) == 8
    assert waits.reading(far) == Reading([], [ZERO]), "the partition was paused when the record was offered"


def test_partitions_wait_for_themselves() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed_frame(0, 10 * HORIZON_MS)], 0)
    waits.offer(ONE, [delayed_frame(0, 50, 1), delayed_frame(1, 60, 1)], 0)
    assert waits.reading(0) == Reading([], [])
    assert waits.next_at_ms() == 50
    assert [each.partition for each in waits.take(100, 10)] == [ONE, ONE]


def test_the_longest_ready_come_first_when_not_all_are_taken() -> None:
    waits = Waits()
    waits.offer(ONE, [delayed_frame(0, 50, 1), delayed_frame(1, 60, 1)], 0)
    waits.offer(ZERO, [delayed_frame(0, 20), delayed_frame(1, 70)], 0)
    assert [(each.partition.partition, each.record.offset) for each in waits.take(100, 3)] == [(0, 0), (0, 1), (1, 0)]
    assert [(each.partition.partition, each.record.offset) for each in waits.take(100, 3)] == [(1, 1)]


def test_memory_is_bounded() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed_frame(offset, 100) for offset in range(HELD_MAX)], 0)
    assert waits.reading(0) == Reading([ZERO], [])
    waits.take(100, HELD_MAX // 2)
    assert waits.reading(100) == Reading([], [])
    waits.take(100, 1)
    assert waits.reading(100) == Reading([], [ZERO])


def test_partitions_that_go_are_forgotten() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed_frame(0, 10), delayed_frame(1, 10 * HORIZON_MS)], 0)
    waits.reading(0)
    waits.forget([ZERO, ONE])
    assert waits.take(100, 10) == []
    assert waits.next_at_ms() is None
    assert waits.reading(0) == Reading([], [])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000)), max_size=60),
    st.lists(st.integers(1, 900), max_size=60),
)
def test_everything_is_taken_once_in_order_and_never_early(sent: list[tuple[int, int]], steps: list[int]) -> None:
    logs: dict[int, list[Delayed]] = {part: [] for part in range(4)}
    for part, ready_ms in sent:
        logs[part].append(delayed_frame(len(logs[part]), ready_ms, part))
    positions, paused, taken = dict.fromkeys(logs, 0), set[int](), dict[int, list[int]]()
    waits, now_ms = Waits(), 0
    for step in [*steps, *[2000] * 6]:
        for _ in range(40):
            reading = waits.reading(now_ms)
            paused |= {part.partition for part in reading.pause}
            paused -= {part.partition for part in reading.resume}
            for each in waits.take(now_ms, 7):
                assert each.ready_ms <= now_ms
                taken.setdefault(each.partition.partition, []).append(each.record.offset)
            for part in logs.keys() - paused:
                polled = logs[part][positions[part] : positions[part] + 5]
                positions[part] += len(polled)
                again = waits.offer(TopicPartition("q.delay.1s", part), polled, now_ms)
                if again is not None:
                    positions[part] = again
                    paused.add(part)
        now_ms += step
    assert taken == {part: list(range(len(log))) for part, log in logs.items() if log}
