"""Deciding on users and permissions: what is taken, what is refused, and what changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scramp import ScramException
from scramp.utils import saslprep

from raftlog._core.security.acls import CLUSTER_NAME, MAX_USER_CHARACTERS, OPERATIONS, Acl, why_no_name, why_no_user
from raftlog.errors import (
    InvalidRequestError,
    RaftlogError,
    ResourceNotFound,
    UnacceptableCredential,
    UnsupportedVersion,
)
from raftlog.v1.records_pb2 import MetadataCommand
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512, UNKNOWN_MECHANISM, ScramCredential
from raftlog.v1.security_pb2 import Acl as WireAcl
from raftmeta.decide import CommandResult, decide, security
from raftmeta.image import MetadataImage
from raftmeta.replay import image_from_records
from tests.support.metadata import accept, claim, image_after, refusal, register, update_feature
from tests.support.metadata_security import acl, alter_acls, alter_users, credential, deletion

EMPTY = image_after(claim(newest=True))


def refused(image: MetadataImage, command: MetadataCommand) -> RaftlogError:
    """Return why a command is refused, which shows nothing of any credential."""
    error = refusal(image, command)
    for each in command.alter_users.upsertions:
        for secret in (each.salt, each.stored_key, each.server_key):
            assert not secret or secret.hex() not in str(error)
            assert not secret or str(secret) not in str(error)
    return error


# Users


def test_a_credential_is_kept_with_the_offset_that_it_was_set_at() -> None:
    image, _ = accept(EMPTY, alter_users([credential("alice"), credential("bob", SCRAM_SHA_256)]))
    alice = image.credential("alice", SCRAM_SHA_512)
    assert alice is not None
    assert alice.version == image.offset == EMPTY.offset + 1
    assert alice.to_wire() == credential("alice")
    assert image.credentials_of("alice") == (alice,)
    assert image.credential("alice", SCRAM_SHA_256) is None
    assert image.credentials_of("carol") == ()
    changed, _ = accept(image, alter_users([credential("alice", secret=2)]))
    assert [each.version for each in changed.credentials_of("alice")] == [changed.offset]
    assert changed.credentials_of("bob") == image.credentials_of("bob")


def test_a_user_may_have_one_credential_of_each_mechanism() -> None:
    image = image_after(
        claim(newest=True),
        alter_users([credential("alice", SCRAM_SHA_512), credential("alice", SCRAM_SHA_256)]),
        alter_users([credential("alice", SCRAM_SHA_256, secret=3)]),
    )
    assert [each.mechanism for each in image.credentials_of("alice")] == [SCRAM_SHA_256, SCRAM_SHA_512]
    assert [each.version for each in image.credentials_of("alice")] == [image.offset, image.offset - 1]


def test_what_is_set_as_it_is_stays_with_its_version() -> None:
    """A retry from elsewhere, or a second `raftlog apply`, ends no session."""
    image, _ = accept(EMPTY, alter_users([credential("alice")]))
    decision = decide(image, alter_users([credential("alice")]))
    assert decision.records == ()
    assert decision.outcome == CommandResult(image.offset)


def test_deletions_are_of_one_mechanism_or_of_all() -> None:
    image, _ = accept(EMPTY, alter_users([credential("alice"), credential("alice", SCRAM_SHA_256), credential("bob")]))
    one, _ = accept(image, alter_users(deletions=[deletion("alice", SCRAM_SHA_256)]))
    assert [each.mechanism for each in one.credentials_of("alice")] == [SCRAM_SHA_512]
    none, _ = accept(image, alter_users(deletions=[deletion("alice", UNKNOWN_MECHANISM)]))
    assert {key.user for key in none.credentials} == {"bob"}


def test_what_is_not_there_cannot_be_deleted_and_then_nothing_else_is_done() -> None:
    image, _ = accept(EMPTY, alter_users([credential("alice")]))
    for gone, words in (
        (deletion("bob"), "user 'bob' has no credential for SCRAM-SHA-512"),
        (deletion("bob", UNKNOWN_MECHANISM), "there is no user 'bob'"),
        (deletion("alice", SCRAM_SHA_256), "user 'alice' has no credential for SCRAM-SHA-256"),
    ):
        error = refused(image, alter_users([credential("carol")], [deletion("alice"), gone]))
        assert isinstance(error, ResourceNotFound)
        assert words in str(error)


def test_one_credential_is_named_once_in_a_request() -> None:
    image, _ = accept(EMPTY, alter_users([credential("alice")]))
    for command in (
        alter_users([credential("bob"), credential("bob", secret=2)]),
        alter_users([credential("alice", secret=2)], [deletion("alice")]),
        alter_users([credential("alice", secret=2)], [deletion("alice", UNKNOWN_MECHANISM)]),
        alter_users([], [deletion("alice"), deletion("alice", UNKNOWN_MECHANISM)]),
    ):
        error = refused(image, command)
        assert type(error) is InvalidRequestError
        assert "SCRAM-SHA-512 is named twice" in str(error)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (credential(""), "has 0 characters"),
        (credential("x" * 256), "has 256 characters, it may have 1 to 255"),
        (credential("*"), "reserved"),
        (credential("a\nb"), r"control character '\n'"),
        (credential(mechanism=UNKNOWN_MECHANISM), "mechanism 0 is not known here, but SCRAM-SHA-256 and SCRAM-SHA-512"),
        (credential(salt_bytes=11), "the salt has 11 bytes, it may have 12 to 255"),
        (credential(salt_bytes=256), "the salt has 256 bytes"),
        (credential(key_bytes=32), "the stored key has 32 bytes, with SCRAM-SHA-512 it has 64"),
        (credential(mechanism=SCRAM_SHA_256, key_bytes=64), "with SCRAM-SHA-256 it has 32"),
        (credential(iterations=4095), "4095 iterations, there may be 4096 to 1000000"),
        (credential(iterations=1_000_001), "1000001 iterations"),
        (credential(iterations=-1), "-1 iterations"),
    ],
)
def test_a_credential_has_to_be_one(wrong: ScramCredential, words: str) -> None:
    error = refused(EMPTY, alter_users([credential("bob"), wrong]))
    assert isinstance(error, UnacceptableCredential)
    assert words in str(error)
    assert len(str(error)) < 400


def test_keys_have_each_their_length() -> None:
    wrong = credential()
    wrong.server_key = b"short"
    assert "the server key has 5 bytes" in str(refused(EMPTY, alter_users([wrong])))


def test_the_limits_themselves_are_allowed() -> None:
    accept(EMPTY, alter_users([credential("x" * 255, iterations=4096, salt_bytes=12)]))
    accept(EMPTY, alter_users([credential(iterations=1_000_000, salt_bytes=255)]))


def test_so_many_credentials_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "MAX_CREDENTIALS", 3)
    full, _ = accept(EMPTY, alter_users([credential(name) for name in "abc"]))
    assert "would have 4 credentials, at most 3" in str(refused(full, alter_users([credential("d")])))
    accept(full, alter_users([credential("d")], [deletion("a")]))
    accept(full, alter_users([credential("a", secret=2)]))
    monkeypatch.setattr(security, "MAX_CREDENTIALS", 1)  # a controller that allowed more wrote these
    accept(full, alter_users(deletions=[deletion("a")]))
    accept(full, alter_users([credential("d")], [deletion("a")]))


def test_so_many_changes_at_once_and_no_more() -> None:
    image, _ = accept(EMPTY, alter_users([credential(f"u{n}") for n in range(1_000)]))
    assert len(image.credentials) == 1_000
    error = refused(image, alter_users([credential("v")], [deletion(f"u{n}") for n in range(1_000)]))
    assert "changes 1001 credentials, at most 1000" in str(error)
    error = refused(image, alter_acls([acl(f"t{n}") for n in range(1_001)]))
    assert "changes 1001 ACLs, at most 1000" in str(error)


def test_a_credential_shows_nothing_of_itself() -> None:
    image, _ = accept(EMPTY, alter_users([credential("alice", secret=7)]))
    assert "alice" in repr(image)
    for byte in (7, 7 + 64, 7 + 128):
        assert repr(bytes([byte]) * 12)[2:-1] not in repr(image)


# Names of users


@pytest.mark.parametrize(
    "name", ["alice", "a", "x" * MAX_USER_CHARACTERS, "CN=a,OU=b", "jürgen", "a b", "日本", "אב", "%"]
)
def test_names_that_users_can_have(name: str) -> None:
    assert why_no_user(name) is None
    accept(EMPTY, alter_users([credential(name)]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ANONYMOUS", "reserved"),
        (" a", "space"),
        ("a ", "space"),
        ("a\x00", "control"),
        ("a\u202eb", "control"),
        ("a\u00adb", "SASLprep"),  # a soft hyphen, which goes away
        ("a\u00a0b", "SASLprep"),  # another space
        ("ﬁ", "NFKC"),  # a ligature, which becomes two letters
        ("u\u0308", "NFKC"),
        ("😀", "SASLprep"),  # not in Unicode 3.2
        ("\ue000", "SASLprep"),
        ("aא", "right to left"),
        ("א1", "right to left"),
        ("אaב", "right to left"),
    ],
)
def test_names_that_no_user_can_have(name: str, words: str) -> None:
    assert words in (why_no_user(name) or "")


@given(st.one_of(st.text(min_size=1, max_size=6), st.text("aאב1,= ﬁ\u00ad\u00a0u\u0308\u202e", min_size=1, max_size=4)))
def test_a_user_can_log_in_under_every_name_that_is_taken(name: str) -> None:
    """As the library that both sides speak SCRAM with prepares names."""
    try:
        prepared = saslprep(name)
    except ScramException:
        prepared = None
    if why_no_user(name) is None:
        assert prepared == name
    elif prepared == name:
        assert name.strip(" ") != name or name in ("*", "ANONYMOUS")


def test_names_in_certificates_are_what_their_authority_says() -> None:
    assert why_no_name("CN ﬁ 😀") is None
    assert why_no_name("") is not None
    assert why_no_name("a\x1b[2J") is not None


# Permissions


def test_acls_are_a_set() -> None:
    image, result = accept(EMPTY, alter_acls([acl("a"), acl("b"), acl("a")]))
    assert image.acls == {acl("a"), acl("b")}
    assert result.offset == image.offset
    same = decide(image, alter_acls([acl("a")], [acl("c")]))
    assert same.records == ()
    assert same.outcome == CommandResult(image.offset)
    changed, _ = accept(image, alter_acls([acl("c")], [acl("a")]))
    assert changed.acls == {acl("b"), acl("c")}
    assert image.acls == {acl("a"), acl("b")}


def test_records_are_in_the_order_of_the_command() -> None:
    image, _ = accept(EMPTY, alter_acls([acl("a"), acl("b")]))
    decision = decide(image, alter_acls([acl("d"), acl("c")], [acl("b"), acl("a")]))
    assert [
        (record.acl.acl if record.HasField("acl") else record.remove_acl.acl).resource_name
        for record in decision.records
    ] == ["b", "a", "d", "c"]


def test_hosts_are_kept_in_one_spelling() -> None:
    image, _ = accept(EMPTY, alter_acls([acl(host="2001:DB8:0::1"), acl(host="::ffff:10.0.0.1")]))
    assert {each.host for each in image.acls} == {"2001:db8::1", "10.0.0.1"}
    image, _ = accept(image, alter_acls(removals=[acl(host="2001:db8::0001")]))
    assert {each.host for each in image.acls} == {"10.0.0.1"}


@pytest.mark.parametrize(
    "wrong",
    [
        acl(resource_type=WireAcl.ANY_RESOURCE),
        acl(resource_type=WireAcl.UNKNOWN_RESOURCE),
        acl(operation=WireAcl.ANY_OPERATION),
        acl(operation=WireAcl.UNKNOWN_OPERATION),
        acl(operation=WireAcl.CLUSTER_ACTION),
        acl(operation=WireAcl.WRITE, resource_type=WireAcl.GROUP),
        acl(operation=WireAcl.READ, resource_type=WireAcl.TRANSACTIONAL_ID),
        acl(CLUSTER_NAME, resource_type=WireAcl.CLUSTER),
        acl(permission=WireAcl.ANY_PERMISSION),
        acl(permission=WireAcl.UNKNOWN_PERMISSION),
        acl(pattern_type=WireAcl.ANY_PATTERN),
        acl(pattern_type=WireAcl.MATCH),
        acl(pattern_type=WireAcl.UNKNOWN_PATTERN),
        acl("*", pattern_type=WireAcl.PREFIXED),
        acl("kafka-cluster", WireAcl.ALTER, resource_type=WireAcl.CLUSTER),
        acl(CLUSTER_NAME, WireAcl.ALTER, resource_type=WireAcl.CLUSTER, pattern_type=WireAcl.PREFIXED),
        acl(""),
        acl("x" * 256),
        acl("a\nb"),
        acl(principal="alice"),
        acl(principal="Group:alice"),
        acl(principal="User:"),
        acl(principal="User:" + "x" * 256),
        acl(principal="User:a\x1b"),
        acl(principal=""),
        acl(host=""),
        acl(host="here.example"),
        acl(host="10.0.0.1/8"),
    ],
    ids=str,
)
def test_an_acl_has_to_say_something_that_can_hold(wrong: Acl) -> None:
    error = refused(EMPTY, alter_acls([acl("b"), wrong]))
    assert type(error) is InvalidRequestError
    assert len(str(error)) < 600
    assert type(refused(EMPTY, alter_acls(removals=[wrong]))) is InvalidRequestError


def test_every_operation_that_a_resource_has_can_be_given() -> None:
    """The table of Kafka's AclEntry.supportedOperations."""
    names = {WireAcl.CLUSTER: CLUSTER_NAME}
    every = [
        acl(names.get(resource_type, "x"), operation, resource_type=resource_type)
        for resource_type, operations in OPERATIONS.items()
        for operation in sorted(operations)
    ]
    image, _ = accept(EMPTY, alter_acls(every))
    assert image.acls == set(every)
    assert {len(operations) for operations in OPERATIONS.values()} == {9, 4, 8, 3}


