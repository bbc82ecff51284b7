"""Checks what the members of a consumer group did, and what was committed for it.

Members note which partitions they own and from which member epoch to which, what each poll handed out, when they were
done with it, and which commits were acknowledged. Observers note the committed offsets that they were told. In the end
it is known how many records there are. From these notes alone follow the anomalies of `Kind`; a history without any is
what the promises of a group allow. Members may die and freeze at any point: what they did not note did not happen, and
what they were given last may be given to others again.

Members of these histories begin at what is committed, or at 0, and never seek back. Times are of one clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple

from tests.support.append_checker import Anomaly, describe

Partition = int
NEVER = float("inf")


class Given(NamedTuple):
    """The records of a partition that one poll returned: when it was called, and when the member had processed them."""

    asked_at: float
    done_at: float
    offsets: tuple[int, ...]


@dataclass
class Span:
    """A member owns a partition, from when it is told so until it lets go of it or ends; epochs are inclusive.

    `last_epoch` is the last member epoch in which it is known to have owned it. A static member that replaces another
    one of its `instance` goes on in the epoch of that one (KIP-345, KIP-848).
    """

    member: str
    partition: Partition
    first_epoch: int
    last_epoch: int
    began_at: float
    given: list[Given] = field(default_factory=list)
    instance: str = ""

    def follows(self, other: Span) -> bool:
        """Whether the coordinator has given the partition to this member once the other one no longer had it."""
        replaces = self.instance != "" and self.instance == other.instance
        if replaces and self.first_epoch == other.last_epoch:
            return self.began_at > other.began_at
        return self.first_epoch > other.last_epoch

    def __str__(self) -> str:
        return f"{self.member} (epochs {self.first_epoch} to {self.last_epoch})"


class Commit(NamedTuple):
    """An acknowledged commit of a member, of one partition."""

    member: str
    member_epoch: int
    partition: Partition
    offset: int
    invoked_at: float
    returned_at: float

    def __str__(self) -> str:
        return f"{self.offset}, committed by {self.member} in epoch {self.member_epoch}"


class Observation(NamedTuple):
    """A committed offset as an observer was told it; 0: none."""

    partition: Partition
    offset: int
    invoked_at: float
    returned_at: float

    def __str__(self) -> str:
        return f"{self.offset}, observed"


@dataclass
class History:
    """Everything that was noted. `ends`: by partition how many records there are, from offset 0."""

    ends: dict[Partition, int]
    spans: list[Span] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    """Records that were handed out to a member which did not own their partition."""


class Kind(Enum):
    """What must not happen."""

    UNPROCESSED = "a record was never processed"
    INVENTED = "a record was processed that is not there"
    TWO_OWNERS = "two members own a partition in the same epochs"
    AT_ONCE = "a member was handed records of a partition that another one owned by then"
    NOT_OWNED = "a member was handed records of a partition that it does not own"
    EPOCH_WENT_BACK = "the epoch of a member went back"
    WENT_BACK = "a committed offset went back"
    STALE_COMMIT = "a commit was taken from a member after another one owned the partition in a later epoch"
    AHEAD = "an offset was committed before the records below it were processed"
    STARTED_BEHIND = "a member began below what was committed before it owned the partition"
    REPEATED = "a member was handed a record again, or an earlier one, while it owned the partition"
    SKIPPED = "a member passed a record over"


def check(history: History) -> list[Anomaly]:
    """Return every anomaly; an empty list for a history that the promises allow."""
    return [
        *_processed(history),
        *_owners(history.spans),
        *_at_once(history.spans),
        *(Anomaly(Kind.NOT_OWNED, what) for what in history.strays),
        *_epochs(history.spans),
        *_committed_back(history),
        *_stale(history),
        *_ahead(history),
        *_starts(history),
        *_order(history.spans),
    ]


def assert_sound(history: History) -> None:
    """Raise with a description of all anomalies if there are any.

    Raises:
        AssertionError: there are.
    """
    anomalies = check(history)
    assert not anomalies, describe(anomalies)


def by_partition(spans: Iterable[Span]) -> Mapping[Partition, list[Span]]:
    """Return spans by partition, in the order in which they were noted."""
    found: dict[Partition, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.partition].append(span)
    return found


def _first_done(history: History) -> dict[Partition, dict[int, float]]:
    """Return when each record was processed first."""
    found: dict[Partition, dict[int, float]] = {partition: {} for partition in history.ends}
    for span in history.spans:
        done = found.setdefault(span.partition, {})
        for given in span.given:
            for offset in given.offsets:
                done[offset] = min(done.get(offset, NEVER), given.done_at)
    return found


def _processed(history: History) -> Iterator[Anomaly]:
    for partition, done in sorted(_first_done(history).items()):
        end = history.ends.get(partition, 0)
        for offset in range(end):
            if offset not in done:
                yield Anomaly(Kind.UNPROCESSED, f"{partition}:{offset}")
        for offset in sorted(done):
            if not 0 <= offset < end:
                yield Anomaly(Kind.INVENTED, f"{partition}:{offset}, and the end is {end}")


def _owners(spans: Iterable[Span]) -> Iterator[Anomaly]:
    """A partition is free before the next member gets it, and that member is in a later epoch then (KIP-848)."""
    for partition, owned in sorted(by_partition(spans).items()):
        latest: Span | None = None
        for span in sorted(owned, key=lambda each: (each.first_epoch, each.last_epoch, each.began_at)):
            if latest is not None and latest.member != span.member and not span.follows(latest):
                yield Anomaly(Kind.TWO_OWNERS, f"partition {partition}: {latest} and {span}")
            if latest is None or span.last_epoch >= latest.last_epoch:
                latest = span


def _at_once(spans: Iterable[Span]) -> Iterator[Anomaly]:
    """Polls that were called after another member was told, in a later epoch, that the partition is his."""
    for partition, owned in sorted(by_partition(spans).items()):
        for span in owned:
            later = [each for each in owned if each.member != span.member and each.follows(span)]
            taken_at = min((each.began_at for each in later), default=NEVER)
            for given in span.given:
                if given.asked_at > taken_at:
                    who = next(each for each in later if each.began_at == taken_at)
                    what = f"partition {partition}: {span} at {given.asked_at:.3f}, and {who} since {taken_at:.3f}"
                    yield Anomaly(Kind.AT_ONCE, what)


def _epochs(spans: Iterable[Span]) -> Iterator[Anomaly]:
    by_member: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.last_epoch < span.first_epoch:
            yield Anomaly(Kind.EPOCH_WENT_BACK, f"partition {span.partition}: {span}")
        by_member[span.member].append(span)
    for noted in by_member.values():
        for before, after in pairwise(sorted(noted, key=lambda each: each.began_at)):
            if after.first_epoch < before.first_epoch:
                yield Anomaly(Kind.EPOCH_WENT_BACK, f"{before}, then {after}")


def _said(history: History) -> Mapping[Partition, list[Commit | Observation]]:
    """Return by partition every commit and observation of committed offsets."""
    found: dict[Partition, list[Commit | Observation]] = defaultdict(list)
    for commit in history.commits:
        found[commit.partition].append(commit)
    for observation in history.observations:
        found[observation.partition].append(observation)
    return found


def _committed_back(history: History) -> Iterator[Anomaly]:
    """An acknowledged or observed offset is a lower bound for every later commit and observation."""
    for partition, events in sorted(_said(history).items()):
        by_return = sorted(events, key=lambda each: each.returned_at)
        ended, highest = 0, None
        for event in sorted(events, key=lambda each: each.invoked_at):
            while by_return[ended].returned_at < event.invoked_at:
                if highest is None or by_return[ended].offset > highest.offset:
                    highest = by_return[ended]
                ended += 1
            if highest is not None and event.offset < highest.offset:
                yield Anomaly(Kind.WENT_BACK, f"partition {partition}: {highest}, then {event}")


def _stale(history: History) -> Iterator[Anomaly]:
    owned = by_partition(history.spans)
    for commit in history.commits:
        for span in owned.get(commit.partition, []):
            later = span.member != commit.member and span.first_epoch > commit.member_epoch
            if later and span.began_at < commit.invoked_at:
                yield Anomaly(Kind.STALE_COMMIT, f"partition {commit.partition}: {commit}, and owned by {span}")


def _ahead(history: History) -> Iterator[Anomaly]:
    """Records below a committed offset are processed: before the commit, or before it was observed."""
    all_done_at: dict[Partition, list[float]] = {}
    for partition, done in _first_done(history).items():
        count = max(done, default=-1) + 1
        all_done_at[partition] = list(accumulate((done.get(offset, NEVER) for offset in range(count)), max))
    for partition, events in sorted(_said(history).items()):
        done_at = all_done_at.get(partition, [])
        for event in events:
            by = event.invoked_at if isinstance(event, Commit) else event.returned_at
            if event.offset > 0 and (event.offset > len(done_at) or done_at[event.offset - 1] > by):
                yield Anomaly(Kind.AHEAD, f"partition {partition}: {event}")


def _starts(history: History) -> Iterator[Anomaly]:
    """A member begins at the group's last committed offset, or above it if commits were in flight."""
    said = _said(history)
    for span in history.spans:
        start = span.given[0].offsets[0] if span.given else None
        if start is None:
            continue
        known = [event for event in said.get(span.partition, []) if event.returned_at < span.began_at]
        highest = max(known, key=lambda event: event.offset, default=None)
        if highest is not None and start < highest.offset:
            yield Anomaly(Kind.STARTED_BEHIND, f"partition {span.partition}: {span} at {start}, and {highest} before")


def _order(spans: Iterable[Span]) -> Iterator[Anomaly]:
    for span in spans:
        offsets = [offset for given in span.given for offset in given.offsets]
        for before, offset in pairwise(offsets):
            what = f"partition {span.partition}: {span}: {offset} after {before}"
            if offset <= before:
                yield Anomaly(Kind.REPEATED, what)
            elif offset > before + 1:
                yield Anomaly(Kind.SKIPPED, what)
