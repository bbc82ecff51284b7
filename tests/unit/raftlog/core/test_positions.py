"""Frames out: the rows from the position on, once and in order; aborted ones dropped; the replica to read from."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.cluster import ClusterCache
from raftlog._core.positions import (
    MAX_COMPLAINTS,
    Fetched,
    Mark,
    NearReplica,
    PartitionState,
    Positions,
    ReadSource,
    Rows,
    has_moved,
    leads_anew,
    read_source,
    table,
)
from raftlog.errors import CorruptRecordError
from raftlog.format import Attributes, Columns, encode_batch, iter_headers
from raftlog.format.aborted import AbortedRanges
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, metadata_pb2
from tests.support.transactional_batches import Aborted, TransactionalLog, transactional_logs

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
    assert state.position == end, "the position must pass control batches and gaps at the end"
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
    assert state.place(2) == [old], "the credit of the old frame must be given back"
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
    assert len(positions.take_back(marks)) == 1, "the credit of the frame that is out of date must be given back"
    assert (state.position, state.last_epoch, marks) == (0, -1, {})
    assert state.fetchable, "the partition must be fetched again"


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

    monkeypatch.setattr("raftlog._core.positions.decode_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.take(3, spent, check_crcs=True)
    assert (state.position, len(spent)) == (3, 1)
    assert state.fetchable, "the partition must be fetched again"


def placed(position: int) -> tuple[PartitionState, Positions]:
    state = PartitionState(T0, b"i" * 16, "earliest")
    state.place(position)
    state.subscription_id = 1
    positions = Positions()
    positions.add(state)
    return state, positions


def offsets_of(taken: list[Rows]) -> list[int]:
    records = [record for rows in taken for record in rows.records()]
    assert all(record.value == b"%d" % record.offset for record in records)
    return [record.offset for record in records]


def read(log: TransactionalLog, position: int, data: st.DataObject, *, committed: bool) -> tuple[list[int], int]:
    """Read in frames that begin and end where they like; return the offsets of the records and the position."""
    state, positions = placed(position)
    end = log.last_stable_offset if committed else log.end_offset
    there = [(base, batch) for base, batch in log.batches if base < end]
    taken: list[Rows] = []
    spent: list[Fetched] = []
    start = sum(1 for base, _ in there if base <= position) - 1 if there else 0
    while 0 <= start < len(there):
        stop = data.draw(st.integers(start + 1, len(there)))
        assert state.position is not None
        bound = there[stop][0] if stop < len(there) else end
        aborted = AbortedRanges(log.overlapping(state.position, bound)) if committed else None
        records = b"".join(batch for _, batch in there[start:stop])
        assert positions.receive(state, Fetched(1, records, None, aborted))
        while rows := positions.take(data.draw(st.integers(1, 9)), spent, check_crcs=True):
            taken += rows
        start = stop
    assert state.error is None
    assert not positions.doubtful
    assert state.position is not None
    return offsets_of(taken), state.position


@given(transactional_logs(), st.data())
def test_records_of_committed_transactions_and_no_others(log: TransactionalLog, data: st.DataObject) -> None:
    end = log.last_stable_offset
    position = data.draw(st.integers(0, end))
    found, reached = read(log, position, data, committed=True)
    assert found == [offset for offset in log.committed if position <= offset < end]
    assert reached == max(end, position), "the position must pass markers and aborted records"


@given(transactional_logs(), st.data())
def test_a_reader_of_uncommitted_records_gets_all_but_the_markers(log: TransactionalLog, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, log.end_offset))
    found, reached = read(log, position, data, committed=False)
    assert found == [offset for offset in log.records if offset >= position]
    assert reached == log.end_offset


def test_the_epoch_of_what_was_passed_over_is_remembered() -> None:
    """KIP-320: a reader that has read nothing but dropped batches still finds out that they were truncated."""
    log = TransactionalLog()
    log.produce(2, 7, transactional=True)
    log.end({7: False})
    state, positions = placed(0)
    records = b"".join(batch for _, batch in log.batches)
    frame = Fetched(1, records, None, AbortedRanges(log.aborted))
    assert positions.receive(state, frame)
    spent: list[Fetched] = []
    assert positions.take(10, spent, check_crcs=True) == []
    assert (state.position, state.last_epoch) == (3, 3)
    assert spent == [frame], "the credit of the frame must be given back"


def test_the_next_transaction_of_the_producer_is_another_one() -> None:
    log = TransactionalLog()
    log.produce(2, 7, transactional=True)
    log.end({7: False})
    log.produce(1, 7, transactional=True)
    log.produce(1, 7)  # not transactional, within the range of nothing
    log.end({7: True})
    log.produce(3, 7, transactional=True)
    log.end({7: False})
    ranges = AbortedRanges(log.aborted)
    held = [ranges.hold(header) for _, batch in log.batches for _, header in iter_headers(batch)]
    assert held == [True, False, False, False, False, True, False]
    assert not AbortedRanges([])


def test_a_batch_of_the_producer_that_is_no_transaction_s_stays() -> None:
    """Compaction takes the mark off batches whose transaction is decided; a range that is still named says nothing."""
    log = TransactionalLog()
    log.produce(2, 7)
    ranges = AbortedRanges([Aborted(7, 0, 5)])
    assert [ranges.hold(header) for _, batch in log.batches for _, header in iter_headers(batch)] == [False]


@pytest.mark.parametrize("byte", [21, 47, 51, -1])
def test_what_says_that_a_batch_is_passed_over_is_checked(byte: int) -> None:
    """Neither a flipped bit in the attributes nor one in the producer id may make records vanish."""
    log = TransactionalLog()
    log.produce(2, 7, transactional=True)
    damaged = bytearray(log.batches[0][1])
    damaged[byte] ^= 1 << 5
    state, _ = placed(0)
    ranges = AbortedRanges([Aborted(7, 0, 5), Aborted(7 | 1 << 37, 0, 5), Aborted(7 | 1 << 5, 0, 5)])
    state.frames.append(Fetched(1, bytes(damaged), None, ranges))
    with pytest.raises(CorruptRecordError, match="checksum"):
        state.take(10, [], check_crcs=True)
    assert state.position == 0


PLACE = TopicPartition("t", 0)
EPOCH = 5


def cluster(leader: int = 1, epoch: int = EPOCH, *, fenced: bool = False) -> ClusterCache:
    response = metadata_pb2.MetadataResponse(cluster_id="c")
    for broker_id in (1, 2, 3):
        response.brokers.add(broker_id=broker_id, host="h", port=broker_id, fenced=fenced and broker_id == 2)
    response.topics.add(name="t", topic_id=b"a" * 16).partitions.add(partition=0, leader=leader, leader_epoch=epoch)
    cache = ClusterCache()
    cache.merge(response, all_topics=False)
    return cache


def state(*, near: NearReplica | None = None, at: int | None = None, epoch: int = EPOCH) -> PartitionState:
    made = PartitionState(PLACE, b"a" * 16, "latest")
    made.position = 0
    made.near = near
    if at is not None:
        made.subscription_id, made.node_id, made.leader_epoch = 1, at, epoch
    return made


NEAR = NearReplica(2, EPOCH, until_ms=100.0)
AT_LEADER = ReadSource(1, EPOCH, from_follower=False)
AT_FOLLOWER = ReadSource(2, EPOCH, from_follower=True)


@pytest.mark.parametrize(
    ("near", "view", "now_ms", "source"),
    [
        (None, cluster(), 0.0, AT_LEADER),
        (None, cluster(leader=-1), 0.0, None),
        (NEAR, cluster(), 99.0, AT_FOLLOWER),
        (NEAR, cluster(), 100.0, AT_LEADER),
        (NEAR, cluster(leader=3, epoch=6), 0.0, ReadSource(3, 6, from_follower=False)),
        (NEAR, cluster(fenced=True), 0.0, AT_LEADER),
        (NearReplica(9, EPOCH, 100.0), cluster(), 0.0, AT_LEADER),
        (NEAR, cluster(leader=-1), 0.0, None),
    ],
)
def test_a_partition_is_read_from_the_near_replica_or_its_leader(
    near: NearReplica | None, view: ClusterCache, now_ms: float, source: ReadSource | None
) -> None:
    assert read_source(state(near=near), view, now_ms) == source


def test_a_leader_from_before_what_was_read_is_none() -> None:
    """A consumer at a follower reads on under the next leader; then the follower dies, before metadata tells of that
    leader. The former one would say that what was read is truncated."""
    reader = state(near=NEAR)
    reader.last_epoch = EPOCH + 1
    assert read_source(reader, cluster(), 0.0) is None
    assert read_source(reader, cluster(leader=3, epoch=EPOCH + 1), 0.0) == ReadSource(3, EPOCH + 1, False)
    reader.place(0)
    assert read_source(reader, cluster(), 200.0) == AT_LEADER, "after a seek the leader must be read"


def test_who_is_subscribed_moves_with_the_leader() -> None:
    assert not has_moved(state(), AT_LEADER), "a partition without a subscription must not count as moved"
    assert not has_moved(state(at=1), AT_LEADER)
    assert has_moved(state(at=3, epoch=4), AT_LEADER)


def test_who_has_heard_of_a_later_epoch_is_not_sent_back() -> None:
    """KIP-232."""
    assert not has_moved(state(at=3, epoch=6), AT_LEADER)


def test_who_reads_from_a_follower_goes_back_when_its_time_is_over() -> None:
    assert not has_moved(state(near=NEAR, at=2), AT_FOLLOWER)
    assert has_moved(state(near=NEAR, at=2), AT_LEADER)


def test_a_leader_that_was_not_asked_yet_is_asked_at_once() -> None:
    """KIP-951: refusals of the previous leader do not count for the next one."""
    assert leads_anew(state(at=3, epoch=4), AT_LEADER)
    assert not leads_anew(state(at=1), AT_LEADER)
    assert not leads_anew(state(), AT_LEADER), "a partition without a subscription must not count as led anew"
    assert not leads_anew(state(at=1), None)
    hinted = cluster()
    topic_id = hinted.topics["t"].topic_id
    assert hinted.apply_hint("t", topic_id, 0, common_pb2.LeaderHint(leader_id=3, leader_epoch=6))
    assert leads_anew(state(at=1), read_source(state(), hinted, 0.0))
