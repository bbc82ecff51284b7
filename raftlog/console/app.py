"""The web application: routes, the cookie of sessions, security headers, live updates, and the process that serves it.

    GET  PATH            a page (pages.py): what is known within `PAGE_S`
    GET  /live?path=PATH server-sent events: the live part of that page, whenever it has changed; with `whole=1` first
                         the whole page, until it lacks no answer
    POST /do/NAME        a change (actions.py), then back to the page it came from
    POST /login, /logout
    GET  /static/NAME    scripts and styles

Every page works without scripts; they only replace what has changed and draw plots. The content security policy allows
nothing but files of the console itself, so text of records can never become a script.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from raftlog import __version__, _installed
from raftlog._client.connections import CertificateRefused
from raftlog._core.security.acls import MAX_USER_CHARACTERS
from raftlog._core.words import counted
from raftlog.cli.nodes.cluster import size_text
from raftlog.console import certificate, messages
from raftlog.console.access import Session, Sessions
from raftlog.console.actions import ACTIONS, audit, perform
from raftlog.console.certificate import Certificate, read_certificate
from raftlog.console.pages import PAGES, Look, Page
from raftlog.console.view import EVERY_S, TooManySearches, View
from raftlog.errors import (
    AuthenticationFailed,
    AuthorizationError,
    GroupIdNotFound,
    InvalidRequestError,
    RaftlogError,
    ResourceNotFound,
    TransactionalIdNotFound,
    UnknownTopicOrPartition,
)
from raftlog.security import AclOperation, AclPermission, PatternType, ResourceType

T = TypeVar("T")

logger = logging.getLogger(__name__)

COOKIE: Final = "raftlog_console"
MOST_FORM_BYTES: Final = 2 << 20
"""Of a change, such as a record to produce."""
MOST_LOGIN_BYTES: Final = 64 << 10
MOST_CERTIFICATE_LOGIN_BYTES: Final = 2 * certificate.MOST_BYTES
"""Forms write some characters of a certificate, such as the ends of lines, as three bytes each."""
MOST_LOGOUT_BYTES: Final = 1 << 10
MOST_FORMS: Final = 16
"""Forms of changes that are read at a time. Smaller forms are bounded by `MOST_CONNECTIONS`."""
MOST_FORM_FIELDS: Final = 200
MOST_QUERY_FIELDS: Final = 50
MOST_STREAMS: Final = 200
MOST_STREAMS_OF_USER: Final = 50
"""Of one that has logged in."""
MOST_CONNECTIONS: Final = 512
"""More than `MOST_STREAMS` by far, and half of the descriptors that a process usually may have. Beyond it a connection
gives way that waits for its client."""
CLIENT_S: Final = 30.0
"""How long a client may take to send a request's head, or a form, or to make room for more of a response."""
THREADS: Final = 8
"""For pages and files: a page holds its thread for `PAGE_S` and the time that it takes to draw."""
STREAM_THREADS: Final = 6
CHANGE_THREADS: Final = 4
THREADS_OF_USER: Final = 2
"""Of those for streams, and of those for changes, that one user's take at a time."""
LOGIN_THREADS: Final = 2
"""Changes and logins wait for brokers for seconds. Neither they nor streams take a thread from pages, nor a stranger's
logins one from changes."""
MOST_VIEWS: Final = 100
"""Users with a view of their own at a time; the one that was used least recently gives way."""
SWEEP_S: Final = 10.0
"""How long a password or a key may outlive a session whose browser has gone away."""
PAGE_S: Final = 0.15
"""How long a page waits for answers."""
LIVE_S: Final = 1.0
"""How long a live update waits for answers: what came meanwhile is shown, and the rest with the next one."""
SOON_S: Final = 0.1
"""The time between two live updates as long as an answer is missing."""
STREAM_S: Final = 600.0
"""How long a stream of live updates runs; the browser opens the next one."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_NOT_FOUND: Final = (ResourceNotFound, UnknownTopicOrPartition, GroupIdNotFound, TransactionalIdNotFound)


@dataclass(frozen=True)
class Settings:
    """How a console is run.

    `client`: config of clients, as --client-config has it. `with_login`: people log in with users of the cluster.
    `certificates`: they log in with certificates, not with names and passwords.
    `acts_as`: the user of `client`, in words, if the console acts as this one user for all; else empty.
    `hosts`: the names under which browsers may address it, none: any. `tls`: whether it serves https.
    """

    bootstrap: str
    client: Mapping[str, object] = field(default_factory=dict)
    with_login: bool = False
    certificates: bool = False
    acts_as: str = ""
    read_only: bool = False
    session_timeout_s: float = 1800.0
    hosts: tuple[str, ...] = LOOPBACK
    tls: bool = False


class Drawn(NamedTuple):
    """A page as HTML, its status code, and whether it lacks no answer."""

    html: str
    code: int
    complete: bool


class Console:
    """The application's state: sessions, and a view of the cluster for each user."""

    def __init__(self, settings: Settings, now_s: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.sessions = Sessions(now_s, lambda: secrets.token_urlsafe(32), settings.session_timeout_s)
        self.streams: Counter[str] = Counter()
        """Open ones by user; "" without logins."""
        self.forms = 0
        self.stream_threads = anyio.CapacityLimiter(STREAM_THREADS)
        self.change_threads = anyio.CapacityLimiter(CHANGE_THREADS)
        self.login_threads = anyio.CapacityLimiter(LOGIN_THREADS)
        self._shares: WeakValueDictionary[tuple[str, str], anyio.CapacityLimiter] = WeakValueDictionary()
        self._login_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._views: dict[str, View] = {}
        self._lock = threading.Lock()
        self.templates = _templates()

    def view_of(self, session: Session) -> View:
        """Return the view of a session's user; all sessions of a user share one.

        Raises:
            AuthenticationFailed: the session has ended meanwhile.
        """
        name = session.user or ""
        with self._lock:
            if session.user is not None and session.secret is None:
                raise AuthenticationFailed("the session has ended; log in again")
            found = self._views.pop(name, None)
            if found is None or found.secret != session.secret:
                if found is not None:
                    found.close()
                found = self._new_view(session.user, session.secret)
                found.prepare()
            self._views[name] = found
            while len(self._views) > MOST_VIEWS:
                self._views.pop(next(iter(self._views))).close()
            return found

    def end_views(self) -> None:
        """Close the views whose sessions have ended: no password and no key outlives its session.

        A rebalance that a user has begun goes on, with the rights of that user, until it is done.
        """
        self.sessions.expire()
        with self._lock:
            left = self.sessions.logins()
            for name, view in list(self._views.items()):
                runs = view.rebalance is not None and view.rebalance.progress.runs
                if name and (name, view.secret) not in left and not runs:
                    self._views.pop(name).close()

    def _new_view(self, user: str | None, secret: str | Certificate | None) -> View:
        """Return a view whose clients act for a user, with the password or the certificate."""
        login: dict[str, object] = {}
        lent = contextlib.ExitStack()
        if isinstance(secret, Certificate):
            login = {"ssl.certificate.location": lent.enter_context(secret.lent())}
        elif user is not None:
            login = {"sasl.username": user, "sasl.password": secret}
        settings = {"client.id": "raftlog-console", **self.settings.client, **login}
        return View(self.settings.bootstrap, settings, secret=secret, on_close=lent.close)

    async def run(self, kind: str, limiter: anyio.CapacityLimiter, session: Session, work: Callable[[], T]) -> T:
        """Return what work in a thread of `limiter` returns, of which a user that has logged in has a share.

        `kind`: what the limiter is for.
        """
        if session.user is None:
            return await anyio.to_thread.run_sync(work, limiter=limiter)
        share = self._shares.setdefault((kind, session.user), anyio.CapacityLimiter(THREADS_OF_USER))
        async with share:
            return await anyio.to_thread.run_sync(work, limiter=limiter)

    def login_turn(self, user: str) -> asyncio.Lock:
        """Return the lock under which logins of this name are tried, one after the other.

        So that each knows how the earlier ones ended: of many at once, `TRIES` wrong ones are tried before the pause.
        """
        return self._login_turns.setdefault(user, asyncio.Lock())

    def log_in(self, session: Session, user: str, secret: str | Certificate) -> Session:
        """Return the session of a user, whose password or certificate a broker has checked.

        Raises:
            AuthenticationFailed: the password is wrong, or there is no such user.
            RaftlogError: no broker answers, or none takes the certificate.
        """
        view = self._new_view(user, secret)
        try:
            view.admin.describe_cluster()
        except AuthenticationFailed:
            raise
        except AuthorizationError:
            pass  # the user exists and may not describe the cluster: the pages say so
        finally:
            view.close()
        return self.sessions.log_in(session, user, secret)

    def close(self) -> None:
        """Close the connections to brokers."""
        with self._lock:
            for view in self._views.values():
                view.close()
            self._views.clear()

    def draw(self, look: Look, make: Callable[[Look], Page], layout: str, patience_s: float = PAGE_S) -> Drawn:
        """Return a page as HTML. `layout`: base.html, whole.html for its inner part, or live.html for its live part."""
        with look.view.hurry(patience_s) as hurry:
            look.view.cluster()  # first: after a failure a page asks for nothing else until brokers answer that
            try:
                page, code = make(look), 200
            except RaftlogError as error:
                page, code = _problem_page(error)
            old = [each for each in page.answers if each.error is not None or (each.pending and each.value)]
            values = {
                **page.values,
                "title": page.title,
                "look": look,
                "fields": look.fields,
                "old": old[0] if old else None,
                "old_s": min((look.view.age_s(each) for each in old), default=0.0),
                "read_only": look.read_only,
                "bootstrap": self.settings.bootstrap,
                "acts_as": self.settings.acts_as,
                "version": __version__,
                "hurry": hurry,
                "note": look.session.take_note() if layout == "base.html" else None,
            }
            html = self.templates.get_template(page.template).render(**values, layout=layout)
            return Drawn(html, code, not hurry.ran_out)


def create_app(settings: Settings) -> ASGIApp:
    """Return the application. All of its answers have the security headers, also those to its own failures."""
    console = Console(settings)
    static = str(files("raftlog.console") / "static")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Each further thread costs memory for good.
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        if not settings.with_login:
            await run_in_threadpool(console.view_of, Session("", "", 0.0))  # which begins to ask before anybody looks
        sweeping = asyncio.create_task(_sweep(console))
        yield
        sweeping.cancel()
        await run_in_threadpool(console.close)

    routes: list[Any] = [
        Route("/live", functools.partial(_live, console), methods=["GET"]),
        Route("/login", functools.partial(_login, console), methods=["GET", "POST"]),
        Route("/logout", functools.partial(_logout, console), methods=["POST"]),
        Route("/do/{action}", functools.partial(_act, console), methods=["POST"]),
        Route("/healthz", _health, methods=["GET"]),
        Mount("/static", StaticFiles(directory=static)),
    ]
    routes += [Route(path, functools.partial(_page, console, page), methods=["GET"]) for path, page in PAGES.items()]

    handlers: dict[Any, Any] = {404: functools.partial(_lost, console), Exception: _failed}
    return _Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), settings)


