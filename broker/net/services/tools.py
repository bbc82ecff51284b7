"""gRPC's own services on the listener for clients: health checking and server reflection, each behind a key.

Health (grpc.health.v1) answers what `/readyz` answers, for the service "" and for each service of raftlog: load
balancers and service meshes ask for it. `Watch` sends a status when it has changed, and looks every WATCH_EVERY_S: a
broker has one state, and no watcher can hold up another one or the broker's stop.

Reflection (grpc.reflection.v1alpha) shows the contract in proto/, so that grpcurl and its like call a broker without
the .proto files.

`Tools.methods` are all methods of the listener, for `Metadata.ApiVersions`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from broker.security.permissions import RULES, TOOLS
from raftlog._client.connections import refuse
from raftlog.errors import BrokerOverloaded, InvalidRequestError

WATCH_EVERY_S: Final = 0.5
MAX_WATCHERS: Final = 100
"""Watches of all clients together; a load balancer has one for each broker."""

_Context = aio.ServicerContext[Any, Any]
_Status = health_pb2.HealthCheckResponse
_SERVICES: Final = frozenset(method.split("/")[1] for method in RULES)


class HealthService:
    """Answers whether this broker serves; `is_ready` is asked at every look."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._watchers = 0

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        """Answer for the broker (""), or for one of its services."""
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            text = f"no service {request.service[:100]!r}; there are {', '.join(sorted(_SERVICES))}"
            await refuse(context, grpc.StatusCode.NOT_FOUND, InvalidRequestError(text), text)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: _Context) -> health_pb2.HealthListResponse:
        """Answer for the broker and for each of its services."""
        services = ("", *sorted(_SERVICES))
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in services}
        )

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Send the status now, and whenever it has changed."""
        if self._watchers >= MAX_WATCHERS:
            text = f"this broker serves {MAX_WATCHERS} watches of its health already"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, BrokerOverloaded(text), text)
        self._watchers += 1
        try:
            sent: int | None = None
            while True:
                status = self._status(request.service)
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                await asyncio.sleep(WATCH_EVERY_S)
        finally:
            self._watchers -= 1

    def _status(self, service: str) -> int:
        known = not service or service in _SERVICES
        status = (_Status.SERVING if self._is_ready() else _Status.NOT_SERVING) if known else _Status.SERVICE_UNKNOWN
        return int(status)


class Tools:
    """The services that are turned on; `add_to` adds them to a server."""

    def __init__(self, is_ready: Callable[[], bool], *, health: bool, reflection: bool) -> None:
        self._is_ready = is_ready
        self._health = health
        self._reflection = reflection

    def methods(self) -> list[str]:
        """Return the full names of the methods of the listener for clients."""
        tools = [each for each in TOOLS if (self._health if each.startswith("/grpc.health.") else self._reflection)]
        return [*RULES, *tools]

    def add_to(self, server: aio.Server) -> None:
        """Add the services."""
        if self._health:
            health_pb2_grpc.add_HealthServicer_to_server(HealthService(self._is_ready), server)
        if self._reflection:
            names = sorted({method.split("/")[1] for method in self.methods()})
            reflection.enable_server_reflection(names, server)
