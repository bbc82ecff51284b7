"""What a log remembers of its producers, on the disk: `<offset>.snapshot` in the directory of the partition.

A snapshot is of everything below its offset (exclusive), and stands for nothing that the log itself does not say: it
saves reading the log again from its start, and keeps what retention has taken from the log (KIP-360). One that is
missing or damaged is passed over; recovery goes on from an older one, or from where the log begins. Where retention has
taken what lies between the older one and the log, only the epochs of the older one count: numbers may have gone on
since, and transactions have ended.

The file has the form of `broker.log.checkpoints`, kind `producers`, a line for each producer id, longest idle first:

    PRODUCER_ID EPOCH LAST_APPEND_MS then for up to five batches BASE_SEQUENCE LAST_SEQUENCE BASE_OFFSET TIMESTAMP_MS

Times are milliseconds since 1970; the timestamp is the log append time, -1 with the producer's own times. The last
offset of a batch follows from its sequences; no batches: a marker was the last that came of the producer, or what came
is not known any more.

With transactions the file is of version 2, and other lines come before those:

    open PRODUCER_ID FIRST_OFFSET STARTED_MS          of a producer below whose transaction is open
    undecided MARKER_OFFSET FIRST_OFFSET              ended by a marker that was not below the high watermark yet
    aborted PRODUCER_ID FIRST_OFFSET LAST_OFFSET LAST_STABLE_OFFSET
                                                      by a marker in the segment that the offset lies in or ends
    decided COMMIT PRODUCER_ID...                     those below whose epoch began with a marker: 1 commit, 0 abort

A file without the last kind of lines was written before there was one: nothing is known of those decisions.

Of the aborted ones in earlier segments their `.txnindex` tells.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from broker.log.batch_scan import walk_headers
from broker.log.checkpoints import contradictions, decode_lines, encode_lines
from broker.log.producer_state import (
    MAX_SEQUENCE,
    REMEMBERED_BATCHES,
    ProducerLimits,
    ProducerState,
    ProducerStates,
    RememberedBatch,
)
from broker.log.segment import Segment
from broker.log.storage import TEMPORARY_SUFFIX, Storage, read_file, rewritten_anyway
from broker.log.transactions import AbortedTransaction, Undecided
from broker.log.txn_index import TxnIndex
from broker.log.txn_scan import read_markers
from raftlog.errors import CorruptRecordError, UnsupportedVersion
from raftlog.format import Attributes

logger = logging.getLogger(__name__)

SNAPSHOT_SUFFIX: Final = ".snapshot"
KEPT_SNAPSHOTS: Final = 2
SNAPSHOT_INTERVAL_BYTES: Final = 64 << 20
"""So many bytes of log at most are read again for the producers when a log is opened, besides those of one batch."""
_KIND: Final = "producers"
_NAME: Final = re.compile(r"(\d{20})\.snapshot")
_HEAD_FIELDS: Final = 3
_BATCH_FIELDS: Final = 4
_PLAIN_VERSION: Final = 1
_VERSION: Final = 2
_CONTROL: Final = int(Attributes.CONTROL)


def snapshot_name(offset: int) -> str:
    """Return the name of the snapshot of everything below `offset`."""
    return f"{offset:020d}{SNAPSHOT_SUFFIX}"


def snapshot_offsets(names: Iterable[str]) -> list[int]:
    """Return the offsets of the snapshots among the names in a directory, in order."""
    return sorted(int(matched[1]) for name in names if (matched := _NAME.fullmatch(name)))


class Snapshot(NamedTuple):
    """What a file holds. `aborted`: by markers in the segment that its offset lies in or ends."""

    producers: ProducerStates
    aborted: tuple[AbortedTransaction, ...] = ()


def encode_producers(
    producers: ProducerStates | Mapping[int, ProducerState],
    undecided: Iterable[Undecided] = (),
    aborted: Iterable[AbortedTransaction] = (),
) -> bytes:
    """Return the bytes of a snapshot: of version 1 where an earlier raftlog would understand it."""
    marked: list[str] = []
    lines: list[str] = []
    has_ended = False
    decided: dict[bool, list[int]] = {False: [], True: []}
    for producer_id, state in producers.items():
        lines.append(_line(producer_id, state))
        if state.first_offset >= 0:
            marked.append(f"open {producer_id} {state.first_offset} {state.started_ms}")
        has_ended |= not state.batches
        if state.decision is not None:
            decided[state.decision].append(producer_id)
    marked += (f"undecided {entry.marker_offset} {entry.first_offset}" for entry in undecided)
    marked += (f"aborted {' '.join(map(str, entry))}" for entry in aborted)
    marked += (f"decided {commit:d} {' '.join(map(str, ids))}" for commit, ids in decided.items() if ids)
    return encode_lines(_KIND, [*marked, *lines], _VERSION if marked or has_ended else _PLAIN_VERSION)


def _line(producer_id: int, state: ProducerState) -> str:
    head = f"{producer_id} {state.epoch} {state.last_append_ms}"
    batches = (f" {b.base_sequence} {b.last_sequence} {b.base_offset} {b.timestamp_ms}" for b in state.batches)
    return head + "".join(batches)


def decode_producers(path: str, data: bytes, limits: ProducerLimits) -> ProducerStates:
    """Return the producers of a snapshot; see `decode_snapshot`."""
    return decode_snapshot(path, data, limits).producers


def decode_snapshot(path: str, data: bytes, limits: ProducerLimits) -> Snapshot:
    """Return what a snapshot holds; of more ids than there may be now, those that appended last, and the open ones.

    Raises:
        UnsupportedVersion: written by a newer raftlog.
        CorruptRecordError: torn, altered, or of another kind.
    """
    lines = decode_lines(path, _KIND, data, _VERSION)
    with contradictions(path):
        return _read_lines(path, lines, limits)


def _read_lines(path: str, lines: Sequence[str], limits: ProducerLimits) -> Snapshot:
    producers: list[tuple[int, ProducerState]] = []
    started: dict[int, tuple[int, int]] = {}
    undecided: list[Undecided] = []
    aborted: list[AbortedTransaction] = []
    decided: dict[int, bool] = {}
    new = tuple.__new__
    for line in lines:
        word, _, rest = line.partition(" ")
        if not word.isdecimal():
            numbers = [int(number) for number in rest.split(" ")]
            match word, len(numbers):
                case "open", 3:
                    started[numbers[0]] = (numbers[1], numbers[2])
                case "undecided", 2:
                    undecided.append(Undecided(*numbers))
                case "aborted", 4:
                    aborted.append(AbortedTransaction(*numbers))
                case "decided", count if count > 1 and numbers[0] in (0, 1):
                    decided.update(dict.fromkeys(numbers[1:], bool(numbers[0])))
                case _:
                    raise CorruptRecordError(f"{path} is damaged: nothing is known of a line {line[:60]!r}")
            continue
        producer_id, epoch, last_append_ms, *numbers = map(int, line.split(" "))
        if len(numbers) % _BATCH_FIELDS or len(numbers) > _BATCH_FIELDS * REMEMBERED_BATCHES:
            raise CorruptRecordError(f"{path} is damaged: producer id {producer_id} has {len(numbers)} numbers")
        fields = iter(numbers)
        batches = tuple(
            [  # there may be half a million: nothing is called for each but what makes it
                new(RememberedBatch, (base, last, offset, offset + (last - base & MAX_SEQUENCE), timestamp_ms))
                for base, last, offset, timestamp_ms in zip(fields, fields, fields, fields, strict=True)
            ]
        )
        first_offset, started_ms = started.pop(producer_id, (-1, 0)) if started else (-1, 0)
        decision = decided.get(producer_id) if decided else None
        state = ProducerState(epoch, last_append_ms, batches, first_offset, started_ms, decision)
        producers.append((producer_id, state))
    if started:
        raise CorruptRecordError(f"{path} is damaged: nothing but a transaction is there of {sorted(started)[:5]}")
    over = len(producers) - limits.max_ids
    if over > 0:
        producers = [*(item for item in producers[:over] if item[1].first_offset >= 0), *producers[over:]]
    return Snapshot(ProducerStates(limits, producers, undecided), tuple(aborted))


def write_snapshot(storage: Storage, directory: str, offset: int, data: bytes, *, durably: bool) -> None:
    """Write the bytes of a snapshot aside; `place_snapshot` makes it one. Raises OSError."""
    aside = storage.open(f"{directory}/{snapshot_name(offset)}{TEMPORARY_SUFFIX}", create=True)
    aside.truncate(0)
    aside.write((data,), 0)
    if durably:
        with rewritten_anyway():
            aside.datasync()


def place_snapshot(storage: Storage, directory: str, offset: int, *, durably: bool) -> None:
    """Give a snapshot that was written aside its name. Raises OSError."""
    path = f"{directory}/{snapshot_name(offset)}"
    storage.rename(path + TEMPORARY_SUFFIX, path)
    if durably:
        storage.sync_dir(directory)


def load_snapshot(
    storage: Storage, directory: str, offsets: Iterable[int], end_offset: int, limits: ProducerLimits
) -> tuple[int, Snapshot]:
    """Return the newest of the snapshots at `offsets` that is not beyond `end_offset`, and its offset.

    (0, nothing known) when there is none. Raises OSError.
    """
    for offset in sorted(offsets, reverse=True):
        if offset > end_offset:
            continue
        path = f"{directory}/{snapshot_name(offset)}"
        try:
            data = read_file(storage, path)
            if data is not None:
                return offset, decode_snapshot(path, data, limits)
        except (CorruptRecordError, UnsupportedVersion) as error:
            logger.warning("the producers are read from the log instead: %s", error)
    return 0, Snapshot(ProducerStates(limits))


def rebuild_producers(
    storage: Storage,
    directory: str,
    offsets: Iterable[int],
    segments: Sequence[Segment],
    end_offset: int,
    limits: ProducerLimits,
    now_ms: int,
    txn_index: TxnIndex | None = None,
) -> ProducerStates:
    """Return what the log remembers of its producers below `end_offset`: a snapshot, and the batches behind it.

    `segments`: all that there are, in order. Where there is no snapshot all of them are read, also what lies below the
    log start. Of a snapshot from before a gap that no segment fills only the fences hold (`ProducerStates.fences`).
    `txn_index`, empty and of one of `segments`, gets the transactions aborted in it; it has to be the last one that
    reaches below `end_offset`, as only of that snapshots tell.

    Raises:
        InvalidBatch: bytes of the log that are no batch.
        OSError: the disk.
    """
    offset, (producers, known) = load_snapshot(storage, directory, offsets, end_offset, limits)
    begin_offset = segments[0].base_offset
    if offset < begin_offset and len(producers):
        logger.warning(
            "%s: what producers appended from offset %d to %d is not known any more; their last epochs before it are",
            directory,
            offset,
            begin_offset,
        )
        producers = producers.fences()
    aborted = [entry for entry in known if txn_index is not None and entry.last_offset >= txn_index.base_offset]
    for segment in segments:
        if segment.next_offset <= offset or segment.base_offset >= end_offset:
            continue
        opened = segment.opened
        if opened is None:
            file, start = storage.open(segment.log_path), 0
        else:
            file, start = opened.file, opened.index.floor(max(offset, segment.base_offset)).position
        for position, header in walk_headers(file, start, segment.size):
            if header.next_offset > end_offset:
                break
            if header.base_offset < offset:
                continue
            if header.attributes & _CONTROL:
                ended = producers.note_markers(read_markers(file, position, header), now_ms)
                if txn_index is not None and segment.base_offset == txn_index.base_offset:
                    aborted += ended
            else:
                producers.note(header, now_ms)
    if txn_index is not None:
        for entry in aborted:
            txn_index.append(entry)
    return producers
