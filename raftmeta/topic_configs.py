"""The configs of topics, the brokers' defaults for them, and the other keys that brokers accept while they run.

Each topic key has a broker key with the default for topics that do not set it, except for keys that only make sense for
one topic. All may be altered while the cluster runs. In rising priority: built-in default, the broker's file, the
cluster's dynamic default (broker resource ""), the broker's dynamic config, the topic's own config.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from raftlog.config import MAX_INT64, ConfigDef, ConfigKey, Value
from raftlog.errors import InvalidConfig

MIB = 1 << 20
DAY_MS = 86_400_000
MAX_FILE_DELETE_DELAY_MS: Final = DAY_MS
"""More than that is refused, and a value from before counts as this."""

# Each topic key with the name of its broker key; an empty name means the same one.
_TOPIC_KEYS: tuple[tuple[ConfigKey, str], ...] = (
    (
        ConfigKey(
            name="cleanup.policy",
            kind="list",
            default=("delete",),
            choices=("delete", "compact"),
            doc="How old records are removed: `delete` removes segments by retention.ms and retention.bytes, `compact` "
            "keeps the last record of each key, `delete,compact` does both. With compact, every record must have a "
            "key.",
            check=lambda value: None if value else "name at least one policy",
        ),
        "log.cleanup.policy",
    ),
    (
        ConfigKey(
            name="compression.type",
            kind="string",
            default="producer",
            choices=("producer",),
            doc="Brokers store batches as the producer compressed them, and never compress them again.",
        ),
        "",
    ),
    (
        ConfigKey(
            name="delete.retention.ms",
            kind="ms",
            default=DAY_MS,
            minimum=0,
            doc="With compaction: how long a tombstone (a record without a value) can still be read after compaction "
            "first reached it. A consumer that reads from the beginning must finish within this time.",
        ),
        "log.cleaner.delete.retention.ms",
    ),
    (
        ConfigKey(
            name="file.delete.delay.ms",
            kind="ms",
            default=60_000,
            minimum=0,
            doc="How long a file that was renamed for deletion stays on the disk; one day at most.",
        ),
        "log.segment.delete.delay.ms",
    ),
    (
        ConfigKey(
            name="flush.messages",
            kind="int",
            default=1,
            minimum=1,
            doc="Number of records after which the log is fsynced. 1: a record is acknowledged only once it is fsynced "
            "(group commit). Unsafe above 1: a power failure can lose acknowledged records.",
        ),
        "log.flush.interval.messages",
    ),
    (
        ConfigKey(
            name="flush.ms",
            kind="ms",
            default=MAX_INT64,
            minimum=0,
            doc="With flush.messages above 1: fsync at least this often.",
        ),
        "log.flush.interval.ms",
    ),
    (
        ConfigKey(
            name="index.interval.bytes",
            kind="bytes",
            default=4096,
            minimum=0,
            maximum=1 << 30,
            doc="Bytes of log between two entries of the offset index.",
        ),
        "log.index.interval.bytes",
    ),
    (
        ConfigKey(
            name="max.compaction.lag.ms",
            kind="ms",
            default=MAX_INT64,
            minimum=1,
            doc="With compaction: age of a record at which the segment is rolled and the log compacted, whatever the "
            "ratio.",
        ),
        "log.cleaner.max.compaction.lag.ms",
    ),
    (
        ConfigKey(
            name="max.inflate.bytes",
            kind="bytes",
            default=64 * MIB,
            minimum=1024,
            maximum=1 << 30,
            own=True,
            doc="The largest inflated size of a compressed batch; a larger one is refused. A topic's own value is at "
            "most the brokers': a larger one from before counts as theirs.",
        ),
        "",
    ),
    (
        ConfigKey(
            name="max.message.bytes",
            kind="bytes",
            default=4 * MIB,
            minimum=128,
            maximum=1 << 30,
            doc="The largest batch that is accepted, in compressed form. The brokers' socket.request.max.bytes must "
            "leave room for it.",
        ),
        "message.max.bytes",
    ),
    (
        ConfigKey(
            name="message.timestamp.type",
            kind="string",
            default="CreateTime",
            choices=("CreateTime", "LogAppendTime"),
            doc="The clock that stamps a record: the producer's, or the leader's when it appends the record.",
        ),
        "log.message.timestamp.type",
    ),
    (
        ConfigKey(
            name="min.cleanable.dirty.ratio",
            kind="float",
            default=0.5,
            minimum=0,
            maximum=1,
            doc="With compaction: a log is compacted when more than this share of its bytes is new since the last "
            "time.",
        ),
        "log.cleaner.min.cleanable.ratio",
    ),
    (
        ConfigKey(
            name="min.compaction.lag.ms",
            kind="ms",
            default=0,
            minimum=0,
            doc="With compaction: how long a record stays at least, even if later records have its key.",
        ),
        "log.cleaner.min.compaction.lag.ms",
    ),
    (
        ConfigKey(
            name="min.insync.replicas",
            kind="int",
            default=1,
            minimum=1,
            maximum=1000,
            doc="The number of in-sync replicas that a write with acks=all needs; with fewer, it is refused.",
        ),
        "",
    ),
    (
        ConfigKey(
            name="retention.bytes",
            kind="bytes",
            default=-1,
            minimum=-1,
            doc="Size above which a partition's oldest segments are deleted; -1: no bound.",
        ),
        "log.retention.bytes",
    ),
    (
        ConfigKey(
            name="retention.ms",
            kind="ms",
            default=7 * DAY_MS,
            minimum=-1,
            doc="A segment is deleted once its newest record is older than this; -1: no bound.",
        ),
        "log.retention.ms",
    ),
    (
        ConfigKey(
            name="segment.bytes",
            kind="bytes",
            default=1 << 30,
            minimum=1024,
            maximum=(1 << 31) - 1,
            doc="Size at which a new segment is begun. Retention works on whole segments. At least the brokers' "
            "min.segment.bytes.",
        ),
        "log.segment.bytes",
    ),
    (
        ConfigKey(
            name="segment.ms",
            kind="ms",
            default=7 * DAY_MS,
            minimum=1,
            doc="Age of a segment at which a new one is begun, even if it is not full. Less than a second counts as a "
            "second.",
        ),
        "log.roll.ms",
    ),
    (
        ConfigKey(
            name="unclean.leader.election.enable",
            kind="bool",
            default=False,
            doc="Whether a replica outside of the ISR may lead if no replica in the ISR is left. "
            "Unsafe: acknowledged records can be lost.",
        ),
        "",
    ),
)

THROTTLED_REPLICAS_OF_LEADER = "leader.replication.throttled.replicas"
THROTTLED_REPLICAS_OF_FOLLOWER = "follower.replication.throttled.replicas"
LEADER_THROTTLE_RATE = "leader.replication.throttled.rate"
FOLLOWER_THROTTLE_RATE = "follower.replication.throttled.rate"
EVERY_REPLICA = "*"


def is_throttled(throttled_replicas: str, partition: int, broker_id: int) -> bool:
    """Whether a value of the `...replication.throttled.replicas` keys names this replica (KIP-73)."""
    return throttled_replicas == EVERY_REPLICA or f"{partition}:{broker_id}" in _items(throttled_replicas)


@lru_cache(maxsize=8)  # a topic may have 10,000 partitions, and its value 30,000 entries: it is split once for all
def _items(throttled_replicas: str) -> frozenset[str]:
    return frozenset(throttled_replicas.split(","))


_REPLICA = re.compile(r"(0|[1-9][0-9]{0,9}):(0|[1-9][0-9]{0,9})", re.ASCII)


def _check_throttled_replicas(value: Value) -> str | None:
    assert isinstance(value, tuple)
    if value == (EVERY_REPLICA,):
        return None
    wrong = [item for item in value if _REPLICA.fullmatch(item) is None]
    if not wrong:
        return None
    return f"{wrong[0][:40]!r} is not a replica; expected partition:broker,... such as 0:1,0:2, or * for all of them"


def _throttled_replicas(name: str, whose: str, rate: str) -> ConfigKey:
    return ConfigKey(
        name=name,
        kind="list",
        default=(),
        doc=f"Replicas {whose} at most at the broker's {rate} during catch-up, as partition:broker,...; *: all. "
        "Followers in sync are never throttled.",
        check=_check_throttled_replicas,
    )


_TOPIC_ONLY_KEYS: tuple[ConfigKey, ...] = (
    _throttled_replicas(THROTTLED_REPLICAS_OF_FOLLOWER, "that receive records", FOLLOWER_THROTTLE_RATE),
    _throttled_replicas(THROTTLED_REPLICAS_OF_LEADER, "that send records to a follower", LEADER_THROTTLE_RATE),
)

BROKER_KEY_BY_TOPIC_KEY: dict[str, str] = {key.name: name or key.name for key, name in _TOPIC_KEYS}
TOPIC_KEY_BY_BROKER_KEY: dict[str, str] = {name: key for key, name in BROKER_KEY_BY_TOPIC_KEY.items()}
assert len(TOPIC_KEY_BY_BROKER_KEY) == len(BROKER_KEY_BY_TOPIC_KEY)

_NO_CLOCK_CHECK: Final = "leave it out: brokers compare no timestamp with their clocks"
_NO_TIERS: Final = "leave it out: records are on the disks of brokers only; retention.ms and retention.bytes limit them"
TOPIC_CONFIGS = ConfigDef(
    "topic config",
    (replace(key, dynamic=True) for key in (*(key for key, _ in _TOPIC_KEYS), *_TOPIC_ONLY_KEYS)),
    instead={
        "local.retention.bytes": _NO_TIERS,
        "local.retention.ms": _NO_TIERS,
        "message.downconversion.enable": "leave it out: there is one format, and no older one to convert to",
        "message.format.version": "leave it out: there is one format",
        "message.timestamp.after.max.ms": _NO_CLOCK_CHECK,
        "message.timestamp.before.max.ms": _NO_CLOCK_CHECK,
        "message.timestamp.difference.max.ms": _NO_CLOCK_CHECK,
        "preallocate": "leave it out: segments grow as they are written",
        "remote.storage.enable": _NO_TIERS,
        "segment.index.bytes": "leave it out: an index grows with its segment",
        "segment.jitter.ms": "leave it out: segments of partitions roll by their own records",
    },
)
"""With what an error says of Kafka's configs that topics do not have here."""

