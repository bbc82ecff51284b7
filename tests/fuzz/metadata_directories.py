"""A metadata directory as a controller on its own leaves it: a log in several files, and a snapshot."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final

from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.image import MetadataImage
from raftmeta.raft import consensus, wal
from raftmeta.raft import wal as wal_module
from raftmeta.raft.consensus import RaftOptions
from raftmeta.raft.node import RaftNode
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.voters import MetadataDirectory
from raftmeta.raft.wal import ENTRY, Segment, WriteAheadLog, split_records
from raftmeta.state import MetadataState
from tests.support.metadata import claim, create_topic, delete_topic, register, unfence
from tests.support.metadata_disk import MemoryDisk
from tests.support.raft_cluster import CLUSTER_ID, Events

DIRECTORY_ID: Final = uuid.UUID(int=0x1234)
SEGMENT_BYTES: Final = 1_200
ALLOCATION_BYTES: Final = 2 << 10
"""In place of megabytes of zeros."""
COMMANDS: Final = 26


@contextmanager
def small_files() -> Iterator[None]:
    """Reserve little space at a time, and let the clock stand still."""
    sizes = wal.ALLOCATION_BYTES, wal_module.RESERVE_BYTES
    wal.ALLOCATION_BYTES, wal_module.RESERVE_BYTES = ALLOCATION_BYTES, 512
    clock = consensus.use_clock(lambda: 1_000.0)
    try:
        yield
    finally:
        wal.ALLOCATION_BYTES, wal_module.RESERVE_BYTES = sizes
        consensus.use_clock(clock)


class Controller:
    """One controller, the only voter, on a disk."""

    def __init__(self, disk: MemoryDisk) -> None:
        """Start it; raises the errors of a start."""
        self.state = MetadataState()
        self.directory = MetadataDirectory.open(disk, 1, CLUSTER_ID, [1], lambda: DIRECTORY_ID)
        self.wal = WriteAheadLog(disk, self.directory.directory_id, SEGMENT_BYTES)
        self.wal.open()
        self.node = RaftNode(
            node_id=1,
            voters=[1],
            directory=self.directory,
            wal=self.wal,
            snapshots=SnapshotStore(disk),
            state=self.state,
            listener=Events(),
            rng=random.Random(1),
            options=RaftOptions(commit_notice_s=0, snapshot_after_entries=12, log_tail_entries=4),
            clock=lambda: 1_000.0,
        )

    def step(self, times: int = 1) -> None:
        """Let it do what is due, durably."""
        for _ in range(times):
            self.node.cycle()
            self.wal.sync()
            self.node.take_immediate()
            self.node.take_durable()

    def propose(self, command: MetadataCommand) -> None:
        """Have a command committed and applied."""
        command.controller_epoch = self.node.term
        before = self.state.last_applied
        self.node.propose(command.SerializeToString(), lambda _outcome: None)
        for _ in range(10):
            self.step()
            if self.state.last_applied > before:
                return
        raise AssertionError("the only voter of a quorum has not committed its own entry within ten steps")


@dataclass(frozen=True)
class Directory:
    """The files of a directory, and what it held after each entry."""

    files: Mapping[str, bytes]
    images: Mapping[int, MetadataImage]
    """By index of the last entry applied."""

    @property
    def sealed_index(self) -> int:
        """The last entry that lies in another file than the newest: no crash could have torn it."""
        names = sorted(name for name in self.files if name.startswith("wal-"))
        indexes = []
        for name in names[:-1]:
            payloads, _ = Segment(DIRECTORY_ID.bytes, int(name[4:])).split(self.files[name], name)
            indexes += [r[1] for payload in payloads for r in split_records(payload, name) if r[0] == ENTRY]
        return max(indexes)


@cache
def directory() -> Directory:
    """Return a directory that nothing is wrong with; its controller was killed."""
    disk, images = MemoryDisk(), {}
    with small_files():
        controller = Controller(disk)
        controller.step(10)
        controller.propose(claim(cluster_id=CLUSTER_ID))
        images[controller.state.last_applied] = controller.state.image
        commands = [register(1), unfence(1, controller.state.last_applied + 1)]
        commands += [create_topic(f"t{number}", number + 1, partitions=1 + number % 3) for number in range(COMMANDS)]
        commands.insert(12, delete_topic("t3"))
        for command in commands:
            controller.propose(command)
            images[controller.state.last_applied] = controller.state.image
    return Directory({name: disk.read(name) for name in disk.names()}, images)


def disk_of(files: Mapping[str, bytes]) -> MemoryDisk:
    """Return a disk with these files."""
    disk = MemoryDisk()
    for name, data in files.items():
        disk.put(name, data)
    return disk
