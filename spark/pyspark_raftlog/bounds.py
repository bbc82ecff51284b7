"""Where a query begins and where a batch query ends, as its options say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark_raftlog.values import MAX_INT64, as_partition_numbers, whole_number

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
OFFSETS: Final = "offsets"
TIMES: Final = "times"
TIME: Final = "time"

_LATEST_OFFSET: Final = -1
_EARLIEST_OFFSET: Final = -2


@dataclass(frozen=True)
class Bound:
    """One end of what is read. `option` is the option that says it, for messages.

    `kind`: EARLIEST, LATEST; OFFSETS: `numbers` has an offset for each partition (-1 latest, -2 earliest); TIMES: a
    time (ms) for each partition; TIME: `time_ms` for all of them. Where there is no record from a time on, the bound is
    the end of the partition, or an error unless `or_latest`.
    """

    option: str
    kind: str
    numbers: tuple[tuple[tuple[str, int], int], ...] = ()
    time_ms: int = 0
    or_latest: bool = True


def starting(own: Mapping[str, str], default: str) -> Bound:
    """Return where the query begins: by one time, else by times, else by offsets, else at the default.

    Raises:
        ValueError: a value that cannot be.
    """
    strategy = own.get("startingOffsetsByTimestampStrategy", "error").strip().lower()
    if strategy not in ("error", LATEST):
        raise ValueError(f"option startingOffsetsByTimestampStrategy={strategy}: expected error or latest")
    return _bound(own, "starting", default, or_latest=strategy == LATEST)


def ending(own: Mapping[str, str]) -> Bound:
    """Return where a batch query ends, as `starting`; by default at the end of each partition.

    Raises:
        ValueError: a value that cannot be.
    """
    return _bound(own, "ending", LATEST, or_latest=True)


def _bound(own: Mapping[str, str], side: str, default: str, *, or_latest: bool) -> Bound:
    name = f"{side}Timestamp"
    if name in own:
        time_ms = whole_number(own[name])
        if time_ms is None:
            raise ValueError(f"option {name}={own[name]}: expected Unix time in milliseconds, at most {MAX_INT64}")
        return Bound(name, TIME, time_ms=time_ms, or_latest=or_latest)
    name = f"{side}OffsetsByTimestamp"
    if name in own:
        times = as_partition_numbers(name, own[name], 0)
        return Bound(name, TIMES, tuple(sorted(times.items())), or_latest=or_latest)
    name = f"{side}Offsets"
    text = own.get(name, default).strip()
    if text.lower() in (EARLIEST, LATEST):
        return Bound(name, text.lower())
    if not text.startswith("{"):
        raise ValueError(f'option {name}={text}: expected earliest, latest, or JSON like {{"topicA": {{"0": 23}}}}')
    least = _EARLIEST_OFFSET if side == "starting" else _LATEST_OFFSET
    return Bound(name, OFFSETS, tuple(sorted(as_partition_numbers(name, text, least).items())))
