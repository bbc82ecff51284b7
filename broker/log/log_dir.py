"""One of `log.dirs`: its lock, its owner, its offset checkpoint, its small files, and whether it still works.

    .lock                 flock, held as long as the broker runs
    meta.properties       cluster, node and directory id
    clean-shutdown        exists only between a clean shutdown and the next start; holds the broker epoch that ended
    served                the broker epoch that serves from here, and the topics whose records count before an fsync
    offset-checkpoint     log start, recovery point and high watermark of each log
    other-logs            the logs in the broker's other log directories, if it has several
    checkpoint-lost       the directory was found without its offset-checkpoint; an operator removes this file
    and the logs          `manager.py`

States: online -> offline for good, at the first error that `judge` finds final. `LogDir.judge` is the one place that
turns an `OSError` into what is raised: no space, another condition that passes, or a broken disk.

Small text files, each replaced as a whole:

    line 1   KIND VERSION                    e.g. `leader-epochs 1`
    line 2   COUNT CRC32C                    of the following lines, newlines included; CRC in 8 hex digits
    then     COUNT lines, fields separated by one space

Files of this form, and a line in each:

    offset-checkpoint        per log dir    TOPIC_ID_HEX PARTITION LOG_START_OFFSET RECOVERY_POINT HIGH_WATERMARK
    leader-epoch-checkpoint  per partition  LEADER_EPOCH START_OFFSET
    partition.metadata       per partition  `topic_id HEX`, `topic NAME`, `partition NUMBER`
    meta.properties          per log dir    `cluster_id ID`, `node_id NUMBER`, `directory_id HEX`
    clean-shutdown           per log dir    `broker_epoch NUMBER`
    served                   per log dir    `broker_epoch NUMBER`, then `unsynced TOPIC_ID_HEX` for each such topic
    damaged                  per partition  the damage that was found while the log was online
    other-logs               per log dir    TOPIC_ID_HEX PARTITION

One file holds all three offsets of a partition, so that they belong to one moment: recovery relies on
log start <= high watermark <= recovery point for records that must never be lost. Files are written aside, fsynced,
renamed, and the directory is fsynced. So a torn or altered file is damage, which is reported.
"""

from __future__ import annotations

import errno
import logging
import math
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Final, NamedTuple

import google_crc32c

from broker.log.storage import DirectoryLock, Storage, SyncFailed, make_dir_durably, read_file, replace_file
from raftlog.errors import (
    CorruptRecordError,
    InvalidConfig,
    RaftlogError,
    StorageError,
    StorageFull,
    UnsupportedVersion,
)
from replication.leader_epochs import EpochEntry

FORMAT_VERSION: Final = 1
OFFSET_CHECKPOINT: Final = "offset-checkpoint"
LEADER_EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"
META_PROPERTIES: Final = "meta.properties"
CLEAN_SHUTDOWN: Final = "clean-shutdown"
SERVED: Final = "served"
DAMAGED: Final = "damaged"
OTHER_LOGS: Final = "other-logs"
CHECKPOINT_LOST: Final = "checkpoint-lost"


class Marks(NamedTuple):
    """The durable offsets of a log. Every record below `recovery_point` was fsynced."""

    log_start_offset: int = 0
    recovery_point: int = 0
    high_watermark: int = 0


_MOST_DIGITS: Final = 19
"""Digits of the largest 63-bit number."""
_DIRECTORY_ID: Final = re.compile("[0-9a-f]{32}")

PartitionKey = tuple[bytes, int]
"""(topic id, partition)"""


def encode_lines(kind: str, lines: Iterable[str], version: int = FORMAT_VERSION) -> bytes:
    """Return the bytes of a file of this kind."""
    rows = [line + "\n" for line in lines]
    body = "".join(rows).encode()
    return f"{kind} {version}\n{len(rows)} {google_crc32c.value(body):08x}\n".encode() + body


def decode_lines(path: str, kind: str, data: bytes, newest_version: int = FORMAT_VERSION) -> list[str]:
    """Return the lines of a file of any version up to `newest_version`; the lines themselves must show which.

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
        raise CorruptRecordError(f"{path} is damaged: its last line lacks a newline")
    with contradictions(path):
        return body.decode().split("\n")[:-1]


def _is_number(text: str) -> bool:
    """Whether `text` is a number of these files; `str.isdigit` alone accepts more than `int` can read."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _number(text: str) -> int:
    if not _is_number(text):
        raise ValueError(f"{text[:40]!r} is not a number from 0 to 10^19-1")
    return int(text)


