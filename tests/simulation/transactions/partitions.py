"""Minimal partitions, and a checker of what is decided in them.

A partition keeps rule 2 of transactions (docs/transactions.md): a marker applies if its epoch is above the producer's,
and its epoch is the producer's from then on; a record of a lower epoch is refused. A group that takes offsets keeps the
same rule, so it is one of these, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raftlog.errors import InvalidProducerEpoch, InvalidTxnState, OutOfOrderSequence, RaftlogError


class Broken(AssertionError):
    """An invariant is violated."""


@dataclass(eq=False)
class Transaction:
    """One producer's records in one epoch, from its own view; also those of a stage.

    `told`: the outcome that it was told.
    """

    name: str
    producer_id: int
    producer_epoch: int
    sent: dict[str, int] = field(default_factory=dict)
    """Records by partition that were acknowledged."""
    may_commit: bool = False
    told: bool | None = None

    def tell(self, commit: bool) -> None:
        if self.told is not None and self.told is not commit:
            raise Broken(f"{self} was told commit={self.told} before, and commit={commit} now")
        self.told = commit

    def __repr__(self) -> str:
        return f"{self.name} ({self.producer_id}, {self.producer_epoch})"


@dataclass
class _Producer:
    epoch: int
    open: Transaction | None = None
    records: int = 0
    by_marker: bool = False


class Partition:
    """One partition, or group."""

    def __init__(self, name: str, checker: Checker) -> None:
        self.name = name
        self._checker = checker
        self._producers: dict[int, _Producer] = {}

    def produce(self, transaction: Transaction, sequence: int) -> RaftlogError | None:
        """Append a record, or take it for one that is there; return why not."""
        epoch = transaction.producer_epoch
        known = self._producers.get(transaction.producer_id)
        if known is not None and epoch < known.epoch:
            return InvalidProducerEpoch("")
        if known is not None and epoch > known.epoch and known.open is not None:
            self._checker.broken(f"{transaction} writes to {self.name} while {known.open} is open there")
            return InvalidTxnState("")
        if known is None or epoch > known.epoch:
            known = self._producers[transaction.producer_id] = _Producer(epoch)
        if sequence > known.records:
            return OutOfOrderSequence("")
        if sequence == known.records:
            known.open = transaction
            known.records += 1
        return None

    def mark(self, producer_id: int, epoch: int, commit: bool) -> None:
        """Take a marker; to its sender, success and InvalidProducerEpoch are the same."""
        known = self._producers.get(producer_id)
        if known is not None and epoch <= known.epoch:
            if epoch == known.epoch and not known.by_marker:
                self._checker.broken(
                    f"{known.open} has written to {self.name} with the epoch of the marker that must end it"
                )
            return
        if known is not None and known.open is not None:
            if known.open.producer_epoch != epoch - 1:
                self._checker.broken(f"{known.open} is ended in {self.name} by the marker of epoch {epoch}")
            self._checker.ended(known.open, self.name, known.records, commit)
        self._checker.marked(producer_id, epoch, self.name, commit)
        self._producers[producer_id] = _Producer(epoch, by_marker=True)

    def open(self) -> list[Transaction]:
        """Return the open transactions, which no marker has ended."""
        return [known.open for known in self._producers.values() if known.open is not None]


class Checker:
    """Watches decisions: one for each transaction, the one that was asked for, and all of it or nothing."""

    def __init__(self) -> None:
        self.transactions: dict[tuple[int, int], Transaction] = {}
        self.decided: dict[tuple[int, int], bool] = {}
        self.markers: dict[tuple[int, int], set[str]] = {}
        self.committed = self.aborted = 0

    def broken(self, what: str) -> None:
        raise Broken(what)

    def begin(self, name: str, producer_id: int, producer_epoch: int) -> Transaction:
        """A producer begins a transaction."""
        at = producer_id, producer_epoch
        if at in self.transactions:
            raise Broken(f"{self.transactions[at]} and {name} have the same producer id and epoch")
        transaction = self.transactions[at] = Transaction(name, producer_id, producer_epoch)
        return transaction

    def decide(self, producer_id: int, epoch: int, commit: bool) -> None:
        """Note a decision; `epoch` is the marker's."""
        at = producer_id, epoch - 1
        if self.decided.setdefault(at, commit) is not commit:
            raise Broken(f"{self.transactions.get(at)} was decided twice, with different outcomes")
        transaction = self.transactions.get(at)
        if commit and (transaction is None or not transaction.may_commit):
            raise Broken(f"{transaction} is committed, but its client has not asked for that")

    def marked(self, producer_id: int, epoch: int, partition: str, commit: bool) -> None:
        """A marker was appended."""
        self.decide(producer_id, epoch, commit)
        self.markers.setdefault((producer_id, epoch - 1), set()).add(partition)

    def ended(self, transaction: Transaction, partition: str, records: int, commit: bool) -> None:
        """A marker ends a transaction that has records there."""
        if transaction.told is not None and transaction.told is not commit:
            raise Broken(
                f"{transaction} was told commit={transaction.told}, but its marker in {partition} has commit={commit}"
            )
        if commit:
            self.committed += 1
            if records < transaction.sent.get(partition, 0):
                raise Broken(
                    f"{transaction} is committed in {partition} with {records} records, but "
                    f"{transaction.sent.get(partition, 0)} were acknowledged"
                )
        else:
            self.aborted += 1

    def check_told(self, transaction: Transaction, *, with_markers: bool) -> None:
        """The outcome that a producer was told is true; `with_markers`: in every partition by now."""
        at = transaction.producer_id, transaction.producer_epoch
        if transaction.told is None:
            return
        if at in self.decided and self.decided[at] is not transaction.told:
            raise Broken(f"{transaction} was told commit={transaction.told}, but the coordinator decided otherwise")
        written = {partition for partition, records in transaction.sent.items() if records}
        if with_markers and not written <= self.markers.get(at, set()):
            raise Broken(
                f"{transaction} was told commit={transaction.told}, but not all of its partitions have a marker"
            )
