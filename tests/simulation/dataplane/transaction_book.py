"""The operations of clients in transactions, their results, and checks of the outcome.

Every record names its transaction, its number there, and an amount. The amounts of a transaction add up to zero (a
bank). A record that was made from another one names that one.

checked when a client is told     the decision is the one that it was told, and committed
checked at the end                atomic: all records of a committed transaction are there, once and in order, and
                                  none of another; the sum of money stays the same; no transaction has read a record
                                  that depends on its own (no cycle of reads, G1c); what a group's transactions say that
                                  they have read follows on one another, and is made into something exactly once;
                                  a batch of a sink is committed by one CommitBatch, whole
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.dataplane.isolation import Numbers
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.dataplane.transaction_ledger import TransactionLedger

MARK = b"T"


class Value(NamedTuple):
    """The content of a record."""

    transaction: int
    number: int
    amount: int
    hops: int
    source: int = -1
    """Offset of the record that it was made from, in the partition that its transaction has read."""

    def encode(self, padding_bytes: int = 0) -> bytes:
        """Return it as a record's value."""
        return b"|".join([MARK, *(b"%d" % each for each in self), b"." * padding_bytes])


def read_value(value: bytes) -> Value | None:
    """Return the content of a record; None: another client wrote it."""
    fields = value.split(b"|")
    return Value(*map(int, fields[1:6])) if fields[0] == MARK else None


@dataclass(eq=False)
class Transaction:
    """One transaction, or stage, of one client."""

    number: int
    name: str
    numbers: Numbers
    may_commit: bool = False
    """Whether a commit was asked for."""
    told: bool | None = None
    """What its client was told: committed, or aborted."""
    acknowledged: dict[PartitionKey, list[Value]] = field(default_factory=dict)
    group_id: str = ""
    source: PartitionKey | None = None
    consumed: tuple[int, int] | None = None
    """Which offsets it has read, and sent: from, to."""
    to_make: list[int] = field(default_factory=list)
    """Offsets that it has made records from."""
    reads_from: set[Numbers] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.name} {self.numbers}"


@dataclass
class Batches:
    """The batches of one sink, by batch id: the stages that commits named, and the stages of the confirmed commit."""

    asked: defaultdict[int, list[frozenset[int]]] = field(default_factory=lambda: defaultdict(list))
    told: dict[int, frozenset[int]] = field(default_factory=dict)
    last: int = -1
    """The last batch that a client was told of."""


