"""How commands print: tables on a terminal, tab-separated lines into a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from raftlog._core.words import counted as counted  # a part of how commands print
from raftlog.cli.tables import fitted, short_ids

Row = Mapping[str, object]


class Output(StrEnum):
    """What `--output` takes."""

    TABLE = "table"
    JSON = "json"


_NOTHING = ("", "-")
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


def print_rows(
    rows: Sequence[Row],
    columns: Sequence[str],
    output: Output,
    *,
    ids: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print rows: a list of objects, a table, or a header and lines with tabs between the cells.

    The table of a terminal has `ids` shortened as far as they stay different, and of the columns `optional` those that
    have something in them, and for which there is room, the first ones first.
    """
    if output is Output.JSON:
        print_json([dict(row) for row in rows])
    elif sys.stdout.isatty():
        _print_table(rows, columns, ids, optional)
    else:
        print("\t".join(columns))
        for row in rows:
            print("\t".join(_cell(row.get(column)).replace("\t", " ") for column in columns))


def _print_table(rows: Sequence[Row], columns: Sequence[str], ids: Sequence[str], optional: Sequence[str]) -> None:
    values = {column: [row.get(column) for row in rows] for column in columns}
    texts: dict[str, list[str]] = {}
    for column, found in values.items():
        texts[column] = [_cell(value) for value in found]
        if column in optional and all(text in _NOTHING for text in texts[column]):
            del texts[column]
        elif column in ids:
            short = short_ids(str(value) for value in found if value is not None)
            texts[column] = [short.get(text, text) for text in texts[column]]
    console = Console()
    table, width, left_out = fitted(
        texts, [name for name in texts if _is_numeric(values[name])], console.width, optional
    )
    console.width = max(console.width, width)
    console.print(table, soft_wrap=False)
    if left_out:
        print_note(f"the terminal is too narrow for {', '.join(left_out)}; --output json has everything")


def _is_numeric(values: Sequence[object]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(type(value) in (int, float) for value in known)


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


def confirmed(question: str, option: str = "--yes") -> bool:
    """Ask whoever sits at the terminal; anything but y and yes is no.

    Raises:
        typer.BadParameter: nobody does: the command takes this option then.
        KeyboardInterrupt: Ctrl-C.
    """
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"there is no terminal to ask at; pass {option} to go on without being asked")
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
