"""Replication streams: the real sessions of both ends, over simulated connections; what the shell does with gRPC.

One stream from a follower to each broker that leads partitions of it. A message is passed on as the object that it is:
the codec has its own tests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raftlog.errors import RaftlogError, StaleBrokerEpoch, UnknownLeaderEpoch
from raftlog.format.wire import ReplicaFrame
from raftlog.v1.replication_pb2 import ReplicateRequest
from replication.follower_session import FollowerOptions, FollowerSession
from replication.leader_session import MARKS_DELAY_MS, LeaderSession, ReadDone
from replication.ports import FollowedPartition, LedPartition, Replica, Wake
from replication.token_bucket import TokenBucket
from tests.simulation.network import Connection

if TYPE_CHECKING:
    from tests.simulation.dataplane.broker import DataBroker

RECONNECT_S = (0.02, 0.2)
MAX_FRAME_BYTES = 1 << 20
RECHECK_S = 0.001
"""A deadline is looked at again no sooner than this."""


class _Pump:
    """Runs `pump` soon after `wake`, and when a deadline has come; at most once at a time."""

    def __init__(self, broker: DataBroker) -> None:
        self._broker = broker
        self._due = False
        self._deadline_ms: float | None = None

    def wake(self) -> None:
        """There may be something to send."""
        if not self._due:
            self._due = True
            self._broker.process.after(0, self._run)

    def _run(self) -> None:
        self._due = False
        self.pump()

    def wait_until(self, deadline_ms: float | None) -> None:
        """Wake at this time of the broker's clock."""
        if deadline_ms is None or (self._deadline_ms is not None and self._deadline_ms <= deadline_ms):
            return
        self._deadline_ms = deadline_ms
        delay_s = max(RECHECK_S, (deadline_ms - self._broker.now_ms()) / 1_000)
        self._broker.process.after(delay_s, self._at_deadline, deadline_ms)

    def _at_deadline(self, deadline_ms: float) -> None:
        if self._deadline_ms == deadline_ms:
            self._deadline_ms = None
        self.pump()

    def pump(self) -> None:
        """Send what there is to send."""
        raise NotImplementedError


class LeaderEnd(_Pump):
    """The leader's end of one stream."""

    def __init__(self, broker: DataBroker, connection: Connection, throttle: TokenBucket) -> None:
        super().__init__(broker)
        self._connection = connection
        self._session = LeaderSession(
            find=self._find,
            me=broker.broker_id,
            cluster_id=broker.simulation.cluster_id,
            check_replica=self._check_replica,
            wake=self.wake,
            wake_soon=lambda: self.wait_until(broker.now_ms() + MARKS_DELAY_MS),
            read_later=self._read_later,
            max_frame_bytes=MAX_FRAME_BYTES,
            throttle=throttle,
            live=broker.live,
        )
        self._over = False
        connection.acceptor_hears(self._take, self._lost)

    def _find(self, topic_id: bytes, partition: int) -> LedPartition:
        return self._broker.registry.find(topic_id, partition)

    def _check_replica(self, replica: Replica) -> None:
        known = self._broker.image.brokers.get(replica.broker_id)
        if known is None or known.broker_epoch < replica.broker_epoch:
            raise UnknownLeaderEpoch(f"broker {replica.broker_id} is not known yet with epoch {replica.broker_epoch}")
        if known.broker_epoch > replica.broker_epoch:
            raise StaleBrokerEpoch(f"broker {replica.broker_id} has registered anew, with epoch {known.broker_epoch}")

    def _read_later(
        self, partition: LedPartition, on_change: Wake, offset: int, max_bytes: int, done: ReadDone
    ) -> None:
        def read() -> object:
            return partition.read_for_replica(on_change, offset, max_bytes, blocking=True)

        def finished() -> None:
            error = future.exception()
            if error is None:
                result = future.result()
                assert result is not None, "a blocking read returned nothing"
                done(result)
            elif isinstance(error, RaftlogError):
                done(error)
            else:
                raise error

        future = self._broker.executor.submit(read)
        future.add_done_callback(lambda _: finished())

    def _take(self, request: ReplicateRequest) -> None:
        if self._over:
            return
        self._broker.touched = True
        try:
            self._session.handle(request, self._broker.now_ms())
        except RaftlogError as error:
            self._broker.simulation.trace(self._broker.host, f"ends a replication stream: {error}")
            self._connection.break_now()
            self._close()

    def _lost(self) -> None:
        self._broker.touched = True
        self._close()

    def _close(self) -> None:
        if not self._over:
            self._over = True
            self._session.close()

    def pump(self) -> None:
        """Send frames, message by message."""
        if self._over:
            return
        self._broker.touched = True
        while frames := self._session.take_frames(self._broker.now_ms()):
            self._connection.answer(frames)
        self.wait_until(self._session.next_deadline_ms(self._broker.now_ms()))


