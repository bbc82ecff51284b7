"""Whatever happens to two replicas, every record is visible if and only if its transaction has committed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transaction_histories import CONFIG, TransactionHistory

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


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_a_record_is_visible_if_and_only_if_its_transaction_has_committed(script: list[tuple[object, ...]]) -> None:
    play([step for step in script if step[0] not in ("trim", "harm")])


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_also_where_indexes_are_lost(script: list[tuple[object, ...]]) -> None:
    play([step for step in script if step[0] != "trim"])


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_also_where_records_of_open_transactions_are_deleted(script: list[tuple[object, ...]]) -> None:
    play([step for step in script if step[0] != "harm"])


@pytest.mark.parametrize("seed", range(12))
def test_long_histories(seed: int) -> None:
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
