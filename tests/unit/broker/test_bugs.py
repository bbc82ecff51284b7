"""What does not stop others is told all the same: to the loop, where there is one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.bugs import report
from tests.support.logged import records_of


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
    (record,) = records_of(caplog, "broker.bugs")
    assert (record.levelname, record.message) == ("ERROR", "a reader")
    assert "what was wrong" in caplog.text
