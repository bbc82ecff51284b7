"""A small coordinator core for tests of the frame: counts by name."""

from __future__ import annotations

from dataclasses import dataclass

from broker.coordinator.core import Decision, Notice, Now, Send
from broker.coordinator.user_bound import Made
from raftlog.errors import CorruptRecordError
from raftlog.v1.group_pb2 import HeartbeatAnswer


@dataclass(frozen=True)
class Add:
    """Count `name` once more; answered with the count."""

    to: object
    name: str


@dataclass(frozen=True)
class Ask:
    """Answered with the count; writes nothing."""

    to: object
    name: str


@dataclass(frozen=True)
class Break:
    """A command that the core has a bug with."""

    to: object


@dataclass(frozen=True)
class Echo:
    """Answered with `number`, which the caller knows."""

    to: object
    number: int


@dataclass(frozen=True)
class AddAll:
    """Count each of `names` once more, one in each go; answered with how many there were."""

    to: object
    names: tuple[str, ...]
    done: int = 0


@dataclass(frozen=True)
class Announce:
    """Count `name` once more; `listener` is given notice of the count."""

    listener: object
    name: str


@dataclass(frozen=True)
class Counted(Notice):
    """How often."""

    count: int


Command = Add | AddAll | Announce | Ask | Break | Echo


class Tally:
    """`deadline_ms`, `topics` are for the test to set and look at."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.made = Made()
        self.is_loaded = False
        self.deadline_ms: float | None = None
        self.topics: list[object] = []
        self.times: list[float] = []

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply a record."""
        if not key.isalnum():
            raise CorruptRecordError(f"key {key!r} is no name")
        if value is None:
            self.counts.pop(key.decode(), None)
        else:
            self.counts[key.decode()] = int(value)

    def loaded(self, now: Now) -> None:
        """Begin."""
        self.is_loaded = True

    def decide(self, command: Command, now: Now) -> Decision:
        """Count, or ask."""
        assert self.is_loaded, "a tally decides before it is loaded"
        match command:
            case Break():
                raise ZeroDivisionError("a bug")
            case Ask():
                return Decision([], [Send(command.to, HeartbeatAnswer(member_epoch=self.counts.get(command.name, 0)))])
            case Echo():
                return Decision([], [Send(command.to, HeartbeatAnswer(member_epoch=command.number))])
            case AddAll():
                name = command.names[command.done]
                record = (name.encode(), str(self.counts.get(name, 0) + 1).encode())
                done = command.done + 1
                if done < len(command.names):
                    return Decision([record], [], AddAll(command.to, command.names, done))
                return Decision([record], [Send(command.to, HeartbeatAnswer(member_epoch=done))])
            case Announce():
                count = self.counts.get(command.name, 0) + 1
                record = (command.name.encode(), str(count).encode())
                return Decision([record], [Send(command.listener, Counted(count))])
            case Add():
                count = self.counts.get(command.name, 0) + 1
                record = (command.name.encode(), str(count).encode())
                return Decision([record], [Send(command.to, HeartbeatAnswer(member_epoch=count))])

    def at_once(self, command: Command, now: Now) -> HeartbeatAnswer | None:
        """Answer an echo."""
        return HeartbeatAnswer(member_epoch=command.number) if isinstance(command, Echo) else None

    def next_deadline_ms(self) -> float | None:
        """Return the values that the test has set."""
        return self.deadline_ms

    def on_time(self, now: Now) -> Decision:
        """Count how often time was up."""
        self.deadline_ms = None
        self.times.append(now.monotonic_ms)
        return Decision([(b"time", str(self.counts.get("time", 0) + 1).encode())], [])

    def on_topics(self, topics: object, now: Now) -> Decision:
        """Keep what it is told."""
        self.topics.append(topics)
        return Decision()
