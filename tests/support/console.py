"""A console in this process, and a browser's memory of cookies and forms without a browser."""

from __future__ import annotations

import http.client
import re
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

from raftlog.console.app import COOKIE, Server, Settings
from raftlog.errors import AuthenticationFailed, ClusterAuthorizationFailed

WAIT_S: Final = 60.0


@contextmanager
def serve(settings: Settings) -> Iterator[str]:
    """Serve a console within the block; its address is like `http://127.0.0.1:4711`."""
    server = Server(settings, "127.0.0.1", 0)
    listens, address = threading.Event(), []

    def announce(url: str) -> None:
        address.append(url.rstrip("/"))
        listens.set()

    server.announce = announce
    thread = threading.Thread(target=server.run, name="console", daemon=True)
    thread.start()
    try:
        assert listens.wait(WAIT_S), f"the console did not listen within {WAIT_S:g} s"
        yield address[0]
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"the console did not stop within {WAIT_S:g} s"


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Silent:
    """An admin client of brokers that do not answer before the test lets them, and then refuse."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def close(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return self.wait

    def wait(self, *_: Any, **__: Any) -> None:
        assert self.answers.wait(WAIT_S), f"the test did not let the brokers answer within {WAIT_S:g} s"
        self.refuse()

    def refuse(self, *_: Any, **__: Any) -> None:
        raise ClusterAuthorizationFailed("no")


class Door:
    """An admin client of brokers that know one user, `admin` with the password `right`, and refuse each request.

    `opens`: brokers answer to logins once it is set. `tried`: the passwords of the logins so far.
    """

    opens = threading.Event()
    tried: ClassVar[list[str]] = []

    def __init__(self, bootstrap: str, config: Mapping[str, Any]) -> None:
        self.login = (config.get("sasl.username"), config.get("sasl.password"))

    def describe_cluster(self, **_: Any) -> None:
        self.tried.append(str(self.login[1]))
        assert self.opens.wait(WAIT_S), f"the test did not let the brokers answer within {WAIT_S:g} s"
        self.answer()

    def close(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return self.answer

    def answer(self, *_: Any, **__: Any) -> None:
        if self.login != ("admin", "right"):
            raise AuthenticationFailed("no")
        raise ClusterAuthorizationFailed("no")


def closed_by_server(connection: socket.socket) -> bool:
    """Whether the server closes a connection, on which nothing is read, before the test loses patience."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(WAIT_S * 1000))


class Reply(NamedTuple):
    """The console's response."""

    code: int
    headers: dict[str, str]
    text: str


class Client:
    """One browser without a screen: it keeps the cookie, and knows the token of the last form that it has seen."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url).netloc
        self.cookie = ""
        self.form_token = ""

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        """Ask for a page, again as long as it says that answers are on their way; notes are on the first one."""
        until_s, notes = time.monotonic() + WAIT_S, ""
        while "data-pending" in (reply := self.once(path, headers)).text:
            assert time.monotonic() < until_s, f"{path} still says after {WAIT_S:g} s that answers are on their way"
            notes += "".join(re.findall(r'<p class="note-line .*?</p>', reply.text))
            time.sleep(0.05)
        return reply._replace(text=notes + reply.text)

    def once(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        """Ask for a page once."""
        with self.sent("GET", path, headers) as connection:
            return self.reply(connection.getresponse())

    def post(self, path: str, **fields: str) -> Reply:
        """Send a form, with the token of the last page unless `form_token` is given."""
        with self.sent("POST", path, None, **fields) as connection:
            return self.reply(connection.getresponse())

    def send(self, path: str, body: bytes) -> Reply:
        """Post a body as it is, which may be no form."""
        with closing(http.client.HTTPConnection(self.address, timeout=WAIT_S)) as connection:
            connection.request("POST", path, body, {"Cookie": f"{COOKIE}={self.cookie}"} if self.cookie else {})
            return self.reply(connection.getresponse())

    def send_head(self, path: str, length: int) -> Reply:
        """Post a form of so many bytes, none of which are sent."""
        with closing(http.client.HTTPConnection(self.address, timeout=WAIT_S)) as connection:
            connection.putrequest("POST", path)
            connection.putheader("Content-Length", str(length))
            connection.endheaders()
            return self.reply(connection.getresponse())

    @contextmanager
    def half_sent(self, path: str) -> Iterator[socket.socket]:
        """Within the block, the console reads a form that this browser does not finish."""
        host, port = self.address.split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nCookie: {COOKIE}={self.cookie}\r\n"
            connection.sendall(f"{head}Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")  # which says that it begins to read
            connection.sendall(b"a=")
            yield connection

    @contextmanager
    def sent(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **fields: str
    ) -> Iterator[http.client.HTTPConnection]:
        """Send a request; the block may read its answer."""
        with closing(http.client.HTTPConnection(self.address, timeout=WAIT_S)) as connection:
            all_headers = {"Cookie": f"{COOKIE}={self.cookie}"} if self.cookie else {}
            if method == "POST":
                all_headers["Content-Type"] = "application/x-www-form-urlencoded"
            body = urlencode({"form_token": self.form_token, **fields}) if method == "POST" else None
            connection.request(method, path, body, {**all_headers, **(headers or {})})
            yield connection

    def reply(self, answer: http.client.HTTPResponse) -> Reply:
        """Read a response, and remember its cookie and the token of its form."""
        text = answer.read().decode()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if (set_cookie := re.match(rf"{COOKIE}=([^;]*)", found.get("set-cookie", ""))) is not None:
            self.cookie = set_cookie[1]
        if (token := re.search(r'name="form_token" value="([^"]+)"', text)) is not None:
            self.form_token = token[1]
        return Reply(answer.status, found, text)
