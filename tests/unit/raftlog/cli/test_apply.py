"""`raftlog apply`: what it does the first time, that it does nothing the second time, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raftlog.cli import apply as apply_plan
from raftlog.errors import BrokerUnavailable, TopicAuthorizationFailed, UnknownOutcome
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512
from raftmeta.credentials import CredentialKey
from tests.support.admin_service import AdminServer
from tests.support.command_line import Ran, Run
from tests.unit.raftlog.cli.test_security import logs_in

ORDERS = {
    "name": "orders",
    "partitions": 2,
    "replicationFactor": 3,
    "config": {"retention.ms": "7d", "min.insync.replicas": 2, "cleanup.policy": ["compact", "delete"]},
}
USER = {"name": "shop", "passwordFile": "shop.password"}
MAY_WRITE = {
    "principal": "User:shop",
    "operations": ["Write", "Describe"],
    "resource": {"type": "topic", "name": "orders"},
}
MAY_NOT = {
    "principal": "User:*",
    "permission": "deny",
    "operations": ["All"],
    "resource": {"type": "transactional-id", "name": "x", "pattern": "prefixed"},
    "host": "::ffff:10.0.0.1",
}
MAY_LOOK = {"principal": "User:shop", "operations": ["describe"], "resource": {"type": "cluster"}}
EVERYTHING: Mapping[str, Any] = {"topics": [ORDERS], "users": [USER], "acls": [MAY_WRITE, MAY_NOT, MAY_LOOK]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the file is to be; the password of a user lies beside it."""
    (tmp_path / "shop.password").write_text("s3cret\n")
    return tmp_path / "cluster.json"


def apply(run: Run, file: Path, document: Mapping[str, Any], *options: str, **terminal: str) -> Ran:
    file.write_text(json.dumps(document))
    return run("apply", str(file), *options, **terminal)


def results(ran: Ran) -> list[tuple[str, str, str]]:
    return [(each["kind"], each["name"], each["result"]) for each in ran.json["objects"]]


