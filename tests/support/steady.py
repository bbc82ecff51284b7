"""Settings for clusters whose servers must not be fenced when the machine is slow."""

from __future__ import annotations

from typing import Final

STEADY: Final[dict[str, int]] = {
    "broker.session.timeout.ms": 60_000,
    "broker.lease.ms": 50_000,
    "replica.lag.time.max.ms": 60_000,
}
"""A broker that is paused for seconds keeps its leaderships, continues to serve, and stays in sync."""

PATIENT: Final[dict[str, int]] = {
    "broker.session.timeout.ms": 6_000,
    "broker.lease.ms": 5_000,
    "replica.lag.time.max.ms": 6_000,
}
"""For tests that kill servers: a dead server is missed in seconds; a server that is paused for less keeps its place."""
