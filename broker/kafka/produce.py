"""Produce: batches in Kafka's format are turned into format 1 and appended, in the order of a connection's requests.

`begin` appends, and returns before the replicas have acknowledged, so that a connection reads its next request
meanwhile; the answer comes as a future. Permissions are those of `broker/partition/produce_session.py`. Transactional
batches are refused as long as the listener has no API to end a transaction.
`ProducerChecks` decides which producer ids the client may use, as there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

from broker.coordinator.internal_topics import refuse_internal
from broker.coordinator.transactions.verifier import ProducerChecks
from broker.kafka import errors
from broker.kafka.codec import Fields
from broker.kafka.record_batches import from_kafka, says_transactional
from broker.partition.partition import Partition
from broker.replicas.replica_manager import ReplicaManager
from broker.security.caller import Caller
from raftlog.errors import InvalidRecord, InvalidTxnState, RaftlogError, RequestTimedOut, UnknownTopicOrPartition
from raftlog.format import BatchHeader, InflateLimits
from raftlog.v1 import log_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

ALL: Final = -1
NO_ACK: Final = 0
ON_LOOP_BYTES: Final = 64 << 10
"""Converting this many bytes takes about a millisecond; larger batches are converted on a disk thread."""
MAX_MESSAGE: Final = 500
"""Characters of an error's text in a response."""


class Refused(Exception):
    """A produce with acks=0 was refused; Kafka closes the connection, so that the client looks for the leader."""


class Produce:
    """The API of one broker."""

    def __init__(
        self,
        replica_manager: ReplicaManager,
        image: Callable[[], MetadataImage],
        disk: Executor,
        default_timeout_ms: int,
        producers: Callable[[Caller], ProducerChecks] | None = None,
    ) -> None:
        """`producers`: as for `LogService`."""
        self._replica_manager = replica_manager
        self._image = image
        self._disk = disk
        self._default_timeout_ms = default_timeout_ms
        self._producers = producers

    async def begin(self, request: Fields, who: Caller) -> asyncio.Future[Fields]:
        """Append the batches, and return the response to come. Call it for one request of a connection at a time.

        Raises:
            Refused: with acks=0, a batch was not appended. With acks=0 the result is not to be sent.
        """
        loop = asyncio.get_running_loop()
        response: asyncio.Future[Fields] = loop.create_future()
        acks, timeout_ms = request["acks"], request["timeout_ms"]
        request_answer = _Answer(response)
        for topic in request["topic_data"]:
            parts: list[Fields] = []
            request_answer.responses.append({"name": topic["name"], "partition_responses": parts})
            for part in topic["partition_data"]:
                result: Fields = {"index": part["index"], "base_offset": -1}
                parts.append(result)
                await self._append(topic["name"], part, result, request, request_answer, who)
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
        self, topic: str, part: Fields, result: Fields, request: Fields, request_answer: _Answer, who: Caller
    ) -> None:
        answer = request_answer.of(result)
        try:
            if request["acks"] not in (ALL, NO_ACK, 1):
                result["error_code"] = errors.INVALID_REQUIRED_ACKS
                answer(None)
                return
            partition, batch, checked = await self._checked(topic, part, request, who)
            counted = self._replica_manager.counters.topic(topic)
            end_offset = partition.log_end_offset
            try:
                base_offset, append_time_ms = partition.append(
                    batch,
                    partition.leader_epoch,
                    None if request["acks"] == NO_ACK else answer,
                    all_replicas=request["acks"] == ALL,
                    checked=checked,
                )
            except RaftlogError:
                counted.failed_produces += 1
                raise
            appended = partition.log_end_offset - end_offset  # 0 for a batch that was in the log already
            counted.records_in += appended
            counted.bytes_in += len(batch) if appended else 0
            if "error_code" not in result:
                result["base_offset"] = base_offset
                result["log_append_time_ms"] = append_time_ms
                result["log_start_offset"] = partition.log.log_start_offset
            if request["acks"] == NO_ACK:
                answer(None)
        except RaftlogError as error:
            answer(error)
        except Exception as error:  # a bug in one append must not take the client's other partitions down
            logger.exception("produce to %s-%d failed", topic, part["index"])
            answer(error)

    async def _checked(
        self, topic: str, part: Fields, request: Fields, who: Caller
    ) -> tuple[Partition, bytes, BatchHeader]:
        who.check(Acl.WRITE, Acl.TOPIC, topic)
        found = self._image().topic(topic)
        if found is None:
            raise UnknownTopicOrPartition(f"there is no topic {topic[:249]!r}")
        refuse_internal(topic, "not written to by clients")
        partition = self._replica_manager.find(found.topic_id, part["index"])
        partition.check_serving()
        records = part["records"]
        if records is None:
            raise InvalidRecord("the partition has no records")
        if says_transactional(records):  # no coordinator would ever end it, and readers of committed records would wait
            raise InvalidTxnState("the Kafka listener has no transactions yet: leave transactional.id out")
        if len(records) <= ON_LOOP_BYTES:
            converted = _converted(partition, records, partition.inflate_limits)
        else:
            loop = asyncio.get_running_loop()
            converted = await loop.run_in_executor(self._disk, _converted, partition, records, partition.inflate_limits)
        batch, header = converted
        if self._producers is not None and header.producer_id >= 0:
            self._producers(who).check(log_pb2.ProduceRequest(), batch)
        return partition, batch, header


def _converted(partition: Partition, records: Any, limits: InflateLimits) -> tuple[bytes, BatchHeader]:
    batch = from_kafka(records, limits)
    return batch, partition.check(batch)


class _Answer:
    """The response of one request, complete once every partition has its answer."""

    def __init__(self, response: asyncio.Future[Fields]) -> None:
        self.responses: list[Fields] = []
        self.refused: BaseException | None = None
        """One of the errors."""
        self._response = response
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
                result.update(error_code=errors.code_of(error), base_offset=-1, error_message=str(error)[:MAX_MESSAGE])
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
