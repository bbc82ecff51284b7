"""Logs of batches in which transactions of several producers lie interleaved, and what readers must get of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
from hypothesis import strategies as st

from raftlog.format import Attributes, Columns, encode_batch
from raftlog.format.control import Marker, encode_control


class Aborted(NamedTuple):
    """An aborted transaction; both offsets inclusive, the last one that of its marker."""

    producer_id: int
    first_offset: int
    last_offset: int


def key_of(offset: int) -> bytes:
    """Return the key of the record at an offset; there are five."""
    return b"k%d" % (offset * 7 % 5)


@dataclass
class TransactionalLog:
    """Batches as they rest in a log. Values of records are their offsets, keys `key_of` them."""

    batches: list[tuple[int, bytes]] = field(default_factory=list)
    """(base offset, batch)"""
    end_offset: int = 0
    committed: list[int] = field(default_factory=list)
    """Offsets of records that a reader of committed ones gets, in order once `settle` was called."""
    records: list[int] = field(default_factory=list)
    aborted: list[Aborted] = field(default_factory=list)
    open: dict[int, list[int]] = field(default_factory=dict)
    """Producer id to the offsets of its open transaction."""
    epochs: dict[int, int] = field(default_factory=dict)

    def produce(self, rows: int, producer_id: int = -1, *, transactional: bool = False) -> None:
        """Append a batch of a producer, or of none."""
        offsets = list(range(self.end_offset, self.end_offset + rows))
        batch = encode_batch(
            Columns(
                pa.array([b"%d" % offset for offset in offsets], pa.binary()),
                key=pa.array([key_of(offset) for offset in offsets], pa.binary()),
            ),
            1_000,
            attributes=int(Attributes.TRANSACTIONAL) if transactional else 0,
            base_offset=self.end_offset,
            leader_epoch=3,
            producer_id=producer_id,
            producer_epoch=self.epochs.setdefault(producer_id, 0) if producer_id >= 0 else -1,
            base_sequence=0 if producer_id >= 0 else -1,
        )
        self.batches.append((self.end_offset, batch))
        self.records += offsets
        (self.open.setdefault(producer_id, []) if transactional else self.committed).extend(offsets)
        self.end_offset += rows

    def end(self, decisions: dict[int, bool]) -> None:
        """Append one control batch that ends transactions: producer id to whether it is committed."""
        markers = []
        base = self.end_offset
        for producer_id, commit in decisions.items():
            self.epochs[producer_id] = self.epochs.get(producer_id, 0) + 1
            offsets = self.open.pop(producer_id, [])
            markers.append(Marker(producer_id, self.epochs[producer_id], commit, 0, offsets[0] if offsets else -1))
            if commit:
                self.committed = sorted(self.committed + offsets)
            elif offsets:
                self.aborted.append(Aborted(producer_id, offsets[0], self.end_offset))
            self.end_offset += 1
        self.batches.append((base, encode_control(markers, 1_000, base_offset=base, leader_epoch=3)))

    @property
    def last_stable_offset(self) -> int:
        """Where the oldest open transaction begins."""
        return min((offsets[0] for offsets in self.open.values()), default=self.end_offset)

    def overlapping(self, first_offset: int, end_offset: int) -> list[Aborted]:
        """Return the aborted transactions that a frame of these offsets names."""
        return [a for a in self.aborted if a.last_offset >= first_offset and a.first_offset < end_offset]


@st.composite
def transactional_logs(draw: st.DrawFn, *, max_steps: int = 25) -> TransactionalLog:
    """Logs of up to `max_steps` batches by three producers and some without numbers."""
    log = TransactionalLog()
    for _ in range(draw(st.integers(1, max_steps))):
        kind = draw(st.sampled_from(["plain", "transactional", "transactional", "end"]))
        if kind == "plain":
            log.produce(draw(st.integers(1, 4)))
        elif kind == "transactional":
            log.produce(draw(st.integers(1, 4)), draw(st.integers(1, 3)), transactional=True)
        elif log.open:
            some = draw(st.lists(st.sampled_from(sorted(log.open)), min_size=1, unique=True))
            log.end({producer_id: draw(st.booleans()) for producer_id in some})
    return log
