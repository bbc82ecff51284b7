"""A produce stream answers what is durable, within its bounds, and counts it, under faults of disk and client."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.log.partition_log import FlushTicket
from broker.partition import produce_session
from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas.heavy_work import HeavyWork
from broker.turns import SharedTurns
from raftlog.errors import BrokerOverloaded, InvalidRequestError, StorageError, UnknownTopicId
from raftlog.format import Codec, wire
from raftlog.v1 import common_pb2, log_pb2
from replication.high_watermark import PendingAcks
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, ProduceWriter, Requests, removal
from tests.support.raw_client import RawClient


def request(number: int, *, partition: int = 0, chain: int = 1, acks: int = log_pb2.ALL, lane: int = 0) -> wire.Produce:
    made = RawClient.request(number, [(TOPIC_ID, partition, 3, chain, batch_of(b"%d" % number))], acks)
    made.head.lane = lane
    return made


def together(*requests: wire.Produce) -> wire.Produce:
    """Return one message with all of these."""
    return requests[0]._replace(more=requests[1:])


@asynccontextmanager
async def session(
    parts: Parts, *, max_in_flight: int = 5, timeout_ms: int = 30_000, many: bool = False
) -> AsyncIterator[tuple[Requests[wire.Produce], ProduceWriter]]:
    requests, writer = Requests[wire.Produce](), ProduceWriter()
    running = asyncio.create_task(
        ProduceSession(
            parts.registry,
            SharedTurns(TURN_BYTES),
            HeavyWork(parts.disk),
            max_in_flight=max_in_flight,
            default_timeout_ms=timeout_ms,
            many=many,
        ).run(requests.__aiter__(), writer)
    )
    try:
        yield requests, writer
        requests.end()
        parts.disk.release()
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_answer_waits_for_the_fsync(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts) as (requests, writer):
            requests.send(request(1))
            await settle()
            partition = parts.registry.find(TOPIC_ID, 0)
            assert partition.log.log_end_offset == 1
            assert partition.high_watermark == 0
            assert not writer.written, "the record was acknowledged before it was on disk"
            parts.disk.release()
            (response,) = await writer.wait_for(1)
            assert (response.correlation_id, response.results[0].base_offset) == (1, 0)
            assert partition.high_watermark == 1


async def test_reading_stops_at_the_bound_and_goes_on_with_the_answers(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts, max_in_flight=3) as (requests, writer):
            for number in range(10):
                requests.send(request(number))
            await settle()
            assert requests.taken == 3
            parts.disk.release()
            responses = await writer.wait_for(10)
            assert [response.results[0].base_offset for response in responses] == list(range(10))


async def test_a_timeout_is_answered_once_and_the_record_may_be_there(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts, timeout_ms=1) as (requests, writer):
            message = request(1)
            message.head.timeout_ms = 0
            requests.send(message)
            (response,) = await writer.wait_for(1)
            assert response.results[0].error.code == common_pb2.REQUEST_TIMED_OUT
            parts.disk.release()
            await settle()
            assert len(writer.written) == 1
            assert parts.registry.find(TOPIC_ID, 0).log.log_end_offset == 1


async def test_requests_of_a_message_are_answered_by_themselves_and_in_one_message_when_they_can(
    tmp_path: Path,
) -> None:
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts, many=True) as (requests, writer):
            requests.send(together(request(1), request(2, partition=9), request(3)))
            (refused,) = await writer.wait_for(1)
            assert (refused.correlation_id, refused.results[0].error.code) == (2, common_pb2.UNKNOWN_TOPIC_ID)
            assert not refused.more, "a refusal must not wait for the other answers"
            parts.disk.release()
            _, answers = await writer.wait_for(2)
            assert [(each.correlation_id, each.results[0].base_offset) for each in (answers, *answers.more)] == [
                (1, 0),
                (3, 1),
            ]


async def test_a_message_of_answers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce_session, "_MESSAGE_RESULTS", 2)
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts, many=True, max_in_flight=20) as (requests, writer):
            requests.send(together(*(request(number) for number in range(6))))
            await settle()
            parts.disk.release()
            messages = await writer.wait_for(3)
            assert [[each.correlation_id for each in (one, *one.more)] for one in messages] == [[0, 1], [2, 3], [4, 5]]


async def test_a_refusal_breaks_the_chain_of_its_lane_only(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts, many=True, max_in_flight=20) as (requests, writer):
        broken = request(1, lane=1)
        broken.parts[0].head.leader_epoch = 1
        requests.send(together(broken, request(2, lane=2), request(3, lane=1), request(4, lane=1, chain=2)))
        found = {
            each.correlation_id: each.results[0].error.code
            for message in await writer.wait_for(2)
            for each in (message, *message.more)
        }
        assert found == {1: common_pb2.FENCED_LEADER_EPOCH, 2: 0, 3: common_pb2.CHAIN_BROKEN, 4: 0}


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_larger_chain_or_the_end_of_a_producer_frees_what_was_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(produce_session, "MAX_BROKEN_CHAINS", 1)
    async with Parts(tmp_path) as parts, session(parts, many=True) as (requests, writer):
        for lane in range(8):
            broken, next_one = request(lane, lane=lane), request(100 + lane, lane=lane, chain=2)
            broken.parts[0].head.leader_epoch = 1
            if leaves:
                next_one = request(100 + lane, lane=100)
                next_one.head.left_lanes.append(lane)
            requests.send(broken)
            requests.send(next_one)
        await settle()
        answers = [each for message in writer.written for each in (message, *message.more)]
        assert {each.correlation_id: each.results[0].error.code for each in answers} == {
            **dict.fromkeys(range(8), common_pb2.FENCED_LEADER_EPOCH),
            **dict.fromkeys(range(100, 108), 0),
        }


async def test_what_a_producer_that_has_left_is_refused_later_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce_session, "MAX_BROKEN_CHAINS", 1)
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts, many=True) as (requests, writer):
            requests.send(together(*(request(lane, lane=lane) for lane in range(3))))
            leaves = request(3, lane=3)._replace(parts=())
            leaves.head.left_lanes.extend(range(3))
            requests.send(leaves)
            await writer.wait_for(1)
            parts.registry.find(TOPIC_ID, 0).close(UnknownTopicId("deleted"))
            _, refused = await writer.wait_for(2)
            codes = [each.results[0].error.code for each in (refused, *refused.more)]
            assert codes == [common_pb2.UNKNOWN_TOPIC_ID] * 3


async def test_a_stream_with_too_many_producers_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce_session, "MAX_LANES", 3)
    async with Parts(tmp_path) as parts:
        with pytest.raises(BrokerOverloaded, match="more than 3 producers"):
            async with session(parts, many=True) as (requests, _):
                requests.send(together(*(request(number, lane=number) for number in range(4))))


async def test_no_producer_of_a_stream_waits_for_the_answers_of_others(tmp_path: Path) -> None:
    """Each may have as many unanswered batches as a broker recognises, however low max.in.flight.requests is."""
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts, many=True, max_in_flight=1) as (requests, writer):
            for number in range(5):
                requests.send(together(*(request(100 * number + lane, lane=lane) for lane in range(100))))
            requests.send(request(500, lane=1))
            await settle()
            assert requests.taken == 5
            parts.disk.release()
            answers = [each for message in await writer.wait_for(2) for each in (message, *message.more)]
            assert {each.correlation_id for each in answers} == set(range(501))


async def test_several_requests_in_a_message_are_for_clients_that_have_said_so(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        with pytest.raises(InvalidRequestError, match="raftlog-produce: many-requests"):
            async with session(parts) as (requests, _):
                requests.send(together(request(1), request(2)))


async def test_unanswered_requests_of_a_message_count_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce_session, "MAX_PRODUCERS", 0)
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts, many=True, max_in_flight=3) as (requests, writer):
            for number in range(0, 12, 4):
                requests.send(together(*(request(number + each) for each in range(4))))
            await settle()
            assert requests.taken == 1
            parts.disk.release()
            answers = [each for message in await writer.wait_for(3) for each in (message, *message.more)]
            assert [each.results[0].base_offset for each in answers] == list(range(12))


async def test_each_request_has_its_own_time_limit(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts) as (requests, writer):
            requests.send(request(1))
            for number in (2, 3):  # a shorter limit than the one that is waited for, and one after that was over
                hurried = request(number, chain=number)
                hurried.head.timeout_ms = 1
                requests.send(hurried)
                found = (await writer.wait_for(number - 1))[-1]
                code = found.results[0].error.code
                assert (found.correlation_id, code) == (number, common_pb2.REQUEST_TIMED_OUT)
            parts.disk.release()
            last = (await writer.wait_for(3))[-1]
            assert (last.correlation_id, last.results[0].error.code) == (1, 0)


async def test_acks_zero_is_answered_only_when_it_is_refused(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        requests.send(request(1, acks=log_pb2.NO_ACK))
        requests.send(request(2, partition=9, acks=log_pb2.NO_ACK))
        requests.send(request(3))
        refused, accepted = await writer.wait_for(2)
        assert (refused.correlation_id, refused.results[0].error.code) == (2, common_pb2.UNKNOWN_TOPIC_ID)
        assert (accepted.correlation_id, accepted.results[0].base_offset) == (3, 1)


@pytest.mark.parametrize("acks", [log_pb2.ALL, log_pb2.NO_ACK])
async def test_a_bug_in_an_append_refuses_its_batch_and_no_other(
    acks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Parts(tmp_path, partitions=2) as parts, session(parts) as (requests, writer):

        def fail(*_: Any, **__: Any) -> Any:
            raise KeyError("a bug")

        monkeypatch.setattr(parts.registry.find(TOPIC_ID, 0), "append", fail)
        batch = batch_of(b"x")
        requests.send(RawClient.request(1, [(TOPIC_ID, 0, 3, 1, batch), (TOPIC_ID, 1, 3, 1, batch)], acks))
        (response,) = await writer.wait_for(1)
        assert [result.HasField("error") for result in response.results] == [True, False]
        assert parts.registry.find(TOPIC_ID, 1).log_end_offset == 1


async def test_refusals_of_acks_zero_that_the_client_does_not_read_stop_the_stream(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts, max_in_flight=2) as (requests, writer):
        writer.stalled = True
        for correlation_id in range(5):
            requests.send(request(correlation_id, partition=9, acks=log_pb2.NO_ACK))
        await settle()
        assert parts.registry.counters.produces_unanswered == 2
        await writer.resume()
        assert len(await writer.wait_for(5)) == 5


async def test_one_request_may_succeed_in_part(tmp_path: Path) -> None:
    async with Parts(tmp_path, partitions=2) as parts, session(parts) as (requests, writer):
        good = batch_of(b"x")
        requests.send(
            RawClient.request(
                1,
                [
                    (TOPIC_ID, 0, 3, 1, good),
                    (TOPIC_ID, 7, 3, 1, good),
                    (TOPIC_ID, 0, 2, 1, good),
                    (TOPIC_ID, 1, 3, 1, good),
                ],
            )
        )
        (response,) = await writer.wait_for(1)
        assert [result.error.code for result in response.results] == [
            common_pb2.NONE,
            common_pb2.UNKNOWN_TOPIC_ID,
            common_pb2.FENCED_LEADER_EPOCH,
            common_pb2.NONE,
        ]


async def test_deleting_the_topic_answers_who_waits(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        async with session(parts) as (requests, writer):
            requests.send(request(1))
            await settle()
            parts.registry.find(TOPIC_ID, 0)
            parts.registry.on_metadata(type(parts.image)(offset=2), [removal()])
            (response,) = await writer.wait_for(1)
            assert response.results[0].error.code == common_pb2.UNKNOWN_TOPIC_ID


async def test_a_failing_disk_is_answered_as_such_and_other_directories_go_on(tmp_path: Path) -> None:
    async with Parts(tmp_path, partitions=2, dirs=2) as parts:
        first, second = (parts.registry.find(TOPIC_ID, number) for number in (0, 1))
        assert parts.logs.dir_of(first.log) != parts.logs.dir_of(second.log)
        parts.disk.held = True
        async with session(parts) as (requests, writer):
            requests.send(request(1, partition=0))
            await settle()
            parts.logs.mark_dir_offline(parts.logs.dir_of(first.log), OSError(errno.EIO, "bad sector"))
            (response,) = await writer.wait_for(1)
            assert response.results[0].error.code == common_pb2.STORAGE_ERROR
            assert "bad sector" in response.results[0].error.message
            parts.disk.release()
            requests.send(request(2, partition=0, chain=2))
            requests.send(request(3, partition=1))
            answers = {r.correlation_id: r.results[0] for r in await writer.wait_for(3)}
            assert answers[2].error.code == common_pb2.STORAGE_ERROR
            assert not answers[3].HasField("error")


def test_a_bug_in_a_flush_stops_its_partition_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No fsync has failed, so the disk is as good as before; what the partition's memory says may be wrong."""

    async def scenario() -> None:
        async with Parts(tmp_path, partitions=2) as parts:
            first = parts.registry.find(TOPIC_ID, 0)

            def fail(ticket: object) -> None:
                raise KeyError("a bug")

            monkeypatch.setattr(first.log, "_run_flush", fail)
            async with session(parts) as (requests, writer):
                requests.send(request(1, partition=0))
                (response,) = await writer.wait_for(1)
                assert response.results[0].error.code == common_pb2.STORAGE_ERROR
                assert "a bug" in response.results[0].error.message
                requests.send(request(2, partition=0, chain=2))
                requests.send(request(3, partition=1))
                answers = {r.correlation_id: r.results[0] for r in await writer.wait_for(3)}
                assert answers[2].error.code == common_pb2.STORAGE_ERROR
                assert not answers[3].HasField("error")
            assert parts.logs.offline_dirs == {}
            parts.registry.retry_failed()
            await settle()
            with pytest.raises(StorageError, match="restart"):
                parts.registry.find(TOPIC_ID, 0)

    asyncio.run(scenario())
    line = next(record for record in caplog.records if record.levelname == "ERROR" and "t-0" in record.getMessage())
    assert line.exc_info is not None


