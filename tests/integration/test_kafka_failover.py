"""Leaders and transaction coordinators are killed under the producers of librdkafka, and of Java's clients.

Nothing that was acknowledged is lost or doubled, and a transaction is there in all of its partitions or in none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import IO, Any, Final, Literal

import confluent_kafka
import pytest
from confluent_kafka import KafkaException

import raftlog
from raftlog.testing import Cluster
from tests.support import append_checker
from tests.support.append_checker import Append, Entry, Log
from tests.support.history import transactions
from tests.support.history.transactions import Transaction
from tests.support.kafka_java import JavaProgram, jars_or_skip
from tests.support.up_to_date import heard_everywhere

PLAIN, TRANSACTED = "plain", "transacted"
TRANSACTIONAL_ID: Final = "of-a-kafka-client"
PARTITIONS: Final = 3
TIMEOUT_S: Final = 120.0
STEP: Final = 30
"""Acknowledgements, and a tenth as many transactions, between two faults."""


class Plain(threading.Thread):
    """An idempotent producer."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(name="plain", daemon=True)
        self.appends: list[Append] = []
        self.failed: list[object] = []
        self.stopping = threading.Event()
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 5,
                "delivery.timeout.ms": int(TIMEOUT_S * 1_000),
                "log_level": 0,
            }
        )

    def run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            self._send(number)
            number += 1
            self._producer.poll(0.01)
        if left := self._producer.flush(TIMEOUT_S):
            self.failed.append(f"{left} records without an answer")

    def end(self, timeout_s: float) -> None:
        """Let it end, with every answer."""
        self.stopping.set()
        self.join(timeout_s)
        assert not self.is_alive(), f"the producer did not end within {timeout_s:g} s"

    def _send(self, number: int) -> None:
        partition, value, asked_s = number % PARTITIONS, b"%d" % number, time.monotonic()

        def done(error: object, message: Any) -> None:
            if error is not None:
                self.failed.append(error)
            offset = None if error is not None else message.offset()
            self.appends.append(
                Append(0, number // PARTITIONS, partition, value, asked_s, time.monotonic(), offset, once=True)
            )

        self._producer.produce(PLAIN, value, partition=partition, on_delivery=done)


class Transacted(threading.Thread):
    """A transactional producer: each transaction puts its value into every partition; one in four is aborted."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(name="transacted", daemon=True)
        self.transactions: list[Transaction] = []
        self.committed = 0
        self.broken: BaseException | None = None
        self.stopping = threading.Event()
        self._servers = bootstrap

    def run(self) -> None:
        try:
            producer = self._made()
            number = 0
            while not self.stopping.is_set():
                if not self._one(producer, number):
                    producer = self._made()
                number += 1
        except BaseException as error:
            self.broken = error
            raise

    def _made(self) -> confluent_kafka.Producer:
        settings: dict[str, Any] = {
            "bootstrap.servers": self._servers,
            "transactional.id": TRANSACTIONAL_ID,
            "log_level": 0,
        }
        producer = confluent_kafka.Producer(settings)
        self._patiently(lambda: producer.init_transactions(TIMEOUT_S))
        return producer

    def end(self, timeout_s: float) -> None:
        """Let it end."""
        self.stopping.set()
        self.join(timeout_s)
        assert not self.is_alive(), f"the transactional producer did not end within {timeout_s:g} s"
        assert self.broken is None

    def _one(self, producer: confluent_kafka.Producer, number: int) -> bool:
        """Return whether the producer goes on."""
        value = b"txn-%d" % number
        outcome: Any = "unknown"
        goes_on = True
        try:
            producer.begin_transaction()
            for partition in range(PARTITIONS):
                producer.produce(TRANSACTED, value, partition=partition)
            if number % 4 == 3:
                self._patiently(lambda: producer.abort_transaction(TIMEOUT_S))
                outcome = "failed"
            else:
                self._patiently(lambda: producer.commit_transaction(TIMEOUT_S))
                outcome = "ok"
                self.committed += 1
        except KafkaException as refused:
            error = refused.args[0]
            goes_on = not error.fatal()
            if error.txn_requires_abort():
                self._patiently(lambda: producer.abort_transaction(TIMEOUT_S))
                outcome = "failed"
        self.transactions.append(Transaction(TRANSACTIONAL_ID, number, value, tuple(range(PARTITIONS)), outcome))
        return goes_on

    def _patiently(self, step: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                step()
                return
            except KafkaException as refused:
                if not refused.args[0].retriable() or time.monotonic() > deadline_s:
                    raise


class JavasPlain(JavaProgram):
    """An idempotent producer of Java's clients."""

    def __init__(self, jars: Path, bootstrap: str) -> None:
        self.appends: list[Append] = []
        self.failed: list[object] = []
        arguments = bootstrap, PLAIN, str(PARTITIONS), str(int(TIMEOUT_S * 1_000))
        super().__init__(jars, "Producers", *arguments, on_line=self._hear)

    def _hear(self, line: str) -> None:
        number, sent_ns, answered_ns, answer = line.split(" ", 3)
        offset = int(answer) if answer.isdigit() else None
        if offset is None:
            self.failed.append(answer)
        at, partition = divmod(int(number), PARTITIONS)
        times_s = int(sent_ns) / 1e9, int(answered_ns) / 1e9
        self.appends.append(Append(0, at, partition, number.encode(), *times_s, offset, once=True))


class JavasTransacted(JavaProgram):
    """A transactional producer of Java's clients, which does what `Transacted` does."""

    def __init__(self, jars: Path, bootstrap: str, errors: IO[str]) -> None:
        self.transactions: list[Transaction] = []
        self.committed = 0
        arguments = bootstrap, TRANSACTED, str(PARTITIONS), str(int(TIMEOUT_S * 1_000)), TRANSACTIONAL_ID
        super().__init__(jars, "Producers", *arguments, on_line=self._hear, errors=errors)

    def _hear(self, line: str) -> None:
        number, _, told = line.partition(" ")
        outcome: Any = told
        value, places = b"txn-%d" % int(number), tuple(range(PARTITIONS))
        self.transactions.append(Transaction(TRANSACTIONAL_ID, int(number), value, places, outcome))
        self.committed += outcome == "ok"


def read_all(cluster: Cluster, topic: str, isolation_level: Literal["read_committed", "read_uncommitted"]) -> Log:
    """Return the records of a topic, by partition."""
    found: Log = {number: [] for number in range(PARTITIONS)}
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest", isolation_level=isolation_level) as consumer:
        partitions = [raftlog.TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        table = consumer.read_to_end(timeout=TIMEOUT_S)
    for number, offset, value in zip(
        *(table[name].to_pylist() for name in ("partition", "offset", "value")), strict=True
    ):
        found[number].append(Entry(offset, value))
    return found


def wait_until(what: str, holds: Callable[[], bool], producer: Plain | Transacted | JavaProgram) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {TIMEOUT_S:g} s: {what}"
        assert producer.is_alive(), f"the producer ended by itself before this: {what}"
        time.sleep(0.02)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3, kafka=True) as started:
        with raftlog.Admin(started.bootstrap) as admin:
            for topic in (PLAIN, TRANSACTED):
                admin.create_topic(
                    topic, partitions=PARTITIONS, replication_factor=3, configs={"min.insync.replicas": 2}
                )
        heard_everywhere(started)
        yield started


@pytest.mark.parametrize("faults", [1, pytest.param(6, marks=pytest.mark.long)])
def test_leaders_and_coordinators_die_under_librdkafka(cluster: Cluster, faults: int) -> None:
    """The broker that coordinates transactions leads partitions of both topics, too: the first fault has it all."""
    plain, transacted = Plain(cluster.kafka_bootstrap), Transacted(cluster.kafka_bootstrap)
    plain.start()
    transacted.start()
    kill_leaders(cluster, plain, transacted, faults)


@pytest.mark.long
def test_leaders_and_coordinators_die_under_javas_clients(cluster: Cluster, tmp_path: Path) -> None:
    """Whose transactional producers have an epoch for each transaction (KIP-890)."""
    jars, notes = jars_or_skip(), tmp_path / "notes"
    with notes.open("w") as errors:
        plain = JavasPlain(jars, cluster.kafka_bootstrap)
        transacted = JavasTransacted(jars, cluster.kafka_bootstrap, errors)
        try:
            kill_leaders(cluster, plain, transacted, faults=6)
        finally:
            plain.kill()
            transacted.kill()
            print(notes.read_text())


def kill_leaders(
    cluster: Cluster, plain: Plain | JavasPlain, transacted: Transacted | JavasTransacted, faults: int
) -> None:
    """Kill one broker after the other under two producers; then stop the producers and check their notes."""

    def progress(what: str) -> None:
        acknowledged, committed = len(plain.appends) + STEP, transacted.committed + STEP // 10
        wait_until(what, lambda: len(plain.appends) >= acknowledged, plain)
        wait_until(what, lambda: transacted.committed >= committed, transacted)

    def in_sync(admin: raftlog.Admin) -> bool:
        described = [admin.describe_topic(topic) for topic in (PLAIN, TRANSACTED)]
        return all(len(each.isr) == 3 for topic in described for each in topic.partitions)

    def coordinator(admin: raftlog.Admin) -> int:
        return admin.describe_transaction(TRANSACTIONAL_ID).coordinator_id

    try:
        progress("the beginning")
        kinds: list[tuple[str, Callable[[], int]]] = [
            ("the coordinator is killed", lambda: cluster.wait_for(coordinator)),
            ("a leader is killed", lambda: cluster.leader(TRANSACTED)),
            ("another leader is killed", lambda: cluster.leader(PLAIN)),
        ]
        for fault, victim in islice(cycle(kinds), faults):
            broker = victim()
            cluster.kill(broker)
            progress(fault)
            cluster.start(broker)
            assert cluster.wait_for(in_sync, what="all replicas in sync")
            progress(f"after {fault}")
    finally:
        plain.end(TIMEOUT_S)
        transacted.end(TIMEOUT_S)
    assert not plain.failed
    log = read_all(cluster, PLAIN, "read_uncommitted")
    append_checker.assert_sound(append_checker.History(plain.appends, [], {0: log}))
    found = transactions.History(transacted.transactions, [], read_all(cluster, TRANSACTED, "read_committed"))
    problems = transactions.check(found)
    assert not problems, problems
