"""The keys of the server's configuration, as a table. `broker.config` makes a `BrokerConfig` of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from broker.endpoints import DEFAULT_PORT, parse_endpoint, parse_nodes, parse_voters
from broker.group_keys import GROUP_KEYS
from broker.security_keys import SECURITY_KEYS
from broker.tracing_keys import TRACING_KEYS
from broker.transaction_keys import TRANSACTION_KEYS
from raftlog.config import MAX_INT64, ConfigDef, ConfigKey, Value
from raftmeta.decide import MAX_PARTITIONS_PER_TOPIC
from raftmeta.topic_configs import REPLICATION_THROTTLE_KEYS, TOPIC_DEFAULT_KEYS

KIB: Final = 1 << 10
MIB: Final = 1 << 20


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


def _voters(value: Value) -> str | None:
    return _complaint_of(parse_voters, value)


def _nodes(value: Value) -> str | None:
    return _complaint_of(parse_nodes, value)


def _complaint_of(parse: Callable[[Iterable[str]], object], value: Value) -> str | None:
    assert isinstance(value, tuple)
    try:
        parse(value)
    except ValueError as error:
        return str(error)
    return None


def _endpoint_if_set(value: Value) -> str | None:
    return _one_endpoint(value) if value else None


def _some_role(value: Value) -> str | None:
    return None if value else "name at least one role: broker, controller, or both"


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
            doc="Id of the cluster; `raftlog quorum new-id` makes one. Required with several voters. A node alone "
            "makes one up at its first start and finds it later. A directory of another cluster is refused.",
        ),
        ConfigKey(
            name="process.roles",
            kind="list",
            default=("broker", "controller"),
            choices=("broker", "controller"),
            check=_some_role,
            doc="What this process is: a broker keeps partitions and serves clients, a controller has a vote in the "
            "metadata quorum.",
        ),
        ConfigKey(
            name="controller.quorum.voters",
            kind="list",
            default=(),
            check=_voters,
            doc="The controllers, each as id@host:port with the address of its inter-node listener; the same list on "
            "every node: 1, 3 or 5 of them. Without it this node is the only one and opens no inter-node listener.",
        ),
        ConfigKey(
            name="inter.node.listener",
            kind="string",
            default="",
            own=True,
            check=_endpoint_if_set,
            doc="Address at which this node listens for the other nodes: controllers for the quorum, followers for "
            "records. A controller without it listens where controller.quorum.voters says; a node that is only a "
            "broker has to name one. It serves neither clients nor anybody outside the cluster.",
        ),
        ConfigKey(
            name="advertised.inter.node.listener",
            kind="string",
            default="",
            own=True,
            check=_endpoint_if_set,
            doc="Address that other brokers are told for this node, where it is not the one in "
            "controller.quorum.voters, or inter.node.listener of a node that is only a broker.",
        ),
        ConfigKey(
            name="inter.node.routes",
            kind="list",
            default=(),
            own=True,
            check=_nodes,
            doc="Where this node reaches the inter-node listeners of other brokers, each as id@host:port, if that is "
            "not the address that they advertise: behind a tunnel or a proxy.",
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
            doc="Allow plaintext without authentication on an address that is not loopback, where TLS is not on. "
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
            doc="Size at which the metadata log is replaced by a snapshot.",
        ),
        ConfigKey(
            name="broker.heartbeat.interval.ms",
            kind="ms",
            default=300,
            minimum=10,
            maximum=60_000,
            doc="Time between two heartbeats of a broker to the active controller.",
        ),
        ConfigKey(
            name="broker.session.timeout.ms",
            kind="ms",
            default=1_500,
            minimum=100,
            maximum=600_000,
            doc="Time without a heartbeat after which the controller fences a broker and others lead its partitions.",
        ),
        ConfigKey(
            name="broker.lease.ms",
            kind="ms",
            default=1_200,
            minimum=50,
            maximum=600_000,
            own=True,
            doc="How long a broker may serve after it sent a heartbeat that the controller answered with a lease; at "
            "most nine tenths of broker.session.timeout.ms, and more than two heartbeats.",
        ),
        ConfigKey(
            name="controller.quorum.election.timeout.ms",
            kind="ms",
            default=500,
            minimum=100,
            maximum=60_000,
            doc="Time without word from the leader of the metadata quorum after which a controller looks for another; "
            "each waits up to twice as long, by chance.",
        ),
        ConfigKey(
            name="auto.leader.rebalance.enable",
            kind="bool",
            default=True,
            doc="Whether leadership goes back to a partition's first replica by itself; "
            "what the active controller has set counts.",
        ),
        ConfigKey(
            name="leader.imbalance.check.interval.ms",
            kind="ms",
            default=300_000,
            minimum=100,
            mirrors="leader.imbalance.check.interval.seconds",
            doc="Time between two looks of the controller for leaders that are not the first replica.",
        ),
        ConfigKey(
            name="leader.imbalance.per.broker.percentage",
            kind="int",
            default=10,
            minimum=0,
            maximum=100,
            doc="Share of a broker's preferred leaderships that others may have before they are moved back.",
        ),
        ConfigKey(
            name="controlled.shutdown.enable",
            kind="bool",
            default=True,
            doc="Whether a broker that stops gives its leaderships away first.",
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
            name="producer.id.expiration.ms",
            kind="ms",
            default=86_400_000,
            minimum=600_000,
            doc="How long a partition remembers an idempotent producer after its last append; longer than any producer "
            "tries to deliver.",
        ),
        ConfigKey(
            name="producer.ids.max",
            kind="int",
            default=100_000,
            minimum=1,
            maximum=10_000_000,
            own=True,
            doc="Idempotent producers that one partition remembers; the same on all brokers. Beyond it those idle for "
            "ten minutes are forgotten, those whose transaction has ended after one; while there are none, new "
            "producers are refused.",
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
            name="replica.lag.time.max.ms",
            kind="ms",
            default=10_000,
            minimum=100,
            maximum=3_600_000,
            doc="How long a follower may stay behind its leader's log end until it leaves the ISR.",
        ),
        ConfigKey(
            name="replica.fetch.max.bytes",
            kind="bytes",
            default=1 * MIB,
            minimum=4 * KIB,
            maximum=1 << 30,
            doc="Largest piece of log in one message to a follower; a single larger batch still goes whole.",
        ),
        ConfigKey(
            name="replica.credit.bytes",
            kind="bytes",
            default=8 * MIB,
            minimum=64 * KIB,
            maximum=1 << 30,
            own=True,
            doc="What each leader may send to this broker before it is appended here, for partitions that are in sync "
            "and as much for those that catch up.",
        ),
        ConfigKey(
            name="replica.high.watermark.checkpoint.interval.ms",
            kind="ms",
            default=5_000,
            minimum=10,
            maximum=3_600_000,
            doc="Time between two writes of the high watermarks to the disk.",
        ),
        ConfigKey(
            name="log.retention.check.interval.ms",
            kind="ms",
            default=300_000,
            minimum=1,
            doc="Time between two looks for segments that retention lets go.",
        ),
        ConfigKey(
            name="log.cleaner.enable",
            kind="bool",
            default=True,
            doc="Whether topics with cleanup.policy compact are compacted here. Off, they grow, and so do the offsets "
            "of consumer groups.",
        ),
        ConfigKey(
            name="log.cleaner.backoff.ms",
            kind="ms",
            default=15_000,
            minimum=1,
            maximum=3_600_000,
            doc="Time between two looks for logs to be compacted, while there is none.",
        ),
        ConfigKey(
            name="log.cleaner.dedupe.buffer.size",
            kind="bytes",
            default=128 * MIB,
            minimum=1 * MIB,
            maximum=1 << 30,
            doc="Memory for the keys of what is compacted in one go; what does not fit waits for the next time.",
        ),
        ConfigKey(
            name="log.cleaner.io.max.bytes.per.second",
            kind="bytes",
            default=MAX_INT64,
            minimum=1 * KIB,
            doc="How many bytes compaction reads and writes a second at most.",
        ),
        ConfigKey(
            name="log.scrub.bytes.per.second",
            kind="bytes",
            default=20 * MIB,
            minimum=0,
            own=True,
            doc="How fast all logs are read again in the background to find damage on the disk; 0 is never.",
        ),
        ConfigKey(
            name="log.scrub.interval.ms",
            kind="ms",
            default=7 * 24 * 3_600_000,
            minimum=100,
            own=True,
            doc="Time from the begin of one such pass to the next; the first is five minutes after the start, or "
            "sooner if this is less.",
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
            name="metrics.listener",
            kind="string",
            default="",
            own=True,
            check=_endpoint_if_set,
            doc="Address of the HTTP endpoint for Prometheus (`/metrics`) and for probes (`/livez`, `/startupz`, "
            "`/readyz`); none without it. It tells figures, names of topics and groups, and no records, to anybody who "
            "reaches it.",
        ),
        ConfigKey(
            name="metrics.group.lag.interval.ms",
            kind="ms",
            default=5_000,
            minimum=0,
            maximum=3_600_000,
            own=True,
            doc="How often the coordinator of a group looks how far it is behind, while there is a `metrics.listener`; "
            "0: never. Lag in seconds is exact to this.",
        ),
        ConfigKey(
            name="liveness.timeout.ms",
            kind="ms",
            default=10_000,
            minimum=1_000,
            maximum=3_600_000,
            own=True,
            doc="How long the event loop may hang until `/livez` says that this process is dead.",
        ),
        ConfigKey(
            name="log.level",
            kind="string",
            default="info",
            choices=("debug", "info", "warning", "error"),
            own=True,
            doc="Least severity that is written to the server's own log.",
        ),
        *SECURITY_KEYS,
        *TRACING_KEYS,
        *GROUP_KEYS,
        *TRANSACTION_KEYS,
        *REPLICATION_THROTTLE_KEYS,
        *TOPIC_DEFAULT_KEYS,
    ),
)
