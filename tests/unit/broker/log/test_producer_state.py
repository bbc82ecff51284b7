"""A log's state of its producers, in memory, in snapshots, and after retention and crashes."""

from __future__ import annotations

import asyncio
import errno
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.log import partition_log, producer_state
from broker.log.config import LogConfig
from broker.log.flush import GroupCommit
from broker.log.log_dir import encode_lines
from broker.log.producer_state import (
    FENCE_MS,
    LIVE_MS,
    MAX_SEQUENCE,
    REMEMBERED_BATCHES,
    SNAPSHOT_INTERVAL_BYTES,
    Duplicate,
    FrozenProducers,
    ProducerLimits,
    ProducerState,
    ProducerStates,
    RememberedBatch,
    Snapshot,
    decode_snapshot,
    encode_producers,
    most_of_each,
    sequence_after,
    snapshot_name,
    snapshot_offsets,
)
from broker.log.storage import read_file
from broker.log.transactions import AbortedTransaction, OpenTransaction, Undecided
from raftlog.errors import (
    BrokerOverloaded,
    CorruptRecordError,
    DuplicateSequence,
    InvalidProducerEpoch,
    OutOfOrderSequence,
    SequenceError,
    UnknownProducerId,
    UnsupportedVersion,
)
from raftlog.format import BatchHeader, iter_headers, parse_batch, validate_produced
from raftlog.format.control import Marker, PlacedMarker
from raftlog.format.header import Attributes
from tests.support.batches import batch_of
from tests.support.fresh import examples
from tests.support.log_driver import LOG_DIR, LogDriver, timed_batch
from tests.support.memory_storage import Fault, MemoryStorage, PowerLoss
from tests.support.transactional_log import transactional_batch

NOW = 1_000_000_000


def decode_producers(path: str, data: bytes, limits: ProducerLimits) -> ProducerStates:
    return decode_snapshot(path, data, limits).producers


def header(sequence: int, records: int = 1, *, producer_id: int = 7, epoch: int = 0, offset: int = 0) -> BatchHeader:
    """Return the header of a batch with these numbers."""
    batch = batch_of(b"", producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, base_offset=offset)
    return parse_batch(batch)._replace(record_count=records, last_offset_delta=records - 1)


def states(*batches: tuple[int, int], first: int = 0) -> ProducerStates:
    """Return what is remembered after batches (sequence, records) of producer 7 in epoch 0, from offset `first` on."""
    found = ProducerStates()
    for sequence, records in batches:
        found.note(header(sequence, records, offset=first), NOW)
        first += records
    return found


def in_transaction(sequence: int, records: int = 1, *, epoch: int = 0, offset: int = 0) -> BatchHeader:
    found = header(sequence, records, epoch=epoch, offset=offset)
    return found._replace(attributes=found.attributes | int(Attributes.TRANSACTIONAL))


def ended(found: ProducerStates, epoch: int, offset: int) -> None:
    """Note the marker that begins an epoch of producer 7."""
    found.note_markers([PlacedMarker(offset, Marker(7, epoch, True, 0))], NOW)


@pytest.mark.parametrize("through_a_snapshot", [False, True])
def test_a_session_continues_its_sequence_over_markers(through_a_snapshot: bool) -> None:
    """A batch of an earlier transaction that comes late is no part of the next, and a missing one is missed."""
    found = ProducerStates()
    found.note(in_transaction(0, 10, epoch=3), NOW)
    ended(found, 4, 10)
    ended(found, 5, 11)  # of a transaction without a record here
    if through_a_snapshot:
        found = decode_producers("p", encode_producers(found), ProducerLimits())
    with pytest.raises(DuplicateSequence):
        found.check(in_transaction(0, 10, epoch=5), NOW, 3)
    with pytest.raises(DuplicateSequence):
        found.check(in_transaction(9, 1, epoch=6), NOW, 3)
    with pytest.raises(OutOfOrderSequence):
        found.check(in_transaction(20, 1, epoch=5), NOW, 3)
    for epoch in (5, 6):
        assert found.check(in_transaction(10, 5, epoch=epoch), NOW, 3) is None
    with pytest.raises(OutOfOrderSequence):  # without a session each epoch begins with 0
        found.check(in_transaction(10, 5, epoch=5), NOW)
    found.note(in_transaction(10, 5, epoch=5, offset=12), NOW)
    again = found.check(in_transaction(10, 5, epoch=5), NOW, 3)
    assert again is not None
    assert again.base_offset == 12
    assert found.check(in_transaction(15, 5, epoch=5), NOW, 3) is None


def test_a_session_begins_its_sequence_with_0() -> None:
    found = ProducerStates()
    found.note(in_transaction(0, 10, epoch=3), NOW)
    ended(found, 4, 10)
    assert found.check(in_transaction(0, 10, epoch=4), NOW, 4) is None
    with pytest.raises(OutOfOrderSequence):
        found.check(in_transaction(10, 1, epoch=4), NOW, 4)
    fresh = ProducerStates()
    ended(fresh, 4, 0)
    assert fresh.check(in_transaction(0, 1, epoch=4), NOW, 2) is None
    with pytest.raises(OutOfOrderSequence):  # what the session has written here is not known any more
        found.fences().check(in_transaction(10, 1, epoch=4), NOW, 3)


def test_a_batch_without_a_producer_id_is_always_taken_and_never_noted() -> None:
    known = ProducerStates()
    plain = parse_batch(batch_of(b""))
    assert known.check(plain, NOW) is None
    known.note(plain, NOW)
    assert len(known) == 0


def test_numbers_begin_with_0_and_go_on() -> None:
    known = states((0, 3))
    assert known.check(header(3, 2), NOW) is None
    known.note(header(3, 2, offset=3), NOW)
    assert known.check(header(5), NOW) is None


def test_each_of_the_last_five_is_known_again_with_its_offsets() -> None:
    known = states(*((number * 2, 2) for number in range(7)), first=100)
    for number in range(2, 7):
        assert known.check(header(number * 2, 2), NOW) == Duplicate(100 + number * 2, 101 + number * 2, -1)
    for number in range(2):
        with pytest.raises(DuplicateSequence, match="before sequence 14"):
            known.check(header(number * 2, 2), NOW)


