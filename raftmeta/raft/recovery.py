"""Reading the write-ahead log back at a start."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field

from raftlog.errors import CorruptRecordError
from raftmeta.disk import DAMAGE_REMEDY, MetadataDisk
from raftmeta.raft import segments
from raftmeta.raft.segments import (
    COMMIT,
    ENTRY,
    PREFIX,
    TMP,
    TRUNCATE,
    VOTE,
    VOTE_RECORD,
    Record,
    Segment,
    first_sequences,
    split_records,
    torn_entries,
)

logger = logging.getLogger(__name__)

Entry = tuple[bytes, int, int]
"""(data, index, term), as PySyncObj has it."""

NO_OP = b"\x01"
"""The data of an entry without a command: a leader's first one of its term."""
FIRST_ENTRY: Entry = (NO_OP, 1, 0)
"""Every log begins with it, so it is not written."""
NOBODY = -1


@dataclass(slots=True)
class RecoveredLog:
    """What the files of a log say, and where the last one goes on."""

    segment: Segment
    entries: list[Entry]
    term: int = 0
    voted_for: int = NOBODY
    position: int = 0
    allocated: int = 0
    next_sequence: int = 1
    closed: list[tuple[str, int]] = field(default_factory=list)
    """Older files, and the highest index that each has an entry for."""
    highest_in_segment: int = 0
    committed: int = 1

    def replay(self, record: Record, where: str) -> None:
        """Do what a record says."""
        kind, first, second, data = record
        entries = self.entries
        if kind == ENTRY:
            if entries and first != entries[-1][1] + 1:
                raise CorruptRecordError(f"{where}: entry {first} follows entry {entries[-1][1]}; {DAMAGE_REMEDY}")
            entries.append((data, first, second))
            self.highest_in_segment = max(self.highest_in_segment, first)
        elif kind == VOTE:
            self.term, self.voted_for = first, second
        elif kind == COMMIT:
            self.committed = max(self.committed, first)
        elif kind == TRUNCATE:
            if entries:
                del entries[max(0, first - entries[0][1]) :]
        else:
            entries.clear()


def read_log(disk: MetadataDisk, directory_id: bytes) -> RecoveredLog | None:
    """Return the log, None if there is none yet; the tail that a crash tore is cut off.

    Raises:
        OSError: the disk failed.
        CorruptRecordError, UnsupportedVersion: the log cannot be read; nothing was changed.
    """
    names = disk.names()
    firsts = first_sequences(names)
    found: RecoveredLog | None = None
    end, data = 0, b""
    for at, first in enumerate(firsts):
        segment = Segment(directory_id, first)
        where = f"{disk.path}/{segment.name}"
        data = disk.read(segment.name)
        payloads, end = segment.split(data, where)
        if len(data) < segments.ALLOCATION_BYTES:
            raise CorruptRecordError(
                f"{where} is damaged: it was cut off at {len(data)} bytes, and a crash leaves at least "
                f"{segments.ALLOCATION_BYTES}; {DAMAGE_REMEDY}"
            )
        following = first + len(payloads)
        if at < len(firsts) - 1 and following != firsts[at + 1]:
            raise CorruptRecordError(
                f"{where} is damaged at byte {end}: it ends with frame {following - 1}, and the next file begins with "
                f"{firsts[at + 1]}; {DAMAGE_REMEDY}"
            )
        if found is None:
            found = RecoveredLog(segment, [FIRST_ENTRY] if first == 1 else [])
        else:
            found.closed.append((found.segment.name, found.highest_in_segment))
        found.segment, found.position, found.allocated = segment, end, len(data)
        found.next_sequence, found.highest_in_segment = following, 0
        for payload in payloads:
            for record in split_records(payload, where):
                found.replay(record, where)
    if found is not None:
        if not found.entries:
            raise CorruptRecordError(f"{disk.path}: the log has no entry; {DAMAGE_REMEDY}")
        _make_durable(disk, found, data[end:].rstrip(b"\0"))
    for name in names:
        if name.startswith(PREFIX) and name.endswith(TMP):
            disk.remove(name)
    return found


def _make_durable(disk: MetadataDisk, found: RecoveredLog, torn: bytes) -> None:
    """Blank what is torn, and sync: what a killed process had written but not synced is about to be seen."""
    name = found.segment.name
    if torn:
        logger.warning(
            "%s/%s: dropped the %d bytes that a crash left of an unfinished write at byte %d, with %d entries to be "
            "told in them; nobody was told that they are here",
            disk.path,
            name,
            len(torn),
            found.position,
            torn_entries(torn),
        )
        disk.write_at(name, found.position, bytes(len(torn)))
    disk.sync(name)
    disk.sync_dir()


def has_log(names: list[str]) -> bool:
    """Whether there is a log among these files."""
    return bool(first_sequences(names))


def unused_log(disk: MetadataDisk) -> uuid.UUID | None:
    """Return the directory id in a log that was made and holds nothing yet: no entry, term or vote; else None.

    Raises:
        CorruptRecordError, UnsupportedVersion: it cannot be read.
    """
    if first_sequences(disk.names()) != [1]:
        return None
    name = Segment(bytes(16), 1).name
    data, where = disk.read(name), f"{disk.path}/{name}"
    directory_id = data[8:24].ljust(16, b"\0")
    payloads, end = Segment(directory_id, 1).split(data, where)
    blank = VOTE_RECORD.pack(VOTE, 0, NOBODY)
    return uuid.UUID(bytes=directory_id) if payloads == [blank] and not data[end:].rstrip(b"\0") else None
