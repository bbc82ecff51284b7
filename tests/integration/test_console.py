"""The console in a real browser, against three brokers with TLS and users: pages, changes, a broker's death, logins.

Users: boss is a super user; ACLs let ops do everything to topics, groups and the cluster; ada may read one topic.

Pictures of all pages, in the theme that the run's seed picks (with --long: in both), go to artifacts/console.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial, partialmethod
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from raftlog import AclBinding, AclOperation, Admin, Producer, ResourceType, TopicPartition
from raftlog._client.admin import AdminEngine
from raftlog._client.metadata import MetadataCache
from raftlog.cli.partitions.moving import Move, put_on, take_off
from raftlog.console.app import COOKIE, Settings
from raftlog.console.view import EVERY_S, View
from raftlog.testing import Cluster
from raftlog.testing.certificates import CertificateAuthority
from tests.support.console import Client, Silent, serve
from tests.support.fresh import one_of
from tests.support.hanging import before_verification, send_without_adding
from tests.support.patience import until
from tests.support.raftlog_up import raftlog_up
from tests.support.steady import PATIENT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="NO BROWSER TESTS: there is no Chromium; on Debian: apt-get install chromium"
)
PICTURES = Path(__file__).resolve().parents[2] / "artifacts" / "console"
FOR_DOCS = os.environ.get("CONSOLE_PICTURES", "")
"""Where the pictures of docs/console.md go; empty: they stay as they are."""
DOCUMENTED = ("overview", "topic", "messages-table", "group", "audit")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 400, "height": 800}
WAIT_MS = 60_000
WAIT_S = 60.0
SHOWN_MS = 1_500
LONG = "a-topic-whose-name-is-longer-than-most-people-would-like-to-read-" + "x" * 100
FLIGHTS = 300
ADDED = 4
PAGES = {
    "overview": "/",
    "brokers": "/brokers",
    "broker": "/brokers/2",
    "plan": "/brokers/plan",
    "topics": "/topics?internal=1",
    "topics-none": "/topics?q=no-such-topic",
    "topic": "/topics/flights",
    "topic-long-name": f"/topics/{LONG}",
    "config": "/topics/flights/config",
    "messages": "/topics/flights/messages",
    "messages-none": "/topics/flights/messages?value=nothing-like-this",
    "messages-table": "/topics/flights/messages?view=table&path=$.carrier",
    "message": "/topics/flights/messages/0/3",
    "groups": "/groups",
    "group": "/groups/billing%2Feurope",
    "reset": "/groups/billing%2Feurope/reset?to=shift&value=-2",
    "transactions": "/transactions?all=1",
    "transaction": "/transactions/transfers",
    "quorum": "/quorum",
    "security": "/security",
    "access": "/security/access",
    "access-user": "/security/access?principal=ada",
    "access-resource": "/security/access?type=topic&name=flights",
    "access-both": "/security/access?principal=User:ada&type=topic&name=adas",
    "audit": "/audit",
    "audit-none": "/audit?who=nobody",
    "create-topic": "/create-topic",
    "not-found": "/topics/no-such-topic",
}
THEMES = ("light", "dark")
GROUP = "billing/europe"
SLOW = TopicPartition("slow", 0)
USERS = {"boss": "open, sesame", "ops": "all hands", "ada": "difference-engine"}
EVERYTHING = (
    (ResourceType.CLUSTER, "raftlog-cluster"),
    (ResourceType.TOPIC, "*"),
    (ResourceType.GROUP, "*"),
    (ResourceType.TRANSACTIONAL_ID, "*"),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three brokers with records, a group, a transactional id, and a topic with a long name; a fourth one waits."""
    config: dict[str, Any] = {**PATIENT, "offsets.topic.num.partitions": 3, "transaction.state.log.num.partitions": 3}
    config |= {"audit.topic.enable": True, "audit.topic.num.partitions": 3}
    config |= {"authorizer": "acl", "super.users": "User:boss"}
    with ExitStack() as opened:
        made = opened.enter_context(closing(Cluster(4, users=USERS, config=config)))
        for start in (partial(made.start, wait=False), made.wait_ready):
            for broker in (1, 2, 3):
                start(broker)
        admin = opened.enter_context(admin_of(made))
        for topic in ("flights", LONG):
            admin.create_topic(topic, partitions=3, replication_factor=3, configs={"min.insync.replicas": "2"})
        for topic in ("theirs", "adas"):
            admin.create_topic(topic)
        admin.create_acls([AclBinding("User:ops", AclOperation.ALL, kind, name) for kind, name in EVERYTHING])
        admin.create_acls(
            [
                AclBinding("User:ada", operation, ResourceType.TOPIC, "adas")
                for operation in (AclOperation.DESCRIBE, AclOperation.READ)
            ]
        )
        client = dict(made.client_config)
        with (
            Producer(made.bootstrap, transactional_id="transfers", config=client) as producer,
            producer.transaction(),
        ):
            for number in range(FLIGHTS):
                value = {"carrier": ("AA", "UA", "DL")[number % 3], "flight": number, "note": "<b>bold</b>"}
                headers = [("trace", str(number).encode())]
                producer.send("flights", json.dumps(value).encode(), key=b"%d" % number, headers=headers)
            producer.send(LONG, b"\x00\xff\x10", key=None)
        admin.alter_group_offsets(GROUP, {TopicPartition("flights", 0): 5})
        admin.alter_user("eve", "a secret of eve")
        until(lambda: "__audit" in admin.list_topics(internal=True), within_s=WAIT_S)
        yield made


