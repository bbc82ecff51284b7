"""How long writes paused is measured right: the container tests hold that against the promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.availability import Starvation, longest_pause
from tests.chaos.operations import Operations


@pytest.mark.parametrize(
    ("times", "longest"),
    [
        ({0: [1, 2, 3, 4]}, (1, 0)),
        ({0: [1, 2, 3, 4], 1: [0.5, 3.9]}, (2.9, 1)),
        ({0: [2, 3, 4]}, (1, 0)),
        ({0: [1.1, 1.2]}, (2.8, 0)),
        ({0: []}, (3, 0)),
        ({0: [0.5, 9]}, (3, 0)),
        ({0: [4, 1, 3, 2]}, (1, 0)),
    ],
)
def test_the_longest_pause_is_that_of_the_worst_partition(
    times: dict[int, list[float]], longest: tuple[float, int]
) -> None:
    assert longest_pause(times, 1, 4) == pytest.approx(longest)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_who_sleeps_is_not_starved() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        try:
            time.sleep(0.5)
            before = Starvation({sleeper.pid: Starvation.now([sleeper.pid]).waited_s[sleeper.pid]})
            time.sleep(0.3)
            assert 0 <= before.until(Starvation.now([sleeper.pid])) < 60
        finally:
            sleeper.kill()


def test_processes_that_have_ended_do_not_count() -> None:
    assert Starvation({1: 5.0, 2: 1.0}).until(Starvation({2: 1.5})) == 0.5
    assert os.getpid() in Starvation.now([]).waited_s


def test_operations_are_kept_in_order_with_their_outcome(tmp_path: Path) -> None:
    operations = Operations()
    with pytest.raises(ValueError), operations.during("fault", "begun first"):
        with operations.during("fault", "over first", node=2):
            pass
        raise ValueError
    operations.write(tmp_path / "deep" / "operations.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "deep" / "operations.jsonl").read_text().splitlines()]
    assert [(each["who"], each["outcome"], each["node"]) for each in lines] == [
        ("begun first", "failed", None),
        ("over first", "ok", 2),
    ]
