"""`./dev bench [SUITE...] [--json]`: measures, beside a ceiling in the same run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

from bench import (
    brokers,
    catch_up,
    compaction,
    compare,
    connections,
    console,
    failover,
    footprint,
    groups,
    hostile,
    kafka,
    maintenance,
    produce,
    quorum,
    quotas,
    regression,
    scale,
    scrape,
    sdk,
    security,
    small,
    spark,
    spark_kafka,
    tracing,
    transactions,
)
from bench.report import Report, touch_memory

SUITES = {
    "produce": produce.run,
    "sdk": sdk.run,
    "tracing": tracing.run,
    "footprint": footprint.run,
    "quorum": quorum.run,
    "replication": produce.run_replicated,
    "failover": failover.run,
    "rolling-restart": maintenance.run_rolling_restart,
    "decommission": maintenance.run_decommission,
    "catch-up": catch_up.run,
    "compaction": compaction.run,
    "groups": groups.run,
    "kafka": kafka.run,
    "scrape": scrape.run,
    "small": small.run,
    "connections": connections.run,
    "scale": scale.run,
    "brokers": brokers.run,
    "topics": brokers.run_topics,
    "transactions": transactions.run,
    "security": security.run,
    "security-replicated": security.run_replicated,
    "quotas": quotas.run,
    "hostile": hostile.run,
    "spark": spark.run,
    "console": console.run,
    "spark-kafka": spark_kafka.run,
    "compare": compare.run,
    "regression": regression.run,
}
BY_NAME_ONLY = ("spark-kafka", "compare", "regression")
"""Suites that run only when they are named: they need more than this checkout."""


def main() -> int:
    """Run the suites; the exit code is 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; by default all but the last three"
    )
    parser.add_argument(
        "--against", metavar="VERSION", help="regression: a wheel or a git ref to compare with; by default the last tag"
    )
    parser.add_argument(
        "--slower",
        metavar="PERCENT",
        type=float,
        default=regression.SLOWER_PERCENT,
        help="regression: how much slower than that version a path may be, %(default)g by default",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - set(SUITES)
    if unknown:
        parser.error(f"no suite {', '.join(sorted(unknown))}; the suites are {', '.join(SUITES)}")
    os.environ["RAFTLOG_SERVER_START"] = "exec"  # as in production, also for what a start takes
    report = Report()
    report.add("warm-up", "touching memory first", f"{touch_memory():.0f} s")
    suites: dict[str, Callable[[Report], None]] = {**SUITES}
    suites["regression"] = partial(regression.run, against=arguments.against, slower_percent=arguments.slower)
    for name in arguments.suites or [name for name in SUITES if name not in BY_NAME_ONLY]:
        suites[name](report)
    report.show(arguments.json)
    return 0 if report.all_met else 1


if __name__ == "__main__":
    sys.exit(main())
