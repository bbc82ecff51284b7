"""Keys of the metadata quorum: who is in it, where it listens, and how long a broker counts as alive."""

from __future__ import annotations

import pytest

from broker.config import BrokerConfig
from broker.config_keys import BROKER_CONFIGS
from broker.endpoints import parse_voters
from raftlog.errors import InvalidConfig

THREE = "1@127.0.0.1:9093,2@127.0.0.1:9094,3@127.0.0.1:9095"


def config(**values: object) -> BrokerConfig:
    least: dict[str, object] = {"node.id": 1, "log.dirs": "/data", "cluster.id": "c"}
    return BrokerConfig.from_values({**least, **{name.replace("_", "."): value for name, value in values.items()}})


def test_a_node_alone_needs_no_quorum_keys_and_opens_no_inter_node_listener() -> None:
    made = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"})
    assert (made.controller_quorum_voters, made.inter_node_listener) == ({}, None)
    assert made.is_broker
    assert made.is_controller


def test_a_controller_listens_at_its_place_among_the_voters_unless_told_otherwise() -> None:
    made = config(controller_quorum_voters=THREE, node_id=2)
    assert made.controller_quorum_voters == {n: ("127.0.0.1", 9092 + n) for n in (1, 2, 3)}
    assert made.inter_node_listener == ("127.0.0.1", 9094)
    assert config(controller_quorum_voters=THREE, inter_node_listener="[::1]:7").inter_node_listener == ("::1", 7)


def test_a_broker_only_node_names_where_its_followers_reach_it() -> None:
    made = config(
        controller_quorum_voters=THREE, node_id=4, process_roles="broker", inter_node_listener="127.0.0.1:9096"
    )
    assert made.inter_node_listener == made.advertised_inter_node_listener == ("127.0.0.1", 9096)
    assert (made.is_broker, made.is_controller) == (True, False)


def test_other_brokers_are_told_the_advertised_address_else_the_one_among_the_voters() -> None:
    told = config(controller_quorum_voters=THREE, inter_node_listener="127.0.0.1:7").advertised_inter_node_listener
    assert told == ("127.0.0.1", 9093)
    more = {"controller_quorum_voters": THREE, "advertised_inter_node_listener": "elsewhere:9"}
    assert config(**more).advertised_inter_node_listener == ("elsewhere", 9)


def test_routes_say_where_this_node_reaches_others() -> None:
    made = config(controller_quorum_voters=THREE, inter_node_routes="2@127.0.0.1:1,4@[::1]:2")
    assert made.inter_node_routes == {2: ("127.0.0.1", 1), 4: ("::1", 2)}
    assert config().inter_node_routes == {}


def test_the_keys_of_replication_have_kafkas_names() -> None:
    made = config(replica_lag_time_max_ms="5s", replica_fetch_max_bytes="2MiB", replica_credit_bytes="4MiB")
    assert (made.replica_lag_time_max_ms, made.replica_fetch_max_bytes, made.replica_credit_bytes) == (
        5_000,
        2 << 20,
        4 << 20,
    )
    assert config().replica_high_watermark_checkpoint_interval_ms == 5_000


def test_a_controller_only_node_needs_a_directory_for_metadata_only() -> None:
    made = config(controller_quorum_voters=THREE, process_roles="controller", log_dirs="", metadata_log_dir="/meta")
    assert (made.is_broker, made.metadata_log_dir) == (False, "/meta")
    with pytest.raises(InvalidConfig, match=r"neither metadata\.log\.dir nor log\.dirs is set"):
        config(controller_quorum_voters=THREE, process_roles="controller", log_dirs="")


def test_the_times_are_those_of_the_design() -> None:
    made = config()
    assert (made.broker_heartbeat_interval_ms, made.broker_lease_ms, made.broker_session_timeout_ms) == (
        300,
        1200,
        1500,
    )
    assert made.controller_quorum_election_timeout_ms == 500
    assert made.auto_leader_rebalance_enable
    assert made.controlled_shutdown_enable


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"controller_quorum_voters": "127.0.0.1:9093"}, "is not id@host:port"),
        ({"controller_quorum_voters": "x@127.0.0.1:9093"}, "is not id@host:port"),
        ({"controller_quorum_voters": "1@127.0.0.1"}, "need to know the port"),
        ({"controller_quorum_voters": "1@127.0.0.1:0"}, "need to know the port"),
        ({"controller_quorum_voters": "1@a:1,1@b:1,2@c:1"}, "node 1 stands there twice"),
        ({"controller_quorum_voters": "1@a:1,2@a:1,3@c:1"}, "a:1 stands there twice"),
        ({"controller_quorum_voters": "1@a:1,2@b:1"}, "2 voters; a quorum has one of 1, 3, 5"),
        ({"controller_quorum_voters": THREE, "node_id": 9}, "node.id=9 is not in controller.quorum.voters"),
        ({"controller_quorum_voters": THREE, "process_roles": "broker"}, "has no controller; add that role"),
        ({"controller_quorum_voters": THREE, "cluster_id": ""}, "Make one with `raftlog quorum new-id`"),
        ({"process_roles": "broker"}, "without controller.quorum.voters"),
        ({"process_roles": "controller"}, "without controller.quorum.voters"),
        ({"inter_node_listener": "127.0.0.1:1"}, "a node alone talks to no other"),
        ({"controller_quorum_voters": THREE, "inter_node_listener": "127.0.0.1:0"}, "need to know the port"),
        ({"controller_quorum_voters": THREE, "inter_node_listener": "10.0.0.1:9093"}, "--insecure"),
        ({"controller_quorum_voters": "1@10.0.0.1:9093"}, "--insecure"),
        ({"controller_quorum_voters": "1@0.0.0.0:1", "insecure": True}, "cannot connect to"),
        (
            {
                "controller_quorum_voters": THREE,
                "node_id": 4,
                "process_roles": "broker",
            },
            "at which its followers fetch from it",
        ),
        (
            {
                "controller_quorum_voters": THREE,
                "node_id": 4,
                "process_roles": "broker",
                "inter_node_listener": "0.0.0.0:9093",
                "insecure": True,
            },
            "set advertised.inter.node.listener",
        ),
        ({"controller_quorum_voters": THREE, "inter_node_routes": "2"}, "is not id@host:port"),
        ({"inter_node_routes": "2@127.0.0.1:1"}, "a node alone talks to no other"),
        (
            {"controller_quorum_voters": THREE, "advertised_inter_node_listener": "0.0.0.0:1"},
            "nobody can connect to that address",
        ),
        ({"broker_lease_ms": 1400}, "at most 1350, nine tenths of broker.session.timeout.ms=1500"),
        ({"broker_heartbeat_interval_ms": 600}, "set it above 1200"),
    ],
)
def test_what_cannot_work_is_refused_and_says_what_to_do(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config(**values)
    assert words in str(caught.value)


def test_an_address_beyond_loopback_is_allowed_to_those_who_say_insecure() -> None:
    made = config(controller_quorum_voters="1@broker-0:9093", inter_node_listener="0.0.0.0:9093", insecure=True)
    assert made.inter_node_listener == ("0.0.0.0", 9093)


def test_voters_are_written_back_as_they_were_given() -> None:
    key = BROKER_CONFIGS.key("controller.quorum.voters")
    assert parse_voters(key.parse(key.format(key.parse(THREE)))) == parse_voters(THREE.split(","))  # type: ignore[arg-type] # a list's value
