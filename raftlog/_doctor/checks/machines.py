"""Checks of the machines: disk space, clocks, open files, CPU time, certificates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from raftlog._core.words import counted
from raftlog._doctor.picture import Picture, Problem, Severity, ids
from raftlog._doctor.report import Check

LITTLE_SPACE: Final = 0.15
NO_SPACE: Final = 0.05
"""The free shares of a file system below which there is a finding. A full one refuses writes and stops the metadata
log."""
SKEW_MS: Final = 500
"""The difference of clocks above which there is a finding. Synchronized clocks differ by some milliseconds. Only the
certain difference counts, without the travel times of the answers."""
OPEN_FILES: Final = 10_000
"""The least limit of open files for a broker,"""
FILES_ROOM: Final = 2
"""and the least multiple of its open files, because it may take over another broker's partitions."""
EXPIRES_DAYS: Final = 14
EXPIRES_NOW_DAYS: Final = 2
FILES_USED: Final = 0.8
LATE_SHARE: Final = 0.01
LATE_MS: Final = 1_000
MEASURED: Final = 600
"""The least number of measurements of the loop, which take a minute: the start of a process says little."""


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def space(picture: Picture) -> Iterator[Problem]:
    """Find file systems that are nearly full."""
    found: dict[tuple[Severity, bool], list[str]] = {}
    for node_id, node in sorted((picture.nodes or {}).items()):
        for log_dir in node.log_dirs:
            if log_dir.error is not None or log_dir.total_bytes <= 0:
                continue
            free = log_dir.usable_bytes / log_dir.total_bytes
            if free >= LITTLE_SPACE:
                continue
            taken = "" if log_dir.metadata else f", partitions take {_gib(log_dir.log_bytes)}"
            found.setdefault(("error" if free < NO_SPACE else "warning", log_dir.metadata), []).append(
                f"node {node_id} {log_dir.path} ({free:.0%} free: {_gib(log_dir.usable_bytes)} of "
                f"{_gib(log_dir.total_bytes)}{taken})"
            )
    for (severity, metadata), where in sorted(found.items()):
        if metadata:
            yield Problem(
                severity,
                f"{counted(len(where), 'metadata directory is', 'metadata directories are')} nearly full; a controller "
                "with a full directory cannot lead or accept changes of the metadata",
                tuple(where),
                "remove other files from that disk, or move metadata.log.dir to a larger one",
            )
        else:
            yield Problem(
                severity,
                f"{counted(len(where), 'directory is', 'directories are')} nearly full; a full one refuses writes",
                tuple(where),
                "shorten retention (raftlog topic alter TOPIC --config retention.ms=1d or retention.bytes), move "
                "partitions to other brokers (raftlog cluster rebalance), or use a larger disk",
            )


def full(picture: Picture) -> Iterator[Problem]:
    """Find brokers whose log directories refuse writes."""
    for broker_id, broker in sorted(picture.brokers().items()):
        if not broker.storage_full:
            continue
        led = f"{counted(broker.leaderships, 'partition')} that no other broker can lead"
        yield Problem(
            "error",
            f"the disk of broker {broker_id} is full: it appends nothing"
            + (f", not even to the {led}" if broker.leaderships else ", and others lead its partitions"),
            (f"broker {broker_id}",),
            "free space: shorten retention (raftlog topic alter TOPIC --config retention.ms=1d or retention.bytes), or "
            "use a larger disk; the broker notices within a minute. Leaderships return to it when they are balanced: "
            "raftlog partition elect TOPIC does this at once",
        )


def offline_dirs(picture: Picture) -> Iterator[Problem]:
    """Find directories that do not work."""
    found = [
        f"node {node_id} {log_dir.path}: {log_dir.error}"
        for node_id, node in sorted((picture.nodes or {}).items())
        for log_dir in node.log_dirs
        if log_dir.error is not None
    ]
    if found:
        yield Problem(
            "error",
            f"{counted(len(found), 'directory does', 'directories do')} not work; partitions there are not served",
            tuple(found),
            "replace the disk, or remove the directory from log.dirs, and restart the node: its replicas are "
            "fetched from the leaders",
        )


def clocks(picture: Picture) -> Iterator[Problem]:
    """Find pairs of nodes whose clocks certainly differ; which clock is right is unknown."""
    nodes = sorted((picture.nodes or {}).items(), key=lambda each: each[1].clock_offset_ms)
    if len(nodes) < 2:
        return
    apart = []
    for number, (slow_id, slow) in enumerate(nodes):
        for fast_id, fast in reversed(nodes[number + 1 :]):
            uncertain = slow.clock_uncertainty_ms + fast.clock_uncertainty_ms
            certain = fast.clock_offset_ms - slow.clock_offset_ms - uncertain
            if certain > SKEW_MS:
                apart.append((certain, f"node {fast_id} is ahead of node {slow_id} by {certain / 1000:.1f} s or more"))
    if apart:
        yield Problem(
            "warning",
            f"clocks of nodes differ by up to {max(apart)[0] / 1000:.1f} s: retention by time, look-ups by time and "
            "lags in seconds are wrong by as much (acknowledgements do not depend on clocks)",
            tuple(text for _, text in sorted(apart, reverse=True)),
            "synchronize the machines' clocks: chronyc tracking or timedatectl shows whether that works",
        )


