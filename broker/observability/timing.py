"""How long calls take: an interceptor for every method that is one request and one response.

The streams of produce and fetch carry many requests each, and count for themselves.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from broker.observability.counters import Counters
from broker.services.rewritten import RewrittenHandlers
from raftlog.errors import from_wire
from raftlog.v1.common_pb2 import Error


class CallTimer(RewrittenHandlers):
    """Counts calls by method and outcome, and the seconds they took."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a clock around it."""
        if handler.unary_unary is None:
            return handler
        return handler._replace(unary_unary=self._around(method.rpartition("/")[2], handler.unary_unary))

    def _around(self, name: str, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        counters = self._counters.request(name)

        async def timed(request: Any, context: Any) -> Any:
            started_s = time.monotonic()
            outcome = "ABORTED"
            try:
                response = await call(request, context)
                outcome = _outcome(response)
                return response
            finally:
                counters.outcomes[outcome] += 1
                counters.stages["total"].observe(time.monotonic() - started_s)

        return timed


def _outcome(response: Any) -> str:
    """Return the name of the error that a response carries, "NONE" without one; those of its parts do not count."""
    error = getattr(response, "error", None)
    return type(from_wire(error)).__name__ if isinstance(error, Error) and error.code else "NONE"
