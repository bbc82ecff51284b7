"""Interceptors that put something around the handlers of a server; each is rewritten once, at its first call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio


class RewrittenHandlers(aio.ServerInterceptor):
    """Serves what `rewrite` makes of each handler."""

    def __init__(self) -> None:
        self._rewritten: dict[Any, Any] = {}
        """Handlers of the server, whose methods are few, and what became of them."""

    @abstractmethod
    def rewrite(self, method: str, handler: Any) -> Any:
        """Return what serves `method` (`/package.Service/Method`): the same handler where nothing is to be done."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, rewritten."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        key = handler_call_details.method, handler  # two methods may have equal handlers
        rewritten = self._rewritten.get(key)
        if rewritten is None:
            rewritten = self._rewritten[key] = self.rewrite(handler_call_details.method, handler)
        return rewritten  # type: ignore[no-any-return] # grpc's handler is a named tuple that its types do not tell
