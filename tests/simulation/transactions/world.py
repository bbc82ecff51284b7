"""A coordinator of transactions, producers, batch writers and partitions in one thread: chance is a seed.

The coordinator is the real core. Its decisions are committed a while later; a crash cuts the log at a random place in
the uncommitted part, and another core loads the rest, compacted or not, with a clock that is off by seconds. Messages
are lost, late, or come twice, up to many seconds later; markers, too, of coordinators that are gone. Producers and
writers keep the rules of docs/transactions.md: no record before its partition was added, none in an epoch that was
ended.

Checked as it happens (`Broken` is raised):
    a transaction is decided once, as its producer has asked, and in every partition alike, with all its records
    no two transactions share an epoch, and none writes to a partition before the last one's marker is there
    what a producer was told is what was decided; within a second of the decision its markers are there, too
    a batch is committed once, by exactly the stages that one CommitBatch has named; a sink's last batch only rises
    now and then: the records, compacted up to a random offset, replay to the state of the coordinator, which counts the
    ids of each user right
and after `heal`: no transaction is open, every process has finished, and each partition has the reported outcomes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from broker.coordinator.core import Send
from broker.coordinator.transactions.commands import (
    Command,
    Decision,
    InitProducer,
    InitStage,
    MarkersWritten,
    NeedsProducerId,
    Now,
    PendingMarkers,
    TransactionConfig,
)
from broker.coordinator.transactions.coordinator import TransactionCoordinator
from broker.coordinator.transactions.listing import Rest
from broker.coordinator.transactions.transaction import PREPARED
from raftlog.errors import NotCoordinator
from tests.simulation.groups.world import compacted
from tests.simulation.transactions.partitions import Broken, Checker, Partition, Transaction
from tests.simulation.transactions.process import Operation, Process, Resume
from tests.simulation.transactions.producer import GROUP, Producer
from tests.simulation.transactions.writer import Batches, Writer
from tests.support.transaction_driver import WALL_MS, hard, topic_id

PATIENCE_MS = 1_500.0
PARTITIONS = 4
USERS = {"x": "User:a", "y": "User:a", "z": "", "s": "User:a", "u": "User:b", "once": "User:b"}
"""By transactional id or sink; "": a client without a login."""


class World:
    """One run: `run` with faults, then `heal`."""

    def __init__(self, seed: int, *, faults: bool = True, config: TransactionConfig | None = None) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.healing = False
        self.now_ms = 0.0
        self.steps = 0
        self.crash_at_step: int | None = None
        self.commit_takes_ms = [1, 5, 20, 300]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        # In every other run an id that is unused for long is forgotten, and its producer begins anew.
        idle_ms = 8_000 if seed % 2 else 7 * 24 * 60 * 60 * 1000
        self.config = config or TransactionConfig(
            max_timeout_ms=10_000, id_expiration_ms=idle_ms, expiration_check_interval_ms=1_000
        )
        self.checker = Checker()
        names = [*(f"t{number}" for number in range(PARTITIONS)), GROUP]
        self.partitions = {name: Partition(name, self.checker) for name in names}
        self._away_until_ms = dict.fromkeys(names, 0.0)
        self.producer_ids = count(4000)
        self.log: list[tuple[bytes, bytes | None]] = []
        self._uncommitted: list[Decision] = []
        self._commits_at_ms = 0.0
        self._decided_at_ms: dict[tuple[int, int], float] = {}
        self._told_last: dict[str, int] = {}
        self.up = True
        self.term = 0
        self.wall_ahead_ms = 0
        self.core = self._load(self.log)
        self.core.loaded(self.now)
        self.batches: dict[str, Batches] = {}
        self.processes: list[Process] = []
        self._lives = count()
        for transactional_id in ("x", "y", "z"):
            self.start_producer(transactional_id)
        for sink_id in ("s", "s", "u", "once"):
            self.start_writer(sink_id)

    @property
    def now(self) -> Now:
        return Now(self.now_ms, WALL_MS + int(self.now_ms) + self.wall_ahead_ms)

    def at(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now_ms + max(0.0, delay_ms), next(self._order), action))

    # The coordinator

    def _load(self, log: list[tuple[bytes, bytes | None]]) -> TransactionCoordinator:
        core = TransactionCoordinator(self.config, self.term)
        for key, value in log:
            core.replay(key, value)
        return core

    def crash(self) -> None:
        """Lose the coordinator, with part of its uncommitted records; another one starts after a while."""
        if not self.up:
            return
        self.up = False
        self.term += 1
        uncommitted = sum(len(decision.records) for decision in self._uncommitted)
        self.log = self.log[: len(self.log) - self.random.randint(0, uncommitted)]
        self._uncommitted.clear()
        self.at(self.random.uniform(10, 3000), self._come_up)

    def _come_up(self) -> None:
        if not self.up:
            self.up = True
            self.wall_ahead_ms = self.random.choice([0, 0, -4000, 4000])
            upto = self.random.randint(0, len(self.log))
            self.core = self._load(compacted(self.log, upto, tombstones=self.random.random() < 0.5))
            self._note_decisions()
            self.core.loaded(self.now)

    def submit(self, command: Command) -> None:
        """A request arrives."""
        if not self.up:
            return
        decision = self.core.decide(command, self.now)
        self._apply(decision)
        while decision.rest is not None:
            assert isinstance(decision.rest, Rest)
            decision = self.core.decide(decision.rest, self.now)
            self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        for key, value in decision.records:
            self.log.append((key, value))
            self.core.replay(key, value)
        if decision.records:
            self._note_decisions()
        self._uncommitted.append(decision)
        held_ms = self.random.choice(self.commit_takes_ms) if decision.records else 0
        self._commits_at_ms = max(self._commits_at_ms, self.now_ms + held_ms)
        term = self.term
        self.at(self._commits_at_ms - self.now_ms, lambda: self._committed(term))

    def _note_decisions(self) -> None:
        """When was each transaction decided, by the records?"""
        for known in self.core.transactions.values():
            if known.state in PREPARED:
                self._decided_at_ms.setdefault((known.producer_id, known.producer_epoch - 1), self.now_ms)

    def _committed(self, term: int) -> None:
        if term == self.term and self._uncommitted:
            for effect in self._uncommitted.pop(0).effects:
                self._send(effect)

    def _send(self, effect: Send) -> None:
        if isinstance(effect.message, PendingMarkers):
            assert effect.to == self.term
            Sender(self, effect.message)
            return
        assert callable(effect.to)
        effect.to(effect.message)

    def told_last(self, sink_id: str, last_batch_id: int, *, at_least: bool = False) -> None:
        """A sink's last batch is told; or that one which it was a while ago."""
        before = self._told_last.get(sink_id, -1)
        if last_batch_id < before and not at_least:
            raise Broken(f"the last batch of {sink_id} goes back from {before} to {last_batch_id}")
        self._told_last[sink_id] = max(before, last_batch_id)

    def told_ended(self, transaction: Transaction, commit: bool) -> None:
        """The answer of EndTransaction leaves: early enough it says that all partitions have their markers."""
        transaction.tell(commit)
        at = transaction.producer_id, transaction.producer_epoch
        decided_ms = self._decided_at_ms.get(at)
        soon = decided_ms is not None and self.now_ms < decided_ms + self.config.answer_within_ms
        self.checker.check_told(transaction, with_markers=soon)

    # The network

    def delay(self) -> float:
        """How long something is under way."""
        if self.faults and self.random.random() < 0.03:
            return self.random.uniform(100, 8000)
        return self.random.uniform(0.5, 20)

    def is_lost(self) -> bool:
        """Whether a message gets nowhere."""
        return self.faults and self.random.random() < 0.03

    def is_away(self, name: str) -> bool:
        """Whether a partition has no leader at the moment."""
        return self.now_ms < self._away_until_ms[name]

    def sleep(self, for_ms: float) -> Operation:
        """Wait."""
        return lambda resume: self.at(for_ms, lambda: resume(None))

    def ask(self, make: Callable[[object], Command], heard: Callable[[Any], None] | None = None) -> Operation:
        """Ask the coordinator: its answer, an error, or None if there was none in time.

        `heard` gets every answer as it leaves, also those that no caller waits for any more.
        """

        def operation(resume: Resume) -> None:
            def arrive() -> None:
                if not self.up:
                    self._reply(resume, NotCoordinator(""))
                    return
                self._submit_with_id(make, resume, heard, None)

            for _ in range(1 + (self.faults and self.random.random() < 0.05)):
                if not self.is_lost():
                    self.at(self.delay(), arrive)
            self.at(PATIENCE_MS, lambda: resume(None))

        return operation

    def _submit_with_id(
        self,
        make: Callable[[object], Command],
        resume: Resume,
        heard: Callable[[Any], None] | None,
        producer_id: int | None,
    ) -> None:
        """What the broker's service does: fetch a producer id if one is needed."""
        answers = 0

        def answered(message: Any) -> None:
            nonlocal answers
            answers += 1
            if answers > 1:
                raise Broken("a call was answered twice")
            if isinstance(message, NeedsProducerId):
                term = self.term
                fresh = next(self.producer_ids)
                self.at(
                    self.random.uniform(1, 50),
                    lambda: self._submit_with_id(make, resume, heard, fresh) if term == self.term else None,
                )
                return
            if heard is not None:
                heard(message)
            self._reply(resume, message)

        command = make(answered)
        if isinstance(command, InitProducer | InitStage):
            name = command.request.transactional_id if isinstance(command, InitProducer) else command.request.sink_id
            command = replace(command, new_producer_id=producer_id, user=USERS[name])
        self.submit(command)

    def _reply(self, resume: Resume, message: Any) -> None:
        if not self.is_lost():
            self.at(self.delay(), lambda: resume(message))

    def produce(self, transaction: Transaction, partition: str, sequence: int) -> Operation:
        """Send a record: True, an error, or None if there was no answer in time."""

        def operation(resume: Resume) -> None:
            def arrive() -> None:
                if self.is_away(partition):
                    return
                error = self.partitions[partition].produce(transaction, sequence)
                self._reply(resume, error or True)

            for _ in range(1 + (self.faults and self.random.random() < 0.05)):
                if not self.is_lost():
                    self.at(self.delay(), arrive)
            self.at(PATIENCE_MS, lambda: resume(None))

        return operation

    # Clients

    def start_producer(self, transactional_id: str) -> None:
        """A process that takes the id over from any other."""
        self.processes.append(Process(self, Producer(self, transactional_id, next(self._lives)).steps()))

    def start_writer(self, sink_id: str) -> None:
        """A driver that goes on with the sink, as others may at the same time."""
        self.processes.append(Process(self, Writer(self, sink_id, next(self._lives)).steps()))

    def producer_ended(self, transactional_id: str) -> None:
        """A producer was fenced or forgotten: a new one begins in a while."""
        self.at(self.random.uniform(0, 3000), lambda: self.start_producer(transactional_id))

    # Chance

    def mishap(self) -> None:
        """Inject a fault."""
        if not self.faults:
            return
        chance = self.random.random()
        living = [process for process in self.processes if process.alive]
        if chance < 0.25:
            self.crash()
        elif chance < 0.4:
            name = self.random.choice(list(self.partitions))
            self._away_until_ms[name] = self.now_ms + self.random.choice([300, 1500, 6000])
        elif chance < 0.6 and living:
            self.random.choice(living).pause(self.random.choice([500.0, 3000.0, 12_000.0]))
        elif chance < 0.7 and living:
            self.random.choice(living).kill()
            living = [process for process in living if process.alive]
        elif chance < 0.8:
            self.start_producer(self.random.choice("xyz"))
            living.append(self.processes[-1])
        if len(living) < 9:
            if self.random.random() < 0.5:
                self.start_producer(self.random.choice("xyz"))
            else:
                self.start_writer(self.random.choice("su"))
            living.append(self.processes[-1])
        self.processes = living
        self.at(self.random.uniform(50, 2500), self.mishap)

    # Time

    def run(self, for_ms: float) -> None:
        """Let time go by, with mishaps where there are faults."""
        if self.faults:
            self.at(0, self.mishap)
        self._run(for_ms)

    def heal(self, for_ms: float = 60_000) -> None:
        """No more faults and no new transactions: open transactions come to their end."""
        self.faults = False
        self.healing = True
        self._away_until_ms = dict.fromkeys(self.partitions, 0.0)
        if not self.up:
            self._come_up()
        for transactional_id in ("x", "y", "z"):
            self.start_producer(transactional_id)
        for sink_id in ("s", "u"):
            self.start_writer(sink_id)
        self._run(for_ms)
        if stuck := [process for process in self.processes if process.alive]:
            raise Broken(f"{len(stuck)} clients still wait, though all faults are over")
        for partition in self.partitions.values():
            if left := partition.open():
                raise Broken(f"{left} stays open in {partition.name}, though all faults are over")
        for transactional_id, known in self.core.transactions.items():
            if not known.is_idle:
                raise Broken(f"{transactional_id} stays in the state {known.state.name}, though all faults are over")
        for sink_id, sink in self.core.sinks.items():
            if sink.stages:
                raise Broken(f"{sink_id} keeps {len(sink.stages)} stages, though all faults are over")
        for transaction in self.checker.transactions.values():
            self.checker.check_told(transaction, with_markers=True)
        for batches in self.batches.values():
            batches.check(self.checker.decided)
        self.check_replay()

    def _run(self, for_ms: float) -> None:
        until_ms = self.now_ms + for_ms
        while True:
            due_ms = self.core.next_deadline_ms() if self.up else None
            event_ms = self._events[0][0] if self._events else until_ms
            if min(event_ms, event_ms if due_ms is None else due_ms) >= until_ms:
                break
            if due_ms is not None and due_ms <= event_ms:
                self.now_ms = max(self.now_ms, due_ms)
                self._apply(self.core.on_time(self.now))
            else:
                self.now_ms, _, action = heapq.heappop(self._events)
                action()
            self.steps += 1
            if self.steps == self.crash_at_step:
                self.crash()
            if self.steps % 1000 == 0:
                self.check_replay()
        self.now_ms = until_ms

    def check_replay(self) -> None:
        """A replay of the log gives the coordinator's state, however the log was compacted."""
        if not self.up:
            return
        upto = self.random.randint(0, len(self.log))
        for log in (self.log, compacted(self.log, upto, tombstones=False), compacted(self.log, upto, tombstones=True)):
            other = self._load(log)
            if hard(other) != hard(self.core):
                raise Broken(
                    f"a replay of the log, compacted up to {upto} of {len(self.log)} records, gives another "
                    "state than the coordinator has"
                )
            if other.made.counts != self.core.made.counts:
                raise Broken(
                    f"a replay of the log, compacted up to {upto} of {len(self.log)} records, counts the ids of users "
                    f"as {other.made.counts}, the coordinator as {self.core.made.counts}"
                )
        known = [*self.core.transactions.values(), *(sink.head for sink in self.core.sinks.values())]
        counted = Counter(each.user for each in known if each is not None and each.user)
        if counted != self.core.made.counts:
            raise Broken(f"users have made {dict(counted)}, and the coordinator counts {self.core.made.counts}")


