"""The server's keys for transactions and staged batches."""

from __future__ import annotations

from typing import Final

from raftlog.config import ConfigKey
from raftmeta.decide import MAX_PARTITIONS_PER_TOPIC

MIB: Final = 1 << 20
DAY_MS: Final = 24 * 60 * 60 * 1000

TRANSACTION_KEYS: Final = (
    ConfigKey(
        name="transaction.state.log.num.partitions",
        kind="int",
        default=50,
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
        doc="Partitions of __transaction_state, over which transactional ids and sinks are spread; counts when the "
        "topic is made.",
    ),
    ConfigKey(
        name="transaction.state.log.replication.factor",
        kind="int",
        default=3,
        minimum=1,
        maximum=1000,
        doc="Replicas of __transaction_state. Set, it is made only once so many brokers are up; by default a smaller "
        "cluster makes do with as many as it has.",
    ),
    ConfigKey(
        name="transaction.state.log.min.isr",
        kind="int",
        default=2,
        minimum=1,
        maximum=1000,
        doc="min.insync.replicas of __transaction_state, or as many as it has replicas where those are fewer; counts "
        "when the topic is made.",
    ),
    ConfigKey(
        name="transaction.state.log.segment.bytes",
        kind="bytes",
        default=100 * MIB,
        minimum=1024,
        maximum=(1 << 31) - 1,
        doc="Segment size of __transaction_state; small ones are compacted, and so loaded, sooner.",
    ),
    ConfigKey(
        name="transaction.max.timeout.ms",
        kind="ms",
        default=900_000,
        minimum=1,
        maximum=(1 << 31) - 1,
        doc="Longest timeout that a transaction, or a stage of a batch, may ask for. For so long an abandoned one "
        "holds up readers with isolation.level read_committed.",
    ),
    ConfigKey(
        name="transactional.id.expiration.ms",
        kind="ms",
        default=7 * DAY_MS,
        minimum=1,
        doc="Time after which a transactional id is forgotten that has begun no transaction.",
    ),
    ConfigKey(
        name="sink.expiration.ms",
        kind="ms",
        default=365 * DAY_MS,
        minimum=1,
        own=True,
        doc="Time after which a sink is forgotten that has committed no batch, and with it which batch was the last: "
        "a batch that is written again after that is there twice. Longer than any pause of a query that goes on from "
        "its checkpoint.",
    ),
)
