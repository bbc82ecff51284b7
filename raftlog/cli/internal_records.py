"""Records that coordinators have written, told by their topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from raftlog.cli import group_records, transaction_records

_READERS: Final[dict[str, Callable[[bytes | None, bytes | None], dict[str, Any] | None]]] = {
    group_records.TOPIC: group_records.readable,
    transaction_records.TOPIC: transaction_records.readable,
}


def readable(topic: str, key: bytes | None, value: bytes | None) -> dict[str, Any] | None:
    """Return {"key": ..., "value": ...} of a coordinator's record; None for any other, and for what cannot be read."""
    reader = _READERS.get(topic)
    return reader(key, value) if reader is not None else None
