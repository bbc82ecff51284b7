"""Tables for a terminal: as wide as it is, without a break inside of a name, a number or a word of a header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.table import Table

_GAP: Final = 2
_LEAST_ID: Final = 8


class Fitted(NamedTuple):
    """A table, how wide it is, and which columns there was no room for."""

    table: Table
    width: int
    left_out: list[str]


class _Column(NamedTuple):
    name: str
    cells: list[str]
    numeric: bool

    def natural(self) -> int:
        """How wide it is on one line."""
        return max(map(cell_len, (self.name, *self.cells)))

    def least(self) -> int:
        """How wide it has to be so that only spaces, and the underscores of the header, are broken at."""
        words = [word for text in (self.name.replace("_", " "), *self.cells) for word in text.split()]
        return max(map(cell_len, words), default=1)


def fitted(
    texts: Mapping[str, Sequence[str]], numeric: Iterable[str], width: int, optional: Sequence[str] = ()
) -> Fitted:
    """Return the table of these columns in `width`.

    Where that is too narrow, headers go over several lines, cells are broken at spaces, and at last columns among
    `optional` are left out, the last one first. What is too wide even so is as wide as it needs to be.
    """
    numbers = set(numeric)
    columns = [_Column(name.upper(), list(cells), name in numbers) for name, cells in texts.items()]
    left_out: list[str] = []
    for name in reversed(optional):
        if _total([column.least() for column in columns]) <= width:
            break
        if name in texts:
            left_out.append(name)
            columns = [column for column in columns if column.name != name.upper()]
    widths = [column.natural() for column in columns]
    least = [column.least() for column in columns]
    while _total(widths) > width and widths != least:
        widest = max(range(len(widths)), key=lambda each: widths[each] - least[each])
        widths[widest] -= 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, given in zip(columns, widths, strict=True):
        fits = cell_len(column.name) <= given
        table.add_column(
            column.name if fits else column.name.replace("_", " "),
            justify="right" if column.numeric else "left",
            width=given,
            overflow="fold",
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return Fitted(table, max(1, _total(widths)), [name for name in texts if name in left_out])


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Return by id the shortest beginning, of 8 characters at least, that no other one has."""
    known = set(ids)
    length = _LEAST_ID
    longest = max(map(len, known), default=0)
    while length < longest and len({each[:length] for each in known}) < len(known):
        length += 1
    return {each: each[:length] for each in known}