class Sender:
    """Sends one decision to every partition until each has it; ends with its coordinator, its messages do not."""

    def __init__(self, world: World, markers: PendingMarkers) -> None:
        self._world = world
        self._markers = markers
        self._term = world.term
        numbers = {(topic_id("t"), number): f"t{number}" for number in range(PARTITIONS)}
        self._missing = {numbers[partition] for partition in markers.partitions} | markers.group_ids
        world.checker.decide(markers.producer_id, markers.producer_epoch, markers.commit)
        for name in sorted(self._missing):
            self._tell(name)
        if not self._missing:
            world.at(0, self._done)

    def _tell(self, name: str) -> None:
        if self._term != self._world.term or name not in self._missing:
            return
        if not self._world.is_lost():
            self._world.at(self._world.delay(), lambda: self._arrive(name))
        self._world.at(self._world.random.uniform(200, 3000), lambda: self._tell(name))

    def _arrive(self, name: str) -> None:
        if self._world.is_away(name):
            return
        self._world.partitions[name].mark(self._markers.producer_id, self._markers.producer_epoch, self._markers.commit)
        if not self._world.is_lost():
            self._world.at(self._world.delay(), lambda: self._written(name))

    def _written(self, name: str) -> None:
        if name in self._missing:
            self._missing.discard(name)
            if not self._missing:
                self._done()

    def _done(self) -> None:
        """The report may come late, or twice, and to the next coordinator."""
        self._world.at(self._world.delay(), self._report)
        if self._world.faults and self._world.random.random() < 0.3:
            self._world.at(self._world.random.uniform(0, 8000), self._report)

    def _report(self) -> None:
        self._world.submit(MarkersWritten(self._markers))
