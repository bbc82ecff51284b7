"""What is told of transactions, sinks and producers: rows for tables, documents for programs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from raftlog._transaction_descriptions import (
    ONGOING,
    OPEN_STATES,
    HangingTransaction,
    PartitionProducers,
    ProducerState,
    SinkDescription,
    SinkListing,
    StageDescription,
    TransactionDescription,
    TransactionListing,
)
from raftlog.cli.group_view import compact
from raftlog.cli.output import counted
from raftlog.types import TopicPartition

LIST_COLUMNS: Final = ("transactional_id", "sink", "producer_id", "state", "open_seconds", "coordinator")
LIST_OPTIONAL: Final = ("open_seconds", "sink", "coordinator")
DESCRIBE_COLUMNS: Final = ("transactional_id", "topic", "partition", "group", "marker")
DESCRIBE_OPTIONAL: Final = ("group", "marker")
SINK_COLUMNS: Final = ("sink", "last_batch", "target", "committed_seconds_ago", "open_stages", "coordinator")
SINK_OPTIONAL: Final = ("target", "committed_seconds_ago", "open_stages", "coordinator")
STAGE_COLUMNS: Final = (
    "sink",
    "producer_id",
    "batch",
    "state",
    "open_seconds",
    "timeout_seconds",
    "attempt",
    "partitions",
)
STAGE_OPTIONAL: Final = ("open_seconds", "attempt", "partitions", "timeout_seconds")
PRODUCER_COLUMNS: Final = (
    "topic",
    "partition",
    "producer_id",
    "epoch",
    "last_sequence",
    "idle_seconds",
    "transaction_start_offset",
    "open_seconds",
    "transactional_id",
    "sink",
)
PRODUCER_OPTIONAL: Final = (
    "transaction_start_offset",
    "open_seconds",
    "transactional_id",
    "sink",
    "idle_seconds",
    "last_sequence",
)
HANGING_COLUMNS: Final = (
    "topic",
    "partition",
    "producer_id",
    "producer_epoch",
    "start_offset",
    "open_seconds",
    "idle_seconds",
)
"""Columns that a terminal's table may do without are in `..._OPTIONAL`, the last one first."""

Producers = Mapping[TopicPartition, PartitionProducers]
Owners = Mapping[int, TransactionListing]
"""Whose producer ids these are, as far as coordinators know."""


def since_s(at_ms: int | None, now_ms: float) -> float | None:
    """Return the seconds since then; None: since never."""
    return round(max(0.0, now_ms - at_ms) / 1000, 1) if at_ms else None


def listed(found: TransactionListing) -> dict[str, Any]:
    """Return an entry of a list as a document: who has no name of one kind has None there."""
    return {**found._asdict(), "transactional_id": found.transactional_id or None, "sink_id": found.sink_id or None}


def open_first(found: Iterable[TransactionListing]) -> list[TransactionListing]:
    """Return what is open, and that first which is so for longest; then the rest, as it was."""
    return sorted(
        found, key=lambda each: (False, each.started_ms) if each.state in OPEN_STATES and each.started_ms else (True, 0)
    )


def list_row(found: TransactionListing, now_ms: float) -> dict[str, Any]:
    """Return the row of a transactional id, or of a stage."""
    return {
        "transactional_id": found.transactional_id or None,
        "sink": found.sink_id or None,
        "producer_id": found.producer_id,
        "state": found.state,
        "open_seconds": since_s(found.started_ms, now_ms),
        "coordinator": found.coordinator_id,
    }


def headline(found: TransactionDescription, now_ms: float) -> str:
    """Return a line on a transaction as a whole."""
    parts = [found.state]
    open_s = since_s(found.started_ms, now_ms)
    if open_s is not None:
        parts[0] += f" for {open_s:g} s"
    parts.append(f"timeout {found.timeout_ms / 1000:g} s")
    parts.append(f"producer {found.producer_id} epoch {found.producer_epoch}")
    parts.append(f"coordinator {found.coordinator_id} (__transaction_state-{found.state_partition})")
    if found.pending:
        parts.append(f"markers still missing: {compact(found.pending)}")
    return f"{found.transactional_id}: {', '.join(parts)}"


def describe_rows(found: TransactionDescription) -> list[dict[str, Any]]:
    """Return a row for each partition and group of a transaction."""
    decided = found.state.startswith("prepare")
    rows: list[dict[str, Any]] = [
        {
            "transactional_id": found.transactional_id,
            "topic": part.topic,
            "partition": part.partition,
            "marker": ("missing" if part in found.pending else "written") if decided else None,
        }
        for part in found.partitions
    ]
    return rows + [{"transactional_id": found.transactional_id, "group": group_id} for group_id in found.group_ids]


