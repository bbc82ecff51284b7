"""Who calls on the inter-node listener: nodes, by their certificates."""

from __future__ import annotations

import inspect
from typing import Any

import grpc

from broker.services.rewritten import RewrittenHandlers
from raftmeta.quorum.peer_identity import NODE_URI, node_ids_of, peer_nodes

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class NodesOnly(RewrittenHandlers):
    """Refuses calls with a certificate that names no node, and has handlers find those it names in `peer_nodes`."""

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a look at the certificate before it."""
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        behavior = getattr(handler, kind)
        return handler._replace(**{kind: _generator(behavior) if _yields(behavior) else _coroutine(behavior)})


def _coroutine(behavior: Any) -> Any:
    async def identified(request: Any, context: Any) -> Any:
        await _identify(context)
        return await behavior(request, context)

    return identified


def _generator(behavior: Any) -> Any:
    async def identified(request: Any, context: Any) -> Any:
        await _identify(context)
        async for response in behavior(request, context):
            yield response

    return identified


def _yields(behavior: Any) -> bool:
    return inspect.isasyncgenfunction(behavior)


async def _identify(context: Any) -> None:
    nodes = node_ids_of(context.auth_context())
    if nodes is not None and not nodes:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"this listener is for nodes, and the certificate names none; issue one with {NODE_URI}ID for a node, "
            "clients connect to `listeners`",
        )
    peer_nodes.set(nodes)
