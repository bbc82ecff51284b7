"""One producer and one log, whatever happens to the log: every batch is there once, in order, or known to be lost."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.log.config import LogConfig
from broker.log.producer_state import Duplicate, ProducerLimits
from raftlog.errors import DuplicateSequence, OutOfOrderSequence, SequenceError, UnknownProducerId
from raftlog.format import iter_headers, validate_produced
from tests.support.log_driver import LogDriver, timed_batch
from tests.support.memory_storage import MemoryStorage

CONFIG = LogConfig(segment_bytes=1_500, index_interval_bytes=300, file_delete_delay_ms=10)
PRODUCER_ID = 4


class History:
    """A log with batches of one record, numbered from 0; `committed` of them are never cut."""

    def __init__(self) -> None:
        self.driver = LogDriver(MemoryStorage(), CONFIG)
        self.driver.open()
        self.appended = 0
        self.committed = 0
        self.lost = False

    def send(self, behind: int) -> None:
        """Send the next batch, or one of those before it, or one that leaves a gap."""
        log, number = self.driver.log, max(0, self.appended - behind)
        batch = timed_batch([number + 1], 100, number, producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=number)
        header = validate_produced(batch)
        try:
            answer: Duplicate | type[SequenceError] | None = log.check_producer(header, self.driver.clock.now)
        except SequenceError as refusal:
            answer = type(refusal)
        if self.lost and number and log.producers.get(PRODUCER_ID) is None:
            assert answer is UnknownProducerId
        elif number == self.appended:
            assert answer is None
            log.append(batch, header, leader_epoch=self.driver.epoch, now_ms=self.driver.clock.now)
            self.appended += 1
        elif number > self.appended:
            assert answer is (OutOfOrderSequence if self.appended else UnknownProducerId)
        elif isinstance(answer, Duplicate):
            assert answer == Duplicate(number, number, -1)
        else:
            assert answer is DuplicateSequence
            assert behind > 5 or self.lost, "one of the last five is known with its offset"

    def flush(self) -> None:
        """All of it is committed."""
        self.committed = self.driver.log.high_watermark = self.driver.log.flush()

    def cut(self, keep: int) -> None:
        """Another leader has less; of what is committed nothing goes."""
        end = max(self.committed, self.appended - keep)
        self.driver.log.truncate_to(end, now_ms=self.driver.clock.now)
        self.driver.epoch += 1
        self.appended = end

    def trim(self) -> None:
        """Retention takes all that it may."""
        driver = self.driver
        driver.log.delete_records(self.committed)
        assert driver.manager is not None
        for _ in range(2):
            driver.manager.run_housekeeping_once(driver.clock.now)
            driver.clock.now += CONFIG.file_delete_delay_ms + 1

    def restart(self, how: int) -> None:
        """Stop cleanly (0), by kill -9 (1) or loss of power, and start again."""
        driver = self.driver
        assert driver.manager is not None
        if how == 0:
            driver.manager.close()
            driver.open()
        else:
            driver.storage.crash(None if how == 1 else Random(how))
            driver.open()
        assert driver.log.log_end_offset >= self.committed
        self.appended = driver.log.log_end_offset
        driver.log.high_watermark = self.committed
        driver.epoch = max(driver.epoch, driver.log.leader_epochs.latest_epoch)

    def expire(self) -> None:
        """Nobody writes for a day."""
        self.driver.clock.now += ProducerLimits().expiration_ms + 1
        self.driver.log.expire_producers(self.driver.clock.now)
        self.lost = True

    def check(self) -> None:
        """The log has every number once, in order."""
        log = self.driver.log
        offset = log.log_start_offset
        while offset < self.appended:
            read = log.read(offset, 10_000, self.appended, blocking=True)
            assert read is not None
            for _, header in iter_headers(read.records):
                assert header.base_sequence == header.base_offset
            offset = read.next_offset


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(-2, 8)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("cut"), st.integers(1, 12)),
        st.tuples(st.just("trim"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 5)),
    ),
    max_size=60,
)


def play(history: History, script: list[tuple[str, int]]) -> None:
    for name, number in script:
        match name:
            case "send":
                history.send(number)
            case "flush":
                history.flush()
            case "cut":
                history.cut(number)
            case "trim":
                history.trim()
            case "restart":
                history.restart(number)
    history.check()


@settings(max_examples=150, deadline=None)
@given(steps)
def test_every_batch_is_there_once_and_in_order(script: list[tuple[str, int]]) -> None:
    play(History(), script)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_who_was_forgotten_is_not_taken_for_new(script: list[tuple[str, int]]) -> None:
    """But begins anew with 0: of a day ago nothing is in doubt."""
    history = History()
    for _ in range(7):
        history.send(0)
    history.flush()
    history.expire()
    for number in (0, 3, -1):
        history.send(number)
    assert history.appended == 7
    play(history, [step for step in script if step[0] != "send"])
