"""What the machines give the nodes: space, clocks, open files, time to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from raftlog._core.words import counted
from raftlog._doctor.picture import Finding, Picture, Severity, ids
from raftlog._doctor.report import Check

LITTLE_SPACE: Final = 0.15
NO_SPACE: Final = 0.05
"""Shares of a file system that are free. A full one refuses writes, and the metadata log does not move on."""
SKEW_MS: Final = 500
"""Clocks that are kept in step are some milliseconds apart. Only what is certain counts: the ways of the answers are
taken off."""
OPEN_FILES: Final = 10_000
"""What a broker should be allowed at least."""
FILES_ROOM: Final = 2
"""And so many times what it has open: another broker's partitions may come here."""
EXPIRES_DAYS: Final = 14
EXPIRES_NOW_DAYS: Final = 2
FILES_USED: Final = 0.8
LATE_SHARE: Final = 0.01
LATE_MS: Final = 1_000
MEASURED: Final = 600
"""Of the loop, a minute: what happens while a process starts says little."""


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def space(picture: Picture) -> Iterator[Finding]:
    """Find file systems that are nearly full."""
    found: dict[Severity, list[str]] = {"error": [], "warning": []}
    for node_id, node in sorted((picture.nodes or {}).items()):
        for log_dir in node.log_dirs:
            if log_dir.error is not None or log_dir.total_bytes <= 0:
                continue
            free = log_dir.usable_bytes / log_dir.total_bytes
            if free >= LITTLE_SPACE:
                continue
            found["error" if free < NO_SPACE else "warning"].append(
                f"node {node_id} {log_dir.path} ({free:.0%} free: {_gib(log_dir.usable_bytes)} of "
                f"{_gib(log_dir.total_bytes)}, partitions take {_gib(log_dir.log_bytes)})"
            )
    for severity, where in found.items():
        if where:
            yield Finding(
                "disk-near-full",
                severity,
                f"{counted(len(where), 'directory is', 'directories are')} nearly full; a full one refuses writes",
                tuple(where),
                "keep less (raftlog topic alter TOPIC --config retention.ms=1d or retention.bytes), move partitions to "
                "other brokers (raftlog cluster rebalance), or give it a larger disk",
            )


def offline_dirs(picture: Picture) -> Iterator[Finding]:
    """Find directories that do not work."""
    found = [
        f"node {node_id} {log_dir.path}: {log_dir.error}"
        for node_id, node in sorted((picture.nodes or {}).items())
        for log_dir in node.log_dirs
        if log_dir.error is not None
    ]
    if found:
        yield Finding(
            "log-dir-offline",
            "error",
            f"{counted(len(found), 'directory does', 'directories do')} not work; partitions there are not served",
            tuple(found),
            "replace the disk, or take the directory out of log.dirs, and start the node again: its replicas are "
            "fetched from the leaders",
        )


def clocks(picture: Picture) -> Iterator[Finding]:
    """Find nodes whose clocks are certainly apart: in pairs, since nobody says whose clock is right."""
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
        yield Finding(
            "clock-skew",
            "warning",
            f"clocks of nodes are up to {max(apart)[0] / 1000:.1f} s apart: retention by time, look-ups by time and "
            "lags in seconds are wrong by as much (acknowledgements do not depend on it)",
            tuple(text for _, text in sorted(apart, reverse=True)),
            "keep the machines' clocks in step: chronyc tracking, or timedatectl, says whether that works",
        )


def open_files(picture: Picture) -> Iterator[Finding]:
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
    remedy = "raise it where the node is started: LimitNOFILE= of its systemd unit, ulimits of its container, ulimit -n"
    if short:
        yield Finding(
            "open-files", "error", "nodes are about to run out of open files; new logs fail then", tuple(short), remedy
        )
    if low:
        yield Finding("open-files", "warning", "nodes may have few files open (nofile)", tuple(low), remedy)


def loop_late(picture: Picture) -> Iterator[Finding]:
    """Find nodes whose event loop does not get to run in time."""
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
        yield Finding(
            "event-loop-late",
            "warning",
            f"{counted(len(found), 'node has', 'nodes have')} run late since the start: leases and sessions may end "
            "for that, and leaders change",
            tuple(found),
            "give the node cores of its own and memory that is not swapped; with many partitions or streams spread "
            "them over more brokers",
        )


def same_machine(picture: Picture) -> Iterator[Finding]:
    """Find nodes that stop together, since they run on one machine."""
    by_host: dict[str, list[int]] = {}
    for node_id, node in sorted((picture.nodes or {}).items()):
        by_host.setdefault(node.hostname, []).append(node_id)
    shared = {host: node_ids for host, node_ids in by_host.items() if len(node_ids) > 1 and host}
    if shared:
        yield Finding(
            "nodes-on-one-machine",
            "note",
            f"{counted(len(shared), 'machine runs', 'machines run')} several nodes, which stop together",
            tuple(f"{host}: nodes {ids(node_ids)}" for host, node_ids in sorted(shared.items())),
            "for what must not be lost: one node a machine, or the machine's name as rack, so that replicas are kept "
            "apart",
        )


def certificates(picture: Picture) -> Iterator[Finding]:
    """Find certificates that soon count no more."""
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
            yield Finding(
                "certificate-expiring",
                severity,
                f"{counted(len(where), 'certificate ends', 'certificates end')} soon; then nobody connects any more",
                tuple(where),
                "put new ones in place of the files; nodes read them by themselves (docs/security.md)",
            )


CHECKS = (
    Check("log-dir-offline", "directories that do not work", ("nodes",), offline_dirs),
    Check("disk-near-full", "directories that are nearly full", ("nodes",), space),
    Check("clock-skew", "clocks that are apart", ("nodes",), clocks),
    Check("certificate-expiring", "certificates that end soon", ("nodes",), certificates),
    Check("open-files", "limits of open files", ("nodes",), open_files),
    Check("event-loop-late", "nodes that do not get to run in time", ("nodes",), loop_late),
    Check("nodes-on-one-machine", "nodes that share a machine", ("nodes",), same_machine),
)
