"""The producer's engine: batches go to the leaders, answers come back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from raftlog._client.connections import connections
from raftlog._client.gate import Identity, PartitionGate
from raftlog._client.gated_buffer import GatedBuffer
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S, MetadataCache
from raftlog._client.options import ProducerOptions
from raftlog._client.produce_stream import ProduceStream
from raftlog._client.producer_buffer import Callbacks, monotonic_ms
from raftlog._client.producer_ids import ProducerIds
from raftlog._client.refusals import CERTAIN, LEADER_ERRORS
from raftlog._client.refused_numbers import on_numbers_refused, on_transactional_numbers_refused
from raftlog._client.transactions import Transactions
from raftlog._core.batch import Batch
from raftlog._core.client_figures import Figures
from raftlog._core.partition_queue import PartitionQueue
from raftlog._core.topic_queues import Partitioner, TopicQueues
from raftlog.errors import (
    AuthorizationError,
    ChainBroken,
    ClosedError,
    DeliveryTimeout,
    FencedError,
    InvalidProducerEpoch,
    InvalidTxnState,
    LeaderNotAvailable,
    MessageTooLarge,
    RaftlogError,
    RetriableError,
    SequenceError,
    UnsupportedVersion,
    from_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2

_TICK_S: Final = 0.05
"""How often timeouts are looked at."""


class ProducerEngine(GatedBuffer):
    """Metadata, routing, and one stream for each broker. Everything here runs on the event loop.

    What follows a refusal: leader errors and broken streams send the batch again, in order and under a larger chain;
    a batch that is too large is halved; what the broker says of the numbers of an idempotent producer is judged by the
    queue; anything else ends its delivery.

    Given a `gate`, the producer is transactional: its numbers come from outside (`renumber`), a partition is written to
    once the gate is open, and everything it sends belongs to the transaction, or stage, that the numbers stand for.
    """

    def __init__(
        self,
        bootstrap: list[str],
        options: ProducerOptions,
        partitioner: Partitioner | None,
        loop: asyncio.AbstractEventLoop,
        *,
        gate: PartitionGate | None = None,
    ) -> None:
        super().__init__(options, loop)
        self.connections = connections(options.pem, options.sasl)
        self.metadata = MetadataCache(
            self.connections,
            bootstrap,
            max_age_ms=options.metadata_max_age_ms,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self.metadata.on_change(self._on_metadata)
        self.ids: Identity | None = None
        """None: the producer is not idempotent."""
        self.transactions: Transactions | None = None
        if options.transactional_id:
            assert gate is None
            gate = self.transactions = Transactions(self)
        if gate is not None:
            self.use_gate(gate)
            self.ids = self.given
        elif options.enable_idempotence:
            self.ids = ProducerIds(
                self.connections,
                self.metadata,
                options.pauses,
                on_here=self._on_producer_id,
                on_refused=self._on_no_producer_id,
            )
        self._without_id: dict[PartitionQueue, None] = {}
        self._partitioner = partitioner
        self._streams: dict[int, ProduceStream] = {}
        self._unrouted: dict[PartitionQueue, float] = {}
        self._pausing: dict[PartitionQueue, asyncio.TimerHandle] = {}
        self._linger_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None

    def trouble_of(self, queue: PartitionQueue) -> RaftlogError | None:
        """Return why nothing gets through to a partition, as far as that is known."""
        if self.metadata.last_error is None:
            leaderless = self.metadata.view.without_leader(TopicPartition(queue.topic, queue.partition))
            if leaderless is not None:
                return LeaderNotAvailable(leaderless)
        if queue.lacks_id and self.ids is not None and self.ids.last_error is not None:
            return self.ids.last_error
        if (shut := self.shut_by(queue)) is not None:
            return shut
        return queue.last_error or self.metadata.last_error

    def metrics(self) -> Figures:
        """Return what `Producer.metrics` does; from any thread."""
        streams = list(self._streams.copy().values())
        return self.figures.show(
            monotonic_ms() / 1_000,
            used_bytes=self.accumulator.used_bytes,
            buffer_bytes=self.options.buffer_memory,
            in_flight=sum(stream.requests_in_flight for stream in streams),
            connections=len(streams),
        )

    async def load_topic(self, topic: str) -> TopicQueues:
        """Return the queues of a topic, asking the cluster when it is not known.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: after `max.block.ms` at most.
        """
        if self.ids is not None:
            self.ids.want()
        view = await self.metadata.topic(topic, self.options.max_block_ms)
        with self.lock:
            self.check_open()
            queues = self.topics.get(topic)
            if queues is None:
                queues = self.topics[topic] = TopicQueues(view, self._partitioner, idempotent=self.ids is not None)
            return queues

    def _on_metadata(self) -> None:
        with self.lock:
            for topic, queues in self.topics.items():
                view = self.metadata.view.topics.get(topic)
                if view is not None and view.partitions:
                    queues.update(view)
            for queue in list(self._pausing):
                if self._leads_anew(queue):
                    self._resume(queue)
                else:
                    self._look_for_leader(queue)
            waiting, self._unrouted = self._unrouted, {}
            for queue, since_ms in waiting.items():
                self._route(queue, since_ms)
        for stream in list(self._streams.values()):  # they make others for what they give up
            stream.check_leaders()

    def _pump(self) -> None:
        """Encode what has lingered, route what is ready, set the timers."""
        self._wake_pending = False
        with self.lock:
            lingered = self.accumulator.close_lingered(monotonic_ms())
            self._drop_lean(lingered)
        if lingered:
            self.encode(lingered)
        with self.lock:
            ready, self.accumulator.ready = self.accumulator.ready, {}
            for queue in ready:
                if queue.sendable:
                    self._route(queue)
            self.ask_ahead()
            linger_ms = self.accumulator.next_linger_ms()
        if linger_ms is not None and self._linger_timer is None:
            delay_s = max(0.0, (linger_ms - monotonic_ms()) / 1000)
            self._linger_timer = self.loop.call_later(delay_s, self._on_linger)
        if self._tick_timer is None and self.accumulator.incomplete:
            self._tick_timer = self.loop.call_later(_TICK_S, self._tick)

    def _on_linger(self) -> None:
        self._linger_timer = None
        self._pump()

    def _route(self, queue: PartitionQueue, since_ms: float | None = None) -> None:
        """Hand the queue to its leader's stream; under the lock."""
        if self.gate is not None and not self.may_send(queue):
            return
        if queue.lacks_id and not self._give_id(queue):
            return
        leader = self.metadata.view.leader(queue.topic, queue.partition)
        if leader is None:
            self._unrouted[queue] = since_ms if since_ms is not None else monotonic_ms()
            self.request_refresh(self._unrouted[queue])
            return
        stream = self._streams.get(leader.broker_id)
        if stream is None:
            stream = self._streams[leader.broker_id] = ProduceStream(self, leader.broker_id)
        stream.add(queue)

    def _give_id(self, queue: PartitionQueue) -> bool:
        """Return whether there is a producer id for the queue; else it is routed once there is."""
        assert self.ids is not None
        if self.ids.current is None:
            self._without_id[queue] = None
            self.ids.want()
            return False
        queue.adopt(*self.ids.current)
        self.note_numbered(queue)
        return True

    def _on_producer_id(self) -> None:
        with self.lock:
            waiting, self._without_id = self._without_id, {}
            for queue in waiting:
                self.reroute(queue)

    def _on_no_producer_id(self, error: RaftlogError) -> None:
        """No broker will ever give one: say so to whoever waits for it."""
        if isinstance(error, UnsupportedVersion):
            error = UnsupportedVersion(f"{error}; enable.idempotence=false does without what this server does not have")
        with self.lock:
            waiting, self._without_id = self._without_id, {}
            failed = [batch for queue in waiting for batch in queue.take_out()]
            self._drop_lean(failed)
        self.fail(failed, error)

    def request_refresh(self, missing_since_ms: float, probe: int | None = None) -> None:
        """Look for changes of the cluster, without which something cannot go on since then."""
        waited_s = (monotonic_ms() - missing_since_ms) / 1000
        self.metadata.request_refresh(missing_since_s=self.loop.time() - waited_s, probe=probe)

    def reroute(self, queue: PartitionQueue) -> None:
        """Look again for the leader of a queue that has something to send, unless all of it has failed meanwhile: the
        gate would be asked for a partition that nobody wants any more. Under the lock."""
        if not all(batch.done for batch in queue.waiting):
            self._route(queue)

    def refused(self, batch: Batch, wire_error: common_pb2.Error, callbacks: Callbacks) -> tuple[Batch, Batch] | None:
        """Decide what becomes of a batch that the broker refused; under the lock. Returns halves to encode."""
        queue = batch.queue
        error = from_wire(wire_error)
        if wire_error.code in LEADER_ERRORS:
            self.metadata.learn(queue.topic, queue.partition, wire_error)
        if isinstance(error, ChainBroken):
            queue.on_refused(batch, resend=True, counts=False)
            return None
        if self.gate is not None and isinstance(error, (SequenceError, InvalidProducerEpoch, InvalidTxnState)):
            on_transactional_numbers_refused(self, batch, error, callbacks)
            return None
        if queue.numbering is not None and isinstance(error, (SequenceError, InvalidProducerEpoch)):
            assert self.ids is not None
            on_numbers_refused(self, self.ids, batch, error, callbacks)
            return None
        if isinstance(error, MessageTooLarge) and batch.count > 1 and not batch.done:
            return self._split(batch)
        if isinstance(error, (RetriableError, FencedError)):
            self.send_again(batch, error, callbacks)
            return None
        queue.on_refused(batch, resend=False, counts=False)
        self.complete(batch, callbacks, error=error)
        return None

    def send_again(self, batch: Batch, error: RaftlogError, callbacks: Callbacks) -> None:
        """Put a batch back that was refused or lost on the way, unless its retries are used up; under the lock."""
        batch.failures += 1
        batch.in_doubt |= error.code not in CERTAIN
        batch.queue.note_failure(error)
        again = batch.failures <= self.options.retries
        if again:
            self.figures.retried(batch, monotonic_ms() / 1_000)
        batch.queue.on_refused(batch, resend=again, counts=True)
        if not again:
            self.complete(batch, callbacks, error=error)

    def _split(self, batch: Batch) -> tuple[Batch, Batch]:
        left, right = self.accumulator.split(batch)
        self.figures.split(monotonic_ms() / 1_000)

        def joined() -> None:
            callbacks: Callbacks = []
            with self.lock:
                if left.done and right.done:
                    self.complete(batch, callbacks, base_offset=left.base_offset, error=left.error or right.error)
            self.finish(callbacks)

        left.callbacks, right.callbacks = [joined], [joined]
        return left, right

    def settle(self, queues: Iterable[PartitionQueue]) -> None:
        """Let queues go on after answers, in order, after a pause when the broker had a reason; under the lock."""
        for queue in queues:
            if queue.recovered():
                if queue.failures and not self._leads_anew(queue):
                    pause_ms = self.options.pauses.after_ms(queue.last_error, queue.failures)
                    now_ms = monotonic_ms()
                    queue.not_before_ms = now_ms + pause_ms
                    queue.refused_since_ms = queue.refused_since_ms or now_ms
                    self._pausing[queue] = self.loop.call_later(pause_ms / 1000, self._after_pause, queue)
                    self._look_for_leader(queue)
                    continue
                self._resume(queue)
            elif queue.waiting and not queue.in_flight:
                self.reroute(queue)
        if self.accumulator.crowded:
            self.wake()

    def _leads_anew(self, queue: PartitionQueue) -> bool:
        """Whether a leader is known of a later epoch than the one that refused: it is asked at once (KIP-951)."""
        view = self.metadata.view.partition(TopicPartition(queue.topic, queue.partition))
        return view is not None and view.leader >= 0 and view.leader_epoch > queue.sent_epoch

    def _look_for_leader(self, queue: PartitionQueue) -> None:
        """If the queue pauses because of who leads, look who does; the pause ends with that."""
        if queue.refused_since_ms is not None and getattr(queue.last_error, "code", None) in LEADER_ERRORS:
            self.request_refresh(queue.refused_since_ms)

    def _resume(self, queue: PartitionQueue) -> None:
        pause = self._pausing.pop(queue, None)
        if pause is not None:
            pause.cancel()
        if self._leads_anew(queue):
            queue.forgive()
        self.reroute(queue)

    def _after_pause(self, queue: PartitionQueue) -> None:
        with self.lock:
            self._pausing.pop(queue, None)
            queue.not_before_ms = 0.0  # whatever the clock says: timers may fire a little early
            self.reroute(queue)

    def _tick(self) -> None:
        """Look at deadlines; runs only while something is incomplete."""
        self._tick_timer = None
        callbacks: Callbacks = []
        now_ms = monotonic_ms()
        with self.lock:
            for batch in list(self.accumulator.expired(now_ms)):
                queue = batch.queue
                reason = self.trouble_of(queue)
                fate = (
                    "may or may not be in the log"
                    if batch.sent
                    else "are certainly not in the log, they were never sent"
                )
                error = DeliveryTimeout(
                    f"{queue}: no acknowledgement within delivery.timeout.ms={self.options.delivery_timeout_ms}; the "
                    f"records {fate}" + (f"; last error: {reason}" if reason else "")
                )
                if queue.open is batch:
                    self.accumulator.close(batch)
                    self._drop_lean((batch,))
                self.complete(batch, callbacks, error=error)
            for queue, since_ms in list(self._unrouted.items()):
                missing = self.metadata.view.missing.get(queue.topic)
                grace_ms = 0.0 if isinstance(missing, AuthorizationError) else UNKNOWN_TOPIC_GRACE_S * 1000
                if missing is not None and now_ms - since_ms > grace_ms:
                    del self._unrouted[queue]
                    self._drop_topic(queue.topic)
                    for batch in queue.take_out():
                        self.complete(batch, callbacks, error=missing)
                else:
                    self.request_refresh(since_ms)
            again = bool(self.accumulator.incomplete)
        self.finish(callbacks)
        for stream in list(self._streams.values()):  # they make others for what they give up
            stream.check_silence(now_ms)
        if self.accumulator.crowded:
            self._pump()
        if again and self._tick_timer is None:
            self._tick_timer = self.loop.call_later(_TICK_S, self._tick)

    def _drop_topic(self, topic: str) -> None:
        """Let the queues of a topic go that is not there; under the lock.

        Should it be there after all, its new queues must not begin with the numbers that the old ones have used: what
        they send would be taken for duplicates.
        """
        queues = self.topics.pop(topic, None)
        self.lean.pop(topic, None)
        if queues is not None and self.ids is not None:
            for queue in queues.queues:
                if queue.numbering is not None and queue.numbering.has_id:
                    self.ids.retire(queue.numbering.upcoming.producer_id)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task on the engine's loop."""
        return self.loop.create_task(work)

    async def drain(self) -> None:
        """As `ProducerBuffer.drain`; a transaction that nobody can commit any more is left for `close` to abort."""
        if self.transactions is None:
            await super().drain()

    async def close(self, timeout: float | None = None) -> None:
        """Stop: whatever is not acknowledged ends with `ClosedError`. Flush before, if that is wanted.

        `timeout` seconds at most to abort a transaction that is open; a few by default.
        """
        if self.transactions is not None:
            await self.transactions.close(timeout)
        self.closed = self.closed or ClosedError("the producer is closed")
        for timer in (self._linger_timer, self._tick_timer, *self._pausing.values()):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*(stream.close() for stream in self._streams.values()), return_exceptions=True)
        with self.lock:
            self.lean.clear()
            left = list(self.accumulator.incomplete)
        self.fail(left, ClosedError("the producer was closed before the record was acknowledged"))
        with self.lock:
            self.ring_for_room()
        if self.ids is not None:
            await self.ids.close()
        await self.metadata.close()
        await self.connections.close()
