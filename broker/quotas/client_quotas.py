"""Rates of users and client ids, and the delay of a client that is over its quota. Pure; the caller passes the time.

Kafka computes the delay from a rate over a window of W seconds (KIP-13): with quota T and observed rate O it is
(O - T) / T * W, the time after which the rate over the longer window is T again. A token bucket that holds T * W gives
the same delay: used - T * W is its debt, and debt / T the delay. Like the windows, it credits a pause of at most W
seconds. The rate of a client that obeys is exactly T in the long run.

Every broker has rates of its own: a quota is one for each broker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from raftlog._core.security.acls import USER_PREFIX
from raftmeta.quotas import REQUEST_PERCENTAGE, QuotaEntity, limit_of
from replication.token_bucket import TokenBucket

MAX_BUCKETS: Final = 10_000
"""Rates that are followed at a time; beyond it the oldest one begins anew."""
MAX_KNOWN: Final = 30_000
"""Clients whose rates are cached until a quota changes."""
MS_OF_PERCENT: Final = 10.0
"""A percent of the event loop's time is this many ms a second."""
MAX_DELAY_MS: Final = float(2**31 - 1)

Quotas = Mapping[QuotaEntity, Mapping[str, float]]
_Scope = tuple[str, QuotaEntity]


class Usage(NamedTuple):
    """What clients that share a quota have used (of request_percentage: ms), and for how long it was exceeded."""

    key: str
    scope: QuotaEntity
    used: float
    throttled_ms: float


class Bucket:
    """What clients that share a quota have used, and their rate."""

    __slots__ = ("rate", "tokens", "used")

    def __init__(self, key: str, rate: float, window_ms: float) -> None:
        self.rate = rate
        self.used = 0.0
        self.tokens = TokenBucket(_amount_per_s(key, rate), window_ms)

    def charge(self, amount: float, now_ms: float) -> float:
        """Count what a client has used, and return for how many ms it is to be held."""
        self.used += amount
        delay_ms = self.tokens.charge(amount, now_ms)
        return delay_ms if delay_ms < MAX_DELAY_MS else MAX_DELAY_MS


class ClientQuotas:
    """The rates of one broker's clients.

    Invariant: every bucket has the rate that `limit_of` gives its scope's clients by the quotas of the last `follow`.
    """

    def __init__(self, window_ms: float) -> None:
        """`window_ms`: how long a client that was idle may send at any rate, measured in time at its quota."""
        self._window_ms = window_ms
        self._quotas: Quotas = {}
        self._keys: frozenset[str] = frozenset()
        """Those that some entity has a quota of: the others need no look-up."""
        self._buckets: OrderedDict[_Scope, Bucket] = OrderedDict()
        self._known: dict[tuple[str, str, str], Bucket | None] = {}
        self.version = 0
        """Rises when a quota changes, or buckets end: delays and buckets that were found before may be outdated."""

    def follow(self, quotas: Quotas, now_ms: float) -> None:
        """Use these quotas from now on; rates that are limited still keep their debt."""
        if quotas is self._quotas:
            return
        before, self._quotas = self._quotas, quotas
        users = _users_of_changes(before, quotas)
        self._keys = frozenset(key for values in quotas.values() for key in values)
        self._known.clear()
        self.version += 1
        for place, bucket in list(self._buckets.items()):
            key, scope = place
            if users is not None and scope.user not in users:
                continue
            limit = limit_of(quotas, key, scope.user or "", scope.client_id or "")
            if limit is None or limit.scope != scope:
                del self._buckets[place]
            elif limit.rate != bucket.rate:
                bucket.rate = limit.rate
                bucket.tokens.set_rate(_amount_per_s(key, limit.rate), now_ms)

    def find(self, principal: str, client_id: str, key: str) -> Bucket | None:
        """Return what this client's use is charged to, until `version` changes; None: it has no quota of that key."""
        return self._find(principal, client_id, key) if key in self._keys else None

    def charge(self, principal: str, client_id: str, key: str, amount: float, now_ms: float) -> float:
        """Count what the client has used, and return for how many ms it is to be held; 0 without a quota."""
        bucket = self.find(principal, client_id, key)
        return 0.0 if bucket is None else bucket.charge(amount, now_ms)

    def delay_ms(self, principal: str, client_id: str, key: str, now_ms: float) -> float:
        """Return for how many ms the client is to be held at this time."""
        return self.charge(principal, client_id, key, 0, now_ms)

    def admit(self, principal: str, client_id: str, key: str, amount: float, now_ms: float) -> float:
        """Count the amount and return 0; count nothing and return the delay if the client is over its quota already.

        So one request may exceed the quota, and later ones are refused until the debt is paid (KIP-599).
        """
        delay_ms = self.delay_ms(principal, client_id, key, now_ms)
        if delay_ms <= 0:
            self.charge(principal, client_id, key, amount, now_ms)
        return max(0.0, delay_ms)

    def usage(self) -> list[Usage]:
        """Return what clients with quotas have used since their rates are followed."""
        return [
            Usage(key, scope, bucket.used, bucket.tokens.throttled_ms)
            for (key, scope), bucket in list(self._buckets.items())
        ]

    def _find(self, principal: str, client_id: str, key: str) -> Bucket | None:
        question = principal, client_id, key
        try:
            return self._known[question]
        except KeyError:
            pass
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        found = self._known[question] = self._bucket(principal, client_id, key)
        return found

    def _bucket(self, principal: str, client_id: str, key: str) -> Bucket | None:
        if not principal.startswith(USER_PREFIX):  # a node
            return None
        limit = limit_of(self._quotas, key, principal.removeprefix(USER_PREFIX), client_id)
        if limit is None:
            return None
        place = key, limit.scope
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= MAX_BUCKETS:
                for _ in range(MAX_BUCKETS // 10):
                    self._buckets.popitem(last=False)
                self._known.clear()
                self.version += 1
            bucket = self._buckets[place] = Bucket(key, limit.rate, self._window_ms)
        return bucket


def _users_of_changes(before: Quotas, after: Quotas) -> frozenset[str | None] | None:
    """Return the users whose quotas have changed; None if a default or the quota of a client id has.

    Looking up the quotas of 10,000 rates takes 70 ms, so a change of one user's quota looks up only that user's.
    """
    missing: Mapping[str, float] = {}
    entities = before.keys() | after.keys()
    changed = [each for each in entities if before.get(each, missing) != after.get(each, missing)]
    return frozenset(each.user for each in changed) if all(each.user for each in changed) else None


def _amount_per_s(key: str, rate: float) -> float:
    """Return a quota in the unit that is charged."""
    return rate * MS_OF_PERCENT if key == REQUEST_PERCENTAGE else rate
