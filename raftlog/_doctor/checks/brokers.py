"""Brokers and nodes: whether they take part, and what they were told to keep away from."""

from __future__ import annotations

from collections.abc import Iterator

from raftlog._core.words import counted
from raftlog._doctor.picture import Finding, Picture, ids
from raftlog._doctor.report import Check


def fenced(picture: Picture) -> Iterator[Finding]:
    """Find brokers that are registered and do not take part."""
    for broker_id, broker in sorted(picture.brokers().items()):
        if not broker.fenced:
            continue
        replicas = f"holds {counted(broker.replicas, 'replica')}" if broker.replicas else "holds no replicas"
        stopped = "was stopped" if broker.in_controlled_shutdown else "is fenced: the controller does not hear of it"
        yield Finding(
            "broker-fenced",
            "warning" if broker.in_controlled_shutdown or not broker.replicas else "error",
            f"broker {broker_id} {stopped}; it {replicas}",
            (f"broker {broker_id} ({broker.host}:{broker.port})",),
            f"start it again; its log says what keeps it. If it is gone for good, raftlog broker decommission "
            f"{broker_id} moves its replicas elsewhere"
            if broker.replicas
            else f"start it again, or, when it is gone for good, raftlog cluster unregister-broker {broker_id}",
        )


def stopping(picture: Picture) -> Iterator[Finding]:
    """Find brokers that are on their way out."""
    found = [broker.broker_id for broker in picture.brokers().values() if broker.in_controlled_shutdown]
    found = [broker_id for broker_id in found if not picture.brokers()[broker_id].fenced]
    if found:
        yield Finding(
            "broker-stopping",
            "note",
            f"{counted(len(found), 'broker is', 'brokers are')} stopping",
            tuple(f"broker {broker_id}" for broker_id in sorted(found)),
            "where nobody stops it: its log says what does",
        )


def set_aside(picture: Picture) -> Iterator[Finding]:
    """Find brokers that were drained or cordoned, and may have been forgotten."""
    for broker_id, broker in sorted(picture.brokers().items()):
        if not (broker.drained or broker.cordoned):
            continue
        state, takes_back = ("drained", "undrain") if broker.drained else ("cordoned", "uncordon")
        keeps = "leads nothing that others can lead, and gets no new replicas" if broker.drained else "gets no replicas"
        yield Finding(
            "broker-set-aside",
            "warning" if not broker.fenced else "note",
            f"broker {broker_id} is {state}: it {keeps}",
            (f"broker {broker_id}",),
            f"when that is over: raftlog broker {takes_back} {broker_id}; if it should have left: raftlog broker "
            f"decommission {broker_id}, with --cancel to have it stay",
        )


def silent(picture: Picture) -> Iterator[Finding]:
    """Find nodes that say nothing of themselves, and are not known to be away."""
    brokers = picture.brokers()
    away = {broker_id for broker_id, broker in brokers.items() if broker.fenced}
    if picture.quorum is not None:
        away |= {voter.node_id for voter in picture.quorum.voters if voter.state == "unreachable"}
    refused = {each.who for each in picture.refusals()}  # it answered; `not-all-seen` tells
    for node_id, why in sorted(picture.silent_nodes.items()):
        if node_id not in away and f"node {node_id}" not in refused:
            yield Finding(
                "node-silent",
                "warning",
                f"node {node_id} does not describe itself: {why}",
                (f"node {node_id}",),
                "its clock, disks, limits and configuration could not be checked: see whether it runs, how busy it is, "
                "and whether it has this version",
            )


def not_ready(picture: Picture) -> Iterator[Finding]:
    """Find nodes that answer and do not serve."""
    for node_id, node in sorted((picture.nodes or {}).items()):
        if node.not_ready:
            yield Finding(
                "node-not-ready",
                "warning",
                f"node {node_id} runs and does not serve: {node.not_ready}",
                (f"node {node_id}",),
                "where it does not pass: the log of the node says what it waits for; mostly controllers that it does "
                "not reach, or logs that are being recovered",
            )


def versions(picture: Picture) -> Iterator[Finding]:
    """Find nodes of different versions."""
    by_version: dict[str, list[int]] = {}
    for node_id, node in sorted((picture.nodes or {}).items()):
        by_version.setdefault(node.version, []).append(node_id)
    if len(by_version) > 1:
        yield Finding(
            "version-mixed",
            "warning",
            f"nodes run {len(by_version)} versions; that is for an upgrade only",
            tuple(f"{version}: nodes {ids(node_ids)}" for version, node_ids in sorted(by_version.items())),
            "bring all nodes to the newest one, one after another: raftlog broker await-safe-stop ID before each",
        )


def features(picture: Picture) -> Iterator[Finding]:
    """Find features of which all nodes know a higher level than the cluster uses."""
    assert picture.cluster is not None, "what a check needs is there"
    assert picture.nodes is not None, "what a check needs is there"
    if picture.silent_nodes or not picture.nodes:
        return  # whoever did not answer may know less
    for name in sorted(set.intersection(*(set(node.features) for node in picture.nodes.values()))):
        ranges = [node.features[name] for node in picture.nodes.values()]
        level = picture.cluster.features.get(name, min(lowest for lowest, _ in ranges))
        known = min(highest for _, highest in ranges)
        if known > level:
            yield Finding(
                "feature-level-low",
                "note",
                f"{name} is at level {level}, and all nodes know level {known}",
                (),
                "once no node is to go back to the version before: raftlog cluster features upgrade; there is no way "
                "back from that",
            )


CHECKS = (
    Check("broker-fenced", "brokers that do not take part", ("cluster",), fenced),
    Check("broker-stopping", "brokers that are stopping", ("cluster",), stopping),
    Check("broker-set-aside", "brokers that are cordoned or drained", ("cluster",), set_aside),
    Check("node-silent", "nodes that do not describe themselves", ("nodes", "cluster"), silent),
    Check("node-not-ready", "nodes that do not serve", ("nodes",), not_ready),
    Check("version-mixed", "nodes of different versions", ("nodes",), versions),
    Check("feature-level-low", "features below what all nodes know", ("nodes", "cluster"), features),
)
