"""`raftlog config ...`"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

import raftlog
from raftlog._server_root import server_environment
from raftlog.cli import min_isr
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    Row,
    key_value_pairs,
    print_done,
    print_note,
    print_rows,
)
from raftlog.errors import InternalError, InvalidConfig

app = typer.Typer(no_args_is_help=True, help="Settings of topics and servers.")


class Resource(StrEnum):
    """What has settings."""

    TOPIC = "topic"
    BROKER = "broker"
    BROKER_LOGGER = "broker-logger"


ResourceArgument = Annotated[Resource, typer.Argument(metavar="topic|broker|broker-logger", show_default=False)]
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        show_default=False,
        help="A topic's name; a broker's id, or default for all brokers; a broker's id for the levels of its loggers.",
    ),
]
_COLUMNS = ("key", "value", "source")
_ALL_BROKERS = "default"
_ROOT = "root"
"""The one that all loggers are beneath; no topic or broker has a setting of this name."""
_LIST_SERVER_KEYS = """\
import json
from broker.config_keys import BROKER_CONFIGS
print(json.dumps([
    {"key": key.name, "type": key.kind, "default": key.format(key.default), "allowed": key.expected,
     "kafka_key": key.kafka_key, "dynamic": key.dynamic, "doc": key.doc} for key in BROKER_CONFIGS
]))
"""


def _target(resource: Resource, name: str) -> dict[str, Any]:
    """Return what the admin client calls the resource.

    Raises:
        typer.BadParameter: a broker's id that is not a number.
    """
    if resource is Resource.TOPIC:
        return {"topic": name}
    if resource is Resource.BROKER_LOGGER:
        if not name.isdecimal():
            raise typer.BadParameter(f"{name!r} is not a broker's id (raftlog cluster describe lists them)")
        return {"broker_logger": int(name)}
    if name == _ALL_BROKERS:
        return {"broker": ""}
    if not name.isdecimal():
        raise typer.BadParameter(
            f"{name!r} is not a broker's id (raftlog cluster describe lists them), nor default, which means all brokers"
        )
    return {"broker": int(name)}


def _alter(admin: raftlog.Admin, target: dict[str, Any], **changes: Any) -> None:
    """Change settings; for one that a server reads only when it starts, say so."""
    try:
        admin.alter_configs(**target, **changes)
    except InvalidConfig:
        if "broker" not in target:
            raise
        broker = target["broker"]
        if broker == "":
            broker = admin.describe_cluster().brokers[0].broker_id
        entries = admin.describe_configs(broker=broker)
        fixed = [key for keys in changes.values() for key in keys if key in entries and entries[key].read_only]
        if not fixed:
            raise
        raise InvalidConfig(
            f"{', '.join(fixed)} cannot change while a server runs; put it into the server's configuration file and "
            "restart the server"
        ) from None


def _warn(admin: raftlog.Admin, target: Mapping[str, Any], changed: Collection[str]) -> None:
    """Warn of topics that cannot be written to any more."""
    if min_isr.KEY in changed:
        min_isr.warn_of_topics(admin, [target["topic"]] if "topic" in target else None)


def _rows(entries: Mapping[str, Any], everything: bool) -> list[Row]:
    hidden = ("default", "static_broker") if _ROOT in entries else ("default",)
    return [
        {
            "key": entry.key,
            "value": entry.value,
            "source": entry.source,
            "read_only": entry.read_only,
            "documentation": entry.documentation,
        }
        for _, entry in sorted(entries.items())
        if everything or entry.source not in hidden or entry.key == _ROOT
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
    resource: ResourceArgument,
    name: NameArgument,
    everything: Annotated[bool, typer.Option("--all", metavar="", help="Also what is left at its default.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show which settings apply to a topic, a broker or its loggers, and where each comes from.

    Example: raftlog config describe topic events --all
    """
    target = _target(resource, name)
    with connect_admin(bootstrap) as admin:
        entries = admin.describe_configs(**target)
    rows = _rows(entries, everything)
    print_rows(rows, _COLUMNS, output)
    if not rows:
        print_note("everything is at its default; --all lists it")


@app.command("set")
def set_keys(
    resource: ResourceArgument,
    name: NameArgument,
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set settings of a topic or a broker, or levels of a broker's loggers, which last until it restarts.

    Examples:

      raftlog config set topic events retention.ms=7d segment.bytes=64MiB

      raftlog config set broker default log.retention.ms=3d

      raftlog config set broker-logger 1 broker.log=DEBUG
    """
    target, changes = _target(resource, name), key_value_pairs(pairs)
    with connect_admin(bootstrap) as admin:
        _alter(admin, target, set=changes)
        _warn(admin, target, changes)
    print_done(f"set for {resource} {name}: {', '.join(changes)}", {resource.value: name, "set": changes}, output)


@app.command()
def unset(
    resource: ResourceArgument,
    name: NameArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Put settings of a topic or a broker, or levels of a broker's loggers, back to their defaults.

    Examples:

      raftlog config unset topic events retention.ms

      raftlog config unset broker-logger 1 broker.log
    """
    target = _target(resource, name)
    with connect_admin(bootstrap) as admin:
        _alter(admin, target, unset=keys)
        _warn(admin, target, keys)
    print_done(f"default again for {resource} {name}: {', '.join(keys)}", {resource.value: name, "unset": keys}, output)


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
