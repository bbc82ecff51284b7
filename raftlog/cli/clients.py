"""The SDK's clients as commands use them: somebody waits in front of a terminal, so they give up sooner."""

from __future__ import annotations

from collections.abc import Mapping

import raftlog

_PATIENCE_MS = 10_000
"""How long a command looks for the cluster before it says that nobody answers."""


def connect_admin(bootstrap: str) -> raftlog.Admin:
    """Return an admin client."""
    return raftlog.Admin(bootstrap, default_api_timeout_ms=_PATIENCE_MS)


def connect_consumer(bootstrap: str) -> raftlog.Consumer:
    """Return a consumer without a group."""
    return raftlog.Consumer(bootstrap, default_api_timeout_ms=_PATIENCE_MS)


def connect_producer(bootstrap: str, settings: Mapping[str, str]) -> raftlog.Producer:
    """Return a producer with these settings, which win."""
    return raftlog.Producer(bootstrap, config={"max.block.ms": _PATIENCE_MS, **settings})
