"""Results of a run: rows with a figure, its target, and whether it is met; as a table or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `met` is None where there is no target, only something to look at."""

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
        """Print the whole on standard output."""
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
