"""Opening a damaged log directory: the records that are served were written, without a gap, or the damage is reported.

A batch that reads back must be one that was written at that offset. What a sealed segment holds is not read when a log
is opened, so damage there may show only when it is read or checked (`PartitionLog.check`, the scrub): one of the two
has to notice. Files of another partition are as good as this one's to whoever has nothing but files, and so is what a
forger gave good checksums: then no more is asked than that offsets follow each other and nothing breaks.
"""

from __future__ import annotations

import logging

from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from raftlog.errors import CorruptRecordError, RaftlogError, StorageError
from raftlog.format import iter_headers, parse_batch, validate_produced
from raftlog.format.control import placed_markers
from tests.fuzz.choices import Choices
from tests.fuzz.log_directories import CONFIG, TOPICS, Base, Written, base, producers_of
from tests.fuzz.oracle import Violation, refusals, require
from tests.fuzz.repair import repair
from tests.fuzz.storages import Damage, damage, storage_of
from tests.support.keyed_log import keyed_batch
from tests.support.log_driver import LOG_DIR, FakeClock, open_manager
from tests.support.memory_storage import MemoryStorage

_DERIVED = (".index", ".timeindex", ".txnindex", ".snapshot", "leader-epoch-checkpoint")
"""What is made anew from the records where it is missing or damaged."""
_CHECKPOINT = f"{LOG_DIR}/offset-checkpoint"


def target(data: bytes) -> None:
    """Damage a directory, open it, read everything, write a little, open it again."""
    logging.disable(logging.CRITICAL)
    try:
        _run(Choices(data))
    finally:
        logging.disable(logging.NOTSET)


def _run(choices: Choices) -> None:
    whole = base(choices.one_in(2), choices.one_in(2))
    done = damage(whole.files, choices, repair if choices.one_in(2) else None)
    storage = storage_of(done.files, LOG_DIR)
    try:
        _open_and_check(whole, done, storage)
    except Exception as error:
        error.add_note("; ".join(done.log))
        raise


def _open_and_check(whole: Base, done: Damage, storage: MemoryStorage) -> None:
    with refusals():
        manager = open_manager(storage, config=CONFIG, clock=FakeClock(2_000_000))
        for topic_id, written in whole.partitions.items():
            log = manager.get(topic_id, 0)
            if log is None:
                require(
                    done.forged or not all(path.endswith(_DERIVED) for path in done.touched),
                    f"{TOPICS[topic_id]} is not served, though none of its records is damaged",
                )
                require(
                    (topic_id, 0) in manager.corrupt_logs
                    or manager.offline_dirs
                    or _metadata_path(topic_id) in done.touched,
                    f"{TOPICS[topic_id]} is not there, and nobody says why",
                )
                continue
            _check_log(log, written, whole, done)
        _go_on(manager, storage, done)


def _metadata_path(topic_id: bytes) -> str:
    return f"{LOG_DIR}/{TOPICS[topic_id]}-0/partition.metadata"


def _check_log(log: PartitionLog, written: Written, whole: Base, done: Damage) -> None:
    foreign = done.forged or _files_moved(done, whole)
    if _CHECKPOINT not in done.touched and not foreign:
        require(
            log.log_start_offset == 0,
            f"the log of {log.topic} must begin at offset 0, but begins at {log.log_start_offset}",
        )
        require(
            log.log_end_offset >= written.kept_end_offset,
            f"the log of {log.topic} ends at {log.log_end_offset}, but records before {written.kept_end_offset} must "
            "be kept",
        )
        if written.kept_end_offset == written.log_end_offset:
            _check_sealed_sizes(log, whole, done)
        _check_scanned(log, written.kept_end_offset)
    found, problem = _read(log)
    if not foreign and all(path.endswith(_DERIVED) for path in done.touched):
        require(
            log.log_end_offset == written.log_end_offset,
            f"{log!r} must end at {written.log_end_offset}, as no record is damaged",
        )
        require(problem is None, f"only files that are made anew were damaged, but reading the log fails: {problem}")
        require(dict(found) == written.batches, "other batches are read than were written, though no record is damaged")
        _check_pieces(log)
    if problem is None:
        with refusals():
            _check_pieces(log)
            _check_batches(log, found, None if foreign else written)
    with refusals():
        log.offset_for_time(1_003_000)
        log.offset_for_time(1 << 62, log.log_end_offset)
        aborted = log.aborted_transactions(log.log_start_offset, log.log_end_offset)
        complete = not foreign and log.log_start_offset == 0 and log.log_end_offset == written.log_end_offset
        if complete and problem is None:
            if not _lacks_transactions(log.topic, done):
                require(
                    {a[:3] for a in aborted} == {a[:3] for a in written.aborted},
                    f"the aborted transactions are {aborted}, not those that were written",
                )
            require(
                producers_of(log) == written.producers,
                f"the producers are {producers_of(log)}, not those that were written",
            )


