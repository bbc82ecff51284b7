"""How `./dev sim --hours` shows what came of its schedules so far: a table on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.simulation.hours import HEADINGS, Show, Summary

LINE_S = 10.0
LOG_COLUMNS = 120


@contextlib.contextmanager
def shown(summary: Summary, console: Console | None = None) -> Iterator[Show]:
    """Give what shows the summary now and then; on a terminal it stays in place until the end."""
    console = console or Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    console.print(f"seeds from {summary.seed} on")
    if console.is_terminal:
        with Live(console=console, refresh_per_second=2) as live:
            yield lambda summary: live.update(view(summary))
        return
    last_s = time.monotonic()

    def line(summary: Summary) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LINE_S:
            last_s = time.monotonic()
            console.print(summary.line(), highlight=False, soft_wrap=True)

    yield line
    console.print(_table(summary))


def view(summary: Summary) -> Group:
    """Return everything that is known so far."""
    failed = [Text(f"{each}\n  {each.job.command()}", style="red") for each in summary.failed]
    return Group(Text(summary.line()), _table(summary), Text(f"faults: {summary.faults()}", style="dim"), *failed)


def _table(summary: Summary) -> Table:
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in summary.rows():
        table.add_row(*row)
    return table
