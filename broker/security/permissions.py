"""The interceptor that refuses calls for which permissions are missing; streams look themselves (`rules.inside`).

It stands behind the one that says who calls. Without an authorizer a call costs one look at who it is.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import grpc

from broker.security.caller import Caller, caller
from broker.security.decisions import MAX_NAME
from broker.security.rules import RULES, Either, Need, Rule, anybody, inside
from broker.services.rewritten import RewrittenHandlers
from raftlog.errors import AuthorizationError, ClusterAuthorizationFailed
from raftmeta.image import MetadataImage

MAX_DETAILS: Final = 2_000
"""Characters of a refusal: it travels in a header."""

AT_A_TIME: Final = 500
"""Needs of a request between which the event loop is free."""


class Permissions(RewrittenHandlers):
    """Aborts with PERMISSION_DENIED, `ClassOfError: what is missing`, before the handler sees the request."""

    def __init__(self, image: Callable[[], MetadataImage], rules: Mapping[str, Rule] = RULES) -> None:
        super().__init__()
        self._image = image
        self._rules = rules

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a look at what the request needs before it."""
        rule = self._rules.get(method)
        if rule in (anybody, inside):
            return handler
        if rule is None:
            rule = _no_rule(method)
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._before(rule, handler.unary_unary))
        if handler.unary_stream is not None and not inspect.isasyncgenfunction(handler.unary_stream):
            return handler._replace(unary_stream=self._before(rule, handler.unary_stream))
        return _refused(method, handler)

    def _before(self, rule: Rule, behavior: Any) -> Any:
        async def permitted(request: Any, context: Any) -> Any:
            who = caller.get()
            if who.authorizer is not None and (refusal := await self._refusal(who, rule, request)) is not None:
                await _abort(context, refusal)
            return await behavior(request, context)

        return permitted

    async def _refusal(self, who: Caller, rule: Rule, request: Any) -> AuthorizationError | None:
        try:
            for number, either in enumerate(rule(request, self._name_of), 1):
                check(who, either)
                if number % AT_A_TIME == 0:
                    await asyncio.sleep(0)
        except AuthorizationError as refusal:
            return refusal
        return None

    def _name_of(self, topic_id: bytes) -> str | None:
        topic = self._image().topics.get(topic_id)
        return None if topic is None else topic.name


def check(who: Caller, either: Either) -> None:
    """Check that one of these needs is met.

    Raises:
        AuthorizationError: none is; about the first.
    """
    if len(either) > 1 and any(_may(who, need) for need in either):
        return
    first = either[0]
    assert first.name is not None, "a refusal names what it is about"
    who.check(first.operation, first.resource, first.name[:MAX_NAME])


def _may(who: Caller, need: Need) -> bool:
    if need.name is None:
        return who.may_any(need.operation, need.resource)
    return who.may(need.operation, need.resource, need.name[:MAX_NAME], log=False)


def _no_rule(method: str) -> Rule:
    def rule(request: Any, name_of: Any) -> Any:
        raise _forgotten(method)

    return rule


def _forgotten(method: str) -> AuthorizationError:
    return ClusterAuthorizationFailed(f"nothing says who may call {method}, so nobody may: this is a bug of the broker")


def _refused(method: str, handler: Any) -> Any:
    """Return the handler of a stream that nothing looks at: it is refused, as a method without a rule is."""
    kind = next(kind for kind in ("unary_stream", "stream_unary", "stream_stream") if getattr(handler, kind))
    behavior = getattr(handler, kind)

    async def coroutine(request: Any, context: Any) -> Any:
        if caller.get().authorizer is not None:
            await _abort(context, _forgotten(method))
        return await behavior(request, context)

    async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
        if caller.get().authorizer is not None:
            await _abort(context, _forgotten(method))
        async for response in behavior(request, context):
            yield response

    return handler._replace(**{kind: generator if inspect.isasyncgenfunction(behavior) else coroutine})


async def _abort(context: Any, refusal: AuthorizationError) -> None:
    details = f"{type(refusal).__name__}: {refusal}"
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, details[:MAX_DETAILS])
