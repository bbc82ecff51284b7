"""The options of clients, and the errors for all others."""

from __future__ import annotations

from typing import Any

import pytest

from raftlog import Admin, Consumer, Producer, aio
from raftlog._client.options import ACKS, ConsumerOptions, ProducerOptions
from raftlog._core.cluster import parse_bootstrap
from raftlog.errors import BrokerUnavailable, InvalidConfig, NotLeader, ThrottlingQuotaExceeded

CLIENTS: list[Any] = [Producer, Consumer, Admin, aio.Producer, aio.Consumer, aio.Admin]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("bootstrap", ["nowhere", "host:0", "host:port", "", []])
def test_a_malformed_bootstrap_is_a_bad_value_like_any_other(client: Any, bootstrap: Any) -> None:
    with pytest.raises(InvalidConfig, match="host:port"):
        client(bootstrap)


def test_addresses_come_as_text_or_as_a_list() -> None:
    with pytest.raises(InvalidConfig, match=r"bootstrap is 9092: give host:port, or a list of such, as text"):
        parse_bootstrap(9092)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="as text"):
        parse_bootstrap(b"a:1")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"'http://a:1/' is a URL; leave its scheme out: a:1"):
        parse_bootstrap("b:1, http://a:1/")
    assert parse_bootstrap("a:1, b:2,") == parse_bootstrap(["a:1", "b:2"]) == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("bootstrap", "keywords"),
    [
        (["a:1"], {"config": {"client.id": "c"}}),
        (None, {"bootstrap_servers": ["a:1"], "client_id": "c"}),
        (None, {"bootstrap_servers": "a:1", "configs": {"client_id": "c"}}),
        ({"bootstrap.servers": "a:1", "client.id": "c"}, {}),
        ({"client.id": "c"}, {"bootstrap_servers": "a:1"}),
        (None, {"config": {"bootstrap.servers": "a:1", "client.id": "c"}}),
    ],
)
@pytest.mark.parametrize("client", [aio.Producer, aio.Consumer, aio.Admin])
def test_clients_take_the_arguments_of_other_clients(client: Any, bootstrap: Any, keywords: dict[str, Any]) -> None:
    made = client(bootstrap, **keywords)
    assert made._addresses == ["a:1"]
    assert made._options.client_id == "c"


@pytest.mark.parametrize(
    ("bootstrap", "keywords", "words"),
    [
        (None, {}, "the addresses of the brokers are missing: give bootstrap"),
        ({"client.id": "c"}, {}, "the addresses of the brokers are missing"),
        ("a:1", {"bootstrap_servers": "a:1"}, "the addresses of the brokers are given twice"),
        ("a:1", {"config": {"bootstrap.servers": "a:1"}}, "the addresses of the brokers are given twice"),
        ("a:1", {"config": {}, "configs": {}}, "the config is given twice"),
        ({"bootstrap.servers": "a:1"}, {"config": {}}, "the config is given twice"),
        ("a:1", {"config": 5}, "config is 5: give a mapping"),
        ({"bootstrap.servers": "a:1", "client.id": "c"}, {"client_id": "d"}, "client_id is given twice"),
    ],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_missing_or_given_twice_is_named(
    client: Any, bootstrap: Any, keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        client(bootstrap, **keywords)


def test_a_mapping_configures_every_option() -> None:
    made = aio.Producer({"bootstrap.servers": "a:1", "acks": "1", "linger.ms": 7})
    assert (made._options.acks, made._options.linger_ms) == (ACKS["1"], 7)
    assert aio.Consumer({"bootstrap.servers": "a:1", "group.id": "g"})._options.group_id == "g"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["sasl.jaas.config", "ssl.keystore.password"])
def test_authentication_by_other_means_than_there_are_is_refused_by_name(client: Any, name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"not in this version: {name}"):
        client("127.0.0.1:1", config={name: "x"})
    underscores = name.replace(".", "_")
    with pytest.raises(InvalidConfig, match=f"not in this version: {underscores}"):
        client("127.0.0.1:1", **{underscores: "x"})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("session.timeout.ms", "group.consumer.session.timeout.ms in their configuration"),
        ("heartbeat.interval.ms", "group.consumer.heartbeat.interval.ms in their configuration"),
        ("partition.assignment.strategy", "group.remote.assignor=sticky, range, roundrobin"),
        ("group.protocol", "KIP-848"),
        ("enable.partition.eof", r"Consumer\.read_to_end"),
    ],
)
@pytest.mark.parametrize("client", [Consumer, aio.Consumer])
def test_what_kafka_has_and_this_has_not_says_what_there_is(client: Any, name: str, instead: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} is not an option here.*{instead}"):
        client("127.0.0.1:1", config={name: "x"})
    underscores = name.replace(".", "_")
    with pytest.raises(InvalidConfig, match=f"{underscores} is not an option here"):
        client("127.0.0.1:1", **{underscores: "x"})


def test_a_broken_connection_is_tried_again_sooner_than_a_refusal() -> None:
    for options in (ProducerOptions.make({}, {}), ConsumerOptions.make({}, {})):
        pauses = options.pauses
        refused, lost = NotLeader("broker 2 leads"), BrokerUnavailable("connection refused")
        assert 40 <= pauses.after_ms(lost, 1) <= 50
        assert 200 <= pauses.after_ms(lost, 30) <= 250
        assert 800 <= pauses.after_ms(refused, 30) <= 1000
    longer = ProducerOptions.make({"reconnect.backoff.ms": "1s"}, {}).pauses
    assert longer.after_ms(lost, 1) >= 800, "the first pause must count where the longest one is shorter"


def test_a_client_over_its_quota_pauses_as_long_as_the_broker_says() -> None:
    pauses = ProducerOptions.make({}, {}).pauses
    assert pauses.after_ms(ThrottlingQuotaExceeded("over", 12_345), 1) == 12_345
    assert pauses.after_ms(ThrottlingQuotaExceeded("over", 0), 1) > 0


@pytest.mark.parametrize("client", [Consumer, aio.Consumer])
def test_an_option_that_is_none_counts_as_left_out(client: Any) -> None:
    options = ConsumerOptions.make({"client.rack": None}, {"group_id": "g", "group_instance_id": None})
    assert (options.group_id, options.group_instance_id, options.client_rack) == ("g", "", "")
    with pytest.raises(InvalidConfig, match="unknown"):
        ConsumerOptions.make({}, {"group_instanceid": None})
    made = ProducerOptions.make({}, {"acks": "1", "enable_idempotence": None})
    assert not made.enable_idempotence
    with pytest.raises(InvalidConfig, match="is empty"):
        client("127.0.0.1:1", group_id="g", group_instance_id="")


def test_none_contradicts_nothing() -> None:
    with Consumer("127.0.0.1:1", group_id="g", group_instance_id=None) as consumer:
        assert consumer.group_metadata().group_instance_id == ""
