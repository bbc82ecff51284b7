"""A row for each client: its operations as bars as long as they took, coloured by their outcome.

Of a client with few operations each is a bar. Of one with many, columns show how many ended when, and bars only those
that took long, or did not end well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from tests.support.history import colours
from tests.support.history.model import PLURALS, History, Kind, Operation, Outcome
from tests.support.history.rows import Row, height_of, label
from tests.support.history.scale import Scale, lanes, seconds
from tests.support.history.svg import Canvas, number

_BARS: Final = 1_800
"""So many bars for all clients together."""
_FEW: Final = 300
_MOST_CLIENTS: Final = 24
_ABOUT: Final = 120
_LANES: Final = 5
_LANE: Final = 4.0
_COLUMNS: Final = 16.0
"""How high the columns are."""
_COLUMN: Final = 3.0
_TIP_COLUMNS: Final = 4
"""So many columns have one tooltip."""
_VISIBLE: Final = 5.0
"""An operation that took so many pixels has a bar of its own."""
_ORDER: Final[tuple[Outcome, ...]] = ("ok", "unknown", "failed")


def rows(history: History, scale: Scale) -> list[Row]:
    """Return a row for each client, and for those above the most that are shown one together."""
    clients = sorted(history.clients.items(), key=lambda each: _natural(each[0]))
    if len(clients) > _MOST_CLIENTS:
        rest = [operation for _, own in clients[_MOST_CLIENTS - 1 :] for operation in own]
        clients = [*clients[: _MOST_CLIENTS - 1], (f"{len(clients) - _MOST_CLIENTS + 1} more clients", rest)]
    most = min(_FEW, _BARS // max(len(clients), 1))
    return [_ClientRow(name, own, scale, most) for name, own in clients]


def _natural(name: str) -> tuple[object, ...]:
    """Order producer-2 before producer-10."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isascii() and tail.isdigit() else (name, -1)


