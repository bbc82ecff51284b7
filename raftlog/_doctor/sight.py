"""What there is and this user is not told of: lists leave out what may not be described, without a word.

Brokers name all partitions on their disks to whoever may describe the cluster (DescribeLogDirs). What is there, and
metadata did not show, is asked for by name: then a broker says whether it refuses, or the topic is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import raftlog
from raftlog._descriptions import ClusterDescription, TopicDescription
from raftlog._node_descriptions import NodeDescription
from raftlog.errors import AuthorizationError, RaftlogError

ASKED: Final = 50
"""So many topics are asked for by name; where one of them is refused, the others beyond are taken to be as well."""
TRANSACTIONS_TOPIC: Final = "__transaction_state"
_NOBODYS_ID: Final = "raftlog-doctor-looks"


def may_be_restricted(nodes: Mapping[int, NodeDescription] | None) -> bool:
    """Whether some broker may have an authorizer; not where all say that they have none."""
    for node in (nodes or {}).values():
        if "broker" in node.roles:
            found = node.configs.get("authorizer")
            if found is None or found.value not in ("", "none"):
                return True
    return not nodes


def hidden_topics(
    admin: raftlog.Admin, cluster: ClusterDescription, topics: Sequence[TopicDescription], patience_s: float
) -> tuple[Sequence[str], AuthorizationError | None]:
    """Return the names of topics that brokers hold and this user may not describe, and what one is refused with.

    None where brokers do not tell what they hold.
    """
    there: set[str] = set()
    for broker in cluster.brokers:
        if not broker.fenced:
            try:
                found = admin.describe_log_dirs(broker.broker_id, timeout=patience_s)
            except RaftlogError:
                continue  # without permission for that there is none for nodes either, which is noted
            there.update(part.topic for each in found for part in each.partitions)
    candidates = sorted(there - {topic.name for topic in topics} - {""})
    refusals = {name: _refusal(admin, name, patience_s) for name in candidates[:ASKED]}
    refused = [name for name, refusal in refusals.items() if refusal is not None]
    if not refused:
        return (), None
    return [*refused, *candidates[ASKED:]], refusals[refused[0]]


def refused_transactions(
    admin: raftlog.Admin, topics: Sequence[TopicDescription], hidden: Sequence[str], patience_s: float
) -> AuthorizationError | None:
    """Return why transactions may be left out of a list of all; None: none are, or there never was one."""
    if TRANSACTIONS_TOPIC not in {*hidden, *(topic.name for topic in topics)}:
        return None  # asking would make it
    try:
        admin.describe_transaction(_NOBODYS_ID, timeout=patience_s)
    except AuthorizationError as error:
        return error
    except RaftlogError:  # there is none of that name
        return None
    return None


def _refusal(admin: raftlog.Admin, topic: str, patience_s: float) -> AuthorizationError | None:
    try:
        admin.describe_topics([topic], internal=True, timeout=patience_s)
    except AuthorizationError as error:
        return error
    except RaftlogError:  # deleted since
        return None
    return None
