"""What the clients can be told: Kafka's keys, with underscores as keyword arguments, or with dots in `config`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from raftlog._core.backoff import Backoff, Pauses
from raftlog.config import ConfigDef, ConfigKey, Value
from raftlog.errors import InvalidConfig
from raftlog.format import Codec
from raftlog.v1 import common_pb2, log_pb2

_CODECS: Final = {codec.name.lower(): codec for codec in Codec}
_ACKS: Final = {"all": log_pb2.ALL, "-1": log_pb2.ALL, "1": log_pb2.LEADER, "0": log_pb2.NO_ACK}
_ISOLATION: Final = {
    "read_committed": common_pb2.READ_COMMITTED,
    "read_uncommitted": common_pb2.READ_UNCOMMITTED,
}
_MAX_INT32: Final = (1 << 31) - 1

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
)
_LATER: Final = ("security.", "sasl.", "ssl.")

PRODUCER_KEYS: Final = ConfigDef(
    "producer option",
    (
        *_COMMON,
        ConfigKey(
            name="acks", kind="string", default="all", choices=tuple(_ACKS),
            doc="Who holds a record before it is acknowledged: all in-sync replicas, the leader (1), or 0: no answer.",
        ),
        ConfigKey(
            name="linger.ms", kind="float", default=5.0, minimum=0,
            doc="How long a batch waits for company; waiting for a delivery, or flush, sends it at once.",
        ),
        ConfigKey(
            name="batch.size", kind="bytes", default=64 << 10, minimum=1, maximum=_MAX_INT32,
            doc="Bytes at which a batch is full, before compression.",
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
            name="compression.type", kind="string", default="none", choices=tuple(_CODECS), doc="Codec of the batches."
        ),
        ConfigKey(
            name="compression.level", kind="int", default=None, optional=True, own=True,
            doc="Level as the codec counts it (gzip 1-9, zstd 1-22); none: the codec's default.",
        ),
        ConfigKey(
            name="max.in.flight.requests.per.connection", kind="int", default=5, minimum=1, maximum=100,
            doc="Requests to one broker that may be unanswered; order is kept with any number.",
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
            name="isolation.level", kind="string", default="read_committed", choices=tuple(_ISOLATION),
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


def refuse_security(name: str) -> None:
    """Refuse Kafka's keys for encryption and authentication by name, so that nobody takes them for a typing error.

    Raises:
        InvalidConfig: it is one of them.
    """
    if name.lower().replace("_", ".").startswith(_LATER):
        raise InvalidConfig(
            f"not in this version: {name}; connections are neither encrypted nor authenticated yet, leave it out "
            "and keep the brokers in a network that you trust"
        )


def _resolve(keys: ConfigDef, config: Mapping[str, object] | None, options: Mapping[str, object]) -> dict[str, Any]:
    raw = dict(config or {})
    for name, value in options.items():
        if name.replace("_", ".") in {given.replace("_", ".") for given in raw}:
            raise InvalidConfig(f"{name} is given twice, as a keyword and in config")
        raw[name] = value
    for name, value in raw.items():
        refuse_security(name)
        if name == "acks" and isinstance(value, int) and not isinstance(value, bool):
            raw[name] = str(value)
    values: dict[str, Value] = keys.resolve(raw)
    return {name.replace(".", "_"): value for name, value in values.items()}


def _pauses(values: dict[str, Any]) -> Pauses:
    """Take the four backoff values out and return what they say."""

    def backoff(name: str) -> Backoff:
        first_ms, max_ms = values.pop(f"{name}_backoff_ms"), values.pop(f"{name}_backoff_max_ms")
        return Backoff(first_ms, max(first_ms, max_ms), random.random)

    return Pauses(retry=backoff("retry"), reconnect=backoff("reconnect"))


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """`PRODUCER_KEYS`, typed: sizes in bytes, times in ms."""

    client_id: str
    acks: log_pb2.Acks.ValueType
    linger_ms: float
    batch_size: int
    buffer_memory: int
    max_block_ms: float
    codec: Codec
    level: int | None
    max_in_flight_requests_per_connection: int
    request_timeout_ms: float
    delivery_timeout_ms: float
    retries: int
    max_request_size: int
    metadata_max_age_ms: float
    pauses: Pauses

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> ProducerOptions:
        """Return the options from what the caller gave.

        Raises:
            InvalidConfig: unknown, out of range, or two that contradict each other.
        """
        values = _resolve(PRODUCER_KEYS, config, options)
        if values["delivery_timeout_ms"] < values["linger_ms"]:
            raise InvalidConfig(
                f"delivery.timeout.ms={values['delivery_timeout_ms']} is less than linger.ms={values['linger_ms']}: "
                "every record would time out before it is sent"
            )
        if values["batch_size"] > values["buffer_memory"]:
            raise InvalidConfig(
                f"batch.size={values['batch_size']} is more than buffer.memory={values['buffer_memory']}"
            )
        return cls(
            client_id=values["client_id"],
            acks=_ACKS[values["acks"]],
            linger_ms=values["linger_ms"],
            batch_size=min(values["batch_size"], values["max_request_size"]),
            buffer_memory=values["buffer_memory"],
            max_block_ms=values["max_block_ms"],
            codec=_CODECS[values["compression_type"]],
            level=values["compression_level"],
            max_in_flight_requests_per_connection=values["max_in_flight_requests_per_connection"],
            request_timeout_ms=values["request_timeout_ms"],
            delivery_timeout_ms=values["delivery_timeout_ms"],
            retries=values["retries"],
            max_request_size=values["max_request_size"],
            metadata_max_age_ms=values["metadata_max_age_ms"],
            pauses=_pauses(values),
        )


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """`CONSUMER_KEYS`, typed: sizes in bytes, times in ms."""

    client_id: str
    auto_offset_reset: str
    isolation_level: common_pb2.IsolationLevel.ValueType
    client_rack: str
    max_poll_records: int
    fetch_max_bytes: int
    max_partition_fetch_bytes: int
    check_crcs: bool
    consumer_timeout_ms: float | None
    default_api_timeout_ms: float
    request_timeout_ms: float
    metadata_max_age_ms: float
    pauses: Pauses

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> ConsumerOptions:
        """Return the options from what the caller gave.

        Raises:
            InvalidConfig: unknown or out of range.
        """
        values = _resolve(CONSUMER_KEYS, config, options)
        isolation = _ISOLATION[values.pop("isolation_level")]
        return cls(isolation_level=isolation, pauses=_pauses(values), **values)


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """`ADMIN_KEYS`, typed: times in ms."""

    client_id: str
    request_timeout_ms: float
    default_api_timeout_ms: float
    pauses: Pauses

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> AdminOptions:
        """Return the options from what the caller gave.

        Raises:
            InvalidConfig: unknown or out of range.
        """
        values = _resolve(ADMIN_KEYS, config, options)
        return cls(
            client_id=values["client_id"],
            request_timeout_ms=values["request_timeout_ms"],
            default_api_timeout_ms=values["default_api_timeout_ms"],
            pauses=_pauses(values),
        )
