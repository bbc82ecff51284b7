"""Bounds on requests before they are parsed.

Protobuf builds an object for every element of a list, so a few MiB of empty elements become gigabytes of objects. Only
produce requests carry records and are large for a reason; everything else is short.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc import aio

from raftlog.errors import InvalidRequestError

MAX_REQUEST_BYTES: Final = 1 << 20
"""Of requests without records: some 20 000 partitions, or every config of a topic a hundred times over."""
LARGE_METHODS: Final = frozenset({"/raftlog.v1.Log/Produce"})
"""Bounded by socket.request.max.bytes and by `raftlog.wire.MAX_PARTS` instead."""


class RequestBounds(aio.ServerInterceptor):
    """Refuses long requests of methods that have no reason for them; the call ends, the connection lives on."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler with a bounded parser."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in LARGE_METHODS:
            return handler  # type: ignore[no-any-return] # grpc's handler is a named tuple that its types do not tell
        parse = handler.request_deserializer

        def parse_short(data: bytes) -> Any:
            if len(data) > MAX_REQUEST_BYTES:
                raise InvalidRequestError(
                    f"a request of {len(data)} bytes; {MAX_REQUEST_BYTES} are enough for this one"
                )
            return parse(data)

        return handler._replace(request_deserializer=parse_short)  # type: ignore[no-any-return] # as above
