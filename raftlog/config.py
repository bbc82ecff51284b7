"""Typed configuration: one table of keys for the server, one for topics, one each for the SDK's clients.

A `ConfigDef` is a table of `ConfigKey`s. It turns values as users write them (TOML, environment, keyword arguments,
strings on the wire) into typed values, and back into one canonical spelling, which is stored and compared.

    kind      value       written as
    int       int         10, "10"
    float     float       0.5, "0.5"
    bool      bool        true, "true"
    ms        int, ms     500, "500", "500ms", "10s", "5m", "2h", "7d"
    bytes     int, bytes  65536, "65536", "64KiB", "16MiB", "1GiB", "1TiB"
    string    str         "text"
    list      tuple       ["a", "b"], "a,b"

`choices` narrow a string, or every item of a list. A key is named with dots; underscores are taken for dots, so that
keyword arguments are the keys: `linger_ms=5`.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, NoReturn, Self, TypeVar, overload

from raftlog.errors import InvalidConfig

T = TypeVar("T")
Kind = Literal["int", "float", "bool", "ms", "bytes", "string", "list"]
Value = int | float | bool | str | tuple[str, ...] | None

MS_PER_UNIT = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
BYTES_PER_UNIT = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MAX_INT64 = (1 << 63) - 1

_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)
_EXPECTED: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "ms": "milliseconds, or a number with a unit such as 500ms, 10s, 5m, 2h or 7d",
    "bytes": "bytes, or a number with a unit such as 64KiB, 16MiB or 1GiB",
    "string": "text",
    "list": "a list of texts, or texts with commas between them",
}
_UNITS: dict[Kind, str] = {"ms": "ms", "bytes": "bytes"}

# Kubernetes sets such variables for every Service, RAFTLOG_PORT=tcp://... for one that is named `raftlog`.
_SERVICE_LINK = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)


@dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """One key: its type, range, default and documentation.

    `mirrors` is the Kafka key with the same meaning if its name differs; `own` says that Kafka has no such key.
    `dynamic` keys may be altered while the cluster runs. An `optional` key may have no value (None, written "").
    `check` gets a value of the right type and range, and returns a complaint or None. `ignore_case`: text is accepted
    in any case and kept in lower case. `secret`: no message shows the value.
    """

    name: str
    kind: Kind
    default: Value
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    mirrors: str = ""
    own: bool = False
    dynamic: bool = False
    optional: bool = False
    ignore_case: bool = False
    secret: bool = False
    check: Callable[[Value], str | None] | None = None

    def __post_init__(self) -> None:
        assert self.name == self.name.lower(), self.name
        assert "_" not in self.name, self.name
        assert self.doc, self.name
        assert not (self.own and self.mirrors), self.name
        assert not (self.optional and self.kind in ("string", "list")), f"{self.name}: empty says it already"
        if self.default is None:
            assert self.optional, f"{self.name}: a key without a default is optional"
        else:
            assert self.parse(self.default) == self.default, self.name

    @property
    def kafka_key(self) -> str | None:
        """The Kafka key that this one mirrors, None if Kafka has none."""
        return None if self.own else self.mirrors or self.name

    @property
    def unit(self) -> str:
        """`ms`, `bytes` or "" (no unit)."""
        return _UNITS.get(self.kind, "")

    @property
    def variable(self) -> str:
        """The name in the environment, without prefix."""
        return self.name.replace(".", "_").upper()

    def parse(self, raw: object) -> Value:
        """Return the typed value of a setting as the user wrote it.

        Raises:
            InvalidConfig: the value has another type, is out of range, or fails `check`; the message shows the value
                and what was expected.
        """
        if self.optional and (raw is None or raw == ""):
            return None
        try:
            value = _PARSERS[self.kind](raw)
        except _TooLarge:
            raise InvalidConfig(
                f"{self.name}={self._shown(raw)}: expected {self.expected}; the largest number is {MAX_INT64}"
            ) from None
        except ValueError:
            raise InvalidConfig(f"{self.name}={self._shown(raw)}: expected {self.expected}") from None
        if self.ignore_case and isinstance(value, str):
            value = value.lower()
        complaint = self._complaint(value)
        if complaint is not None:
            raise InvalidConfig(f"{self.name}={self._shown(raw)}: {complaint}")
        return value

    def _shown(self, raw: object) -> str:
        return "(not shown)" if self.secret else _shown(raw)

    def format(self, value: Value) -> str:
        """Return the canonical spelling of a typed value; `parse` takes it back to the same value."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value)

    @property
    def expected(self) -> str:
        """The form of a value, in words."""
        text = _EXPECTED[self.kind]
        if self.choices:
            one_of = "one of" if self.kind == "string" else "a list of"
            text = f"{one_of} {', '.join(self.choices)}"
        if self.minimum is not None and self.maximum is not None:
            text += f", from {self.minimum:.15g} to {self.maximum:.15g}"
        elif self.minimum is not None:
            text += f", at least {self.minimum:.15g}"
        elif self.maximum is not None:
            text += f", at most {self.maximum:.15g}"
        return text

    def _complaint(self, value: Value) -> str | None:
        items = value if isinstance(value, tuple) else (value,)
        if self.choices and any(item not in self.choices for item in items):
            return f"expected {self.expected}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.minimum is not None and value < self.minimum:
                return f"expected {self.expected}"
            if self.maximum is not None and value > self.maximum:
                return f"expected {self.expected}"
        return self.check(value) if self.check is not None else None