TOPIC_DEFAULT_KEYS: tuple[ConfigKey, ...] = tuple(
    replace(
        key,
        name=BROKER_KEY_BY_TOPIC_KEY[key.name],
        dynamic=True,
        doc=f"Default of the topic config {key.name}. {key.doc}",
    )
    for key, _ in _TOPIC_KEYS
)
"""The broker's side of the table: part of a broker's file as well."""

REPLICATION_THROTTLE_KEYS: tuple[ConfigKey, ...] = tuple(
    ConfigKey(
        name=name,
        kind="bytes",
        default=MAX_INT64,
        minimum=1,
        dynamic=True,
        doc=f"Bytes a second that this broker {does} in total for throttled replicas that catch up. The topic config "
        f"{replicas} names these replicas.",
    )
    for name, does, replicas in (
        (LEADER_THROTTLE_RATE, "sends", THROTTLED_REPLICAS_OF_LEADER),
        (FOLLOWER_THROTTLE_RATE, "receives", THROTTLED_REPLICAS_OF_FOLLOWER),
    )
)
"""Part of a broker's file as well."""

DYNAMIC_BROKER_CONFIGS = ConfigDef(
    "dynamic broker config",
    (*TOPIC_DEFAULT_KEYS, *REPLICATION_THROTTLE_KEYS),
    note="; any other key is in the file of each server, and takes effect with a restart",
)


