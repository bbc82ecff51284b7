"""The keys that clients take: Kafka's, where it has them."""

from __future__ import annotations

from typing import Final

from raftlog.config import ConfigDef, ConfigKey
from raftlog.format import Codec
from raftlog.v1 import common_pb2, log_pb2

CODECS: Final = {codec.name.lower(): codec for codec in Codec}
ACKS: Final = {"all": log_pb2.ALL, "-1": log_pb2.ALL, "1": log_pb2.LEADER, "0": log_pb2.NO_ACK}
ISOLATION: Final = {
    "read_committed": common_pb2.READ_COMMITTED,
    "read_uncommitted": common_pb2.READ_UNCOMMITTED,
}
_MAX_INT32: Final = (1 << 31) - 1

SECURITY_KEYS: Final = (
    ConfigKey(
        name="security.protocol",
        kind="string",
        default="plaintext",
        choices=("plaintext", "ssl", "sasl_ssl"),
        ignore_case=True,
        doc="What the brokers' listeners speak: plaintext, TLS (ssl), or TLS where users log in (sasl_ssl).",
    ),
    ConfigKey(
        name="ssl.ca.location",
        kind="string",
        default="",
        own=True,
        doc="PEM file with the certificates of the CAs that a broker's certificate is checked against; empty: those "
        "that gRPC brings along, of public CAs. With ssl and sasl_ssl. Read again when it changes.",
    ),
    ConfigKey(
        name="ssl.certificate.location",
        kind="string",
        default="",
        own=True,
        doc="PEM file with this client's certificate, followed by those between it and the CA, and with the private "
        "key, unless ssl.key.location names another file; for brokers with ssl.client.auth=required. Read again when "
        "it changes.",
    ),
    ConfigKey(
        name="ssl.key.location",
        kind="string",
        default="",
        own=True,
        doc="PEM file with this client's private key, not encrypted. Read again when it changes.",
    ),
    ConfigKey(
        name="sasl.mechanism",
        kind="string",
        default="SCRAM-SHA-512",
        choices=("SCRAM-SHA-512", "SCRAM-SHA-256"),
        doc="How the password is checked, which never crosses the wire; as the user was created. With sasl_ssl.",
    ),
    ConfigKey(
        name="sasl.username",
        kind="string",
        default="",
        mirrors="sasl.jaas.config",
        doc="Who logs in; permissions are given to User:NAME. With sasl_ssl.",
    ),
    ConfigKey(
        name="sasl.password",
        kind="string",
        default="",
        mirrors="sasl.jaas.config",
        secret=True,
        doc="The user's password; sasl.password.location is the better place for one.",
    ),
    ConfigKey(
        name="sasl.password.location",
        kind="string",
        default="",
        own=True,
        doc="File with the user's password, in place of sasl.password. Read again with every login.",
    ),
)

_COMMON: Final = (
    ConfigKey(
        name="client.id", kind="string", default="raftlog-python", doc="Name of this client in the broker's log."
    ),
    ConfigKey(
        name="request.timeout.ms",
        kind="ms",
        default=30_000,
        minimum=1,
        doc="How long one request may go without an answer.",
    ),
    ConfigKey(
        name="retry.backoff.ms",
        kind="ms",
        default=50,
        minimum=0,
        doc="Pause before the first retry; it doubles with every further one.",
    ),
    ConfigKey(name="retry.backoff.max.ms", kind="ms", default=1000, minimum=0, doc="Longest pause between retries."),
    ConfigKey(
        name="reconnect.backoff.ms",
        kind="ms",
        default=50,
        minimum=0,
        doc="Pause before a broken connection is tried again; it doubles with every further failure.",
    ),
    ConfigKey(
        name="reconnect.backoff.max.ms",
        kind="ms",
        default=250,
        minimum=0,
        doc="Longest pause between tries to reach a broker; a broker that is back is found within this time.",
    ),
    *SECURITY_KEYS,
)

_TRACING: Final = ConfigKey(
    name="tracing",
    kind="bool",
    default=False,
    own=True,
    doc="Whether records carry the trace of the current span, and sampled ones make spans; needs the extra "
    "`raftlog[otel]`, and OpenTelemetry set up by the application.",
)

