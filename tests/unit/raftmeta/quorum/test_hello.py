"""Voters that do not belong together say so, and say what to do."""

from __future__ import annotations

import time

import pytest

from raftlog.errors import InconsistentClusterId, InconsistentVoters
from raftlog.v1.raft_pb2 import RaftHello
from raftmeta.quorum.hello import duplicate, refusal, same_cluster
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
