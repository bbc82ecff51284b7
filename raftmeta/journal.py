"""The durable metadata of one node: a snapshot, and a journal of what was committed since.

    format                  format.version and node.id; its presence says that the directory was set up
    snapshot-<offset>       the image at that offset; none before the first compaction
    journal-<offset>        entries after that offset; the one of the newest snapshot (or of 0) is appended to
    *.tmp                   being written aside; dropped at the next start

Compaction writes an empty journal-<n>, then snapshot-<n>, then removes the older pair. A file appears under its name
only when it is whole and durable, and each step is durable before the next one, so that whatever a crash leaves shows
how far it came: the newest snapshot counts, and its journal is there.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from raftlog.errors import CorruptRecordError, InvalidConfig, StorageError, StorageFull, UnsupportedVersion
from raftlog.v1.records_pb2 import MetadataEntries, MetadataEntry
from raftmeta.disk import MetadataDisk
from raftmeta.frames import (
    HEADER_BYTES,
    JOURNAL_MAGIC,
    SNAPSHOT_MAGIC,
    check_header,
    encode_frame,
    encode_header,
    single_frame,
    split_frames,
)
from raftmeta.image import MetadataImage
from raftmeta.replay import image_from_records, replay_all

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
FORMAT_NAME = "format"
_JOURNAL = "journal-"
_SNAPSHOT = "snapshot-"
_TMP = ".tmp"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start found: the image, and the entries of the journal that led to it from the snapshot."""

    image: MetadataImage
    entries: Sequence[MetadataEntry]


