"""What clients can be told, and what they say to the rest."""

from __future__ import annotations

from typing import Any

import pytest

from raftlog import Admin, Consumer, Producer, aio
from raftlog._client.connections import parse_bootstrap
from raftlog._client.options import ConsumerOptions, ProducerOptions
from raftlog.errors import BrokerUnavailable, InvalidConfig, NotLeader

CLIENTS: list[Any] = [Producer, Consumer, Admin, aio.Producer, aio.Consumer, aio.Admin]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("bootstrap", ["nowhere", "host:0", "host:port", "", []])
def test_a_malformed_bootstrap_is_a_bad_value_like_any_other(client: Any, bootstrap: Any) -> None:
    with pytest.raises(InvalidConfig, match="host:port"):
        client(bootstrap)


def test_addresses_come_as_text_or_as_a_list() -> None:
    assert parse_bootstrap("a:1, b:2,") == parse_bootstrap(["a:1", "b:2"]) == ["a:1", "b:2"]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["security.protocol", "sasl.mechanism", "ssl.ca.location", "ssl.keystore.password"])
def test_encryption_and_authentication_are_said_to_come_later(client: Any, name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"not in this version: {name}"):
        client("127.0.0.1:1", config={name: "x"})
    underscores = name.replace(".", "_")
    with pytest.raises(InvalidConfig, match=f"not in this version: {underscores}"):
        client("127.0.0.1:1", **{underscores: "x"})


def test_a_broken_connection_is_tried_again_sooner_than_a_refusal() -> None:
    for options in (ProducerOptions.make({}, {}), ConsumerOptions.make({}, {})):
        pauses = options.pauses
        refused, lost = NotLeader("broker 2 leads"), BrokerUnavailable("connection refused")
        assert 40 <= pauses.after_ms(lost, 1) <= 50
        assert 200 <= pauses.after_ms(lost, 30) <= 250
        assert 800 <= pauses.after_ms(refused, 30) <= 1000
    longer = ProducerOptions.make({"reconnect.backoff.ms": "1s"}, {}).pauses
    assert longer.after_ms(lost, 1) >= 800, "the first pause wins where the longest one is shorter"
