"""Aggregates events to results, exactly once from end to end: delays by airport and hour.

    python spark/examples/departures.py --bootstrap 127.0.0.1:9092 --source flights --results departures \\
        --checkpoint /data/checkpoints/departures

It reads flights as JSON, groups them into windows of an hour by their own time, and writes each window to the topic of
results when the watermark has passed it. You can kill it at any time and restart it with the same checkpoint:
read_committed consumers see every window once.
"""

from __future__ import annotations

import argparse

import pyspark_raftlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

FLIGHT = "origin string, dep_delay double, time_hour timestamp"
"""The wanted fields of an event; it may have more."""


def read(spark: SparkSession, bootstrap: str, topic: str, max_events: int) -> DataFrame:
    """Return the events of a topic, from its beginning."""
    return (
        spark.readStream.format("raftlog")
        .option("bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", max_events)
        .load()
    )


def parse(events: DataFrame) -> DataFrame:
    """Return the flights of events; other events are left out (archive.py counts them)."""
    flight = sf.from_json(sf.col("value").cast("string"), FLIGHT).alias("flight")
    return events.select(flight).select("flight.*").where("origin is not null and time_hour is not null")


def by_hour(flights: DataFrame, late: str) -> DataFrame:
    """Return delays by airport and hour, as records. Flights that are later than `late` are not counted."""
    hours = (
        flights.withWatermark("time_hour", late)
        .groupBy(sf.window("time_hour", "1 hour").alias("hour"), "origin")
        .agg(
            sf.count("*").alias("flights"),
            sf.count_if(sf.col("dep_delay").isNull()).alias("cancelled"),
            sf.round(sf.avg("dep_delay"), 2).alias("mean_delay_min"),
            sf.max("dep_delay").alias("max_delay_min"),
        )
    )
    result = sf.struct("origin", sf.col("hour.start").alias("hour"), *hours.columns[2:])
    return hours.select(sf.col("origin").alias("key"), sf.to_json(result).alias("value"))


def start(results: DataFrame, bootstrap: str, topic: str, checkpoint: str, *, once: bool) -> StreamingQuery:
    """Start the query that writes results; `once`: it ends at the current end of the topic."""
    writer = (
        results.writeStream.format("raftlog")
        .option("bootstrap.servers", bootstrap)
        .option("topic", topic)
        .option("checkpointLocation", checkpoint)
    )
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")).start()


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, help="host:port, several with commas between them")
    parser.add_argument("--source", required=True, help="the topic with flights")
    parser.add_argument("--results", required=True, help="the topic for windows")
    parser.add_argument("--checkpoint", required=True, help="the directory with the query's progress")
    parser.add_argument("--late", default="1 day", help="how far events may be out of order (default: %(default)s)")
    parser.add_argument("--max-events", type=int, default=100_000, help="limit of one trigger (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="end at the current end of the topic")
    arguments = parser.parse_args()
    pyspark_raftlog.setup()  # Spark uses this Python, unless PYSPARK_PYTHON names one
    spark = SparkSession.builder.appName("departures").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    events = read(spark, arguments.bootstrap, arguments.source, arguments.max_events)
    results = by_hour(parse(events), arguments.late)
    query = start(results, arguments.bootstrap, arguments.results, arguments.checkpoint, once=arguments.once)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
