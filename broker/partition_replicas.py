"""What the followers of a partition, and the controller, hear from it while this broker leads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from broker.leading import Leading
from broker.log.partition_log import ReadResult
from broker.partition_roles import PartitionRoles
from raftlog.errors import CorruptRecordError, InvalidRequestError
from replication.isr import IsrChange
from replication.leader import ReplicaView
from replication.ports import Opening, Replica, Wake


class PartitionDescription(NamedTuple):
    """What a leader knows of its replicas, its own first."""

    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    replicas: tuple[ReplicaView, ...]


class LedReplicas(PartitionRoles):
    """Implements `replication.ports.LedPartition`."""

    # Followers

    def open_replica(
        self,
        replica: Replica,
        *,
        leader_epoch: int,
        fetch_offset: int,
        last_fetched_epoch: int,
        held_end_offset: int,
        on_change: Wake,
    ) -> Opening:
        """Take a follower on, if its log is a prefix of this one; see the port."""
        if leader_epoch < 0:
            raise InvalidRequestError(
                f"{self.topic_partition}: a follower knows its leader epoch, {leader_epoch} is none"
            )
        self.check_leader_epoch(leader_epoch)
        opening = self._led().open_replica(replica, fetch_offset, last_fetched_epoch, held_end_offset, on_change)
        self._look_at_isr(replica)
        return opening

    def close_replica(self, replica: Replica, on_change: Wake) -> None:
        """Forget the stream of `on_change`."""
        if self._leading is not None:
            self._leading.close_replica(replica, on_change)

    def check_open(self, on_change: Wake) -> None:
        """Check that a stream was opened in this epoch, and no other one has taken over; see the port."""
        self._led().check_open(on_change)

    def replica_held(self, replica: Replica, on_change: Wake, held_end_offset: int) -> None:
        """Count what a follower holds durably; see the port."""
        self._led().replica_held(replica, on_change, held_end_offset)
        self._look_at_isr(replica)

    def read_for_replica(self, on_change: Wake, offset: int, max_bytes: int, *, blocking: bool) -> ReadResult | None:
        """Return whole batches from `offset` up to the log end; see the port. May run in a thread."""
        try:
            read = self._led().read_for_replica(on_change, offset, max_bytes, blocking=blocking)
        except CorruptRecordError:
            self._host.on_suspicion(self.log, offset)
            raise
        if read is not None:
            self._host.count_replicated(0, len(read.records))
        return read

    def replicas_offline(self, broker_ids: frozenset[int]) -> None:
        """Take note whose replicas have no working log, by the metadata: what they held is forgotten."""
        if self._leading is not None:
            self._leading.replicas_offline(broker_ids)

    @property
    def has_offline_replicas(self) -> bool:
        """Whether replicas were said to be offline last."""
        return self._leading is not None and bool(self._leading.offline)

    def suspect(self, offset: int) -> None:
        """Have the log checked at an offset: somebody got a batch there that does not check. Returns at once."""
        if self._closed_by is None:
            self._host.on_suspicion(self.log, offset)

    @property
    def held_by_all(self) -> int:
        """Exclusive: what is on the disk of every assigned replica; 0: not known, or this broker does not lead."""
        return 0 if self._leading is None else self._leading.state.held_by_all

    def is_live(self, broker_id: int) -> bool:
        """Whether a follower is in the ISR."""
        return self._leading is not None and broker_id in self._leading.state.isr

    def _led(self) -> Leading:
        if self._leading is None:
            assert self.refused_by is not None, "who does not lead refuses"
            raise self.refused_by
        return self._leading

    # The ISR, while this broker leads

    def _look_at_isr(self, replica: Replica) -> None:
        if self._leading is not None and replica.broker_id not in self._leading.state.isr:
            self._host.on_isr_wish(self)

    def wanted_isr(self, active: Mapping[int, int]) -> IsrChange | None:
        """Return the change of the ISR that the controller is to be asked for now; it counts as asked for from then on.

        `active`: broker epochs by broker id, of brokers neither fenced nor shutting down.
        """
        return None if self._leading is None else self._leading.wanted_isr(active)

    def isr_answered(self, change: IsrChange, error: BaseException | None) -> None:
        """Take the controller's answer; None: granted."""
        if self._leading is not None:
            self._leading.isr_answered(change, error)

    def describe_replicas(self) -> PartitionDescription:
        """Return what this leader knows of its replicas.

        Raises:
            NotLeader: or the reason why this partition is closed.
        """
        progress = self._led().progress()
        return PartitionDescription(
            self.leader_epoch, self.log_start_offset, self.high_watermark, self.log_end_offset, progress
        )

    @property
    def isr(self) -> frozenset[int]:
        """The committed ISR, as this leader knows; empty while another broker leads."""
        return frozenset() if self._leading is None else self._leading.state.isr

    def follower_lags(self) -> list[tuple[int, int]]:
        """Return (broker id, records it lacks) of each follower; none while another broker leads. For any thread."""
        leading = self._leading
        return [] if leading is None else leading.state.follower_lags()

    def nearer_replica(self, nearby: Collection[int]) -> int | None:
        """Return a follower among `nearby` that is in sync and has every committed record (KIP-392), or None."""
        if self._leading is None or self._host.node_id in nearby:
            return None
        for replica in self._leading.progress():
            if replica.in_sync and replica.broker_id in nearby and replica.held_end_offset >= self.high_watermark:
                return replica.broker_id
        return None

    def log_start_moved(self) -> None:
        """Tell the followers that the log start has moved, and readers who wait below it."""
        if self._leading is not None:
            self._leading.wake_streams()
            self._wake()
