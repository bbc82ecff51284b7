"""Values of options: parses the text from Spark; errors say what is expected."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, Final

_UNITS_MS: Final = {
    "us": 0.001, "ms": 1.0, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6, "d": 8.64e7,
}  # fmt: skip
_DURATION: Final = re.compile(r"(\d+)\s*([a-z]*)")
MAX_INT64: Final = (1 << 63) - 1
_MAX_DIGITS: Final = 100


def whole_number(text: str) -> int | None:
    """Return the value of digits, if it fits 63 bits; otherwise None."""
    text = text.strip()
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:  # Python refuses to parse thousands
        return None
    return int(text) if int(text) <= MAX_INT64 else None


def given_twice(name: str, one: str, other: str) -> str:
    """Return the message for an option with two values; a password is not shown."""
    from raftlog._core.words import shown

    return f"option {name} is given twice, as {shown(name, one)!r} and as {shown(name, other)!r}; give it once"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the question whether a similar known name was meant, or `otherwise` if none is similar."""
    written = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), written, n=1, cutoff=0.7)
    return f"did you mean {written[near[0]]}?" if near else otherwise


def as_bool(name: str, value: str | None, default: bool) -> bool:
    """Return the value of true or false.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return default
    if value.strip().lower() not in ("true", "false"):
        raise ValueError(f"option {name}={value}: expected true or false")
    return value.strip().lower() == "true"


def as_count(name: str, value: str | None) -> int | None:
    """Return a whole number above 0; None without a value.

    Raises:
        ValueError: it is malformed.
    """
    if value is None:
        return None
    number = whole_number(value)
    if not number:
        raise ValueError(f"option {name}={value}: expected a whole number above 0")
    return number


def as_duration_ms(name: str, value: str | None) -> float | None:
    """Return a duration as Spark writes it, such as `15m` or `30s`, in milliseconds, which is also the default unit.

    Raises:
        ValueError: it is malformed.
    """
    if value is None:
        return None
    found = _DURATION.fullmatch(value.strip().lower())
    if found is None or len(found[1]) > _MAX_DIGITS or (found[2] or "ms") not in _UNITS_MS:
        raise ValueError(f"option {name}={value}: expected a number and one of {', '.join(_UNITS_MS)}, such as 15m")
    return int(found[1]) * _UNITS_MS[found[2] or "ms"]


def as_partitions(name: str, value: str) -> list[tuple[str, int]]:
    """Return the partitions of `{"topicA": [0, 1], "topicB": [2]}`.

    Raises:
        ValueError: it is not of this form.
    """
    wanted = f'option {name}={value}: expected JSON like {{"topicA": [0, 1], "topicB": [2]}}'
    parsed = _object(wanted, value)
    found = []
    for topic, partitions in parsed.items():
        if not isinstance(partitions, list):
            raise ValueError(wanted)
        found += [(topic, _number(wanted, partition)) for partition in partitions]
    if not found:
        raise ValueError(f"{wanted}; it names no partition")
    return sorted(set(found))


def as_partition_numbers(name: str, value: str, least: int) -> dict[tuple[str, int], int]:
    """Return the numbers, at least `least`, of the partitions in `{"topicA": {"0": 23, "1": -1}}`.

    Raises:
        ValueError: it is not of this form.
    """
    wanted = f'option {name}={value}: expected JSON like {{"topicA": {{"0": 23, "1": 42}}}}'
    found: dict[tuple[str, int], int] = {}
    for topic, numbers in _object(wanted, value).items():
        if not isinstance(numbers, dict):
            raise ValueError(wanted)
        for partition, number in numbers.items():
            if not partition.isascii() or not partition.isdigit():
                raise ValueError(f"{wanted}; {partition!r} is not a partition")
            found[topic, int(partition)] = _number(wanted, number, least)
    return found


def _object(wanted: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ValueError(f"{wanted}; it is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(wanted)
    return parsed


def _number(wanted: str, value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_INT64:
        raise ValueError(f"{wanted}; {value!r} is not a number of at least {least}")
    return value
