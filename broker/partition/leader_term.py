"""A partition on its leader, for one leader epoch: followers, high watermark, and answers to produces.

`replication.leader` decides; this module applies its decisions to the log, the waiting produces, the readers and the
streams of the followers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Final

from broker.clock import Clock
from broker.log.flush import Flushing
from broker.log.partition_log import PartitionLog, ReadResult
from broker.server.lease import Lease
from raftlog.errors import FencedLeaderEpoch, InvalidRequestError, NotEnoughReplicas, NotEnoughReplicasAfterAppend
from replication.high_watermark import Answer, PendingAcks
from replication.isr import IsrChange, Pending
from replication.leader import LeaderState, Membership, ReplicaView
from replication.leader_epochs import check_prefix
from replication.ports import Accepted, Opening, Replica, Wake

MAX_DENIED: Final = 10_000
"""Producers of a partition whose refusal is remembered; each has lost a batch within this term."""


class Acks:
    """Answers owed to produces: `durable` with acks=1, `committed` with acks=all."""

    __slots__ = ("committed", "durable")

    def __init__(self) -> None:
        self.durable = PendingAcks()
        self.committed = PendingAcks()

    def fail(self, error: BaseException) -> None:
        self.durable.fail(error)
        self.committed.fail(error)


class Leading:
    """One term. Made by `Partition.lead`; after `end` it answers no produce.

    Without a lease it answers nothing and leaves the log's high watermark where it is, because another broker may lead
    already. It goes on counting what followers hold.
    """

    def __init__(
        self,
        log: PartitionLog,
        flushing: Flushing,
        clock: Clock,
        lease: Lease,
        acks: Acks,
        *,
        leader_id: int,
        leader_epoch: int,
        membership: Membership,
        lag_time_max_ms: float,
        wake_readers: Callable[[], None],
    ) -> None:
        self.leader_epoch = leader_epoch
        self._name = f"{log.topic}-{log.partition}"
        self._log = log
        self._flushing = flushing
        self._clock = clock
        self._lease = lease
        self._acks = acks
        self._wake_readers = wake_readers
        self._streams: dict[Wake, Replica] = {}
        self._wake_of: dict[int, Wake] = {}
        self._log_starts: dict[int, int] = {}
        """Where the logs of followers start, as far as they have said on their present streams."""
        self._over = False
        self._denied: dict[int, int] = {}
        """Producer id to the producer epoch that was refused because a batch is missing."""
        self.offline: frozenset[int] = frozenset()
        """Brokers whose replicas have no working log, by the newest metadata."""
        durable = flushing.durable_end_offset
        self.state = LeaderState(
            leader_id=leader_id,
            leader_epoch=leader_epoch,
            epoch_start_offset=log.log_end_offset,
            log_end_offset=log.log_end_offset,
            durable_end_offset=durable,
            high_watermark=min(log.high_watermark, durable),
            membership=membership,
            now_ms=clock.monotonic_ms(),
            lag_time_max_ms=lag_time_max_ms,
        )
        self._alone = len(membership.replicas) == 1
        self.has_enough_in_sync = self.state.has_enough_in_sync
        """Whether produces with acks=all may be appended; changes with the membership only."""

    def begin(self) -> None:
        """Flush what an earlier role has left unflushed, and advance to what is durable already."""
        self._flushing.catch_up()
        self.advance()

    def end(self) -> None:
        """End the term; wake the followers' streams, which then see that it is over."""
        self._over = True
        self._lease.stop_waiting(self.advance)
        streams, self._streams = self._streams, {}
        self._wake_of.clear()
        for wake in streams:
            wake()

    # Marks

    @property
    def has_confirmed(self) -> bool:
        """Whether the high watermark that clients see has reached this term's start (KIP-207)."""
        return self._log.high_watermark >= self.state.epoch_start_offset

    @property
    def may_deny(self) -> bool:
        """Whether a batch that is missing in this log is missing in the log of every later leader too.

        A confirmed term alone does not prove that. If nothing is uncommitted, a term is confirmed at once, although a
        member of the ISR may have more records. With too few in sync, replicas outside of the ISR may be elected.
        """
        return self.has_confirmed and self.has_enough_in_sync and self.state.has_heard_all_in_sync

    def deny(self, producer_id: int, producer_epoch: int) -> None:
        """Remember a refusal: no further batch of this producer epoch is appended in this term.

        The producer sends its unacknowledged batches again under new numbers, in its next epoch. A late copy of the
        missing batch would let in late copies of all batches after it, so that those would be in the log twice. Copies
        that arrive in a later term carry this term's leader epoch, and are refused for that.
        """
        denied = self._denied
        denied[producer_id] = max(producer_epoch, denied.pop(producer_id, -1))
        if len(denied) > MAX_DENIED:
            del denied[next(iter(denied))]

    def has_denied(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether this producer epoch, or a later one, was passed to `deny` in this term."""
        return producer_epoch <= self._denied.get(producer_id, -1)

    def advance(self) -> None:
        """Move the log's high watermark to that of `state`, and answer the produces below it; under a lease."""
        high_watermark, durable = self.state.high_watermark, self.state.durable_end_offset
        moves = high_watermark > self._log.high_watermark
        if self._over or not (moves or len(self._acks.durable)):
            return
        if not self._lease.valid():
            self._lease.call_when_renewed(self.advance)
            return
        if moves:
            self._log.high_watermark = high_watermark
            self._acks.committed.advance(high_watermark)
        self._acks.durable.advance(durable)
        if moves:
            self._wake_readers()
            self.wake_streams()

    def wake_streams(self) -> None:
        """Tell the followers' streams that something has changed."""
        for wake in tuple(self._streams):
            wake()

    def update_membership(self, membership: Membership) -> None:
        """Adopt newer metadata of this leader epoch.

        With fewer in sync than min.insync.replicas, the waiting produces with acks=all fail: it is unknown when enough
        replicas will be in sync again.
        """
        self._alone = len(membership.replicas) == 1
        now_ms = self._clock.monotonic_ms()
        self.state.appended(self._log.log_end_offset, now_ms)
        self.state.update_membership(membership, now_ms)
        self.has_enough_in_sync = self.state.has_enough_in_sync
        self.advance()
        if not self.has_enough_in_sync and len(self._acks.committed):
            self._acks.committed.fail(
                NotEnoughReplicasAfterAppend(
                    f"{self._name}: appended, but {self._in_sync()} now and "
                    f"min.insync.replicas={membership.min_insync_replicas}; the records may yet be committed"
                )
            )
        self.wake_streams()

    # The leader's own log

    def not_enough(self) -> NotEnoughReplicas:
        """Return the error for a produce with acks=all while too few replicas are in sync."""
        return NotEnoughReplicas(
            f"{self._name}: {self._in_sync()}, acks=all needs "
            f"min.insync.replicas={self.state.membership.min_insync_replicas}"
        )

    def _in_sync(self) -> str:
        count = len(self.state.isr)
        return f"{count} replica is in sync" if count == 1 else f"{count} replicas are in sync"

    def appended(self, log_end_offset: int, answer: Answer | None, *, all_replicas: bool) -> None:
        """Continue after an append: owe the answer, ask for a flush, wake the followers' streams."""
        if answer is not None:
            (self._acks.committed if all_replicas else self._acks.durable).wait(log_end_offset, answer)
        if self._alone:  # without followers only the durable end counts
            if self._flushing.appended():
                self.on_durable()
            return
        self.state.appended(log_end_offset, self._clock.monotonic_ms())
        if self._flushing.appended():
            self.on_durable()
        if self._streams:
            self.wake_streams()

    def repeated(self, end_offset: int, answer: Answer, *, all_replicas: bool) -> None:
        """Answer a produce that is in the log already: now if it is durable as asked, else once it is."""
        reached = self._log.high_watermark if all_replicas else self._flushing.durable_end_offset
        if end_offset <= reached:
            answer(None)
        else:
            (self._acks.committed if all_replicas else self._acks.durable).wait_again(end_offset, answer)

    def on_durable(self) -> None:
        """Count what the leader itself holds durably now."""
        now_ms = self._clock.monotonic_ms()
        self.state.appended(self._log.log_end_offset, now_ms)
        self.state.flushed(self._flushing.durable_end_offset, now_ms)
        self.advance()

    # Followers

    def open_replica(
        self,
        replica: Replica,
        fetch_offset: int,
        last_fetched_epoch: int,
        durable_end_offset: int,
        on_change: Wake,
    ) -> Opening:
        """As `replication.ports.LedPartition.open_replica`; the caller has checked the leader epoch."""
        log, state, now_ms = self._log, self.state, self._clock.monotonic_ms()
        replicas = state.membership.replicas
        if replica.broker_id not in replicas or replica.broker_id == state.leader_id:
            raise InvalidRequestError(
                f"{self._name}: broker {replica.broker_id} is no follower, the replicas are {list(replicas)} and "
                f"{state.leader_id} leads"
            )
        if not 0 <= durable_end_offset <= fetch_offset:
            raise InvalidRequestError(
                f"{self._name}: broker {replica.broker_id} cannot hold {durable_end_offset} of a log that ends at "
                f"{fetch_offset}"
            )
        state.appended(log.log_end_offset, now_ms)
        start, end, epochs = log.bounds()
        opening = check_prefix(
            epochs,
            start,
            end,
            fetch_offset,
            last_fetched_epoch,
            leader_epoch=self.leader_epoch,
        )
        if isinstance(opening, Accepted):
            state.opened(replica, durable_end_offset, now_ms)
            former = self._wake_of.get(replica.broker_id)
            if former is not None and former != on_change:
                del self._streams[former]
                former()
            self._streams[on_change] = replica
            self._wake_of[replica.broker_id] = on_change
            self._log_starts.pop(replica.broker_id, None)
            self.advance()
        return opening

    def close_replica(self, replica: Replica, on_change: Wake) -> None:
        """Forget a stream, if it is still the follower's."""
        if self._streams.get(on_change) == replica:
            del self._streams[on_change]
            del self._wake_of[replica.broker_id]
            self.state.closed(replica)

    def replicas_offline(self, broker_ids: frozenset[int]) -> None:
        """Forget what replicas held that are newly offline, and end their streams' subscriptions.

        A replica that was offline already may have begun anew with an empty log, which counts as it grows.
        """
        lost, self.offline = broker_ids - self.offline, broker_ids
        for broker_id in lost:
            self.state.forget(broker_id)
            wake = self._wake_of.pop(broker_id, None)
            if wake is not None:
                del self._streams[wake]
                wake()

    def check_open(self, on_change: Wake) -> Replica:
        """Return the follower of a stream.

        Raises:
            FencedLeaderEpoch: the stream was not opened in this epoch, or another stream has replaced it.
        """
        replica = self._streams.get(on_change)
        if replica is None:
            raise FencedLeaderEpoch(
                f"{self._name}: not open on this stream in leader epoch {self.leader_epoch}; open it again"
            )
        return replica

    def replica_acked(
        self, replica: Replica, on_change: Wake, durable_end_offset: int, log_start_offset: int = 0
    ) -> None:
        if self.check_open(on_change) != replica:
            raise FencedLeaderEpoch(f"{self._name}: opened by another broker, or in an earlier life; open it again")
        self.state.acked(replica, durable_end_offset, self._clock.monotonic_ms())
        if log_start_offset:
            self._log_starts[replica.broker_id] = log_start_offset
        self.advance()

    def is_deleted_in_sync(self, offset: int) -> bool:
        """Whether every replica in sync has said that its log starts at `offset` or above."""
        if offset > self._log.log_start_offset:
            return False
        followers = self.state.isr - {self.state.leader_id}
        return offset <= 0 or all(self._log_starts.get(broker_id, 0) >= offset for broker_id in followers)

    def read_for_replica(self, on_change: Wake, offset: int, max_bytes: int, *, blocking: bool) -> ReadResult | None:
        """Return whole batches from `offset` up to the log end. May run in a thread."""
        self.check_open(on_change)
        return self._log.read(offset, max_bytes, self._log.log_end_offset, blocking=blocking)

    def progress(self) -> tuple[ReplicaView, ...]:
        """Return how far every replica is, the leader first."""
        now_ms = self._clock.monotonic_ms()
        self.state.appended(self._log.log_end_offset, now_ms)
        return self.state.progress(now_ms)

    # The ISR

    def wanted_isr(self, active: Mapping[int, int], full: Set[int] = frozenset()) -> IsrChange | None:
        """Return the change to propose to the controller now; it is pending from this call on."""
        if self._alone or self._lacks_nothing():
            return None
        now_ms = self._clock.monotonic_ms()
        change = self.state.wanted_isr(active, now_ms, full)
        if change is not None:
            self.state.proposed(change)
        return change

    def _lacks_nothing(self) -> bool:
        """Whether every replica is in sync, open, and holds everything, so that the ISR needs no change."""
        state = self.state
        return (
            state.high_watermark == state.log_end_offset
            and state.isr_is_whole
            and len(self._wake_of) == len(state.membership.replicas) - 1
            and state.pending is Pending.NONE
        )

    def isr_answered(self, change: IsrChange, error: BaseException | None) -> None:
        """Take the controller's answer; one that belongs to an earlier term is ignored."""
        if change.leader_epoch == self.leader_epoch and not self._over:
            self.state.answered(change, error)
            self.advance()