class FollowerEnd(_Pump):
    """The follower's end of the streams to one leader, one after the other."""

    def __init__(self, broker: DataBroker, leader_id: int, throttle: TokenBucket, chance: random.Random) -> None:
        super().__init__(broker)
        self._leader_id = leader_id
        self._random = chance
        self._connection: Connection | None = None
        self._connecting = False
        self.session = FollowerSession(
            me=Replica(broker.broker_id, broker.broker_epoch),
            leader_id=leader_id,
            cluster_id=broker.simulation.cluster_id,
            wake=self.wake,
            throttle=throttle,
            options=FollowerOptions(credit_bytes=broker.simulation.credit_bytes, max_frame_bytes=1 << 16),
            live=broker.live,
        )

    def pump(self) -> None:
        """Send what there is to say; connect, if there is a partition to follow."""
        self._broker.touched = True
        if self._connection is None:
            if len(self.session) and not self._connecting:
                self._connect()
            return
        now_ms = self._broker.now_ms()
        while (request := self.session.take_request(now_ms)) is not None:
            self._connection.send(request)
        self.wait_until(self.session.next_deadline_ms(now_ms))

    def _connect(self) -> None:
        self._connecting = False
        leader = self._broker.simulation.data_broker(self._leader_id)
        connection = (
            None if leader is None else self._broker.simulation.network.connect(self._broker.process, leader.process)
        )
        if connection is None or leader is None:
            self._later()
            return
        stream = connection
        stream.opener_hears(lambda frames: self._take(stream, frames), lambda: self._lost(stream))
        leader.accept_replica(stream)
        self._connection = stream
        self.session.connected(self._broker.now_ms())

    def _later(self) -> None:
        self._connecting = True
        self._broker.process.after(self._random.uniform(*RECONNECT_S), self._connect)

    def _take(self, connection: Connection, frames: Sequence[ReplicaFrame]) -> None:
        if self._connection is connection:
            self._broker.touched = True
            try:
                self.session.handle(frames, self._broker.now_ms())
            except RaftlogError as error:
                self._broker.simulation.trace(self._broker.host, f"ends its stream to {self._leader_id}: {error}")
                connection.break_now()
                self._lost(connection)
            self.wake()

    def _lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._broker.touched = True
            self._connection = None
            self.session.lost()
            self._later()


class SimFetchers:
    """Follows partitions at their leaders as the replica manager says; in place of `replication.shell.fetchers`."""

    def __init__(self, broker: DataBroker, chance: random.Random) -> None:
        self._broker = broker
        self._random = chance
        self._throttle = TokenBucket(None)
        self._ends: dict[int, FollowerEnd] = {}
        self._leader_of: dict[tuple[bytes, int], int] = {}

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Follow a partition, in the epoch that it is in."""
        key = (partition.topic_id, partition.partition)
        before = self._leader_of.get(key)
        if before is not None and before != leader_id:
            self._ends[before].session.unfollow(*key)
        self._leader_of[key] = leader_id
        end = self._ends.get(leader_id)
        if end is None:
            end = self._ends[leader_id] = FollowerEnd(self._broker, leader_id, self._throttle, self._random)
        end.session.follow(partition)
        end.wake()

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Follow it no more."""
        key = (topic_id, partition)
        leader_id = self._leader_of.pop(key, None)
        if leader_id is not None:
            self._ends[leader_id].session.unfollow(topic_id, partition)

    def endpoints_changed(self) -> None:
        """Nothing to do: hosts keep their addresses."""
