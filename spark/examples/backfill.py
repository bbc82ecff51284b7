"""Parquet files into a topic, once: each row is a record, its columns are a JSON object.

    python spark/examples/backfill.py --bootstrap 127.0.0.1:9092 --topic flights --name flights-2013 \\
        --key tailnum --time time_hour /data/flights

What is written becomes visible as a whole, when all of it is there. Run it again, after a crash or by mistake, under
the same `--name`: what was written is not written again.
"""

from __future__ import annotations

import argparse
import os
import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

import raftlog
from raftlog.errors import TransactionalIdNotFound


def records(rows: DataFrame, key: str | None = None, time: str | None = None) -> DataFrame:
    """Return rows as records: all columns as JSON, one of them as the key, one as the time."""
    value = sf.to_json(sf.struct("*")).alias("value")
    columns = [value]
    if key is not None:
        columns.append(sf.col(key).cast("string").alias("key"))
    if time is not None:
        columns.append(sf.to_timestamp(time).alias("timestamp"))
    return rows.select(*columns)


def backfill(found: DataFrame, bootstrap: str, topic: str, name: str) -> None:
    """Write records under a name that is used once."""
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
    """Return whether a load of that name is there; the cluster remembers it."""
    with raftlog.Admin(bootstrap) as admin:
        try:
            return admin.describe_sink(name).last_batch_id >= 0
        except TransactionalIdNotFound:
            return False


def main() -> None:
    """Do what the command line says."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, help="host:port, several with commas between them")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--name", required=True, help="of this load; a name is written once")
    parser.add_argument("--key", help="the column that decides the partition")
    parser.add_argument("--time", help="the column that says when it happened; otherwise it happens now")
    parser.add_argument("files", help="a Parquet file, or a directory of them")
    arguments = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # which Python looks for data sources
    spark = SparkSession.builder.appName("backfill").getOrCreate()
    if is_written(arguments.bootstrap, arguments.name):  # only now: Spark forks as it starts, which gRPC must not see
        print(f"{arguments.name} was written before, and is not written again; another load needs another --name")
    else:
        rows = spark.read.parquet(arguments.files)
        backfill(records(rows, arguments.key, arguments.time), arguments.bootstrap, arguments.topic, arguments.name)
        print(f"{rows.count():,} records are in {arguments.topic}")
    spark.stop()


if __name__ == "__main__":
    main()
