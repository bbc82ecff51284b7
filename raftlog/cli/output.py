"""How commands print: tables on a terminal, tab-separated lines into a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Row = Mapping[str, object]


class Output(StrEnum):
    """What `--output` takes."""

    TABLE = "table"
    JSON = "json"


BOOTSTRAP_DEFAULT = "127.0.0.1:9092"
BOOTSTRAP_VARIABLE = "RAFTLOG_BOOTSTRAP"

BootstrapOption = Annotated[
    str,
    typer.Option("--bootstrap", "-b", envvar=BOOTSTRAP_VARIABLE, metavar="HOST:PORT,...", help="Where the cluster is."),
]
OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="table: for people, tab-separated into a pipe; json: for programs."),
]


def print_json(value: object) -> None:
    """Print one JSON document on a line of its own."""
    print(json_text(value), flush=True)


def json_text(value: object) -> str:
    """Return JSON on one line, in ASCII where standard output takes no more than that."""
    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    return json.dumps(value, ensure_ascii=encoding != "utf8", default=str)


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return `1 record`, `2,000 records`; `many` is `one` with an s unless it is given."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def print_rows(rows: Sequence[Row], columns: Sequence[str], output: Output) -> None:
    """Print rows: a list of objects, a table, or a header and lines with tabs between the cells."""
    if output is Output.JSON:
        print_json([dict(row) for row in rows])
    elif sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            numeric = all(type(row.get(column)) is int for row in rows) and bool(rows)
            table.add_column(column.upper(), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        Console().print(table)
    else:
        print("\t".join(columns))
        for row in rows:
            print("\t".join(_cell(row.get(column)).replace("\t", " ") for column in columns))


def print_done(message: str, result: Row, output: Output) -> None:
    """Print what a command has done: a sentence, or as JSON its result."""
    if output is Output.JSON:
        print_json(dict(result))
    else:
        print(message)


def print_error(message: str) -> None:
    """Print an error on stderr: one line, and below it the quoted lines of a log where the error brings some."""
    first, *quoted = message.strip().splitlines() or [""]
    print("\n".join([f"error: {first}", *(f"  | {line}" for line in quoted)]), file=sys.stderr)


def print_note(message: str) -> None:
    """Print something that is not part of the result, on stderr."""
    print(message, file=sys.stderr, flush=True)


def confirmed(question: str) -> bool:
    """Ask whoever sits at the terminal; anything but y and yes is no.

    Raises:
        typer.BadParameter: nobody does: the command takes --yes then.
        KeyboardInterrupt: Ctrl-C.
    """
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask at; pass --yes to go on without being asked")
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def key_value_pairs(pairs: Sequence[str]) -> dict[str, str]:
    """Return what `KEY=VALUE` arguments say.

    Raises:
        typer.BadParameter: one without `=`.
    """
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{pair!r}: write KEY=VALUE, for example retention.ms=7d")
        parsed[key.strip()] = value.strip()
    return parsed


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)