def test_a_log_append_time_is_remembered() -> None:
    known = ProducerStates()
    known.note_appended(header(0), 5, 1_234, NOW)
    assert known.check(header(0), NOW) == Duplicate(5, 5, 1_234)


@pytest.mark.parametrize(("sequence", "records"), [(4, 1), (1, 3), (2, 2), (1 << 30, 1)])
def test_a_gap_or_a_batch_that_is_partly_new_is_out_of_order(sequence: int, records: int) -> None:
    with pytest.raises(OutOfOrderSequence, match="the next one here is 3"):
        states((0, 3)).check(header(sequence, records), NOW)


@pytest.mark.parametrize(("sequence", "records"), [(0, 1), (1, 1), (1, 2), (0, 2)])
def test_a_part_of_what_was_appended_is_no_news(sequence: int, records: int) -> None:
    """A producer has split the batch meanwhile; numbered anew its records would be there twice."""
    with pytest.raises(DuplicateSequence):
        states((0, 3), (3, 1)).check(header(sequence, records), NOW)


def test_epochs_only_rise_and_begin_with_0() -> None:
    known = states((0, 3))
    with pytest.raises(OutOfOrderSequence, match="begins epoch 1"):
        known.check(header(3, epoch=1), NOW)
    assert known.check(header(0, epoch=1), NOW) is None
    known.note(header(0, epoch=1, offset=3), NOW)
    with pytest.raises(InvalidProducerEpoch, match="epoch 1 has written"):
        known.check(header(3), NOW)
    assert known.check(header(1, epoch=1), NOW) is None


def test_a_producer_that_is_not_known_begins_with_0() -> None:
    with pytest.raises(UnknownProducerId, match="producer id 8"):
        states((0, 3)).check(header(3, producer_id=8), NOW)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_sequences_go_on_at_0_after_the_largest(before: int) -> None:
    first = MAX_SEQUENCE - before
    known = states((first - 3, 3), (first, 3))
    assert sequence_after(first, 3) == 2 - before
    assert known.check(header(2 - before), NOW) is None
    assert known.check(header(first, 3), NOW) == Duplicate(3, 5, -1)
    with pytest.raises(OutOfOrderSequence):
        known.check(header(3 - before), NOW)
    with pytest.raises(DuplicateSequence):
        known.check(header(first - 5, 2), NOW)


def test_who_has_been_idle_too_long_is_forgotten() -> None:
    limits = ProducerLimits(expiration_ms=1_000)
    known = ProducerStates(limits)
    known.note(header(0), NOW)
    known.note(header(0, producer_id=8), NOW + 500)
    assert known.expire(NOW + 1_000) == 0
    assert known.expire(NOW + 1_001) == 1
    assert known.get(7) is None
    assert known.get(8) is not None
    known.note(header(1, producer_id=8), NOW)  # the clock was set back
    assert known.expire(NOW + 1_400) == 0


def test_a_producer_of_a_time_when_the_clock_was_ahead_keeps_no_others_from_being_forgotten() -> None:
    """It is first in line, and no other is looked at before it: new producers would be refused for as long."""
    day_ms = 86_400_000
    known = ProducerStates(ProducerLimits(max_ids=3))
    known.note(header(0, producer_id=1), NOW + 365 * day_ms)
    known.note(header(0, producer_id=2), NOW)
    known.note_markers([PlacedMarker(1, Marker(3, 1, True, 1))], NOW + 365 * day_ms)
    while ahead := known.ahead_of(NOW + 1):
        known.set_back(ahead, NOW + 1)
    assert [producer_id for producer_id, _ in known.items()] == [2, 1, 3]
    assert known.newest_append_ms == NOW + 1
    assert known.check(header(0, producer_id=4), NOW + LIVE_MS + 1) is None, "producer 2 must make room"
    assert known.expire(NOW + day_ms + 1) == 1
    assert known.expire(NOW + day_ms + 2) == 2
    assert known == ProducerStates(ProducerLimits(max_ids=3), list(known.freeze().together().items()))


def test_times_that_are_ahead_by_little_stay() -> None:
    """Housekeeping has its time from before it began, and appends go on meanwhile."""
    known = states((0, 3))
    known.note(header(3), NOW + LIVE_MS)
    assert known.ahead_of(NOW) == []
    assert known.ahead_of(NOW - 1) == [7]


def test_over_the_bound_the_longest_idle_go_and_live_ones_never() -> None:
    known = ProducerStates(ProducerLimits(max_ids=2))
    known.note(header(0, producer_id=1), NOW)
    known.note(header(0, producer_id=2), NOW)
    with pytest.raises(BrokerOverloaded, match=r"producer\.ids\.max=2"):
        known.check(header(0, producer_id=3), NOW + LIVE_MS)
    assert known.check(header(1, producer_id=1), NOW + LIVE_MS) is None
    known.note(header(1, producer_id=1), NOW + LIVE_MS)
    assert known.check(header(0, producer_id=3), NOW + LIVE_MS + 1) is None
    known.note(header(0, producer_id=3), NOW + LIVE_MS + 1)
    assert [producer_id for producer_id, _ in known.items()] == [1, 3]


def test_a_log_that_is_read_again_is_believed() -> None:
    """Batches that are read from the log count as they are: the leader that appended them has checked them."""
    known = states((0, 3))
    known.note(header(50, 2, offset=3), NOW)
    assert known.check(header(52), NOW) is None
    assert known.check(header(50, 2), NOW) == Duplicate(3, 4, -1)
    with pytest.raises(DuplicateSequence):
        known.check(header(0, 3), NOW)


