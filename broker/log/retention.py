"""Which segments have outlived their topic's retention. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from broker.log.config import LogConfig


class SegmentFacts(Protocol):
    """What retention looks at."""

    @property
    def next_offset(self) -> int:
        """The first offset after the segment."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def max_timestamp_ms(self) -> int:
        """Largest timestamp; negative when the records have none."""
        ...


def expired_segments(segments: Sequence[SegmentFacts], config: LogConfig, last_stable_offset: int, now_ms: int) -> int:
    """Return how many of the oldest segments may go.

    Only what lies wholly below the last stable offset goes: the rest may not be committed or decided yet. By time, a
    segment goes when its largest timestamp is older than `retention_ms`; one without timestamps stays. By size, the
    oldest goes as long as the others alone have `retention_bytes`. Segments without records stay.
    """
    if not config.deletes:
        return 0
    left_bytes = sum(segment.size for segment in segments)
    count = 0
    for segment in segments:
        if segment.size == 0 or segment.next_offset > last_stable_offset:
            break
        too_old = (
            config.retention_ms is not None
            and segment.max_timestamp_ms >= 0
            and now_ms - segment.max_timestamp_ms > config.retention_ms
        )
        too_much = config.retention_bytes is not None and left_bytes - segment.size >= config.retention_bytes
        if not too_old and not too_much:
            break
        left_bytes -= segment.size
        count += 1
    return count
