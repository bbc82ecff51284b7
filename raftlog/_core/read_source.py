"""Which replica a consumer reads a partition from: the leader, or a follower that the leader has sent it to."""

from __future__ import annotations

from typing import NamedTuple

from raftlog._core.cluster import ClusterCache
from raftlog._core.positions import PartitionState


class ReadSource(NamedTuple):
    """Where to subscribe, and the leader epoch that is believed in there."""

    node_id: int
    leader_epoch: int
    from_follower: bool


def read_source(state: PartitionState, cluster: ClusterCache, now_ms: float) -> ReadSource | None:
    """Return where to read a partition from, None when nobody leads it as far as is known.

    A follower may have given records of a later leader epoch than the metadata has told of. Whoever was leader before
    that knows nothing of them and would call them truncated: nobody leads, before the leader of that epoch is known
    (KIP-320).

    A near replica counts under the leader that named it, for as long as `NearReplica` says, while its broker is one of
    the cluster (KIP-392). Then, or after it has refused, the leader is asked again.
    """
    view = cluster.partition(state.topic_partition)
    leader = cluster.leader(*state.topic_partition)
    if view is None or leader is None or view.leader_epoch < state.last_epoch:
        return None
    near = state.near
    if near is not None and near.leader_epoch == view.leader_epoch and now_ms < near.until_ms:
        broker = cluster.brokers.get(near.node_id)
        if broker is not None and not broker.fenced:
            return ReadSource(near.node_id, view.leader_epoch, from_follower=True)
    return ReadSource(leader.broker_id, view.leader_epoch, from_follower=False)


def has_moved(state: PartitionState, source: ReadSource) -> bool:
    """Whether a subscribed partition is to be read from somewhere else than it is.

    What is subscribed at the leader stays there until a later epoch is known: who is told of an epoch before the
    metadata is must not be sent back.
    """
    if state.subscription_id is None or state.node_id == source.node_id:
        return False
    return state.near is not None or source.leader_epoch > state.leader_epoch


def leads_anew(state: PartitionState, source: ReadSource | None) -> bool:
    """Whether somebody leads whom the partition was not asked for yet: what another one refused is over (KIP-951)."""
    return source is not None and source.leader_epoch > state.leader_epoch >= 0
