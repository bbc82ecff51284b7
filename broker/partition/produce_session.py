"""One `Log.Produce` stream: requests in, answers out by correlation id, order kept per partition.

Permissions (KIP-11): each part needs WRITE of its topic. A transactional batch also needs WRITE of the transactional
id, or the sink, that the request names. `ProducerChecks` (`broker/coordinator/transactions/verifier.py`) decides which
producer ids the client may use; the batches of a stream wait while a transaction's coordinator is asked.

Quotas (KIP-13, KIP-124): a message is served and then charged, with the time that its checks took in other threads.
Its responses carry the rest of the delay, and the next message is not read before the delay is over.

A message may have 10,000 batches, each of which inflates to a thousand times its size. So the streams of a broker share
the turns of the event loop, and what a message inflates beyond some MiB is checked in threads (`HeavyWork`,
docs/adr/0051).

With `many` the stream belongs to several producers of one client (docs/adr/0040): a message has requests of several of
them, each with its lane, and a message to the client has all answers that are ready.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from broker.coordinator.internal_topics import refuse_internal
from broker.coordinator.transactions.verifier import ProducerChecks
from broker.log.producer_state import REMEMBERED_BATCHES
from broker.partition.partition import Partition, append_for_client
from broker.quotas.heavy_work import HeavyWork, forgetful
from broker.quotas.manager import Meter, QuotaManager, charged_to, whole_ms
from broker.replicas.replica_manager import TOPIC_ID_BYTES, ReplicaManager
from broker.security.caller import EVERYTHING_ALLOWED, Caller, Decisions
from broker.turns import SharedTurns
from raftlog.errors import (
    BrokerOverloaded,
    ChainBroken,
    DuplicateSequence,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    ThrottlingQuotaExceeded,
    to_wire,
)
from raftlog.format import BatchHeader, Buffer, checking_cost_bytes
from raftlog.format.header import says_transactional
from raftlog.format.wire import MANY_REQUESTS, MAX_PRODUCERS, Decoding, Produce, ProducePart
from raftlog.v1 import log_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.quotas import PRODUCER_BYTE_RATE
from replication.high_watermark import Answer

logger = logging.getLogger(__name__)

MAX_BROKEN_CHAINS: Final = 16_384
"""Partitions with a refused batch that one stream may have; bounds memory, and no ordinary client reaches it."""
MAX_LANES: Final = 10 * MAX_PRODUCERS
"""Producers of one stream of which the client has not said that they have left; bounds memory likewise."""
TURN_BYTES: Final = 8 << 20
"""What all streams of a broker append and check in one turn of the event loop: a few milliseconds."""
BATCH_COST_BYTES: Final = 32 << 10
"""To append a batch takes as long as so many bytes, beside its own."""
CHECK_ON_LOOP_BYTES: Final = 4 << 20
"""Checking this many bytes takes a few milliseconds; nothing may block the event loop for more than ten. Neither a
batch nor what all compressed batches of a message inflate to is checked on the event loop beyond it."""
PIECE_BYTES: Final = TURN_BYTES // 4
"""What a stream appends before it looks whether others wait for a turn."""
LOOK_AT_A_TIME: Final = 256
"""Batches of a request whose headers are looked at in one go, 2 us each."""

Checked = dict[int, BatchHeader | RaftlogError]
"""Results of batches that were checked off the event loop, by their place in the request."""

_Unchecked = list[tuple[int, Partition, Buffer]]
"""Batches that one job is to check, with their places in the request."""

_Chains = dict[tuple[bytes, int], int]
"""Of one lane, by topic id and partition: the largest chain in which a batch was refused, until a larger one comes."""

Message = TypeVar("Message", contravariant=True)
T = TypeVar("T")


_MESSAGE_RESULTS: Final = 1_000
"""Answers go into one message until they have about so many results, so that no client's answers hold the loop up."""


class ResponseWriter(Protocol[Message]):
    """The part of a gRPC context that a session needs to send its messages."""

    async def write(self, message: Message, /) -> None:
        """Send one message; returns once the transport has accepted it."""
        ...


class _Request:
    """One request and its response, which is sent once no part's answer is missing; with acks=0, if one is an error."""

    __slots__ = (
        "appended_s",
        "arrived_s",
        "begun_s",
        "complete_s",
        "held_until_ms",
        "is_acknowledged",
        "missing",
        "open",
        "response",
        "timeout_ms",
    )

    def __init__(self, request: Produce, arrived_s: float, default_timeout_ms: int) -> None:
        head = request.head
        self.arrived_s = arrived_s
        self.begun_s = self.appended_s = self.complete_s = time.monotonic()
        self.response = log_pb2.ProduceResponse(correlation_id=head.correlation_id)
        self.open: list[Answer] = []
        self.missing = len(request.parts)
        self.is_acknowledged = head.acks != log_pb2.NO_ACK
        self.timeout_ms = head.timeout_ms or default_timeout_ms
        self.held_until_ms = 0.0
        """When the client's next request is read; 0: at once."""


