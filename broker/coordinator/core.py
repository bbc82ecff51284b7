"""What a coordinator's core looks like to the frame that runs it (`shard.py`). Pure: time and metadata are passed in.

    decide(command, now) -> Decision(records, effects)     nothing is applied
    replay(key, value)                                     the only way state changes that has to last

The frame replays what a decision wrote before it asks for the next one, and sends the effects once the records are
committed, in the order of the decisions. So what anybody has heard of is what the next coordinator finds in the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from raftlog.errors import RaftlogError

CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
TopicsT_contra = TypeVar("TopicsT_contra", contravariant=True)

Record = tuple[bytes, bytes | None]
"""Key and value; None: what the key stands for is over."""


@dataclass(frozen=True, slots=True)
class Now:
    """The time: `monotonic_ms` for whatever is waited for, `wall_ms` for what is stored."""

    monotonic_ms: float
    wall_ms: int


class Notice:
    """What a coordinator tells another part of its own broker; it never travels."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Give `message` to whoever waits at `to`, a token of the frame: one for each stream or unary call.

    A RaftlogError to a stream is its last word. None, to a stream only: it ends without one. A Notice goes to a token
    that lives as long as the coordinator, and takes nothing else.
    """

    to: object
    message: Message | Notice | RaftlogError | None


@dataclass(slots=True)
class Decision:
    """Records to be appended and replayed, in order, and what is sent once they are committed, in order.

    `rest`: the command was too much for one go, and this one is decided next in its place, before all others that wait
    for their turn. The loop is free in between.
    """

    records: list[Record] = field(default_factory=list)
    effects: list[Send] = field(default_factory=list)
    rest: object | None = None


class Core(Protocol[CommandT_contra, TopicsT_contra]):
    """One coordinator's state: that of the groups, or transactions, of one partition.

    `TopicsT_contra`: how it sees the topics of the cluster.
    """

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply one record.

        Raises:
            CorruptRecordError: it is none of this coordinator's.
        """
        ...

    def loaded(self, now: Now) -> None:
        """Begin: the log was replayed to its end, and from now on time runs."""
        ...

    def decide(self, command: CommandT_contra, now: Now) -> Decision:
        """Return what a command leads to, or a piece of it. A refusal is an effect, too."""
        ...

    def at_once(self, command: CommandT_contra, now: Now) -> Message | None:
        """Return the answer of a command that may be answered before what is under way is committed; None: no.

        It has to write nothing, and its answer to say nothing but what who asks has said itself, so that nobody acts
        on what may vanish. The frame calls it only while nobody else can coordinate: under a valid lease.
        """
        ...

    def next_deadline_ms(self) -> float | None:
        """Return when `on_time` has to be called next, in monotonic ms; None: never."""
        ...

    def on_time(self, now: Now) -> Decision:
        """Return what is due by now, or some of it: a few milliseconds' work.

        `now` may lie a little back: time has come only as far as all commands have been decided that came in by then.
        """
        ...

    def on_topics(self, topics: TopicsT_contra, now: Now) -> Decision:
        """Return what a change of the cluster's topics leads to."""
        ...


class Recipient(Protocol):
    """Who is answered: a call, or a stream. `deliver` does not wait, and passes over what comes after the end."""

    @property
    def is_stream(self) -> bool:
        """Whether it lives on after an answer, and has time when appending has to wait."""
        ...

    def deliver(self, message: Message | RaftlogError | None) -> None:
        """Take a message, or the error that takes its place; None ends a stream without a word."""
        ...


class Listener(Protocol):
    """Who takes a coordinator's notices: another part of the same broker, with the coordinator's own life."""

    def notify(self, notice: Notice) -> None:
        """Take a notice; returns at once."""
        ...
