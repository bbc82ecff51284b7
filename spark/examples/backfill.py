"""Writes Parquet files into a topic, once: each row becomes a record with its columns as a JSON object.

    python spark/examples/backfill.py --bootstrap 127.0.0.1:9092 --topic flights --name flights-2013 \\
        --key tailnum --time time_hour /data/flights

All records become readable together, at the end. A second run with the same `--name`, after a crash or by mistake,
writes nothing twice.
"""

from __future__ import annotations

import argparse

import pyspark_raftlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

import raftlog
from raftlog.errors import TransactionalIdNotFound


def records(rows: DataFrame, key: str | None = None, time: str | None = None) -> DataFrame:
    """Return rows as records: all columns as JSON, and columns for the key and the time."""
    value = sf.to_json(sf.struct("*")).alias("value")
    columns = [value]
    if key is not None:
        columns.append(sf.col(key).cast("string").alias("key"))
    if time is not None:
        columns.append(sf.to_timestamp(time).alias("timestamp"))
    return rows.select(*columns)


def backfill(found: DataFrame, bootstrap: str, topic: str, name: str) -> None:
    """Write records under a name that is valid for one write."""
    (
        found.write.format("raftlog")
        .mode("append")
        .option("bootstrap.servers", bootstrap)
        .option("topic", topic)
        .option("txn.app.id", name)
        .option("txn.version", "0")
        .save()
    )


def is_written(bootstrap: str, name: str) -> bool:
    """Return whether a load of that name was written, which the cluster remembers."""
    with raftlog.Admin(bootstrap) as admin:
        try:
            return admin.describe_sink(name).last_batch_id >= 0
        except TransactionalIdNotFound:
            return False


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, help="host:port, several with commas between them")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--name", required=True, help="the name of this load, which is written once")
    parser.add_argument("--key", help="the column that decides the partition")
    parser.add_argument("--time", help="the column with the time of the event; by default the time of writing")
    parser.add_argument("files", help="a Parquet file, or a directory of them")
    arguments = parser.parse_args()
    pyspark_raftlog.setup()  # Spark uses this Python, unless PYSPARK_PYTHON names one
    spark = SparkSession.builder.appName("backfill").getOrCreate()
    if is_written(
        arguments.bootstrap, arguments.name
    ):  # only now: Spark forks as it starts, and gRPC must not be in use then
        print(f"{arguments.name} was written before and is not written again; use another --name for another load")
    else:
        rows = spark.read.parquet(arguments.files)
        backfill(records(rows, arguments.key, arguments.time), arguments.bootstrap, arguments.topic, arguments.name)
        print(f"{rows.count():,} records are in {arguments.topic}")
    spark.stop()


if __name__ == "__main__":
    main()
