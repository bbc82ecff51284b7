"""The quorum as one voter sees it, for `describe`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from raftlog.v1.common_pb2 import QuorumInfo, QuorumObserver, QuorumVoter
from raftlog.v1.raft_pb2 import FRESH, JOINING
from raftmeta.image import MetadataImage
from raftmeta.quorum.config import Endpoint, QuorumConfig
from raftmeta.quorum.controller_plan import BrokerReport
from raftmeta.raft.node import PeerStatus, RaftNode

NOT_KNOWN = -1


class RaftView(NamedTuple):
    """A voter's own view of the Raft log. `lags`: entries that each other voter lacks, on the leader only."""

    role: str
    term: int
    leader_id: int
    commit_index: int
    last_applied: int
    last_index: int
    snapshot_index: int
    lags: dict[int, int]


def describe(
    node: RaftNode, config: QuorumConfig, image: MetadataImage, reports: Mapping[int, BrokerReport], now_ms: float
) -> QuorumInfo:
    """Return what this voter knows; lags and observers are the leader's to know."""
    info = QuorumInfo(
        cluster_id=image.cluster_id or config.cluster_id,
        answered_by=node.node_id,
        leader_id=node.leader_id,
        leader_epoch=node.term,
        commit_index=node.commit_index,
        log_start_index=node.first_index,
        log_end_index=node.last_index,
        snapshot_index=node.snapshot_index,
    )
    _describe_snapshot(info, config.directory)
    peers = node.peers()
    for voter_id in config.voter_ids:
        endpoint = config.voters.get(voter_id, Endpoint("", 0))
        if voter_id == config.node_id:
            info.voters.append(_self(node, endpoint))
        else:
            info.voters.append(_peer(node, voter_id, endpoint, peers[voter_id]))
    if node.role == "leader":
        info.observers.extend(_observers(image, reports, now_ms))
    return info


def _describe_snapshot(info: QuorumInfo, directory: str) -> None:
    if not info.snapshot_index:
        return
    try:
        found = (Path(directory) / f"raft-snapshot-{info.snapshot_index:020d}").stat()
    except OSError:
        return  # it is being replaced by a newer one
    info.snapshot_bytes = found.st_size
    info.snapshot_at_ms = found.st_mtime_ns // 1_000_000


def _self(node: RaftNode, endpoint: Endpoint) -> QuorumVoter:
    state = "leader" if node.role == "leader" else "joining" if node.voter_state in (FRESH, JOINING) else "follower"
    return QuorumVoter(
        node_id=node.node_id,
        host=endpoint.host,
        port=endpoint.port,
        state=state,
        log_end_index=node.last_index,
        lag=0 if state == "leader" else NOT_KNOWN,
        last_contact_ms=0,
    )


def _peer(node: RaftNode, voter_id: int, endpoint: Endpoint, peer: PeerStatus) -> QuorumVoter:
    leads = node.role == "leader"
    if not peer.connected:
        state = "unreachable"
    elif voter_id == node.leader_id:
        state = "leader"
    else:
        state = "joining" if peer.state in (FRESH, JOINING) else "follower"
    known = leads and peer.match_index > 0
    heard = leads or voter_id == node.leader_id  # followers exchange no messages
    return QuorumVoter(
        node_id=voter_id,
        host=endpoint.host,
        port=endpoint.port,
        state=state,
        log_end_index=peer.match_index if known else NOT_KNOWN,
        lag=max(0, node.last_index - peer.match_index) if known else NOT_KNOWN,
        last_contact_ms=int(peer.last_contact_s * 1_000) if heard and peer.last_contact_s is not None else NOT_KNOWN,
    )


def _observers(image: MetadataImage, reports: Mapping[int, BrokerReport], now_ms: float) -> list[QuorumObserver]:
    found = []
    for broker_id, broker in sorted(image.brokers.items()):
        report = reports.get(broker_id)
        heard = report is not None and report.broker_epoch == broker.broker_epoch
        found.append(
            QuorumObserver(
                broker_id=broker_id,
                applied_offset=report.applied_offset if report is not None and heard else NOT_KNOWN,
                lag=max(0, image.offset - report.applied_offset) if report is not None and heard else NOT_KNOWN,
                fenced=broker.fenced,
                last_heartbeat_ms=int(now_ms - report.heard_ms) if report is not None and heard else NOT_KNOWN,
            )
        )
    return found
