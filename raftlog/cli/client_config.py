"""`--client-config FILE`, which every command takes that talks to a cluster, and the variables for the same settings.

file (--client-config, RAFTLOG_CLIENT_CONFIG)    TOML with keys of clients, as docs/python.md lists them
RAFTLOG_SECURITY_PROTOCOL, RAFTLOG_SSL_...,
RAFTLOG_SASL_MECHANISM, RAFTLOG_SASL_USERNAME,
RAFTLOG_SASL_PASSWORD_LOCATION                   the keys for TLS and users; they win over the file

A password itself is taken from no variable: children inherit those, and containers' tools show them.
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

from raftlog._client.kafkas_keys import refuse_kafkas
from raftlog._client.option_keys import ADMIN_KEYS, CONSUMER_KEYS, PRODUCER_KEYS, SECURITY_KEYS
from raftlog._client.options import refuse_security
from raftlog.config import ConfigDef, ConfigKey
from raftlog.errors import InvalidConfig

FILE_VARIABLE: Final = "RAFTLOG_CLIENT_CONFIG"
PREFIX: Final = "RAFTLOG_"
_PASSWORD: Final = "sasl.password"
_PASSWORDS: Final = (_PASSWORD, "sasl.password.location")
_PASSWORD_VARIABLE: Final = "RAFTLOG_SASL_PASSWORD"


class _ClientKeys(ConfigDef):
    def key(self, name: str) -> ConfigKey:
        """Return the key of that name; Kafka's that there are not get a word on what there is instead."""
        refuse_security(name)
        if name.replace("_", ".") not in self:
            refuse_kafkas(name)
        return super().key(name)


_CLIENT_KEYS: Final = _ClientKeys(
    "client option", {key.name: key for keys in (ADMIN_KEYS, CONSUMER_KEYS, PRODUCER_KEYS) for key in keys}.values()
)
_PARAMETER: Final = "client_config"
_MARKS: Final = "bootstrap"
"""Who has this parameter talks to a cluster."""

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
    """Return what the file and the variables say for a kind of client; what other kinds have is passed over.

    Raises:
        InvalidConfig: the file cannot be read, or has a key that no client has.
    """
    path = _file.get()
    found = dict(_defaults.get({}))
    for over in (_of_file(path) if path is not None else {}, of_environment(os.environ)):
        if not over.keys().isdisjoint(_PASSWORDS):  # one takes the other's place
            found = {name: value for name, value in found.items() if name not in _PASSWORDS}
        found |= over
    return {name: value for name, value in found.items() if name in keys}


def of_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the settings for TLS and users that variables give.

    Raises:
        InvalidConfig: a variable has a password.
    """
    named = {PREFIX + key.variable: key.name for key in SECURITY_KEYS if key.name != _PASSWORD}
    if environment.get(_PASSWORD_VARIABLE):
        raise InvalidConfig(
            f"{_PASSWORD_VARIABLE} is not taken, since others see variables; put the password into a file, and the "
            f"file's name into {PREFIX}SASL_PASSWORD_LOCATION"
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
    """Take the settings from a file meanwhile."""
    file, defaults = _file.set(path), _defaults.set({})
    try:
        yield
    finally:
        _file.reset(file)
        _defaults.reset(defaults)


def default_to(settings: Mapping[str, object]) -> None:
    """Take these settings where neither file nor variables say otherwise, until the command ends."""
    _defaults.set(settings)


def add_to(app: typer.Typer) -> None:
    """Give every command with `--bootstrap`, of this and what hangs on it, the option `--client-config`.

    A callback is a command too, where it does something without one below it.
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
        return command  # it has been given it before

    @functools.wraps(command)
    def taking(*arguments: Any, client_config: Path | None = None, **options: Any) -> Any:
        with using(client_config):
            return command(*arguments, **options)

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