def _check_sealed_sizes(log: PartitionLog, whole: Base, done: Damage) -> None:
    """A start does not read below the recovery point; yet it notices that a file has another size."""
    directory = f"{LOG_DIR}/{log.topic}-0/"
    segments = sorted(path for path in whole.files if path.startswith(directory) and path.endswith(".log"))
    for path in segments[:-1]:
        size = len(done.files.get(path, b""))
        require(
            size == len(whole.files[path]),
            f"{log!r} is served, but {path} has {size} of {len(whole.files[path])} bytes",
        )


def _check_scanned(log: PartitionLog, recovery_point: int) -> None:
    """What is above the recovery point was read at the start: no damage is left in it."""
    try:
        _check_pieces(log, recovery_point)
    except CorruptRecordError as error:
        raise Violation(
            f"{log!r} is served, but is damaged above the recovery point {recovery_point}: {error}"
        ) from error


def _lacks_transactions(topic: str, done: Damage) -> bool:
    """Whether an index of transactions was taken away: a segment that has none needs none (`broker.log.index`)."""
    gone = (path for path in done.touched if path not in done.files)
    return any(path.endswith(".txnindex") and f"/{topic}-0/" in path for path in gone)


def _files_moved(done: Damage, whole: Base) -> bool:
    """Whether a file has the content of another one instead of its own; some are alike from the beginning."""
    contents = {data for data in whole.files.values() if data}
    return any(data != whole.files.get(path) and data in contents for path, data in done.files.items())


def _read(log: PartitionLog) -> tuple[list[tuple[int, bytes]], RaftlogError | None]:
    """Return the batches that a reader which checks every batch gets, as (base offset, bytes), and the error that ended
    it."""
    found: list[tuple[int, bytes]] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        try:
            result = log.read(offset, 400, log.log_end_offset, blocking=True)
            require(result is not None and result.records, f"there are no records at offset {offset} of {log!r}")
            assert result is not None
            position = 0
            for position, header in iter_headers(result.records):
                parse_batch(result.records, position)
                found.append((header.base_offset, result.records[position : position + header.size]))
                position += header.size
            if position != len(result.records):
                return found, CorruptRecordError("the read ends within a batch")
        except (CorruptRecordError, StorageError, RaftlogError) as error:
            return found, error
        require(result.next_offset > offset, f"a read at offset {offset} made no progress")
        offset = result.next_offset
    return found, None


def _check_pieces(log: PartitionLog, begin: int = 0) -> None:
    offset = max(begin, log.log_start_offset)
    while offset < log.log_end_offset:
        piece = log.check(offset, 1 << 20)
        require(piece.next_offset > offset, f"a check at offset {offset} made no progress")
        offset = piece.next_offset


def _check_batches(log: PartitionLog, found: list[tuple[int, bytes]], written: Written | None) -> None:
    """Check the batches that were read from a log that reports no damage."""
    expected = None
    for base_offset, data in found:
        header = parse_batch(data)
        require(
            expected is None or base_offset == expected,
            f"a batch at offset {base_offset} follows where the next must have offset {expected}",
        )
        expected = header.next_offset
        if written is not None:
            require(
                written.batches.get(base_offset) == data,
                f"the batch at offset {base_offset} is not the one that was written",
            )
        if header.is_control:
            placed_markers(data)
    if found:
        require(
            found[0][0] <= log.log_start_offset,
            f"the first batch begins at {found[0][0]}, behind the log start {log.log_start_offset}",
        )
        require(expected == log.log_end_offset, f"the log ends at {log.log_end_offset}, but its batches at {expected}")


def _go_on(manager: LogManager, storage: MemoryStorage, done: Damage) -> None:
    """Append to what is served, stop cleanly, and open it once more: it is what it was."""
    ends: dict[bytes, int] = {}
    for log in manager.logs():
        batch = keyed_batch([(b"new", b"value")], 3_000_000)
        epoch = max(9, log.leader_epochs.latest_epoch)
        try:
            end = log.log_end_offset
            result = log.append(batch, validate_produced(batch), leader_epoch=epoch, now_ms=3_000_000)
            log.flush()
        except RaftlogError:
            continue
        require(result.base_offset == end, f"an append got offset {result.base_offset}, but the log ended at {end}")
        log.high_watermark = log.log_end_offset
        ends[log.topic_id] = log.log_end_offset
    manager.close()
    again = open_manager(storage, config=CONFIG, clock=FakeClock(4_000_000))
    for topic_id, end in ends.items():
        log_again = again.get(topic_id, 0)
        if log_again is None:
            require(
                (topic_id, 0) in again.corrupt_logs or again.offline_dirs,
                "a log that was served is gone after a restart",
            )
        else:
            require(log_again.log_end_offset == end, f"{log_again!r} ended at {end} before the restart")
    again.close()
