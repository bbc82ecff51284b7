"""Whether two voters belong to one quorum, by their hellos; pure.

Data from a peer is checked for size before it is compared, sorted, sent or logged.
"""

from __future__ import annotations

from typing import Final

from raftlog.errors import InconsistentClusterId, InconsistentVoters, InvalidRequestError, RaftlogError
from raftlog.v1.raft_pb2 import RaftHello
from raftmeta.raft.messages import MAX_TERM

MAX_VOTERS: Final = 7
MAX_CLUSTER_ID_BYTES: Final = 255
MAX_SHOWN: Final = 80
MAX_REASON: Final = 1_000
"""Characters of a peer's reason that are passed on."""


def refusal(mine: RaftHello, theirs: RaftHello) -> RaftlogError | None:
    """Return why the node that sent `theirs` is not the expected voter, or None.

    `mine.peer_id` is the expected node, or 0 to accept any voter; both nodes log the message.
    """
    me, other = mine.node_id, theirs.node_id
    if len(theirs.voters) > max(MAX_VOTERS, len(mine.voters)):
        return InconsistentVoters(
            f"controller {other} has {len(theirs.voters)} voters and controller {me} has {len(mine.voters)}: name the "
            "same ones in controller.quorum.voters of all"
        )
    if theirs.current_term > MAX_TERM:
        return InvalidRequestError(
            f"controller {other} says that it is in term {theirs.current_term}, there are only {MAX_TERM}: its "
            "metadata directory is damaged, or it is no raftlog controller"
        )
    if not same_cluster(mine.cluster_id, theirs.cluster_id):
        return InconsistentClusterId(
            f"controller {other} belongs to the cluster {shown_id(theirs.cluster_id)} and controller {me} to "
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


def same_cluster(ours: str, theirs: str) -> bool:
    """Whether two cluster ids match: both valid, and equal or one of them still unknown."""
    if len(theirs) > MAX_CLUSTER_ID_BYTES or len(theirs.encode()) > MAX_CLUSTER_ID_BYTES:
        return False
    return not ours or not theirs or ours == theirs


def shown_id(text: str) -> str:
    """Return a peer's text in the form for messages."""
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r} and {len(text) - MAX_SHOWN} characters more"


def duplicate(node_id: int) -> RaftlogError:
    """Return the refusal of a second process with the id of one that is connected."""
    return InconsistentVoters(
        f"another process with node.id {node_id} is connected and alive: give each node an id of its own, and do not "
        "start two processes with copies of one directory"
    )
