"""The admin client keeps its timeout, and passes on what a broker says that was reached."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftlog import Admin
from raftlog._client import admin as engine
from raftlog._client import admin_calls, inquiry
from raftlog.errors import (
    BrokerUnavailable,
    InvalidPartitions,
    PolicyViolation,
    RaftlogError,
    RequestTimedOut,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.v1 import admin_pb2
from tests.support.patience import quickest_s


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("timeout_ms", [300, 1_200])
def test_the_timeout_is_kept_when_nobody_answers(silent: str, timeout_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (admin_calls, "_ADDRESS_TIMEOUT_S"),
        (admin_calls, "_FIRST_CONTACT_S"),
        (inquiry, "_ADDRESS_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, 120.0)
    enough_s = timeout_ms / 1000 + 0.4
    with Admin(silent, default_api_timeout_ms=timeout_ms, request_timeout_ms=120_000) as admin:
        for call in (admin.describe_cluster, admin.list_topics):

            def attempt(call: Callable[[], object] = call) -> float:
                started = time.monotonic()
                with pytest.raises((BrokerUnavailable, RequestTimedOut)):
                    call()
                return time.monotonic() - started

            assert quickest_s(attempt, enough_s) < enough_s


def test_what_a_broker_says_wins_over_those_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        if address.endswith(":1"):
            raise BrokerUnavailable("no connection")
        return admin_pb2.DescribeClusterResponse(error=to_wire(RequestTimedOut("controllers 2, 4 are missing")))

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    said = pytest.raises(RequestTimedOut, match=r"127\.0\.0\.1:2: controllers 2, 4 are missing")
    with Admin("127.0.0.1:1,127.0.0.1:2", default_api_timeout_ms=300) as admin, said:
        admin.describe_cluster(linearizable=True)


def test_a_broker_that_cannot_say_is_followed_by_the_next_and_that_one_is_asked_first_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        asked.append(address[-1])
        if address.endswith(":1"):
            return admin_pb2.DescribeClusterResponse(error=to_wire(RequestTimedOut("cut off")))
        return admin_pb2.DescribeClusterResponse(cluster_id="c")

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    with Admin("127.0.0.1:1,127.0.0.1:2") as admin:
        assert admin.describe_cluster(linearizable=True).cluster_id == "c"
        assert admin.describe_cluster(linearizable=True).cluster_id == "c"
    assert asked == ["1", "2", "2"]


@pytest.mark.parametrize("change", ["delete", "partitions"])
@pytest.mark.parametrize("first", [RequestTimedOut("applied late"), BrokerUnavailable("no connection")])
def test_a_change_that_is_there_after_an_attempt_without_an_answer_is_done(
    monkeypatch: pytest.MonkeyPatch, change: str, first: RaftlogError
) -> None:
    refusals = {
        "delete": UnknownTopicOrPartition("there is no topic"),
        "partitions": InvalidPartitions("has 4 already"),
    }

    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        if address.endswith(":1"):
            raise first
        return admin_pb2.DeleteTopicResponse(error=to_wire(refusals[change]))

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    with Admin("127.0.0.1:1,127.0.0.1:2", default_api_timeout_ms=300) as admin:

        def make() -> None:
            if change == "delete":
                admin.delete_topic("a")
            else:
                admin.create_partitions("a", 4)

        if isinstance(first, RequestTimedOut):
            make()
        else:  # nobody can have heard of it: then it is a mistake
            with pytest.raises(type(refusals[change])):
                make()


def test_a_topic_is_asked_for_with_one_id_however_often(monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[bytes] = []

    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        ids.append(request.topic_id)
        if len(ids) < 3:
            raise RequestTimedOut("making 2 000 partitions takes a while")
        return admin_pb2.CreateTopicResponse(error=to_wire(PolicyViolation("enough")))

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    with Admin("127.0.0.1:1,127.0.0.1:2") as admin:
        with pytest.raises(PolicyViolation):
            admin.create_topic("a")
        with pytest.raises(PolicyViolation):
            admin.create_topic("a")
    assert len(ids[0]) == 16
    assert ids[0] == ids[1] == ids[2] != ids[3]
