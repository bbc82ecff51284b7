"""`--client-config FILE`, an option of every command that talks to a cluster, and the variables for the same settings.

file (--client-config, RAFTLOG_CLIENT_CONFIG)    TOML with keys of clients, as docs/python.md lists them
RAFTLOG_SECURITY_PROTOCOL, RAFTLOG_SSL_...,
RAFTLOG_SASL_MECHANISM, RAFTLOG_SASL_USERNAME,
RAFTLOG_SASL_PASSWORD_LOCATION                   the keys for TLS and users; they win over the file

A variable cannot hold a password itself: child processes inherit variables, and container tools show them.

Also here: the SDK's clients as commands use them. They give up sooner than the SDK's defaults, because a person waits.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.models import CommandInfo, TyperInfo

import raftlog
from raftlog._client.connections import REFUSED_GRACE_S
from raftlog._client.options import (
    ADMIN_KEYS,
    CONSUMER_KEYS,
    PRODUCER_KEYS,
    SECURITY_KEYS,
    refuse_kafkas,
    refuse_security,
)
from raftlog.cli.output import did_you_mean
from raftlog.config import ConfigDef, ConfigKey
from raftlog.errors import GroupIdNotFound, InvalidConfig, InvalidGroupId, RaftlogError, UnknownTopicOrPartition

FILE_VARIABLE: Final = "RAFTLOG_CLIENT_CONFIG"
PREFIX: Final = "RAFTLOG_"
_PASSWORD: Final = "sasl.password"
_PASSWORDS: Final = (_PASSWORD, "sasl.password.location")
_PASSWORD_VARIABLE: Final = "RAFTLOG_SASL_PASSWORD"


class _ClientKeys(ConfigDef):
    def key(self, name: str) -> ConfigKey:
        """Return the key of that name; an unsupported Kafka key raises with what to use instead."""
        refuse_security(name)
        if name.replace("_", ".") not in self:
            refuse_kafkas(name)
        return super().key(name)


_CLIENT_KEYS: Final = _ClientKeys(
    "client option", {key.name: key for keys in (ADMIN_KEYS, CONSUMER_KEYS, PRODUCER_KEYS) for key in keys}.values()
)
_PARAMETER: Final = "client_config"
_MARKS: Final = "bootstrap"
"""A command with this parameter talks to a cluster."""

ClientConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--client-config",
        envvar=FILE_VARIABLE,
        metavar="FILE",
        show_default=False,
        help="TOML file with settings of clients, such as security.protocol, ssl.ca.location and sasl.username.",
    ),
]

_file: ContextVar[Path | None] = ContextVar("client_config", default=None)
_defaults: ContextVar[Mapping[str, object]] = ContextVar("client_defaults")


def settings_for(keys: ConfigDef) -> dict[str, object]:
    """Return the settings of the file and the variables that are among a client's `keys`; others are ignored.

    Raises:
        InvalidConfig: the file cannot be read, or has a key that no client has.
    """
    path = _file.get()
    found = dict(_defaults.get({}))
    for over in (_of_file(path) if path is not None else {}, of_environment(os.environ)):
        if not over.keys().isdisjoint(_PASSWORDS):  # a password and a password file replace each other
            found = {name: value for name, value in found.items() if name not in _PASSWORDS}
        found |= over
    return {name: value for name, value in found.items() if name in keys}


def of_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the settings for TLS and users that the variables hold.

    Raises:
        InvalidConfig: a variable holds a password.
    """
    named = {PREFIX + key.variable: key.name for key in SECURITY_KEYS if key.name != _PASSWORD}
    if environment.get(_PASSWORD_VARIABLE):
        raise InvalidConfig(
            f"{_PASSWORD_VARIABLE} is not accepted, because other processes can see it; put the password into a file, "
            f"and the file's name into {PREFIX}SASL_PASSWORD_LOCATION"
        )
    return {name: environment[variable] for variable, name in named.items() if environment.get(variable)}


