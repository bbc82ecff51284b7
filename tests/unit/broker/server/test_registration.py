"""A broker registers, waits for its earlier process to lapse, heartbeats, and gives its lease up."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from broker.log.log_dir import LOCK_FILE
from broker.server import registration
from broker.server.broker_role import IDENTITY_BYTES, lock_identity
from broker.server.lease import ServingLease
from broker.server.registration import HeartbeatOptions, Heartbeats, Registration, register
from raftlog.errors import (
    BrokerIdNotRegistered,
    BrokerUnavailable,
    DuplicateBrokerRegistration,
    InconsistentClusterId,
    InvalidRequestError,
    NotController,
    RaftlogError,
    StaleBrokerEpoch,
)
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from raftmeta.decide.brokers import MAX_UNSYNCED_TOPICS
from tests.support import virtual_time
from tests.support.memory_metadata import FakeHeartbeats, MemoryMetadata
from tests.support.virtual_time import LoopClock

DIRECTORY = b"the first logdir"
LOCK = b"the lock of this"


def described(previous_broker_epoch: int | None = None, lock_identity: bytes = LOCK) -> Registration:
    return Registration(
        broker_id=4,
        host="127.0.0.1",
        port=9095,
        rack="r",
        directory_id=DIRECTORY,
        lock_identity=lock_identity,
        previous_broker_epoch=previous_broker_epoch,
    )


def test_a_registered_broker_begins_fenced_and_unclean_unless_its_last_epoch_says_otherwise() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        epoch = await register(metadata, described(), 1_500)
        broker = metadata.image.brokers[4]
        assert (broker.broker_epoch, broker.fenced, broker.port, broker.rack) == (epoch, True, 9095, "r")
        assert (broker.directory_id, broker.lock_identity) == (DIRECTORY, LOCK)
        again = await register(metadata, described(previous_broker_epoch=epoch), 1_500)
        assert again > epoch
        assert not metadata.image.brokers[4].unclean
        await register(metadata, described(previous_broker_epoch=epoch), 1_500)
        assert metadata.image.brokers[4].unclean, (
            "the broker must count as unclean, as the mark is of an earlier process"
        )

    virtual_time.run(scenario())


def test_a_registration_says_what_was_fsynced_before_it_counted_unless_too_many_topics_were_not() -> None:
    topics = frozenset(number.to_bytes(16, "big") for number in range(MAX_UNSYNCED_TOPICS + 1))
    few = replace(described(), synced_broker_epoch=7, unsynced_topic_ids=topics - {bytes(16)})
    command = few.command(bytes(16)).register_broker
    assert command.synced_broker_epoch == 7
    assert list(command.unsynced_topic_ids) == sorted(few.unsynced_topic_ids)
    many = replace(few, unsynced_topic_ids=topics).command(bytes(16)).register_broker
    assert not many.HasField("synced_broker_epoch")
    assert not many.unsynced_topic_ids


def test_a_clean_stop_stays_clean_when_the_machine_is_booted_meanwhile() -> None:
    """The lock is of the running kernel, and another one after a boot; the directory is the same."""

    async def scenario() -> None:
        metadata = MemoryMetadata()
        epoch = await register(metadata, described(), 1_500)
        await register(metadata, described(previous_broker_epoch=epoch, lock_identity=bytes(16)), 1_500)
        assert not metadata.image.brokers[4].unclean

    virtual_time.run(scenario())


def test_all_directories_that_work_are_registered() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        other = b"the other logdir"
        await register(metadata, replace(described(), other_directory_ids=(other,)), 1_500)
        assert metadata.image.brokers[4].directory_ids == (DIRECTORY, other)
        await register(metadata, replace(described(), directory_id=other), 1_500)
        assert not metadata.image.brokers[4].former_directory_ids
        await register(metadata, replace(described(), directory_id=bytes(16)), 1_500)
        assert metadata.image.brokers[4].former_directory_ids == (other,)

    virtual_time.run(scenario())


def test_an_earlier_process_is_waited_for() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        metadata.refuse_with = [DuplicateBrokerRegistration("alive"), DuplicateBrokerRegistration("alive")]
        assert await register(metadata, described(), 1_500) > 0

    virtual_time.run(scenario())


def test_one_that_stays_alive_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "PATIENCE_MARGIN_S", 0.0)

    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(4, port=7777)
        with pytest.raises(DuplicateBrokerRegistration, match=r"broker 4 at 127\.0\.0\.1:7777 and stays alive"):
            await register(metadata, described(lock_identity=bytes(16)), 100)

    virtual_time.run(scenario())


def test_a_refusal_for_good_is_not_repeated() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        metadata.refuse_with = [InvalidRequestError("no")]
        with pytest.raises(InvalidRequestError):
            await register(metadata, described(), 1_500)

    virtual_time.run(scenario())


def test_a_process_in_the_way_is_asked_about_ever_more_rarely_and_told_of() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(4, port=7777)
        metadata.refuse_with = [DuplicateBrokerRegistration("alive")] * 100
        awaited: list[str] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await register(metadata, described(), 1_500, awaited.append)
        assert awaited == ["the session of the process registered as broker 4 at 127.0.0.1:7777 to end"]
        assert 100 - len(metadata.refuse_with) == 3, (
            "the broker must try three times, at 0, 0.25 and 0.75 s, as each try is an entry in the metadata log"
        )

    virtual_time.run(scenario())


WAIT_S = 10.0


class Sender:
    """Heartbeats of broker 1, and the test's view of them."""

    def __init__(self, interval_ms: int, answer_timeout_ms: int) -> None:
        self.metadata = MemoryMetadata()
        self.lease = ServingLease(LoopClock())
        self.applied_offset = 7
        self.fatal: list[RaftlogError] = []
        options = HeartbeatOptions(
            broker_id=1,
            broker_epoch=3,
            cluster_id="test",
            interval_ms=interval_ms,
            answer_timeout_ms=answer_timeout_ms,
        )
        self.heartbeats = Heartbeats(self.metadata, self.lease, options, lambda: self.applied_offset, self.fatal.append)

    async def stream(self) -> FakeHeartbeats:
        """Accept the next stream."""
        stream = FakeHeartbeats()
        self.metadata.streams.put_nowait(stream)
        return stream


