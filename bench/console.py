"""The console with 10,000 topics and 1,000 groups: pages, first paint, memory, and what it asks brokers."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import psutil

from bench.report import Report
from raftlog import TopicPartition, aio
from raftlog.testing import Cluster

TOPICS = 10_000
GROUPS = 1_000
AT_A_TIME = 32
ROUNDS = 20
VIEWERS = 50
WATCHED_S = 20.0
EVERY_S = 2.0
PAGE_LIMIT_S = 0.5
PAINT_LIMIT_S = 0.3
MEMORY_LIMIT = 150 * 10**6
PAGES = (
    "/",
    "/brokers",
    "/brokers/1",
    "/brokers/plan",
    "/topics",
    "/topics?q=topic-77&sort=-size",
    "/topics?page=200",
    "/topics/topic-00042",
    "/topics/topic-00042/config",
    "/topics/topic-00042/messages",
    "/groups",
    "/groups?page=20",
    "/groups/group-0042",
    "/transactions",
    "/quorum",
    "/security",
)


def run(report: Report) -> None:
    """Measure a console in a process of its own on a real broker."""
    # On a busy machine the broker may pause for seconds; long time-outs keep it from being fenced.
    config: dict[str, str | int] = {
        "offsets.topic.num.partitions": 8,
        "broker.session.timeout.ms": 60_000,
        "broker.lease.ms": 30_000,
        "metrics.listener": "127.0.0.1:0",
    }
    with Cluster(1, config=config) as cluster:
        began_s = time.perf_counter()
        asyncio.run(_fill(cluster.bootstrap))
        report.add("console", "making of the cluster", f"{time.perf_counter() - began_s:.0f} s")
        with _console(cluster.bootstrap) as (url, process):
            _pages(report, cluster.bootstrap, url)
            _first_paint(report, url)
            _questions(report, url, cluster)
            most = process.memory_info().rss
            report.add(
                "console",
                "of it not shared with other processes (USS)",
                f"{process.memory_full_info().uss / 1e6:.0f} MB",
            )
            report.add(
                "console",
                f"memory (RSS) after {VIEWERS} viewers",
                f"{most / 1e6:.0f} MB",
                f"< {MEMORY_LIMIT / 1e6:.0f} MB",
                most < MEMORY_LIMIT,
            )


async def _fill(bootstrap: str) -> None:
    async with aio.Admin(bootstrap) as admin:
        room = asyncio.Semaphore(AT_A_TIME)

        async def topic(number: int) -> None:
            async with room:
                await admin.create_topic(f"topic-{number:05}", partitions=1)

        async def group(number: int) -> None:
            async with room:
                await admin.alter_group_offsets(f"group-{number:04}", {TopicPartition(f"topic-{number:05}", 0): 0})

        await asyncio.gather(*(topic(number) for number in range(TOPICS)))
        await asyncio.gather(*(group(number) for number in range(GROUPS)))


@contextmanager
def _console(bootstrap: str) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-P", "-m", "raftlog", "console", "--bootstrap", bootstrap, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            line = started.stdout.readline()
            yield line.split("the console is at ")[1].split("/;")[0], psutil.Process(started.pid)
        finally:
            started.terminate()


class Loaded(NamedTuple):
    """How long a page took, and whether it lacked no answer."""

    took_s: float
    complete: bool


def _get(url: str) -> Loaded:
    began_s = time.perf_counter()
    with urllib.request.urlopen(url, timeout=60) as answer:
        page = answer.read()
    return Loaded(time.perf_counter() - began_s, b"data-pending" not in page)


def _cold(bootstrap: str, path: str) -> tuple[float, float]:
    """Return how long the first page of a console takes, and how long until it lacks no answer."""
    with _console(bootstrap) as (url, _):
        began_s = time.perf_counter()
        first = loaded = _get(url + path)
        while not loaded.complete:
            time.sleep(0.05)
            loaded = _get(url + path)
        return first.took_s, time.perf_counter() - began_s


def _pages(report: Report, bootstrap: str, url: str) -> None:
    """Each page as the very first of a console, then again and again on one that runs: answers are up to 2 s old."""
    slowest: tuple[float, str] = (0.0, "")
    for path in PAGES:
        cold_s, complete_s = _cold(bootstrap, path)
        took = []
        for _ in range(ROUNDS):
            took.append(_get(url + path).took_s)
            time.sleep(0.25)
        slowest = max(slowest, (max(cold_s, *took), path))
        figures = {"cold": cold_s, "all of it": complete_s, "median": median(took), "worst": max(took)}
        text = ", ".join(f"{name} {figure_s * 1000:.0f} ms" for name, figure_s in figures.items())
        report.add("console", f"page {path}", text)
    report.add(
        "console",
        "slowest of all pages",
        f"{slowest[0] * 1000:.0f} ms ({slowest[1]})",
        f"< {PAGE_LIMIT_S * 1000:.0f} ms",
        slowest[0] < PAGE_LIMIT_S,
    )


def _first_paint(report: Report, url: str) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        report.add("console", "first contentful paint", "not measured: there is no Chromium")
        return
    from playwright.sync_api import sync_playwright

    script = "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        took = {}
        for path in ("/", "/topics", "/groups"):
            page = chromium.new_page()
            paints = []
            for _ in range(5):
                page.goto(url + path)
                while (painted_ms := page.evaluate(script)) is None:  # the page's policy allows no waiting in it
                    page.wait_for_timeout(20)
                paints.append(float(painted_ms) / 1000)
            took[path] = median(paints)
            page.close()
        chromium.close()
    path, paint_s = max(took.items(), key=lambda each: each[1])
    report.add(
        "console",
        f"first contentful paint, {path}",
        f"{paint_s * 1000:.0f} ms",
        f"< {PAINT_LIMIT_S * 1000:.0f} ms",
        paint_s < PAINT_LIMIT_S,
    )


def _questions(report: Report, url: str, cluster: Cluster) -> None:
    """Fifty people with the same pages open: how often the broker is asked for the cluster."""
    stop = threading.Event()

    def look(number: int) -> None:
        while not stop.is_set():
            _get(url + ("/", "/topics", "/brokers")[number % 3])
            stop.wait(0.5)

    viewers = [threading.Thread(target=look, args=(number,)) for number in range(VIEWERS)]
    for each in viewers:
        each.start()
    before = _asked(cluster)
    time.sleep(WATCHED_S)
    asked = {name: count - before.get(name, 0) for name, count in _asked(cluster).items()}
    stop.set()
    for each in viewers:
        each.join()
    allowed = WATCHED_S / EVERY_S + 1
    most = max(asked.items(), key=lambda each: each[1], default=("none", 0))
    report.add(
        "console",
        f"requests of a kind, {VIEWERS} viewers, {WATCHED_S:.0f} s",
        f"at most {most[1]} ({most[0]})",
        f"<= {allowed:.0f}",
        most[1] <= allowed,
    )


def _asked(cluster: Cluster) -> dict[str, int]:
    """Return how many requests of each kind the broker has answered."""
    ready = json.loads((cluster.config_file(1).parent / "ready.json").read_bytes())
    with urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("raftlog_requests_total{"):
            kind = line.split('request="')[1].split('"')[0]
            found[kind] = found.get(kind, 0) + round(float(line.rsplit(" ", 1)[1]))
    return found
