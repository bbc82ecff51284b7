"""DescribeLogDirs: space, and the partitions of each directory."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from raftlog.errors import StorageError, to_wire
from raftlog.v1.admin_pb2 import LogDirInfo, LogDirPartition


class LogView(Protocol):
    """What is told of one partition's log."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def directory(self) -> str | os.PathLike[str]: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def segment_count(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...


class LogsView(Protocol):
    """What is told of all logs; `offline_dirs` maps a directory to the reason why it is offline."""

    @property
    def offline_dirs(self) -> Mapping[str, object]: ...
    def logs(self) -> Iterable[LogView]: ...


async def describe_log_dirs(paths: Sequence[str], logs: LogsView) -> list[LogDirInfo]:
    """Return each directory, in the order of the configuration; one that is offline carries the reason."""
    partitions: dict[str, list[LogView]] = {}
    for log in logs.logs():
        partitions.setdefault(_normalized(os.path.dirname(os.fspath(log.directory))), []).append(log)
    offline = {_normalized(path): reason for path, reason in logs.offline_dirs.items()}
    infos = []
    for path in paths:
        info = LogDirInfo(path=path)
        reason = offline.get(_normalized(path))
        if reason is None:
            try:
                info.total_bytes, info.usable_bytes = await asyncio.to_thread(_space, path)
            except OSError as error:
                reason = error
        if reason is not None:
            info.error.CopyFrom(to_wire(StorageError(f"log directory {path} is offline: {reason}")))
        here = sorted(partitions.get(_normalized(path), []), key=lambda log: (log.topic, log.partition))
        info.partitions.extend(_partition(log) for log in here)
        infos.append(info)
    return infos


def _partition(log: LogView) -> LogDirPartition:
    return LogDirPartition(
        topic=log.topic,
        partition=log.partition,
        size_bytes=log.size_bytes,
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        high_watermark=log.high_watermark,
        segments=log.segment_count,
    )


def _space(path: str) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def _normalized(path: str) -> str:
    return os.path.abspath(path)
