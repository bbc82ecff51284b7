"""The server's configuration: sources, checks across keys, the quorum's keys and the keys of TLS and logins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.config.config import BROKER_CONFIGS, BrokerConfig
from broker.config.endpoints import parse_endpoint, parse_voters
from raftlog._core.cluster import is_loopback
from raftlog._core.security.acls import super_users_of
from raftlog.config import settings_of
from raftlog.errors import InvalidConfig

MINIMAL: dict[str, object] = {"node.id": 1, "log.dirs": "/data"}


def config(**values: object) -> BrokerConfig:
    return BrokerConfig.from_values({**MINIMAL, **{name.replace("_", "."): value for name, value in values.items()}})


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('node.id = 1\nlog.dirs = ["/a", "/b"]\nrack = "file"\nmax.streams = 7\nlog.level = "debug"\n')
    environment = {"RAFTLOG_RACK": "environment", "RAFTLOG_MAX_STREAMS": "8", "RAFTLOG_BOOTSTRAP": "x:1", "HOME": "/"}
    loaded = BrokerConfig.load(file=file, environment=environment, flags={"max_streams": "9"})
    assert loaded.log_dirs == ("/a", "/b")
    assert loaded.log_level == "debug"
    assert loaded.rack == "environment"
    assert loaded.max_streams == 9
    assert loaded.static_keys == {"node.id", "log.dirs", "rack", "max.streams", "log.level"}


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"cannot read the configuration file .*nothing.toml: No such file"):
        BrokerConfig.load(file=tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="is not UTF-8 text"):
        BrokerConfig.load(file=tmp_path / "binary.toml")


def test_an_unknown_key_is_an_error_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("node.idd = 1\n")
    with pytest.raises(InvalidConfig, match=r"server.toml: unknown server config 'node.idd'; did you mean 'node.id'\?"):
        BrokerConfig.load(file=file)
    with pytest.raises(InvalidConfig, match="environment variable RAFTLOG_NODEID"):
        BrokerConfig.load(environment={"RAFTLOG_NODEID": "1"})
    with pytest.raises(InvalidConfig, match=r"did you mean 'log.retention.ms'\?"):
        BrokerConfig.load(flags={"log.retention.m": "1"})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("zookeeper.connect", "there is no ZooKeeper; controller.quorum.voters names the controllers"),
        ("broker.rack", "it is called rack here"),
        ("broker.id", "it is called node.id here"),
        ("delete.topic.enable", "topics can be deleted"),
        ("log_retention_hours", r"log\.retention\.ms takes units, such as log\.retention\.ms=7d"),
    ],
)
def test_a_key_of_kafkas_servers_is_refused_with_what_to_use_instead(key: str, words: str) -> None:
    """The nearest name would mislead: `rack` is not near to `broker.rack`, `broker.lease.ms` is."""
    with pytest.raises(InvalidConfig, match=f"unknown server config '{key}': .*{words}"):
        BrokerConfig.load(flags={key: "1"})
    with pytest.raises(InvalidConfig, match=words):
        BrokerConfig.load(environment={f"RAFTLOG_{key.upper().replace('.', '_')}": "1"})


def test_one_key_in_two_spellings_is_an_error() -> None:
    with pytest.raises(InvalidConfig, match=r"node\.id is given twice"):
        BrokerConfig.load(flags={"node.id": 1, "node_id": 2})


def test_every_key_has_its_field() -> None:
    made = config()
    for setting in settings_of(BrokerConfig):
        assert BROKER_CONFIGS.key(setting.key.name) is setting.key
        assert setting.attribute in vars(made), setting.attribute
    assert {key.name for key in BROKER_CONFIGS if not key.dynamic} == {
        each.key.name for each in settings_of(BrokerConfig)
    }
    assert BrokerConfig.node_id.key.name == "node.id"
    with pytest.raises(AttributeError, match="never changes"):
        made.node_id = 2


def test_defaults() -> None:
    made = config()
    assert made.listener == ("127.0.0.1", 9092)
    assert made.advertised_listener is None
    assert made.metadata_log_dir == "/data/__cluster_metadata"
    assert made.insecure is False
    assert config(metadata_log_dir="/meta").metadata_log_dir == "/meta"


def test_the_topics_defaults_reach_the_log() -> None:
    log = config(log_retention_ms="1h", log_segment_bytes="1MiB", message_max_bytes="8MiB").log_config()
    assert (log.retention_ms, log.segment_bytes, log.max_message_bytes) == (3_600_000, 1 << 20, 8 << 20)
    log = config(log_retention_ms=-1).log_config()
    assert (log.retention_ms, log.retention_bytes, log.flush_messages, log.flush_ms) == (None, None, 1, None)
    assert log.max_message_bytes == 4 << 20


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:9092", ("127.0.0.1", 9092)),
        ("localhost:0", ("localhost", 0)),
        ("broker-0.raftlog", ("broker-0.raftlog", 9092)),
        ("[::1]:65535", ("::1", 65535)),
        ("[::1]", ("::1", 9092)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text", ["", ":9092", "host:", "host:65536", "host:-1", "host:٣", "::1:9092", "a b:1", "tcp://host:1", "[::1:9092"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="listeners"):
        config(listeners=text)


@pytest.mark.parametrize("listener", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "LocalHost:1"])
def test_plaintext_on_loopback_is_fine(listener: str) -> None:
    assert config(listeners=listener).listener[1] == 1


@pytest.mark.parametrize("listener", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "broker.example:1", "localhost.example:1"])
def test_plaintext_beyond_loopback_refuses_to_start_unless_told_insecure(listener: str) -> None:
    with pytest.raises(InvalidConfig, match=r"plaintext without authentication .* --insecure"):
        config(listeners=listener, advertised_listeners="broker:1")
    assert config(listeners=listener, advertised_listeners="broker:1", insecure=True).insecure


def test_clients_need_an_address_they_can_connect_to() -> None:
    with pytest.raises(InvalidConfig, match=r"set advertised\.listeners"):
        config(listeners="0.0.0.0:9092", insecure=True)
    with pytest.raises(InvalidConfig, match="clients cannot connect to that address"):
        config(advertised_listeners="0.0.0.0:9092")
    assert config(advertised_listeners="broker-0:0").advertised_listener == ("broker-0", 0)


def test_kafka_clients_have_a_listener_of_their_own() -> None:
    assert config().kafka_listener is None
    both = config(listeners="raftlog://127.0.0.1:1, kafka://127.0.0.1:2")
    assert (both.listener, both.kafka_listener) == (("127.0.0.1", 1), ("127.0.0.1", 2))
    advertised = config(listeners="127.0.0.1:1,KAFKA://[::1]:2", advertised_listeners="kafka://broker:0")
    assert (advertised.advertised_listener, advertised.advertised_kafka_listener) == (None, ("broker", 0))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"listeners": "kafka://127.0.0.1:2"}, "expected host:port"),
        ({"listeners": "127.0.0.1:1,kafka://127.0.0.1:2,kafka://127.0.0.1:3"}, "one listener for kafka clients"),
        ({"listeners": "127.0.0.1:1,kafka://127.0.0.1:2,kafka+ssl://127.0.0.1:3"}, "one listener for kafka clients"),
        ({"listeners": "127.0.0.1:1,kafka+tls://127.0.0.1:2"}, "the protocol kafka+tls is unknown"),
        ({"listeners": "127.0.0.1:1,kafka+ssl://127.0.0.1:2"}, "and kafka+ssl:// in `listeners` needs it"),
        (
            {"listeners": "127.0.0.1:1,kafka+ssl://127.0.0.1:2", "ssl_keystore_location": "/a"},
            "ssl.truststore.location is not set",
        ),
        ({"listeners": "127.0.0.1:1,kafka+sasl://10.0.0.1:2"}, "passwords in plaintext are for loopback"),
        ({"listeners": "127.0.0.1:1,kafka+sasl://0.0.0.0:2", "insecure": True}, "as kafka+sasl://host:port"),
        (
            {"listeners": "127.0.0.1:1,kafka+sasl://127.0.0.1:2", "advertised_listeners": "kafka://127.0.0.1:2"},
            "so write kafka+sasl:// here as well",
        ),
        ({"listeners": "127.0.0.1:1,kafka://10.0.0.1:2"}, "plaintext without authentication"),
        ({"listeners": "127.0.0.1:1,kafka://0.0.0.0:2", "insecure": True}, "as kafka://host:port"),
        ({"advertised_listeners": "kafka://broker:2"}, "`listeners` has no address for kafka clients"),
        (
            {
                "listeners": "127.0.0.1:1,kafka://127.0.0.1:2",
                "listener_security_protocol": "ssl",
                "ssl_keystore_location": "/a",
                "ssl_client_auth": "none",
            },
            "admits anyone, but listener.security.protocol=ssl does not",
        ),
    ],
)
def test_a_listener_for_kafka_clients_is_no_way_around_security(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config(**values)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("listener", "protocol", "asks"),
    [
        ("kafka://127.0.0.1:2", "plaintext", True),
        ("kafka+ssl://10.0.0.1:2", "ssl", True),
        ("KAFKA+SASL://127.0.0.1:2", "sasl_plaintext", False),
        ("kafka+sasl+ssl://10.0.0.1:2", "sasl_ssl", False),
    ],
)
def test_each_protocol_of_kafka_clients(listener: str, protocol: str, asks: bool) -> None:
    files = {"ssl_keystore_location": "/a", "ssl_truststore_location": "/b"}
    made = config(listeners=f"127.0.0.1:1,{listener}", authorizer="acl", **files)
    assert made.kafka_security_protocol == protocol
    assert made.asks_kafka_for_certificates == asks
    assert made.kafka_speaks_tls == protocol.endswith("ssl")
    assert made.kafka_listener is not None
    required = config(listeners=f"127.0.0.1:1,{listener}", ssl_client_auth="required", **files)
    assert required.asks_kafka_for_certificates


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"node_id": ""}, "node.id is not set"),
        ({"log_dirs": ""}, "log.dirs is not set"),
        ({"log_dirs": "/a,/b,/a/"}, "names a directory twice"),
        ({"metadata_log_dir": "/data"}, "is one of log.dirs"),
        ({"process_roles": ""}, "name at least one role"),
        ({"process_roles": "observer"}, "broker, controller"),
        (
            {"auto_create_topics_enable": True},
            "brokers never create topics by themselves; create them with the admin API",
        ),
        ({"socket_request_max_bytes": "4MiB"}, "leaves no room for a batch of message.max.bytes=4194304"),
        ({"num_partitions": 5, "max_partitions_per_topic": 4}, "num.partitions=5 is above"),
        ({"listeners": "127.0.0.1:1,127.0.0.1:2"}, "one listener for raftlog clients is supported"),
        ({"listeners": ""}, "expected host:port"),
        ({"advertised_listeners": "host:port"}, "the port is a number"),
        ({"log_level": "loud"}, "expected one of debug, info, warning, error"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config(**values)
    assert words in str(caught.value)


def test_names_that_resolve_to_anything_do_not_count_as_loopback() -> None:
    assert is_loopback("127.0.0.53")
    assert not is_loopback("127.0.0.1.example")
    assert not is_loopback("")


THREE = "1@127.0.0.1:9093,2@127.0.0.1:9094,3@127.0.0.1:9095"


def quorum(**values: object) -> BrokerConfig:
    least: dict[str, object] = {"node.id": 1, "log.dirs": "/data", "cluster.id": "c"}
    return BrokerConfig.from_values({**least, **{name.replace("_", "."): value for name, value in values.items()}})


def test_a_node_alone_needs_no_quorum_keys_and_opens_no_inter_node_listener() -> None:
    made = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"})
    assert (made.controller_quorum_voters, made.inter_node_listener) == ({}, None)
    assert made.is_broker
    assert made.is_controller


def test_a_controller_listens_at_its_place_among_the_voters_unless_told_otherwise() -> None:
    made = quorum(controller_quorum_voters=THREE, node_id=2)
    assert made.controller_quorum_voters == {n: ("127.0.0.1", 9092 + n) for n in (1, 2, 3)}
    assert made.inter_node_listener == ("127.0.0.1", 9094)
    assert quorum(controller_quorum_voters=THREE, inter_node_listener="[::1]:7").inter_node_listener == (
        "::1",
        7,
    )


def test_a_broker_only_node_names_where_its_followers_reach_it() -> None:
    made = quorum(
        controller_quorum_voters=THREE, node_id=4, process_roles="broker", inter_node_listener="127.0.0.1:9096"
    )
    assert made.inter_node_listener == made.advertised_inter_node_listener == ("127.0.0.1", 9096)
    assert (made.is_broker, made.is_controller) == (True, False)


def test_other_brokers_are_told_the_advertised_address_else_the_one_among_the_voters() -> None:
    told = quorum(controller_quorum_voters=THREE, inter_node_listener="127.0.0.1:7").advertised_inter_node_listener
    assert told == ("127.0.0.1", 9093)
    more = {"controller_quorum_voters": THREE, "advertised_inter_node_listener": "elsewhere:9"}
    assert quorum(**more).advertised_inter_node_listener == ("elsewhere", 9)


def test_routes_say_where_this_node_reaches_others() -> None:
    made = quorum(controller_quorum_voters=THREE, inter_node_routes="2@127.0.0.1:1,4@[::1]:2")
    assert made.inter_node_routes == {2: ("127.0.0.1", 1), 4: ("::1", 2)}
    assert quorum().inter_node_routes == {}


def test_the_keys_of_replication_have_kafkas_names() -> None:
    made = quorum(replica_lag_time_max_ms="5s", replica_fetch_max_bytes="2MiB", replica_credit_bytes="4MiB")
    assert (made.replica_lag_time_max_ms, made.replica_fetch_max_bytes, made.replica_credit_bytes) == (
        5_000,
        2 << 20,
        4 << 20,
    )
    assert quorum().replica_high_watermark_checkpoint_interval_ms == 5_000


def test_a_controller_only_node_needs_a_directory_for_metadata_only() -> None:
    made = quorum(controller_quorum_voters=THREE, process_roles="controller", log_dirs="", metadata_log_dir="/meta")
    assert (made.is_broker, made.metadata_log_dir) == (False, "/meta")
    with pytest.raises(InvalidConfig, match=r"neither metadata\.log\.dir nor log\.dirs is set"):
        quorum(controller_quorum_voters=THREE, process_roles="controller", log_dirs="")


def test_the_times_are_those_of_the_design() -> None:
    made = quorum()
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
        ({"controller_quorum_voters": "1@a:1,1@b:1,2@c:1"}, "node 1 is given twice"),
        ({"controller_quorum_voters": "1@a:1,2@a:1,3@c:1"}, "a:1 is given twice"),
        ({"controller_quorum_voters": "1@a:1,2@b:1"}, "2 voters; a quorum has 1, 3, 5"),
        ({"controller_quorum_voters": THREE, "node_id": 9}, "node.id=9 is not in controller.quorum.voters"),
        ({"controller_quorum_voters": THREE, "process_roles": "broker"}, "has no controller; add that role"),
        ({"controller_quorum_voters": THREE, "cluster_id": ""}, "make one with `raftlog quorum new-id`"),
        ({"process_roles": "broker"}, "without controller.quorum.voters"),
        ({"process_roles": "controller"}, "without controller.quorum.voters"),
        ({"inter_node_listener": "127.0.0.1:1"}, "a node that is alone calls no other"),
        ({"controller_quorum_voters": THREE, "inter_node_listener": "127.0.0.1:0"}, "need to know the port"),
        ({"controller_quorum_voters": THREE, "inter_node_listener": "10.0.0.1:9093"}, "--insecure"),
        ({"controller_quorum_voters": "1@10.0.0.1:9093"}, "--insecure"),
        ({"controller_quorum_voters": "1@0.0.0.0:1", "insecure": True}, "cannot connect"),
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
        ({"inter_node_routes": "2@127.0.0.1:1"}, "a node that is alone calls no other"),
        (
            {"controller_quorum_voters": THREE, "advertised_inter_node_listener": "0.0.0.0:1"},
            "no node can connect to that address",
        ),
        ({"broker_lease_ms": 1400}, "at most 1350, nine tenths of broker.session.timeout.ms=1500"),
        ({"broker_heartbeat_interval_ms": 600}, "set it above 1200"),
    ],
)
def test_what_cannot_work_is_refused_and_says_what_to_do(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        quorum(**values)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"log_segment_bytes": "64KiB"}, "log.segment.bytes=65536 is below min.segment.bytes=1048576"),
        ({"min_insync_replicas": 2}, "min.insync.replicas=2 is above default.replication.factor=1"),
        ({"ssl_keystore_location": "/node.pem"}, "ssl.keystore.location=/node.pem is not used"),
    ],
)
def test_a_valid_setting_that_is_probably_a_mistake_causes_a_warning(values: dict[str, object], words: str) -> None:
    (warning,) = quorum(**values).warnings
    assert warning.startswith(words)


def test_ordinary_settings_cause_no_warning() -> None:
    assert quorum().warnings == ()
    assert quorum(min_insync_replicas=2, default_replication_factor=3, min_segment_bytes=1024).warnings == ()
    assert quorum(log_segment_bytes="64KiB", min_segment_bytes="64KiB").warnings == ()


def test_an_address_beyond_loopback_is_allowed_to_those_who_say_insecure() -> None:
    made = quorum(controller_quorum_voters="1@broker-0:9093", inter_node_listener="0.0.0.0:9093", insecure=True)
    assert made.inter_node_listener == ("0.0.0.0", 9093)


def test_voters_are_written_back_as_they_were_given() -> None:
    key = BROKER_CONFIGS.key("controller.quorum.voters")
    assert parse_voters(key.parse(key.format(key.parse(THREE)))) == parse_voters(THREE.split(","))  # type: ignore[arg-type] # a list's value


VOTERS = "1@10.0.0.1:9093"
KEYSTORE = {"ssl.keystore.location": "node.pem"}
CERTIFICATES = {**KEYSTORE, "ssl.truststore.location": "ca.pem"}
SSL = {"listener.security.protocol": "ssl", **CERTIFICATES}
EVERYWHERE = {"listeners": "10.0.0.1:9092", "controller.quorum.voters": VOTERS}


def secured(values: dict[str, object]) -> BrokerConfig:
    return BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **values})


def test_everything_is_plaintext_by_default() -> None:
    made = secured({})
    assert made.listener_security_protocol == made.security_inter_broker_protocol == "plaintext"
    assert made.client_settings() == {}


@pytest.mark.parametrize("spelling", ["ssl", "SSL", "Ssl"])
def test_nodes_speak_what_clients_speak_unless_said_otherwise(spelling: str) -> None:
    made = secured({**SSL, "listener.security.protocol": spelling})
    assert made.listener_security_protocol == made.security_inter_broker_protocol == "ssl"
    assert made.asks_for_certificates
    assert made.client_settings() == {
        "security.protocol": "ssl",
        "ssl.ca.location": "ca.pem",
        "ssl.certificate.location": "node.pem",
    }
    assert secured({**SSL, "security.inter.broker.protocol": "PLAINTEXT"}).security_inter_broker_protocol == "plaintext"


def test_with_tls_listeners_may_be_reached_from_elsewhere() -> None:
    made = secured({**EVERYWHERE, **SSL})
    assert not made.insecure


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (EVERYWHERE, r"listeners='10.0.0.1:9092': plaintext .*\(listener.security.protocol = ssl\)"),
        (
            {**EVERYWHERE, **SSL, "security.inter.broker.protocol": "plaintext"},
            r"controller.quorum.voters: this node is at 10.0.0.1:9093: plaintext without authentication",
        ),
        (
            {**EVERYWHERE, **SSL, "listener.security.migration": True},
            r"listener.security.migration=true still accepts plaintext; set it to false, or start with --insecure",
        ),
    ],
)
def test_plaintext_that_others_reach_is_refused_unless_it_is_meant(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        secured(values)
    assert secured({**values, "insecure": True}).insecure


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"listener.security.protocol": "ssl"}, "ssl.keystore.location is not set, and listener.security.protocol=ssl"),
        ({"listener.security.migration": True}, "ssl.keystore.location is not set, and listener.security.migration"),
        (
            {"security.inter.broker.protocol": "ssl", "controller.quorum.voters": "1@127.0.0.1:9093"},
            "ssl.keystore.location is not set, and ssl between nodes (security.inter.broker.protocol) needs it",
        ),
        (
            {"listener.security.protocol": "ssl", **KEYSTORE},
            "ssl.truststore.location is not set, and ssl.client.auth=required: name the PEM file with the certificate "
            "of the CA that has issued them, or set ssl.client.auth = none",
        ),
        (
            {
                "listener.security.protocol": "ssl",
                **KEYSTORE,
                "ssl.client.auth": "none",
                "controller.quorum.voters": "1@127.0.0.1:9093",
            },
            "ssl.truststore.location is not set, and nodes must show certificates to each other",
        ),
        ({"ssl.client.auth": "requested"}, "expected one of auto, none, required"),
        ({"listener.security.protocol": "SASL_PLAINTEXT"}, "expected one of plaintext, ssl, sasl_ssl"),
        ({"listener.security.protocol": "SASL_SSL"}, "listener.security.protocol=sasl_ssl needs it: name the PEM file"),
        (
            {"listener.security.protocol": "sasl_ssl", **KEYSTORE, "ssl.client.auth": "required"},
            "ssl.truststore.location is not set, and ssl.client.auth=required",
        ),
        (
            {"listener.security.protocol": "sasl_ssl", **KEYSTORE, "controller.quorum.voters": "1@127.0.0.1:9093"},
            "ssl.truststore.location is not set, and nodes must show certificates to each other",
        ),
        ({"sasl.enabled.mechanisms": "PLAIN"}, "add SCRAM-SHA-512"),
        ({"authorizer": "AclAuthorizer"}, "expected one of none, acl"),
        ({"max.partitions.per.user.overrides": "alice:5"}, "'alice:5' is not User:NAME:LIMIT, such as User:"),
        ({"max.partitions.per.user.overrides": "User:alice"}, "'User:alice' is not User:NAME:LIMIT"),
        ({"max.partitions.per.user.overrides": "User::5"}, "'User::5' is not User:NAME:LIMIT"),
        ({"max.partitions.per.user.overrides": "User:alice:-1"}, "does not end in a limit"),
        ({"max.partitions.per.user.overrides": "User:a:5,User:b:many"}, "does not end in a limit"),
        ({"max.partitions.per.user.overrides": "User:a:5;User:a:6"}, "'User:a' has two limits"),
        ({"super.users": "alice"}, "'alice' is not a principal; write User:NAME, with semicolons between"),
        ({"super.users": "User:alice;bob"}, "'bob' is not a principal"),
        ({"super.users": "User:"}, "'User:' is not a principal"),
        ({"super.users": "User:alice,User:bob"}, "has a comma"),
        ({"super.users": "User:*"}, "would give all clients all rights"),
        ({"super.users": "User:ANONYMOUS"}, "would give all clients all rights"),
    ],
)
def test_what_is_missing_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        secured(values)


def test_a_node_alone_that_asks_for_no_certificates_needs_no_ca() -> None:
    made = secured({"listener.security.protocol": "ssl", **KEYSTORE, "ssl.client.auth": "none"})
    assert made.ssl_truststore_location == ""


def test_users_with_passwords_show_no_certificates_unless_they_are_asked() -> None:
    made = secured({"listener.security.protocol": "Sasl_SSL", **KEYSTORE})
    assert not made.asks_for_certificates
    assert made.security_inter_broker_protocol == "ssl"
    assert made.sasl_enabled_mechanisms == ("SCRAM-SHA-256", "SCRAM-SHA-512")
    assert made.client_settings() == {"security.protocol": "sasl_ssl"}
    asks = secured({**SSL, "listener.security.protocol": "sasl_ssl", "ssl.client.auth": "required"})
    assert asks.asks_for_certificates
    assert asks.client_settings()["ssl.certificate.location"] == "node.pem"
    assert not secured({**SSL, "ssl.client.auth": "none"}).asks_for_certificates


def test_with_passwords_listeners_may_be_reached_from_elsewhere() -> None:
    assert not secured({**EVERYWHERE, **SSL, "listener.security.protocol": "sasl_ssl"}).insecure
    with pytest.raises(InvalidConfig, match="still accepts plaintext"):
        secured({**EVERYWHERE, **SSL, "listener.security.protocol": "sasl_ssl", "listener.security.migration": True})


def test_a_client_on_this_machine_is_an_administrator(tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text('bob = "one"\nroot = "two"\n')
    keys = {"listener.security.protocol": "sasl_ssl", **CERTIFICATES, "sasl.users.location": str(users)}
    made = secured({**keys, "super.users": "User:root; User:carol"})
    assert made.client_settings() == {
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": "ca.pem",
        "sasl.username": "root",
        "sasl.password": "two",
        "sasl.mechanism": "SCRAM-SHA-512",
    }
    assert "two" not in repr(made)
    weaker = secured({**keys, "super.users": "User:root", "sasl.enabled.mechanisms": "SCRAM-SHA-256"})
    assert weaker.client_settings()["sasl.mechanism"] == "SCRAM-SHA-256"
    users.write_text("root")
    with pytest.raises(InvalidConfig, match=r"sasl\.users\.location=.*: it is not TOML"):
        made.client_settings()


def test_super_users_are_separated_by_semicolons() -> None:
    assert super_users_of("User:a;User:b c; User:CN=d ;") == {"User:a", "User:b c", "User:CN=d"}
    assert super_users_of("") == frozenset()


def test_variables_of_clients_are_not_taken_for_the_servers() -> None:
    variables = {
        "RAFTLOG_CLIENT_CONFIG": "client.toml",
        "RAFTLOG_SECURITY_PROTOCOL": "ssl",
        "RAFTLOG_SSL_CA_LOCATION": "ca.pem",
        "RAFTLOG_SSL_CERTIFICATE_LOCATION": "client.pem",
        "RAFTLOG_SSL_KEY_LOCATION": "client.key",
    }
    made = BrokerConfig.load(environment={"RAFTLOG_NODE_ID": "1", "RAFTLOG_LOG_DIRS": "/data", **variables})
    assert made.listener_security_protocol == "plaintext"
