"""Members that commit with transactions, and a coordinator of those that never fails; the network is as bad as ever.

Beside what `world` checks:
    no offset becomes the group's before its transaction was decided, and none of one that was aborted
    once the marker of a commit is answered, all offsets of the transaction are the group's
and after `heal`: committed offsets are there, and none are pending.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, cast

from google.protobuf.message import Message

from broker.coordinator.groups.commands import CommitTransactionOffsets, EndTransactionOffsets
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import RaftlogError
from raftlog.v1 import group_pb2
from raftlog.v1.group_records_pb2 import GroupRecordKey, OffsetValue
from tests.simulation.groups.client import Client
from tests.simulation.groups.world import Broken, RecordsChecker, World

if TYPE_CHECKING:
    from tests.simulation.groups.client import Client as ClientType

TIMEOUT_MS = 5_000.0
RETRY_MS = 400.0
GIVE_UP_MS = 2_000.0


class Transaction:
    """One transaction of one producer; `decision` is final."""

    def __init__(self, world: TransactionWorld, producer_id: int, epoch: int) -> None:
        self._world = world
        self.producer_id = producer_id
        self.epoch = epoch
        self.offsets: Mapping[TopicPartition, int] = {}
        self.decision: bool | None = None
        self.over = False
        """The marker has been answered: the next transaction may begin."""
        world.transactions[self.tag] = self
        world.at(TIMEOUT_MS, lambda: self.decide(commit=False))

    @property
    def tag(self) -> str:
        """What its offsets carry as metadata."""
        return f"{self.producer_id}:{self.epoch}"

    def decide(self, *, commit: bool) -> None:
        """Commit or abort; only the first one counts."""
        if self.decision is None:
            self.decision = commit
            self._mark()

    def _mark(self) -> None:
        """Send the marker until it is answered; copies in flight then still arrive."""
        if self.over:
            return
        marker = (self.producer_id, self.epoch + 1, bool(self.decision))
        self._world.call(lambda to: EndTransactionOffsets(to, "g", *marker), self._answered)
        self._world.at(RETRY_MS, self._mark)

    def _answered(self, message: Message | RaftlogError | None) -> None:
        if isinstance(message, group_pb2.CommitOffsetResult) and not self.over:
            self.over = True
            self.check()

    def check(self) -> None:
        """The committed offsets are the group's, unless later ones were committed since."""
        for partition, offset in self.offsets.items() if self.decision else ():
            if self._world.checker.committed.get(partition, -1) < offset:
                raise Broken(
                    f"{self.tag} was committed with offset {offset} of partition {partition[1]}, but the "
                    "group's committed offset is lower"
                )


class TransactionalClient(Client):
    """Commits what it reads with transactions, one after the other; goes on where committed offsets are certain."""

    require_stable = True
    _transaction: Transaction | None = None
    _begun = 0

    def _commit(self, partition: TopicPartition) -> None:
        world = cast(TransactionWorld, self._world)
        offsets = {each: position for each, position in self.owned.items() if position is not None}
        if world.ending or not offsets or (self._transaction is not None and not self._transaction.over):
            return
        if self._transaction is None:
            self._producer_id = next(world.producer_ids)
        self._begun += 1
        transaction = self._transaction = Transaction(world, self._producer_id, self._begun - 1)
        transaction.offsets = offsets
        self._send(transaction, sorted(offsets), self._world.random.random() < 0.2)
        # A client that hears nothing aborts, with what it has sent still under way.
        self._world.at(GIVE_UP_MS + self._world.delay(), lambda: transaction.decide(commit=False))

    def _send(self, transaction: Transaction, left: list[TopicPartition], twice: bool) -> None:
        """Send some offsets, and the rest once they are answered; then commit."""
        if not left:
            commit = self._world.random.random() < 0.8
            self._world.at(self._world.delay(), lambda: transaction.decide(commit=commit))
            return
        some = left[: self._world.random.randint(1, len(left))]
        request = group_pb2.CommitTransactionOffsetsRequest(
            group_id="g",
            transactional_id=str(transaction.producer_id),
            producer_id=transaction.producer_id,
            producer_epoch=transaction.epoch,
            member_id=self.name,
            member_epoch=self.epoch,
            instance_id=self.instance,
            offsets=[
                group_pb2.CommitOffset(
                    topic_id=topic_id,
                    partition=number,
                    offset=transaction.offsets[topic_id, number],
                    metadata=transaction.tag,
                )
                for topic_id, number in some
            ],
        )

        def answer(message: Message | RaftlogError | None) -> None:
            refused = not isinstance(message, group_pb2.CommitOffsetsResponse) or any(
                each.HasField("error") for each in message.results
            )
            if refused:
                transaction.decide(commit=False)
            elif transaction.decision is None and left[0] not in sent:
                sent.update(some)
                self._send(transaction, left[len(some) :], False)

        sent: set[TopicPartition] = set()
        for _ in range(1 + twice):
            self._world.call(lambda to: CommitTransactionOffsets(to, request), answer)

    def _commit_late(self, partition: TopicPartition) -> None:
        """It commits nothing without a transaction."""


class _Checker(RecordsChecker):
    def __init__(self, transactions: Mapping[str, Transaction]) -> None:
        super().__init__()
        self._transactions = transactions

    def note(self, key: bytes, value: bytes | None) -> None:
        super().note(key, value)
        if value is not None and GroupRecordKey.FromString(key).WhichOneof("kind") == "offset":
            tag = OffsetValue.FromString(value).metadata
            decision = self._transactions[tag].decision
            if not decision:
                raise Broken(f"offsets of {tag} became the group's, but the decision of the transaction is {decision}")


class TransactionWorld(World):
    """A world whose members commit with transactions."""

    def __init__(self, seed: int, *, members: int = 4, faults: bool = True) -> None:
        self.producer_ids = count()
        self.ending = False
        self.transactions: dict[str, Transaction] = {}
        super().__init__(seed, members=members, faults=faults)
        self.checker = self._make_checker()

    def _make_checker(self) -> RecordsChecker:
        return _Checker(self.transactions)

    def _make_client(self, name: str, topics: tuple[str, ...], instance: str) -> ClientType:
        return TransactionalClient(self, name, topics, instance)

    def heal(self) -> None:
        """As ever, and then every transaction comes to its end."""
        super().heal()
        self.ending = True
        self._run(TIMEOUT_MS + 10_000)
        for transaction in self.transactions.values():
            if not transaction.over:
                raise Broken(f"the group never answered the marker of {transaction.tag}")
            transaction.check()
        for group in self.core.groups.values():
            if group.pending:
                raise Broken(f"the transactions {group.pending.keys()} have ended, but their offsets are still pending")