class Setting(Generic[T]):
    """A key declared as an attribute: `node_id = integer(...)` declares the key node.id and types `config.node_id`.

    The arguments are those of `ConfigKey`; `name` is needed if the attribute has another name than the key. `of` turns
    the parsed value into the attribute's value; its `ValueError` says what is wrong with a value.
    """

    key: ConfigKey

    def __init__(self, kind: Kind, default: Value, of: Callable[[Any], T] | None = None, **rest: Any) -> None:
        self._spec = {"kind": kind, "default": default, **rest}
        self._of = of
        if of is not None and "check" not in rest:
            self._spec["check"] = partial(_complaint_of, of)

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute
        self.key = ConfigKey(**{"name": attribute.replace("_", "."), **self._spec})

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Setting[T] | T:
        assert instance is None, f"{self.attribute} has no value yet"  # a value stands in the instance itself
        return self

    def value(self, values: Mapping[str, Value]) -> T:
        """Return the attribute's value, given the values of all keys."""
        value: Any = values[self.key.name]
        return value if self._of is None else self._of(value)


def _complaint_of(of: Callable[[Any], object], value: Value) -> str | None:
    try:
        of(value)
    except ValueError as error:
        return str(error)
    return None


@overload
def integer(default: int | None, of: Callable[[Any], T], **rest: Any) -> Setting[T]: ...
@overload
def integer(default: int | None, **rest: Any) -> Setting[int]: ...
def integer(default: int | None, of: Any = None, **rest: Any) -> Setting[Any]:
    """Declare a whole number."""
    return Setting("int", default, of, **rest)


def number(default: float, **rest: Any) -> Setting[float]:
    """Declare a number."""
    return Setting("float", default, **rest)


def switch(default: bool, **rest: Any) -> Setting[bool]:
    """Declare a boolean."""
    return Setting("bool", default, **rest)


def duration_ms(default: int, **rest: Any) -> Setting[int]:
    """Declare a time in milliseconds."""
    return Setting("ms", default, **rest)


def size_bytes(default: int, **rest: Any) -> Setting[int]:
    """Declare a size in bytes."""
    return Setting("bytes", default, **rest)


@overload
def text(default: str, of: Callable[[Any], T], **rest: Any) -> Setting[T]: ...
@overload
def text(default: str, **rest: Any) -> Setting[str]: ...
def text(default: str, of: Any = None, **rest: Any) -> Setting[Any]:
    """Declare a text."""
    return Setting("string", default, of, **rest)


@overload
def names(default: tuple[str, ...], of: Callable[[Any], T], **rest: Any) -> Setting[T]: ...
@overload
def names(default: tuple[str, ...], **rest: Any) -> Setting[tuple[str, ...]]: ...
def names(default: tuple[str, ...], of: Any = None, **rest: Any) -> Setting[Any]:
    """Declare a list of texts."""
    return Setting("list", default, of, **rest)


def integer_or_none(**rest: Any) -> Setting[int | None]:
    """Declare a whole number that may be left out."""
    return Setting("int", None, optional=True, **rest)


def duration_ms_or_none(**rest: Any) -> Setting[int | None]:
    """Declare a time in milliseconds that may be left out."""
    return Setting("ms", None, optional=True, **rest)


