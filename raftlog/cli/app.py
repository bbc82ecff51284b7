"""The commands put together, and what happens to their errors.

Exit codes: 0 done, 1 an error that a line on stderr names, 2 the command line is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from raftlog import __version__
from raftlog.cli import cluster, configs, consume, log_dump, produce, servers, topics
from raftlog.cli.output import print_error
from raftlog.errors import RaftlogError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="raftlog",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="A replicated log: topics, records, clusters.\n\n"
    "Start with [bold]raftlog up[/bold] in one terminal, then in another:\n\n"
    "  raftlog topic create events --partitions 3\n\n"
    "  echo hello | raftlog produce events\n\n"
    "  raftlog consume events --from-beginning --no-follow",
)
app.command("up")(servers.up)
app.command("server")(servers.server)
app.add_typer(topics.app, name="topic")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(configs.app, name="config")
app.add_typer(cluster.app, name="cluster")
app.add_typer(log_dump.app, name="log")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"raftlog {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> NoReturn:
    """Run the command line; never returns."""
    try:
        sys.exit(app(prog_name="raftlog", standalone_mode=False))
    except TyperException as error:
        if error.message:  # else it was a group without a command, whose help has been printed
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "raftlog"
            print_error(f"{error.format_message().rstrip('.')}; try '{command} --help'")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _close_quietly()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except (RaftlogError, OSError) as error:
        print_error(str(error) or type(error).__name__)
        sys.exit(EXIT_ERROR)


def _close_quietly() -> NoReturn:
    """Leave when whoever read the output has gone, as `head` does, without a word about it."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 # the interpreter flushes it at the end
    sys.exit(EXIT_ERROR)
