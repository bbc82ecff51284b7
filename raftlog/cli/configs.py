"""`raftlog config ...`"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

import raftlog
from raftlog.cli.client_config import connect_admin
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
from raftlog.cli.partitions import moving
from raftlog.cli.servers import ask_server_packages
from raftlog.errors import InvalidConfig

app = typer.Typer(no_args_is_help=True, help="Settings of topics and servers.")


class Resource(StrEnum):
    """A kind of resource that has settings."""

    TOPIC = "topic"
    BROKER = "broker"
    BROKER_LOGGER = "broker-logger"


ResourceArgument = Annotated[
    Resource, typer.Argument(metavar="topic|broker|broker-logger", show_default=False, show_choices=False)
]
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        show_default=False,
        help="A topic's name; a broker's id, or default for all brokers; for broker-logger a broker's id.",
    ),
]
_COLUMNS = ("key", "value", "source")
_ALL_BROKERS = "default"
_ROOT = "root"
"""The root of all loggers; no topic or broker has a setting of this name."""
_LIST_SERVER_KEYS = """\
import json
from broker.config.config import BROKER_CONFIGS
print(json.dumps([
    {"key": key.name, "type": key.kind, "default": key.format(key.default), "allowed": key.expected,
     "kafka_key": key.kafka_key, "dynamic": key.dynamic, "doc": key.doc} for key in BROKER_CONFIGS
]))
"""


def _target(resource: Resource, name: str) -> dict[str, Any]:
    """Return the admin client's arguments for a resource.

    Raises:
        typer.BadParameter: a broker's id is not a number.
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
    """Change settings; the error for a read-only one says that a server reads it only when it starts."""
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
    """Warn of topics that cannot be written to after a change of min.insync.replicas."""
    if moving.KEY in changed:
        moving.warn_of_topics(admin, [target["topic"]] if "topic" in target else None)


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
    """List the settings that are set on topics.

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
    everything: Annotated[bool, typer.Option("--all", metavar="", help="Also settings at their default.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the settings of a topic, a broker or its loggers, and where each value comes from.

    Example: raftlog config describe topic events --all
    """
    target = _target(resource, name)
    with connect_admin(bootstrap) as admin:
        entries = admin.describe_configs(**target)
    rows = _rows(entries, everything)
    print_rows(rows, _COLUMNS, output)
    if not rows:
        print_note("all settings are at their defaults; --all lists them")


@app.command("set")
def set_keys(
    resource: ResourceArgument,
    name: NameArgument,
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change settings of a topic or a broker, or log levels of a broker, which last until it restarts.

    Example: raftlog config set topic events retention.ms=7d segment.bytes=64MiB

    Example: raftlog config set broker default log.retention.ms=3d

    Example: raftlog config set broker-logger 1 broker.log=DEBUG
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
    """Set settings of a topic or a broker, or log levels of a broker, back to their defaults.

    Example: raftlog config unset topic events retention.ms

    Example: raftlog config unset broker-logger 1 broker.log
    """
    target = _target(resource, name)
    with connect_admin(bootstrap) as admin:
        _alter(admin, target, unset=keys)
        _warn(admin, target, keys)
    print_done(f"default again for {resource} {name}: {', '.join(keys)}", {resource.value: name, "unset": keys}, output)


@app.command("server-keys")
def server_keys(output: OutputOption = Output.TABLE) -> None:
    """List the keys of a server's configuration file. Needs no running server.

    Example: raftlog config server-keys
    """
    print_rows(ask_server_packages(_LIST_SERVER_KEYS), ("key", "default", "allowed", "doc"), output)
