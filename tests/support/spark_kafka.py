"""Spark's own connector for Kafka as a client of the Kafka listener, in a process of its own.

    python -m tests.support.spark_kafka BOOTSTRAP JARS DIRECTORY SOURCE TARGET ROWS

Writes rows with keys and headers to SOURCE, has a stream bring them to TARGET in two runs, and prints how many of each
pair of key and value a batch query finds there, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.spark_session import SHORT_LIVED, make_session


def main(bootstrap: str, jars: str, directory: str, source: str, target: str, rows: str) -> None:
    """Run it."""
    paths = ",".join(map(str, sorted(Path(jars).glob("*.jar"))))
    session = make_session("local[2]", Path(directory), {"spark.jars": paths, **SHORT_LIVED})
    servers = {"kafka.bootstrap.servers": bootstrap}
    columns = (
        "CAST(id AS STRING) AS key",
        "CAST(id * 2 AS STRING) AS value",
        "array(named_struct('key', 'of', 'value', CAST('spark' AS BINARY))) AS headers",
    )
    half = int(rows) // 2
    for begin in (0, half):
        made = session.range(begin, begin + half).selectExpr(*columns)
        made.write.format("kafka").options(**servers, topic=source, includeHeaders=True).save()
        read = session.readStream.format("kafka").options(
            **servers, subscribe=source, startingOffsets="earliest", includeHeaders=True, maxOffsetsPerTrigger=half // 3
        )
        stream = read.load().select("key", "value", "headers").writeStream.format("kafka")
        query = (
            stream.options(**servers, topic=target, checkpointLocation=f"{directory}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    found = session.read.format("kafka").options(**servers, subscribePattern=f"{target}.*", includeHeaders=True).load()
    shown = found.selectExpr(
        "CAST(key AS STRING)",
        "CAST(value AS STRING)",
        "headers[0].key AS name",
        "CAST(headers[0].value AS STRING) AS of",
    )
    print(json.dumps([list(row) for row in shown.collect()]))
    session.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
