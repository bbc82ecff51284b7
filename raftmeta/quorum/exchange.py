"""The accepting end of `Raft.Exchange`: who may talk to this voter, and what it says.

A stream that carries what no voter says is ended before anything of the frame is believed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from raftlog.errors import RaftlogError, to_wire
from raftlog.v1 import raft_pb2, raft_pb2_grpc
from raftmeta.quorum.hello import duplicate, refusal
from raftmeta.quorum.links import HELLO_TIMEOUT_S, MAX_FRAME_MESSAGES, PING_AFTER_S, SILENCE_S, LinkedCore
from raftmeta.quorum.peer_identity import refuse_false_claim
from raftmeta.raft.messages import flaw

logger = logging.getLogger(__name__)

_Context = aio.ServicerContext[Any, Any]


@dataclass(eq=False, slots=True)
class _Inbound:
    """The stream of one peer."""

    incarnation: int
    heard_s: float = field(default_factory=time.monotonic)


class RaftExchange(raft_pb2_grpc.RaftServicer):
    """Takes the messages of the other voters; one stream of each, the newest.

    A peer that reconnects replaces its own older stream, whose late messages are dropped. A second process that
    claims the id of a living one is refused.
    """

    def __init__(self, node: LinkedCore, kick: Callable[[], None]) -> None:
        self._node = node
        self._kick = kick
        self._inbound: dict[int, _Inbound] = {}
        self._refused: dict[int, str] = {}
        self._closed = False

    async def Exchange(  # type: ignore[override] # the stub knows generators only; with read() both ends show
        self, request_iterator: Any, context: _Context
    ) -> None:
        """Serve one stream until it breaks, falls silent, or is superseded."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await context.read()
        except (TimeoutError, DecodeError):
            return
        if self._closed or frame is aio.EOF or frame is None or not frame.HasField("hello"):
            return
        theirs = frame.hello
        mine = self._node.hello()
        peer_id = theirs.node_id
        await refuse_false_claim(context, peer_id)
        refused = refusal(mine, theirs) or self._duplicate(theirs)
        mine.peer_id = peer_id
        if refused is not None:
            self._note_refused(peer_id, refused)
            mine.error.CopyFrom(to_wire(refused))
            await context.write(raft_pb2.RaftFrame(hello=mine))
            return
        self._refused.pop(peer_id, None)
        inbound = self._inbound[peer_id] = _Inbound(theirs.incarnation)
        self._node.hello_from(peer_id, theirs)
        self._kick()
        try:
            await context.write(raft_pb2.RaftFrame(hello=mine))
            await self._serve(peer_id, inbound, context)
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            pass  # broken or silent: the same to Raft
        except DecodeError as error:
            logger.error("ended the stream of controller %d: it does not parse: %s", peer_id, error)
        finally:
            if self._inbound.get(peer_id) is inbound:
                del self._inbound[peer_id]
                if not self._closed:
                    self._node.stream_lost(peer_id)
                    self._kick()

    async def _serve(self, peer_id: int, inbound: _Inbound, context: _Context) -> None:
        node, kick = self._node, self._kick
        loop = asyncio.get_running_loop()
        answered_s = inbound.heard_s
        async with asyncio.timeout(SILENCE_S) as deadline:  # one for all frames, moved as often as the peer is answered
            while True:
                frame = await context.read()
                if frame is aio.EOF or frame is None or self._inbound.get(peer_id) is not inbound or self._closed:
                    return
                wrong = flaw_in(frame)
                if wrong:
                    logger.error("ended the stream of controller %d: it sent %s", peer_id, wrong)
                    return
                now_s = inbound.heard_s = time.monotonic()
                for message in frame.messages:
                    node.receive(peer_id, message)
                if frame.messages:
                    kick()
                if now_s - answered_s >= PING_AFTER_S / 2:
                    answered_s = now_s
                    deadline.reschedule(loop.time() + SILENCE_S)
                    await context.write(raft_pb2.RaftFrame())

    def _duplicate(self, theirs: raft_pb2.RaftHello) -> RaftlogError | None:
        present = self._inbound.get(theirs.node_id)
        if present is None or present.incarnation == theirs.incarnation:
            return None
        return duplicate(theirs.node_id) if time.monotonic() - present.heard_s < SILENCE_S else None

    def _note_refused(self, peer_id: int, error: RaftlogError) -> None:
        """One line for each new reason, not for each attempt."""
        if self._refused.get(peer_id) != str(error):
            if len(self._refused) >= 100:  # ids come from outside
                self._refused.clear()
            self._refused[peer_id] = str(error)
            logger.error("refused a stream of controller %d: %s", peer_id, error)

    def close(self) -> None:
        """Take nothing more."""
        self._closed = True
        self._inbound.clear()


def flaw_in(frame: raft_pb2.RaftFrame) -> str:
    """Return why a frame is not one that a voter sends, in words; "" when it may be."""
    if len(frame.messages) > MAX_FRAME_MESSAGES:
        return f"{len(frame.messages)} messages in one frame, at most {MAX_FRAME_MESSAGES} are allowed"
    return next(filter(None, map(flaw, frame.messages)), "")
