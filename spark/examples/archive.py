"""Archives a topic as Parquet files, a directory for each day, and reports on the quality of the data.

    python spark/examples/archive.py --bootstrap 127.0.0.1:9092 --topic flights --archive /data/archive \\
        --checkpoint /data/checkpoints/archive

Every record is kept unchanged, with the fields of its value in further columns, or with an error in the column
`problem`. You can kill it at any time and restart it with the same checkpoint: it continues, and no record is in the
archive twice. Read the archive with Spark: its `_spark_metadata` lists the valid files, and files of killed attempts
may lie beside them. At the end the script compares the archive with the topic, prints a report, and writes it to
`_report.json` in the archive; it fails if a record is missing or doubled.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyspark_raftlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

FLIGHT = "number long, origin string, dest string, tailnum string, dep_delay double, time_hour timestamp, _bad string"
"""The wanted fields of an event; Spark puts text that is not JSON into `_bad`."""
LONGEST_DELAY_MIN = 24 * 60
REPORT = "_report.json"
"""Spark does not read files whose names begin with an underscore."""


def read(spark: SparkSession, bootstrap: str, topic: str, max_events: int) -> DataFrame:
    """Return the records of a topic, from its beginning."""
    return (
        spark.readStream.format("raftlog")
        .option("bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", max_events)
        .load()
    )


def judged(records: DataFrame) -> DataFrame:
    """Return records with their fields, their problem (null: none), and their day."""
    text = sf.col("value").cast("string")
    flight = sf.from_json(text, FLIGHT, {"columnNameOfCorruptRecord": "_bad"}).alias("flight")
    problem = (
        sf.when(sf.col("value").isNull(), "no value")
        .when(sf.col("flight").isNull() | sf.col("flight._bad").isNotNull(), "no JSON")
        .when(sf.col("flight.time_hour").isNull(), "no time")
        .when(sf.col("flight.origin").isNull() | sf.col("flight.dest").isNull(), "no route")
        .when(sf.abs("flight.dep_delay") > LONGEST_DELAY_MIN, "delay out of range")
    )
    day = sf.to_date(sf.coalesce("flight.time_hour", "timestamp"))
    return (
        records.select("*", flight)
        .withColumn("problem", problem)
        .withColumn("day", day)
        .withColumn("flight", sf.col("flight").dropFields("_bad"))
    )


def start(judged_records: DataFrame, archive: str, checkpoint: str, *, once: bool) -> StreamingQuery:
    """Start the query that fills the archive; `once`: it ends at the current end of the topic."""
    writer = (
        judged_records.writeStream.format("parquet")
        .partitionBy("day")
        .option("path", archive)
        .option("checkpointLocation", checkpoint)
    )
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 minute")).start()


def report(kept: DataFrame, bootstrap: str, topic: str) -> dict[str, Any]:
    """Compare the archive with the topic, and return a report on the data."""
    places = kept.groupBy("partition").agg(
        sf.min("offset").alias("first"),
        sf.max("offset").alias("last"),
        sf.count("*").alias("records"),
        sf.count_distinct("offset").alias("offsets"),
    )
    found = {row["partition"]: row.asDict() for row in places.orderBy("partition").collect()}
    in_topic = _count_in_topic(kept.sparkSession, bootstrap, topic, found)
    problems = kept.where("problem is not null").groupBy("problem").count().orderBy("problem").collect()
    days = kept.groupBy("day").count().orderBy("day").collect()
    bad = sum(row["count"] for row in problems)
    total = sum(row["records"] for row in found.values())
    return {
        "topic": topic,
        "records": total,
        "doubled": total - sum(row["offsets"] for row in found.values()),
        "missing": sum(in_topic.values()) - sum(row["offsets"] for row in found.values()),
        "bad": bad,
        "bad_percent": round(100 * bad / total, 3) if total else 0.0,
        "problems": {row["problem"]: row["count"] for row in problems},
        "without_delay": kept.where("problem is null and flight.dep_delay is null").count(),
        "days": {str(row["day"]): row["count"] for row in days},
        "partitions": {str(partition): row for partition, row in found.items()},
    }


def _count_in_topic(
    spark: SparkSession, bootstrap: str, topic: str, archived: dict[int, dict[str, Any]]
) -> dict[int, int]:
    """Return by partition how many records the topic has from the archive's first to its last."""
    if not archived:
        return {}
    bounds = {
        "startingOffsets": {str(partition): row["first"] for partition, row in archived.items()},
        "endingOffsets": {str(partition): row["last"] + 1 for partition, row in archived.items()},
    }
    records = (
        spark.read.format("raftlog")
        .schema("partition int")  # no other column is needed
        .option("bootstrap.servers", bootstrap)
        .option("assign", json.dumps({topic: sorted(archived)}))
        .options(**{option: json.dumps({topic: numbers}) for option, numbers in bounds.items()})
        .load()
    )
    return {row["partition"]: row["count"] for row in records.groupBy("partition").count().collect()}


def main() -> int:
    """Run the command line; return 1 if the archive differs from the topic."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, help="host:port, several with commas between them")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--archive", required=True, help="the directory for Parquet files")
    parser.add_argument("--checkpoint", required=True, help="the directory with the query's progress")
    parser.add_argument("--max-events", type=int, default=100_000, help="limit of one trigger (default: %(default)s)")
    parser.add_argument(
        "--follow", action="store_true", help="continue with new records until it is stopped; no report"
    )
    arguments = parser.parse_args()
    pyspark_raftlog.setup()  # Spark uses this Python, unless PYSPARK_PYTHON names one
    spark = SparkSession.builder.appName("archive").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    records = read(spark, arguments.bootstrap, arguments.topic, arguments.max_events)
    to_archive = judged(records)
    query = start(to_archive, arguments.archive, arguments.checkpoint, once=not arguments.follow)
    query.awaitTermination()
    kept = spark.read.schema(to_archive.schema).parquet(arguments.archive)
    found = report(kept, arguments.bootstrap, arguments.topic)
    text = json.dumps(found, indent=2)
    (Path(arguments.archive) / REPORT).write_text(text + "\n")
    print(text)
    spark.stop()
    return 1 if found["missing"] or found["doubled"] else 0


if __name__ == "__main__":
    sys.exit(main())
