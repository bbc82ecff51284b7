"""The broker role of a process: it registers, sends heartbeats, holds a lease, and leads what its image says.

It appends nothing. Only the time of its acknowledgements counts: it is a violation if one leaves while another broker
may lead already, or if two brokers would acknowledge at the same time.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from raftlog.errors import RaftlogError
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.features import ALTER_PARTITIONS_LEVEL, metadata_version
from raftmeta.image import MetadataImage
from raftmeta.quorum.sessions import BrokerLease
from tests.simulation.controller import Heartbeat, HeartbeatAnswer
from tests.simulation.network import Connection
from tests.simulation.process import Process, ProcessGone
from tests.simulation.requests import Requester
from tests.simulation.voter import Committed

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation

HEARTBEAT_S = 0.3
EAGER_HEARTBEAT_S = 0.1
"""While it has no lease."""
RESTART_S = 0.5
"""The delay after which a process that ended by itself is started again."""
BEHIND_S = 0.3
"""A controller that does not show what is known to be committed for so long is left for another one."""
MOST_BEHIND_S = 5.0
"""The same, where controller after controller is behind: each is given twice the time of the one before."""
PRODUCE_S = 0.05
ALTER_SHARE = 0.04
"""How often a leader changes an ISR instead of acknowledging a record."""

BATCH_SHARE = 0.5
"""How often it changes the ISRs of all that it leads in one command."""
LATE_SHARE = 0.2
"""How many of those changes are of an earlier epoch."""
DOUBLE_SHARE = 0.1
"""How many of the partitions are in the command twice."""

PartitionKey = tuple[bytes, int]


class SimBroker:
    """One life of a broker."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.host = process.host
        self.simulation: Simulation = process.simulation
        self._random = random.Random(self.simulation.random.random())
        self.broker_id = self.host.node_id
        self.broker_epoch = -1
        self.image = MetadataImage()
        self.lease: BrokerLease = self.simulation.parts.lease()
        self._incarnation_id = self._random.randbytes(16)
        self._requester = Requester(process, self._random)
        self._heartbeats: Connection | None = None
        self._watch: Connection | None = None
        self._patience_s = BEHIND_S
        self._controller_id = -1
        self._sequence = 0
        self._committed_offset = 0
        """What answers have shown to be committed."""
        self._led: dict[PartitionKey, int] = {}
        self._led_of: MetadataImage | None = None
        self._altering: set[PartitionKey] = set()
        self.wants_shutdown = False
        """It asks to be relieved of what it leads, and then stops cleanly."""
        process.after(self._random.uniform(0.01, 0.1), self.register)
        self.begin_leading()

    def begin_leading(self) -> None:
        """Begin to act as the leader of what it leads, from time to time."""
        self.process.after(self._random.uniform(0, PRODUCE_S), self._produce)

    # What it believes

    def _now_ms(self) -> float:
        return self.host.local_s() * 1_000

    def led(self) -> dict[PartitionKey, int]:
        """Return the leader epochs of the partitions that its image says it leads, whatever its lease says."""
        if self._led_of is not self.image:
            me = self.image.brokers.get(self.broker_id)
            mine = me is not None and me.broker_epoch == self.broker_epoch and not me.fenced
            self._led_of = self.image
            self._led = {
                (topic_id, partition.partition): partition.leader_epoch
                for topic_id, topic in self.image.topics.items()
                for partition in topic.partitions
                if mine and partition.leader == self.broker_id
            }
        return self._led

    @property
    def applied_offset(self) -> int:
        """The metadata offset up to which it acts."""
        return self.image.offset

    def has_lease(self) -> bool:
        """Return whether its lease is valid at this moment."""
        return self.lease.valid(self._now_ms())

    def sees(self, image: MetadataImage) -> None:
        """Take a committed image; an older one than it has is never acted on."""
        if image.offset <= self.image.offset:
            return
        self.simulation.invariants.image_moves(self, self.image, image)
        self.image = image
        self.simulation.invariants.beliefs_changed(self)

    # Registration and heartbeats

    def register(self) -> None:
        """Register this process; it tries until it is."""
        mark, self.host.clean_mark = self.host.clean_mark, None
        command = MetadataCommand(
            register_broker=records_pb2.RegisterBrokerCommand(
                broker_id=self.broker_id,
                incarnation_id=self._incarnation_id,
                host="localhost",
                port=9_000 + self.broker_id,
                directory_id=self.broker_id.to_bytes(16, "big"),
                lock_identity=self.broker_id.to_bytes(16, "big"),
                features=self.simulation.features,
                previous_broker_epoch=mark,
            )
        )
        self.vouch(command.register_broker)
        self._requester.propose(command, self.registered)

    def vouch(self, registration: records_pb2.RegisterBrokerCommand) -> None:
        """Say what is known of the records that an earlier process acknowledged: nothing, without logs."""

    def registered(self, answer: Committed) -> None:
        """Take the outcome of the registration."""
        if isinstance(answer.outcome, CommandResult):
            if self.broker_epoch != answer.outcome.broker_epoch:
                self.lease.revoke()
            self.broker_epoch = answer.outcome.broker_epoch
            self._committed_offset = max(self._committed_offset, self.broker_epoch)  # it is its registration's
            self._led_of = None
            self.simulation.trace(self.host, f"registered with broker epoch {self.broker_epoch}")
            self.begin_heartbeats()
        else:
            assert isinstance(answer.outcome, RaftlogError)
            self.process.after(0.3, self.register)

    def begin_heartbeats(self) -> None:
        """Send heartbeats from now on."""
        self.process.after(0, self._beat)

    def _beat(self) -> None:
        self.process.after(
            HEARTBEAT_S if self.has_lease() else EAGER_HEARTBEAT_S * self._random.uniform(0.8, 1.2), self._beat
        )
        self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Send one now."""
        if self._heartbeats is None:
            self._open_heartbeats()
        if self._heartbeats is not None:
            self._sequence += 1
            self.lease.sent(self._sequence, self._now_ms())
            self._heartbeats.send(
                Heartbeat(self.broker_id, self.broker_epoch, self._sequence, self.applied_offset, self.wants_shutdown)
            )

    def _open_heartbeats(self) -> None:
        target = self._controller_id if self._controller_id >= 0 else self._random.choice(self.simulation.voters)
        self._controller_id = -1
        voter = self.simulation.voter_on(target)
        connection = None if voter is None else self.simulation.network.connect(self.process, voter.process)
        if connection is None or voter is None:
            return
        controller = voter.controller
        connection.acceptor_hears(
            lambda heartbeat: controller.heartbeat(connection, heartbeat),
            lambda: controller.stream_closed(connection),
        )
        connection.opener_hears(
            lambda answer: self._answered(connection, answer), lambda: self._lost_heartbeats(connection)
        )
        self._heartbeats = connection
        self.process.after(1.0, self._check_answers, connection, self._sequence)

    def _check_answers(self, connection: Connection, sequence: int) -> None:
        """Go elsewhere if nothing has been heard on a connection for a second."""
        if self._heartbeats is connection:
            if self.lease.expires_at_ms < self._now_ms() and sequence < self._sequence:
                connection.break_now()
                self._lost_heartbeats(connection)
            else:
                self.process.after(1.0, self._check_answers, connection, self._sequence)

    def _answered(self, connection: Connection, answer: HeartbeatAnswer) -> None:
        self._committed_offset = max(self._committed_offset, answer.metadata_offset)
        if answer.lease_ms:
            self.lease.granted(answer.sequence, answer.lease_ms, self._now_ms())
            self.simulation.invariants.beliefs_changed(self)
        if answer.replaced:  # by a registration of an earlier life that was under way for long, for example
            self.lease.revoke()
            self.simulation.scheduler.after(RESTART_S, self.host.boot)
            self.host.stop("ends: a later registration of this broker is committed")
            raise ProcessGone
        if answer.may_shut_down and self.wants_shutdown:
            self.lease.revoke()
            self.leave()
            raise ProcessGone
        if not answer.active and self._heartbeats is connection:
            self._controller_id = answer.hint
            connection.break_now()
            self._lost_heartbeats(connection)

    def leave(self) -> None:
        """Stop cleanly."""
        self.host.clean_mark = self.broker_epoch
        self.host.stop("stops cleanly")

    def _lost_heartbeats(self, connection: Connection) -> None:
        if self._heartbeats is connection:
            self._heartbeats = None

    # Watching, on a host without a voter

    def watch(self) -> None:
        """Follow the images of some controller."""
        voter = self.simulation.voter_on(self._random.choice(self.simulation.voters))
        connection = None if voter is None else self.simulation.network.connect(self.process, voter.process)
        if connection is None or voter is None:
            self.process.after(0.2, self.watch)
            return
        watching = connection

        def lost() -> None:
            if self._watch is watching:
                self._watch = None
                self.process.after(self._random.uniform(0.01, 0.2), self.watch)

        def begin(_: object) -> None:
            voter.watchers.append(watching.answer)
            watching.answer(voter.image)

        def stop() -> None:
            if watching.answer in voter.watchers:
                voter.watchers.remove(watching.answer)

        watching.acceptor_hears(begin, stop)
        watching.opener_hears(self.sees, lost)
        watching.send(None)
        self._watch = watching
        self.process.after(self._patience_s, self._leave_who_is_behind, watching, self._committed_offset)

    def _leave_who_is_behind(self, watching: Connection, committed_offset: int) -> None:
        """Watch another controller if this one has not shown for a while what is known to be committed.

        As `raftmeta.quorum.observed_metadata` does.
        """
        if self._watch is not watching:
            return
        if self.image.offset >= committed_offset:
            self._patience_s = BEHIND_S
            self.process.after(BEHIND_S, self._leave_who_is_behind, watching, self._committed_offset)
        else:
            self._patience_s = min(2 * self._patience_s, MOST_BEHIND_S)
            self._watch = None
            watching.break_now()
            self.watch()

    # Leading

    def _produce(self) -> None:
        self.process.after(PRODUCE_S * self._random.uniform(0.5, 1.5), self._produce)
        if not self.simulation.parts.checks_lease and self.led():
            self._acknowledge(*self._random.choice(sorted(self.led().items())))
        if not self.has_lease() or not self.led():
            return
        key, leader_epoch = self._random.choice(sorted(self.led().items()))
        if self._random.random() < ALTER_SHARE and key not in self._altering:
            if metadata_version(self.image) >= ALTER_PARTITIONS_LEVEL and self._random.random() < BATCH_SHARE:
                self._alter_many(sorted(self.led().keys() - self._altering))
            else:
                self._alter(key)
        else:
            self.process.after(self._random.choice((0.001, 0.02, 0.4)), self._acknowledge, key, leader_epoch)

    def _acknowledge(self, key: PartitionKey, leader_epoch: int) -> None:
        """The records appended in `leader_epoch` are on the ISR's disks: answer, unless the lease has expired."""
        if self.led().get(key) == leader_epoch and (self.has_lease() or not self.simulation.parts.checks_lease):
            self.simulation.invariants.acknowledges(self, key, leader_epoch)

    def _alter(self, key: PartitionKey) -> None:
        command = MetadataCommand(alter_partition=self._alter_command(key))
        self._altering.add(key)
        self._requester.propose(command, lambda _: self._altering.discard(key))

    def _alter_many(self, keys: list[PartitionKey]) -> None:
        """Change many ISRs in one command: some changes are of an earlier epoch, some partitions are named twice."""
        command = records_pb2.AlterPartitionsCommand(broker_id=self.broker_id, broker_epoch=self.broker_epoch)
        for key in (*keys, *(each for each in keys if self._random.random() < DOUBLE_SHARE)):
            one = self._alter_command(key)
            late = self._random.random() < LATE_SHARE
            command.alterations.add(
                topic_id=one.topic_id,
                partition=one.partition,
                leader_epoch=one.leader_epoch - (late and self._random.random() < 0.5),
                partition_epoch=one.partition_epoch - late,
                new_isr=one.new_isr,
            )
        self._altering.update(keys)

        def done(answer: Committed) -> None:
            self._altering.difference_update(keys)
            if isinstance(answer.outcome, CommandResult):
                self.simulation.invariants.batch_answered(command, answer.outcome)

        self._requester.propose(MetadataCommand(alter_partitions=command), done)

    def _alter_command(self, key: PartitionKey) -> records_pb2.AlterPartitionCommand:
        partition = self.image.partition(*key)
        assert partition is not None
        members = {self.broker_id, *(each for each in partition.replicas if self._random.random() < 0.7)}
        return records_pb2.AlterPartitionCommand(
            broker_id=self.broker_id,
            broker_epoch=self.broker_epoch,
            topic_id=key[0],
            partition=key[1],
            leader_epoch=partition.leader_epoch,
            partition_epoch=partition.partition_epoch,
            new_isr=[
                records_pb2.IsrMember(broker_id=each, broker_epoch=self.image.brokers[each].broker_epoch)
                for each in sorted(members)
                if each in self.image.brokers
            ],
        )
