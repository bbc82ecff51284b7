"""How many ids each user has made, and the bound on it. Pure.

A coordinator keeps the user that makes an id in the id's record (docs/adr/0037):

    a record of an id appears, with its user     Made.changed    counted
    the id expires, or is deleted                Made.changed    not counted any more
    a request would make another id              UserBound.check refused, if the user has made enough

So the counts follow from the records, and the next coordinator has the same ones. A record without a user counts for no
user: older versions wrote such records, and this one does for clients without a login and for nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from raftlog.errors import PolicyViolation


class Made:
    """Numbers of ids by the user that made them. Changed by replayed records alone; each number is above 0."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """By user; to be looked at only."""

    def changed(self, before: str, after: str) -> None:
        """An id was of the user `before` and is of `after`; "": there was none, there is none, or it has no user."""
        if before == after:
            return
        if after:
            self.counts[after] = self.counts.get(after, 0) + 1
        if before:
            left = self.counts[before] - 1
            assert left >= 0, "an id that goes has been counted"
            if left:
                self.counts[before] = left
            else:
                del self.counts[before]


class UserBound:
    """The bound on the ids of one kind that a user makes, for all coordinators of a broker together.

    Args:
        limit: the key that sets it.
        what: what the ids are of, in the plural.
        most: ids that a user may have made.
        made: returns how many a user has made, of those that this broker coordinates.
        refused: is called with a user that has made too many.
    """

    def __init__(
        self,
        limit: str,
        what: str,
        most: int,
        made: Callable[[str], int],
        refused: Callable[[str], None] = lambda user: None,
    ) -> None:
        assert most > 0
        self._limit = limit
        self._what = what
        self._most = most
        self._made = made
        self._refused = refused

    def check(self, user: str) -> None:
        """Check that a user may make one more id; "" may: it is no single user.

        Raises:
            PolicyViolation: it has made as many as it may.
        """
        if not user:
            return
        made = self._made(user)
        if made >= self._most:
            self._refused(user)
            raise PolicyViolation(
                f"{user} has made {made} {self._what} that this broker coordinates, and may make {self._most} "
                f"({self._limit}). Existing ones can still be used. Use them again instead of making new ones, delete "
                "old ones or wait until they have expired, or ask an administrator to raise the limit"
            )


NO_BOUND: Final = UserBound("", "ids", 1, lambda user: 0)
"""Of a coordinator by itself, as in tests."""
