"""Voters that do not belong together say so; which node a certificate names."""

from __future__ import annotations

import contextvars
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import AuthorizationError, InconsistentClusterId, InconsistentVoters
from raftlog.v1 import records_pb2
from raftlog.v1.raft_pb2 import RaftHello
from raftmeta.quorum.hello import duplicate, refusal, same_cluster
from raftmeta.quorum.peer_identity import NODE_NAME, NODE_URI, check_claim, node_ids_named, node_ids_of, peer_nodes
from raftmeta.quorum.service import ALLOWED_KINDS, claimed_node
from raftmeta.raft.messages import MAX_TERM


def hello(node_id: int, peer_id: int = 0, cluster_id: str = "c", voters: tuple[int, ...] = (1, 2, 3)) -> RaftHello:
    return RaftHello(cluster_id=cluster_id, node_id=node_id, peer_id=peer_id, voters=voters)


def test_voters_of_one_quorum_accept_one_another() -> None:
    assert refusal(hello(1, 2), hello(2, 1)) is None
    assert refusal(hello(1), hello(2, 1)) is None  # the accepting side has no expectation
    assert refusal(hello(1, 2, voters=(3, 1, 2)), hello(2, 1)) is None  # the order says nothing


@pytest.mark.parametrize(
    ("mine", "theirs", "error", "words"),
    [
        (hello(1, 2), hello(2, 1, cluster_id="d"), InconsistentClusterId, "'d'.*'c'.*cluster.id"),
        (hello(1, 2), hello(3, 1), InconsistentVoters, "expected controller 2.*found controller 3.*node.id"),
        (hello(1), hello(2, 3), InconsistentVoters, "took controller 1 for controller 3"),
        (hello(1), hello(1, 1), InconsistentVoters, "another process has node.id 1"),
        (hello(1, 2), hello(2, 1, voters=(1, 2)), InconsistentVoters, r"\[1, 2\].*\[1, 2, 3\].*set-voters"),
        (hello(1), hello(4, 1), InconsistentVoters, "controller 4 is not one of the voters"),
    ],
)
def test_a_refusal_names_what_differs_and_what_to_do(
    mine: RaftHello, theirs: RaftHello, error: type[Exception], words: str
) -> None:
    refused = refusal(mine, theirs)
    assert isinstance(refused, error)
    with pytest.raises(error, match=words):
        raise refused


def test_a_second_process_with_an_id_is_told_so() -> None:
    assert "node.id 2" in str(duplicate(2))


def test_what_comes_from_outside_is_measured_before_it_is_compared_or_shown() -> None:
    many = RaftHello(cluster_id="c", node_id=2, peer_id=1, voters=list(range(100)) * 70_000)
    huge = hello(2, 1, cluster_id="\x01" * 20_000_000)
    late = hello(2, 1)
    late.current_term = MAX_TERM + 1
    for theirs, words in ((many, "7000000 voters"), (huge, "cluster.id"), (late, "2147483648")):
        begun_s = time.thread_time()
        refused = refusal(hello(1, 2), theirs)
        assert time.thread_time() - begun_s < 0.1
        assert refused is not None
        assert words in str(refused)
        assert len(str(refused)) < 1_000
    late.current_term = MAX_TERM
    assert refusal(hello(1, 2), late) is None


def test_a_cluster_id_that_is_not_known_yet_goes_with_any_that_can_be() -> None:
    assert same_cluster("", "a")
    assert same_cluster("a", "")
    assert same_cluster("a", "a")
    assert not same_cluster("a", "b")
    assert not same_cluster("", "é" * 128)


NODES = st.integers(0, (1 << 31) - 1)


@given(st.lists(NODES), st.lists(NODES))
def test_uris_name_nodes_and_else_the_common_name_does(uris: list[int], names: list[int]) -> None:
    found = node_ids_named([f"{NODE_URI}{node}" for node in uris], [f"{NODE_NAME}{node}" for node in names])
    assert found == frozenset(uris or names)


@pytest.mark.parametrize(
    "written",
    ["", "-1", "+1", " 1", "1 ", "01", "1/", "1/2", "0x1", "1e3", "१", "2147483648", "99999999999999999999", "1\n"],
)
def test_what_is_no_number_of_a_node_names_none(written: str) -> None:
    assert node_ids_named([NODE_URI + written], []) == frozenset()
    assert node_ids_named([], [NODE_NAME + written]) == frozenset()


@pytest.mark.parametrize("uri", ["raftlog://nodes/1", "RAFTLOG://NODE/1", "spiffe://raftlog://node/1", "node/1"])
def test_other_uris_name_none(uri: str) -> None:
    assert node_ids_named([uri], []) == frozenset()


def test_a_bad_uri_of_ours_is_not_made_up_for_by_the_common_name() -> None:
    assert node_ids_named([NODE_URI + "x"], [NODE_NAME + "1"]) == frozenset()


def test_plaintext_says_nothing_about_nodes() -> None:
    assert node_ids_of({}) is None
    assert node_ids_of({"transport_security_type": [b"insecure"], "peer_uri": [b"raftlog://node/1"]}) is None


def test_what_grpc_tells_of_a_certificate() -> None:
    told = {
        "transport_security_type": [b"ssl"],
        "x509_common_name": [b"raftlog-node-9"],
        "peer_uri": [b"raftlog://node/1", b"https://example", b"\xff"],
    }
    assert node_ids_of(told) == frozenset({1})
    del told["peer_uri"]
    assert node_ids_of(told) == frozenset({9})
    del told["x509_common_name"]
    assert node_ids_of(told) == frozenset()


def _claim(nodes: frozenset[int] | None, claimed: int) -> None:
    def serve() -> None:
        peer_nodes.set(nodes)
        check_claim(claimed)

    contextvars.copy_context().run(serve)


def test_a_claim_is_checked_against_the_certificate() -> None:
    _claim(None, 7)
    _claim(frozenset({1, 7}), 7)
    for nodes, said in ((frozenset({2, 1}), "1, 2"), (frozenset(), "none")):
        with pytest.raises(AuthorizationError, match=rf"said to be of node 7, with a certificate of node {said};"):
            _claim(nodes, 7)


def test_every_command_that_a_broker_sends_about_itself_is_claimed() -> None:
    """A command with the id of its sender has to be looked at; the others only name a broker that they are about."""
    about_others = {"unregister_broker", "alter_broker"}
    fields: Any = records_pb2.MetadataCommand.DESCRIPTOR.fields_by_name
    of_senders = {
        kind for kind in ALLOWED_KINDS - about_others if "broker_id" in fields[kind].message_type.fields_by_name
    }
    claimed = set()
    for kind in ALLOWED_KINDS:
        command = records_pb2.MetadataCommand()
        getattr(command, kind).SetInParent()
        if kind in of_senders:
            getattr(command, kind).broker_id = 5
            assert claimed_node(command) == 5
        if claimed_node(command) is not None:
            claimed.add(kind)
    told = {"register_broker", "alter_partition", "alter_partitions", "offline_replicas", "allocate_producer_ids"}
    assert claimed == of_senders == told
