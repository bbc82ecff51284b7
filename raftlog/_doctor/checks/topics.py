"""Checks of topics whose settings tolerate too few failures, of partitions that fail now, and of nodes' settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from raftlog._core.cluster import is_loopback, why_lost
from raftlog._core.descriptions import NodeDescription, PartitionDescription, TopicDescription
from raftlog._core.words import counted
from raftlog._doctor.picture import Picture, Problem, ids, named, one_topic, setting
from raftlog._doctor.report import Check

_MORE_REPLICAS = "give it more replicas (raftlog partition reassign --generate --topic TOPIC --replication-factor N)"


def _least_replicas(topic: TopicDescription) -> int:
    return min((len(set(part.replicas) - set(part.removing_replicas)) for part in topic.partitions), default=0)


def _of(found: Sequence[str]) -> str:
    """Return the topic for an example command, from places that begin with its name."""
    return one_topic([place.partition(" ")[0] for place in found])


_FACTORS: Final = (
    "default.replication.factor",
    "offsets.topic.replication.factor",
    "transaction.state.log.replication.factor",
)


def _for_new_topics(picture: Picture) -> str:
    """Return the end of a remedy: the settings that give new topics one replica; "" if the nodes have higher ones."""
    nodes = picture.broker_nodes().values()
    low = [f"{key}=3" for key in _FACTORS if not nodes or any(setting(node, key) in ("", "1") for node in nodes)]
    if not low:
        return ""
    keys = " and ".join([", ".join(low[:-1]), low[-1]] if len(low) > 1 else low)
    return f"; for new topics set {keys} in the servers' configuration"


def unwritable(picture: Picture) -> Iterator[Problem]:
    """Find topics with fewer replicas than min.insync.replicas."""
    found = []
    for topic in picture.topics or ():
        replicas, least = _least_replicas(topic), picture.min_insync_replicas(topic.name)
        if topic.partitions and replicas < least:
            found.append(f"{topic.name} (replicas: {replicas}, min.insync.replicas: {least})")
    if found:
        yield Problem(
            "error",
            f"{counted(len(found), 'topic')} can never be written to with acks=all: min.insync.replicas is above the "
            "number of replicas",
            tuple(found),
            f"{_MORE_REPLICAS}, or lower the setting: raftlog topic alter {_of(found)} --config min.insync.replicas=N",
        )


def no_slack(picture: Picture) -> Iterator[Problem]:
    """Find topics that refuse acks=all as soon as one replica is out of sync."""
    found = []
    for topic in picture.topics or ():
        replicas, least = _least_replicas(topic), picture.min_insync_replicas(topic.name)
        if replicas > 1 and replicas == least:
            found.append(f"{topic.name} (replicas: {replicas}, min.insync.replicas: {least})")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'topic refuses', 'topics refuse')} acks=all as soon as one broker stops, even for a "
            "restart: min.insync.replicas equals the number of replicas",
            tuple(found),
            f"{_MORE_REPLICAS}, or lower it by one: raftlog topic alter {_of(found)} --config min.insync.replicas=N",
        )


def single_replica(picture: Picture) -> Iterator[Problem]:
    """Find topics with one replica, whose records are lost with one disk."""
    alone = len(picture.brokers()) < 2
    found = [topic.name for topic in picture.topics or () if topic.partitions and _least_replicas(topic) == 1]
    if found:
        most = min(3, len(picture.brokers()))
        more = (
            f"raftlog partition reassign --generate --topic {_of(found)} --replication-factor {most} > plan.json, then "
        )
        more += "raftlog partition reassign --plan plan.json"
        yield Problem(
            "note" if alone else "warning",
            f"{counted(len(found), 'topic has', 'topics have')} partitions with one replica: the records are lost with "
            "its disk, and clients cannot write or read while its broker restarts",
            tuple(found),
            "a cluster of one broker has no place for copies: add brokers if records must not be lost"
            if alone
            else f"give them more: {more}{_for_new_topics(picture)}",
        )


def min_isr_one(picture: Picture) -> Iterator[Problem]:
    """Find topics whose leader may acknowledge records that only it holds."""
    found = [
        topic.name
        for topic in picture.topics or ()
        if _least_replicas(topic) > 1 and picture.topic_config(topic.name, "min.insync.replicas") == "1"
    ]
    if found:
        yield Problem(
            "note",
            f"{counted(len(found), 'topic has', 'topics have')} several replicas and min.insync.replicas=1: while the "
            "others are out of sync, the leader acknowledges records that are on one disk only",
            tuple(found),
            f"with three replicas: raftlog topic alter {_of(found)} --config min.insync.replicas=2",
        )


def min_isr_in_file(picture: Picture) -> Iterator[Problem]:
    """Find topics whose min.insync.replicas is set only in the brokers' files, which controllers do not read."""
    found = {}
    for topic in picture.topics or ():
        least = (picture.configs or {}).get(topic.name, {}).get("min.insync.replicas")
        if least is not None and least.source == "static_broker" and 1 < int(least.value) <= _least_replicas(topic):
            found[topic.name] = int(least.value)
    if found:
        yield Problem(
            "note",
            f"{counted(len(found), 'topic has', 'topics have')} min.insync.replicas only from the brokers' files, "
            "which controllers do not read: after all brokers have stopped, only the last replica in sync may lead, "
            "although others have all committed records",
            tuple(found),
            f"raftlog config set broker default min.insync.replicas={max(found.values())}",
        )


