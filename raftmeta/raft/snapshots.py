"""Snapshots of the replicated state: one file each, whole or absent.

    raft-snapshot-<index, 20 digits>, little-endian
      0   8  magic          b"RLRAFTS1"
      8   8  index          u64, of the last entry in it
     16   8  term           u64, of that entry
     24   8  previous term  u64, of the entry before it
     32   4  entry length   u32
     36   n  entry          the last entry's data, as in the log
   36+n   8  state length   u64
   44+n   m  state          what `ReplicatedState.encode` returned
 44+n+m  32  sha256         of everything before it

The same bytes travel to a follower that is too far behind. A snapshot that does not parse stops the node; it is never
deleted, and never passed over for an older one, whose log is gone.

Taking snapshots of the own state, and taking in those of a leader.

A snapshot is captured between cycles, then encoded and made durable off the loop; only then entries before it may go.
One that comes from a leader is collected, checked, read and made durable off the loop, and only then put in the place
of state and log; only then it is acknowledged. What cannot be read is not written down: the node stops, and can start
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import struct
from dataclasses import dataclass, field
from typing import Final

from raftlog.errors import CorruptRecordError, InternalError, RaftlogError, StorageError, UnsupportedVersion
from raftlog.v1.raft_pb2 import SnapshotChunk
from raftmeta.disk import DAMAGE_REMEDY, NO_SPACE, MetadataDisk
from raftmeta.raft.consensus import Consensus, RaftOptions
from raftmeta.raft.ports import ReplicatedState, RunOffLoop
from raftmeta.raft.wal import WriteAheadLog

_MAGIC = b"RLRAFTS1"
_HEADER = struct.Struct("<8sQQQI")
_STATE_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_PREFIX = "raft-snapshot-"
_TMP = ".tmp"
assert _HEADER.size == 36


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after the entry at `index`, and that entry, behind which the log continues."""

    index: int
    term: int
    previous_term: int
    entry: bytes
    state: bytes


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the content of a snapshot's file."""
    assert snapshot.index >= 2, "the first entry is the same everywhere: there is nothing to say about it"
    body = b"".join(
        (
            _HEADER.pack(_MAGIC, snapshot.index, snapshot.term, snapshot.previous_term, len(snapshot.entry)),
            snapshot.entry,
            _STATE_LENGTH.pack(len(snapshot.state)),
            snapshot.state,
        )
    )
    return body + hashlib.sha256(body).digest()


def decode_snapshot(data: bytes, where: str) -> Snapshot:
    """Return a snapshot.

    Raises:
        UnsupportedVersion: written by a newer version.
        CorruptRecordError: damaged.
    """
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(body) < _HEADER.size + _STATE_LENGTH.size or hashlib.sha256(body).digest() != digest:
        raise CorruptRecordError(f"{where} is damaged: its checksum does not match; {DAMAGE_REMEDY}")
    magic, index, term, previous_term, entry_bytes = _HEADER.unpack_from(body)
    if magic != _MAGIC:
        raise UnsupportedVersion(f"{where} has another format ({magic!r}); run the version that wrote it")
    at = _HEADER.size + entry_bytes
    if at + _STATE_LENGTH.size > len(body):
        raise CorruptRecordError(f"{where} contradicts itself: the last entry is longer than the file; {DAMAGE_REMEDY}")
    (state_bytes,) = _STATE_LENGTH.unpack_from(body, at)
    state = body[at + _STATE_LENGTH.size :]
    if len(state) != state_bytes:
        raise CorruptRecordError(
            f"{where} contradicts itself: {len(state)} bytes of state instead of {state_bytes}; {DAMAGE_REMEDY}"
        )
    return Snapshot(index, term, previous_term, body[_HEADER.size : at], state)


