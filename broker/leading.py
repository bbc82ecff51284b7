"""A partition on its leader, for one leader epoch: what its followers hold, the high watermark, and who is answered.

What has to be decided is decided in `replication.leader`; here is what follows from it for the log, the producers that
wait, the readers, and the streams of the followers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from broker.clock import Clock
from broker.flushing import Flushing
from broker.lease import Lease
from broker.log.partition_log import PartitionLog, ReadResult
from raftlog.errors import FencedLeaderEpoch, InvalidRequestError, NotEnoughReplicas, NotEnoughReplicasAfterAppend
from replication.divergence import check_prefix
from replication.isr import IsrChange, Pending
from replication.leader import LeaderState, Membership, ReplicaView
from replication.pending_acks import Answer, PendingAcks
from replication.ports import Accepted, Opening, Replica, Wake

MAX_DENIED: Final = 10_000
"""Producers of a partition of which a refusal is remembered: each has lost a batch within this term."""


class Acks:
    """Who waits for an answer to a produce: `held` with acks=1, `committed` with acks=all."""

    __slots__ = ("committed", "held")

    def __init__(self) -> None:
        self.held = PendingAcks()
        self.committed = PendingAcks()

    def fail(self, error: BaseException) -> None:
        """Answer everyone with `error`."""
        self.held.fail(error)
        self.committed.fail(error)


class Leading:
    """One term. Made by `Partition.lead`, ended by `end`; then it answers nobody any more.

    Nothing is answered, and the high watermark of the log does not move, without a lease: without one somebody else
    may lead already. What followers hold is counted all the same.
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
        self._log = log
        self._flushing = flushing
        self._clock = clock
        self._lease = lease
        self._acks = acks
        self._wake_readers = wake_readers
        self._streams: dict[Wake, Replica] = {}
        self._wake_of: dict[int, Wake] = {}
        self._over = False
        self._denied: dict[int, int] = {}
        """Producer id to the epoch of it that has been told that a batch is not in the log."""
        self.offline: frozenset[int] = frozenset()
        """Whose replicas have no working log, as the metadata said last."""
        held = flushing.held_end_offset
        self.state = LeaderState(
            leader_id=leader_id,
            leader_epoch=leader_epoch,
            epoch_start_offset=log.log_end_offset,
            log_end_offset=log.log_end_offset,
            held_end_offset=held,
            high_watermark=min(log.high_watermark, held),
            membership=membership,
            now_ms=clock.monotonic_ms(),
            lag_time_max_ms=lag_time_max_ms,
        )
        self._alone = len(membership.replicas) == 1
        self.has_enough_in_sync = self.state.has_enough_in_sync
        """Whether acks=all may be appended; changes with the membership only."""

    def begin(self) -> None:
        """Count what is there already, and have flushed what is not."""
        self._flushing.catch_up()
        self.advance()

    def end(self) -> None:
        """End the term: the followers' streams look for themselves what comes now."""
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
        """Whether a batch that is not in this log cannot turn up in it later, when another replica has led meanwhile.

        That takes more than a confirmed term: where nothing is uncommitted it is confirmed at once, and a member of
        the ISR may have more all the same. With too few in sync replicas outside of the ISR may be elected.
        """
        return self.has_confirmed and self.has_enough_in_sync and self.state.has_heard_all_in_sync

    def deny(self, producer_id: int, producer_epoch: int) -> None:
        """Keep a refusal true: nothing more of this epoch of the producer is appended in this term.

        The producer numbers anew, in its next epoch, what it has not heard of. A late copy of what was missing would
        let late copies of all that followed in as well, beside what is numbered anew. Copies that come in a later term
        name this one's leader epoch, and are refused for that.
        """
        denied = self._denied
        denied[producer_id] = max(producer_epoch, denied.pop(producer_id, -1))
        if len(denied) > MAX_DENIED:
            del denied[next(iter(denied))]

    def has_denied(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether this epoch of the producer, or a later one, was told so in this term."""
        return producer_epoch <= self._denied.get(producer_id, -1)

    def advance(self) -> None:
        """Move the high watermark to where the state has it, and answer who has waited for that; under a lease."""
        high_watermark, held = self.state.high_watermark, self.state.held_end_offset
        moves = high_watermark > self._log.high_watermark
        if self._over or not (moves or len(self._acks.held)):
            return
        if not self._lease.valid():
            self._lease.call_when_renewed(self.advance)
            return
        if moves:
            self._log.high_watermark = high_watermark
            self._acks.committed.advance(high_watermark)
        self._acks.held.advance(held)
        if moves:
            self._wake_readers()
            self.wake_streams()

    def wake_streams(self) -> None:
        """Have the followers' streams look what has changed."""
        for wake in tuple(self._streams):
            wake()

    def update_membership(self, membership: Membership) -> None:
        """Take over newer metadata of this leader epoch.

        With fewer in sync than min.insync.replicas the produces with acks=all that are not committed yet end here:
        nobody knows when there will be enough again.
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
        """Return the refusal of a produce with acks=all that too few could hold."""
        return NotEnoughReplicas(
            f"{self._name}: {self._in_sync()}, acks=all needs "
            f"min.insync.replicas={self.state.membership.min_insync_replicas}"
        )

    def _in_sync(self) -> str:
        count = len(self.state.isr)
        return f"{count} replica is in sync" if count == 1 else f"{count} replicas are in sync"

    def appended(self, log_end_offset: int, answer: Answer | None, *, all_replicas: bool) -> None:
        """Go on from an append: who waits for it, the flush, the followers."""
        if answer is not None:
            (self._acks.committed if all_replicas else self._acks.held).wait(log_end_offset, answer)
        if self._alone:  # nobody needs to know before it is held
            if self._flushing.appended():
                self.held()
            return
        self.state.appended(log_end_offset, self._clock.monotonic_ms())
        if self._flushing.appended():
            self.held()
        if self._streams:
            self.wake_streams()

    def repeated(self, end_offset: int, answer: Answer, *, all_replicas: bool) -> None:
        """Owe an answer for what was appended before; at once, where it is held as asked already."""
        reached = self._log.high_watermark if all_replicas else self._flushing.held_end_offset
        if end_offset <= reached:
            answer(None)
        else:
            (self._acks.committed if all_replicas else self._acks.held).wait_again(end_offset, answer)

    def held(self) -> None:
        """Count what the leader itself holds now."""
        now_ms = self._clock.monotonic_ms()
        self.state.appended(self._log.log_end_offset, now_ms)
        self.state.held(self._flushing.held_end_offset, now_ms)
        self.advance()

    # Followers

    def open_replica(
        self,
        replica: Replica,
        fetch_offset: int,
        last_fetched_epoch: int,
        held_end_offset: int,
        on_change: Wake,
    ) -> Opening:
        """See `replication.ports.LedPartition.open_replica`; the leader epoch has been compared."""
        log, state, now_ms = self._log, self.state, self._clock.monotonic_ms()
        replicas = state.membership.replicas
        if replica.broker_id not in replicas or replica.broker_id == state.leader_id:
            raise InvalidRequestError(
                f"{self._name}: broker {replica.broker_id} is no follower, the replicas are {list(replicas)} and "
                f"{state.leader_id} leads"
            )
        if not 0 <= held_end_offset <= fetch_offset:
            raise InvalidRequestError(
                f"{self._name}: broker {replica.broker_id} cannot hold {held_end_offset} of a log that ends at "
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
            state.opened(replica, held_end_offset, now_ms)
            former = self._wake_of.get(replica.broker_id)
            if former is not None and former != on_change:
                del self._streams[former]
                former()
            self._streams[on_change] = replica
            self._wake_of[replica.broker_id] = on_change
            self.advance()
        return opening

    def close_replica(self, replica: Replica, on_change: Wake) -> None:
        """Forget a stream, if it is still the follower's."""
        if self._streams.get(on_change) == replica:
            del self._streams[on_change]
            del self._wake_of[replica.broker_id]
            self.state.closed(replica)

    def replicas_offline(self, broker_ids: frozenset[int]) -> None:
        """Forget what those held who are offline only now, and end their streams' subscriptions.

        Only now: a replica begins anew with an empty log while the mark is still there, and then counts as it grows.
        """
        lost, self.offline = broker_ids - self.offline, broker_ids
        for broker_id in lost:
            self.state.forget(broker_id)
            wake = self._wake_of.pop(broker_id, None)
            if wake is not None:
                del self._streams[wake]
                wake()

    def check_open(self, on_change: Wake) -> Replica:
        """Return whose stream this is.

        Raises:
            FencedLeaderEpoch: it was not opened in this epoch, or another one has taken over.
        """
        replica = self._streams.get(on_change)
        if replica is None:
            raise FencedLeaderEpoch(
                f"{self._name}: not open on this stream in leader epoch {self.leader_epoch}; open it again"
            )
        return replica

    def replica_held(self, replica: Replica, on_change: Wake, held_end_offset: int) -> None:
        """Count what a follower holds."""
        if self.check_open(on_change) != replica:
            raise FencedLeaderEpoch(f"{self._name}: opened by another broker, or in an earlier life; open it again")
        self.state.acked(replica, held_end_offset, self._clock.monotonic_ms())
        self.advance()

    def read_for_replica(self, on_change: Wake, offset: int, max_bytes: int, *, blocking: bool) -> ReadResult | None:
        """Read up to the log end; may run in a thread."""
        self.check_open(on_change)
        return self._log.read(offset, max_bytes, self._log.log_end_offset, blocking=blocking)

    def progress(self) -> tuple[ReplicaView, ...]:
        """Return how far every replica is, the leader first."""
        now_ms = self._clock.monotonic_ms()
        self.state.appended(self._log.log_end_offset, now_ms)
        return self.state.progress(now_ms)

    # The ISR

    def wanted_isr(self, active: Mapping[int, int]) -> IsrChange | None:
        """Return the change that the controller is to be asked for now, counted from this moment on."""
        if self._alone or self._lacks_nothing():
            return None
        now_ms = self._clock.monotonic_ms()
        change = self.state.wanted_isr(active, now_ms)
        if change is not None:
            self.state.proposed(change)
        return change

    def _lacks_nothing(self) -> bool:
        """Whether every replica is in sync, open, and holds everything: the ISR is as it should be; a quick look."""
        state = self.state
        return (
            state.high_watermark == state.log_end_offset
            and state.isr_is_whole
            and len(self._wake_of) == len(state.membership.replicas) - 1
            and state.pending is Pending.NONE
        )

    def isr_answered(self, change: IsrChange, error: BaseException | None) -> None:
        """Take the controller's answer; an answer to an earlier term says nothing here."""
        if change.leader_epoch == self.leader_epoch and not self._over:
            self.state.answered(change, error)
            self.advance()

    @property
    def _name(self) -> str:
        return f"{self._log.topic}-{self._log.partition}"