def document(found: TransactionDescription) -> dict[str, Any]:
    """Return everything that is known of a transaction."""
    return {**found._asdict(), "partitions": parts(found.partitions), "pending": parts(found.pending)}


def sink_row(found: SinkListing, now_ms: float) -> dict[str, Any]:
    """Return the row of a sink."""
    return {
        "sink": found.sink_id,
        "last_batch": found.last_batch_id if found.last_batch_id >= 0 else None,
        "target": found.target or None,
        "committed_seconds_ago": since_s(found.updated_ms, now_ms),
        "open_stages": found.open_stages,
        "coordinator": found.coordinator_id,
    }


def sink_headline(found: SinkDescription, now_ms: float) -> str:
    """Return a line on a sink as a whole."""
    ago_s = since_s(found.updated_ms, now_ms)
    last = "no batch is committed"
    if found.last_batch_id >= 0:
        last = f"batch {found.last_batch_id} is committed" + (f", {ago_s:g} s ago" if ago_s is not None else "")
    open_stages = sum(stage.state == ONGOING for stage in found.stages)
    return f"{found.sink_id}: {last}, target {found.target or '-'}, {counted(open_stages, 'stage')} open"


def stage_rows(found: SinkDescription, now_ms: float) -> list[dict[str, Any]]:
    """Return a row for each stage of a sink that stands."""
    return [
        {
            "sink": found.sink_id,
            "producer_id": stage.producer_id,
            "batch": stage.batch_id,
            "state": stage.state,
            "open_seconds": since_s(stage.started_ms, now_ms),
            "timeout_seconds": round(stage.timeout_ms / 1000),
            "attempt": stage.attempt or None,
            "partitions": compact(stage.partitions),
        }
        for stage in found.stages
    ]


def sink_document(found: SinkDescription) -> dict[str, Any]:
    """Return everything that is known of a sink."""
    return {**found._asdict(), "stages": [stage_document(stage) for stage in found.stages]}


def stage_document(found: StageDescription) -> dict[str, Any]:
    """Return everything that is known of a stage."""
    return {**found._asdict(), "partitions": parts(found.partitions)}


def only_open(found: Producers) -> dict[TopicPartition, PartitionProducers]:
    """Return of each partition the producers that have a transaction open there."""
    return {
        part: described._replace(
            producers=[each for each in described.producers if each.transaction_start_offset is not None]
        )
        for part, described in found.items()
    }


def producer_rows(found: Producers, owners: Owners, now_ms: float) -> list[dict[str, Any]]:
    """Return a row for each producer of each partition."""
    return [
        {
            "topic": part.topic,
            "partition": part.partition,
            "producer_id": each.producer_id,
            "epoch": each.producer_epoch,
            "last_sequence": each.last_sequence if each.last_sequence >= 0 else None,
            "idle_seconds": since_s(each.last_append_ms, now_ms),
            "transaction_start_offset": each.transaction_start_offset,
            "open_seconds": since_s(each.transaction_started_ms, now_ms),
            "transactional_id": _names(each, owners)["transactional_id"],
            "sink": _names(each, owners)["sink_id"],
        }
        for part, described in found.items()
        for each in described.producers
    ]


def _names(producer: ProducerState, owners: Owners) -> dict[str, str | None]:
    owner = owners.get(producer.producer_id)
    return {
        "transactional_id": owner.transactional_id or None if owner is not None else None,
        "sink_id": owner.sink_id or None if owner is not None else None,
    }


def producer_documents(found: Producers, owners: Owners) -> list[dict[str, Any]]:
    """Return everything that is known of the producers of partitions."""
    return [
        {
            **part._asdict(),
            **described._asdict(),
            "producers": [{**each._asdict(), **_names(each, owners)} for each in described.producers],
        }
        for part, described in found.items()
    ]


def held_up(found: Producers) -> list[str]:
    """Return a line for each partition in which an open transaction holds up the readers of what is committed."""
    return [
        f"{part}: the last stable offset is {each.last_stable_offset}, {each.high_watermark - each.last_stable_offset} "
        f"below the high watermark {each.high_watermark}"
        for part, each in found.items()
        if each.last_stable_offset < each.high_watermark
    ]


def hanging_row(found: HangingTransaction, now_ms: float) -> dict[str, Any]:
    """Return the row of a hanging transaction."""
    row = found._asdict()
    row["open_seconds"] = since_s(row.pop("started_ms"), now_ms)
    row["idle_seconds"] = since_s(row.pop("last_append_ms"), now_ms)
    return row


def abort_command(found: HangingTransaction) -> str:
    """Return the command that ends a hanging transaction."""
    return (
        f"raftlog txn abort-hanging {shlex.quote(found.topic)} --partition {found.partition} "
        f"--start-offset {found.start_offset}"
    )


def parts(partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    """Return partitions as documents."""
    return [part._asdict() for part in partitions]