class SnapshotStore:
    """The snapshots in a metadata directory. Blocking; may be used from any one thread at a time."""

    def __init__(self, disk: MetadataDisk) -> None:
        self._disk = disk

    def newest(self) -> int | None:
        """Return the index of the newest snapshot."""
        return max(self._indexes(), default=None)

    def read(self, index: int) -> Snapshot:
        """Return a snapshot.

        Raises:
            CorruptRecordError, UnsupportedVersion: it does not parse.
        """
        name = _name(index)
        snapshot = decode_snapshot(self._disk.read(name), f"{self._disk.path}/{name}")
        if snapshot.index != index:
            raise CorruptRecordError(
                f"{self._disk.path}/{name} holds the snapshot at {snapshot.index}; {DAMAGE_REMEDY}"
            )
        return snapshot

    def read_bytes(self, index: int) -> bytes:
        """Return a snapshot's file unchecked, to send it; the receiver checks it."""
        return self._disk.read(_name(index))

    def write(self, index: int, data: bytes) -> None:
        """Make an encoded snapshot durable; its name appears only when it is complete."""
        name = _name(index)
        try:
            self._disk.write(name + _TMP, data)
            self._disk.sync(name + _TMP)
            self._disk.rename(name + _TMP, name)
        except OSError:
            with contextlib.suppress(OSError):  # a part of it takes up the space that is missing
                self._disk.remove(name + _TMP)
            raise
        self._disk.sync_dir()

    def remove_older(self, index: int) -> None:
        """Remove the snapshots before `index`, and unfinished ones."""
        for older in self._indexes():
            if older < index:
                self._disk.remove(_name(older))
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Remove files that the last process did not finish; no write may be under way."""
        for name in self._disk.names():
            if name.startswith(_PREFIX) and name.endswith(_TMP):
                self._disk.remove(name)

    def _indexes(self) -> list[int]:
        rests = (name.removeprefix(_PREFIX) for name in self._disk.names() if name.startswith(_PREFIX))
        return [int(rest) for rest in rests if len(rest) == 20 and rest.isdecimal()]


def _name(index: int) -> str:
    return f"{_PREFIX}{index:020d}"


logger = logging.getLogger(__name__)
LAST_INDEX: Final = 2**63 - 1
"""The largest index of a log; offsets of the metadata are int64."""


@dataclass(slots=True)
class Incoming:
    """Chunks of one snapshot from one leader."""

    peer_id: int
    term: int
    sequence: int = 0
    chunks: list[bytes] = field(default_factory=list)
    state: object = None
    """The state in the snapshot, once it was read."""


class Snapshotter:
    """The snapshots of one node."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        wal: WriteAheadLog,
        state: ReplicatedState,
        options: RaftOptions,
        run_off_loop: RunOffLoop,
    ) -> None:
        self._snapshots, self._wal, self._state = snapshots, wal, state
        self._options, self._run_off_loop = options, run_off_loop
        self.index = 0
        """Index of the newest snapshot, 0 if there is none."""
        self.failed: RaftlogError | None = None
        """Why the disk can no longer be used."""
        self._bytes_at_snapshot = 0
        self._writing = False
        self._retry_at_bytes = 0
        self._incoming: Incoming | None = None
        self.arrived: tuple[Incoming, Snapshot] | None = None
        """A leader's snapshot that is durable and waits for the next cycle."""

    # Start

    def load(self) -> int:
        """Restore the newest snapshot and return its index, 0 if there is none; the log is made to fit it.

        Raises:
            StorageError: the disk failed.
            RaftlogError: the snapshot does not parse, or entries between it and the log are missing.
        """
        try:
            self._snapshots.remove_unfinished()
            newest = self._snapshots.newest()
            if newest is None:
                if self._wal.first_index > 1:
                    raise CorruptRecordError(
                        f"the metadata log begins with entry {self._wal.first_index}, and there is no snapshot of what "
                        f"was before; {DAMAGE_REMEDY}"
                    )
                return 0
            snapshot = self._snapshots.read(newest)
        except OSError as error:
            raise StorageError(f"cannot read the newest snapshot: {error}; repair the disk and restart") from error
        if self._wal.term_at(newest) != snapshot.term:
            if self._wal.first_index > newest:
                raise CorruptRecordError(
                    f"the metadata log begins with entry {self._wal.first_index}, and the newest snapshot is at "
                    f"{newest}; {DAMAGE_REMEDY}"
                )
            # A crash between making a leader's snapshot durable and putting it in the place of the log.
            self._wal.reset((snapshot.entry, snapshot.index, snapshot.term))
        self._state.adopt(self._state.decode(snapshot.state, snapshot.index, snapshot.term))
        self.index = newest
        return newest

    # Own snapshots

    def maybe_begin(self, last_applied: int) -> None:
        """Begin a snapshot of the applied state, if enough entries have come since the last one."""
        if self._writing:
            return
        grown = self._wal.appended_bytes - self._bytes_at_snapshot
        enough = last_applied - self.index >= self._options.snapshot_after_entries
        if not enough and grown < self._options.snapshot_after_bytes:
            return
        if last_applied <= max(self.index, 1) or self._wal.appended_bytes < self._retry_at_bytes:
            return
        data, index, term = self._wal.entry(last_applied)
        previous_term = self._wal.term_at(index - 1) or 0
        captured = self._state.capture()
        appended = self._wal.appended_bytes

        def write() -> None:
            state = self._state.encode(captured)
            encoded = encode_snapshot(Snapshot(index, term, previous_term, data, state))
            self._snapshots.write(index, encoded)
            self._snapshots.remove_older(index)

        def done(error: BaseException | None) -> None:
            self._writing = False
            if error is None:
                self._bytes_at_snapshot = appended
                self._finished(index)
            else:
                self._refused(index, error)
                self._retry_at_bytes = self._wal.appended_bytes + self._options.snapshot_after_bytes // 20

        self._writing = True
        self._run_off_loop(write, done)

    def _finished(self, index: int) -> None:
        if index > self.index:
            self.index = index
            self._wal.trim(index - max(1, self._options.log_tail_entries))
            logger.info("took a snapshot at entry %d", index, extra={"event": "raft_snapshot_taken", "entry": index})

    def _refused(self, index: int, error: BaseException) -> None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            logger.warning("no space for the snapshot at %d, tried later: %s", index, error)
        elif isinstance(error, OSError):
            self.failed = StorageError(f"cannot write the snapshot at {index}: {error}; repair the disk and restart")
        elif isinstance(error, RaftlogError):
            self.failed = error
        else:
            self.failed = InternalError(f"cannot take the snapshot at {index}: {type(error).__name__}: {error}")

    # A leader's snapshots

    def collect(self, peer_id: int, term: int, chunk: SnapshotChunk) -> tuple[bool, bool]:
        """Add a chunk; return whether it was expected, and whether the snapshot is complete and being written."""
        incoming = self._incoming
        if chunk.first:
            incoming = self._incoming = Incoming(peer_id, term)
        if (
            incoming is None
            or (incoming.peer_id, incoming.term) != (peer_id, term)
            or chunk.sequence != incoming.sequence + 1
        ):
            self._incoming = None
            return False, False
        incoming.sequence = chunk.sequence
        incoming.chunks.append(chunk.data)
        if not chunk.last:
            return True, False
        self._incoming = None
        if self._writing or self.arrived is not None:
            return False, False
        return self._write_down(incoming), True

    def _write_down(self, incoming: Incoming) -> bool:
        data = b"".join(incoming.chunks)
        incoming.chunks.clear()
        try:
            snapshot = decode_snapshot(data, f"the snapshot from node {incoming.peer_id}")
            _check_possible(snapshot, incoming)
        except RaftlogError as error:
            logger.warning("refused: %s", error)
            return False
        if self.already_has(snapshot):
            self.arrived = (incoming, snapshot)
            return True

        def write() -> None:
            incoming.state = self._state.decode(snapshot.state, snapshot.index, snapshot.term)
            self._snapshots.write(snapshot.index, data)  # only what a restart can read again

        def done(error: BaseException | None) -> None:
            self._writing = False
            if error is None:
                self.arrived = (incoming, snapshot)
            else:
                self._refused(snapshot.index, error)

        self._writing = True
        self._run_off_loop(write, done)
        return True

    def already_has(self, snapshot: Snapshot) -> bool:
        """Whether the log has the snapshot's last entry, and so everything in it (Raft, section 7)."""
        return self._wal.term_at(snapshot.index) == snapshot.term

    def install(self, snapshot: Snapshot, state: object, consensus: Consensus) -> None:
        """Replace state and log by a leader's durable snapshot and the state read from it."""
        assert snapshot.index > consensus.commit_index
        self._state.adopt(state)
        self._wal.reset((snapshot.entry, snapshot.index, snapshot.term))
        consensus.jump_to(snapshot.index)
        self.index = snapshot.index
        self._bytes_at_snapshot = self._wal.appended_bytes
        logger.info(
            "went on from the leader's snapshot at entry %d",
            snapshot.index,
            extra={"event": "raft_snapshot_installed", "entry": snapshot.index},
        )


def _check_possible(snapshot: Snapshot, incoming: Incoming) -> None:
    """Check that a leader of that term may have this snapshot.

    Raises:
        CorruptRecordError: it cannot have it.
    """
    if not (2 <= snapshot.index <= LAST_INDEX and snapshot.previous_term <= snapshot.term <= incoming.term):
        raise CorruptRecordError(
            f"the snapshot from node {incoming.peer_id}, leader of term {incoming.term}, ends with entry "
            f"{snapshot.index} of term {snapshot.term} behind one of term {snapshot.previous_term}"
        )
