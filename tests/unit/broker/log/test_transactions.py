"""Open transactions and the last stable offset; without a disk."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.log.producer_state import FENCE_MS, LIVE_MS, Duplicate, ProducerLimits, ProducerStates
from broker.log.transactions import AbortedTransaction, MarkerFate, OpenTransaction, OpenTransactions, Undecided
from raftlog.errors import (
    BrokerOverloaded,
    InvalidProducerEpoch,
    InvalidTxnState,
    OutOfOrderSequence,
    RaftlogError,
    UnknownProducerId,
)
from raftlog.format import Attributes, BatchHeader, parse_batch
from raftlog.format.control import Marker, PlacedMarker
from tests.support.batches import batch_of
from tests.support.fresh import examples
from tests.support.transaction_histories import CONFIG, TransactionHistory

NOW = 1_700_000_000_000
TRANSACTIONAL = int(Attributes.TRANSACTIONAL)


def header(
    sequence: int, *, epoch: int = 0, producer_id: int = 1, offset: int = 0, transactional: bool = True
) -> BatchHeader:
    """One record of a producer."""
    return parse_batch(
        batch_of(
            b"v",
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            base_offset=offset,
            attributes=TRANSACTIONAL if transactional else 0,
        )
    )


def marked(
    states: ProducerStates,
    epoch: int,
    offset: int,
    *,
    commit: bool = True,
    producer_id: int = 1,
    first_offset: int = -1,
) -> list[AbortedTransaction]:
    """Note a marker."""
    return states.note_markers([PlacedMarker(offset, Marker(producer_id, epoch, commit, 0, first_offset))], NOW)


def opened(limits: ProducerLimits | None = None) -> ProducerStates:
    """Producer 1 with a transaction of epoch 4 open since offset 10, two records long."""
    states = ProducerStates(limits)
    states.note(header(0, epoch=4, offset=10), NOW)
    states.note(header(1, epoch=4, offset=11), NOW + 5)
    return states


# The table of transactions.py


def test_the_first_transactional_batch_opens_a_transaction() -> None:
    states = opened()
    assert states.transactions.get(1) == OpenTransaction(4, 10, NOW)
    state = states.get(1)
    assert state is not None
    assert (state.first_offset, state.started_ms) == (10, NOW)
    states.note(header(0, producer_id=2, offset=12, transactional=False), NOW)
    assert 2 not in states.transactions


def test_a_transaction_goes_on_by_its_sequences() -> None:
    states = opened()
    assert states.check(header(2, epoch=4), NOW) is None
    assert states.check(header(0, epoch=4), NOW) == Duplicate(10, 10, -1)
    with pytest.raises(OutOfOrderSequence):
        states.check(header(3, epoch=4), NOW)


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (header(0, epoch=3), InvalidProducerEpoch),
        (header(0, epoch=5), InvalidTxnState),
        (header(2, epoch=4, transactional=False), InvalidTxnState),
        (header(0, epoch=5, transactional=False), InvalidTxnState),
    ],
)
def test_what_is_no_part_of_the_open_transaction_is_refused(batch: BatchHeader, error: type[RaftlogError]) -> None:
    states = opened()
    with pytest.raises(error):
        states.check(batch, NOW)
    assert states == opened()


@pytest.mark.parametrize("commit", [True, False])
def test_after_a_marker_the_numbers_begin_with_0_in_its_epoch(commit: bool) -> None:
    states = opened()
    marked(states, 5, 12, commit=commit, first_offset=10)
    state = states.get(1)
    assert state is not None
    assert (state.epoch, state.batches, state.first_offset, state.last_sequence) == (5, (), -1, -1)
    assert not states.transactions
    for late in (header(0, epoch=4), header(2, epoch=4)):
        with pytest.raises(InvalidProducerEpoch):
            states.check(late, NOW)
    for sequence in (1, 2, 1 << 30, (1 << 31) - 1):
        with pytest.raises(OutOfOrderSequence):
            states.check(header(sequence, epoch=5), NOW)
    assert states.check(header(0, epoch=5), NOW) is None
    assert states.check(header(0, epoch=7), NOW) is None, (
        "a producer may skip epochs, which it used in other partitions"
    )


def fates(states: ProducerStates, *epochs: int, producer_id: int = 1) -> list[MarkerFate | type[BaseException]]:
    found = states.check_markers([Marker(producer_id, epoch, True, 0) for epoch in epochs], NOW)
    return [fate if isinstance(fate, MarkerFate) else type(fate) for fate in found]


def test_a_marker_is_appended_if_its_epoch_is_higher() -> None:
    states = opened()
    assert fates(states, 5) == fates(states, 9) == [MarkerFate.APPENDED]
    assert fates(states, 4) == [MarkerFate.REPEATED], "a late marker of the transaction before must not end this one"
    assert fates(states, 3) == [InvalidProducerEpoch]
    assert fates(states, 0, producer_id=77) == [MarkerFate.APPENDED], "a marker of an unknown producer must be appended"
    assert fates(states, 5, 5, 4, 6) == [
        MarkerFate.APPENDED,
        MarkerFate.REPEATED,
        InvalidProducerEpoch,
        MarkerFate.APPENDED,
    ]


def test_the_other_decision_is_no_repeat() -> None:
    states = opened()
    found = states.check_markers([Marker(1, 5, True, 0), Marker(1, 5, False, 0), Marker(1, 5, True, 0)], NOW)
    assert [type(fate) for fate in found] == [MarkerFate, InvalidTxnState, MarkerFate]
    marked(states, 5, 12, commit=False, first_offset=10)
    assert fates(states, 5) == [InvalidTxnState]
    assert states.check_markers([Marker(1, 5, False, 0)], NOW) == [MarkerFate.REPEATED]
    states.note(header(0, epoch=5, offset=13), NOW)
    assert fates(states, 5) == [InvalidTxnState], "the marker must be refused, as the next transaction has begun"
    states.note(header(0, epoch=7, offset=14), NOW)
    assert fates(states, 7) == [MarkerFate.REPEATED], (
        "the marker must count as a repetition, as the epoch began with a batch, without a decision"
    )


def test_the_highest_epoch_is_that_of_a_marker() -> None:
    states = ProducerStates()
    states.note(header(0, epoch=32_766, offset=3), NOW)
    assert fates(states, 32_767) == [MarkerFate.APPENDED]
    marked(states, 32_767, 4)
    assert fates(states, 32_767) == [MarkerFate.REPEATED]


def test_a_marker_of_an_unknown_producer_is_remembered() -> None:
    """Else a late batch of its transaction would open that again."""
    states = ProducerStates()
    marked(states, 3, 0)
    with pytest.raises(InvalidProducerEpoch):
        states.check(header(0, epoch=2), NOW)


def test_aborted_transactions_are_those_with_records() -> None:
    states = opened()
    states.note(header(0, producer_id=2, offset=12), NOW)
    assert marked(states, 1, 13, commit=False, producer_id=3) == []
    assert marked(states, 5, 14, commit=False, first_offset=10) == [AbortedTransaction(1, 10, 14, 12)]
    assert marked(states, 1, 15, commit=False, producer_id=2, first_offset=12) == [AbortedTransaction(2, 12, 15, 16)]
    assert marked(states, 2, 16, producer_id=2, first_offset=3) == []


# Producers that are forgotten


def test_an_open_transaction_is_neither_expired_nor_evicted() -> None:
    states = opened(ProducerLimits(expiration_ms=1_000, max_ids=3))
    states.note(header(0, producer_id=2, offset=12, transactional=False), NOW + 1)
    assert states.expire(NOW + 5_000) == 1
    assert [producer_id for producer_id, _ in states.items()] == [1]
    for producer_id in (3, 4, 5, 6):
        states.note(header(0, producer_id=producer_id, transactional=False), NOW)
    assert sorted(producer_id for producer_id, _ in states.items()) == [1, 5, 6]
    frozen = states.freeze()
    assert sorted(frozen.together()) == [1, 5, 6]
    marked(states, 5, 20)
    assert states.expire(NOW + 5_000) == 3


def test_where_all_are_open_a_new_one_waits_and_what_the_log_says_counts() -> None:
    limits = ProducerLimits(max_ids=2)
    states = opened(limits)
    states.note(header(0, producer_id=2, offset=12), NOW)
    late = NOW + LIVE_MS + 1
    with pytest.raises(BrokerOverloaded):
        states.check(header(0, producer_id=3), late)
    assert fates(states, 1, producer_id=3) == [BrokerOverloaded]
    states.note(header(0, producer_id=3, offset=13), NOW)
    assert len(states) == 3, "a follower must take what its leader has taken"
    marked(states, 1, 14, producer_id=2)
    assert states.check(header(0, producer_id=4), late + LIVE_MS) is None
    states.note(header(0, producer_id=4, offset=15), late)
    assert sorted(producer_id for producer_id, _ in states.items()) == [1, 3, 4]


def test_markers_of_many_new_producers_do_not_make_live_ones_vanish() -> None:
    states = ProducerStates(ProducerLimits(max_ids=3))
    states.note(header(0), NOW)
    found = states.check_markers([Marker(producer_id, 1, True, 0) for producer_id in (2, 3, 4, 5)], NOW)
    assert [isinstance(fate, BrokerOverloaded) for fate in found] == [False, False, True, True]
    states.note(header(0, producer_id=8, offset=1, transactional=False), NOW + LIVE_MS)
    found = states.check_markers([Marker(producer_id, 1, True, 0) for producer_id in (2, 3, 4)], NOW + 2 * LIVE_MS)
    assert [isinstance(fate, BrokerOverloaded) for fate in found] == [False, True, True], (
        "only one of three producers fits, as one has an open transaction and one is live"
    )


def test_of_whom_only_a_marker_is_left_goes_sooner() -> None:
    states = ProducerStates(ProducerLimits(max_ids=3))
    states.note(header(0, producer_id=1, transactional=False), NOW)
    for producer_id in (2, 3):
        marked(states, 1, 10 + producer_id, producer_id=producer_id)
    with pytest.raises(BrokerOverloaded):
        states.check(header(0, producer_id=4), NOW + FENCE_MS)
    late = NOW + FENCE_MS + 1
    assert states.check(header(0, producer_id=4), late) is None
    found = states.check_markers([Marker(producer_id, 1, True, 0) for producer_id in (4, 5, 6)], late)
    assert [isinstance(fate, BrokerOverloaded) for fate in found] == [False, False, True], (
        "only two of three producers fit, as one is live"
    )
    for producer_id in (4, 5):
        states.note(header(0, producer_id=producer_id, offset=20 + producer_id), late)
    assert [producer_id for producer_id, _ in states.items()] == [1, 4, 5]
    marked(states, 1, 30, producer_id=4)
    states.note(header(0, producer_id=6, transactional=False), NOW + LIVE_MS)
    assert [producer_id for producer_id, _ in states.items()] == [1, 5, 6], (
        "producer 4 must give way, as it could have expired for nine minutes"
    )


def test_nobody_is_looked_for_among_those_with_open_transactions() -> None:
    """There may be a hundred thousand of them; a look at all would hold the loop up for too long."""
    count = 20_000
    states = ProducerStates(ProducerLimits(max_ids=count))
    first = header(0)
    for producer_id in range(count):
        states.note_appended(first._replace(producer_id=producer_id), producer_id, -1, NOW)
    seen: list[int] = []

    class Counted(dict[int, object]):
        def __getitem__(self, key: int) -> object:
            seen.append(key)
            return super().__getitem__(key)

    states._producers = Counted(states._producers)  # type: ignore[assignment] # counts look-ups
    states._producers.move_to_end = lambda key: seen.append(key)  # type: ignore[method-assign, misc, assignment]
    with pytest.raises(BrokerOverloaded):
        states.check(header(0, producer_id=count), NOW + LIVE_MS + 1)
    assert states.expire(NOW + 2 * LIVE_MS) == 0
    states.note_appended(header(0, producer_id=count), count, -1, NOW)
    assert len(seen) < 10


def test_who_is_forgotten_may_begin_anew_only_with_0() -> None:
    states = ProducerStates()
    with pytest.raises(UnknownProducerId):
        states.check(header(1, epoch=2), NOW)


# The last stable offset

histories = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 4)),
        st.tuples(st.just("end"), st.integers(0, 4)),
        st.tuples(st.just("commit"), st.integers(0, 5)),
    ),
    max_size=40,
)


@given(histories, st.booleans())
def test_the_last_stable_offset_is_what_the_definition_says(script: list[tuple[str, int]], copied: bool) -> None:
    transactions = OpenTransactions()
    open_ones: dict[int, int] = {}
    ended: list[Undecided] = []
    offset = high_watermark = 0
    for what, number in script:
        match what:
            case "begin" if number not in open_ones:
                transactions.begin(number, OpenTransaction(0, offset, NOW))
                open_ones[number] = offset
                offset += 1
            case "end":
                first = open_ones.pop(number, None)
                found = transactions.end(number, offset)
                assert (found is None) == (first is None)
                if first is not None:
                    ended.append(Undecided(offset, first))
                offset += 1
            case "commit":
                high_watermark = min(offset, high_watermark + number)
        if copied:
            transactions = OpenTransactions(transactions.items(), transactions.undecided)
        waiting = [*open_ones.values(), *(each.first_offset for each in ended if each.marker_offset >= high_watermark)]
        assert transactions.first_unstable(high_watermark) == min(waiting, default=None)
        assert transactions.holds_back == bool(waiting)
        assert transactions.first_open == min(open_ones.values(), default=None)
        assert len(transactions) == len(open_ones)


which = st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.just("produce"), st.integers(-1, 4), st.integers(1, 3)),
    st.tuples(st.just("produce"), st.integers(0, 3), st.just(1)),
    st.tuples(st.just("mark"), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), st.just(1)),
    st.tuples(st.just("mark"), st.lists(st.integers(0, 5), min_size=1, max_size=2), st.booleans(), st.integers(-2, 0)),
    st.tuples(st.just("replicate"), st.integers(1, 10)),
    st.tuples(st.just("flush"), which),
    st.tuples(st.just("commit"), st.sampled_from([0.4, 1.0])),
    st.tuples(st.just("settle")),
    st.tuples(st.just("roll"), which),
    st.tuples(st.just("fail_over")),
    st.tuples(st.just("restart"), which, st.integers(0, 5)),
    st.tuples(st.just("checkpoint"), which),
    st.tuples(st.just("trim"), which, st.sampled_from([0.3, 1.0])),
    st.tuples(st.just("harm"), which, which),
)


def play(script: list[tuple[object, ...]], history: TransactionHistory | None = None) -> None:
    history = history or TransactionHistory()
    for name, *arguments in script:
        if name == "fail_over" and history.replicas[1 - history.leader].log.log_end_offset < history.high_watermark:
            continue
        getattr(history, str(name))(*arguments)
        history.check()


@settings(max_examples=examples(1.5), deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_a_record_is_visible_if_and_only_if_its_transaction_has_committed(script: list[tuple[object, ...]]) -> None:
    play([step for step in script if step[0] not in ("trim", "harm")])


@settings(max_examples=examples(0.6), deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_a_record_is_visible_also_where_indexes_are_lost(script: list[tuple[object, ...]]) -> None:
    play([step for step in script if step[0] != "trim"])


@settings(max_examples=examples(0.6), deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_a_record_is_visible_also_where_records_of_open_transactions_are_deleted(
    script: list[tuple[object, ...]],
) -> None:
    play([step for step in script if step[0] != "harm"])


def test_where_the_log_starts_within_a_batch_at_its_last_stable_offset_nothing_is_visible() -> None:
    play([("produce", 0, 1), ("produce", -1, 2), *[("produce", 0, 1)] * 4, ("settle",), ("trim", 0, 0.3)])


@pytest.mark.parametrize("seed", range(12))
def test_long_histories_over_many_segments(seed: int) -> None:
    """Many segments, and transactions over several of them."""
    dice = Random(seed)
    history = TransactionHistory(replace(CONFIG, segment_bytes=dice.choice([700, 1_500, 4_000])))
    for _ in range(250):
        match dice.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7:
                history.produce(dice.randrange(-1, 6), dice.randrange(1, 4))
            case 8 | 9 | 10:
                history.mark([dice.randrange(6) for _ in range(dice.randrange(1, 4))], dice.random() < 0.5)
            case 11:
                history.mark([dice.randrange(6)], dice.random() < 0.5, dice.randrange(-2, 1))
            case 12 | 13:
                history.replicate(dice.randrange(1, 20))
            case 14:
                history.flush(dice.randrange(2))
            case 15 | 16:
                history.settle()
            case 17:
                history.restart(dice.randrange(2), dice.randrange(6))
            case 18:
                if history.replicas[1 - history.leader].log.log_end_offset >= history.high_watermark:
                    history.fail_over()
            case 19:
                history.checkpoint(dice.randrange(2))
        history.check()
