"""All that a log remembers of its producers as one table: in which order, which go, and how it is taken for a snapshot.

Pure; what is remembered of one producer, and what follows from it, is in `producer_entries.py` and `producer_state.py`.

Forgotten is who has been idle for `producer.id.expiration.ms` (KIP-854), and, where there is no room, who has been idle
for longest; never one whose transaction is open, as its marker has to find it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from typing import Final, Self, cast

from broker.log.producer_entries import FrozenProducers, Layer, ProducerLimits, ProducerState
from broker.log.transactions import OpenTransaction, OpenTransactions, Undecided

LIVE_MS: Final = 600_000
"""A producer that has appended within this time is never forgotten for want of room: its last batch may be in doubt."""
FENCE_MS: Final = 60_000
"""Likewise one of which only a marker is left: nothing of it is in doubt, but a late batch of what has ended has to be
refused for as long as one may be on its way."""
MAX_LAYERS: Final = 4
SMALL_LAYER: Final = 1_000
"""Layers that have no more together are merged as they are made."""
MAX_FORGOTTEN: Final = 1_000
"""Producers that make room for those of one control batch."""


class ProducerTable:
    """The producers of one log, in the order of their last appends.

    Invariants: at most `limits.max_ids` ids, unless more have a transaction open; of each at most five batches. The
    order is that of the log. The layers and then `_recent`, one over the other, are `_producers`; a layer never
    changes. `transactions` has the open ones of `_producers`, `_ended` those of which only a marker or a fence is left,
    `_idle` the others; both in the order of `_producers`, which is that in which every replica forgets them.
    """

    __slots__ = ("_ended", "_idle", "_layers", "_newest_ms", "_producers", "_recent", "limits", "transactions")

    def __init__(
        self,
        limits: ProducerLimits | None = None,
        producers: Iterable[tuple[int, ProducerState]] = (),
        undecided: Iterable[Undecided] = (),
    ) -> None:
        self.limits: Final = limits or ProducerLimits()
        self._producers = OrderedDict(producers)
        self._newest_ms = max((state.last_append_ms for state in self._producers.values()), default=0)
        self.transactions: Final = OpenTransactions(
            (
                (producer_id, OpenTransaction(state.epoch, state.first_offset, state.started_ms))
                for producer_id, state in self._producers.items()
                if state.first_offset >= 0
            ),
            undecided,
        )
        self._idle = OrderedDict[int, None]()
        self._ended = OrderedDict[int, None]()
        for producer_id, state in self._producers.items():
            if state.first_offset < 0:
                (self._idle if state.batches else self._ended)[producer_id] = None
        self._layers: tuple[Layer, ...] = ()
        self._recent: Layer = dict(self._producers)

    def __len__(self) -> int:
        return len(self._producers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerTable) and list(self.items()) == list(other.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self._producers)})"

    def items(self) -> Iterator[tuple[int, ProducerState]]:
        """Yield (producer id, state), the longest idle first."""
        return iter(self._producers.items())

    def get(self, producer_id: int) -> ProducerState | None:
        """Return what is known of a producer id."""
        return self._producers.get(producer_id)

    def remembers(self, producer_id: int, base_offset: int) -> bool:
        """Whether the batch at `base_offset` is one of those by which a repetition is known; compaction keeps it."""
        state = self._producers.get(producer_id)
        return state is not None and any(batch.base_offset == base_offset for batch in state.batches)

    @property
    def newest_append_ms(self) -> int:
        """Wall clock at the last append of all; 0 where nothing is known."""
        return self._newest_ms if self._producers else 0

    def copy(self) -> Self:
        """Return what is remembered now; later changes of one do not show in the other. Takes a while, see `freeze`."""
        return type(self)(self.limits, self.items(), self.transactions.undecided)

    def fences(self) -> Self:
        """Return what holds whatever was appended since: whom a higher epoch fences.

        Neither which numbers come next, nor which transactions are open: that may have changed.
        """
        return type(self)(self.limits, ((producer_id, state.fence()) for producer_id, state in self.items()))

    # Snapshots: nothing here takes longer where more is remembered, as it runs on the event loop

    @property
    def may_freeze(self) -> bool:
        """Whether another `freeze` is cheap in memory: each may keep a table, until `replace_layers`."""
        return len(self._layers) < MAX_LAYERS

    def freeze(self) -> FrozenProducers:
        """Return what is remembered now."""
        layers, recent = self._layers, self._recent
        if recent and layers and len(layers[-1]) + len(recent) <= SMALL_LAYER:
            together = dict(layers[-1])
            for producer_id, state in recent.items():
                together.pop(producer_id, None)
                together[producer_id] = state
            self._layers = (*layers[:-1], together)
            self._recent = {}
        elif recent:
            self._layers = (*layers, recent)
            self._recent = {}
        return FrozenProducers(self._layers, self.transactions.undecided)

    def replace_layers(self, frozen: FrozenProducers, together: dict[int, ProducerState]) -> None:
        """Keep `frozen.together()` instead of the layers of `frozen`, unless they have been replaced since."""
        count = len(frozen.layers)
        layers = self._layers
        if len(layers) >= count and all(mine is its for mine, its in zip(layers, frozen.layers, strict=False)):
            self._layers = (cast(Layer, together), *layers[count:])

    # The order, and who is forgotten

    def _may_forget(self, count: int, now_ms: int) -> bool:
        """Whether so many producers have been idle for long enough, and have no transaction open."""
        if count > MAX_FORGOTTEN:
            return False
        found = self._idle_since(self._ended, count, now_ms - FENCE_MS)
        return found >= count or found + self._idle_since(self._idle, count - found, now_ms - LIVE_MS) >= count

    def _idle_since(self, ids: Iterable[int], at_most: int, since_ms: int) -> int:
        """Return how many of `ids`, the longest idle first, have appended nothing since."""
        states = (self._producers[producer_id] for producer_id in islice(ids, at_most))
        return sum(1 for _ in takewhile(lambda state: state.last_append_ms < since_ms, states))

    def _put(self, producer_id: int, state: ProducerState) -> None:
        producers, recent = self._producers, self._recent
        former = producers.get(producer_id)
        if former is not None:
            if former.last_append_ms > state.last_append_ms:
                state = state._replace(last_append_ms=former.last_append_ms)
            producers.move_to_end(producer_id)
        self._place(producer_id, former, state)
        recent.pop(producer_id, None)  # to the end with it, too, also of one that was forgotten
        if state.last_append_ms > self._newest_ms:
            self._newest_ms = state.last_append_ms
        producers[producer_id] = recent[producer_id] = state
        if len(producers) > self.limits.max_ids:
            longest_idle = self._longest_idle()
            if longest_idle is not None and longest_idle != producer_id:
                self._forget(longest_idle)

    def _place(self, producer_id: int, former: ProducerState | None, state: ProducerState) -> None:
        """Put a producer to the end of those that it belongs to now."""
        before, now = self._order_of(former), self._order_of(state)
        if before is not None and before is not now:
            del before[producer_id]
        if now is not None:
            now[producer_id] = None
            if before is now:
                now.move_to_end(producer_id)

    def _order_of(self, state: ProducerState | None) -> OrderedDict[int, None] | None:
        """Return in which order a producer waits to be forgotten; None: it does not."""
        if state is None or state.first_offset >= 0:
            return None
        return self._idle if state.batches else self._ended

    def expire(self, now_ms: int, at_most: int | None = None) -> int:
        """Forget who has not appended for `limits.expiration_ms` (KIP-854), and return how many that were.

        `at_most`: so many; where that is what is returned, there may be more.
        """
        oldest_ms = now_ms - self.limits.expiration_ms
        count = 0
        for order in (self._idle, self._ended):
            while order and count != at_most:
                longest_idle = next(iter(order))
                if self._producers[longest_idle].last_append_ms >= oldest_ms:
                    break
                self._forget(longest_idle)
                count += 1
        return count

    def _longest_idle(self) -> int | None:
        """Return the producer that is the first to be forgotten for want of room, None: there is none.

        That which may be forgotten for the longest time, or may be first. One with an open transaction is not idle:
        its fate is unknown, and its marker has to find it.
        """
        idle, ended = next(iter(self._idle), None), next(iter(self._ended), None)
        if idle is None or ended is None:
            return ended if idle is None else idle
        producers = self._producers
        is_later = producers[ended].last_append_ms + FENCE_MS > producers[idle].last_append_ms + LIVE_MS
        return idle if is_later else ended

    def _forget(self, producer_id: int) -> None:
        order = self._order_of(self._producers.pop(producer_id))
        assert order is not None, "its marker would find nothing"
        del order[producer_id]
        self._recent.pop(producer_id, None)
        if any(producer_id in layer for layer in self._layers):
            self._recent[producer_id] = None
