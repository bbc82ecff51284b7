"""Sessions of the console: who has logged in, for how long, and whose forms are believed."""

from __future__ import annotations

from itertools import count
from typing import Any

from raftlog.console.access import MOST_OF_USER, MOST_SESSIONS, PAUSE_S, TRIES, Session, Sessions
from tests.support.console import Clock


def make_sessions(clock: Clock, timeout_s: float = 60.0) -> Sessions:
    numbers = count()
    return Sessions(clock, lambda: f"token-{next(numbers)}", timeout_s)


def test_a_login_takes_the_place_of_the_anonymous_session() -> None:
    sessions = make_sessions(Clock())
    planted = sessions.begin()
    session = sessions.log_in(planted, "ada", "secret")
    assert (session.user, session.token != planted.token, sessions.find(planted.token)) == ("ada", True, None)
    assert "secret" not in repr(session)


def test_a_session_ends_when_it_is_idle_or_is_ended() -> None:
    clock = Clock()
    sessions = make_sessions(clock)
    session = sessions.log_in(sessions.begin(), "ada", "secret")
    for _ in range(3):
        clock.now_s += 59
        assert sessions.find(session.token) is session
    for _ in range(2):  # live updates are no sign of a person
        clock.now_s += 40
        found = sessions.find(session.token, use=False)
    assert found is None
    assert session.secret is None
    again = sessions.begin()
    sessions.end(again)
    assert sessions.find(again.token) is None


def test_a_login_ends_with_its_session_even_if_the_browser_never_comes_back() -> None:
    clock = Clock()
    sessions = make_sessions(clock)
    first = sessions.log_in(sessions.begin(), "ada", "secret")
    clock.now_s += 40
    second = sessions.log_in(sessions.begin(), "boss", "open, sesame")
    sessions.expire()
    assert sessions.logins() == {("ada", "secret"), ("boss", "open, sesame")}
    clock.now_s += 40
    sessions.expire()
    assert sessions.logins() == {("boss", "open, sesame")}
    assert (first.secret, len(sessions)) == (None, 1)
    sessions.end(second)
    assert sessions.logins() == set()


def test_a_user_may_log_in_while_a_thread_looks_for_logins() -> None:
    sessions = make_sessions(Clock())

    class Watched(Session):
        def __getattribute__(self, name: str) -> Any:
            if name == "user":
                sessions.log_in(sessions.begin(), "ada", "secret")  # another thread does it, between two steps
            return super().__getattribute__(name)

    for _ in range(2):
        began = sessions.begin()
        sessions.end(began)
        sessions._users[began.token] = Watched(began.token, began.form_token, 0.0)
    assert sessions.logins() == set()
    assert len(sessions) == 4


def test_a_form_of_another_session_is_not_believed() -> None:
    sessions = make_sessions(Clock())
    mine, theirs = sessions.begin(), sessions.begin()
    assert mine.may_post(mine.form_token)
    assert not mine.may_post(theirs.form_token)
    assert not mine.may_post("")
    assert not mine.may_post("schlüssel")


def test_failed_logins_of_a_name_wait() -> None:
    clock = Clock()
    sessions = make_sessions(clock)
    for _ in range(TRIES):
        assert sessions.pause_s("ada") == 0
        sessions.failed("ada")
    assert sessions.pause_s("ada") == PAUSE_S
    assert sessions.pause_s("bob") == 0
    clock.now_s += PAUSE_S
    assert sessions.pause_s("ada") == 0
    sessions.log_in(sessions.begin(), "ada", "secret")
    sessions.failed("ada")
    assert sessions.pause_s("ada") == 0


def test_the_number_of_sessions_is_bounded() -> None:
    sessions = make_sessions(Clock())
    first, second = sessions.begin(), sessions.begin()
    sessions.find(first.token)
    for _ in range(MOST_SESSIONS - 1):
        sessions.begin()
    assert len(sessions) == MOST_SESSIONS
    assert sessions.find(first.token) is first
    assert sessions.find(second.token) is None


def test_anonymous_sessions_end_no_session_of_a_user() -> None:
    sessions = make_sessions(Clock())
    ada = sessions.log_in(sessions.begin(), "ada", "secret")
    for _ in range(MOST_SESSIONS + 1):
        sessions.begin()
    assert sessions.find(ada.token) is ada
    assert ada.secret == "secret"
    for number in range(MOST_SESSIONS):
        sessions.log_in(sessions.begin(), f"user {number}", "secret")
    assert sessions.find(ada.token) is None


def test_a_note_is_shown_once() -> None:
    session = make_sessions(Clock()).begin()
    session.note = ("done", "Topic orders was created.")
    assert session.take_note() == ("done", "Topic orders was created.")
    assert session.take_note() is None


def test_a_user_with_very_many_sessions_ends_its_own_only() -> None:
    sessions = make_sessions(Clock())
    ada = sessions.log_in(sessions.begin(), "ada", "secret")
    mine = [sessions.log_in(sessions.begin(), "bob", "his") for _ in range(MOST_OF_USER)]
    sessions.find(mine[0].token)
    sessions.log_in(sessions.begin(), "bob", "his")
    assert sessions.find(mine[0].token) is mine[0]
    assert sessions.find(mine[1].token) is None, "the one that was idle for the longest time"
    for _ in range(MOST_SESSIONS):
        sessions.log_in(sessions.begin(), "bob", "his")
    assert sessions.find(ada.token) is ada
    assert len(sessions) == MOST_OF_USER + 1
