"""A broker's log directory on a virtual disk, and the threads that wait for it.

The files are `tests.support.memory_storage`: a loss of power takes unsynced bytes, partly or all, and may tear writes
anywhere. This module decides about times: the disk does a piece of work at one instant, some time after the request,
and reports its end some time after that. In between the process continues, is paused, or dies.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from broker.log.log_dir import OFFSET_CHECKPOINT, decode_lines
from tests.simulation.dataplane.loop import HAND_OVER_S
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.process import Process
from tests.support.memory_storage import Fault, MemoryStorage, PowerLoss

if TYPE_CHECKING:
    from tests.simulation.process import Host

QUICK_S = (0.0002, 0.0005, 0.003)
LOGS = "/logs"


class LogDisk:
    """The disk of one host that has the logs on it. It outlives processes."""

    def __init__(self, host: Host, chance: random.Random) -> None:
        self.host = host
        self.storage = MemoryStorage()
        self.sync_s: tuple[float, ...] = QUICK_S
        """How long a piece of work takes: one of these."""
        self.failed = False
        """Whether it has failed, or refused, anything that the simulation planned."""
        self.loses_all = False
        """Whether the next power cut takes everything that was not synced, and not as the dice say."""
        self._random = chance
        self._dies_with_power = False

    @property
    def dead(self) -> bool:
        """Whether the process is gone in the midst of an operation."""
        return self.storage.crash_at is not None and self.storage.operations >= self.storage.crash_at

    def die_after(self, operations: int) -> None:
        """Let the process, or the machine, go after so many more operations."""
        self.storage.crash_at = self.storage.operations + operations
        self._dies_with_power = self._random.random() < 0.5

    def break_now(self) -> None:
        """Fail every sync from now on; bytes written since the last one are gone when the machine starts again."""
        self.failed = True
        self.storage.faults = [Fault("datasync", errno=errno.EIO), Fault("sync_dir", errno=errno.EIO)]

    def fill(self) -> None:
        """Leave no room."""
        self.failed = True
        self.storage.capacity_bytes = self.storage.used_bytes()

    def lose_half(self, path: str) -> None:
        """Lose the second half of a file that is at rest, though it was synced."""
        self.storage.lose_durably(path, len(self.storage.content(path)) // 2)

    def flip(self, path: str, first: int, share: float) -> None:
        """Change one byte of a file that is at rest, at this share of what it has from position `first` on."""
        data = self.storage.raw(path)
        data[first + int(share * (len(data) - first))] ^= 0x20
        self.storage.lose_durably(path, len(data))  # nothing is lost but the old byte

    def lose_directory(self, path: str) -> None:
        """Lose a directory that is at rest, with its files."""
        for name in self.storage.list_sizes(path):
            self.storage.remove(f"{path}/{name}")
        self.storage.sync_dir(path)
        self.storage.remove_dir(path)
        self.storage.sync_dir(path.rpartition("/")[0])

    def recovery_point(self, key: PartitionKey) -> int:
        """Return below which offset a start takes a log for durable without a look."""
        path = f"{LOGS}/{OFFSET_CHECKPOINT}"
        if self.storage.exists(path):
            for line in decode_lines(path, "offsets", bytes(self.storage.content(path))):
                topic_id, partition, _, recovery_point, _ = line.split(" ")
                if (bytes.fromhex(topic_id), int(partition)) == key:
                    return int(recovery_point)
        return 0

    def mend(self) -> None:
        """Make it quick, empty enough and whole."""
        self.sync_s = QUICK_S
        self.storage.capacity_bytes = None
        self.storage.faults = []

    def process_died(self, with_machine: bool) -> None:
        """The process is gone; if its machine is too, or its disk is broken, unsynced bytes are lost."""
        broken = bool(self.storage.faults)
        lost = with_machine or broken or (self.dead and self._dies_with_power)
        dice = _Lowest() if self.loses_all else self._random
        self.storage.crash(dice if lost else None)
        self.storage.faults = []
        self.loses_all = False


class _Lowest(random.Random):
    """Dice that always show the least: nothing survives that need not."""

    def randint(self, a: int, b: int) -> int:
        return a

    def random(self) -> float:
        return 1.0


class SimExecutor(Executor):
    """Threads of a process that wait for its disk."""

    def __init__(self, process: Process, disk: LogDisk, chance: random.Random) -> None:
        self._process = process
        self._disk = disk
        self._random = chance

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it after a while; the future is done a little later."""
        future: Future[Any] = Future()

        def begin() -> None:
            try:
                result, error = fn(*args, **kwargs), None
            except Exception as raised:  # travels to the waiting caller, as from a thread
                result, error = None, raised
            if self._disk.dead:
                raise PowerLoss
            self._process.after(self._random.uniform(0, HAND_OVER_S), finish, result, error)

        def finish(result: object, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._process.after(self._random.choice(self._disk.sync_s) * self._random.uniform(0.5, 1.5), begin)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing has to be given back."""
