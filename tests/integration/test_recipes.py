"""The Python in docs/recipes.md runs as it stands there, block after block, against a real broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raftlog.testing import Cluster
from tests.support.patient_polls import patient_polls
from tests.support.steady import STEADY

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
BLOCKS = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
SOON, LATER = 'b"try again", delay=0.5', 'b"try again", delay=10'
"""It is seen that a record is not due yet, however long the next queue takes to open."""


@pytest.mark.filterwarnings("error")
def test_the_recipes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "recipes"}
    with Cluster(nodes=1, config=STEADY) as cluster, patient_polls(monkeypatch, cluster.bootstrap, gathering=False):
        assert "127.0.0.1:9092" in BLOCKS[0]
        assert sum(block.count(SOON) for block in BLOCKS) == 1
        for number, block in enumerate(BLOCKS):
            code = block.replace("127.0.0.1:9092", cluster.bootstrap).replace(SOON, LATER)
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