def test_an_acl_is_not_both_added_and_removed() -> None:
    command = alter_acls([acl(host="::ffff:10.0.0.1")], [acl(host="10.0.0.1")])
    assert "both added and removed" in str(refused(EMPTY, command))


def test_so_many_acls_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "MAX_ACLS", 3)
    full, _ = accept(EMPTY, alter_acls([acl(name) for name in "abc"]))
    assert "would have 4 ACLs, at most 3" in str(refused(full, alter_acls([acl("d")])))
    accept(full, alter_acls([acl("d")], [acl("a")]))
    monkeypatch.setattr(security, "MAX_ACLS", 1)
    accept(full, alter_acls(removals=[acl("a")]))


# Both


def test_older_clusters_refuse_and_say_what_to_do() -> None:
    image = image_after(claim())
    for command in (alter_users([credential()]), alter_acls([acl()])):
        error = refused(image, command)
        assert isinstance(error, UnsupportedVersion)
        assert "users and permissions needs metadata.version=2, the cluster is at 1" in str(error)


def test_networks_need_a_cluster_that_knows_them() -> None:
    """Where an older controller may decide as well, a network is refused in every spelling, that of one address too."""
    older = image_after(claim(), register(), update_feature("metadata.version", 6))
    newer = image_after(claim(), register(), update_feature("metadata.version", 7))
    for host in ("10.0.0.0/8", "10.0.0.1/32"):
        for command in (alter_acls([acl(host=host)]), alter_acls(removals=[acl(host=host)])):
            error = refused(older, command)
            assert isinstance(error, UnsupportedVersion)
            assert "an ACL for a network needs metadata.version=7, the cluster is at 6" in str(error)
    image, _ = accept(newer, alter_acls([acl(host="10.0.0.0/8"), acl(host="10.0.0.1/32")]))
    assert {each.host for each in image.acls} == {"10.0.0.0/8", "10.0.0.1"}
    assert not accept(image, alter_acls(removals=[acl(host="10.0.0.0/255.0.0.0"), acl(host="10.0.0.1")]))[0].acls


