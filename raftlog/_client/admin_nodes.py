"""The admin client's part that asks single nodes what they have to say of themselves."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import grpc

from raftlog._client.admin_calls import AdminCalls
from raftlog._client.connections import from_grpc
from raftlog._client.trace_metadata import call_metadata
from raftlog._node_descriptions import NodeDescription, describe_node
from raftlog.errors import (
    BrokerUnavailable,
    RaftlogError,
    RetriableError,
    UnsupportedVersion,
    from_wire,
)
from raftlog.v1 import node_pb2, node_pb2_grpc

_ADDRESS_TIMEOUT_S: Final = 5.0
_LEAST_S: Final = 0.1
_OTHERS: Final = 2
"""So many brokers are asked on behalf of this client, when the node itself is not reached."""
_SLOW_MS: Final = 20.0
"""An answer that took longer says little of the clock, and opening the connection was a part of it: one more."""


class NodeAdmin(AdminCalls):
    """Single nodes."""

    async def describe_node(self, node_id: int, timeout: float | None) -> NodeDescription:
        """Return what a node says of itself; asked through a broker, when it is none or is not reached."""

        async def attempt(deadline: float) -> NodeDescription:
            await self._metadata.refresh()
            brokers = self._metadata.view.brokers
            own = [brokers[node_id].address] if node_id in brokers else []
            others = [each.address for each in brokers.values() if not each.fenced and each.address not in own]
            others.sort(key=lambda address: address != self._last_address)  # stable
            addresses = [*own, *others[:_OTHERS]] or self._metadata.bootstrap
            first: RaftlogError | None = None
            loop = asyncio.get_running_loop()
            for number, address in enumerate(addresses):
                until = loop.time() + (deadline - loop.time()) / (len(addresses) - number)
                try:
                    found = await self._described(node_id, address, until)
                    if found.clock_uncertainty_ms > _SLOW_MS / 2:
                        again = await self._described(node_id, address, until)
                        found = min(found, again, key=lambda each: each.clock_uncertainty_ms)
                except (RetriableError, UnsupportedVersion) as error:
                    first = first or error
                else:
                    return found
            raise first or BrokerUnavailable(f"no broker is there that could ask node {node_id}")

        return await self._retried(attempt, timeout)

    async def _described(self, node_id: int, address: str, until: float) -> NodeDescription:
        left_s = max(_LEAST_S, until - asyncio.get_running_loop().time())
        stub = node_pb2_grpc.NodeStub(self._connections.channel(address))
        request = node_pb2.DescribeNodeRequest(node_id=node_id)
        asked_ms, begun_s = time.time() * 1000, time.monotonic()
        try:
            with self._counted():
                response = await stub.DescribeNode(
                    request,
                    timeout=min(_ADDRESS_TIMEOUT_S, self._options.request_timeout_ms / 1000, left_s),
                    metadata=call_metadata(),
                )
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None
        round_trip_ms = (time.monotonic() - begun_s) * 1000
        if response.error.code:
            raise from_wire(response.error)
        return describe_node(response.node, asked_ms, round_trip_ms, address)
