"""A row for each node: whether it is alive, paused or cut off, which partitions it leads, and when it controls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from tests.support.history import colours
from tests.support.history.model import History, Ill, Reign
from tests.support.history.rows import Row, label
from tests.support.history.scale import Scale, fits
from tests.support.history.svg import Canvas

_BAR: Final = 16.0
_STRIPE: Final = 4.0
_MOST_STRIPES: Final = 8
_FILLS: Final = {"dead": colours.DEAD, "paused": colours.PAUSED, "hampered": colours.HAMPERED}


def rows(history: History, scale: Scale) -> list[Row]:
    """Return them in the order of the nodes."""
    led = sorted({each.partition for each in history.reigns if each.partition is not None})[:_MOST_STRIPES]
    return [_NodeRow(history, node, scale, led) for node in history.nodes]


class _NodeRow(Row):
    def __init__(self, history: History, node: int, scale: Scale, led: Sequence[int]) -> None:
        self._history, self._node, self._scale, self._led = history, node, scale, led
        self.height = _BAR + _STRIPE * len(led) + 14

    def paint(self, canvas: Canvas, y: float) -> None:
        history, node, scale = self._history, self._node, self._scale
        label(canvas, y + 4, f"node {node}", self._said() or ("has a vote" if node in history.voters else ""))
        canvas.rect(scale.left, y + 4, scale.right - scale.left, _BAR, colours.ALIVE, f"node {node}", radius=3)
        self._cuts(canvas, y + 4)
        for each in sorted(history.conditions, key=lambda each: each.ill != "hampered"):
            if each.node == node:
                self._mark(canvas, y + 4, each.begin_s, each.end_s, _FILLS[each.ill], each.ill)
        for reign in history.reigns:
            if reign.node == node:
                self._reign(canvas, y + 4, reign)

    def _said(self) -> str:
        ills = [each.ill for each in self._history.conditions if each.node == self._node]
        names: dict[Ill, str] = {"dead": "down", "paused": "paused", "hampered": "hampered"}
        return ", ".join(f"{names[ill]} {count}×" for ill in names if (count := ills.count(ill)))

    def _mark(self, canvas: Canvas, y: float, begin_s: float, end_s: float | None, fill: str, what: str) -> None:
        x, end = self._scale.x(begin_s), self._scale.x(end_s)
        width = max(end - x, 1.5)
        tip = f"node {self._node} {what}: {self._scale.since(begin_s)} to {self._scale.since(end_s)}"
        canvas.rect(x, y, width, _BAR, fill, tip)
        if fits(what, 10, width):
            ink = "#ffffff" if fill == colours.DEAD else colours.INK
            halo = "" if fill == colours.DEAD else 'stroke="#ffffff" stroke-width="3" paint-order="stroke"'
            canvas.text(x + width / 2, y + 12, what, 10, ink, "middle", 600, more=halo)

    def _cuts(self, canvas: Canvas, y: float) -> None:
        """Cut off where it is that from everybody, both ways; else some of its links are."""
        own = [each for each in self._history.cuts if self._node in (each.sender, each.receiver)]
        moments = sorted(
            {each.begin_s for each in own}
            | {self._scale.extent.end_s if each.end_s is None else each.end_s for each in own}
        )
        all_links = 2 * (len(self._history.nodes) - 1)
        spans: list[tuple[float, float, int]] = []
        for begin_s, end_s in pairwise(moments):
            cut = {
                (each.sender, each.receiver)
                for each in own
                if each.begin_s <= begin_s and (each.end_s is None or each.end_s >= end_s)
            }
            if spans and spans[-1][1] == begin_s and spans[-1][2] == len(cut):
                spans[-1] = spans[-1][0], end_s, len(cut)
            elif cut:
                spans.append((begin_s, end_s, len(cut)))
        for begin_s, end_s, count in spans:
            whole = count >= all_links
            what = "cut off" if whole else f"{count} of {all_links} links cut"
            self._mark(canvas, y, begin_s, end_s, colours.CUT if whole else colours.HALF_CUT, what)

    def _reign(self, canvas: Canvas, y: float, reign: Reign) -> None:
        x, end = self._scale.x(reign.begin_s), self._scale.x(reign.end_s)
        span = f"{self._scale.since(reign.begin_s)} to {self._scale.since(reign.end_s)}"
        if reign.partition is None:
            tip = f"node {self._node} is the controller: {span}"
            canvas.rect(x, y - 3, max(end - x, 1), 3, colours.CONTROLLER, tip)
        elif reign.partition in self._led:
            lane = self._led.index(reign.partition)
            tip = f"node {self._node} leads partition {reign.partition}: {span}"
            fill = colours.LEADERS[reign.partition % len(colours.LEADERS)]
            canvas.rect(x, y + _BAR + 2 + _STRIPE * lane, max(end - x, 1), _STRIPE - 1, fill, tip)
