"""A loop that is held up shows in the metrics; errors that stop no request are logged."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.observability.event_loop import BUCKETS_MS, LoopLagMonitor, report
from tests.support.logged import lines_of, records_of


def test_measurements_are_counted_in_their_buckets() -> None:
    lag = LoopLagMonitor(SystemClock())
    for measured in (0.0, 1.0, 1.5, 10.0, 10.1, 5_000.0):
        lag.note(measured)
    assert lag.counts == [2, 1, 0, 1, 1, 0, 0, 1], (
        f"each value must be in the first of the buckets {BUCKETS_MS} that it does not exceed, or in the one above"
    )
    assert lag.largest_ms == 5_000.0
    assert lag.share_above(10) == pytest.approx(2 / 6)


async def test_blocking_the_loop_is_noticed() -> None:
    lag = LoopLagMonitor(SystemClock())
    lag.start()
    await asyncio.sleep(0.05)
    time.sleep(0.25)  # noqa: ASYNC251 # the fault that is to be noticed
    await asyncio.sleep(0.05)
    await lag.stop()
    assert lag.largest_ms >= 100


def test_only_a_server_that_was_ready_reports(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(report: bool) -> None:
        lag = LoopLagMonitor(SystemClock())
        lag.start()
        await lag.stop(report=report)

    with caplog.at_level("INFO"):
        asyncio.run(scenario(False))
        assert lines_of(caplog, "broker") == []
        asyncio.run(scenario(True))
        assert lines_of(caplog, "broker") == ["event loop lag"]


def test_the_loop_hears_of_it() -> None:
    heard: list[dict[str, Any]] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
        report("a reader", error)

    error = ValueError("x")
    asyncio.run(work())
    assert heard == [{"message": "a reader", "exception": error}]


def test_without_a_loop_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    report("a reader", ValueError("what was wrong"))
    (record,) = records_of(caplog, "broker.observability.event_loop")
    assert (record.levelname, record.message) == ("ERROR", "a reader")
    assert "what was wrong" in caplog.text
