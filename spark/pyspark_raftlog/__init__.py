"""Spark connector: `format("raftlog")` for `readStream`, `read`, `writeStream` and `write`.

Spark finds `DefaultSource` in installed modules named `pyspark_*`, so nothing has to be registered. It imports these
modules even for queries that do not use raftlog, in processes that fork later: so this package imports nothing heavy,
and never gRPC. Spark finds it only if *its* Python has it: a program that imports `pyspark_raftlog` before it makes its
session tells Spark to use the program's own Python, unless `PYSPARK_PYTHON` names one (docs/spark.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
except ModuleNotFoundError as error:
    from raftlog._installed import is_of, needs

    if not is_of(error, "spark"):
        raise
    raise ModuleNotFoundError(needs("pyspark_raftlog", error.name, "spark"), name=error.name) from None

from pyspark_raftlog import interpreter
from pyspark_raftlog import options as option_rules
from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema
from pyspark_raftlog.sink import BatchSink, StreamSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.types import StructType

    from pyspark_raftlog.read_options import SourceOptions
    from raftlog.types import TopicPartition

__all__ = ["DefaultSource", "lag", "setup"]


def setup(spark: SparkSession | None = None) -> None:
    """Make `format("raftlog")` known to Spark if Spark has not found it itself.

    Without a session, call it before Spark starts: it does the same as the import of this package. With a session, it
    registers the source there; Spark then runs the source with the Python of its functions (`spark.pyspark.python`,
    `PYSPARK_PYTHON`) instead of the one that the JVM started with.

    Raises:
        RuntimeError: the session's Python lacks this package; the message says what to do.
    """
    if spark is None:
        interpreter.prepare()
    else:
        interpreter.register(spark, DefaultSource)


def lag(progress: StreamingQueryProgress) -> dict[TopicPartition, int]:
    """Return how many offsets a streaming query has left to read in each partition, for a `StreamingQueryListener`.

    These are the offsets between the end of this progress's batch and the ends of the partitions when that batch was
    planned. Sources other than raftlog's are left out.
    """
    from pyspark_raftlog import ranges

    return ranges.lag(progress)


class DefaultSource(DataSource):
    """The data source `raftlog`: source and sink, batch and streaming."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "raftlog"

    def schema(self) -> StructType:
        """Return the source's columns, after a first check of its options.

        Raises:
            ValueError: an invalid option.
        """
        from pyspark_raftlog.columns import source_schema
        from pyspark_raftlog.read_options import SourceOptions

        return source_schema(include_headers=SourceOptions.parse(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the source of a batch query, after checking its options and columns.

        Raises:
            ValueError: an invalid option or column; nothing is read.
        """
        from pyspark_raftlog.source import BatchSource

        return BatchSource(*self._checked_source(schema, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the source of a streaming query, after checking its options and columns.

        Raises:
            ValueError: an invalid option or column; the query does not start.
        """
        from pyspark_raftlog.source import StreamSource

        return StreamSource(*self._checked_source(schema, streaming=True))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the sink of a streaming query, after checking its options, columns and topic.

        Raises:
            ValueError: an invalid option, column or topic; no task runs.
        """
        return StreamSink(*self._checked_sink(schema, overwrite, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the sink of a batch query, after checking its options, columns and topic.

        Raises:
            ValueError: an invalid option, column or topic; nothing is written.
        """
        return BatchSink(*self._checked_sink(schema, overwrite, streaming=False))

    def _checked_sink(self, schema: StructType, overwrite: bool, *, streaming: bool) -> tuple[SinkOptions, SinkSchema]:
        options = SinkOptions.parse(self.options, streaming=streaming)
        if overwrite:
            instead = 'outputMode("append")' if streaming else 'mode("append")'
            raise ValueError(f"raftlog topics are logs: a query can only append to them; use {instead}")
        checked = SinkSchema.check(schema, options)
        option_rules.check_cluster(options)
        return options, checked

    def _checked_source(self, schema: StructType, *, streaming: bool) -> tuple[SourceOptions, StructType]:
        from pyspark_raftlog.columns import check_schema
        from pyspark_raftlog.read_options import SourceOptions

        try:
            import pyspark.sql.streaming.datasource  # noqa: F401 # to report an old PySpark
        except ImportError:
            raise ValueError(
                "the raftlog source needs PySpark 4.2 or newer; older versions can only use the sink"
            ) from None
        checked = SourceOptions.parse(self.options, streaming=streaming)
        check_schema(schema, include_headers=checked.include_headers)
        return checked, schema


interpreter.prepare()