def admin_of(cluster: Cluster) -> Admin:
    """Return an admin client of the super user."""
    return Admin(cluster.bootstrap, config=dict(cluster.client_config))


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> Iterator[str]:
    client = {key: value for key, value in cluster.client_config.items() if not key.startswith("sasl")}
    with serve(Settings(cluster.bootstrap, client=client, with_login=True)) as address:
        yield address


def logged_in(url: str, user: str) -> Client:
    """Return a client that has logged in as this user."""
    client = Client(url)
    client.get("/login")
    reply = client.post("/login", user=user, password=USERS[user], after="/topics")
    assert (reply.code, reply.headers["location"]) == (303, "/topics")
    return client


def context_of(browser: Any, url: str, user: str, **more: Any) -> Any:
    """Return a browser's window in which a user has logged in."""
    context = browser.new_context(viewport=WIDE, **more)
    context.set_default_timeout(WAIT_MS)
    context.add_cookies([{"name": COOKIE, "value": logged_in(url, user).cookie, "url": url}])
    return context


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def window(browser: Any, url: str) -> Iterator[Any]:
    """A window in which ops has logged in: one for all tests, as a new one costs a second of CPU time."""
    context = context_of(browser, url, "ops")
    yield context
    context.close()


@pytest.fixture
def page(window: Any) -> Iterator[Any]:
    """A page of ops whose errors fail the test."""
    made = window.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
    yield made
    made.close()
    assert problems == []


def whole(page: Any, url: str) -> None:
    """Open a page, and wait until it lacks no answer."""
    page.goto(url)
    settled(page)


def settled(page: Any) -> None:
    """Wait until the page lacks no answer: it may be replaced until then, though not while a form is filled in."""
    page.locator("[data-pending]").wait_for(state="detached")


def told(page: Any, text: str) -> None:
    """Wait until a change is answered with this text, and the page after it lacks no answer."""
    page.get_by_text(text).wait_for()
    settled(page)


WATCH = """
    const Plain = window.EventSource;
    window.EventSource = class extends Plain {
        constructor(address) {
            super(address);
            this.addEventListener("whole", (event) => event.data.includes("data-pending") || console.log("whole"));
        }
    };
"""
"""Says on the browser's console when a whole page has come that lacks nothing."""


class Waiting(NamedTuple):
    """A page that lacks all answers until `answers` is set."""

    page: Any
    url: str
    answers: threading.Event


@pytest.fixture(scope="module")
def plain_window(browser: Any) -> Iterator[Any]:
    """A window without a login."""
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    yield context
    context.close()


