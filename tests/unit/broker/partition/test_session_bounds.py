"""Requests about many partitions: bounded before anything is decided, and others have their turns meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.config.config import BrokerConfig
from broker.net.services.log import LogService
from broker.partition import fetch_session
from broker.partition.fetch_session import MAX_PARTS, FetchSession
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.security.caller import caller
from raftlog.errors import InvalidRequestError
from raftlog.v1 import common_pb2, log_pb2
from tests.support.broker_parts import TOPIC_ID, FetchWriter, Parts, Requests
from tests.support.fake_authorizer import FakeAuthorizer
from tests.support.replica_link import settle
from tests.support.turns import counted_turns


class Ended(Exception):
    """The exception that a context raises."""


class Context:
    """A call's context that can be aborted."""

    async def abort(self, status: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        raise Ended(status, details)


def look_ups(parts: int) -> dict[str, Any]:
    """Return requests about so many partitions, by the name of the call."""
    topic_ids = [TOPIC_ID] * parts
    listed = [log_pb2.ListOffsetsPartition(topic_id=each, leader_epoch=-1, timestamp_ms=-2) for each in topic_ids]
    epochs = [log_pb2.EpochPartition(topic_id=each, current_leader_epoch=-1) for each in topic_ids]
    deleted = [log_pb2.DeleteRecordsPartition(topic_id=each) for each in topic_ids]
    return {
        "ListOffsets": log_pb2.ListOffsetsRequest(partitions=listed),
        "OffsetForLeaderEpoch": log_pb2.OffsetForLeaderEpochRequest(partitions=epochs),
        "DeleteRecords": log_pb2.DeleteRecordsRequest(partitions=deleted),
    }


def test_look_ups_are_bounded_and_leave_others_their_turns(tmp_path: Path) -> None:
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": [str(tmp_path)]})

    async def main() -> None:
        async with Parts(tmp_path) as parts:
            service = LogService(parts.registry, config, DiskReads(parts.disk), HeavyWork(parts.disk))
            authorizer = FakeAuthorizer()
            caller.set(authorizer.caller())
            for name, request in look_ups(MAX_PARTS + 1).items():
                with pytest.raises(Ended, match=f"at most {MAX_PARTS}") as ended:
                    await getattr(service, name)(request, Context())
                assert ended.value.args[0] is grpc.StatusCode.INVALID_ARGUMENT
            assert authorizer.asked == []
            for name, request in look_ups(MAX_PARTS).items():
                async with counted_turns() as turns:
                    response = await getattr(service, name)(request, Context())
                    assert {result.error.code for result in response.results} == {common_pb2.TOPIC_AUTHORIZATION_FAILED}
                    assert turns.count >= MAX_PARTS // 500 - 1

    asyncio.run(main())


def test_subscriptions_are_bounded_and_leave_others_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_session, "AT_A_TIME", 2)

    def subscribe(count: int) -> log_pb2.FetchRequest:
        parts = [log_pb2.FetchPartition(subscription_id=each, topic_id=TOPIC_ID) for each in range(1, count + 1)]
        return log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=parts))

    async def main() -> None:
        async with Parts(tmp_path) as parts:
            authorizer = FakeAuthorizer()
            session = FetchSession(
                parts.registry,
                DiskReads(parts.disk),
                max_frame_bytes=1 << 20,
                max_subscriptions=10,
                who=authorizer.caller(),
            )
            requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
            running = asyncio.ensure_future(session.run(aiter(requests), writer))
            requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 30)))
            await settle()
            async with asyncio.timeout(60), counted_turns() as turns:
                requests.send(subscribe(40))  # more than may stay unread
                while sum(map(len, writer.written)) < 40:
                    await writer.wait_for(len(writer.written) + 1)
                assert turns.count >= 19
            before = len(authorizer.asked)
            requests.send(subscribe(MAX_PARTS + 1))
            with pytest.raises(InvalidRequestError, match=f"at most {MAX_PARTS}"):
                await asyncio.wait_for(running, 60)
            assert len(authorizer.asked) == before

    asyncio.run(main())


def subscribe(*numbers: int, topic_id: bytes = TOPIC_ID) -> log_pb2.FetchRequest:
    parts = [
        log_pb2.FetchPartition(subscription_id=each + 1, topic_id=topic_id, partition=each, leader_epoch=-1)
        for each in numbers
    ]
    return log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=parts))


def test_a_message_has_few_frames_however_many_partitions_have_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_session, "AT_A_TIME", 4)

    async def main() -> None:
        async with Parts(tmp_path, partitions=40) as parts:
            session = FetchSession(parts.registry, DiskReads(parts.disk), max_frame_bytes=1 << 20, max_subscriptions=40)
            requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
            running = asyncio.ensure_future(session.run(aiter(requests), writer))
            requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=0)))
            requests.send(subscribe(*range(40)))
            await settle()
            assert writer.written == []
            requests.send(log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=1 << 20)))
            async with asyncio.timeout(60):
                await writer.wait_for(10)
            assert [len(message) for message in writer.written] == [4] * 10
            requests.end()
            await asyncio.wait_for(running, 60)

    asyncio.run(main())


def test_a_client_that_leaves_refusals_unread_is_not_read_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_session, "AT_A_TIME", 4)

    async def main() -> None:
        async with Parts(tmp_path) as parts:
            session = FetchSession(
                parts.registry, DiskReads(parts.disk), max_frame_bytes=1 << 20, max_subscriptions=1_000
            )
            requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
            writer.stalled = True
            running = asyncio.ensure_future(session.run(aiter(requests), writer))
            requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession()))
            for first in range(0, 100, 10):
                requests.send(subscribe(*range(first, first + 10), topic_id=bytes(16)))
            await settle()
            assert requests.taken <= 3
            assert sum(map(len, writer.written)) + len(session._refusals) <= 8
            await writer.resume()
            async with asyncio.timeout(60):
                while sum(map(len, writer.written)) < 100:
                    await writer.wait_for(len(writer.written) + 1)
            requests.end()
            await asyncio.wait_for(running, 60)

    asyncio.run(main())
