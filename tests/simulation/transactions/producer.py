"""A producer with a transactional id, as small as it can be: transactions one after another, and what may go wrong."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from broker.coordinator.transactions import transaction as epochs
from broker.coordinator.transactions.commands import AddTo, End, InitProducer
from broker.coordinator.transactions.records import partition_messages
from raftlog.errors import (
    ConcurrentTransactions,
    FencedError,
    NotCoordinator,
    RaftlogError,
    TransactionAbortable,
)
from raftlog.v1 import transaction_pb2
from tests.simulation.transactions.partitions import Broken, Transaction
from tests.simulation.transactions.process import Operation, Steps
from tests.support.transaction_driver import topic_id

if TYPE_CHECKING:
    from tests.simulation.transactions.world import World

RETRY_MS = 50.0
GROUP = "g"
TIMEOUT_MS = 3_000


class Fenced(Exception):
    """Another process has taken the id over: this producer is fenced."""


class Abortable(Exception):
    """The transaction cannot be committed."""


class Producer:
    """`steps` is its life. A new process of the same id begins without numbers, as after a crash."""

    def __init__(self, world: World, transactional_id: str, life: int) -> None:
        self._world = world
        self._random = world.random
        self._id = transactional_id
        self._name = f"{transactional_id}/{life}"
        self._producer_id = self._epoch = -1
        self._done = 0

    def steps(self) -> Steps:
        """Run transactions until the end of days."""
        try:
            yield from self._init(goes_on=False)
            while not (self._world.healing and self._done):
                if not self._world.healing:
                    yield self._world.sleep(self._random.choice([0, 10, 300]))
                yield from self._transaction()
                if self._epoch > epochs.MAX_EPOCH:  # patched in some runs
                    yield from self._init(goes_on=self._random.random() < 0.5)
        except Fenced:
            self._world.producer_ended(self._id)

    # Calls

    def _ask(self, make: Any, heard: Any = None) -> Generator[Operation, Any, Any]:
        """Ask until there is an answer that says something.

        Raises:
            Fenced, Abortable
        """
        while True:
            answer = yield self._world.ask(make, heard)
            if answer is None or isinstance(answer, NotCoordinator | ConcurrentTransactions):
                yield self._world.sleep(RETRY_MS)
            elif isinstance(answer, FencedError):
                raise Fenced from answer
            elif isinstance(answer, TransactionAbortable):
                raise Abortable
            elif isinstance(answer, RaftlogError):
                raise Broken(
                    f"{self._name} got an error that it must never get, {type(answer).__name__}: {answer}"
                ) from answer
            else:
                return answer

    def _init(self, *, goes_on: bool) -> Generator[Operation, Any, None]:
        request = transaction_pb2.InitProducerIdRequest(transactional_id=self._id, transaction_timeout_ms=TIMEOUT_MS)
        if goes_on:
            request.producer_id, request.producer_epoch = self._producer_id, self._epoch
        answer = yield from self._ask(lambda to: InitProducer(to, request))
        self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch

    def _add(self, name: str) -> Generator[Operation, Any, None]:
        request = transaction_pb2.AddToTransactionRequest(
            transactional_id=self._id, producer_id=self._producer_id, producer_epoch=self._epoch
        )
        if name == GROUP:
            request.group_ids.append(GROUP)
        else:
            request.partitions.extend(partition_messages([(topic_id("t"), int(name[1:]))]))
        yield from self._ask(lambda to: AddTo(to, request))

    def _end(self, transaction: Transaction, commit: bool) -> Generator[Operation, Any, None]:
        transaction.may_commit |= commit
        request = transaction_pb2.EndTransactionRequest(
            transactional_id=self._id,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            commit=commit,
        )

        def heard(message: Any) -> None:
            if isinstance(message, transaction_pb2.EndTransactionResponse):
                self._world.told_ended(transaction, commit)

        answer = yield from self._ask(lambda to: End(to, request), heard)
        self._epoch = answer.producer_epoch

    # Transactions

    def _transaction(self) -> Generator[Operation, Any, None]:
        transaction = self._world.checker.begin(self._name, self._producer_id, self._epoch)
        try:
            yield from self._write(transaction)
            yield from self._end(transaction, commit=self._random.random() < 0.8)
            self._done += 1
        except Abortable:
            # Its producer may abort what was aborted, or go on at once (KIP-360).
            if self._random.random() < 0.5:
                yield from self._end(transaction, commit=False)
            else:
                yield from self._init(goes_on=True)

    def _write(self, transaction: Transaction) -> Generator[Operation, Any, None]:
        names = sorted(self._world.partitions)
        for name in self._random.sample(names, self._random.randint(0, 3)):
            yield from self._add(name)
            if self._random.random() < 0.1:
                continue  # added, and never written to
            transaction.sent[name] = 0
            for sequence in range(self._random.randint(1, 3)):
                yield from self._send(transaction, name, sequence)
        if self._random.random() < 0.05 and not self._world.healing:
            yield self._world.sleep(self._random.uniform(0, 2 * TIMEOUT_MS))

    def _send(self, transaction: Transaction, name: str, sequence: int) -> Generator[Operation, Any, None]:
        while True:
            answer = yield self._world.produce(transaction, name, sequence)
            if answer is True:
                transaction.sent[name] = sequence + 1
                return
            if isinstance(answer, RaftlogError):
                # Its marker is there already: the coordinator knows why.
                raise Abortable
            yield self._world.sleep(RETRY_MS)
