"""The metadata quorum as the broker sees it.

A voter of the quorum stands behind it, or an observer of one; nothing that uses this port may tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raftlog.v1.common_pb2 import QuorumInfo
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand, MetadataRecord
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage

Listener = Callable[[MetadataImage, Sequence[MetadataRecord] | None], None]
"""Called on the event loop, in order, once for each committed change: the image after it, and its records.

None for the records: the image came whole, and anything in it may have changed.
"""

Unsubscribe = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Change:
    """The records of one committed command and the metadata offset they are committed at.

    Offsets rise from change to change, but not by one: what the log holds besides changes leaves gaps.
    """

    offset: int
    controller_epoch: int
    records: Sequence[MetadataRecord]


class HeartbeatStream(Protocol):
    """A broker's heartbeats to one controller. One task sends and one receives; both raise once it is broken."""

    async def send(self, request: HeartbeatRequest) -> None:
        """Send a heartbeat; sequences rise.

        Raises:
            RaftlogError: retriable: the stream is broken; open another one.
        """
        ...

    async def receive(self) -> HeartbeatResponse:
        """Return the next answer; they come in the order of the heartbeats.

        Raises:
            NotController: it is not the active controller any more; the next stream is opened to the one it named.
            RaftlogError: what the controller refused the heartbeat with (StaleBrokerEpoch, BrokerIdNotRegistered:
                register anew), or retriable: the stream is broken.
        """
        ...

    async def close(self) -> None:
        """End the stream; the controller then waits for the broker no longer than its lease may last."""
        ...


class MetadataPort(Protocol):
    """Committed metadata: what a broker may act on, and how it asks for changes."""

    @property
    def image(self) -> MetadataImage:
        """The newest committed image this node knows. It never goes back, and is never ahead of what is durable."""
        ...

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command and return its result once `image` shows it; the controller stamps clock and epoch.

        This retries by itself over changes of the controller and broken connections; the command takes effect once.

        Raises:
            RaftlogError: refused, and nothing changed; or RequestTimedOut, StorageError, ShuttingDown, after which it
                may or may not be committed.
        """
        ...

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change after the present `image`, until the returned function is called."""
        ...

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset` up to `image.offset`; None when they are not all kept."""
        ...

    async def barrier(self) -> int:
        """Return a metadata offset that covers all acknowledged before this call, once `image` shows it.

        Raises:
            RaftlogError: no majority confirmed it in time.
        """
        ...

    async def describe_quorum(self) -> QuorumInfo:
        """Return the leader's view of the quorum; on a voter, while there is no leader, that voter's own.

        Raises:
            RaftlogError: no controller could be asked.
        """
        ...

    async def open_heartbeats(self) -> HeartbeatStream:
        """Open a stream of heartbeats to where the active controller is believed to be.

        Raises:
            RaftlogError: retriable: no controller could be reached.
        """
        ...

    async def wait_ready(self) -> None:
        """Return once an active controller has been heard and `image` is as new as what it had committed by then."""
        ...

    def waiting_for(self) -> str:
        """Return what keeps this node from being ready, as text for a log line; "" if it is ready."""
        ...

    async def start(self) -> None:
        """Begin. May be called once.

        Raises:
            RaftlogError: with the reason; nothing stays locked.
        """
        ...

    async def close(self) -> None:
        """End, and give everything up."""
        ...
