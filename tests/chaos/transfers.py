"""Transactions over all partitions of a topic, through the SDK, with a reader of what is committed beside them."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from typing import Final

from raftlog import Consumer, Producer, TopicPartition
from raftlog.errors import ProducerFenced, RaftlogError, RetriableError, TransactionAbortable
from tests.chaos.operations import Operation, Operations, Outcome
from tests.support.append_checker import Entry, Poll
from tests.support.history.transactions import History, Transaction, check

TIMEOUT_MS: Final = 10_000
_END_S: Final = 180.0
_PAUSE_S: Final = 0.1
_COMMIT_SHARE: Final = 0.75

Places = dict[int, list[tuple[int, bytes]]]
"""By partition: offset and value, in the order in which they were read."""


class Transactor(threading.Thread):
    """One transactional producer after the other; each transaction puts one value into every partition."""

    def __init__(self, name: str, bootstrap: str, topic: str, partitions: int, operations: Operations) -> None:
        super().__init__(name=name, daemon=True)
        self.over = threading.Event()
        self.broken: BaseException | None = None
        self.outcomes: dict[bytes, Outcome] = {}
        """What became of each value: "ok" is committed, "failed" aborted or refused."""
        self.ending_at: dict[bytes, float] = {}
        """When the commit of each was asked for first."""
        self.committed = 0
        self._servers = bootstrap
        self._topic = topic
        self._partitions = range(partitions)
        self._operations = operations
        self._chance = random.Random(name)
        self._number = 0

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self._live()
        except BaseException as error:  # the test shows it
            self.broken = error

    def _live(self) -> None:
        with Producer(
            self._servers, transactional_id=self.name, transaction_timeout_ms=TIMEOUT_MS, linger_ms=0
        ) as producer:
            while not self.over.is_set():
                self._number += 1
                value = f"{self.name}:{self._number:06}".encode()
                started_s = time.monotonic()
                self.outcomes[value] = "unknown"
                goes_on = True
                error: RaftlogError | None = None
                try:
                    self.outcomes[value] = self._transact(producer, value, commit=self._chance.random() < _COMMIT_SHARE)
                except RaftlogError as caught:
                    error, goes_on = caught, False
                outcome = self.outcomes[value]
                self.committed += outcome == "ok"
                detail = f"{value.decode()} {'' if error is None else repr(error)}"
                self._operations.add(
                    Operation("transaction", self.name, started_s, time.monotonic(), outcome, detail=detail)
                )
                if not goes_on:
                    return
                time.sleep(_PAUSE_S)

    def _transact(self, producer: Producer, value: bytes, *, commit: bool) -> Outcome:
        """Run one transaction; after an error that leaves here the outcome is unknown and the producer ends."""
        producer.begin_transaction()
        try:
            for partition in self._partitions:
                producer.send(self._topic, value, partition=partition)
            if commit:
                self.ending_at[value] = time.monotonic()
                self._insist(producer.commit_transaction)
                return "ok"
        except ProducerFenced:
            raise
        except TransactionAbortable:
            pass
        self._insist(producer.abort_transaction)
        return "failed"

    @staticmethod
    def _insist(end: object) -> None:
        """Ask until the outcome is known."""
        assert callable(end)
        deadline_s = time.monotonic() + _END_S
        while True:
            try:
                end()
                return
            except TransactionAbortable:
                raise
            except RetriableError:
                if time.monotonic() > deadline_s:
                    raise


class CommittedReader(threading.Thread):
    """Reads what is committed, from the start, all the while."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(name="committed-reader", daemon=True)
        self.over = threading.Event()
        self.broken: BaseException | None = None
        self.seen: Places = defaultdict(list)
        self.polls: list[Poll] = []
        self._consumer = Consumer(bootstrap, auto_offset_reset="earliest", isolation_level="read_committed")
        self._topic = topic

    def run(self) -> None:
        try:
            with self._consumer as consumer:
                consumer.subscribe(self._topic)
                while not self.over.is_set():
                    asked_at = time.monotonic()
                    try:
                        records = consumer.poll(0.1)
                    except RetriableError:
                        continue
                    told_at = time.monotonic()
                    given: dict[int, list[Entry]] = {}
                    for record in records:
                        self.seen[record.partition].append((record.offset, record.value or b""))
                        given.setdefault(record.partition, []).append(Entry(record.offset, record.value or b""))
                    self.polls += [Poll(0, part, tuple(found), asked_at, told_at) for part, found in given.items()]
        except BaseException as error:  # the test shows it
            self.broken = error


