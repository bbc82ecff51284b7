"""What clients notice when 100 replicas move off a broker for good, with a producer and a group at work."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Final

from bench.controller_process import quantile
from bench.report import Report
from bench.rolling_restart import MIN_INSYNC, TOPIC, Load
from raftlog import Admin
from raftlog.testing import Cluster

PARTITIONS: Final = 100
LEAVING: Final = 4
RECORDS_PER_S: Final = 1_000
FILL_S: Final = 20.0
"""How long is written before it leaves, so that there is something to copy."""
SETTLE_S: Final = 3.0
TIMEOUT_S: Final = 300
_PLACES: Final = ([LEAVING, 1, 2], [2, LEAVING, 3], [3, 1, LEAVING])
"""Where the partitions are: the broker that leaves has a replica of each, and leads a third of them."""


def run(report: Report) -> None:
    """A broker leaves, in batches as it comes, and its process is stopped when it holds nothing."""
    with Cluster(nodes=4, config={"min.insync.replicas": MIN_INSYNC}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, replica_assignment=[_PLACES[each % 3] for each in range(PARTITIONS)])
        load = Load(cluster.bootstrap, RECORDS_PER_S)
        load.settle()
        time.sleep(FILL_S)
        with Admin(cluster.bootstrap) as admin:
            size = sum(log.size_bytes for each in admin.describe_log_dirs(LEAVING) for log in each.partitions)
        begun_s = time.monotonic()
        empty_s = _decommission(cluster, report)
        took_s = [took for sent, took in load.latencies_s if sent >= begun_s]
        time.sleep(SETTLE_S)
        missing, _ = load.stop()
    moved = f"{PARTITIONS} partitions with {size / 2**20:.0f} MiB move off a broker"
    report.add("decommission", moved, f"{empty_s:.1f} s")
    p50_s, p99_s = quantile(took_s, 0.5), quantile(took_s, 0.99)
    figure = f"p50 {p50_s * 1e3:.0f} ms, p99 {p99_s * 1e3:.0f} ms, slowest of {len(took_s)} {max(took_s):.2f} s"
    report.add("decommission", f"produce meanwhile, acks=all, {RECORDS_PER_S} records/s", figure)
    load.report(report, "decommission", missing)


def _decommission(cluster: Cluster, report: Report) -> float:
    """Have the broker leave; return how long it took until it held nothing.

    Raises:
        TimeoutExpired: its process has stopped, and it was not unregistered.
    """
    command = [sys.executable, "-P", "-m", "raftlog.cli", "broker", "decommission", str(LEAVING), "--wait"]
    more = ["--timeout", str(TIMEOUT_S), "--bootstrap", cluster.bootstrap]
    begun_s = time.monotonic()
    with subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as leaving:
        assert leaving.stderr is not None
        said = []
        for line in leaving.stderr:
            said.append(line)
            if "its process is to be stopped" in line:
                break
        empty_s = time.monotonic() - begun_s
        cluster.stop(LEAVING)
        code = leaving.wait(TIMEOUT_S)
    report.add("decommission", "how the command ended", f"exit code {code}", "0", code == 0)
    if code != 0:
        report.add("decommission", "the last that it said", said[-1].strip() if said else "nothing")
    return empty_s
