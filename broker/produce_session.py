"""One `Log.Produce` stream: requests in, answers out by correlation id, order kept per partition.

Permissions (KIP-11): each part needs WRITE of its topic. A transactional batch needs WRITE of a transactional id
besides. Kafka's produce request names the id and the broker checks that one, which a client may choose among those that
it may write; this protocol's parts carry producer id and epoch alone, so WRITE of any transactional id is asked for.
The very id is checked where it is known: by the coordinator's calls, which give out producer ids and add partitions.
As in Kafka before KIP-890's second part, who may write a topic may write there under the producer id of somebody else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from functools import partial
from typing import Final, Protocol

from broker.internal_topics import refuse_internal
from broker.partition import TOPIC_ID_BYTES
from broker.registry import PartitionRegistry
from broker.security.caller import EVERYTHING_ALLOWED, Caller
from broker.security.decisions import Decisions
from raftlog._core.traceparent import MAX_TRACES
from raftlog.errors import BrokerOverloaded, ChainBroken, DuplicateSequence, RaftlogError, RequestTimedOut, to_wire
from raftlog.format import BatchHeader, checking_cost_bytes
from raftlog.format.header import says_transactional
from raftlog.v1 import log_pb2
from raftlog.v1.security_pb2 import Acl
from raftlog.wire import Produce, ProducePart
from replication.pending_acks import Answer

logger = logging.getLogger(__name__)

MAX_BROKEN_CHAINS: Final = 16_384
"""Partitions with a refused batch that one stream may have: a bound on memory, not on any sane client."""


CHECK_ON_LOOP_BYTES: Final = 4 << 20
"""Checking so many bytes takes a few milliseconds; the event loop is not to be held up for more than ten."""

Checked = dict[int, BatchHeader | RaftlogError]
"""Outcome for batches, by their place in the request, that were checked ahead."""


class ResponseWriter(Protocol):
    """The part of a gRPC context that a session needs."""

    async def write(self, message: log_pb2.ProduceResponse) -> None:
        """Send one message; returns when the transport has taken it."""
        ...


class _Request:
    """Answers still owed for one request; when the last one is in, the response goes out."""

    __slots__ = ("appended_s", "arrived_s", "begun_s", "complete_s", "missing", "open", "response", "timer")

    def __init__(self, correlation_id: int, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.begun_s = self.appended_s = self.complete_s = time.monotonic()
        self.response = log_pb2.ProduceResponse(correlation_id=correlation_id)
        self.open: list[Answer] = []
        self.missing = 0
        self.timer: asyncio.TimerHandle | None = None


class ProduceSession:
    """State of one stream.

    Bounded: at most `max_in_flight` requests are unanswered, then reading stops and the transport's flow control
    holds the client back. A batch is appended as soon as it is read, so a session keeps no payload.
    """

    def __init__(
        self,
        registry: PartitionRegistry,
        disk: Executor,
        *,
        max_in_flight: int,
        default_timeout_ms: int,
        who: Caller = EVERYTHING_ALLOWED,
    ) -> None:
        self._registry = registry
        self._disk = disk
        self._max_in_flight = max_in_flight
        self._default_timeout_ms = default_timeout_ms
        self._in_flight = 0
        self._failure: RaftlogError | None = None
        self._lease = registry.lease
        self._counters = registry.counters
        self._requests = registry.counters.request("Produce")
        self._answers: deque[_Request] = deque()
        self._held: list[_Request] = []
        self._answer_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._broken_chains: dict[tuple[bytes, int], int] = {}
        self._topics = Decisions.of(who, Acl.WRITE, Acl.TOPIC)
        self._transactional_ids = Decisions.of(who, Acl.WRITE, Acl.TRANSACTIONAL_ID)

    async def run(self, requests: AsyncIterator[Produce], writer: ResponseWriter) -> None:
        """Serve the stream until the client ends it and has all its answers."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while True:
                while self._answers:
                    owed = self._answers.popleft()
                    if not self._lease.valid() and _acknowledges(owed.response):
                        self._hold(owed)
                        continue
                    try:
                        await writer.write(owed.response)
                    finally:  # a client that has its answer may leave before we hear that it went out
                        self._count(owed)
                    self._counters.produces_unanswered -= 1
                    self._in_flight -= 1  # only now: a client that does not read its answers holds none of our memory
                    self._room.set()
                if self._failure is not None:
                    raise self._failure
                if reader.done():
                    reader.result()  # a client that broke the protocol hears of it now, whatever it is still owed
                    if not self._in_flight:
                        break
                self._answer_ready.clear()
                await self._answer_ready.wait()
        finally:
            reader.cancel()
            self._counters.produces_unanswered -= self._in_flight
            self._in_flight = 0
            self._lease.stop_waiting(self._release_held)

    def _count(self, owed: _Request) -> None:
        """Count a request that was answered, and how long each stage took."""
        now_s = time.monotonic()
        stages = self._requests.stages
        stages["queue"].observe(owed.begun_s - owed.arrived_s)
        stages["local"].observe(owed.appended_s - owed.begun_s)
        stages["remote"].observe(max(0.0, owed.complete_s - owed.appended_s))
        stages["response"].observe(now_s - max(owed.complete_s, owed.appended_s))
        stages["total"].observe(now_s - owed.arrived_s)

    def _hold(self, owed: _Request) -> None:
        """Keep an acknowledgement that was decided on while there was a lease, from before a pause: it stays true."""
        self._held.append(owed)
        self._lease.call_when_renewed(self._release_held)

    def _release_held(self) -> None:
        self._answers.extendleft(reversed(self._held))
        self._held.clear()
        self._answer_ready.set()

    async def _read(self, requests: AsyncIterator[Produce]) -> None:
        try:
            async for request in requests:
                arrived_s = time.monotonic()
                self._handle(request, await self._check_heavy(request), arrived_s)
                del request  # the payload is in the log; an idle stream must not keep it
                while self._in_flight >= self._max_in_flight:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._answer_ready.set()

    async def _check_heavy(self, request: Produce) -> Checked:
        """Check batches that would hold the event loop up off it; what comes later on this stream waits meanwhile."""
        checked: Checked = {}
        for number, part in enumerate(request.parts):
            if checking_cost_bytes(part.records) <= CHECK_ON_LOOP_BYTES:
                continue
            try:
                self._check_permissions(part)
                partition = self._registry.find(part.head.topic_id, part.head.partition)
                loop = asyncio.get_running_loop()
                checked[number] = await loop.run_in_executor(self._disk, partition.check, part.records)
            except RaftlogError as error:
                checked[number] = error
        return checked

    def _handle(self, request: Produce, checked: Checked, arrived_s: float) -> None:
        head = request.head
        if head.acks == log_pb2.NO_ACK:
            for number, part in enumerate(request.parts):
                try:
                    self._append(part, None, log_pb2.NO_ACK, checked.get(number))
                    self._requests.outcomes["NONE"] += 1
                except RaftlogError as error:
                    self._requests.outcomes[type(error).__name__] += 1
                    logger.debug("acks=0 batch refused: %s", error)
            return
        owed = _Request(head.correlation_id, arrived_s)
        owed.missing = len(request.parts)
        self._in_flight += 1
        self._counters.produces_unanswered += 1
        if not owed.missing:
            self._finish(owed)
            return
        for number, part in enumerate(request.parts):
            self._serve(part, owed, head.acks, checked.get(number))
        owed.appended_s = time.monotonic()
        if owed.missing:
            timeout_ms = head.timeout_ms or self._default_timeout_ms
            loop = asyncio.get_running_loop()
            owed.timer = loop.call_later(timeout_ms / 1000, self._time_out, owed, timeout_ms)

    def _serve(self, part: ProducePart, owed: _Request, acks: int, checked: BatchHeader | RaftlogError | None) -> None:
        result = owed.response.results.add()
        key = (part.head.topic_id, part.head.partition)
        chain = part.head.chain
        answered = False

        # Holds no reference to `part`: while an answer is owed, the payload must be free to go.
        def answer(error: BaseException | None) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            self._requests.outcomes["NONE" if error is None else type(error).__name__] += 1
            if error is not None:
                result.Clear()
                result.error.CopyFrom(to_wire(error))
                result.base_offset = -1
                if not isinstance(error, DuplicateSequence):  # that one says that the batch is in the log
                    self._break_chain(key, chain)
            owed.missing -= 1
            if not owed.missing:
                self._finish(owed)

        try:
            base_offset, append_time_ms, log_start_offset = self._append(part, answer, acks, checked)
        except RaftlogError as error:
            answer(error)
        except Exception as error:  # a bug in one append must not take the client's other partitions down
            logger.exception("produce to %s-%d failed", key[0].hex(), key[1])
            answer(error)
        else:
            # The answer may have come already; the response is serialized later, by the writer's task.
            if not result.HasField("error"):
                result.base_offset = base_offset
                result.log_append_time_ms = append_time_ms
                result.log_start_offset = log_start_offset
            if not answered:
                owed.open.append(answer)

    def _append(
        self, part: ProducePart, answer: Answer | None, acks: int, checked: BatchHeader | RaftlogError | None
    ) -> tuple[int, int, int]:
        head = part.head
        key = (head.topic_id, head.partition)
        if self._broken_chains and head.chain <= self._broken_chains.get(key, -1):
            raise ChainBroken(
                f"a batch before this one was refused in chain {head.chain}; "
                "send both again, in order, in a larger chain"
            )
        if self._topics is not None:
            self._check_permissions(part)
        if isinstance(checked, RaftlogError):
            raise checked
        partition = self._registry.find(*key)
        if partition.is_internal:
            refuse_internal(partition.log.topic, "not written to by clients")
        counted, end_offset = self._counters.topic(partition.log.topic), partition.log_end_offset
        append = partition.append
        if partition.traces is not None and head.traceparents:
            append = partial(partition.traces.append, partition, head.traceparents[:MAX_TRACES])
        try:
            base_offset, append_time_ms = append(
                part.records, head.leader_epoch, answer, all_replicas=acks == log_pb2.ALL, checked=checked
            )
        except RaftlogError:
            counted.failed_produces += 1
            raise
        appended = partition.log_end_offset - end_offset  # nothing, of a batch that was there already
        counted.records_in += appended
        counted.bytes_in += len(part.records) if appended else 0
        return base_offset, append_time_ms, partition.log.log_start_offset

    def _check_permissions(self, part: ProducePart) -> None:
        """Check what this part needs; a topic that is not known here is left to `find`.

        Raises:
            AuthorizationError: the client may not write this.
        """
        if self._topics is None or self._transactional_ids is None:
            return
        topic = self._registry.topic_name(part.head.topic_id, part.head.partition)
        if topic is not None:
            self._topics.check(topic)
        if says_transactional(part.records):
            self._transactional_ids.check_any()

    def _break_chain(self, key: tuple[bytes, int], chain: int) -> None:
        if len(key[0]) != TOPIC_ID_BYTES:
            return  # there is no such partition, so there is no order to keep
        if key not in self._broken_chains and len(self._broken_chains) >= MAX_BROKEN_CHAINS:
            # Not raised here: this may run inside a partition that is answering others, too.
            self._failure = BrokerOverloaded(
                f"more than {MAX_BROKEN_CHAINS} partitions of one stream were refused; open a new one"
            )
            self._answer_ready.set()
            return
        self._broken_chains[key] = max(chain, self._broken_chains.get(key, 0))

    def _time_out(self, owed: _Request, timeout_ms: int) -> None:
        error = RequestTimedOut(
            f"not held by every in-sync replica within {timeout_ms} ms; the records are in the log and may yet be"
        )
        for answer in owed.open:
            answer(error)

    def _finish(self, owed: _Request) -> None:
        if owed.timer is not None:
            owed.timer.cancel()
        owed.open.clear()
        owed.complete_s = time.monotonic()
        self._answers.append(owed)
        self._answer_ready.set()


def _acknowledges(response: log_pb2.ProduceResponse) -> bool:
    return not all(result.HasField("error") for result in response.results)
