"""Reading the write-ahead log back at a start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from raftlog.errors import CorruptRecordError
from raftmeta.disk import MetadataDisk
from raftmeta.raft.segments import (
    ENTRY,
    PREFIX,
    TMP,
    TRUNCATE,
    VOTE,
    Record,
    Segment,
    first_sequences,
    split_records,
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

    def replay(self, record: Record, where: str) -> None:
        """Do what a record says."""
        kind, first, second, data = record
        entries = self.entries
        if kind == ENTRY:
            if entries and first != entries[-1][1] + 1:
                raise CorruptRecordError(f"{where}: entry {first} follows entry {entries[-1][1]}")
            entries.append((data, first, second))
            self.highest_in_segment = max(self.highest_in_segment, first)
        elif kind == VOTE:
            self.term, self.voted_for = first, second
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
        following = first + len(payloads)
        if at < len(firsts) - 1 and following != firsts[at + 1]:
            raise CorruptRecordError(
                f"{where} is damaged at byte {end}: it ends with frame {following - 1}, and the next file begins with "
                f"{firsts[at + 1]}; restore the directory from a copy"
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
            raise CorruptRecordError(f"{disk.path}: the log has no entry; restore the directory from a copy")
        _make_durable(disk, found, torn=data.count(0, end) != len(data) - end)
    for name in names:
        if name.startswith(PREFIX) and name.endswith(TMP):
            disk.remove(name)
    return found


def _make_durable(disk: MetadataDisk, found: RecoveredLog, *, torn: bool) -> None:
    """Cut off what is torn, and sync: what a killed process had written but not synced is about to be seen."""
    name = found.segment.name
    if torn:
        logger.warning("%s/%s: dropped what a crash left unfinished at byte %d", disk.path, name, found.position)
        disk.truncate(name, found.position)
        found.allocated = found.position
    disk.sync(name)
    disk.sync_dir()
