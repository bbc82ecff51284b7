"""How many ids each user has made, what its transactions name, and the bounds on these. Pure.

A coordinator keeps the user that makes an id in the id's record (docs/adr/0037):

    a record of an id appears, with its user     Made.changed    counted
    the id expires, or is deleted                Made.changed    not counted any more
    a request would make another id              UserBound.check refused, if the user has made enough

So the counts follow from the records, and the next coordinator has the same ones. A record without a user counts for no
user: older versions wrote such records, and this one does for clients without a login and for nodes.

Amounts of a user follow from records in the same way (`Amounts`, `AmountBound`): of partitions and groups that open
transactions and stages name, each of which gets a marker in the end, and of committed offsets (docs/adr/0054). So does
the memory for members, except for joining members of a classic group, which no record has yet (docs/adr/0057).

A group keeps the end of a transaction that named it, whether or not there is such a group, and nothing can refuse a
transaction's end. So what is bounded is what transactions name (`NamedGroups`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from raftlog.errors import BrokerOverloaded, PolicyViolation, RaftlogError


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


class Amounts:
    """How much of something each user has; each amount is above 0."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """By user; to be looked at only."""

    def changed(self, user: str, by: int) -> None:
        """A user has `by` more, or less; "": it has no user, and does not count."""
        if not user or not by:
            return
        left = self.counts.get(user, 0) + by
        assert left >= 0, "what goes has been counted"
        if left:
            self.counts[user] = left
        else:
            del self.counts[user]


class AmountBound:
    """The bound on an amount of each user, for all coordinators of a broker together.

    Args:
        amount: returns how much a user has at this broker.
        most: how much it may have.
        refusal: returns the error for a user that has an amount, and asks for so much more.
    """

    def __init__(
        self, amount: Callable[[str], int], most: int, refusal: Callable[[str, int, int], RaftlogError]
    ) -> None:
        self._amount = amount
        self._most = most
        self._refusal = refusal

    def check(self, user: str, more: int) -> None:
        """Check that a user may have so much more; "" may: it is no single user. Raises the refusal: it may not."""
        if not user or more <= 0:
            return
        amount = self._amount(user)
        if amount + more > self._most:
            raise self._refusal(user, amount, more)


MOST_OWED: Final = 250_000
"""Markers of one user: 50 MB of memory, and some minutes of work if all are to be written."""


def owed_bound(owed: Callable[[str], int], most: int = MOST_OWED) -> AmountBound:
    """Return the bound on the markers of a user: one for each partition and group of its transactions and stages.

    What counts is open, or decided and not over. `owed`: returns how many a user has. Refused with BrokerOverloaded.
    """

    def refusal(user: str, amount: int, more: int) -> RaftlogError:
        return BrokerOverloaded(
            f"open transactions and stages of {user} name {amount} partitions and groups at this broker, and may name "
            f"{most}: {more} more cannot be added before some of them have ended. Write to fewer partitions in each, "
            "or end them sooner"
        )

    return AmountBound(owed, most, refusal)


OFFSET_BYTES: Final = 300
"""What a committed offset takes in memory, besides its metadata."""
MOST_KEPT_BYTES: Final = 128 << 20
"""Of the offsets of one user's groups: those of 10,000 groups that read 40 partitions each."""


def kept_bound(kept: Callable[[str], int], most: int = MOST_KEPT_BYTES) -> AmountBound:
    """Return the bound on what the committed offsets of a user's groups take. `kept`: returns it, in bytes.

    Refused with PolicyViolation.
    """

    def refusal(user: str, amount: int, more: int) -> RaftlogError:
        return PolicyViolation(
            f"committed offsets of groups that {user} has made take {amount} bytes of this broker, and may take "
            f"{most}: {more} more are refused. Commit shorter metadata, or delete groups or offsets that are not needed"
        )

    return AmountBound(kept, most, refusal)