async def _sweep(console: Console) -> None:
    """End what idle sessions leave behind, again and again."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            await run_in_threadpool(console.end_views)
            await run_in_threadpool(_installed.give_memory_back)
        except Exception:  # else no secret would be forgotten any more
            logger.exception("what ended sessions leave behind could not be ended; it is tried again")


class _Guard:
    """Refuses foreign host names (DNS rebinding) and adds the security headers.

    It is around the whole application: Starlette answers to an exception outside of its own middleware.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = {host.lower() for host in settings.hosts}
        self._headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        if settings.tls:
            self._headers.append((b"strict-transport-security", b"max-age=31536000"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                cached = scope["path"].startswith("/static/")
                cache = b"public, max-age=3600" if cached else b"no-store"
                message["headers"] = [*message["headers"], *self._headers, (b"cache-control", cache)]
            await send(message)

        refusal = self._refusal(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
        await (refusal or self._app)(scope, receive, sending)

    def _refusal(self, host: str) -> Response | None:
        """Return the answer to a request with a Host header that is malformed or not allowed, None if it is allowed."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return PlainTextResponse(f"the Host header {host!r} is not a host name; use the console's own", 400)
        if self._hosts and name not in self._hosts:
            said = f"this console is not served under the name {host!r}; allow it with --allowed-host"
            return PlainTextResponse(said, 421)
        return None


# Sessions and looks


def _find_session(console: Console, request: Request, *, use: bool = True) -> Session | None:
    """Return the browser's session, if it has one. Only pages and the login page begin sessions."""
    return console.sessions.find(request.cookies.get(COOKIE), use=use)


def _with_cookie(console: Console, response: Response, session: Session) -> Response:
    response.set_cookie(COOKIE, session.token, httponly=True, samesite="strict", secure=console.settings.tls, path="/")
    return response


def _must_log_in(console: Console, session: Session | None) -> bool:
    return console.settings.with_login and (session is None or session.user is None)


def _query(request: Request) -> str:
    """Return a request's query as the browser wrote it; `request.url` would parse it together with the Host header."""
    return str(request.scope["query_string"].decode("latin-1"))


def _query_fields(query: str) -> dict[str, str]:
    """Return the fields of a query.

    Raises:
        HTTPException: there are too many.
    """
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_QUERY_FIELDS))
    except ValueError:
        said = f"this address has more than {MOST_QUERY_FIELDS} fields; shorten it, or open the page from another one"
        raise HTTPException(400, said) from None


def _look(console: Console, session: Session, path: str, fields: Mapping[str, str], names: Mapping[str, str]) -> Look:
    return Look(console.view_of(session), session, fields, names, path, console.settings.read_only)


def _page(console: Console, page: Callable[[Look], Page], request: Request) -> Response:
    found = _find_session(console, request)
    if _must_log_in(console, found):
        query = f"?{_query(request)}" if _query(request) else ""
        after = quote(f"{request.scope['path']}{query}", safe="/")
        return RedirectResponse(f"/login?after={after}", 303)
    session = found or console.sessions.begin()
    look = _look(console, session, request.scope["path"], _query_fields(_query(request)), request.path_params)
    drawn = console.draw(look, page, "base.html")
    response = HTMLResponse(drawn.html, drawn.code)
    return response if found is not None else _with_cookie(console, response, session)


def _problem_page(error: RaftlogError) -> tuple[Page, int]:
    if isinstance(error, _NOT_FOUND):
        title, code = "Not found", 404
    elif isinstance(error, AuthorizationError):
        title, code = "Not allowed", 403
    elif isinstance(error, InvalidRequestError):
        title, code = "Not possible", 400
    else:
        title, code = "Busy" if isinstance(error, TooManySearches) else "The cluster does not answer", 503
    return Page("problem.html", title, {"problem": str(error)}), code


def _lost(console: Console, request: Request, error: Exception) -> Response:
    session = _find_session(console, request, use=False)
    if _must_log_in(console, session):
        return RedirectResponse("/login", 303)
    session = session or Session("", "", 0.0)
    drawn = console.draw(_look(console, session, request.scope["path"], {}, {}), _no_page, "base.html")
    return HTMLResponse(drawn.html, drawn.code)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer after an exception that nothing expects. The server logs it with its traceback."""
    return PlainTextResponse("the console failed to answer this request; its log says why", 500)


def _no_page(look: Look) -> Page:
    raise ResourceNotFound(f"there is no page {look.path}")


# Logins and changes


async def _form(request: Request, most_bytes: int) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        HTTPException: it is too large, it did not come within `CLIENT_S`, or it is no form.
    """
    too_large = HTTPException(413, f"the form is larger than {size_text(most_bytes)}; send less")
    if int(request.headers.get("content-length", "0")) > most_bytes:  # h11 has checked that it is a number
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(CLIENT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise too_large
    except TimeoutError:
        said = f"the form did not come within {CLIENT_S:g} seconds; send it again"
        raise HTTPException(408, said, {"Connection": "close"}) from None
    except ClientDisconnect:
        raise HTTPException(400, "the form is incomplete; its client has gone away") from None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise HTTPException(400, "the body is not a form; it is not UTF-8") from None
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FORM_FIELDS))
    except ValueError:
        raise HTTPException(400, f"the form has more than {MOST_FORM_FIELDS} fields; send fewer") from None


