"""Spark connector: `df.writeStream.format("raftlog")` and `df.write.format("raftlog")`.

Spark looks through the installed modules named `pyspark_*` for a `DefaultSource`, so there is nothing to register. It
does so in processes that fork later and for queries that have nothing to do with raftlog: importing this package
imports nothing heavy and never touches gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)

from pyspark_raftlog import preflight
from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema
from pyspark_raftlog.sink import BatchSink, StreamSink

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pyspark_raftlog.read_options import SourceOptions

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The data source `raftlog`: source and sink, batch and streaming."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "raftlog"

    def schema(self) -> StructType:
        """Return the source's columns, after a first look at its options.

        Raises:
            ValueError: an option that cannot be.
        """
        from pyspark_raftlog.columns import source_schema
        from pyspark_raftlog.read_options import SourceOptions

        return source_schema(include_headers=SourceOptions.parse(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the source of a batch query, after checking its options and the columns that it wants.

        Raises:
            ValueError: an option or a column that cannot be; nothing is read.
        """
        from pyspark_raftlog.source import BatchSource

        return BatchSource(*_checked(self.options, schema, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the source of a streaming query, after checking its options and the columns that it wants.

        Raises:
            ValueError: an option or a column that cannot be; the query does not start.
        """
        from pyspark_raftlog.source import StreamSource

        return StreamSource(*_checked(self.options, schema, streaming=True))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the sink of a streaming query, after checking its options, its columns and where it writes.

        Raises:
            ValueError: an option, a column or a topic that cannot be; no task runs.
        """
        options = SinkOptions.parse(self.options, streaming=True)
        _refuse_overwrite(overwrite, 'outputMode("append")')
        checked = SinkSchema.check(schema, options)
        preflight.check_cluster(options)
        return StreamSink(options, checked)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the sink of a batch query, after checking its options, its columns and where it writes.

        Raises:
            ValueError: an option, a column or a topic that cannot be; nothing is written.
        """
        options = SinkOptions.parse(self.options, streaming=False)
        _refuse_overwrite(overwrite, 'mode("append")')
        checked = SinkSchema.check(schema, options)
        preflight.check_cluster(options)
        return BatchSink(options, checked)


def _checked(options: Mapping[str, str], schema: StructType, *, streaming: bool) -> tuple[SourceOptions, StructType]:
    from pyspark_raftlog.columns import check_schema
    from pyspark_raftlog.read_options import SourceOptions

    try:
        import pyspark.sql.streaming.datasource  # noqa: F401 # to say in words that it is missing
    except ImportError:
        raise ValueError("the raftlog source needs PySpark 4.2 or newer; with an older one there is the sink") from None
    checked = SourceOptions.parse(options, streaming=streaming)
    check_schema(schema, include_headers=checked.include_headers)
    return checked, schema


def _refuse_overwrite(overwrite: bool, instead: str) -> None:
    if overwrite:
        raise ValueError(f"raftlog topics are logs: a query can only append to them; use {instead}")
