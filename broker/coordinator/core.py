"""The interface of a coordinator's core to the frame that runs it (`shard.py`), and its records as batches. Pure.

    decide(command, now) -> Decision(records, effects)     nothing is applied
    replay(key, value)                                     the only way hard state changes

The frame replays a decision's records before it asks for the next decision, and sends the effects once the records are
committed, in the order of the decisions. So the next coordinator finds in the log everything that was ever answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import pyarrow as pa
from google.protobuf.message import Message

from broker.coordinator.user_bound import Made
from raftlog.errors import CorruptRecordError, RaftlogError
from raftlog.format import BatchHeader, Buffer, Columns, decode_batch, encode_batch, iter_headers, parse_header
from raftlog.format.small_batch import FEW, encode_few

CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
TopicsT_contra = TypeVar("TopicsT_contra", contravariant=True)

Record = tuple[bytes, bytes | None]
"""Key and value; a None value removes the key (a tombstone)."""


@dataclass(frozen=True, slots=True)
class Now:
    """The time: `monotonic_ms` for deadlines, `wall_ms` for stored times."""

    monotonic_ms: float
    wall_ms: int


class Notice:
    """A message to another part of the same broker; it never crosses the wire."""

    __slots__ = ()


class Reply:
    """An answer to a call of this broker's listener for Kafka clients, which puts it into their form."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver `message` to the recipient `to`, a token of the frame for one stream or unary call.

    A RaftlogError ends a stream; None, for a stream only, ends it without an error. A Notice goes to the token that
    lives as long as the coordinator; that token takes nothing else.
    """

    to: object
    message: Message | Reply | Notice | RaftlogError | None


@dataclass(slots=True)
class Decision:
    """Records to append and replay, in order, and the effects to send once they are committed, in order.

    `rest`: a long command is decided in pieces. The frame decides `rest` next, before all waiting commands, after other
    tasks had a turn on the event loop.
    """

    records: list[Record] = field(default_factory=list)
    effects: list[Send] = field(default_factory=list)
    rest: object | None = None


class Core(Protocol[CommandT_contra, TopicsT_contra]):
    """One coordinator's state: the groups, or the transactions, of one partition.

    `TopicsT_contra`: its view of the cluster's topics.
    """

    @property
    def made(self) -> Made:
        """How many ids each user has made, by the replayed records."""
        ...

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply one record.

        Raises:
            CorruptRecordError: the record is not valid for this coordinator.
        """
        ...

    def loaded(self, now: Now) -> None:
        """Begin: the log has been replayed to its end, and deadlines count from now on."""
        ...

    def decide(self, command: CommandT_contra, now: Now) -> Decision:
        """Return the decision on a command, or on a piece of it. A refusal is an effect, too."""
        ...

    def at_once(self, command: CommandT_contra, now: Now) -> Message | None:
        """Return the answer to a command that need not wait for uncommitted records; None: it must wait.

        Such a command writes nothing, and its answer repeats only what the caller has said, so that no caller acts on
        state that may be lost. The frame calls this only under a valid lease, when no other broker can coordinate.
        """
        ...

    def next_deadline_ms(self) -> float | None:
        """Return when `on_time` must be called next, in monotonic ms; None: never."""
        ...

    def on_time(self, now: Now) -> Decision:
        """Return the decision on deadlines that have passed, or on some of them: a few milliseconds of work.

        `now` may be a little in the past: it is the latest time by which all commands received until then are decided.
        """
        ...

    def on_topics(self, topics: TopicsT_contra, now: Now) -> Decision:
        """Return the decision on a change of the cluster's topics."""
        ...


class Recipient(Protocol):
    """The receiver of an answer: a call, or a stream. `deliver` does not wait, and ignores messages after the end."""

    @property
    def is_stream(self) -> bool:
        """Whether it stays open after an answer, and may wait while nothing can be appended."""
        ...

    def deliver(self, message: Message | Reply | RaftlogError | None) -> None:
        """Deliver a message, or an error in its place; None ends a stream without an error."""
        ...


class Listener(Protocol):
    """The receiver of a coordinator's notices: another part of the same broker, which lives as long."""

    def notify(self, notice: Notice) -> None:
        """Deliver a notice; returns at once."""
        ...


def encode(records: Sequence[Record], wall_ms: int) -> tuple[bytes, BatchHeader]:
    """Return the records as one batch, and its header; there is at least one."""
    keys = [key for key, _ in records]
    written = [value for _, value in records if value is not None]
    if len(keys) == len(written) <= FEW:
        batch = encode_few(keys, written, wall_ms)
    else:
        values = pa.array([value for _, value in records], pa.binary())
        batch = encode_batch(Columns(value=values, key=pa.array(keys, pa.binary())), wall_ms)
    return batch, parse_header(batch)


def decode(data: Buffer) -> Iterator[tuple[int, bytes, bytes | None]]:
    """Yield (offset, key, value) of every record in whole batches, in order; control batches hold none.

    Raises:
        CorruptRecordError: a batch does not check, or a record has no key; the message names the offset.
    """
    for position, header in iter_headers(data):
        if header.is_control or not header.record_count:
            continue
        try:
            columns = decode_batch(data, position).columns
        except CorruptRecordError as error:
            raise CorruptRecordError(f"the batch at offset {header.base_offset}: {error}") from None
        names = columns.schema.names
        deltas = columns.column("offset_delta").to_pylist() if "offset_delta" in names else range(header.record_count)
        keys = columns.column("key").to_pylist() if "key" in names else [None] * header.record_count
        values = columns.column("value").to_pylist()
        for delta, key, value in zip(deltas, keys, values, strict=True):
            offset = header.base_offset + delta
            if key is None:
                raise CorruptRecordError(f"the record at offset {offset} has no key")
            yield offset, key, value
