"""Power loss, kill -9 and a full disk at any moment of a log with transactions: then it knows what its batches say."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from broker.log.config import LogConfig
from raftlog.errors import StorageFull
from tests.support.log_driver import LogDriver
from tests.support.memory_storage import MemoryStorage, PowerLoss
from tests.support.transaction_histories import TransactionHistory, chain_of

CONFIG = LogConfig(segment_bytes=1_200, index_interval_bytes=300, file_delete_delay_ms=10)


class Life(TransactionHistory):
    """What happens to the first replica, which leads throughout."""

    def housekeep(self) -> None:
        self.checkpoint(0)

    def held(self, share: float = 1.0) -> None:
        """Flush, and move the high watermark."""
        log = self.log
        log.flush()
        log.high_watermark = self.high_watermark = max(self.high_watermark, int(log.flushed_end_offset * share))

    def live(self) -> None:
        """Transactions within segments and across them, restarts, and a truncation to an earlier segment."""
        self.produce(9)  # open throughout
        for number in range(5):
            self.produce(number % 3)
            self.produce(3 + number % 2, 2)
            self.produce(-1)
            self.mark([number % 3], number % 2 == 0)
            self.held(0.7)
            if number == 2:
                self.mark([3, 4], False)
                self.housekeep()
        self.roll(0)
        self.held()
        self.cycle()
        self.roll(0)  # nothing was appended to what is sealed now since the start
        self.mark([0, 3], False)
        self.produce(1)
        self.produce(4)
        self.held(0.6)
        self.log.roll()
        self.mark([1], False)
        self.log.flush()
        self.log.truncate_to(self.high_watermark, now_ms=self.now_ms)
        self.epoch += 1
        self.produce(0)
        self.mark([0, 4], False)
        self.held()
        self.replicas[0].clock.now += 20
        self.housekeep()
        self.mark([9], False)
        self.log.roll()
        self.held()
        self.cycle()
        self.produce(2)
        self.held()

    def cycle(self) -> None:
        """Stop cleanly, and start."""
        replica = self.replicas[0]
        assert replica.manager is not None
        replica.manager.close()
        replica.open()
        replica.log.high_watermark = self.high_watermark

    def check_first(self) -> None:
        """The first replica knows what its log says."""
        log = self.log
        self.high_watermark = min(self.high_watermark, log.log_end_offset)
        log.high_watermark = self.high_watermark
        self.chain = chain_of(log)
        self.check_log(log)


def born(storage: MemoryStorage) -> Life:
    """A life that has not begun: also its first opening may be crashed."""
    life = Life.__new__(Life)
    life.replicas = [LogDriver(storage, CONFIG)]
    life.leader = life.epoch = life.high_watermark = life.last_stable_offset = life.sent = 0
    life.chain = []
    return life


def lived(storage: MemoryStorage) -> Life:
    life = born(storage)
    life.replicas[0].open()
    life.live()
    return life


OPERATIONS = lived(MemoryStorage()).replicas[0].storage.operations


def test_the_script_is_worth_crashing() -> None:
    life = lived(MemoryStorage())
    life.check_first()
    assert life.log.segment_count > 5
    assert sum(segment.has_txn_index for segment in life.log.segments) > 3
    assert len(life.log.aborted_transactions(0, life.log.last_stable_offset)) >= 5
    assert OPERATIONS > 200


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kill", [True, False])
def test_a_crash_at_every_operation_leaves_what_the_log_says(part: int, kill: bool) -> None:
    for crash_at in range(part, OPERATIONS, 4):
        life = born(MemoryStorage(crash_at=crash_at))
        with pytest.raises(PowerLoss):
            life.replicas[0].open()
            life.live()
        for again in range(2):
            life.replicas[0].storage.crash(None if kill else Random(crash_at + again))
            life.replicas[0].open()
            life.check_first()
            life.epoch = max(life.epoch, life.log.leader_epochs.latest_epoch)
            for producer_id in (5, 6):
                life.produce(producer_id)
                life.mark([producer_id], producer_id == 5)
            life.log.roll()
        life.held()
        life.cycle()
        life.check_first()


@pytest.mark.parametrize("part", range(4))
def test_a_disk_that_is_full_at_any_moment_changes_nothing_that_is_known(part: int) -> None:
    """What could not be written is made anew from the log."""
    storage = MemoryStorage()
    used = lived(storage).replicas[0].storage.used_bytes
    for room in range(200 + part * 100, used(), 400):
        life = born(MemoryStorage(capacity_bytes=room))
        with suppress(StorageFull, OSError):  # what is appended, or the first start
            life.replicas[0].open()
            life.live()
        if life.replicas[0].opened is None:
            continue
        life.replicas[0].storage.capacity_bytes = 1 << 20
        life.replicas[0].storage.crash(Random(room))
        life.replicas[0].open()
        life.check_first()
