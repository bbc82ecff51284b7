"""The SDK's clients as commands use them: somebody waits in front of a terminal, so they give up sooner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

import raftlog
from raftlog._client.connections import REFUSED_GRACE_S
from raftlog.errors import InvalidConfig

_PATIENCE_MS = 10_000
"""How long a command looks for the cluster before it says that nobody answers."""


@contextmanager
def _checked() -> Iterator[None]:
    """Make a wrong command line of what the SDK refuses before it asks anybody: an address, a setting."""
    try:
        yield
    except (ValueError, InvalidConfig) as error:
        raise typer.BadParameter(str(error)) from None


def connect_admin(bootstrap: str) -> raftlog.Admin:
    """Return an admin client."""
    with _checked():
        return raftlog.Admin(bootstrap, default_api_timeout_ms=_PATIENCE_MS)


def connect_consumer(bootstrap: str, when_out_of_range: str) -> raftlog.Consumer:
    """Return a consumer without a group; `when_out_of_range` is what it does when its position is gone."""
    with _checked():
        found = raftlog.Consumer(bootstrap, auto_offset_reset=when_out_of_range, default_api_timeout_ms=_PATIENCE_MS)
    found._engine.metadata.refused_grace_s = REFUSED_GRACE_S
    return found


def connect_producer(bootstrap: str, settings: Mapping[str, str]) -> raftlog.Producer:
    """Return a producer with these settings, which win."""
    with _checked():
        found = raftlog.Producer(bootstrap, config={"max.block.ms": _PATIENCE_MS, **settings})
    found._engine.metadata.refused_grace_s = REFUSED_GRACE_S
    return found
