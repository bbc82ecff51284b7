"""A broker registers, waits for an earlier process to lapse, and says who is in its way when that one stays."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from broker import registration
from broker.registration import Registration, register
from raftlog.errors import DuplicateBrokerRegistration, InvalidRequestError
from tests.support import virtual_time
from tests.support.memory_metadata import MemoryMetadata

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
        assert metadata.image.brokers[4].unclean, "the mark was of an earlier life"

    virtual_time.run(scenario())


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
        assert awaited == ["the process that is registered as broker 4 at 127.0.0.1:7777 to lapse"]
        assert 100 - len(metadata.refuse_with) == 3, "at 0, 0.25 and 0.75 s: every attempt is an entry in the log"

    virtual_time.run(scenario())