def open_files(picture: Picture) -> Iterator[Problem]:
    """Find nodes that will run out of open files."""
    short, low = [], []
    for node_id, node in sorted((picture.nodes or {}).items()):
        limit, used = node.open_files.soft_limit, node.open_files.used
        if limit < 0:
            continue
        wanted = max(OPEN_FILES, FILES_ROOM * used) if "broker" in node.roles else 0
        if used > FILES_USED * limit:
            short.append(f"node {node_id}: {used:,} of {limit:,} are open")
        elif limit < wanted:
            low.append(f"node {node_id}: {limit:,}, should be {wanted:,} ({used:,} are open)")
    remedy = "raise the limit of the process: LimitNOFILE= of its systemd unit, ulimits of its container, or ulimit -n"
    if short:
        yield Problem(
            "error",
            "nodes will soon run out of open files; then they cannot open logs",
            tuple(short),
            remedy,
        )
    if low:
        yield Problem("warning", "nodes have a low limit of open files (nofile)", tuple(low), remedy)


def loop_late(picture: Picture) -> Iterator[Problem]:
    """Find nodes whose event loop runs late."""
    found = []
    for node_id, node in sorted((picture.nodes or {}).items()):
        lag = node.loop_lag
        if lag.measurements < MEASURED:
            continue
        if lag.share_above_100_ms > LATE_SHARE or lag.largest_ms > LATE_MS:
            found.append(
                f"node {node_id}: up to {lag.largest_ms:,.0f} ms late, {lag.share_above_100_ms:.1%} of the time by "
                "more than 100 ms"
            )
    if found:
        yield Problem(
            "warning",
            f"the event loop of {counted(len(found), 'node')} has run late since the start: leases and sessions may "
            "expire, and leaders change",
            tuple(found),
            "give the node its own cores, and memory that is not swapped; spread many partitions or streams over more "
            "brokers",
        )


def same_machine(picture: Picture) -> Iterator[Problem]:
    """Find nodes on the same machine, which stop together."""
    by_host: dict[str, list[int]] = {}
    for node_id, node in sorted((picture.nodes or {}).items()):
        by_host.setdefault(node.hostname, []).append(node_id)
    shared = {host: node_ids for host, node_ids in by_host.items() if len(node_ids) > 1 and host}
    if shared:
        yield Problem(
            "note",
            f"{counted(len(shared), 'machine runs', 'machines run')} several nodes, which stop together",
            tuple(f"{host}: nodes {ids(node_ids)}" for host, node_ids in sorted(shared.items())),
            "if records must not be lost, run one node on each machine, or use the machine's name as rack to keep "
            "replicas apart",
        )


def certificates(picture: Picture) -> Iterator[Problem]:
    """Find certificates that expire soon."""
    found: dict[Severity, list[str]] = {"error": [], "warning": []}
    for node_id, node in sorted((picture.nodes or {}).items()):
        if not node.certificate_expires_ms:
            continue
        days = (node.certificate_expires_ms - picture.taken_at_ms) / 86_400_000
        if days < EXPIRES_DAYS:
            said = f"in {days:.1f} days" if days > 0 else f"{-days:.1f} days ago"
            found["error" if days < EXPIRES_NOW_DAYS else "warning"].append(f"node {node_id}: {said}")
    for severity, where in found.items():
        if where:
            yield Problem(
                severity,
                f"{counted(len(where), 'certificate expires', 'certificates expire')} soon; then clients cannot "
                "connect",
                tuple(where),
                "replace the files with new ones; nodes reload them automatically (docs/security.md)",
            )


CHECKS = (
    Check("log-dir-offline", "directories that do not work", ("nodes",), offline_dirs),
    Check("disk-full", "brokers that refuse writes because their disk is full", ("cluster",), full),
    Check("disk-near-full", "directories that are nearly full", ("nodes",), space),
    Check("clock-skew", "clocks that differ", ("nodes",), clocks),
    Check("certificate-expiring", "certificates that expire soon", ("nodes",), certificates),
    Check("open-files", "limits of open files", ("nodes",), open_files),
    Check("event-loop-late", "nodes whose event loop runs late", ("nodes",), loop_late),
    Check("nodes-on-one-machine", "nodes that share a machine", ("nodes",), same_machine),
)
