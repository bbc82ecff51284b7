"""A topic into a Parquet archive, one directory a day, with a report on the quality of the data.

    python spark/examples/archive.py --bootstrap 127.0.0.1:9092 --topic flights --archive /data/archive \\
        --checkpoint /data/checkpoints/archive

Every record is kept as it is, with what its value says in columns beside it, or with what is wrong with it in the
column `problem`. Kill it whenever you like and start it again with the same checkpoint: it goes on, and no record is in
the archive twice. Read the archive with Spark, which knows by its `_spark_metadata` which files count; files of killed
attempts may lie beside them. At its end it compares the archive with the topic, prints a report and leaves it as
`_report.json` in the archive; it fails if a record is missing or doubled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

FLIGHT = "number long, origin string, dest string, tailnum string, dep_delay double, time_hour timestamp, _bad string"
"""What is wanted of an event; `_bad` is where Spark puts what is no JSON."""
LONGEST_DELAY_MIN = 24 * 60
REPORT = "_report.json"
"""Spark does not read files with an underscore in front."""


def read(spark: SparkSession, bootstrap: str, topic: str, max_events: int) -> DataFrame:
    """Return the records of a topic from its beginning on."""
    return (
        spark.readStream.format("raftlog")
        .option("bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", max_events)
        .load()
    )


def judged(records: DataFrame) -> DataFrame:
    """Return records with what they say, what is wrong with them (null: nothing), and their day."""
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
    """Start the query that fills the archive; `once` it ends when what is there is read."""
    writer = (
        judged_records.writeStream.format("parquet")
        .partitionBy("day")
        .option("path", archive)
        .option("checkpointLocation", checkpoint)
    )
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 minute")).start()


def report(kept: DataFrame, bootstrap: str, topic: str) -> dict[str, Any]:
    """Compare what is archived with the topic, and say how good the data is."""
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
    """Return how many records the topic has between what is first and last in the archive, by partition."""
    if not archived:
        return {}
    bounds = {
        "startingOffsets": {str(partition): row["first"] for partition, row in archived.items()},
        "endingOffsets": {str(partition): row["last"] + 1 for partition, row in archived.items()},
    }
    records = (
        spark.read.format("raftlog")
        .schema("partition int")  # nothing else is wanted
        .option("bootstrap.servers", bootstrap)
        .option("assign", json.dumps({topic: sorted(archived)}))
        .options(**{option: json.dumps({topic: numbers}) for option, numbers in bounds.items()})
        .load()
    )
    return {row["partition"]: row["count"] for row in records.groupBy("partition").count().collect()}


def main() -> int:
    """Do what the command line says; return 1 if the archive is not what the topic is."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, help="host:port, several with commas between them")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--archive", required=True, help="the directory for Parquet files")
    parser.add_argument("--checkpoint", required=True, help="the directory by which a query is known again")
    parser.add_argument("--max-events", type=int, default=100_000, help="of one trigger (default: %(default)s)")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until it is stopped; no report")
    arguments = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # which Python looks for data sources
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
