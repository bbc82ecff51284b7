"""Whether two voters belong together, from what they say of themselves; pure."""

from __future__ import annotations

from raftlog.errors import InconsistentClusterId, InconsistentVoters, RaftlogError
from raftlog.v1.raft_pb2 import RaftHello


def refusal(mine: RaftHello, theirs: RaftHello) -> RaftlogError | None:
    """Return why the node that said `theirs` is not the voter it was taken for, or None.

    `mine.peer_id` is whom this node believes to talk to, or 0 to take the other's word; the message is for both logs.
    """
    me, other = mine.node_id, theirs.node_id
    if mine.cluster_id and theirs.cluster_id and mine.cluster_id != theirs.cluster_id:
        return InconsistentClusterId(
            f"controller {other} belongs to the cluster {theirs.cluster_id!r} and controller {me} to "
            f"{mine.cluster_id!r}: set the same cluster.id on both, or correct the address of one of them in "
            "controller.quorum.voters"
        )
    if mine.peer_id and mine.peer_id != other:
        return InconsistentVoters(
            f"controller {me} expected controller {mine.peer_id} at this address and found controller {other}: correct "
            "controller.quorum.voters, or node.id of the node at that address"
        )
    if theirs.peer_id and theirs.peer_id != me:
        return InconsistentVoters(
            f"controller {other} took controller {me} for controller {theirs.peer_id}: correct "
            f"controller.quorum.voters of controller {other}, or node.id of controller {me}"
        )
    if other == me:
        return InconsistentVoters(
            f"another process has node.id {me}, too: give each node an id of its own, and do not start two processes "
            "with copies of one directory"
        )
    ours, others = sorted(mine.voters), sorted(theirs.voters)
    if ours != others:
        return InconsistentVoters(
            f"controller {other} has the voters {others} and controller {me} has {ours}: name the same ones in "
            "controller.quorum.voters of all; a list is changed with `raftlog quorum set-voters` while the node is down"
        )
    if other not in ours:
        return InconsistentVoters(f"controller {other} is not one of the voters {ours} of controller {me}")
    return None


def duplicate(node_id: int) -> RaftlogError:
    """Return the refusal of a second process with the id of one that is connected."""
    return InconsistentVoters(
        f"another process with node.id {node_id} is connected and alive: give each node an id of its own, and do not "
        "start two processes with copies of one directory"
    )