class Transfers:
    """`start`, break things, `stop`, `problems`."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, operations: Operations, producers: int = 2) -> None:
        self._bootstrap, self._topic, self._partitions = bootstrap, topic, partitions
        self._producers = [
            Transactor(f"{topic}-{number}", bootstrap, topic, partitions, operations) for number in range(producers)
        ]
        self._reader = CommittedReader(bootstrap, topic)

    def start(self) -> None:
        """Begin."""
        for thread in (*self._producers, self._reader):
            thread.start()

    @property
    def polls(self) -> list[Poll]:
        """The records that the reader has received so far."""
        return list(self._reader.polls)

    @property
    def committed(self) -> int:
        """How many transactions were committed so far."""
        return sum(each.committed for each in self._producers)

    def wait_for_progress(self, transactions: int = 2, timeout_s: float = 60.0) -> float:
        """Return the seconds until every producer has committed so many more.

        Raises:
            AssertionError: not in time.
        """
        started_s = time.monotonic()
        wanted = [each.committed + transactions for each in self._producers]
        while any(each.committed < count for each, count in zip(self._producers, wanted, strict=True)):
            self._check_threads()
            assert time.monotonic() < started_s + timeout_s, f"no transaction was committed within {timeout_s:g} s"
            time.sleep(0.01)
        return time.monotonic() - started_s

    def _check_threads(self) -> None:
        threads: list[Transactor | CommittedReader] = [*self._producers, self._reader]
        for each in threads:
            if each.broken is not None:
                raise each.broken

    def stop(self) -> None:
        """Begin no more, and wait for the last ones to end."""
        for each in self._producers:
            each.over.set()
        for each in self._producers:
            each.join(_END_S + TIMEOUT_MS / 1000)
            assert not each.is_alive(), f"{each.name} did not end"
        self._check_threads()

    def abandon(self) -> None:
        """Tell all threads to end, without waiting."""
        threads: list[Transactor | CommittedReader] = [*self._producers, self._reader]
        for each in threads:
            each.over.set()

    def problems(self) -> list[str]:
        """Read everything that is committed, and return what is wrong with it.

        Raises:
            AssertionError: it cannot be read to the end.
        """
        final = self._read_all()
        self._wait_for_reader(final)
        done = [
            Transaction(each.name, number, value, tuple(range(self._partitions)), outcome, each.ending_at.get(value))
            for each in self._producers
            for number, (value, outcome) in enumerate(each.outcomes.items())
        ]
        logs = {partition: [Entry(*place) for place in places] for partition, places in final.items()}
        found = [str(each) for each in check(History(done, list(self._reader.polls), logs))]
        for partition, places in final.items():
            if self._reader.seen[partition] != places:
                found.append(f"partition {partition}: a reader of the time saw something else than what is there now")
        return found

    def _read_all(self) -> Places:
        found: Places = {partition: [] for partition in range(self._partitions)}
        with Consumer(self._bootstrap, isolation_level="read_committed") as consumer:
            places = consumer.partitions_for(self._topic)
            consumer.assign(places)
            consumer.seek_to_beginning(*places)
            deadline_s = time.monotonic() + _END_S
            ends = self._ends(places, deadline_s)
            while any(consumer.position(place) < ends[place] for place in places):
                assert time.monotonic() < deadline_s, (
                    f"the consumer has read only to {[consumer.position(place) for place in places]} of {ends}"
                )
                for record in consumer.poll(0.2):
                    found[record.partition].append((record.offset, record.value or b""))
        return found

    def _ends(self, places: list[TopicPartition], deadline_s: float) -> dict[TopicPartition, int]:
        """Return where partitions end, once nothing is open: a commit does not wait for late markers."""
        with (
            Consumer(self._bootstrap, isolation_level="read_committed") as committed,
            Consumer(self._bootstrap, isolation_level="read_uncommitted") as everything,
        ):
            while (ends := committed.end_offsets(places)) != everything.end_offsets(places):
                assert time.monotonic() < deadline_s, (
                    f"a transaction is never ended: the last stable offset does not reach one of {ends}"
                )
                time.sleep(0.05)
        return ends

    def _wait_for_reader(self, final: Places) -> None:
        deadline_s = time.monotonic() + _END_S
        while any(len(self._reader.seen[part]) < len(places) for part, places in final.items()):
            self._check_threads()
            assert time.monotonic() < deadline_s, (
                "the reader of committed records does not reach the end: a transaction may be open"
            )
            time.sleep(0.02)
        self._reader.over.set()
        self._reader.join(_END_S)
