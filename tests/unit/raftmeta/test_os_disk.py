"""The real disk behind the port, and the whole node on it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker.clock import SystemClock
from raftlog.errors import RaftlogError, StorageError
from raftlog.v1.records_pb2 import MetadataCommand, UnfenceBrokerCommand
from raftmeta.disk import OsDisk
from raftmeta.quorum.config import QuorumConfig
from raftmeta.quorum.voter_metadata import QuorumMetadata, open_quorum
from tests.support.metadata import create_topic, register


def test_operations_do_what_the_port_says(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    disk = OsDisk(directory)
    disk.lock()
    disk.write("a", b"one")
    disk.append("a", b"two")
    disk.append("a", b"three")
    disk.sync("a")
    assert disk.read("a") == b"onetwothree"
    disk.truncate("a", 6)
    disk.append("a", b"!")
    assert disk.read("a") == b"onetwo!"
    disk.write("a", b"new")
    disk.rename("a", "b")
    disk.append("b", b"er")
    disk.sync("b")
    disk.sync_dir()
    disk.write("c", b"")
    assert sorted(disk.names()) == ["b", "c"]
    disk.remove("c")
    assert disk.names() == ["b"]
    assert disk.read("b") == b"newer"
    with pytest.raises(FileNotFoundError):
        disk.append("missing", b"x")
    disk.close()


def test_a_directory_has_one_user_at_a_time(tmp_path: Path) -> None:
    first, second = OsDisk(tmp_path), OsDisk(tmp_path)
    first.lock()
    with pytest.raises(BlockingIOError):
        second.lock()
    first.close()
    second.lock()
    second.close()


def test_a_node_on_a_real_directory_comes_back_with_everything(tmp_path: Path) -> None:
    config = QuorumConfig(node_id=1, directory=str(tmp_path / "meta"))
    fatal: list[RaftlogError] = []

    async def opened(executor: ThreadPoolExecutor) -> QuorumMetadata:
        metadata = await open_quorum(config, executor, SystemClock(), fatal.append)
        await metadata.start()
        await metadata.wait_ready()
        return metadata

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            metadata = await opened(executor)
            with pytest.raises(StorageError, match="in use by another process"):
                await opened(executor)
            epoch = (await metadata.propose(register())).broker_epoch
            await metadata.propose(
                MetadataCommand(unfence_broker=UnfenceBrokerCommand(broker_id=1, broker_epoch=epoch))
            )
            for number in range(30):
                await metadata.propose(create_topic(f"t{number}", number))
            image = metadata.image
            await metadata.close()
            again = await opened(executor)
            assert again.image.topics.keys() == image.topics.keys()
            assert again.image.brokers.keys() == image.brokers.keys()
            assert again.image.controller_epoch > image.controller_epoch
            await again.close()
        assert fatal == []

    asyncio.run(main())
