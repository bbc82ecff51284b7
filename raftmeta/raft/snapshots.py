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
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from dataclasses import dataclass

from raftlog.errors import CorruptRecordError, UnsupportedVersion
from raftmeta.disk import DAMAGE_REMEDY, MetadataDisk

_MAGIC = b"RLRAFTS1"
_HEADER = struct.Struct("<8sQQQI")
_STATE_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_PREFIX = "raft-snapshot-"
_TMP = ".tmp"
assert _HEADER.size == 36


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after the entry at `index`, and that entry: the log goes on from there."""

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
        """Return a snapshot's file as it is, to send it: the receiver checks it."""
        return self._disk.read(_name(index))

    def write(self, index: int, data: bytes) -> None:
        """Make an encoded snapshot durable under its name, which appears when all of it is there."""
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
        """Remove the snapshots before `index`, and what nobody finished."""
        for older in self._indexes():
            if older < index:
                self._disk.remove(_name(older))
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Remove what was being written when the last process ended; nothing may be under way."""
        for name in self._disk.names():
            if name.startswith(_PREFIX) and name.endswith(_TMP):
                self._disk.remove(name)

    def _indexes(self) -> list[int]:
        rests = (name.removeprefix(_PREFIX) for name in self._disk.names() if name.startswith(_PREFIX))
        return [int(rest) for rest in rests if len(rest) == 20 and rest.isdecimal()]


def _name(index: int) -> str:
    return f"{_PREFIX}{index:020d}"
