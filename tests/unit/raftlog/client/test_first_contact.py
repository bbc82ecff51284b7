"""Nobody at any address: said soon, in words, and not before servers that are just starting had a moment."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest

from raftlog import Admin
from raftlog._client import admin_calls
from raftlog._client.connections import from_grpc
from raftlog.cli import clients
from raftlog.errors import BrokerUnavailable, RequestTimedOut
from tests.support.admin_service import AdminServer
from tests.support.fake_broker import FakeCluster

PATIENCE_MS = 120_000
SOON_S = 40.0
"""Far below `PATIENCE_MS`, and far above what it takes, two seconds."""


@pytest.fixture
def refused() -> Iterator[str]:
    """Two addresses where nobody listens."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))  # so that nobody else listens there, either
        yield ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other))


def admin(bootstrap: str) -> None:
    with clients.connect_admin(bootstrap) as found:
        found.describe_cluster()


def admin_topics(bootstrap: str) -> None:
    with Admin(bootstrap, default_api_timeout_ms=PATIENCE_MS) as found:
        found.list_topics()


def admin_topic(bootstrap: str) -> None:
    with clients.connect_admin(bootstrap) as found:
        found.describe_topic("t")


def consumer(bootstrap: str) -> None:
    with clients.connect_consumer(bootstrap, "earliest") as found:
        found.partitions_for("t")


def producer(bootstrap: str) -> None:
    with clients.connect_producer(bootstrap, {}) as found:
        found.send_batch("t", [])


@pytest.mark.parametrize("call", [admin, admin_topics, admin_topic, consumer, producer])
def test_refused_connections_fail_soon(
    refused: str, call: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_PATIENCE_MS", PATIENCE_MS)
    monkeypatch.setattr(admin_calls, "_FIRST_CONTACT_S", PATIENCE_MS / 1000)
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable) as said:
        call(refused)
    assert 1.5 < time.monotonic() - started < SOON_S
    assert "connection refused" in str(said.value)
    assert "failed to connect to all addresses" not in str(said.value)
    assert "ipv4" not in str(said.value)


def test_who_has_been_heard_of_is_waited_for_longer() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with clients.connect_consumer(cluster.bootstrap, "earliest") as found:
            assert len(found.partitions_for("t")) == 1
            cluster.kill(1)
            engine = found._engine
            engine.options = replace(engine.options, default_api_timeout_ms=4_000)
            started = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                found.partitions_for("u")
            assert time.monotonic() - started > 3.5


def test_who_has_answered_that_there_is_no_controller_yet_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_at: list[float] = []
    brokers = 0
    with AdminServer() as server:

        async def barrier() -> int:
            asked_at.append(time.monotonic())
            if asked_at[-1] - asked_at[0] <= 2 * contact_s:
                raise RequestTimedOut("the metadata quorum has no leader")
            return server.image.offset

        monkeypatch.setattr(server.cluster.metadata, "barrier", barrier)
        for contact_s in (0.5, 5.0, 15.0):  # longer, if nobody has answered within less
            monkeypatch.setattr(admin_calls, "_FIRST_CONTACT_S", contact_s)
            asked_at.clear()
            with (
                contextlib.suppress(BrokerUnavailable, RequestTimedOut),
                Admin(server.bootstrap, default_api_timeout_ms=PATIENCE_MS) as found,
            ):
                brokers = len(found.describe_cluster(linearizable=True).brokers)
                break
        assert brokers == 4
        assert asked_at[-1] - asked_at[0] > 2 * contact_s


class Failed(grpc.RpcError):
    """What gRPC raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the code."""
        return self._code

    def details(self) -> str:
        """Return the text."""
        return self._details


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused",
            "no connection to h:1: connection refused",
        ),
        (
            "errors resolving h:1: [field:hostname lookup error:address lookup failed for h:1: Domain name not found]",
            "no connection to h:1: the host name is not known",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: No route to host",
            "no connection to h:1: no route to host",
        ),
        ("Socket closed", "no connection to h:1: the connection was closed"),
        ("recvmsg:Connection reset by peer", "no connection to h:1: the connection was reset"),
        ("something else", "no connection to h:1: something else"),
    ],
)
def test_failures_of_connections_are_put_into_words(details: str, words: str) -> None:
    error = from_grpc(Failed(grpc.StatusCode.UNAVAILABLE, details), "h:1")
    assert isinstance(error, BrokerUnavailable)
    assert str(error) == words


def test_a_call_that_took_too_long_has_no_text_of_grpc() -> None:
    error = from_grpc(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), "h:1")
    assert isinstance(error, RequestTimedOut)
    assert str(error) == "h:1 did not answer in time"
