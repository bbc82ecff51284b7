"""What a reader of delayed records keeps, pauses and fetches again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.delay_waits import HELD_MAX, HORIZON_MS, LEAD_MS, Reading, Waits
from raftlog._core.delays import Delayed
from raftlog.types import Record, TopicPartition

ZERO = TopicPartition("q.delay.1s", 0)
ONE = TopicPartition("q.delay.1s", 1)


def delayed(offset: int, ready_ms: int, partition: int = 0) -> Delayed:
    return Delayed(Record("q.delay.1s", partition, offset, 0, b"k", b"v"), ready_ms, ready_ms, None)


def offsets(taken: list[Delayed]) -> list[int]:
    return [each.record.offset for each in taken]


def test_what_is_due_is_taken_in_order_and_the_rest_is_kept() -> None:
    waits = Waits()
    assert waits.offer(ZERO, [delayed(0, 100), delayed(1, 200), delayed(2, 300)], 0) is None
    assert waits.take(99, 10) == []
    assert waits.next_at_ms() == 100
    assert offsets(waits.take(200, 10)) == [0, 1]
    assert waits.next_at_ms() == 300
    assert waits.reading(200) == Reading([], []), "what comes next is fetched while it waits"


def test_a_record_behind_a_later_one_waits_for_it() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed(0, 900), delayed(1, 100)], 0)
    assert waits.take(500, 10) == []
    assert offsets(waits.take(900, 10)) == [0, 1]


def test_what_is_far_off_is_not_kept_but_fetched_again_in_time() -> None:
    waits = Waits()
    far = HORIZON_MS + 500
    assert waits.offer(ZERO, [delayed(7, 100), delayed(8, far), delayed(9, far)], 0) == 8
    assert waits.reading(0) == Reading([ZERO], [])
    assert waits.reading(0) == Reading([], []), "it is paused already"
    assert offsets(waits.take(100, 10)) == [7]
    assert waits.next_at_ms() == far - LEAD_MS
    assert waits.reading(far - LEAD_MS - 1) == Reading([], [])
    assert waits.reading(far - LEAD_MS) == Reading([], [ZERO])
    assert waits.next_at_ms() is None
    assert waits.offer(ZERO, [delayed(8, far), delayed(9, far)], far - LEAD_MS) is None
    assert waits.take(far - 1, 10) == []
    assert offsets(waits.take(far, 10)) == [8, 9]


def test_partitions_wait_for_themselves() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed(0, 10 * HORIZON_MS)], 0)
    waits.offer(ONE, [delayed(0, 50, 1), delayed(1, 60, 1)], 0)
    assert waits.reading(0) == Reading([ZERO], [])
    assert waits.next_at_ms() == 50
    assert [each.partition for each in waits.take(100, 10)] == [ONE, ONE]


def test_the_longest_ready_come_first_when_not_all_are_taken() -> None:
    waits = Waits()
    waits.offer(ONE, [delayed(0, 50, 1), delayed(1, 60, 1)], 0)
    waits.offer(ZERO, [delayed(0, 20), delayed(1, 70)], 0)
    assert [(each.partition.partition, each.record.offset) for each in waits.take(100, 3)] == [(0, 0), (0, 1), (1, 0)]
    assert [(each.partition.partition, each.record.offset) for each in waits.take(100, 3)] == [(1, 1)]


def test_memory_is_bounded() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed(offset, 100) for offset in range(HELD_MAX)], 0)
    assert waits.reading(0) == Reading([ZERO], [])
    waits.take(100, HELD_MAX // 2)
    assert waits.reading(100) == Reading([], [])
    waits.take(100, 1)
    assert waits.reading(100) == Reading([], [ZERO])


def test_partitions_that_go_are_forgotten() -> None:
    waits = Waits()
    waits.offer(ZERO, [delayed(0, 10), delayed(1, 10 * HORIZON_MS)], 0)
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
        logs[part].append(delayed(len(logs[part]), ready_ms, part))
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
                positions[part] = positions[part] if again is None else again
        now_ms += step
    assert taken == {part: list(range(len(log))) for part, log in logs.items() if log}
