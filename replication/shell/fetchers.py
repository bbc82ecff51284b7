"""The streams by which this broker follows others: one to each broker that leads a partition of it.

`ReplicaFetchers` knows what is followed where, a `LeaderLink` is the connection to one leader. Its states, with one log
line for each change:

    connecting --(the leader accepts the hello)-->       up
    up         --(broken, silent, another address)-->    connecting       dialled again at once, if it lasted
    connecting --(refused, or no answer)-->              trouble: <why>   dialled again, with growing pauses
    trouble    --(the leader accepts the hello)-->       up
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import grpc
from grpc import aio

from raftlog._client.connections import in_words
from raftlog._client.security import ChannelTls, dial
from raftlog.errors import AuthorizationError, BrokerUnavailable, InvalidRequestError, RaftlogError
from raftlog.format import wire
from raftlog.format.header import first_batches
from raftlog.v1 import replication_pb2
from replication.follower_session import FollowerOptions, FollowerSession, PartitionKey
from replication.pacing import LiveTraffic
from replication.ports import FollowedPartition, Replica
from replication.shell.service import METHOD, SERVICE, SIGN_OF_LIFE_MS, WELCOME, WakeTimer, now_ms
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 1.0
LONGEST_HELLO_TIMEOUT_S: Final = 4.0
"""The timeout doubles up to this one: a leader that lacks CPU time may never answer within the first. gRPC itself ends
the wait for a connection that is not made within a second."""
OF_USE_S: Final = 1.0
"""A shorter stream does not reset the pauses: the leader accepts streams, and breaks them for some reason."""
CLEAN_UP_S: Final = 3.0
"""How long to wait for the tasks of a stream to end."""
FIRST_RETRY_S: Final = 0.02
LAST_RETRY_S: Final = 0.3
REFUSED_RETRY_S: Final = 1.0
SILENCE_S: Final = 2.0
"""A leader that is silent for this long counts as gone; paused or cut off, it keeps its connections open."""
UNREACHABLE_AFTER_S: Final = 5.0
"""After this time an unreachable leader is logged. A leader that has died is replaced sooner."""
LINGER_S: Final = 1.0
"""How long a link without partitions stays open; leaderships often come back."""
BATCHES_IN_A_TURN: Final = 64
"""A leader may send thousands of small batches in a message. After so many of them the event loop does other work."""
CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    # No limit on received messages: the credit bounds them, and the largest batch that a topic allows has to pass.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
]

assert SIGN_OF_LIFE_MS * 2 / 1000 < SILENCE_S

AddressOf = Callable[[int], str | None]
"""Returns where a broker listens for other nodes, as `host:port`; None while that is not known."""


def in_pieces(frames: Iterable[wire.ReplicaFrame], most: int) -> Iterator[list[wire.ReplicaFrame]]:
    """Yield the frames of a message in lists of about `most` batches; a frame of more batches becomes several.

    Frames without records count as one batch. Only the first frame that is made of another has its traces.
    """
    piece: list[wire.ReplicaFrame] = []
    left = most
    for frame in frames:
        head, records = frame
        position, count = first_batches(records, 0, left)
        if position == len(records):
            piece.append(frame)
        else:
            piece.append(wire.ReplicaFrame(head, records[:position]))
            untraced = replication_pb2.ReplicaFrame()
            untraced.CopyFrom(head)
            untraced.ClearField("traceparents")
        left -= max(1, count)
        while left <= 0:
            yield piece
            piece, left = [], most
            if position < len(records):
                begin = position
                position, count = first_batches(records, begin, left)
                piece.append(wire.ReplicaFrame(untraced, records[begin:position]))
                left -= count
    if piece:
        yield piece


class ReplicaFetchers:
    """All partitions that this broker follows, from all leaders.

    `me`: this life of this broker. `throttle`: `follower.replication.throttled.rate`. `live`: shared with the streams
    of this broker's followers.
    """

    def __init__(
        self,
        me: Replica,
        cluster_id: str,
        address_of: AddressOf,
        *,
        options: FollowerOptions | None = None,
        throttle: TokenBucket | None = None,
        live: LiveTraffic | None = None,
        rng: random.Random | None = None,
        tls: ChannelTls | None = None,
    ) -> None:
        self._me = me
        self._cluster_id = cluster_id
        self._address_of = address_of
        self._options = options or FollowerOptions()
        self._throttle = throttle or TokenBucket()
        self._live = live or LiveTraffic()
        self._rng = rng or random.Random()
        self._tls = tls
        self._links: dict[int, LeaderLink] = {}
        self._leader_of: dict[PartitionKey, int] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        if self._closed:
            return
        key = (partition.topic_id, partition.partition)
        if self._leader_of.get(key, leader_id) != leader_id:
            self.unfollow(*key)
        self._leader_of[key] = leader_id
        link = self._links.get(leader_id)
        if link is None:
            assert leader_id != self._me.broker_id, "a broker does not follow itself"
            link = self._links[leader_id] = LeaderLink(
                self._me,
                leader_id,
                self._cluster_id,
                self._throttle,
                self._live,
                self._options,
                self._address_of,
                self._rng,
                self._tls,
            )
            link.start()
        link.session.follow(partition)

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        leader_id = self._leader_of.pop((topic_id, partition), None)
        if leader_id is None:
            return
        link = self._links[leader_id]
        link.session.unfollow(topic_id, partition)
        if not len(link.session):
            asyncio.get_running_loop().call_later(LINGER_S, self._retire, leader_id, link)

    def _retire(self, leader_id: int, link: LeaderLink) -> None:
        if not len(link.session) and self._links.get(leader_id) is link:
            del self._links[leader_id]
            task = asyncio.create_task(link.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def endpoints_changed(self) -> None:
        """Look up the leaders' addresses again; a link to an outdated address is dialled again."""
        for link in self._links.values():
            link.look_up()

    def troubles(self) -> dict[int, str]:
        """Return, by leader id, why there is no link to that leader."""
        return {leader_id: link.trouble for leader_id, link in self._links.items() if link.trouble}

    async def close(self) -> None:
        """End all streams, and follow nothing from now on."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        self._leader_of.clear()
        await asyncio.gather(*(link.close() for link in links), *self._ending)


class LeaderLink:
    """The stream to one leader, dialled again whenever it breaks; `session` outlives the streams."""

    def __init__(
        self,
        me: Replica,
        leader_id: int,
        cluster_id: str,
        throttle: TokenBucket,
        live: LiveTraffic,
        options: FollowerOptions,
        address_of: AddressOf,
        rng: random.Random,
        tls: ChannelTls | None = None,
    ) -> None:
        self._tls = tls
        self._leader_id = leader_id
        self._address_of = address_of
        self._rng = rng
        self._wake_timer = WakeTimer()
        self._look_up = asyncio.Event()
        self._hello_timeout_s = HELLO_TIMEOUT_S
        self._hello: asyncio.Timeout | None = None
        """While the leader is to answer the hello."""
        self._address: str | None = None
        self._up = False
        self._up_ms = 0.0
        self._down_since_ms = 0.0
        self._told_unreachable = False
        self._heard_ms = 0.0
        self._task: asyncio.Task[None] | None = None
        self.trouble = "not connected yet"
        """Why there is no stream; "" while there is one."""
        self.session = FollowerSession(
            me=me,
            leader_id=leader_id,
            cluster_id=cluster_id,
            wake=self._wake_timer.ring,
            throttle=throttle,
            options=options,
            live=live,
        )

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"replica-link-{self._leader_id}")

    def look_up(self) -> None:
        """Dial again if the leader's address has changed, or is known now."""
        if self._address_of(self._leader_id) != self._address:
            self._look_up.set()
            if self._hello is not None and not self._hello.expired():
                self._hello.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Stop dialling and end the stream."""
        if self._task is not None:
            self._task.cancel()
            await _end_of([self._task])
        self._wake_timer.close()

    async def _run(self) -> None:
        delay_s = 0.0
        self._down_since_ms = now_ms()
        while True:
            self._up = False
            error = await self._one_stream()
            self.session.lost()
            self._say_lost(error)
            if self._up and now_ms() - self._up_ms >= OF_USE_S * 1000:
                delay_s = 0.0  # the first retry comes at once
            elif not error.retriable:
                delay_s = REFUSED_RETRY_S
            if delay_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s * self._rng.uniform(0.5, 1.5)):
                        await self._look_up.wait()
            delay_s = min(max(FIRST_RETRY_S, delay_s * 1.7), LAST_RETRY_S)

    async def _one_stream(self) -> RaftlogError:
        """Dial, and serve the stream until it breaks; return the reason."""
        try:
            self._look_up.clear()
            self._address = self._address_of(self._leader_id)
            if self._address is None:
                return BrokerUnavailable(f"it is not known where broker {self._leader_id} listens for other nodes")
            channel = dial(self._address, CHANNEL_OPTIONS, self._tls)
            try:
                return await self._serve(channel)
            finally:
                await _end_of([asyncio.ensure_future(channel.close())])
        except RaftlogError as error:
            return error
        except Exception as error:  # a bug, after which the link is dialled again
            logger.exception("the link to broker %d failed", self._leader_id)
            return BrokerUnavailable(f"{type(error).__name__}: {error}")

    async def _serve(self, channel: aio.Channel) -> RaftlogError:
        call: Any = channel.stream_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=replication_pb2.ReplicateRequest.SerializeToString,
            response_deserializer=wire.decode_replicate,
        )()
        tasks: list[asyncio.Task[None]] = []
        try:
            try:
                async with asyncio.timeout(self._hello_timeout_s) as self._hello:
                    self.session.connected(now_ms())
                    await call.write(self.session.take_request(now_ms()))
                    if WELCOME not in tuple(await call.initial_metadata()):
                        return await _ending(call)
            except TimeoutError:
                self._hello_timeout_s = min(2 * self._hello_timeout_s, LONGEST_HELLO_TIMEOUT_S)
                raise
            finally:
                self._hello = None
            self._hello_timeout_s = HELLO_TIMEOUT_S
            self._say_up()
            tasks = [
                asyncio.create_task(self._read(call), name=f"replica-link-{self._leader_id}-read"),
                asyncio.create_task(self._write(call), name=f"replica-link-{self._leader_id}-write"),
                asyncio.create_task(self._watch_address()),
                asyncio.create_task(self._watch_silence()),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:  # the reader comes first: its error says more than a failed write
                if task.done() and not task.cancelled():
                    task.result()
            return BrokerUnavailable("the stream was broken off")
        except TimeoutError:
            return BrokerUnavailable("it does not answer")
        except (grpc.RpcError, asyncio.InvalidStateError):
            return await _ending(call)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr] # there is one
                raise
            return await _ending(call)  # gRPC raises this when the call, not this task, was cancelled
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await _end_of(tasks)

    async def _read(self, call: Any) -> None:
        session = self.session
        while (frames := await call.read()) is not aio.EOF:
            if frames is None:
                raise InvalidRequestError(f"broker {self._leader_id} sent a message that is not a ReplicateResponse")
            self._heard_ms = now_ms()  # of an empty message too, which has no pieces: it says that the leader lives
            for number, piece in enumerate(in_pieces(frames, BATCHES_IN_A_TURN)):
                if number:
                    await asyncio.sleep(0)
                    self._heard_ms = now_ms()
                session.handle(piece, self._heard_ms)
        raise await _ending(call)

    async def _write(self, call: Any) -> None:
        session, timer = self.session, self._wake_timer
        while True:
            timer.clear()
            request = session.take_request(now_ms())
            if request is not None:
                await call.write(request)
            await timer.wait(session.next_deadline_ms(now_ms()))

    async def _watch_address(self) -> None:
        await self._look_up.wait()
        raise BrokerUnavailable("its address has changed")

    async def _watch_silence(self) -> None:
        self._heard_ms = now_ms()
        while (left_s := SILENCE_S - (now_ms() - self._heard_ms) / 1000) > 0:  # noqa: ASYNC110 - `_read` moves `_heard_ms`
            await asyncio.sleep(left_s)
        raise BrokerUnavailable(f"it has sent nothing for {SILENCE_S:g} s")

    def _say_up(self) -> None:
        self._up = True
        self._up_ms = now_ms()
        self._told_unreachable = False
        self.trouble = ""
        logger.info(
            "following broker %d at %s",
            self._leader_id,
            self._address,
            extra={"event": "leader_connected", "peer": self._leader_id},
        )

    def _say_lost(self, error: RaftlogError) -> None:
        trouble = str(error)
        if self._up:
            self._down_since_ms = now_ms()
            logger.info(
                "lost the stream to broker %d: %s",
                self._leader_id,
                trouble,
                extra={"event": "leader_connection_lost", "peer": self._leader_id, "reason": trouble},
            )
        elif not error.retriable and trouble != self.trouble:
            logger.error("broker %d refuses this broker as a follower: %s", self._leader_id, trouble)
        elif (
            error.retriable
            and not self._told_unreachable
            and now_ms() - self._down_since_ms >= UNREACHABLE_AFTER_S * 1000
        ):
            self._told_unreachable = True
            logger.warning(
                "cannot reach broker %d at %s, whose partitions this broker follows: %s; trying again. If other nodes "
                "cannot reach it either, correct its advertised.inter.node.listener",
                self._leader_id,
                self._address,
                trouble,
                extra={"event": "leader_unreachable", "peer": self._leader_id, "reason": trouble},
            )
        self.trouble = trouble


async def _end_of(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait until cancelled tasks have ended, with any result, for at most `CLEAN_UP_S`."""
    if tasks:
        done, pending = await asyncio.wait(tasks, timeout=CLEAN_UP_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # marks it as retrieved
        if pending:
            logger.warning("%d tasks of a stream to a leader do not end", len(pending))


async def _ending(call: Any) -> RaftlogError:
    """Return why a call has ended, or is about to end."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            code, details = await call.code(), await call.details()
    except TimeoutError:
        return BrokerUnavailable("the connection broke")
    if code is grpc.StatusCode.OK:
        return BrokerUnavailable("it ended the stream")
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return InvalidRequestError(details or code.name)
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return AuthorizationError(details or code.name)
    return BrokerUnavailable(in_words(details or code.name))
