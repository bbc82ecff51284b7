"""What a broker says about the recovery of its logs while that takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.log.config import LogConfig
from broker.log.log_dir import PARTITION_METADATA
from broker.log.manager import LogManager
from broker.observability.health import Health
from broker.server import broker_role
from broker.server.broker_role import open_logs
from raftlog.testing import server_process
from tests.support.log_driver import LOG_DIR, TOPIC_ID, FakeClock, append, open_manager
from tests.support.memory_storage import MemoryFile, MemoryStorage

PATIENCE_S = 60.0


class Said(logging.Handler):
    """The lines about a recovery, and the numbers in them; `twice` is set when a line has those of the line before."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: set[str] = set()
        self.numbers: list[tuple[object, ...]] = []
        self.twice = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        fields = record.__dict__
        if fields.get("event") == "logs_recovering":
            self.messages.add(record.getMessage())
            self.numbers.append(tuple(fields.get(name) for name in ("identified", "recovered", "of")))
            if self.numbers[-2:-1] == self.numbers[-1:]:
                self.twice.set()


class SlowStorage(MemoryStorage):
    """A disk that opens some files only after two equal lines about the recovery."""

    def __init__(self, said: Said) -> None:
        super().__init__()
        self.said = said
        self.slow_at: tuple[str, ...] = ()

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        """Wait, then open."""
        if path in self.slow_at:
            self.said.twice.clear()
            assert self.said.twice.wait(PATIENCE_S), "it says nothing"
        return super().open(path, create=create)


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    broker_role.logger.addHandler(handler)
    level = broker_role.logger.level
    broker_role.logger.setLevel(logging.INFO)
    yield handler
    broker_role.logger.setLevel(level)
    broker_role.logger.removeHandler(handler)


async def test_a_long_recovery_says_how_far_it_is(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_role, "SAY_RECOVERING_EVERY_S", 0.005)
    storage = SlowStorage(said)
    manager = open_manager(storage)
    for partition in range(3):
        append(manager.create("t", TOPIC_ID, partition))
    manager.close()
    storage.slow_at = (f"{LOG_DIR}/t-1/{PARTITION_METADATA}", f"{LOG_DIR}/t-2/leader-epoch-checkpoint")
    health = Health(FakeClock(), 10_000)
    logs = LogManager(storage, [LOG_DIR], LogConfig(), FakeClock())
    with ThreadPoolExecutor(1) as disk:
        await open_logs(disk, logs, "cluster", 1, FakeClock(), health)
    assert {(1, 0, 3), (3, 2, 3)} <= set(said.numbers), "while it reads metadata, and while it recovers"
    assert said.messages == {server_process._RECOVERING}, "by which whoever waits for a server knows that it recovers"
    assert health.startup()[1]["recovered"] == 3
    assert len(logs.logs()) == 3