@contextmanager
def contradictions(path: str) -> Iterator[None]:
    """Name the file when its checksum holds but a line cannot be parsed.

    Raises:
        CorruptRecordError: in place of the parser's error.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptRecordError(
            f"{path} is damaged: its checksum holds, but a line cannot be parsed: {str(error)[:200]}"
        ) from None


def _load(storage: Storage, path: str, kind: str) -> list[str] | None:
    data = read_file(storage, path)
    return None if data is None else decode_lines(path, kind, data)


def load_marks(storage: Storage, directory: str) -> dict[PartitionKey, Marks] | None:
    """Return the marks of every partition in a log directory, or None without a checkpoint."""
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
    """Return the leader epochs of a partition, or None without a checkpoint."""
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
    """Replace the leader epochs of a partition."""
    lines = (f"{entry.leader_epoch} {entry.start_offset}" for entry in entries)
    replace_file(storage, directory, LEADER_EPOCH_CHECKPOINT, encode_lines("leader-epochs", lines))


class PartitionMetadata(NamedTuple):
    """Which partition a directory belongs to."""

    topic_id: bytes
    topic: str
    partition: int


def load_partition_metadata(storage: Storage, directory: str) -> PartitionMetadata | None:
    """Return the contents of `partition.metadata`, or None if it is missing."""
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
    """Return the damage that was found in a log, or None."""
    lines = _load(storage, f"{directory}/{DAMAGED}", "damaged")
    return None if lines is None else " ".join(lines)


def store_damage(storage: Storage, directory: str, what: str) -> None:
    """Note the damage of a log for the next start, which would not read all of the log."""
    replace_file(storage, directory, DAMAGED, encode_lines("damaged", what.splitlines()))


class MetaProperties(NamedTuple):
    """Which cluster and node a log directory belongs to."""

    cluster_id: str
    node_id: int
    directory_id: str


def load_meta_properties(storage: Storage, directory: str) -> MetaProperties | None:
    """Return the contents of `meta.properties`, or None if it is missing."""
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
    """Return the broker epoch of the last process, if that stopped cleanly.

    None: the stop was not clean, or its mark lacks the epoch (damaged, or written by an old version).
    """
    path = f"{directory}/{CLEAN_SHUTDOWN}"
    try:
        lines = _load(storage, path, "clean-shutdown")
        with contradictions(path):
            fields = dict(line.split(" ", 1) for line in lines or ())
    except (CorruptRecordError, UnsupportedVersion):
        return None  # an unreadable mark proves nothing
    epoch = fields.get("broker_epoch", "")
    return int(epoch) if _is_number(epoch) else None


def store_clean_shutdown(storage: Storage, directory: str, broker_epoch: int | None) -> None:
    """Write the mark of a clean shutdown."""
    lines = () if broker_epoch is None else (f"broker_epoch {broker_epoch}",)
    replace_file(storage, directory, CLEAN_SHUTDOWN, encode_lines("clean-shutdown", lines))


class Served(NamedTuple):
    """The process that served last from a log directory, and what it may have lost with an unclean end.

    It fsynced a record before it counted the record as durable, except in `unsynced_topic_ids` (flush.messages above
    1). `broker_epoch` is None if no process has noted one.
    """

    broker_epoch: int | None = None
    unsynced_topic_ids: frozenset[bytes] = frozenset()


def load_served(storage: Storage, directory: str) -> Served:
    """Return the contents of `served`; without an epoch if it is missing or damaged."""
    path = f"{directory}/{SERVED}"
    try:
        lines = _load(storage, path, "served")
        with contradictions(path):
            epoch: int | None = None
            topic_ids = set()
            for line in lines or ():
                match line.split(" "):
                    case ["broker_epoch", number]:
                        epoch = _number(number)
                    case ["unsynced", topic_id]:
                        topic_ids.add(bytes.fromhex(topic_id))
                    case _:
                        raise ValueError(f"{line[:40]!r} is neither an epoch nor a topic")
    except (CorruptRecordError, UnsupportedVersion):
        return Served()  # it vouches for nothing
    return Served(epoch, frozenset(topic_ids))


def store_served(storage: Storage, directory: str, served: Served) -> None:
    """Write `served`."""
    epoch = () if served.broker_epoch is None else (f"broker_epoch {served.broker_epoch}",)
    lines = (*epoch, *(f"unsynced {topic_id.hex()}" for topic_id in sorted(served.unsynced_topic_ids)))
    replace_file(storage, directory, SERVED, encode_lines("served", lines))


def load_other_logs(storage: Storage, directory: str) -> frozenset[PartitionKey]:
    """Return the logs in the broker's other log directories, as of the last checkpoint."""
    path = f"{directory}/{OTHER_LOGS}"
    with contradictions(path):
        rows = (line.split(" ") for line in _load(storage, path, "other-logs") or ())
        return frozenset((bytes.fromhex(topic_id), _number(partition)) for topic_id, partition in rows)


