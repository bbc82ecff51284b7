"""What all rows of a timeline have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

from tests.support.history import colours
from tests.support.history.svg import Canvas, width_of

LABEL_X: Final = 24.0
_LABEL_WIDTH: Final = 186.0
_TAIL: Final = 12
"""Names differ at their ends."""


class Row(ABC):
    """`height`: in pixels, with what is free below it."""

    height: float

    @abstractmethod
    def paint(self, canvas: Canvas, y: float) -> None:
        """Paint it below `y`."""


def label(canvas: Canvas, y: float, name: str, more: str = "") -> None:
    """Write what a row is about into the gutter, and a line of small print below it."""
    canvas.text(LABEL_X, y + 11, _shortened(name, 12, _TAIL), 12, colours.INK, weight=600, tip=name)
    if more:
        canvas.text(LABEL_X, y + 23, _shortened(more, 9.5), 9.5, colours.SOFT, tip=more)


def height_of(columns: Iterable[int]) -> float:
    """Return what a column as high as its row stands for: a burst after a fault must not flatten the rest."""
    there = sorted(each for each in columns if each)
    return min(2.5 * there[len(there) // 2], there[-1]) if there else 1.0


def _shortened(text: str, size: float, tail: int = 0) -> str:
    """Return as much of a text as there is room for; so many glyphs of its end stay."""
    most = int(_LABEL_WIDTH / width_of("x", size))
    return text if len(text) <= most else text[: most - 1 - tail] + "…" + text[len(text) - tail :]
