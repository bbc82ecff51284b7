"""Who looks at the console: sessions, logins, and tokens against forged requests. No I/O; the clock comes in.

A session is a random token in a cookie. It begins anonymous. On a cluster without users, or when the console has a
user of its own, an anonymous session sees everything that the console may see. Otherwise it sees the login page only,
until the user logs in with a name and a password, or with a certificate; the session then has a new token, so that a
token that was planted before the login is worth nothing (session fixation).

    anonymous  -- log in -->  user  -- log out, or idle for `timeout_s` -->  gone

The secret, a password or a certificate with its key, stays in the memory of this process as long as the session, as
each connection to a broker needs it, and reaches no page. `Sessions.logins` says which ones are left, so that
connections end with their sessions.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from raftlog.console.certificate import Certificate

MOST_SESSIONS: Final = 10_000
"""Of users, and as many anonymous ones. Beyond it the one of its kind that was idle for the longest time ends, so that
strangers, who may begin anonymous ones, end no user's."""
MOST_OF_USER: Final = 100
"""Sessions of one user. Beyond it the user's own longest idle one ends, not another user's."""
TRIES: Final = 5
"""Failed logins of one name, after which further ones wait."""
PAUSE_S: Final = 30.0
MOST_NAMES: Final = 10_000


@dataclass(slots=True)
class Session:
    """One browser. `form_token`: what its forms carry. `user`: None until it has logged in.

    `secret`: what the user has proved that with, a password or a certificate with its key.
    """

    token: str
    form_token: str
    used_s: float
    user: str | None = None
    secret: str | Certificate | None = field(default=None, repr=False)
    note: tuple[str, str] | None = None
    """What the next page says at its top: kind (done, error) and text."""

    def take_note(self) -> tuple[str, str] | None:
        """Return the note, which is shown once."""
        note, self.note = self.note, None
        return note

    def may_post(self, form_token: str) -> bool:
        """Whether a form came from a page of this session."""
        return hmac.compare_digest(self.form_token.encode(), form_token.encode())


class Sessions:
    """The sessions of a console.

    `now_s`: a monotonic clock. `make_token`: returns an unguessable text. `timeout_s`: how long one may be idle.
    """

    def __init__(self, now_s: Callable[[], float], make_token: Callable[[], str], timeout_s: float) -> None:
        self._now_s = now_s
        self._make_token = make_token
        self._timeout_s = timeout_s
        self._users: dict[str, Session] = {}  # of both, the longest idle one comes first
        self._anonymous: dict[str, Session] = {}
        self._tokens: dict[str, dict[str, None]] = {}
        """By user, of its sessions; in the same order."""
        self._failures: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._users) + len(self._anonymous)

    def find(self, token: str | None, *, use: bool = True) -> Session | None:
        """Return the live session of a cookie. `use`: the person is there, so the idle time begins anew."""
        found = self._users.get(token or "") or self._anonymous.get(token or "")
        if found is None:
            return None
        if self._now_s() - found.used_s > self._timeout_s:
            self.end(found)
            return None
        if use:
            found.used_s = self._now_s()
            table = self._table(found)
            table[found.token] = table.pop(found.token)
            if found.user is not None and (own := self._tokens.get(found.user)) is not None:
                own.pop(found.token, None)
                own[found.token] = None
        return found

    def expire(self) -> None:
        """End the sessions that were idle for too long; `find` does so only for those whose browsers come back."""
        for table in (self._users, self._anonymous):
            for each in list(table.values()):
                if self._now_s() - each.used_s <= self._timeout_s:
                    break
                self.end(each)

    def logins(self) -> set[tuple[str, str | Certificate]]:
        """Return the name and the secret of each user with a session."""
        return {
            (each.user, each.secret)
            for each in list(self._users.values())  # a thread does it; others log in meanwhile
            if each.user is not None and each.secret is not None
        }

    def begin(self) -> Session:
        """Return a new anonymous session."""
        return self._begin()

    def end(self, session: Session) -> None:
        """Forget a session and its secret."""
        session.secret = None
        self._table(session).pop(session.token, None)
        if session.user is not None and (own := self._tokens.get(session.user)) is not None:
            own.pop(session.token, None)
            if not own:
                del self._tokens[session.user]

    def log_in(self, session: Session, user: str, secret: str | Certificate) -> Session:
        """Return the session of this user that takes the place of `session`. The caller has checked the secret."""
        self.end(session)
        self._failures.pop(user, None)
        return self._begin(user, secret)

    def pause_s(self, user: str) -> float:
        """Return how long the next login of this name has to wait after failed ones, 0: not at all."""
        failures, last_s = self._failures.get(user, (0, 0.0))
        return max(0.0, last_s + PAUSE_S - self._now_s()) if failures >= TRIES else 0.0

    def failed(self, user: str) -> None:
        """Count a failed login."""
        failures, last_s = self._failures.pop(user, (0, 0.0))
        if self._now_s() - last_s > PAUSE_S:
            failures = 0
        self._failures[user] = (failures + 1, self._now_s())
        while len(self._failures) > MOST_NAMES:
            del self._failures[next(iter(self._failures))]

    def _begin(self, user: str | None = None, secret: str | Certificate | None = None) -> Session:
        session = Session(self._make_token(), self._make_token(), self._now_s(), user, secret)
        table = self._table(session)
        table[session.token] = session
        if user is not None:
            own = self._tokens.setdefault(user, {})
            own[session.token] = None
            while len(own) > MOST_OF_USER:
                longest_idle = next(iter(own))
                del own[longest_idle]
                if (ended := self._users.get(longest_idle)) is not None:
                    self.end(ended)
        while len(table) > MOST_SESSIONS:
            self.end(next(iter(table.values())))
        return session

    def _table(self, session: Session) -> dict[str, Session]:
        return self._anonymous if session.user is None else self._users