def _inside(path: str) -> str:
    """Return a path of the console to go back to; anything else leads to the first page."""
    try:
        parts = urlsplit(path)
    except ValueError:  # brackets that are no IPv6 address
        return "/"
    safe = path.startswith("/") and not path.startswith(("//", "/\\")) and not parts.scheme and not parts.netloc
    return path if safe and path.isprintable() else "/"


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"


async def _login(console: Console, request: Request) -> Response:
    if not console.settings.with_login:
        return RedirectResponse("/", 303)
    found = _find_session(console, request)
    session = found or console.sessions.begin()
    after, problem, user = request.query_params.get("after", "/"), "", ""
    secret: str | Certificate = ""
    code = 200
    if request.method == "POST":
        try:
            by_certificate = console.settings.certificates
            fields = await _form(request, MOST_CERTIFICATE_LOGIN_BYTES if by_certificate else MOST_LOGIN_BYTES)
            after, user = fields.get("after", "/"), fields.get("user", "").strip()
            secret = fields.get("password", "")
            if found is None or not session.may_post(fields.get("form_token", "")):
                raise InvalidRequestError("the form was too old; try again")
            if len(user) > MAX_USER_CHARACTERS:
                raise InvalidRequestError(f"a user's name has at most {MAX_USER_CHARACTERS} characters")
            if by_certificate:
                read = functools.partial(read_certificate, fields.get("certificate", ""), fields.get("passphrase", ""))
                secret = await anyio.to_thread.run_sync(read, limiter=console.login_threads)
                user = f"certificate {secret.name}"
            check = functools.partial(console.log_in, session, user, secret)
            async with console.login_turn(user):
                if (pause_s := console.sessions.pause_s(user)) > 0:
                    raise InvalidRequestError(f"too many failed logins; try again in {pause_s:.0f} seconds")
                try:
                    session = await anyio.to_thread.run_sync(check, limiter=console.login_threads)
                except AuthorizationError:
                    console.sessions.failed(user)
                    raise
            audit.info("login by %s from %s", user, _address(request))
            return _with_cookie(console, RedirectResponse(_inside(after), 303), session)
        except AuthorizationError:
            audit.warning("login by %s from %s was refused", user, _address(request))
            problem, code = "brokers refuse it" if console.settings.certificates else "name or password is wrong", 401
        except InvalidRequestError as error:
            problem, code = str(error), 400
        except RaftlogError as error:
            problem, code = str(error), 503
            if isinstance(secret, Certificate) and isinstance(error, CertificateRefused):
                audit.warning("login by %s from %s: brokers refuse the certificate: %s", user, _address(request), error)
                problem, code = f"brokers refuse this certificate: {error.why}", 401
            elif isinstance(secret, Certificate):  # brokers may close the connection, and not say why
                audit.warning("login by %s from %s found no broker that takes the certificate", user, _address(request))
                problem = (
                    f"no broker at {console.settings.bootstrap} takes a connection with this certificate. Is it of a "
                    "CA that brokers trust, and not revoked? If others cannot log in either, no broker answers."
                )
    values = {"problem": problem, "user": user, "after": _inside(after), "session": session, "version": __version__}
    page = console.templates.get_template("login.html").render(
        **values, bootstrap=console.settings.bootstrap, certificates=console.settings.certificates
    )
    return _with_cookie(console, HTMLResponse(page, code), session)


