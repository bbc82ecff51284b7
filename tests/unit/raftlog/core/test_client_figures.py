"""What a client shows of what it has counted."""

from __future__ import annotations

from raftlog._core.client_figures import ConsumerFigures
from raftlog.prometheus import ClientCollector
from raftlog.types import TopicPartition


def test_a_topic_that_is_called_as_a_partition_of_another_is_shown_beside_it() -> None:
    figures = ConsumerFigures(0.0)
    figures.received("orders.0", 100, 1.0)
    figures.handed_out("orders.0", 7, 1.0)

    class Client:
        def metrics(self) -> dict[str, dict[str, float]]:
            return figures.show(2.0, lags={TopicPartition("orders", 0): 5}, assigned=2, connections=1)

    both = Client().metrics()["consumer-fetch-manager-metrics.orders.0"]
    assert (both["records-consumed-total"], both["records-lag"]) == (7, 5)
    samples = [sample for family in ClientCollector(c=Client()).collect() for sample in family.samples]
    [consumed] = [each for each in samples if each.name == "raftlog_consumer_topic_records_consumed_total"]
    assert consumed.labels == {"client": "c", "topic": "orders.0"}
    [lag] = [each for each in samples if each.name == "raftlog_consumer_partition_records_lag"]
    assert lag.labels == {"client": "c", "topic": "orders", "partition": "0"}
