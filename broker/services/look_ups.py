"""The part of the `Log` service that other brokers may ask, on the inter-node listener: `ListOffsets`.

The coordinator of a group asks it where the partitions end that the group reads, to say how far it is behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import grpc

from broker.services.calls import Context
from raftlog.errors import ShuttingDown, to_wire
from raftlog.v1 import log_pb2

SERVICE: Final = "raftlog.v1.Log"
LIST_OFFSETS: Final = "ListOffsets"

ListOffsets: TypeAlias = Callable[[log_pb2.ListOffsetsRequest], Awaitable[log_pb2.ListOffsetsResponse]]


class LookUpService:
    """States: closed -> open (`open`: the broker is registered) -> closed (`close`: it stops)."""

    def __init__(self) -> None:
        self._list_offsets: ListOffsets | None = None

    def open(self, list_offsets: ListOffsets) -> None:
        """Answer from now on."""
        self._list_offsets = list_offsets

    def close(self) -> None:
        """Answer no more."""
        self._list_offsets = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handler."""
        handler = grpc.unary_unary_rpc_method_handler(
            self.ListOffsets, log_pb2.ListOffsetsRequest.FromString, log_pb2.ListOffsetsResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {LIST_OFFSETS: handler})

    async def ListOffsets(self, request: log_pb2.ListOffsetsRequest, context: Context) -> log_pb2.ListOffsetsResponse:
        """Offsets by timestamp, by name, or of the first record from an offset on."""
        if self._list_offsets is not None:
            return await self._list_offsets(request)
        refusal = to_wire(ShuttingDown("the broker is starting or stopping"))
        return log_pb2.ListOffsetsResponse(
            results=[log_pb2.ListOffsetsResult(error=refusal) for _ in request.partitions]
        )
