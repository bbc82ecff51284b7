"""Further faults: those of logs, and an operator's interventions in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raftlog.format import HEADER_BYTES, parse_header
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.image import NO_LEADER
from tests.simulation.dataplane.clients import partitions_of
from tests.simulation.dataplane.disk import LogDisk
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.fault_maker import FaultMaker
from tests.simulation.faults import SICK_DISK_S, Faults
from tests.simulation.process import Host

if TYPE_CHECKING:
    from tests.simulation.dataplane.schedule import DataSimulation

SLOW_SYNC_S = ((0.02, 0.05), (0.1, 0.4), (0.001, 1.0), (0.5, 3.0))


class DataFaults(Faults):
    """Faults of the quorum's schedules, and these."""

    def __init__(self, simulation: DataSimulation) -> None:
        super().__init__(simulation)
        self._data = simulation
        kinds = [
            (self._slow_log, 4.0),
            (self._full_log, 1.0),
            (self._broken_log, 1.0),
            (self._die_in_log, 3.0),
            (self._cut_power_of_brokers, 1.5),
            (self._part_brokers, 3.0),
            (self._reassign, 1.5),
            (self._delete_records, 1.5),
            (self._elect_preferred, 1.0),
            (self._rot, 1.5),
            (self._flip, 1.0),
        ]
        self._kinds += kinds
        self._weights += [weight * (self._random.random() < 0.7) for _, weight in kinds]
        # These are about the quorum alone, which has schedules of its own.
        for number, (fault, _) in enumerate(self._kinds):
            if fault in (self._wipe, self._broken_disk, self._old_leader_returns):
                self._weights[number] = 0
        if not any(self._weights):
            self._weights[0] = 1.0
        self._mean_pause_s = self._random.choice((0.4, 0.8, 1.5))

    def _heal(self, host: Host) -> None:
        if host.log_disk is not None and host.log_disk.storage.faults:
            host.stop("gets another disk")
            host.log_disk.process_died(with_machine=True)  # if there was none
        super()._heal(host)

    @staticmethod
    def _fail_disks(host: Host) -> None:
        FaultMaker._fail_disks(host)
        if host.log_disk is not None:
            host.log_disk.mend()  # a full one would refuse what is to fail: its broker goes on leading
            host.log_disk.break_now()

    def _pick_broker(self) -> Host:
        """Pick a broker, one that leads something more often than others."""
        leaders = [partition.leader for _, partition in partitions_of(self._simulation.invariants.truth)]
        leaders = [leader for leader in leaders if leader != NO_LEADER]
        if leaders and self._random.random() < 0.5:
            return self._simulation.host(self._random.choice(leaders))
        return self._simulation.host(self._random.choice(self._simulation.broker_ids))

    def _pick(self) -> Host:
        return self._pick_broker() if self._random.random() < 0.7 else super()._pick()

    @staticmethod
    def _mend(host: Host) -> None:
        Faults._mend(host)
        if host.log_disk is not None and not host.log_disk.storage.faults:
            host.log_disk.mend()

    def _slow_log(self) -> None:
        host = self._pick_broker()
        assert host.log_disk is not None
        self._trace(host, "slow-log")
        host.log_disk.sync_s = self._random.choice(SLOW_SYNC_S)
        self._after(self._random.choice(SICK_DISK_S), self._mend, host)

    def _full_log(self) -> None:
        host = self._pick_broker()
        assert host.log_disk is not None
        self._trace(host, "full-log")
        host.log_disk.fill()
        self._after(self._random.choice(SICK_DISK_S), self._mend, host)

    def _broken_log(self) -> None:
        """Syncs fail; after a while the machine restarts with a disk that works."""
        host = self._pick_broker()
        assert host.log_disk is not None
        self._trace(host, "broken-log")
        host.log_disk.break_now()
        self._after(self._random.choice(SICK_DISK_S), host.stop, "gets another disk")

    def _die_in_log(self) -> None:
        host = self._pick_broker()
        assert host.log_disk is not None
        self._trace(host, "dying-in-log within one of its next operations")
        host.log_disk.die_after(self._random.randrange(12))

    def _rot(self) -> bool:
        """Let a log lose records that were synced, or its whole directory, while its machine is off."""
        whole = self._random.random() < 0.3

        def lose(disk: LogDisk, key: PartitionKey, path: str) -> bool:
            if whole:
                disk.lose_directory(path.rpartition("/")[0])
            else:
                disk.lose_half(path)
            return True

        return self._spoil("rotten", lose)

    def _flip(self) -> bool:
        """Change a byte of a log that the next start reads: above the recovery point.

        Readers and the scrub find changed bytes below it; their tests are in tests/unit/broker/log.
        """
        share = self._random.random()

        def flip(disk: LogDisk, key: PartitionKey, path: str) -> bool:
            data, recovery_point, position = disk.storage.content(path), disk.recovery_point(key), 0
            while len(data) - position >= HEADER_BYTES:
                header = parse_header(data, position)
                if header.base_offset >= recovery_point:
                    disk.flip(path, position, share)
                    return True
                position += header.size
            return False

        return self._spoil("corrupt", flip)

    def _spoil(self, what: str, spoil: Callable[[LogDisk, PartitionKey, str], bool]) -> bool:
        """Harm the log of a replica that does not count towards the high watermark.

        A replica that counts may have the only copy of a record, and only one fault at a time is survived there. One
        that holds everything committed may count before the metadata show it, as its leader may have proposed it.
        """
        found = [
            (key, node_id)
            for key, partition in partitions_of(self._simulation.invariants.truth)
            for node_id in partition.replicas
            if node_id not in partition.isr and node_id not in partition.eligible_leader_replicas
            if self._data.ledger.lacks_committed(key, node_id)
        ]
        if not found:
            return False
        key, node_id = self._random.choice(found)
        host, log = self._simulation.host(node_id), self._data.ledger.log_of(key, node_id)
        assert log is not None, "the replica that lacks committed records has no log"
        assert host.log_disk is not None
        was_alive = host.alive
        host.stop(f"off, and {key[0].hex()[:4]}-{key[1]} is {what}", power=self._random.random() < 0.5)
        path = log.segments[-1].log_path
        return was_alive and host.log_disk.storage.exists(path) and spoil(host.log_disk, key, path)

    def _cut_power_of_brokers(self) -> bool:
        self._trace(None, "powerless-brokers, all of them")
        hosts = [self._simulation.host(node_id) for node_id in self._simulation.broker_ids]
        return sum(self._stop(host, "powerless with all brokers", power=True) for host in hosts) > 0

    def _part_brokers(self) -> bool:
        """Cut two brokers off from one another; both still hear the quorum, as far as that is elsewhere."""
        one, other = self._random.sample(self._simulation.broker_ids, 2)
        paths = [(one, other), (other, one)]
        return self._cut(paths if self._random.random() < 0.6 else paths[:1], "part-brokers")

    def _reassign(self) -> bool:
        found = list(partitions_of(self._simulation.invariants.truth))
        if not found:
            return False
        key, partition = self._random.choice(found)
        topic = self._simulation.invariants.truth.topics[key[0]]
        count = len(partition.replicas) - len(partition.adding_replicas)
        wanted = self._random.sample(self._simulation.broker_ids, min(count, len(self._simulation.broker_ids)))
        if self._random.random() < 0.2:
            wanted = []
        self._trace(None, f"reassigns {topic.name}-{key[1]} from {partition.replicas} to {wanted}")
        self._data.propose(
            MetadataCommand(
                alter_reassignments=records_pb2.AlterReassignmentsCommand(
                    topic=topic.name, partition=key[1], replicas=wanted
                )
            )
        )
        return True

    def _delete_records(self) -> bool:
        found = [entry for entry in partitions_of(self._simulation.invariants.truth) if entry[1].leader != NO_LEADER]
        if found:
            key, partition = self._random.choice(found)
            end = self._data.ledger.of(key).end
            before_offset = self._random.choice((-1, end // 2, max(0, end - 5)))
            self._trace(None, f"deletes-records of {key[0].hex()[:4]}-{key[1]} before {before_offset}")
            self._data.deleter.delete(key, partition.leader, before_offset)
        return bool(found)

    def _elect_preferred(self) -> bool:
        refs = [
            records_pb2.PartitionRef(topic_id=key[0], partition=key[1])
            for key, _ in partitions_of(self._simulation.invariants.truth)
        ]
        if refs:
            self._trace(None, "elects-preferred")
            elect = records_pb2.ElectLeadersCommand(partitions=refs, type=records_pb2.ElectLeadersCommand.PREFERRED)
            self._data.propose(MetadataCommand(elect_leaders=elect))
        return bool(refs)
