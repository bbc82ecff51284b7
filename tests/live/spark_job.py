"""A Spark driver in a pod, with executors that it starts as pods: copies a topic exactly once until it is told to stop.

    spark_job.py SOURCE TARGET
    spark_job.py executor

Stops when the file STOP is there, copies what the source has by then, and prints what the target has of it as a line of
JSON. The image is raftlog's own, so `submit` and `execute` do what the scripts in an image of Spark do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STOP = Path("/tmp/stop")
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def submit() -> None:
    """Become Spark's JVM, which runs this program again; as `spark-submit` does, for which the image has no bash."""
    settings = {
        "spark.kubernetes.namespace": _NAMESPACE.read_text(),
        "spark.kubernetes.container.image": os.environ["IMAGE"],
        "spark.kubernetes.executor.podTemplateFile": "/work/executor.json",
        "spark.kubernetes.driver.pod.name": os.environ["HOSTNAME"],
        "spark.kubernetes.executor.request.cores": "100m",
        "spark.driver.host": os.environ["POD_IP"],
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": _JVM,
        "spark.executor.instances": "2",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": _JVM,
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        "spark.executorEnv.PYSPARK_PYTHON": sys.executable,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": "/tmp/warehouse",
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
    }
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_SCALA_VERSION": "2.13"}
    java = f"{os.environ['JAVA_HOME']}/bin/java"
    launcher = [java, "-cp", f"{os.environ['SPARK_HOME']}/jars/*", "org.apache.spark.launcher.Main"]
    options = [each for key, value in settings.items() for each in ("--conf", f"{key}={value}")]
    program = ["org.apache.spark.deploy.SparkSubmit", "--master", os.environ["MASTER"], *options, *sys.argv]
    printed = subprocess.run(
        [*launcher, *program], stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout
    command = printed.partition("\0\n")[2].rstrip("\0").split("\0")
    os.execve(command[0], command, environment)


def execute() -> None:
    """Become an executor; Spark's driver has described it in the environment."""
    of_spark = {name.removeprefix("SPARK_"): value for name, value in os.environ.items() if name.startswith("SPARK_")}
    java = f"{os.environ['JAVA_HOME']}/bin/java"
    options = [value for name, value in of_spark.items() if name.startswith("JAVA_OPT_")]
    named = {
        "driver-url": "DRIVER_URL",
        "executor-id": "EXECUTOR_ID",
        "cores": "EXECUTOR_CORES",
        "app-id": "APPLICATION_ID",
        "hostname": "EXECUTOR_POD_IP",
        "resourceProfileId": "RESOURCE_PROFILE_ID",
        "podName": "EXECUTOR_POD_NAME",
    }
    program = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    arguments = [each for option, name in named.items() for each in (f"--{option}", of_spark[name])]
    heap = f"-Xmx{of_spark['EXECUTOR_MEMORY']}"
    os.execv(java, [java, *options, heap, "-cp", f"{of_spark['HOME']}/jars/*", program, *arguments])


def main() -> None:
    """Copy, and check the copy."""
    if sys.argv[1:] == ["executor"]:
        execute()
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        submit()
    from pyspark.sql import SparkSession

    source, target = sys.argv[1:]
    spark = SparkSession.builder.getOrCreate()
    servers = {"bootstrap.servers": os.environ["RAFTLOG_BOOTSTRAP"]}
    stream = spark.readStream.format("raftlog").options(subscribe=source, startingOffsets="earliest", **servers).load()
    place = "to_json(struct(partition, offset, CAST(value AS STRING) AS value)) AS value"

    def begin(**trigger: Any) -> Any:
        writer = stream.selectExpr(place).writeStream.format("raftlog").options(topic=target, **servers)
        return writer.option("checkpointLocation", "/tmp/checkpoint").trigger(**trigger).start()

    query = begin(processingTime="1 second")
    while query.isActive and not STOP.exists():
        time.sleep(0.2)
    query.stop()
    if query.exception() is not None:
        raise query.exception()
    batches = query.lastProgress["batchId"]
    rest = begin(availableNow=True)
    rest.awaitTermination()
    last = rest.lastProgress or query.lastProgress
    end_offset = json.loads(last["sources"][0]["endOffset"])[source]

    copied = spark.read.format("raftlog").options(subscribe=target, **servers).load()
    copied = copied.selectExpr(
        "from_json(CAST(value AS STRING), 'partition INT, offset BIGINT, value STRING') AS row"
    ).select("row.*")
    there = spark.read.format("raftlog").options(
        subscribe=source, endingOffsets=json.dumps({source: end_offset}), **servers
    )
    rows = there.load().selectExpr("partition", "offset", "CAST(value AS STRING) AS value")
    found = {
        "batches": batches,
        "source": sum(end_offset.values()),
        "copied": copied.count(),
        "missing": rows.exceptAll(copied).count(),
        "doubled_or_wrong": copied.exceptAll(rows).count(),
    }
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
