"""A console in this process, and a browser's memory of cookies and forms without a browser."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from raftlog.console.app import COOKIE, Server, Settings


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
        assert listens.wait(60), "the console does not listen"
        yield address[0]
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


class Reply(NamedTuple):
    """What the console answered."""

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
        """Ask for a page."""
        return self._request("GET", path, None, headers or {})

    def post(self, path: str, **fields: str) -> Reply:
        """Send a form, with the token of the last page unless `form_token` is given."""
        body = urlencode({"form_token": self.form_token, **fields})
        return self._request("POST", path, body, {"Content-Type": "application/x-www-form-urlencoded"})

    def _request(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> Reply:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            cookie = {"Cookie": f"{COOKIE}={self.cookie}"} if self.cookie else {}
            connection.request(method, path, body, {**cookie, **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
            found = {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()
        if (set_cookie := re.match(rf"{COOKIE}=([^;]*)", found.get("set-cookie", ""))) is not None:
            self.cookie = set_cookie[1]
        if (token := re.search(r'name="form_token" value="([^"]+)"', text)) is not None:
            self.form_token = token[1]
        return Reply(answer.status, found, text)
