"""The metadata quorum: whether it works, and whether it works after one more failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from raftlog._core.words import counted
from raftlog._descriptions import QuorumDescription, QuorumVoterDescription
from raftlog._doctor.picture import Finding, Picture, ids
from raftlog._doctor.report import Check

LAG_ENTRIES: Final = 1_000
"""A voter that is so far behind would need some time until it can lead."""
SILENT_MS: Final = 5_000
"""Ten election timeouts as they are by default."""
OBSERVER_LAG: Final = 1_000
OBSERVER_SILENT_MS: Final = 5_000


def _quorum(picture: Picture) -> QuorumDescription:
    assert picture.quorum is not None, "what a check needs is there"
    return picture.quorum


def _works(voter: QuorumVoterDescription) -> bool:
    return voter.state in ("leader", "follower")


def _is_tight(quorum: QuorumDescription) -> bool:
    """Whether a quorum works that has just a majority, because others do not."""
    working = sum(map(_works, quorum.voters))
    return quorum.leader_id >= 0 and len(quorum.voters) // 2 + 1 >= working != len(quorum.voters)


def no_leader(picture: Picture) -> Iterator[Finding]:
    """Find a quorum in which nobody decides."""
    quorum = _quorum(picture)
    if quorum.leader_id < 0:
        away = [voter.node_id for voter in quorum.voters if voter.state == "unreachable"]
        yield Finding(
            "quorum-no-leader",
            "error",
            "the metadata quorum has no leader: topics, leaders and configurations do not change, and brokers stop "
            f"acknowledging once their leases end (as node {quorum.answered_by} sees it)",
            tuple(f"controller {node_id}: unreachable" for node_id in away),
            f"start controllers again until more than half of {len(quorum.voters)} run; docs/quorum.md says what to do "
            "when they are gone for good",
        )


def no_slack(picture: Picture) -> Iterator[Finding]:
    """Find a quorum that stands still when one more controller stops."""
    quorum = _quorum(picture)
    if _is_tight(quorum):
        working = [voter.node_id for voter in quorum.voters if _works(voter)]
        others = [voter for voter in quorum.voters if not _works(voter)]
        yield Finding(
            "quorum-no-slack",
            "error",
            f"{len(working)} of {len(quorum.voters)} controllers work (nodes {ids(working)}), which is the least "
            "majority: when one more stops, nothing changes any more and brokers stop acknowledging",
            tuple(f"controller {voter.node_id}: {voter.state}" for voter in others),
            f"start again: controller {ids([voter.node_id for voter in others])}; one whose disk is lost is "
            "replaced as docs/quorum.md says",
        )


def voters(picture: Picture) -> Iterator[Finding]:
    """Find voters that are away or behind while the quorum works."""
    quorum = _quorum(picture)
    if quorum.leader_id < 0:
        return
    found = []
    for voter in quorum.voters:
        if voter.node_id == quorum.leader_id:
            continue
        if not _works(voter):
            if _is_tight(quorum):
                continue  # said by another check
            found.append(f"controller {voter.node_id}: {voter.state}")
        elif voter.lag > LAG_ENTRIES:
            found.append(f"controller {voter.node_id}: {voter.lag:,} entries behind")
        elif voter.last_contact_ms > SILENT_MS:
            found.append(f"controller {voter.node_id}: not heard of for {voter.last_contact_ms / 1000:.0f} s")
    if found:
        yield Finding(
            "quorum-voter-behind",
            "warning",
            f"{counted(len(found), 'controller')} could not lead at once",
            tuple(found),
            "see whether it runs, how busy its disk is (metadata.log.dir on a disk of its own helps), and whether the "
            "inter-node listeners reach one another; raftlog quorum describe shows how far it is",
        )


def observers(picture: Picture) -> Iterator[Finding]:
    """Find brokers that act on old metadata."""
    brokers = picture.brokers()
    found = []
    for seen in _quorum(picture).observers:
        if seen.fenced or (seen.broker_id in brokers and brokers[seen.broker_id].fenced):
            continue  # said by another check
        if seen.lag > OBSERVER_LAG:
            found.append(f"broker {seen.broker_id}: {seen.lag:,} behind")
        elif seen.last_heartbeat_ms > OBSERVER_SILENT_MS:
            found.append(f"broker {seen.broker_id}: last heartbeat {seen.last_heartbeat_ms / 1000:.0f} s ago")
    if found:
        yield Finding(
            "metadata-behind",
            "warning",
            f"{counted(len(found), 'broker acts', 'brokers act')} on old metadata",
            tuple(found),
            "see how busy the broker is and whether it reaches the controllers; it serves what it has, and hears late "
            "of new leaders and topics",
        )


def shape(picture: Picture) -> Iterator[Finding]:
    """Find quorums of a size that buys nothing."""
    total, brokers = len(_quorum(picture).voters), len(picture.brokers())
    if total == 1 and brokers > 1:
        yield Finding(
            "quorum-size",
            "warning",
            f"one controller decides for {brokers} brokers: when it stops they all stop acknowledging, and with its "
            "disk the cluster's metadata is gone",
            (),
            "have three: docs/quorum.md says how to go from one controller to several",
        )
    elif total and total % 2 == 0:  # 0: who answered does not know them
        yield Finding(
            "quorum-size",
            "warning",
            f"{total} controllers stand no more failures than {total - 1}",
            (),
            "have an odd number of controllers, three or five: raftlog quorum set-voters",
        )


CHECKS = (
    Check("quorum-no-leader", "a quorum without a leader", ("quorum",), no_leader),
    Check("quorum-no-slack", "a quorum that stands no more failure", ("quorum",), no_slack),
    Check("quorum-voter-behind", "controllers that are away or behind", ("quorum",), voters),
    Check("metadata-behind", "brokers with old metadata", ("quorum", "cluster"), observers),
    Check("quorum-size", "how many controllers there are", ("quorum", "cluster"), shape),
)
