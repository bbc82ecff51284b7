"""The audit log: no client can hide the actions of others by flooding it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from broker.security.audit import (
    BURST_LINES,
    LINES_PER_S,
    MAX_PRINCIPALS,
    OWN_BURST_LINES,
    REPEAT_MS,
    RESERVED_BURST_LINES,
    Audit,
    note_change,
)
from broker.security.caller import Caller, caller, network_of
from tests.support.scram_parts import Hands


class World:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clock = Hands()
        self.audit = Audit(self.clock)
        self._caplog = caplog

    def refuse(self, principal: str, resource: str) -> None:
        self.audit.refused(principal, "10.0.0.1", "WRITE", "TOPIC", resource)

    def lines(self) -> list[dict[str, Any]]:
        """Return the fields of the lines since the last call."""
        found = [vars(record) for record in self._caplog.records if record.name == "raftlog.audit"]
        self._caplog.clear()
        return found


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.INFO)
    return World(caplog)


def test_failed_logins_leave_room_for_refusals_and_the_other_way_round(world: World) -> None:
    for number in range(300):
        world.audit.not_authenticated("mallory", f"10.0.{number}.1", "SCRAM-SHA-512")
    assert len(world.lines()) == BURST_LINES
    for number in range(300):
        world.refuse("User:alice", f"topic-{number}")
    lines = world.lines()
    assert len(lines) == BURST_LINES
    assert not any("left_out" in line for line in lines), (
        "no line may say that it left some out, if those were of its own kind"
    )
    world.clock.ms += 1_000
    world.audit.not_authenticated("mallory", "10.1.0.1", "SCRAM-SHA-512")
    world.refuse("User:alice", "another")
    assert [line["left_out"] for line in world.lines()] == [200, 200]


def test_names_that_somebody_makes_up_are_no_lines_each(world: World) -> None:
    for number in range(1_000):
        world.audit.not_authenticated(f"user-{number}", f"2001:db8::{number:x}", "SCRAM-SHA-512")
    (line,) = world.lines()
    assert (line["principal"], line["host"]) == ("User:user-0", "2001:db8::0")
    world.audit.not_authenticated("bob", "10.0.0.1", "SCRAM-SHA-512")
    (line,) = world.lines()
    assert line["principal"] == "User:bob"
    world.clock.ms += REPEAT_MS
    world.audit.not_authenticated("last", "2001:db8::1", "SCRAM-SHA-512")
    (line,) = world.lines()
    assert (line["principal"], line["repeated"]) == ("User:last", 999)


def test_who_is_refused_a_lot_leaves_lines_for_others(world: World) -> None:
    for number in range(10_000):
        world.refuse("User:loud", f"topic-{number}")
    assert len(world.lines()) == BURST_LINES
    for number in range(100):
        world.refuse("User:quiet", f"topic-{number}")
        world.refuse("User:loud", f"other-{number}")
    assert [line["principal"] for line in world.lines()] == ["User:quiet"] * OWN_BURST_LINES
    for second in range(1, 61):
        world.clock.ms += 1_000
        for number in range(LINES_PER_S):  # the whole budget
            world.refuse("User:loud", f"more-{second}-{number}")
        if second % 20 == 0:
            world.refuse("User:quiet", f"later-{second}")
    later = [line["resource"] for line in world.lines() if line["principal"] == "User:quiet"]
    assert later == ["later-20", "later-40", "later-60"]


def test_many_principals_cannot_fill_a_disk(world: World) -> None:
    for number in range(50 * MAX_PRINCIPALS):
        world.refuse(f"User:{number % (2 * MAX_PRINCIPALS)}", f"topic-{number}")
    assert len(world.lines()) == BURST_LINES + RESERVED_BURST_LINES
    assert len(world.audit._refusals._own) == MAX_PRINCIPALS


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("nowhere", "nowhere"),
    ],
)
def test_an_address_of_ipv6_is_one_of_many(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_line_names_the_client_that_names_itself(world: World) -> None:
    token = caller.set(Caller("User:ada", "10.0.0.1", None, client_id="raftlog-console"))
    try:
        note_change(("User:ada", "10.0.0.1", "DELETE", "USER", "eve"), is_certain=True)
        world.refuse("User:ada", "orders")
    finally:
        caller.reset(token)
    world.refuse("User:bob", "orders")
    assert [line.get("client_id") for line in world.lines()] == ["raftlog-console", "raftlog-console", None]
