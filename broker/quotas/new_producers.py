"""How many producers each user has lately begun in the partitions that this broker leads, and the bound on it. Pure.

A log remembers each producer id for `producer.id.expiration.ms`, and for LIVE_MS at least
(`broker/log/producer_state.py`): up to `producer.ids.max` of them, in each partition. So a user with a topic of many
partitions could have a broker remember very many. What can be forgotten is, once all logs together have too many
(`LogManager`). What cannot be forgotten is bounded here: within LIVE_MS, a user begins MOST_BEGUN producers, each
counted in each partition.

    first batch of a producer id that its partition does not know    `admit` allows or refuses it; it counts once it is
                                                                     in the log
    any other batch                                                  not looked at

The bound needs no memory of who began what: a count leaves after WINDOW_MS, when what it stands for can be forgotten.
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
Begins = Callable[[], Callable[[], None]]
"""`NewProducers.admit` for one user."""
SLOTS: Final = 10
SLOT_MS: Final = LIVE_MS // SLOTS
WINDOW_MS: Final = LIVE_MS + SLOT_MS
"""What a slot counts may be up to a slot younger than the slot."""


class _Begun:
    """What one user has begun: a count for each slot, and their sum."""

    __slots__ = ("count", "slots")

    def __init__(self) -> None:
        self.count = 0
        self.slots: deque[tuple[int, int]] = deque()

    def forget(self, slot: int) -> None:
        """Forget what is too old in a slot."""
        while self.slots and self.slots[0][0] < slot - SLOTS:
            self.count -= self.slots.popleft()[1]

    def add(self, slot: int) -> None:
        self.count += 1
        if self.slots and self.slots[-1][0] == slot:
            self.slots[-1] = slot, self.slots[-1][1] + 1
        else:
            self.slots.append((slot, 1))


class NewProducers:
    """The bound for all partitions that a broker leads. `now_ms`: returns the monotonic time."""

    def __init__(self, now_ms: Callable[[], float], most: int = MOST_BEGUN) -> None:
        self._now_ms = now_ms
        self._most = most
        self._begun: dict[str, _Begun] = {}
        self._slot = 0

    def count(self, name: str) -> int:
        """Return how many a user has begun lately."""
        begun = self._begun.get(name)
        return 0 if begun is None else begun.count

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
                f"{name} has begun {begun.count} producers within the last {WINDOW_MS // 60_000} minutes in partitions "
                f"that this broker leads, each counted in each partition, and may begin {self._most}: use fewer "
                "producers and keep them open, or write to fewer partitions with each"
            )
        return partial(begun.add, slot)
