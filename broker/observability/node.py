"""One node's counters, health and tracing, and the HTTP endpoint for probes and Prometheus.

The endpoint takes GET only and has a thread of its own, so that `/livez` is answered while the event loop hangs. A node
without tracing does not import OpenTelemetry; with tracing, every proposed metadata command is a span.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, cast

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, exposition

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.net.interceptors import Rarely
from broker.net.listeners import why_not
from broker.observability.counters import Counters
from broker.observability.event_loop import LoopLagMonitor
from broker.observability.health import Answer, Health
from raftlog._installed import install
from raftlog.errors import BrokerUnavailable, InvalidConfig
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult

if TYPE_CHECKING:
    from broker.observability.tracing import NodeTracing
    from broker.server.quorum_role import NodeMetadata


logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S: Final = 5.0
MAX_REQUESTS: Final = 16
"""Connections at a time, each with a thread. A further one takes the place of another."""
MAKE_ROOM_S: Final = 0.5
"""A new connection waits so long for the thread of the one whose place it takes."""
MAX_PAUSE_S: Final = 1.0
"""Between two encodings of the metrics."""
JSON: Final = "application/json; charset=utf-8"


class _Server(ThreadingHTTPServer):
    """With MAX_REQUESTS connections open, a new one takes the place of the oldest from which no whole request has come.

    Where all are being answered, it takes the oldest one's. So clients that are slow, or never read, keep no probe out.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MAX_REQUESTS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)
        self._lock = threading.Lock()
        self._answered: dict[Any, bool] = {}
        """Whether a request is being answered, by open connection, the oldest first. Under `_lock`."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._make_room()
            if not self._room.acquire(timeout=MAKE_ROOM_S):
                self.shutdown_request(request)
                return
        self.note(request, is_answered=False)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def note(self, connection: Any, *, is_answered: bool) -> None:
        """Note that a request of a connection is being answered, or that one is waited for."""
        with self._lock:
            self._answered.pop(connection, None)
            self._answered[connection] = is_answered

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # `_make_room` must not meet a descriptor that is something else by now
            self._answered.pop(request, None)
        super().shutdown_request(request)

    def _make_room(self) -> None:
        with self._lock:
            oldest = next(iter(self._answered), None)
            chosen = next((each for each, is_answered in self._answered.items() if not is_answered), oldest)
            if chosen is not None:
                self._answered.pop(chosen)
                with suppress(OSError):  # the client has closed it
                    chosen.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a probe or scrape from %s broke off", client_address, exc_info=True)


class Scrapes:
    """The metrics as text, encoded for one scrape at a time, and for at most a third of the time.

    To encode takes the interpreter from the event loop, so scrapes that come meanwhile share the next encoding. None
    gets one that began before it asked.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counting = threading.Lock()
        self._asking = 0
        self._encoding = threading.Lock()
        self._last: tuple[float, str, bytes] | None = None
        """When the last encoding began, its type and itself; None while no scrape is under way."""
        self._not_before_s = 0.0

    def encoded(self, accept: str) -> tuple[str, bytes]:
        """Return the content type, by a client's `Accept`, and the metrics. Raises what a metric raises."""
        encode, content_type = exposition.choose_encoder(accept)
        asked_s = time.monotonic()
        with self._counting:
            self._asking += 1
        try:
            with self._encoding:
                if self._last is not None and self._last[0] >= asked_s and self._last[1] == content_type:
                    return self._last[1:]
                time.sleep(max(0.0, self._not_before_s - time.monotonic()))
                begun_s = time.monotonic()
                measured = encode(self._registry)
                ended_s = time.monotonic()
                self._not_before_s = ended_s + min(MAX_PAUSE_S, 2 * (ended_s - begun_s))
                self._last = begun_s, content_type, measured
                return content_type, measured
        finally:
            with self._counting:
                self._asking -= 1
                if not self._asking:
                    self._last = None


