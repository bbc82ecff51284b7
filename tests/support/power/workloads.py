"""Clients at work while the power goes: topics that come and go, transactions over several partitions, offsets.

Each notes what it was told, and says in the end, or whenever all is up, whether that is so. Appends and polls are
those of `tests.support.append_workload`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from random import Random
from typing import Final

from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.errors import RaftlogError, TopicAlreadyExists, UnknownTopicOrPartition

_CALL_S: Final = 10.0
_PAUSE_S: Final = 0.05
"""Between two transactions, commits or changes of topics: clients that take the whole machine starve the servers."""
_READ_S: Final = 90.0
_JOIN_S: Final = 180.0


class Client(threading.Thread):
    """Works until it is told to stop; `stop` raises the error that ended it."""

    def __init__(self, bootstrap: str, seed: int) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.bootstrap = bootstrap
        self.chance = Random(seed)
        self.over = threading.Event()
        self.done = 0
        self._broken: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.work()
        except BaseException as error:  # the test shows it
            self._broken = error

    def work(self) -> None:
        """Work for a while."""
        raise NotImplementedError

    def check(self) -> None:
        """See that everything is as it was told; raises AssertionError otherwise."""
        raise NotImplementedError

    def stop(self) -> None:
        """End, once what is under way has been answered."""
        self.over.set()
        self.join(_JOIN_S)
        assert not self.is_alive(), f"{self.name} did not end within {_JOIN_S:g} s"
        if self._broken is not None:
            raise self._broken


class Topics(Client):
    """Makes topics and deletes some of them."""

    def __init__(self, bootstrap: str, seed: int, replicas: int = 3) -> None:
        super().__init__(bootstrap, seed)
        self._replicas = replicas
        self._made: list[str] = []
        self._deleted: list[str] = []
        self._number = 0
        self._lock = threading.Lock()

    def work(self) -> None:
        with Admin(self.bootstrap) as admin:
            while not self.over.wait(_PAUSE_S):
                if len(self._made) > 3 and self.chance.random() < 0.5:
                    self._remove_topic(admin)
                else:
                    self._make_topic(admin)

    def _make_topic(self, admin: Admin) -> None:
        name = f"topic-{self._number}"
        self._number += 1
        try:
            with contextlib.suppress(TopicAlreadyExists):  # of the try before
                admin.create_topic(name, 2, replication_factor=self._replicas, timeout=_CALL_S)
        except RaftlogError:
            return  # it may be there, or not
        with self._lock:
            self._made.append(name)
            self.done += 1

    def _remove_topic(self, admin: Admin) -> None:
        with self._lock:
            name = self._made.pop(self.chance.randrange(len(self._made)))
        try:
            with contextlib.suppress(UnknownTopicOrPartition):
                admin.delete_topic(name, timeout=_CALL_S)
        except RaftlogError:
            return
        with self._lock:
            self._deleted.append(name)
            self.done += 1

    def check(self) -> None:
        """See that every topic is there that was made, and none that was deleted."""
        with self._lock:  # no topic is deleted, or reported as created, meanwhile
            deadline_s = time.monotonic() + _READ_S
            while True:
                try:
                    with Admin(self.bootstrap) as admin:
                        admin.describe_cluster(linearizable=True, timeout=_CALL_S)
                        there = set(admin.list_topics(timeout=_CALL_S))
                    break
                except RaftlogError:
                    assert time.monotonic() < deadline_s, "no broker has listed the topics within the time allowed"
                    time.sleep(0.1)
            lost, back = set(self._made) - there, set(self._deleted) & there
        assert not lost, f"topics are gone whose creation was acknowledged: {sorted(lost)}"
        assert not back, f"topics are back whose deletion was acknowledged: {sorted(back)}"


class Transactions(Client):
    """One value into every partition of a topic, committed or aborted."""

    TOPIC: Final = "bank"
    PARTITIONS: Final = 3

    def __init__(self, bootstrap: str, seed: int) -> None:
        super().__init__(bootstrap, seed)
        self._committed: set[bytes] = set()
        self._aborted: set[bytes] = set()
        self._id = f"teller-{seed}"
        self._number = 0

    def work(self) -> None:
        try:
            with Producer(self.bootstrap, transactional_id=self._id, linger_ms=0, max_block_ms=30_000) as producer:
                while not self.over.wait(_PAUSE_S):
                    self._transact(producer)
        except RaftlogError:
            time.sleep(0.1)  # the next one with this id ends what is open

    def _transact(self, producer: Producer) -> None:
        value = f"{self._id}-{self._number}".encode()
        commit = self.chance.random() < 0.7
        self._number += 1
        if not commit:
            self._aborted.add(value)  # however it ends
        producer.begin_transaction()
        for partition in range(self.PARTITIONS):
            producer.send(self.TOPIC, value, partition=partition)
        if commit:
            producer.commit_transaction()
            self._committed.add(value)
        else:
            producer.abort_transaction()
        self.done += 1

    def check(self) -> None:
        """See that every transaction is there as a whole or not at all, as its producer was told."""
        with Producer(self.bootstrap, transactional_id=self._id) as successor:
            successor.begin_transaction()
            successor.abort_transaction()
        found = self._read()
        for partition, values in found.items():
            assert len(values) == len(set(values)), f"partition {partition} has records of a transaction twice"
        sets = [
            {value for value in values if value.startswith(b"%s-" % self._id.encode())} for values in found.values()
        ]
        torn = set[bytes]().union(*sets) - sets[0].intersection(*sets)
        assert not torn, f"only some partitions have the records of these transactions: {sorted(torn)[:5]}"
        lost, back = self._committed - sets[0], self._aborted & sets[0]
        assert not lost, f"{len(lost)} transactions are gone whose commit was acknowledged: {sorted(lost)[:5]}"
        assert not back, f"{len(back)} transactions are readable that were aborted: {sorted(back)[:5]}"

    def _read(self) -> dict[int, list[bytes]]:
        partitions = [TopicPartition(self.TOPIC, number) for number in range(self.PARTITIONS)]
        found: dict[int, list[bytes]] = {each.partition: [] for each in partitions}
        with Consumer(self.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.assign(partitions)
            with Admin(self.bootstrap) as admin:
                latest = admin.list_offsets(dict.fromkeys(partitions, "latest"), timeout=_READ_S)
            ends = {each: position.offset for each, position in latest.items() if position is not None}
            deadline_s = time.monotonic() + _READ_S
            while any(consumer.position(each) < end for each, end in ends.items()):
                assert time.monotonic() < deadline_s, (
                    f"after {_READ_S:g} s a reader of committed records has not reached {ends}: a transaction is "
                    "still open"
                )
                for record in consumer.poll(0.2):
                    assert record.value is not None
                    found[record.partition].append(record.value)
        return found


class Commits(Client):
    """Commits growing offsets of a group."""

    def __init__(self, bootstrap: str, seed: int, topic: str) -> None:
        super().__init__(bootstrap, seed)
        self._at = TopicPartition(topic, 0)
        self._group = f"group-{seed}"
        self._asked = 0
        self._lock = threading.Lock()

    def work(self) -> None:
        with Consumer(self.bootstrap, group_id=self._group, enable_auto_commit=False) as consumer:
            consumer.assign([self._at])
            while not self.over.wait(_PAUSE_S):
                with self._lock:
                    self._asked += 1
                    try:
                        consumer.commit({self._at: self._asked})
                    except RaftlogError:
                        continue
                    self.done = self._asked

    def check(self) -> None:
        """Check that the offset is not below the acknowledged one, nor above the requested one."""
        with self._lock:
            deadline_s = time.monotonic() + _READ_S
            while True:
                try:
                    with Admin(self.bootstrap) as admin:
                        found = admin.group_offsets(self._group, timeout=_CALL_S)
                    break
                except RaftlogError:
                    assert time.monotonic() < deadline_s, (
                        f"no broker has answered what is committed within {_READ_S:g} s"
                    )
                    time.sleep(0.1)
            offset = found[self._at].offset if self._at in found else 0
            assert self.done <= offset <= self._asked, (
                f"the committed offset must be from {self.done} to {self._asked}, but is {offset}"
            )
