"""Counters and histograms of the data plane. All other metrics derive from the state at each scrape.

Counters only rise. Histograms hold one count for each bucket; `/metrics` converts them to Prometheus's cumulative form.
The event loop writes and other threads read: integers are replaced whole, so a reader sees the old or the new value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final

LATENCY_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Inclusive upper bounds in seconds; one more bucket holds larger values."""
STAGES: Final = ("queue", "local", "remote", "response", "total")
"""Of a request, in Kafka's words: waiting in the queue, work on this broker, waiting for disks and replicas, sending
the response, and all of them."""

MTLS: Final = "mTLS"
"""The mechanism under which certificates of clients count, beside those of SASL."""


class Histogram:
    """Counts of values by bucket, and their sum."""

    __slots__ = ("buckets", "counts", "total")

    def __init__(self, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) for each bucket; the last bound is "+Inf"."""
        seen = 0
        rows = []
        for end, count in zip((*map(repr, self.buckets), "+Inf"), list(self.counts), strict=True):
            seen += count
            rows.append((end, float(seen)))
        return rows


class TopicCounters:
    """What clients produced to a topic and fetched from it on this broker."""

    __slots__ = ("bytes_in", "bytes_out", "failed_produces", "records_in")

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.records_in = 0
        self.failed_produces = 0


class RequestCounters:
    """Requests of one kind: their number by outcome, and the seconds of each stage."""

    __slots__ = ("outcomes", "stages")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        """By the name of the error; "NONE" for success."""
        self.stages = {stage: Histogram() for stage in STAGES}


class Counters:
    """All counters of one node."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicCounters] = {}
        self.requests: dict[str, RequestCounters] = {}
        self.flushes: dict[str, Histogram] = {}
        """Seconds of the logs' fsyncs, by log directory."""
        self.isr_shrinks = 0
        self.isr_expands = 0
        self.replication_bytes_in = 0
        self.replication_bytes_out = 0
        self.streams: Counter[str] = Counter()
        """Open streams by kind."""
        self.produces_unanswered = 0
        """Produce requests whose responses have not left."""
        self.reads_from_cache = self.reads_from_disk = 0
        """Reads for consumers from the page cache, and from the disk."""
        self.leader_elections = self.unclean_leader_elections = 0
        """Leader changes of partitions while this node was the active controller."""
        self.authentications: Counter[tuple[str, str]] = Counter()
        """Exchanges by mechanism (of certificates `MTLS`), and "success" or "failure"."""
        self.unauthenticated_calls = 0
        """Calls refused for a missing or expired authentication."""
        self.authorization_refusals: Counter[str] = Counter()
        """Refused operations, by operation."""
        self.commit_seconds = Histogram()
        """Seconds from a command's proposal until it was applied, on the active controller."""

    def replicated(self, bytes_in: int, bytes_out: int) -> None:
        """Count the bytes of record batches received from leaders, and of those sent to followers."""
        self.replication_bytes_in += bytes_in
        self.replication_bytes_out += bytes_out

    def topic(self, name: str) -> TopicCounters:
        """Return the counters of a topic; creates them at the first call."""
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = TopicCounters()
        return found

    def keep_topics(self, names: frozenset[str]) -> None:
        """Drop the counters of deleted topics. Safe on any thread, beside concurrent calls of `topic`."""
        for name in self.topics.copy().keys() - names:
            self.topics.pop(name, None)

    def request(self, name: str) -> RequestCounters:
        """Return the counters of a kind of request; creates them at the first call."""
        found = self.requests.get(name)
        if found is None:
            found = self.requests[name] = RequestCounters()
        return found

    def flushed(self, log_dir: str, seconds: float) -> None:
        """Count one fsync."""
        found = self.flushes.get(log_dir)
        if found is None:
            found = self.flushes[log_dir] = Histogram()
        found.observe(seconds)
