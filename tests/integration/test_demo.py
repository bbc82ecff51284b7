"""`./dev demo`, as a newcomer runs it: a server and Spark's driver die on the way, and every record is there once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.spark("own")
def test_the_demo_kills_a_leader_and_the_driver_and_has_every_record_once() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "spark")))}
    run = subprocess.run(
        [sys.executable, "-P", "-m", "raftlog_demo"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1_200,
        env=environment,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"Server [123], which led \d partitions, was killed", run.stdout), run.stdout
    assert re.search(r"Spark's driver was killed", run.stdout), run.stdout
    assert re.search(r"missing 0, repeated 0, unknown 0", run.stdout), run.stdout
    assert "336,776 records" in run.stdout
