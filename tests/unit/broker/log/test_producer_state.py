"""What a log remembers of its producers: which batch is taken, known again, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.log import producer_table
from broker.log.producer_state import (
    LIVE_MS,
    MAX_SEQUENCE,
    REMEMBERED_BATCHES,
    Duplicate,
    FrozenProducers,
    ProducerLimits,
    ProducerState,
    ProducerStates,
    RememberedBatch,
    sequence_after,
)
from raftlog.errors import (
    BrokerOverloaded,
    DuplicateSequence,
    InvalidProducerEpoch,
    OutOfOrderSequence,
    SequenceError,
    UnknownProducerId,
)
from raftlog.format import BatchHeader, parse_batch
from tests.support.batches import batch_of

NOW = 1_000_000_000


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
    """Whatever it says was appended by a leader that knew what it did."""
    known = states((0, 3))
    known.note(header(50, 2, offset=3), NOW)
    assert known.check(header(52), NOW) is None
    assert known.check(header(50, 2), NOW) == Duplicate(3, 4, -1)
    with pytest.raises(DuplicateSequence):
        known.check(header(0, 3), NOW)


def test_what_compaction_has_to_keep() -> None:
    known = states(*((number, 1) for number in range(6)))
    assert [offset for offset in range(7) if known.remembers(7, offset)] == [1, 2, 3, 4, 5]
    assert not known.remembers(8, 1)


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
    """Whatever is noted, forgotten, frozen and merged later; and nothing of that shows in what is remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer_table, "SMALL_LAYER", 1_000 if large else 2)
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
            raise AssertionError("read")

        keys = items = values = copy = __iter__

    state = ProducerState(0, 5, (RememberedBatch(0, 0, 0, 0, -1),))
    known = ProducerStates(None, dict.fromkeys(range(2_000), state).items())
    known._recent = Unread(known._recent)
    frozen = known.freeze()
    known.note_appended(header(0, producer_id=1), 7, -1, 9)
    assert frozen.layers[0][1] == state
    for _ in range(producer_table.MAX_LAYERS - 1):
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
