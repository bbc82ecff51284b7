"""The web application on its own: what it refuses before any broker is asked, and its security headers."""

from __future__ import annotations

import asyncio
import http.client
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote, urlsplit

import grpc
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from raftlog.console.access import TRIES
from raftlog.console.app import (
    CHANGE_THREADS,
    COOKIE,
    MOST_FORM_BYTES,
    MOST_LOGIN_BYTES,
    MOST_LOGOUT_BYTES,
    THREADS,
    THREADS_OF_USER,
    Console,
    Settings,
    _find_page,
    _form,
    _inside,
    _sweep,
)
from raftlog.console.view import View
from raftlog.testing import CertificateAuthority
from tests.support.console import WAIT_S, Client, Door, Reply, Silent, closed_by_server, serve


@pytest.fixture(scope="module")
def nowhere() -> Iterator[str]:
    """An address where nothing listens as long as the test has it."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def url(nowhere: str) -> Iterator[str]:
    with serve(Settings(nowhere)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Client:
    made = Client(url)
    assert made.get("/create-topic").code == 200
    return made


@pytest.fixture
def secured_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A console with logins; `admin` has the password `right`, no other login is right."""
    monkeypatch.setattr("raftlog.console.app.View", partial(View, make_admin=Door))  # type: ignore[arg-type] # a stand-in
    Door.opens.set()
    Door.tried.clear()
    with serve(Settings("127.0.0.1:1", with_login=True)) as address:
        yield address


@pytest.fixture
def with_login(secured_url: str) -> Client:
    """A browser in which admin has logged in."""
    client = Client(secured_url)
    client.get("/login")
    assert client.post("/login", user="admin", password="right").code == 303
    client.get("/create-topic")
    return client


def test_every_answer_has_the_security_headers(client: Client) -> None:
    for path in ("/create-topic", "/nothing", "/static/console.css"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
        assert headers["cache-control"] == ("public, max-age=3600" if path.startswith("/static") else "no-store")


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(url: str) -> None:
    cookie = Client(url).get("/create-topic").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "evil.example:8080"])
def test_a_foreign_host_name_is_refused(url: str, host: str) -> None:
    reply = Client(url).get("/", {"Host": host})
    assert reply.code == 421
    assert "--allowed-host" in reply.text


@pytest.mark.parametrize("host", ["[", "[::1", "a]b", "127.0.0.1:[", "[x]"])
def test_a_malformed_host_name_is_refused(nowhere: str, url: str, host: str) -> None:
    with serve(Settings(nowhere, hosts=())) as anywhere:
        for address in (url, anywhere):
            reply = Client(address).get("/login", {"Host": host})
            assert (reply.code, reply.headers["x-frame-options"]) == (400, "DENY")
            assert f"the Host header {host!r} is not a host name" in reply.text


def test_a_failure_of_the_console_itself_is_answered_without_a_traceback(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a secret of the code")

    monkeypatch.setattr("raftlog.console.app.Console.view_of", fail)
    reply = client.get("/topics")
    assert (reply.code, reply.headers["cache-control"]) == (500, "no-store")
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert reply.text == "the console failed to answer this request; its log says why"


FIELDS: Final = "&".join(f"a{number}=1" for number in range(300))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"/?{FIELDS}", "more than 50 fields"),
        (f"/topics?{FIELDS}", "more than 50 fields"),
        (f"/live?path=/%3F{quote(FIELDS)}", "more than 50 fields"),
        (f"/live?{FIELDS}", "more than 50 fields"),
        ("/live?path=//[", "is not the path of a page"),
        ("/live?path=http://[::1", "is not the path of a page"),
    ],
)
def test_an_address_that_no_page_has_is_refused(client: Client, path: str, says: str) -> None:
    reply = client.get(path)
    assert (reply.code, says in reply.text) == (400, True), reply.text


def test_a_request_target_that_is_no_path_is_not_found(client: Client) -> None:
    for target in ("[", "[/", "*"):
        assert client.once(target).code == 404


