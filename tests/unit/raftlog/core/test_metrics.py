"""Rates, averages and maxima of the last half minute, and the metrics that a client shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.metrics import LEAST_S, SLOT_S, SLOTS, ConsumerMetrics, Meter
from raftlog.prometheus import ClientCollector
from raftlog.types import TopicPartition


def test_what_is_older_than_half_a_minute_counts_in_the_total_only() -> None:
    meter = Meter(100.0)
    assert (meter.rate(100.0), meter.average(100.0), meter.largest(100.0)) == (0, 0, 0)
    meter.add(10, 100.0)
    meter.add(30, 104.0, count=3)
    assert meter.rate(108.0) == 40 / 8
    assert meter.frequency(108.0) == 4 / 8
    assert meter.average(108.0) == 10
    assert meter.largest(108.0) == 30
    meter.add(5, 125.0)
    assert meter.largest(129.0) == 30
    assert meter.largest(130.0) == 5, "the largest value from 100 s on must be forgotten after 30 s"
    assert meter.rate(130.0) == 5 / 20
    assert meter.rate(200.0) == 0
    assert (meter.total, meter.count) == (45, 5)


def test_the_first_values_make_no_enormous_rate() -> None:
    meter = Meter(50.0)
    meter.add(1, 50.001)
    assert meter.rate(50.002) == 1 / LEAST_S


@given(st.lists(st.tuples(st.floats(0, 12), st.floats(0, 1_000)), min_size=1, max_size=60))
def test_a_rate_is_that_of_the_last_20_to_30_seconds(steps: list[tuple[float, float]]) -> None:
    meter, now_s, added = Meter(0.0), 0.0, list[tuple[float, float]]()
    for passed_s, value in steps:
        now_s += passed_s
        meter.add(value, now_s)
        added.append((now_s, value))
    since_s = (now_s // SLOT_S - SLOTS + 1) * SLOT_S
    recent = [value for at_s, value in added if at_s >= since_s]
    assert meter.rate(now_s) * max(LEAST_S, now_s - max(0.0, since_s)) == pytest.approx(sum(recent))
    assert meter.average(now_s) == pytest.approx(sum(recent) / len(recent))
    assert meter.largest(now_s) == max(recent)
    assert meter.total == pytest.approx(sum(value for _, value in added))


def test_a_topic_that_is_called_as_a_partition_of_another_is_shown_beside_it() -> None:
    metrics = ConsumerMetrics(0.0)
    metrics.received("orders.0", 100, 1.0)
    metrics.handed_out("orders.0", 7, 1.0)

    class Client:
        def metrics(self) -> dict[str, dict[str, float]]:
            return metrics.show(2.0, lags={TopicPartition("orders", 0): 5}, assigned=2, connections=1)

    both = Client().metrics()["consumer-fetch-manager-metrics.orders.0"]
    assert (both["records-consumed-total"], both["records-lag"]) == (7, 5)
    samples = [sample for family in ClientCollector(c=Client()).collect() for sample in family.samples]
    [consumed] = [each for each in samples if each.name == "raftlog_consumer_topic_records_consumed_total"]
    assert consumed.labels == {"client": "c", "topic": "orders.0"}
    [lag] = [each for each in samples if each.name == "raftlog_consumer_partition_records_lag"]
    assert lag.labels == {"client": "c", "topic": "orders", "partition": "0"}
