"""One partition that this broker follows, as the session with its leader keeps it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from raftlog.errors import RaftlogError
from replication.ports import Done, FollowedPartition


class State(Enum):
    """Of one partition; `replication.follower_session` has the transitions."""

    WAITING = "waiting"
    OPENING = "opening"
    FOLLOWING = "following"
    TRUNCATING = "truncating"
    FLUSHING = "flushing"
    BACKING_OFF = "backing off"


class Followed:
    """One partition, followed in one epoch of its leader. `id` is that of its subscription, 0: it has none.

    Invariant, unless it is over: it has a subscription exactly while it is opening or following.
    """

    __slots__ = (
        "acked_end_offset",
        "attempts",
        "damaged_offset",
        "flush_end_offset",
        "id",
        "leader_epoch",
        "name",
        "on_held",
        "on_truncated",
        "over",
        "partition",
        "retry_at_ms",
        "state",
        "throttled",
        "unheld",
    )

    def __init__(
        self,
        partition: FollowedPartition,
        held: Callable[[Followed, int], None],
        truncated: Callable[[Followed, RaftlogError | None], None],
    ) -> None:
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.name = partition.name
        self.id = 0
        self.state = State.WAITING
        self.over = False
        self.attempts = 0
        self.retry_at_ms = 0.0
        self.acked_end_offset = 0
        self.flush_end_offset = 0
        """What has to be held before a partition that is flushing is opened again."""
        self.throttled = False
        """Whether it was opened as a throttled one."""
        self.damaged_offset: int | None = None
        """Where the leader has sent a batch that does not check, until it has been told."""
        self.unheld: deque[tuple[int, int]] = deque()
        """(log end, bytes) of what was appended while catching up and is not held yet, oldest first."""
        # One object each, so that equal callbacks are seen to be equal.
        self.on_held: Callable[[int], None] = lambda held_end_offset: held(self, held_end_offset)
        self.on_truncated: Done = lambda error: truncated(self, error)

    def check_invariants(self) -> None:
        """Check what the class promises."""
        has_subscription = self.state is State.OPENING or self.state is State.FOLLOWING
        assert self.over or has_subscription == (self.id != 0), f"{self.name} is {self.state.value} with id {self.id}"

    def backs_off_until(self, at_ms: float) -> bool:
        """Whether it waits for that instant still."""
        return not self.over and self.state is State.BACKING_OFF and self.retry_at_ms == at_ms

    # Credit that is out for what is not held

    def note_unheld(self, size_bytes: int) -> bool:
        """Remember what was just appended; return False if it is held already, or will not be."""
        if not self.id:
            return False
        log_end_offset = self.partition.fetch_state().log_end_offset
        if log_end_offset <= self.acked_end_offset:
            return False
        self.unheld.append((log_end_offset, size_bytes))
        return True

    def take_held(self, held_end_offset: int) -> int:
        """Return the bytes that are held now."""
        size_bytes = 0
        while self.unheld and self.unheld[0][0] <= held_end_offset:
            size_bytes += self.unheld.popleft()[1]
        return size_bytes

    def forget_unheld(self) -> int:
        """Return the bytes of which nothing will be heard."""
        size_bytes = sum(size for _, size in self.unheld)
        self.unheld.clear()
        return size_bytes
