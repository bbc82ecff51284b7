"""The numbers by which a broker knows a batch that it is sent again: producer id, epoch and sequence (KIP-98)."""

from __future__ import annotations

from typing import Final, NamedTuple

SEQUENCES: Final = 1 << 31
"""Sequence numbers are those of a signed 32-bit integer that are not negative; after the last comes 0 again."""
LAST_EPOCH: Final = (1 << 15) - 1
"""The largest producer epoch; after it a new producer id is needed."""
BATCHES_REMEMBERED: Final = 5
"""So many batches of a producer a broker knows again, so no more of a partition may be in flight (KIP-98)."""


class Number(NamedTuple):
    """What a batch carries: its producer, and the sequence number of its first record."""

    producer_id: int
    producer_epoch: int
    base_sequence: int

    def after(self, records: int) -> Number:
        """Return the number of what follows so many records."""
        return self._replace(base_sequence=(self.base_sequence + records) % SEQUENCES)


NO_NUMBER: Final = Number(-1, -1, -1)
"""A batch that is not recognised when it is sent again."""


class Numbering:
    """The numbers of one partition's batches.

    One producer has one id and, since brokers keep their state by partition, an epoch for each partition. A batch gets
    its number when it is taken for sending the first time (`take`) and keeps it however often it is sent again. What
    it will be is predicted when the batch is closed (`predict`), so that the bytes are right already in most cases.

    Transitions:
        without id -> numbering   `adopt`
        numbering  -> numbering   `start_over`: the next epoch, from sequence 0
        numbering  -> without id  `start_over` after the last epoch; `forget`: somebody else has used the id

    Invariants: `upcoming` is above every number taken in its epoch, but for wrapping around; an epoch is never used
    again after a later one of the same producer id.
    """

    __slots__ = ("_acknowledged", "_predicted", "upcoming")

    def __init__(self) -> None:
        self.upcoming: Number = NO_NUMBER
        """The number of the next batch that has none yet."""
        self._predicted: Number = NO_NUMBER
        self._acknowledged: Number | None = None
        """What follows the records that were acknowledged last."""

    @property
    def has_id(self) -> bool:
        """Whether there is a producer id."""
        return self.upcoming.producer_id >= 0

    def adopt(self, producer_id: int, producer_epoch: int) -> None:
        """Number with this id, from 0 on, which nobody else uses in this epoch or a later one."""
        assert producer_id >= 0
        assert 0 <= producer_epoch <= LAST_EPOCH
        self._begin(Number(producer_id, producer_epoch, 0))

    def start_over(self) -> None:
        """Number anew from 0 in the next epoch, or under an id still to be had if this one was the last.

        Only when nothing that keeps an older number will be sent, and nothing that gets a new one is in the log.
        """
        assert self.has_id
        producer_id, epoch, _ = self.upcoming
        self._begin(Number(producer_id, epoch + 1, 0) if epoch < LAST_EPOCH else NO_NUMBER)

    def forget(self) -> None:
        """Let the producer id go: another one is needed."""
        self._begin(NO_NUMBER)

    def _begin(self, number: Number) -> None:
        self.upcoming = self._predicted = number
        self._acknowledged = None

    def predict(self, records: int) -> Number:
        """Return the number that a batch just closed will have if all before it are sent."""
        number = self._predicted
        if number.producer_id >= 0:
            self._predicted = number.after(records)
        return number

    def repredict(self, waiting_records: int) -> None:
        """Predict anew: so many records wait without a number."""
        if self.has_id:
            self._predicted = self.upcoming.after(waiting_records)

    def take(self, records: int) -> Number:
        """Return the number of a batch that is sent for the first time."""
        assert self.has_id
        number = self.upcoming
        self.upcoming = number.after(records)
        return number

    def on_acknowledged(self, number: Number, records: int) -> None:
        """The broker holds a batch with this number."""
        self._acknowledged = number.after(records)

    def follows_acknowledged(self, number: Number) -> bool:
        """Whether what lies directly before this number was acknowledged: then it is in the log, or was lost."""
        return number == self._acknowledged
