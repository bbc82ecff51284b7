"""The bound on the producers that a user begins within some minutes in the partitions that this broker leads. Pure.

A log remembers each producer id for `producer.id.expiration.ms`, and for LIVE_MS at least
(`broker/log/producer_state.py`), up to `producer.ids.max` of them in each partition. So a user with a topic of many
partitions could fill a broker's memory. Once all logs together remember too many ids, they forget idle ones
(`LogManager`). Ids that they may not forget yet are bounded here: within LIVE_MS a user may begin MOST_BEGUN
producers. A producer counts once in each partition that it writes to.

    first batch of a producer id that its partition does not know    `admit` allows or refuses it; it counts once it is
                                                                     in the log
    any other batch                                                  is not counted

No id is kept here: a count is dropped after WINDOW_MS, when the logs may forget the ids that it stands for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from broker.log.producer_state import LIVE_MS
from raftlog.errors import BrokerOverloaded

MOST_BEGUN: Final = 250_000
"""150 to 475 MB of the leader's memory, and of each follower's."""
AdmitProducer = Callable[[], Callable[[], None]]
"""`NewProducers.admit` for one user."""
SLOTS: Final = 10
SLOT_MS: Final = LIVE_MS // SLOTS
WINDOW_MS: Final = LIVE_MS + SLOT_MS
"""One slot more, since the last producer of a slot may have begun at its end."""


class _Begun:
    """What one user has begun: a count for each slot, and their sum."""

    __slots__ = ("count", "slots")

    def __init__(self) -> None:
        self.count = 0
        self.slots: deque[tuple[int, int]] = deque()

    def forget(self, slot: int) -> None:
        """Drop the counts that are too old when `slot` begins."""
        while self.slots and self.slots[0][0] < slot - SLOTS:
            self.count -= self.slots.popleft()[1]

    def add(self, slot: int) -> None:
        self.count += 1
        if self.slots and self.slots[-1][0] == slot:
            self.slots[-1] = slot, self.slots[-1][1] + 1
        else:
            self.slots.append((slot, 1))


class NewProducers:
    """The counts of all users. `now_ms` returns the monotonic time."""

    def __init__(self, now_ms: Callable[[], float], most: int = MOST_BEGUN) -> None:
        self._now_ms = now_ms
        self._most = most
        self._begun: dict[str, _Begun] = {}
        self._slot = 0

    def admit(self, name: str) -> Callable[[], None]:
        """Check that a user may begin a producer in a partition; return what to call at once when it has.

        A batch that is not appended, as on a full disk, begins nothing, however often it is sent.

        Raises:
            BrokerOverloaded: it has begun too many.
        """
        slot = int(self._now_ms() // SLOT_MS)
        if slot != self._slot:
            self._slot = slot
            for begun in self._begun.values():
                begun.forget(slot)
            self._begun = {user: begun for user, begun in self._begun.items() if begun.count}
        begun = self._begun.setdefault(name, _Begun())
        if begun.count >= self._most:
            raise BrokerOverloaded(
                f"{name} has begun {begun.count} producers within the last {WINDOW_MS // 60_000} minutes on this "
                f"broker (each counts once for each partition), and may begin {self._most}: use fewer producers and "
                "keep them open, or write to fewer partitions with each"
            )
        return partial(begun.add, slot)
