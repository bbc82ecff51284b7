"""The HTTP endpoint for probes and scrapes, phase by phase, over real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric

from broker.clock import SystemClock
from broker.observability.health import Health
from broker.observability.node import MAX_REQUESTS, ObservabilityServer, Scrapes
from raftlog.errors import BrokerUnavailable


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000.0

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return self.ms


def test_a_node_is_alive_while_its_loop_turns() -> None:
    clock = Clock()
    health = Health(clock, liveness_timeout_ms=10_000)
    clock.ms += 10_000
    assert health.live() == (200, {"live": True, "event_loop_last_turned_ms_ago": 10_000})
    clock.ms += 1
    assert health.live() == (503, {"live": False, "event_loop_last_turned_ms_ago": 10_001})
    health.beat()
    assert health.live()[0] == 200


def test_recovery_is_no_reason_to_kill_and_shows_how_far_it_is() -> None:
    health = Health(Clock(), 10_000)
    assert health.startup() == (503, {"started": False, "phase": "starting"})
    health.recovering(20, 0, 40)
    assert health.startup()[1] == {"started": False, "phase": "recovering", "identified": 20, "recovered": 0, "of": 40}
    health.recovering(40, 3, 40)
    assert health.startup() == (
        503,
        {"started": False, "phase": "recovering", "identified": 40, "recovered": 3, "of": 40},
    )
    assert health.ready() == (503, {"ready": False, "reason": "the node is recovering"})
    assert health.live()[0] == 200
    health.joining()
    assert health.ready()[1]["reason"] == "the node is joining"


def test_a_node_that_starts_says_what_it_waits_for() -> None:
    """Before it is ready it opens no port for clients, so that `raftlog cluster quorum` finds nothing to ask."""
    health = Health(Clock(), 10_000)
    health.why_not = lambda: "controller 2 at 10.0.0.2:9093: connection refused"
    reason = "the node is starting: controller 2 at 10.0.0.2:9093: connection refused"
    assert health.ready() == (503, {"ready": False, "reason": reason})
    assert health.startup()[1]["waiting_for"] == "controller 2 at 10.0.0.2:9093: connection refused"
    health.stopping()
    assert health.ready()[1]["reason"] == "the node is stopping"
    assert "waiting_for" not in health.startup()[1]


def test_a_node_that_serves_is_ready_unless_something_keeps_it() -> None:
    health = Health(Clock(), 10_000)
    why = ""
    health.why_not = lambda: why
    health.serving()
    assert health.startup()[0] == 200
    assert health.ready() == (200, {"ready": True})
    why = "no lease: the controller is away"
    assert health.ready() == (503, {"ready": False, "reason": "no lease: the controller is away"})
    assert health.startup()[0] == 200, "a node that has started must count as started for ever"
    why = ""
    health.stopping()
    assert health.ready() == (503, {"ready": False, "reason": "the node is stopping"})


@pytest.fixture
def health() -> Health:
    return Health(SystemClock(), 600_000)


@pytest.fixture
def server(health: Health) -> Iterator[ObservabilityServer]:
    registry = CollectorRegistry()
    Gauge("raftlog_answer", "The answer.", registry=registry).set(42)
    server = ObservabilityServer("127.0.0.1", 0, health, registry)
    server.start()
    yield server
    server.close()


def get(server: ObservabilityServer, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()


def answered(server: ObservabilityServer, path: str) -> int:
    """Return the status once there is room: a thread has its place a moment longer than its connection."""
    until_s = time.monotonic() + 60
    while True:
        try:
            return get(server, path)[0]
        except ConnectionError:
            assert time.monotonic() < until_s, "the server still closes every connection"
        time.sleep(0.01)


def test_probes_and_metrics_are_answered(server: ObservabilityServer, health: Health) -> None:
    status, content_type, body = get(server, "/readyz")
    assert (status, content_type) == (503, "application/json; charset=utf-8")
    assert json.loads(body) == {"ready": False, "reason": "the node is starting"}
    health.serving()
    assert get(server, "/readyz?verbose")[0] == 200
    assert get(server, "/livez")[0] == get(server, "/startupz")[0] == 200
    status, content_type, body = get(server, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain")
    assert b"raftlog_answer 42.0" in body
    assert get(server, "/metrics", "HEAD")[2] == b""


def test_a_metric_that_cannot_be_read_is_an_error_and_logged_once(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def collect(self) -> Iterator[Metric]:
            yield Metric("fine", "Fine.", "gauge")
            raise RuntimeError("dictionary changed size during iteration")

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Broken())
    server = ObservabilityServer("127.0.0.1", 0, health, registry)
    server.start()
    try:
        for _ in range(2):
            status, content_type, body = get(server, "/metrics")
            assert (status, content_type) == (500, "application/json; charset=utf-8")
            assert "the node's log says why" in json.loads(body)["error"]
    finally:
        server.close()
    assert [record.message for record in caplog.records if record.exc_info] == [
        "a scrape failed: a metric could not be read; please report this"
    ], "the cause must be in the log once, not for every scrape"


def test_what_is_not_there_is_named(server: ObservabilityServer) -> None:
    status, _, body = get(server, "/health")
    assert status == 404
    assert "/livez, /readyz, /startupz, /metrics" in json.loads(body)["error"]
    assert get(server, "/livez", "POST")[0] == 501


def test_who_connects_and_says_nothing_does_not_keep_probes_out_for_long(server: ObservabilityServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_REQUESTS * 2)]
    try:
        for each in idle:
            each.settimeout(60)
        closed = sum(each.recv(1) == b"" for each in idle)
        assert closed == len(idle), "the server must close all idle connections, some at once, the others after a while"
        assert answered(server, "/livez") == 200
    finally:
        for each in idle:
            each.close()


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\n", b"GET /livez HTTP/1.1\r\n\r\n"])
def test_slow_clients_keep_no_probe_out(server: ObservabilityServer, said: bytes) -> None:
    """Those that say nothing, not all, or stay connected after an answer."""
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_REQUESTS)]
    try:
        for each in slow:
            each.sendall(said)
        for _ in range(MAX_REQUESTS):
            slow.append(socket.create_connection(("127.0.0.1", server.port)))
            assert get(server, "/livez")[0] == 200
    finally:
        for each in slow:
            each.close()


def test_scrapes_that_come_meanwhile_share_one_encoding(health: Health) -> None:
    begun, go_on, collected = threading.Event(), threading.Event(), []

    class Slow:
        def collect(self) -> Iterator[Metric]:
            collected.append(threading.current_thread())
            begun.set()
            assert go_on.wait(60)
            yield Metric("fine", "Fine.", "gauge")

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Slow())
    scrapes = Scrapes(registry)
    with ThreadPoolExecutor(MAX_REQUESTS) as pool:
        first = pool.submit(scrapes.encoded, "")
        assert begun.wait(60)
        others = [pool.submit(scrapes.encoded, "") for _ in range(MAX_REQUESTS - 1)]
        while scrapes._asking < MAX_REQUESTS:
            time.sleep(0.001)
        go_on.set()
        assert len({each.result(60) for each in (first, *others)}) == 1
    assert len(collected) == 2, "one for the first, and one for all that asked after it had begun"
    assert scrapes._last is None, "the text must not be kept"
    scrapes.encoded("")
    assert len(collected) == 3, "a scrape must not get an encoding from before it asked"


def test_a_port_that_is_taken_is_named(server: ObservabilityServer, health: Health) -> None:
    with pytest.raises(BrokerUnavailable, match=rf"cannot serve metrics on 127.0.0.1:{server.port}: address already"):
        ObservabilityServer("127.0.0.1", server.port, health, CollectorRegistry())