async def test_a_flush_without_memory_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Parts(tmp_path) as parts:
        partition = parts.registry.find(TOPIC_ID, 0)
        run = partition.log._run_flush

        def fail(ticket: object) -> None:
            monkeypatch.setattr(partition.log, "_run_flush", run)
            raise MemoryError

        monkeypatch.setattr(partition.log, "_run_flush", fail)
        async with session(parts) as (requests, writer):
            requests.send(request(1))
            (response,) = await writer.wait_for(1)
            assert "MemoryError" in response.results[0].error.message
            parts.registry.housekeep()
            await settle()
            assert partition.log.flushed_end_offset == partition.log_end_offset > 0
        assert parts.logs.offline_dirs == {}


def test_a_stream_with_too_many_broken_chains_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce_session, "MAX_BROKEN_CHAINS", 3)

    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            with pytest.raises(BrokerOverloaded, match="more than 3 partitions"):
                async with session(parts) as (requests, _):
                    for number in range(4):
                        requests.send(request(number, partition=100 + number))

    asyncio.run(scenario())


def test_a_partition_that_closes_answers_everyone_even_when_a_stream_is_over_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce_session, "MAX_BROKEN_CHAINS", 0)

    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            parts.disk.held = True
            async with session(parts) as (_, other):
                with pytest.raises(BrokerOverloaded):
                    async with session(parts) as (requests, _):
                        requests.send(request(1))
                        await settle()
                        answers: list[BaseException | None] = []
                        partition = parts.registry.find(TOPIC_ID, 0)
                        partition.append(batch_of(b"another client's"), 3, answers.append)
                        partition.close(UnknownTopicId("deleted"))
                        assert [type(answer) for answer in answers] == [UnknownTopicId]
                assert not other.written

    asyncio.run(scenario())


