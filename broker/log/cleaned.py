"""How far a log has been compacted, and when: what decides which tombstones have been there long enough.

    cleaner-checkpoint   per partition  `FIRST_DIRTY_OFFSET`, then lines `OFFSET WALL_MS` (checkpoints.py)

A line says: at that time no record below OFFSET was followed by another one of its key below OFFSET. So a tombstone
below it hides nothing any more, and may go once whoever reads the log from its begin has had `delete.retention.ms` to
come past it (docs/adr/0013). A file that is missing or damaged means that nothing is known to be clean, which costs
work only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from broker.log.checkpoints import decode_lines, encode_lines
from broker.log.storage import Storage, read_file, replace_file
from raftlog.errors import CorruptRecordError, UnsupportedVersion

logger = logging.getLogger(__name__)

CLEANER_CHECKPOINT: Final = "cleaner-checkpoint"
_KIND: Final = "cleaner"
_STEPS: Final = 32
"""Times are kept `delete.retention.ms / _STEPS` apart: tombstones stay so much longer, never shorter."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """`first_dirty_offset`: below it the log is clean. `times`: (offset, wall clock in ms), ascending in both."""

    first_dirty_offset: int = 0
    times: tuple[tuple[int, int], ...] = ()

    def tombstones_below(self, now_ms: int, delete_retention_ms: int) -> int:
        """Return the offset below which tombstones have been there for `delete_retention_ms` since they were clean."""
        return max((offset for offset, at_ms in self.times if now_ms - at_ms >= delete_retention_ms), default=0)

    def reached(self, offset: int, now_ms: int, delete_retention_ms: int) -> Cleaned:
        """Return what is known after a cleaning up to `offset`.

        However often that is: of the times that lie close together the first one stays, and the newest of all, so there
        is always one that will be due next. Of those that are due only the last one counts.
        """
        due = self.tombstones_below(now_ms, delete_retention_ms)
        times = [(below, at_ms) for below, at_ms in self.times if due <= below < offset and at_ms <= now_ms]
        if self.times and self.times[-1][0] == offset:  # nothing new came: since then it has been clean
            times.append(self.times[-1])
        else:
            times.append((offset, now_ms))
        kept = times[:1]
        for time in times[1:-1]:
            if time[1] - kept[-1][1] >= max(1, delete_retention_ms // _STEPS):
                kept.append(time)
        return Cleaned(offset, (*kept, *times[1:][-1:]))

    def cut(self, offset: int) -> Cleaned:
        """Return what is known once the records from `offset` on may be others."""
        times = [(min(below, offset), at_ms) for below, at_ms in self.times]
        kept = {below: at_ms for below, at_ms in reversed(times) if below > 0}  # of several, the earliest time
        return Cleaned(min(self.first_dirty_offset, offset), tuple(sorted(kept.items())))


def load_cleaned(storage: Storage, directory: str) -> Cleaned:
    """Return what the checkpoint of a partition says."""
    path = f"{directory}/{CLEANER_CHECKPOINT}"
    data = read_file(storage, path)
    if data is None:
        return Cleaned()
    try:
        first, *times = decode_lines(path, _KIND, data)
        pairs = tuple((int(below), int(at_ms)) for below, at_ms in map(str.split, times))
        return Cleaned(int(first), pairs)
    except (CorruptRecordError, UnsupportedVersion, ValueError) as error:
        logger.warning("a log is compacted from its begin again: %s", error)
        return Cleaned()


def store_cleaned(storage: Storage, directory: str, cleaned: Cleaned) -> None:
    """Replace the checkpoint of a partition, durably."""
    lines = [str(cleaned.first_dirty_offset), *(f"{below} {at_ms}" for below, at_ms in cleaned.times)]
    replace_file(storage, directory, CLEANER_CHECKPOINT, encode_lines(_KIND, lines))
