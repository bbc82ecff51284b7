"""The server's configuration: defaults, a TOML file, RAFTLOG_* variables and flags, each over the one before.

Everything is checked here, at the edge; inside the server a `BrokerConfig` is passed on explicitly and never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker.config_checks import check_values
from broker.config_keys import BROKER_CONFIGS
from broker.endpoints import parse_endpoint, parse_nodes, parse_voters
from broker.log.config import LogConfig
from raftlog.config import Value
from raftlog.errors import InvalidConfig
from raftmeta.topic_configs import BROKER_KEY_BY_TOPIC_KEY, TOPIC_CONFIGS

ENVIRONMENT_PREFIX: Final = "RAFTLOG_"
CLIENT_VARIABLES: Final = ("RAFTLOG_BOOTSTRAP",)
"""Settings of clients that share the prefix; the server passes them over."""
METADATA_DIRECTORY: Final = "__cluster_metadata"
QUORUM_KEYS: Final = (
    "controller.quorum.voters",
    "inter.node.listener",
    "advertised.inter.node.listener",
    "inter.node.routes",
)

Endpoint = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """Every key of `BROKER_CONFIGS` with its value; `broker.config_keys` documents them.

    The topics' defaults (log.retention.ms and the like) stand in `topic_defaults`, by topic key in canonical
    spelling. `values` and `static_keys` serve DescribeConfigs: all values by key, and the keys that somebody set.
    `inter_node_listener` is None where none is opened: on a node alone. `advertised_inter_node_listener` is what other
    brokers are told; None there as well. `inter_node_routes`: where this node reaches others instead.
    """

    node_id: int
    cluster_id: str
    process_roles: tuple[str, ...]
    listener: Endpoint
    advertised_listener: Endpoint | None
    controller_quorum_voters: Mapping[int, Endpoint]
    inter_node_listener: Endpoint | None
    advertised_inter_node_listener: Endpoint | None
    inter_node_routes: Mapping[int, Endpoint]
    insecure: bool
    rack: str
    log_dirs: tuple[str, ...]
    metadata_log_dir: str
    metadata_log_max_record_bytes_between_snapshots: int
    broker_heartbeat_interval_ms: int
    broker_session_timeout_ms: int
    broker_lease_ms: int
    controller_quorum_election_timeout_ms: int
    auto_leader_rebalance_enable: bool
    leader_imbalance_check_interval_ms: int
    leader_imbalance_per_broker_percentage: int
    controlled_shutdown_enable: bool
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
    replica_lag_time_max_ms: int
    replica_fetch_max_bytes: int
    replica_credit_bytes: int
    replica_high_watermark_checkpoint_interval_ms: int
    log_retention_check_interval_ms: int
    log_scrub_bytes_per_second: int
    log_scrub_interval_ms: int
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
        check_values(values)
        topic_defaults = {
            key.name: key.format(values.get(BROKER_KEY_BY_TOPIC_KEY.get(key.name, ""), key.default))
            for key in TOPIC_CONFIGS
        }
        special = {"listeners", "advertised.listeners", "metadata.log.dir", *QUORUM_KEYS}
        voters = parse_voters(values["controller.quorum.voters"])
        broker_keys = values.keys() - special - {key.name for key in BROKER_CONFIGS if key.dynamic}
        return BrokerConfig(
            **{name.replace(".", "_"): values[name] for name in broker_keys},
            listener=parse_endpoint(values["listeners"][0]),
            advertised_listener=_endpoint_or_none(*values["advertised.listeners"]),
            controller_quorum_voters=voters,
            inter_node_listener=_inter_node_listener(values, voters),
            advertised_inter_node_listener=_advertised_inter_node_listener(values, voters),
            inter_node_routes=parse_nodes(values["inter.node.routes"]),
            metadata_log_dir=values["metadata.log.dir"] or str(Path(values["log.dirs"][0]) / METADATA_DIRECTORY),
            topic_defaults=topic_defaults,
            values=values,
            static_keys=frozenset(parsed),
        )

    @property
    def is_broker(self) -> bool:
        """Whether this node keeps partitions and serves clients."""
        return "broker" in self.process_roles

    @property
    def is_controller(self) -> bool:
        """Whether this node has a vote in the metadata quorum."""
        return "controller" in self.process_roles

    def log_config(self) -> LogConfig:
        """Return what a partition's log does when its topic sets nothing."""
        return LogConfig.from_topic_configs(self.topic_defaults)


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


def _inter_node_listener(values: Mapping[str, Any], voters: Mapping[int, Endpoint]) -> Endpoint | None:
    if not voters:
        return None
    return _endpoint_or_none(values["inter.node.listener"]) or voters[values["node.id"]]


def _advertised_inter_node_listener(values: Mapping[str, Any], voters: Mapping[int, Endpoint]) -> Endpoint | None:
    advertised = _endpoint_or_none(values["advertised.inter.node.listener"])
    return advertised or voters.get(values["node.id"]) or _inter_node_listener(values, voters)
