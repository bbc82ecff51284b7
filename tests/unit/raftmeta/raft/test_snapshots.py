"""The snapshot container and its files."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import CorruptRecordError, RaftlogError
from raftmeta.raft.snapshots import Snapshot, SnapshotStore, decode_snapshot, encode_snapshot
from tests.support.metadata_disk import MemoryDisk, everything_survives, nothing_survives

SNAPSHOT = Snapshot(index=300, term=5, previous_term=4, entry=b"\x00cmd", state=b"state")
GOLDEN = "524c5241465453312c01000000000000050000000000000004000000000000000400000000636d6405000000000000007374617465"


@given(
    st.builds(
        Snapshot,
        st.integers(2, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=50),
        st.binary(max_size=200),
    )
)
def test_what_is_encoded_is_decoded(snapshot: Snapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot), "here") == snapshot


def test_golden_bytes() -> None:
    data = encode_snapshot(SNAPSHOT)
    assert data[:-32].hex() == GOLDEN


def test_every_bit_flip_and_every_cut_is_refused() -> None:
    data = encode_snapshot(SNAPSHOT)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecordError, match="here is damaged"):
            decode_snapshot(bytes(damaged), "here")
    for size in range(len(data)):
        with pytest.raises(CorruptRecordError):
            decode_snapshot(data[:size], "here")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(RaftlogError):
        decode_snapshot(data, "here")


def test_a_file_under_another_name_is_refused() -> None:
    disk = MemoryDisk()
    disk.put("raft-snapshot-00000000000000000007", encode_snapshot(SNAPSHOT))
    with pytest.raises(CorruptRecordError, match="holds the snapshot at 300"):
        SnapshotStore(disk).read(7)


@pytest.mark.parametrize("operation", ["sync", "rename"])
def test_what_could_not_be_written_does_not_keep_the_space(operation: str) -> None:
    disk = MemoryDisk()
    disk.fail(operation, errno.ENOSPC)
    with pytest.raises(OSError, match="ENOSPC"):
        SnapshotStore(disk).write(300, encode_snapshot(SNAPSHOT))
    assert disk.names() == []


@pytest.mark.parametrize("survival", [nothing_survives, everything_survives])
def test_a_crash_while_writing_leaves_the_old_one_or_the_new_one(survival: object) -> None:
    assert callable(survival)
    newer = Snapshot(400, 6, 6, b"\x00x", b"newer")

    def replace(store: SnapshotStore) -> None:
        store.write(400, encode_snapshot(newer))
        store.remove_older(400)

    whole = MemoryDisk()
    SnapshotStore(whole).write(300, encode_snapshot(SNAPSHOT))
    begun = whole.operations
    replace(SnapshotStore(whole))
    assert whole.names() == ["raft-snapshot-00000000000000000400"]
    for power_off_at in range(begun, whole.operations):
        disk = MemoryDisk(power_off_at)
        store = SnapshotStore(disk)
        store.write(300, encode_snapshot(SNAPSHOT))
        with pytest.raises(OSError, match="power"):
            replace(store)
        store = SnapshotStore(disk.survivor(survival))
        newest = store.newest()
        assert newest is not None
        assert store.read(newest) in (SNAPSHOT, newer)
        replace(store)