def _of_file(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"--client-config {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"--client-config {path} is not UTF-8 text") from None
    return {_CLIENT_KEYS.key(name).name: value for name, value in _CLIENT_KEYS.from_toml(text, str(path)).items()}


@contextmanager
def using(path: Path | None) -> Iterator[None]:
    """Take the settings from this file within the block."""
    file, defaults = _file.set(path), _defaults.set({})
    try:
        yield
    finally:
        _file.reset(file)
        _defaults.reset(defaults)


def default_to(settings: Mapping[str, object]) -> None:
    """Set defaults, which the file and the variables override, until the command ends."""
    _defaults.set(settings)


def add_to(app: typer.Typer) -> None:
    """Give every command below `app` that has `--bootstrap` the option `--client-config`.

    Callbacks count as commands, because some act without a subcommand.
    """
    commands: list[CommandInfo | TyperInfo] = [*app.registered_commands]
    if app.registered_callback is not None:
        commands.append(app.registered_callback)
    for command in commands:
        if command.callback is not None and _MARKS in inspect.signature(command.callback).parameters:
            command.callback = _with_option(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_to(group.typer_instance)


def _with_option(command: Callable[..., Any]) -> Callable[..., Any]:
    if _PARAMETER in inspect.signature(command).parameters:
        return command  # it has the option already

    @functools.wraps(command)
    def taking(*arguments: Any, client_config: Path | None = None, **options: Any) -> Any:
        with using(client_config):
            try:
                return command(*arguments, **options)
            except (UnknownTopicOrPartition, GroupIdNotFound) as error:
                hinted = "did you mean" in str(error)  # by a broker
                raise type(error)(f"{error}{'' if hinted else _guess(error, options)}") from None

    signature = inspect.signature(command, eval_str=True)
    more = inspect.Parameter(_PARAMETER, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ClientConfigOption)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        if parameter.name == _MARKS:
            parameters.append(more)
    taking.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # inspect looks there
    taking.__annotations__ = {each.name: each.annotation for each in parameters}
    return taking


_GUESS_PATIENCE_S = 2.0
"""How long a failed command looks for the name that the user may have meant."""


def _guess(error: UnknownTopicOrPartition | GroupIdNotFound, options: Mapping[str, Any]) -> str:
    """Return the end of the error's sentence: the topic or group that a misspelt argument may have meant, or ""."""
    kinds = ("group", "groups") if isinstance(error, GroupIdNotFound) else ("topic", "topics")
    given = [options[kind] for kind in kinds if options.get(kind)]
    named = [name for each in given for name in ([each] if isinstance(each, str) else each)]
    try:
        with connect_admin(options[_MARKS]) as admin:
            if isinstance(error, GroupIdNotFound):
                known = [each.group_id for each in admin.list_groups(missing=[], timeout=_GUESS_PATIENCE_S)]
            else:
                known = admin.list_topics(internal=True, timeout=_GUESS_PATIENCE_S)
    except RaftlogError:
        return ""
    unknown = [name for name in (each.partition(":")[0] for each in named) if name not in known and name in str(error)]
    return did_you_mean(unknown[0], known) if unknown else ""


_PATIENCE_MS = 10_000
"""How long a command looks for the cluster before it says that no server answers."""
_LEAST_PATIENCE_MS = 3_000
"""The least time for a coordinator to answer, even if the caller asked for less."""


@contextmanager
def _checked() -> Iterator[None]:
    """Turn the SDK's refusal of an argument, such as an address, into an error of the command line."""
    try:
        yield
    except (ValueError, InvalidConfig, InvalidGroupId) as error:
        raise typer.BadParameter(str(error)) from None


def connect_admin(bootstrap: str) -> raftlog.Admin:
    """Return an admin client with the settings of file and variables."""
    with _checked():
        return raftlog.Admin(bootstrap, config={"default.api.timeout.ms": _PATIENCE_MS, **settings_for(ADMIN_KEYS)})


def connect_consumer(
    bootstrap: str,
    when_out_of_range: str,
    group: str | None = None,
    *,
    patience_s: float | None = None,
    isolation_level: str = "read_committed",
    settings: Mapping[str, str] | None = None,
) -> raftlog.Consumer:
    """Return a consumer that does not commit automatically; `when_out_of_range`: its auto.offset.reset.

    `patience_s`: how long a call may take, joining a group included; it is kept between 3 and 10 seconds. `settings`
    override those of file and variables.
    """
    patience_ms = _PATIENCE_MS if patience_s is None else max(_LEAST_PATIENCE_MS, min(_PATIENCE_MS, patience_s * 1000))
    with _checked():
        chosen = {
            **settings_for(CONSUMER_KEYS),
            **(settings or {}),
            "group.id": group,
            "auto.offset.reset": when_out_of_range,
            "isolation.level": isolation_level,
            "default.api.timeout.ms": int(patience_ms),
            "enable.auto.commit": False,
        }
        found = raftlog.Consumer(bootstrap, config=chosen)
    found._engine.metadata.refused_grace_s = REFUSED_GRACE_S
    return found


def connect_producer(bootstrap: str, settings: Mapping[str, str]) -> raftlog.Producer:
    """Return a producer; `settings` override those of file and variables."""
    with _checked():
        found = raftlog.Producer(
            bootstrap, config={"max.block.ms": _PATIENCE_MS, **settings_for(PRODUCER_KEYS), **settings}
        )
    found._engine.metadata.refused_grace_s = REFUSED_GRACE_S
    return found