def unclean(picture: Picture) -> Iterator[Problem]:
    """Find topics that allow a replica without all records to lead."""
    found = [
        topic.name
        for topic in picture.topics or ()
        if picture.topic_config(topic.name, "unclean.leader.election.enable") == "true"
    ]
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'topic')} may lose acknowledged records: unclean.leader.election.enable lets a "
            "replica lead that lacks some of them",
            tuple(found),
            f"if that is not intended: raftlog topic alter {_of(found)} --unset unclean.leader.election.enable",
        )


def unflushed(picture: Picture) -> Iterator[Problem]:
    """Find topics that acknowledge records before they are on the disk."""
    found = [
        topic.name
        for topic in picture.topics or ()
        if (picture.topic_config(topic.name, "flush.messages") or "1") != "1"
    ]
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'topic acknowledges', 'topics acknowledge')} records before they are on the disk "
            "(flush.messages above 1): when several machines lose their power at once, records are lost",
            tuple(found),
            f"if that is not intended: raftlog topic alter {_of(found)} --unset flush.messages",
        )


def one_rack(picture: Picture) -> Iterator[Problem]:
    """Find partitions with all replicas in one rack although there are several racks."""
    racks = {broker_id: broker.rack for broker_id, broker in picture.brokers().items()}
    if len({rack for rack in racks.values() if rack}) < 2:
        return
    found = []
    for topic, part in picture.partitions():
        replicas = [each for each in part.replicas if each not in part.removing_replicas]
        stands = {racks.get(each, "") for each in replicas}
        if len(replicas) > 1 and len(stands) == 1 and "" not in stands:
            found.append(f"{named(topic.name, part.partition)} (rack {stands.pop()}: {ids(replicas)})")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'partition has', 'partitions have')} all replicas in one rack, and fail with it",
            tuple(found),
            "raftlog partition reassign --generate --topic TOPIC makes a plan that spreads them over the racks",
        )


TOPICS_CHECKS = (
    Check("topic-unwritable", "min.insync.replicas above the replicas", ("topics", "configs"), unwritable),
    Check("topic-no-slack", "min.insync.replicas equal to the replicas", ("topics", "configs"), no_slack),
    Check("topic-single-replica", "topics with one replica", ("topics", "cluster"), single_replica),
    Check("topic-min-isr-one", "topics whose leader may acknowledge alone", ("topics", "configs"), min_isr_one),
    Check(
        "topic-min-isr-in-file",
        "topics whose min.insync.replicas is only in the brokers' files",
        ("topics", "configs"),
        min_isr_in_file,
    ),
    Check("topic-unclean-election", "topics that may lose records by election", ("topics", "configs"), unclean),
    Check(
        "topic-not-flushed", "topics that acknowledge before records are on the disk", ("topics", "configs"), unflushed
    ),
    Check("partition-one-rack", "replicas that share one rack", ("topics", "cluster"), one_rack),
)


