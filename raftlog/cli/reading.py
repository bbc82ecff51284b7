"""What `raftlog consume` reads: partitions, where each begins, and what it waits for meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, auto

import raftlog
from raftlog._client.offsets import EARLIEST, LATEST, STRAGGLER_GRACE_S
from raftlog._consumer_views import leaderless, out_of_reach, partitions_now, try_offsets
from raftlog.cli.output import counted, print_note
from raftlog.errors import LeaderNotAvailable, OffsetOutOfRange, RaftlogError, RetriableError

_POLL_S = 0.5
_FIRST_PATIENCE_S = 2.0
"""How long leaders may take to say where reading begins before somebody is told that it is waited for."""
_PATIENCE_S = 8.0
"""Without --follow: how long it is waited for in all beyond that."""
_LOOK_S = 2.0
"""How often it is looked for new partitions."""
_LOOK_PATIENCE_S = 0.5
_TOLD_AFTER_S = 2.0
"""A leader may be out of reach for so long without a word: another one is elected in that time."""
_RETRY_S = 2.0
"""Between attempts to read what could not be read."""
_RETRY_PATIENCE_S = 0.5
"""How long such an attempt may keep those waiting that are read."""
_STALLED_S = 10.0
"""Without --follow and --timeout: a partition that has not reached its end by then will not soon."""
_NAMED = 5
"""How many partitions one line names."""


class Begin(Enum):
    """Where reading begins, when it is not an offset."""

    BEGINNING = auto()
    END = auto()


class Reading:
    """Partitions that are read, those that cannot be and are asked again meanwhile, and where reading ends.

    Attributes:
        unread: why a partition cannot be read for now.

    With `topic`, partitions that it gets later are read from their beginnings when following.

    Raises:
        RaftlogError: no partition can be read, and it does not follow.
        OffsetOutOfRange: a partition does not have the offset to begin at.
    """

    def __init__(
        self,
        consumer: raftlog.Consumer,
        places: list[raftlog.TopicPartition],
        begin: Begin | int,
        *,
        follow: bool,
        topic: str | None = None,
    ) -> None:
        self.unread: dict[raftlog.TopicPartition, RaftlogError] = {}
        self._consumer = consumer
        self._begin = begin
        self._follow = follow
        self._several = len(places) > 1
        self._ends: dict[raftlog.TopicPartition, int] = {}
        self._assigned: list[raftlog.TopicPartition] = []
        self._topic = topic
        self._known = set(places)
        self._later: set[raftlog.TopicPartition] = set()
        """Partitions that the topic has got since: nobody has read of them what was there before."""
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
        """Yield records as they come; without following, those below the ends, and no longer than until all are
        reached, or nothing has come for _STALLED_S."""
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
            self._look_who_is_waited_for()

    def _poll(self, wait_s: float) -> list[raftlog.Record]:
        if self._assigned:
            return self._consumer.poll(wait_s)
        time.sleep(wait_s)
        return []

    def _look_for_new(self) -> None:
        """Take in partitions that the topic has got meanwhile."""
        if self._topic is None or not self._follow or time.monotonic() < self._look_at_s:
            return
        with suppress(RetriableError):
            new = set(partitions_now(self._consumer, self._topic, _LOOK_PATIENCE_S)) - self._known
            self._known |= new
            self._later |= new
            for place in sorted(new):
                self.unread[place] = LeaderNotAvailable(f"{place} is new")
                self._retry_at_s = 0.0
        self._look_at_s = time.monotonic() + _LOOK_S

    def _waited_for(self) -> dict[raftlog.TopicPartition, str]:
        """Return the partitions whose leaders are out of reach, and why."""
        unread = {place: leaderless(self._consumer, place) or str(error) for place, error in self.unread.items()}
        return dict(sorted({**unread, **out_of_reach(self._consumer)}.items()))

    def _look_who_is_waited_for(self) -> None:
        """Say so when leaders have been out of reach for a while, and when others are."""
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
        """Whether nothing came because there is nothing.

        Raises:
            LeaderNotAvailable: nobody knows: leaders are out of reach.
        """
        waited_for = self._waited_for() if self._follow else {}
        if waited_for:
            raise LeaderNotAvailable(
                f"nothing came for {limit_s:g} s; there was no contact with the leaders of {listed(waited_for)}"
            )

    def check_complete(self) -> None:
        """Without following: see that everything was read.

        Raises:
            LeaderNotAvailable: names the partitions that were not, or not to their ends.
        """
        if self._follow:
            return
        problems = [self._why_unread()] if self.unread else []
        if self._ends:
            places = ", ".join(map(str, sorted(self._ends)))
            problems.append(f"nothing more came from {places}, which did not reach the end")
        if problems:
            raise LeaderNotAvailable("; ".join(problems))

    def _retry(self, *, last_time: bool = False) -> None:
        """Take partitions in that can be read by now."""
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

    def _take_in_from(self, places: list[raftlog.TopicPartition], begin: Begin | int, patience_s: float | None) -> None:
        starts = {} if begin is Begin.END else self._look_up(places, EARLIEST, patience_s)
        needs_ends = begin is not Begin.BEGINNING or not self._follow
        ends = self._look_up(sorted(starts) or places, LATEST, patience_s) if needs_ends else {}
        found = [place for place in places if (place in ends if needs_ends else place in starts)]
        if not found:
            return
        for place in found:
            self.unread.pop(place, None)
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
                case _:
                    self._consumer.seek(place, begin)
        if not self._follow:
            self._ends |= {place: ends[place] for place in found}

    def _look_up(
        self, places: list[raftlog.TopicPartition], which: int, patience_s: float | None
    ) -> dict[raftlog.TopicPartition, int]:
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
    """Return partitions and what is the matter with each; the first few of many."""
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
            raise OffsetOutOfRange(f"{place} has offsets {starts[place]} to {end}, {offset} is not among them{choice}")


def _is_before_end(record: raftlog.Record, ends: dict[raftlog.TopicPartition, int]) -> bool:
    return record.offset < ends.get(raftlog.TopicPartition(record.topic, record.partition), 0)
