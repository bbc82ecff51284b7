"""Which offsets a group is set to: how they are written, and where they may lie; pure."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from raftlog.config import parse_duration_ms
from raftlog.errors import InvalidConfig
from raftlog.types import TopicPartition

_ISO_DURATION = re.compile(
    r"P(?!$)(?:(?P<d>\d+)D)?(?:T(?!$)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?", re.ASCII
)
_SECONDS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}


class Reset(NamedTuple):
    """A partition's offset before and after. `why`: a word on why it is not what was asked for, or None."""

    part: TopicPartition
    current: int | None
    new: int
    why: str | None = None

    @property
    def row(self) -> dict[str, object]:
        """The change as a row."""
        return {
            "topic": self.part.topic,
            "partition": self.part.partition,
            "current_offset": self.current,
            "new_offset": self.new,
            "change": None if self.current is None else self.new - self.current,
        }


def bounded(part: TopicPartition, current: int | None, wanted: int, start: int, end: int) -> Reset:
    """Return the change to the wanted offset, or to the nearest one that the partition has."""
    new = min(max(wanted, start), end)
    why = None if new == wanted else f"{part} has offsets {start} to {end}, so {new} is taken in place of {wanted}"
    return Reset(part, current, new, why)


def parse_selection(texts: Iterable[str]) -> dict[str, set[int] | None]:
    """Return by topic the partitions that `TOPIC` or `TOPIC:0,1` names; None: all of them.

    Raises:
        ValueError: cannot be understood; says how it is written.
    """
    found: dict[str, set[int] | None] = {}
    for text in texts:
        topic, colon, numbers = text.partition(":")
        if not topic or (colon and not re.fullmatch(r"[0-9]+(,[0-9]+)*", numbers, re.ASCII)):
            raise ValueError(f"{text!r}: write a topic, or TOPIC:0,1 for some of its partitions")
        chosen = {int(number) for number in numbers.split(",")} if colon else None
        before = found.get(topic, set())
        found[topic] = None if chosen is None or before is None else before | chosen
    return found


def parse_time_ms(text: str) -> int:
    """Return Unix milliseconds for ISO 8601; UTC, unless it says otherwise.

    Raises:
        ValueError: it is not that.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time; write for example 2026-11-01T12:30:00Z") from None
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def parse_span_ms(text: str) -> int:
    """Return milliseconds for a duration: `90m`, `2d`, or in ISO 8601 `PT1H30M`.

    Raises:
        ValueError: it is neither.
    """
    match = _ISO_DURATION.fullmatch(text.upper())
    if match is not None:
        return int(sum(_SECONDS[unit] * float(amount) for unit, amount in match.groupdict().items() if amount) * 1000)
    try:
        found = parse_duration_ms(text)
    except (ValueError, InvalidConfig):
        found = -1
    if found < 0:
        raise ValueError(f"{text!r} is no duration; write for example 90m, 2d, or PT1H30M")
    return found


def parse_plan(text: str) -> dict[TopicPartition, int]:
    """Return offsets by partition from lines of `topic,partition,offset`, as `format_plan` writes them.

    Raises:
        ValueError: a line is not that; names the line.
    """
    found: dict[TopicPartition, int] = {}
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        if not row or (number == 1 and [cell.strip() for cell in row] == ["topic", "partition", "offset"]):
            continue
        try:
            topic, partition, offset = (cell.strip() for cell in row)
            part = TopicPartition(topic, int(partition))
            where = int(offset)
            if not topic or part.partition < 0 or where < 0:
                raise ValueError
        except ValueError:
            raise ValueError(f"line {number}: {','.join(row)!r}: write topic,partition,offset") from None
        if part in found:
            raise ValueError(f"line {number}: {part} is there twice")
        found[part] = where
    return found


def format_plan(offsets: Mapping[TopicPartition, int]) -> str:
    """Return offsets as `parse_plan` takes them."""
    return "".join(f"{part.topic},{part.partition},{offset}\n" for part, offset in offsets.items())
