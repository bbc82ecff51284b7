"""The HTTP endpoint for probes and Prometheus: GET only, a thread of its own, nothing of the event loop's.

A probe has to be answered while the event loop hangs; that is what `/livez` is for.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, exposition

from broker.listening import why_not
from broker.observability.health import Answer, Health
from raftlog.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S: Final = 5.0
MAX_REQUESTS: Final = 16
"""Under way at a time; whoever comes beyond that is hung up on."""
JSON: Final = "application/json; charset=utf-8"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MAX_REQUESTS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a probe or scrape from %s broke off", client_address, exc_info=True)


class ObservabilityServer:
    """`start`, then `port`; `close` ends it."""

    def __init__(self, host: str, port: int, health: Health, registry: CollectorRegistry) -> None:
        pages: Mapping[str, Callable[[], Answer]] = {
            "/livez": health.live,
            "/readyz": health.ready,
            "/startupz": health.startup,
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = SOCKET_TIMEOUT_S
            protocol_version = "HTTP/1.1"
            server_version = "raftlog"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                page = pages.get(path)
                if page is not None:
                    status, document = page()
                    self._answer(status, JSON, json.dumps(document).encode())
                elif path == "/metrics":
                    encode, content_type = exposition.choose_encoder(self.headers.get("Accept", ""))
                    self._answer(200, content_type, encode(registry))
                else:
                    known = ", ".join((*pages, "/metrics"))
                    self._answer(404, JSON, json.dumps({"error": f"no such page; there are {known}"}).encode())

            do_HEAD = do_GET

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                logger.debug(format, *arguments)

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise BrokerUnavailable(
                f"cannot serve metrics on {host}:{port}: {why_not(host, port) or error}; change `metrics.listener`, "
                "or use port 0 for a free one"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="observability", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(SOCKET_TIMEOUT_S)
        self._server.server_close()
