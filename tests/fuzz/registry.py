"""All targets by name. One more is one entry here, and a function that raises where an oracle is violated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.fuzz import (
    batches,
    commands,
    handlers,
    kafka_clients,
    log_directories,
    log_recovery,
    metadata_directories,
    metadata_recovery,
    raft_messages,
    replication,
    server,
    settings,
    small_files,
    wires,
)
from tests.fuzz.oracle import MIB, Limits, run_within

LIMITS: Final = Limits()
SLOW: Final = Limits(measured_one_in=8)
SERVED: Final = Limits(cpu_s=60.0, memory_bytes=256 * MIB, measured_one_in=4)
"""Beside what a node does by itself meanwhile; a batch may inflate to max.inflate.bytes, four at a time."""


@dataclass(frozen=True)
class Target:
    """Something to fuzz."""

    run: Callable[[bytes], None]
    what: str
    limits: Limits = LIMITS
    examples: int = 100
    """How many inputs a CI run tries."""
    prepare: Callable[[], None] = lambda: None
    """Makes what all inputs share; its cost is not theirs."""

    def check(self, data: bytes) -> None:
        """Run it on an input within its limits; raises where something is wrong."""
        self.prepare()
        run_within(self.run, data, self.limits)


def _node() -> None:
    batches.prepare()
    server.node()


def _metadata() -> None:
    metadata_directories.directory()


TARGETS: Final[dict[str, Target]] = {
    "batch": Target(
        batches.target, "record batches, control and compressed ones", prepare=batches.prepare, examples=200
    ),
    "small-batch": Target(batches.few_target, "the shortcut for small batches", examples=200),
    "aborted": Target(batches.aborted_target, "ranges of aborted transactions"),
    "kafka-requests": Target(kafka_clients.request_target, "requests of Kafka clients", examples=200),
    "kafka-batches": Target(kafka_clients.batch_target, "record batches of Kafka producers", examples=200),
    "kafka-authentication": Target(
        kafka_clients.authentication_target, "what Kafka clients send before a login", SLOW, examples=100
    ),
    "wire": Target(wires.target, "produce, fetch and replicate messages", examples=200),
    "log-recovery": Target(
        log_recovery.target, "opening a damaged log directory", SLOW, prepare=log_directories.prepare, examples=40
    ),
    "log-lines": Target(small_files.lines_target, "checkpoints and properties of a log directory", examples=200),
    "log-indexes": Target(small_files.index_target, "index files", SLOW, prepare=log_directories.prepare),
    "producer-snapshots": Target(small_files.snapshot_target, "producer snapshots", prepare=log_directories.prepare),
    "leader-epochs": Target(small_files.epochs_target, "questions about leader epochs", examples=50),
    "metadata-recovery": Target(
        metadata_recovery.target, "starting on a damaged metadata directory", SLOW, prepare=_metadata, examples=60
    ),
    "metadata-formats": Target(metadata_recovery.formats_target, "frames, records, snapshots", prepare=_metadata),
    "metadata-state": Target(metadata_recovery.state_target, "the state in a snapshot", prepare=_metadata),
    "metadata-commands": Target(commands.metadata_target, "commands to the metadata", SLOW, examples=60),
    "raft-messages": Target(
        raft_messages.target, "messages between controllers", SLOW, prepare=raft_messages.prepare, examples=30
    ),
    "raft-hello": Target(raft_messages.hello_target, "hellos between controllers"),
    "calls": Target(handlers.unary_target, "calls of every method", SERVED, prepare=_node, examples=150),
    "kafka-connections": Target(
        kafka_clients.connection_target, "connections of Kafka clients", SERVED, prepare=_node, examples=60
    ),
    "streams": Target(handlers.stream_target, "streams of every method", SERVED, prepare=_node, examples=50),
    "replica-follower": Target(
        replication.follower_target, "frames of a leader", SLOW, prepare=batches.prepare, examples=100
    ),
    "replica-leader": Target(replication.leader_target, "requests of a follower"),
    "server-config": Target(settings.server_target, "server.toml, variables, flags"),
    "cli-inputs": Target(settings.input_target, "what `raftlog produce` reads"),
    "cli-segments": Target(
        settings.segment_target, "`raftlog log dump`", SLOW, prepare=log_directories.prepare, examples=60
    ),
    "group-records": Target(commands.group_target, "records of __consumer_offsets"),
    "transaction-records": Target(commands.transaction_target, "records of __transaction_state"),
}
