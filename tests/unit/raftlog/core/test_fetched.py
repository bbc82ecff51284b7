"""Frames out: whatever the batches look like, the rows from the position on, once and in order."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.fetched import Rows
from raftlog._core.positions import MAX_COMPLAINTS, Fetched, Mark, PartitionState, Positions
from raftlog._core.tables import table
from raftlog.errors import CorruptRecordError
from raftlog.format import Attributes, Columns, encode_batch
from raftlog.types import TopicPartition

T0 = TopicPartition("t", 0)
BATCHES = st.lists(
    st.tuples(st.sampled_from(["plain", "control", "sparse"]), st.lists(st.booleans(), min_size=1, max_size=12)),
    min_size=1,
    max_size=8,
)


def log_of(shapes: list[tuple[str, list[bool]]]) -> tuple[list[bytes], list[int]]:
    """Return batches, and the offsets that hold records."""
    batches, offsets, base = [], [], 0
    for kind, kept in shapes:
        span = len(kept)
        if kind == "sparse":
            deltas = [delta for delta, keep in enumerate(kept) if keep]
        else:
            deltas = list(range(span))
        columns = Columns(
            pa.array([b"%d" % (base + delta) for delta in deltas], pa.binary()),
            offset_delta=pa.array(deltas, pa.uint32()) if kind == "sparse" else None,
        )
        attributes = Attributes.CONTROL if kind == "control" else 0
        batches.append(
            encode_batch(
                columns, 1, attributes=attributes, base_offset=base, last_offset_delta=span - 1, leader_epoch=3
            )
        )
        if kind != "control":
            offsets += [base + delta for delta in deltas]
        base += span
    return batches, offsets


@given(BATCHES, st.data())
def test_every_record_from_the_position_on_once_and_in_order(
    shapes: list[tuple[str, list[bool]]], data: st.DataObject
) -> None:
    batches, offsets = log_of(shapes)
    end = sum(len(kept) for _, kept in shapes)
    position = data.draw(st.integers(0, end))
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(position)
    state.subscription_id = 1
    positions = Positions()
    positions.add(state)
    # Frames overlap as they like: a broker may begin before the position, and send batches twice.
    start = 0
    while start < len(batches):
        stop = data.draw(st.integers(start + 1, len(batches)))
        again = data.draw(st.integers(0, start))
        assert positions.receive(state, Fetched(1, b"".join(batches[again:stop]), None))
        start = stop
    spent: list[Fetched] = []
    taken: list[Rows] = []
    while rows := positions.take(data.draw(st.integers(1, 9)), spent, check_crcs=True):
        taken += rows
        assert state.position is not None
        assert state.position > rows[-1].records()[-1].offset
    expected = [offset for offset in offsets if offset >= position]
    records = [record for rows in taken for record in rows.records()]
    assert [record.offset for record in records] == expected
    assert [record.value for record in records] == [b"%d" % offset for offset in expected]
    assert table(taken, ["t"])["offset"].to_pylist() == expected
    assert state.position == end, "control batches and holes at the end are behind it too"
    assert len(state.frames) == 0


def test_frames_of_an_old_subscription_are_refused_and_dropped() -> None:
    batches, _ = log_of([("plain", [True] * 3)])
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(0)
    state.subscription_id = 4
    positions = Positions()
    positions.add(state)
    old = Fetched(4, batches[0], None)
    assert positions.receive(state, old)
    assert state.place(2) == [old], "its credit goes back"
    state.subscription_id = 5
    assert not positions.receive(state, old)
    assert positions.take(10, [], check_crcs=True) == []
    assert positions.receive(state, Fetched(5, batches[0], None))
    assert [record.offset for rows in positions.take(10, [], check_crcs=True) for record in rows.records()] == [2]
    assert state.last_epoch == 3


def test_the_table_of_several_topics_has_one_dictionary() -> None:
    batches, _ = log_of([("plain", [True] * 2)])
    chunks = []
    for topic in ("b", "a"):
        state = PartitionState(TopicPartition(topic, 5), b"i" * 16, "earliest")
        state.place(0)
        state.frames.append(Fetched(1, batches[0], None))
        rows = state.take(10, [], check_crcs=True)
        assert rows is not None
        chunks.append(rows)
    found = table(chunks, ["a", "b"])
    found.validate(full=True)
    assert found["topic"].to_pylist() == ["b", "b", "a", "a"]
    assert found["partition"].to_pylist() == [5] * 4
    assert {tuple(chunk.dictionary.to_pylist()) for chunk in found["topic"].chunks} == {("a", "b")}
    assert table([], ["a"]).num_rows == 0


@pytest.mark.parametrize(
    ("batch", "flipped", "error"),
    [
        (0, 1 << 36, "beyond 6"),
        (0, 1 << 3, "beyond 6"),
        (0, 1, "in front of offset 2"),
        (1, 1, "in front of offset 4"),
        (1, 2, "where 2 or more must follow"),
        (2, 1, "beyond 6"),
        (2, 4, "where 4 or more must follow"),
    ],
)
def test_an_offset_that_cannot_be_is_never_handed_out(batch: int, flipped: int, error: str) -> None:
    batches, offsets = log_of([("plain", [True, True])] * 3)
    damaged = bytearray(batches[batch])
    damaged[:8] = (2 * batch ^ flipped).to_bytes(8, "little")
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(0)
    state.subscription_id, state.high_watermark = 1, 6
    state.frames.append(Fetched(1, b"".join([*batches[:batch], damaged, *batches[batch + 1 :]]), None))
    for expected in range(batch):
        rows = state.take(100, [], check_crcs=True)
        assert rows is not None
        assert rows.first_offset == offsets[2 * expected]
    with pytest.raises(CorruptRecordError, match=error):
        state.take(100, [], check_crcs=True)
    assert state.position == 2 * batch


@pytest.mark.parametrize(
    ("batch", "epoch", "error"),
    [(0, 7, "epoch 7 in front of epoch 3"), (1, 7, "epoch 7 in front of epoch 3"), (2, 2, "epoch 2 after epoch 3")],
)
def test_a_leader_epoch_that_cannot_be_is_never_believed(batch: int, epoch: int, error: str) -> None:
    batches, _ = log_of([("plain", [True, True])] * 3)
    damaged = bytearray(batches[batch])
    damaged[12:16] = epoch.to_bytes(4, "little")
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(0)
    state.subscription_id = 1
    state.frames.append(Fetched(1, b"".join([*batches[:batch], damaged, *batches[batch + 1 :]]), None))
    for _ in range(batch):
        assert state.take(100, [], check_crcs=True) is not None
    with pytest.raises(CorruptRecordError, match=error):
        state.take(100, [], check_crcs=True)
    assert (state.position, state.last_epoch) == (2 * batch, 3 if batch else -1)


@pytest.mark.parametrize("byte", [16, 20, 40, -1])
def test_a_batch_that_does_not_check_is_asked_for_again_some_times_and_then_an_error(byte: int) -> None:
    (batch,), _ = log_of([("plain", [True, True])])
    damaged = bytearray(batch)
    damaged[byte] ^= 32
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(0)
    positions = Positions()
    positions.add(state)
    for attempt in range(MAX_COMPLAINTS + 1):
        state.subscription_id = attempt
        assert positions.receive(state, Fetched(attempt, bytes(damaged), None))
        assert positions.take(100, [], check_crcs=True) == []
        assert (state.error is None) == (attempt < MAX_COMPLAINTS)
        assert [found for found, _ in positions.doubtful] == [state] * min(attempt + 1, MAX_COMPLAINTS)
    assert state.position == 0


def test_what_was_taken_and_handed_to_nobody_is_taken_back() -> None:
    batches, _ = log_of([("plain", [True] * 3)] * 3)
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(0)
    positions = Positions()
    positions.add(state)
    marks: dict[PartitionState, Mark] = {}
    state.subscription_id = 1
    assert positions.receive(state, Fetched(1, b"".join(batches), None))
    assert len(positions.take(4, [], check_crcs=True, marks=marks)) == 2
    assert (state.position, marks) == (4, {state: Mark(0, -1, b"i" * 16)})
    assert len(positions.take_back(marks)) == 1, "the credit of the frame that is stale now"
    assert (state.position, state.last_epoch, marks) == (0, -1, {})
    assert state.fetchable, "it is asked for again"


def test_an_interrupt_leaves_the_position_before_what_was_being_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, _ = log_of([("plain", [True] * 3)] * 2)
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(0)
    state.subscription_id = 1
    state.frames.append(Fetched(1, b"".join(batches), None))
    assert state.take(3, [], check_crcs=True) is not None
    spent: list[Fetched] = []

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raftlog._core.fetched.decode_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.take(3, spent, check_crcs=True)
    assert (state.position, len(spent)) == (3, 1)
    assert state.fetchable, "it is asked for again"