def store_other_logs(storage: Storage, directory: str, keys: Iterable[PartitionKey]) -> None:
    """Write the logs in the broker's other log directories."""
    lines = (f"{topic_id.hex()} {partition}" for topic_id, partition in sorted(keys))
    replace_file(storage, directory, OTHER_LOGS, encode_lines("other-logs", lines))


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Conditions of the process or the machine, not of the disk."""


def is_full(error: BaseException) -> bool:
    """Whether the error only means that the disk has no space."""
    return isinstance(error, OSError) and error.errno in _FULL and not isinstance(error, SyncFailed)


def is_passing(error: BaseException) -> bool:
    """Whether the error is not the disk's (too many open files, no memory)."""
    if isinstance(error, OSError):
        return error.errno in _PASSING and not isinstance(error, SyncFailed)
    return isinstance(error, MemoryError)


def is_refusal(error: BaseException) -> bool:
    """Whether the same operation may succeed later: no space, or a condition that passes. Other errors are final."""
    return is_full(error) or is_passing(error)


def full(directory: str, wanted_bytes: int) -> StorageFull:
    """Return the refusal of a write for want of space. `wanted_bytes` 0: the write of a small file, not of records."""
    wanted = f"{wanted_bytes} bytes" if wanted_bytes else "a file"
    return StorageFull(
        f"no space left in log directory {directory}: {wanted} could not be written and nothing was appended; free "
        "space or shorten retention, reads go on and writes resume by themselves"
    )


def passing(error: BaseException, doing: str) -> StorageError:
    """Return the refusal for a condition that passes."""
    reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    return StorageError(f"{doing} failed: {reason}; try again later, and raise the limit on open files or memory")


logger = logging.getLogger(__name__)

LOCK_FILE: Final = ".lock"


class LogDirLocked(StorageError):
    """Another process uses the log directory."""


FLUSH_GROWTH: Final = 1.02
"""Each slower flush raises `LogDir.flush_ms` by this factor. Busy processors make most flushes look slow, not all."""


