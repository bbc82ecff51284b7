"""How a record is printed: as text, as JSON, or its bytes as they are."""

from __future__ import annotations

import base64
from typing import Any

NULL_MARK = "␀"
"""Stands for no key or no value, which neither the text `null` nor an empty text is."""


def text_of(data: bytes | None) -> str:
    """Return bytes for reading: UTF-8 where they are that, `\\x..` for what is not, `␀` for None."""
    return NULL_MARK if data is None else data.decode(errors="backslashreplace")


def json_bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return {name: text}, or {name_base64: ...} for bytes that are not UTF-8; `raftlog produce` takes both."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def json_record(
    *, key: bytes | None, value: bytes | None, headers: Any, timestamp_ms: int, offset: int, **place: object
) -> dict[str, object]:
    """Return a record as `--output json` prints it; `place` stands first (topic, partition)."""
    record: dict[str, object] = {**place, "offset": offset, "timestamp": timestamp_ms}
    record |= json_bytes("key", key)
    record |= json_bytes("value", value)
    if headers:
        record["headers"] = [[name, None if data is None else text_of(data)] for name, data in headers]
    return record
