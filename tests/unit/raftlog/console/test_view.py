"""How seldom the console asks brokers, and what it shows while they do not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raftlog.console.actions import ACTIONS, NEEDS, why_not
from raftlog.console.view import (
    AHEAD_S,
    AT_A_TIME,
    EVERY_S,
    MOST_ANSWERS,
    MOST_FOUND,
    MOST_PLOTS,
    MOST_SEARCHES,
    RECORDS,
    SELDOM_S,
    SHARE,
    TooManySearches,
    View,
)
from raftlog.errors import BrokerUnavailable, ClusterAuthorizationFailed
from raftlog.security import AclOperation
from tests.support.console import Clock
from tests.support.patience import until

WAIT_S = 60.0


class NoAdmin:
    """Stands for the admin client; these tests bring their own questions."""

    def __init__(self, bootstrap: str, config: dict[str, Any]) -> None:
        self.config = config

    def close(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> Iterator[View]:
    made = View("127.0.0.1:1", {}, make_admin=NoAdmin, now_s=clock)  # type: ignore[arg-type] # a stand-in
    yield made
    made.close()


def test_brokers_are_asked_once_in_two_seconds(view: View, clock: Clock) -> None:
    asked = []
    for step in range(41):
        clock.now_s = 1000.0 + step * 0.1
        view.ask("cluster", lambda: asked.append(clock.now_s))
    assert asked == [1000.0, 1002.0, 1004.0]


def test_many_people_get_one_answer(view: View) -> None:
    begun, go_on, asked = threading.Event(), threading.Event(), []

    def question() -> int:
        asked.append(1)
        begun.set()
        go_on.wait(30)
        return len(asked)

    found: list[int | None] = []
    threads = [threading.Thread(target=lambda: found.append(view.ask("x", question).value)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [1] * 8


def test_a_slow_question_is_asked_more_seldom(view: View, clock: Clock) -> None:
    asked = []

    def question() -> None:
        asked.append(clock.now_s)
        clock.now_s += 1.0

    view.ask("topics", question)
    clock.now_s += SHARE - 0.1
    view.ask("topics", question)
    assert len(asked) == 1
    clock.now_s += 0.2
    view.ask("topics", question)
    assert len(asked) == 2


def test_a_question_that_hung_once_is_asked_again_soon(view: View, clock: Clock) -> None:
    """As those are that waited for a broker which was dying: the page shows soon that it is back."""
    asked = []

    def question() -> None:
        asked.append(clock.now_s)
        clock.now_s += 30.0 if len(asked) == 1 else 0.01

    view.ask("topics", question)
    clock.now_s += SELDOM_S + 0.1
    view.ask("topics", question)
    assert len(asked) == 2


def test_the_last_answer_stays_while_brokers_are_away(view: View, clock: Clock) -> None:
    def away() -> str:
        raise BrokerUnavailable("no broker answers")

    assert view.ask("x", away).value is None
    clock.now_s += EVERY_S
    assert view.ask("x", lambda: "known").value == "known"
    clock.now_s += 10
    answer = view.ask("x", away)
    assert (answer.value, str(answer.error), view.age_s(answer)) == ("known", "no broker answers", 10)
    clock.now_s += EVERY_S
    again = view.ask("x", lambda: "new")
    assert (again.value, again.error) == ("new", None)


def test_a_refusal_leaves_nothing_of_the_old_answer(view: View, clock: Clock) -> None:
    def refused() -> str:
        raise ClusterAuthorizationFailed("User:ada may not describe the cluster")

    view.ask("x", lambda: "known")
    clock.now_s += EVERY_S
    answer = view.ask("x", refused)
    assert (answer.value, answer.refused) == (None, True)


def test_after_a_change_everything_is_asked_anew(view: View) -> None:
    asked: list[int] = []
    view.ask("x", lambda: asked.append(1))
    view.forget()
    view.ask("x", lambda: asked.append(2))
    assert asked == [1, 2]


def test_memory_is_bounded(view: View) -> None:
    for number in range(MOST_ANSWERS + MOST_PLOTS):
        view.ask(f"group {number}", lambda: None)
        view.note(f"lag {number}", number)
    assert len(view._slots) == MOST_ANSWERS
    assert len(view._plots) == MOST_PLOTS


def test_growth_becomes_a_rate(view: View, clock: Clock) -> None:
    assert view.note_total("records", 100) is None
    clock.now_s += 2
    assert view.note_total("records", 300) == 100
    clock.now_s += 0.1  # another page of the same user
    assert view.note_total("records", 310) == 100
    clock.now_s += 1.9
    assert view.note_total("records", 290) == 0  # a topic was deleted


def test_one_thing_of_many_may_fail(view: View) -> None:
    def question(broker: int) -> int:
        if broker == 2:
            raise BrokerUnavailable("broker 2 does not answer")
        return broker * 10

    found = view.each([1, 2, 3], question)
    assert (found[1], str(found[2]), found[3]) == (10, "broker 2 does not answer", 30)


def test_a_change_that_needs_a_permission_is_told_before_it_is_tried(view: View) -> None:
    may: frozenset[AclOperation] | None = frozenset({AclOperation.DELETE})
    view.operations = lambda resource, name="": may  # type: ignore[method-assign] # a stand-in for brokers
    assert why_not(view, "delete-topic", "orders") is None
    assert why_not(view, "produce", "orders") == "You may not: this needs Write on topic orders."
    assert why_not(view, "abort", "sink") == "You may not: this needs Write on transactional id sink."
    assert why_not(view, "move") == "You may not: this needs Alter on the cluster."
    may = None
    assert why_not(view, "move") is None, (
        "the change must be offered, as brokers of earlier versions do not tell permissions and refuse themselves"
    )


def test_every_change_has_its_permission() -> None:
    assert ACTIONS.keys() - NEEDS.keys() == {"create-topic"}, (
        "only create-topic may have no permission of its own, as an ACL for some names is enough"
    )
    assert NEEDS.keys() <= ACTIONS.keys()


def test_while_no_broker_answers_a_page_waits_once(view: View, clock: Clock) -> None:
    def silent() -> int:
        raise BrokerUnavailable("no broker answers")

    asked: list[float] = []
    assert isinstance(view.ask("cluster", silent).error, BrokerUnavailable)
    assert isinstance(view.ask("topics", lambda: asked.append(clock.now_s)).error, BrokerUnavailable)
    assert asked == []
    view.ask("cluster", lambda: 1)
    clock.now_s += EVERY_S
    view.ask("cluster", lambda: 1)
    assert view.ask("topics", lambda: asked.append(clock.now_s)).error is None
    assert asked == [clock.now_s]


def test_while_brokers_are_asked_again_after_an_outage_nothing_else_is_asked(view: View, clock: Clock) -> None:
    go_on = threading.Event()

    def silent() -> int:
        raise BrokerUnavailable("no broker answers")

    def slow() -> int:
        assert go_on.wait(WAIT_S)
        return 1

    asked: list[int] = []
    view.ask("cluster", silent)
    clock.now_s += EVERY_S
    with view.hurry(0):
        assert view.ask("cluster", slow).pending
        assert isinstance(view.ask("topics", lambda: asked.append(1)).error, BrokerUnavailable)
    assert view._slots["topics"].asking is None
    assert asked == []
    go_on.set()
    with view.hurry(WAIT_S):
        view.ask("cluster", slow)
        assert view.ask("topics", lambda: asked.append(1)).error is None
    assert asked == [1]


def test_a_refusal_of_one_question_leaves_the_others(view: View) -> None:
    def refused() -> int:
        raise ClusterAuthorizationFailed("no")

    view.ask("cluster", refused)
    assert view.ask("topics", lambda: 3).value == 3


def test_a_page_does_not_wait_for_the_next_answer(view: View, clock: Clock) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go_on.wait(WAIT_S)
        done.set()
        return "new"

    view.ask("topics", lambda: "old", ahead=True)
    clock.now_s += EVERY_S
    for _ in range(3):
        assert view.ask("topics", slow, ahead=True).value == "old"
    assert begun.wait(WAIT_S)
    go_on.set()
    assert done.wait(WAIT_S)
    until(lambda: view.ask("topics", lambda: "newer", ahead=True).value == "new", within_s=WAIT_S)
    clock.now_s += EVERY_S + AHEAD_S
    assert view.ask("topics", lambda: "newest", ahead=True).value == "newest", (
        "an answer that is too old must not be shown, but a new one waited for"
    )


def test_a_page_in_a_hurry_shows_what_is_known_and_gets_the_rest_later(view: View, clock: Clock) -> None:
    begun, go_on = threading.Event(), threading.Event()
    asked: list[int] = []

    def slow() -> str:
        asked.append(1)
        begun.set()
        assert go_on.wait(WAIT_S)
        return "known"

    for _ in range(3):
        with view.hurry(0.01) as hurry:
            answer = view.ask("topics", slow)
        assert (answer.value, answer.pending, hurry.ran_out) == (None, True, True)
    assert begun.wait(WAIT_S)
    go_on.set()
    with view.hurry(WAIT_S) as hurry:
        answer = view.ask("topics", slow)
    assert (answer.value, answer.pending, hurry.ran_out, asked) == ("known", False, False, [1])
    clock.now_s += EVERY_S + AHEAD_S
    go_on.clear()
    with view.hurry(0.01) as hurry:
        answer = view.ask("topics", slow, ahead=True)
    assert (answer.value, answer.pending, hurry.ran_out) == ("known", True, True), (
        "an old answer must be shown as pending"
    )
    go_on.set()


def test_questions_that_wait_for_one_another_find_a_thread(view: View) -> None:
    """More of them than there are threads: those that a question needs are asked by its own thread."""
    full = threading.Barrier(AT_A_TIME + 1)

    def needs(number: int) -> int:
        full.wait(WAIT_S)
        return number + (view.ask("shared", lambda: sum(view.each([10, 20], lambda each: each))).value or 0)

    with view.hurry(0):
        for number in range(AT_A_TIME):
            view.ask(f"needs {number}", lambda number=number: needs(number))  # type: ignore[misc] # bound now
        view.ask("shared", lambda: 30)  # no thread is left for it
    full.wait(WAIT_S)
    for number in range(AT_A_TIME):
        with view.hurry(WAIT_S):
            assert view.ask(f"needs {number}", lambda: -1).value == number + 30


def test_a_question_that_breaks_is_asked_again(view: View) -> None:
    def breaks() -> int:
        raise ZeroDivisionError

    with view.hurry(WAIT_S), pytest.raises(ZeroDivisionError):
        view.ask("x", breaks)
    assert view.ask("x", lambda: 1).value == 1


def test_a_search_is_refused_at_once_when_too_many_wait(view: View) -> None:
    go_on = threading.Event()
    with view.hurry(0):
        for _ in range(2):  # those that are asked for again wait already, and take no more room
            for number in range(MOST_SEARCHES):
                waits = view.records(f"flights {number}", lambda: go_on.wait(WAIT_S))
                assert (waits.pending, waits.error) == (True, None)
        refused = view.records("one more", lambda: True)
        assert (refused.pending, type(refused.error)) == (False, TooManySearches)
        assert view.ask("topics", lambda: True).error is None
    go_on.set()

    def found() -> bool | None:
        with view.hurry(WAIT_S):
            return view.records("one more", lambda: True).value

    until(found, within_s=WAIT_S)


def test_a_rebalance_decides_by_what_is_and_pages_share_what_was_two_seconds_ago() -> None:
    ages: list[object] = []

    class Noting(NoAdmin):
        def __init__(self, bootstrap: str, config: dict[str, Any]) -> None:
            super().__init__(bootstrap, config)
            ages.append(config.get("metadata.max.age.ms"))

    made = View("127.0.0.1:1", {}, make_admin=Noting)  # type: ignore[arg-type] # a stand-in
    assert made.mover() is made.mover()
    made.close()
    assert ages == [EVERY_S * 1000, None]


def test_few_results_of_searches_are_kept(view: View) -> None:
    """Each has megabytes, and a user may search for anything."""
    view.ask("topics", lambda: True)
    for number in range(3 * MOST_FOUND):
        view.records(f"flights {number}", lambda: bytes(100))
    kept = [name for name in view._slots if name.startswith(RECORDS)]
    assert kept == [f"{RECORDS}flights {number}" for number in range(2 * MOST_FOUND, 3 * MOST_FOUND)]
    assert "topics" in view._slots