class ProduceSession:
    """State of one stream.

    Bounded: with `max_in_flight` requests unanswered the session stops reading, and the transport's flow control
    slows the client down. A batch is appended as soon as it is read, so a session keeps no payload.
    """

    def __init__(
        self,
        replica_manager: ReplicaManager,
        turns: SharedTurns,
        heavy_work: HeavyWork,
        *,
        max_in_flight: int,
        default_timeout_ms: int,
        who: Caller = EVERYTHING_ALLOWED,
        producers: ProducerChecks | None = None,
        quotas: QuotaManager | None = None,
        many: bool = False,
    ) -> None:
        """`turns`, of TURN_BYTES, and `heavy_work` are shared by all streams of the broker.

        `producers`: None accepts every producer id; `quotas`: None limits no rate. A broker always has both.
        `many`: the client may send several requests in a message, and reads several answers in one.
        """
        self.was_used = False
        """Whether a batch came, be it refused."""
        self._many = many
        self._who = who
        self._quotas = quotas
        self._account = None if quotas is None else quotas.account(who, PRODUCER_BYTE_RATE)
        self._replica_manager = replica_manager
        self._turns = turns
        self._heavy_work = heavy_work
        self._share = who.share
        """The name of whose share of the broker's work this client takes."""
        self._admit_producer = partial(replica_manager.new_producers.admit, who.share)
        # Of the present message:
        self._size_bytes = 0
        self._inflated_bytes = 0
        """What it has inflated on the event loop."""
        self._checking = Meter()
        """The time that its checks in threads have taken."""
        self._waited_s = 0.0
        """How long it has waited for others, so that the event loop did other work."""
        # So that no producer of a shared stream waits for another one's answers, whatever the configured number.
        self._max_in_flight = max(max_in_flight, MAX_PRODUCERS * REMEMBERED_BATCHES) if many else max_in_flight
        self._default_timeout_ms = default_timeout_ms
        self._in_flight = 0
        self._failure: RaftlogError | None = None
        self._turned_out: ThrottlingQuotaExceeded | None = None
        self._lease = replica_manager.lease
        self._counters = replica_manager.counters
        self._requests = replica_manager.counters.request("Produce")
        self._answers: deque[_Request] = deque()
        self._withheld: list[_Request] = []
        self._answer_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._lanes: dict[int, _Chains] = {}
        self._unanswered: dict[_Request, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._times_out_s = math.inf
        """When `_timer` fires."""
        self._topics = Decisions.of(who, Acl.WRITE, Acl.TOPIC)
        self._producers = producers

    async def run(
        self, requests: AsyncIterator[Produce | Decoding], writer: ResponseWriter[log_pb2.ProduceResponse]
    ) -> None:
        """Serve the stream until the client ends it and has all its answers.

        Raises:
            ThrottlingQuotaExceeded: the client is over a quota, and too many streams wait for that already.
        """
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while True:
                while ready := self._take_ready():
                    message = ready[0].response
                    message.more.extend(owed.response for owed in ready[1:])
                    try:
                        await writer.write(message)
                    finally:  # a client may leave as soon as it has its answer, before `write` returns
                        self._count(ready)
                    self._counters.produces_unanswered -= len(ready)
                    self._in_flight -= len(ready)  # only now, so that a client that reads no answers is bounded too
                    self._room.set()
                if self._failure is not None:
                    raise self._failure
                if reader.done():
                    reader.result()  # ends the stream at once if the client broke the protocol
                    if not self._in_flight:
                        break
                self._answer_ready.clear()
                await self._answer_ready.wait()
            if self._turned_out is not None:
                raise self._turned_out
        finally:
            reader.cancel()
            self._counters.produces_unanswered -= self._in_flight
            self._in_flight = 0
            self._lease.stop_waiting(self._release_withheld)
            if self._timer is not None:
                self._timer.cancel()

    def _take_ready(self) -> list[_Request]:
        """Return the answers of the next message: what may go now and fits it, or without `many` the first of them."""
        ready: list[_Request] = []
        results = 0
        while self._answers and (not ready or (self._many and results < _MESSAGE_RESULTS)):
            owed = self._answers.popleft()
            if not self._lease.valid() and _acknowledges(owed.response):
                self._withheld.append(owed)  # decided under an earlier lease, it stays true
                self._lease.call_when_renewed(self._release_withheld)
                continue
            if owed.held_until_ms:
                owed.response.throttle_time_ms = self._left_ms(owed.held_until_ms)
            ready.append(owed)
            results += len(owed.response.results)
        return ready

    def _count(self, answered: Iterable[_Request]) -> None:
        """Count answered requests, and how long each stage took."""
        now_s = time.monotonic()
        stages = self._requests.stages
        for owed in answered:
            stages["queue"].observe(owed.begun_s - owed.arrived_s)
            stages["local"].observe(owed.appended_s - owed.begun_s)
            stages["remote"].observe(max(0.0, owed.complete_s - owed.appended_s))
            stages["response"].observe(now_s - max(owed.complete_s, owed.appended_s))
            stages["total"].observe(now_s - owed.arrived_s)

    def _release_withheld(self) -> None:
        self._answers.extendleft(reversed(self._withheld))
        self._withheld.clear()
        self._answer_ready.set()

    async def _read(self, requests: AsyncIterator[Produce | Decoding]) -> None:
        try:
            key, delay_ms = ("", 0.0) if self._account is None else self._account.charge(0, 0.0)
            if delay_ms > 0:  # an earlier stream's debt, which a new one does not end
                await self._hold(key, delay_ms)
            async for begun in requests:
                message = begun if isinstance(begun, Produce) else await self._decoded(begun)
                del begun
                if message.more and not self._many:
                    raise InvalidRequestError(
                        "a message with several requests came on a call whose metadata lacks "
                        f"{': '.join(MANY_REQUESTS)}"
                    )
                arrived_s = time.monotonic()
                self._size_bytes = self._inflated_bytes = 0
                self._checking.ms = self._waited_s = 0.0
                owing: list[_Request] = []
                for lane in message.head.left_lanes:
                    self._lanes.pop(lane, None)  # from now on only answers that are owed refer to its chains
                for request in (message, *message.more):
                    self.was_used = self.was_used or bool(request.parts)
                    costs, checked = await self._check_ahead(request)
                    owing.append(await self._handle(request, costs, checked, arrived_s))
                del message, request  # frees the payload, which an idle stream would keep otherwise
                if self._account is not None:
                    worked_s = time.monotonic() - arrived_s - self._waited_s
                    key, delay_ms = self._account.charge(self._size_bytes, worked_s * 1_000 + self._checking.ms)
                if delay_ms > 0:
                    self._note_delay(owing, delay_ms)
                    await self._hold(key, delay_ms)
                del owing  # and the answers
                while self._in_flight >= self._max_in_flight:
                    self._room.clear()
                    await self._room.wait()
        except ThrottlingQuotaExceeded as error:
            self._turned_out = error  # once its answers have left
        finally:
            self._answer_ready.set()

    async def _decoded(self, decoding: Decoding) -> Produce:
        """Return a message of many batches, decoded in several turns. Raises InvalidRequestError: it is none."""
        while True:
            await self._turn(TURN_BYTES // 4)
            try:
                next(decoding)
            except StopIteration as end:
                message: Produce = end.value
                return message

    async def _hold(self, key: str, delay_ms: float) -> None:
        """Leave the stream unread for this time. Raises ThrottlingQuotaExceeded: too many are already."""
        assert self._quotas is not None, "without quotas there is no delay"
        await self._quotas.hold_unread(self._who, key, delay_ms)

    def _note_delay(self, owing: Iterable[_Request], delay_ms: float) -> None:
        """Have the answers say that the client's next message is not read for this time."""
        assert self._quotas is not None, "without quotas there is no delay"
        for owed in owing:
            owed.held_until_ms = self._quotas.now_ms() + delay_ms

    def _left_ms(self, until_ms: float) -> int:
        assert self._quotas is not None, "without quotas there is no delay"
        return whole_ms(until_ms - self._quotas.now_ms())

    async def _check_ahead(self, request: Produce) -> tuple[list[int], Checked]:
        """Check large batches off the event loop, and transactions with their coordinators.

        Later requests of this stream wait meanwhile. Return what each batch costs the event loop, and the results.
        """
        costs: list[int] = []
        checked: Checked = {}
        unchecked: _Unchecked = []
        checking_bytes = 0
        producers = self._producers
        for number, part in enumerate(request.parts):
            if number % LOOK_AT_A_TIME == LOOK_AT_A_TIME - 1:
                await self._turn(TURN_BYTES // 8)
            records = part.records
            self._size_bytes += len(records)
            cost_bytes = checking_cost_bytes(records)
            inflated_bytes = self._inflated_bytes + cost_bytes - len(records)
            is_heavy = cost_bytes > CHECK_ON_LOOP_BYTES or inflated_bytes > CHECK_ON_LOOP_BYTES
            is_transactional = producers is not None and says_transactional(records)
            if is_heavy:
                costs.append(BATCH_COST_BYTES + len(records))
            else:
                costs.append(BATCH_COST_BYTES + cost_bytes)
                self._inflated_bytes = inflated_bytes
                if not is_transactional:
                    continue
            try:
                self._check_permissions(request.head, part)
                partition = self._replica_manager.find(part.head.topic_id, part.head.partition)
                if producers is not None and is_transactional:
                    await self._waiting(producers.verify(request.head, records, partition))
            except RaftlogError as error:
                checked[number] = error
                continue
            if is_heavy:
                unchecked.append((number, partition, records))
                checking_bytes += cost_bytes
                if checking_bytes > CHECK_ON_LOOP_BYTES:
                    await self._check_elsewhere(unchecked, checking_bytes, checked)
                    unchecked, checking_bytes = [], 0
        if unchecked:
            await self._check_elsewhere(unchecked, checking_bytes, checked)
        return costs, checked

    async def _check_elsewhere(self, unchecked: _Unchecked, size_bytes: int, checked: Checked) -> None:
        """Add the results of these batches, which a thread checks."""
        with charged_to(self._checking):
            checking = self._heavy_work.check(self._share, size_bytes, _check, unchecked)
            checked.update(await self._waiting(checking))

    async def _turn(self, cost_bytes: int) -> None:
        """Wait until the event loop may do this much work."""
        if not self._turns.take(cost_bytes):
            await self._waiting(self._turns.wait(self._share, cost_bytes))

    async def _waiting(self, work: Awaitable[T]) -> T:
        """Return the result of work that others do; the wait for it is no time of this message."""
        begun_s = time.monotonic()
        try:
            return await work
        finally:
            self._waited_s += time.monotonic() - begun_s

    async def _handle(self, request: Produce, costs: list[int], checked: Checked, arrived_s: float) -> _Request:
        """Append the batches of a request, in as many turns as they cost."""
        owed = _Request(request, arrived_s, self._default_timeout_ms)
        self._in_flight += 1
        self._counters.produces_unanswered += 1
        if not owed.missing:
            self._finish(owed)
            return owed
        for piece, cost_bytes in _pieces(costs):
            await self._turn(cost_bytes)
            for number in piece:
                self._serve(request.parts[number], owed, request.head, checked.get(number))
        owed.appended_s = time.monotonic()
        if owed.missing:
            self._unanswered[owed] = None
            self._time_out_by(owed.begun_s + owed.timeout_ms / 1_000)
        return owed

    def _serve(
        self,
        part: ProducePart,
        owed: _Request,
        request: log_pb2.ProduceRequest,
        checked: BatchHeader | RaftlogError | None,
    ) -> None:
        result = owed.response.results.add()
        key = (part.head.topic_id, part.head.partition)
        chain = part.head.chain
        chains = self._chains_of(request.lane)
        answered = False

        # Refers to no `part`: its payload must be freed while the answer is owed.
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
                if owed.is_acknowledged and not isinstance(error, DuplicateSequence):  # then the batch is in the log
                    self._break_chain(chains, key, chain)
            owed.missing -= 1
            if not owed.missing:
                self._finish(owed)

        try:
            to_answer = answer if owed.is_acknowledged else None
            base_offset, append_time_ms, log_start_offset = self._append(part, to_answer, request, chains, checked)
        except RaftlogError as error:
            answer(error)
        except Exception as error:  # a bug in one append must not take the client's other partitions down
            logger.exception("produce to %s-%d failed", key[0].hex(), key[1])
            answer(error)
        else:
            if not owed.is_acknowledged:
                result.base_offset = -1
                answer(None)
            elif not result.HasField("error"):
                # The answer may have come already; `run` serializes the response later.
                result.base_offset = base_offset
                result.log_append_time_ms = append_time_ms
                result.log_start_offset = log_start_offset
            if not answered:
                owed.open.append(answer)

    def _append(
        self,
        part: ProducePart,
        answer: Answer | None,
        request: log_pb2.ProduceRequest,
        chains: _Chains,
        checked: BatchHeader | RaftlogError | None,
    ) -> tuple[int, int, int]:
        head = part.head
        if chains:
            key = (head.topic_id, head.partition)
            if head.chain <= chains.get(key, -1):
                raise ChainBroken(
                    f"a batch before this one was refused in chain {head.chain}; "
                    "send both again, in order, in a larger chain"
                )
            chains.pop(key, None)
        self._check_permissions(request, part)
        if isinstance(checked, RaftlogError):
            raise checked
        partition = self._replica_manager.find(head.topic_id, head.partition)
        if partition.is_internal:
            refuse_internal(partition.log.topic, "not written to by clients")
        base_offset, append_time_ms = append_for_client(
            partition,
            self._counters.topic(partition.log.topic),
            head.traceparents,
            part.records,
            head.leader_epoch,
            answer,
            all_replicas=request.acks == log_pb2.ALL,
            checked=checked,
            admit_producer=self._admit_producer,
        )
        return base_offset, append_time_ms, partition.log.log_start_offset

    def _check_permissions(self, request: log_pb2.ProduceRequest, part: ProducePart) -> None:
        """Check the permissions that this part needs; an unknown topic is left to `find`.

        Raises:
            AuthorizationError: the client may not write the topic, or as the owner of the transaction.
            RaftlogError: as `ProducerChecks.check`.
        """
        if self._topics is not None:
            topic = self._replica_manager.topic_name(part.head.topic_id, part.head.partition)
            if topic is not None:
                self._topics.check(topic, part.head.topic_id)
        if self._producers is not None:
            self._producers.check(request, part.records)

    def _chains_of(self, lane: int) -> _Chains:
        chains = self._lanes.get(lane)
        if chains is None:
            if len(self._lanes) >= MAX_LANES:
                raise BrokerOverloaded(f"more than {MAX_LANES} producers on one stream; open a new one")
            chains = self._lanes[lane] = {}
        return chains

    def _break_chain(self, chains: _Chains, key: tuple[bytes, int], chain: int) -> None:
        if len(key[0]) != TOPIC_ID_BYTES:
            return  # no such partition exists, so there is no order to keep
        if key not in chains and sum(map(len, self._lanes.values())) >= MAX_BROKEN_CHAINS:
            # Not raised here: this may run within a partition that is answering other clients too.
            self._failure = BrokerOverloaded(
                f"more than {MAX_BROKEN_CHAINS} partitions of one stream were refused; open a new one"
            )
            self._answer_ready.set()
            return
        chains[key] = max(chain, chains.get(key, 0))

    def _time_out_by(self, due_s: float) -> None:
        """Look for requests out of time at `due_s` at the latest: one timer serves all requests, most in time."""
        if due_s >= self._times_out_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._times_out_s = due_s
        delay_s = due_s - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._time_out)

    def _time_out(self) -> None:
        self._timer, self._times_out_s = None, math.inf
        now_s = time.monotonic()
        for owed in list(self._unanswered):
            due_s = owed.begun_s + owed.timeout_ms / 1_000
            if due_s > now_s:
                self._time_out_by(due_s)
                continue
            error = RequestTimedOut(
                f"not acknowledged within {owed.timeout_ms} ms; the records are in the log and may yet be committed"
            )
            for answer in list(owed.open):
                answer(error)

    def _finish(self, owed: _Request) -> None:
        """Send the response. With acks=0 the client has counted the records as sent, and wants to know of errors only.

        It then looks for the leader; what is on its way to this broker is lost.
        """
        if not (owed.is_acknowledged or any(result.HasField("error") for result in owed.response.results)):
            self._in_flight -= 1
            self._counters.produces_unanswered -= 1
            return
        self._unanswered.pop(owed, None)
        owed.open.clear()
        owed.complete_s = time.monotonic()
        self._answers.append(owed)
        self._answer_ready.set()


def _acknowledges(response: log_pb2.ProduceResponse) -> bool:
    return not all(result.HasField("error") for result in response.results)


def _check(unchecked: _Unchecked) -> Checked:
    """Return what the checks say of these batches. In any thread."""
    results: Checked = {}
    for number, partition, records in unchecked:
        try:
            results[number] = partition.check(records)
        except RaftlogError as error:
            results[number] = forgetful(error)
    return results


def _pieces(costs: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Yield which batches of a request to append in one go, and what they cost."""
    begin = cost_bytes = 0
    for end, cost in enumerate(costs, 1):
        cost_bytes += cost
        if cost_bytes >= PIECE_BYTES or end == len(costs):
            yield range(begin, end), cost_bytes
            begin, cost_bytes = end, 0
