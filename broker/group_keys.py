"""The server's keys for consumer groups: what becomes of offsets, how members are watched, who assigns partitions."""

from __future__ import annotations

import re
from typing import Final

from raftlog.config import ConfigKey, Value
from raftmeta.decide import MAX_PARTITIONS_PER_TOPIC

MIB: Final = 1 << 20
MINUTE_MS: Final = 60_000
ASSIGNORS: Final = ("sticky", "range", "roundrobin")
"""Those that need no entry point."""

_ASSIGNOR_NAME = re.compile(r"[a-zA-Z0-9._-]{1,100}", re.ASCII)


def _assignors(value: Value) -> str | None:
    assert isinstance(value, tuple)
    if not value:
        return f"name at least one assignor, such as {', '.join(ASSIGNORS)}"
    if len(set(value)) < len(value):
        return "names an assignor twice"
    wrong = [name for name in value if _ASSIGNOR_NAME.fullmatch(name) is None]
    return f"{wrong[0][:40]!r} is no name of an assignor" if wrong else None


GROUP_KEYS: Final = (
    ConfigKey(
        name="offsets.topic.num.partitions",
        kind="int",
        default=50,
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
        doc="Partitions of __consumer_offsets, over which groups are spread; counts when the topic is made.",
    ),
    ConfigKey(
        name="offsets.topic.replication.factor",
        kind="int",
        default=3,
        minimum=1,
        maximum=1000,
        doc="Replicas of __consumer_offsets. Set, it is made only once so many brokers are up; by default a smaller "
        "cluster makes do with as many as it has.",
    ),
    ConfigKey(
        name="offsets.topic.segment.bytes",
        kind="bytes",
        default=100 * MIB,
        minimum=1024,
        maximum=(1 << 31) - 1,
        doc="Segment size of __consumer_offsets; small ones are compacted, and so loaded, sooner.",
    ),
    ConfigKey(
        name="offsets.retention.minutes",
        kind="int",
        default=10_080,
        minimum=1,
        maximum=(1 << 31) - 1,
        doc="Minutes after which the offsets of a group without members are removed; without a membership ever, "
        "counted from the commit.",
    ),
    ConfigKey(
        name="offsets.retention.check.interval.ms",
        kind="ms",
        default=600_000,
        minimum=1,
        doc="Time between two looks for offsets that have expired.",
    ),
    ConfigKey(
        name="offset.metadata.max.bytes",
        kind="bytes",
        default=4096,
        minimum=0,
        maximum=MIB,
        doc="Longest text that may be committed with an offset.",
    ),
    ConfigKey(
        name="group.consumer.session.timeout.ms",
        kind="ms",
        default=15_000,
        minimum=1_000,
        maximum=3_600_000,
        doc="Time without a heartbeat after which a member of a group is taken for dead. Set it above "
        "replica.lag.time.max.ms: for so long a follower that stands still holds up what a coordinator writes, and "
        "with it the members that are asked to let partitions go.",
    ),
    ConfigKey(
        name="group.consumer.heartbeat.interval.ms",
        kind="ms",
        default=3_000,
        minimum=100,
        maximum=3_600_000,
        doc="Time between two heartbeats of a member; less than half of group.consumer.session.timeout.ms.",
    ),
    ConfigKey(
        name="group.coordinator.rebalance.timeout.ms",
        kind="ms",
        default=60_000,
        minimum=100,
        maximum=86_400_000,
        own=True,
        doc="How long a member may take to let partitions go, if it does not say so itself; then it is taken for dead.",
    ),
    ConfigKey(
        name="group.consumer.max.size",
        kind="int",
        default=10_000,
        minimum=1,
        maximum=1_000_000,
        doc="Members that one group may have.",
    ),
    ConfigKey(
        name="group.consumer.assignors",
        kind="list",
        default=ASSIGNORS,
        check=_assignors,
        doc="Who may assign partitions to members, by name, the default first. Names that are not built in are looked "
        "up among the entry points `raftlog.assignors` of what is installed with the server.",
    ),
)
