"""What one caller may do with one kind of resource, remembered: for sessions and lists, which ask again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from broker.security.caller import Authorizer, Caller, Operation, ResourceType
from raftlog.errors import AuthorizationError

MAX_NAME: Final = 256
"""Nothing has a longer name (topics 249, groups and transactional ids 255): of one that is, the beginning counts."""
MAX_KNOWN: Final = 10_000
"""Decisions that one stream has remembered at a time."""
MAX_REFUSALS: Final = 500
"""Texts of refusals likewise: some hundred bytes each."""
AT_A_TIME: Final = 1_000

T = TypeVar("T")


class Decisions:
    """One operation on resources of one type, by one caller. Asks its authorizer once for each name and version.

    Made with `Decisions.of`, which returns None where there is no authorizer: a session then spends nothing on it. A
    refusal goes into the audit log when it is decided, not each time it is repeated.
    """

    __slots__ = ("_authorizer", "_caller", "_known", "_log", "_operation", "_refusals", "_resource", "_version")

    def __init__(
        self, who: Caller, authorizer: Authorizer, operation: Operation, resource: ResourceType, *, log: bool
    ) -> None:
        self._caller = who
        self._authorizer = authorizer
        self._operation = operation
        self._resource = resource
        self._log = log
        self._version: object = authorizer.version
        self._known: dict[str | None, bool] = {}
        self._refusals: dict[str, tuple[type[AuthorizationError], str]] = {}

    @classmethod
    def of(cls, who: Caller, operation: Operation, resource: ResourceType, *, log: bool = True) -> Decisions | None:
        """Return the decisions about a caller; None: everything is allowed, and always will be. `log`: as of `may`."""
        return None if who.authorizer is None else cls(who, who.authorizer, operation, resource, log=log)

    @property
    def version(self) -> object:
        """As `Authorizer.version`: what stands has to be looked at anew when it changes."""
        return self._authorizer.version

    def allow(self, name: str) -> bool:
        """Whether this is allowed with the resource of that name."""
        self._follow()
        name = name[:MAX_NAME]
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._caller.may(self._operation, self._resource, name, log=self._log)
        return found

    def check(self, name: str) -> None:
        """Check that it is allowed with the resource of that name.

        Raises:
            AuthorizationError: it is not.
        """
        if not self.allow(name):
            raise self.refusal(name)

    def check_any(self) -> None:
        """Check that it is allowed with any resource at all.

        Raises:
            AuthorizationError: it is not.
        """
        self._follow()
        found = self._known.get(None)
        if found is None:
            found = self._known[None] = self._caller.may_any(self._operation, self._resource)
        if not found:
            raise self.refusal("*")

    def refusal(self, name: str) -> AuthorizationError:
        """Return the error about the resource of that name: a new one each time, since who raises it adds to it."""
        name = name[:MAX_NAME]
        found = self._refusals.get(name)
        if found is None:
            caller = self._caller
            error = self._authorizer.refusal(caller.principal, self._operation, self._resource, name, caller.host)
            if len(self._refusals) >= MAX_REFUSALS:
                self._refusals.clear()
            found = self._refusals[name] = type(error), str(error)
        kind, text = found
        return kind(text)

    def _follow(self) -> None:
        """Forget what was decided before something changed, or what is too much."""
        version = self._authorizer.version
        if version != self._version or len(self._known) >= MAX_KNOWN:
            self._version = version
            self._known.clear()


async def allowed_of(decisions: Decisions | None, listed: list[T], name: Callable[[T], str]) -> list[T]:
    """Return what is allowed of a list, by the name of each; lets others have their turn."""
    if decisions is None:
        return listed
    shown: list[T] = []
    for start in range(0, len(listed), AT_A_TIME):
        shown += [each for each in listed[start : start + AT_A_TIME] if decisions.allow(name(each))]
        await asyncio.sleep(0)
    return shown
