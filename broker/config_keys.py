"""The keys of the server's configuration, as a table. `broker.config` makes a `BrokerConfig` of their values."""

from __future__ import annotations

from typing import Final

from raftlog.config import ConfigDef, ConfigKey, Value
from raftmeta.decide import MAX_PARTITIONS_PER_TOPIC
from raftmeta.topic_configs import TOPIC_DEFAULT_KEYS

KIB: Final = 1 << 10
MIB: Final = 1 << 20
DEFAULT_PORT: Final = 9092


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`, `[::1]:port`, or `host` alone with the default port.

    Raises:
        ValueError: something else.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address stands in brackets, [::1]:9092")
    if not host or any(c.isspace() or c in "/,[]" for c in host):
        raise ValueError(f"{text!r} is not host:port")
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"{text!r}: the port is a number from 0 to 65535")
    return host, int(port)


def _one_endpoint(value: Value) -> str | None:
    items = value if isinstance(value, tuple) else (str(value),)
    if len(items) > 1:
        return "one listener is supported"
    try:
        for item in items:
            parse_endpoint(item)
    except ValueError as error:
        return str(error)
    return None


def _needs_listener(value: Value) -> str | None:
    return _one_endpoint(value) if value else "expected host:port, for example 127.0.0.1:9092"


def _both_roles(value: Value) -> str | None:
    if isinstance(value, tuple) and set(value) == {"broker", "controller"}:
        return None
    return "this version runs broker and controller in one process only: broker,controller"


def _no_auto_create(value: Value) -> str | None:
    return "topics are not created by themselves yet; create them with the admin API" if value else None


BROKER_CONFIGS: Final = ConfigDef(
    "server config",
    (
        ConfigKey(
            name="node.id",
            kind="int",
            default=None,
            optional=True,
            minimum=0,
            maximum=(1 << 31) - 1,
            doc="Number of this node, unique in the cluster and never changed. Required.",
        ),
        ConfigKey(
            name="cluster.id",
            kind="string",
            default="",
            own=True,
            doc="Id of the cluster. Without it the first start makes one up and later starts find it; "
            "with it a directory of another cluster is refused.",
        ),
        ConfigKey(
            name="process.roles",
            kind="list",
            default=("broker", "controller"),
            choices=("broker", "controller"),
            check=_both_roles,
            doc="What this process is.",
        ),
        ConfigKey(
            name="listeners",
            kind="list",
            default=(f"127.0.0.1:{DEFAULT_PORT}",),
            check=_needs_listener,
            doc="Address that clients connect to, as host:port; port 0 takes a free one.",
        ),
        ConfigKey(
            name="advertised.listeners",
            kind="list",
            default=(),
            check=_one_endpoint,
            doc="Address that clients are told to connect to, where it is not the one of `listeners`; "
            "port 0 stands for the port that was taken.",
        ),
        ConfigKey(
            name="insecure",
            kind="bool",
            default=False,
            own=True,
            doc="Allow plaintext without authentication on an address that is not loopback. "
            "Anyone who reaches the port can then read, write and delete everything.",
        ),
        ConfigKey(
            name="rack",
            kind="string",
            default="",
            mirrors="broker.rack",
            doc="Where this node stands; replicas of a partition are kept in different racks.",
        ),
        ConfigKey(
            name="log.dirs",
            kind="list",
            default=(),
            doc="Directories for partitions, each on a disk of its own; a partition lies in one of them. Required.",
        ),
        ConfigKey(
            name="metadata.log.dir",
            kind="string",
            default="",
            doc="Directory for the cluster's metadata; without it `__cluster_metadata` in the first of log.dirs.",
        ),
        ConfigKey(
            name="metadata.log.max.record.bytes.between.snapshots",
            kind="bytes",
            default=20 * MIB,
            minimum=64 * KIB,
            maximum=1 << 30,
            doc="Size at which the metadata journal is replaced by a snapshot.",
        ),
        ConfigKey(
            name="num.partitions",
            kind="int",
            default=1,
            minimum=1,
            maximum=MAX_PARTITIONS_PER_TOPIC,
            doc="Partitions of a topic that is created without a number.",
        ),
        ConfigKey(
            name="default.replication.factor",
            kind="int",
            default=1,
            minimum=1,
            maximum=1000,
            doc="Replicas of a topic that is created without a number.",
        ),
        ConfigKey(
            name="auto.create.topics.enable",
            kind="bool",
            default=False,
            check=_no_auto_create,
            doc="Whether a topic comes into being when it is first asked for.",
        ),
        ConfigKey(
            name="max.partitions.per.topic",
            kind="int",
            default=MAX_PARTITIONS_PER_TOPIC,
            minimum=1,
            maximum=MAX_PARTITIONS_PER_TOPIC,
            own=True,
            doc="Partitions that one topic may have.",
        ),
        ConfigKey(
            name="max.partitions.per.broker",
            kind="int",
            default=20_000,
            minimum=1,
            maximum=1_000_000,
            own=True,
            doc="Replicas per broker, on average, beyond which no more partitions are created.",
        ),
        ConfigKey(
            name="socket.request.max.bytes",
            kind="bytes",
            default=32 * MIB,
            minimum=64 * KIB,
            maximum=(1 << 31) - 1,
            doc="Largest message on the wire; at least message.max.bytes and 64 KiB more.",
        ),
        ConfigKey(
            name="max.streams",
            kind="int",
            default=10_000,
            minimum=1,
            maximum=1_000_000,
            own=True,
            doc="Produce, fetch and watch streams that this broker serves at a time.",
        ),
        ConfigKey(
            name="max.subscriptions",
            kind="int",
            default=10_000,
            minimum=1,
            maximum=1_000_000,
            own=True,
            doc="Partitions that one fetch stream may read.",
        ),
        ConfigKey(
            name="max.in.flight.requests",
            kind="int",
            default=1_000,
            minimum=1,
            maximum=100_000,
            own=True,
            doc="Unanswered batches that one produce stream may have.",
        ),
        ConfigKey(
            name="request.timeout.ms",
            kind="ms",
            default=30_000,
            minimum=1,
            maximum=3_600_000,
            doc="How long a produce waits for its replicas when it does not say so itself.",
        ),
        ConfigKey(
            name="fetch.max.bytes",
            kind="bytes",
            default=1 * MIB,
            minimum=1 * KIB,
            maximum=1 << 30,
            doc="Largest piece of log in one message of a fetch stream; a single larger batch still goes whole.",
        ),
        ConfigKey(
            name="log.retention.check.interval.ms",
            kind="ms",
            default=300_000,
            minimum=1,
            doc="Time between two looks for segments that retention lets go.",
        ),
        ConfigKey(
            name="log.format",
            kind="string",
            default="text",
            choices=("text", "json"),
            own=True,
            doc="How the server's own log is written.",
        ),
        ConfigKey(
            name="log.level",
            kind="string",
            default="info",
            choices=("debug", "info", "warning", "error"),
            own=True,
            doc="Least severity that is written to the server's own log.",
        ),
        *TOPIC_DEFAULT_KEYS,
    ),
)
