"""Produce: batches in Kafka's format are turned into format 1 and appended, in the order of a connection's requests.

`begin` appends, and returns before the replicas have acknowledged, so that a connection reads its next request
meanwhile; the answer comes as a future. Permissions are those of `broker/partition/produce_session.py`, and
`ProducerChecks` decides which producer ids the client may use, as there.

Before the first batch of a transaction in a partition, its coordinator is asked which epoch the transaction has
(`transactions.py`); the batch is appended in that one. Later requests of the connection wait meanwhile.

Kafka's format does not say what a batch inflates to. So a batch is converted within a bound, which is raised when the
batch turns out to cost more: first on the event loop, unless the partition's last batch inflated too far for that, then
in a thread for what ordinary batches inflate to, at last for what their topic allows. The user's share of heavy work
(`HeavyWork`) covers the bound in threads.

An idempotent producer has several batches of a partition under way. If the broker refuses one for the moment, the next
one leaves a gap. That would end the producer's epoch (ADR 0012), although the client sends both again, in order. So the
broker remembers the refusal, and refuses the batches behind it for the moment too, as chains do for raftlog's clients
(ADR 0004).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from broker.coordinator.internal_topics import refuse_internal
from broker.coordinator.transactions.verifier import ProducerChecks
from broker.kafka import errors
from broker.kafka.codec import Fields
from broker.kafka.messages import PRODUCE
from broker.kafka.parts import check_count
from broker.kafka.record_batches import (
    LOOP_COST,
    RECORD_COST,
    from_kafka,
    is_compressed,
    producer_in,
    record_count_in,
    says_transactional,
)
from broker.kafka.transactions import KEEPS_NO_EPOCH_FROM
from broker.log.producer_state import SEQUENCES
from broker.partition.partition import Partition, append_for_client
from broker.quotas.heavy_work import HeavyWork, TooCostly
from broker.replicas.replica_manager import ReplicaManager
from broker.security.caller import Caller
from broker.turns import Budget, in_turns
from raftlog.errors import (
    ChainBroken,
    ConcurrentTransactions,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidRecord,
    NotCoordinator,
    RaftlogError,
    RequestTimedOut,
    TransactionalIdAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.format import BatchHeader, Buffer, checking_cost_bytes
from raftlog.v1 import log_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage, TopicImage

logger = logging.getLogger(__name__)

ALL: Final = -1
NO_ACK: Final = 0
USUAL_RATIO: Final = 4
EXPECTED_RATIO: Final = 16
"""What the compressed batches of ordinary producers inflate to, and at most, as a multiple of their bytes."""
EXPECTED_COST: Final = 16 << 20
"""The least bound of a conversion in a thread. Four of this cost leave half of all heavy work to others."""
IDS_FROM: Final = 13
"""The first version that names topics by id."""
MAX_REMEMBERED: Final = 10_000
MAX_MESSAGE: Final = 500
"""Characters of an error's text in a response."""


_OF_COORDINATOR: Final = (
    ConcurrentTransactions,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    NotCoordinator,
)
"""What a transaction's coordinator may say for the moment; Kafka's brokers give them the same code."""


class Refused(Exception):
    """A produce with acks=0 was refused; Kafka closes the connection, so that the client looks for the leader."""


