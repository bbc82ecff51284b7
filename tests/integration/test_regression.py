"""`./dev bench regression`: how rounds are judged, and that it finds a slowdown that is planted in the working tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.regression import Ratio, compare, sides

_PLANTED = """
import time
from broker.partition.produce_session import ProduceSession
handle = ProduceSession._handle

def slow(*arguments):
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass
    return handle(*arguments)

ProduceSession._handle = slow
"""


@pytest.mark.parametrize(
    ("ours", "is_worse"),
    [
        ([115.0] * 4, False),
        ([116.0] * 4, True),
        ([99.0, 120.0, 130.0, 140.0], True),
        ([99.0, 99.0, 300.0, 300.0], False),
        ([80.0] * 4, False),
    ],
)
def test_a_figure_is_worse_if_it_is_above_the_limit_and_behind_in_most_rounds(
    ours: list[float], is_worse: bool
) -> None:
    assert Ratio.of(ours, [100.0] * 4, 15).is_worse is is_worse


@pytest.mark.long
def test_a_planted_slowdown_is_found_in_its_path_and_in_no_other(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_PLANTED)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with sides("HEAD", environment) as (ours, theirs):
        verdicts = compare(ours, theirs, {"one-by-one": 50, "topics": 5}, 4, slower_percent=100)
    assert verdicts["one-by-one"].cpu.is_worse, verdicts
    assert not verdicts["topics"].cpu.is_worse, verdicts
