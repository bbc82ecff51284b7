"""The parts of a history. All times are seconds of one monotonic clock; an end of None: it was still going on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["send", "poll", "commit", "transaction", "admin"]
Outcome = Literal["ok", "failed", "unknown"]
PLURALS: dict[Kind, str] = {
    "send": "sends",
    "poll": "polls",
    "commit": "commits",
    "transaction": "transactions",
    "admin": "calls",
}
WRITES: tuple[Kind, ...] = ("send", "transaction")


class Window(NamedTuple):
    """A stretch of time."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a client asked for, from asking to the answer.

    `outcome`: "unknown" while it is not known whether it took effect; `end_s` None: no answer came during the run.
    `partition`, `node`: the ones that it concerned, if any. `about`: values, offsets or errors, for reports. `count`:
    the number of equal operations, from the begin of the first to the end of the last.
    """

    client: str
    kind: Kind
    begin_s: float
    end_s: float | None
    outcome: Outcome = "ok"
    partition: int | None = None
    node: int | None = None
    about: str = ""
    count: int = 1

    def __post_init__(self) -> None:
        assert self.end_s is None or self.end_s >= self.begin_s, f"{self} ends before it begins"
        assert self.end_s is not None or self.outcome != "ok", (
            f"{self} has succeeded, but has no time at which its answer came"
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault: its name, and its target nodes if it has any."""

    name: str
    begin_s: float
    end_s: float | None
    targets: tuple[int, ...] = ()


Ill = Literal["dead", "paused", "hampered"]


@dataclass(frozen=True, slots=True)
class Condition:
    """A node that is not well: "dead" has no process, "paused" stands still, "hampered" is slow or short of something.

    `begin_s` to `end_s` for a dead one: until it served again, if anybody waited for that.
    """

    node: int
    ill: Ill
    begin_s: float
    end_s: float | None


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing that one node sends arrives at the other."""

    sender: int
    receiver: int
    begin_s: float
    end_s: float | None


@dataclass(frozen=True, slots=True)
class Reign:
    """A node leads a partition, or is the controller (`partition` None), according to answers of the cluster."""

    node: int
    partition: int | None
    begin_s: float
    end_s: float | None


@dataclass
class History:
    """One run. `voters`: the nodes of which a majority decides; none: all. `until_s`: the end of the observation.

    `writes`: the kinds of operations that make the cluster available.
    """

    title: str
    nodes: Sequence[int] = ()
    voters: Sequence[int] = ()
    operations: list[Operation] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    reigns: list[Reign] = field(default_factory=list)
    until_s: float | None = None
    writes: tuple[Kind, ...] = WRITES

    @property
    def extent(self) -> Window:
        """From the first thing that is known of to the last."""
        begins: list[float] = []
        ends: list[float] = [] if self.until_s is None else [self.until_s]
        parts: tuple[Iterable[Operation | Fault | Condition | Cut | Reign], ...] = (
            self.operations, self.faults, self.conditions, self.cuts, self.reigns
        )  # fmt: skip
        for part in parts:
            for each in part:
                begins.append(each.begin_s)
                ends.append(each.begin_s if each.end_s is None else each.end_s)
        return Window(min(begins), max(ends)) if begins else Window(0.0, 0.0)

    @property
    def clients(self) -> dict[str, list[Operation]]:
        """Operations by client, in the order in which they began."""
        found: dict[str, list[Operation]] = {}
        for each in sorted(self.operations, key=lambda operation: operation.begin_s):
            found.setdefault(each.client, []).append(each)
        return found


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not happen, and did: its name, what that means, and what happened."""

    name: str
    meaning: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.meaning}: {self.what}"
