"""Checks of the arguments of a record. Keys and values are bytes; the error for a str says how to encode it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from raftlog.errors import InvalidConfig, InvalidRequestError
from raftlog.format.columns import binary_array, headers_array, would_import_pandas
from raftlog.types import Header

HeadersLike = Mapping[str, bytes | None] | Iterable[Header]
C = TypeVar("C")


def as_converter(name: str, given: C) -> C:
    """Return a serializer or deserializer, which is a function or None.

    Raises:
        InvalidConfig: it is neither, but for example the name of a class.
    """
    if given is not None and not callable(given):
        to_or_from = "from" if name.endswith("deserializer") else "to"
        raise InvalidConfig(f"{name} is {given!r}: give a function that converts {to_or_from} bytes")
    return given


def converted(convert: Callable[[Any], Any] | None, item: Any, name: str, where: str) -> Any:
    """Return the converted key or value; None stays None.

    An exception of the converter gets a note that names it, and `where`.
    """
    if convert is None or item is None:
        return item
    try:
        return convert(item)
    except Exception as error:
        error.add_note(f"(raised by {name} for {where})")
        raise


def as_bytes(item: Any, name: str) -> bytes | None:
    """Return `item` as bytes; None stays None (a null key, or a tombstone).

    Raises:
        TypeError: any other type; the message says what to do.
    """
    if item is None or type(item) is bytes:
        return item
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)  # a copy: the caller may reuse the buffer before it is sent
    if isinstance(item, str):
        raise TypeError(f"{name} must be bytes, not str; encode it first: {name}={_shown(item)}.encode()")
    raise TypeError(f"{name} must be bytes or None, not {type(item).__name__}; serialize it first")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 20 else text[:17] + "...")


def as_headers(headers: Any) -> tuple[Header, ...]:
    """Return headers as a tuple of (name, bytes or None).

    Raises:
        TypeError: not a mapping or pairs of str and bytes.
    """
    if not headers:
        return ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    checked = []
    for pair in pairs:
        try:
            name, content = pair
        except (TypeError, ValueError):
            raise TypeError(f"headers must be pairs of a name and bytes, not {pair!r}") from None
        if not isinstance(name, str):
            raise TypeError(f"a header's name must be str, not {type(name).__name__}")
        checked.append((name, as_bytes(content, "header")))
    return tuple(checked)


LAST_TIMESTAMP_MS: Final = 253_402_300_799_999
"""The end of the year 9999: later times fit neither a datetime nor the microseconds of Arrow and Spark."""
AFTER_THE_LAST: Final = "is after the year 9999; it counts milliseconds since 1970, not microseconds"


def as_timestamp(timestamp_ms: Any) -> int:
    """Return Unix milliseconds.

    Raises:
        TypeError: not an int. InvalidRequestError: negative, or after the year 9999.
    """
    if not isinstance(timestamp_ms, int) or isinstance(timestamp_ms, bool):
        raise TypeError(f"timestamp_ms must be an int (Unix milliseconds), not {type(timestamp_ms).__name__}")
    if timestamp_ms < 0:
        raise InvalidRequestError(f"timestamp_ms {timestamp_ms} is negative; it counts milliseconds since 1970")
    if timestamp_ms > LAST_TIMESTAMP_MS:
        raise InvalidRequestError(f"timestamp_ms {timestamp_ms} {AFTER_THE_LAST}")
    return timestamp_ms


def as_partition(partition: Any) -> int:
    """Return a partition number.

    Raises:
        TypeError: not an int.
    """
    if not isinstance(partition, int) or isinstance(partition, bool):
        raise TypeError(f"partition must be an int, not {type(partition).__name__}")
    return partition


def as_topic(topic: Any) -> str:
    """Return a topic name.

    Raises:
        TypeError: not a str.
    """
    if not isinstance(topic, str):
        raise TypeError(f"topic must be str, not {type(topic).__name__}")
    return topic


def as_batches(values: Any, key: Any, partition: Any, headers: Any, timestamp_ms: Any) -> list[Any]:
    """Return the arguments of `send_batch` as `pyarrow.RecordBatch`es.

    Raises:
        TypeError, InvalidRequestError: an unsupported type, or columns of different lengths.
    """
    if isinstance(values, (pa.RecordBatch, pa.Table)):
        if not all(extra is None for extra in (key, partition, headers, timestamp_ms)):
            raise InvalidRequestError(
                "Arrow data has its own columns; put key, partition, headers and timestamp into it"
            )
        return values.to_batches() if isinstance(values, pa.Table) else [values]
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    value = values if isinstance(values, pa.Array) else _column(list(values), pa.binary(), "values")
    rows = len(value)
    columns = {"value": value}
    if key is not None:
        columns["key"] = _repeated(key, rows, pa.binary(), "key", single=(bytes, bytearray, memoryview, str))
    if partition is not None:
        columns["partition"] = _repeated(partition, rows, pa.int32(), "partition", single=(int,))
    if timestamp_ms is not None:
        columns["timestamp"] = _repeated(timestamp_ms, rows, pa.int64(), "timestamp_ms", single=(int,))
    if headers is not None:
        columns["headers"] = headers_array([as_headers(headers) or None] * rows)
    for name, column in columns.items():
        if len(column) != rows:
            raise InvalidRequestError(f"{rows} values but {len(column)} of {name}; give one for all, or one for each")
    return [pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))]


def _column(items: Sequence[Any], kind: Any, name: str) -> Any:
    if kind == pa.binary() and would_import_pandas() and all(item is None or type(item) is bytes for item in items):
        return binary_array(items)
    try:
        return pa.array(items, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must all be of one kind, {kind}: {error}") from None


def _repeated(item: Any, rows: int, kind: Any, name: str, *, single: tuple[type, ...]) -> Any:
    if isinstance(item, pa.ChunkedArray):
        return item.combine_chunks()
    if isinstance(item, pa.Array):
        return item
    if isinstance(item, single):
        if kind == pa.binary():
            item = as_bytes(item, name)
        return pa.repeat(pa.scalar(item, kind), rows)
    return _column(list(item), kind, name)
