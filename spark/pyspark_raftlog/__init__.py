"""Spark connector: `df.writeStream.format("raftlog")` and `df.write.format("raftlog")`.

Spark looks through the installed modules named `pyspark_*` for a `DefaultSource`, so there is nothing to register. It
does so in processes that fork later and for queries that have nothing to do with raftlog: importing this package
imports nothing heavy and never touches gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)

from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema
from pyspark_raftlog.sink import BatchSink, StreamSink

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The data source `raftlog`. This version writes; reading comes later."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "raftlog"

    def schema(self) -> StructType:
        """Refuse to read. Spark asks for the columns first, unless the query says them.

        Raises:
            ValueError: always.
        """
        _refuse_reading()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Refuse to read, as `schema` does."""
        _refuse_reading()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Refuse to read, as `schema` does."""
        _refuse_reading()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the sink of a streaming query, after checking its options and its columns.

        Raises:
            ValueError: an option or a column that cannot be; the query does not start.
        """
        options = SinkOptions.parse(self.options)
        _refuse_overwrite(overwrite, 'outputMode("append")')
        return StreamSink(options, SinkSchema.check(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the sink of a batch query, after checking its options and its columns.

        Raises:
            ValueError: an option or a column that cannot be; nothing is written.
        """
        options = SinkOptions.parse(self.options)
        _refuse_overwrite(overwrite, 'mode("append")')
        return BatchSink(options, SinkSchema.check(schema, options))


def _refuse_reading() -> NoReturn:
    raise ValueError(
        "this version of raftlog has the sink only: it cannot be read from Spark yet, the source comes with "
        "transactions; until then raftlog.Consumer.poll_arrow hands records out as Arrow tables"
    )


def _refuse_overwrite(overwrite: bool, instead: str) -> None:
    if overwrite:
        raise ValueError(f"raftlog topics are logs: a query can only append to them; use {instead}")
