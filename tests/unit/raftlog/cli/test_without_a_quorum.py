"""The output without a linearizable answer: one broker's metadata, marked as such, and exit code 1."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raftlog._client import admin
from raftlog._core.backoff import Backoff
from raftlog.cli import output as freshness
from raftlog.errors import BrokerUnavailable, RequestTimedOut
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import begin_shutdown, broker_epoch, fence


@pytest.fixture
def leaderless(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> AdminServer:
    """The quorum has lost its majority."""

    async def barrier() -> int:
        raise RequestTimedOut("the metadata quorum has no leader: controller 2 at 127.0.0.1:9 does not answer")

    monkeypatch.setattr(freshness, "PATIENCE_S", 30.0)
    monkeypatch.setattr(Backoff, "pause_ms", lambda backoff, failures: 120_000.0)  # no time for a second try
    monkeypatch.setattr(server.cluster.metadata, "barrier", barrier)
    server.cluster.metadata.quorum.leader_id = -1
    server.cluster.metadata.quorum.answered_by = 1
    return server


@pytest.mark.parametrize(
    "command",
    [
        ("topic", "describe"),
        ("topic", "describe", "a"),
        ("topic", "describe", "--unavailable"),
        ("topic", "describe", "--under-min-isr"),
        ("topic", "describe", "--at-min-isr"),
        ("topic", "describe", "--under-replicated"),
        ("cluster", "describe"),
    ],
)
def test_what_a_broker_knows_is_shown_as_such(leaderless: AdminServer, run: Run, command: Sequence[str]) -> None:
    for output in ("table", "json"):
        ran = run(*command, "-o", output)
        assert ran.code == 1
        assert ran.out, "the command must print what the broker knows"
        note = ran.err.splitlines()[0]
        assert f"as of metadata offset {leaderless.image.offset}" in note
        assert "may be out of date" in note
        assert "the metadata quorum has no leader" in note


def test_with_a_quorum_nothing_is_said(server: AdminServer, run: Run) -> None:
    before = server.cluster.metadata.barriers
    for command in (("topic", "describe"), ("cluster", "describe"), ("cluster", "quorum")):
        ran = run(*command)
        assert (ran.code, ran.err) == (0, ""), command
    assert server.cluster.metadata.barriers == before + 2


@pytest.mark.parametrize("command", [("cluster", "quorum"), ("quorum", "describe")])
def test_a_quorum_without_a_leader_is_an_error(leaderless: AdminServer, run: Run, command: Sequence[str]) -> None:
    ran = run(*command)
    assert ran.code == 1
    assert "no leader (as node 1 sees it)" in ran.out
    assert run(*command, "-o", "json").code == 1


def test_a_leader_that_does_not_answer_makes_its_partitions_unavailable(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = admin.AdminEngine._replicas_led_by

    async def refuse(self: object, broker: object, *arguments: object) -> object:
        if broker.broker_id == 2:  # type: ignore[attr-defined] # a BrokerView
            raise BrokerUnavailable("no connection to 127.0.0.1:1: connection refused")
        return await ask(self, broker, *arguments)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(admin.AdminEngine, "_replicas_led_by", refuse)
    ran = run("topic", "describe", "--unavailable")
    assert [(row["topic"], row["partition"]) for row in ran.table] == [("a", "1")]
    assert "leader 2 does not answer: no connection to 127.0.0.1:1: connection refused" in ran.err
    [topic] = run("topic", "describe", "--unavailable", "-o", "json").json
    assert topic["partitions"][0]["unavailable"].startswith("leader 2 does not answer: ")


def test_the_state_of_brokers_is_a_word(server: AdminServer, run: Run) -> None:
    server.propose(fence(2, broker_epoch(server.image, 2)))
    for broker_id in (3, 4):
        server.propose(begin_shutdown(broker_id, broker_epoch(server.image, broker_id)))
    server.propose(fence(4, broker_epoch(server.image, 4)))
    document = run("cluster", "describe", "-o", "json").json
    assert [broker["state"] for broker in document["brokers"]] == ["active", "fenced", "stopping", "stopped"]
    assert [broker["fenced"] for broker in document["brokers"]] == [False, True, False, True]
    assert "broker_id\thost\tport\track\tstate\t" in run("cluster", "describe").out
