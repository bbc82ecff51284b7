"""Streams between voters: `Raft.Exchange`, one for each ordered pair, dialled by the one that sends on it.

Messages go one way; the other direction carries the answering hello, then empty frames as signs of life. Raft copes
with lost messages, so a link is dropped and dialled again when its queue overflows, when it is silent for SILENCE_S,
and when it breaks.

The states of an outgoing link; each change is one line in the log:

    connecting --(hello accepted)--> up
    up         --(broken, silent, overflow)--> connecting
    connecting --(hello refused, by either side)--> refused: <why>     and dialled again all the same
    refused    --(hello accepted)--> up

The accepting end checks which node calls. A frame that no voter sends ends its stream before any of it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from raftlog._client.connections import in_words
from raftlog._client.security import ChannelTls, dial
from raftlog.errors import AuthorizationError, BrokerUnavailable, RaftlogError, from_wire, to_wire
from raftlog.v1 import raft_pb2, raft_pb2_grpc
from raftlog.v1.common_pb2 import NONE
from raftmeta.quorum.config import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, Endpoint
from raftmeta.quorum.hello import MAX_REASON, duplicate, refusal
from raftmeta.quorum.peer_identity import refuse_false_claim
from raftmeta.raft.messages import flaw

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 1.0
PING_AFTER_S: Final = 0.5
"""Interval of the signs of life on an idle link."""
SILENCE_S: Final = 2.0
"""After this silence a peer counts as unreachable."""
FIRST_RETRY_S: Final = 0.02
LAST_RETRY_S: Final = 0.3
REFUSED_RETRY_S: Final = 1.0
MAX_QUEUED_MESSAGES: Final = 20_000
MAX_QUEUED_BYTES: Final = 128 << 20
MAX_FRAME_BYTES: Final = 4 << 20
"""A frame is closed at this size; its last message may exceed it."""
MAX_FRAME_MESSAGES: Final = 4096
"""The most messages in a frame that the accepting end takes."""

assert PING_AFTER_S * 2 < SILENCE_S
assert MAX_FRAME_BYTES * 2 < MAX_MESSAGE_BYTES


class LinkedCore(Protocol):
    """The part of the core that links use."""

    def hello(self) -> raft_pb2.RaftHello:
        """Return how this voter introduces itself."""
        ...

    def hello_from(self, peer_id: int, hello: raft_pb2.RaftHello) -> None:
        """Take a peer's hello."""
        ...

    def receive(self, peer_id: int, message: raft_pb2.RaftMessage) -> None:
        """Take a message."""
        ...

    def link_up(self, peer_id: int, hello: raft_pb2.RaftHello) -> None:
        """Note that messages can be sent to the peer."""
        ...

    def link_down(self, peer_id: int) -> None:
        """Note that messages can no longer be sent to the peer."""
        ...

    def stream_lost(self, peer_id: int) -> None:
        """Note that the peer's own stream to this node broke."""
        ...


_REFUSALS: Final = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