class MetadataJournal:
    """Blocking, one caller at a time. `open` first."""

    def __init__(self, disk: MetadataDisk, node_id: int, compact_at_bytes: int) -> None:
        self._disk = disk
        self._node_id = node_id
        self._compact_at_bytes = compact_at_bytes
        self._name = ""
        self._size_bytes = 0
        self._compact_next_bytes = compact_at_bytes

    # Start

    def open(self) -> Recovered:
        """Lock the directory, set it up where it is empty, and read it back.

        Raises:
            StorageError: another process uses it, or the disk failed.
            UnsupportedVersion: written by a newer version.
            InvalidConfig: it belongs to another node.
            CorruptRecordError: damaged; nothing was changed.
        """
        try:
            self._disk.lock()
        except BlockingIOError:
            raise StorageError(f"{self._disk.path} is in use by another process; stop that one first") from None
        except OSError as error:
            raise self._failed(error) from error
        try:
            return self._open_locked()
        except OSError as error:
            self._disk.close()
            raise self._failed(error) from error
        except BaseException:  # whatever it is, the directory must not stay locked
            self._disk.close()
            raise

    def _open_locked(self) -> Recovered:
        names = set(self._disk.names())
        self._check_format(names)
        snapshots = _offsets(names, _SNAPSHOT)
        journals = _offsets(names, _JOURNAL)
        base = max(snapshots, default=0)
        image = self._read_snapshot(base) if base else MetadataImage()
        if base not in journals:
            raise CorruptRecordError(
                f"{self._disk.path}: {_file(_JOURNAL, base)} is missing; restore the directory from a copy"
            )
        for newer in (offset for offset in journals if offset > base):
            self._check_unused(newer)
        image, entries = self._read_journal(base, image)
        self._remove(
            [name for name in names if name.endswith(_TMP)]
            + [_file(_JOURNAL, offset) for offset in journals if offset != base]
            + [_file(_SNAPSHOT, offset) for offset in snapshots if offset != base]
        )
        return Recovered(image, entries)

    def _check_format(self, names: set[str]) -> None:
        if FORMAT_NAME in names:
            self._check_format_file()
            return
        found = sorted(name for name in names if name.startswith((_JOURNAL, _SNAPSHOT)) and not name.endswith(_TMP))
        first = _file(_JOURNAL, 0)
        if found and (found != [first] or len(self._disk.read(first)) > HEADER_BYTES):
            raise CorruptRecordError(
                f"{self._disk.path} holds metadata ({found[0]}) but the file {FORMAT_NAME!r} is missing; "
                "restore it from a copy"
            )
        self._write_tmp(first, encode_header(JOURNAL_MAGIC, 0))
        self._publish(first)
        self._write_tmp(FORMAT_NAME, f"format.version={FORMAT_VERSION}\nnode.id={self._node_id}\n".encode())
        self._publish(FORMAT_NAME)
        names.update((first, FORMAT_NAME))
        logger.info("set up the metadata directory %s for node %d", self._disk.path, self._node_id)

    def _check_format_file(self) -> None:
        where = f"{self._disk.path}/{FORMAT_NAME}"
        text = self._disk.read(FORMAT_NAME).decode("ascii", "replace")
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        version, node_id = values.get("format.version", ""), values.get("node.id", "")
        if not version.isdecimal() or not node_id.isdecimal():
            raise CorruptRecordError(f"{where} is damaged: {text[:100]!r}; restore it from a copy")
        if int(version) > FORMAT_VERSION:
            raise UnsupportedVersion(
                f"{where} says format {version}, this version reads up to {FORMAT_VERSION}; "
                "run the version that wrote it"
            )
        if int(node_id) != self._node_id:
            raise InvalidConfig(
                f"node.id={self._node_id}, but {self._disk.path} belongs to node {node_id}; "
                "correct node.id or metadata.log.dir"
            )

    def _read_snapshot(self, offset: int) -> MetadataImage:
        name = _file(_SNAPSHOT, offset)
        data = self._disk.read(name)
        where = f"{self._disk.path}/{name}"
        check_header(data, SNAPSHOT_MAGIC, offset, where)
        entry = MetadataEntry()
        try:
            entry.ParseFromString(single_frame(data, where))
        except DecodeError:
            raise CorruptRecordError(f"{where} is damaged: not a snapshot") from None
        image = image_from_records(entry.records, offset)
        if entry.offset != offset:
            raise CorruptRecordError(f"{where} is damaged: it holds the image at {entry.offset}")
        return image

    def _check_unused(self, offset: int) -> None:
        name = _file(_JOURNAL, offset)
        if len(self._disk.read(name)) > HEADER_BYTES:
            raise CorruptRecordError(
                f"{self._disk.path}: {name} has entries, but {_file(_SNAPSHOT, offset)} is missing; "
                "restore the directory from a copy"
            )

    def _read_journal(self, base: int, image: MetadataImage) -> tuple[MetadataImage, list[MetadataEntry]]:
        name = _file(_JOURNAL, base)
        data = self._disk.read(name)
        where = f"{self._disk.path}/{name}"
        check_header(data, JOURNAL_MAGIC, base, where)
        payloads, end = split_frames(data, where)
        entries: list[MetadataEntry] = []
        for payload in payloads:
            group = MetadataEntries()
            try:
                group.ParseFromString(payload)
            except DecodeError:
                raise CorruptRecordError(f"{where} is damaged: not metadata entries") from None
            for entry in group.entries:
                if entry.offset != image.offset + 1:
                    raise CorruptRecordError(f"{where} is damaged: offset {entry.offset} follows offset {image.offset}")
                image = replay_all(image, entry.records, entry.offset)
                entries.append(entry)
        if end < len(data):
            logger.warning("%s: dropped %d bytes that a crash left unfinished at the end", where, len(data) - end)
            self._disk.truncate(name, end)
        # What a process that was killed had written but not synced is about to be seen: make it durable first.
        self._disk.sync(name)
        self._disk.sync_dir()
        self._name, self._size_bytes = name, end
        return image, entries

    # Running

    @property
    def needs_compaction(self) -> bool:
        """Whether the journal has grown beyond its bound."""
        return self._size_bytes > self._compact_next_bytes

    def append(self, entries: Sequence[MetadataEntry]) -> None:
        """Make entries durable, all in one fsync.

        Raises:
            StorageFull: no space; the entries are not in the journal, and it goes on.
            StorageError: final; whether the entries are durable is unknown until the next start.
        """
        frame = encode_frame(MetadataEntries(entries=entries).SerializeToString(deterministic=True))
        try:
            self._disk.append(self._name, frame)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise self._failed(error) from error
            self._take_back()
            raise StorageFull(f"no space is left in {self._disk.path}: {error}; make room and try again") from error
        try:
            self._disk.sync(self._name)
        except OSError as error:  # whatever the error: the kernel may have dropped the dirty pages
            raise self._failed(error) from error
        self._size_bytes += len(frame)

    def _take_back(self) -> None:
        try:
            self._disk.truncate(self._name, self._size_bytes)
            self._disk.sync(self._name)
        except OSError as error:
            raise self._failed(error) from error

    def compact(self, image: MetadataImage) -> None:
        """Replace snapshot and journal by a snapshot of `image`, which is what they lead to.

        Raises:
            StorageError: final. Without space nothing changes, and compaction is tried again later.
        """
        entry = MetadataEntry(offset=image.offset, controller_epoch=image.controller_epoch, records=image.to_records())
        frame = encode_frame(entry.SerializeToString(deterministic=True))
        journal, snapshot = _file(_JOURNAL, image.offset), _file(_SNAPSHOT, image.offset)
        before = self._name
        assert journal != before, "nothing was committed since the last compaction"
        try:
            try:
                self._write_tmp(journal, encode_header(JOURNAL_MAGIC, image.offset))
                self._write_tmp(snapshot, encode_header(SNAPSHOT_MAGIC, image.offset) + frame)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                self._remove([journal + _TMP, snapshot + _TMP])
                self._compact_next_bytes = self._size_bytes + self._compact_at_bytes
                logger.warning("no space to compact the metadata in %s, tried later: %s", self._disk.path, error)
                return
            # From here on there is no way back to the old journal: a crash may leave the new snapshot in place.
            self._publish(journal)
            self._publish(snapshot)
            self._name, self._size_bytes = journal, HEADER_BYTES
            self._compact_next_bytes = max(self._compact_at_bytes, 2 * len(frame))
            self._remove([before, before.replace(_JOURNAL, _SNAPSHOT)])
        except OSError as error:
            raise self._failed(error) from error
        logger.info("compacted the metadata journal at offset %d into %d bytes", image.offset, len(frame))

    def close(self) -> None:
        """Give the directory up."""
        self._disk.close()

    def _write_tmp(self, name: str, data: bytes) -> None:
        self._disk.write(name + _TMP, data)
        self._disk.sync(name + _TMP)

    def _publish(self, name: str) -> None:
        self._disk.rename(name + _TMP, name)
        self._disk.sync_dir()

    def _remove(self, names: Sequence[str]) -> None:
        present = set(self._disk.names())
        for name in names:
            if name in present:
                self._disk.remove(name)

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"the metadata directory {self._disk.path} failed: {error}; repair the disk and restart")


def _file(prefix: str, offset: int) -> str:
    return f"{prefix}{offset:020d}"


def _offsets(names: set[str], prefix: str) -> list[int]:
    """Return the offsets of the files of one kind, rising."""
    rests = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(rest) for rest in rests if len(rest) == 20 and rest.isdecimal())
