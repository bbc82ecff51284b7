"""The Python in docs/recipes.md runs as it stands there, block after block, against a real broker."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from raftlog import Consumer, Record
from raftlog.testing import Cluster

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
BLOCKS = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a poll come back with nothing only when there is nothing: recipes take a second's silence for the end."""
    poll = Consumer.poll

    def at_end(consumer: Consumer) -> bool:
        ends = consumer.end_offsets(consumer.assignment())
        return all(consumer.position(partition) >= end for partition, end in ends.items())

    def polled(self: Consumer, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        deadline_s = time.monotonic() + 60
        while not (found := poll(self, timeout, max_records)):
            if at_end(self) or time.monotonic() > deadline_s:
                break
        return found

    monkeypatch.setattr(Consumer, "poll", polled)


@pytest.mark.usefixtures("patient")
@pytest.mark.filterwarnings("error")
def test_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "recipes"}
    with Cluster(nodes=1) as cluster:
        assert "127.0.0.1:9092" in BLOCKS[0]
        for number, block in enumerate(BLOCKS):
            code = block.replace("127.0.0.1:9092", cluster.bootstrap)
            exec(compile(code, f"{RECIPES.name}, block {number + 1}", "exec"), names)
        names["database"].close()
    assert capsys.readouterr().out.splitlines() == [
        "3 accounts in order",
        "4 6 0 applied, 45 cents",
        "20 done, 20 shouted, 20 of them different",
        "True there is a backlog",
        "6000 jobs, [1, 1, 1, 1] partitions each",
        "[] is due at once",
        "b'order-7' b'try again' attempt 1",
        "[b'your table is booked']",
    ]
