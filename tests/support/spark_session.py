"""The Spark session of tests and benchmarks: a JVM on this machine whose Python workers are this Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.unix.domain.socket.enabled": "true",
}
SHORT_LIVED: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""Settings for a JVM of a few minutes: to compile everything for speed takes longer than all of its work."""


def make_session(master: str, directory: Path, settings: Mapping[str, str]) -> Any:
    """Start Spark, or return the session that is there; what it writes for itself goes to `directory`.

    Its workers find modules where this process finds them.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    where = {"spark.local.dir": str(directory / "local"), "spark.sql.warehouse.dir": str(directory / "warehouse")}
    for key, value in {**_SETTINGS, **where, **settings}.items():
        builder = builder.config(key, value)
    with _python_of_workers():
        return builder.getOrCreate()


@contextmanager
def _python_of_workers() -> Iterator[None]:
    """The JVM inherits these when it starts; processes that are started later do not."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