def test_a_body_that_is_no_form_is_refused(with_login: Client) -> None:
    bodies = [
        (b"\xff\xfe", 400, "not a form"),
        (FIELDS.encode(), 400, "more than 200 fields"),
        (b"a" * (3 << 20), 413, "larger than"),
    ]
    assert (with_login.send("/logout", b"\xff\xfe").code, with_login.send("/logout", b"a" * (3 << 20)).code) == (
        400,
        413,
    )
    for path in ("/do/elect", "/login"):
        for body, code, says in bodies:
            reply = with_login.send(path, body)
            assert (reply.code, says in reply.text) == (code, True), (path, reply.text)


@pytest.mark.parametrize("token", ["", "wrong", "schlüssel"])
def test_a_form_without_the_token_of_the_session_is_refused(client: Client, token: str) -> None:
    reply = client.post("/do/delete-topic", topic="orders", typed="orders", form_token=token)
    assert (reply.code, "does not come from a page of this session" in reply.text) == (403, True)


def test_a_token_of_another_session_is_refused(url: str, client: Client) -> None:
    other = Client(url)
    other.get("/create-topic")
    assert client.post("/do/elect", topic="orders", form_token=other.form_token).code == 403


def test_a_form_before_any_page_is_refused(url: str) -> None:
    assert Client(url).post("/do/elect", topic="orders").code == 403


def test_unknown_actions_and_pages(client: Client) -> None:
    assert client.post("/do/drop-everything").code == 404
    reply = client.get("/<script>alert(1)</script>")
    assert reply.code == 404
    assert "<script>alert" not in reply.text
    assert "there is no page" in reply.text


def test_a_form_that_is_too_large_is_cut_off(client: Client) -> None:
    assert client.post("/do/produce", topic="orders", value="x" * MOST_FORM_BYTES).code == 413


def form_of(receive: Callable[[], Awaitable[dict[str, Any]]], most_bytes: int = 10, **headers: str) -> Any:
    """Read a form whose parts `receive` gives."""
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/login", "headers": named}
    return _form(Request(scope, cast(Any, receive)), most_bytes)


async def test_a_form_is_refused_by_its_length_before_it_is_read() -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("it was read")

    with pytest.raises(HTTPException, match="larger than 10 B") as raised:
        await form_of(receive, content_length="11")
    assert raised.value.status_code == 413


