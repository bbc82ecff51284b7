"""Small text files that are replaced as a whole.

    line 1   KIND VERSION                    e.g. `leader-epochs 1`
    line 2   COUNT CRC32C                    of the lines that follow, newlines included; CRC in 8 hex digits
    then     COUNT lines, fields separated by one space

Files of this form, and a line in each:

    offset-checkpoint        per log dir    TOPIC_ID_HEX PARTITION LOG_START_OFFSET RECOVERY_POINT HIGH_WATERMARK
    leader-epoch-checkpoint  per partition  LEADER_EPOCH START_OFFSET
    partition.metadata       per partition  `topic_id HEX`, `topic NAME`, `partition NUMBER`
    meta.properties          per log dir    `cluster_id ID`, `node_id NUMBER`, `directory_id HEX`
    clean-shutdown           per log dir    `broker_epoch NUMBER`
    damaged                  per partition  what was found damaged in it while it was online

One file holds all three offsets of a partition, so that they are of one moment: recovery relies on
log start <= high watermark <= recovery point for what it may never lose. Files are written aside, fsynced, renamed,
and the directory is fsynced; so a torn or altered one is damage, and is reported instead of guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import google_crc32c

from broker.log.storage import Storage, read_file, replace_file
from raftlog.errors import CorruptRecordError, UnsupportedVersion
from replication.leader_epochs import EpochEntry

FORMAT_VERSION: Final = 1
OFFSET_CHECKPOINT: Final = "offset-checkpoint"
LEADER_EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"
META_PROPERTIES: Final = "meta.properties"
CLEAN_SHUTDOWN: Final = "clean-shutdown"
DAMAGED: Final = "damaged"


class Marks(NamedTuple):
    """What is durable about a log's offsets. Everything below `recovery_point` was fsynced."""

    log_start_offset: int = 0
    recovery_point: int = 0
    high_watermark: int = 0


_MOST_DIGITS: Final = 19
"""Of a number that is positive and has 63 bits."""
_DIRECTORY_ID: Final = re.compile("[0-9a-f]{32}")

PartitionKey = tuple[bytes, int]
"""(topic id, partition)"""


def encode_lines(kind: str, lines: Iterable[str], version: int = FORMAT_VERSION) -> bytes:
    """Return the bytes of a file of this kind."""
    rows = [line + "\n" for line in lines]
    body = "".join(rows).encode()
    return f"{kind} {version}\n{len(rows)} {google_crc32c.value(body):08x}\n".encode() + body


def decode_lines(path: str, kind: str, data: bytes, newest_version: int = FORMAT_VERSION) -> list[str]:
    """Return the lines of a file of a version up to `newest_version`; they have to tell which by themselves.

    Raises:
        UnsupportedVersion: written by a newer raftlog.
        CorruptRecordError: torn, altered, or of another kind.
    """
    head, _, rest = data.partition(b"\n")
    counts, _, body = rest.partition(b"\n")
    name, _, version = head.decode("utf-8", "replace").partition(" ")
    if name != kind or not _is_number(version):
        raise CorruptRecordError(
            f"{path} is damaged: it begins with {head[:40]!r} instead of '{kind} {FORMAT_VERSION}'"
        )
    if not FORMAT_VERSION <= int(version) <= newest_version:
        raise UnsupportedVersion(
            f"{path} has format version {version}, this raftlog reads {newest_version}; start the newer version again"
        )
    if counts != f"{body.count(10)} {google_crc32c.value(body):08x}".encode():
        raise CorruptRecordError(f"{path} is damaged: its {len(body)} bytes do not match the checksum {counts[:40]!r}")
    if body and not body.endswith(b"\n"):
        raise CorruptRecordError(f"{path} is damaged: its last line does not end")
    with contradictions(path):
        return body.decode().split("\n")[:-1]


def _is_number(text: str) -> bool:
    """Whether it is a number as these files have them: not all that `str.isdigit` takes is read by `int`."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _number(text: str) -> int:
    if not _is_number(text):
        raise ValueError(f"{text[:40]!r} is not a number from 0 on")
    return int(text)


@contextmanager
def contradictions(path: str) -> Iterator[None]:
    """Say which file is damaged where its checksum holds and its lines are not what the kind has.

    Raises:
        CorruptRecordError: in place of what goes wrong with such lines.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptRecordError(
            f"{path} is damaged: its checksum holds, but not what a line says: {str(error)[:200]}"
        ) from None


def _load(storage: Storage, path: str, kind: str) -> list[str] | None:
    data = read_file(storage, path)
    return None if data is None else decode_lines(path, kind, data)


def load_marks(storage: Storage, directory: str) -> dict[PartitionKey, Marks] | None:
    """Return the marks of every partition in a log directory, None when there is no checkpoint yet."""
    lines = _load(storage, f"{directory}/{OFFSET_CHECKPOINT}", "offsets")
    if lines is None:
        return None
    marks = {}
    with contradictions(f"{directory}/{OFFSET_CHECKPOINT}"):
        for line in lines:
            topic_id, partition, *offsets = line.split(" ")
            log_start_offset, recovery_point, high_watermark = map(_number, offsets)
            key = bytes.fromhex(topic_id), _number(partition)
            marks[key] = Marks(log_start_offset, recovery_point, high_watermark)
    return marks


