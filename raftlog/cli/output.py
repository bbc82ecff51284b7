"""How commands print: tables on a terminal, tab-separated lines into a pipe, JSON for programs.

A terminal's table is as wide as the terminal, without a break inside a name, a number or a word of a header. Also
here: commands over several ids, answers that the quorum confirms, and an orderly end on SIGTERM.
"""

from __future__ import annotations

import difflib
import json
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

import raftlog
from raftlog.errors import GroupIdNotFound, RaftlogError, RetriableError, TransactionalIdNotFound

T = TypeVar("T")


def refusals(ids: Iterable[str], do: Callable[[str], object]) -> dict[str, str | None]:
    """Call `do` with each id once, whatever happens to the others; return each id's error message, None: success."""
    found: dict[str, str | None] = {}
    for each in dict.fromkeys(ids):
        try:
            do(each)
        except RaftlogError as error:
            found[each] = str(error)
        else:
            found[each] = None
    return found


def tell(found: dict[str, str | None], done: str, sentence: Callable[[str], str], what: str, output: Output) -> None:
    """Print the result for each id, from `refusals`. `done`: the action's past participle; `what`: the kind of id.

    Raises:
        typer.Exit: with code 1 when an id was refused.
    """
    refused = {each: why for each, why in found.items() if why is not None}
    if output is Output.JSON:
        print_json({done: [each for each in found if each not in refused], "refused": refused})
    else:
        for each in found:
            if each not in refused:
                print(sentence(each))
    for each, why in refused.items():
        print_error(f"not {done}: {why}" if each in why else f"{what}{each} was not {done}: {why}")
    if refused:
        raise typer.Exit(1)


def described(ids: Iterable[str], describe: Callable[[str], T]) -> tuple[list[T], list[RaftlogError]]:
    """Return the descriptions of groups or transactions, and the errors for unknown ids.

    Raises:
        GroupIdNotFound, TransactionalIdNotFound: all ids are unknown.
    """
    found: list[T] = []
    absent: list[RaftlogError] = []
    for each in dict.fromkeys(ids):
        try:
            found.append(describe(each))
        except (GroupIdNotFound, TransactionalIdNotFound) as error:
            absent.append(error)
    if not found:
        raise absent.pop(0)
    return found, absent


def check_complete(what: str, missing: Iterable[RaftlogError], absent: Iterable[RaftlogError] = ()) -> None:
    """Print a note for each reason why a list of `what` may be incomplete, and the errors for unknown ids.

    Raises:
        typer.Exit: with code 1 if there was any.
    """
    notes = [f"note: the list of {what} may be incomplete: {reason}" for reason in dict.fromkeys(map(str, missing))]
    for note in notes:
        print_note(note)
    errors = [str(error) for error in absent]
    for error in errors:
        print_error(error)
    if notes or errors:
        raise typer.Exit(1)


def checked_states(known: Collection[str]) -> Callable[[list[str] | None], list[str] | None]:
    """Return the callback of a `--state` option, which returns the states in lower case or raises BadParameter."""

    def check(states: list[str] | None) -> list[str] | None:
        for state in states or ():
            if state.lower() not in known:
                raise typer.BadParameter(f"unknown state {state!r}; the states are {', '.join(known)}")
        return [state.lower() for state in states] if states else None

    return check


PATIENCE_S: Final = 4.0
"""How long a command waits for the quorum's linearizable answer."""


def is_agreed(admin: raftlog.Admin) -> bool:
    """Ask the quorum, so that this client's next requests see every change that was acknowledged before.

    If the quorum does not answer, it prints a note on stderr that says which node's metadata is shown instead, and why,
    and returns False. The command then ends with exit code 1.
    """
    try:
        admin.describe_cluster(linearizable=True, timeout=PATIENCE_S)
    except RetriableError as error:
        known = admin.describe_cluster(timeout=PATIENCE_S)
        print_note(
            f"note: this is the view of {_answering_node(admin)}, as of metadata offset {known.metadata_offset}, which "
            f"may be out of date: {error}"
        )
        return False
    return True


def _answering_node(admin: raftlog.Admin) -> str:
    try:
        node = admin.describe_quorum(timeout=PATIENCE_S).answered_by
    except RaftlogError:
        node = 0
    return f"node {node}" if node > 0 else "a broker"


_ASKED_TO_END: Final = (signal.SIGTERM, signal.SIGHUP)