def test_what_compaction_has_to_keep() -> None:
    known = states(*((number, 1) for number in range(6)))
    assert [n for n in range(7) if known.remembers(header(n, offset=n))] == [1, 2, 3, 4, 5]
    assert not known.remembers(header(1, offset=1, producer_id=8))
    known.note_markers([PlacedMarker(6, Marker(7, 1, commit=True, coordinator_epoch=1))], NOW)
    assert [n for n in range(7) if known.remembers(header(n, offset=n))] == [5], "the last sequence before the marker"
    assert not known.remembers(header(5, offset=5, epoch=1))
    known.note(header(6, offset=7, epoch=1), NOW)
    assert [n for n in range(7) if known.remembers(header(n, offset=n))] == []
    assert known.remembers(header(6, offset=7, epoch=1))


def test_a_copy_lives_its_own_life() -> None:
    known = states((0, 3))
    copy = known.copy()
    assert copy == known
    known.note(header(3, offset=3), NOW)
    assert copy != known
    assert copy.check(header(3), NOW) is None


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@given(sizes=sizes, first=st.sampled_from([0, MAX_SEQUENCE - 5]), data=st.data())
def test_any_request_is_answered_by_what_is_in_the_log(sizes: list[int], first: int, data: st.DataObject) -> None:
    """The model: the list of all batches appended, from which the answer to any request follows."""
    known, log, sequence, offset = ProducerStates(), [], first, 0
    for size in sizes:
        known.note(header(sequence, size, offset=offset), NOW)
        log.append((sequence, size, offset))
        sequence, offset = sequence_after(sequence, size), offset + size
    ahead = data.draw(st.integers(-offset, 4))
    size = data.draw(st.integers(1, 6))
    asked = header((sequence + ahead) % (MAX_SEQUENCE + 1), size)
    found = [entry for entry in log[-REMEMBERED_BATCHES:] if entry[:2] == (asked.base_sequence, size)]
    try:
        answer: object = known.check(asked, NOW)
    except SequenceError as refusal:
        answer = type(refusal)
    if found:
        assert answer == Duplicate(found[0][2], found[0][2] + size - 1, -1)
    elif ahead == 0:
        assert answer is None
    elif ahead + size <= 0:
        assert answer is DuplicateSequence
    else:
        assert answer is OutOfOrderSequence