async def test_a_client_that_does_not_read_its_answers_is_not_read_either(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts, max_in_flight=3) as (requests, writer):
        writer.stalled = True
        for number in range(50):
            requests.send(request(number))
        await settle()
        assert requests.taken <= 4
        await writer.resume()
        assert len(await writer.wait_for(50)) == 50


def test_a_flush_that_is_refused_for_now_is_answered_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = True
    run = FlushTicket.run

    def run_or_refuse(self: FlushTicket) -> None:
        if refused:
            raise StorageError("too many open files")
        run(self)

    monkeypatch.setattr(FlushTicket, "run", run_or_refuse)

    async def scenario() -> None:
        nonlocal refused
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            requests.send(request(1))
            (response,) = await writer.wait_for(1)
            assert response.results[0].error.code == common_pb2.STORAGE_ERROR
            partition = parts.registry.find(TOPIC_ID, 0)
            assert partition.high_watermark == 0
            refused = False
            partition.housekeep()
            await settle()
            assert partition.high_watermark == 1
            assert not parts.logs.offline_dirs

    asyncio.run(scenario())


def heavy_batch() -> bytes:
    pattern = random.Random(1).randbytes(1 << 14)
    return batch_of(pattern * (produce_session.CHECK_ON_LOOP_BYTES // len(pattern) + 1), codec=Codec.ZSTD)


def test_a_batch_that_takes_long_to_check_is_checked_off_the_loop_and_keeps_its_place(tmp_path: Path) -> None:
    heavy = heavy_batch()

    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            log = parts.registry.find(TOPIC_ID, 0).log
            parts.disk.held = True
            requests.send(RawClient.request(1, [(TOPIC_ID, 0, 3, 1, heavy)]))
            requests.send(request(2))
            await settle()
            assert log.log_end_offset == 0, (
                "the heavy batch was checked on the event loop, or the second batch was appended before it"
            )
            parts.disk.release()
            answers = {r.correlation_id: r.results[0].base_offset for r in await writer.wait_for(2)}
            assert answers == {1: 0, 2: 1}

    asyncio.run(scenario())


def test_a_heavy_batch_that_lies_is_refused_like_any_other(tmp_path: Path) -> None:
    honest = heavy_batch()
    torn = honest[:-1] + bytes([honest[-1] ^ 1])

    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            requests.send(RawClient.request(1, [(TOPIC_ID, 0, 3, 1, torn), (TOPIC_ID, 9, 3, 1, honest)]))
            (response,) = await writer.wait_for(1)
            assert [r.error.code for r in response.results] == [
                common_pb2.CORRUPT_MESSAGE,
                common_pb2.UNKNOWN_TOPIC_ID,
            ]

    asyncio.run(scenario())


async def test_an_answer_that_was_ready_before_a_pause_waits_for_the_next_lease_and_a_refusal_does_not(
    tmp_path: Path,
) -> None:
    async with Parts(tmp_path, partitions=2) as parts, session(parts) as (requests, writer):
        partition = parts.registry.find(TOPIC_ID, 0)

        class Pausing(PendingAcks):
            def advance(self, durable_end_offset: int) -> None:
                super().advance(durable_end_offset)  # answered: the response waits for the session's task
                parts.lease.end()  # the process is stopped, and resumed when the lease is over

        partition._acks.durable = partition._acks.committed = Pausing()
        requests.send(request(1))
        requests.send(request(2, partition=1))
        await settle()
        assert [each.correlation_id for each in writer.written if not each.results[0].error.code] == []
        requests.send(request(3))
        await writer.wait_for(1)
        assert {each.results[0].error.code for each in writer.written} == {common_pb2.NOT_LEADER_OR_FOLLOWER}
        partition._acks.durable, partition._acks.committed = PendingAcks(), PendingAcks()
        parts.lease.renew()
        responses = await writer.wait_for(3)
        accepted = [each.correlation_id for each in responses if not each.results[0].HasField("error")]
        assert accepted[0] == 1
        assert not parts.lease.waiting


class LeavingClient:
    """Takes an answer, and is gone before the server hears that it went out."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def write(self, message: log_pb2.ProduceResponse) -> None:
        self.reached.set()
        await asyncio.Event().wait()


async def test_a_request_counts_although_its_client_left_with_the_answer(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        counters = parts.registry.counters
        requests, client = Requests[wire.Produce](), LeavingClient()
        session = ProduceSession(
            parts.registry, SharedTurns(TURN_BYTES), HeavyWork(parts.disk), max_in_flight=5, default_timeout_ms=30_000
        )
        running = asyncio.create_task(session.run(requests.__aiter__(), client))
        requests.send(RawClient.request(1, [(TOPIC_ID, 0, 3, 1, batch_of(b"x"))], log_pb2.ALL))
        async with asyncio.timeout(60):
            await client.reached.wait()
        assert counters.produces_unanswered == 1
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert counters.requests["Produce"].outcomes == {"NONE": 1}
        assert counters.requests["Produce"].stages["total"].cumulative()[-1] == ("+Inf", 1)
        assert counters.produces_unanswered == 0