async def _health(request: Request) -> Response:
    """Answer on the event loop: the threads may all be waiting for brokers."""
    return PlainTextResponse("ok")


async def _logout(console: Console, request: Request) -> Response:
    session = _find_session(console, request)
    if session is not None:
        fields = await _form(request, MOST_LOGOUT_BYTES)
        if session.may_post(fields.get("form_token", "")):
            console.sessions.end(session)
            await run_in_threadpool(console.end_views)
    response = RedirectResponse("/login" if console.settings.with_login else "/", 303)
    response.delete_cookie(COOKIE, path="/")
    return response


async def _act(console: Console, request: Request) -> Response:
    session = _find_session(console, request)
    name = request.path_params["action"]
    if _must_log_in(console, session):
        return RedirectResponse("/login", 303)
    foreign = PlainTextResponse("this form does not come from a page of this session; load the page again", 403)
    if session is None:
        return foreign
    if name not in ACTIONS:
        return PlainTextResponse(f"there is no action {name}", 404)
    if console.settings.read_only:
        return PlainTextResponse("this console is read-only", 403)
    if console.forms >= MOST_FORMS:
        return PlainTextResponse(f"the console is receiving {MOST_FORMS} other forms; send this one again soon", 503)
    console.forms += 1
    try:
        fields = await _form(request, MOST_FORM_BYTES)
    finally:
        console.forms -= 1
    if not session.may_post(fields.get("form_token", "")):
        return foreign
    user = session.user or console.settings.acts_as or "the console's own user"

    def change() -> tuple[bool, str]:
        return perform(name, console.view_of(session), fields, user, _address(request))

    done, said = await console.run("change", console.change_threads, session, change)
    session.note = ("done" if done else "error", said)
    back = _inside(fields.get("then" if done and fields.get("then") else "back", "/"))
    return RedirectResponse(back, 303)