class Produce:
    """The API of one broker."""

    def __init__(
        self,
        replica_manager: ReplicaManager,
        image: Callable[[], MetadataImage],
        heavy_work: HeavyWork,
        default_timeout_ms: int,
        producers: Callable[[Caller], ProducerChecks] | None = None,
    ) -> None:
        """`producers`: as for `LogService`."""
        self._replica_manager = replica_manager
        self._image = image
        self._heavy_work = heavy_work
        self._default_timeout_ms = default_timeout_ms
        self._producers = producers
        self._epochs: OrderedDict[tuple[bytes, int, str, int, int], int] = OrderedDict()
        """Epochs that coordinators have told, by partition, transactional id, producer id and the client's epoch."""
        self._ratios: OrderedDict[tuple[bytes, int], float] = OrderedDict()
        """What the last compressed batch of a partition inflated to, as a multiple of its bytes."""
        self._chains = _Chains()

    def checks_of(self, who: Caller) -> ProducerChecks | None:
        """Return the checks of a client's producer ids, for `begin`; they remember the ids that they have checked."""
        return None if self._producers is None else self._producers(who)

    async def begin(
        self, request: Fields, version: int, who: Caller, checks: ProducerChecks | None = None
    ) -> asyncio.Future[Fields]:
        """Append the batches, and return the response to come. Call it for one request of a connection at a time.

        `checks`: of the connection's client, from `checks_of`.

        Raises:
            Refused: with acks=0, a batch was not appended. With acks=0 the result is not to be sent.
            InvalidRequestError: too many partitions are named.
        """
        loop = asyncio.get_running_loop()
        response: asyncio.Future[Fields] = loop.create_future()
        acks, timeout_ms = request["acks"], request["timeout_ms"]
        request_answer = _Answer(response, by_name=version < IDS_FROM)
        turns = Budget(LOOP_COST)
        check_count(sum(len(topic["partition_data"]) for topic in request["topic_data"]), "partitions")
        async for topic in in_turns(request["topic_data"], weight=lambda topic: 1 + len(topic["partition_data"])):
            parts: list[Fields] = []
            named = {"name": topic["name"], "topic_id": topic["topic_id"]}
            request_answer.responses.append({**named, "partition_responses": parts})
            async for part in in_turns(topic["partition_data"]):
                result: Fields = {"index": part["index"], "base_offset": -1}
                parts.append(result)
                await self._append(topic, part, result, request, version, request_answer, who, checks, turns)
                part["records"] = None  # frees the payload
        if acks == NO_ACK and request_answer.refused is not None:
            raise Refused(str(request_answer.refused))
        request_answer.begun()
        if not response.done():
            timer = loop.call_later(
                (timeout_ms if timeout_ms > 0 else self._default_timeout_ms) / 1_000, request_answer.time_out
            )
            response.add_done_callback(lambda _: timer.cancel())
        return response

    async def _append(
        self,
        named: Fields,
        part: Fields,
        result: Fields,
        request: Fields,
        version: int,
        request_answer: _Answer,
        who: Caller,
        checks: ProducerChecks | None,
        turns: Budget,
    ) -> None:
        answer = request_answer.of(result)
        partition: Partition | None = None
        try:
            if request["acks"] not in (ALL, NO_ACK, 1):
                result["error_code"] = errors.INVALID_REQUIRED_ACKS
                answer(None)
                return
            topic = self._topic(named, version, who)
            partition = self._replica_manager.find(topic.topic_id, part["index"])
            found = await self._checked(partition, part, request, version, who, checks, turns)
            (batch, checked, traceparents), session_epoch = found
            base_offset, append_time_ms = append_for_client(
                partition,
                self._replica_manager.counters.topic(topic.name),
                traceparents,
                batch,
                partition.leader_epoch,
                None if request["acks"] == NO_ACK else answer,
                all_replicas=request["acks"] == ALL,
                checked=checked,
                admit_producer=partial(self._replica_manager.new_producers.admit, who.share),
                session_epoch=session_epoch,
            )
            self._chains.settle(partition, part["records"], who, comes_again=False)
            if "error_code" not in result:
                result["base_offset"] = base_offset
                result["log_append_time_ms"] = append_time_ms
                result["log_start_offset"] = partition.log.log_start_offset
            if request["acks"] == NO_ACK:
                answer(None)
        except RaftlogError as error:
            if partition is not None and part["records"] is not None and not isinstance(error, ChainBroken):
                self._chains.settle(partition, part["records"], who, comes_again=error.retriable)
            answer(error)
        except Exception as error:  # a bug in one append must not take the client's other partitions down
            logger.exception("produce to a partition failed", extra={"partition": part["index"]})
            answer(error)

    def _topic(self, named: Fields, version: int, who: Caller) -> TopicImage:
        if version >= IDS_FROM:
            found = self._image().topics.get(named["topic_id"])
            if found is None:
                raise UnknownTopicId(f"there is no topic with the id {named['topic_id'].hex()}")
            who.check(Acl.WRITE, Acl.TOPIC, found.name, found.topic_id)
        else:
            who.check(Acl.WRITE, Acl.TOPIC, named["name"])
            found = self._image().topic(named["name"])
            if found is None:
                raise UnknownTopicOrPartition(f"there is no topic {named['name'][:249]!r}")
        refuse_internal(found.name, "not written to by clients")
        return found

    async def _checked(
        self,
        partition: Partition,
        part: Fields,
        request: Fields,
        version: int,
        who: Caller,
        checks: ProducerChecks | None,
        turns: Budget,
    ) -> tuple[tuple[bytes, BatchHeader, list[str]], int]:
        """Return what `_converted` returns, and as what `Partition.append` takes the epoch."""
        partition.check_serving()
        records = part["records"]
        if records is None:
            raise InvalidRecord("the partition has no records")
        self._chains.check(partition, records, who)
        epoch, session_epoch = None, -1
        producer_id, client_epoch, _ = producer_in(records)
        if checks is not None and producer_id >= 0:
            transactional_id = request["transactional_id"] or ""
            is_transactional = says_transactional(records)
            if is_transactional and not transactional_id:
                raise TransactionalIdAuthorizationFailed(
                    "a transactional batch, and the request has no transactional id"
                )
            head = log_pb2.ProduceRequest(transactional_id=transactional_id)
            checks.check_id(head, producer_id, transactional=is_transactional)
            if is_transactional:
                add = version >= KEEPS_NO_EPOCH_FROM[PRODUCE]
                owner = transactional_id, producer_id, client_epoch
                epoch = await self._epoch(partition, owner, checks, add=add)
                session_epoch = -1 if add else client_epoch
        if not is_compressed(records):
            return await self._convert(partition, records, epoch, who, turns, 1), session_epoch
        key = partition.log.topic_id, part["index"]
        ratio = self._ratios.get(key, USUAL_RATIO)
        converted = await self._convert(partition, records, epoch, who, turns, ratio)
        inflated = checking_cost_bytes(converted[0]) - len(converted[0])
        self._ratios[key] = inflated / len(records)
        self._ratios.move_to_end(key)
        while len(self._ratios) > MAX_REMEMBERED:
            self._ratios.popitem(last=False)
        return converted, session_epoch

    async def _convert(
        self, partition: Partition, records: Any, epoch: int | None, who: Caller, turns: Budget, ratio: float
    ) -> tuple[bytes, BatchHeader, list[str]]:
        """Return what `_converted` returns. `ratio`: what the batch is expected to inflate to."""
        of_records = RECORD_COST * record_count_in(records)
        if ratio * len(records) + of_records <= LOOP_COST:
            try:
                converted = _converted(partition, records, epoch, LOOP_COST)
            except TooCostly:
                pass
            except RaftlogError:
                await turns.spend(LOOP_COST)  # at most
                raise
            else:
                await turns.spend(checking_cost_bytes(converted[0]) + RECORD_COST * converted[1].record_count)
                return converted
        cost = max(EXPECTED_RATIO * len(records) + of_records, EXPECTED_COST)
        try:
            async with self._heavy_work.conversion(who.share, cost) as run:
                return await run(_converted, partition, records, epoch, cost)
        except TooCostly:
            pass
        cost = partition.inflate_limits.max_bytes + of_records
        async with self._heavy_work.conversion(who.share, cost) as run:
            return await run(_converted, partition, records, epoch)

    async def _epoch(
        self, partition: Partition, owner: tuple[str, int, int], checks: ProducerChecks, *, add: bool
    ) -> int:
        """Return the epoch of a transaction that is open and includes the partition. Raises RaftlogError: it is not."""
        transactional_id, producer_id, client_epoch = owner
        key = (partition.log.topic_id, partition.log.partition, *owner)
        found = partition.log.producers.transactions.get(producer_id)
        if found is not None and self._epochs.get(key) == found.epoch:
            return found.epoch  # it was asked before the first batch, and its marker is not here
        epoch = await checks.epoch_of(transactional_id, producer_id, client_epoch, partition, add=add)
        self._epochs[key] = epoch
        self._epochs.move_to_end(key)
        while len(self._epochs) > MAX_REMEMBERED:
            self._epochs.popitem(last=False)
        return epoch