class AskedToEnd(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled like Ctrl-C. `exit_code`: the code that shells show for a command that it ended."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that its contexts are left.

    Further signals are ignored while the contexts are left. A signal that was ignored before (nohup) stays ignored.

    Raises:
        typer.Exit: a signal came, and all contexts are left.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise AskedToEnd(number)

    before = {each: signal.getsignal(each) for each in _ASKED_TO_END}
    before = {each: handler for each, handler in before.items() if handler is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    except AskedToEnd as asked:
        raise typer.Exit(asked.exit_code) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


_GAP: Final = 2
_LEAST_ID: Final = 8


class Fitted(NamedTuple):
    """A table, its width, and the columns that did not fit."""

    table: Table
    width: int
    left_out: list[str]


class _Column(NamedTuple):
    name: str
    cells: list[str]
    numeric: bool

    def natural(self) -> int:
        """Return the width without line breaks."""
        return max(map(cell_len, (self.name, *self.cells)))

    def least(self) -> int:
        """Return the least width that breaks lines only at spaces and at the header's underscores."""
        words = [word for text in (self.name.replace("_", " "), *self.cells) for word in text.split()]
        return max(map(cell_len, words), default=1)


def fitted(
    texts: Mapping[str, Sequence[str]], numeric: Iterable[str], width: int, optional: Sequence[str] = ()
) -> Fitted:
    """Return the table of these columns in `width`.

    If the table is wider, headers and cells are broken at spaces; then columns of `optional` are left out, the last one
    first. A table that is still too wide keeps its least width.
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
    """Return each id's prefix: all have the same length, at least 8 characters, and no two are equal."""
    known = set(ids)
    length = _LEAST_ID
    longest = max(map(len, known), default=0)
    while length < longest and len({each[:length] for each in known}) < len(known):
        length += 1
    return {each: each[:length] for each in known}


Row = Mapping[str, object]


class Output(StrEnum):
    """The values of `--output`."""

    TABLE = "table"
    TSV = "tsv"
    JSON = "json"


_NOTHING = ("", "-")
BOOTSTRAP_DEFAULT = "127.0.0.1:9092"
BOOTSTRAP_VARIABLE = "RAFTLOG_BOOTSTRAP"

BootstrapOption = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=BOOTSTRAP_VARIABLE,
        metavar="HOST:PORT,...",
        help="Addresses of servers of the cluster.",
    ),
]
OutputOption = Annotated[
    Output,
    typer.Option(
        "--output", "-o", help="table: for people (in a pipe, as tsv); tsv: lines with tabs; json: for programs."
    ),
]


def on_terminal(output: Output) -> bool:
    """Return whether rows are printed as a table for people, which leaves out what has no value or no room."""
    return output is Output.TABLE and sys.stdout.isatty()


def print_json(value: object) -> None:
    """Print a JSON document on one line."""
    print(json_text(value), flush=True)


def json_text(value: object) -> str:
    """Return JSON on one line, ASCII only unless standard output is UTF-8."""
    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    return json.dumps(value, ensure_ascii=encoding != "utf8", default=str)


def print_rows(
    rows: Sequence[Row],
    columns: Sequence[str],
    output: Output,
    *,
    documents: object = None,
    headlines: Iterable[str] = (),
    ids: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print rows: as JSON, as a table, or (TSV, and a table in a pipe) as a header and lines with tabs between cells.

    JSON is `documents`, or without them a list of the rows. `headlines` go to stderr, before a table or lines. On a
    terminal the columns `ids` are shortened while they stay unique; a column of `optional` is shown only if it has
    values and fits, and the first ones have priority.
    """
    if output is Output.JSON:
        print_json([dict(row) for row in rows] if documents is None else documents)
        return
    for headline in headlines:
        print_note(headline)
    if on_terminal(output):
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
    """Print a command's result: a sentence, or JSON."""
    if output is Output.JSON:
        print_json(dict(result))
    else:
        print(message)


def print_error(message: str) -> None:
    """Print an error on stderr: its first line, and further lines, such as those of a log, quoted below."""
    first, *quoted = message.strip().splitlines() or [""]
    print("\n".join([f"error: {first}", *(f"  | {line}" for line in quoted)]), file=sys.stderr)


def print_note(message: str) -> None:
    """Print a line on stderr, which is not part of the result."""
    print(message, file=sys.stderr, flush=True)


YesOption = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask. Kafka's --force means the same.")]


def confirm_at_terminal(question: str, otherwise: str) -> None:
    """Ask as `confirm` does if standard input is a terminal; a script is not asked."""
    if sys.stdin.isatty():
        confirm(question, otherwise)


def confirm(question: str, otherwise: str) -> None:
    """Ask the user at the terminal; any answer but y and yes means no.

    Raises:
        typer.BadParameter: standard input is no terminal; the message names --yes, which skips the question.
        typer.Exit: with code 1, after printing `otherwise`, if the answer is no.
        KeyboardInterrupt: Ctrl-C, also after printing `otherwise`.
    """
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            "standard input is not a terminal, so the command cannot ask; pass --yes to go on without a question"
        )
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        print(f"\n{otherwise}", file=sys.stderr)
        raise
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    if answer.strip().lower() not in ("y", "yes"):
        print_note(otherwise)
        raise typer.Exit(1)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the known name most like this one; "" if none is."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def key_value_pairs(pairs: Sequence[str]) -> dict[str, str]:
    """Return the settings of `KEY=VALUE` arguments.

    Raises:
        typer.BadParameter: an argument has no key or no `=`.
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