def _settled(part: PartitionDescription) -> list[int]:
    """Return the replicas that are not being added."""
    return [replica for replica in part.replicas if replica not in part.adding_replicas]


def _missing(part: PartitionDescription) -> list[int]:
    return [replica for replica in _settled(part) if replica not in part.isr]


def offline(picture: Picture) -> Iterator[Problem]:
    """Find partitions that cannot be written to or read."""
    found = []
    awaited: set[int] = set()
    for topic, part in picture.partitions():
        down = part.leader in part.offline_replicas
        if (part.leader >= 0 and not down) or _why_lost(topic, part) is not None:
            continue
        candidates = sorted({*part.isr, *part.eligible_leader_replicas} & set(part.offline_replicas)) or part.isr
        awaited |= set(candidates)
        why = f"leader {part.leader} is down" if down else "no leader"
        found.append(f"{named(topic.name, part.partition)} ({why}; brokers with all records: {ids(candidates)})")
    if found:
        yield Problem(
            "error",
            f"{counted(len(found), 'partition')} can neither be written to nor read",
            tuple(found),
            f"start one of the brokers with all records again: {ids(awaited)}. Only if they are gone for good: raftlog "
            "partition elect TOPIC --unclean lets another replica lead, and loses the records that it lacks",
        )


def log_lost(picture: Picture) -> Iterator[Problem]:
    """Find partitions without a leader because the only replica in sync has lost its disk."""
    for topic, part in picture.partitions():
        why = _why_lost(topic, part)
        if why is not None:
            where = named(topic.name, part.partition)
            what, _, advice = why.partition("; ")
            yield Problem("error", f"{where} has no leader: {what}", (), advice)


def _why_lost(topic: TopicDescription, part: PartitionDescription) -> str | None:
    return why_lost(topic.name, part.leader, part.replicas, part.isr, part.lost_replicas)


def leader_silent(picture: Picture) -> Iterator[Problem]:
    """Find brokers that lead partitions but do not answer."""
    for broker_id, why in sorted(picture.silent_leaders.items()):
        led = [named(topic.name, part.partition) for topic, part in picture.partitions() if part.leader == broker_id]
        yield Problem(
            "error",
            f"broker {broker_id} leads {counted(len(led), 'partition')} and does not answer from here: {why}",
            tuple(led),
            f"see whether clients reach broker {broker_id} at the address that raftlog broker list shows: its process, "
            "its load, firewalls, advertised.listeners",
        )


def under_min_isr(picture: Picture) -> Iterator[Problem]:
    """Find partitions that refuse acks=all because too few of their replicas are in sync."""
    found = []
    missing: set[int] = set()
    for topic, part in picture.partitions():
        least = picture.min_insync_replicas(topic.name)
        if part.leader >= 0 and len(part.isr) < least <= len(_settled(part)):
            missing |= set(_missing(part))
            found.append(
                f"{named(topic.name, part.partition)} (in sync: {ids(part.isr)} of {ids(_settled(part))}; "
                f"needs {least})"
            )
    if found:
        yield Problem(
            "error",
            f"{counted(len(found), 'partition refuses', 'partitions refuse')} writes with acks=all: fewer replicas are "
            "in sync than min.insync.replicas",
            tuple(found),
            _bring_back(picture, missing),
        )


def under_replicated(picture: Picture) -> Iterator[Problem]:
    """Find partitions with a replica that is out of sync."""
    found = []
    missing: set[int] = set()
    for topic, part in picture.partitions():
        out = _missing(part)
        if out:
            missing |= set(out)
            found.append(f"{named(topic.name, part.partition)} (out of sync: {ids(out)})")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'partition has', 'partitions have')} replicas out of sync",
            tuple(found),
            _bring_back(picture, missing),
        )