MAX_INFLATE_BYTES: Final = "max.inflate.bytes"
MAX_VALUE_CHARACTERS: Final = 4_096
MAX_THROTTLED_REPLICAS: Final = 30_000
"""Of one topic: three replicas of each of the most partitions that a topic may have."""
_MAX_ENTRY_CHARACTERS: Final = len("9999999999:9999999999, ")


def check_limits(
    configs: Mapping[str, str],
    *,
    min_segment_bytes: int = 0,
    max_throttled_replicas: int = MAX_THROTTLED_REPLICAS,
    max_inflate_bytes: int | None = None,
) -> None:
    """Refuse values, as a client asks for them, that would burden the brokers; of a topic, or of brokers.

    The broker that a client asks checks this, before it proposes a command. A decision must not depend on it: every
    controller decides again on the commands in its log, which may have larger values from before.
    The stored form of every other value is a number or a choice, so with these limits a topic's configs have at most
    a KB in sum, besides its throttled replicas. `max_inflate_bytes`: the most that a topic may have; None: of brokers.

    Raises:
        InvalidConfig: a value is too long, names something twice, or is out of the limits.
    """
    for name, value in configs.items():
        key = name.replace("_", ".")
        key = TOPIC_KEY_BY_BROKER_KEY.get(key, key)
        throttled = key in (THROTTLED_REPLICAS_OF_LEADER, THROTTLED_REPLICAS_OF_FOLLOWER)
        longest = MAX_THROTTLED_REPLICAS * _MAX_ENTRY_CHARACTERS if throttled else MAX_VALUE_CHARACTERS
        if len(value) > longest:
            raise InvalidConfig(
                f"config {name[:249]!r}: the value has {len(value)} characters, at most {longest} may be"
            )
        if key not in TOPIC_CONFIGS:
            continue
        if TOPIC_CONFIGS.key(key).kind == "list":
            _check_items(name, value, max_throttled_replicas if throttled else MAX_VALUE_CHARACTERS)
        elif key == "segment.bytes":
            # Parsed without the key's own minimum: its error would name that one, although the brokers' is higher.
            segment_bytes = replace(TOPIC_CONFIGS.key(key), name=name.replace("_", "."), minimum=None).parse(value)
            assert isinstance(segment_bytes, int)
            if segment_bytes < min_segment_bytes:
                raise InvalidConfig(
                    f"{name}={value.strip()}: the broker's min.segment.bytes={min_segment_bytes} allows no smaller "
                    "segments, as each takes files and descriptors; set at least that"
                )
        elif key == MAX_INFLATE_BYTES and max_inflate_bytes is not None:
            inflate_bytes = TOPIC_CONFIGS.key(key).parse(value)
            assert isinstance(inflate_bytes, int)
            if inflate_bytes > max_inflate_bytes:
                raise InvalidConfig(
                    f"{name}={value.strip()}: the brokers' own max.inflate.bytes={max_inflate_bytes} is the most that "
                    "a topic may have, as they take that much memory to check a batch; set at most that, or have an "
                    "administrator raise theirs"
                )
        elif key == "file.delete.delay.ms":
            delay_ms = TOPIC_CONFIGS.key(key).parse(value)
            assert isinstance(delay_ms, int)
            if delay_ms > MAX_FILE_DELETE_DELAY_MS:
                raise InvalidConfig(
                    f"{name}={value.strip()}: deleted files stay for one day at most, {MAX_FILE_DELETE_DELAY_MS} ms"
                )


def _check_items(name: str, value: str, most: int) -> None:
    items = [item.strip() for item in value.split(",")]
    if len(items) > most:
        raise InvalidConfig(
            f"{name} names {len(items)} replicas; at most {most} may be named, one of each partition and broker, "
            f"or {EVERY_REPLICA} for all of them"
        )
    if len(set(items)) < len(items):
        twice = Counter(items).most_common(1)[0][0]
        raise InvalidConfig(f"{name} names {twice[:40]!r} twice; name each once")