class _ClientRow(Row):
    def __init__(self, name: str, operations: Sequence[Operation], scale: Scale, most: int) -> None:
        self._name, self._operations, self._scale = name, operations, scale
        self._most = most
        self._is_few = len(operations) <= most
        self._bars = list(lanes(self._spans(), _LANES, 0.6)) if self._is_few else self._worst()
        used = 1 + max((lane for lane, *_ in self._bars), default=-1)
        self._above = used * _LANE
        self.height = max(26.0, self._above + (0 if self._is_few else _COLUMNS) + 2) + 8

    def _spans(self) -> list[tuple[float, float, Operation]]:
        """Return what may have a bar of its own."""
        spans = []
        for each in self._operations:
            begin, end = self._scale.x(each.begin_s), self._scale.x(each.end_s)
            if self._is_few or end - begin >= _VISIBLE or each.outcome != "ok":
                spans.append((begin, max(end, begin + 1.5), each))
        return spans

    def _worst(self) -> list[tuple[int, float, float, Operation]]:
        """Return those that did not end well, then those that took longest, each with a lane that is free there."""
        size = int(self._scale.right) + 2
        taken = [bytearray(size) for _ in range(_LANES)]
        found: list[tuple[int, float, float, Operation]] = []
        for begin, end, each in sorted(self._spans(), key=lambda span: (span[2].outcome == "ok", span[0] - span[1])):
            place = slice(int(begin), int(end) + 2)
            lane = next((lane for lane, pixels in enumerate(taken) if not any(pixels[place])), None)
            if lane is not None:
                taken[lane][place] = b"\1" * len(taken[lane][place])
                found.append((lane, begin, end, each))
                if len(found) == self._most:
                    break
        return found

    def paint(self, canvas: Canvas, y: float) -> None:
        label(canvas, y, self._name, self._said())
        scale = self._scale
        height = self.height - 8
        canvas.rect(scale.left, y, scale.right - scale.left, height, colours.TRACK, radius=2, more='fill-opacity=".6"')
        if not self._is_few:
            self._columns(canvas, y + height)
        shift = (height - self._above) / 2 if self._is_few else 1
        for lane, begin, end, each in self._bars:
            open_end = ' fill-opacity=".6" stroke="#b45309" stroke-dasharray="3 2" stroke-width=".6"'
            more = open_end if each.end_s is None else ""
            colour = colours.OUTCOMES[each.outcome]
            canvas.rect(begin, y + shift + lane * _LANE, end - begin, _LANE - 0.8, colour, self._tip(each), more=more)

    def _said(self) -> str:
        counts: Counter[str] = Counter()
        kinds: Counter[Kind] = Counter()
        for each in self._operations:
            counts[each.outcome] += each.count
            kinds[each.kind] += each.count
        took = sorted(each.end_s - each.begin_s for each in self._operations if each.end_s is not None)
        what = PLURALS[next(iter(kinds))] if len(kinds) == 1 else "operations"
        parts = [f"{counts.total():,} {what}"]
        parts += [f"{counts[each]:,} {each}" for each in ("unknown", "failed") if counts[each]]
        if took:
            parts.append(f"p99 {seconds(took[min(len(took) - 1, int(len(took) * 0.99))])}")
        return ", ".join(parts)

    def _tip(self, each: Operation) -> str:
        took = "no answer" if each.end_s is None else seconds(each.end_s - each.begin_s)
        where = "" if each.partition is None else f", partition {each.partition}"
        many = f" × {each.count}" if each.count > 1 else ""
        about = f"\n{each.about[:_ABOUT]}" if each.about else ""
        return f"{each.kind}{many}: {each.outcome}{where}\n{self._scale.since(each.begin_s)}, {took}{about}"

    def _columns(self, canvas: Canvas, bottom: float) -> None:
        scale = self._scale
        size = int((scale.right - scale.left) / _COLUMN) + 1
        columns: list[Counter[Outcome]] = [Counter() for _ in range(size)]
        slowest = [0.0] * size
        for each in self._operations:
            at = int((scale.x(each.begin_s if each.end_s is None else each.end_s) - scale.left) / _COLUMN)
            columns[at][each.outcome] += each.count
            took = 0.0 if each.end_s is None else each.end_s - each.begin_s
            slowest[at] = max(slowest[at], took)
        highest = height_of(column.total() for column in columns)
        data: dict[Outcome, list[str]] = {each: [] for each in _ORDER}
        for index, column in enumerate(columns):
            y = bottom
            for outcome in _ORDER:
                if column[outcome]:
                    least = 1.5 if outcome == "ok" else 3.0  # a single one that went wrong must be seen
                    height = max(least, min(1.0, column[outcome] / highest) * (_COLUMNS - 4))
                    x = scale.left + index * _COLUMN
                    data[outcome].append(f"M{number(x)} {number(y)}v-{number(height)}h2.6v{number(height)}z")
                    y -= height
        for outcome in _ORDER:
            canvas.path("".join(data[outcome]), colours.OUTCOMES[outcome])
        with canvas.group('fill="#fff" fill-opacity="0"'):
            for index in range(0, size, _TIP_COLUMNS):
                self._column_tip(canvas, bottom, index, columns[index : index + _TIP_COLUMNS], slowest)

    def _column_tip(
        self, canvas: Canvas, bottom: float, index: int, columns: Sequence[Counter[Outcome]], slowest: Sequence[float]
    ) -> None:
        counts = Counter[Outcome]()
        for column in columns:
            counts.update(column)
        if not counts:
            return
        at_s = self._scale.extent.begin_s + index * _COLUMN / self._scale.per_s
        told = ", ".join(f"{counts[each]:,} {each}" for each in _ORDER if counts[each])
        took = seconds(max(slowest[index : index + _TIP_COLUMNS]))
        x = self._scale.left + index * _COLUMN
        tip = f"{self._name}, around {self._scale.since(at_s)}: {told}; slowest {took}"
        canvas.hover(x, bottom - _COLUMNS, _COLUMN * _TIP_COLUMNS, _COLUMNS, tip)
