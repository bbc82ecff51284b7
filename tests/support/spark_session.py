"""The Spark session of tests and benchmarks: a JVM on this machine whose Python workers are this Python.

    python -m tests.support.spark_session

archives the classes that Spark loads in a stream and in a query. A JVM that maps them starts with half of the CPU time,
and tests that kill drivers start several. `.ci/run` does so once; without an archive, or with one of another Java or of
other jars, everything works, and takes longer.
"""

from __future__ import annotations

import os
import sys
import tempfile
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
_BUILD: Final = Path(__file__).resolve().parents[2] / "build"
_ARCHIVE: Final = _BUILD / "spark-classes.jsa"
_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:cds*=off"
JVM_OPTIONS: Final = f"{_JVM} -XX:SharedArchiveFile={_ARCHIVE}" if _ARCHIVE.exists() else _JVM
"""Options for a JVM of a few minutes: to compile everything for speed takes longer than all of its work."""
SHORT_LIVED: Final = {"spark.driver.extraJavaOptions": JVM_OPTIONS}


def spark_home() -> Path:
    """Return a home of Spark without PySpark in a zip, and make it if it is not there.

    Spark puts `python/lib/pyspark.zip` of its home before all else on its Python's path. Python keeps no bytecode of
    what it imports from a zip, so each of its processes would compile PySpark: 1.7 of its 2.5 CPU seconds. Without the
    zip it imports the same modules from the environment. With `--long` the demo runs with Spark's own home, as
    users do.
    """
    import pyspark

    installed, home = Path(pyspark.__file__).resolve().parent, _BUILD / "spark-home"
    if home.exists() and (home / "jars").resolve() == installed / "jars":
        return home
    _BUILD.mkdir(exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="spark-home-", dir=_BUILD))
    for name in ("bin", "jars"):
        (new / name).symlink_to(installed / name)
    if home.exists():
        home.rename(new / "replaced")
    new.rename(home)
    return home


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
    path = os.pathsep.join(path for path in sys.path if path)
    variables = {"PYTHONPATH": path, "SPARK_HOME": str(spark_home())}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def archive_classes() -> None:
    """Start a JVM, have it load what streams and queries with raftlog load, and archive these classes at its end."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as in tests/conftest.py
    from raftlog import Admin
    from raftlog.testing import Cluster
    from tests.support.steady import STEADY

    new = _ARCHIVE.with_suffix(".new")
    _ARCHIVE.parent.mkdir(exist_ok=True)
    options = {"spark.driver.extraJavaOptions": f"{_JVM} -XX:ArchiveClassesAtExit={new}"}
    with Cluster(config=STEADY) as cluster, tempfile.TemporaryDirectory() as name:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("rows", 2, timeout=60)
        directory, servers = Path(name), {"bootstrap.servers": cluster.bootstrap}
        session = make_session("local[2,3]", directory, {"spark.sql.shuffle.partitions": "2", **options})
        rows = session.range(100).selectExpr("CAST(id AS STRING) AS key", "to_json(struct(*)) AS value")
        rows.write.parquet(f"{directory}/in")
        stream = session.readStream.schema(rows.schema).parquet(f"{directory}/in").repartition(2).writeStream
        written = stream.format("raftlog").options(topic="rows", **servers)
        read = (
            session.readStream.format("raftlog").options(subscribe="rows", startingOffsets="earliest", **servers).load()
        )
        counted = read.withWatermark("timestamp", "1 day").groupBy("partition").count().writeStream
        for number, query in enumerate((written, counted.format("noop").outputMode("update"))):
            checkpoint = f"{directory}/checkpoint-{number}"
            query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
        assert (
            session.read.format("raftlog").options(subscribe="rows", **servers).load().groupBy("key").count().count()
            == 100
        )
        jvm = session.sparkContext._gateway.proc  # PySpark leaves it to the end of this process
        session.stop()
        jvm.stdin.close()
        jvm.wait()
    new.replace(_ARCHIVE)


if __name__ == "__main__":
    archive_classes()
