"""Partitions follow the metadata, also when the disk does not let them at first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from raftlog.errors import CorruptRecordError, InternalError, InvalidRequestError, StorageFull, UnknownTopicId
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with, partition_records, removal


async def apply_again(parts: Parts) -> None:
    parts.registry.retry_failed()
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_partition_that_could_not_be_made_is_made_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LogManager.create
    full = True

    def create(self: LogManager, *arguments: Any, **options: Any) -> Any:
        if full:
            raise StorageFull("no space left")
        return make(self, *arguments, **options)

    monkeypatch.setattr(LogManager, "create", create)

    async def scenario() -> None:
        nonlocal full
        async with Parts(tmp_path, partitions=2) as parts:
            with pytest.raises(StorageFull):
                parts.registry.find(TOPIC_ID, 0)
            await apply_again(parts)
            with pytest.raises(StorageFull):
                parts.registry.find(TOPIC_ID, 1)
            full = False
            await apply_again(parts)
            assert [parts.registry.find(TOPIC_ID, number).leader_epoch for number in (0, 1)] == [3, 3]

    asyncio.run(scenario())


async def make_damaged(root: Path) -> None:
    """Leave a log behind that ends below its recovery point."""
    async with Parts(root) as parts:
        parts.registry.find(TOPIC_ID, 0).append(batch_of(b"lost"), 3, None)
    (segment,) = (root / "logs-0" / "t-0").glob("*.log")
    segment.write_bytes(b"")
    (root / "logs-0" / "clean-shutdown").unlink()


def test_a_damaged_log_goes_with_its_topic(tmp_path: Path) -> None:
    async def scenario() -> None:
        await make_damaged(tmp_path)
        async with Parts(tmp_path) as parts:
            with pytest.raises(CorruptRecordError):
                parts.registry.find(TOPIC_ID, 0)
            image = type(parts.image)(offset=2)
            parts.registry.on_metadata(image, [removal()])
            await parts.registry.wait_applied(2)
            assert not (tmp_path / "logs-0" / "t-0").exists()
            with pytest.raises(UnknownTopicId):
                parts.registry.find(TOPIC_ID, 0)

    asyncio.run(scenario())


def test_a_damaged_log_of_an_unknown_topic_is_set_aside(tmp_path: Path) -> None:
    async def scenario() -> None:
        await make_damaged(tmp_path)
        parts = Parts(tmp_path)
        parts.image = replace(parts.image, topics={}, topic_id_by_name={})
        async with parts:
            names = [path.name for path in (tmp_path / "logs-0").iterdir() if path.is_dir()]
            assert names == [f"~stray-{TOPIC_ID.hex()}-0"]

    asyncio.run(scenario())


def test_what_is_no_topic_id_is_said_to_be_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            with pytest.raises(InvalidRequestError, match="16 bytes"):
                parts.registry.find(b"x" * 1_000, 0)

    asyncio.run(scenario())


def test_a_topic_whose_metadata_cannot_be_applied_is_not_served_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a leadership that was taken away would go on here, and the controller would hear that it was let go."""

    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            partition = parts.registry.find(TOPIC_ID, 0)

            def fail(configs: object) -> None:
                raise ValueError("no such value")

            monkeypatch.setattr(LogConfig, "from_topic_configs", fail)
            moved = image_with(1, offset=2, leader_epoch=4, leader=2, replicas=(1, 2))
            parts.registry.on_metadata(moved, partition_records(moved))
            await parts.registry.wait_applied(2)
            with pytest.raises(InternalError, match="cannot apply"):
                parts.registry.find(TOPIC_ID, 0)
            with pytest.raises(InternalError):
                partition.append(batch_of(b"a"), -1, None)

    asyncio.run(scenario())
