"""Configurations of nodes: what differs where it should not, and what lets strangers in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from raftlog._core.bootstrap import is_loopback
from raftlog._core.words import counted
from raftlog._descriptions import ConfigDescription
from raftlog._doctor.picture import Finding, Picture, ids
from raftlog._doctor.report import Check
from raftlog._node_descriptions import NodeDescription

OF_ONE_NODE: Final = frozenset(
    {
        "node.id",
        "process.roles",
        "listeners",
        "advertised.listeners",
        "inter.node.listener",
        "advertised.inter.node.listener",
        "inter.node.routes",
        "metrics.listener",
        "rack",
        "log.dirs",
        "metadata.log.dir",
        "log.level",
        "log.format",
        "leader.replication.throttled.rate",
        "follower.replication.throttled.rate",
    }
)
"""Keys that may differ: a node's own place, and throttles, which another check is about."""
OF_ONE_NODE_PREFIXES: Final = ("ssl.keystore.", "ssl.truststore.", "sasl.users.", "tracing.")
"""Where a node's certificates and its first users lie is its own, and so is where its traces go."""
OF_ALL_NODES: Final = frozenset(
    {
        "cluster.id",
        "controller.quorum.voters",
        "security.inter.broker.protocol",
        "broker.session.timeout.ms",
        "broker.lease.ms",
        "broker.heartbeat.interval.ms",
        "controller.quorum.election.timeout.ms",
        "auto.leader.rebalance.enable",
        "leader.imbalance.check.interval.ms",
        "leader.imbalance.per.broker.percentage",
    }
)
"""Keys that controllers go by as well; the others are compared among brokers."""
MUST_NOT_DIFFER: Final = frozenset({"cluster.id", "controller.quorum.voters"})
MAY_LACK: Final = frozenset({"cluster.id", "controller.quorum.voters"})
"""A node that found its cluster in its directory need not name it; a node alone has no list of voters."""
PLAINTEXT: Final = "plaintext"
_SHOWN: Final = 60


def _may_differ(key: str) -> bool:
    return key in OF_ONE_NODE or key.startswith(OF_ONE_NODE_PREFIXES)


def differences(picture: Picture) -> Iterator[Finding]:
    """Find keys that some nodes have otherwise than others."""
    nodes = picture.nodes or {}
    brokers = picture.broker_nodes()
    serious: list[str] = []
    others: list[str] = []
    for key in sorted({key for node in nodes.values() for key in node.configs}):
        if _may_differ(key):
            continue
        by_value: dict[str, list[int]] = {}
        for node_id, node in sorted((nodes if key in OF_ALL_NODES else brokers).items()):
            found = node.configs.get(key)
            if found is not None and not (key in MAY_LACK and not found.value):
                by_value.setdefault(_comparable(key, found.value), []).append(node_id)
        if len(by_value) < 2:
            continue
        values = "; ".join(f"{_short(value)} on {ids(node_ids)}" for value, node_ids in sorted(by_value.items()))
        (serious if key in MUST_NOT_DIFFER else others).append(f"{key}: {values}")
    remedy = (
        "write the same into all configuration files, and start the nodes again one after another; what is set while "
        "the cluster runs (raftlog config set broker default KEY=VALUE) holds for all brokers"
    )
    if serious:
        yield Finding(
            "config-differs",
            "error",
            "nodes do not agree on who they are a cluster with",
            tuple(serious),
            "write the same list into all configuration files; docs/quorum.md says how voters are changed",
        )
    if others:
        yield Finding(
            "config-differs",
            "warning",
            f"{counted(len(others), 'setting differs', 'settings differ')} between nodes, so that what a topic or a "
            "client gets depends on who serves it",
            tuple(others),
            remedy,
        )


def _comparable(key: str, value: str) -> str:
    """Return a value in a form that is equal for equal meanings: voters and super users may stand in any order."""
    separator = {"controller.quorum.voters": ",", "super.users": ";"}.get(key)
    return value if separator is None else separator.join(sorted(value.split(separator)))


