"""Which node a certificate names, and what it may say of itself."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import AuthorizationError
from raftlog.v1 import records_pb2
from raftmeta.quorum.peer_identity import NODE_NAME, NODE_URI, check_claim, node_ids_named, node_ids_of, peer_nodes
from raftmeta.quorum.service import ALLOWED_KINDS, claimed_node

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
    assert claimed == of_senders == {"register_broker", "alter_partition", "offline_replicas", "allocate_producer_ids"}
