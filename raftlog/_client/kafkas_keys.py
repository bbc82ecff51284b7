"""Kafka's keys of clients that these clients do without."""

from __future__ import annotations

from typing import Final

from raftlog.errors import InvalidConfig

_SERVERS: Final = "the group's servers say that"
_KAFKAS: Final = {
    "session.timeout.ms": f"{_SERVERS}: group.consumer.session.timeout.ms in their configuration; a consumer has "
    "max.poll.interval.ms",
    "heartbeat.interval.ms": f"{_SERVERS}: group.consumer.heartbeat.interval.ms in their configuration",
    "partition.assignment.strategy": "the coordinator distributes partitions: group.remote.assignor=sticky, range, "
    "roundrobin, or one that its servers have",
    "group.protocol": "there is one, that of KIP-848 (consumer)",
    "group.protocol.type": "there is one, that of KIP-848 (consumer)",
    "group.remote.assignors": "it is one name: group.remote.assignor",
    "bootstrap.servers": "the addresses are the first argument, as host:port,host:port",
    "key.deserializer": "keys are bytes; decode them where they are used",
    "value.deserializer": "values are bytes; decode them where they are used",
    "key.serializer": "keys are sent as the bytes that they are",
    "value.serializer": "values are sent as the bytes that they are",
    "auto.commit.enable": "it is called enable.auto.commit",
    "fetch.min.bytes": "brokers send what there is as soon as it is there",
    "fetch.max.wait.ms": "brokers send what there is as soon as it is there; poll takes a timeout",
    "allow.auto.create.topics": "topics are made by Admin.create_topic or raftlog topic create",
    "exclude.internal.topics": "patterns pass internal topics over; name one to read it",
    "interceptor.classes": "there are none",
}
"""Kafka's keys that are not there, and what to use instead."""


def refuse_kafkas(name: str) -> None:
    """Refuse Kafka's keys that these clients do without, and say what there is instead.

    Raises:
        InvalidConfig: it is one of them.
    """
    instead = _KAFKAS.get(name.lower().replace("_", "."))
    if instead is not None:
        raise InvalidConfig(f"{name} is not an option here, leave it out: {instead}")
