"""The metadata quorum as the broker sees it.

A single node stands behind it now and a Raft quorum later; nothing that uses this port may tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raftlog.v1.records_pb2 import MetadataCommand, MetadataRecord
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage

Listener = Callable[[MetadataImage, Sequence[MetadataRecord]], None]
"""Called on the event loop, in order, once for each committed change: the image after it, and its records."""

Unsubscribe = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Change:
    """The records of one committed command and the metadata offset they are committed at."""

    offset: int
    controller_epoch: int
    records: Sequence[MetadataRecord]


class MetadataPort(Protocol):
    """Committed metadata: what a broker may act on, and how it asks for changes."""

    @property
    def image(self) -> MetadataImage:
        """The newest committed image this node knows. It never goes back, and is never ahead of what is durable."""
        ...

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command and return its result once `image` shows it; the port stamps the clock and the epoch.

        Raises:
            RaftlogError: refused, and nothing changed; or StorageError, RequestTimedOut, ShuttingDown,
                after which it may or may not be committed.
        """
        ...

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change after the present `image`, until the returned function is called."""
        ...

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset` up to `image.offset`; None when they are not all kept, or it is ahead."""
        ...