def _converted(
    partition: Partition, records: Any, epoch: int | None, most_cost: int | None = None
) -> tuple[bytes, BatchHeader, list[str]]:
    """Return the batch in format 1, its header, and the spans that its records name, where they are traced.

    Raises:
        TooCostly: the conversion costs more than `most_cost`.
        RaftlogError: the batch is refused.
    """
    traceparents: list[str] = []
    traced = None if partition.traces is None else traceparents
    batch = from_kafka(records, partition.inflate_limits, epoch, traced, most_cost)
    return batch, partition.check(batch), traceparents


_Queue = tuple[str, bytes, int, int, int]
"""The batches of a producer for a partition: the user, the topic id, the partition, the producer id, its epoch."""


class _Chains:
    """The first batch of each producer that was refused for the moment, until the client sends it again."""

    def __init__(self) -> None:
        self._broken: OrderedDict[_Queue, tuple[int, int]] = OrderedDict()
        """The base sequence of the batch, and the leader epoch in which it was refused: a later one has other gaps."""

    def check(self, partition: Partition, records: Buffer, who: Caller) -> None:
        """Check that no batch before this one was refused. Raises ChainBroken: the client is to send that one again."""
        if not self._broken:
            return
        queue, sequence = _place(partition, records, who)
        broken_at = self._broken_at(queue, partition)
        if broken_at is not None and _is_behind(sequence, broken_at):
            raise ChainBroken(
                f"{partition.topic_partition}: the batch with sequence {broken_at} of producer id {queue[3]} was "
                f"refused; send it again before the one with sequence {sequence}"
            )

    def settle(self, partition: Partition, records: Buffer, who: Caller, *, comes_again: bool) -> None:
        """Note that a batch was appended, or refused; `comes_again`: for the moment, so that it comes again."""
        if not (comes_again or self._broken):
            return
        queue, sequence = _place(partition, records, who)
        broken_at = self._broken_at(queue, partition)
        if not comes_again:
            if sequence == broken_at:
                del self._broken[queue]
        elif sequence >= 0 and (broken_at is None or _is_behind(broken_at, sequence)):
            self._broken[queue] = sequence, partition.leader_epoch
            if len(self._broken) > MAX_REMEMBERED:
                self._broken.popitem(last=False)

    def _broken_at(self, queue: _Queue, partition: Partition) -> int | None:
        found = self._broken.get(queue)
        return found[0] if found is not None and found[1] == partition.leader_epoch else None