# Live updates


async def _live(console: Console, request: Request) -> Response:
    session = _find_session(console, request, use=False)
    if session is None or _must_log_in(console, session):
        return PlainTextResponse("the session has ended; load the page again", 401)
    name = session.user or ""
    if console.streams.total() >= MOST_STREAMS or (name and console.streams[name] >= MOST_STREAMS_OF_USER):
        return PlainTextResponse("too many open pages; this one does not update itself", 503)
    fields = _query_fields(_query(request))
    try:
        target = urlsplit(fields.get("path", "/"))
    except ValueError:
        raise HTTPException(400, f"{fields['path']!r} is not the path of a page; load the page again") from None
    target_fields = _query_fields(target.query)
    page, names = _find_page(target.path) or (_no_page, {})

    async def draw(layout: str) -> Drawn:
        def drawn() -> Drawn:
            return console.draw(_look(console, session, target.path, target_fields, names), page, layout, LIVE_S)

        return await console.run("stream", console.stream_threads, session, drawn)

    async def events() -> AsyncIterator[str]:
        console.streams[name] += 1
        try:
            whole = fields.get("whole") == "1" and "last-event-id" not in request.headers
            last, until_s = None, time.monotonic() + STREAM_S
            yield "retry: 2000\n\n"
            while time.monotonic() < until_s and not await request.is_disconnected():
                if console.sessions.find(session.token, use=False) is None:
                    yield "event: over\ndata: over\n\n"
                    return
                drawn = await draw("whole.html" if whole else "live.html")
                if drawn.html != last:
                    data = "".join(f"data: {line}\n" for line in drawn.html.splitlines())
                    kind = "event: whole\n" if whole else "id: live\n"  # by the id a stream that goes on is known
                    yield f"{kind}{data}\n"
                    last = drawn.html
                else:
                    yield ": alive\n\n"
                whole = whole and not drawn.complete
                await asyncio.sleep(EVERY_S if drawn.complete else SOON_S)
        finally:
            console.streams[name] -= 1
            if not console.streams[name]:
                del console.streams[name]

    return StreamingResponse(events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


_ROUTES: Final = [(Route(path, lambda request: Response(), methods=["GET"]), page) for path, page in PAGES.items()]


def _find_page(path: str) -> tuple[Callable[[Look], Page], dict[str, str]] | None:
    """Return the page of a path as a browser writes it, and the parts of the path, decoded."""
    scope = {"type": "http", "method": "GET", "path": unquote(path), "root_path": "", "path_params": {}}
    for route, page in _ROUTES:
        match, child = route.matches(scope)
        if match is Match.FULL:
            return page, child["path_params"]
    return None


# Templates

_NO_BREAK: Final = "\u00a0"


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("raftlog.console"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        size=lambda value: "–" if value is None else size_text(int(value)).replace(" ", _NO_BREAK),
        count=lambda value: "–" if value is None else f"{value:,}".replace(",", "\u202f"),
        rate=lambda value: "–" if value is None else f"{value:,.0f}".replace(",", "\u202f"),
        age=_age,
        moment=_moment,
        brief=messages.brief,
        shown=messages.shown,
        path=lambda value: quote(str(value), safe=""),
    )
    environment.globals.update(
        counted=counted,
        with_fields=_with_fields,
        plot_data=lambda points: [
            [point.at_ms / 1000 for point in points],
            [round(point.value, 1) for point in points],
        ],
        operations=[each.name for each in AclOperation if each is not AclOperation.ANY],
        resource_types=[each.name for each in ResourceType if each is not ResourceType.ANY],
        permissions=[AclPermission.ALLOW.name, AclPermission.DENY.name],
        pattern_types=[PatternType.LITERAL.name, PatternType.PREFIXED.name],
    )
    return environment


def _age(seconds: float | None) -> str:
    """Return a duration in words: 3.2 s, 5 min, 2 h, 3 d."""
    if seconds is None:
        return "–"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{_NO_BREAK}{unit}"
    return f"{seconds:.{1 if seconds < 10 else 0}f}{_NO_BREAK}s"


def _moment(time_ms: int | None) -> str:
    if time_ms is None or time_ms <= 0:
        return "–"
    return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC).isoformat(" ", "milliseconds")[:-6]


