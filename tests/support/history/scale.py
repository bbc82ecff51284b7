"""From seconds to pixels, and the ticks of an axis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Final, TypeVar

from tests.support.history.model import Window
from tests.support.history.svg import width_of

T = TypeVar("T")
_STEPS_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400)


@dataclass(frozen=True)
class Scale:
    """`extent` lies between the pixels `left` and `right`."""

    extent: Window
    left: float
    right: float

    @property
    def per_s(self) -> float:
        """Pixels a second."""
        return (self.right - self.left) / max(self.extent.length_s, 1e-6)

    def x(self, at_s: float | None) -> float:
        """Return where a moment is; None is the end."""
        if at_s is None:
            return self.right
        return min(max(self.left + (at_s - self.extent.begin_s) * self.per_s, self.left), self.right)

    def since(self, at_s: float | None) -> str:
        """Return how long after the begin a moment was."""
        return "the end" if at_s is None else f"{at_s - self.extent.begin_s:.3f} s"

    def ticks(self, apart: float = 80) -> list[tuple[float, str]]:
        """Return places and labels, at least so many pixels apart."""
        step_s = next((each for each in _STEPS_S if each * self.per_s >= apart), _STEPS_S[-1])
        count = ceil(self.extent.length_s / step_s)
        return [(self.left + index * step_s * self.per_s, _label(index * step_s, step_s)) for index in range(count)]


def _label(at_s: float, step_s: float) -> str:
    if step_s >= 60:
        hours, minutes = divmod(round(at_s / 60), 60)
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
    if at_s >= 60:
        minutes, seconds = divmod(round(at_s), 60)
        return f"{minutes}:{seconds:02}" if step_s >= 1 else f"{at_s:g} s"
    return f"{round(at_s, 2):g} s"


def seconds(length_s: float) -> str:
    """Return a length of time for people."""
    if length_s < 0.1:
        return f"{length_s * 1000:.1f} ms"
    if length_s < 10:
        return f"{length_s:.2f} s"
    return f"{length_s:.1f} s" if length_s < 120 else f"{int(length_s // 60)} min {int(length_s % 60)} s"


def lanes(
    spans: Iterable[tuple[float, float, T]], most: int, apart: float = 1.0
) -> Iterable[tuple[int, float, float, T]]:
    """Yield spans by their begin, each with the first lane that is free; those without one are left out."""
    free = [float("-inf")] * most
    for begin, end, what in sorted(spans, key=lambda each: each[0]):
        for lane, since in enumerate(free):
            if since <= begin:
                free[lane] = end + apart
                yield lane, begin, end, what
                break


def fits(text: str, size: float, width: float) -> bool:
    """Whether a text fits into so many pixels."""
    return width_of(text, size) + 4 <= width
