"""How `raftlog consume` reads: `Reading` without a group, `GroupReading` as a member of a group.

Also here: functions that look into a consumer, for unreachable leaders and current partitions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Final, NamedTuple

import raftlog
from raftlog._client.group_consumer import GroupEngine
from raftlog._client.metadata import EARLIEST, LATEST, STRAGGLER_GRACE_S
from raftlog._consumer import Consumer
from raftlog._core.words import counted
from raftlog.cli.groups.groups import compact
from raftlog.cli.output import print_note
from raftlog.errors import (
    CoordinatorNotAvailable,
    FencedError,
    InvalidRequestError,
    LeaderNotAvailable,
    OffsetOutOfRange,
    RaftlogError,
    RetriableError,
)
from raftlog.types import TopicPartition


def out_of_reach(consumer: Consumer) -> dict[TopicPartition, str]:
    """Return the assigned partitions whose leaders the consumer cannot reach, and why."""
    consumer._engine.check_open()
    return consumer._thread.run(consumer._engine.out_of_reach())


def leaderless(consumer: Consumer, partition: TopicPartition) -> str | None:
    """Return a sentence if the consumer knows no leader of the partition; else None."""
    return consumer._engine.metadata.view.without_leader(partition)


def position_now(consumer: Consumer, partition: TopicPartition) -> int | None:
    """Return the offset of the next record; None during the lookup of the start, or if it is not assigned.

    Raises:
        OffsetOutOfRange: it has no position, and `auto.offset.reset` is `none`.
    """
    unread = consumer._unread.first_offsets().get(partition)
    if unread is not None:
        return unread
    try:
        return consumer._engine.position_now(partition)
    except InvalidRequestError:  # the session has just ended
        return None


def why_no_member(consumer: Consumer) -> str | None:
    """Return why a consumer that subscribes with a group is not a member now; None: it is a member, or has no group."""
    engine = consumer._engine
    if not isinstance(engine, GroupEngine) or not engine.subscribed or engine.membership.is_member:
        return None
    return f"group {engine.group_id}: {engine.membership.refusal or 'its coordinator has not answered'}"


def partitions_now(consumer: Consumer, topic: str, patience_s: float) -> list[TopicPartition]:
    """Return the current partitions of a topic, from a broker.

    Raises:
        RaftlogError: no broker answers within `patience_s`.
    """
    consumer._engine.check_open()
    view = consumer._thread.run(consumer._engine.metadata.topic(topic, patience_s * 1000, fresh=True))
    return [TopicPartition(topic, part.partition) for part in view.partitions]


def try_offsets(
    consumer: Consumer,
    partitions: Iterable[TopicPartition],
    which: int,
    grace_s: float = STRAGGLER_GRACE_S,
    patience_s: float | None = None,
) -> dict[TopicPartition, int | RaftlogError]:
    """Return an offset of each partition, or its error: its first or last offset (EARLIEST, LATEST), or that of a time.

    A partition without a record that new is left out. Arguments and errors are those of `OffsetLookup.find_some`.
    """
    engine = consumer._engine
    engine.check_open()
    wanted = dict.fromkeys(partitions, which)
    found = consumer._thread.run(engine.lookup.find_some(wanted, engine.options.isolation_level, grace_s, patience_s))
    return {
        part: answer if isinstance(answer, RaftlogError) else answer.offset
        for part, answer in found.items()
        if answer is not None
    }


_POLL_S = 0.5
_FIRST_PATIENCE_S = 2.0
"""How long leaders may take to answer for the start before a note says that the command waits for them."""
_PATIENCE_S = 8.0
"""Without --follow: how much longer the command waits for these leaders."""
_LOOK_S = 2.0
"""How often the command looks for new partitions."""
_LOOK_PATIENCE_S = 0.5
_TOLD_AFTER_S = 2.0
"""How long a leader may be unreachable before a note says so; meanwhile another one may be elected."""
_RETRY_S = 2.0
"""Time between attempts for partitions that could not be read."""
_RETRY_PATIENCE_S = 0.5
"""How long such an attempt may delay the other partitions."""
_STALLED_S = 10.0
"""Without --follow and --timeout: the command gives up after this time without a record."""
_NAMED = 5
"""How many partitions one line names."""


class Begin(Enum):
    """The places at which reading may begin, other than an offset."""

    BEGINNING = auto()
    END = auto()


class FromTime(NamedTuple):
    """Reading begins at the first record with at least this timestamp, or at the end if there is none."""

    time_ms: int


class LastRecords(NamedTuple):
    """Reading begins this many offsets before the end of each partition."""

    number: int


Beginning = Begin | FromTime | LastRecords | int
"""An int is an offset."""


class Reading:
    """Reads partitions, retries those that cannot be read, and stops at their ends unless it follows.

    Attributes:
        unread: the partitions that cannot be read for now, and why.

    With `topics` and `follow`, partitions that these topics get later are read from their beginnings.

    Raises:
        RaftlogError: no partition can be read, and it does not follow.
        OffsetOutOfRange: a partition does not have the offset to begin at.
    """

    def __init__(
        self,
        consumer: raftlog.Consumer,
        places: list[raftlog.TopicPartition],
        begin: Beginning,
        *,
        follow: bool,
        topics: Iterable[str] = (),
    ) -> None:
        self.unread: dict[raftlog.TopicPartition, RaftlogError] = {}
        self._consumer = consumer
        self._begin = begin
        self._follow = follow
        self._several = len(places) > 1
        self._ends: dict[raftlog.TopicPartition, int] = {}
        self._assigned: list[raftlog.TopicPartition] = []
        self._topics = list(topics)
        self._known = set(places)
        self._later: set[raftlog.TopicPartition] = set()
        """Partitions added to the topic since the start: they are read from the beginning."""
        self._contact_at_s = 0.0
        self._waiting_since_s: float | None = None
        self._told: frozenset[raftlog.TopicPartition] = frozenset()
        self._take_in_first(places)
        self._retry_at_s = time.monotonic() + _RETRY_S
        self._look_at_s = time.monotonic() + _LOOK_S

    def _take_in_first(self, places: list[raftlog.TopicPartition]) -> None:
        try:
            self._take_in(places, _FIRST_PATIENCE_S)
        except RetriableError as error:
            self.unread = dict.fromkeys(places, error)
            self._tell(self._waited_for())
            if not self._follow:
                self._take_in(places, _PATIENCE_S)
            return
        if self.unread:
            print_note(f"{self._why_unread()}; reading the other partitions and trying again")
            self._told = frozenset(self.unread)

    def polls(self, timeout_s: float | None) -> Iterator[list[raftlog.Record]]:
        """Yield records as they come; without following, the ones below the ends, until all ends are reached.

        It also stops after `timeout_s` without a record; without following and `timeout_s`, after _STALLED_S.
        """
        last_record = time.monotonic()
        limit_s = timeout_s if timeout_s is not None or self._follow else _STALLED_S
        while True:
            ends = self._ends
            if not self._follow:
                ends = self._ends = {place: end for place, end in ends.items() if self._consumer.position(place) < end}
                if not ends:
                    self._retry(last_time=True)
                    if not self._ends:
                        return
                    continue
            wait_s = _POLL_S if limit_s is None else min(_POLL_S, max(0.0, last_record + limit_s - time.monotonic()))
            records = self._poll(wait_s)
            if records:
                yield [record for record in records if self._follow or _is_before_end(record, ends)]
                last_record = time.monotonic()
            elif limit_s is not None and time.monotonic() >= last_record + limit_s:
                self._check_contact(limit_s)
                return
            self._retry()
            self._look_for_new()
            self._check_unreachable()

    def _poll(self, wait_s: float) -> list[raftlog.Record]:
        if self._assigned:
            return self._consumer.poll(wait_s)
        time.sleep(wait_s)
        return []

    def _look_for_new(self) -> None:
        """Add partitions that the topics have got meanwhile."""
        if not self._topics or not self._follow or time.monotonic() < self._look_at_s:
            return
        for topic in self._topics:
            with suppress(RetriableError):
                new = set(partitions_now(self._consumer, topic, _LOOK_PATIENCE_S)) - self._known
                self._known |= new
                self._later |= new
                for place in sorted(new):
                    self.unread[place] = LeaderNotAvailable(f"{place} is new")
                    self._retry_at_s = 0.0
        self._look_at_s = time.monotonic() + _LOOK_S

    def _waited_for(self) -> dict[raftlog.TopicPartition, str]:
        """Return the partitions whose leaders are unreachable, and why."""
        unread = {place: leaderless(self._consumer, place) or str(error) for place, error in self.unread.items()}
        return dict(sorted({**unread, **out_of_reach(self._consumer)}.items()))

    def _check_unreachable(self) -> None:
        """Print a note when leaders have been unreachable for a while, and when the set of them changes."""
        if time.monotonic() < self._contact_at_s:
            return
        self._contact_at_s = time.monotonic() + _POLL_S
        waited_for = self._waited_for()
        if not waited_for:
            self._waiting_since_s = None
            if self._told:
                print_note("all partitions are being read again")
                self._told = frozenset()
            return
        self._waiting_since_s = self._waiting_since_s or time.monotonic()
        if time.monotonic() - self._waiting_since_s >= _TOLD_AFTER_S:
            self._tell(waited_for)

    def _tell(self, waited_for: dict[raftlog.TopicPartition, str]) -> None:
        if waited_for.keys() != self._told:
            self._told = frozenset(waited_for)
            print_note(f"waiting for {listed(waited_for)}")

    def _check_contact(self, limit_s: float) -> None:
        """Check that the reason why no records came is that there are none.

        Raises:
            LeaderNotAvailable: leaders are unreachable, so there may be records.
        """
        waited_for = self._waited_for() if self._follow else {}
        if waited_for:
            raise LeaderNotAvailable(f"no record came for {limit_s:g} s; unreachable leaders: {listed(waited_for)}")

    def check_complete(self) -> None:
        """Without following: check that everything was read.

        Raises:
            LeaderNotAvailable: partitions were not read, or not to their ends; the message names them.
        """
        if self._follow:
            return
        problems = [self._why_unread()] if self.unread else []
        if self._ends:
            places = ", ".join(map(str, sorted(self._ends)))
            problems.append(f"reading stopped before the end of {places}")
        if problems:
            raise LeaderNotAvailable("; ".join(problems))

    def _retry(self, *, last_time: bool = False) -> None:
        """Add partitions that can be read now."""
        if self.unread and (last_time or time.monotonic() >= self._retry_at_s):
            with suppress(RetriableError):
                self._take_in(sorted(self.unread), _RETRY_PATIENCE_S)
            self._retry_at_s = time.monotonic() + _RETRY_S

    def _take_in(self, places: list[raftlog.TopicPartition], patience_s: float | None) -> None:
        later = [place for place in places if place in self._later]
        if later:
            places = [place for place in places if place not in self._later]
            self._take_in_from(later, Begin.BEGINNING, patience_s)
        if places:
            self._take_in_from(places, self._begin, patience_s)

    def _take_in_from(self, places: list[raftlog.TopicPartition], begin: Beginning, patience_s: float | None) -> None:
        starts = (
            {} if begin is Begin.END or isinstance(begin, FromTime) else self._look_up(places, EARLIEST, patience_s)
        )
        needs_ends = begin is not Begin.BEGINNING or not self._follow
        ends = self._look_up(sorted(starts) or places, LATEST, patience_s) if needs_ends else {}
        found = [place for place in places if (place in ends if needs_ends else place in starts)]
        if not found:
            return
        for place in found:
            self.unread.pop(place, None)
        if isinstance(begin, FromTime):
            at = ends | self._look_up(found, begin.time_ms, patience_s)
            found = [place for place in found if place not in self.unread]
        if isinstance(begin, int):
            _check_offset(begin, starts, {place: ends[place] for place in found}, several=self._several)
        self._assigned += found
        self._consumer.assign(self._assigned)
        for place in found:
            match begin:
                case Begin.BEGINNING:
                    self._consumer.seek(place, starts[place])
                case Begin.END:
                    self._consumer.seek(place, ends[place])
                case FromTime():
                    self._consumer.seek(place, at[place])
                case LastRecords(number):
                    self._consumer.seek(place, max(starts[place], ends[place] - number))
                case _:
                    self._consumer.seek(place, begin)
        if not self._follow:
            self._ends |= {place: ends[place] for place in found}

    def _look_up(
        self, places: list[raftlog.TopicPartition], which: int, patience_s: float | None
    ) -> dict[raftlog.TopicPartition, int]:
        """Return the offsets; the errors of other partitions go to `unread`."""
        found: dict[raftlog.TopicPartition, int] = {}
        grace_s = STRAGGLER_GRACE_S if patience_s is None else min(STRAGGLER_GRACE_S, patience_s)
        for place, answer in try_offsets(self._consumer, places, which, grace_s, patience_s).items():
            if isinstance(answer, RaftlogError):
                self.unread[place] = answer
            else:
                found[place] = answer
        return found

    def _why_unread(self) -> str:
        reasons = [
            str(error) if str(error).startswith(f"{place}") else f"{place}: {error}"
            for place, error in sorted(self.unread.items())
        ]
        more = f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
        return f"cannot read {counted(len(reasons), 'partition')}: {'; '.join(reasons[:_NAMED])}{more}"


def listed(reasons: dict[raftlog.TopicPartition, str]) -> str:
    """Return the first partitions with their reasons, and the number of further ones."""
    texts = [why if why.startswith(f"{place}:") else f"{place}: {why}" for place, why in reasons.items()]
    more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more


def _check_offset(
    offset: int,
    starts: dict[raftlog.TopicPartition, int],
    ends: dict[raftlog.TopicPartition, int],
    *,
    several: bool,
) -> None:
    for place, end in ends.items():
        if not starts[place] <= offset <= end:
            choice = "; choose one with --partition" if several else ""
            raise OffsetOutOfRange(f"{place} has offsets {starts[place]} to {end}, not {offset}{choice}")


def _is_before_end(record: raftlog.Record, ends: dict[raftlog.TopicPartition, int]) -> bool:
    return record.offset < ends.get(raftlog.TopicPartition(record.topic, record.partition), 0)


_GROUP_POLL_S: Final = 0.5
_GROUP_STALLED_S: Final = 10.0
"""Without following and --timeout: the command gives up after this time without a record or an assignment."""
_PER_POLL: Final = 500
_GROUP_FIRST_PATIENCE_S: Final = 2.0
"""How long leaders may take to answer for the end of a partition."""
_GROUP_RETRY_S: Final = 2.0
"""Time between further attempts to get these ends."""
_GROUP_RETRY_PATIENCE_S: Final = 0.5


class Told(raftlog.RebalanceListener):
    """Calls `gone` with partitions that the member has no more, and prints a note on stderr when it loses them because
    it did not answer."""

    def __init__(self, gone: Callable[[Sequence[TopicPartition]], None]) -> None:
        self._gone = gone

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Tell of them; other members get them then."""
        self._gone(partitions)

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Print the note; the member's session has timed out."""
        print_note(
            f"note: lost {', '.join(map(str, partitions))}: other members of the group continue there, and read "
            "uncommitted records again"
        )
        self._gone(partitions)


