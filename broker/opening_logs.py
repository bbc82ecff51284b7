"""Recovering the logs of a broker before anything else, and telling how far that is."""

from __future__ import annotations

import logging

from broker.clock import Clock
from broker.log.manager import LogManager
from broker.observability.health import Health

logger = logging.getLogger(__name__)


def open_logs(logs: LogManager, cluster_id: str, node_id: int, clock: Clock, health: Health) -> None:
    """Recover the logs, with a line for every tenth of a long recovery. Blocks for as long as the disks take.

    Raises:
        RaftlogError: as `LogManager.open`.
    """
    shown, started_ms = 0, clock.monotonic_ms()

    def progress(opened: int, total: int, directory: str) -> None:
        nonlocal shown
        health.recovering(opened, total)
        if opened * 10 // total > shown and total >= 100:
            shown = opened * 10 // total
            logger.info("recovering logs", extra={"event": "logs_recovering", "opened": opened, "total": total})

    logs.open(cluster_id=cluster_id, node_id=node_id, progress=progress)
    logger.info(
        "logs recovered",
        extra={
            "event": "logs_recovered",
            "logs": len(logs.logs()),
            "damaged": len(logs.corrupt_logs),
            "took_ms": round(clock.monotonic_ms() - started_ms),
        },
    )
    for corrupt in logs.corrupt_logs.values():
        logger.error("log %s is damaged and not served: %s", corrupt.directory, corrupt.error)