async def test_a_form_without_a_length_is_read_up_to_its_bound() -> None:
    parts = iter([b"a=123", b"4567", b"89"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(parts), "more_body": True}

    with pytest.raises(HTTPException, match="larger than 10 B"):
        await form_of(receive)


async def test_a_form_has_to_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftlog.console.app.CLIENT_S", 0.01)

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    with pytest.raises(HTTPException, match=r"did not come within 0\.01 seconds") as raised:
        await form_of(receive, content_length="10")
    assert raised.value.status_code == 408


async def test_a_client_that_goes_away_while_it_sends_a_form_is_no_failure_of_the_console() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(HTTPException, match="its client has gone away"):
        await form_of(receive)


def test_the_bound_of_a_form_depends_on_what_it_is_for(with_login: Client, secured_url: str) -> None:
    for path, most_bytes in (
        ("/login", MOST_LOGIN_BYTES),
        ("/logout", MOST_LOGOUT_BYTES),
        ("/do/elect", MOST_FORM_BYTES),
    ):
        assert with_login.send(path, b"a" * (most_bytes + 1)).code == 413, path
    stranger = Client(secured_url)
    for path in ("/do/elect", "/logout"):  # answered before the body, which never comes
        assert stranger.send_head(path, length=1000).code == 303


def test_a_change_without_a_session_is_refused_before_its_form_is_read(url: str) -> None:
    assert Client(url).send_head("/do/elect", length=1000).code == 403


def test_a_login_with_an_endless_name_is_not_tried(secured_url: str) -> None:
    client = Client(secured_url)
    client.get("/login")
    reply = client.post("/login", user="x" * 256, password="right")
    assert (reply.code, "at most 255 characters" in reply.text, Door.tried) == (400, True, [])


def test_a_few_forms_of_changes_are_read_at_a_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftlog.console.app.MOST_FORMS", 1)
    with client.half_sent("/do/elect"):
        reply = client.post("/do/elect", topic="orders")
        assert (reply.code, "send this one again soon" in reply.text) == (503, True)


def connect(url: str) -> socket.socket:
    host, port = urlsplit(url).netloc.split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def test_silent_connections_give_way(nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftlog.console.app.MOST_CONNECTIONS", 3)
    monkeypatch.setattr("raftlog.console.app.CLIENT_S", 10 * WAIT_S)  # so that they are closed for nothing else
    with serve(Settings(nowhere)) as url:  # a console of its own: connections of other tests would give way first
        client = Client(url)
        client.get("/create-topic")
        with client.half_sent("/logout") as half, connect(url) as silent, connect(url), connect(url), connect(url):
            assert client.get("/static/console.css").code == 200
            assert closed_by_server(half)
            assert closed_by_server(silent)


def test_a_connection_whose_request_is_under_way_does_not_give_way(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.sent("GET", "/live?path=/nothing") as stream:
        reply = stream.getresponse()
        assert reply.readline() == b"retry: 2000\n"
        monkeypatch.setattr("raftlog.console.app.MOST_CONNECTIONS", 1)
        # It may be closed before its connect returns.
        with suppress(ConnectionResetError), connect(f"http://{client.address}") as other:
            assert closed_by_server(other)
        assert b"\n" in reply.readline()


def test_a_request_head_has_to_come_in_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftlog.console.app.CLIENT_S", 0.05)
    for begun in (
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET ",
    ):
        with connect(url) as connection:
            connection.sendall(begun)
            assert closed_by_server(connection)


def test_a_client_that_reads_no_response_is_disconnected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftlog.console.app.CLIENT_S", 0.05)
    with connect(url) as connection, suppress(ConnectionError):
        connection.sendall(b"GET /static/uplot.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 500)
        assert closed_by_server(connection)


def test_a_refused_form_says_what_is_missing(client: Client) -> None:
    reply = client.post("/do/create-topic", topic=" ", back="/create-topic")
    assert (reply.code, reply.headers["location"]) == (303, "/create-topic")
    assert "topic is missing" in client.get("/create-topic").text
    client.post("/do/delete-topic", topic="orders", typed="order", back="/create-topic")
    assert "nothing was deleted: type the name orders to confirm" in client.get("/create-topic").text


@pytest.mark.parametrize(
    "path",
    [
        "//evil.example",
        "//[",
        "http://[",
        "https://evil.example/",
        "/\\evil.example",
        "javascript:alert(1)",
        "",
        "/a\r\nb: c",
    ],
)
def test_no_redirect_leads_outside(path: str) -> None:
    assert _inside(path) == "/"
    assert _inside("/groups/a%2Fb?page=2") == "/groups/a%2Fb?page=2"


def test_a_read_only_console_refuses_every_change(nowhere: str) -> None:
    with serve(Settings(nowhere, read_only=True)) as address:
        client = Client(address)
        page = client.get("/create-topic").text
        assert "<form" not in page
        client.form_token = "none"
        assert client.post("/do/elect", topic="orders").code == 403


def test_a_console_with_logins_shows_nothing_before(nowhere: str) -> None:
    with serve(Settings(nowhere, with_login=True)) as address:
        client = Client(address)
        reply = client.get("/topics?q=a")
        assert (reply.code, reply.headers["location"]) == (303, "/login?after=/topics%3Fq%3Da")
        assert client.get("/live?path=/").code == 401
        assert client.post("/do/elect", topic="orders").headers["location"] == "/login"
        for after in ("//evil.example", "//[", "http://["):
            assert 'name="after" value="/"' in client.get(f"/login?after={after}").text


def logins_at_once(url: str, passwords: list[str]) -> list[Reply]:
    """Log in as admin with each of these passwords, while brokers answer to none before all were sent."""
    Door.opens.clear()
    with ExitStack() as opened:
        waiting = []
        for password in passwords:
            client = Client(url)
            client.get("/login")
            sent = client.sent("POST", "/login", user="admin", password=password)
            waiting.append((client, opened.enter_context(sent)))
        Door.opens.set()
        return [client.reply(connection.getresponse()) for client, connection in waiting]


def test_of_many_wrong_logins_at_once_five_are_tried(secured_url: str) -> None:
    replies = logins_at_once(secured_url, [f"guess {number}" for number in range(30)])
    assert sorted(each.code for each in replies) == [400] * (30 - TRIES) + [401] * TRIES
    assert len(Door.tried) == TRIES
    assert all("too many failed logins" in each.text for each in replies if each.code == 400)


@pytest.mark.parametrize("failed", [0, TRIES - 1])
def test_a_user_may_log_in_from_several_tabs_at_once(secured_url: str, failed: int) -> None:
    logins_at_once(secured_url, ["wrong"] * failed)
    assert [each.code for each in logins_at_once(secured_url, ["right"] * 7)] == [303] * 7


def test_a_stranger_gets_a_session_from_the_login_page_only(secured_url: str) -> None:
    for path in ("/topics", "/nothing", "/live?path=/", "/healthz"):
        assert "set-cookie" not in Client(secured_url).get(path).headers
    assert "set-cookie" not in Client(secured_url).send("/do/elect", b"").headers
    stranger = Client(secured_url)
    stranger.get("/login")
    assert stranger.cookie


def test_requests_without_a_session_begin_none(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    began: list[None] = []
    monkeypatch.setattr("raftlog.console.access.Sessions.begin", lambda _: began.append(None))
    for request in (partial(Client.send, path="/logout", body=b""), partial(Client.get, path="/nothing")):
        assert request(Client(url)).code in (303, 404)
    assert began == []


def test_a_certificate_that_brokers_refuse_is_said_to_be_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Long before the console loses its patience with brokers that do not answer."""
    caplog.set_level("INFO", "raftlog.console.audit")
    monkeypatch.setattr("raftlog.console.view.PATIENCE_MS", round(10_000 * WAIT_S))
    monkeypatch.setattr("raftlog._client.admin._FIRST_CONTACT_S", 10 * WAIT_S)
    trusted, stranger = CertificateAuthority(tmp_path / "a"), CertificateAuthority(tmp_path / "b", "another CA")
    own = trusted.issue("server").read_bytes()
    broker = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(own, own)], trusted.ca_file.read_bytes(), require_client_auth=True)
    port = broker.add_secure_port("127.0.0.1:0", credentials)
    broker.start()
    tls = {"security.protocol": "ssl", "ssl.ca.location": str(trusted.ca_file)}
    try:
        with serve(Settings(f"127.0.0.1:{port}", client=tls, with_login=True, certificates=True)) as address:
            client = Client(address)
            client.get("/login")
            reply = client.post("/login", certificate=stranger.issue("ada", hosts=()).read_text())
    finally:
        broker.stop(None)
    assert reply.code == 401
    assert "brokers refuse this certificate: no CA in ssl.ca.location has issued it; use one of a CA that" in reply.text
    (line,) = [each.getMessage() for each in caplog.records if each.name == "raftlog.console.audit"]
    assert line.startswith("login by certificate ada from 127.0.0.1: brokers refuse the certificate: no broker at")


def test_a_cluster_that_does_not_answer_is_said_so(nowhere: str) -> None:
    settings = Settings(nowhere, client={"default.api.timeout.ms": 300})
    with serve(settings) as address:
        reply = Client(address).get("/topics")
    assert reply.code == 200
    assert "Brokers have not answered yet:" in reply.text


def test_live_updates_find_pages_as_browsers_write_their_paths() -> None:
    found = _find_page("/groups/billing%2Feurope")
    assert found is not None
    assert found[1] == {"group": "billing/europe"}
    assert _find_page("/no-such-page") is None


def test_a_page_that_does_not_exist_is_updated_like_others(client: Client) -> None:
    connection = http.client.HTTPConnection(client.address, timeout=30)
    connection.request("GET", "/live?path=/nothing", headers={"Cookie": f"{COOKIE}={client.cookie}"})
    reply = connection.getresponse()
    lines = [reply.readline().decode() for _ in range(8)]
    connection.close()
    assert reply.status == 200
    assert any("there is no page /nothing" in line for line in lines), lines


async def test_the_sweep_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raftlog.console.app.SWEEP_S", 0.001)
    again = asyncio.Event()
    loop = asyncio.get_running_loop()
    calls: list[None] = []

    class Console:
        def end_views(self) -> None:
            calls.append(None)
            if len(calls) == 1:
                raise RuntimeError("a view would not close")
            loop.call_soon_threadsafe(again.set)

    sweeping = asyncio.create_task(_sweep(cast(Any, Console())))
    async with asyncio.timeout(30):
        await again.wait()
    sweeping.cancel()
    with suppress(asyncio.CancelledError):
        await sweeping
    assert "a view would not close" in caplog.text


@pytest.mark.parametrize("held_by", ["streams", "changes"])
def test_pages_come_while_others_wait_for_silent_brokers(monkeypatch: pytest.MonkeyPatch, held_by: str) -> None:
    silent = Silent()
    monkeypatch.setattr("raftlog.console.app.View", partial(View, make_admin=lambda *_, **__: silent))  # type: ignore[arg-type] # a stand-in
    monkeypatch.setattr("raftlog.console.app.LIVE_S", 600.0)
    with serve(Settings("127.0.0.1:1")) as url, ExitStack() as opened:
        opened.callback(silent.answers.set)
        client = Client(url)
        assert client.once("/create-topic").code == 200
        assert client.form_token
        for number in range(2 * THREADS):
            if held_by == "streams":
                waits = opened.enter_context(client.sent("GET", f"/live?path=/groups/{number}"))
                assert waits.getresponse().readline() == b"retry: 2000\n"
            else:
                opened.enter_context(client.sent("POST", "/do/delete-group", group=f"{number}", typed=f"{number}"))
        assert client.once("/topics").code == 200
        assert client.once("/static/console.css").code == 200


MEMORY = """
import os
from raftlog._installed import give_memory_back
from raftlog.console.app import keep_memory_small

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

keep_memory_small()
import pyarrow
answers = [bytes(2_000) for _ in range(20_000)]
kept = bytes(2_000)
before = resident()
del answers
give_memory_back()
print(pyarrow.default_memory_pool().backend_name, before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_that_is_no_longer_used_goes_back_to_the_system() -> None:
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    pool, given_back = run.stdout.split()
    assert pool == "system"
    assert int(given_back) > 30_000_000


def test_a_user_has_so_many_pages_that_update_themselves(with_login: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One could have all of them, so that no other user's page did."""
    monkeypatch.setattr("raftlog.console.app.MOST_STREAMS_OF_USER", 2)
    with ExitStack() as opened:
        for _ in range(2):
            stream = opened.enter_context(with_login.sent("GET", "/live?path=/")).getresponse()
            assert stream.status == 200
            assert stream.readline() == b"retry: 2000\n"
        assert with_login.get("/live?path=/").code == 503


async def test_the_work_of_one_user_does_not_take_all_threads() -> None:
    console, go_on = Console(Settings("127.0.0.1:1", with_login=True)), threading.Event()
    bob, ada = (console.sessions.log_in(console.sessions.begin(), name, "secret") for name in ("bob", "ada"))

    def long() -> bool:
        return go_on.wait(WAIT_S)

    async with asyncio.TaskGroup() as group:
        his = [
            group.create_task(console.run("change", console.change_threads, bob, long)) for _ in range(CHANGE_THREADS)
        ]
        await asyncio.sleep(0.05)
        assert console.change_threads.borrowed_tokens == THREADS_OF_USER < CHANGE_THREADS
        assert await console.run("change", console.change_threads, ada, lambda: True)
        go_on.set()
    assert all(each.result() for each in his)