def settings_of(owner: type) -> Iterator[Setting[Any]]:
    """Yield the settings that a class and its bases declare, in order of declaration, those of the bases first."""
    for each in reversed(owner.__mro__):
        yield from (setting for setting in vars(each).values() if isinstance(setting, Setting))


class Settings:
    """Values of all keys that a class declares as attributes. Immutable."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update({each.attribute: each.value(values) for each in settings_of(type(self))})

    def but(self, **attributes: object) -> Self:
        """Return a copy with other values of these attributes, which are not checked."""
        changed = copy(self)
        vars(changed).update(attributes)
        return changed

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} never changes: {name}")


class ConfigDef:
    """A table of keys. `what` names it in messages, for example "topic config".

    `instead`: what an error says of keys of Kafka's that are not in the table; `note`: what it adds for other names.
    """

    def __init__(
        self, what: str, keys: Iterable[ConfigKey], *, instead: Mapping[str, str] | None = None, note: str = ""
    ) -> None:
        self.what = what
        self._note = note
        self._keys: dict[str, ConfigKey] = {}
        for key in keys:
            assert key.name not in self._keys, f"{key.name} stands twice in {what}"
            self._keys[key.name] = key
        self._by_variable = {key.variable: key for key in self._keys.values()}
        renamed = {key.mirrors: f"it is called {key.name} here" for key in self._keys.values() if key.mirrors}
        self._instead = renamed | dict(instead or {})
        assert not self._keys.keys() & self._instead.keys(), f"{what} has keys that it says it has not"

    def __iter__(self) -> Iterator[ConfigKey]:
        return iter(self._keys.values())

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def instead(self) -> Mapping[str, str]:
        """What an error says of keys of Kafka's that are not in the table."""
        return self._instead

    def key(self, name: str) -> ConfigKey:
        """Return the key of that name; underscores are taken for dots.

        Raises:
            InvalidConfig: there is no such key; the message names the nearest one.
        """
        found = self._keys.get(name.replace("_", "."))
        if found is None:
            raise InvalidConfig(f"unknown {self.what} {name!r}{self._remedy(name)}")
        return found

    def parse(self, raw: Mapping[str, object]) -> dict[str, Value]:
        """Return typed values of the keys in `raw` and of no others.

        Raises:
            InvalidConfig: a key is unknown or given in two spellings, or a value is bad.
        """
        values: dict[str, Value] = {}
        for name, text in raw.items():
            key = self.key(name)
            if key.name in values:
                raise InvalidConfig(f"{self.what} {key.name} is given twice, once as {name!r}")
            values[key.name] = key.parse(text)
        return values

    def resolve(self, raw: Mapping[str, object]) -> dict[str, Value]:
        """Return a value for every key: from `raw`, else the default. Raises as `parse` does."""
        return {key.name: key.default for key in self} | self.parse(raw)

    def canonical(self, raw: Mapping[str, object]) -> dict[str, str]:
        """Return the canonical spelling of the keys in `raw`, sorted by name. Raises as `parse` does."""
        values = self.parse(raw)
        return {name: self._keys[name].format(values[name]) for name in sorted(values)}

    def from_toml(self, text: str, source: str = "the configuration file") -> dict[str, object]:
        """Return the keys of a TOML document; dotted keys and tables mean the same.

        Raises:
            InvalidConfig: the text is not TOML, or a key is unknown. The values are not checked here.
        """
        try:
            raw = dict(_flatten(tomllib.loads(text), ""))
        except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
            raise InvalidConfig(f"{source} is not valid TOML: {error}") from None
        except RecursionError:
            raise InvalidConfig(f"{source} has too many nested tables or lists") from None
        for name in raw:
            try:
                self.key(name)
            except InvalidConfig as error:
                raise InvalidConfig(f"{source}: {error}") from None
        return raw

    def from_environment(
        self, environ: Mapping[str, str], prefix: str = "RAFTLOG_", ignore: Iterable[str] = ()
    ) -> dict[str, object]:
        """Return the keys that the environment sets: RAFTLOG_LOG_DIRS sets log.dirs.

        `ignore` names variables (with the prefix) that have another meaning. The variables that Kubernetes sets for a
        Service called `raftlog` are ignored too.

        Raises:
            InvalidConfig: a variable has the prefix and names no key.
        """
        ignored = frozenset(ignore)
        raw: dict[str, object] = {}
        for variable in sorted(environ):
            rest = variable.removeprefix(prefix)
            if not variable.startswith(prefix) or variable in ignored:
                continue
            key = self._by_variable.get(rest)
            if key is not None:
                raw[key.name] = environ[variable]
            elif _SERVICE_LINK.fullmatch(rest) is None:
                name = rest.lower().replace("_", ".")
                raise InvalidConfig(
                    f"environment variable {variable}: unknown {self.what} {name!r}{self._remedy(name)}"
                )
        return raw

    def to_markdown(self) -> str:
        """Return the documentation of all keys as a table, sorted by name."""
        lines = ["| Key | Type | Default | Allowed | Kafka | Meaning |", "| --- | --- | --- | --- | --- | --- |"]
        for key in sorted(self, key=lambda key: key.name):
            default = f"`{key.format(key.default)}`" if key.default not in (None, "", ()) else "—"
            if key.kafka_key is None:
                kafka = "—"
            else:
                kafka = "same" if key.kafka_key == key.name else f"`{key.kafka_key}`"
            kind = f"{key.kind}, dynamic" if key.dynamic else key.kind
            cells = [f"`{key.name}`", kind, default, key.expected, kafka, key.doc]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"

    def _remedy(self, name: str) -> str:
        """Return what the error for an unknown name says after it."""
        dotted = name.lower().replace("_", ".")
        if dotted in self._instead:
            return f": {self._instead[dotted]}"
        near = difflib.get_close_matches(dotted, self._keys, n=1, cutoff=0.5)
        return (f"; did you mean {near[0]!r}?" if near else "") + self._note


