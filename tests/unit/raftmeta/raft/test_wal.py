"""The write-ahead log and its disk: its content after a crash, refused damage, a full or failing disk."""

from __future__ import annotations

import errno
import random
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftlog.errors import CorruptRecordError, RaftlogError, StorageError, UnsupportedVersion
from raftmeta.disk import MetadataDisk, OsDisk
from raftmeta.raft import wal as segments
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.wal import (
    ABSTAINED,
    ALLOCATION_BYTES,
    FIRST_ENTRY,
    FRAME_OVERHEAD_BYTES,
    HEADER_BYTES,
    RESERVE_BYTES,
    Entry,
    Segment,
    WriteAheadLog,
    split_records,
)
from tests.support.fresh import examples
from tests.support.metadata_disk import MemoryDisk, everything_survives, nothing_survives

DIRECTORY = uuid.UUID(int=7)
FILE = "wal-00000000000000000001"


def opened(disk: MemoryDisk, segment_bytes: int = 1 << 20) -> WriteAheadLog:
    wal = WriteAheadLog(disk, DIRECTORY, segment_bytes)
    wal.open()
    return wal


def filled(disk: MemoryDisk, count: int = 20, segment_bytes: int = 1 << 20) -> WriteAheadLog:
    wal = opened(disk, segment_bytes)
    for index in range(2, count + 2):
        wal.add(b"\x00command %d" % index, index, 1)
        wal.sync()
    wal.setCurrentTerm(7, 3)
    wal.sync()
    return wal


def content(wal: WriteAheadLog) -> tuple[list[Entry], int, int | None]:
    return wal[:], wal.getCurrentTerm(), wal.getVotedForNodeId()


def test_a_new_log_has_the_first_entry_and_writes_nothing() -> None:
    disk = MemoryDisk()
    wal = opened(disk)
    assert wal[:] == [FIRST_ENTRY]
    assert not wal.dirty
    assert disk.names() == []


def test_everything_synced_is_read_back() -> None:
    disk = MemoryDisk()
    wal = filled(disk)
    wal.deleteEntriesFrom(15)
    wal.add(b"\x00other", 16, 7)
    wal.setCurrentTerm(8, None)
    wal.setCurrentTerm(9, ABSTAINED)
    wal.sync()
    again = opened(disk.survivor(nothing_survives))
    assert content(again) == content(wal)
    assert again.synced_index == 16
    assert again.getVotedForNodeId() == ABSTAINED
    wal.reset((b"\x00last of a snapshot", 100, 9))
    wal.add(b"\x00next", 101, 9)
    wal.sync()
    assert opened(disk)[:] == [(b"\x00last of a snapshot", 100, 9), (b"\x00next", 101, 9)]


def test_an_index_counts_as_synced_only_when_it_is() -> None:
    wal = filled(MemoryDisk(), 5)
    assert wal.synced_index == 6
    wal.add(b"\x00a", 7, 7)
    wal.setCurrentTerm(8, 1)
    assert (wal.synced_index, wal.synced_term) == (6, 7)
    pending = wal.take()
    wal.add(b"\x00b", 8, 8)
    wal.write(pending)
    wal.done(pending)
    assert (wal.synced_index, wal.synced_term) == (7, 8)
    pending = wal.take()
    wal.deleteEntriesFrom(4)  # 5 and later go while their write is under way
    assert wal.synced_index == 4
    wal.write(pending)
    wal.done(pending)
    assert wal.synced_index == 4, "a write that was in progress must not count as synced"
    wal.sync()
    assert wal.synced_index == wal.last_index == 4


def test_the_last_frame_torn_at_any_byte_is_dropped() -> None:
    disk = MemoryDisk()
    wal = filled(disk)
    before = content(wal)
    end = wal._position
    wal.add(b"\x00the last one", 22, 7)
    wal.sync()
    whole = disk.read(FILE)
    for cut in range(end, wal._position):
        found = MemoryDisk()
        found.put(FILE, whole[:cut] + bytes(len(whole) - cut))
        again = opened(found)
        assert content(again) == before
        again.add(b"\x00instead", 22, 8)
        again.sync()
        assert opened(found.survivor(nothing_survives))[:] == [*before[0], (b"\x00instead", 22, 8)]


