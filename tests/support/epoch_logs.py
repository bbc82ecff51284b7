"""Logs of nothing but epochs: enough to see where they part, and how a follower is brought to agree with its leader."""

from __future__ import annotations

from replication.leader_epochs import NO_EPOCH, EpochEntry, LeaderEpochCache, check_prefix, truncation_offset
from replication.ports import Accepted, Diverging, OutOfRange

MAX_QUESTIONS = 50


class EpochLog:
    """The leader epoch of each record, from `start` on; with the cache that a broker keeps of it."""

    def __init__(self, epochs: list[int], start: int = 0) -> None:
        self.start = start
        self.epochs = list(epochs)
        self.started_over = False

    @property
    def end(self) -> int:
        """Exclusive."""
        return self.start + len(self.epochs)

    @property
    def last_epoch(self) -> int:
        """Of the last record; -1 without one."""
        return self.epochs[-1] if self.epochs else NO_EPOCH

    @property
    def cache(self) -> LeaderEpochCache:
        """The content that the broker's cache would have."""
        entries = dict[int, int]()
        for offset, epoch in enumerate(self.epochs, self.start):
            entries.setdefault(epoch, offset)
        return LeaderEpochCache(EpochEntry(*entry) for entry in entries.items())

    def records(self) -> dict[int, int]:
        """Return epoch by offset."""
        return dict(enumerate(self.epochs, self.start))

    def append(self, epoch: int, count: int) -> None:
        """Append as the leader of `epoch`."""
        self.epochs += [epoch] * count

    def copy(self, leader: EpochLog, count: int) -> None:
        """Append the next records of the leader, at most `count`."""
        first = self.end - leader.start
        assert first >= 0, "the follower begins before the leader's log, so it must start over before it copies"
        self.epochs += leader.epochs[first : first + count]

    def truncate(self, end: int) -> None:
        """Cut back to `end`; below the start, start over there."""
        if end < self.start:
            self.start_over(end)
        else:
            del self.epochs[end - self.start :]

    def start_over(self, start: int) -> None:
        """Drop everything."""
        self.start, self.epochs, self.started_over = start, [], True

    def expire(self, count: int) -> None:
        """Drop the oldest records."""
        count = min(count, len(self.epochs))
        del self.epochs[:count]
        self.start += count


def align(leader: EpochLog, follower: EpochLog) -> int:
    """Open `follower` at `leader`, and do what it answers until it accepts; return how often was asked."""
    for asked in range(1, MAX_QUESTIONS):
        match check_prefix(leader.cache, leader.start, leader.end, follower.end, follower.last_epoch):
            case Accepted():
                return asked
            case Diverging() as diverging:
                follower.truncate(truncation_offset(follower.cache, follower.end, diverging))
            case OutOfRange(log_start_offset):
                follower.start_over(log_start_offset)
    raise AssertionError(
        f"after {MAX_QUESTIONS - 1} questions the follower still has not found where its log and the leader's part"
    )
