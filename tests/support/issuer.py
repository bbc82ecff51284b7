"""An issuer of JSON Web Tokens for tests: its keys, its tokens, and its two URLs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet

ISSUER = "https://issuer.test"
AUDIENCE = "raftlog-test"


class Issuer:
    """Makes tokens with the last of its keys; `rotate` makes another one."""

    def __init__(self) -> None:
        self.keys: list[ECKey] = []
        self.rotate()

    def rotate(self) -> None:
        self.keys.append(ECKey.generate_key("P-256", {"alg": "ES256", "use": "sig"}, auto_kid=True))

    def jwks(self) -> str:
        """Return the public keys."""
        return json.dumps(KeySet(self.keys).as_dict(private=False))  # type: ignore[arg-type] # any key is one

    def write(self, path: Path) -> str:
        """Write the keys into a file, as a whole, and return its URL."""
        temporary = path.with_suffix(".new")
        temporary.write_text(self.jwks())
        temporary.replace(path)
        return path.resolve().as_uri()

    def token(self, user: str | None = "alice", *, lifetime_s: float = 600, **claims: Any) -> str:
        """Return a token; a claim None is left out."""
        now_s = int(time.time())
        content = {"iss": ISSUER, "aud": AUDIENCE, "sub": user, "iat": now_s, "exp": int(now_s + lifetime_s), **claims}
        present = {name: value for name, value in content.items() if value is not None}
        return jwt.encode({"alg": "ES256", "kid": self.keys[-1].kid}, present, self.keys[-1])


def message_of(token: str) -> bytes:
    """Return a client's message of OAUTHBEARER."""
    return f"n,,\x01auth=Bearer {token}\x01\x01".encode()


Answer = tuple[int, dict[str, str], str]
"""Status, headers, body."""


@contextmanager
def web_server(answer: Callable[[str, dict[str, str], str], Answer]) -> Iterator[str]:
    """Serve `answer(path, headers, body)` over HTTP on loopback, and yield the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            status, headers, content = answer(self.path, dict(self.headers), body)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content.encode())

        do_POST = do_GET  # as the base class calls them

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
