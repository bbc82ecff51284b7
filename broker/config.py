"""The server's configuration: defaults, a TOML file, RAFTLOG_* variables and flags, each over the one before.

Everything is checked here, at the edge; inside the server a `BrokerConfig` is passed on explicitly and never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker.config_checks import asks_for_certificates, check_values, inter_node_protocol
from broker.config_keys import BROKER_CONFIGS
from broker.endpoints import parse_endpoint, parse_nodes, parse_voters
from broker.group_keys import MINUTE_MS
from broker.groups.config import GroupConfig
from broker.log.config import LogConfig
from broker.log.producer_state import ProducerLimits
from broker.security.passwords import administrator
from broker.security_keys import PLAINTEXT, SASL_SSL, SSL, super_users
from broker.transactions.config import TransactionConfig
from raftlog._client.option_keys import SECURITY_KEYS
from raftlog.config import Value
from raftlog.errors import InvalidConfig
from raftmeta.topic_configs import BROKER_KEY_BY_TOPIC_KEY, TOPIC_CONFIGS

ENVIRONMENT_PREFIX: Final = "RAFTLOG_"
CLIENT_VARIABLES: Final = (
    "RAFTLOG_BOOTSTRAP",
    "RAFTLOG_CLIENT_CONFIG",
    *(f"{ENVIRONMENT_PREFIX}{key.variable}" for key in SECURITY_KEYS),
)
"""Settings of clients that share the prefix; the server passes them over."""
METADATA_DIRECTORY: Final = "__cluster_metadata"
QUORUM_KEYS: Final = (
    "controller.quorum.voters",
    "inter.node.listener",
    "advertised.inter.node.listener",
    "inter.node.routes",
    "security.inter.broker.protocol",
)
COMPLETE_AFTER_MS: Final = 100
"""How long the record that a transaction has all its markers waits for its producer's next transaction, which makes it
needless: so a producer that is busy costs two records for each transaction, not three."""

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
    listener_security_protocol: str
    security_inter_broker_protocol: str
    listener_security_migration: bool
    ssl_keystore_location: str
    ssl_keystore_key_location: str
    ssl_truststore_location: str
    ssl_client_auth: str
    sasl_enabled_mechanisms: tuple[str, ...]
    sasl_users_location: str
    authorizer: str
    super_users: str
    allow_everyone_if_no_acl_found: bool
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
    producer_id_expiration_ms: int
    producer_ids_max: int
    fetch_max_bytes: int
    replica_lag_time_max_ms: int
    replica_fetch_max_bytes: int
    replica_credit_bytes: int
    replica_high_watermark_checkpoint_interval_ms: int
    log_retention_check_interval_ms: int
    log_cleaner_enable: bool
    log_cleaner_backoff_ms: int
    log_cleaner_dedupe_buffer_size: int
    log_cleaner_io_max_bytes_per_second: int
    log_scrub_bytes_per_second: int
    log_scrub_interval_ms: int
    offsets_topic_num_partitions: int
    offsets_topic_replication_factor: int
    offsets_topic_segment_bytes: int
    offsets_retention_minutes: int
    offsets_retention_check_interval_ms: int
    offset_metadata_max_bytes: int
    group_consumer_session_timeout_ms: int
    group_consumer_heartbeat_interval_ms: int
    group_coordinator_rebalance_timeout_ms: int
    group_consumer_max_size: int
    group_consumer_assignors: tuple[str, ...]
    transaction_state_log_num_partitions: int
    transaction_state_log_replication_factor: int
    transaction_state_log_min_isr: int
    transaction_state_log_segment_bytes: int
    transaction_max_timeout_ms: int
    transactional_id_expiration_ms: int
    sink_expiration_ms: int
    metrics_listener: Endpoint | None
    metrics_group_lag_interval_ms: int
    liveness_timeout_ms: int
    tracing_exporter: str
    tracing_otlp_endpoint: str
    tracing_service_name: str
    tracing_sampling_ratio: float
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
        special = {"listeners", "advertised.listeners", "metadata.log.dir", "metrics.listener", *QUORUM_KEYS}
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
            security_inter_broker_protocol=inter_node_protocol(values),
            metrics_listener=_endpoint_or_none(values["metrics.listener"]),
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

    def client_settings(self) -> dict[str, str]:
        """Return what a client on this machine needs to be told to reach this broker.

        It is this node itself by its certificate, or an administrator of `sasl.users.location`. Holds a password then.

        Raises:
            InvalidConfig: that file is no good.
        """
        if self.listener_security_protocol == PLAINTEXT:
            return {}
        settings = {
            "security.protocol": self.listener_security_protocol,
            "ssl.ca.location": self.ssl_truststore_location,
        }
        if self.listener_security_protocol == SSL or self.asks_for_certificates:
            settings["ssl.certificate.location"] = self.ssl_keystore_location
            settings["ssl.key.location"] = self.ssl_keystore_key_location
        if self.listener_security_protocol == SASL_SSL and self.sasl_users_location:
            settings |= administrator(Path(self.sasl_users_location), super_users(self.super_users))
            settings["sasl.mechanism"] = max(self.sasl_enabled_mechanisms)  # the longest hash
        return {name: value for name, value in settings.items() if value}

    @property
    def asks_for_certificates(self) -> bool:
        """Whether clients have to show certificates."""
        return asks_for_certificates(self.values)

    def producer_limits(self) -> ProducerLimits:
        """Return what the logs remember of idempotent producers."""
        return ProducerLimits(self.producer_id_expiration_ms, self.producer_ids_max)

    def group_config(self) -> GroupConfig:
        """Return what the coordinators of groups go by."""
        return GroupConfig(
            session_timeout_ms=self.group_consumer_session_timeout_ms,
            heartbeat_interval_ms=self.group_consumer_heartbeat_interval_ms,
            rebalance_timeout_ms=self.group_coordinator_rebalance_timeout_ms,
            max_size=self.group_consumer_max_size,
            offsets_retention_ms=self.offsets_retention_minutes * MINUTE_MS,
            offsets_retention_check_interval_ms=self.offsets_retention_check_interval_ms,
            offset_metadata_max_bytes=self.offset_metadata_max_bytes,
            producer_id_expiration_ms=self.producer_id_expiration_ms,
        )

    def transaction_config(self) -> TransactionConfig:
        """Return what the coordinators of transactions go by."""
        return TransactionConfig(
            max_timeout_ms=self.transaction_max_timeout_ms,
            id_expiration_ms=self.transactional_id_expiration_ms,
            sink_expiration_ms=self.sink_expiration_ms,
            complete_after_ms=COMPLETE_AFTER_MS,
        )

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
