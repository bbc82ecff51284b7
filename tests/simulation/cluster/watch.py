"""Compares the acknowledgements and records that a broker sends to clients with the ledger.

An acknowledgement names a batch that is appended, or was before (a repeated batch). With acks=all it must be committed,
as it was sent. The acknowledgement may leave late, after a pause, when another broker leads: it is still valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftlog.format import iter_headers
from raftlog.format.wire import Frame, Produce
from raftlog.v1 import log_pb2
from tests.simulation.cluster.server import Watch
from tests.simulation.dataplane.messages import PartitionKey

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import ClusterBroker


def watch_of(broker: ClusterBroker, method: str) -> Watch | None:
    """Return the watch over calls of this method, if there is one."""
    match method:
        case "/raftlog.v1.Log/Produce":
            return _ProduceWatch(broker)
        case "/raftlog.v1.Log/Fetch":
            return _FetchWatch(broker)
    return None


class _ProduceWatch:
    def __init__(self, broker: ClusterBroker) -> None:
        self._broker = broker
        self._asked: dict[int, tuple[int, list[tuple[PartitionKey, int, bytes]]]] = {}

    def request(self, message: Produce) -> None:
        for request in (message, *message.more):
            self._note(request)

    def _note(self, request: Produce) -> None:
        head = request.head
        if head.acks != log_pb2.NO_ACK:
            self._asked[head.correlation_id] = (
                head.acks,
                [
                    ((part.head.topic_id, part.head.partition), part.head.leader_epoch, bytes(part.records))
                    for part in request.parts
                ],
            )

    def response(self, message: log_pb2.ProduceResponse) -> None:
        for answer in (message, *message.more):
            self._check(answer)

    def _check(self, message: log_pb2.ProduceResponse) -> None:
        if message.correlation_id not in self._asked:
            assert any(result.HasField("error") for result in message.results), (
                f"a request with acks=0 was answered without an error: {message}"
            )
            return
        acks, parts = self._asked.pop(message.correlation_id)
        for (key, leader_epoch, records), result in zip(parts, message.results, strict=True):
            if not result.HasField("error"):
                self._broker.simulation.ledger.answers(
                    self._broker, key, leader_epoch, result.base_offset, records, all_replicas=acks == log_pb2.ALL
                )


class _FetchWatch:
    def __init__(self, broker: ClusterBroker) -> None:
        self._broker = broker
        self._subscribed: dict[int, tuple[PartitionKey, int]] = {}

    def request(self, message: log_pb2.FetchRequest) -> None:
        for part in message.subscribe.partitions:
            self._subscribed[part.subscription_id] = (part.topic_id, part.partition), part.offset

    def response(self, message: list[Frame]) -> None:
        for head, data in message:
            records = bytes(data)
            if records and head.subscription_id in self._subscribed:
                key, offset = self._subscribed[head.subscription_id]
                self._broker.simulation.ledger.serves(self._broker, key, offset, records)
                *_, (_, last) = iter_headers(records)
                self._subscribed[head.subscription_id] = key, last.next_offset
