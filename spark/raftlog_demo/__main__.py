"""Runs the demo: `./dev demo`.

Exit code 0 when every record came back unchanged, 1 otherwise, 2 for unknown arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import raftlog
from raftlog.testing import Cluster
from raftlog_demo import flights as flight_data
from raftlog_demo.driver import Driver
from raftlog_demo.mishap import LeaderKill
from raftlog_demo.read_back import ReadBack, read_back
from raftlog_demo.verdict import Verdict, compare

TOPIC = "flights"
PARTITIONS = 6
FILES = 24
SERVERS = 3
TOPIC_CONFIGS = {
    "min.insync.replicas": "2",
    "retention.ms": "-1",  # the flights are from 2013: the default of seven days would delete them
}
KILL_SERVER_AT, KILL_DRIVER_AT = 0.2, 0.6
"""The shares of rows after which a server and Spark's driver are killed."""
_READ_TIMEOUT_S = 60.0
_MIB = 1 << 20
_LOG_TAIL = 4000


def main() -> int:
    """Run the demo in a temporary directory, and print each step."""
    argparse.ArgumentParser(
        prog="./dev demo",
        description="Stream every flight out of New York City in 2013 through Spark into three raftlog servers, "
        "exactly once, kill a server and Spark's driver on the way, read the records back and compare. Needs no "
        "network, takes about a minute, and leaves nothing behind.",
    ).parse_args()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())  # a terminal wraps, a file has long lines
    started = time.monotonic()
    console.print("[bold]raftlog demo: real records through Spark into a replicated log, and back[/bold]\n")
    with tempfile.TemporaryDirectory(prefix="raftlog-demo-") as directory:
        verdict = _run(console, Path(directory))
    console.print(f"\nThat took {time.monotonic() - started:.0f} s; the servers and their files are removed.")
    return 0 if verdict.is_complete else 1


def _run(console: Console, directory: Path) -> Verdict:
    source = directory / "flights"
    source.mkdir()
    with _step(console, "1  Loading the data: every flight out of New York City in 2013"):
        flights = flight_data.load()
        flight_data.write_files(flights, source, FILES)
        sent_checksum = flight_data.checksum(flights)
    _say(console, f"{flights.num_rows:,} flights in {FILES} Parquet files")
    with contextlib.ExitStack() as stack:
        with _step(console, f"2  Starting {SERVERS} raftlog servers, separate processes on loopback"):
            cluster = stack.enter_context(Cluster(nodes=SERVERS, directory=directory / "cluster"))
            with raftlog.Admin(cluster.bootstrap) as admin:
                admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=SERVERS, configs=TOPIC_CONFIGS)
        _say(console, cluster.bootstrap)
        _say(
            console, f"topic {TOPIC}: {PARTITIONS} partitions, each with a replica on every server; key: the aeroplane"
        )
        _write(console, Driver(directory, source, cluster.bootstrap, TOPIC), cluster, flights)
        with _step(console, "4  Reading the topic back with the Python SDK, as Arrow tables"):
            result = read_back(cluster.bootstrap, TOPIC, _READ_TIMEOUT_S)
        _print_partitions(console, result)
        with _step(console, "5  Comparing every flight with the original data"):
            verdict = compare(flights, sent_checksum, result.records)
        verdict.print(console)
    return verdict


def _write(console: Console, driver: Driver, cluster: Cluster, flights: pa.Table) -> None:
    title = '3  Streaming the files through Spark into the topic: writeStream.format("raftlog")'
    started = time.monotonic()
    mishap = LeaderKill(cluster, TOPIC, int(flights.num_rows * KILL_SERVER_AT))
    with _rows_bar(console, title, flights.num_rows) as show:

        def on_rows(rows: int) -> None:
            show(rows)
            mishap.on_rows(rows)

        try:
            ride = driver.run(int(flights.num_rows * KILL_DRIVER_AT), on_rows)
        except Exception:
            console.print(driver.log_tail(_LOG_TAIL), markup=False)
            raise
        happened = mishap.result()
        show(flights.num_rows)
    console.print(f"{title}: {time.monotonic() - started:.1f} s")
    steady = ride.batches[1:] or ride.batches
    busy_s = sum(batch.busy_ms for batch in steady) / 1000
    _say(
        console,
        f"{flights.num_rows:,} rows in {steady[-1].number + 1} micro-batches, each committed at once; "
        f"{sum(batch.rows for batch in steady) / busy_s:,.0f} rows a second",
    )
    _say(
        console,
        f"[bold]Server {happened.node_id}, which led {happened.partitions} partitions, was killed[/bold] (kill -9) "
        f"after {happened.at_rows:,} rows; the others took over in {happened.new_leaders_s:.1f} s. Restarted, it had "
        f"caught up after {happened.in_sync_s:.1f} s",
    )
    _say(
        console,
        "[bold]Spark's driver was killed[/bold] with its JVM (kill -9), in the middle of a batch, after "
        f"{ride.killed_at_rows:,} rows. Restarted from its checkpoint, it had written a batch after "
        f"{ride.restart_s:.1f} s",
    )


def _print_partitions(console: Console, result: ReadBack) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("   partition", "records", "aeroplanes", "offsets", "MiB of values"):
        table.add_column(column, justify="right")
    for found in result.partitions:
        table.add_row(
            str(found.partition),
            f"{found.records:,}",
            f"{found.keys:,}",
            f"{found.first_offset} to {found.next_offset - 1}",
            f"{found.value_bytes / _MIB:.1f}",
        )
    records = sum(found.records for found in result.partitions)
    mib = sum(found.value_bytes for found in result.partitions) / _MIB
    table.add_row("all", f"{records:,}", "", "", f"{mib:.1f}", style="bold")
    console.print(table)
    _say(console, f"{records / result.seconds:,.0f} records a second, {mib / result.seconds:,.0f} MiB/s of values")


def _say(console: Console, sentence: str) -> None:
    """Print a sentence below a step; the terminal's width decides where it wraps, and a file gets one line."""
    console.print(Padding(sentence, (0, 0, 0, 3), expand=False) if console.is_terminal else f"   {sentence}")


@contextlib.contextmanager
def _step(console: Console, title: str) -> Iterator[None]:
    """Print a step with its duration; show a status meanwhile."""
    started = time.monotonic()
    with console.status(title):
        yield
    console.print(f"{title}: {time.monotonic() - started:.1f} s")


@contextlib.contextmanager
def _rows_bar(console: Console, title: str, rows: int) -> Iterator[Callable[[int], None]]:
    bar = Progress(
        TextColumn(title),
        BarColumn(),
        TextColumn("{task.completed:,} rows"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=rows)
        yield lambda done: bar.update(task, completed=done)


if __name__ == "__main__":
    sys.exit(main())