def test_nothing_asked_is_nothing_done() -> None:
    for command in (alter_users(), alter_acls()):
        decision = decide(EMPTY, command)
        assert decision.records == ()
        assert decision.outcome == CommandResult(EMPTY.offset)


def test_the_bytes_of_a_snapshot_do_not_depend_on_the_order_of_events() -> None:
    one = image_after(
        claim(newest=True),
        alter_users([credential("b"), credential("a")]),
        alter_acls([acl("b"), acl("a"), acl("c", principal="User:a")]),
    )
    other = image_after(
        claim(newest=True),
        alter_users([credential("a"), credential("b")]),
        alter_acls([acl("c", principal="User:a"), acl("a"), acl("b")]),
    )
    assert one == other
    serialized = [
        [record.SerializeToString(deterministic=True) for record in each.to_records()] for each in (one, other)
    ]
    assert serialized[0] == serialized[1]
    assert image_from_records(one.to_records(), one.offset) == one


def test_a_snapshot_has_what_is_in_no_order_in_its_own() -> None:
    """Sets of strings have another order in every process."""
    acls = [acl(f"t{n}", WireAcl.WRITE if n % 2 else WireAcl.READ, host=f"10.0.0.{n % 3}") for n in range(100)]
    image, _ = accept(EMPTY, alter_acls(acls))
    written = [Acl.from_wire(record.acl.acl) for record in image.to_records() if record.HasField("acl")]
    assert written == sorted(acls)


def test_what_a_change_does_not_touch_is_the_same_object() -> None:
    """Brokers tell by it whether sessions have to end, and whether decisions have to be made anew."""
    before, _ = accept(EMPTY, alter_users([credential("a")]))
    before, _ = accept(before, alter_acls([acl("a")]))
    users, _ = accept(before, alter_users([credential("b")]))
    assert users.acls is before.acls
    assert users.credentials is not before.credentials
    acls, _ = accept(before, alter_acls([acl("b")]))
    assert acls.credentials is before.credentials
    assert acls.acls is not before.acls
    neither = replace(before, offset=before.offset + 1)
    assert neither.acls is before.acls