@given(
    script=st.lists(
        st.one_of(
            st.integers(0, 11),
            st.sampled_from(["freeze", "merge", "expire"]),
        ),
        max_size=120,
    ),
    large=st.booleans(),
)
@example(script=[0, 1, 1, 1, 1, "freeze", "expire", 1, 0, "freeze"], large=False)
def test_what_was_frozen_stays_as_it_was(script: list[int | str], large: bool) -> None:
    """Snapshots may be frozen and merged at any time without a change in what is remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer_state, "SMALL_LAYER", 1_000 if large else 2)
        known = ProducerStates(ProducerLimits(expiration_ms=5, max_ids=8))
        plain: dict[int, int] = {}
        taken: list[tuple[FrozenProducers, list[int]]] = []
        for now_ms, step in enumerate(script):
            if isinstance(step, int):
                known.note_appended(header(plain.pop(step, -1) + 1, producer_id=step), now_ms, -1, now_ms)
                state = known.get(step)
                assert state is not None
                plain[step] = state.next_sequence - 1
                if len(plain) > 8:
                    del plain[next(iter(plain))]
            elif step == "freeze":
                taken.append((known.freeze(), list(plain)))
            elif step == "expire":
                known.expire(now_ms, 2)
                plain = {number: last for number, last in plain.items() if known.get(number) is not None}
            elif taken:
                frozen, _ = taken[len(script) % len(taken)]
                known.replace_layers(frozen, frozen.together())
            assert [number for number, _ in known.items()] == list(plain)
            for frozen, expected in taken:
                assert list(frozen.together()) == expected
        assert known.freeze().together() == dict(known.items())
        for frozen, _ in taken:
            frozen.release()
            assert frozen.together() == {}


def test_taking_what_is_remembered_looks_at_none_of_it() -> None:
    """It runs on the event loop, at every roll."""

    class Unread(dict[int, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("a copy of the producer state must not walk its entries")

        keys = items = values = copy = __iter__

    state = ProducerState(0, 5, (RememberedBatch(0, 0, 0, 0, -1),))
    known = ProducerStates(None, dict.fromkeys(range(2_000), state).items())
    known._recent = Unread(known._recent)
    frozen = known.freeze()
    known.note_appended(header(0, producer_id=1), 7, -1, 9)
    assert frozen.layers[0][1] == state
    for _ in range(producer_state.MAX_LAYERS - 1):
        assert known.may_freeze
        known._recent = Unread(dict.fromkeys(range(2_000)))
        known.freeze()
    assert not known.may_freeze


def test_the_newest_append_is_the_last() -> None:
    known = ProducerStates()
    assert known.newest_append_ms == 0
    for now_ms, producer_id in enumerate((1, 2, 1)):
        known.note_appended(header(0, producer_id=producer_id), 7, -1, now_ms)
    assert known.newest_append_ms == 2


CONFIG = LogConfig(segment_bytes=1_100, index_interval_bytes=100, file_delete_delay_ms=10)
DIRECTORY = f"{LOG_DIR}/topic-0"
BATCHES = (
    RememberedBatch(MAX_SEQUENCE - 1, 2, 90, 94, 1_700),
    RememberedBatch(3, 3, 95, 95, -1),
)
PRODUCERS = [(12, ProducerState(3, 1_600, BATCHES[:1])), (5, ProducerState(0, 1_700, BATCHES))]


def snapshots(driver: LogDriver) -> list[int]:
    return snapshot_offsets(driver.storage.list_sizes(DIRECTORY))


def lived(batches: int = 30) -> LogDriver:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(batches):
        driver.append(value_bytes=100)
        driver.flush()
    return driver


def test_a_snapshot_is_what_it_was_made_of() -> None:
    producers = ProducerStates(None, PRODUCERS)
    data = encode_producers(producers)
    assert data.startswith(b"producers 1\n2 ")
    assert b"\n12 3 1600 2147483646 2 90 1700\n5 0 1700 2147483646 2 90 1700 3 3 95 -1\n" in data
    assert decode_producers("p", data, ProducerLimits()) == producers
    assert decode_producers("p", encode_producers(ProducerStates()), ProducerLimits()) == ProducerStates()


def test_the_example_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parents[4] / "docs" / "format.md").read_text()
    lines = [line.removeprefix("    ") for line in page.splitlines()]
    start = lines.index("producers 1")
    example = "".join(line + "\n" for line in lines[start : start + 3]).encode()
    batches = (RememberedBatch(15, 24, 912, 921, -1), RememberedBatch(25, 25, 922, 922, -1))
    expected = ProducerStates(None, [(4_000, ProducerState(2, 1_700_000_000_000, batches))])
    assert decode_producers("p", example, ProducerLimits()) == expected
    assert encode_producers(expected) == example
    start = lines.index("producers 2")
    example = "".join(line + "\n" for line in lines[start : start + 6]).encode()
    opened = ProducerState(2, 1_700_000_000_000, (RememberedBatch(0, 24, 912, 936, -1),), 912, 1_700_000_000_000)
    expected = ProducerStates(None, [(4_000, opened)], [Undecided(910, 880)])
    assert encode_producers(expected, [Undecided(910, 880)], [AbortedTransaction(5_000, 902, 911, 912)]) == example


def test_with_transactions_it_is_of_another_version() -> None:
    marked = ProducerState(7, 1_650, ())
    opened = ProducerState(3, 1_600, BATCHES[:1], 88, 1_500)
    undecided, aborted = (Undecided(91, 80),), (AbortedTransaction(5, 70, 89, 88), AbortedTransaction(4, 71, 90, 80))
    data = encode_producers(ProducerStates(None, [(12, opened), (5, marked)]), undecided, aborted)
    assert data.startswith(b"producers 2\n6 ")
    assert decode_snapshot("p", data, ProducerLimits()) == Snapshot(
        ProducerStates(None, [(12, opened), (5, marked)]), aborted
    )
    read = decode_producers("p", data, ProducerLimits())
    assert read.transactions.undecided == undecided
    assert read.transactions.get(12) == OpenTransaction(3, 88, 1_500)
    assert len(read.transactions) == 1


def test_how_an_epoch_began_is_kept_and_old_files_do_not_know() -> None:
    states = [
        (12, ProducerState(7, 1_650, (), decision=True)),
        (5, ProducerState(7, 1_650, BATCHES[:1], decision=False)),
        (6, ProducerState(7, 1_650, (), decision=False)),
        (7, ProducerState(7, 1_650, ())),
    ]
    data = encode_producers(ProducerStates(None, states))
    assert b"\ndecided 0 5 6\ndecided 1 12\n" in data
    assert decode_producers("p", data, ProducerLimits()) == ProducerStates(None, states)
    old = encode_lines("producers", ["12 7 1650"], 2)
    assert decode_producers("p", old, ProducerLimits()).get(12) == ProducerState(7, 1_650, ())


def test_with_a_smaller_bound_open_transactions_stay_as_well() -> None:
    opened = ProducerState(3, 1_600, BATCHES[:1], 88, 1_500)
    states = [(1, PRODUCERS[0][1]), (2, opened), (3, PRODUCERS[0][1]), (4, PRODUCERS[1][1])]
    read = decode_producers("p", encode_producers(ProducerStates(None, states)), ProducerLimits(max_ids=1))
    assert [producer_id for producer_id, _ in read.items()] == [2, 4]


@pytest.mark.parametrize(
    "lines",
    [
        ["open 5 1 2"],
        ["open 12 1", "12 3 1600"],
        ["undecided 1 2 3"],
        ["decided 2 12", "12 3 1600"],
        ["decided 1", "12 3 1600"],
        ["aborted 1 2 3"],
        ["torn 1"],
        ["12 3 1600 1"],
    ],
)
def test_lines_that_make_no_sense_are_damage(lines: list[str]) -> None:
    with pytest.raises(CorruptRecordError):
        decode_producers("p", encode_lines("producers", lines, 2), ProducerLimits())


def test_with_a_smaller_bound_those_that_wrote_last_stay() -> None:
    data = encode_producers(ProducerStates(None, PRODUCERS))
    assert [producer_id for producer_id, _ in decode_producers("p", data, ProducerLimits(max_ids=1)).items()] == [5]


def test_any_flipped_bit_is_damage() -> None:
    data = encode_producers(ProducerStates(None, PRODUCERS))
    for position in range(len(data)):
        for bit in range(8):
            torn = bytearray(data)
            torn[position] ^= 1 << bit
            with pytest.raises((CorruptRecordError, UnsupportedVersion)):
                decode_producers("p", bytes(torn), ProducerLimits())
    for length in range(len(data)):
        with pytest.raises((CorruptRecordError, UnsupportedVersion)):
            decode_producers("p", data[:length], ProducerLimits())


def test_names_have_twenty_digits() -> None:
    assert snapshot_name(42) == "00000000000000000042.snapshot"
    assert snapshot_offsets([snapshot_name(42), snapshot_name(7), "1.snapshot", snapshot_name(3) + ".tmp"]) == [7, 42]


def test_one_at_every_roll_and_one_at_the_end_and_few_are_kept() -> None:
    driver = lived()
    bases = [segment.base_offset for segment in driver.log.segments]
    assert len(bases) > 4
    assert snapshots(driver) == bases[-2:]
    driver.close()
    assert snapshots(driver) == [bases[-1], driver.end]
    driver.open()
    driver.check()
    driver.close()  # nothing is new
    assert snapshots(driver) == [bases[-1], driver.end]


def test_clean_restarts_leave_few() -> None:
    driver = LogDriver()
    for restarts in range(8):
        driver.open()
        driver.check()
        driver.checkpoint()
        assert len(snapshots(driver)) <= 3
        driver.append()
        driver.close()
        assert snapshots(driver)[-1] == restarts + 1, "the stop must write a snapshot"
    driver.crash(Random(0))
    assert driver.end == 8


@pytest.mark.parametrize("seed", range(10))
def test_of_the_snapshots_of_clean_stops_a_usable_one_survives_a_power_loss(seed: int) -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=6_000))
    driver.open()
    for _ in range(9):
        driver.append(value_bytes=2_500)
    driver.flush()
    driver.delete_records(driver.log.segments[-1].base_offset)
    driver.checkpoint()  # the other segments are gone, so only snapshots know of their producers
    for _ in range(5):
        driver.append(value_bytes=0)
        driver.close()
        driver.open()
        driver.log.high_watermark = driver.end
    driver.checkpoint()
    assert len(snapshots(driver)) <= 3
    driver.crash(Random(seed))


def test_one_after_so_many_bytes() -> None:
    driver = lived(1)
    driver.log._snapshot_bytes = SNAPSHOT_INTERVAL_BYTES
    driver.append()
    driver.flush()
    assert snapshots(driver) == [2]


def test_one_that_no_truncation_reaches_is_kept() -> None:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(9):
        driver.append(value_bytes=100)
    driver.flush()
    committed = driver.log.high_watermark
    for _ in range(20):
        driver.append(value_bytes=100)
        driver.log.flush()
    assert [offset <= committed for offset in snapshots(driver)] == [True, False, False]
    driver.durable_end = committed
    driver.truncate(committed)
    driver.check()


@pytest.mark.parametrize("harm", ["removed", "torn", "altered", "emptied"])
def test_without_usable_snapshots_the_log_says_the_same(harm: str) -> None:
    driver = lived()
    expected = driver.log.producers.copy()
    driver.close()
    for offset in snapshots(driver):
        path = f"{DIRECTORY}/{snapshot_name(offset)}"
        file = driver.storage.open(path)
        match harm:
            case "removed":
                driver.storage.remove(path)
            case "torn":
                file.truncate(file.size() - 3)
            case "altered":
                file.write((b"9",), 20)
            case "emptied":
                file.truncate(0)
    driver.open()
    assert driver.log.producers == expected
    driver.check()


def test_a_snapshot_beyond_the_end_is_removed_before_the_log_grows_over_it() -> None:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(20):
        driver.append(value_bytes=100)
    ahead = driver.log.segments[-1].base_offset
    driver.log.store_producers()  # written and durable, though the log is not
    assert snapshots(driver) == [ahead]
    driver.crash(Random(1))
    assert driver.end < ahead
    assert snapshots(driver) == []
    for seed in range(5):
        driver.append(value_bytes=100)
        driver.crash(Random(seed))


def test_retention_takes_records_and_not_what_is_known_of_their_producers() -> None:
    """KIP-360: "producer state ... retained" though the log has none of its records any more."""
    driver = lived()
    expected = driver.log.producers.copy()
    driver.log.roll()
    driver.delete_records(driver.end)
    driver.checkpoint()
    driver.clock.now += CONFIG.file_delete_delay_ms + 1
    driver.checkpoint()
    assert driver.log.segment_count == 1
    driver.check()
    driver.crash(None)
    assert driver.log.producers == expected
    driver.crash(Random(3))
    assert driver.log.producers == expected


def test_idle_producers_are_forgotten_by_housekeeping() -> None:
    driver = lived(3)
    assert len(driver.log.producers) == 2
    driver.clock.now += ProducerLimits().expiration_ms + 1
    driver.checkpoint()
    assert len(driver.log.producers) == 0


def test_housekeeping_forgets_idle_producers_after_the_clock_was_set_back() -> None:
    """What the log remembers of them says so after a restart, too."""
    driver = lived(3)
    driver.clock.now -= 365 * 86_400_000
    driver.checkpoint()
    driver.close()
    driver.open()
    driver.clock.now += ProducerLimits().expiration_ms
    driver.checkpoint()
    assert len(driver.log.producers) == 2
    driver.clock.now += 1
    driver.checkpoint()
    assert len(driver.log.producers) == 0


def test_what_retention_removes_is_known_after_what_was_not_committed_is_cut() -> None:
    """The snapshot of the last roll lies above the high watermark, and goes with the truncation."""
    driver = LogDriver(
        MemoryStorage(), LogConfig(segment_bytes=600, index_interval_bytes=0, retention_bytes=1_000, retention_ms=None)
    )
    driver.open()
    driver.append([0, 1], 0)
    driver.append([0, 1], 0)
    driver.flush()
    committed = driver.end
    for _ in range(8):
        driver.append([0, 1], 0)
    driver.checkpoint()
    assert driver.log.log_start_offset == committed, "the log must begin where the committed records end"
    assert min(snapshots(driver)) == committed
    driver.truncate(committed)
    driver.check()


def many(ids: int) -> ProducerStates:
    state = ProducerState(0, 1_000, (RememberedBatch(0, 0, 0, 0, -1),))
    return ProducerStates(None, dict.fromkeys(range(ids), state).items())


class WatchedLock:
    """A log's lock that records which producers were forgotten while it was held."""

    def __init__(self, driver: LogDriver) -> None:
        self.driver = driver
        self.lock = driver.log._lock
        self.forgotten: list[int] = []
        self.before = 0

    def __enter__(self) -> None:
        self.lock.acquire()
        self.before = len(self.driver.log.producers)

    def __exit__(self, *error: object) -> None:
        self.forgotten.append(self.before - len(self.driver.log.producers))
        self.lock.release()