def store_marks(storage: Storage, directory: str, marks: Mapping[PartitionKey, Marks]) -> None:
    """Replace the checkpoint of a log directory."""
    lines = (f"{topic_id.hex()} {partition} {m[0]} {m[1]} {m[2]}" for (topic_id, partition), m in marks.items())
    replace_file(storage, directory, OFFSET_CHECKPOINT, encode_lines("offsets", lines))


def load_leader_epochs(storage: Storage, directory: str) -> list[EpochEntry] | None:
    """Return the entries of a partition, None when there is no checkpoint yet."""
    path = f"{directory}/{LEADER_EPOCH_CHECKPOINT}"
    lines = _load(storage, path, "leader-epochs")
    if lines is None:
        return None
    entries: list[EpochEntry] = []
    with contradictions(path):
        for line in lines:
            entry = EpochEntry(*map(_number, line.split(" ")))
            if entries and not (
                entry.leader_epoch > entries[-1].leader_epoch and entry.start_offset > entries[-1].start_offset
            ):
                raise ValueError(f"epoch and offset of {line!r} do not rise")
            entries.append(entry)
    return entries


def store_leader_epochs(storage: Storage, directory: str, entries: Iterable[EpochEntry]) -> None:
    """Replace the checkpoint of a partition."""
    lines = (f"{entry.leader_epoch} {entry.start_offset}" for entry in entries)
    replace_file(storage, directory, LEADER_EPOCH_CHECKPOINT, encode_lines("leader-epochs", lines))


class PartitionMetadata(NamedTuple):
    """Whose log a directory holds."""

    topic_id: bytes
    topic: str
    partition: int


def load_partition_metadata(storage: Storage, directory: str) -> PartitionMetadata | None:
    """Return what `partition.metadata` says, None when it is missing."""
    lines = _load(storage, f"{directory}/{PARTITION_METADATA}", "partition")
    if lines is None:
        return None
    with contradictions(f"{directory}/{PARTITION_METADATA}"):
        fields = dict(line.split(" ", 1) for line in lines)
        return PartitionMetadata(bytes.fromhex(fields["topic_id"]), fields["topic"], _number(fields["partition"]))


def store_partition_metadata(storage: Storage, directory: str, metadata: PartitionMetadata) -> None:
    """Write `partition.metadata`."""
    lines = (
        f"topic_id {metadata.topic_id.hex()}",
        f"topic {metadata.topic}",
        f"partition {metadata.partition}",
    )
    replace_file(storage, directory, PARTITION_METADATA, encode_lines("partition", lines))


def load_damage(storage: Storage, directory: str) -> str | None:
    """Return what was found damaged in a log, None when nothing was."""
    lines = _load(storage, f"{directory}/{DAMAGED}", "damaged")
    return None if lines is None else " ".join(lines)


def store_damage(storage: Storage, directory: str, what: str) -> None:
    """Note that a log is damaged, for the next start: that one does not read everything."""
    replace_file(storage, directory, DAMAGED, encode_lines("damaged", what.splitlines()))


class MetaProperties(NamedTuple):
    """Whose log directory this is."""

    cluster_id: str
    node_id: int
    directory_id: str


def load_meta_properties(storage: Storage, directory: str) -> MetaProperties | None:
    """Return what `meta.properties` says, None when it is missing."""
    lines = _load(storage, f"{directory}/{META_PROPERTIES}", "log-dir")
    if lines is None:
        return None
    path = f"{directory}/{META_PROPERTIES}"
    with contradictions(path):
        fields = dict(line.split(" ", 1) for line in lines)
        meta = MetaProperties(fields["cluster_id"], _number(fields["node_id"]), fields.get("directory_id", ""))
    if not _DIRECTORY_ID.fullmatch(meta.directory_id):
        raise CorruptRecordError(f"{path} is damaged: directory_id {meta.directory_id!r} is not 32 hex digits")
    return meta


def store_meta_properties(storage: Storage, directory: str, meta: MetaProperties) -> None:
    """Write `meta.properties`."""
    lines = (f"cluster_id {meta.cluster_id}", f"node_id {meta.node_id}", f"directory_id {meta.directory_id}")
    replace_file(storage, directory, META_PROPERTIES, encode_lines("log-dir", lines))


def load_clean_shutdown(storage: Storage, directory: str) -> int | None:
    """Return the broker epoch that the process had which went down cleanly.

    None: the last stop was not clean, or its mark does not say in which epoch it was (damaged, or of an old form).
    """
    path = f"{directory}/{CLEAN_SHUTDOWN}"
    try:
        lines = _load(storage, path, "clean-shutdown")
        with contradictions(path):
            fields = dict(line.split(" ", 1) for line in lines or ())
    except (CorruptRecordError, UnsupportedVersion):
        return None  # a mark that cannot be read vouches for nothing
    epoch = fields.get("broker_epoch", "")
    return int(epoch) if _is_number(epoch) else None


def store_clean_shutdown(storage: Storage, directory: str, broker_epoch: int | None) -> None:
    """Leave the mark of a clean shutdown."""
    lines = () if broker_epoch is None else (f"broker_epoch {broker_epoch}",)
    replace_file(storage, directory, CLEAN_SHUTDOWN, encode_lines("clean-shutdown", lines))
