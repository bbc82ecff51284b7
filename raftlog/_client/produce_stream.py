"""The produce stream to one broker: few large requests, several in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

import grpc

from raftlog._client.connections import from_grpc
from raftlog._core.batch import Batch
from raftlog._core.partition_queue import PartitionQueue
from raftlog.errors import AuthorizationError, BrokerUnavailable, NotLeader, RaftlogError, RequestTimedOut
from raftlog.v1 import log_pb2
from raftlog.wire import Produce, ProducePart, encode_produce

if TYPE_CHECKING:
    from raftlog._client.producer import ProducerEngine
    from raftlog._client.producer_buffer import Callbacks

logger = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 2.0
"""How long closing waits for the broker to read what nobody will answer (acks=0)."""
_ANSWER_GRACE_MS: Final = 1000.0
"""The broker itself answers after `request.timeout.ms`; a stream that is silent for longer than this beyond is dead."""


_SILENCE_MS: Final = 500.0
"""After so long without an answer it is asked whether the broker lives, and whether it still leads."""
_LAST_ANSWER_MS: Final = 100.0
"""How long a broker that leads no more, and lives, may take to say what became of what it was sent. It knows of the
change as soon as others do; to send again what it has appended would double it."""


class _Flight:
    """One request that has no answer yet. A batch that was given up has left None in its place."""

    __slots__ = ("batches", "sent_ms")

    def __init__(self, batches: list[Batch | None], sent_ms: float) -> None:
        self.batches = batches
        self.sent_ms = sent_ms

    def live(self) -> list[Batch]:
        """Return the batches that are waited for."""
        return [batch for batch in self.batches if batch is not None]


class ProduceStream:
    """Sends the queues that one broker leads, in turn.

    A request takes as many batches as `max.request.size` allows, from as many partitions as have some: while the
    application keeps the interpreter lock busy, the loop gets few turns, and each has to count.
    """

    def __init__(self, engine: ProducerEngine, node_id: int) -> None:
        self._engine = engine
        self._node_id = node_id
        self._queues: dict[PartitionQueue, None] = {}
        self._in_flight: dict[int, _Flight] = {}
        self._correlation_id = 0
        self._ready = asyncio.Event()
        self._call: Any = None
        self._closing = False
        self._task = engine.spawn(self._run())
        self._failures = 0
        self._failing_since_ms: float | None = None
        self._leaving: dict[PartitionQueue, float] = {}
        """Queues with something in flight that somebody else leads, and since when that is known."""
        self._broken_off: RaftlogError | None = None
        """Why this side has ended the call."""

    @property
    def requests_in_flight(self) -> int:
        """Requests that have no answer yet."""
        return len(self._in_flight)

    def add(self, queue: PartitionQueue) -> None:
        """This broker leads the queue, which has something to send."""
        self._queues[queue] = None
        self._ready.set()

    def check_leaders(self) -> None:
        """Give up queues that somebody else leads now. Without idempotence what is in flight may still be answered, by
        a broker that answers, for a moment; with it, it is sent again at once, and recognised if it is there."""
        engine = self._engine
        now_ms = engine.now_ms()
        with engine.lock:
            for queue in list(self._queues):
                leader = engine.metadata.view.leader(queue.topic, queue.partition)
                if leader is None or leader.broker_id != self._node_id:
                    del self._queues[queue]
                    engine.reroute(queue)
            before, self._leaving = self._leaving, {}
            for flight in self._in_flight.values():
                for batch in flight.live():
                    leader = engine.metadata.view.leader(batch.queue.topic, batch.queue.partition)
                    if leader is not None and leader.broker_id != self._node_id:
                        self._leaving[batch.queue] = before.get(batch.queue, now_ms)
        if self._queues and self._failing_since_ms is not None:
            engine.request_refresh(self._failing_since_ms)
        self._leave(now_ms)

    def _leave(self, now_ms: float) -> None:
        """Send to its new leader what this broker does not answer any more."""
        if not self._leaving:
            return
        engine = self._engine
        silent = engine.metadata.silent_since(self._node_id) is not None
        left = {
            queue: None
            for queue, since_ms in self._leaving.items()
            if silent or queue.numbering is not None or now_ms - since_ms >= _LAST_ANSWER_MS
        }
        if not left:
            return
        callbacks: Callbacks = []
        error = NotLeader(f"broker {self._node_id} has not answered, and leads no more")
        with engine.lock:
            for flight in self._in_flight.values():
                for index, batch in enumerate(flight.batches):
                    if batch is not None and batch.queue in left:
                        flight.batches[index] = None
                        engine.send_again(batch, error, callbacks)
            for queue in left:
                del self._leaving[queue]
            engine.settle(left)
        engine.finish(callbacks)
        if not any(flight.live() for flight in self._in_flight.values()):
            self._break_off(error)  # nobody waits for its answers, which would be in the way of later requests

    def _break_off(self, error: RaftlogError) -> None:
        """End the call, but not the stream. The task is cancelled as well: who writes to a call that is cancelled
        before its connection is there would wait for ever."""
        if self._call is not None and self._broken_off is None:
            self._broken_off = error
            self._call.cancel()
            self._task.cancel()

    def check_silence(self, now_ms: float) -> None:
        """Look whether the broker lives when its oldest request has no answer yet, and break the stream in the end."""
        self._leave(now_ms)
        limit_ms = self._engine.options.request_timeout_ms + _ANSWER_GRACE_MS
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None or self._call is None:
            return
        if now_ms - oldest.sent_ms > limit_ms:
            limit = f"request.timeout.ms={self._engine.options.request_timeout_ms}"
            self._break_off(RequestTimedOut(f"broker {self._node_id} has not answered within {limit}"))
        elif now_ms - oldest.sent_ms > _SILENCE_MS:
            self._engine.request_refresh(oldest.sent_ms, probe=self._node_id)

    async def close(self) -> None:
        """End the stream; what was written without asking for an answer still gets there."""
        call = self._call
        if call is not None and self._engine.options.acks == log_pb2.NO_ACK:
            with contextlib.suppress(TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await call.done_writing()
                    await call.code()  # the broker ends the stream once it has read everything
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        engine = self._engine
        while True:
            await self._ready.wait()
            if not self._queues:
                self._ready.clear()
                continue
            address = engine.metadata.address(self._node_id)
            error: RaftlogError
            try:
                if address is None:
                    error = BrokerUnavailable(f"broker {self._node_id} is not part of the cluster any more")
                else:
                    await self._stream(address)
                    error = BrokerUnavailable(f"{address} closed the stream")
            except (grpc.RpcError, asyncio.InvalidStateError, RaftlogError) as broke:
                error = from_grpc(broke, address or "")
            except asyncio.CancelledError:
                if self._broken_off is None or self._closing:
                    raise
                error = self._broken_off
            except Exception as bug:  # one of ours: it must not strand the batches, which are sent again
                logger.exception("produce stream to broker %d failed", self._node_id)
                error = from_grpc(bug, address or "")
            self._call = None
            if self._broken_off is not None and not self._closing:
                self._task.uncancel()
            error, self._broken_off = self._broken_off or error, None
            if isinstance(error, NotLeader):  # given up in favour of another one: he may be asked again at once
                self._give_back(error)
                continue
            self._failures += 1
            if self._failing_since_ms is None:
                self._failing_since_ms = engine.now_ms()
            logger.debug("produce stream to broker %d ended: %s", self._node_id, error)
            if isinstance(error, AuthorizationError):
                self._fail_all(error)
            self._give_back(error)
            engine.request_refresh(self._failing_since_ms)
            await asyncio.sleep(engine.options.pauses.after_ms(error, self._failures) / 1000)

    def _fail_all(self, error: RaftlogError) -> None:
        """The broker does not let this user in: nothing that is to go there will be taken, however often it is sent."""
        engine = self._engine
        callbacks: Callbacks = []
        with engine.lock:
            failed = [batch for flight in self._in_flight.values() for batch in flight.live()]
            for queue in dict.fromkeys([*(batch.queue for batch in failed), *self._queues]):
                failed += (*queue.refused, *queue.waiting)
            for batch in failed:
                engine.complete(batch, callbacks, error=error)
        engine.finish(callbacks)

    def _give_back(self, error: RaftlogError) -> None:
        """Return everything in flight to its queue, in order, and all queues to the engine."""
        engine = self._engine
        callbacks: Callbacks = []
        with engine.lock:
            touched: dict[PartitionQueue, None] = {}
            for flight in self._in_flight.values():
                for batch in flight.live():
                    engine.send_again(batch, error, callbacks)
                    touched[batch.queue] = None
            self._in_flight.clear()
            self._leaving.clear()
            for queue in self._queues:
                queue.note_failure(error)
            engine.settle(touched)
        engine.finish(callbacks)

    async def _stream(self, address: str) -> None:
        channel = self._engine.connections.channel(address)
        method = channel.stream_stream(
            "/raftlog.v1.Log/Produce",
            request_serializer=encode_produce,
            response_deserializer=log_pb2.ProduceResponse.FromString,
        )
        call = self._call = method()
        reader = asyncio.get_running_loop().create_task(self._read(call))
        reader.add_done_callback(lambda _: self._ready.set())
        try:
            while not reader.done():
                request, flight = self._next_request()
                if request is None:
                    self._ready.clear()
                    await self._ready.wait()
                    continue
                try:
                    await call.write(request)
                except asyncio.InvalidStateError:  # it has ended, and the reader knows why
                    await reader
                    raise
                if request.head.acks == log_pb2.NO_ACK:
                    del self._in_flight[request.head.correlation_id]
                    self._complete_unacknowledged(flight.live())
            await reader  # raises what broke it
        finally:
            call.cancel()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, RaftlogError, asyncio.InvalidStateError):
                await reader

    def _next_request(self) -> tuple[Produce | None, _Flight]:
        engine = self._engine
        options = engine.options
        flight = _Flight([], engine.now_ms())
        parts: list[ProducePart] = []
        if len(self._in_flight) >= options.max_in_flight_requests_per_connection:
            return None, flight
        room_bytes = options.max_request_size
        with engine.lock:
            for queue in list(self._queues):
                if room_bytes <= 0:
                    break
                topic = engine.metadata.view.topics.get(queue.topic)
                view = topic.partitions[queue.partition] if topic and queue.partition < len(topic.partitions) else None
                del self._queues[queue]
                if topic is None or view is None or view.leader != self._node_id:
                    engine.reroute(queue)
                    continue
                if queue.not_before_ms > flight.sent_ms:
                    continue  # comes back by itself after its pause
                if engine.gate is not None and not engine.may_send(queue):
                    continue  # the topic was made again meanwhile
                for batch in queue.take(
                    self._node_id, room_bytes, at_least_one=not parts, leader_epoch=view.leader_epoch
                ):
                    assert batch.encoded is not None
                    head = log_pb2.ProducePartition(
                        topic_id=topic.topic_id,
                        partition=queue.partition,
                        leader_epoch=view.leader_epoch,
                        chain=queue.chain,
                    )
                    if batch.traces:
                        head.traceparents.extend(batch.traces.values())
                    parts.append(ProducePart(head, batch.encoded))
                    flight.batches.append(batch)
                    room_bytes -= len(batch.encoded)
                if queue.sendable and (not queue.in_flight or queue.node_id == self._node_id):
                    self._queues[queue] = None  # to the back: the others have their turn first
            if not parts:
                return None, flight
            self._correlation_id += 1
            self._in_flight[self._correlation_id] = flight
            engine.figures.sent(self._node_id, flight.live(), flight.sent_ms / 1_000)
        head_request = log_pb2.ProduceRequest(
            correlation_id=self._correlation_id, acks=options.acks, timeout_ms=int(options.request_timeout_ms)
        )
        return Produce(head_request, parts), flight

    def _complete_unacknowledged(self, batches: list[Batch]) -> None:
        engine = self._engine
        callbacks: Callbacks = []
        with engine.lock:
            for batch in batches:
                batch.queue.on_accepted(batch)
                engine.complete(batch, callbacks)
        engine.finish(callbacks)

    async def _read(self, call: Any) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                code = await call.code()
                if code is not grpc.StatusCode.OK:
                    raise BrokerUnavailable(f"the stream ended: {code.name}: {await call.details()}")
                return
            self._on_response(response)

    def _on_response(self, response: log_pb2.ProduceResponse) -> None:
        engine = self._engine
        flight = self._in_flight.get(response.correlation_id)
        if flight is None or len(response.results) != len(flight.batches):
            raise BrokerUnavailable(f"an answer that fits no request: correlation id {response.correlation_id}")
        del self._in_flight[response.correlation_id]
        self._failures, self._failing_since_ms = 0, None
        now_ms = engine.now_ms()
        engine.figures.answered(self._node_id, now_ms - flight.sent_ms, now_ms / 1_000)
        callbacks: Callbacks = []
        halves: list[Batch] = []
        touched: dict[PartitionQueue, None] = {}
        with engine.lock:
            for batch, result in zip(flight.batches, response.results, strict=True):
                if batch is None:
                    continue
                queue = batch.queue
                touched[queue] = None
                if result.HasField("error") and result.error.code:
                    halves += engine.refused(batch, result.error, callbacks) or ()
                else:
                    queue.on_accepted(batch)
                    engine.complete(
                        batch, callbacks, base_offset=result.base_offset, append_time_ms=result.log_append_time_ms
                    )
            engine.settle(touched)
        if halves:
            engine.encode(halves)
        engine.finish(callbacks)
        self._ready.set()