def test_many_idle_producers_are_forgotten_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waits for the lock meanwhile."""
    driver = lived(0)
    driver.log.producers = many(2_500)
    lock = WatchedLock(driver)
    monkeypatch.setattr(driver.log, "_lock", lock)
    assert driver.log.expire_producers(1_001 + ProducerLimits().expiration_ms) == 2_500
    assert lock.forgotten == [1_000, 1_000, 500]


def test_while_a_snapshot_is_encoded_the_log_is_appended_to_flushed_and_rolled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread does so, which must not wait; and the snapshot is of the roll that it was taken at."""
    driver = lived(3)
    log = driver.log
    log.roll()
    offset, expected = driver.end, list(log.producers.items())

    def encode(producers: Any, *transactions: Any) -> bytes:
        monkeypatch.setattr(partition_log, "encode_producers", encode_producers)
        with ThreadPoolExecutor(1) as other:
            for step in (driver.append, lambda: other_flush(driver), log.roll, driver.append):
                other.submit(step).result(60)
        assert list(log.producers.items()) != expected
        return encode_producers(producers, *transactions)

    monkeypatch.setattr(partition_log, "encode_producers", encode)
    log.store_producers()
    data = read_file(driver.storage, f"{DIRECTORY}/{snapshot_name(offset)}")
    assert data is not None
    assert list(decode_producers("p", data, ProducerLimits()).items()) == expected
    driver.flush()
    assert snapshots(driver)[-1] > offset
    driver.check()
    driver.crash(None)
    driver.check()


