"""The commands put together, and what happens to their errors.

Exit codes: 0 done, or whoever read the output has left; 1 an error that a line on stderr names; 2 the command line is
wrong; 130 Ctrl-C; 143 and 129 for SIGTERM and SIGHUP, where a command leaves things in order before it ends.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from raftlog import __version__
from raftlog.cli import (
    acls,
    apply,
    brokers,
    client_config,
    cluster,
    configs,
    consume,
    doctor,
    groups,
    log_dump,
    partitions,
    produce,
    quorum,
    servers,
    support_bundle,
    topics,
    transactions,
    users,
)
from raftlog.cli.output import print_error
from raftlog.errors import RaftlogError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
_PHRASES = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "write a whole number",
    "Input should be a valid number, unable to parse string as a number": "write a number",
    "Input should be": "it should be",
}

_KAFKAS_NAMES = {"bootstrap-server": "bootstrap", "command-config": "client-config", "max-messages": "max"}
"""What fingers that know Kafka's tools type for these options."""

app = typer.Typer(
    name="raftlog",
    context_settings={"token_normalize_func": lambda token: _KAFKAS_NAMES.get(token, token)},
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
app.add_typer(partitions.app, name="partition")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(configs.app, name="config")
app.command("apply")(apply.apply)
app.add_typer(groups.app, name="group")
app.add_typer(transactions.app, name="txn")
app.add_typer(users.app, name="user")
app.add_typer(acls.app, name="acl")
app.add_typer(cluster.app, name="cluster")
app.add_typer(brokers.app, name="broker")
app.add_typer(quorum.app, name="quorum")
app.add_typer(log_dump.app, name="log")
app.command("doctor")(doctor.doctor)
app.command("support-bundle")(support_bundle.support_bundle)
client_config.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"raftlog {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> NoReturn:
    """Run the command line; never returns."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is; a narrow terminal is no reason to stop
    try:
        code = app(prog_name="raftlog", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # Typer leaves with 1 by itself
            _close_quietly()
        raise
    except TyperException as error:
        message = _plain(error.format_message())
        if message:  # else it was a group without a command, whose help has been printed
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "raftlog"
            print_error(f"{message.rstrip('.')}; try '{command} --help'")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _close_quietly()
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except RaftlogError as error:
        print_error(str(error) or type(error).__name__)
        sys.exit(EXIT_ERROR)
    except OSError as error:
        print_error(_in_words(error))
        sys.exit(EXIT_ERROR)


def _plain(message: str) -> str:
    """Return Typer's message on one line and without the turns of the library that checks its types."""
    line = " ".join(message.split())
    for phrase, plain in _PHRASES.items():
        line = line.replace(phrase, plain)
    return line


def _in_words(error: OSError) -> str:
    """Say what the operating system refused, where, and what to do."""
    if error.filename is None:
        return str(error)
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    match error.errno:
        case errno.ENOENT:
            return f"there is no {path}; check the path, and that its directory exists"
        case errno.EACCES | errno.EPERM:
            return f"{path} may not be opened; check its permissions, or run this as another user"
        case errno.EISDIR:
            return f"{path} is a directory; name a file"
        case errno.ENOTDIR | errno.EEXIST:
            return f"{path} is in the way or goes through a file, not a directory; name another path"
        case _:
            return f"{path}: {error.strerror}"


def _close_quietly() -> NoReturn:
    """Leave when whoever read the output has gone, as `head` does, without a word about it."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 # the interpreter flushes it at the end
    sys.exit(0)
