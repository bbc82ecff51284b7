"""W3C trace context as text: the header `traceparent`, https://www.w3.org/TR/trace-context/. Pure.

    version  "-" trace id  "-" span id  "-" flags
    00        -  32 hex     -  16 hex    -  2 hex     flags: bit 0, the trace is sampled

Only sampled traces get spans; others are passed on unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
MAX_TRACES: Final = 16
"""A broker makes spans for at most this many traces of a batch or frame; the wire contract names the number."""

TRACE_ID: Final = slice(3, 35)
"""The characters of the trace id in a traceparent."""

_SAMPLED: Final = 1
_LENGTH: Final = 55
_MAX_LENGTH: Final = 512
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII | re.DOTALL)


class Traceparent(NamedTuple):
    """A reference to a span. Both ids are above zero."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether the trace is recorded."""
        return bool(self.flags & _SAMPLED)

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


def parse_traceparent(text: str | bytes | None) -> Traceparent | None:
    """Return the parsed header, or None if it is invalid. As the recommendation requires, accept later versions."""
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    if text is None or len(text) > _MAX_LENGTH:
        return None
    form = _FORM.fullmatch(text)
    if form is None or form[1] == "ff" or (form[1] == "00" and len(text) != _LENGTH):
        return None
    parent = Traceparent(int(form[2], 16), int(form[3], 16), int(form[4], 16))
    return parent if parent.trace_id and parent.span_id else None


def sampled_traces(traceparents: Iterable[str | bytes]) -> list[Traceparent]:
    """Return the first named span of each sampled trace; skip malformed texts.

    Only the first `MAX_TRACES` texts are read, so that a long list costs no time.
    """
    found: dict[int, Traceparent] = {}
    for text in islice(traceparents, MAX_TRACES):
        parent = parse_traceparent(text)
        if parent is not None and parent.sampled:
            found.setdefault(parent.trace_id, parent)
    return list(found.values())
