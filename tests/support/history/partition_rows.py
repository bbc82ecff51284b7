"""A row for the cluster and one for each partition: how many writes were acknowledged when, and where none was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.support.history import colours
from tests.support.history.availability import CLUSTER, Outage, no_majority
from tests.support.history.model import History, Operation, Window
from tests.support.history.rows import Row, height_of, label
from tests.support.history.scale import Scale, seconds
from tests.support.history.svg import Canvas, number, width_of

_HEIGHT: Final = 26.0
_COLUMN: Final = 2.0
_MOST: Final = 12
"""Of more partitions those with the longest outages are shown."""
_MOST_OUTAGES: Final = 80
_NAMED_S: Final = 0.5
"""Shorter outages have no label."""


def rows(history: History, scale: Scale, found: Sequence[Outage]) -> list[Row]:
    """Return the cluster's row and the partitions', with the outages that were found; none if nobody wrote."""
    writes = [each for each in history.operations if each.kind in history.writes]
    if not writes:
        return []
    excused = no_majority(history)
    partitions = {each.partition for each in writes if each.partition is not None}
    longest_s: dict[int | None, float] = {}
    for each in found:
        longest_s[each.partition] = max(longest_s.get(each.partition, 0.0), each.window.length_s)
    worst = sorted(partitions, key=lambda partition: -longest_s.get(partition, 0.0))
    shown: list[int | None] = [CLUSTER, *sorted(worst[:_MOST])] if partitions else [CLUSTER]
    return [
        _PartitionRow(
            partition,
            [each for each in writes if partition is CLUSTER or each.partition in (partition, None)],
            [each for each in found if each.partition == partition],
            excused,
            scale,
        )
        for partition in shown
    ]


class _PartitionRow(Row):
    height = _HEIGHT + 6

    def __init__(
        self,
        partition: int | None,
        writes: Sequence[Operation],
        found: Sequence[Outage],
        excused: Sequence[Window],
        scale: Scale,
    ) -> None:
        self._partition, self._writes, self._outages = partition, writes, found
        self._excused, self._scale = excused, scale

    def paint(self, canvas: Canvas, y: float) -> None:
        scale = self._scale
        acknowledged = sum(each.count for each in self._writes if each.outcome == "ok")
        name = "cluster" if self._partition is CLUSTER else f"partition {self._partition}"
        rate = acknowledged / max(scale.extent.length_s, 1e-6)
        label(canvas, y, name, f"{acknowledged:,} acknowledged, {rate:,.0f}/s")
        canvas.rect(scale.left, y, scale.right - scale.left, _HEIGHT, colours.TRACK, radius=2, more='fill-opacity=".6"')
        for window in self._excused:
            x, end = scale.x(window.begin_s), scale.x(window.end_s)
            tip = f"no majority possible for {seconds(window.length_s)}, from {scale.since(window.begin_s)}"
            canvas.rect(x, y, end - x, _HEIGHT, colours.EXCUSED, tip)
        self._columns(canvas, y)
        worst = sorted(self._outages, key=lambda each: -each.window.length_s)[:_MOST_OUTAGES]
        for each in worst:
            self._outage(canvas, y, each)
        self._lengths(canvas, y, worst)

    def _columns(self, canvas: Canvas, y: float) -> None:
        count = int((self._scale.right - self._scale.left) / _COLUMN) + 1
        columns = [0] * count
        for each in self._writes:
            if each.outcome == "ok" and each.end_s is not None:
                columns[int((self._scale.x(each.end_s) - self._scale.left) / _COLUMN)] += each.count
        highest = height_of(columns)
        data, bottom = [], y + _HEIGHT
        for index, value in enumerate(columns):
            if value:
                height = max(1.5, (_HEIGHT - 3) * min(1.0, value / highest))
                x = self._scale.left + index * _COLUMN
                data.append(f"M{number(x)} {number(bottom)}v-{number(height)}h{number(_COLUMN)}v{number(height)}z")
        canvas.path("".join(data), colours.RATE)

    def _outage(self, canvas: Canvas, y: float, outage: Outage) -> None:
        window, scale = outage.window, self._scale
        x, end = scale.x(window.begin_s), scale.x(window.end_s)
        width = max(end - x, 1.5)
        tip = f"{outage}, {scale.since(window.begin_s)} to {scale.since(window.end_s)}"
        more = f'fill-opacity=".22" stroke="{colours.OUTAGE}" stroke-width=".8"'
        canvas.rect(x, y + 0.5, width, _HEIGHT - 1, colours.OUTAGE, tip, more=more)

    def _lengths(self, canvas: Canvas, y: float, worst: Sequence[Outage]) -> None:
        """Write down how long outages were, the longest first, as far as there is room."""
        halo = 'stroke="#ffffff" stroke-width="3" stroke-opacity=".9" paint-order="stroke"'
        taken: list[tuple[float, float]] = []
        for each in worst:
            if each.window.length_s < _NAMED_S:
                break
            text = seconds(each.window.length_s)
            half = width_of(text, 10.5) / 2 + 2
            middle = (self._scale.x(each.window.begin_s) + self._scale.x(each.window.end_s)) / 2
            middle = min(max(middle, self._scale.left + half), self._scale.right - half)
            if all(middle + half < begin or middle - half > end for begin, end in taken):
                taken.append((middle - half, middle + half))
                canvas.text(middle, y + 17, text, 10.5, colours.BAD, "middle", 700, tip=str(each), more=halo)
