"""The directories in a log directory: which are logs, how one comes into being, goes, or is set aside.

    TOPIC-PARTITION             a log
    ~new-TOPICID-PARTITION      being made; means nothing after a restart
    ~delete-TOPICID-PARTITION   being removed; means nothing after a restart
    ~stray-TOPICID-PARTITION    a log of a topic that the cluster does not know; never touched again

No topic name holds a `~`, so none of these can be taken for a log, or a log for one of these.
"""

from __future__ import annotations

from typing import Final

from broker.log.checkpoints import (
    PARTITION_METADATA,
    PartitionMetadata,
    load_partition_metadata,
    store_partition_metadata,
)
from broker.log.segment import segment_stem
from broker.log.storage import Storage
from raftlog.errors import CorruptRecordError, StorageError

_MARK: Final = "~"
NEW_PREFIX: Final = f"{_MARK}new-"
DELETE_PREFIX: Final = f"{_MARK}delete-"
STRAY_PREFIX: Final = f"{_MARK}stray-"


def find_logs(storage: Storage, log_dir: str) -> tuple[list[str], list[str]]:
    """Return the paths of the logs in a log directory, and of what is left of others.

    Raises:
        CorruptRecordError: a directory with segments of which it cannot be told whose they are.
        OSError: the disk.
    """
    logs, leftovers = [], []
    for name, size in sorted(storage.list_sizes(log_dir).items()):
        path = f"{log_dir}/{name}"
        if size >= 0 or name.startswith(STRAY_PREFIX):
            continue
        if name.startswith((NEW_PREFIX, DELETE_PREFIX)):
            leftovers.append(path)
        elif storage.exists(f"{path}/{PARTITION_METADATA}"):
            logs.append(path)
        elif any(entry.endswith(".log") for entry in storage.list_sizes(path)):
            raise CorruptRecordError(
                f"{path} holds segments but no {PARTITION_METADATA}: whose log it is cannot be told"
            )
    return logs, leftovers


def make_log(storage: Storage, log_dir: str, metadata: PartitionMetadata) -> str:
    """Make the directory of an empty log, all or nothing and durably; return its path.

    After an error it may be there already, empty; the next attempt takes it as it is.

    Raises:
        StorageError: another log has the name.
        OSError: the disk.
    """
    path = f"{log_dir}/{metadata.topic}-{metadata.partition}"
    if storage.exists(path):
        other = load_partition_metadata(storage, path)
        if other == metadata:
            storage.sync_dir(log_dir)
            return path
        raise StorageError(
            f"{path} is there already, with topic id {other.topic_id.hex() if other else 'unknown'}; "
            "move it away if it is not needed"
        )
    aside = f"{log_dir}/{NEW_PREFIX}{metadata.topic_id.hex()}-{metadata.partition}"
    storage.make_dir(aside)
    store_partition_metadata(storage, aside, metadata)
    storage.open(segment_stem(aside, 0) + ".log", create=True)
    storage.sync_dir(aside)
    storage.rename(aside, path)
    storage.sync_dir(log_dir)
    return path


def unused_path(storage: Storage, log_dir: str, prefix: str, topic_id: bytes, partition: int) -> str:
    """Return a path with this prefix that nothing has taken yet. Raises OSError."""
    stem = f"{log_dir}/{prefix}{topic_id.hex()}-{partition}"
    number, path = 0, stem
    while storage.exists(path):
        number += 1
        path = f"{stem}-{number}"
    return path


def remove_log(storage: Storage, path: str) -> None:
    """Remove the directory of a log, if it is there. Raises OSError."""
    if storage.exists(path):
        for name in storage.list_sizes(path):
            storage.remove(f"{path}/{name}")
        storage.remove_dir(path)