class GroupReading:
    """A member of a group that reads topics.

    Without following it stops at the ends that its partitions have when they are assigned, or at once if the group
    assigns none. The time limit of `polls` starts with the constructor, so it includes joining.

    If the coordinator cannot store offsets, for example because its disk is full, a reading that follows goes on, and
    commits them with those of later records.
    """

    def __init__(self, consumer: raftlog.Consumer, topics: str | list[str], *, follow: bool) -> None:
        self._consumer = consumer
        self._follow = follow
        self._ends: dict[TopicPartition, int] = {}
        self._without_end: dict[TopicPartition, str] = {}
        """Partitions whose ends are unknown, and why."""
        self._retry_at_s = 0.0
        self._note = ""
        self._uncommitted: dict[TopicPartition, int] = {}
        """Offsets of printed records, not committed yet."""
        self._refused = False
        self._began_s = time.monotonic()
        consumer.subscribe(topics, listener=Told(self._forget))

    def polls(self, timeout_s: float | None, max_records: int | None) -> Iterator[list[raftlog.Record]]:
        """Yield records as they come, `max_records` in all; the next iteration commits the previous records.

        Raises:
            LeaderNotAvailable: no record came within the time limit, and leaders are unreachable or, without
                following, partitions are not at their ends.
            CoordinatorNotAvailable: no record came, and this consumer is not a member of the group.
            RetriableError: offsets were not committed in time; if it follows, only at the end.
        """
        left = max_records
        last_record = self._began_s
        limit_s = timeout_s if timeout_s is not None or self._follow else _GROUP_STALLED_S
        while left is None or left > 0:
            self._tell()
            if not self._follow and self._at_end():
                return
            wait_s = (
                _GROUP_POLL_S
                if limit_s is None
                else min(_GROUP_POLL_S, max(0.0, last_record + limit_s - time.monotonic()))
            )
            records = self._consumer.poll(wait_s, _PER_POLL if left is None else min(_PER_POLL, left))
            if not self._follow:
                self._look_up_ends({_place(record) for record in records})  # of partitions that this poll has added
                records = [record for record in records if record.offset < self._ends.get(_place(record), math.inf)]
            if records:
                yield records
                last = left is not None and len(records) >= left
                self._commit(records, must=last or not self._follow)
                last_record = time.monotonic()
                left = None if left is None else left - len(records)
                continue
            timed_out = limit_s is not None and time.monotonic() >= last_record + limit_s
            if self._uncommitted:
                self._commit((), must=timed_out)
            if timed_out:
                assert limit_s is not None
                self._check_contact(limit_s, asked_for=timeout_s is not None)
                return

    def _at_end(self) -> bool:
        """Return whether this member has read its partitions to their ends; False before an assignment."""
        assigned = self._consumer.assignment()
        self._look_up_ends(assigned)
        if not assigned:
            return bool(self._consumer.group_note())
        return not self._behind()

    def _behind(self) -> list[TopicPartition]:
        return [part for part in self._consumer.assignment() if not self._is_read(part)]

    def _is_read(self, part: TopicPartition) -> bool:
        if part not in self._ends:
            return False
        position = position_now(self._consumer, part)
        return position is not None and position >= self._ends[part]

    def _look_up_ends(self, parts: Iterable[TopicPartition]) -> None:
        unknown = [part for part in parts if part not in self._ends]
        asked_before = all(part in self._without_end for part in unknown)
        if not unknown or (asked_before and time.monotonic() < self._retry_at_s):
            return
        patience_s = _GROUP_RETRY_PATIENCE_S if asked_before else _GROUP_FIRST_PATIENCE_S
        answers: Mapping[TopicPartition, int | RaftlogError]
        try:
            grace_s = min(STRAGGLER_GRACE_S, patience_s)
            answers = try_offsets(self._consumer, unknown, LATEST, grace_s, patience_s)
        except RetriableError as error:
            answers = dict.fromkeys(unknown, error)
        for part, answer in answers.items():
            if isinstance(answer, RaftlogError):
                self._without_end[part] = str(answer)
            else:
                self._ends[part] = answer
                self._without_end.pop(part, None)
        self._retry_at_s = time.monotonic() + _GROUP_RETRY_S

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        """Commit nothing of partitions that go to others: they begin at the committed offset, and commit later ones."""
        if late := [part for part in partitions if self._uncommitted.pop(part, None) is not None]:
            print_note(
                f"note: printed records of {', '.join(map(str, late))} were not committed before the partitions went "
                "to other members, which may print them again"
            )

    def _commit(self, records: Sequence[raftlog.Record], *, must: bool) -> None:
        offsets = self._uncommitted | {_place(record): record.offset + 1 for record in records}
        try:
            self._consumer.commit(offsets)
        except FencedError as error:
            print_note(
                f"note: these records are printed but not committed, so another member may print them again: {error}"
            )
        except RetriableError as error:
            if must:
                raise
            self._uncommitted = offsets  # not before: a signal may end the commit, and it may have arrived
            if not self._refused:
                self._refused = True
                print_note(f"note: records are printed but not committed yet; trying again: {error}")
            return
        self._uncommitted = {}
        self._refused = False

    def _tell(self) -> None:
        """Print the group's note on partitions that cannot be read when it changes, and when it is gone."""
        note = self._consumer.group_note()
        if note == self._note:
            return
        if note:
            print_note(f"note: {note}")
        elif assigned := self._consumer.assignment():
            print_note(f"note: now reading {compact(assigned)}")
        else:  # the note is gone, but no assignment has come yet
            return
        self._note = note

    def _check_contact(self, limit_s: float, *, asked_for: bool) -> None:
        """Check that the reason why no records came is that there are none.

        Raises:
            RaftlogError: as `polls`.
        """
        if (why := why_no_member(self._consumer)) is not None:
            raise CoordinatorNotAvailable(f"no record came for {limit_s:g} s; {why}")
        assigned = self._consumer.assignment()
        behind = assigned if self._follow else self._behind()
        reasons = {part: why for part, why in self._without_end.items() if part in behind}
        reasons |= {part: why for part, why in out_of_reach(self._consumer).items() if part in behind}
        if reasons:
            raise LeaderNotAvailable(
                f"no record came for {limit_s:g} s; unreachable leaders: {listed(dict(sorted(reasons.items())))}"
            )
        if self._follow:
            return
        if behind:
            named = ", ".join(map(str, behind))
            raise LeaderNotAvailable(f"reading stopped before the end of {named}")
        if not self._note and not asked_for:
            print_note("note: the group has assigned no partition to this member")


def _place(record: raftlog.Record) -> TopicPartition:
    return TopicPartition(record.topic, record.partition)
