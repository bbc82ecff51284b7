"""Names of options: those that the source or the sink has, and the treatment of Kafka's others.

Spark ignores the case of names, and jobs for `format("kafka")` write client settings with the prefix `kafka.`. A job
for Kafka runs unchanged if that is safe: a setting that does not affect its rows is ignored with a warning (`ignored`).
A setting that affects the query's result is refused, and the error says what to use instead (`refused`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pyspark_raftlog.values import did_you_mean, given_twice

logger = logging.getLogger(__name__)

PREFIX: Final = "kafka."
BOOTSTRAP: Final = "bootstrap.servers"

_TRANSPORT: Final = dict.fromkeys(
    (
        "auto.include.jmx.reporter",
        "client.dns.lookup",
        "connections.max.idle.ms",
        "enable.metrics.push",
        "metadata.max.idle.ms",
        "metadata.recovery.rebootstrap.trigger.ms",
        "metadata.recovery.strategy",
        "metric.reporters",
        "metrics.num.samples",
        "metrics.recording.level",
        "metrics.sample.window.ms",
        "receive.buffer.bytes",
        "send.buffer.bytes",
        "socket.connection.setup.timeout.max.ms",
        "socket.connection.setup.timeout.ms",
    ),
    "it tunes Kafka's own client",
)
_NO_GROUP: Final = "the source has no consumer group: the query's checkpoint has its offsets"
_NO_CODE: Final = "it names code for the JVM, which would not run"
_BYTES: Final = "keys and values are bytes; cast them in the query"

IGNORED_BY_SOURCE: Final = {
    **_TRANSPORT,
    **dict.fromkeys(
        (
            "groupidprefix",
            "group.id",
            "group.instance.id",
            "group.protocol",
            "group.remote.assignor",
            "enable.auto.commit",
            "auto.commit.interval.ms",
            "heartbeat.interval.ms",
            "internal.leave.group.on.close",
            "max.poll.interval.ms",
            "partition.assignment.strategy",
            "session.timeout.ms",
        ),
        _NO_GROUP,
    ),
    "allow.auto.create.topics": "reading never creates a topic",
    "exclude.internal.topics": "internal topics are never read",
    "fetch.max.wait.ms": "a task reads records that exist, so a fetch never waits",
    "fetch.min.bytes": "a task reads records that exist, so a fetch never waits",
    "fetchoffset.numretries": "default.api.timeout.ms limits how long offsets are asked for",
    "fetchoffset.retryintervalms": "retry.backoff.ms is the pause between retries",
    "max.poll.records": "rows leave the source as whole Arrow batches; maxOffsetsPerTrigger limits a trigger",
}
REFUSED_BY_SOURCE: Final = {
    "auto.offset.reset": "startingOffsets sets where a query begins, and failOnDataLoss=false lets it continue when "
    "offsets are gone",
    "consumer.timeout.ms": "kafkaConsumer.pollTimeoutMs limits how long a task waits for records",
    "interceptor.classes": f"{_NO_CODE}; leave it out",
    "topic": "it is an option of the sink; a source has subscribe",
    "path": "a source has no path; subscribe names its topics",
}
IGNORED_BY_SINK: Final = {
    **_TRANSPORT,
    "compression.gzip.level": "compression.level sets the level",
    "compression.lz4.level": "compression.level sets the level",
    "compression.zstd.level": "compression.level sets the level",
    "includeheaders": "the sink writes the column headers whenever the query has one",
    "partitioner.adaptive.partitioning.enable": "rows without a key go to partitions in turn",
    "partitioner.availability.timeout.ms": "rows without a key go to partitions in turn",
}
REFUSED_BY_SINK: Final = {
    "interceptor.classes": f"{_NO_CODE}; leave it out",
    "partitioner.class": f"{_NO_CODE}; leave it out, and name each row's partition in a column partition",
    "partitioner.ignore.keys": "a row with a key goes to the key's partition; leave it out, and name each row's "
    "partition in a column partition",
    "path": "it writes to the option topic, or a column topic; leave the path out of save() or start()",
    "transactional.id": "every task attempt is its own transactional producer, and txn.app.id names their common sink; "
    "leave it out",
}
_CONVERTERS: Final = ("key.deserializer", "value.deserializer", "key.serializer", "value.serializer")
_OF_BYTES: Final = ("string", "bytearray", "bytes", "bytebuffer")

_warned: set[tuple[str, str]] = set()
"""The warnings that this process has already logged: Spark makes a sink for every batch."""


@dataclass(frozen=True)
class Vocabulary:
    """The names of one side's options.

    `side`: source or sink. `own`: the documented names of the connector's own options, by lower-case name. `clients`:
    the settings of the client below. `ignored`, `refused`: the reason by lower-case name, without the prefix; these two
    win over `clients`.
    """

    side: str
    own: Mapping[str, str]
    clients: Iterable[str]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]

    def collect(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return the options by lower-case name, without prefix, and without those that are ignored.

        Raises:
            ValueError: an option is unknown or refused, is given twice, or the cluster's address is missing.
            InvalidConfig: an invalid address, or a setting of Kafka's for logins that has another name here.
        """
        # Not at the top: Spark imports this module in processes that fork, where gRPC must not be loaded.
        from raftlog._client.options import refuse_security
        from raftlog._core.cluster import parse_bootstrap

        known = {**{name: name for name in self.clients}, **self.own}
        given: dict[str, str] = {}
        for name, value in options.items():
            key = name.lower()
            key = key if key in self.own else key.removeprefix(PREFIX)
            refuse_security(key)
            if reason := self.refused.get(key):
                raise ValueError(f"the raftlog {self.side} has no option {name}: {reason}")
            if key in _CONVERTERS:
                self._check_converter(name, value)
            elif reason := self.ignored.get(key):
                self._ignore(name, reason)
            elif key not in known:
                usable = sorted(known.keys() - self.refused.keys() - self.ignored.keys())
                raise ValueError(self._unknown(name, [known[each] for each in usable]))
            elif given.setdefault(key, value) != value:
                raise ValueError(given_twice(key, given[key], value))
        if BOOTSTRAP not in given:
            raise ValueError(f'the address of the cluster is missing; add option("{BOOTSTRAP}", "host:port")')
        parse_bootstrap(given[BOOTSTRAP])
        return given

    def _check_converter(self, name: str, value: str) -> None:
        """Ignore a converter of plain bytes or text, which changes nothing, and refuse any other."""
        kind = value.rpartition(".")[2].lower().removesuffix("deserializer").removesuffix("serializer")
        if kind not in _OF_BYTES:
            raise ValueError(
                f"the raftlog {self.side} cannot use {name}={value}: {_BYTES}, for example with from_json, to_json, "
                "from_avro or to_avro, and leave the option out"
            )
        self._ignore(name, _BYTES)

    def _ignore(self, name: str, reason: str) -> None:
        if (self.side, name) not in _warned:
            _warned.add((self.side, name))
            logger.warning("the raftlog %s ignores the option %s: %s", self.side, name, reason)

    def _unknown(self, name: str, usable: list[str]) -> str:
        advice = did_you_mean(name.lower().removeprefix(PREFIX), usable, f"its options are {', '.join(usable)}")
        return f"the raftlog {self.side} has no option {name}; {advice}"
