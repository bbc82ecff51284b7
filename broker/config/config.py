"""The server's configuration: every key is declared here once, as an attribute of `BrokerConfig`.

Values come from defaults, a TOML file, RAFTLOG_* variables and flags; each source overrides the ones before. They are
checked once, when they are read (`broker/config/checks.py`). Inside the server a `BrokerConfig` never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from broker.config.checks import (
    ACL,
    ASSIGNORS,
    EXPORTERS,
    OAUTH_ALGORITHMS,
    OAUTHBEARER,
    PLAIN,
    SAME,
    SCRAM_MECHANISMS,
    WITH_TLS,
    asks_for_certificates,
    assignors,
    check_values,
    collector,
    connection_overrides,
    inter_node_protocol,
    limits_of_users,
    mapping_rules,
    no_auto_create,
    principals,
    some_role,
    user_overrides,
    warnings_of,
)
from broker.config.endpoints import (
    DEFAULT_PORT,
    KAFKA,
    KAFKA_PROTOCOLS,
    PLAINTEXT,
    SASL_SSL,
    SSL,
    Endpoint,
    by_protocol,
    endpoint_or_none,
    kafka_protocol,
    listener_of,
    listener_or_none,
    parse_nodes,
    parse_voters,
)
from broker.coordinator.groups.classic.machine import ClassicConfig
from broker.coordinator.groups.commands import GroupConfig, Migration
from broker.coordinator.transactions.commands import TransactionConfig
from broker.log.config import LogConfig
from broker.log.producer_state import ProducerLimits
from broker.security.users import administrator
from raftlog._client.options import SECURITY_KEYS
from raftlog._core.security.acls import super_users_of
from raftlog.config import (
    MAX_INT64,
    ConfigDef,
    Settings,
    Value,
    duration_ms,
    integer,
    names,
    number,
    settings_of,
    size_bytes,
    switch,
    text,
)
from raftlog.errors import InvalidConfig
from raftmeta.decide import MAX_PARTITIONS_PER_TOPIC
from raftmeta.topic_configs import (
    BROKER_KEY_BY_TOPIC_KEY,
    REPLICATION_THROTTLE_KEYS,
    TOPIC_CONFIGS,
    TOPIC_DEFAULT_KEYS,
)

KIB: Final = 1 << 10
MIB: Final = 1 << 20
MINUTE_MS: Final = 60_000
DAY_MS: Final = 24 * 60 * MINUTE_MS
ENVIRONMENT_PREFIX: Final = "RAFTLOG_"
CLIENT_VARIABLES: Final = (
    "RAFTLOG_BOOTSTRAP",
    "RAFTLOG_CLIENT_CONFIG",
    *(f"{ENVIRONMENT_PREFIX}{key.variable}" for key in SECURITY_KEYS),
)
"""Settings of clients that share the prefix; the server ignores them."""
METADATA_DIRECTORY: Final = "__cluster_metadata"
COMPLETE_AFTER_MS: Final = 100
"""How long the coordinator delays the record that says that all markers of a transaction are written. The producer's
next transaction makes this record unnecessary: a busy producer then costs two records per transaction, not three."""


class BrokerConfig(Settings):
    """Every key of the server as an attribute: `node_id` is node.id. Immutable.

    Attributes that stand for an address are parsed. Where a key is left out, some attributes derive from others:
    `inter_node_listener` (None on a node alone), `advertised_inter_node_listener`, `security_inter_broker_protocol`,
    `metadata_log_dir`. `kafka_listener` and `advertised_kafka_listener` are the endpoints for Kafka clients in
    `listeners` and `advertised.listeners`, None without them; `kafka_security_protocol` is Kafka's name of what the
    former speaks. `topic_defaults` has the topics' defaults
    (log.retention.ms and its like) by topic key in canonical spelling. `values` has all values by key and `static_keys`
    the keys that were set, for DescribeConfigs. `warnings`: see `warnings_of`.
    """

    # This node, its disks, its limits

    node_id = integer(
        None,
        optional=True,
        minimum=0,
        maximum=(1 << 31) - 1,
        doc="Id of this node: unique in the cluster, and never changed. Required.",
    )
    cluster_id = text(
        "",
        own=True,
        doc="Id of the cluster; `raftlog quorum new-id` makes one. Required with several voters. A node that is "
        "alone makes an id at its first start and stores it. The server refuses a directory of another cluster.",
    )
    process_roles = names(
        ("broker", "controller"),
        choices=("broker", "controller"),
        check=some_role,
        doc="Roles of this process: a broker stores partitions and serves clients, a controller votes in the "
        "metadata quorum.",
    )
    controller_quorum_voters = names(
        (),
        of=parse_voters,
        doc="The controllers, each as id@host:port with the address of its inter-node listener; the same list on "
        "every node: 1, 3 or 5 of them. Without it this node is the only one and opens no inter-node listener.",
    )
    inter_node_listener = text(
        "",
        of=endpoint_or_none,
        own=True,
        doc="Address at which this node listens for other nodes: for the quorum's messages and for replication. A "
        "controller listens by default at its address in controller.quorum.voters; a node that is only a broker "
        "must set it. Clients cannot use this listener.",
    )
    advertised_inter_node_listener = text(
        "",
        of=endpoint_or_none,
        own=True,
        doc="Address that this node tells other brokers, if it differs from the one in controller.quorum.voters (or "
        "from inter.node.listener on a node that is only a broker).",
    )
    inter_node_routes = names(
        (),
        of=parse_nodes,
        own=True,
        doc="Addresses at which this node reaches other brokers' inter-node listeners, each as id@host:port, if they "
        "differ from the advertised ones: behind a tunnel or a proxy.",
    )
    listener = names(
        (f"127.0.0.1:{DEFAULT_PORT}",),
        name="listeners",
        of=listener_of,
        doc="Address for raftlog's clients, as host:port or raftlog://host:port; after a comma, optionally one for "
        "Kafka clients, as kafka://host:port (docs/kafka.md): kafka+ssl:// with TLS, kafka+sasl+ssl:// with TLS and a "
        "user's name and password, kafka+sasl:// with a name and password but without TLS. Port 0 takes a free port.",
    )
    advertised_listener = names(
        (),
        name="advertised.listeners",
        of=listener_or_none,
        doc="Addresses that brokers tell clients to connect to, if they differ from `listeners`, in the same form; "
        "port 0 stands for the port in use.",
    )
    insecure = switch(
        False,
        own=True,
        doc="Allow plaintext without authentication on an address that is not loopback. "
        "Anyone who reaches the port can then read, write and delete everything.",
    )
    rack = text(
        "",
        mirrors="broker.rack",
        doc="Rack of this node; the replicas of a partition are spread over racks.",
    )
    log_dirs = names(
        (),
        doc="Directories for partitions, each on its own disk; a partition is stored in one of them. Required.",
    )
    metadata_log_dir = text(
        "",
        doc="Directory for the cluster's metadata; by default `__cluster_metadata` in the first of log.dirs.",
    )
    metadata_log_max_record_bytes_between_snapshots = size_bytes(
        20 * MIB,
        minimum=64 * KIB,
        maximum=1 << 30,
        doc="Size of the metadata log at which a snapshot replaces it.",
    )
    broker_heartbeat_interval_ms = duration_ms(
        300,
        minimum=10,
        maximum=60_000,
        doc="Interval of a broker's heartbeats to the active controller.",
    )
    broker_session_timeout_ms = duration_ms(
        1_500,
        minimum=100,
        maximum=600_000,
        doc="Time without a heartbeat after which the controller fences a broker and elects other leaders.",
    )
    broker_lease_ms = duration_ms(
        1_200,
        minimum=50,
        maximum=600_000,
        own=True,
        doc="How long a broker may serve clients after sending a heartbeat that the controller answered with a lease; "
        "at most nine tenths of broker.session.timeout.ms, and more than two heartbeats.",
    )
    controller_quorum_election_timeout_ms = duration_ms(
        500,
        minimum=100,
        maximum=60_000,
        doc="Time without a message from the quorum's leader after which a controller starts an election; each "
        "controller waits a random time of up to twice as long.",
    )
    auto_leader_rebalance_enable = switch(
        True,
        doc="Whether leadership returns to a partition's preferred (first) replica automatically; "
        "the active controller's value counts.",
    )
    leader_imbalance_check_interval_ms = duration_ms(
        300_000,
        minimum=100,
        mirrors="leader.imbalance.check.interval.seconds",
        doc="Interval at which the controller looks for leaders that are not the preferred replica.",
    )
    leader_imbalance_per_broker_percentage = integer(
        10,
        minimum=0,
        maximum=100,
        doc="Percentage of the partitions that prefer a broker as their leader that other brokers may lead before the "
        "controller moves leaderships back.",
    )
    controlled_shutdown_enable = switch(
        True,
        doc="Whether a broker hands over its leaderships before it stops.",
    )
    num_partitions = integer(
        1,
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
        doc="Partitions of a topic that is created without a number of partitions.",
    )
    default_replication_factor = integer(
        1,
        minimum=1,
        maximum=1000,
        doc="Replicas of each partition of a topic that is created without a replication factor.",
    )
    auto_create_topics_enable = switch(
        False,
        check=no_auto_create,
        doc="Only false: brokers never create a topic because a client asks for it.",
    )
    max_partitions_per_topic = integer(
        MAX_PARTITIONS_PER_TOPIC,
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
        own=True,
        doc="Most partitions of one topic.",
    )
    max_partitions_per_broker = integer(
        20_000,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Average number of replicas per broker above which no more partitions are created; three eighths of the "
        "limit of open files (ulimit -n) if that is less.",
    )
    max_partitions_per_user = integer(
        10_000,
        minimum=1,
        maximum=2_147_483_647,
        own=True,
        doc="Most partitions of the topics that one user has made, in the cluster; more are refused. A user with Alter "
        "on the cluster has no limit, and neither has User:ANONYMOUS. Topics count from metadata.version 11 on.",
    )
    max_partitions_per_user_overrides = text(
        "",
        limits_of_users,
        check=user_overrides,
        own=True,
        doc="For single users, the value in place of max.partitions.per.user, with semicolons between: "
        "User:alice:50000;User:bob:100.",
    )
    min_segment_bytes = size_bytes(
        MIB,
        minimum=1024,
        maximum=1 << 30,
        own=True,
        doc="The smallest segment.bytes that a topic, or a default of all topics, may be given. Smaller values from "
        "before, or of this file, count as this one. Each segment has four files; very small ones take more "
        "of the disk, and of the broker's time, than their records.",
    )
    socket_request_max_bytes = size_bytes(
        32 * MIB,
        minimum=64 * KIB,
        maximum=(1 << 31) - 1,
        doc="Largest message on the wire; at least message.max.bytes and 64 KiB more.",
    )
    quota_window_num = integer(
        11,
        minimum=1,
        maximum=3_600,
        doc="Quotas: after a pause, a client may at once use up what its quota allows in this many windows.",
    )
    quota_window_size_seconds = integer(1, minimum=1, maximum=3_600, doc="Quotas: length of one window, in seconds.")
    max_connections = integer(
        2_147_483_647,
        minimum=1,
        maximum=2_147_483_647,
        doc="Most connections to each listener for clients. Whatever this value, half of the process's file "
        "descriptors are reserved for files, and the listeners share the rest.",
    )
    max_connections_per_ip = integer(
        1_000,
        minimum=1,
        maximum=2_147_483_647,
        doc="Most connections of one address to each listener.",
    )
    max_connections_per_ip_overrides = names(
        (),
        check=connection_overrides,
        doc="For single addresses, the value in place of max.connections.per.ip: 10.0.0.1:5000,[fd00::1]:10.",
    )
    max_connection_creation_rate = integer(
        2_147_483_647,
        minimum=1,
        maximum=2_147_483_647,
        doc="New connections a second that one address may open, unless it has a quota connection_creation_rate; after "
        "a pause, quota.window.num times as many at once.",
    )
    max_unused_connection_rate = integer(
        5,
        minimum=1,
        maximum=2_147_483_647,
        own=True,
        doc="Connections a second of one address (of IPv6 a /64) on which no user logs in, or that a limit refuses; "
        "ten times as many at once. Beyond it the kernel ignores the address's attempts to connect, for five seconds "
        "at most; clients try again by themselves. On Linux, where clients connect to the broker's gRPC server "
        "directly.",
    )
    connection_login_timeout_ms = duration_ms(
        30_000,
        minimum=1_000,
        own=True,
        doc="With listener.security.protocol=sasl_ssl: the broker closes a connection on which no logged-in user has "
        "made a call within this time; on the listener for Kafka clients, one whose login or TLS handshake is not "
        "complete; during a migration, one without any call.",
    )
    connections_max_idle_ms = duration_ms(
        600_000,
        minimum=1_000,
        doc="The broker closes a connection after this time without a call, or without a request of a Kafka client.",
    )
    max_streams_per_connection = integer(
        250,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most calls of one connection at a time; HTTP/2 makes further ones wait.",
    )
    max_streams_per_user = integer(
        2_000,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most streams, and calls whose answers it has not taken, of one user at a time; User:ANONYMOUS has no "
        "limit of its own.",
    )
    max_streams_per_ip = integer(
        5_000,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most streams, and calls whose answers it has not taken, of one address at a time.",
    )
    max_short_stream_rate = integer(
        500,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most short streams (ended within ten seconds) a second of one user, or of one address whose clients have "
        "no login; five times as many at once. Above that, the broker shuts the user or address out for a minute, each "
        "further time for twice as long: it serves none of its calls and logins, and closes connections that ask for "
        "one.",
    )
    max_unused_stream_rate = integer(
        50,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most short produce and fetch streams a second that one user, or one address whose clients have no login, "
        "gives up before a batch came or a partition was read; five times as many at once. One a second of each "
        "connection, twenty at once, and streams whose connection ends with them do not count. Above that, "
        "the user is shut out, as with max.short.stream.rate. On Linux only.",
    )
    max_call_rate = integer(
        2_000,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most unary calls a second of one user, or of one address whose clients have no login; five times as many "
        "at once. A request counts as one call more for each 4 KiB of it. Further calls are refused, with the time to "
        "wait.",
    )
    max_refused_call_rate = integer(
        500,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most calls a second of one user, or of one address whose clients have no login, that are refused because "
        "of a limit or a quota; five times as many at once. Above that, the user is shut out, as with "
        "max.short.stream.rate. Against an address count its calls without a valid token, twenty times, and its failed "
        "logins, a hundred times; above the rate, connections are closed that go on with them.",
    )
    max_transactional_ids_per_user = integer(
        10_000,
        minimum=1,
        maximum=2_147_483_647,
        own=True,
        doc="Most transactional ids and sinks that one user has made, of those that this broker coordinates; a new one "
        "beyond that is refused. User:ANONYMOUS has no limit.",
    )
    max_groups_per_user = integer(
        10_000,
        minimum=1,
        maximum=2_147_483_647,
        own=True,
        doc="Most groups that one user has made, of those that this broker coordinates; a new one beyond that is "
        "refused. Also the most groups that the user's transactions name within producer.id.expiration.ms and "
        "transaction.max.timeout.ms together, of those transactions that this broker coordinates. User:ANONYMOUS has "
        "no limit.",
    )
    max_streams = integer(
        10_000,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most produce, fetch and watch streams that this broker serves at a time.",
    )
    max_subscriptions = integer(
        10_000,
        minimum=1,
        maximum=1_000_000,
        own=True,
        doc="Most partitions that one fetch stream may read.",
    )
    max_in_flight_requests = integer(
        1_000,
        minimum=1,
        maximum=100_000,
        own=True,
        doc="Most unanswered requests of one produce stream; a stream that several producers share may always have "
        "500.",
    )
    request_timeout_ms = duration_ms(
        30_000,
        minimum=1,
        maximum=3_600_000,
        doc="How long a produce request waits for its replicas, unless the request says otherwise.",
    )
    producer_id_expiration_ms = duration_ms(
        86_400_000,
        minimum=600_000,
        doc="How long a partition remembers an idempotent producer after its last append. Set it above the "
        "delivery.timeout.ms of every producer.",
    )
    producer_ids_max = integer(
        100_000,
        minimum=1,
        maximum=10_000_000,
        own=True,
        doc="Most idempotent producers that one partition remembers; the same on all brokers. Above it, the partition "
        "forgets producers that have been idle for ten minutes, and producers whose transaction ended a minute ago; if "
        "there are none, it refuses new producers.",
    )
    fetch_max_bytes = size_bytes(
        1 * MIB,
        minimum=1 * KIB,
        maximum=1 << 30,
        doc="Most bytes of the log in one message of a fetch stream; a single larger batch is still sent whole.",
    )
    replica_lag_time_max_ms = duration_ms(
        10_000,
        minimum=100,
        maximum=3_600_000,
        doc="How long a follower may be behind its leader's log end before the leader removes it from the ISR.",
    )
    replica_fetch_max_bytes = size_bytes(
        1 * MIB,
        minimum=4 * KIB,
        maximum=1 << 30,
        doc="Most bytes of the log in one message to a follower; a single larger batch is still sent whole.",
    )
    replica_credit_bytes = size_bytes(
        8 * MIB,
        minimum=64 * KIB,
        maximum=1 << 30,
        own=True,
        doc="Bytes that each leader may send to this broker before they are appended here, for in-sync partitions; the "
        "same again for partitions that catch up.",
    )
    replica_high_watermark_checkpoint_interval_ms = duration_ms(
        5_000,
        minimum=10,
        maximum=3_600_000,
        doc="Interval at which the high watermarks are written to the disk.",
    )
    log_retention_check_interval_ms = duration_ms(
        300_000,
        minimum=1,
        doc="Interval at which the broker looks for segments to delete.",
    )
    log_cleaner_enable = switch(
        True,
        doc="Whether this broker compacts topics with cleanup.policy=compact. If not, they grow, and so does "
        "__consumer_offsets.",
    )
    log_cleaner_backoff_ms = duration_ms(
        15_000,
        minimum=1,
        maximum=3_600_000,
        doc="Interval at which the cleaner looks for logs to compact, while there are none.",
    )
    log_cleaner_dedupe_buffer_size = size_bytes(
        128 * MIB,
        minimum=1 * MIB,
        maximum=1 << 30,
        doc="Memory for the keys of one compaction; records whose keys do not fit wait for the next one.",
    )
    num_recovery_threads_per_data_dir = integer(
        4,
        minimum=1,
        maximum=1_000,
        doc="Logs of each log directory that are recovered at a time at the start, and flushed at a time at the end. "
        "Most of both is waiting for the disk, which does several fsyncs at once.",
    )
    log_cleaner_io_max_bytes_per_second = size_bytes(
        MAX_INT64,
        minimum=1 * KIB,
        doc="Most bytes per second that compaction reads and writes.",
    )
    log_scrub_bytes_per_second = size_bytes(
        20 * MIB,
        minimum=0,
        own=True,
        doc="Bytes per second at which the broker rereads all logs in the background to find damage on the disk; 0: "
        "never.",
    )
    log_scrub_interval_ms = duration_ms(
        7 * 24 * 3_600_000,
        minimum=100,
        own=True,
        doc="Time from the start of one such pass (log.scrub.bytes.per.sec) to the start of the next. The first starts "
        "five minutes after the broker, or earlier if this time is shorter.",
    )
    log_format = text(
        "text",
        choices=("text", "json"),
        own=True,
        doc="Format of the server's own log.",
    )
    metrics_listener = text(
        "",
        of=endpoint_or_none,
        own=True,
        doc="Address of the HTTP endpoint for Prometheus (`/metrics`) and for probes (`/livez`, `/startupz`, "
        "`/readyz`); without it there is none. Anyone who reaches it sees metrics and the names of topics and "
        "groups, but no records.",
    )
    metrics_group_lag_interval_ms = duration_ms(
        5_000,
        minimum=0,
        maximum=3_600_000,
        own=True,
        doc="Interval at which coordinators measure the lag of their groups, if `metrics.listener` is set; "
        "0: never. Lag in seconds is accurate to this interval.",
    )
    liveness_timeout_ms = duration_ms(
        10_000,
        minimum=1_000,
        maximum=3_600_000,
        own=True,
        doc="How long the event loop may hang before `/livez` reports this process as dead.",
    )
    log_level = text(
        "info",
        choices=("debug", "info", "warning", "error"),
        own=True,
        doc="Lowest severity that is written to the server's own log.",
    )

    # TLS, users and ACLs; docs/security.md

    listener_security_protocol = text(
        PLAINTEXT,
        choices=(PLAINTEXT, SSL, SASL_SSL),
        ignore_case=True,
        mirrors="listener.security.protocol.map",
        doc="The protocol for clients at `listeners`: plaintext, TLS (ssl), or TLS with a login (sasl_ssl, see "
        "sasl.enabled.mechanisms). With ssl, the common name of a client's certificate is its user.",
    )
    security_inter_broker_protocol = text(
        SAME,
        choices=(SAME, PLAINTEXT, SSL),
        ignore_case=True,
        doc="Protocol between nodes; the same on all nodes. With ssl, both ends present a certificate that names the "
        "node: a URI raftlog://node/ID among its subject alternative names (several URIs if nodes share a "
        "certificate), or the common name raftlog-node-ID. same: the value of listener.security.protocol, but ssl if "
        "that is sasl_ssl.",
    )
    listener_security_migration = switch(
        False,
        own=True,
        doc="Accept TLS and plaintext at both listeners, while rolling restarts turn TLS on or off. "
        "security.inter.broker.protocol decides what this node itself uses to call others. With sasl_ssl, a client "
        "without a password is meanwhile User:ANONYMOUS, with or without TLS, and the broker does not know the "
        "addresses of clients. Slower.",
    )
    ssl_keystore_location = text(
        "",
        doc="PEM file with this node's certificate, followed by the intermediate certificates, and by the private key "
        "unless ssl.keystore.key.location names another file. Required for ssl. Read again when it changes.",
    )
    ssl_keystore_key_location = text(
        "",
        own=True,
        doc="PEM file with this node's private key. Read again when it changes.",
    )
    ssl_key_password_location = text(
        "",
        own=True,
        doc="File with the password of this node's private key, if that is encrypted. Read again when it changes.",
    )
    ssl_key_password_command = text(
        "",
        own=True,
        doc="A command that prints the password of this node's private key, run without a shell; in place of "
        "ssl.key.password.location.",
    )
    ssl_truststore_location = text(
        "",
        doc="PEM file with the certificates of the CAs that clients' and nodes' certificates are checked against. "
        "Needed for ssl between nodes and for ssl.client.auth=required. Read again when it changes.",
    )
    ssl_crl_location = text(
        "",
        own=True,
        doc="PEM file with revocation lists (CRLs) of the CAs in ssl.truststore.location: clients and nodes with a "
        "certificate that one of them revokes are refused. Read again when it changes.",
    )
    ssl_client_auth = text(
        "auto",
        choices=("auto", "none", "required"),
        ignore_case=True,
        doc="Whether a client must present a certificate of a CA in ssl.truststore.location. auto: required with ssl, "
        "none with sasl_ssl. With ssl and none every client is User:ANONYMOUS, and without an authorizer anyone "
        "who reaches the port can read, write and delete everything. Nodes must always present one.",
    )
    ssl_principal_mapping_rules = text(
        "DEFAULT",
        check=mapping_rules,
        doc="How the distinguished name of a client's certificate becomes its user (KIP-371): rules "
        "`RULE:PATTERN/REPLACEMENT/`, with L or U at the end for lower or upper case, separated by commas; the first "
        "rule that matches counts. DEFAULT: the common name.",
    )
    sasl_enabled_mechanisms = names(
        SCRAM_MECHANISMS,
        choices=(*SCRAM_MECHANISMS, PLAIN, OAUTHBEARER),
        doc="Mechanisms by which clients may log in: with a password (SCRAM), or with a token of an issuer "
        "(OAUTHBEARER, which needs three keys sasl.oauthbearer...). PLAIN, in which the client sends the password "
        "itself, is only for Kafka clients at kafka+sasl+ssl://, and needs a SCRAM mechanism beside it.",
    )
    sasl_oauthbearer_jwks_endpoint_url = text(
        "",
        doc="Where the issuer's public keys are, as a JSON Web Key Set: file:///PATH, read again when it changes, or "
        "an https:// URL, which sasl.oauthbearer.allowed.urls must name. The broker follows no redirects and uses no "
        "proxies.",
    )
    sasl_oauthbearer_jwks_endpoint_refresh_ms = duration_ms(
        3_600_000,
        minimum=10_000,
        doc="How often the broker fetches the keys from the URL; a token with an unknown key makes it fetch sooner.",
    )
    sasl_oauthbearer_allowed_urls = names(
        (),
        own=True,
        doc="The URLs from which the broker may fetch keys.",
    )
    sasl_oauthbearer_private_addresses_allow = switch(
        False,
        own=True,
        doc="Whether the URL with the keys may be at an address that is not public (RFC 1918, loopback, link-local), "
        "and use http.",
    )
    sasl_oauthbearer_expected_issuer = text(
        "",
        doc="The value that the claim `iss` of a token must have.",
    )
    sasl_oauthbearer_expected_audience = names(
        (),
        doc="The names of this cluster at the issuer: the claim `aud` of a token must contain one of them.",
    )
    sasl_oauthbearer_algorithms = names(
        ("RS256", "PS256", "ES256"),
        choices=OAUTH_ALGORITHMS,
        own=True,
        doc="Algorithms with which tokens may be signed. Symmetric algorithms are not supported.",
    )
    sasl_oauthbearer_sub_claim_name = text(
        "sub",
        doc="The claim that names the user; ACLs name it User:NAME, like a user with a password of that name.",
    )
    sasl_oauthbearer_clock_skew_seconds = integer(
        30,
        minimum=0,
        maximum=600,
        doc="By how much this machine's clock may differ from the issuer's.",
    )
    connections_max_reauth_ms = duration_ms(
        0,
        minimum=0,
        doc="Time after which a Kafka client with a password must authenticate again, or the broker closes its "
        "connection; 0: never. A change of the password always ends connections at once.",
    )
    sasl_users_location = text(
        "",
        own=True,
        doc='TOML file with a line `name = "password"` for each user of this broker besides those in the metadata, '
        "such "
        "as the first administrator. Or a directory with a file for each user: its name is the user's, its content the "
        "password. If the metadata has a user of the same name, that one counts. Read again when it changes.",
    )
    grpc_health_enable = switch(
        False,
        own=True,
        doc="Whether `listeners` also serves gRPC's health checking protocol (grpc.health.v1), for load balancers and "
        "service meshes; callers are identified as for any call. `metrics.listener` has probes without a login.",
    )
    grpc_reflection_enable = switch(
        False,
        own=True,
        doc="Whether `listeners` also serves gRPC's server reflection, with which tools such as grpcurl call a broker "
        "without the .proto files; callers are identified as for any call.",
    )
    authorizer = text(
        "none",
        choices=("none", ACL),
        ignore_case=True,
        mirrors="authorizer.class.name",
        doc="acl: users need the permissions that `raftlog acl add` grants. none: every user may do everything. The "
        "same on all brokers.",
    )
    super_users = text(
        "",
        check=principals,
        doc="Users that may do everything, separated by semicolons: `User:alice;User:bob`. Clients with a node's "
        "certificate may do everything as well.",
    )
    allow_everyone_if_no_acl_found = switch(
        False,
        doc="With an authorizer: every user may do everything with resources without ACLs.",
    )
    audit_topic_enable = switch(
        False,
        own=True,
        doc="Whether the broker also writes the lines of the audit log as records to the topic __audit, from which the "
        "console shows them; docs/security.md says which can be lost. The same on all brokers.",
    )
    audit_topic_num_partitions = integer(
        12,
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
        own=True,
        doc="Partitions of __audit; used when the topic is created. A broker writes to those that it leads, so there "
        "should be at least as many as brokers.",
    )
    audit_topic_replication_factor = integer(
        3,
        minimum=1,
        maximum=1000,
        own=True,
        doc="Replicas of __audit; by default a smaller cluster uses as many as it has brokers.",
    )
    audit_topic_segment_bytes = size_bytes(
        16 * MIB,
        minimum=1024,
        maximum=(1 << 31) - 1,
        own=True,
        doc="Segment size of __audit.",
    )
    audit_topic_retention_ms = duration_ms(
        30 * 24 * 60 * MINUTE_MS,
        minimum=MINUTE_MS,
        own=True,
        doc="How long records of __audit are kept; used when the topic is created.",
    )

    # OpenTelemetry traces

    tracing_exporter = text(
        "none",
        choices=EXPORTERS,
        own=True,
        doc="Destination of this node's spans: a collector (otlp), the standard output (console), or none, which "
        "costs nothing. otlp and console need the extra `raftlog[otel]`; docs/tracing.md lists the spans.",
    )
    tracing_otlp_endpoint = text(
        "",
        own=True,
        check=collector,
        doc="Address of the collector, as http://host:port, or https://host:port for TLS, with OTLP over gRPC; empty: "
        "the value of OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4317.",
    )
    tracing_service_name = text(
        "raftlog",
        own=True,
        doc="Name (`service.name`) under which this node's spans appear.",
    )
    tracing_sampling_ratio = number(
        0.0,
        minimum=0,
        maximum=1,
        own=True,
        doc="Share of this node's metadata changes that begin a trace of their own if the caller has none. For "
        "records, the producers decide on sampling.",
    )

    # Consumer groups

    offsets_topic_num_partitions = integer(
        50,
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
        doc="Partitions of __consumer_offsets, over which groups are spread; used when the topic is created.",
    )
    offsets_topic_replication_factor = integer(
        3,
        minimum=1,
        maximum=1000,
        doc="Replicas of __consumer_offsets. If set, the topic is created only once this many brokers are up; by "
        "default, a smaller cluster uses as many replicas as it has brokers.",
    )
    offsets_topic_segment_bytes = size_bytes(
        100 * MIB,
        minimum=1024,
        maximum=(1 << 31) - 1,
        doc="Segment size of __consumer_offsets; smaller segments are compacted earlier, so they load faster.",
    )
    offsets_retention_minutes = integer(
        10_080,
        minimum=1,
        maximum=(1 << 31) - 1,
        doc="Minutes without members after which the offsets of a group are deleted; for a group that never had "
        "members, counted from the commit.",
    )
    offsets_retention_check_interval_ms = duration_ms(
        600_000,
        minimum=1,
        doc="Interval at which coordinators look for expired offsets.",
    )
    offset_metadata_max_bytes = size_bytes(
        4096,
        minimum=0,
        maximum=MIB,
        doc="Longest metadata text that may be committed with an offset.",
    )
    group_consumer_session_timeout_ms = duration_ms(
        15_000,
        minimum=1_000,
        maximum=3_600_000,
        doc="Time without a heartbeat after which a group member counts as dead. Set it above "
        "replica.lag.time.max.ms: a paused follower delays a coordinator's writes for that long, and with them "
        "the members that have to give up partitions.",
    )
    group_consumer_heartbeat_interval_ms = duration_ms(
        3_000,
        minimum=100,
        maximum=3_600_000,
        doc="Interval of a member's heartbeats; less than half of group.consumer.session.timeout.ms.",
    )
    group_coordinator_rebalance_timeout_ms = duration_ms(
        60_000,
        minimum=100,
        maximum=86_400_000,
        own=True,
        doc="How long a member may take to give up partitions before it counts as dead, unless it states a time "
        "itself.",
    )
    group_consumer_max_size = integer(
        10_000,
        minimum=1,
        maximum=1_000_000,
        doc="Most members of a group in which the coordinator assigns partitions: raftlog's consumers, and Kafka "
        "clients with `group.protocol=consumer` (KIP-848). For classic groups: `group.max.size`.",
    )
    group_consumer_migration_policy = text(
        Migration.BIDIRECTIONAL.value,
        choices=tuple(each.value for each in Migration),
        doc="Whether a consumer group with members may change its protocol. `upgrade`: a classic group becomes one in "
        "which the coordinator assigns, when a member of that protocol joins (from metadata.version 8 on). "
        "`downgrade`: the group becomes a classic one when the last such member leaves. `bidirectional`: both. "
        "`disabled`: neither.",
    )
    group_consumer_assignors = names(
        ASSIGNORS,
        check=assignors,
        doc="Assignors that distribute partitions, by name, the default first. Names that are not built in are looked "
        "up among the entry points `raftlog.assignors` of the packages installed with the server.",
    )

    group_min_session_timeout_ms = duration_ms(
        6_000,
        minimum=1,
        maximum=3_600_000,
        doc="Shortest session timeout of a Kafka client in a classic group.",
    )
    group_max_session_timeout_ms = duration_ms(
        1_800_000,
        minimum=1,
        maximum=86_400_000,
        doc="Longest session timeout of a Kafka client in a classic group.",
    )
    group_initial_rebalance_delay_ms = duration_ms(
        3_000,
        minimum=0,
        maximum=3_600_000,
        doc="How long the first rebalance of an empty classic group waits for more members; each member that joins "
        "starts the time anew.",
    )
    group_max_size = integer(
        2_000,
        minimum=1,
        maximum=100_000,
        doc="Most members of a classic group; raftlog's consumers and those of KIP-848 are bounded by "
        "`group.consumer.max.size`.",
    )

    # Transactions and staged batches

    transaction_state_log_num_partitions = integer(
        50,
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
        doc="Partitions of __transaction_state, over which transactional ids and sinks are spread; used when the "
        "topic is created.",
    )
    transaction_state_log_replication_factor = integer(
        3,
        minimum=1,
        maximum=1000,
        doc="Replicas of __transaction_state. If set, the topic is created only once this many brokers are up; by "
        "default, a smaller cluster uses as many replicas as it has brokers.",
    )
    transaction_state_log_min_isr = integer(
        2,
        minimum=1,
        maximum=1000,
        doc="min.insync.replicas of __transaction_state, or its number of replicas if that is smaller; used when the "
        "topic is created.",
    )
    transaction_state_log_segment_bytes = size_bytes(
        100 * MIB,
        minimum=1024,
        maximum=(1 << 31) - 1,
        doc="Segment size of __transaction_state; smaller segments are compacted earlier, so they load faster.",
    )
    transaction_max_timeout_ms = duration_ms(
        900_000,
        minimum=1,
        maximum=(1 << 31) - 1,
        doc="Longest timeout that a transaction, or a stage of a batch, may ask for. An abandoned one blocks readers "
        "with isolation.level=read_committed for up to this time.",
    )
    transactional_id_expiration_ms = duration_ms(
        7 * DAY_MS,
        minimum=1,
        doc="Time without a transaction after which the coordinator forgets a transactional id.",
    )
    sink_expiration_ms = duration_ms(
        365 * DAY_MS,
        minimum=1,
        own=True,
        doc="Time without a committed batch after which the coordinator forgets a sink, and with it the number of its "
        "last batch: a batch that is written again after that is in the log twice. Set it above the longest pause of a "
        "query that continues from its checkpoint.",
    )

    kafka_listener: Endpoint | None
    kafka_security_protocol: str
    advertised_kafka_listener: Endpoint | None
    values: Mapping[str, Value]
    static_keys: frozenset[str]
    warnings: tuple[str, ...]
    topic_defaults: Mapping[str, str]

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
        values = BROKER_CONFIGS.resolve(parsed)
        check_values(values)
        return BrokerConfig(values, frozenset(parsed))

    def __init__(self, values: Mapping[str, Any], static_keys: frozenset[str]) -> None:
        super().__init__(values)
        own = self.inter_node_listener
        if self.controller_quorum_voters:
            own = own or self.controller_quorum_voters[self.node_id]
        else:
            own = None
        advertised = self.advertised_inter_node_listener or self.controller_quorum_voters.get(self.node_id) or own
        vars(self).update(
            inter_node_listener=own,
            advertised_inter_node_listener=advertised,
            security_inter_broker_protocol=inter_node_protocol(values),
            kafka_listener=by_protocol(values["listeners"]).get(KAFKA),
            kafka_security_protocol=KAFKA_PROTOCOLS.get(kafka_protocol(values["listeners"]), PLAINTEXT),
            advertised_kafka_listener=by_protocol(values["advertised.listeners"]).get(KAFKA),
            metadata_log_dir=self.metadata_log_dir or str(Path(self.log_dirs[0]) / METADATA_DIRECTORY),
            values=values,
            static_keys=static_keys,
            warnings=tuple(warnings_of(values)),
            topic_defaults={
                key.name: key.format(values.get(BROKER_KEY_BY_TOPIC_KEY.get(key.name, ""), key.default))
                for key in TOPIC_CONFIGS
            },
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
        """Return the settings with which a client on this machine reaches this broker.

        The client is this node itself, by its certificate, or an administrator of `sasl.users.location`; then the
        settings hold a password.

        Raises:
            InvalidConfig: `sasl.users.location` cannot be read, or has an error.
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
            settings["ssl.key.password.location"] = self.ssl_key_password_location
            settings["ssl.key.password.command"] = self.ssl_key_password_command
        if self.listener_security_protocol == SASL_SSL and self.sasl_users_location:
            settings |= administrator(Path(self.sasl_users_location), super_users_of(self.super_users))
            settings["sasl.mechanism"] = max(self.scram_mechanisms or SCRAM_MECHANISMS)  # the longest hash
        return {name: value for name, value in settings.items() if value}

    @property
    def asks_for_certificates(self) -> bool:
        """Whether clients must show certificates."""
        return asks_for_certificates(self.values, self.listener_security_protocol)

    @property
    def asks_kafka_for_certificates(self) -> bool:
        """Whether Kafka clients that use TLS must show certificates."""
        return asks_for_certificates(self.values, self.kafka_security_protocol)

    @property
    def kafka_speaks_tls(self) -> bool:
        """Whether the listener for Kafka clients speaks TLS."""
        return self.kafka_listener is not None and self.kafka_security_protocol in WITH_TLS

    @property
    def own_mechanisms(self) -> tuple[str, ...]:
        """The enabled mechanisms that raftlog's own clients use."""
        return tuple(each for each in self.sasl_enabled_mechanisms if each != PLAIN)

    @property
    def scram_mechanisms(self) -> tuple[str, ...]:
        """The enabled mechanisms with a challenge, at both listeners."""
        return tuple(each for each in self.sasl_enabled_mechanisms if each in SCRAM_MECHANISMS)

    def producer_limits(self) -> ProducerLimits:
        """Return the limits for remembering idempotent producers in logs."""
        return ProducerLimits(self.producer_id_expiration_ms, self.producer_ids_max)

    def group_config(self) -> GroupConfig:
        """Return the configuration of group coordinators."""
        return GroupConfig(
            session_timeout_ms=self.group_consumer_session_timeout_ms,
            heartbeat_interval_ms=self.group_consumer_heartbeat_interval_ms,
            rebalance_timeout_ms=self.group_coordinator_rebalance_timeout_ms,
            max_size=self.group_consumer_max_size,
            offsets_retention_ms=self.offsets_retention_minutes * MINUTE_MS,
            offsets_retention_check_interval_ms=self.offsets_retention_check_interval_ms,
            offset_metadata_max_bytes=self.offset_metadata_max_bytes,
            producer_id_expiration_ms=self.producer_id_expiration_ms,
            migration=Migration(self.group_consumer_migration_policy),
            classic=ClassicConfig(
                min_session_timeout_ms=self.group_min_session_timeout_ms,
                max_session_timeout_ms=self.group_max_session_timeout_ms,
                initial_rebalance_delay_ms=self.group_initial_rebalance_delay_ms,
                max_size=self.group_max_size,
            ),
        )

    def transaction_config(self) -> TransactionConfig:
        """Return the configuration of transaction coordinators."""
        return TransactionConfig(
            max_timeout_ms=self.transaction_max_timeout_ms,
            id_expiration_ms=self.transactional_id_expiration_ms,
            sink_expiration_ms=self.sink_expiration_ms,
            complete_after_ms=COMPLETE_AFTER_MS,
        )

    def log_config(self) -> LogConfig:
        """Return the configuration of a partition's log whose topic sets nothing."""
        return LogConfig.from_topic_configs(self.topic_defaults).within_limits(self.min_segment_bytes)


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


