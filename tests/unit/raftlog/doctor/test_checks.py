"""Each check finds what it is about, once, and nothing where all is well."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from typer.main import get_command

from raftlog._core.descriptions import (
    GroupListing,
    HangingTransaction,
    LoopLagDescription,
    OpenFilesDescription,
    TransactionListing,
)
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.picture import Finding, Picture, Unanswered
from raftlog._doctor.report import examine
from raftlog.cli.app import tree
from raftlog.cli.doctor import FailOn, is_bad, told
from raftlog.errors import StorageError
from raftlog.types import TopicPartition
from tests.support import pictures
from tests.support.pictures import GIB, NOW_MS, ORDERS, broker, configs, healthy, lag, node, partition, topic, voter


def orders(*parts: Any, **settings: str) -> dict[str, Any]:
    """Return the changes that make `orders` consist of these partitions, with settings (`min_insync_replicas="1"`)."""
    values = {"min.insync.replicas": "2", **{key.replace("_", "."): value for key, value in settings.items()}}
    return {"topics": [topic("orders", *parts)], "configs": {"orders": configs(values, "dynamic_topic")}}


def brokers(*found: Any) -> dict[str, Any]:
    return {"cluster": pictures.cluster(*found)}


def nodes(*found: Any) -> dict[str, Any]:
    return {"nodes": {each.node_id: each for each in found}}


def groups(members: int, now: Any, before: Any = None) -> dict[str, Any]:
    state = "stable" if members else "empty"
    return {
        "groups": [GroupListing("billing", state, members, 1)],
        "lags": {"billing": {ORDERS: now}},
        "lags_before": {"billing": {ORDERS: before or now}},
    }


def transaction(state: str, begun_s_ago: int) -> dict[str, Any]:
    return {"transactions": [TransactionListing("pay-1", "", 7, state, NOW_MS - begun_s_ago * 1000, 1)]}


def setting(node_id: int, **values: str) -> Any:
    """Return a node with these settings (`num_partitions="3"`) besides those that all have."""
    more = configs({key.replace("_", "."): value for key, value in values.items()})
    return node(node_id, configs={**node(node_id).configs, **more})


DAY_MS = 86_400_000
THROTTLE = configs({"leader.replication.throttled.rate": "1000"}, "dynamic_broker")
MOVING = partition(0, [2, 3, 1], leader=1, isr=[1], adding_replicas=[2, 3])
WHOLE = partition(0, [1, 2, 3])
LATE = {"log_end_offset": 9_000, "lag": 8_900, "lag_seconds": 900.0}

FOUND: list[tuple[str, str, str, Mapping[str, Any]]] = [
    # the check, how bad it is, a piece of what it says or of where, and what is otherwise in the picture
    ("quorum-no-leader", "error", "start controllers", {"quorum": pictures.quorum(voter(1), leader_id=-1)}),
    (
        "quorum-no-slack",
        "error",
        "controller 3: unreachable",
        {"quorum": pictures.quorum(voter(1, "leader"), voter(2), voter(3, "unreachable"))},
    ),
    (
        "quorum-voter-behind",
        "warning",
        "controller 5: unreachable",
        {"quorum": pictures.quorum(voter(1, "leader"), voter(2), voter(3), voter(4), voter(5, "unreachable"))},
    ),
    (
        "quorum-voter-behind",
        "warning",
        "controller 2: 5,000 entries behind",
        {"quorum": pictures.quorum(voter(1, "leader"), voter(2, lag=5_000), voter(3))},
    ),
    (
        "quorum-voter-behind",
        "warning",
        "controller 3: no contact for 9 s",
        {"quorum": pictures.quorum(voter(1, "leader"), voter(2), voter(3, last_contact_ms=9_000))},
    ),
    (
        "metadata-behind",
        "warning",
        "broker 2: 9,000 behind",
        {
            "quorum": pictures.quorum(
                voter(1, "leader"),
                voter(2),
                voter(3),
                observers=[pictures.observer(2, lag=9_000)],
            )
        },
    ),
    ("quorum-size", "warning", "have one controller", {"quorum": pictures.quorum(voter(1, "leader"))}),
    (
        "quorum-size",
        "warning",
        "tolerate no more failures than 3",
        {"quorum": pictures.quorum(voter(1, "leader"), voter(2), voter(3), voter(4))},
    ),
    ("broker-fenced", "error", "holds 2 replicas", brokers(broker(1), broker(2), broker(3, fenced=True))),
    (
        "broker-fenced",
        "warning",
        "raftlog cluster unregister-broker 3",
        brokers(broker(1), broker(2), broker(3, fenced=True, replicas=0)),
    ),
    (
        "broker-fenced",
        "warning",
        "was stopped",
        brokers(broker(1), broker(2), broker(3, fenced=True, in_controlled_shutdown=True)),
    ),
    ("broker-stopping", "note", "stopping", brokers(broker(1), broker(2), broker(3, in_controlled_shutdown=True))),
    ("broker-set-aside", "warning", "raftlog broker undrain 2", brokers(broker(1), broker(2, drained=True), broker(3))),
    (
        "broker-set-aside",
        "warning",
        "raftlog broker uncordon 2",
        brokers(broker(1), broker(2, cordoned=True), broker(3)),
    ),
    ("node-silent", "warning", "node 2 does not describe itself: slow", {"silent_nodes": {2: "slow"}}),
    ("node-not-ready", "warning", "no lease", nodes(node(1), node(2, not_ready="no lease"), node(3))),
    ("version-mixed", "warning", "0.9: nodes 2", nodes(node(1), node(2, version="0.9"), node(3))),
    (
        "feature-level-low",
        "note",
        "level 1, but all nodes support level 2",
        {"cluster": pictures.cluster(broker(1), broker(2), broker(3), level=1)},
    ),
    (
        "partition-offline",
        "error",
        "orders-0 (no leader; brokers with all records: 2)",
        orders(partition(0, [1, 2], leader=-1, isr=[2], offline_replicas=[2]), min_insync_replicas="1"),
    ),
    (
        "partition-offline",
        "error",
        "leader 1 is down",
        orders(partition(0, [1, 2, 3], offline_replicas=[1])),
    ),
    (
        "partition-log-lost",
        "error",
        "orders-0 has no leader: broker 1 alone had every record and came back without the log",
        orders(partition(0, [1, 2], leader=-1, isr=[1], lost_replicas=[1]), min_insync_replicas="1"),
    ),
    ("leader-silent", "error", "frozen", {"silent_leaders": {2: "frozen"}}),
    (
        "partition-under-min-isr",
        "error",
        "orders-0 (in sync: 1 of 1, 2, 3; needs 2)",
        orders(partition(0, [1, 2, 3], isr=[1])),
    ),
    (
        "partition-under-replicated",
        "warning",
        "orders-0 (out of sync: 3)",
        orders(partition(0, [1, 2, 3], isr=[1, 2])),
    ),
    (
        "replica-offline",
        "error",
        "broker 3 runs, but has no working log for 1 partition",
        orders(partition(0, [1, 2, 3], isr=[1, 2], offline_replicas=[3])),
    ),
    ("replica-of-unknown-broker", "error", "broker 9", orders(partition(0, [1, 2, 9], isr=[1, 2]))),
    (
        "log-dir-offline",
        "error",
        "node 2 /data: disk gone",
        nodes(node(1), node(2, log_dirs=[pictures.log_dir(error=StorageError("disk gone"))])),
    ),
    (
        "disk-full",
        "error",
        "not even to the 2 partitions that no other broker can lead",
        brokers(broker(1), broker(2, storage_full=True, leaderships=2)),
    ),
    ("disk-full", "error", "others lead", brokers(broker(1), broker(2, storage_full=True, leaderships=0))),
    (
        "disk-near-full",
        "error",
        "4% free",
        nodes(node(1), node(2, log_dirs=[pictures.log_dir(usable_bytes=4 * GIB)])),
    ),
    (
        "disk-near-full",
        "warning",
        "10.0 GiB of 100.0 GiB",
        nodes(node(1), node(2, log_dirs=[pictures.log_dir(usable_bytes=10 * GIB)])),
    ),
    (
        "disk-near-full",
        "error",
        "1 metadata directory is nearly full",
        nodes(node(1), node(2, log_dirs=[pictures.log_dir(path="/meta", metadata=True, usable_bytes=GIB)])),
    ),
    (
        "clock-skew",
        "warning",
        "node 2 is ahead of node 1 by 1.9 s or more",
        nodes(node(1, clock_offset_ms=-900.0, clock_uncertainty_ms=50), node(2, clock_offset_ms=1_100.0)),
    ),
    (
        "open-files",
        "error",
        "950 of 1,000 are open",
        nodes(node(1), node(2, open_files=OpenFilesDescription(950, 1_000, 1_000))),
    ),
    (
        "open-files",
        "warning",
        "1,024, should be 10,000",
        nodes(node(1), node(2, open_files=OpenFilesDescription(50, 1_024, 4_096))),
    ),
    (
        "open-files",
        "warning",
        "should be 26,000 (13,000 are open)",
        nodes(node(1), node(2, open_files=OpenFilesDescription(13_000, 20_000, 20_000))),
    ),
    ("certificate-expiring", "warning", "in 9.0 days", nodes(node(1, certificate_expires_ms=NOW_MS + 9 * DAY_MS))),
    ("certificate-expiring", "error", "1.0 days ago", nodes(node(1, certificate_expires_ms=NOW_MS - DAY_MS))),
    (
        "event-loop-late",
        "warning",
        "up to 3,000 ms late",
        nodes(node(1), node(2, loop_lag=LoopLagDescription(10_000, 3_000.0, 0.1, 0.001))),
    ),
    ("nodes-on-one-machine", "note", "a: nodes 1, 2", nodes(node(1, hostname="a"), node(2, hostname="a"))),
    (
        "transaction-hanging",
        "error",
        "raftlog txn abort-hanging orders --partition 0 --start-offset 12",
        {"hanging": [HangingTransaction("orders", 0, 7, 0, 12, 0, 0)]},
    ),
    ("transaction-undelivered", "warning", "pay-1: prepare_commit", transaction("prepare_commit", 120)),
    ("transaction-long-open", "note", "pay-1 (for 600 s)", transaction("ongoing", 600)),
    ("group-lag", "warning", "orders-0: lag 8,900, the oldest 900 s old", groups(1, lag(100, **LATE))),
    ("group-missed-records", "warning", "before the log start", groups(1, lag(10, log_start_offset=50))),
    ("group-missed-records", "warning", "the log ends at 100", groups(1, lag(500))),
    ("group-empty-with-lag", "note", "a lag of 90", groups(0, lag(10))),
    ("topic-unwritable", "error", "replicas: 3, min.insync.replicas: 4", orders(WHOLE, min_insync_replicas="4")),
    ("topic-no-slack", "warning", "replicas: 3, min.insync.replicas: 3", orders(WHOLE, min_insync_replicas="3")),
    (
        "topic-single-replica",
        "warning",
        "--topic orders --replication-factor 3 ",
        orders(partition(0, [1]), min_insync_replicas="1"),
    ),
    (
        "topic-single-replica",
        "warning",
        "--topic orders --replication-factor 3 ",
        {
            **brokers(broker(1), broker(2), broker(3, fenced=True)),
            **orders(partition(0, [1]), min_insync_replicas="1"),
        },
    ),
    (
        "topic-single-replica",
        "note",
        "a cluster of one broker",
        {**brokers(broker(1)), **orders(partition(0, [1]), min_insync_replicas="1")},
    ),
    ("topic-min-isr-one", "note", "raftlog topic alter orders", orders(WHOLE, min_insync_replicas="1")),
    (
        "topic-min-isr-in-file",
        "note",
        "raftlog config set broker default min.insync.replicas=2",
        {"topics": [topic("orders", WHOLE)], "configs": {"orders": configs({"min.insync.replicas": "2"})}},
    ),
    ("topic-unclean-election", "warning", "orders", orders(WHOLE, unclean_leader_election_enable="true")),
    ("topic-not-flushed", "warning", "orders", orders(WHOLE, flush_messages="100")),
    (
        "partition-one-rack",
        "warning",
        "orders-0 (rack a: 1, 2)",
        {
            **brokers(broker(1, rack="a"), broker(2, rack="a"), broker(3, rack="b")),
            **orders(partition(0, [1, 2])),
        },
    ),
    (
        "throttle-forgotten",
        "note",
        "broker 2: leader.replication.throttled.rate=1000",
        nodes(node(1), node(2, configs={**node(2).configs, **THROTTLE})),
    ),
    (
        "throttle-forgotten",
        "warning",
        "topic orders: leader.replication.throttled.replicas=0:1",
        {
            **nodes(node(1), node(2, configs={**node(2).configs, **THROTTLE})),
            **orders(WHOLE, leader_replication_throttled_replicas="0:1"),
        },
    ),
    (
        "reassignment-stuck",
        "warning",
        "orders-0 (no progress within 3 s on broker 3)",
        {
            **orders(MOVING),
            "replicas": {ORDERS: pictures.replicas(ORDERS, b2=50, b3=30)},
            "replicas_before": {ORDERS: pictures.replicas(ORDERS, b2=40, b3=30)},
        },
    ),
    (
        "reassignment-stuck",
        "warning",
        "new replica down: broker 3",
        {**orders(MOVING), **brokers(broker(1), broker(2), broker(3, fenced=True))},
    ),
    ("reassignment-under-way", "note", "orders-0 (to 2, 3; from none)", orders(MOVING)),
    (
        "replica-skew",
        "warning",
        "broker 3 (0, the mean is 6.0)",
        orders(*(partition(number, [1, 2]) for number in range(9))),
    ),
    (
        "leader-skew",
        "warning",
        "broker 1 (9, the mean is 3.0)",
        orders(*(partition(number, [1, 2, 3]) for number in range(9))),
    ),
    ("leader-not-preferred", "note", "led by 2, not 1", orders(partition(0, [1, 2, 3], leader=2))),
    (
        "leader-not-preferred",
        "warning",
        "5 partitions",
        orders(*(partition(number, [1, 2, 3], leader=2) for number in range(5))),
    ),
    (
        "config-differs",
        "warning",
        "num.partitions: 1 on 1, 3; 5 on 2",
        nodes(node(1), setting(2, num_partitions="5"), node(3)),
    ),
    (
        "config-differs",
        "error",
        "controller.quorum.voters",
        nodes(node(1), setting(2, controller_quorum_voters="1@b1:9093,2@b2:9093,4@b4:9093")),
    ),
    ("advertised-loopback", "error", "broker 3: localhost:9092", brokers(broker(1), broker(3, host="localhost"))),
    ("rack-missing", "warning", "broker 2", brokers(broker(1, rack="a"), broker(2), broker(3, rack="b"))),
    (
        "listener-insecure",
        "warning",
        "node 2: listeners 0.0.0.0:9092",
        nodes(node(1), setting(2, listeners="0.0.0.0:9092")),
    ),
    (
        "listener-insecure",
        "warning",
        "node 2: listeners kafka://b2:9192 (plaintext)",
        nodes(node(1), setting(2, listeners="127.0.0.1:9092, kafka://b2:9192")),
    ),
    (
        "listener-insecure",
        "warning",
        "node 2: inter.node.listener 10.0.0.2:9093 (plaintext)",
        nodes(node(1), node(2, inter_node_listener="10.0.0.2:9093")),
    ),
    (
        "listener-insecure",
        "warning",
        "listeners b2:9092 (plaintext besides TLS: listener.security.migration)",
        nodes(setting(2, listeners="b2:9092", listener_security_protocol="ssl", listener_security_migration="true")),
    ),
    (
        "listener-insecure",
        "warning",
        "listeners b2:9092 (clients without a certificate: ssl.client.auth=none)",
        nodes(setting(2, listeners="b2:9092", listener_security_protocol="ssl", ssl_client_auth="none")),
    ),
    (
        "listener-insecure",
        "warning",
        "node 2: inter.node.listener 10.0.0.2:9093 (plaintext)",
        nodes(
            setting(2, listener_security_protocol="ssl", security_inter_broker_protocol="plaintext")._replace(
                inter_node_listener="10.0.0.2:9093"
            )
        ),
    ),
    (
        "authorizer-no-super-user",
        "warning",
        "broker 2",
        nodes(
            setting(1, authorizer="acl", super_users="User:admin", listener_security_protocol="sasl_ssl"),
            setting(2, authorizer="acl", super_users="", listener_security_protocol="sasl_ssl"),
        ),
    ),
    (
        "authorizer-anonymous",
        "warning",
        "broker 2: listener.security.protocol=plaintext",
        nodes(setting(2, authorizer="acl", super_users="User:admin")),
    ),
    (
        "authorizer-anonymous",
        "warning",
        "broker 2: ssl.client.auth=none",
        nodes(
            setting(
                2,
                authorizer="acl",
                super_users="User:admin",
                listener_security_protocol="ssl",
                ssl_client_auth="none",
                listeners="b2:9092",
            )
        ),
    ),
    (
        "authorizer-open",
        "warning",
        "broker 2",
        nodes(
            setting(1, authorizer="acl", super_users="User:admin", allow_everyone_if_no_acl_found="false"),
            setting(2, authorizer="acl", super_users="User:admin", allow_everyone_if_no_acl_found="true"),
        ),
    ),
    (
        "not-all-seen",
        "warning",
        "including 2 topics; problems there are not found\ntopic bills\ntopic orders",
        {"topics": [], "hidden_topics": ["bills", "orders"]},
    ),
    ("not-all-seen", "warning", "settings of nodes 2", nodes(node(1), node(2, configs={}))),
    (
        "not-all-seen",
        "warning",
        "raftlog acl add --allow-principal User:ops --operation Describe --group '*'",
        {"unanswered": [Unanswered("lags", "group billing", "User:ops may not DESCRIBE group 'billing'; ...", True)]},
    ),
    (
        "not-all-seen",
        "warning",
        "the progress of replicas, at leader 1",
        {"unanswered": [Unanswered("replicas", "leader 1", "User:ops may not DESCRIBE the cluster; ...", True)]},
    ),
    (
        "users-unrestricted",
        "note",
        "broker 1",
        nodes(setting(1, listener_security_protocol="sasl_ssl", authorizer="none")),
    ),
]


def found_by(check: str, picture: Picture) -> list[Finding]:
    return [found for found in examine(picture, CHECKS).findings if found.check == check]


def test_nothing_is_found_where_all_is_well() -> None:
    report = examine(healthy(), CHECKS)
    assert report.findings == ()
    assert [each.check for each in report.checked if each.result != "ok"] == []


@pytest.mark.parametrize(("check", "severity", "piece", "changes"), FOUND, ids=[f"{c}-{s}" for c, s, _, _ in FOUND])
def test_what_is_wrong_is_found_and_told_with_its_place(
    check: str, severity: str, piece: str, changes: Mapping[str, Any]
) -> None:
    [found] = found_by(check, healthy(**changes))
    assert found.severity == severity
    assert piece in "\n".join((found.what, *found.where, found.remedy))
    assert found.remedy


def test_every_check_is_shown_to_find_something() -> None:
    assert {check for check, _, _, _ in FOUND} == {check.id for check in CHECKS}


def test_one_command_corrects_the_leaders_of_one_topic_or_of_all() -> None:
    def remedy(**changes: Any) -> str:
        return found_by("leader-not-preferred", healthy(**changes))[0].remedy

    one = topic("orders", *(partition(number, [1, 2, 3], leader=2) for number in range(2)))
    other = topic("events", partition(0, [1, 2, 3], leader=2))
    assert remedy(topics=[one]).endswith("raftlog partition elect orders")
    assert remedy(topics=[one, other]).endswith("raftlog partition elect --all")


def commands() -> dict[str, Any]:
    """Return every command of the command line by its words, and the names of its options."""
    found: dict[str, Any] = {}

    def walk(command: Any, words: str) -> None:
        if getattr(command, "commands", None):
            for name, each in command.commands.items():
                walk(each, f"{words} {name}".strip())
        else:
            found[words] = {option for parameter in command.params for option in parameter.opts}

    walk(get_command(tree()), "")
    return found


def test_every_command_in_a_remedy_exists_with_its_options() -> None:
    known = commands()
    named = set()
    for check, _, _, changes in FOUND:
        for found in found_by(check, healthy(**changes)):
            for said in re.findall(r"raftlog ([^;:,()]+)", found.remedy):
                words = said.split()
                command = next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in known), None)
                assert command is not None, (
                    f"{check} recommends raftlog {' '.join(words[:2])}, but there is no such command"
                )
                options = {word for word in words if word.startswith("--")}
                assert options <= known[command], (
                    f"{check} recommends options that raftlog {command} has not: {options - known[command]}"
                )
                named.add(command)
    assert {"partition elect", "topic alter", "txn abort-hanging", "group describe"} <= named


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        # what looks like trouble and is none
        ("group-lag", groups(1, lag(100, **LATE), lag(50, **{**LATE, "lag": 9_500}))),  # it gets nearer
        ("group-lag", groups(1, lag(10))),  # behind by a second
        ("group-lag", groups(0, lag(10, **LATE))),  # no member reads; another check reports that
        ("clock-skew", nodes(node(1), node(2, clock_offset_ms=900.0, clock_uncertainty_ms=500.0))),  # not certain
        ("event-loop-late", nodes(node(1, loop_lag=LoopLagDescription(20, 3_000.0, 0.5, 0.5)))),  # it has just begun
        ("open-files", nodes(node(1, roles=["controller"], open_files=OpenFilesDescription(50, 1_024, 1_024)))),
        ("open-files", nodes(node(1, open_files=OpenFilesDescription(-1, -1, -1)))),  # unlimited
        (
            "advertised-loopback",  # all of it runs on one machine
            {**brokers(broker(1, host="127.0.0.1")), **nodes(node(1, hostname="a"), node(2, hostname="a"))},
        ),
        ("certificate-expiring", nodes(node(1, certificate_expires_ms=NOW_MS + 30 * DAY_MS))),
        ("quorum-size", {"quorum": pictures.quorum()}),  # the answering node does not know the voters
        ("quorum-size", {"quorum": pictures.quorum(voter(1, "leader")), **brokers(broker(1))}),
        (
            "quorum-no-slack",
            {"quorum": pictures.quorum(*(voter(n, "leader" if n == 1 else "follower") for n in (1, 2)))},
        ),
        (
            "quorum-no-slack",
            {"quorum": pictures.quorum(voter(1, "leader"), voter(2), voter(3), voter(4), voter(5, "unreachable"))},
        ),
        (
            "quorum-voter-behind",  # quorum-no-slack says it
            {"quorum": pictures.quorum(voter(1, "leader"), voter(2), voter(3, "unreachable"))},
        ),
        ("throttle-forgotten", {**nodes(node(1, configs={**node(1).configs, **THROTTLE})), **orders(MOVING)}),
        ("reassignment-stuck", {**orders(MOVING), "replicas_before": None}),
        ("leader-not-preferred", {**brokers(broker(1, drained=True)), **orders(partition(0, [1, 2], leader=2))}),
        ("leader-not-preferred", orders(partition(0, [1, 2], leader=2, isr=[2]))),
        ("replica-skew", {**brokers(broker(1), broker(2), broker(3, cordoned=True)), **orders(*[WHOLE] * 9)}),
        ("partition-under-replicated", orders(partition(0, [1, 2, 3], isr=[1, 2], adding_replicas=[3]))),
        ("partition-under-min-isr", orders(partition(0, [1]))),  # it never could: topic-unwritable
        ("listener-insecure", nodes(setting(1, listeners="[::1]:9092"), setting(2, listeners="localhost:9092"))),
        ("listener-insecure", nodes(setting(1, listeners="127.0.0.1:9092,kafka://127.0.0.1:9192"))),
        (
            "listener-insecure",
            nodes(
                setting(
                    1, listeners="0.0.0.0:9092", listener_security_protocol="ssl", ssl_client_auth="required"
                )._replace(inter_node_listener="10.0.0.2:9093")
            ),
        ),
        (
            "listener-insecure",  # users log in, and need no certificate
            nodes(
                setting(
                    1, listeners="0.0.0.0:9092", listener_security_protocol="sasl_ssl", ssl_client_auth="none"
                )._replace(inter_node_listener="10.0.0.2:9093")
            ),
        ),
        (
            "config-differs",  # files of one's own, and the same super users
            nodes(
                setting(1, super_users="User:a;User:b", sasl_users_location="/a"),
                setting(2, super_users="User:b;User:a", sasl_users_location="/b"),
            ),
        ),
        (
            "authorizer-no-super-user",  # a controller asks no authorizer
            nodes(setting(1)._replace(roles=["controller"]), setting(2, authorizer="none")),
        ),
        ("authorizer-anonymous", nodes(setting(1, authorizer="acl", listener_security_protocol="sasl_ssl"))),
        (
            "authorizer-anonymous",
            nodes(setting(1, authorizer="acl", listener_security_protocol="ssl", ssl_client_auth="auto")),
        ),
        ("authorizer-open", nodes(setting(1, allow_everyone_if_no_acl_found="true"))),  # there is no authorizer
        ("not-all-seen", {"unanswered": [Unanswered("nodes", "node 3", "timed out")]}),  # it did not say no
        (
            "node-silent",  # it answered
            {"silent_nodes": {3: "x"}, "unanswered": [Unanswered("nodes", "node 3", "User:a may not DESCRIBE", True)]},
        ),
        ("users-unrestricted", nodes(setting(1, authorizer="acl", listener_security_protocol="sasl_ssl"))),
        ("config-differs", nodes(setting(1, rack="a", log_dirs="/x"), setting(2, rack="b", log_dirs="/y"))),
        (
            "config-differs",  # the same voters in another order, and a node that names none
            nodes(
                setting(1, controller_quorum_voters="2@b:1,1@a:1"),
                setting(2, controller_quorum_voters="1@a:1,2@b:1"),
                setting(3, controller_quorum_voters=""),
            ),
        ),
        ("config-differs", nodes(node(1), node(2, roles=["controller"], configs=configs({"num.partitions": "9"})))),
        ("node-silent", {"silent_nodes": {3: "x"}, **brokers(broker(1), broker(2), broker(3, fenced=True))}),
        ("feature-level-low", {"silent_nodes": {3: "x"}, "cluster": pictures.cluster(broker(1), level=1)}),
        ("feature-level-low", {"nodes": {}, "cluster": pictures.cluster(broker(1), level=1)}),
        ("transaction-undelivered", transaction("prepare_commit", 2)),
        ("transaction-long-open", transaction("complete_commit", 9_000)),
        ("partition-one-rack", {**brokers(broker(1, rack="a"), broker(2, rack="a")), **orders(partition(0, [1, 2]))}),
    ],
)
def test_what_looks_like_trouble_and_is_none(check: str, changes: Mapping[str, Any]) -> None:
    picture = healthy(**changes)
    assert found_by(check, picture) == []
    [checked] = [each for each in examine(picture, CHECKS).checked if each.check == check]
    assert checked.result == "ok", "the check must be reported as done"


@pytest.mark.parametrize(
    "part", ["quorum", "topics", "configs", "replicas", "nodes", "groups", "lags", "hanging", "transactions"]
)
def test_without_a_part_of_the_picture_checks_are_skipped_with_the_reason(part: str) -> None:
    changes: dict[str, Any] = {part: None}
    report = examine(replace(healthy(**changes), unanswered=[Unanswered(part, "all", "timed out")]), CHECKS)
    skipped = {each.check for each in report.skipped()}
    assert skipped == {check.id for check in CHECKS if part in check.needs} != set()
    assert {each.why for each in report.skipped()} == {"not known: timed out"}
    assert report.findings == ()
    assert is_bad(report, FailOn.WARNING), "a check that could not be made must count as a warning"
    assert not is_bad(report, FailOn.ERROR)
    assert "all fine" not in "\n".join(told(report, healthy(**changes), 120))
    left = examine(healthy(**changes), CHECKS, ignored=skipped)
    assert not is_bad(left, FailOn.NOTE), "a check that was ignored must not count"


def test_one_look_only_leaves_out_what_takes_two() -> None:
    report = examine(healthy(lags_before=None, replicas_before=None, apart_s=0.0), CHECKS)
    assert [(each.check, each.why) for each in report.skipped()] == [
        ("group-lag", "it needs two readings, see --interval")
    ]
    assert not is_bad(report, FailOn.NOTE), (
        "a check that needs a second reading must not count if only one was asked for"
    )


def test_findings_are_told_the_worst_first_and_ignored_ones_not() -> None:
    picture = healthy(**orders(partition(0, [1, 2, 3], isr=[1]), min_insync_replicas="2"))
    report = examine(picture, CHECKS)
    assert [(found.check, found.severity) for found in report.findings] == [
        ("partition-under-min-isr", "error"),
        ("partition-under-replicated", "warning"),
    ]
    assert report.worst() == "error"
    left = examine(picture, CHECKS, ignored=["partition-under-min-isr"])
    assert [found.check for found in left.findings] == ["partition-under-replicated"]
    assert left.worst() == "warning"
    document = report.document()
    assert document["counts"] == {"error": 1, "warning": 1, "note": 0}
    assert document["findings"][0]["where"] == ("orders-0 (in sync: 1 of 1, 2, 3; needs 2)",)


FACTORS = {"offsets_topic_replication_factor": "3", "transaction_state_log_replication_factor": "3"}


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (["3", "3"], ""),
        (["3", "1"], "; for new topics set default.replication.factor=3 in the servers' configuration"),
        (["2"], ""),
    ],
)
def test_replication_factors_are_recommended_only_where_the_servers_have_lower_ones(
    factors: Sequence[str], said: str
) -> None:
    servers = [
        setting(number, default_replication_factor=factor, **FACTORS) for number, factor in enumerate(factors, 1)
    ]
    picture = healthy(**orders(partition(0, [1]), min_insync_replicas="1"), **nodes(*servers))
    [found] = found_by("topic-single-replica", picture)
    assert found.remedy == (
        "give them more: raftlog partition reassign --generate --topic orders --replication-factor 3 > plan.json, then "
        f"raftlog partition reassign --plan plan.json{said}"
    )


def test_gaps_of_one_list_are_told_together_and_shortened() -> None:
    gaps = [Unanswered("hanging", "some", f"accounts-{number} has no leader at the moment") for number in range(25)]
    picture = healthy(unanswered=[*gaps, Unanswered("nodes", "node 3", "timed out")])
    lines = list(told(examine(picture, CHECKS), picture, 120, more="--output json has all"))
    assert lines[0] == "unknown  some of the hanging transactions: 25 questions have no answer"
    assert lines[1] == "  where  accounts-0 has no leader at the moment"
    assert lines[8:11] == [
        "         accounts-7 has no leader at the moment",
        "         and 17 more; --output json has all",
        "unknown  node 3: timed out",
    ]


def test_what_a_topic_is_set_to_is_not_guessed() -> None:
    assert found_by("topic-min-isr-one", healthy(configs={})) == []


def test_a_group_of_many_partitions_is_one_finding() -> None:
    parts = [TopicPartition("orders", number) for number in range(50)]
    late = {part: lag(100, **LATE) for part in parts}
    [found] = found_by("group-lag", healthy(lags={"billing": late}, lags_before={"billing": late}))
    assert len(found.where) == 50