class Book:
    """All transactions of all clients."""

    def __init__(self, ledger: TransactionLedger) -> None:
        self._ledger = ledger
        self.transactions: list[Transaction] = []
        self.by_numbers: dict[Numbers, Transaction] = {}
        self.sinks: defaultdict[str, Batches] = defaultdict(Batches)

    def begin(self, name: str, producer_id: int, epoch: int) -> Transaction:
        """Note a transaction that its client begins.

        Raises:
            Violation: another one has these numbers.
        """
        numbers = (producer_id, epoch)
        if numbers in self.by_numbers:
            raise Violation(f"{name} was given the producer id and epoch {numbers} of {self.by_numbers[numbers].name}")
        transaction = Transaction(len(self.transactions), name, numbers)
        self.transactions.append(transaction)
        self.by_numbers[numbers] = transaction
        return transaction

    def tell(self, transaction: Transaction, commit: bool, *, is_quick: bool) -> None:
        """A client is told what has become of its transaction; `is_quick`: within what all markers may take.

        Raises:
            Violation: something else has, or its records are not there yet.
        """
        transaction.told = commit
        decided = self._ledger.decided.get(transaction.numbers)
        begun = bool(self._ledger.added.get(transaction.numbers))
        if begun and decided is not commit:
            raise Violation(
                f"{transaction}: the client was told commit={commit}, but the coordinator's decision is {decided}"
            )
        if commit and not begun and transaction.acknowledged:
            raise Violation(
                f"{transaction}: the client was told that it is committed, but the coordinator never began it"
            )
        if begun and is_quick and (missing := self._ledger.unmarked(transaction.numbers)):
            raise Violation(f"{transaction}: the client was told commit={commit}, but {missing} have no marker yet")

    # Sinks

    def tell_batch(self, sink_id: str, batch_id: int, winners: frozenset[int]) -> None:
        """A driver is told that a batch is committed, by its own commit.

        Raises:
            Violation: it was committed by another one.
        """
        batches = self.sinks[sink_id]
        if batches.told.setdefault(batch_id, winners) != winners:
            raise Violation(
                f"{sink_id}: the commit of batch {batch_id} succeeded with two sets of stages, "
                f"{batches.told[batch_id]} and {winners}"
            )
        for producer_id in winners:
            if not self._ledger.decided.get((producer_id, 0)):
                raise Violation(
                    f"{sink_id}: the driver was told that batch {batch_id} is committed, but its stage "
                    f"{producer_id} is not"
                )
        if self._ledger.sinks[sink_id].last_batch_id < batch_id:
            raise Violation(
                f"{sink_id}: the driver was told that batch {batch_id} is committed, but no committed record says so"
            )

    def tell_last(self, sink_id: str, batch_id: int, before: int) -> None:
        """A client is told which batch is the last; `before`: what clients were told before it asked.

        Raises:
            Violation: it goes back.
        """
        batches = self.sinks[sink_id]
        if batch_id < before:
            raise Violation(
                f"{sink_id}: batch {batch_id} was reported as the last one, but {before} was reported earlier"
            )
        batches.last = max(batches.last, batch_id)

    # The end

    def check(self) -> Counter[str]:
        """Check what has become of everything, when nothing is open any more; return what there was.

        Raises:
            Violation: it is not as it should be.
        """
        counts: Counter[str] = Counter()
        for transaction in self.transactions:
            committed = self._ledger.decided.get(transaction.numbers, False)
            counts["committed" if committed else "aborted"] += 1
            counts["of unknown outcome"] += transaction.told is None and transaction.may_commit
            if committed and not transaction.may_commit:
                raise Violation(f"{transaction} is committed, but its client never asked for that")
            if transaction.told is not None and transaction.acknowledged and committed is not transaction.told:
                raise Violation(
                    f"{transaction}: the client was told commit={transaction.told}, but the decision is {committed}"
                )
        self._check_records(counts)
        self._check_sources(counts)
        self._check_cycles()
        self._check_sinks(counts)
        return counts

    def _check_records(self, counts: Counter[str]) -> None:
        found: defaultdict[Numbers, defaultdict[PartitionKey, list[Value]]]
        found = defaultdict(lambda: defaultdict(list))
        money = 0
        for key, isolation in self._ledger.isolations.items():
            for entry in isolation.entries:
                if entry.part is None or not entry.is_visible:
                    continue
                for each in entry.values:
                    value = read_value(each)
                    assert value is not None, (
                        "a record of a transaction has content that no client of the simulation wrote"
                    )
                    found[entry.part.numbers][key].append(value)
                    money += value.amount
        if money:
            raise Violation(
                f"the amounts in all committed records add up to {money}, not to 0: one is missing, or there twice"
            )
        for transaction in self.transactions:
            there = {key: values for key, values in found[transaction.numbers].items() if values}
            committed = self._ledger.decided.get(transaction.numbers, False)
            expected = transaction.acknowledged if committed else {}
            if there != expected:
                raise Violation(
                    f"{transaction} (committed: {committed}) has the records {there}, but {expected} were acknowledged"
                )
            counts["records of transactions"] += sum(map(len, there.values()))

    def _check_sources(self, counts: Counter[str]) -> None:
        reached: dict[tuple[str, PartitionKey], int] = {}
        for transaction in sorted(self.transactions, key=lambda each: (each.consumed or (0, 0), each.numbers)):
            if transaction.consumed is None or not self._ledger.decided.get(transaction.numbers):
                continue
            assert transaction.source is not None
            where = (transaction.group_id, transaction.source)
            begin, end = transaction.consumed
            if begin != reached.get(where, 0):
                raise Violation(
                    f"{transaction} consumed from offset {begin} on, but its group had reached {reached.get(where, 0)}"
                )
            reached[where] = end
            made = [value.source for values in transaction.acknowledged.values() for value in values]
            if sorted(made) != transaction.to_make:
                raise Violation(
                    f"{transaction} wrote records made from {sorted(made)}, but consumed {transaction.to_make}"
                )
            counts["records made from others"] += len(made)
        for where, end in reached.items():
            if self._ledger.offsets.get(where) != end:
                raise Violation(
                    f"the committed offset of {where} is {self._ledger.offsets.get(where)}, but committed "
                    f"transactions consumed up to {end}"
                )

    def _check_cycles(self) -> None:
        committed = {each.numbers: each for each in self.transactions if self._ledger.decided.get(each.numbers)}
        done: set[Numbers] = set()
        path: dict[Numbers, None] = {}

        def visit(numbers: Numbers) -> None:
            if numbers in path:
                raise Violation(f"{numbers} read records that were made from its own: {list(path)}")
            if numbers in done:
                return
            path[numbers] = None
            for source in committed[numbers].reads_from:
                if source not in committed:
                    raise Violation(f"{committed[numbers]} read records of {source}, which is not committed")
                visit(source)
            del path[numbers]
            done.add(numbers)

        for numbers in committed:
            visit(numbers)

    def _check_sinks(self, counts: Counter[str]) -> None:
        for sink_id, batches in self.sinks.items():
            last = self._ledger.sinks[sink_id].last_batch_id
            for batch_id in range(last + 1):
                stages = {number for number, of in self._ledger.stages.items() if of == (sink_id, batch_id)}
                winners = frozenset(number for number in stages if self._ledger.decided.get((number, 0)))
                told = batches.told.get(batch_id)
                if winners not in (batches.asked[batch_id] if told is None else [told]):
                    raise Violation(
                        f"{sink_id}: the stages {set(winners)} of batch {batch_id} are committed, but commits "
                        f"named {batches.asked[batch_id]}, and the driver was told {told}"
                    )
                counts["batches committed to sinks"] += 1
                counts["stages that lost"] += len(stages - winners)