PRODUCER_KEYS: Final = ConfigDef(
    "producer option",
    (
        *_COMMON,
        ConfigKey(
            name="acks", kind="string", default="all", choices=tuple(ACKS),
            doc="Who holds a record before it is acknowledged: all in-sync replicas, the leader (1), or 0: no answer.",
        ),
        ConfigKey(
            name="enable.idempotence", kind="bool", default=True,
            doc="Whether the brokers recognise what is sent again, so that every record is in the log once and in "
            "order; needs acks=all, retries, and at most 5 requests in flight.",
        ),
        ConfigKey(
            name="transactional.id", kind="string", default="",
            doc="Lets a producer send in transactions, under a name that stays the same over restarts: who begins with "
            "it fences the producer before and aborts what that left open. Needs what idempotence needs; empty: none.",
        ),
        ConfigKey(
            name="transaction.timeout.ms", kind="ms", default=60_000, minimum=1, maximum=_MAX_INT32,
            doc="How long a transaction may stay open before its coordinator aborts it; at most the server's "
            "transaction.max.timeout.ms.",
        ),
        ConfigKey(
            name="linger.ms", kind="float", default=5.0, minimum=0,
            doc="How long a batch waits for company; waiting for a delivery, or flush, sends it at once.",
        ),
        ConfigKey(
            name="batch.size", kind="bytes", default=64 << 10, minimum=1, maximum=_MAX_INT32,
            doc="Bytes at which a batch is full, before compression; four times as many while an idempotent producer "
            "has batches waiting for those in flight.",
        ),
        ConfigKey(
            name="buffer.memory", kind="bytes", default=64 << 20, minimum=1024,
            doc="Bytes that may wait unacknowledged; beyond, `send` waits.",
        ),
        ConfigKey(
            name="max.block.ms", kind="ms", default=60_000, minimum=0,
            doc="How long `send` may wait for memory, or for the cluster to say where a topic is.",
        ),
        ConfigKey(
            name="compression.type", kind="string", default="none", choices=tuple(CODECS), doc="Codec of the batches."
        ),
        ConfigKey(
            name="compression.level", kind="int", default=None, optional=True, own=True,
            doc="Level as the codec counts it (gzip 1-9, zstd 1-22); none: the codec's default.",
        ),
        ConfigKey(
            name="max.in.flight.requests.per.connection", kind="int", default=5, minimum=1, maximum=100,
            doc="Requests to one broker that may be unanswered; order is kept with any number, but with more than 5 a "
            "producer is not idempotent.",
        ),
        ConfigKey(
            name="delivery.timeout.ms", kind="ms", default=120_000, minimum=1,
            doc="How long a delivery may take in all, retries included.",
        ),
        ConfigKey(
            name="retries", kind="int", default=_MAX_INT32, minimum=0, maximum=_MAX_INT32,
            doc="How often a batch is sent again; `delivery.timeout.ms` is the better bound.",
        ),
        ConfigKey(
            name="max.request.size", kind="bytes", default=1 << 20, minimum=1024, maximum=_MAX_INT32,
            doc="Largest request, and so the largest record.",
        ),
        ConfigKey(
            name="metadata.max.age.ms", kind="ms", default=300_000, minimum=10,
            doc="How old the view of the cluster may be before it is asked for again.",
        ),
        _TRACING,
    ),
)  # fmt: skip

CONSUMER_KEYS: Final = ConfigDef(
    "consumer option",
    (
        *_COMMON,
        ConfigKey(
            name="auto.offset.reset", kind="string", default="latest", choices=("latest", "earliest", "none"),
            doc="Where to begin without a position, or when it is gone; none: `OffsetOutOfRange` from `poll`.",
        ),
        ConfigKey(
            name="isolation.level", kind="string", default="read_committed", choices=tuple(ISOLATION),
            doc="Whether records of open transactions are seen.",
        ),
        ConfigKey(
            name="client.rack", kind="string", default="",
            doc="Where this client stands, as brokers name it in `broker.rack`: it reads from a replica there, if one "
            "is in sync; empty: from leaders only.",
        ),
        ConfigKey(
            name="max.poll.records", kind="int", default=500, minimum=1, doc="Most records that one `poll` returns."
        ),
        ConfigKey(
            name="fetch.max.bytes", kind="bytes", default=32 << 20, minimum=1024,
            doc="Bytes that may lie fetched and not yet polled, over all partitions.",
        ),
        ConfigKey(
            name="max.partition.fetch.bytes", kind="bytes", default=1 << 20, minimum=1024, maximum=_MAX_INT32,
            doc="Bytes of one partition in one message, unless a single batch is larger.",
        ),
        ConfigKey(
            name="check.crcs", kind="bool", default=True, doc="Whether the checksum of every batch is verified."
        ),
        ConfigKey(
            name="consumer.timeout.ms", kind="ms", default=None, optional=True, own=True,
            doc="How long iteration waits for a record before it ends; none: for ever.",
        ),
        ConfigKey(
            name="default.api.timeout.ms", kind="ms", default=60_000, minimum=1,
            doc="How long calls that ask the cluster something may take, retries included.",
        ),
        ConfigKey(
            name="metadata.max.age.ms", kind="ms", default=5_000, minimum=10,
            doc="How often a subscription looks for new topics and partitions.",
        ),
        ConfigKey(
            name="group.id", kind="string", default="",
            doc="The group that shares the partitions and keeps the offsets; empty: none.",
        ),
        ConfigKey(
            name="group.instance.id", kind="string", default="",
            doc="Makes a static member: who comes back with it within the session timeout has its partitions again, "
            "without a rebalance.",
        ),
        ConfigKey(
            name="group.remote.assignor", kind="string", default="",
            doc="How the coordinator is to distribute partitions: sticky, range, roundrobin, or one that its server "
            "has; empty: its default.",
        ),
        ConfigKey(
            name="enable.auto.commit", kind="bool", default=True,
            doc="Whether a consumer with a group commits by itself what the application has come back from.",
        ),
        ConfigKey(
            name="auto.commit.interval.ms", kind="ms", default=5_000, minimum=0,
            doc="How often it does so.",
        ),
        ConfigKey(
            name="max.poll.interval.ms", kind="ms", default=300_000, minimum=1, maximum=_MAX_INT32,
            doc="How long a member of a group may stay away from `poll`, or take to let a partition go, before others "
            "get its partitions.",
        ),
        _TRACING,
    ),
)  # fmt: skip

ADMIN_KEYS: Final = ConfigDef(
    "admin option",
    (
        *_COMMON,
        ConfigKey(
            name="default.api.timeout.ms", kind="ms", default=60_000, minimum=1,
            doc="How long a call may take, retries included.",
        ),
    ),
)  # fmt: skip