MOST_MEMBERS_BYTES: Final = 256 << 20
"""For the members of one user's groups: enough for 10,000 members that share 400,000 partitions."""


def members_bound(taken: Callable[[str], int], most: int = MOST_MEMBERS_BYTES) -> AmountBound:
    """Return the bound on the memory for the members of a user's groups. `taken`: returns a user's, in bytes.

    Refused with PolicyViolation.
    """

    def refusal(user: str, amount: int, more: int) -> RaftlogError:
        return PolicyViolation(
            f"members of groups that {user} has made take {amount} bytes of this broker's memory, and may take {most}: "
            f"{more} more are refused. Subscribe to fewer topics, or use fewer members or groups"
        )

    return AmountBound(taken, most, refusal)


NO_AMOUNT_BOUND: Final = owed_bound(lambda user: 0)
"""Of a coordinator by itself, as in tests."""


AT_A_TIME: Final = 100
"""The most groups that one call forgets, besides those that it needs room for."""


class NamedGroups:
    """The groups that transactions of each user have named lately, for all coordinators of a broker together.

    What counts is a group with a producer id: a group keeps one end for each producer id, the last one. The same group
    in the next transaction of an application counts no further.

    Args:
        limit: the key that sets the bound.
        most: groups that the transactions of a user may name in `kept_ms` and `open_ms` together.
        kept_ms: how long a group keeps the end of a transaction.
        open_ms: the longest time from the naming of a group to the transaction's end.
        refused: is called with a user whose transactions have named too many.
    """

    def __init__(
        self, limit: str, most: int, *, kept_ms: int, open_ms: int, refused: Callable[[str], None] = lambda user: None
    ) -> None:
        assert most > 0
        assert kept_ms > 0
        assert open_ms > 0
        self._limit = limit
        self._most = most
        self._counts_ms = kept_ms + open_ms
        self._refused = refused
        # Not plain dicts: finding the first of those takes the longer, the more has been removed before it.
        self._named: OrderedDict[str, OrderedDict[tuple[int, str], int]] = OrderedDict()
        """By user: when a group was last named with a producer id, the oldest first. The user of the last naming last.

        Invariant: each user has 1 to `most`.
        """

    def count(self, user: str) -> int:
        """Return how many the transactions of a user have named, some of them perhaps too long ago to count."""
        return len(self._named.get(user, ()))

    def add(self, user: str, producer_id: int, group_ids: Iterable[str], wall_ms: int) -> None:
        """Note that a transaction names groups which it has not named before; those of "" do not count.

        Raises:
            PolicyViolation: these would be too many; then none of them is noted.
        """
        pairs = [(producer_id, group_id) for group_id in group_ids]
        if not user or not pairs:
            return
        self._forget(user, len(pairs), wall_ms)  # enough: no more room than that is needed
        named = self._named.get(user) or OrderedDict[tuple[int, str], int]()
        if len(named) + sum(pair not in named for pair in pairs) > self._most:
            self._refused(user)
            raise PolicyViolation(
                f"transactions of {user} have named {len(named)} groups at this broker, and may name {self._most} "
                f"within {self._counts_ms // 1_000} s ({self._limit}; producer.id.expiration.ms and "
                "transaction.max.timeout.ms). Commit offsets for groups that they have named before, wait, or ask an "
                "administrator to raise the limit"
            )
        for pair in pairs:
            named[pair] = wall_ms
            named.move_to_end(pair)
        self._named[user] = named
        self._named.move_to_end(user)
        self._forget(next(iter(self._named)), AT_A_TIME, wall_ms)

    def _forget(self, user: str, most: int, wall_ms: int) -> None:
        """Forget groups that a user's transactions named too long ago to count, `most` at a time."""
        named = self._named.get(user)
        if named is None:
            return
        for _ in range(min(most, len(named))):
            if next(iter(named.values())) > wall_ms - self._counts_ms:
                return
            named.popitem(last=False)
        if not named:
            del self._named[user]