def other_flush(driver: LogDriver) -> None:
    ticket = driver.log.begin_flush()
    assert ticket is not None
    ticket.run()
    driver.log.finish_flush(ticket)


def test_a_snapshot_that_a_truncation_overtakes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    driver.append()
    driver.flush()
    for _ in range(3):
        driver.append()
    driver.log.roll()

    def encode(producers: Any, *transactions: Any) -> bytes:
        driver.truncate(1)
        return encode_producers(producers, *transactions)

    monkeypatch.setattr(partition_log, "encode_producers", encode)
    driver.log.store_producers()
    assert snapshots(driver) == []
    driver.check()


def test_acks_do_not_wait_for_a_snapshot() -> None:
    """Callers that wait for a flush are answered first; a bug in the work after it does not affect them."""

    class OneAtATime(Executor):
        def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Any:
            asyncio.get_running_loop().call_soon(work, *arguments)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        driver.append()
        driver.log.roll()
        happened: list[str] = []
        commit = GroupCommit(OneAtATime())

        def store(*, closing: bool = False) -> None:
            loop.call_soon(happened.append, "stored")
            raise KeyError("a bug")

        driver.log.store_producers = store  # type: ignore[method-assign]
        commit.request(driver.log, lambda end: happened.append("held"), lambda error: happened.append(repr(error)))
        await commit.close()
        await asyncio.sleep(0)
        assert happened == ["held", "stored"]

    driver = lived(0)
    asyncio.run(scenario())