def _place(partition: Partition, records: Buffer, who: Caller) -> tuple[_Queue, int]:
    producer_id, producer_epoch, base_sequence = producer_in(records)
    log = partition.log
    return (who.principal, log.topic_id, log.partition, producer_id, producer_epoch), base_sequence


def _is_behind(sequence: int, other: int) -> bool:
    """Whether a sequence comes after another one; they begin again at 0, so less than half of all come after one."""
    return 0 < (sequence - other) % SEQUENCES < SEQUENCES // 2


class _Answer:
    """The response of one request, complete once every partition has its answer."""

    def __init__(self, response: asyncio.Future[Fields], *, by_name: bool) -> None:
        self.responses: list[Fields] = []
        self.refused: BaseException | None = None
        """One of the errors."""
        self._response = response
        self._by_name = by_name
        self._open: dict[int, Callable[[BaseException | None], None]] = {}
        self._appending = True

    def of(self, result: Fields) -> Callable[[BaseException | None], None]:
        """Return what takes the answer of one partition; later answers than the first have no effect."""
        key = id(result)  # `responses` keeps it alive

        def answer(error: BaseException | None) -> None:
            if self._open.pop(key, None) is None:
                return
            if error is not None:
                self.refused = error
                code = errors.code_of(error, by_name=self._by_name)
                if isinstance(error, _OF_COORDINATOR):  # which a producer expects of no partition, and would give up on
                    code = errors.NOT_ENOUGH_REPLICAS
                result.update(error_code=code, base_offset=-1, error_message=str(error)[:MAX_MESSAGE])
            self._finish()

        self._open[key] = answer
        return answer

    def begun(self) -> None:
        """Note that all batches were appended or refused."""
        self._appending = False
        self._finish()

    def time_out(self) -> None:
        """Answer for the partitions whose replicas have not acknowledged."""
        late = RequestTimedOut("not acknowledged in time; the records are in the log and may yet be committed")
        for answer in list(self._open.values()):
            answer(late)

    def _finish(self) -> None:
        if not self._open and not self._appending and not self._response.done():
            self._response.set_result({"responses": self.responses})
