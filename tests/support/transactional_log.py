"""A compacted log with transactions of several producers, and what readers of committed records must find in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Self

from broker.log.cleaner import clean, committed_end, plan_cleaning
from broker.log.config import LogConfig
from broker.log.producer_state import ProducerStates, rebuild_producers
from raftlog._core.positions import Rows, wanted_rows
from raftlog.format import HEADER_BYTES, Attributes, decode_batch, iter_headers, parse_header, validate_produced
from raftlog.format.aborted import AbortedRanges
from raftlog.format.control import Marker
from raftlog.format.header import build_batch
from raftlog.types import TopicPartition
from tests.support.keyed_log import KeyedLog, Record, keyed_batch, rows_of


def transactional_batch(
    rows: Sequence[tuple[bytes | None, bytes | None]], at_ms: int, numbers: tuple[int, int, int]
) -> bytes:
    """Return a transactional batch as its producer sends it; `numbers`: id, epoch, base sequence."""
    batch = keyed_batch(rows, at_ms, producer=numbers)
    header = parse_header(batch)
    return build_batch(header._replace(attributes=header.attributes | Attributes.TRANSACTIONAL), batch[HEADER_BYTES:])


class TransactionalKeyedLog(KeyedLog):
    """`written` has every record of a transaction that is committed, or of none; `pending` those that are open."""

    def __init__(self, config: LogConfig) -> None:
        self.epochs: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.pending: dict[int, list[Record]] = {}
        self.decided: list[tuple[int, int, list[Record], bool]] = []
        """(offset of the marker, producer id, records, committed)"""
        self.markers_below: int | None = None
        """Up to where all replicas have the log; None: there is this one only."""
        super().__init__(config)

    def stopped(self) -> Self:
        """Return another machine in the same state, where nothing runs any more: `stop` starts it."""
        made = super().stopped()
        made.epochs, made.sequences = dict(self.epochs), dict(self.sequences)
        made.pending = {producer_id: list(records) for producer_id, records in self.pending.items()}
        made.decided = list(self.decided)
        return made

    def produce(self, producer_id: int, *rows: tuple[bytes | None, bytes | None]) -> int:
        """Append a batch to the transaction of a producer, which begins one if none is open; return its offset."""
        epoch, sequence = self.epochs.setdefault(producer_id, 0), self.sequences.get(producer_id, 0)
        batch = transactional_batch(rows, self.clock.now, (producer_id, epoch, sequence))
        header = validate_produced(batch)
        assert self.log.check_producer(header, self.clock.now) is None, (
            "the log refuses a batch that continues its producer's sequence"
        )
        result = self.log.append(batch, header, leader_epoch=self.epoch, now_ms=self.clock.now)
        self.sequences[producer_id] = sequence + len(rows)
        records = self.pending.setdefault(producer_id, [])
        for offset, at_ms, key, value in rows_of(decode_batch(batch)):
            records.append((result.base_offset + offset, at_ms, key, value))
        return result.base_offset

    def end(self, decisions: Mapping[int, bool]) -> int:
        """End transactions in one control batch: producer id to whether it is committed; return its base offset."""
        markers = [
            Marker(producer_id, self.epochs.get(producer_id, 0) + 1, commit, coordinator_epoch=1)
            for producer_id, commit in decisions.items()
        ]
        result = self.log.append_markers(markers, leader_epoch=self.epoch, now_ms=self.clock.now)
        for number, marker in enumerate(markers):
            producer_id = marker.producer_id
            self.epochs[producer_id], self.sequences[producer_id] = marker.producer_epoch, 0
            records = self.pending.pop(producer_id, [])
            self.decided.append((result.base_offset + number, producer_id, records, marker.commit))
            if marker.commit:
                self.written = sorted(self.written + records)
        return result.base_offset

    @property
    def last_stable_offset(self) -> int:
        """Where records end that a reader of committed ones gets."""
        return committed_end(self.log)

    def clean(self, *, dedupe_bytes: int = 1 << 20, force: bool = True) -> bool:
        """Compact below the last stable offset."""
        plan = plan_cleaning(self.log, self.last_stable_offset, self.clock.now)
        if plan is None or not (plan.is_due or force):
            return False
        below = self.log.flushed_end_offset if self.markers_below is None else self.markers_below
        plan = plan._replace(markers_below=below)
        for _ in clean(plan, dedupe_bytes=dedupe_bytes, clock=self.clock.now_ms):
            pass
        return True

    def stop(self, dice: Random | None) -> None:
        """Lose power (None: kill -9) and start again; uncommitted content may be gone."""
        super().stop(dice)
        self._cut()

    def truncate(self, offset: int) -> None:
        """Cut what is not committed, from an offset on, as a follower does."""
        self.log.truncate_to(max(offset, self.log.high_watermark), now_ms=self.clock.now)
        end = self.log.log_end_offset
        self.written = [record for record in self.written if record[0] < end]
        self._cut()

    def _cut(self) -> None:
        """Forget what lies above the log end."""
        end = self.log.log_end_offset
        for offset, producer_id, records, commit in reversed(self.decided):
            if offset >= end:  # the marker is gone: its transaction is open again
                self.epochs[producer_id] -= 1
                self.pending[producer_id] = records
                if commit:
                    self.written = [record for record in self.written if record not in records]
        self.decided = [decision for decision in self.decided if decision[0] < end]
        for producer_id, records in list(self.pending.items()):
            kept = [record for record in records if record[0] < end]
            self.sequences[producer_id] = len(kept)
            self.pending[producer_id] = kept
            if not kept:
                del self.pending[producer_id]

    def visible(self) -> list[Record]:
        """Read as a consumer of committed records does."""
        found: list[Record] = []
        position, end = self.log.log_start_offset, self.last_stable_offset
        part = TopicPartition(self.log.topic, self.log.partition)
        while position < end:
            result = self.log.read(position, 300, end, blocking=True)
            assert result is not None
            assert result.next_offset > position, (
                f"a read at offset {position} ended at {result.next_offset}, without any progress"
            )
            ranges = AbortedRanges(self.log.aborted_transactions(position, result.next_offset))
            for rows in wanted_rows(part, result.records, position, check_crcs=True, aborted=ranges):
                if isinstance(rows, Rows):
                    found += [(r.offset, r.timestamp_ms, r.key, r.value) for r in rows.records()]
            position = result.next_offset
        return found

    def headers(self) -> list[tuple[int, int]]:
        """Return (base offset, attributes) of every batch that has rows."""
        found = []
        offset, end = self.log.log_start_offset, self.log.log_end_offset
        while offset < end:
            result = self.log.read(offset, 300, end, blocking=True)
            assert result is not None
            found += [(h.base_offset, h.attributes) for _, h in iter_headers(result.records) if h.record_count]
            offset = result.next_offset
        return found

    def rebuilt(self) -> ProducerStates:
        """Return the state of producers that follows from the log alone, without a snapshot."""
        log = self.log
        return rebuild_producers(
            self.storage, log.directory, (), log.segments, log.log_end_offset, log.producers.limits, self.clock.now
        )

    def check_committed(self, *, half_cleaned: bool = False) -> None:
        """A reader gets committed records only, the last one of each key among them, all of those not compacted.

        `half_cleaned`: a cleaning has come to nothing, so it is not known which those are.
        """
        end, found = self.last_stable_offset, self.visible()
        committed = [record for record in self.written if record[0] < end]
        assert found == sorted(found), "the cleaner changed the order of records"
        assert set(found) <= set(committed), "readers get a record that is not committed"
        last = {record[2]: record for record in committed}
        missing = [record for record in last.values() if record not in found and record[3] is not None]
        assert not missing, f"the cleaner removed the last records of keys: {missing}"
        clean_below = end if half_cleaned else self.log.cleaned.first_dirty_offset
        untouched = [record for record in committed if record[0] >= clean_below]
        assert [record for record in found if record[0] >= clean_below] == untouched, (
            f"the cleaner changed records from offset {clean_below} on, which it has not cleaned"
        )

    def check_rebuilt(self) -> None:
        """After any compaction the log alone tells what is open, and what is known of producers."""
        rebuilt, live = self.rebuilt(), self.log.producers
        assert dict(rebuilt.transactions.items()).keys() == dict(live.transactions.items()).keys(), (
            "a rebuilt producer state has other open transactions than the live one"
        )
        for producer_id, transaction in live.transactions.items():
            again = rebuilt.transactions.get(producer_id)
            assert again is not None
            assert (again.epoch, again.first_offset) == (transaction.epoch, transaction.first_offset), (
                f"a rebuilt producer state has another transaction of producer {producer_id}: {again} instead of "
                f"{transaction}"
            )
        for producer_id, state in live.items():
            known = rebuilt.get(producer_id)
            assert known is not None, (
                f"a rebuilt producer state does not know producer {producer_id}, which the live one does"
            )
            assert known.epoch == state.epoch, (
                f"a rebuilt producer state has epoch {known.epoch} of producer {producer_id}, but the live one "
                f"{state.epoch}"
            )
            assert known.batches == state.batches, (
                f"a rebuilt producer state has batches {known.batches} of producer {producer_id}, but the live one "
                f"{state.batches}"
            )
            assert known.last_written == state.last_written, (
                f"a rebuilt producer state has {known.last_written} as last sequence of producer {producer_id}, but "
                f"the live one {state.last_written}"
            )
