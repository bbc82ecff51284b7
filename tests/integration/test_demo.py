"""`./dev demo`: a server and Spark's driver die on the way, and every record is there once.

The short form has a Spark whose processes start with less computing (`tests.support.spark_session`); the long form
has Spark as a newcomer has it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spark_session import JVM_OPTIONS, spark_home

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.spark("own")
@pytest.mark.parametrize("spark_is", ["prepared", pytest.param("as installed", marks=pytest.mark.long)])
def test_the_demo_kills_a_leader_and_the_driver_and_has_every_record_once(spark_is: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "spark")))}
    if spark_is == "prepared":
        environment |= {"SPARK_HOME": str(spark_home()), "JAVA_TOOL_OPTIONS": JVM_OPTIONS}
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
    assert re.search(r"   Server .* was killed \(kill -9\) after .* had caught up after .* s\n", run.stdout), run.stdout
    assert re.search(r"missing 0, repeated 0, unknown 0", run.stdout), run.stdout
    assert "336,776 records" in run.stdout
