"""The SDK's clients as commands use them: somebody waits in front of a terminal, so they give up sooner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

import raftlog
from raftlog._client.connections import REFUSED_GRACE_S
from raftlog._client.option_keys import ADMIN_KEYS, CONSUMER_KEYS, PRODUCER_KEYS
from raftlog.cli.client_config import settings_for
from raftlog.errors import InvalidConfig, InvalidGroupId

_PATIENCE_MS = 10_000
"""How long a command looks for the cluster before it says that nobody answers."""
_LEAST_PATIENCE_MS = 3_000
"""Somebody who wants to wait less than that waits so long for a coordinator all the same."""


@contextmanager
def _checked() -> Iterator[None]:
    """Make a wrong command line of what the SDK refuses before it asks anybody: an address, a setting."""
    try:
        yield
    except (ValueError, InvalidConfig, InvalidGroupId) as error:
        raise typer.BadParameter(str(error)) from None


def connect_admin(bootstrap: str) -> raftlog.Admin:
    """Return an admin client."""
    with _checked():
        return raftlog.Admin(bootstrap, config={"default.api.timeout.ms": _PATIENCE_MS, **settings_for(ADMIN_KEYS)})


def connect_consumer(
    bootstrap: str,
    when_out_of_range: str,
    group: str | None = None,
    *,
    patience_s: float | None = None,
    isolation_level: str = "read_committed",
) -> raftlog.Consumer:
    """Return a consumer that commits nothing by itself; `when_out_of_range`: what it does when its position is gone.

    `patience_s`: how long calls may take, joining a group among them, within what is sensible.
    """
    patience_ms = _PATIENCE_MS if patience_s is None else max(_LEAST_PATIENCE_MS, min(_PATIENCE_MS, patience_s * 1000))
    with _checked():
        settings = {
            **settings_for(CONSUMER_KEYS),
            "group.id": group,
            "auto.offset.reset": when_out_of_range,
            "isolation.level": isolation_level,
            "default.api.timeout.ms": int(patience_ms),
            "enable.auto.commit": False,
        }
        found = raftlog.Consumer(bootstrap, config=settings)
    found._engine.metadata.refused_grace_s = REFUSED_GRACE_S
    return found


def connect_producer(bootstrap: str, settings: Mapping[str, str]) -> raftlog.Producer:
    """Return a producer with these settings, which win."""
    with _checked():
        found = raftlog.Producer(
            bootstrap, config={"max.block.ms": _PATIENCE_MS, **settings_for(PRODUCER_KEYS), **settings}
        )
    found._engine.metadata.refused_grace_s = REFUSED_GRACE_S
    return found