def parse_duration_ms(raw: object) -> int:
    """Return milliseconds.

    Raises:
        ValueError: neither a whole number nor one with a unit.
    """
    return _scaled(raw, MS_PER_UNIT)


def parse_size_bytes(raw: object) -> int:
    """Return bytes.

    Raises:
        ValueError: neither a whole number nor one with a unit.
    """
    return _scaled(raw, BYTES_PER_UNIT)


def _scaled(raw: object, units: Mapping[str, int]) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return _int64(raw)
    if not isinstance(raw, str):
        raise ValueError(raw)
    match = _NUMBER_AND_UNIT.fullmatch(raw)
    if match is None:
        raise ValueError(raw)
    number, unit = match.groups()
    if unit and (unit not in units or number.startswith("-")):
        raise ValueError(raw)
    return _int64(_digits(number) * units.get(unit, 1))


def _parse_int(raw: object) -> int:
    return _scaled(raw, {})


def _digits(number: str) -> int:
    if len(number) > 20:  # longer than any 64-bit number; int() refuses very long ones with a text of its own
        raise ValueError(number)
    return int(number)


class _TooLarge(ValueError):
    """A number exceeds 64 bits."""


def _int64(number: int) -> int:
    if number > MAX_INT64:
        raise _TooLarge(number)
    if number < -MAX_INT64 - 1:
        raise ValueError(number)
    return number


def _parse_float(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError(raw)
    try:
        number = float(raw)
    except OverflowError:
        raise ValueError(raw) from None
    if not math.isfinite(number):
        raise ValueError(raw)
    return number


def _parse_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.strip().lower() in ("true", "false"):
        return raw.strip().lower() == "true"
    raise ValueError(raw)


def _parse_string(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(raw)
    return raw


def _parse_list(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = raw.split(",") if raw.strip() else []
    if not isinstance(raw, (list, tuple)):
        raise ValueError(raw)
    items = []
    for item in raw:
        if not isinstance(item, str) or "," in item or not item.strip():
            raise ValueError(raw)
        items.append(item.strip())
    return tuple(items)


_PARSERS: dict[Kind, Callable[[object], Value]] = {
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "ms": parse_duration_ms,
    "bytes": parse_size_bytes,
    "string": _parse_string,
    "list": _parse_list,
}


def _flatten(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(raw: object) -> str:
    """Return a value for a message: text in quotes, long text cut."""
    if isinstance(raw, int) and raw.bit_length() > 256:  # str() refuses numbers with thousands of digits
        return f"a number of {raw.bit_length()} bits"
    text = repr(raw) if isinstance(raw, str) else str(raw)
    return text if len(text) <= 100 else f"{text[:97]}..."
