"""Settings of every test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.support.spark_session import make_session

# PySpark forks to start the JVM, after gRPC has been used: gRPC's own handling of forks crashes there. It is looked at
# when gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# No test is about how long it takes: the machine may be busy with something else. A change is judged by the same
# examples every time; everybody else's runs look for new ones.
settings.register_profile("raftlog", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("raftlog")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Spark session that all tests of the run share."""
    session = make_session("local[2,3]", tmp_path_factory.mktemp("spark"), {"spark.sql.shuffle.partitions": "2"})
    yield session
    session.stop()