def _bring_back(picture: Picture, missing: set[int]) -> str:
    brokers = picture.brokers()
    down = {each for each in missing if each not in brokers or brokers[each].fenced}
    slow = missing - down
    said = []
    if down:
        said.append(f"start {_brokers(sorted(down))} again, which {'is' if len(down) == 1 else 'are'} down")
    if slow:
        said.append(
            f"see why {_brokers(sorted(slow))} {'lags' if len(slow) == 1 else 'lag'}: raftlog topic describe shows by "
            "how much, and the broker's log why; usual causes are slow or full disks, a throttle, a broken network "
            "between brokers, or a leader's advertised.inter.node.listener that they cannot reach"
        )
    return "; ".join(said)


def _brokers(found: Sequence[int]) -> str:
    return f"broker{'' if len(found) == 1 else 's'} {ids(found)}"


def replica_offline(picture: Picture) -> Iterator[Problem]:
    """Find replicas without a working log on brokers that run."""
    live = {broker.broker_id for broker in picture.live_brokers()}
    found: dict[int, list[str]] = {}
    for topic, part in picture.partitions():
        for replica in part.offline_replicas:
            if replica in live:
                found.setdefault(replica, []).append(named(topic.name, part.partition))
    for broker_id, parts in sorted(found.items()):
        yield Problem(
            "error",
            f"broker {broker_id} runs, but has no working log for {counted(len(parts), 'partition')}",
            tuple(parts),
            f"the log of broker {broker_id} says which file or directory is damaged or missing; repair or replace the "
            "disk and start the broker again: it fetches missing records from the leaders",
        )


def replica_unknown(picture: Picture) -> Iterator[Problem]:
    """Find replicas on brokers that are not registered."""
    brokers = picture.brokers()
    found: dict[int, list[str]] = {}
    for topic, part in picture.partitions():
        for replica in part.replicas:
            if replica not in brokers:
                found.setdefault(replica, []).append(named(topic.name, part.partition))
    for broker_id, parts in sorted(found.items()):
        yield Problem(
            "error",
            f"{counted(len(parts), 'partition has', 'partitions have')} a replica on broker {broker_id}, which is not "
            "registered",
            tuple(parts),
            f"start broker {broker_id}, or move the replicas: raftlog partition reassign --generate --topic "
            "TOPIC --brokers ID,... makes a plan",
        )


PARTITIONS_CHECKS = (
    Check("partition-offline", "partitions without a working leader", ("topics",), offline),
    Check("partition-log-lost", "partitions whose log is lost with a disk", ("topics",), log_lost),
    Check("leader-silent", "leaders that do not answer", ("topics", "replicas"), leader_silent),
    Check("partition-under-min-isr", "partitions that refuse acks=all", ("topics", "configs"), under_min_isr),
    Check("partition-under-replicated", "replicas out of sync", ("topics", "cluster"), under_replicated),
    Check("replica-offline", "replicas without a working log", ("topics", "cluster"), replica_offline),
    Check("replica-of-unknown-broker", "replicas on unregistered brokers", ("topics", "cluster"), replica_unknown),
)


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
"""Keys that may differ between nodes: addresses and paths of a node, and throttles, which have a check of their own."""
OF_ONE_NODE_PREFIXES: Final = ("ssl.keystore.", "ssl.truststore.", "sasl.users.", "tracing.")
"""Paths of certificates and first users, and destinations of traces, may also differ."""
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
"""Keys that controllers use too; other keys are compared only among brokers."""
MUST_NOT_DIFFER: Final = frozenset({"cluster.id", "controller.quorum.voters"})
MAY_LACK: Final = frozenset({"cluster.id", "controller.quorum.voters"})
"""A node that knows its cluster from its directory need not set it; a single node has no list of voters."""
PLAINTEXT: Final = "plaintext"
_SHOWN: Final = 60


def _may_differ(key: str) -> bool:
    return key in OF_ONE_NODE or key.startswith(OF_ONE_NODE_PREFIXES)


def differences(picture: Picture) -> Iterator[Problem]:
    """Find keys with different values on different nodes."""
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
        "write the same value into all configuration files, and restart the nodes one by one; settings changed while "
        "the cluster runs (raftlog config set broker default KEY=VALUE) apply to all brokers"
    )
    if serious:
        yield Problem(
            "error",
            "nodes disagree on the cluster that they belong to",
            tuple(serious),
            "write the same values into all configuration files; docs/quorum.md says how to change voters",
        )
    if others:
        yield Problem(
            "warning",
            f"{counted(len(others), 'setting differs', 'settings differ')} between nodes, so that topics and clients "
            "are treated differently by different brokers",
            tuple(others),
            remedy,
        )