def _with_fields(fields: Mapping[str, str], **changes: object) -> str:
    """Return the query of a link: the present fields with some changed; None removes one."""
    merged = {**fields, **{name: str(value) for name, value in changes.items() if value is not None}}
    return "?" + urlencode(
        {name: value for name, value in merged.items() if name not in changes or changes[name] is not None}
    )


# The process


def keep_memory_small() -> None:
    """Have glibc give memory back to the system soon. For a process of its own; other C libraries stay as they are.

    Answers about all topics take megabytes for a moment, in some thread. By default each thread has an arena that keeps
    them, and glibc keeps ever larger blocks in arenas. Arrow, which is loaded for the first page of records, has an
    allocator of its own that does not give memory back. NumPy starts a thread for each core; the console needs none.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    options = {_installed.ARENA_MAX: 1, _installed.MMAP_THRESHOLD: 64 << 10, _installed.TRIM_THRESHOLD: 128 << 10}
    _installed.set_malloc_options(options)


class Connection(H11Protocol):
    """One connection of a browser, with bounds that uvicorn does not have.

    It waits for its client before and between requests, and while a request's body is incomplete. Before and between
    requests it waits `CLIENT_S` at most; `_form` bounds the time of a body. Beyond `MOST_CONNECTIONS` the connection
    that has waited longest gives way to the new one, so that silent connections keep no browser out; if none waits, the
    new one is closed. A client that makes no room for a response within `CLIENT_S` is disconnected.
    """

    _no_request: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _waits_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Count the connection, and make another one give way if there are too many."""
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > MOST_CONNECTIONS:
            others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
            waiting = [each for each in others if each.waits_for_client]
            gives_way = min(waiting, key=lambda each: each._waits_since_s, default=self)
            self.connections.discard(gives_way)  # it is lost at the event loop's next turn only
            gives_way._drop()

    @property
    def waits_for_client(self) -> bool:
        """Whether no complete request is under way."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._no_request)

    def on_response_complete(self) -> None:
        """Wait for the next request, if it has not come already."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait_for_request()

    def pause_writing(self) -> None:
        """Wait until the client has read."""
        super().pause_writing()
        _cancel(self._unread)
        self._unread = self.loop.call_later(CLIENT_S, self._drop)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        _cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        _cancel(self._no_request)
        _cancel(self._unread)
        super().connection_lost(exc)

    def _drop(self) -> None:
        """Close the connection at once; the kernel keeps no part of a response that the client does not read."""
        at_once = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):  # it is closed already
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()

    def _wait_for_request(self) -> None:
        self._waits_since_s = time.monotonic()  # the loop's own time counts whole milliseconds
        _cancel(self._no_request)
        self._no_request = self.loop.call_later(CLIENT_S, self._drop)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Serves a console until a signal. `announce` is called with its address once it listens."""

    def __init__(
        self, settings: Settings, host: str, port: int, certificate: str | None = None, key: str | None = None
    ) -> None:
        self.announce: Callable[[str], None] = lambda url: None
        config = uvicorn.Config(
            create_app(settings),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            timeout_graceful_shutdown=2,
            proxy_headers=False,
            http=Connection,
            ws="none",
        )
        super().__init__(config)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begin to listen, and announce the address."""
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self.announce(f"http{'s' if self.config.is_ssl else ''}://{shown}:{port}/")
