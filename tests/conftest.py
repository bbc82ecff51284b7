"""Settings of every test run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# No test is about how long it takes: the machine may be busy with something else.
settings.register_profile("raftlog", deadline=None)
settings.load_profile("raftlog")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Spark session that all tests of the run share."""
    from pyspark.sql import SparkSession

    directory = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    session = (
        SparkSession.builder.master("local[2,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.local.dir", str(directory / "local"))
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.python.unix.domain.socket.enabled", "true")
        .getOrCreate()
    )
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    yield session
    session.stop()


@pytest.fixture(scope="session", autouse=True)
def java_before_grpc(request: pytest.FixtureRequest) -> None:
    """Start Spark's JVM first: PySpark forks to start it, and a process that has used gRPC must not fork."""
    if any(item.get_closest_marker("spark") for item in request.session.items):
        request.getfixturevalue("spark")
