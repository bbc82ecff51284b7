"""Transactions, and stages of batches: all records of one are readable, or none is.

checked when an application is told   the decision is the one that it was told, and is committed
checked at the end                    atomic: all records of committed transactions, once, and no others; the sum of
                                      money is unchanged; every record that a transformer's group has committed was
                                      transformed exactly once; a batch of a sink is exactly what one commit has named
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.cluster.book import Book, Value, Writer
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.cluster.offsets import GroupOffsets

BANK, MADE, BATCH = b"bank", b"made", b"batch"


@dataclass(eq=False)
class Deal:
    """One transaction, or stage."""

    number: int
    name: str
    writer: Writer
    records: int = 0
    may_commit: bool = False
    """Whether a commit was asked for."""
    told: bool | None = None
    """What its application was told."""

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


class Deals:
    """All of them."""

    def __init__(self, book: Book, offsets: GroupOffsets) -> None:
        self._book = book
        self._offsets = offsets
        self.counts: Counter[str] = Counter()
        self.all: list[Deal] = []
        self._numbers: dict[tuple[int, int], Deal] = {}
        """By writer and number of a record."""
        self._records: defaultdict[Deal, list[tuple[int, int]]] = defaultdict(list)
        self.asked: defaultdict[tuple[str, int], list[frozenset[Deal]]] = defaultdict(list)
        """By sink and batch: what commits have named."""

    def begin(self, name: str, writer: Writer) -> Deal:
        """A transaction, or stage, begins."""
        deal = Deal(len(self.all), name, writer)
        self.all.append(deal)
        return deal

    def value(self, deal: Deal, kind: bytes, *numbers: int) -> Value:
        """Return the next record of a deal."""
        value = Value(deal.writer.number, deal.writer.sent, (kind, *(b"%d" % each for each in (deal.number, *numbers))))
        deal.writer.sent += 1
        deal.records += 1
        self._numbers[value.writer, value.number] = deal
        self._records[deal].append((value.writer, value.number))
        return value

    def told(self, deal: Deal, committed: bool) -> None:
        """An application is told the outcome of its transaction.

        Raises:
            Violation: the outcome was another one, or acknowledged records are missing.
        """
        deal.told = committed
        self.counts["told that it is committed" if committed else "told that it is aborted"] += 1
        ledger = self._book.ledger
        for place in self._records[deal]:
            where = self._book.places[place]
            if committed and not where:
                raise Violation(
                    f"{deal}: the client was told that it is committed, but its record {place[1]} is in no log"
                )
            for _, _, entry in where:
                assert entry.part is not None, "a record of a transaction is in the log as a plain record"
                decided = ledger.decided.get(entry.part.numbers)
                if decided is not committed:
                    raise Violation(
                        f"{deal}: the client was told commit={committed}, but the coordinator's decision about "
                        f"{entry.part.numbers} is {decided}"
                    )

    # The end

    def _visible(self, deal: Deal) -> int:
        """Return how many of its records are readable."""
        return sum(entry.is_visible for place in self._records[deal] for _, _, entry in self._book.places[place])

    def check(self) -> Counter[str]:
        """Check all of them.

        Raises:
            Violation: something does not hold.
        """
        for deal in self.all:
            visible = self._visible(deal)
            if visible not in (0, deal.records):
                raise Violation(
                    f"{deal}: {visible} of its {deal.records} records are readable, but all or none must be"
                )
            if visible and (not deal.may_commit or deal.told is False):
                raise Violation(
                    f"{deal} is readable, but its client never asked for the commit, or was told that it is aborted"
                )
            if deal.told and not visible and deal.records:
                raise Violation(f"{deal}: the client was told that it is committed, but its records are not readable")
            self.counts["deals committed"] += bool(visible)
            self.counts["deals aborted"] += bool(deal.records and not visible)
        self._check_money()
        for sink_id, batch_id in self.asked:
            self._check_batch(sink_id, batch_id)
        return self.counts

    def _readable_values(self, kind: bytes) -> Iterable[tuple[PartitionKey, Value]]:
        ledger = self._book.ledger
        for (writer, number), where in self._book.places.items():
            for key, offset, entry in where:
                value = self._book.parse(entry.values[offset - entry.base_offset])
                if entry.is_visible and value.rest and value.rest[0] == kind and ledger.exists(key):
                    assert (value.writer, value.number) == (writer, number)
                    yield key, value

    def _check_money(self) -> None:
        amounts = [int(value.rest[2]) for _, value in self._readable_values(BANK)]
        if sum(amounts):
            raise Violation(
                f"the amounts of all readable transfers add up to {sum(amounts)}, not to 0: one is missing in "
                "part, or there twice"
            )

    def check_made(self, group_id: str, sources: Iterable[PartitionKey]) -> None:
        """Every record up to which a group of transformers has committed was transformed exactly once.

        Raises:
            Violation: a record was not transformed, or more than once.
        """
        made = Counter((int(value.rest[2]), int(value.rest[3])) for _, value in self._readable_values(MADE))
        ledger = self._book.ledger
        for key in sources:
            end = self._offsets.committed.get((group_id, key), 0)
            for offset in ledger.readable(key, 0, end):
                if (times := made.pop((key[1], offset), 0)) != 1:
                    raise Violation(
                        f"{ledger.name(key)}: the record made from offset {offset} is readable {times} times, not once"
                    )
                self.counts["records made from others"] += 1
        if made:
            raise Violation(
                f"{group_id}: records were made from offsets that the group has not committed, by partition: "
                f"{sorted(made)[:5]}"
            )

    def _check_batch(self, sink_id: str, batch_id: int) -> None:
        asked = self.asked[sink_id, batch_id]
        all_named = [deal for named in asked for deal in named]
        readable = frozenset(deal for deal in all_named if self._visible(deal))
        wanted = [frozenset(deal for deal in named if deal.records) for named in asked]
        if readable not in (*wanted, frozenset()):
            raise Violation(
                f"batch {batch_id} of {sink_id}: exactly the stages {sorted(map(str, readable))} are readable, "
                "which no commit named"
            )
        self.counts["batches of sinks readable"] += bool(readable)
