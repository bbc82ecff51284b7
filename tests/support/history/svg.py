"""Writes SVG: a list of elements, with tooltips, without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Final

FONT: Final = "'Inter','Segoe UI','Helvetica Neue','DejaVu Sans',Arial,sans-serif"
_LONGEST_TIP: Final = 1_000
_GLYPH: Final = 0.56
"""The mean width of a glyph, in font sizes."""


def number(value: float) -> str:
    """Return a coordinate, to a tenth of a pixel."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def width_of(text: str, size: float) -> float:
    """Return about how wide a text is."""
    return len(text) * size * _GLYPH


class Canvas:
    """Elements in the order in which they are painted. Everything that comes in is text, and escaped here."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        tip: str = "",
        radius: float = 0,
        more: str = "",
    ) -> None:
        """A rectangle; `more` are attributes as they are."""
        rounded = f' rx="{number(radius)}"' if radius else ""
        start = f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(width, 0.1))}" height="{number(height)}"'
        self._element(f'{start} fill="{fill}"{rounded}{f" {more}" if more else ""}', "rect", tip)

    def hover(self, x: float, y: float, width: float, height: float, tip: str) -> None:
        """A rectangle that has the fill of its group, and a tooltip."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._element(f"<rect {place}", "rect", tip)

    def extend(self, other: Canvas) -> None:
        """Everything of another one, on top."""
        self._parts += other._parts

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, more: str = "") -> None:
        """A straight line."""
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self._parts.append(f'<line {ends} stroke="{stroke}" stroke-width="{width:g}"{f" {more}" if more else ""}/>')

    def path(self, data: str, fill: str, more: str = "") -> None:
        """A path of commands."""
        if data:
            self._parts.append(f'<path d="{data}" fill="{fill}"{f" {more}" if more else ""}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 11,
        fill: str = "#334155",
        anchor: str = "start",
        weight: int = 400,
        tip: str = "",
        more: str = "",
    ) -> None:
        """A line of text whose base line begins, has its middle or ends at a point."""
        style = f'font-size="{size:g}" fill="{fill}"'
        style += "" if anchor == "start" else f' text-anchor="{anchor}"'
        style += "" if weight == 400 else f' font-weight="{weight}"'
        style += f" {more}" if more else ""
        shown = f"<title>{escape(_printable(tip[:_LONGEST_TIP]))}</title>" if tip else ""
        self._parts.append(f'<text x="{number(x)}" y="{number(y)}" {style}>{shown}{escape(_printable(text))}</text>')

    @contextmanager
    def group(self, attributes: str) -> Iterator[None]:
        """Elements with the same attributes."""
        self._parts.append(f"<g {attributes}>")
        yield
        self._parts.append("</g>")

    def _element(self, start: str, name: str, tip: str) -> None:
        end = f"><title>{escape(_printable(tip[:_LONGEST_TIP]))}</title></{name}>" if tip else "/>"
        self._parts.append(start + end)

    def document(self, width: float, height: float, title: str, definitions: str = "") -> str:
        """Return the file."""
        size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">'
        body = "\n".join(self._parts)
        return f"{head}\n<title>{escape(_printable(title))}</title>\n<defs>{definitions}</defs>\n{body}\n</svg>\n"


def _printable(text: str) -> str:
    """Return a text without what XML does not allow."""
    return "".join(each if _allowed(each) else "\ufffd" for each in text)


def _allowed(each: str) -> bool:
    return each in "\n\t" or (each.isprintable() and each not in "\ufffe\uffff")
