"""The benchmark of failover: a pause is measured to its end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from bench import failover
from bench.failover import Writer

PAUSE_S = 0.5


class FakeProducer:
    """Records are acknowledged at once, but not while it is paused."""

    goes_on = threading.Event()

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> FakeProducer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, *_: object) -> Any:
        class Sent:
            def result(self, timeout_s: float) -> None:
                time.sleep(0.001)
                assert FakeProducer.goes_on.wait(timeout_s)

        return Sent()


def test_an_acknowledgement_that_was_on_its_way_at_the_kill_does_not_end_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover, "Producer", FakeProducer)
    FakeProducer.goes_on.set()
    writer = Writer("")
    try:
        killed_s = time.monotonic()
        while not writer.acknowledged_s or writer.acknowledged_s[-1] <= killed_s:
            time.sleep(0.001)
        FakeProducer.goes_on.clear()
        time.sleep(0.1)
        threading.Timer(PAUSE_S, FakeProducer.goes_on.set).start()
        assert writer.longest_gap_s(killed_s) >= PAUSE_S
    finally:
        FakeProducer.goes_on.set()
        writer.stop()
