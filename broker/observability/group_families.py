"""What a broker shows of the groups that it coordinates. A round of `group_lag.py` is shown as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from broker.observability.broker_families import PREFIX, gauge
from broker.observability.group_lag import GroupFigures


class GroupFamilies:
    """A collector: lag by group and partition, members by group."""

    def __init__(self, figures: Callable[[], GroupFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        figures = self._figures()
        labels = ("group", "topic", "partition")
        records = GaugeMetricFamily(
            f"{PREFIX}group_lag_records", "Records that a group has yet to read and commit.", labels=labels
        )
        seconds = GaugeMetricFamily(
            f"{PREFIX}group_lag_seconds",
            "Seconds since there is more than what a group has committed; absent while that is not known.",
            labels=labels,
        )
        for lag in figures.lags:
            key = [lag.group, lag.topic, str(lag.partition)]
            records.add_metric(key, lag.records)
            if lag.seconds is not None:
                seconds.add_metric(key, lag.seconds)
        members = GaugeMetricFamily(
            f"{PREFIX}group_members", "Members of a group that is in this state.", labels=("group", "state")
        )
        for size in figures.sizes:
            members.add_metric([size.group, size.state], size.members)
        yield from (records, seconds, members)
        yield gauge("group_series_left_out", "Figures of groups here beyond what is shown.", figures.left_out)
