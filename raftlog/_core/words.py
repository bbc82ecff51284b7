"""Numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return `1 record`, `2,000 records`; `many` is `one` with an s unless it is given."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def some(things: Sequence[object], at_most: int) -> str:
    """Return the first of them, and how many there are besides: `a, b and 1,000 more`."""
    more = f" and {len(things) - at_most:,} more" if len(things) > at_most else ""
    return ", ".join(map(str, things[:at_most])) + more
