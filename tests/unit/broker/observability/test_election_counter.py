"""Leader changes, counted by who decides on them."""

from __future__ import annotations

from broker.observability.counters import Counters
from broker.observability.election_counter import ElectionCounter
from raftmeta.image import MetadataImage, partition_record
from tests.support.metadata import accept, cluster, create_topic, down, settled, up


def test_only_another_leader_of_a_partition_that_was_there_counts_and_only_at_the_active_controller() -> None:
    counters, active = Counters(), True
    image = cluster(3)
    counter = ElectionCounter(counters, lambda: active, image)

    def go_on(changed: MetadataImage) -> int:
        nonlocal image
        before, image = counters.leader_elections, changed
        counter(
            changed,
            [partition_record(topic.topic_id, part) for topic in changed.topics.values() for part in topic.partitions],
        )
        return counters.leader_elections - before

    made, _ = accept(image, create_topic("orders", 1, partitions=2, replication_factor=2))
    assert go_on(made) == 0, "new partitions"
    first = made.topic("orders")
    assert first is not None
    leader = first.partitions[0].leader
    moved = settled(down(image, leader))
    changed = sum(
        part.leader != before.leader and part.leader >= 0
        for part, before in zip(moved.topic("orders").partitions, first.partitions, strict=True)  # type: ignore[union-attr]
    )
    assert changed >= 1
    assert go_on(moved) == changed
    assert go_on(moved) == 0, "the same once more"
    active = False
    back = settled(up(image, leader))
    last = next(each for each in (1, 2, 3) if each != leader)
    go_on(back)
    assert go_on(settled(down(back, last))) == 0, "somebody else counts"
    counter(image, None)
    assert counters.unclean_leader_elections == 0