class LogDir:
    """A log directory. Thread-safe where it is shared: marks and the state."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        on_offline: Callable[[LogDir, BaseException], None] = lambda _dir, _error: None,
    ) -> None:
        self.storage = storage
        self.path = path
        self.directory_id = ""
        self.was_clean = False
        """Whether the last process closed the directory cleanly: all that it appended or renamed was fsynced."""
        self.clean_broker_epoch: int | None = None
        """The broker epoch of the last process, if that stopped cleanly and its mark holds the epoch."""
        self.offline_reason: StorageError | None = None
        self.times_full = 0
        """How many operations were refused for want of space."""
        self._on_offline = on_offline
        self._lock_file: DirectoryLock | None = None
        self.checkpoint_lost = False
        """Whether the directory was found without its checkpoint, so that it cannot tell which logs it had."""
        self._marks: dict[PartitionKey, Marks] = {}
        self._marks_stored = False
        self._other_logs: frozenset[PartitionKey] = frozenset()
        self.left_by = Served()
        """What the last process left in `served`."""
        self._served = Served()
        self._served_stored = True
        self._serves = False
        self.unsynced_topic_ids: frozenset[bytes] = frozenset()
        """Topics whose records may count as durable before they are fsynced: on the disk, `served` says so."""
        self.flush_ms = math.inf
        """The shortest recent flush of a log here, in ms; infinite before the first one."""
        self._marks_lock = threading.Lock()
        self._state_lock = threading.Lock()

    def open(self, cluster_id: str, node_id: int) -> None:
        """Lock the directory, check its owner, read the checkpoint, and remove the clean-shutdown mark.

        Raises:
            LogDirLocked: another process has locked it.
            InvalidConfig: it belongs to another cluster or node.
            UnsupportedVersion: a newer raftlog wrote it.
            CorruptRecordError: one of its own files is damaged.
            OSError: the disk.
        """
        make_dir_durably(self.storage, self.path)
        try:
            self._lock_file = self.storage.lock(f"{self.path}/{LOCK_FILE}")
        except BlockingIOError:
            raise LogDirLocked(
                f"log directory {self.path} is in use by another process; stop it, or give this broker its own log.dirs"
            ) from None
        self._check_owner(cluster_id, node_id)
        marks = load_marks(self.storage, self.path)
        if marks is None:
            logger.error(
                "log directory has lost its checkpoint",
                extra={"event": "checkpoint_lost", "path": f"{self.path}/{OFFSET_CHECKPOINT}"},
            )
            replace_file(self.storage, self.path, CHECKPOINT_LOST, encode_lines("checkpoint-lost", ()))
        self.checkpoint_lost = self.storage.exists(f"{self.path}/{CHECKPOINT_LOST}")
        self._marks = marks or {}
        self._marks_stored = marks is not None
        self._other_logs = load_other_logs(self.storage, self.path)
        self.left_by = self._served = load_served(self.storage, self.path)
        self.unsynced_topic_ids = self._served.unsynced_topic_ids
        mark = f"{self.path}/{CLEAN_SHUTDOWN}"
        if self.storage.exists(mark):
            self.was_clean = True
            self.clean_broker_epoch = load_clean_shutdown(self.storage, self.path)
            self.storage.remove(mark)
            self.storage.sync_dir(self.path)

    def _check_owner(self, cluster_id: str, node_id: int) -> None:
        meta = load_meta_properties(self.storage, self.path)
        if meta is None:
            names = self.storage.list_sizes(self.path)
            logs = [
                n
                for n, size in names.items()
                if size < 0 and self.storage.exists(f"{self.path}/{n}/partition.metadata")
            ]
            if logs:
                raise InvalidConfig(
                    f"log directory {self.path} holds logs ({logs[0]}, …) but no meta.properties: "
                    "their cluster and node are unknown; put the file back, or use an empty directory"
                )
            meta = MetaProperties(cluster_id, node_id, uuid.uuid4().hex)
            store_marks(self.storage, self.path, {})  # first: from now on a directory without it has lost it
            store_meta_properties(self.storage, self.path, meta)
        if (meta.cluster_id, meta.node_id) != (cluster_id, node_id):
            raise InvalidConfig(
                f"log directory {self.path} belongs to node {meta.node_id} of cluster {meta.cluster_id!r}, "
                f"this is node {node_id} of cluster {cluster_id!r}; correct log.dirs"
            )
        self.directory_id = meta.directory_id

    @property
    def is_held(self) -> bool:
        """Whether this process has locked the directory."""
        return self._lock_file is not None

    def close(self, *, clean: bool, broker_epoch: int | None = None) -> None:
        """Unlock the directory; `clean` writes the mark, so everything must have been flushed and checkpointed."""
        if clean and self.offline_reason is None:
            try:
                store_clean_shutdown(self.storage, self.path, broker_epoch)
            except OSError as error:  # the next start only takes longer
                logger.warning("no clean-shutdown mark in %s: %s", self.path, error)
        self.release()

    def release(self) -> None:
        """Unlock. Another process may now write the checkpoint, so `update_marks` refuses."""
        with self._marks_lock:
            if self._lock_file is not None:
                self._lock_file.release()
                self._lock_file = None

    # Marks

    def marks_of(self, key: PartitionKey) -> Marks | None:
        """Return the marks of a log in the checkpoint, or None."""
        return self._marks.get(key)

    @property
    def listed_logs(self) -> frozenset[PartitionKey]:
        """The logs that the checkpoints list, in this directory or in the broker's others."""
        return self._other_logs.union(self._marks)

    def store_other_logs(self, keys: frozenset[PartitionKey]) -> None:
        """Make the list of the logs in the broker's other directories durable, if it differs. Raises OSError."""
        if keys != self._other_logs:
            store_other_logs(self.storage, self.path, keys)
            self._other_logs = keys

    def update_marks(
        self, changes: Callable[[], Mapping[PartitionKey, Marks]], removed: Iterable[PartitionKey] = ()
    ) -> None:
        """Make the marks that `changes` returns durable, if they differ; those of other logs stay.

        `changes` is called under the lock, so that no truncation comes between its result and the disk.

        Raises:
            OSError: the old checkpoint is still in place.
            StorageError: the directory was released.
        """
        with self._marks_lock:
            if not self.is_held:
                raise StorageError(f"log directory {self.path} is no longer locked: the broker has closed it")
            marks = {**self._marks, **changes()}
            for key in removed:
                marks.pop(key, None)
            if marks == self._marks and self._marks_stored:
                return
            self._marks_stored = False  # after an error either version may be on the disk
            store_marks(self.storage, self.path, marks)
            self._marks = marks
            self._marks_stored = True

    # What may be lost with an unclean end

    def serve(self, broker_epoch: int) -> None:
        """Note durably that the process with this broker epoch serves from here. Raises OSError; call it again then."""
        with self._marks_lock:
            self._store_served(Served(broker_epoch, self.unsynced_topic_ids))
            self._serves = True

    def note_flush(self, took_ms: float) -> None:
        """Note how long a flush took. A shorter one counts at once; slower ones raise `flush_ms` by 2 % each."""
        self.flush_ms = min(took_ms, self.flush_ms * FLUSH_GROWTH + 0.01)

    def note_unsynced(self, topic_ids: Set[bytes]) -> None:
        """Note durably that records of these topics may count before they are fsynced; from then on they may.

        Raises:
            OSError: they must not, as before.
            StorageError: the directory was released.
        """
        with self._marks_lock:
            if not topic_ids <= self.unsynced_topic_ids:
                noted = self.unsynced_topic_ids | topic_ids
                self._store_served(self._served._replace(unsynced_topic_ids=noted))
                self.unsynced_topic_ids = noted

    def forget_unsynced(self, topic_ids: Set[bytes], is_synced: Callable[[bytes], bool]) -> None:
        """Forget topics whose records are all fsynced, and will be before they count.

        `is_synced` is asked once no record of the topic can count before an fsync any more. Only a process that serves
        forgets any: the controllers know by then what the last one left. Raises as `note_unsynced`.
        """
        with self._marks_lock:
            leaving = self.unsynced_topic_ids & topic_ids
            if leaving and self._serves:
                self.unsynced_topic_ids -= leaving
                self.unsynced_topic_ids |= {topic_id for topic_id in leaving if not is_synced(topic_id)}
                self._store_served(self._served._replace(unsynced_topic_ids=self.unsynced_topic_ids))

    def _store_served(self, served: Served) -> None:
        if not self.is_held:
            raise StorageError(f"log directory {self.path} is no longer locked: the broker has closed it")
        if served != self._served or not self._served_stored:
            self._served_stored = False  # after an error either version may be on the disk
            store_served(self.storage, self.path, served)
            self._served, self._served_stored = served, True

    # Trouble

    def judge(self, error: BaseException, doing: str, wanted_bytes: int = 0) -> RaftlogError:
        """Return the exception to raise for an error of the disk.

        Refusals (no space, no descriptors, no memory) pass and change nothing; any other error takes the directory
        offline for good.
        """
        if is_full(error):
            self.times_full += 1
            return full(self.path, wanted_bytes)
        if is_passing(error):
            return passing(error, doing)
        return self.fail(error, doing)

    def fail(self, error: BaseException, doing: str) -> StorageError:
        """Take the directory offline for good, and return the exception to raise, which names the first error."""
        with self._state_lock:
            first = self.offline_reason is None
            if self.offline_reason is None:
                self.offline_reason = StorageError(
                    f"log directory {self.path} is offline: {doing} failed: {error}; "
                    "repair the disk and restart the broker"
                )
            reason = self.offline_reason
        if first:
            logger.error(
                "log directory goes offline",
                extra={"event": "log_dir_offline", "path": self.path, "doing": doing, "error": str(error)},
            )
            self._on_offline(self, error)
        return reason
