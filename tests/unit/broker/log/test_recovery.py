"""The content of a log after a crash at every storage operation: a torn tail is truncated, any other damage fails
loudly."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from random import Random

import pytest

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from raftlog.errors import CorruptRecordError, StorageFull
from tests.support.fresh import seeds
from tests.support.log_driver import TOPIC_ID, LogDriver, open_manager
from tests.support.memory_storage import MemoryStorage, PowerLoss, moments
from tests.support.transaction_histories import TransactionHistory, chain_of

DIRECTORY = "/data/topic-0"
FIRST_LOG = f"{DIRECTORY}/{0:020d}.log"
CONFIG = LogConfig(index_interval_bytes=300)


def reopened(storage: MemoryStorage) -> LogManager:
    storage.crash(None)
    return open_manager(storage, config=CONFIG)


def driver_with(batches: int, config: LogConfig = CONFIG) -> LogDriver:
    driver = LogDriver(config=config)
    driver.open()
    for _ in range(batches):
        driver.append([driver.clock.now] * 2)
    return driver


def test_a_tail_cut_at_every_byte_ends_at_the_last_whole_batch() -> None:
    driver = driver_with(4)
    ends = [0]
    for batch in driver.chain:
        ends.append(ends[-1] + len(batch.data))
    whole = bytes(driver.storage.raw(FIRST_LOG))
    for cut in range(len(whole) + 1):
        storage = driver.storage.clone()
        del storage.raw(FIRST_LOG)[cut:]
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        batches = max(i for i, end in enumerate(ends) if end <= cut)
        assert log.log_end_offset == 2 * batches
        assert storage.raw(FIRST_LOG) == whole[: ends[batches]]


@pytest.mark.parametrize("tail", [bytes(1000), b"\xff" * 1000, b"\x01" * 64], ids=["zeros", "ones", "junk"])
def test_a_tail_of_other_bytes_is_cut_off(tail: bytes) -> None:
    driver = driver_with(4)
    whole = bytes(driver.storage.raw(FIRST_LOG))
    driver.storage.raw(FIRST_LOG).extend(tail)
    driver.crash(None)
    assert driver.storage.raw(FIRST_LOG) == whole
    driver.append()
    driver.check()


def test_a_batch_that_does_not_follow_is_no_part_of_the_log() -> None:
    driver = driver_with(2)
    data = driver.storage.raw(FIRST_LOG)
    data.extend(data[: len(driver.chain[0].data)])  # a sound batch, at the wrong offset
    driver.crash(None)
    assert driver.log.log_end_offset == 4


def test_every_bit_flipped_above_the_recovery_point_ends_the_log_before_it() -> None:
    driver = driver_with(3)
    sizes = [len(batch.data) for batch in driver.chain]
    for position in range(0, sum(sizes), 3):
        storage = driver.storage.clone()
        storage.raw(FIRST_LOG)[position] ^= 0x40
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        number = 0 if position < sizes[0] else 1 if position < sizes[0] + sizes[1] else 2
        if number == 0 and 12 <= position < 16:
            continue  # the epoch stands outside the checksum; a first batch may have any
        assert log.log_end_offset <= 2 * number + (2 if 12 <= position - sum(sizes[:number]) < 16 else 0)


def test_bit_rot_below_the_recovery_point_never_becomes_a_gap() -> None:
    driver = driver_with(6)
    driver.flush()
    driver.checkpoint()
    for index in (".index", ".timeindex"):  # so that the damage is met: the log is read from its start
        driver.storage.raw(FIRST_LOG.replace(".log", index)).clear()
    for position in range(0, len(driver.storage.raw(FIRST_LOG)), 7):
        storage = driver.storage.clone()
        storage.raw(FIRST_LOG)[position] ^= 0x01
        before = bytes(storage.raw(FIRST_LOG))
        manager = reopened(storage)
        if 12 <= position % len(driver.chain[0].data) < 16:
            continue  # the epoch stands outside the checksum
        assert manager.get(TOPIC_ID, 0) is None
        corrupt = manager.corrupt_logs[TOPIC_ID, 0]
        assert FIRST_LOG in str(corrupt.error)
        assert "position" in str(corrupt.error)
        assert storage.raw(FIRST_LOG) == before
        with pytest.raises(CorruptRecordError):
            manager.create("topic", TOPIC_ID, 0)


def test_a_flushed_tail_that_is_missing_is_loud() -> None:
    driver = driver_with(6)
    driver.flush()
    driver.checkpoint()
    del driver.storage.raw(FIRST_LOG)[-1:]
    assert (TOPIC_ID, 0) in reopened(driver.storage).corrupt_logs


def test_damage_below_the_high_watermark_is_loud_although_nothing_was_flushed_since() -> None:
    """flush.messages > 1: the checkpoint flushes what it calls committed, so a torn tail is never below it."""
    driver = driver_with(6, LogConfig(index_interval_bytes=300, flush_messages=1000))
    driver.log.high_watermark = driver.end
    driver.checkpoint()
    assert driver.log.flushed_end_offset == driver.end
    driver.storage.raw(FIRST_LOG)[-1] ^= 1
    driver.storage.raw(FIRST_LOG.replace(".log", ".index")).clear()
    assert (TOPIC_ID, 0) in reopened(driver.storage).corrupt_logs


def test_a_missing_segment_is_loud() -> None:
    driver = driver_with(12, LogConfig(segment_bytes=1_000, index_interval_bytes=300))
    driver.flush()
    driver.checkpoint()
    names = [segment.log_path for segment in driver.log.segments]
    assert len(names) >= 3
    for name in names:
        storage = driver.storage.clone()
        storage.remove(name)
        assert (TOPIC_ID, 0) in reopened(storage).corrupt_logs, name


def test_segments_behind_a_torn_one_go_too() -> None:
    driver = driver_with(12, LogConfig(segment_bytes=1_000, index_interval_bytes=300))
    names = [segment.log_path for segment in driver.log.segments]
    storage = driver.storage.clone()
    del storage.raw(names[1])[-10:]
    log = reopened(storage).get(TOPIC_ID, 0)
    assert log is not None
    assert [segment.log_path for segment in log.segments] == names[:2]
    assert storage.exists(names[2] + ".deleted")
    assert not storage.exists(names[2])


def spoiled_indexes() -> list[tuple[str, bytes | None]]:
    return [("gone", None), ("empty", b""), ("zeros", bytes(120)), ("junk", b"\xa5" * 121), ("short", b"\x00")]


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize(("name", "content"), spoiled_indexes())
def test_indexes_are_rebuilt_when_missing_or_wrong(suffix: str, name: str, content: bytes | None) -> None:
    driver = driver_with(20, LogConfig(segment_bytes=1_500, index_interval_bytes=300))
    driver.flush()
    driver.close()
    stems = [segment.stem for segment in driver.log.segments]
    assert len(stems) >= 3
    good = [bytes(driver.storage.raw(stem + suffix)) for stem in stems]
    for stem in stems:
        driver.storage.remove(stem + suffix)
        if content is not None:
            driver.storage.open(stem + suffix, create=True).write((content,), 0)
    driver.crash(None)
    driver.check()
    driver.close()
    assert [bytes(driver.storage.raw(stem + suffix)) for stem in stems] == good


def test_an_index_of_another_segment_is_not_believed() -> None:
    driver = driver_with(20, LogConfig(segment_bytes=1_500, index_interval_bytes=300))
    driver.flush()
    driver.close()
    first, second = (segment.stem for segment in driver.log.segments[:2])
    for suffix in (".index", ".timeindex"):
        driver.storage.raw(first + suffix)[:] = driver.storage.raw(second + suffix)
    driver.crash(None)
    driver.check()


def test_every_cut_of_the_active_index_is_good_enough() -> None:
    driver = driver_with(20)
    driver.flush()
    driver.checkpoint()
    path = FIRST_LOG.replace(".log", ".index")
    for cut in range(len(driver.storage.raw(path))):
        storage = driver.storage.clone()
        del storage.raw(path)[cut:]
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        assert log.log_end_offset == 40
        result = log.read(21, 1, 40, blocking=True)
        assert result is not None
        assert result.records == driver.chain[10].data


def test_leader_epochs_are_read_from_the_log_when_their_checkpoint_is_damaged() -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=600, index_interval_bytes=300))
    driver.open()
    for epoch in (2, 5, 9):
        driver.epoch = epoch
        driver.append()
        driver.append()
    driver.flush()
    entries = driver.log.leader_epochs.entries
    driver.close()
    for spoil in (b"junk", None):
        storage = driver.storage.clone()
        if spoil is None:
            storage.remove(f"{DIRECTORY}/leader-epoch-checkpoint")
        else:
            storage.raw(f"{DIRECTORY}/leader-epoch-checkpoint")[:] = spoil
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        assert log.leader_epochs.entries == entries


DAY_CONFIG = LogConfig(segment_bytes=2_000, index_interval_bytes=500, file_delete_delay_ms=10)


def live(driver: LogDriver) -> None:
    """Append over several segments and epochs, flush, checkpoint, delete, truncate, restart, append again."""
    driver.open()
    for epoch in (1, 2):
        driver.epoch = epoch
        for _ in range(5):
            driver.append([driver.clock.now, driver.clock.now + 1], value_bytes=100)
            driver.clock.now += 5
        driver.flush()
        driver.append(value_bytes=300)
        driver.checkpoint()
    driver.append(value_bytes=900)
    driver.flush()
    driver.delete_records(9)
    driver.checkpoint()
    driver.truncate(19)
    driver.append(value_bytes=700)
    driver.append(value_bytes=700)
    driver.flush()
    driver.clock.now += 20
    driver.checkpoint()
    driver.close()
    driver.open()
    driver.append()
    driver.flush()
    driver.truncate(14)
    driver.append()
    driver.check()
    for offset in (40, 43, 12):  # beyond the end, inside, below the start
        driver.start_over(offset)
        for _ in range(5):
            driver.append(value_bytes=700)
        driver.flush()
        driver.delete_records(offset + 2)  # detaches the first segment, whose file stays until the next checkpoint
        driver.append()
    driver.start_over(12)
    driver.append()
    driver.flush()
    driver.check()


def stopped_at_every_operation() -> list[LogDriver]:
    """Return the machine in which all ends before an operation of `live`, for each of them."""
    driver = LogDriver(MemoryStorage(), DAY_CONFIG)
    return moments(driver.storage, lambda: live(driver), driver.stopped)


def test_the_script_is_worth_crashing() -> None:
    driver = LogDriver(MemoryStorage(), DAY_CONFIG)
    live(driver)
    assert driver.log.log_start_offset == 12
    assert driver.log.log_end_offset == 13
    assert driver.storage.operations > 300


@pytest.mark.parametrize("seed", seeds(also=range(6)))
def test_power_loss_at_every_operation_keeps_what_was_flushed(seed: int) -> None:
    for number, driver in enumerate(stopped_at_every_operation()):
        driver.crash(Random(seed + number))
        driver.epoch = max(driver.epoch, driver.log.leader_epochs.latest_epoch)
        driver.append()
        driver.flush()
        driver.crash(Random(seed + number + 1))


def test_kill_9_at_every_operation_loses_nothing() -> None:
    for driver in stopped_at_every_operation():
        appended = list(driver.chain)
        driver.other_chain = driver.other_chain or appended[:-1]  # the append under way may or may not be there
        driver.crash(None)
        driver.check()


@pytest.mark.parametrize("seed", range(6))
def test_power_loss_after_kill_9_keeps_what_recovery_found(seed: int) -> None:
    """Recovered records count as held, although the process that wrote them never fsynced them or their names."""
    driver = LogDriver(MemoryStorage(), DAY_CONFIG)
    driver.open()
    for _ in range(20):
        driver.append(value_bytes=300)
    assert driver.log.segment_count > 3
    driver.crash(None)
    assert driver.durable_end == 20
    driver.crash(Random(seed))


@pytest.mark.parametrize("seed", range(20))
def test_power_loss_after_a_refused_write_at_the_end_of_a_segment(seed: int) -> None:
    """The partial write may be on the disk and its removal not, in a segment that ends at the recovery point."""
    driver = LogDriver(MemoryStorage(), LogConfig(segment_bytes=300))
    driver.open()
    driver.append()
    driver.flush()
    driver.checkpoint()
    driver.log.update_config(LogConfig(segment_bytes=100_000))
    driver.storage.capacity_bytes = driver.storage.used_bytes() + 30
    with pytest.raises(StorageFull):
        driver.append()
    driver.storage.capacity_bytes = None
    driver.log.roll()
    driver.append()
    driver.crash(Random(seed))
    driver.append()
    driver.flush()
    driver.crash(Random(seed))


def test_power_loss_during_recovery_from_power_loss() -> None:
    for number, stopped in list(enumerate(stopped_at_every_operation()))[40::7]:
        for second in range(0, 30, 2):
            driver = stopped.stopped()
            dice = Random(number * 100 + second)
            driver.storage.crash(dice)
            driver.storage.crash_at = driver.storage.operations + second
            try:
                driver.open()
            except PowerLoss:
                driver.crash(dice)


TRANSACTIONS_CONFIG = LogConfig(segment_bytes=1_200, index_interval_bytes=300, file_delete_delay_ms=10)


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

    def stopped(self) -> Life:
        """Return another life in the same state, whose first replica has just stopped."""
        made = copy(self)
        made.replicas, made.chain = [replica.stopped() for replica in self.replicas], list(self.chain)
        return made

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
    life.replicas = [LogDriver(storage, TRANSACTIONS_CONFIG)]
    life.leader = life.epoch = life.high_watermark = life.last_stable_offset = life.sent = 0
    life.chain = []
    return life


def lived(life: Life) -> Life:
    life.replicas[0].open()
    life.live()
    return life


def test_the_script_with_transactions_is_worth_crashing() -> None:
    life = lived(born(MemoryStorage()))
    life.check_first()
    assert life.log.segment_count > 5
    assert sum(segment.has_txn_index for segment in life.log.segments) > 3
    assert len(life.log.aborted_transactions(0, life.log.last_stable_offset)) >= 5
    assert life.replicas[0].storage.operations > 200


@pytest.mark.parametrize("seed", seeds(also=range(4)))
@pytest.mark.parametrize("kill", [True, False])
def test_a_crash_at_any_operation_leaves_what_the_log_says(seed: int, kill: bool) -> None:
    """At every fourth operation; which ones, the seed decides."""
    whole = born(MemoryStorage())
    stopped = moments(whole.replicas[0].storage, lambda: lived(whole), whole.stopped)
    for number, life in list(enumerate(stopped))[seed % 4 :: 4]:
        for again in range(2):
            life.replicas[0].storage.crash(None if kill else Random(seed + number + again))
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


@pytest.mark.parametrize("seed", seeds(also=range(4)))
def test_a_disk_that_is_full_at_any_moment_changes_nothing_that_is_known(seed: int) -> None:
    """What could not be written is made anew from the log."""
    storage = MemoryStorage()
    used = lived(born(storage)).replicas[0].storage.used_bytes
    for room in range(200 + seed % 4 * 100, used(), 400):
        life = born(MemoryStorage(capacity_bytes=room))
        with suppress(StorageFull, OSError):  # what is appended, or the first start
            lived(life)
        if life.replicas[0].opened is None:
            continue
        life.replicas[0].storage.capacity_bytes = 1 << 20
        life.replicas[0].storage.crash(Random(room))
        life.replicas[0].open()
        life.check_first()
