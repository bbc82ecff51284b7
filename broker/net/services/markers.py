"""The `Markers` service of the inter-node listener.

`Write` takes transaction markers from coordinators on other brokers. With `Verify`, a group coordinator asks whether a
transaction is open (`broker.coordinator.transactions.verifier`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Final, TypeAlias

import grpc

from broker.coordinator.transactions.marker_sender import Errors, LocalMarkers, from_message
from broker.net.services.calls import Context, longest_wait_s
from raftlog.errors import RaftlogError, RequestTimedOut, ShuttingDown, to_wire
from raftlog.v1 import transaction_pb2
from raftlog.v1.common_pb2 import Error

SERVICE: Final = "raftlog.v1.Markers"
METHOD: Final = "Write"
VERIFY: Final = "Verify"
WAIT_MS: Final = 1_000
"""How long a response waits for its markers to be committed; after that, markers still pending get RequestTimedOut."""

VerifyHere: TypeAlias = Callable[
    [transaction_pb2.VerifyTransactionRequest, float], Awaitable[transaction_pb2.VerifyTransactionResponse]
]
"""Returns this broker's coordinator's answer about a transaction, within the given seconds."""


class MarkerService:
    """States: closed -> open (`open`: the broker is registered) -> closed (`close`: it stops)."""

    def __init__(self) -> None:
        self._local: LocalMarkers | None = None
        self._verify: VerifyHere | None = None

    def open(self, local: LocalMarkers, verify: VerifyHere | None = None) -> None:
        """Serve `Write` and `Verify` from now on."""
        self._local = local
        self._verify = verify

    def close(self) -> None:
        """Refuse all calls from now on."""
        self._local = self._verify = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handler."""
        write = grpc.unary_unary_rpc_method_handler(
            self.Write,
            transaction_pb2.WriteMarkersRequest.FromString,
            transaction_pb2.WriteMarkersResponse.SerializeToString,
        )
        verify = grpc.unary_unary_rpc_method_handler(
            self.Verify,
            transaction_pb2.VerifyTransactionRequest.FromString,
            transaction_pb2.VerifyTransactionResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: write, VERIFY: verify})

    async def Write(
        self, request: transaction_pb2.WriteMarkersRequest, context: Context
    ) -> transaction_pb2.WriteMarkersResponse:
        """Write markers. Adjacent parts for the same partition or group are written as one, and answered separately."""
        response = transaction_pb2.WriteMarkersResponse()
        local = self._local
        if local is None:
            refusal = to_wire(ShuttingDown("the broker is starting or stopping"))
            response.partitions.extend([refusal] * len(request.partitions))
            response.groups.extend([refusal] * len(request.groups))
            return response
        gathering = _Gathering()
        for (topic_id, partition), parts in groupby(request.partitions, lambda part: (part.topic_id, part.partition)):
            some = [[from_message(marker) for marker in part.markers] for part in parts]
            expected = gathering.expect(f"partition {partition}", [len(markers) for markers in some])
            local.write(topic_id, partition, list(chain.from_iterable(some)), expected)
        for group_id, groups in groupby(request.groups, lambda group: group.group_id):
            some = [[from_message(marker) for marker in group.markers] for group in groups]
            expected = gathering.expect(f"group {group_id!r}", [len(markers) for markers in some])
            local.write_group(group_id, list(chain.from_iterable(some)), expected)
        errors = await gathering.results(longest_wait_s(context, WAIT_MS))
        response.partitions.extend(errors[: len(request.partitions)])
        response.groups.extend(errors[len(request.partitions) :])
        return response

    async def Verify(
        self, request: transaction_pb2.VerifyTransactionRequest, context: Context
    ) -> transaction_pb2.VerifyTransactionResponse:
        """Say whether a transaction that this broker coordinates is open and includes a group."""
        try:
            if self._verify is None:
                raise ShuttingDown("the broker is starting or stopping")
            return await self._verify(request, longest_wait_s(context, WAIT_MS))
        except RaftlogError as error:
            return transaction_pb2.VerifyTransactionResponse(error=to_wire(error))


class _Gathering:
    """The results of several writes, in request order, as far as they have arrived."""

    def __init__(self) -> None:
        self._errors: list[Error | None] = []
        self._names: list[str] = []
        self._left = 0
        self._all = asyncio.Event()
        self._all.set()

    def expect(self, name: str, counts: Sequence[int]) -> partial[None]:
        """Return the callback for one more write, whose errors belong to parts of `counts` markers each."""
        first = len(self._errors)
        self._errors += [None] * len(counts)
        self._names += [name] * len(counts)
        self._left += 1
        self._all.clear()
        return partial(self._take, first, counts)

    def _take(self, first: int, counts: Sequence[int], errors: Errors) -> None:
        if self._errors[first] is not None:
            return
        rest = iter(errors)
        for index, count in enumerate(counts, first):
            failed = [error for error in islice(rest, count) if error is not None]
            self._errors[index] = to_wire(failed[0]) if failed else Error()
        self._left -= 1
        if not self._left:
            self._all.set()

    async def results(self, wait_s: float) -> list[Error]:
        """Return the results, with RequestTimedOut for each that has not arrived within `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._all.wait()
        expected = zip(self._errors, self._names, strict=True)
        return [self._late(name) if error is None else error for error, name in expected]

    def _late(self, name: str) -> Error:
        return to_wire(RequestTimedOut(f"markers of {name} are not committed yet"))
