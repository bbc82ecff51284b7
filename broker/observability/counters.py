"""What is counted where it happens. Everything else that is shown is derived from the state when somebody asks.

Counters only rise, and histograms hold one count for each bucket; `/metrics` makes Prometheus' cumulative form of them.
Written on the event loop, read from other threads: integers are replaced whole, so a reader sees one or the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final

LATENCY_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper ends, inclusive, in seconds; one more bucket holds what is above."""
STAGES: Final = ("queue", "local", "remote", "response", "total")
"""Of a request, in Kafka's words: waiting to be looked at, work here, waiting for disks and replicas, sending back."""


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
        """Return (upper end, values up to it) for each bucket, the last one "+Inf"."""
        seen = 0
        rows = []
        for end, count in zip((*map(repr, self.buckets), "+Inf"), list(self.counts), strict=True):
            seen += count
            rows.append((end, float(seen)))
        return rows


class TopicCounters:
    """What clients wrote to a topic and read from it, on this broker."""

    __slots__ = ("bytes_in", "bytes_out", "failed_produces", "records_in")

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.records_in = 0
        self.failed_produces = 0


class RequestCounters:
    """Requests of one kind: how many by outcome, and how long each stage took."""

    __slots__ = ("outcomes", "stages")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        """By the name of the error; "NONE": it worked."""
        self.stages = {stage: Histogram() for stage in STAGES}


class Counters:
    """Everything that one node counts."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicCounters] = {}
        self.requests: dict[str, RequestCounters] = {}
        self.flushes: dict[str, Histogram] = {}
        """Seconds that fsyncs of logs took, by log directory."""
        self.isr_shrinks = 0
        self.isr_expands = 0
        self.replication_bytes_in = 0
        self.replication_bytes_out = 0
        self.streams: Counter[str] = Counter()
        """Open streams by kind."""
        self.produces_unanswered = 0
        """Produce requests that were read, and whose answers have not left."""
        self.reads_from_cache = self.reads_from_disk = 0
        """Reads for consumers that the page cache answered, and that had to wait for the disk."""
        self.leader_elections = self.unclean_leader_elections = 0
        """Partitions that got another leader while this node was the active controller."""
        self.authentications: Counter[tuple[str, str]] = Counter()
        """Exchanges by mechanism, and "success" or "failure"."""
        self.unauthenticated_calls = 0
        """Calls that were refused because nobody knew who called."""
        self.authorization_refusals: Counter[str] = Counter()
        """What somebody may not do, by operation."""
        self.commit_seconds = Histogram()
        """How long the active controller waited for a majority, by command."""

    def replicated(self, bytes_in: int, bytes_out: int) -> None:
        """Count bytes of record batches that came from a leader, and that were read for a follower."""
        self.replication_bytes_in += bytes_in
        self.replication_bytes_out += bytes_out

    def topic(self, name: str) -> TopicCounters:
        """Return the counters of a topic, new ones the first time."""
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = TopicCounters()
        return found

    def keep_topics(self, names: frozenset[str]) -> None:
        """Forget the topics that are gone. For any thread, several at a time: what comes meanwhile stays."""
        for name in self.topics.copy().keys() - names:
            self.topics.pop(name, None)

    def request(self, name: str) -> RequestCounters:
        """Return the counters of a kind of request, new ones the first time."""
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