@pytest.fixture
def waiting(plain_window: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    admin = Silent()
    monkeypatch.setattr("raftlog.console.app.View", partial(View, make_admin=lambda *_, **__: admin))  # type: ignore[arg-type] # a stand-in
    try:
        with serve(Settings("127.0.0.1:1")) as address:
            page = plain_window.new_page()
            page.add_init_script(WATCH)
            page.on("console", lambda said: None)  # the browser tells only from then on what is said
            yield Waiting(page, address, admin.answers)
            page.close()
    finally:
        admin.answers.set()


def let_answers_come(waiting: Waiting) -> None:
    """Let brokers answer, and wait until the whole page has come to the browser and had time to be shown."""
    with waiting.page.expect_event("console", lambda said: said.text == "whole"):
        waiting.answers.set()
    waiting.page.wait_for_timeout(SHOWN_MS)


@needs_browser
def test_a_form_that_is_filled_in_while_answers_are_on_their_way_can_be_sent(waiting: Waiting) -> None:
    page = waiting.page
    page.goto(f"{waiting.url}/create-topic")
    page.get_by_label("Name").fill("bookings")
    let_answers_come(waiting)
    page.get_by_role("button", name="Create").hover()
    page.mouse.down()
    page.wait_for_timeout(SHOWN_MS)
    assert page.get_by_label("Name").input_value() == "bookings"
    with page.expect_request("**/do/create-topic") as sent:
        page.mouse.up()
    assert "topic=bookings" in sent.value.post_data
    page.get_by_text("no", exact=True).wait_for()  # a page that closes while another is on its way may hang


HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
"""As when a person goes to another tab, and comes back."""


@needs_browser
def test_what_a_person_has_typed_survives_a_look_at_another_tab(waiting: Waiting) -> None:
    page = waiting.page
    page.goto(f"{waiting.url}/create-topic")
    page.get_by_label("Name").fill("bookings")
    page.evaluate(HIDE, True)
    page.evaluate(HIDE, False)
    let_answers_come(waiting)
    assert page.get_by_label("Name").input_value() == "bookings"


@needs_browser
def test_what_a_person_has_opened_is_not_replaced_under_the_hand(waiting: Waiting) -> None:
    page = waiting.page
    page.goto(f"{waiting.url}/groups/billing")
    page.locator("summary").click()
    let_answers_come(waiting)
    assert page.locator("details[open]").count() == 1
    page.locator("summary").click()
    settled(page)


@needs_browser
def test_a_click_is_not_lost_when_the_whole_page_comes_before_its_end(waiting: Waiting) -> None:
    page = waiting.page
    page.goto(f"{waiting.url}/groups/billing")
    page.locator("summary").hover()
    page.mouse.down()
    let_answers_come(waiting)
    page.mouse.up()
    page.locator("details[open]").wait_for()


@needs_browser
def test_a_page_without_a_stream_of_updates_gets_its_answers_all_the_same(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raftlog.console.app.MOST_STREAMS", 0)
    waiting.page.goto(f"{waiting.url}/create-topic")
    waiting.page.locator("[data-pending]").wait_for(state="attached")
    waiting.answers.set()
    settled(waiting.page)


@needs_browser
def test_the_field_in_which_a_page_begins_keeps_the_focus(waiting: Waiting) -> None:
    waiting.page.goto(f"{waiting.url}/create-topic")
    waiting.page.locator("[data-pending]").wait_for(state="attached")
    waiting.answers.set()
    settled(waiting.page)
    assert waiting.page.evaluate("document.activeElement.name") == "topic"


@needs_browser
def test_the_first_times_below_a_plot_differ(browser: Any) -> None:
    page = browser.new_page()
    page.set_content("""<div style="width: 600px" data-plot="[[1000000000.2, 1000000002.4], [1, 2]]"></div>""")
    page.evaluate(
        """() => {
            window.drawn = [];
            const fillText = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
                drawn.push(text);
                return fillText.call(this, text, ...place);
            };
        }"""
    )
    for script in ("uplot.js", "console.js"):
        page.add_script_tag(path=files("raftlog.console") / "static" / script)
    page.wait_for_function("drawn.length > 0")
    times = [text for text in page.evaluate("drawn") if ":" in text]
    page.close()
    assert times == ["01:46:41", "01:46:42"]


@needs_browser
@pytest.mark.parametrize("theme", one_of(THEMES))
def test_every_page_is_accessible(browser: Any, url: str, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    PICTURES.mkdir(parents=True, exist_ok=True)
    boss = logged_in(url, "boss")
    context = context_of(browser, url, "boss", color_scheme=theme)
    page = context.new_page()
    problems: list[object] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
    plotted = []

    def narrow(name: str) -> None:
        page.set_viewport_size(NARROW)
        page.screenshot(path=PICTURES / f"{name}-narrow.png")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"the page {name} is {wide} px wider than a window of 400 px"

    for name, path in PAGES.items():
        assert boss.get(path).code == (404 if name == "not-found" else 200), name
        whole(page, url + path)
        page.screenshot(path=PICTURES / f"{name}-{theme}.png", full_page=True)
        violations = Axe().run(page).response["violations"]
        problems += [(name, each["id"], each["nodes"][0]["html"][:200]) for each in violations]
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"the page {name} is {wide} px wider than the window"
        if page.locator("[data-plot]").count():  # a script has measured the window for it
            plotted.append(name)
        else:
            narrow(name)
            page.set_viewport_size(WIDE)
    for name in DOCUMENTED if FOR_DOCS else ():  # at the end: plots have points
        page.goto(url + PAGES[name])
        page.wait_for_timeout(5_000)
        page.screenshot(
            path=Path(FOR_DOCS) / f"{name}-{theme}.png", clip={"x": 0, "y": 0, "width": 1280, "height": 720}
        )
    page.set_viewport_size(NARROW)
    for name in plotted:
        whole(page, url + PAGES[name])
        narrow(name)
    context.close()
    assert problems == []


@needs_browser
def test_a_topic_from_its_creation_to_its_end(page: Any, url: str, cluster: Cluster) -> None:
    page.goto(f"{url}/topics")
    page.get_by_role("link", name="Create a topic").click()
    settled(page)
    page.get_by_label("Name").fill("bookings")
    page.get_by_label("Partitions").fill("2")
    page.get_by_label("Config").fill("retention.ms=3600000")
    page.get_by_role("button", name="Create").click()
    told(page, "Topic bookings was created.")
    with admin_of(cluster) as admin:
        until(lambda: len(admin.describe_topic("bookings").partitions) == 2, within_s=WAIT_S)
        whole(page, f"{url}/topics/bookings/messages")
        page.get_by_text("Produce a record").click()
        page.get_by_label("Key (empty").fill("42")
        page.locator("textarea[name=value]").fill('{"seat": "12A"}')
        page.locator("textarea[name=headers]").fill("source=console")
        page.get_by_role("button", name="Produce").click()
        told(page, "The record is at offset 0")
        page.goto(f"{url}/topics/bookings/messages?path=$.seat+%3D%3D+12A&header=source=console&key=42")
        page.get_by_role("link", name="0", exact=True).click()
        assert '"seat": "12A"' in page.locator("pre.json").inner_text()

        whole(page, f"{url}/topics/bookings/config?q=retention.ms")
        entry = page.locator("article", has=page.get_by_role("heading", name="retention.ms set here"))
        entry.get_by_label("retention.ms").fill("7200000")
        entry.get_by_role("button", name="Set").click()
        told(page, "retention.ms is 7200000 now.")
        entry.get_by_role("button", name="Back to the default").click()
        told(page, "retention.ms has its default again.")
        assert admin.describe_configs(topic="bookings")["retention.ms"].source != "dynamic_topic"

        whole(page, f"{url}/topics/bookings")
        page.get_by_text("Add partitions").first.click()
        page.get_by_role("button", name="Add partitions").click()
        told(page, "Topic bookings has 3 partitions now.")
        page.get_by_text("Elect preferred leaders").click()
        page.get_by_role("button", name="Elect").click()
        told(page, "The preferred replicas of bookings lead already.")
        page.get_by_text("Move a partition").click()
        page.get_by_label("Replicas, the preferred").fill("3,1")
        page.get_by_role("button", name="Move", exact=True).click()
        told(page, "bookings-0 moves to brokers 3, 1.")
        until(lambda: admin.describe_topic("bookings").partitions[0].replicas == [3, 1], within_s=WAIT_S)
        page.get_by_text("Delete records").first.click()
        form = page.locator("form[action='/do/delete-records']")
        for partition in range(3):
            form.locator("[name=partition]").fill(str(partition))
            form.locator("[name=before]").fill("-1")
            form.locator("[name=typed]").fill("bookings")
            form.get_by_role("button", name="Delete records").click()
            told(page, f"bookings-{partition} begins at offset")
            page.get_by_text("Delete records").first.click()
        page.get_by_text("Delete the topic").first.click()
        form = page.locator("form[action='/do/delete-topic']")
        form.locator("[name=typed]").fill("bookin")
        form.get_by_role("button", name="Delete the topic").click()
        told(page, "nothing was deleted: type the name bookings to confirm")
        page.get_by_text("Delete the topic").first.click()
        form.locator("[name=typed]").fill("bookings")
        form.get_by_role("button", name="Delete the topic").click()
        told(page, "Topic bookings was deleted.")
        until(lambda: "bookings" not in admin.list_topics(), within_s=WAIT_S)


@needs_browser
def test_offsets_of_a_group_are_reset_as_the_preview_shows(page: Any, url: str, cluster: Cluster) -> None:
    page.goto(f"{url}/groups")
    page.get_by_role("link", name=GROUP).click()
    page.get_by_role("link", name="Reset offsets").click()
    settled(page)
    page.locator("select[name=to]").select_option("shift")
    page.get_by_label("Value").fill("-3")
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("row", name="flights-0 5 2 -3").wait_for()
    settled(page)
    page.get_by_role("button", name="Set these offsets").click()
    told(page, f"1 offset of group {GROUP} set.")
    with admin_of(cluster) as admin:
        assert admin.group_offsets(GROUP)[TopicPartition("flights", 0)].offset == 2
        admin.alter_group_offsets(GROUP, {TopicPartition("flights", 0): 5})
        admin.alter_group_offsets("old-job", {TopicPartition("flights", 0): 5})
        whole(page, f"{url}/groups/old-job")
        page.get_by_text("Delete the group").first.click()
        page.locator("form[action='/do/delete-group'] [name=typed]").fill("old-job")
        page.get_by_role("button", name="Delete the group").click()
        told(page, "Group old-job was deleted.")
        assert "old-job" not in [each.group_id for each in admin.list_groups()]


@needs_browser
def test_users_and_acls_are_made_and_deleted(page: Any, url: str, cluster: Cluster) -> None:
    whole(page, f"{url}/security")
    page.get_by_text("Create a user, or change a password").click()
    form = page.locator("form[action='/do/set-user']")
    for repeated, said in (("mistyped", "the two passwords differ"), ("a long secret", "has this password now")):
        form.get_by_label("Name").fill("mallory")
        form.locator("[name=password]").fill("a long secret")
        form.locator("[name=repeated]").fill(repeated)
        form.get_by_role("button", name="Save").click()
        told(page, said)
        page.get_by_text("Create a user, or change a password").click()
    page.get_by_text("Add an ACL").first.click()
    form = page.locator("form[action='/do/add-acl']")
    form.get_by_label("Principal").fill("User:mallory")
    form.get_by_label("Operation").select_option("READ")
    form.get_by_label("Resource").select_option("TOPIC")
    form.locator("[name=resource_name]").fill("flights")
    form.get_by_role("button", name="Add the ACL").click()
    told(page, "User:mallory has the ACL now.")
    page.get_by_role("button", name="Delete the ACL of User:mallory on flights").click()
    told(page, "The ACL was deleted.")
    page.get_by_text("Delete a user").first.click()
    form = page.locator("form[action='/do/delete-user']")
    for field in ("user", "typed"):
        form.locator(f"[name={field}]").fill("mallory")
    form.get_by_role("button", name="Delete the user").click()
    told(page, "User mallory was deleted")
    with admin_of(cluster) as admin:
        assert "mallory" not in [each.user for each in admin.describe_users()]


@needs_browser
def test_a_transaction_is_seen_and_aborted_and_new_records_come_live(page: Any, url: str, cluster: Cluster) -> None:
    client = dict(cluster.client_config)
    with Producer(cluster.bootstrap, transactional_id="stuck", config=client) as producer:
        producer.begin_transaction()
        producer.send("flights", b"never committed").result(WAIT_S)
        page.goto(f"{url}/transactions")
        page.get_by_role("row", name="stuck ongoing").get_by_role("link", name="stuck").click()
        page.get_by_role("button", name="Abort the transaction").click()
        page.get_by_text("The transaction of stuck is aborted").wait_for()
    page.goto(f"{url}/topics/adas/messages?live=1")
    page.get_by_text("There are no records here.").wait_for()
    with Producer(cluster.bootstrap, config=client) as producer:
        producer.send("adas", b"look, no hands").result(WAIT_S)
    page.get_by_text("look, no hands").wait_for()


@needs_browser
def test_a_broker_is_drained_and_a_plan_carried_out(page: Any, url: str, cluster: Cluster) -> None:
    with admin_of(cluster) as admin:
        admin.create_topic("uneven", replica_assignment=[[1], [1], [1]])
        with Producer(cluster.bootstrap, config=dict(cluster.client_config)) as producer:
            for partition in range(3):
                producer.send("uneven", os.urandom(400_000), partition=partition).result(WAIT_S)
        until(lambda: len(admin.describe_topics(["uneven"])) == 1, within_s=WAIT_S)
        page.goto(f"{url}/brokers")
        page.get_by_role("link", name="Plan a rebalance").click()
        carry_out = page.get_by_role("button", name="Carry out")

        def planned() -> bool:
            """The console asks for topics once in some seconds, so its plan may be older than the topic."""
            page.reload()
            return bool(carry_out.count())

        until(planned, within_s=WAIT_S)
        page.get_by_label("Throttle on each broker").fill("1KiB")
        carry_out.click()
        page.get_by_role("button", name="Cancel the rebalance").click()
        page.get_by_text("The last rebalance was cancelled").wait_for()
        until(planned, within_s=WAIT_S)
        carry_out.click()
        page.get_by_text("The rebalance has begun").wait_for()
        page.get_by_text("The last rebalance is done").wait_for()

        def preferred() -> set[int]:
            return {part.replicas[0] for part in admin.describe_topic("uneven").partitions}

        until(lambda: preferred() == {1, 2, 3} and not admin.list_reassignments(), within_s=WAIT_S)
        admin.delete_topic("uneven")
        whole(page, f"{url}/brokers/3")
        page.get_by_role("button", name="Cordon").click()
        told(page, "Broker 3 gets no new replicas.")
        page.get_by_role("button", name="Uncordon").click()
        told(page, "Broker 3 gets replicas again.")
        page.get_by_role("button", name="Drain").click()
        told(page, "Broker 3 is drained")
        page.locator("h1 .badge", has_text="drained").wait_for()
        page.get_by_role("button", name="Let it lead again").click()
        told(page, "Broker 3 may lead again.")
        assert not any(broker.drained for broker in admin.describe_cluster().brokers)


@needs_browser
def test_the_move_of_a_partition_is_cancelled(page: Any, url: str, cluster: Cluster) -> None:
    client = dict(cluster.client_config)
    with admin_of(cluster) as admin, Producer(cluster.bootstrap, config=client) as producer:
        admin.create_topic("slow", replica_assignment=[[1]])
        for _ in range(2):  # the throttle lets one batch through, and the second one waits for minutes
            producer.send("slow", os.urandom(400_000)).result(WAIT_S)
        put_on(admin, [Move(SLOW, (1,))], {SLOW: Move(SLOW, (2,))}, 1024)
        whole(page, f"{url}/topics/slow")
        page.get_by_text("Move a partition").click()
        page.get_by_label("Replicas, the preferred").fill("2")
        page.get_by_role("button", name="Move", exact=True).click()
        told(page, "slow-0 moves to brokers 2.")
        page.get_by_text("1 partition moves to other brokers.").wait_for()
        page.get_by_text("Move a partition").click()
        page.get_by_role("button", name="Cancel its move").click()
        told(page, "The move of slow-0 was cancelled.")
        until(lambda: admin.describe_topic("slow").partitions[0].replicas == [1], within_s=WAIT_S)
        assert not admin.list_reassignments()
        take_off(admin, ["slow"])
        admin.delete_topic("slow")


@contextmanager
def a_fourth_broker(cluster: Cluster, admin: Admin) -> Iterator[None]:
    """A broker that is gone afterwards, so that a failure of its test leaves the other tests their three."""
    cluster.start(ADDED)
    try:
        yield
    finally:
        if cluster.is_running(ADDED):
            cluster.stop(ADDED)
        if ADDED in {broker.broker_id for broker in admin.describe_cluster(linearizable=True).brokers}:
            admin.unregister_broker(ADDED)


@needs_browser
def test_a_broker_comes_and_is_decommissioned(page: Any, url: str, cluster: Cluster) -> None:
    with admin_of(cluster) as admin, a_fourth_broker(cluster, admin):
        admin.create_topic("leaving", replica_assignment=[[ADDED]])
        carry_out = page.get_by_role("button", name="Carry out")

        page.goto(f"{url}/brokers")
        page.get_by_role("row", name=f"{ADDED} active").get_by_role("link").click()
        page.get_by_role("link", name="Decommission: plan its moves").click()

        def planned() -> bool:
            page.reload()
            settled(page)
            return bool(carry_out.count())

        until(planned, within_s=WAIT_S)
        carry_out.click()
        page.get_by_text("The last rebalance is done").wait_for()
        assert ADDED not in admin.describe_topic("leaving").partitions[0].replicas
        page.goto(f"{url}/brokers/{ADDED}")
        page.locator("h1 .badge", has_text="cordoned").wait_for()
        assert page.get_by_role("button", name="Remove from the cluster").count() == 0, (
            "a running broker must not be offered for removal"
        )
        cluster.stop(ADDED)
        page.locator("h1 .badge", has_text="stopped").wait_for()
        remove = page.get_by_role("button", name="Remove from the cluster")
        remove.focus()  # it has come by itself
        page.wait_for_timeout(2 * SHOWN_MS)
        # One step: an update between finding the button and asking it would leave another button with the focus.
        assert page.evaluate("document.activeElement.textContent") == "Remove from the cluster", (
            "an update of the page takes the focus away from the button"
        )
        page.keyboard.press("Enter")
        told(page, f"Broker {ADDED} has left the cluster.")
        assert [each.broker_id for each in admin.describe_cluster(linearizable=True).brokers] == [1, 2, 3]
        admin.delete_topic("leaving")


GONE_FOR_A_MOMENT = """
    (deed) => {
        const shown = livePart().innerHTML;
        const focused = () => document.activeElement.textContent;
        Array.from(document.querySelectorAll("button")).find((each) => each.textContent === "Drain").focus();
        const before = focused();
        replace(livePart(), "<h1>Broker 2</h1>");
        const meanwhile = focused();
        if (deed) document.body.dispatchEvent(new Event(deed, { bubbles: true }));
        replace(livePart(), shown);
        return [before, meanwhile === before, focused() === before];
    }
"""


@needs_browser
@pytest.mark.parametrize("deed", ["", "keydown", "pointerdown"])
def test_what_is_gone_for_a_moment_gets_the_focus_back_unless_the_person_goes_on(
    page: Any, url: str, deed: str
) -> None:
    whole(page, f"{url}/brokers/2")
    page.get_by_role("button", name="Drain", exact=True).wait_for()
    assert page.evaluate(GONE_FOR_A_MOMENT, deed) == ["Drain", False, not deed]


@needs_browser
def test_a_hanging_transaction_is_found_and_aborted(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = partialmethod(Admin.find_hanging_transactions, max_transaction_timeout_ms=0)
    monkeypatch.setattr(Admin, "find_hanging_transactions", find)  # by default only what is older than 15 minutes
    with before_verification(tmp_path, monkeypatch) as cluster, Admin(cluster.bootstrap) as admin:
        admin.create_topic("hangs")
        with Producer(cluster.bootstrap, transactional_id="forgetful") as producer, producer.transaction():
            send_without_adding(producer, "hangs", b"never ended", monkeypatch)
        with serve(Settings(cluster.bootstrap)) as url, closing(browser.new_context()) as context:
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            whole(page, f"{url}/transactions")
            page.get_by_role("row", name="hangs-0").get_by_role("button", name="Abort").click()
            told(page, "The hanging transaction in hangs-0 is aborted.")
            page.get_by_role("region", name="Hanging transactions").wait_for(state="detached")
        assert admin.find_hanging_transactions() == []


@needs_browser
def test_the_page_goes_on_while_a_broker_is_killed(page: Any, url: str, cluster: Cluster) -> None:
    page.goto(url)
    page.get_by_text("3 of 3 up").wait_for()
    cluster.kill(3)
    try:
        page.get_by_text("2 of 3 up").wait_for()
        page.locator(".warn", has_text="Under-replicated").wait_for()
        for name, path in PAGES.items():
            if not name.startswith("audit"):  # which ops may not read
                whole(page, url + path)
                assert page.locator("h1").inner_text() != "The cluster does not answer", name
        whole(page, f"{url}/brokers/3")
        page.locator("h1 .badge", has_text="fenced").wait_for()
    finally:
        cluster.start(3)
    page.goto(url)
    page.get_by_text("3 of 3 up").wait_for()
    page.locator(".cards > div:not(.warn)", has_text="Under-replicated").wait_for()


def test_metadata_are_asked_for_once_in_two_seconds_whatever_people_look_at(
    url: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counting(owner: type, name: str) -> None:
        original = getattr(owner, name)

        async def counted(*given: Any, **options: Any) -> Any:
            asked.append(name)
            return await original(*given, **options)

        monkeypatch.setattr(owner, name, counted)

    searches = ("message", "audit")  # each has a consumer, which asks for itself
    watched = [path for name, path in PAGES.items() if not name.startswith((*searches, "not-found"))]
    people = [logged_in(url, "boss") for _ in range(4)]
    for path in watched:
        people[0].get(path)  # it asks what this user may do with each topic, which is not asked again for a minute
    counting(MetadataCache, "_ask_for")
    counting(AdminEngine, "_with_operations")
    began_s = time.monotonic()
    while time.monotonic() - began_s < 4 * EVERY_S:
        with ThreadPoolExecutor(len(people)) as pool:
            for person in people:
                for path in watched:
                    pool.submit(person.once, path).add_done_callback(lambda done: done.result())
        time.sleep(EVERY_S / 4)  # these hundred pages are enough to ask many times, if each asked
    assert 1 < len(asked) <= (time.monotonic() - began_s) / EVERY_S + 1, asked


def test_records_of_a_topic_never_become_markup(url: str) -> None:
    reply = logged_in(url, "boss").get("/topics/flights/messages")
    assert "&lt;b&gt;bold" in reply.text
    assert "<b>bold" not in reply.text


def test_who_may_what_is_told_with_the_rule(url: str) -> None:
    boss = logged_in(url, "boss")

    def rows(query: str) -> list[str]:
        body = boss.get(f"/security/access?{query}").text.partition("<tbody>")[2].partition("</tbody>")[0]
        return [" ".join(re.sub("<[^>]*>", " ", row).split()) for row in body.split("</tr>") if row.strip()]

    assert rows("principal=ada") == ["adas read describe ACL of User:ada: allows read on adas"]
    both = rows("principal=User:ada&type=topic&name=adas")
    assert both[0] == "read yes ACL of User:ada: allows read on adas"
    assert both[1] == "write no no ACL or role allows it"
    assert "delete yes super user" in rows("principal=boss&name=adas")
    of_topic = rows("name=adas")
    assert [row.split()[0] for row in of_topic if " nothing " not in row] == ["User:ada", "User:boss", "User:ops"]
    assert "alter yes ACL of User:ops: allows all" in rows("principal=ops&type=cluster")
    assert logged_in(url, "ada").get("/security/access?principal=boss").code == 403


def test_a_search_finds_what_it_is_asked_for(url: str) -> None:
    client = logged_in(url, "ops")
    found = client.get("/topics/flights/messages?begin=oldest&path=$.carrier+%3D%3D+UA&limit=200").text
    assert "100 records shown, 300 looked at" in found
    table = client.get("/topics/flights/messages?view=table&path=$.carrier+%3D%3D+UA").text
    assert re.findall(r'<th scope="col">(\w+)<br><span class="code">(\w+)</span>', table) == [
        ("carrier", "string"),
        ("flight", "int64"),
        ("note", "string"),
    ]
    assert "code hex" in client.get(f"/topics/{LONG}/messages").text
    assert "No record matches." in client.get("/topics/flights/messages?header=trace=none").text
    assert "JSON path; write for example" in client.get("/topics/flights/messages?path=%5B").text


def test_a_console_with_a_certificate_acts_as_its_user(tmp_path: Path) -> None:
    config: dict[str, Any] = {**PATIENT, "authorizer": "acl", "super.users": "User:client"}
    with Cluster(1, tls=True, config=config) as cluster:
        with admin_of(cluster) as admin:
            for topic in ("theirs", "adas"):
                admin.create_topic(topic)
            admin.create_acls([AclBinding("User:ada", AclOperation.ALL, ResourceType.TOPIC, "adas")])
        file = tmp_path / "ada.toml"
        lines = (f'"{key}" = "{value}"\n' for key, value in cluster.authority.client_config("ada").items())
        file.write_text("".join(lines))
        command = [sys.executable, "-P", "-m", "raftlog", "console", "--client-config", str(file)]
        command += ["--bootstrap", cluster.bootstrap, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                client = Client(process.stdout.readline().split()[4].rstrip("/;"))
                listed = client.get("/topics").text
                assert ("/topics/adas" in listed, "/topics/theirs" in listed) == (True, False)
                assert "certificate ada.pem" in listed
                client.get("/topics/adas")  # which has a form
                for topic, said in (("theirs", "may not DELETE"), ("adas", "Topic adas was deleted.")):
                    client.post("/do/delete-topic", topic=topic, typed=topic, back="/topics")
                    assert said in client.get("/topics").text
            finally:
                process.terminate()
                _, said = process.communicate(timeout=WAIT_S)
        assert "delete-topic of adas by certificate ada.pem from 127.0.0.1" in said
        with admin_of(cluster) as admin:
            assert admin.list_topics() == ["theirs"]


@needs_browser
@pytest.mark.parametrize("theme", one_of(THEMES))
def test_people_log_in_with_their_certificates(
    browser: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, theme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    caplog.set_level("INFO", "raftlog.console.audit")
    stranger = CertificateAuthority(tmp_path / "other").issue("ada", hosts=())
    config: dict[str, Any] = {**PATIENT, "authorizer": "acl", "super.users": "User:client"}
    with Cluster(1, tls=True, config=config) as cluster, admin_of(cluster) as admin:
        for topic in ("theirs", "adas"):
            admin.create_topic(topic)
        admin.create_acls([AclBinding("User:ada", AclOperation.ALL, ResourceType.TOPIC, "adas")])
        own = {name: Path(cluster.authority.client_config(name)["ssl.certificate.location"]) for name in ("ada", "bob")}
        client = {
            key: value
            for key, value in cluster.client_config.items()
            if not key.endswith(("certificate.location", "key.location"))
        }
        settings = Settings(cluster.bootstrap, client=client, with_login=True, certificates=True)
        with serve(settings) as address, closing(browser.new_context(color_scheme=theme)) as context:
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            page.goto(f"{address}/topics")
            assert page.url.endswith("/login?after=/topics")
            page.screenshot(path=PICTURES / f"login-certificate-{theme}.png")
            assert Axe().run(page).response["violations"] == []
            field = page.get_by_label("Certificate and private key")
            for text, said in (
                (own["ada"].read_text().partition("-----BEGIN PRIVATE")[0], "the private key is missing"),
                (stranger.read_text(), "brokers refuse this certificate: no CA in ssl.ca.location has issued it"),
            ):
                field.fill(text)
                page.get_by_role("button", name="Log in").click()
                assert said in page.get_by_role("alert").inner_text()
                assert field.input_value() == "", "the field must be empty: no private key may come back in a page"
            page.get_by_label("Files").set_input_files(own["ada"])
            until(lambda: "PRIVATE KEY" in field.input_value(), within_s=WAIT_S)
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("link", name="adas").wait_for()
            assert page.get_by_role("link", name="theirs").count() == 0
            assert "certificate ada" in page.locator("header").inner_text()
            assert "PRIVATE KEY" not in page.content()
            page.get_by_role("button", name="Log out").click()
            page.get_by_label("Certificate and private key").fill(own["bob"].read_text())
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("button", name="Log out").wait_for()
            page.goto(f"{address}/topics")
            assert page.get_by_role("link", name="adas").count() == 0, (
                "the topics page must show bob no topic, as he may describe none"
            )
    lines = [each.getMessage() for each in caplog.records]
    assert "login by certificate ada from 127.0.0.1" in lines
    assert not any("PRIVATE" in each for each in lines)


def test_ctrl_c_ends_a_console_quietly(cluster: Cluster) -> None:
    command = [sys.executable, "-P", "-m", "raftlog", "console", "--port", "0", "--bootstrap", cluster.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("the console is at http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=WAIT_S) == ("", "")
        finally:
            process.kill()
    assert process.returncode == 0


def test_up_serves_the_console_and_ends_it() -> None:
    with raftlog_up("--console", "--console-port", "0") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        address = next(line.split()[1] for line in lines if line.startswith("Console: "))

        def overview() -> str:
            try:
                return Client(address).get("/").text
            except OSError:
                return ""

        until(lambda: "1<small> of 1 up" in overview(), within_s=WAIT_S)
        assert "everyone may do everything" in Client(address).get("/security/access?principal=ada").text
        assert "audit.topic.enable = true" in Client(address).get("/audit").text
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert overview() == ""


@needs_browser
@pytest.mark.parametrize("theme", one_of(THEMES))
def test_what_a_user_may_not_do_is_shown_accessibly(browser: Any, url: str, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(color_scheme=theme, viewport=WIDE)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    problems: list[object] = []

    def look(name: str) -> None:
        page.screenshot(path=PICTURES / f"{name}-{theme}.png", full_page=True)
        problems.extend((name, each["id"]) for each in Axe().run(page).response["violations"])

    page.goto(f"{url}/topics/adas")
    look("login")
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("name or password is wrong").wait_for()
    page.get_by_label("Password").fill("difference-engine")
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/topics/adas")
    settled(page)
    page.get_by_text("Delete the topic").first.click()
    page.get_by_text("You may not: this needs Delete on topic adas.").last.wait_for()
    assert page.get_by_role("button", name="Delete the topic").is_disabled()
    look("refused")
    for name, path in (("refused-config", "/topics/adas/config"), ("refused-security", "/security")):
        page.goto(url + path)
        look(name)
    context.close()
    assert problems == []


def test_logins_and_acls(url: str) -> None:
    ada = Client(url)
    ada.get("/login")
    planted = ada.cookie
    wrong = ada.post("/login", user="ada", password="open, sesame", after="/")
    assert (wrong.code, "name or password is wrong" in wrong.text) == (401, True)
    right = ada.post("/login", user="ada", password="difference-engine", after="/topics")
    assert (right.code, right.headers["location"]) == (303, "/topics")
    assert ada.cookie != planted
    until(lambda: "adas" in ada.get("/topics").text, within_s=WAIT_S)
    listed = ada.get("/topics").text
    assert "theirs" not in listed
    offered = ada.get("/topics/adas").text
    assert "You may not: this needs Delete on topic adas." in offered
    assert "You may not: this needs Alter on the cluster." in offered
    assert offered.count("<fieldset disabled>") == 5
    assert "this needs Write on topic adas" in ada.get("/topics/adas/messages").text
    assert 'href="/security"' not in listed, (
        "the navigation must not offer the security page to a user who may not describe the cluster"
    )
    assert "difference-engine" not in listed
    assert ada.get("/topics/theirs").code in (403, 404)
    ada.post("/do/delete-topic", topic="adas", typed="adas", back="/topics")
    assert "note-line error" in ada.get("/topics").text
    assert ada.get("/audit").code == 403
    ada.post("/logout")
    assert ada.get("/topics").code == 303

    boss = logged_in(url, "boss")
    assert "theirs" in boss.get("/topics").text
    assert "You may not" not in boss.get("/topics/theirs").text
    assert "User:ada" in boss.get("/security").text
    refused = re.compile("User:ada.*raftlog-console", re.DOTALL)
    until(lambda: refused.search(boss.get("/audit?outcome=refused&what=delete&on=adas").text), within_s=WAIT_S)
    assert "No audit record matches." in boss.get("/audit?outcome=refused&what=delete&on=others").text
    assert 'href="/audit"' in boss.get("/").text
    boss.post("/do/delete-topic", topic="theirs", typed="theirs", back="/topics")
    assert "Topic theirs was deleted." in boss.get("/topics").text
