"""The tree of commands, and how their errors become messages and exit codes.

Exit codes: 0 success, or the reader of the output closed it; 1 an error, named on stderr; 2 a wrong command line;
130 Ctrl-C; 143 SIGTERM and 129 SIGHUP, for commands that clean up before they end.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from raftlog import __version__
from raftlog.cli import client_config
from raftlog.cli.output import print_error
from raftlog.errors import RaftlogError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
_PHRASES = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "write a whole number",
    "Input should be a valid number, unable to parse string as a number": "write a number",
    "Input should be": "it should be",
    "(Possible options:": "(did you mean",
}

_KAFKAS_NAMES = {
    "bootstrap-server": "bootstrap",
    "command-config": "client-config",
    "max-messages": "max",
    "force": "yes",
}
"""Names that Kafka's tools have for these options; both are accepted."""

_COMMANDS: Final = {
    "up": "servers:up",
    "server": "servers:server",
    "topic": "topics:app",
    "partition": "partitions.partitions:app",
    "produce": "records.produce:produce",
    "consume": "records.consume:consume",
    "config": "configs:app",
    "apply": "apply:apply",
    "group": "groups.groups:app",
    "txn": "transactions:app",
    "user": "security.users:app",
    "acl": "security.acls:app",
    "role": "security.roles:app",
    "quota": "security.quotas:app",
    "cluster": "nodes.cluster:app",
    "broker": "nodes.brokers:app",
    "quorum": "nodes.quorum:app",
    "log": "records.log_dump:app",
    "perf": "perf:app",
    "console": "console:console",
    "doctor": "doctor:doctor",
    "support-bundle": "doctor:support_bundle",
}
"""Where each command is, in the order of the help."""


class _Page:
    """A help page that fits into 80 columns, without types for flags, not even for those that Typer adds (--help)."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page, as the base class does, with one space between its columns instead of two."""
        from typer import rich_utils  # takes time and memory, and only a page needs it

        rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment] # Rich takes these four, too
        super().format_help(ctx, formatter)  # type: ignore[misc] # of a command

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as the base class does."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of a command
        for each in found:
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""
        return found


class _Command(_Page, TyperCommand):
    """A command."""


class _Group(_Page, TyperGroup):
    """A command with subcommands."""


def _finish(app: typer.Typer) -> None:
    """Give all commands below `app` such pages, with paragraphs that the terminal wraps, not the source."""
    for command in app.registered_commands:
        command.cls = _Command
        text = inspect.cleandoc(command.help or getattr(command.callback, "__doc__", None) or "")
        command.help = "\n\n".join(" ".join(each.split("\n")) for each in text.split("\n\n"))
    for group in app.registered_groups:
        group.cls = _Group
        if group.typer_instance is not None:
            _finish(group.typer_instance)


def _path_of(arguments: Sequence[str]) -> str:
    """Return the command that these arguments begin with: `raftlog group reset-offsets`."""
    command: Any = get_command(tree(arguments[0] if arguments else None))
    path = ["raftlog"]
    for each in arguments:
        command = getattr(command, "commands", {}).get(each)
        if command is None:
            break
        path.append(each)
    return " ".join(path)


def tree(name: str | None = None) -> typer.Typer:
    """Return all commands, or only the one of that name if there is one.

    A command imports what it needs: `raftlog console`, which runs for long, holds no memory for reading Parquet files.
    """
    app = typer.Typer(
        name="raftlog",
        context_settings={"token_normalize_func": lambda token: _KAFKAS_NAMES.get(token, token)},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        cls=_Group,
        help="A replicated log: topics, records, clusters.\n\n"
        "Start with [bold]raftlog up[/bold] in one terminal, then in another:\n\n"
        "  raftlog topic create events --partitions 3\n\n"
        "  echo hello | raftlog produce events\n\n"
        "  raftlog consume events --from-beginning --no-follow",
    )
    app.callback()(options)
    for each in [name] if name in _COMMANDS else _COMMANDS:
        module, _, attribute = _COMMANDS[each].partition(":")
        command = getattr(import_module(f"raftlog.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=each)
        else:
            app.command(each)(command)
    client_config.add_to(app)
    _finish(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"raftlog {__version__}")
        raise typer.Exit


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
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does, so that no terminal's encoding fails
    try:
        code = tree(sys.argv[1] if len(sys.argv) > 1 else None)(prog_name="raftlog", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # Typer itself exits with 1
            _close_quietly()
        raise
    except TyperException as error:
        message = _plain(error.format_message())
        if message:  # empty: a group without a command, and its help is printed
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else _path_of(sys.argv[1:])
            if command == "raftlog" and message.startswith("No such option"):
                message = (
                    f"There is no option {sys.argv[1].partition('=')[0]} before a command; write it after the command"
                )
            print_error(f"{message.rstrip('.')}; try '{command} --help'")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _close_quietly()
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except RaftlogError as error:
        print_error(str(error) or "the command failed, and the cluster gave no reason; see the logs of its servers")
        sys.exit(EXIT_ERROR)
    except OSError as error:
        print_error(_in_words(error))
        sys.exit(EXIT_ERROR)


def _plain(message: str) -> str:
    """Return Typer's message on one line, with pydantic's phrases replaced."""
    line = " ".join(message.split())
    for phrase, plain in _PHRASES.items():
        line = line.replace(phrase, plain)
    return line


def _in_words(error: OSError) -> str:
    """Return what the operating system refused, for which path, and what to do."""
    if error.filename is None:
        return str(error)
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    match error.errno:
        case errno.ENOENT:
            return f"there is no {path}; check the path, and that its directory exists"
        case errno.EACCES | errno.EPERM:
            return f"{path} cannot be opened; check its permissions, or run the command as another user"
        case errno.EISDIR:
            return f"{path} is a directory; name a file"
        case errno.ENOTDIR | errno.EEXIST:
            return f"{path} already exists, or a part of its path is a file; name another path"
        case _:
            return f"{path}: {error.strerror}"


def _close_quietly() -> NoReturn:
    """Exit silently when the reader of the output, such as `head`, has closed it."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 # the interpreter flushes it at the end
    sys.exit(0)
