"""What `raftlog consume --group` reads: what the group gives to this member, committed once it is printed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import raftlog
from raftlog._client.offsets import LATEST, STRAGGLER_GRACE_S
from raftlog._consumer_views import out_of_reach, position_now, try_offsets, why_no_member
from raftlog.cli.group_view import compact
from raftlog.cli.output import print_note
from raftlog.cli.reading import listed
from raftlog.errors import CoordinatorNotAvailable, FencedError, LeaderNotAvailable, RaftlogError, RetriableError
from raftlog.types import TopicPartition

_POLL_S: Final = 0.5
_STALLED_S: Final = 10.0
"""Without following and --timeout: how long nothing may come from partitions that are not at their ends, and how long
the group may take to give this member any."""
_PER_POLL: Final = 500
_FIRST_PATIENCE_S: Final = 2.0
"""How long leaders may take to say where a partition ends."""
_RETRY_S: Final = 2.0
"""Between attempts to find that out from those that did not say."""
_RETRY_PATIENCE_S: Final = 0.5


class Told(raftlog.RebalanceListener):
    """Says on stderr that partitions were lost, which the group does not do to members that answer."""

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """The session was over before this member knew."""
        print_note(
            f"note: lost {', '.join(map(str, partitions))}: others in the group go on there, and read again what was "
            "not committed"
        )


class GroupReading:
    """A member of a group that reads one topic.

    Without following it ends where the partitions that it is given end at the time it gets them, or at once where the
    group has nothing for it. What `polls` waits for counts from the beginning on, joining included.
    """

    def __init__(self, consumer: raftlog.Consumer, topic: str, *, follow: bool) -> None:
        self._consumer = consumer
        self._follow = follow
        self._ends: dict[TopicPartition, int] = {}
        self._without_end: dict[TopicPartition, str] = {}
        """Partitions whose leaders have not said where they end, and why."""
        self._retry_at_s = 0.0
        self._note = ""
        self._began_s = time.monotonic()
        consumer.subscribe(topic, listener=Told())

    def polls(self, timeout_s: float | None, max_records: int | None) -> Iterator[list[raftlog.Record]]:
        """Yield records as they come, `max_records` in all; who has been given them goes on to have them committed.

        Raises:
            LeaderNotAvailable: nothing came for `timeout_s`, or without following for a while, and leaders are out of
                reach, or without following partitions have more.
            CoordinatorNotAvailable: nothing came, and this is no member of the group any more.
        """
        left = max_records
        last_record = self._began_s
        limit_s = timeout_s if timeout_s is not None or self._follow else _STALLED_S
        while left is None or left > 0:
            self._tell()
            if not self._follow and self._at_end():
                return
            wait_s = _POLL_S if limit_s is None else min(_POLL_S, max(0.0, last_record + limit_s - time.monotonic()))
            records = self._consumer.poll(wait_s, _PER_POLL if left is None else min(_PER_POLL, left))
            if not self._follow:
                self._look_up_ends({_place(record) for record in records})  # of some that came in with the poll
                records = [record for record in records if record.offset < self._ends.get(_place(record), math.inf)]
            if records:
                yield records
                self._commit(records)
                last_record = time.monotonic()
                left = None if left is None else left - len(records)
            elif limit_s is not None and time.monotonic() >= last_record + limit_s:
                self._check_contact(limit_s, asked_for=timeout_s is not None)
                return

    def _at_end(self) -> bool:
        """Whether all that this member has is read up to where it ended; False while the group has yet to say."""
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
        patience_s = _RETRY_PATIENCE_S if asked_before else _FIRST_PATIENCE_S
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
        self._retry_at_s = time.monotonic() + _RETRY_S

    def _commit(self, records: Sequence[raftlog.Record]) -> None:
        offsets = {_place(record): record.offset + 1 for record in records}
        try:
            self._consumer.commit(offsets)
        except FencedError as error:
            print_note(f"note: printed and not committed, so that it may be printed again elsewhere: {error}")

    def _tell(self) -> None:
        """Say why there is nothing to read, or not all, whenever that changes; and when it is over."""
        note = self._consumer.group_note()
        if note == self._note:
            return
        if note:
            print_note(f"note: {note}")
        elif assigned := self._consumer.assignment():
            print_note(f"note: reads {compact(assigned)} now")
        else:  # the note is gone and nothing has come of it yet
            return
        self._note = note

    def _check_contact(self, limit_s: float, *, asked_for: bool) -> None:
        """Whether nothing came because there is nothing.

        Raises:
            RaftlogError: as `polls`.
        """
        if (why := why_no_member(self._consumer)) is not None:
            raise CoordinatorNotAvailable(f"nothing came for {limit_s:g} s; {why}")
        assigned = self._consumer.assignment()
        behind = assigned if self._follow else self._behind()
        reasons = {part: why for part, why in self._without_end.items() if part in behind}
        reasons |= {part: why for part, why in out_of_reach(self._consumer).items() if part in behind}
        if reasons:
            raise LeaderNotAvailable(
                f"nothing came for {limit_s:g} s; there was no contact with the leaders of "
                f"{listed(dict(sorted(reasons.items())))}"
            )
        if self._follow:
            return
        if behind:
            named = ", ".join(map(str, behind))
            raise LeaderNotAvailable(f"nothing more came from {named}, which did not reach the end")
        if not self._note and not asked_for:
            print_note("note: the group has given nothing to this member")


def _place(record: raftlog.Record) -> TopicPartition:
    return TopicPartition(record.topic, record.partition)
