"""The drawing of a history: faults as bands over nodes, partitions and clients, with a verdict above.

Its size depends on how many nodes, partitions and clients there are, and hardly on how many operations: of a client
with many, columns show how many ended when, and bars only those that took long or went wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import wrap
from typing import Final

from tests.support.history import client_rows, colours, node_rows, partition_rows
from tests.support.history.availability import Outage, no_majority, outages
from tests.support.history.model import PLURALS, History, Kind, Problem, Window
from tests.support.history.scale import Scale, lanes, seconds
from tests.support.history.svg import Canvas, width_of
from tests.support.history.verdict import summary

WIDTH: Final = 1360.0
GUTTER: Final = 216.0
MARGIN: Final = 24.0
_LABEL_LANES: Final = 4
_LABEL: Final = 10.5
_LINES: Final = 12
"""So many lines say what is wrong."""


def timeline(history: History, problems: Sequence[Problem] = (), failure: str | None = None) -> str:
    """Return a self-contained SVG. `failure`: why the run ended early, or what was asserted in vain."""
    extent = history.extent
    extent = Window(extent.begin_s, max(extent.end_s, extent.begin_s + 0.001))
    scale = Scale(extent, GUTTER, WIDTH - MARGIN)
    canvas, below = Canvas(), Canvas()
    found = outages(history)
    y = _head(canvas, history, found, problems, failure)
    names = _lane_names(history, scale)
    band_top = y + 4
    y = band_top + 14 * (1 + max((lane for lane, *_ in names), default=-1)) + 6
    for section, rows in (
        ("Nodes", node_rows.rows(history, scale)),
        ("Writes acknowledged", partition_rows.rows(history, scale, found)),
        ("Clients", client_rows.rows(history, scale)),
    ):
        if rows:
            y = _section(below, section, y + 10)
            for row in rows:
                row.paint(below, y)
                y += row.height
    bottom = y + 6
    _grid(canvas, scale, band_top, bottom)
    _bands(canvas, history, scale, names, band_top, bottom)
    canvas.extend(below)
    y = _legend(canvas, bottom + 40)
    y = _wrong(canvas, problems, failure, y)
    final = Canvas()
    final.rect(0, 0, WIDTH, y, colours.PAPER)
    final.extend(canvas)
    return final.document(WIDTH, y, history.title, colours.DEFINITIONS)


def _head(
    canvas: Canvas, history: History, found: Sequence[Outage], problems: Sequence[Problem], failure: str | None
) -> float:
    sound = not problems and failure is None
    told = "sound" if sound else summary(problems) or "failed"
    told = told if width_of(told, 13) < 560 else f"{len(problems)} problems"
    badge = width_of(told, 13) + 44
    title = _cut(history.title, 19, WIDTH - 3 * MARGIN - badge)
    canvas.text(MARGIN, 38, title, 19, colours.INK, weight=700, tip=history.title)
    canvas.rect(WIDTH - MARGIN - badge, 18, badge, 28, colours.GOOD if sound else colours.BAD, radius=14)
    mark = "✓" if sound else "✗"
    canvas.text(WIDTH - MARGIN - badge / 2, 37, f"{mark}  {told}", 13, "#ffffff", "middle", 700)
    canvas.text(MARGIN, 60, _facts(history, found), 12, colours.SOFT)
    return 72


def _facts(history: History, found: Sequence[Outage]) -> str:
    counts: Counter[str] = Counter()
    kinds: Counter[Kind] = Counter()
    for each in history.operations:
        counts[each.outcome] += each.count
        kinds[each.kind] += each.count
    longest = max(found, key=lambda each: each.window.length_s, default=None)
    lost_s = sum(each.length_s for each in no_majority(history))
    parts = [
        f"{seconds(history.extent.length_s)}",
        ", ".join(f"{count:,} {PLURALS[kind]}" for kind, count in kinds.most_common()) or "no operations",
        f"{counts['ok']:,} ok · {counts['failed']:,} failed · {counts['unknown']:,} unknown",
        f"{len(history.faults)} fault{'s' * (len(history.faults) != 1)}",
    ]
    if longest is not None:
        where = "the whole cluster" if longest.partition is None else f"partition {longest.partition}"
        parts.append(f"longest outage {seconds(longest.window.length_s)} ({where})")
    if lost_s > 0.05:
        parts.append(f"no majority for {seconds(lost_s)}")
    return "   |   ".join(parts)


def _section(canvas: Canvas, name: str, y: float) -> float:
    canvas.text(MARGIN, y + 13, name.upper(), 10, colours.SOFT, weight=700, more='letter-spacing="1"')
    canvas.line(MARGIN, y + 19, WIDTH - MARGIN, y + 19, colours.RULE)
    return y + 25


def _grid(canvas: Canvas, scale: Scale, top: float, bottom: float) -> None:
    for x, label in scale.ticks():
        canvas.line(x, top, x, bottom + 4, colours.GRID)
        canvas.text(x, bottom + 18, label, 10.5, colours.SOFT, "middle" if x > scale.left else "start")
    canvas.line(scale.left, bottom, scale.right, bottom, colours.RULE)


def _lane_names(history: History, scale: Scale) -> list[tuple[int, float, float, int]]:
    """Return which lane the label of which fault is in, and where; the others have tooltips only."""
    wanted = []
    for index, each in enumerate(history.faults):
        begin, width = scale.x(each.begin_s), width_of(_name(history, index), _LABEL) + 6
        begin = min(begin, scale.right - width)
        wanted.append((begin, begin + width, index))
    return list(lanes(wanted, _LABEL_LANES, 4))


def _name(history: History, index: int) -> str:
    fault = history.faults[index]
    targets = f" ({', '.join(str(each) for each in fault.targets)})" if fault.targets else ""
    return f"{fault.name.replace('_', ' ')}{targets}"


def _bands(
    canvas: Canvas,
    history: History,
    scale: Scale,
    names: Sequence[tuple[int, float, float, int]],
    top: float,
    bottom: float,
) -> None:
    edge = 0.55 if len(history.faults) < 40 else 0.15
    for index, each in enumerate(history.faults):
        x, end = scale.x(each.begin_s), scale.x(each.end_s)
        length = "" if each.end_s is None else f", {seconds(each.end_s - each.begin_s)}"
        tip = f"{_name(history, index)}: {scale.since(each.begin_s)} to {scale.since(each.end_s)}{length}"
        canvas.rect(x, top, max(end - x, 1.5), bottom - top, colours.FAULT, tip, more='fill-opacity=".13"')
        canvas.line(x, top, x, bottom, colours.FAULT, 1, f'stroke-opacity="{edge:g}"')
    for lane, begin, _, index in names:
        canvas.text(begin + 3, top + 11 + 14 * lane, _name(history, index), _LABEL, colours.FAULT_INK, weight=600)


def _legend(canvas: Canvas, y: float) -> float:
    x = MARGIN
    for row in colours.LEGEND:
        x = MARGIN
        for fill, label in row:
            if label.startswith("#"):
                canvas.text(x, y + 10, label[1:], 10.5, colours.SOFT, weight=700)
                x += width_of(label, 10.5) + 14
                continue
            canvas.rect(x, y + 1, 20, 10, fill, radius=2)
            canvas.text(x + 26, y + 10, label, 10.5, colours.INK)
            x += 26 + width_of(label, 10.5) + 18
        y += 19
    return y + 6


def _wrong(canvas: Canvas, problems: Sequence[Problem], failure: str | None, y: float) -> float:
    lines = [(f"{each.name}  {each.what}", str(each)) for each in problems[:_LINES]]
    if len(problems) > _LINES:
        lines.append((f"and {len(problems) - _LINES} more", ""))
    if failure is not None:
        told = [line for part in failure.splitlines()[:_LINES] for line in wrap(part, 200)]
        lines += [(line, failure) for line in told[:_LINES]]
    if not lines:
        return y + 6
    canvas.rect(MARGIN, y, WIDTH - 2 * MARGIN, 16 * len(lines) + 36, "#fef2f2", radius=6, more='stroke="#fecaca"')
    canvas.text(MARGIN + 14, y + 20, "What is wrong", 12, colours.BAD, weight=700)
    for index, (line, tip) in enumerate(lines):
        shown = _cut(line, 11, WIDTH - 2 * MARGIN - 28)
        canvas.text(MARGIN + 14, y + 38 + 16 * index, shown, 11, colours.INK, tip=tip if tip != shown else "")
    return y + 16 * len(lines) + 52


def _cut(text: str, size: float, width: float) -> str:
    most = int(width / width_of("x", size))
    return text if len(text) <= most else text[: most - 1] + "…"