def _short(value: str) -> str:
    text = value or '""'
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _value(configs: Mapping[str, ConfigDescription], key: str) -> str:
    found = configs.get(key)
    return found.value if found is not None else ""


def _open_listeners(node: NodeDescription) -> Iterator[str]:
    """Yield the listeners that others than this machine reach, and what is missing there."""
    clients = _value(node.configs, "listener.security.protocol") or PLAINTEXT
    among_nodes = _value(node.configs, "security.inter.broker.protocol")
    among_nodes = clients if among_nodes in ("", "same") else among_nodes
    both = _value(node.configs, "listener.security.migration") == "true"
    # Who logs in needs no certificate; strangers are held back where permissions count.
    named = clients == "sasl_ssl" or _value(node.configs, "authorizer") not in ("", "none")
    anybody = _value(node.configs, "ssl.client.auth") == "none" and not named
    for key, address, protocol, strangers in (
        ("listeners", _value(node.configs, "listeners") if "broker" in node.roles else "", clients, anybody),
        ("inter.node.listener", node.inter_node_listener, among_nodes, False),  # nodes always show a certificate
    ):
        if not address or is_loopback(address.rpartition(":")[0].strip("[]")):
            continue
        if protocol == PLAINTEXT:
            yield f"{key} {address} (plaintext)"
        elif both:
            yield f"{key} {address} (plaintext besides TLS: listener.security.migration)"
        elif strangers:
            yield f"{key} {address} (clients without a certificate: ssl.client.auth=none)"


def insecure_listeners(picture: Picture) -> Iterator[Finding]:
    """Find listeners that others than the own machine reach without having to say who they are."""
    found = [
        f"node {node_id}: {listener}"
        for node_id, node in sorted((picture.nodes or {}).items())
        for listener in _open_listeners(node)
    ]
    if found:
        yield Finding(
            "listener-insecure",
            "warning",
            f"{counted(len(found), 'listener lets', 'listeners let')} in whoever reaches the port from other machines, "
            "to read, write and delete everything",
            tuple(found),
            "use TLS with users or with certificates of clients (docs/security.md), or keep strangers out by a "
            "firewall or network policy and ignore this: --ignore listener-insecure",
        )


def advertised(picture: Picture) -> Iterator[Finding]:
    """Find brokers that tell clients an address at which only their own machine reaches them."""
    if len({node.hostname for node in (picture.nodes or {}).values()}) < 2:
        return
    found = [
        f"broker {broker_id}: {broker.host}:{broker.port}"
        for broker_id, broker in sorted(picture.brokers().items())
        if is_loopback(broker.host)
    ]
    if found:
        yield Finding(
            "advertised-loopback",
            "error",
            f"{counted(len(found), 'broker tells', 'brokers tell')} clients a loopback address, though the nodes run "
            "on several machines: clients elsewhere do not reach what is led there",
            tuple(found),
            "set listeners, or advertised.listeners, to an address that clients reach",
        )


def racks(picture: Picture) -> Iterator[Finding]:
    """Find brokers without a rack, where others have one."""
    brokers = picture.brokers()
    found = [broker_id for broker_id, broker in sorted(brokers.items()) if not broker.rack]
    if found and len(found) < len(brokers):
        yield Finding(
            "rack-missing",
            "warning",
            f"{counted(len(found), 'broker has', 'brokers have')} no rack, and others have one: replicas may come to "
            "stand together",
            tuple(f"broker {broker_id}" for broker_id in found),
            "set rack in their configuration, and start them again",
        )


CHECKS = (
    Check("config-differs", "settings that differ between nodes", ("nodes",), differences),
    Check("advertised-loopback", "addresses that clients do not reach", ("nodes", "cluster"), advertised),
    Check("rack-missing", "brokers without a rack among others with one", ("cluster",), racks),
    Check("listener-insecure", "listeners that let anybody in", ("nodes",), insecure_listeners),
)
