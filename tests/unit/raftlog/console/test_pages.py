"""The pages' requests to brokers, and the content and actions that they show."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from raftlog._core.descriptions import ClusterDescription, GroupListing, LogDirDescription, LogDirPartition
from raftlog.cli.partitions.moving import Move
from raftlog.console import pages
from raftlog.console.access import Session
from raftlog.console.actions import perform, why_not
from raftlog.console.app import Console, Settings
from raftlog.console.pages import Look
from raftlog.console.rebalance import Rebalance
from raftlog.console.view import AHEAD_S, EVERY_S, SELDOM_S, View
from raftlog.errors import (
    BrokerUnavailable,
    RaftlogError,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from raftlog.types import TopicPartition
from tests.support import patience, pictures
from tests.support.console import Clock, Silent

VIEWERS = 8
WATCHED_S = 60.0
TOPICS = 120
WAIT_S = 60.0
NUMBERS = {"broker": "7", "partition": "7", "offset": "7"}


class Admin:
    """An admin client of a healthy cluster that counts what it is asked."""

    def __init__(self, bootstrap: str = "", config: Mapping[str, Any] | None = None) -> None:
        self.whole = pictures.healthy()
        self.asked: Counter[str] = Counter()
        self.may_create_topics: bool | None = None

    def close(self) -> None:
        """Do nothing."""

    def describe_cluster(self, **_: Any) -> ClusterDescription:
        self.asked["describe_cluster"] += 1
        assert self.whole.cluster is not None
        return self.whole.cluster._replace(may_create_topics=self.may_create_topics)

    def describe_quorum(self, **_: Any) -> Any:
        self.asked["describe_quorum"] += 1
        return self.whole.quorum

    def describe_topics(self, names: Any = None, **_: Any) -> Any:
        self.asked["describe_topics"] += 1
        bad = pictures.partition(0, [1, 2], isr=[1])
        return [
            pictures.topic(f"topic-{number:03}", bad if number == 7 else pictures.partition(0, [1, 2]))
            for number in range(TOPICS)
        ]

    def describe_topic_configs(self, topics: list[str], **_: Any) -> Any:
        self.asked["describe_topic_configs"] += 1
        return {name: {} for name in topics}

    def describe_replicas(self, topics: Any = None, **_: Any) -> Any:
        self.asked[f"describe_replicas of {'all' if topics is None or len(topics) > 1 else topics[0]}"] += 1
        return {}

    def describe_log_dirs(self, broker: int, **_: Any) -> Any:
        self.asked[f"describe_log_dirs {broker}"] += 1
        parts = [LogDirPartition(f"topic-{number:03}", 0, number * 10, 0, 0, 0, 1) for number in range(TOPICS)]
        return [LogDirDescription(broker, "/data", None, 1 << 40, 1 << 39, parts)]

    def describe_node(self, node_id: int, **_: Any) -> Any:
        self.asked[f"describe_node {node_id}"] += 1
        return pictures.node(node_id)

    def list_groups(self, **_: Any) -> Any:
        self.asked["list_groups"] += 1
        return [GroupListing(f"group-{number}", "stable", 1, 1, "consumer") for number in range(3)]

    def group_lags(self, group_ids: list[str], **_: Any) -> Any:
        self.asked["group_lags"] += 1
        return {group: {TopicPartition("topic-000", 0): pictures.lag(90, lag=10)} for group in group_ids}

    def list_transactions(self, **_: Any) -> Any:
        self.asked["list_transactions"] += 1
        return []

    def find_hanging_transactions(self, **_: Any) -> Any:
        self.asked["find_hanging_transactions"] += 1
        return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admin() -> Admin:
    return Admin()


@pytest.fixture
def view(admin: Admin, clock: Clock) -> Iterator[View]:
    made = View("127.0.0.1:1", {}, make_admin=lambda *_, **__: admin, now_s=clock)  # type: ignore[arg-type] # a stand-in
    yield made
    made.close()


def look_at(view: View, **fields: str) -> Look:
    return Look(view, Session("", "", 0.0), fields, {}, "/", False)


def test_brokers_are_asked_once_in_two_seconds_however_many_people_look(view: View, admin: Admin, clock: Clock) -> None:
    looked = (pages.overview, pages.topics, pages.brokers, pages.groups, pages.quorum, pages.transactions)
    with ThreadPoolExecutor(VIEWERS) as people:
        for step in range(int(WATCHED_S / 0.5)):
            clock.now_s = 1000.0 + step * 0.5
            list(people.map(lambda page: page(look_at(view)), looked * VIEWERS))
            # An answer that is under way while the clock is set forward would count as one that took long.
            patience.until(lambda: not any(slot.asking for slot in list(view._slots.values())), within_s=30, pause_s=0)
    often, seldom = int(WATCHED_S / EVERY_S) + 1, int(WATCHED_S / SELDOM_S) + 1  # the doctor asks for all by itself
    assert {name: count for name, count in admin.asked.items() if count > often + seldom} == {}
    assert admin.asked["describe_topic_configs"] <= seldom
    assert admin.asked["describe_topics"] > often // 2, (
        "the pages do not ask for topics often enough to stay up to date"
    )


@pytest.mark.parametrize("path", pages.PAGES)
def test_a_page_is_there_at_once_and_claims_nothing_that_is_not_known(
    path: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Silent()
    monkeypatch.setattr(pages, "_search", admin.wait)
    view = View("127.0.0.1:1", {}, make_admin=lambda *_, **__: admin, now_s=clock)  # type: ignore[arg-type] # a stand-in
    look = Look(view, Session("", "", 0.0), {}, dict.fromkeys(("topic", "group", "id"), "x") | NUMBERS, path, False)
    drawn = Console(Settings("127.0.0.1:1")).draw(look, pages.PAGES[path], "base.html", patience_s=0)
    admin.answers.set()
    view.close()
    assert (drawn.code, drawn.complete, "data-pending" in drawn.html) == (200, False, True)
    text = told(drawn.html)
    assert not re.search(r"\b0\b|no problems|no group|nothing|there (is|are) no", text, re.IGNORECASE), text


def test_topics_are_searched_sorted_and_cut_before_they_become_rows(view: View) -> None:
    found = pages.topics(look_at(view, q="PIC-0", sort="-size", page="2")).values["list"]
    assert (found.total, found.page, found.pages, len(found.rows)) == (100, 2, 2, 50)
    assert (found.rows[0].name, found.rows[0].size_bytes) == ("topic-049", 490)
    bad = pages.topics(look_at(view, bad="1")).values["list"]
    assert [(row.name, row.under_replicated) for row in bad.rows] == [("topic-007", 1)]


def test_the_size_of_a_topic_that_is_younger_than_the_last_sizes_is_not_known(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "describe_log_dirs", lambda broker: [LogDirDescription(broker, "/data", None, 9, 9, [])])
    look = replace(look_at(view), names={"topic": "topic-000"})
    young = pages.topic(look).values
    assert (young["size_bytes"], young["list"].rows[0].size_bytes) == (None, None)
    assert pages.topics(look).values["list"].rows[0].size_bytes is None


def test_alike_partitions_share_one_description(view: View) -> None:
    found = view.topics().value
    assert found is not None
    assert len({id(topic.partitions[0]) for topic in found.by_name.values()}) == 2
    assert (found.health.topics, found.health.partitions, found.health.under_replicated) == (TOPICS, TOPICS, 1)


def told(html: str) -> str:
    """Return the text of a page, without header and footer."""
    return re.sub(r"<[^>]*>", " ", html[html.index("<main") : html.index("<footer")])


@pytest.mark.parametrize(
    ("known", "said"), [(False, "It is not known whether the group has members"), (True, "The group has 1 member:")]
)
def test_a_reset_warns_of_members_unless_it_knows_that_there_are_none(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch, known: bool, said: str
) -> None:
    def silent(**_: Any) -> Any:
        raise BrokerUnavailable("no coordinator answers")

    monkeypatch.setattr(admin, "group_offsets", lambda group_id: {}, raising=False)
    if not known:
        monkeypatch.setattr(admin, "list_groups", silent)
    look = Look(view, Session("", "", 0.0), {"to": "earliest"}, {"group": "group-1"}, "/groups/group-1/reset", False)
    monkeypatch.setattr(admin, "list_offsets", lambda parts: {}, raising=False)
    drawn = Console(Settings("127.0.0.1:1")).draw(look, pages.reset, "base.html", WAIT_S)
    assert said in told(drawn.html)
    assert "stop them first" in told(drawn.html)
    assert "There is nothing to reset" in told(drawn.html)


def test_groups_have_members_even_if_their_lags_are_not_known(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(group_ids: list[str], **_: Any) -> Any:
        raise BrokerUnavailable("no coordinator answers")

    monkeypatch.setattr(admin, "group_lags", silent)
    console = Console(Settings("127.0.0.1:1"))
    text = told(console.draw(look_at(view), pages.overview, "base.html", WAIT_S).html)
    assert ("There are no groups." in text, "Not known yet." in text) == (False, True)
    view.forget()
    monkeypatch.setattr(admin, "list_groups", lambda **_: [])
    text = told(console.draw(look_at(view), pages.overview, "base.html", WAIT_S).html)
    assert text.count("There are no groups.") == 2


def overview(view: View) -> str:
    return Console(Settings("127.0.0.1:1")).draw(look_at(view), pages.overview, "base.html", WAIT_S).html


def test_the_overview_shows_the_lag_of_groups_without_members(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [GroupListing("old-job", "empty", 0, 1, "consumer"), GroupListing("live", "stable", 1, 1, "consumer")]
    monkeypatch.setattr(admin, "list_groups", lambda **_: listed)
    lags = " ".join(told(overview(view)).partition("Lag of groups")[2].partition("Lag of groups")[2].split())
    assert "old-job no members 10" in lags
    assert "live 10" in lags


def test_the_overview_marks_that_not_all_brokers_are_up(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = '<div class="bad"><dt>Brokers</dt>'
    assert card not in overview(view)
    view.forget()
    cluster = admin.whole.cluster
    assert cluster is not None
    fenced = [each._replace(fenced=each.broker_id == 2) for each in cluster.brokers]
    monkeypatch.setattr(admin, "describe_cluster", lambda **_: cluster._replace(brokers=fenced))
    assert card in overview(view)


def test_findings_have_an_age_and_old_ones_are_not_shown(
    view: View, admin: Admin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examined() -> bool:
        return view.doctor().value is not None

    patience.until(examined, within_s=WAIT_S)
    clock.now_s += 10
    assert "Examined 10\u00a0s ago." in told(overview(view))

    def silent(**_: Any) -> Any:
        raise BrokerUnavailable("no broker answers")

    monkeypatch.setattr(admin, "describe_cluster", silent)
    clock.now_s += 3600
    text = told(overview(view))
    assert "Examined" not in text
    assert "The cluster is being examined." in text or text.count("no broker answers") == 2


def test_the_records_of_partitions_that_have_a_leader_are_plotted(
    view: View, admin: Admin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: dict[int, int] = {}
    leaderless = [pictures.topic("orders", pictures.partition(0, [1]), pictures.partition(1, [2], leader=-1))]
    monkeypatch.setattr(admin, "describe_topics", lambda *_, **__: leaderless)

    def replicas(topics: Any, *, silent: Any) -> Any:
        return {
            TopicPartition("orders", part): pictures.replicas(TopicPartition("orders", part), b1=end)._replace(
                log_end_offset=end
            )
            for part, end in ends.items()
        }

    def rate(**found: int) -> float | None:
        ends.clear()
        ends.update({int(part[1:]): end for part, end in found.items()})
        clock.now_s += 40
        view.records_appended()
        patience.until(lambda: not any(slot.asking for slot in list(view._slots.values())), within_s=30, pause_s=0)
        value: float | None = pages.overview(look_at(view)).values["rate"]
        return value

    monkeypatch.setattr(admin, "describe_replicas", replicas)
    assert rate(p0=100) is None
    assert rate(p0=500) == 10
    assert rate(p0=900, p1=1_000_000) == 10
    assert rate(p0=900, p1=1_000_400) == 10


def test_the_lag_of_a_group_is_plotted_in_records_and_in_seconds(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lags = {TopicPartition("topic-000", 0): pictures.lag(90, lag=10)._replace(lag_seconds=2.5)}
    monkeypatch.setattr(admin, "group_lag", lambda group_id: lags, raising=False)
    monkeypatch.setattr(admin, "describe_group", Silent().refuse, raising=False)
    page = pages.group(replace(look_at(view), names={"group": "billing"}))
    assert [[point.value for point in points] for _, _, points in page.values["plots"]] == [[10], [2.5]]


def test_what_a_user_may_not_see_is_neither_counted_nor_about_to_come(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for question in ("describe_configs", "describe_topic"):
        monkeypatch.setattr(admin, question, Silent().refuse, raising=False)
    look = replace(look_at(view), names={"topic": "topic-000"})
    assert pages.topic(look).values["records"] is None, (
        "the number of records must be unknown, as no leader told its offsets"
    )
    config = told(Console(Settings("127.0.0.1:1")).draw(look, pages.topic_config, "base.html", WAIT_S).html)
    assert ("You may not see all of this" in config, "Not known yet." in config) == (True, False)


def test_the_documentation_of_a_config_shows_code_as_code() -> None:
    shown = Console(Settings("127.0.0.1:1")).templates.from_string(
        "{% from 'macros.html' import prose %}{{ prose(text) }}"
    )
    assert shown.render(text="`delete` removes <b>") == "<code>delete</code> removes &lt;b&gt;"


def test_a_lag_that_no_leader_tells_is_not_plotted_as_none(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = pictures.lag(90, lag=10)._replace(lag=None, lag_seconds=None)
    monkeypatch.setattr(admin, "group_lag", lambda group_id: {TopicPartition("topic-000", 0): unknown}, raising=False)
    monkeypatch.setattr(admin, "describe_group", Silent().refuse, raising=False)
    values = pages.group(replace(look_at(view), names={"group": "billing"})).values
    assert (values["lag"], [points for _, _, points in values["plots"]]) == (None, [[], []])


@pytest.mark.parametrize(("may", "offered"), [(True, True), (None, True), (False, False)])
def test_creating_a_topic_is_offered_to_those_who_may(
    view: View, admin: Admin, may: bool | None, offered: bool
) -> None:
    admin.may_create_topics = may
    assert (why_not(view, "create-topic") is None) is offered
    console = Console(Settings("127.0.0.1:1"))
    listed = console.draw(look_at(view), pages.topics, "base.html").html
    assert ("/create-topic" in listed) is offered
    form = console.draw(look_at(view), pages.new_topic, "base.html").html
    assert ("this needs Create on the cluster, or on some topics" in form) is not offered
    assert ("<fieldset disabled>" in form) is not offered


@pytest.mark.parametrize(
    ("error", "offered"),
    [
        (BrokerUnavailable("no broker answers"), True),
        (UnknownTopicOrPartition("there is no topic '__audit'"), True),
        (TopicAuthorizationFailed("no"), False),
    ],
)
def test_audit_records_are_offered_unless_it_is_known_that_the_user_may_not_read_them(
    view: View, admin: Admin, monkeypatch: pytest.MonkeyPatch, error: RaftlogError, offered: bool
) -> None:
    answers = threading.Event()

    def late(*_: Any, **__: Any) -> Any:
        assert answers.wait(WAIT_S)
        raise error

    monkeypatch.setattr(admin, "describe_topics", late)
    console = Console(Settings("127.0.0.1:1"))
    assert 'href="/audit"' in console.draw(look_at(view), pages.quorum, "base.html", 0).html, (
        "the first page of a user must have the link to the audit log"
    )
    answers.set()
    assert ('href="/audit"' in console.draw(look_at(view), pages.quorum, "base.html", WAIT_S).html) is offered
    assert console.draw(look_at(view), pages.audit, "base.html", WAIT_S).code == (200 if offered else 403)


def test_the_audit_page_says_at_once_that_auditing_is_off(
    view: View, admin: Admin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise UnknownTopicOrPartition("there is no topic '__audit'")

    monkeypatch.setattr(admin, "describe_topics", missing)
    monkeypatch.setattr(pages, "_search", missing)
    assert view.audited().value is False  # as the first page of a user asks
    clock.now_s += SELDOM_S + AHEAD_S + 1
    silent = Silent()
    monkeypatch.setattr(admin, "describe_topics", silent.wait)
    monkeypatch.setattr(pages, "_search", silent.wait)
    drawn = Console(Settings("127.0.0.1:1")).draw(look_at(view), pages.audit, "base.html", 0)
    silent.answers.set()
    assert "There are no audit records: brokers write them with" in told(drawn.html)


def test_a_topic_that_does_not_exist_is_not_found_also_while_it_is_asked_for_again(
    view: View, admin: Admin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    answers.set()
    young = [pictures.topic("nope", pictures.partition(0, [1, 2]))]

    def described(name: str, **_: Any) -> Any:
        assert answers.wait(WAIT_S)
        if not young:
            raise UnknownTopicOrPartition(f"there is no topic {name!r}")
        return young.pop()

    monkeypatch.setattr(admin, "describe_topic", described, raising=False)
    console = Console(Settings("127.0.0.1:1"))
    look = replace(look_at(view), names={"topic": "nope"}, path="/topics/nope")
    assert console.draw(look, pages.topic, "base.html", WAIT_S).code == 200, (
        "a topic that is younger than the list of topics must be shown"
    )
    for patience_s in (WAIT_S, 0):
        clock.now_s += EVERY_S
        drawn = console.draw(look, pages.topic, "base.html", patience_s)
        text = told(drawn.html)
        assert (drawn.code, "there is no topic &#39;nope&#39;" in text, "Partitions" in text) == (404, True, False)
        answers.clear()
    answers.set()


@pytest.mark.parametrize("page", [pages.topic, pages.topic_config, pages.messages])
def test_a_topic_that_is_not_known_yet_is_asked_for_alone(
    view: View, monkeypatch: pytest.MonkeyPatch, page: Any
) -> None:
    """Else a page has the refusals of the others first, that there is no such topic."""
    silent, asked = Silent(), []
    monkeypatch.setattr(view.admin, "describe_topic", silent.wait, raising=False)
    for question in ("describe_replicas", "describe_configs"):
        monkeypatch.setattr(view.admin, question, lambda *_, **__: asked.append(1), raising=False)
    monkeypatch.setattr(pages, "_search", lambda *_: asked.append(1))
    assert view.topics().value is not None
    drawn = Console(Settings("127.0.0.1:1")).draw(
        replace(look_at(view), names={"topic": "nope"}), page, "live.html", 0.1
    )
    silent.answers.set()
    assert (drawn.code, drawn.complete, asked) == (200, False, [])


def test_a_password_and_its_connections_end_with_the_session(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    closed: list[str] = []

    class Watched(Admin):
        def __init__(self, bootstrap: str = "", config: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self.user = str((config or {}).get("sasl.username"))

        def close(self) -> None:
            closed.append(self.user)

    monkeypatch.setattr("raftlog.console.app.View", partial(View, make_admin=Watched))  # type: ignore[arg-type] # a stand-in
    console = Console(Settings("127.0.0.1:1", with_login=True, session_timeout_s=60), now_s=clock)
    ada = console.log_in(console.sessions.begin(), "ada", "difference-engine")
    bob = console.log_in(console.sessions.begin(), "bob", "builder")
    for each in (ada, bob):
        console.view_of(each)
    closed.clear()  # those that checked the passwords
    clock.now_s += 40
    console.sessions.find(bob.token)
    clock.now_s += 40
    console.end_views()
    assert closed == ["ada"]
    assert [view.secret for view in console._views.values()] == ["builder"]
    assert ada.secret is None
    console.sessions.end(bob)
    console.end_views()
    assert (closed[1:], console._views) == (["bob"], {})


def test_a_rebalance_outlives_the_session_that_began_it(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr("raftlog.console.app.View", partial(View, make_admin=Admin))  # type: ignore[arg-type] # a stand-in
    console = Console(Settings("127.0.0.1:1", with_login=True), now_s=clock)
    ada = console.log_in(console.sessions.begin(), "ada", "difference-engine")
    view = console.view_of(ada)
    view.rebalance = Rebalance(view.admin, [Move(TopicPartition("topic-000", 0), (2, 1))])
    console.sessions.end(ada)
    console.end_views()
    assert list(console._views) == ["ada"]
    view.rebalance._progress = view.rebalance.progress._replace(state="done")
    console.end_views()
    assert console._views == {}


def test_no_name_forges_a_line_of_the_audit_log(view: View, caplog: pytest.LogCaptureFixture) -> None:
    forged = "x\nlogin by boss from 10.0.0.1\u2028" + "y" * 1_000
    done, _ = perform("delete-topic", view, {"topic": forged, "typed": "x"}, f"ada {forged}", "127.0.0.1")
    assert not done
    (line,) = (each.getMessage() for each in caplog.records if each.name == "raftlog.console.audit")
    assert line.startswith("delete-topic of x\\nlogin by boss from 10.0.0.1\\u2028yyy")
    assert (line.isprintable(), len(line) < 800) == (True, True)
    assert line.endswith("... from 127.0.0.1 was refused: InvalidRequestError")
