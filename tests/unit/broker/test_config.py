"""The server's configuration: sources, checks across keys, and a dataclass that keeps pace with the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from broker.config import BrokerConfig
from broker.config_keys import BROKER_CONFIGS
from broker.endpoints import parse_endpoint
from raftlog._core.bootstrap import is_loopback
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


def test_one_key_in_two_spellings_is_an_error() -> None:
    with pytest.raises(InvalidConfig, match=r"node\.id is given twice"):
        BrokerConfig.load(flags={"node.id": 1, "node_id": 2})


def test_every_key_has_its_field() -> None:
    fields = {field.name.replace("_", ".") for field in dataclasses.fields(BrokerConfig)}
    endpoints = {"listeners": "listener", "advertised.listeners": "advertised.listener"}
    keys = {endpoints.get(key.name, key.name) for key in BROKER_CONFIGS if not key.dynamic}
    assert fields == keys | {"topic.defaults", "values", "static.keys"}


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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"node_id": ""}, "node.id is not set"),
        ({"log_dirs": ""}, "log.dirs is not set"),
        ({"log_dirs": "/a,/b,/a/"}, "names a directory twice"),
        ({"metadata_log_dir": "/data"}, "is one of log.dirs"),
        ({"process_roles": ""}, "name at least one role"),
        ({"process_roles": "observer"}, "broker, controller"),
        ({"auto_create_topics_enable": True}, "create them with the admin API"),
        ({"socket_request_max_bytes": "4MiB"}, "leaves no room for a batch of message.max.bytes=4194304"),
        ({"num_partitions": 5, "max_partitions_per_topic": 4}, "num.partitions=5 is above"),
        ({"listeners": "127.0.0.1:1,127.0.0.1:2"}, "one listener is supported"),
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
