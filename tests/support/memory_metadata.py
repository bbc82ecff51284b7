"""`MetadataPort` without a quorum: the state machine alone, in memory, for tests of what stands on the port."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from raftlog.errors import BrokerUnavailable, RaftlogError
from raftlog.v1.common_pb2 import QuorumInfo
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import ClaimControllerCommand, MetadataCommand, UnfenceBrokerCommand
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage
from raftmeta.port import Change, Listener, Unsubscribe
from raftmeta.quorum.image_feed import ImageFeed
from raftmeta.state import MetadataState
from tests.support.metadata import levels_with_ids_asked_for, register

TERM = 1


class FakeHeartbeats:
    """One stream of heartbeats, answered by the test."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[HeartbeatRequest] = asyncio.Queue()
        self.closed = False
        self._answers: asyncio.Queue[HeartbeatResponse | BaseException] = asyncio.Queue()

    def answer(self, answer: HeartbeatResponse | BaseException) -> None:
        """Have the next `receive` end with this."""
        self._answers.put_nowait(answer)

    async def send(self, request: HeartbeatRequest) -> None:
        """Take a heartbeat."""
        self.sent.put_nowait(request)

    async def receive(self) -> HeartbeatResponse:
        """Return the next answer, or raise it."""
        answer = await self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def close(self) -> None:
        """End the stream."""
        self.closed = True


class MemoryMetadata:
    """A quorum of one that commits at once. Offsets have gaps, as those of a real log do.

    Topics have the ids asked for, so that tests know them beforehand.
    """

    def __init__(self, *, controller_id: int = 1, cluster_id: str = "test") -> None:
        self.state = MetadataState()
        self.feed = ImageFeed()
        self.barriers = 0
        self.quorum = QuorumInfo(cluster_id=cluster_id, leader_id=controller_id)
        self.streams: asyncio.Queue[FakeHeartbeats] = asyncio.Queue()
        self.cluster_id = cluster_id
        self.refuse_with: list[RaftlogError] = []
        self.state.subscribe(self.feed.publish, self.feed.reset)
        levels = levels_with_ids_asked_for()
        claim = ClaimControllerCommand(controller_id=controller_id, cluster_id=cluster_id, features=levels)
        self._apply(MetadataCommand(claim_controller=claim))

    @property
    def image(self) -> MetadataImage:
        """The image after the last command."""
        return self.feed.image

    def _apply(self, command: MetadataCommand) -> CommandResult:
        index = self.state.last_applied
        self.state.begin_term(index + 1, TERM)
        stamped = MetadataCommand()
        stamped.CopyFrom(command)
        stamped.controller_epoch, stamped.proposed_at_ms = TERM, 1_000
        outcome = self.state.apply(index + 2, TERM, stamped.SerializeToString()).outcome
        if isinstance(outcome, RaftlogError):
            raise outcome
        return outcome

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Apply a command, after those of `refuse_with` were raised."""
        await asyncio.sleep(0)
        if self.refuse_with:
            raise self.refuse_with.pop(0)
        return self._apply(command)

    async def add_broker(self, broker_id: int = 1, rack: str = "", port: int = 9092) -> None:
        """Register a broker and unfence it."""
        epoch = (await self.propose(register(broker_id, incarnation=broker_id, port=port, rack=rack))).broker_epoch
        await self.propose(
            MetadataCommand(unfence_broker=UnfenceBrokerCommand(broker_id=broker_id, broker_epoch=epoch))
        )

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change from now on."""
        return self.feed.subscribe(listener)

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`."""
        return self.feed.changes_since(offset)

    async def barrier(self) -> int:
        """Count that it was asked for."""
        self.barriers += 1
        return self.image.offset

    async def describe_quorum(self) -> QuorumInfo:
        """Return `quorum`."""
        return self.quorum

    async def open_heartbeats(self) -> FakeHeartbeats:
        """Return the next stream that the test has put there."""
        if self.streams.empty():
            await asyncio.sleep(0.001)
            raise BrokerUnavailable("no controller answers")
        return self.streams.get_nowait()

    async def wait_ready(self) -> None:
        """Return."""

    def waiting_for(self) -> str:
        """Return nothing."""
        return ""

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
