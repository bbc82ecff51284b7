"""Checks of brokers and nodes, the metadata quorum, the balance between brokers, and moves of partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from raftlog._core.descriptions import PartitionReplicas, QuorumDescription, QuorumVoterDescription
from raftlog._core.words import counted
from raftlog._doctor.picture import Picture, Problem, ids, named
from raftlog._doctor.report import Check
from raftlog.types import TopicPartition


def fenced(picture: Picture) -> Iterator[Problem]:
    """Find registered brokers that do not serve."""
    for broker_id, broker in sorted(picture.brokers().items()):
        if not broker.fenced:
            continue
        replicas = f"holds {counted(broker.replicas, 'replica')}" if broker.replicas else "holds no replicas"
        stopped = (
            "was stopped" if broker.in_controlled_shutdown else "is fenced: the controller gets no heartbeats from it"
        )
        yield Problem(
            "warning" if broker.in_controlled_shutdown or not broker.replicas else "error",
            f"broker {broker_id} {stopped}; it {replicas}",
            (f"broker {broker_id} ({broker.host}:{broker.port})",),
            f"start it again; if it does not come up, its log says why. If it is gone for good, raftlog broker "
            f"decommission {broker_id} moves its replicas to other brokers"
            if broker.replicas
            else f"start it again, or if it is gone for good: raftlog cluster unregister-broker {broker_id}",
        )


def stopping(picture: Picture) -> Iterator[Problem]:
    """Find brokers that are stopping."""
    found = [broker.broker_id for broker in picture.brokers().values() if broker.in_controlled_shutdown]
    found = [broker_id for broker_id in found if not picture.brokers()[broker_id].fenced]
    if found:
        yield Problem(
            "note",
            f"{counted(len(found), 'broker is', 'brokers are')} stopping",
            tuple(f"broker {broker_id}" for broker_id in sorted(found)),
            "if this is not intended, its log says why it stops",
        )


def set_aside(picture: Picture) -> Iterator[Problem]:
    """Find drained and cordoned brokers, which may have been forgotten."""
    for broker_id, broker in sorted(picture.brokers().items()):
        if not (broker.drained or broker.cordoned):
            continue
        state, takes_back = ("drained", "undrain") if broker.drained else ("cordoned", "uncordon")
        keeps = (
            "leads only partitions that no other broker can lead, and gets no new replicas"
            if broker.drained
            else "gets no new replicas"
        )
        yield Problem(
            "warning" if not broker.fenced else "note",
            f"broker {broker_id} is {state}: it {keeps}",
            (f"broker {broker_id}",),
            f"to end that: raftlog broker {takes_back} {broker_id}; to remove the broker: raftlog broker decommission "
            f"{broker_id}, or with --cancel to keep it",
        )


def silent(picture: Picture) -> Iterator[Problem]:
    """Find nodes that do not describe themselves although they should be up."""
    brokers = picture.brokers()
    away = {broker_id for broker_id, broker in brokers.items() if broker.fenced}
    if picture.quorum is not None:
        away |= {voter.node_id for voter in picture.quorum.voters if voter.state == "unreachable"}
    refused = {each.who for each in picture.refusals()}  # it answered; the check `not-all-seen` reports it
    for node_id, why in sorted(picture.silent_nodes.items()):
        if node_id not in away and f"node {node_id}" not in refused:
            yield Problem(
                "warning",
                f"node {node_id} does not describe itself: {why}",
                (f"node {node_id}",),
                "its clock, disks, limits and configuration could not be checked: see whether it runs, is overloaded, "
                "or has an older version",
            )


def not_ready(picture: Picture) -> Iterator[Problem]:
    """Find nodes that answer but do not serve."""
    for node_id, node in sorted((picture.nodes or {}).items()):
        if node.not_ready:
            yield Problem(
                "warning",
                f"node {node_id} runs but does not serve: {node.not_ready}",
                (f"node {node_id}",),
                "if it lasts, the node's log says what it waits for: usually controllers that it cannot reach, or the "
                "recovery of logs",
            )


def versions(picture: Picture) -> Iterator[Problem]:
    """Find nodes of different versions."""
    by_version: dict[str, list[int]] = {}
    for node_id, node in sorted((picture.nodes or {}).items()):
        by_version.setdefault(node.version, []).append(node_id)
    if len(by_version) > 1:
        yield Problem(
            "warning",
            f"nodes run {len(by_version)} versions; that should only be so during an upgrade",
            tuple(f"{version}: nodes {ids(node_ids)}" for version, node_ids in sorted(by_version.items())),
            "upgrade all nodes to the newest one, one by one, each after raftlog broker await-safe-stop ID",
        )


def features(picture: Picture) -> Iterator[Problem]:
    """Find features for which all nodes support a higher level than the cluster uses."""
    assert picture.cluster is not None, "examine() checks what a check needs"
    assert picture.nodes is not None, "examine() checks what a check needs"
    if picture.silent_nodes or not picture.nodes:
        return  # a node that did not answer may support less
    for name in sorted(set.intersection(*(set(node.features) for node in picture.nodes.values()))):
        ranges = [node.features[name] for node in picture.nodes.values()]
        level = picture.cluster.features.get(name, min(lowest for lowest, _ in ranges))
        known = min(highest for _, highest in ranges)
        if known > level:
            yield Problem(
                "note",
                f"{name} is at level {level}, but all nodes support level {known}",
                (),
                "once no node may have to go back to the previous version: raftlog cluster features upgrade, which "
                "cannot be undone",
            )


BROKERS_CHECKS = (
    Check("broker-fenced", "brokers that are fenced", ("cluster",), fenced),
    Check("broker-stopping", "brokers that are stopping", ("cluster",), stopping),
    Check("broker-set-aside", "brokers that are cordoned or drained", ("cluster",), set_aside),
    Check("node-silent", "nodes that do not describe themselves", ("nodes", "cluster"), silent),
    Check("node-not-ready", "nodes that do not serve", ("nodes",), not_ready),
    Check("version-mixed", "nodes of different versions", ("nodes",), versions),
    Check("feature-level-low", "features below the level that all nodes support", ("nodes", "cluster"), features),
)


LAG_ENTRIES: Final = 1_000
"""A voter that is further behind needs some time before it can lead."""
SILENT_MS: Final = 5_000
"""Ten times the default election timeout."""
OBSERVER_LAG: Final = 1_000
OBSERVER_SILENT_MS: Final = 5_000


def _quorum(picture: Picture) -> QuorumDescription:
    assert picture.quorum is not None, "examine() checks what a check needs"
    return picture.quorum


def _works(voter: QuorumVoterDescription) -> bool:
    return voter.state in ("leader", "follower")


def _is_tight(quorum: QuorumDescription) -> bool:
    """Return whether a quorum works, but with no voter more than a majority."""
    working = sum(map(_works, quorum.voters))
    return quorum.leader_id >= 0 and len(quorum.voters) // 2 + 1 >= working != len(quorum.voters)


def no_leader(picture: Picture) -> Iterator[Problem]:
    """Find a quorum without a leader."""
    quorum = _quorum(picture)
    if quorum.leader_id < 0:
        away = [voter.node_id for voter in quorum.voters if voter.state == "unreachable"]
        yield Problem(
            "error",
            "the metadata quorum has no leader: topics, leaders and configurations do not change, and brokers stop "
            f"acknowledging once their leases end (as node {quorum.answered_by} sees it)",
            tuple(f"controller {node_id}: unreachable" for node_id in away),
            f"start controllers again until more than half of {len(quorum.voters)} run; docs/quorum.md says what to do "
            "if they are gone for good",
        )


def no_slack(picture: Picture) -> Iterator[Problem]:
    """Find a quorum that stops working when one more controller stops."""
    quorum = _quorum(picture)
    if _is_tight(quorum):
        working = [voter.node_id for voter in quorum.voters if _works(voter)]
        others = [voter for voter in quorum.voters if not _works(voter)]
        yield Problem(
            "error",
            f"{len(working)} of {len(quorum.voters)} controllers work (nodes {ids(working)}), just a majority: when "
            "one more stops, the metadata cannot change and brokers stop acknowledging",
            tuple(f"controller {voter.node_id}: {voter.state}" for voter in others),
            f"start controller {ids([voter.node_id for voter in others])} again; docs/quorum.md says how to replace "
            "one that has lost its disk",
        )


def voters(picture: Picture) -> Iterator[Problem]:
    """Find voters that are unreachable or behind while the quorum works."""
    quorum = _quorum(picture)
    if quorum.leader_id < 0:
        return
    found = []
    for voter in quorum.voters:
        if voter.node_id == quorum.leader_id:
            continue
        if not _works(voter):
            if _is_tight(quorum):
                continue  # another check reports it
            found.append(f"controller {voter.node_id}: {voter.state}")
        elif voter.lag > LAG_ENTRIES:
            found.append(f"controller {voter.node_id}: {voter.lag:,} entries behind")
        elif voter.last_contact_ms > SILENT_MS:
            found.append(f"controller {voter.node_id}: no contact for {voter.last_contact_ms / 1000:.0f} s")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'controller')} could not take over at once",
            tuple(found),
            "see whether it runs, whether its disk is overloaded (a separate disk for metadata.log.dir helps), and "
            "whether inter-node listeners are reachable; raftlog quorum describe shows its progress",
        )


def observers(picture: Picture) -> Iterator[Problem]:
    """Find brokers with outdated metadata."""
    brokers = picture.brokers()
    found = []
    for seen in _quorum(picture).observers:
        if seen.fenced or (seen.broker_id in brokers and brokers[seen.broker_id].fenced):
            continue  # another check reports it
        if seen.lag > OBSERVER_LAG:
            found.append(f"broker {seen.broker_id}: {seen.lag:,} behind")
        elif seen.last_heartbeat_ms > OBSERVER_SILENT_MS:
            found.append(f"broker {seen.broker_id}: last heartbeat {seen.last_heartbeat_ms / 1000:.0f} s ago")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'broker has', 'brokers have')} outdated metadata",
            tuple(found),
            "see whether the broker is overloaded, and whether it reaches the controllers; it serves its partitions, "
            "but learns of new leaders and topics late",
        )


def shape(picture: Picture) -> Iterator[Problem]:
    """Find quorums of an unsafe or useless size."""
    total, brokers = len(_quorum(picture).voters), len(picture.brokers())
    if total == 1 and brokers > 1:
        yield Problem(
            "warning",
            f"{brokers} brokers have one controller: when it stops they all stop acknowledging, and with its "
            "disk the cluster's metadata is lost",
            (),
            "use three controllers: docs/quorum.md says how to go from one to several",
        )
    elif total and total % 2 == 0:  # 0: the node that answered does not know the voters
        yield Problem(
            "warning",
            f"{total} controllers tolerate no more failures than {total - 1}",
            (),
            "use an odd number of controllers, three or five: raftlog quorum set-voters",
        )


QUORUM_CHECKS = (
    Check("quorum-no-leader", "a quorum without a leader", ("quorum",), no_leader),
    Check("quorum-no-slack", "a quorum that tolerates no more failures", ("quorum",), no_slack),
    Check("quorum-voter-behind", "controllers that are unreachable or behind", ("quorum",), voters),
    Check("metadata-behind", "brokers with outdated metadata", ("quorum", "cluster"), observers),
    Check("quorum-size", "the number of controllers", ("quorum", "cluster"), shape),
)


SHARE: Final = 0.5
"""A broker is reported if its load differs from the mean by at least this share of the mean,"""
LEAST: Final = 4
"""and by at least this number: with few partitions, large shares occur by chance."""
NOT_PREFERRED: Final = 0.1
"""The share of partitions that their first replica does not lead above which there is a finding: the default of
leader.imbalance.per.broker.percentage, above which the controller moves leaderships back automatically."""


def _uneven(loads: Mapping[int, int]) -> list[str]:
    """Return the brokers whose load is far from the mean."""
    if len(loads) < 2:
        return []
    mean = sum(loads.values()) / len(loads)
    return [
        f"broker {broker_id} ({load}, the mean is {mean:.1f})"
        for broker_id, load in sorted(loads.items())
        if abs(load - mean) >= max(LEAST, SHARE * mean)
    ]


def _at_work(picture: Picture) -> list[int]:
    """Return the brokers that should have a share."""
    return [broker.broker_id for broker in picture.live_brokers() if not (broker.cordoned or broker.drained)]


def replica_skew(picture: Picture) -> Iterator[Problem]:
    """Find brokers with many more or fewer replicas than others."""
    loads = dict.fromkeys(_at_work(picture), 0)
    for _, part in picture.partitions():
        for replica in part.replicas:
            if replica in loads:
                loads[replica] += 1
    uneven = _uneven(loads)
    if uneven:
        yield Problem(
            "warning",
            "replicas are spread unevenly over the brokers",
            tuple(uneven),
            "raftlog cluster rebalance shows a plan with the fewest moves; --execute --throttle SIZE carries it out",
        )


def leader_skew(picture: Picture) -> Iterator[Problem]:
    """Find brokers that lead many more or fewer partitions than others."""
    loads = dict.fromkeys(_at_work(picture), 0)
    for _, part in picture.partitions():
        if part.leader in loads:
            loads[part.leader] += 1
    uneven = _uneven(loads)
    if uneven:
        yield Problem(
            "warning",
            "leaderships are spread unevenly over the brokers: all writes and reads go to leaders",
            tuple(uneven),
            "raftlog partition elect TOPIC lets first replicas lead; if these are uneven, raftlog cluster rebalance "
            "shows a plan",
        )


def not_preferred(picture: Picture) -> Iterator[Problem]:
    """Find partitions that their first replica could lead but does not."""
    ready = set(_at_work(picture))
    found = []
    topics = set()
    total = 0
    for topic, part in picture.partitions():
        total += 1
        first = part.replicas[0] if part.replicas else -1
        moving = part.adding_replicas or part.removing_replicas
        if part.leader not in (-1, first) and first in part.isr and first in ready and not moving:
            found.append(f"{named(topic.name, part.partition)} (led by {part.leader}, not {first})")
            topics.add(topic.name)
    if found:
        yield Problem(
            "warning" if len(found) > NOT_PREFERRED * total and len(found) >= LEAST else "note",
            f"{counted(len(found), 'partition is', 'partitions are')} not led by the first replica, although it is in "
            "sync",
            tuple(found),
            "the controller corrects that every leader.imbalance.check.interval.ms, if there are enough of them and "
            "auto.leader.rebalance.enable is on; at once: raftlog partition elect "
            + ("--all" if len(topics) > 1 else topics.pop()),
        )


BALANCE_CHECKS = (
    Check("replica-skew", "replicas spread unevenly", ("topics", "cluster"), replica_skew),
    Check("leader-skew", "leaderships spread unevenly", ("topics", "cluster"), leader_skew),
    Check("leader-not-preferred", "leaders that are not the first replica", ("topics", "cluster"), not_preferred),
)


RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")


def _moving(picture: Picture) -> Iterator[tuple[TopicPartition, list[int], list[int]]]:
    """Yield each moving partition with the brokers that it moves to and from."""
    for topic, part in picture.partitions():
        if part.adding_replicas or part.removing_replicas:
            yield TopicPartition(topic.name, part.partition), part.adding_replicas, part.removing_replicas


def forgotten_throttles(picture: Picture) -> Iterator[Problem]:
    """Find throttles that are on while no partition moves: they slow down replicas that have fallen behind."""
    if any(_moving(picture)):
        return
    rates = [
        f"broker {node_id}: {key}={found.value}"
        for node_id, node in sorted(picture.broker_nodes().items())
        for key in RATES
        if (found := node.configs.get(key)) is not None and found.source == "dynamic_broker"
    ]
    replicas = [
        f"topic {topic}: {key}={found.value}"
        for topic, configs in sorted((picture.configs or {}).items())
        for key in THROTTLED
        if (found := configs.get(key)) is not None and found.value and found.source == "dynamic_topic"
    ]
    if rates or replicas:
        yield Problem(
            "warning" if rates and replicas else "note",
            "replication throttles are on while no partition moves"
            + ("; replicas that fall behind catch up slowly or never" if rates and replicas else ""),
            (*rates, *replicas),
            "run an interrupted rebalance or decommission again, which removes them; otherwise "
            "raftlog config unset broker ID leader.replication.throttled.rate follower.replication.throttled.rate, and "
            "raftlog topic alter TOPIC --unset leader.replication.throttled.replicas --unset "
            "follower.replication.throttled.replicas",
        )


def stuck(picture: Picture) -> Iterator[Problem]:
    """Find moves whose new replicas are down, or made no progress between two readings."""
    brokers = picture.brokers()
    found = []
    for part, adding, _ in _moving(picture):
        down = [each for each in adding if each not in brokers or brokers[each].fenced]
        if down:
            found.append(f"{named(*part)} (new replica down: broker {ids(down)})")
            continue
        still = _without_progress(part, adding, picture.replicas or {}, picture.replicas_before or {})
        if still:
            found.append(f"{named(*part)} (no progress within {picture.apart_s:.0f} s on broker {ids(still)})")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'move makes', 'moves make')} no progress",
            tuple(found),
            "start the brokers of the new replicas; raise the throttle: raftlog partition reassign with the same moves "
            "and --throttle SIZE; or cancel: raftlog partition reassign --cancel with the same moves",
        )


def _without_progress(
    part: TopicPartition,
    adding: list[int],
    now: Mapping[TopicPartition, PartitionReplicas],
    before: Mapping[TopicPartition, PartitionReplicas],
) -> list[int]:
    """Return the new replicas that are behind and whose log end has not moved."""
    if part not in now or part not in before:
        return []
    held = {each.broker_id: each.log_end_offset for each in before[part].replicas}
    return [
        each.broker_id
        for each in now[part].replicas
        if each.broker_id in adding
        and not each.in_sync
        and each.lag != 0
        and each.log_end_offset <= held.get(each.broker_id, -2)
    ]


def under_way(picture: Picture) -> Iterator[Problem]:
    """Report moves that are in progress."""
    found = [f"{named(*part)} (to {ids(adding)}; from {ids(removing)})" for part, adding, removing in _moving(picture)]
    if found:
        yield Problem(
            "note",
            f"{counted(len(found), 'partition is', 'partitions are')} moving",
            tuple(found),
            "raftlog partition reassign --list shows their progress",
        )


MOVES_CHECKS = (
    Check("throttle-forgotten", "throttles without a move", ("topics", "nodes", "configs"), forgotten_throttles),
    Check("reassignment-stuck", "moves without progress", ("topics", "cluster"), stuck),
    Check("reassignment-under-way", "moves that are under way", ("topics",), under_way),
)