_THREADS: Final = "leave it out: a broker works in one event loop, and sizes its threads itself"
_BY_SYSTEM: Final = "leave it out: the operating system sizes the buffers of connections"
_NO_ZOOKEEPER: Final = "leave it out: there is no ZooKeeper; controller.quorum.voters names the controllers"
_KAFKAS: Final = {
    "authorizer.class.name": "authorizer=acl turns ACLs on; there are no classes to name",
    "background.threads": _THREADS,
    "broker.id": "it is called node.id here",
    "broker.id.generation.enable": "leave it out: every node has a node.id of its own, for ever",
    "controller.listener.names": "inter.node.listener is the address of controllers and of brokers for one another",
    "controller.quorum.bootstrap.servers": "controller.quorum.voters names the controllers",
    "delete.topic.enable": "leave it out: topics can be deleted by users with the Delete permission",
    "inter.broker.listener.name": "inter.node.listener is the address of nodes for one another",
    "inter.broker.protocol.version": "leave it out: raftlog cluster features upgrade raises the version once all "
    "brokers run it",
    "listener.security.protocol.map": "listener.security.protocol is that of raftlog's clients; a Kafka address "
    "has its own, such as kafka+ssl://",
    "log.dir": "it is called log.dirs here",
    "log.message.format.version": "leave it out: there is one format",
    "log.preallocate": "leave it out: segments grow as they are written",
    "log.retention.hours": "log.retention.ms takes units, such as log.retention.ms=7d",
    "log.retention.minutes": "log.retention.ms takes units, such as log.retention.ms=90m",
    "log.roll.hours": "log.roll.ms takes units, such as log.roll.ms=7d",
    "metric.reporters": "metrics.listener serves Prometheus",
    "num.io.threads": _THREADS,
    "num.network.threads": _THREADS,
    "num.replica.fetchers": "leave it out: leaders push to their followers",
    "replica.fetch.min.bytes": "leave it out: leaders push to their followers",
    "replica.selector.class": "leave it out: consumers with a client.rack read from a replica in the broker's rack",
    "socket.receive.buffer.bytes": _BY_SYSTEM,
    "socket.send.buffer.bytes": _BY_SYSTEM,
    "zookeeper.connect": _NO_ZOOKEEPER,
    "zookeeper.connection.timeout.ms": _NO_ZOOKEEPER,
    "zookeeper.session.timeout.ms": _NO_ZOOKEEPER,
}
"""Keys of Kafka's servers that do not exist here, and what to use instead."""
BROKER_CONFIGS: Final = ConfigDef(
    "server config",
    (*(each.key for each in settings_of(BrokerConfig)), *REPLICATION_THROTTLE_KEYS, *TOPIC_DEFAULT_KEYS),
    instead=_KAFKAS,
)
