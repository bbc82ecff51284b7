"""What is remembered of one producer, and of all of them at one moment. Pure; `producer_state.py` says what for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from broker.log.transactions import Undecided

REMEMBERED_BATCHES: Final = 5
MAX_SEQUENCE: Final = (1 << 31) - 1
NO_TIMESTAMP: Final = -1
SEQUENCES: Final = MAX_SEQUENCE + 1


def sequence_after(sequence: int, count: int) -> int:
    """Return the sequence `count` records further on; after 2^31-1 comes 0."""
    return (sequence + count) % SEQUENCES


@dataclass(frozen=True, slots=True)
class ProducerLimits:
    """How long and how many producer ids a log remembers."""

    expiration_ms: int = 86_400_000
    """producer.id.expiration.ms: since a producer's last append, by this broker's clock."""
    max_ids: int = 100_000
    """producer.ids.max, in each partition."""


class Duplicate(NamedTuple):
    """Where the records of a batch are already."""

    base_offset: int
    last_offset: int
    timestamp_ms: int
    """The log append time, -1 with the producer's own times."""


class RememberedBatch(NamedTuple):
    """One of the last batches of a producer."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int
    """The log append time, -1 with the producer's own times."""


class ProducerState(NamedTuple):
    """One producer id.

    `batches`: at most five, oldest first, without a gap between them; none after a marker, or where those are lost.
    """

    epoch: int
    last_append_ms: int
    """Wall clock of this broker at the last append here."""
    batches: tuple[RememberedBatch, ...]
    first_offset: int = -1
    """Of the transaction that is open; -1: none is."""
    started_ms: int = 0
    """Wall clock of this broker when its first record was appended here; 0: none is open."""
    decision: bool | None = None
    """Of the marker that began this epoch: whether it was a commit; None: not known, or a batch began it."""

    def fence(self) -> ProducerState:
        """Return what holds of the producer whatever has followed: no lower epoch is taken."""
        return ProducerState(self.epoch, self.last_append_ms, (), decision=self.decision)

    @property
    def next_sequence(self) -> int:
        """What the next batch begins with."""
        return (self.batches[-1].last_sequence + 1) % SEQUENCES if self.batches else 0

    @property
    def last_sequence(self) -> int:
        """Of the last record in this epoch, -1: there is none."""
        return self.batches[-1].last_sequence if self.batches else -1

    @property
    def last_offset(self) -> int:
        """Of the producer's last record in this epoch, -1: there is none."""
        return self.batches[-1].last_offset if self.batches else -1


Layer = dict[int, ProducerState | None]
"""What was noted in some stretch of time, the longest ago first; None: the producer was forgotten."""


class FrozenProducers:
    """What was remembered at one moment, whatever is noted since; of use in any thread.

    It is the layers of which it consists, so that taking it costs nothing: reading them is what takes time.
    """

    __slots__ = ("layers", "undecided")

    def __init__(self, layers: tuple[Layer, ...], undecided: tuple[Undecided, ...] = ()) -> None:
        self.layers = layers
        self.undecided = undecided

    def together(self) -> dict[int, ProducerState]:
        """Return it as one table, the longest idle first."""
        merged: dict[int, ProducerState] = {}
        for layer in self.layers:
            for producer_id, state in layer.items():
                merged.pop(producer_id, None)
                if state is not None:
                    merged[producer_id] = state
        return merged

    def release(self) -> None:
        """Let go of it, one state after the other: a table that goes at once holds the interpreter up."""
        layers, self.layers = self.layers, ()
        states = [state for layer in layers for state in layer.values()]
        del layers
        while states:
            states.pop()