class OutgoingLink:
    """The stream to one peer."""

    def __init__(
        self,
        peer_id: int,
        endpoint: Endpoint,
        node: LinkedCore,
        kick: Callable[[], None],
        rng: random.Random,
        tls: ChannelTls | None = None,
    ) -> None:
        self.peer_id = peer_id
        self._endpoint = endpoint
        self._node = node
        self._kick = kick
        self._rng = rng
        self._tls = tls
        self._queue: list[raft_pb2.RaftMessage] = []
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._up = False
        self._heard_s = 0.0
        self._idle = True
        """Whether nothing was sent since the last tick."""
        self._ticker: asyncio.TimerHandle | None = None
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self._broken: RaftlogError | None = None
        self.trouble = "not connected yet"
        """The reason why there is no link, as text; "" while there is one."""

    def start(self) -> None:
        """Begin to dial."""
        self._task = asyncio.create_task(self._run(), name=f"raft-link-{self.peer_id}")

    def send(self, message: raft_pb2.RaftMessage) -> None:
        """Queue a message; dropped while the link is down."""
        if not self._up:
            return
        self._queue.append(message)
        self._queued_bytes += message.ByteSize()
        self._wake.set()
        if len(self._queue) > MAX_QUEUED_MESSAGES or self._queued_bytes > MAX_QUEUED_BYTES:
            self._break(BrokerUnavailable("it does not read fast enough"))

    async def close(self) -> None:
        """Stop dialling and end the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            try:
                await self._connect_once()
            except RaftlogError as error:
                was_up = self._up
                self._down(error)
                if was_up:
                    delay_s = FIRST_RETRY_S
                elif not error.retriable:
                    delay_s = REFUSED_RETRY_S
            except Exception as error:  # a peer may cause any error; the link is dialled again
                logger.exception("the link to controller %d failed", self.peer_id)
                self._down(BrokerUnavailable(f"{type(error).__name__}: {error}"))
            finally:
                if self._up:
                    self._down(BrokerUnavailable("this node is stopping"))
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.5))
            delay_s = min(delay_s * 1.7, LAST_RETRY_S)

    async def _connect_once(self) -> None:
        """Dial, introduce, and send until something breaks.

        Raises:
            RaftlogError: always; retriable unless one side refused the other.
        """
        channel = dial(self._endpoint.address, CHANNEL_OPTIONS, self._tls)
        call = raft_pb2_grpc.RaftStub(channel).Exchange()
        reader: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await self._introduce(call)
            self._heard_s = time.monotonic()
            self._call = call
            self._set_up(hello)
            self._tick()
            reader = asyncio.create_task(self._read(call), name=f"raft-link-{self.peer_id}-read")
            await self._write(call)
        except TimeoutError:
            raise BrokerUnavailable("it does not answer") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS:
                raise AuthorizationError(details or "it refuses this node") from None
            raise self._broken or BrokerUnavailable(in_words(details or "the connection broke")) from None
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr] # there is one
                raise
            # The call was cancelled, not this task.
            raise self._broken or BrokerUnavailable("the stream was cancelled") from None
        finally:
            self._call = None
            if self._ticker is not None:
                self._ticker.cancel()
            if reader is not None:
                reader.cancel()
            call.cancel()
            with contextlib.suppress(Exception):  # it is given up either way
                await channel.close()

    async def _introduce(self, call: Any) -> raft_pb2.RaftHello:
        mine = self._node.hello()
        mine.peer_id = self.peer_id
        await call.write(raft_pb2.RaftFrame(hello=mine))
        frame = await call.read()
        if frame is grpc.aio.EOF or frame is None or not frame.HasField("hello"):
            raise BrokerUnavailable("it ended the stream instead of answering; is it a raftlog controller?")
        hello: raft_pb2.RaftHello = frame.hello
        if hello.error.code != NONE:
            hello.error.message = hello.error.message[:MAX_REASON]
            raise from_wire(hello.error)
        refused = refusal(mine, hello)
        if refused is not None:
            raise refused
        return hello

    async def _write(self, call: Any) -> None:
        """Send queued messages, or a sign of life; `_tick` detects silence, so that messages need no timers."""
        while True:
            if self._broken is not None:
                raise self._broken
            if self._queue:
                self._idle = False
                await call.write(self._next_frame())
                continue
            self._wake.clear()
            await self._wake.wait()
            if self._idle and not self._queue and self._broken is None:
                await call.write(raft_pb2.RaftFrame())

    def _tick(self) -> None:
        """Check the silence of the peer and of this node, every PING_AFTER_S while the link is up."""
        self._ticker = asyncio.get_running_loop().call_later(PING_AFTER_S, self._tick)
        if time.monotonic() - self._heard_s > SILENCE_S:
            self._break(BrokerUnavailable(f"it has sent nothing for {SILENCE_S:g} s"))
        if self._idle:
            self._wake.set()
        self._idle = True

    def _next_frame(self) -> raft_pb2.RaftFrame:
        taken = size_bytes = 0
        while taken < min(len(self._queue), MAX_FRAME_MESSAGES) and size_bytes < MAX_FRAME_BYTES:
            size_bytes += self._queue[taken].ByteSize()
            taken += 1
        frame = raft_pb2.RaftFrame(messages=self._queue[:taken])
        del self._queue[:taken]
        self._queued_bytes -= size_bytes
        return frame

    async def _read(self, call: Any) -> None:
        """Note signs of life, and the end."""
        error = BrokerUnavailable("it closed the connection")
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                if frame is None:  # bytes that are no frame
                    error = BrokerUnavailable("it sent a message that is not a Raft frame; is it a raftlog controller?")
                    break
                self._heard_s = time.monotonic()
        except grpc.aio.AioRpcError as broken:
            error = BrokerUnavailable(broken.details() or "the connection broke")
        except asyncio.InvalidStateError:
            pass
        finally:  # also when it is cancelled: by the link's own end, or because something else cancelled the call
            if self._call is call:
                self._break(error)

    def _break(self, error: RaftlogError) -> None:
        if self._broken is None:
            self._broken = error
            self._wake.set()
            if self._call is not None:
                self._call.cancel()  # a write that waits for the peer to read ends, too

    def _set_up(self, hello: raft_pb2.RaftHello) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        self._broken = None
        self._up = True
        self.trouble = ""
        logger.info(
            "connected to controller %d at %s",
            self.peer_id,
            self._endpoint.address,
            extra={"event": "controller_connected", "peer": self.peer_id},
        )
        self._node.hello_from(self.peer_id, hello)
        self._node.link_up(self.peer_id, hello)
        self._kick()

    def _down(self, error: RaftlogError) -> None:
        trouble = str(error)
        if self._up:
            self._up = False
            self._queue.clear()
            self._queued_bytes = 0
            logger.info(
                "lost controller %d at %s: %s",
                self.peer_id,
                self._endpoint.address,
                trouble,
                extra={"event": "controller_lost", "peer": self.peer_id, "reason": trouble},
            )
            self._node.link_down(self.peer_id)
            self._kick()
        elif not error.retriable and trouble != self.trouble:
            logger.error("controller %d at %s is refused: %s", self.peer_id, self._endpoint.address, trouble)
        self._broken = None
        self.trouble = trouble


class RaftLinks:
    """All outgoing links of a voter."""

    def __init__(
        self,
        node: LinkedCore,
        peers: Mapping[int, Endpoint],
        kick: Callable[[], None],
        rng: random.Random,
        tls: ChannelTls | None = None,
    ) -> None:
        self._links = {
            peer_id: OutgoingLink(peer_id, endpoint, node, kick, rng, tls)
            for peer_id, endpoint in sorted(peers.items())
        }

    def start(self) -> None:
        """Begin to dial."""
        for link in self._links.values():
            link.start()

    def send(self, peer_id: int, message: raft_pb2.RaftMessage) -> None:
        """Send a message, which may get lost; Raft sends it again if needed."""
        self._links[peer_id].send(message)

    def troubles(self) -> dict[int, str]:
        """Return why there is no link to a peer, for each that has none."""
        return {peer_id: link.trouble for peer_id, link in self._links.items() if link.trouble}

    async def close(self) -> None:
        """End all streams."""
        await asyncio.gather(*(link.close() for link in self._links.values()))


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
        """Log each new reason once, not each attempt."""
        if self._refused.get(peer_id) != str(error):
            if len(self._refused) >= 100:  # ids come from outside
                self._refused.clear()
            self._refused[peer_id] = str(error)
            logger.error("refused a stream of controller %d: %s", peer_id, error)

    def close(self) -> None:
        """Accept no more streams."""
        self._closed = True
        self._inbound.clear()


def flaw_in(frame: raft_pb2.RaftFrame) -> str:
    """Return why no voter sends such a frame, as text; "" if it is valid."""
    if len(frame.messages) > MAX_FRAME_MESSAGES:
        return f"{len(frame.messages)} messages in one frame, at most {MAX_FRAME_MESSAGES} are allowed"
    return next(filter(None, map(flaw, frame.messages)), "")
