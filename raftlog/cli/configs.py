"""`raftlog config ...`"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from raftlog._server_root import server_environment
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    Row,
    key_value_pairs,
    print_done,
    print_rows,
)
from raftlog.errors import InternalError

app = typer.Typer(no_args_is_help=True, help="Settings of topics and servers.")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
_COLUMNS = ("key", "value", "source")
_LIST_SERVER_KEYS = """\
import json
from broker.config_keys import BROKER_CONFIGS
print(json.dumps([
    {"key": key.name, "type": key.kind, "default": key.format(key.default), "allowed": key.expected,
     "kafka_key": key.kafka_key, "dynamic": key.dynamic, "doc": key.doc} for key in BROKER_CONFIGS
]))
"""


def _rows(entries: Mapping[str, Any], everything: bool) -> list[Row]:
    return [
        {
            "key": entry.key,
            "value": entry.value,
            "source": entry.source,
            "read_only": entry.read_only,
            "documentation": entry.documentation,
        }
        for _, entry in sorted(entries.items())
        if everything or entry.source != "default"
    ]


@app.command("list")
def list_changed(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """List the settings that topics have of their own.

    Example: raftlog config list
    """
    with connect_admin(bootstrap) as admin:
        rows = [
            {"topic": topic, **row}
            for topic in sorted(admin.list_topics())
            for row in _rows(admin.describe_configs(topic=topic), everything=False)
            if row["source"] == "dynamic_topic"
        ]
    print_rows(rows, ("topic", "key", "value"), output)


@app.command()
def describe(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", show_default=False)] = None,
    broker: Annotated[int | None, typer.Option(metavar="ID", help="A broker's settings instead of a topic's.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what is left at its default.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show which settings apply to a topic or a broker, and where each comes from.

    Example: raftlog config describe events --all
    """
    if (topic is None) == (broker is None):
        raise typer.BadParameter("name a topic or give --broker ID, one of them")
    with connect_admin(bootstrap) as admin:
        entries = admin.describe_configs(topic=topic, broker=broker)
    print_rows(_rows(entries, everything), _COLUMNS, output)


@app.command("set")
def set_keys(
    topic: TopicArgument,
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set a topic's settings.

    Example: raftlog config set events retention.ms=7d segment.bytes=64MiB
    """
    changes = key_value_pairs(pairs)
    with connect_admin(bootstrap) as admin:
        admin.alter_configs(topic, set=changes)
    print_done(f"set for {topic}: {', '.join(changes)}", {"topic": topic, "set": changes}, output)


@app.command()
def unset(
    topic: TopicArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Put a topic's settings back to their defaults.

    Example: raftlog config unset events retention.ms
    """
    with connect_admin(bootstrap) as admin:
        admin.alter_configs(topic, unset=keys)
    print_done(f"back to the default for {topic}: {', '.join(keys)}", {"topic": topic, "unset": keys}, output)


@app.command("server-keys")
def server_keys(output: OutputOption = Output.TABLE) -> None:
    """List what a server's configuration file may hold. Needs no running server.

    Example: raftlog config server-keys
    """
    asked = subprocess.run(
        [sys.executable, "-P", "-c", _LIST_SERVER_KEYS],
        env=server_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        raise InternalError(f"the server's packages did not load: {asked.stderr.strip().splitlines()[-1:]}")
    print_rows(json.loads(asked.stdout), ("key", "default", "allowed", "doc"), output)
