"""The state that a broker finds again after a restart, and the files that it leaves alone."""

from __future__ import annotations

from pathlib import Path

from raftlog import Admin, Consumer, Producer
from raftlog.testing import Cluster

NAMES = (".new", ".delete", ".stray", "-", "a.b-1-2", "x" * 249)


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe([topic])
        return [record.value for record in consumer.poll(60)]


def test_topics_of_any_allowed_name_survive() -> None:
    with Cluster(nodes=1) as cluster:
        with Admin(cluster.bootstrap) as admin:
            for topic in NAMES:
                admin.create_topic(topic, timeout=60)
        with Producer(cluster.bootstrap) as producer:
            for topic in NAMES:
                producer.send(topic, b"kept in " + topic.encode()).result(60)
        cluster.stop(1)
        cluster.start(1)
        for topic in NAMES:
            assert values(cluster.bootstrap, topic) == [b"kept in " + topic.encode()]


def test_a_log_that_the_cluster_does_not_know_is_set_aside_and_its_name_is_free(tmp_path: Path) -> None:
    with Cluster(nodes=1, directory=tmp_path) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", timeout=60)
        with Producer(cluster.bootstrap) as producer:
            producer.send("t", b"old").result(60)
        log_dir = cluster.log_dir(1)
        cluster.stop(1)
        (log_dir / "t-0").rename(tmp_path / "kept-0")
        cluster.start(1)
        with Admin(cluster.bootstrap) as admin:
            admin.delete_topic("t")
        cluster.stop(1)
        (tmp_path / "kept-0").rename(log_dir / "t-0")  # as if the broker had been away while the topic was deleted
        cluster.start(1)
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", timeout=60)
        with Producer(cluster.bootstrap) as producer:
            producer.send("t", b"new").result(60)
        assert values(cluster.bootstrap, "t") == [b"new"]
        (stray,) = [path for path in log_dir.iterdir() if "stray" in path.name]
        assert sum(file.stat().st_size for file in stray.glob("*.log")) > 0, (
            "the log of the deleted topic must be set aside, not deleted"
        )
        cluster.stop(1)
        cluster.start(1)
        assert stray.is_dir()
        assert values(cluster.bootstrap, "t") == [b"new"]