class ObservabilityServer:
    """`start`, then `port`; `close` ends it."""

    def __init__(self, host: str, port: int, health: Health, registry: CollectorRegistry) -> None:
        pages: Mapping[str, Callable[[], Answer]] = {
            "/livez": health.live,
            "/readyz": health.ready,
            "/startupz": health.startup,
        }
        rarely, scrapes = Rarely(), Scrapes(registry)

        class Handler(BaseHTTPRequestHandler):
            timeout = SOCKET_TIMEOUT_S
            protocol_version = "HTTP/1.1"
            server_version = "raftlog"
            sys_version = ""

            def do_GET(self) -> None:
                server = cast(_Server, self.server)
                server.note(self.connection, is_answered=True)
                self._answer_path(self.path.partition("?")[0])
                server.note(self.connection, is_answered=False)

            def _answer_path(self, path: str) -> None:
                page = pages.get(path)
                if page is not None:
                    status, document = page()
                    self._answer(status, JSON, json.dumps(document).encode())
                elif path == "/metrics":
                    try:
                        content_type, measured = scrapes.encoded(self.headers.get("Accept", ""))
                    except Exception as error:
                        if rarely.may_log(type(error).__name__, 1e3 * time.monotonic()):
                            logger.exception("a scrape failed: a metric could not be read; please report this")
                        said = "a metric could not be read; the node's log says why"
                        self._answer(500, JSON, json.dumps({"error": said}).encode())
                        return
                    self._answer(200, content_type, measured)
                else:
                    known = ", ".join((*pages, "/metrics"))
                    self._answer(404, JSON, json.dumps({"error": f"no such page; the pages are {known}"}).encode())

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
        """Answer requests from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(SOCKET_TIMEOUT_S)
        self._server.server_close()


def tracing_of(config: BrokerConfig) -> NodeTracing | None:
    """Return the node's tracing; None with `tracing.exporter=none`.

    Raises:
        InvalidConfig: OpenTelemetry is not installed.
    """
    if config.tracing_exporter == "none":
        return None
    try:
        from broker.observability.tracing import NodeTracing

        return NodeTracing(config)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise InvalidConfig(
            f"tracing.exporter={config.tracing_exporter}: OpenTelemetry is not installed ({error}); install it with "
            f"{install('otel')}; or remove tracing.exporter from the configuration"
        ) from None


class Observability:
    """Counters, health and tracing of one node; `open`, then `address`, and `close`.

    The endpoint opens before all other parts, so that a probe shows the progress of the recovery.
    """

    def __init__(self, config: BrokerConfig, clock: Clock) -> None:
        self._config: Final = config
        self._server: ObservabilityServer | None = None
        self.counters = Counters()
        self.health = Health(clock, config.liveness_timeout_ms)
        self.loop_lag = LoopLagMonitor(clock, self.health.beat)
        self.registry = CollectorRegistry()
        self.tracing = tracing_of(config)
        """None without tracing."""
        self.address = ""
        """host:port of the endpoint; "" without one."""

    def open(self) -> None:
        """Start measuring the event loop, and serve `metrics.listener` if it is set.

        Raises:
            BrokerUnavailable: the port cannot be bound.
        """
        self.loop_lag.start()
        if self._config.metrics_listener is None:
            return
        ProcessCollector(namespace="raftlog", registry=self.registry)
        GCCollector(registry=self.registry)
        host, port = self._config.metrics_listener
        self._server = ObservabilityServer(host, port, self.health, self.registry)
        self._server.start()
        self.address = f"{host}:{self._server.port}"

    async def close(self, *, report: bool) -> None:
        """Stop all of it; with `report`, log how late the event loop was."""
        await self.loop_lag.stop(report=report)
        if self._server is not None:
            self._server.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def traced_metadata(metadata: NodeMetadata, tracing: NodeTracing) -> NodeMetadata:
    """Return `metadata` with a span `quorum commit` around every proposal."""
    return cast("NodeMetadata", _TracedMetadata(metadata, tracing))


class _TracedMetadata:
    def __init__(self, metadata: NodeMetadata, tracing: NodeTracing) -> None:
        self._metadata = metadata
        self._tracing = tracing

    async def propose(self, command: MetadataCommand) -> CommandResult:
        return await self._tracing.propose(self._metadata.propose, command)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)
