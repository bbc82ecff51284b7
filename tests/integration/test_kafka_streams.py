"""Kafka Streams, of Kafka 4.3, with exactly_once_v2: its results are exact over kills of a broker and of the program.

They need Java, and Maven or the jars (`tests/support/kafka_java.py`).
"""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import confluent_kafka
import pytest

import raftlog
from bench.compare import streams_jars
from raftlog.testing import Cluster
from tests.support.kafka_java import JVM, JavaProgram, jars_or_skip
from tests.support.patience import until
from tests.support.up_to_date import heard_everywhere

pytestmark = pytest.mark.long

APPLICATION: Final = "word-count"
LINES, COUNTS, WINDOWS = "lines", "counts", "windows"
REPARTITION: Final = f"{APPLICATION}-words-repartition"
CHANGELOGS: Final = tuple(f"{APPLICATION}-{store}-changelog" for store in ("counts", "windows"))
PARTITIONS: Final = 2
WORDS: Final = ("alpha", "beta", "gamma", "delta", "epsilon")
LINE_MS: Final = 50
"""Between the timestamps of two lines."""
TIMEOUT_S: Final = 240.0


class WordCount(JavaProgram):
    """One JVM with two stream threads. It counts words, and the words of each minute."""

    def __init__(self, jars: Path, cluster: Cluster, directory: Path) -> None:
        self.said: list[str] = []
        directory.mkdir(exist_ok=True)
        self.log = directory / "log"
        settings = {
            "processing.guarantee": "exactly_once_v2",
            "num.stream.threads": 2,
            "replication.factor": 3,
            "commit.interval.ms": 100,
            "session.timeout.ms": 6_000,  # so that one that was killed is soon forgotten
            "repartition.purge.interval.ms": 500,
        }
        options = (f"{key}={value}" for key, value in settings.items())
        names = APPLICATION, cluster.kafka_bootstrap, str(directory), LINES, COUNTS, WINDOWS
        with self.log.open("a") as log:
            super().__init__(jars, "WordCount", *names, *options, on_line=self.said.append, errors=log)

    def restored(self) -> int:
        """The records that its stores were restored from."""
        return sum(int(each.split()[2]) for each in self.said if each.startswith("restored "))


class Lines:
    """Lines of two words, sent once each, and what their counts have to be."""

    def __init__(self, cluster: Cluster) -> None:
        self.words: Counter[str] = Counter()
        self.minutes: Counter[tuple[str, int]] = Counter()
        self._sent = 0
        config = {"bootstrap.servers": cluster.kafka_bootstrap, "enable.idempotence": True, "log_level": 0}
        self._producer = confluent_kafka.Producer(config)

    def send(self, lines: int) -> None:
        for number in range(self._sent, self._sent + lines):
            line = *islice(cycle(WORDS), number % 5, number % 5 + 1), WORDS[number // 5 % 5]
            at_ms = 60_000 + number * LINE_MS
            self.words.update(line)
            self.minutes.update((word, at_ms // 60_000 * 60_000) for word in line)
            self._producer.produce(LINES, " ".join(line), partition=number % PARTITIONS, timestamp=at_ms)
        assert self._producer.flush(TIMEOUT_S) == 0
        self._sent += lines


def counted(cluster: Cluster, topic: str) -> dict[str, list[int]]:
    """Return the committed counts of each key, in their order."""
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition(topic, number) for number in range(PARTITIONS)])
        table = consumer.read_to_end(timeout=TIMEOUT_S)
    counts = defaultdict(list)
    for key, value in zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True):
        counts[key.decode()].append(int(value))
    return counts


def is_exact(cluster: Cluster, lines: Lines, times: int = 1) -> bool:
    """Whether each word was counted once. Raises AssertionError: a count is missing, or there twice."""
    words = {word: [*range(1, count + 1)] * times for word, count in lines.words.items()}
    minutes = {f"{word}@{at}": [*range(1, count + 1)] * times for (word, at), count in lines.minutes.items()}
    found = counted(cluster, COUNTS), counted(cluster, WINDOWS)
    for have, must in zip(found, (words, minutes), strict=True):
        for key, counts in have.items():
            assert counts == must[key][: len(counts)], f"the counts of {key!r} must be 1, 2, 3 and so on"
    return found == (words, minutes)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    jars_or_skip()
    with Cluster(3, kafka=True, config={"group.initial.rebalance.delay.ms": 100}) as started:
        with raftlog.Admin(started.bootstrap) as admin:
            for topic in (LINES, COUNTS, WINDOWS):
                admin.create_topic(
                    topic, partitions=PARTITIONS, replication_factor=3, configs={"min.insync.replicas": "2"}
                )
        heard_everywhere(started)
        yield started


def test_kafka_streams_counts_exactly_over_kills_of_a_broker_and_of_the_program(
    cluster: Cluster, tmp_path: Path
) -> None:
    jars, tools = jars_or_skip(streams_jars), jars_or_skip()
    lines = Lines(cluster)
    program = WordCount(jars, cluster, tmp_path)

    def wait(times: int = 1) -> None:
        def done() -> bool:
            assert program.is_alive(), program.log.read_text()[-4_000:]
            return is_exact(cluster, lines, times)

        until(done, "each word is counted", within_s=TIMEOUT_S, pause_s=0.3)

    try:
        lines.send(500)
        wait()
        check_internal_topics(cluster)
        with raftlog.Admin(cluster.bootstrap) as admin:
            coordinator = admin.describe_group(APPLICATION).coordinator_id
        cluster.kill(coordinator)
        lines.send(500)
        wait()
        cluster.start(coordinator)
        program.kill()
        lines.send(500)
        program = WordCount(jars, cluster, tmp_path)
        wait()
        assert program.restored() >= sum(lines.words.values()) * 2 // 3, "its stores come from the changelogs"
        program.end(TIMEOUT_S)
        reset = subprocess.run(
            [
                *(*JVM, "-cp", f"{tools}/*", "org.apache.kafka.tools.StreamsResetter", "--force"),
                *("--bootstrap-server", cluster.kafka_bootstrap),
                *("--application-id", APPLICATION, "--input-topics", LINES),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert reset.returncode == 0, f"{reset.stdout}\n{reset.stderr}"
        with raftlog.Admin(cluster.bootstrap) as admin:
            assert not {REPARTITION, *CHANGELOGS} & {*admin.list_topics()}
        program = WordCount(jars, cluster, tmp_path / "after-the-reset")
        wait(times=2)
    finally:
        program.kill()


def check_internal_topics(cluster: Cluster) -> None:
    """Its topics are as it needs them, and the records that it has read are deleted from the repartition topic."""
    with raftlog.Admin(cluster.bootstrap) as admin:
        configs = admin.describe_topic_configs([REPARTITION, *CHANGELOGS])
        assert all(
            len(partition.replicas) == 3
            for name in (REPARTITION, *CHANGELOGS)
            for partition in admin.describe_topic(name).partitions
        )

        def value(topic: str, key: str) -> str:
            return configs[topic][key].value

        assert [value(REPARTITION, key) for key in ("cleanup.policy", "retention.ms")] == ["delete", "-1"]
        policies = [{*value(name, "cleanup.policy").split(",")} for name in CHANGELOGS]
        assert policies == [{"compact"}, {"compact", "delete"}]
        repartition = {raftlog.TopicPartition(REPARTITION, number): "earliest" for number in range(PARTITIONS)}
        until(
            lambda: any(each is not None and each.offset for each in admin.list_offsets(repartition).values()),
            "what was read is deleted",
            within_s=TIMEOUT_S,
            pause_s=0.2,
        )
