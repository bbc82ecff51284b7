"""Producer ids and transactions: calls of the services that raftlog's own clients call, and of the same coordinator.

There are two generations of clients (KIP-890). Those of transaction.version 2 (EndTxn 5, TxnOffsetCommit 5, Produce 12)
have an epoch for each transaction, as raftlog's own, and add partitions and groups by their first batch or offsets.
Earlier ones keep the epoch and the sequence numbers of InitProducerId over all of their transactions, and add
beforehand: their requests say `keeps_epoch`, and the coordinator knows which epoch they mean (`Transaction.own_epoch`).
In a log every transaction has its own epoch, whichever client has written it.

An error becomes the code after which a client of that version does the right thing:

    condition                         clients that know the code      others
    another producer has taken over   PRODUCER_FENCED                 INVALID_PRODUCER_EPOCH: final as well
    the transaction has timed out     TRANSACTION_ABORTABLE           INVALID_PRODUCER_ID_MAPPING: abort, InitProducerId
    the user has made enough ids      TRANSACTIONAL_ID_AUTHORIZATION_FAILED: final; librdkafka retries POLICY_VIOLATION
    its transactions named enough     GROUP_AUTHORIZATION_FAILED: the client aborts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from broker.coordinator.transactions.transaction import MAX_EPOCH
from broker.coordinator.transactions.verifier import TransactionVerifier
from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.apis import Apis, Handler, Services
from broker.kafka.codec import Fields
from broker.kafka.groups import coded, offsets_in
from broker.kafka.parts import by_topic, once
from broker.net.services.transactions import MAX_PRODUCERS
from broker.security.caller import Caller
from broker.turns import in_turns
from raftlog.errors import (
    BrokerOverloaded,
    FencedMemberEpoch,
    InvalidRequestError,
    PolicyViolation,
    ProducerFenced,
    RaftlogError,
    StaleMemberEpoch,
    TopicAuthorizationFailed,
    TransactionAbortable,
    UnknownTopicOrPartition,
)
from raftlog.v1 import group_pb2, transaction_pb2
from raftlog.v1.security_pb2 import Acl

NEVER: Final = 1 << 15
KEEPS_NO_EPOCH_FROM: Final = {api.END_TXN: 5, api.TXN_OFFSET_COMMIT: 5, api.PRODUCE: 12}
"""The first versions of clients of transaction.version 2."""
WAIT_S: Final = 5.0
"""For a transaction's coordinator, when a group's coordinator asks it."""
DESCRIBED_AT_A_TIME: Final = 100
"""Partitions of DescribeProducers between two turns of the event loop."""


class _Codes(NamedTuple):
    """The first versions of an API whose clients know a code."""

    fenced: int
    abortable: int


_CODES: Final = {
    api.INIT_PRODUCER_ID: _Codes(4, 5),
    api.ADD_PARTITIONS_TO_TXN: _Codes(2, NEVER),
    api.ADD_OFFSETS_TO_TXN: _Codes(2, 4),
    api.END_TXN: _Codes(2, 4),
}

STATES: Final = {
    transaction_pb2.TRANSACTION_EMPTY: "Empty",
    transaction_pb2.TRANSACTION_ONGOING: "Ongoing",
    transaction_pb2.PREPARE_COMMIT: "PrepareCommit",
    transaction_pb2.PREPARE_ABORT: "PrepareAbort",
    transaction_pb2.COMPLETE_COMMIT: "CompleteCommit",
    transaction_pb2.COMPLETE_ABORT: "CompleteAbort",
}
"""Kafka's names of the states."""


def coordinator_code(api_key: int, version: int, error: RaftlogError) -> int:
    """Return the code of a coordinator's error for a client of that version."""
    known = _CODES[api_key]
    if isinstance(error, ProducerFenced) and version < known.fenced:
        return errors.INVALID_PRODUCER_EPOCH
    if isinstance(error, TransactionAbortable) and version < known.abortable:
        return errors.INVALID_PRODUCER_ID_MAPPING
    if isinstance(error, PolicyViolation):
        return errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return errors.code_of(error, of_coordinator=True)


def offsets_code(version: int, error: RaftlogError) -> int:
    """Return the code of an error of TxnOffsetCommit; clients abort after ILLEGAL_GENERATION."""
    if isinstance(error, ProducerFenced):
        return errors.INVALID_PRODUCER_EPOCH
    if isinstance(error, PolicyViolation):
        return errors.GROUP_AUTHORIZATION_FAILED
    if isinstance(error, (FencedMemberEpoch, StaleMemberEpoch)) or (
        isinstance(error, TransactionAbortable) and version < _CODES[api.END_TXN].abortable
    ):
        return errors.ILLEGAL_GENERATION
    return errors.code_of(error, of_coordinator=True)