def test_what_a_crash_tore_is_told_with_its_size(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    wal = filled(disk)
    end = wal._position
    for index in (22, 23):
        wal.add(b"\x00entry", index, 7)
    wal.sync()
    data = bytearray(disk.read(FILE))
    data[wal._position - 1] ^= 1
    disk.put(FILE, bytes(data))
    opened(disk)
    assert f"dropped the {wal._position - end} bytes" in caplog.text
    assert f"at byte {end}, with 2 entries" in caplog.text
    caplog.clear()
    opened(disk)
    assert [record for record in caplog.records if record.name.startswith("raftmeta.")] == [], (
        "the torn tail must be gone after the first start"
    )


@pytest.mark.parametrize("size", [0, HEADER_BYTES + 60, ALLOCATION_BYTES - 1])
def test_a_file_that_was_cut_off_is_damage(size: int) -> None:
    """No crash makes a file shorter than it was when it got its name, so acknowledged entries may be missing."""
    disk = MemoryDisk()
    filled(disk)
    disk.put(FILE, disk.read(FILE)[:size])
    with pytest.raises(CorruptRecordError, match="damaged"):
        opened(disk)
    assert len(disk.read(FILE)) == size


def test_an_empty_log_is_made_once_and_read_back() -> None:
    disk = MemoryDisk()
    wal = opened(disk)
    wal.begin()
    wal.begin()
    assert disk.names() == [FILE]
    left = disk.survivor(nothing_survives)
    again = opened(left)
    assert content(again) == ([FIRST_ENTRY], 0, None)
    again.setCurrentTerm(1, 2)
    again.sync()
    assert content(opened(left)) == ([FIRST_ENTRY], 1, 2)


def test_the_last_frame_torn_in_the_middle_is_dropped() -> None:
    """A disk writes sectors in any order: the end of a frame may be there and its beginning not."""
    disk = MemoryDisk()
    wal = filled(disk)
    before, end = content(wal), wal._position
    wal.add(b"\x00" + bytes(range(256)) * 8, 22, 7)
    wal.sync()
    data = bytearray(disk.read(FILE))
    data[end : end + 512] = bytes(512)
    disk.put(FILE, bytes(data))
    assert content(opened(disk)) == before


def test_every_bit_flip_before_the_last_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ALLOCATION_BYTES", 0)  # without the megabytes of zeros
    disk = MemoryDisk()
    wal = filled(disk, 4)
    last = wal._position
    wal.add(b"\x00the last one", 6, 7)
    wal.sync()
    whole = disk.read(FILE)[: wal._position]
    for bit in range(last * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        damaged = MemoryDisk()
        damaged.put(FILE, bytes(data))
        with pytest.raises((CorruptRecordError, UnsupportedVersion)):
            opened(damaged)
        assert damaged.read(FILE) == bytes(data), "a damaged log must not be changed"


def test_the_error_names_file_and_position() -> None:
    disk = MemoryDisk()
    filled(disk)
    data = bytearray(disk.read(FILE))
    data[HEADER_BYTES + 30] ^= 1
    disk.put(FILE, bytes(data))
    with pytest.raises(CorruptRecordError, match=f"/metadata/{FILE} is damaged at byte {HEADER_BYTES}"):
        opened(disk)


def test_a_log_of_another_directory_is_refused() -> None:
    disk = MemoryDisk()
    filled(disk)
    with pytest.raises(CorruptRecordError, match="header"):
        WriteAheadLog(disk, uuid.UUID(int=8)).open()


def test_a_frame_inside_a_command_does_not_pass_for_one() -> None:
    """A command that holds an old log must not make a torn frame look like damage."""
    disk = MemoryDisk()
    wal = filled(disk)
    before, end = content(wal), wal._position
    foreign = Segment(uuid.UUID(int=9).bytes, 1).frame(99, b"\x04")
    wal.add(b"\x00" + foreign * 3, 22, 7)
    wal.sync()
    data = bytearray(disk.read(FILE))
    data[end] ^= 1
    disk.put(FILE, bytes(data))
    assert content(opened(disk)) == before


def test_files_are_begun_and_removed_and_a_missing_one_is_noticed() -> None:
    disk = MemoryDisk()
    wal = filled(disk, 100, segment_bytes=400)
    names = sorted(disk.names())
    assert len(names) > 10
    assert content(opened(disk.survivor(nothing_survives))) == content(wal)
    without = disk.survivor(everything_survives)
    without.remove(names[4])
    with pytest.raises(CorruptRecordError, match=f"{names[3]} is damaged at byte"):
        opened(without)
    wal.trim(60)
    wal.add(b"\x00more", 102, 7)
    wal.sync()
    assert 0 < len(disk.names()) < len(names)
    assert disk.names()[0] > names[3]
    again = opened(disk.survivor(nothing_survives))
    assert again.entries(60, 103) == wal.entries(60, 103)
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (7, 3)


def scenario(wal: WriteAheadLog, note: Callable[[], None]) -> None:
    """Everything a log goes through; `note` is called after each sync."""
    wal.setCurrentTerm(1, 2)
    for index in range(2, 12):
        wal.add(b"\x00%d" % index, index, 1)
        if index % 2:
            wal.sync()
            note()
    wal.deleteEntriesFrom(6)
    wal.setCurrentTerm(2, None)
    for index in range(7, 15):
        wal.add(b"\x00%d again" % index, index, 2)
    wal.sync()
    note()
    wal.trim(8)
    wal.reset((b"\x00snapshot", 40, 2))
    for index in range(41, 60):
        wal.add(b"\x00%d" % index, index, 2)
        wal.sync()
        note()
    wal.trim(50)
    wal.setCurrentTerm(3, 1)
    wal.sync()
    note()


@pytest.mark.parametrize("survival", [nothing_survives, everything_survives, lambda count: count // 2])
def test_a_crash_at_any_disk_operation_loses_nothing_synced(survival: Callable[[int], int]) -> None:
    whole = MemoryDisk()
    scenario(opened(whole, 300), lambda: None)
    for power_off_at in range(whole.operations):
        disk = MemoryDisk(power_off_at)
        wal = opened(disk, 300)
        synced: list[tuple[list[Entry], int, int | None]] = [content(wal)]
        with pytest.raises(StorageError):
            scenario(wal, lambda: synced.append(content(wal)))  # noqa: B023 # called within this turn of the loop
        wanted = content(wal)
        again = opened(disk.survivor(survival), 300)
        entries, term, vote = content(again)
        before, before_term, before_vote = synced[-1]
        oldest = max(entries[0][1], before[0][1])
        if (term, vote) == (before_term, before_vote) and entries[-1] == before[-1]:
            assert entries[oldest - entries[0][1] :] == before[oldest - before[0][1] :]
        else:  # the write under way is there as a whole
            oldest = max(entries[0][1], wanted[0][0][1])
            assert (term, vote) == wanted[1:]
            assert entries[oldest - entries[0][1] :] == wanted[0][oldest - wanted[0][0][1] :]
        again.add(b"\x00goes on", again.last_index + 1, term)
        again.sync()


@settings(max_examples=examples(0.6), deadline=None)
@given(st.data())
def test_random_histories_with_crashes(data: st.DataObject) -> None:
    """After any operations and a power loss, synced entries are there, and every entry found was once written."""
    disk = MemoryDisk()
    segment_bytes = data.draw(st.integers(100, 2000))
    wal = opened(disk, segment_bytes)
    synced = content(wal)
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["add", "add", "truncate", "term", "sync", "sync", "crash", "trim"]))
        if step == "add":
            for _ in range(data.draw(st.integers(1, 5))):
                wal.add(b"\x00" * data.draw(st.integers(1, 50)), wal.last_index + 1, wal.getCurrentTerm())
        elif step == "truncate" and len(wal) > 1:
            wal.deleteEntriesFrom(data.draw(st.integers(1, len(wal) - 1)))
        elif step == "term":
            wal.setCurrentTerm(wal.getCurrentTerm() + 1, data.draw(st.sampled_from([None, 1, 2, ABSTAINED])))
        elif step == "trim":
            wal.trim(data.draw(st.integers(1, wal.synced_index + 1 if wal.synced_index > 0 else 1)))
        elif step == "sync":
            wal.sync()
            synced = content(wal)
        elif step == "crash":
            wanted = content(wal)
            if wal.dirty and data.draw(st.booleans()):
                pending = wal.take()
                if not pending.rotation:
                    disk.write_at(pending.segment.name, pending.position, pending.data)
            disk = disk.survivor(lambda count: data.draw(st.integers(0, count - 1)))
            wal = opened(disk, segment_bytes)
            found = content(wal)
            newest = [kept for kept in (synced, wanted) if (kept[0][-1], *kept[1:]) == (found[0][-1], *found[1:])]
            assert newest, "the log has neither the last synced state nor the one that was being written"
            oldest = max(wal.first_index, newest[0][0][0][1])
            assert wal.entries(oldest, wal.last_index + 1) == [e for e in newest[0][0] if e[1] >= oldest]
            synced = found


def test_no_space_is_noticed_before_anything_is_promised() -> None:
    disk = MemoryDisk()
    disk.free_bytes = 5 << 20
    wal = opened(disk)
    assert wal.has_room(1000)
    taken = 0
    while wal.has_room(100_000):
        wal.add(bytes(100_000 - 21), wal.last_index + 1, 1)
        wal.sync()
        taken += 1
    assert taken > 20
    assert not wal.has_room(100_000)
    for term in range(2, 500):  # the reserve takes terms and votes all the same
        wal.setCurrentTerm(term, 1)
        wal.sync()
    assert disk.free_bytes >= 0
    disk.free_bytes = 50 << 20
    assert wal.has_room(100_000)
    assert content(opened(disk.survivor(nothing_survives))) == content(wal)


def test_a_directory_without_any_room_says_so_and_stays_usable() -> None:
    disk = MemoryDisk()
    disk.free_bytes = 0
    wal = opened(disk)
    assert not wal.has_room(1)
    assert disk.names() == []
    disk.free_bytes = 100 << 20
    assert wal.has_room(1)


def test_no_space_for_a_new_file_goes_on_in_the_old_one() -> None:
    disk = MemoryDisk()
    wal = opened(disk, segment_bytes=1000)
    assert wal.has_room(10_000)
    disk.free_bytes = 0
    for index in range(2, 50):
        assert wal.has_room(121)
        wal.add(b"\x00" * 100, index, 1)
        wal.sync()
    assert disk.names() == [FILE]
    assert content(opened(disk.survivor(nothing_survives))) == content(wal)
    disk.free_bytes = None
    wal.add(b"\x00", 50, 1)
    wal.sync()
    assert len(disk.names()) == 2


@pytest.mark.parametrize("operation", ["write_at", "sync"])
def test_an_io_error_is_final(operation: str) -> None:
    disk = MemoryDisk()
    wal = filled(disk)
    wal.add(b"\x00x", 22, 7)
    disk.fail(operation, errno.EIO)
    with pytest.raises(StorageError, match="repair the disk"):
        wal.sync()
    with pytest.raises(AssertionError):
        wal.sync() if wal.dirty else wal.take()


def test_an_io_error_while_reserving_is_final() -> None:
    disk = MemoryDisk()
    wal = filled(disk)
    disk.fail("allocate", errno.EIO)
    with pytest.raises(StorageError):
        wal.has_room(100 << 20)


def test_the_reserve_is_never_given_away() -> None:
    disk = MemoryDisk()
    wal = opened(disk)
    wal.has_room(1)
    disk.free_bytes = 0
    left = wal._allocated - wal._position
    assert not wal.has_room(left - RESERVE_BYTES)
    assert wal.has_room(left - RESERVE_BYTES - FRAME_OVERHEAD_BYTES)


@pytest.mark.parametrize(
    "payload", [b"\x09", b"\x01\x00", b"\x02\x00", segments.ENTRY_RECORD.pack(1, 2, 3, 100) + b"short"]
)
def test_records_that_do_not_parse_are_damage(payload: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        list(split_records(payload, "a file"))


def test_a_newer_format_is_told_from_damage() -> None:
    disk = MemoryDisk()
    filled(disk)
    disk.put(FILE, b"RLRAFTW2" + disk.read(FILE)[8:])
    with pytest.raises(UnsupportedVersion):
        opened(disk)


def test_golden_bytes() -> None:
    disk = MemoryDisk()
    wal = opened(disk)
    wal.setCurrentTerm(5, 3)
    wal.add(b"\x00ab", 2, 5)
    wal.sync()
    assert disk.read(FILE).rstrip(b"\0").hex() == GOLDEN


GOLDEN = (
    "524c5241465457310000000000000000000000000000000701000000000000004d147492"
    "524c5746320000000100000000000000dd8f7483"
    "0205000000000000000300000002050000000000000003000000010200000000000000050000000000000003000000006162"
)


@settings(max_examples=examples(2), deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_files_are_refused_with_an_error_of_ours(data: bytes) -> None:
    disk = MemoryDisk()
    disk.put(FILE, data)
    with pytest.raises(RaftlogError):
        opened(disk)


def test_what_was_committed_is_written_along_and_read_back() -> None:
    disk = MemoryDisk()
    wal = filled(disk, 10, segment_bytes=400)
    wal.note_committed(8)
    assert not wal.dirty, "the commit index must not cause a write of its own"
    wal.note_committed(5)
    wal.setCurrentTerm(8, 1)
    wal.sync()
    again = opened(disk.survivor(nothing_survives), 400)
    assert again.known_committed == 8
    again.reset((b"\x00last of a snapshot", 100, 8))
    again.sync()
    assert again.known_committed == 8


@pytest.fixture(params=["os", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> MetadataDisk:
    made: MetadataDisk = OsDisk(tmp_path / "meta") if request.param == "os" else MemoryDisk()
    made.lock()
    return made


def test_writing_into_reserved_space(disk: MetadataDisk) -> None:
    disk.write("a", b"0123")
    disk.allocate("a", 10)
    assert disk.read("a") == b"0123" + bytes(6)
    disk.allocate("a", 5)
    assert len(disk.read("a")) == 10
    disk.write_at("a", 2, b"xyz")
    disk.sync("a")
    assert disk.read("a") == b"01xyz" + bytes(5)
    disk.write_at("a", 8, b"beyond")
    assert disk.read("a") == b"01xyz" + bytes(3) + b"beyond"
    disk.append("a", b"!")
    disk.truncate("a", 3)
    disk.sync("a")
    assert disk.read("a") == b"01x"
    disk.close()


def test_a_file_that_was_replaced_is_not_written_through_an_old_handle(disk: MetadataDisk) -> None:
    disk.write("a", b"old")
    disk.write_at("a", 0, b"O")
    disk.write("b", b"new")
    disk.write_at("b", 0, b"N")
    disk.rename("b", "a")
    disk.write_at("a", 1, b"E")
    disk.sync("a")
    assert disk.read("a") == b"NEw"
    disk.close()


def test_log_and_snapshots_use_one_directory_from_two_threads(tmp_path: Path) -> None:
    disk = OsDisk(tmp_path)
    disk.lock()
    wal = WriteAheadLog(disk, uuid.UUID(int=1), segment_bytes=5000)
    wal.open()
    store = SnapshotStore(disk)

    def snapshots() -> None:
        for index in range(2, 40):
            store.write(index, random.Random(index).randbytes(10_000))
            store.remove_older(index)

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(snapshots)
        for index in range(2, 300):
            assert wal.has_room(200)
            wal.add(b"\x00" * 100, index, 1)
            wal.sync()
            wal.trim(index - 20)
        running.result()
    again = WriteAheadLog(disk, uuid.UUID(int=1))
    again.open()
    assert again.last_index == 299
    assert store.newest() == 39
    disk.close()


def test_a_power_loss_takes_back_what_was_written_over() -> None:
    disk = MemoryDisk()
    disk.write("a", b"0123456789")
    disk.sync("a")
    disk.sync_dir()
    disk.write_at("a", 2, b"xx")
    disk.truncate("a", 5)
    assert disk.survivor(nothing_survives).read("a") == b"0123456789"
    assert disk.survivor(lambda count: min(1, count - 1)).read("a") == b"01xx456789"
    assert disk.survivor(lambda count: count - 1).read("a") == b"01xx4"


def test_what_a_reset_leaves_is_not_durable_before_it_is_written() -> None:
    wal = WriteAheadLog(MemoryDisk(), uuid.UUID(int=1))
    wal.open()
    wal.begin()
    for index in range(2, 11):
        wal.add(segments.NO_OP, index, 1)
    wal.sync()
    wal.reset((segments.NO_OP, 5, 2))
    wal.add(segments.NO_OP, 6, 3)
    assert wal.synced_index == 4
    wal.sync()
    assert wal.synced_index == 6


def test_a_disk_without_a_free_inode_goes_on_in_the_old_file(tmp_path: Path) -> None:
    """The next file cannot even be made, so there is none to remove."""

    class Full(OsDisk):
        has_inodes = True

        def write(self, name: str, data: bytes) -> None:
            if not self.has_inodes:
                raise OSError(errno.ENOSPC, "no space left on device")
            super().write(name, data)

    disk = Full(str(tmp_path))
    wal = WriteAheadLog(disk, uuid.UUID(int=1), segment_bytes=4_096)
    wal.open()
    wal.begin()
    disk.has_inodes = False
    for index in range(2, 100):
        assert wal.has_room(200)
        wal.add(bytes(100), index, 0)
        wal.sync()
    again = WriteAheadLog(OsDisk(str(tmp_path)), uuid.UUID(int=1))
    again.open()
    assert again.last_index == 99