def run(work: Callable[[Sender], Awaitable[None]], *, interval_ms: int = 50, answer_timeout_ms: int = 300) -> None:
    async def main() -> None:
        sender = Sender(interval_ms, answer_timeout_ms)
        sender.heartbeats.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await work(sender)
        finally:
            await sender.heartbeats.close()

    virtual_time.run(main())


def granted(request: HeartbeatRequest, lease_ms: int = 1200, **more: bool) -> HeartbeatResponse:
    return HeartbeatResponse(sequence=request.sequence, lease_ms=lease_ms, **more)  # type: ignore[arg-type] # flags


def test_a_lease_is_there_once_the_controller_grants_one() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        first = await stream.sent.get()
        assert (first.broker_id, first.broker_epoch, first.applied_offset, first.cluster_id) == (1, 3, 7, "test")
        stream.answer(granted(first, 0, fenced=True))
        sender.applied_offset = 9
        second = await stream.sent.get()
        assert (second.sequence, second.applied_offset) == (first.sequence + 1, 9)
        assert not sender.lease.valid()
        assert sender.heartbeats.fenced
        stream.answer(granted(second))
        await sender.heartbeats.wait_serving()
        assert sender.lease.valid()

    run(work)


def test_being_fenced_ends_the_lease_at_once() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        stream.answer(granted(await stream.sent.get()))
        await sender.heartbeats.wait_serving()
        stream.answer(granted(await stream.sent.get(), 0, fenced=True))
        await stream.sent.get()
        assert not sender.lease.valid()

    run(work)


def test_a_silent_controller_is_left_for_another_stream_and_sequences_rise_over_all_of_them() -> None:
    async def work(sender: Sender) -> None:
        silent = await sender.stream()
        first = await silent.sent.get()
        other = await sender.stream()
        second = await other.sent.get()
        assert silent.closed
        assert second.sequence > first.sequence
        other.answer(granted(second))
        await sender.heartbeats.wait_serving()

    run(work)


