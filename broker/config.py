"""The server's configuration: defaults, a TOML file, RAFTLOG_* variables and flags, each over the one before.

Everything is checked here, at the edge; inside the server a `BrokerConfig` is passed on explicitly and never changes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker.config_keys import BROKER_CONFIGS, KIB, parse_endpoint
from broker.log.config import LogConfig
from raftlog.config import Value
from raftlog.errors import InvalidConfig
from raftmeta.topic_configs import BROKER_KEY_BY_TOPIC_KEY, TOPIC_CONFIGS

ENVIRONMENT_PREFIX: Final = "RAFTLOG_"
CLIENT_VARIABLES: Final = ("RAFTLOG_BOOTSTRAP",)
"""Settings of clients that share the prefix; the server passes them over."""
METADATA_DIRECTORY: Final = "__cluster_metadata"
REQUEST_OVERHEAD_BYTES: Final = 64 * KIB
"""What a request has around its largest batch."""

Endpoint = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """Every key of `BROKER_CONFIGS` with its value; `broker.config_keys` documents them.

    The topics' defaults (log.retention.ms and the like) stand in `topic_defaults`, by topic key in canonical
    spelling. `values` and `static_keys` serve DescribeConfigs: all values by key, and the keys that somebody set.
    """

    node_id: int
    cluster_id: str
    process_roles: tuple[str, ...]
    listener: Endpoint
    advertised_listener: Endpoint | None
    insecure: bool
    rack: str
    log_dirs: tuple[str, ...]
    metadata_log_dir: str
    metadata_log_max_record_bytes_between_snapshots: int
    num_partitions: int
    default_replication_factor: int
    auto_create_topics_enable: bool
    max_partitions_per_topic: int
    max_partitions_per_broker: int
    socket_request_max_bytes: int
    max_streams: int
    max_subscriptions: int
    max_in_flight_requests: int
    request_timeout_ms: int
    fetch_max_bytes: int
    log_retention_check_interval_ms: int
    log_format: str
    log_level: str
    topic_defaults: Mapping[str, str]
    values: Mapping[str, Value]
    static_keys: frozenset[str]

    @staticmethod
    def load(
        *,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
    ) -> BrokerConfig:
        """Return the configuration from all its sources.

        Raises:
            InvalidConfig: the file cannot be read, an unknown key, a bad value, or values that contradict each other.
        """
        raw: dict[str, object] = {}
        if file is not None:
            raw |= _named(BROKER_CONFIGS.from_toml(_text_of(file), str(file)))
        raw |= BROKER_CONFIGS.from_environment(environment or {}, ENVIRONMENT_PREFIX, CLIENT_VARIABLES)
        raw |= _named(flags or {})
        return BrokerConfig.from_values(raw)

    @staticmethod
    def from_values(raw: Mapping[str, object]) -> BrokerConfig:
        """Return the configuration that these values give over the defaults. Raises InvalidConfig as `load` does."""
        parsed = BROKER_CONFIGS.parse(raw)
        values: dict[str, Any] = BROKER_CONFIGS.resolve(parsed)
        _check(values)
        topic_defaults = {key.name: key.format(values[BROKER_KEY_BY_TOPIC_KEY[key.name]]) for key in TOPIC_CONFIGS}
        special = {"listeners", "advertised.listeners", "metadata.log.dir"}
        broker_keys = values.keys() - special - set(BROKER_KEY_BY_TOPIC_KEY.values())
        return BrokerConfig(
            **{name.replace(".", "_"): values[name] for name in broker_keys},
            listener=parse_endpoint(values["listeners"][0]),
            advertised_listener=_endpoint_or_none(*values["advertised.listeners"]),
            metadata_log_dir=values["metadata.log.dir"] or str(Path(values["log.dirs"][0]) / METADATA_DIRECTORY),
            topic_defaults=topic_defaults,
            values=values,
            static_keys=frozenset(parsed),
        )

    def log_config(self) -> LogConfig:
        """Return what a partition's log does when its topic sets nothing."""
        return LogConfig.from_topic_configs(self.topic_defaults)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"cannot read the configuration file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"the configuration file {file} is not UTF-8 text") from None


def _named(raw: Mapping[str, object]) -> dict[str, object]:
    """Return `raw` by full key names, so that one source replaces another whatever their spelling."""
    named: dict[str, object] = {}
    for name, value in raw.items():
        key = BROKER_CONFIGS.key(name)
        if key.name in named:
            raise InvalidConfig(f"{key.name} is given twice, once as {name!r}")
        named[key.name] = value
    return named


def _endpoint_or_none(text: str = "") -> Endpoint | None:
    return parse_endpoint(text) if text else None


def _check(values: Mapping[str, Any]) -> None:
    if values["node.id"] is None:
        raise InvalidConfig("node.id is not set; give this node a number of its own, for example node.id = 1")
    log_dirs = values["log.dirs"]
    if not log_dirs:
        raise InvalidConfig('log.dirs is not set; name a directory for the data, for example "/var/lib/raftlog"')
    if len(set(map(_normalized, log_dirs))) < len(log_dirs):
        raise InvalidConfig(f"log.dirs={','.join(log_dirs)} names a directory twice")
    if _normalized(values["metadata.log.dir"]) in map(_normalized, log_dirs) and values["metadata.log.dir"]:
        raise InvalidConfig(
            f"metadata.log.dir={values['metadata.log.dir']!r} is one of log.dirs; give it a directory of its own"
        )
    _check_listeners(values)
    needed = values["message.max.bytes"] + REQUEST_OVERHEAD_BYTES
    if values["socket.request.max.bytes"] < needed:
        raise InvalidConfig(
            f"socket.request.max.bytes={values['socket.request.max.bytes']} leaves no room for a batch of "
            f"message.max.bytes={values['message.max.bytes']}; set it to {needed} or more"
        )
    if values["num.partitions"] > values["max.partitions.per.topic"]:
        raise InvalidConfig(
            f"num.partitions={values['num.partitions']} is above "
            f"max.partitions.per.topic={values['max.partitions.per.topic']}"
        )


def _normalized(path: str) -> str:
    return str(Path(path).absolute())


def _check_listeners(values: Mapping[str, Any]) -> None:
    listener = values["listeners"][0]
    host, _ = parse_endpoint(listener)
    if not is_loopback(host) and not values["insecure"]:
        raise InvalidConfig(
            f"listeners={listener!r}: plaintext without authentication is for loopback addresses only; "
            "listen on 127.0.0.1, or start with --insecure (insecure = true) if anyone who reaches the port may do all"
        )
    if host in ("0.0.0.0", "::") and not values["advertised.listeners"]:
        raise InvalidConfig(
            f"listeners={listener!r} is every address of this machine, which clients cannot connect to; "
            "set advertised.listeners to the one that they reach"
        )
    for advertised in values["advertised.listeners"]:
        if parse_endpoint(advertised)[0] in ("0.0.0.0", "::"):
            raise InvalidConfig(f"advertised.listeners={advertised!r}: clients cannot connect to that address")