def test_the_first_time_everything_and_the_second_time_nothing(server: AdminServer, run: Run, file: Path) -> None:
    ran = apply(run, file, EVERYTHING)
    assert (ran.code, ran.err) == (0, "6 created, 0 unchanged\n")
    assert [(row["kind"], row["name"], row["result"]) for row in ran.table] == [
        ("topic", "orders", "created"),
        ("user", "shop", "created"),
        ("acl", "User:shop may Write topic orders", "created"),
        ("acl", "User:shop may Describe topic orders", "created"),
        ("acl", "User:shop may Describe the cluster", "created"),
        ("acl", "User:* may not do anything with every transactional id that begins with x from 10.0.0.1", "created"),
    ]
    topic = server.image.topic("orders")
    assert topic is not None
    assert [len(part.replicas) for part in topic.partitions] == [3, 3]
    configs = {row["key"]: row["value"] for row in run("config", "describe", "topic", "orders").table}
    assert configs["retention.ms"] == "604800000"
    assert configs["cleanup.policy"] == "compact,delete"
    assert logs_in(server, "shop", "s3cret")
    assert set(map(str, server.image.acls)) == {
        "ALLOW User:shop WRITE TOPIC LITERAL 'orders' from *",
        "ALLOW User:shop DESCRIBE TOPIC LITERAL 'orders' from *",
        "ALLOW User:shop DESCRIBE CLUSTER LITERAL 'raftlog-cluster' from *",
        "DENY User:* ALL TRANSACTIONAL_ID PREFIXED 'x' from 10.0.0.1",
    }
    before = server.image.offset
    ran = apply(run, file, EVERYTHING, "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    assert {result for _, _, result in results(ran)} == {"unchanged"}
    assert ran.json["dry_run"] is False
    assert server.image.offset == before


def test_a_dry_run_says_it_and_does_nothing(server: AdminServer, run: Run, file: Path) -> None:
    before = server.image.offset
    ran = apply(run, file, EVERYTHING, "--dry-run")
    assert ran.code == 0
    assert ran.err == "6 created, 0 unchanged; nothing was changed, this was a dry run\n"
    assert {row["result"] for row in ran.table} == {"would be created"}
    ran = apply(run, file, EVERYTHING, "--dry-run", "--output", "json")
    assert ran.json["dry_run"] is True
    assert {result for _, _, result in results(ran)} == {"created"}
    assert server.image.offset == before


def test_toml(server: AdminServer, run: Run, file: Path) -> None:
    toml = file.with_suffix(".toml")
    toml.write_text(
        """
        [[topics]]
        name = "orders"
        partitions = 2
        config = {"retention.ms" = "7d"}
        [[users]]
        name = "shop"
        passwordFile = "shop.password"
        mechanism = "SCRAM-SHA-256"
        iterations = 5_000
        [[acls]]
        principal = "User:shop"
        operations = ["Read"]
        resource = {type = "group", name = "billing"}
        """
    )
    ran = run("apply", str(toml))
    assert (ran.code, ran.err) == (0, "3 created, 0 unchanged\n")
    assert server.image.credentials[CredentialKey("shop", SCRAM_SHA_256)].iterations == 5_000
    assert [str(each) for each in server.image.acls] == ["ALLOW User:shop READ GROUP LITERAL 'billing' from *"]


def test_a_topic_that_is_there_gets_settings_and_partitions(server: AdminServer, run: Run, file: Path) -> None:
    wanted = {"name": "a", "partitions": 4, "replicationFactor": 2, "config": {"retention.ms": 6.048e8}}
    ran = apply(run, file, {"topics": [wanted]})
    assert (ran.code, ran.err) == (1, "1 changed, 0 unchanged, 1 differs\n")
    (row,) = ran.table
    assert row["details"] == (
        "2 -> 4 partitions, retention.ms=604800000; differs: replication factor 3, the file says 2; "
        "see raftlog partition reassign"
    )
    topic = server.image.topic("a")
    assert topic is not None
    assert len(topic.partitions) == 4
    ran = apply(run, file, {"topics": [{"name": "a", "partitions": 3, "config": {"retention.ms": "168h"}}]})
    (row,) = ran.table
    assert (ran.code, ran.err) == (1, "0 unchanged, 1 differs\n")
    assert (row["result"], row["details"]) == (
        "differs",
        "4 partitions, the file says 3; a topic cannot lose partitions",
    )
    ran = apply(run, file, {"topics": [{"name": "a", "replicationFactor": 1}]}, "--dry-run", "-o", "json")
    assert (ran.code, ran.json["objects"]) == (
        1,
        [
            {
                "kind": "topic",
                "name": "a",
                "result": "differs",
                "details": "replication factor 3, the file says 1; see raftlog partition reassign",
                "differs": True,
            }
        ],
    )
    accepted = apply(run, file, {"topics": [{"name": "a", "replicationFactor": 1}]}, "--accept-differences")
    assert (accepted.code, accepted.err) == (0, "0 unchanged, 1 differs\n")
    assert apply(run, file, {"topics": [{"name": "a", "partitions": 4, "replicationFactor": 3}]}).code == 0
    configs = {row["key"]: row["value"] for row in run("config", "describe", "topic", "a").table}
    assert configs == {"min.insync.replicas": "2", "retention.ms": "604800000"}


def test_a_setting_that_equals_the_default_is_set(server: AdminServer, run: Run, file: Path) -> None:
    """Else it would change with the default, and the file would not be what there is."""
    default = {row["key"]: row["value"] for row in run("config", "describe", "topic", "a", "--all").table}
    document = {"topics": [{"name": "a", "config": {"retention.ms": default["retention.ms"]}}]}
    assert results(apply(run, file, document, "-o", "json")) == [("topic", "a", "changed")]
    assert results(apply(run, file, document, "-o", "json")) == [("topic", "a", "unchanged")]


def test_users_who_are_there_are_left_alone_unless_asked_for(server: AdminServer, run: Run, file: Path) -> None:
    run("user", "create", "shop", "--iterations", "5000", stdin="old")
    run("user", "passwd", "shop", "--mechanism", "SCRAM-SHA-256", stdin="old")
    document = {"users": [USER]}
    assert results(apply(run, file, document, "-o", "json")) == [("user", "shop", "unchanged")]
    assert logs_in(server, "shop", "old")
    assert results(apply(run, file, document, "--set-passwords", "-o", "json")) == [("user", "shop", "changed")]
    for mechanism in (SCRAM_SHA_256, SCRAM_SHA_512):
        assert logs_in(server, "shop", "s3cret", mechanism)
    assert server.image.credentials[CredentialKey("shop", SCRAM_SHA_512)].iterations == 5_000


def test_a_user_without_the_mechanism_that_is_wanted(server: AdminServer, run: Run, file: Path) -> None:
    run("user", "create", "shop", stdin="old")
    document = {"users": [{**USER, "mechanism": "SCRAM-SHA-256"}]}
    (row,) = apply(run, file, document).table
    assert (row["result"], row["details"]) == (
        "unchanged",
        "cannot log in with SCRAM-SHA-256; --set-passwords changes that",
    )
    apply(run, file, document, "--set-passwords")
    for mechanism in (SCRAM_SHA_256, SCRAM_SHA_512):
        assert logs_in(server, "shop", "s3cret", mechanism), (
            "the new password must count for each mechanism, and the old one for none"
        )


def test_permissions_that_are_not_in_the_file(server: AdminServer, run: Run, file: Path) -> None:
    run("acl", "add", "--allow-principal", "User:other", "--topic", "orders")
    run("acl", "add", "--allow-principal", "User:shop", "--operation", "Write", "--topic", "orders")
    apply(run, file, {"acls": [MAY_WRITE]})
    assert len(server.image.acls) == 3, "ACLs that are not in the file must stay"
    ran = apply(run, file, {"acls": [MAY_WRITE]}, "--prune-acls", "--dry-run")
    assert ("acl", "User:other may do everything with topic orders", "would be removed") in [
        (row["kind"], row["name"], row["result"]) for row in ran.table
    ]
    ran = apply(run, file, {"acls": [MAY_WRITE]}, "--prune-acls", terminal="n\n")
    assert ran.code == 1
    assert "to remove: User:other may do everything with topic orders\nremove 1 permission? [y/N]" in ran.err
    assert "nothing was changed" in ran.err
    ran = apply(run, file, {"acls": [MAY_WRITE]}, "--prune-acls")
    assert ran.code == 2
    assert "--yes" in ran.err
    assert len(server.image.acls) == 3
    ran = apply(run, file, {"acls": [MAY_WRITE]}, "--prune-acls", terminal="y\n")
    assert ran.code == 0
    assert ran.err.endswith("1 removed, 2 unchanged\n")
    assert len(server.image.acls) == 2
    assert apply(run, file, {"acls": []}, "--prune-acls", "--force").code == 0
    assert not server.image.acls


def test_pruning_needs_a_list(server: AdminServer, run: Run, file: Path) -> None:
    run("acl", "add", "--allow-principal", "User:other", "--topic", "orders")
    ran = apply(run, file, {"topics": []}, "--prune-acls", "--force")
    assert ran.code == 2
    assert "--prune-acls needs acls in" in ran.err
    assert len(server.image.acls) == 1


def test_more_permissions_than_go_into_one_request(
    server: AdminServer, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_plan, "AT_ONCE", 2)
    acls = [{**MAY_LOOK, "principal": f"User:{number}"} for number in range(5)]
    assert apply(run, file, {"acls": acls}).code == 0
    assert len(server.image.acls) == 5
    assert apply(run, file, {"acls": acls[:2]}, "--prune-acls", "--force").code == 0
    assert len(server.image.acls) == 2


MISTAKES: Sequence[tuple[Any, Sequence[str]]] = [
    ([], ["an object with topics, users, acls is needed, not []"]),
    ({"topcis": []}, ["topcis: unknown key; did you mean topics?"]),
    ({"topics": {}, "users": [3]}, ["topics: a list is needed, not {}", "users[0]: an object is needed, not 3"]),
    (
        {"topics": [{}, {"name": "a/b", "partitions": 0, "replicationFactor": "3"}, {"name": "__x"}, {"name": ""}]},
        [
            "topics[0].name: is needed",
            "topics[1].name: 'a/b' is not a topic name",
            "topics[1].partitions: a whole number from 1 on is needed, not 0",
            'topics[1].replicationFactor: a whole number from 1 to 32,767 is needed, not "3"',
            "topics[2].name: '__x': names that begin with two underscores",
            'topics[3].name: a text is needed, not ""',
        ],
    ),
    (
        {"topics": [{"name": "b", "partitions": True, "config": {"retention.ms": None}}, {"name": "b"}]},
        [
            "topics[0].partitions: a whole number from 1 on is needed, not true",
            "topics[0].config.retention.ms: a text, a number or true or false is needed, not null",
            "topics[1].name: 'b' is in topics[0] already",
        ],
    ),
    (
        {
            "users": [
                {"name": "User:x"},
                {"name": "y", "passwordFile": "nowhere", "mechanism": "PLAIN", "iterations": 1},
            ]
        },
        [
            "users[0].name: 'User:x': write the name alone",
            "users[0].passwordFile: is needed",
            "nowhere cannot be read: No such file or directory",
            "users[1].mechanism: there is no mechanism 'PLAIN'",
            "users[1].iterations: a whole number from 4,096 to 1,000,000 is needed, not 1",
        ],
    ),
    ({"users": [{"name": "z", "password": "s3cret"}]}, ["users[0].password: unknown key"]),
    ({"users": [{"name": "ANONYMOUS", "passwordFile": "shop.password"}]}, ["users[0].name: 'ANONYMOUS' is reserved"]),
    (
        {"acls": [{"principal": "shop", "permission": "maybe", "operations": ["Raed", 3], "resource": 3, "host": "h"}]},
        [
            "acls[0].principal: 'shop': write User:NAME",
            "acls[0].permission: 'maybe': write one of allow, deny",
            "acls[0].host: 'h': write an IP address",
            "acls[0].resource: an object is needed, not 3",
            "acls[0].operations[0]: 'Raed': did you mean Read?",
            "acls[0].operations[1]: '3': write one of",
        ],
    ),
    (
        {
            "acls": [
                {"principal": "User:a", "operations": ["Write"], "resource": {"type": "group", "name": "g"}},
                {"principal": "User:a", "operations": "Read", "resource": {"type": "topics", "pattern": "any"}},
                {"principal": "User:a", "operations": ["Read"], "resource": {"type": "cluster", "name": "c"}},
                {**MAY_WRITE, "resource": {"type": "topic", "name": "*", "pattern": "prefixed"}},
                {**MAY_WRITE, "operation": "Read"},
            ]
        },
        [
            "acls[0].operations[0]: a group has no operation Write; it has All, Read, Describe, Delete",
            "acls[1].resource.type: 'topics': did you mean topic?",
            "acls[1].resource.pattern: 'any': write one of literal, prefixed",
            "acls[1].operations: a list such as",
            "acls[2].resource.name: the cluster's only name is raftlog-cluster",
            "acls[3].resource.name: * means all names",
            "acls[4].operation: unknown key; did you mean operations?",
        ],
    ),
]


@pytest.mark.parametrize(("document", "mistakes"), MISTAKES)
def test_every_mistake_is_named_with_its_place(
    server: AdminServer, run: Run, file: Path, document: Any, mistakes: Sequence[str]
) -> None:
    before = server.image.offset
    if isinstance(document, dict) and "acls" not in document:
        document = {**document, "acls": [MAY_LOOK]}  # which is right, and not done either
    ran = apply(run, file, document)
    assert ran.code == 2
    for mistake in mistakes:
        assert mistake in ran.err
    assert "nothing was changed" in ran.err
    assert "s3cret" not in ran.err
    assert server.image.offset == before


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("f.json", b"{", "is not valid JSON: "),
        ("f.json", b'{"acls": [], "acls": []}', "the key 'acls' is twice"),
        ("f.json", b"\xff", "not UTF-8"),
        ("f.toml", b"= 3", "is not valid TOML: "),
        ("f.yaml", b"", "ends in .json or .toml"),
    ],
)
def test_what_is_no_such_file(run: Run, tmp_path: Path, name: str, text: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(text)
    ran = run("apply", str(tmp_path / name))
    assert ran.code == 2
    assert why in ran.err
    assert run("apply", str(tmp_path / "none.json")).code == 1


def test_what_brokers_would_refuse_of_topics_is_found_before_anything_is_done(
    server: AdminServer, run: Run, file: Path
) -> None:
    before = server.image.offset
    document = {
        "topics": [
            ORDERS,
            {"name": "b", "config": {"retention.sm": 3}},
            {"name": "c", "replicationFactor": 9},
            {"name": "a", "config": {"cleanup.policy": "never"}},
        ],
        "users": [USER],
    }
    ran = apply(run, file, document)
    assert ran.code == 2
    assert "3 mistakes" in ran.err
    for place in ("topics[1]: ", "topics[2]: ", "topics[3]: "):
        assert place in ran.err
    assert server.image.offset == before


def test_permissions_without_an_authorizer_are_a_mistake_of_the_file(run: Run, file: Path) -> None:
    with AdminServer(authorizer=False) as without:
        before = without.image.offset
        document = {**EVERYTHING, "topics": [ORDERS, {**ORDERS, "name": "wide", "replicationFactor": 9}]}
        ran = apply(run, file, document, "--bootstrap", without.bootstrap)
        assert ran.code == 2
        assert "2 mistakes in" in ran.err
        assert "topics[1]: " in ran.err
        assert "acls: this broker has no authorizer, so every client may do everything" in ran.err
        assert without.image.offset == before
        assert apply(run, file, {"topics": [ORDERS], "acls": []}, "--bootstrap", without.bootstrap).code == 0


def test_what_this_user_may_not_is_no_mistake_of_the_file(
    server: AdminServer, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise TopicAuthorizationFailed("User:a may not CREATE topic 'orders'")

    monkeypatch.setattr("raftlog.Admin.create_topic", refused)
    ran = apply(run, file, EVERYTHING)
    assert (ran.code, ran.err) == (1, "error: User:a may not CREATE topic 'orders'\n")
    assert not server.image.acls


def test_what_is_refused_does_not_keep_the_rest_from_being_done(server: AdminServer, run: Run, file: Path) -> None:
    (file.parent / "bad").write_text("\u0000")  # SASLprep forbids it, which is found out when it is used
    document = {**EVERYTHING, "users": [{"name": "bad", "passwordFile": "bad"}, USER]}
    ran = apply(run, file, document, "-o", "json")
    assert ran.code == 1
    found = {(kind, name): result for kind, name, result in results(ran)}
    assert found.pop(("user", "bad")) == "failed"
    assert set(found.values()) == {"created"}
    assert "error: user bad: " in ran.err
    assert logs_in(server, "shop", "s3cret")


def test_a_cluster_that_does_not_answer_is_not_asked_on(
    server: AdminServer, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: object, **options: object) -> None:
        raise BrokerUnavailable("nobody answers")

    monkeypatch.setattr("raftlog.Admin.alter_user", away)
    ran = apply(run, file, EVERYTHING, "-o", "json")
    assert ran.code == 1
    assert [result for _, _, result in results(ran)] == ["created", "failed", *["not tried"] * 4]
    assert not server.image.acls
    monkeypatch.undo()


def test_an_outcome_that_is_not_known_is_settled_by_the_next_time(server: AdminServer, run: Run, file: Path) -> None:
    server.cluster.metadata.refuse_with += [UnknownOutcome("it may have happened")]
    first = apply(run, file, EVERYTHING)
    assert first.code in (0, 1)
    assert apply(run, file, EVERYTHING).code == 0
    assert apply(run, file, EVERYTHING).err == "6 unchanged\n"


def test_an_empty_file_is_nothing_to_do(run: Run, file: Path) -> None:
    ran = apply(run, file, {})
    assert (ran.code, ran.err) == (0, "0 unchanged\n")