class TransactionApis:
    """The APIs of one broker; `handlers` has them by API key."""

    def __init__(self, apis: Apis, services: Services, verifier: TransactionVerifier) -> None:
        self._apis = apis
        self._transactions = services.transactions
        self._groups = services.groups
        self._verifier = verifier
        self.handlers: dict[int, Handler] = {
            api.INIT_PRODUCER_ID: self._init_producer_id,
            api.ADD_PARTITIONS_TO_TXN: self._add_partitions,
            api.ADD_OFFSETS_TO_TXN: self._add_offsets,
            api.END_TXN: self._end,
            api.TXN_OFFSET_COMMIT: self._commit_offsets,
            api.WRITE_TXN_MARKERS: self._write_markers,
            api.DESCRIBE_PRODUCERS: self._describe_producers,
            api.DESCRIBE_TRANSACTIONS: self._describe,
            api.LIST_TRANSACTIONS: self._list,
        }

    # Producers

    async def _init_producer_id(self, request: Fields, version: int, who: Caller) -> Fields:
        transactional_id = request["transactional_id"]
        call = transaction_pb2.InitProducerIdRequest(transactional_id=transactional_id or "")
        try:
            if transactional_id is not None:
                if not transactional_id:
                    raise InvalidRequestError("a transactional id has at least one character")
                call.transaction_timeout_ms = max(0, request["transaction_timeout_ms"])
                if request["producer_id"] >= 0:
                    call.producer_id, call.producer_epoch = request["producer_id"], request["producer_epoch"]
                    call.keeps_epoch = True  # changes nothing for a client that does not
            return await self._begun(call, who)
        except RaftlogError as error:
            return {"error_code": coordinator_code(api.INIT_PRODUCER_ID, version, error), "producer_epoch": -1}

    async def _begun(self, call: transaction_pb2.InitProducerIdRequest, who: Caller) -> Fields:
        answer = await self._apis.call("Transaction/InitProducerId", self._transactions.InitProducerId, call, who)
        return {"producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch}

    async def _add_partitions(self, request: Fields, version: int, who: Caller) -> Fields:
        call = transaction_pb2.AddToTransactionRequest(
            transactional_id=request["transactional_id"],
            producer_id=request["producer_id"],
            producer_epoch=request["producer_epoch"],
            keeps_epoch=True,
        )
        unknown: set[str] = set()
        async for topic in in_turns(request["topics"]):
            topic_id = self._apis.id_of(topic["name"])
            if topic_id is None:
                unknown.add(topic["name"])
            else:
                call.partitions.add(topic_id=topic_id, topic=topic["name"], partitions=topic["partitions"])
        codes: Callable[[str], int] = lambda name: errors.NONE  # noqa: E731 # replaced below by what went wrong
        try:
            if unknown:  # the answer for all does not depend on whether a hidden topic exists
                self._apis.permit("Transaction/AddToTransaction", call, who)
                async for name in in_turns(unknown):
                    who.check(Acl.WRITE, Acl.TOPIC, name)
                raise UnknownTopicOrPartition("there is no such topic")
            if call.partitions:
                await self._apis.call("Transaction/AddToTransaction", self._transactions.AddToTransaction, call, who)
        except TopicAuthorizationFailed as error:
            refused = errors.code_of(error)
            codes = lambda name: (  # noqa: E731
                errors.OPERATION_NOT_ATTEMPTED if who.may(Acl.WRITE, Acl.TOPIC, name, log=False) else refused
            )
        except RaftlogError as error:
            code = coordinator_code(api.ADD_PARTITIONS_TO_TXN, version, error)
            codes = lambda name: code if not unknown or name in unknown else errors.OPERATION_NOT_ATTEMPTED  # noqa: E731
        results = []
        async for topic in in_turns(request["topics"], weight=lambda topic: 1 + len(topic["partitions"])):
            code = codes(topic["name"])
            parts = [{"partition_index": each, "partition_error_code": code} for each in topic["partitions"]]
            results.append({"name": topic["name"], "results_by_partition": parts})
        return {"results_by_topic": results}

    async def _add_offsets(self, request: Fields, version: int, who: Caller) -> Fields:
        call = transaction_pb2.AddToTransactionRequest(
            transactional_id=request["transactional_id"],
            producer_id=request["producer_id"],
            producer_epoch=request["producer_epoch"],
            group_ids=[request["group_id"]],
            keeps_epoch=True,
        )
        try:
            await self._apis.call("Transaction/AddToTransaction", self._transactions.AddToTransaction, call, who)
        except RaftlogError as error:
            if isinstance(error, PolicyViolation):
                return {"error_code": errors.GROUP_AUTHORIZATION_FAILED}
            return {"error_code": coordinator_code(api.ADD_OFFSETS_TO_TXN, version, error)}
        return {}

    async def _end(self, request: Fields, version: int, who: Caller) -> Fields:
        keeps_epoch = version < KEEPS_NO_EPOCH_FROM[api.END_TXN]
        call = transaction_pb2.EndTransactionRequest(
            transactional_id=request["transactional_id"],
            producer_id=request["producer_id"],
            producer_epoch=request["producer_epoch"],
            commit=request["committed"],
            keeps_epoch=keeps_epoch,
        )
        try:
            answer = await self._apis.call("Transaction/EndTransaction", self._transactions.EndTransaction, call, who)
            if answer.producer_epoch > MAX_EPOCH and not keeps_epoch:
                return await self._renewed(request, answer.producer_epoch, who)
        except RaftlogError as error:
            return {"error_code": coordinator_code(api.END_TXN, version, error)}
        return {"producer_id": request["producer_id"], "producer_epoch": answer.producer_epoch}

    async def _renewed(self, request: Fields, producer_epoch: int, who: Caller) -> Fields:
        """Return another producer id: the epochs of this one are used up."""
        key = request["transactional_id"]
        answer = await self._apis.call(
            "Transaction/DescribeTransactions",
            self._transactions.DescribeTransactions,
            transaction_pb2.DescribeTransactionsRequest(transactional_ids=[key]),
            who,
        )
        (described,) = answer.transactions
        call = transaction_pb2.InitProducerIdRequest(
            transactional_id=key,
            transaction_timeout_ms=described.timeout_ms,
            producer_id=request["producer_id"],
            producer_epoch=producer_epoch,
        )
        return await self._begun(call, who)

    async def _commit_offsets(self, request: Fields, version: int, who: Caller) -> Fields:
        call = group_pb2.CommitTransactionOffsetsRequest(
            group_id=request["group_id"],
            transactional_id=request["transactional_id"],
            producer_id=request["producer_id"],
            producer_epoch=request["producer_epoch"],
            member_id=request["member_id"],
            member_epoch=request["generation_id"],
            instance_id=request["group_instance_id"] or "",
            offsets=await offsets_in(request),
        )
        method = "Group/CommitTransactionOffsets"
        codes: list[int]
        try:
            self._apis.permit(method, call, who)
            adds = version >= KEEPS_NO_EPOCH_FROM[api.TXN_OFFSET_COMMIT]
            call.producer_epoch = await self._verifier.epoch_for_group(call, WAIT_S, add=adds, user=who.user)
            answer = await self._apis.call(method, self._groups.CommitTransactionOffsets, call, who)
            codes = [
                offsets_code(version, errors.error_of(each.error)) if each.HasField("error") else errors.NONE
                async for each in in_turns(answer.results)
            ]
        except RaftlogError as error:
            codes = [offsets_code(version, error)] * len(call.offsets)
        return await coded(request, codes)

    # Tools

    async def _write_markers(self, request: Fields, version: int, who: Caller) -> Fields:
        """End hanging transactions, as `kafka-transactions.sh abort` asks; all else is for brokers only."""
        return {
            "markers": [
                {
                    "producer_id": marker["producer_id"],
                    "topics": [
                        {
                            "name": topic["name"],
                            "partitions": [
                                {
                                    "partition_index": each,
                                    "error_code": await self._abort_hanging(marker, topic["name"], each, who),
                                }
                                async for each in in_turns(topic["partition_indexes"])
                            ],
                        }
                        async for topic in in_turns(
                            marker["topics"], weight=lambda topic: 1 + len(topic["partition_indexes"])
                        )
                    ],
                }
                async for marker in in_turns(request["markers"], at_a_time=1)
            ]
        }

    async def _abort_hanging(self, marker: Fields, topic: str, partition: int, who: Caller) -> int:
        call = transaction_pb2.AbortHangingRequest(
            topic_id=self._apis.id_of(topic) or b"",
            partition=partition,
            producer_id=marker["producer_id"],
            producer_epoch=marker["producer_epoch"],
        )
        try:
            self._apis.permit("Transaction/AbortHanging", call, who)
            if marker["transaction_result"]:
                raise InvalidRequestError("only a coordinator commits a transaction")
            if not call.topic_id:
                raise UnknownTopicOrPartition(f"there is no topic {topic[:249]!r}")
            wanted = transaction_pb2.DescribeProducersRequest()
            wanted.partitions.add(topic_id=call.topic_id, partitions=[partition])
            described = await self._apis.unchecked(self._transactions.DescribeProducers, wanted)
            (found,) = described.partitions
            if found.HasField("error"):
                raise errors.error_of(found.error)
            call.start_offset = next(
                (
                    each.transaction_start_offset
                    for each in found.producers
                    if (each.producer_id, each.producer_epoch) == (call.producer_id, call.producer_epoch)
                ),
                -1,
            )
            await self._apis.unchecked(self._transactions.AbortHanging, call)
        except RaftlogError as error:
            return errors.code_of(error)
        return errors.NONE

    async def _describe_producers(self, request: Fields, version: int, who: Caller) -> Fields:
        topics = [
            {"name": topic["name"], "partitions": [{"partition_index": each} for each in topic["partition_indexes"]]}
            for topic in request["topics"]
        ]
        rows = await self._apis.rows(topics, "name", "partition_index", who)
        known = [(topic_id, result) for topic_id, result, _ in rows if topic_id is not None]
        described: list[Any] = []
        told = 0
        async for first in in_turns(range(0, len(known), DESCRIBED_AT_A_TIME), at_a_time=1):
            call = transaction_pb2.DescribeProducersRequest(any_replica=True)
            some = known[first : first + DESCRIBED_AT_A_TIME]
            for topic_id, result in some:
                call.partitions.add(topic_id=topic_id, partitions=[result["partition_index"]])
            try:
                if told >= MAX_PRODUCERS:
                    raise BrokerOverloaded(f"the answer has {told} producers already: ask for fewer partitions")
                answer = await self._apis.call(
                    "Transaction/DescribeProducers", self._transactions.DescribeProducers, call, who
                )
                described += answer.partitions
                told += sum(len(each.producers) for each in answer.partitions)
            except RaftlogError as error:
                code = errors.code_of(error)
                for _, result in some:
                    result["error_code"] = code
        answered = iter(described)
        for _, result, _ in rows:
            result["active_producers"] = []
        async for _, result in in_turns(known):
            if result["error_code"]:
                continue
            found = next(answered)
            result["error_code"] = errors.code_in(found)
            result["active_producers"] = [
                {
                    "producer_id": each.producer_id,
                    "producer_epoch": each.producer_epoch,
                    "last_sequence": each.last_sequence,
                    "last_timestamp": each.last_append_ms,
                    "coordinator_epoch": -1,
                    "current_txn_start_offset": each.transaction_start_offset,
                }
                for each in found.producers
            ]
        return {"topics": await by_topic(topics, (result for _, result, _ in rows))}

    async def _describe(self, request: Fields, version: int, who: Caller) -> Fields:
        ids = await once(request["transactional_ids"])
        return {"transaction_states": [await self._described(each, who) async for each in in_turns(ids)]}

    async def _described(self, transactional_id: str, who: Caller) -> Fields:
        call = transaction_pb2.DescribeTransactionsRequest(transactional_ids=[transactional_id])
        result: Fields = {
            "transactional_id": transactional_id,
            "transaction_state": "",
            "producer_id": -1,
            "producer_epoch": -1,
            "transaction_start_time_ms": -1,
            "topics": [],
        }
        try:
            answer = await self._apis.call(
                "Transaction/DescribeTransactions", self._transactions.DescribeTransactions, call, who
            )
            (found,) = answer.transactions
            if found.HasField("error"):
                raise errors.error_of(found.error)
        except RaftlogError as error:
            return {**result, "error_code": errors.code_of(error, of_coordinator=True)}
        result.update(
            error_code=errors.NONE,
            transaction_state=STATES[found.state],
            transaction_timeout_ms=found.timeout_ms,
            transaction_start_time_ms=found.started_ms or -1,
            producer_id=found.producer_id,
            producer_epoch=min(found.producer_epoch, MAX_EPOCH),
            topics=[
                {"topic": each.topic, "partitions": sorted(each.partitions)} for each in found.partitions if each.topic
            ],
        )
        return result

    async def _list(self, request: Fields, version: int, who: Caller) -> Fields:
        numbers = {name: number for number, name in STATES.items()}
        unknown = [each for each in request["state_filters"] if each not in numbers]
        states = [numbers[each] for each in request["state_filters"] if each in numbers]
        result: Fields = {"unknown_state_filters": unknown, "transaction_states": []}
        if unknown and not states:
            return result
        call = transaction_pb2.ListTransactionsRequest(
            states=states,
            producer_ids=request["producer_id_filters"],
            running_longer_than_ms=max(0, request["duration_filter"]),
        )
        try:
            answer = await self._apis.call(
                "Transaction/ListTransactions", self._transactions.ListTransactions, call, who
            )
        except RaftlogError as error:
            return {**result, "error_code": errors.code_of(error, of_coordinator=True)}
        if answer.loading:
            return {**result, "error_code": errors.COORDINATOR_LOAD_IN_PROGRESS}
        result["transaction_states"] = [
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.producer_id,
                "transaction_state": STATES[each.state],
            }
            for each in answer.transactions
            if each.transactional_id  # stages of sinks have none
        ]
        return result
