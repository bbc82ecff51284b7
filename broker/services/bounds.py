"""Bounds on requests before they are parsed.

Protobuf builds an object for every element of a list, so a few MiB of empty elements become gigabytes of objects. Only
produce requests carry records and are large for a reason; everything else is short.
"""

from __future__ import annotations

from typing import Any, Final

from broker.services.rewritten import RewrittenHandlers
from raftlog.errors import InvalidRequestError

MAX_REQUEST_BYTES: Final = 1 << 20
"""Of requests without records: some 20 000 partitions, or every config of a topic a hundred times over."""
LARGE_METHODS: Final = frozenset({"/raftlog.v1.Log/Produce"})
"""Bounded by socket.request.max.bytes and by `raftlog.wire.MAX_PARTS` instead."""


class RequestBounds(RewrittenHandlers):
    """Refuses long requests of methods that have no reason for them; the call ends, the connection lives on."""

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a bounded parser."""
        return handler if method in LARGE_METHODS else _bounded(handler)


def _bounded(handler: Any) -> Any:
    """Return the handler with a parser that looks at the length first."""
    parse = handler.request_deserializer

    def parse_short(data: bytes) -> Any:
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidRequestError(f"a request of {len(data)} bytes; {MAX_REQUEST_BYTES} are enough for this one")
        return parse(data)

    return handler._replace(request_deserializer=parse_short)