def test_a_newer_controller_is_followed_at_once_and_an_older_one_is_not() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        response = granted(await stream.sent.get())
        response.controller_epoch = 5
        stream.answer(response)
        await sender.heartbeats.wait_serving()
        sender.heartbeats.follow(5)
        await stream.sent.get()
        stayed = not stream.closed
        other = await sender.stream()
        sender.heartbeats.follow(6)
        await other.sent.get()
        assert stayed
        assert stream.closed

    run(work, answer_timeout_ms=60_000)  # its silence does not tell within the test


@pytest.mark.parametrize(
    "error",
    [
        NotController("another one leads"),
        BrokerUnavailable("broken"),
        asyncio.CancelledError(),  # gRPC's word for a call that another task has cancelled
        KeyError("a bug"),
    ],
)
def test_an_error_that_passes_opens_the_next_stream(error: BaseException) -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        await stream.sent.get()
        stream.answer(error)
        other = await sender.stream()
        other.answer(granted(await other.sent.get()))
        await sender.heartbeats.wait_serving()
        assert not sender.fatal

    run(work)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StaleBrokerEpoch("x"), "another process has since registered as broker 1"),
        (BrokerIdNotRegistered("x"), "broker 1 was unregistered"),
        (InconsistentClusterId("x"), "another cluster"),
    ],
)
def test_a_broker_that_the_cluster_has_no_more_says_why_and_stops_serving(error: RaftlogError, words: str) -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        stream.answer(granted(await stream.sent.get()))
        await sender.heartbeats.wait_serving()
        stream.answer(error)
        while not sender.fatal:  # noqa: ASYNC110 # no event announces it
            await asyncio.sleep(0.001)
        assert words in str(sender.fatal[0])
        assert type(sender.fatal[0]) is type(error)
        assert not sender.lease.valid()

    run(work)


def test_stopping_waits_until_others_have_taken_over_then_gives_the_lease_up() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        stream.answer(granted(await stream.sent.get()))
        await sender.heartbeats.wait_serving()
        leaving = asyncio.ensure_future(sender.heartbeats.shut_down(5.0))
        while not (request := await stream.sent.get()).wants_shutdown:
            stream.answer(granted(request))
        stream.answer(granted(request))
        request = await stream.sent.get()
        assert not leaving.done()
        stream.answer(granted(request, may_shut_down=True))
        assert await leaving
        releasing = asyncio.ensure_future(sender.heartbeats.release())
        while not (request := await stream.sent.get()).lease_released:
            stream.answer(granted(request))
        assert not sender.lease.valid()
        stream.answer(granted(request, fenced=True))
        await releasing
        assert not sender.lease.valid()

    run(work)


def test_stopping_without_a_controller_does_not_take_long() -> None:
    async def work(sender: Sender) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert not await sender.heartbeats.shut_down(0.4)
        await sender.heartbeats.release()
        assert loop.time() - began_s < 2.0

    run(work)


def test_what_the_controller_waits_for_is_told_early() -> None:
    async def work(sender: Sender) -> None:
        stream = await sender.stream()
        await stream.sent.get()
        sender.heartbeats.kick()
        await stream.sent.get()

    run(work, interval_ms=60_000, answer_timeout_ms=90_000)  # the next one in turn does not come within the test


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log directory with its lock file, and a boot id beside it."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / LOCK_FILE).touch()
    (tmp_path / "boot").write_text("one\n")
    return tmp_path


def identity(directory: Path, logs: str = "logs") -> bytes:
    return lock_identity(str(directory / logs), "d1", directory / "boot")


def test_the_same_file_under_the_same_kernel_is_the_same_lock(directory: Path) -> None:
    assert identity(directory) == identity(directory)
    assert len(identity(directory)) == IDENTITY_BYTES


def test_a_copy_of_the_directory_is_another_lock(directory: Path) -> None:
    shutil.copytree(directory / "logs", directory / "copy")
    assert identity(directory, "copy") != identity(directory)


def test_after_a_boot_or_on_another_machine_it_is_another_lock(directory: Path) -> None:
    before = identity(directory)
    (directory / "boot").write_text("two\n")
    assert identity(directory) != before


def test_where_the_kernel_does_not_say_nothing_is_proved(directory: Path) -> None:
    (directory / "boot").unlink()
    assert identity(directory) != identity(directory)