def test_what_segments_say_is_written_while_producers_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop notes producers in the midst of it."""
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(20):
        driver.append(value_bytes=100)
    driver.flush()
    log = driver.log
    for offset in list(log._snapshots.offsets):
        driver.storage.remove(f"{DIRECTORY}/{snapshot_name(offset)}")
    log._snapshots.offsets, log._snapshots.newest_durable = [], log.log_end_offset
    driver.delete_records(log.segments[2].base_offset)
    get, ids = ProducerState.__getattribute__, count(1_000)

    class Appending(ProducerState):
        """A state that is looked at while its log is appended to."""

        def __getattribute__(self, name: str) -> Any:
            if name == "last_append_ms" and not log._lock._is_owned():  # type: ignore[attr-defined]
                batch = batch_of(b"", producer_id=next(ids), producer_epoch=0, base_sequence=0)
                log.producers.note(parse_batch(batch), 5)
            return get(self, name)

    log.producers = ProducerStates(None, ((number, Appending(*state)) for number, state in log.producers.items()))
    log.store_producers()
    assert len(snapshots(driver)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_a_clean_stop_writes_survives_a_power_loss_where_nothing_else_is_left(seed: int) -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=600))
    driver.open()
    for _ in range(6):
        driver.append([0], 0)
    driver.crash(None)  # what was due at the rolls is forgotten
    driver.flush()
    driver.delete_records(driver.end)
    driver.close()
    driver.crash(None)
    driver.check()
    driver.crash(Random(seed))
    driver.check()


GAPS_CONFIG = LogConfig(segment_bytes=600, index_interval_bytes=0, retention_bytes=1_000, retention_ms=None)


def opened() -> LogDriver:
    driver = LogDriver(MemoryStorage(), GAPS_CONFIG)
    driver.open()
    return driver


def produce(driver: LogDriver, epoch: int, sequence: int, *, transactional: bool = False) -> None:
    """Append a batch of producer 5, as its leader."""
    numbers = (5, epoch, sequence)
    batch = transactional_batch([(None, b"x")], 1, numbers) if transactional else _batch(*numbers)
    header = validate_produced(batch)
    assert driver.log.check_producer(header, driver.clock.now) is None
    driver.log.append(batch, header, leader_epoch=1, now_ms=driver.clock.now)


def _batch(producer_id: int, epoch: int, sequence: int) -> bytes:
    return timed_batch([1], 0, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)


def end(driver: LogDriver, epoch: int, *, commit: bool) -> None:
    driver.log.append_markers([Marker(5, epoch, commit, 1)], leader_epoch=1, now_ms=driver.clock.now)


def settle(driver: LogDriver) -> None:
    """Roll, and let everything be committed and written that is to be."""
    driver.log.roll()
    driver.log.high_watermark = driver.log.flush()


def test_a_snapshot_from_before_a_gap_says_nothing_of_batches() -> None:
    """A committed record was cut, and with it the snapshot that had what retention took; the one before is too old."""
    driver = opened()
    for _ in range(2):
        driver.append([0], 0)
    driver.log.roll()
    driver.flush()
    for _ in range(3):
        driver.append([0], 900)
    driver.log.roll()
    driver.flush()
    driver.checkpoint()
    driver.truncate(4)
    assert snapshots(driver) == [2]
    assert [segment.base_offset for segment in driver.log.segments] == [4], (
        "the segment that knew of offset 3 must be gone"
    )
    fence = ProducerState(0, driver.clock.now, ())
    assert list(driver.log.producers.items()) == [(7, fence), (9, fence)]
    driver.check()
    driver.crash(None)
    assert list(driver.log.producers.items()) == [(7, fence), (9, fence)]
    driver.check()
    driver.append([0], 0)
    driver.flush()
    driver.crash(Random(1))
    driver.check()


def restarted_behind_a_gap(*, transactional: bool, goes_on: bool = False) -> LogDriver:
    """Return a log of producer 5 that knows what it had written up to sequence 1 of epoch 3, and not what came next.

    `goes_on`: sequence 3 is in the log again; else a transaction has ended in the gap.
    """
    driver = opened()
    produce(driver, 2, 0)
    for sequence in (0, 1):
        produce(driver, 3, sequence, transactional=transactional)
    settle(driver)
    fault = Fault("write", "*.snapshot*", errno.ENOSPC)
    driver.storage.faults.append(fault)
    produce(driver, 3, 2, transactional=transactional)
    if transactional and not goes_on:
        end(driver, 4, commit=True)
    settle(driver)
    gap_end = driver.log.log_end_offset
    if goes_on:
        produce(driver, 3, 3, transactional=transactional)
        settle(driver)
    driver.log.delete_records(gap_end)
    assert driver.manager is not None
    driver.manager.run_housekeeping_once(driver.clock.now)
    driver.storage.crash(None)
    driver.storage.faults.remove(fault)
    driver.open()
    assert snapshots(driver) == [3]
    assert driver.log.segments[0].base_offset == gap_end > 3
    driver.log.high_watermark = driver.log.log_end_offset
    return driver


def test_behind_a_gap_whoever_was_fenced_is_fenced_and_numbers_are_not_known() -> None:
    driver = restarted_behind_a_gap(transactional=False)
    with pytest.raises(InvalidProducerEpoch):
        produce(driver, 2, 1)
    with pytest.raises(OutOfOrderSequence):
        produce(driver, 3, 2)  # the log had it
    produce(driver, 4, 0)
    produce(driver, 4, 1)


def test_behind_a_gap_numbers_go_on_where_the_log_does() -> None:
    driver = restarted_behind_a_gap(transactional=False, goes_on=True)
    (batch,) = driver.log.producers_now()[0][1].batches
    assert batch == RememberedBatch(3, 3, 4, 4, -1)
    produce(driver, 3, 4)


def test_a_transaction_that_may_have_ended_in_a_gap_holds_nobody_back() -> None:
    driver = restarted_behind_a_gap(transactional=True)
    assert not driver.log.producers.transactions.holds_back
    assert driver.log.producers.get(5) == ProducerState(3, driver.clock.now, ())
    with pytest.raises(InvalidProducerEpoch):
        produce(driver, 2, 0, transactional=True)
    end(driver, 4, commit=True)
    settle(driver)
    assert driver.log.last_stable_offset == driver.log.log_end_offset


def test_a_transaction_that_goes_on_behind_a_gap_is_open_from_there() -> None:
    driver = restarted_behind_a_gap(transactional=True, goes_on=True)
    assert dict(driver.log.producers.transactions.items())[5].first_offset == 4
    assert driver.log.last_stable_offset == 4
    end(driver, 4, commit=False)
    settle(driver)
    assert driver.log.last_stable_offset == driver.log.log_end_offset == 6
    (aborted,) = driver.log.aborted_transactions(4, 6)
    assert aborted[:3] == (5, 4, 5)


def test_fences_are_all_that_holds_whatever_comes() -> None:
    batches = (RememberedBatch(0, 0, 7, 7, -1),)
    states = ProducerStates(
        None,
        [
            (1, ProducerState(4, 100, (), decision=True)),
            (2, ProducerState(2, 200, batches, 7, 150)),
            (3, ProducerState(0, 300, batches, decision=False)),
        ],
        [Undecided(8, 6)],
    )
    fences = states.fences()
    assert list(fences.items()) == [
        (1, ProducerState(4, 100, (), decision=True)),
        (2, ProducerState(2, 200, ())),
        (3, ProducerState(0, 300, (), decision=False)),
    ]
    assert not fences.transactions.holds_back
    assert fences.expire(400 + fences.limits.expiration_ms) == 3, "producers whose markers are not awaited must expire"
    assert len(states) == 3


def test_what_retention_took_while_there_was_no_room_for_a_snapshot_is_written_as_soon_as_there_is() -> None:
    driver = opened()
    for _ in range(6):
        driver.append([0], 0)
    driver.log.roll()
    fault = Fault("write", "*.snapshot*", errno.ENOSPC)
    driver.storage.faults.append(fault)
    driver.flush()
    driver.delete_records(driver.end)
    driver.checkpoint()
    assert snapshots(driver) == []
    assert driver.log.segment_count == 1
    driver.storage.faults.remove(fault)
    driver.checkpoint()
    driver.crash(Random(1))
    assert len(driver.log.producers) == 2
    driver.check()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_log_that_starts_over_forgets_its_producers_wherever_it_is_stopped(seed: int | None) -> None:
    """A copy is made anew when what is known here may be wrong (`MarkerMissing`), so nothing of it may come back."""

    def live(driver: LogDriver) -> None:
        driver.open()
        for _ in range(6):
            driver.append([0], 0)
        driver.log.roll()
        driver.flush()
        driver.delete_records(driver.end)
        driver.checkpoint()
        driver.append([0], 0)
        driver.flush()
        begun.append(driver.storage.operations)
        driver.start_over(20)

    begun: list[int] = []
    whole = LogDriver(MemoryStorage(), GAPS_CONFIG)
    live(whole)
    assert whole.storage.operations > begun[0] + 5
    for crash_at in range(begun[0], whole.storage.operations):
        driver = LogDriver(MemoryStorage(crash_at=crash_at), GAPS_CONFIG)
        with pytest.raises(PowerLoss):
            live(driver)
        driver.crash(None if seed is None else Random(seed))
        if driver.log.log_start_offset == driver.log.log_end_offset:
            assert not driver.log.producers, crash_at


HISTORIES_CONFIG = LogConfig(segment_bytes=1_500, index_interval_bytes=300, file_delete_delay_ms=10)
PRODUCER_ID = 4


class History:
    """A log with batches of one record, numbered from 0; `committed` of them are never cut."""

    def __init__(self) -> None:
        self.driver = LogDriver(MemoryStorage(), HISTORIES_CONFIG)
        self.driver.open()
        self.appended = 0
        self.committed = 0
        self.lost = False

    def send(self, behind: int) -> None:
        """Send the next batch, or one of those before it, or one that leaves a gap."""
        log, number = self.driver.log, max(0, self.appended - behind)
        batch = timed_batch([number + 1], 100, number, producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=number)
        header = validate_produced(batch)
        try:
            answer: Duplicate | type[SequenceError] | None = log.check_producer(header, self.driver.clock.now)
        except SequenceError as refusal:
            answer = type(refusal)
        if self.lost and number and log.producers.get(PRODUCER_ID) is None:
            assert answer is UnknownProducerId
        elif number == self.appended:
            assert answer is None
            log.append(batch, header, leader_epoch=self.driver.epoch, now_ms=self.driver.clock.now)
            self.appended += 1
        elif number > self.appended:
            assert answer is (OutOfOrderSequence if self.appended else UnknownProducerId)
        elif isinstance(answer, Duplicate):
            assert answer == Duplicate(number, number, -1)
        else:
            assert answer is DuplicateSequence
            assert behind > 5 or self.lost, (
                "a batch among the last five of its producer must be recognised with its offset"
            )

    def flush(self) -> None:
        """All of it is committed."""
        self.committed = self.driver.log.high_watermark = self.driver.log.flush()

    def cut(self, keep: int) -> None:
        """Another leader has less; of what is committed nothing goes."""
        end = max(self.committed, self.appended - keep)
        self.driver.log.truncate_to(end, now_ms=self.driver.clock.now)
        self.driver.epoch += 1
        self.appended = end

    def trim(self) -> None:
        """Retention takes all that it may."""
        driver = self.driver
        driver.log.delete_records(self.committed)
        assert driver.manager is not None
        for _ in range(2):
            driver.manager.run_housekeeping_once(driver.clock.now)
            driver.clock.now += HISTORIES_CONFIG.file_delete_delay_ms + 1

    def restart(self, how: int) -> None:
        """Stop cleanly (0), by kill -9 (1) or loss of power, and start again."""
        driver = self.driver
        assert driver.manager is not None
        if how == 0:
            driver.manager.close()
            driver.open()
        else:
            driver.storage.crash(None if how == 1 else Random(how))
            driver.open()
        assert driver.log.log_end_offset >= self.committed
        self.appended = driver.log.log_end_offset
        driver.log.high_watermark = self.committed
        driver.epoch = max(driver.epoch, driver.log.leader_epochs.latest_epoch)

    def expire(self) -> None:
        """No write for a day."""
        self.driver.clock.now += ProducerLimits().expiration_ms + 1
        self.driver.log.expire_producers(self.driver.clock.now)
        self.lost = True

    def check(self) -> None:
        """The log has every number once, in order."""
        log = self.driver.log
        offset = log.log_start_offset
        while offset < self.appended:
            read = log.read(offset, 10_000, self.appended, blocking=True)
            assert read is not None
            for _, header in iter_headers(read.records):
                assert header.base_sequence == header.base_offset
            offset = read.next_offset


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(-2, 8)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("cut"), st.integers(1, 12)),
        st.tuples(st.just("trim"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 5)),
    ),
    max_size=60,
)


def play(history: History, script: list[tuple[str, int]]) -> None:
    for name, number in script:
        match name:
            case "send":
                history.send(number)
            case "flush":
                history.flush()
            case "cut":
                history.cut(number)
            case "trim":
                history.trim()
            case "restart":
                history.restart(number)
    history.check()


@settings(max_examples=examples(1.5), deadline=None)
@given(steps)
def test_every_batch_is_there_once_and_in_order(script: list[tuple[str, int]]) -> None:
    play(History(), script)


@settings(max_examples=examples(0.5), deadline=None)
@given(steps)
def test_who_was_forgotten_is_not_taken_for_new(script: list[tuple[str, int]]) -> None:
    """But begins anew with 0: of a day ago nothing is in doubt."""
    history = History()
    for _ in range(7):
        history.send(0)
    history.flush()
    history.expire()
    for number in (0, 3, -1):
        history.send(number)
    assert history.appended == 7
    play(history, [step for step in script if step[0] != "send"])


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 500))
def test_the_limit_on_each_count_keeps_their_sum_within_the_whole(counts: list[int], most: int) -> None:
    each = most_of_each(counts, most)
    total = sum(min(count, each) for count in counts)
    assert total <= most
    if sum(counts) > most:
        assert total + sum(count > each for count in counts) > most, "one more for each would be too many"
    else:
        assert total == sum(counts)


def test_idle_producers_are_forgotten_down_to_a_number_the_longest_idle_first() -> None:
    found = ProducerStates()
    for number in range(10):
        found.note(header(0, producer_id=number, offset=number), NOW + number)
    later = NOW + LIVE_MS
    assert found.forget_idle(4, later, 100) == 0, "any of them may send its last batch again"
    assert found.forget_idle(4, later + 5, 3) == 3
    assert found.forget_idle(4, later + 5, 100) == 2, "the others are live"
    assert found.forget_idle(4, later + 100, 100) == 1
    assert [producer_id for producer_id, _ in found.items()] == [6, 7, 8, 9]


def test_what_a_marker_alone_has_left_is_forgotten_soon_and_a_sequence_before_it_is_not() -> None:
    found = ProducerStates()
    found.note_markers([PlacedMarker(0, Marker(1, 5, True, 0))], NOW)
    found.note(in_transaction(0, 10, epoch=3), NOW)
    ended(found, 4, 10)
    assert found.forget_idle(0, NOW + FENCE_MS, 100) == 0
    assert found.forget_idle(0, NOW + FENCE_MS + 1, 100) == 1
    assert found.get(7) is not None
    assert found.forget_idle(0, NOW + LIVE_MS + 1, 100) == 1


def test_a_producer_with_an_open_transaction_is_never_forgotten() -> None:
    found = ProducerStates()
    found.note(in_transaction(0), NOW)
    assert found.forget_idle(0, NOW + 10 * LIVE_MS, 100) == 0
