"""Results of a run: rows with a figure, its target, and whether it is met; as a table or JSON."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `met` is None without a target."""

    suite: str
    name: str
    figure: str
    target: str = ""
    met: bool | None = None


@dataclass(slots=True)
class Report:
    """All rows of a run."""

    rows: list[Row] = field(default_factory=list)

    def add(self, suite: str, name: str, figure: str, target: str = "", met: bool | None = None) -> None:
        """Add a row and show it at once on standard error."""
        row = Row(suite, name, figure, target, met)
        self.rows.append(row)
        verdict = "" if met is None else ("  met" if met else "  MISSED")
        Console(stderr=True, highlight=False).print(
            f"{suite:8} {name}: {figure}" + (f"  (target {target}){verdict}" if target else "")
        )

    def show(self, as_json: bool) -> None:
        """Print all rows on standard output."""
        if as_json:
            print(json.dumps([asdict(row) for row in self.rows], indent=1))
            return
        table = Table("suite", "what", "figure", "target", "")
        for row in self.rows:
            mark = "" if row.met is None else ("[green]met[/]" if row.met else "[red]missed[/]")
            table.add_row(row.suite, row.name, row.figure, row.target, mark)
        Console().print(table)

    @property
    def all_met(self) -> bool:
        """Whether no target was missed."""
        return all(row.met is not False for row in self.rows)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of measurements."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


_STEP = 1 << 21
_MOST_BYTES = 24 << 30


def touch_memory() -> float:
    """Touch three quarters of free memory, at most 24 GiB, and return the seconds: its first use in a VM is slow."""
    start = time.perf_counter()
    size = min(_MOST_BYTES, psutil.virtual_memory().free * 3 // 4) // _STEP * _STEP
    page = b"\1" * _STEP
    with mmap.mmap(-1, max(size, _STEP)) as memory:
        for position in range(0, size, _STEP):
            memory[position : position + _STEP] = page
    return time.perf_counter() - start