def _comparable(key: str, value: str) -> str:
    """Return a value in a form to compare: the order of voters and of super users does not matter."""
    separator = {"controller.quorum.voters": ",", "super.users": ";"}.get(key)
    return value if separator is None else separator.join(sorted(value.split(separator)))


def _short(value: str) -> str:
    text = value or '""'
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _open_listeners(node: NodeDescription) -> Iterator[str]:
    """Yield the listeners that other machines can reach without identification, and why."""
    clients = setting(node, "listener.security.protocol") or PLAINTEXT
    among_nodes = setting(node, "security.inter.broker.protocol")
    among_nodes = clients if among_nodes in ("", "same") else among_nodes
    both = setting(node, "listener.security.migration") == "true"
    # A login replaces a certificate; an authorizer restricts anonymous clients.
    named = clients == "sasl_ssl" or setting(node, "authorizer") not in ("", "none")
    anybody = setting(node, "ssl.client.auth") == "none" and not named
    addresses = setting(node, "listeners").split(",") if "broker" in node.roles else []
    for key, address, protocol, admits_anonymous in (
        *(("listeners", each.strip(), clients, anybody) for each in addresses),
        ("inter.node.listener", node.inter_node_listener, among_nodes, False),  # nodes always show a certificate
    ):
        host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
        if not address or is_loopback(host):
            continue
        if protocol == PLAINTEXT:
            yield f"{key} {address} (plaintext)"
        elif both:
            yield f"{key} {address} (plaintext besides TLS: listener.security.migration)"
        elif admits_anonymous:
            yield f"{key} {address} (clients without a certificate: ssl.client.auth=none)"


def insecure_listeners(picture: Picture) -> Iterator[Problem]:
    """Find listeners that other machines can reach without identification."""
    found = [
        f"node {node_id}: {listener}"
        for node_id, node in sorted((picture.nodes or {}).items())
        for listener in _open_listeners(node)
    ]
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'listener lets', 'listeners let')} every client that reaches the port from other "
            "machines read, write and delete everything",
            tuple(found),
            "use TLS with users or client certificates (docs/security.md), or protect the port with a firewall or "
            "network policy and ignore this check: --ignore listener-insecure",
        )


def advertised(picture: Picture) -> Iterator[Problem]:
    """Find brokers that advertise a loopback address to clients on other machines."""
    if len({node.hostname for node in (picture.nodes or {}).values()}) < 2:
        return
    found = [
        f"broker {broker_id}: {broker.host}:{broker.port}"
        for broker_id, broker in sorted(picture.brokers().items())
        if is_loopback(broker.host)
    ]
    if found:
        yield Problem(
            "error",
            f"{counted(len(found), 'broker advertises', 'brokers advertise')} a loopback address, although the nodes "
            "run on several machines: clients on other machines cannot reach the partitions led there",
            tuple(found),
            "set listeners, or advertised.listeners, to an address that clients can reach",
        )


def racks(picture: Picture) -> Iterator[Problem]:
    """Find brokers without a rack while others have one."""
    brokers = picture.brokers()
    found = [broker_id for broker_id, broker in sorted(brokers.items()) if not broker.rack]
    if found and len(found) < len(brokers):
        yield Problem(
            "warning",
            f"{counted(len(found), 'broker has', 'brokers have')} no rack, but others have one: all replicas of a "
            "partition may end up in one rack",
            tuple(f"broker {broker_id}" for broker_id in found),
            "set rack in their configuration, and restart them",
        )


CONFIGS_CHECKS = (
    Check("config-differs", "settings that differ between nodes", ("nodes",), differences),
    Check("advertised-loopback", "addresses that clients cannot reach", ("nodes", "cluster"), advertised),
    Check("rack-missing", "brokers without a rack among others with one", ("cluster",), racks),
    Check("listener-insecure", "listeners that admit every client", ("nodes",), insecure_listeners),
)
