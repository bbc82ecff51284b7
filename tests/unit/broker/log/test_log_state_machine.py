"""Any order of operations, crashes and restarts leaves the log as the model says."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.log.config import LogConfig
from broker.log.partition_log import FlushTicket
from raftlog.errors import StorageFull
from raftlog.types import OffsetAndTimestamp
from tests.support.fresh import examples
from tests.support.log_driver import LogDriver, ModelBatch
from tests.support.memory_storage import MemoryStorage

stamps = st.lists(st.integers(0, 60), min_size=1, max_size=4)


class LogMachine(RuleBasedStateMachine):
    """`LogDriver` under random operations."""

    driver: LogDriver

    @initialize(
        segment_bytes=st.sampled_from([600, 1_500, 100_000]),
        interval=st.sampled_from([0, 400, 4096]),
        retention_bytes=st.sampled_from([None, 1_000, 4_000]),
    )
    def start(self, segment_bytes: int, interval: int, retention_bytes: int | None) -> None:
        config = LogConfig(
            segment_bytes=segment_bytes,
            index_interval_bytes=interval,
            retention_bytes=retention_bytes,
            retention_ms=None,
            file_delete_delay_ms=5,
        )
        self.driver = LogDriver(MemoryStorage(), config)
        self.driver.open()
        self.tickets: list[FlushTicket] = []
        self.ran: list[FlushTicket] = []

    def forget_tickets(self) -> None:
        self.tickets.clear()
        self.ran.clear()

    @rule(timestamps_ms=stamps, value_bytes=st.sampled_from([0, 10, 200, 900]), times=st.integers(1, 4))
    def append(self, timestamps_ms: list[int], value_bytes: int, times: int) -> None:
        for _ in range(times):
            self.driver.append(timestamps_ms, value_bytes)

    @rule()
    def append_into_a_full_disk(self) -> None:
        driver = self.driver
        driver.storage.capacity_bytes = driver.storage.used_bytes() + 30
        try:
            driver.append()
        except StorageFull:
            pass
        else:
            raise AssertionError("an append succeeded on a full disk")
        finally:
            driver.storage.capacity_bytes = None

    @rule()
    def flush(self) -> None:
        self.driver.flush()

    @rule()
    def begin_flush(self) -> None:
        ticket = self.driver.log.begin_flush()
        if ticket is not None:
            self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def run_flush(self, data: st.DataObject) -> None:
        ticket = self.tickets[data.draw(st.integers(0, len(self.tickets) - 1))]
        if ticket in self.ran:
            self.ran.remove(ticket)
            self.tickets.remove(ticket)
            flushed_end_offset = self.driver.log.finish_flush(ticket)
            self.driver.durable_end = max(self.driver.durable_end, flushed_end_offset)
            self.driver.log.high_watermark = self.driver.durable_end
        else:
            ticket.run()
            self.ran.append(ticket)

    @rule()
    def next_epoch(self) -> None:
        self.driver.epoch += 1

    @rule(later_ms=st.integers(0, 20))
    def housekeeping(self, later_ms: int) -> None:
        driver = self.driver
        driver.clock.now += later_ms
        driver.checkpoint()

    @rule()
    def write_marks(self) -> None:
        manager = self.driver.manager
        assert manager is not None
        manager.checkpoint_marks()

    @rule()
    def roll(self) -> None:
        self.driver.log.roll()

    @precondition(lambda self: self.driver.durable_end > self.driver.start)
    @rule(data=st.data())
    def delete_records(self, data: st.DataObject) -> None:
        driver = self.driver
        driver.delete_records(data.draw(st.integers(driver.start, driver.durable_end)))

    @precondition(lambda self: self.driver.end > self.driver.start)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        driver = self.driver
        driver.truncate(data.draw(st.integers(driver.start, driver.end)))

    @rule(data=st.data())
    def start_over(self, data: st.DataObject) -> None:
        driver = self.driver
        driver.start_over(data.draw(st.integers(max(0, driver.start - 10), driver.end + 10)))

    @rule(seed=st.integers(0, 1_000))
    def power_loss(self, seed: int) -> None:
        self.forget_tickets()
        self.driver.crash(Random(seed))

    @rule()
    def kill_9(self) -> None:
        self.forget_tickets()
        self.driver.crash(None)

    @rule()
    def restart(self) -> None:
        self.forget_tickets()
        self.driver.close()
        self.driver.crash(None)

    @precondition(lambda self: self.driver.end > self.driver.start)
    @rule(data=st.data(), max_bytes=st.sampled_from([1, 200, 700, 5_000]), cold=st.booleans())
    def read(self, data: st.DataObject, max_bytes: int, cold: bool) -> None:
        driver = self.driver
        ends = [batch.next_offset for batch in driver.chain if batch.next_offset >= driver.start]
        end_offset = data.draw(st.sampled_from(ends))
        offset = data.draw(st.integers(driver.start, end_offset))
        driver.storage.cold = cold
        result = driver.log.read(offset, max_bytes, end_offset, blocking=False)
        driver.storage.cold = False
        if result is None:
            result = driver.log.read(offset, max_bytes, end_offset, blocking=True)
            assert result is not None
        wanted = [b for b in driver.chain if b.next_offset > offset and b.next_offset <= end_offset]
        got = result.records
        taken: list[ModelBatch] = []
        for batch in wanted:
            if len(got) < sum(len(b.data) for b in taken) + len(batch.data):
                break
            taken.append(batch)
        assert got == b"".join(batch.data for batch in taken)
        assert result.next_offset == (taken[-1].next_offset if taken else offset)
        assert bool(taken) == bool(wanted), "progress"
        assert len(taken) <= 1 or len(got) <= max_bytes

    @rule(timestamp_ms=st.integers(0, 61))
    def offset_for_time(self, timestamp_ms: int) -> None:
        records = self._records()
        found = next((record for record in records if record[1] >= timestamp_ms), None)
        answer = self.driver.log.offset_for_time(timestamp_ms, self.driver.end)
        assert _without_epoch(answer) == found

    @rule()
    def max_timestamp(self) -> None:
        end = self.driver.durable_end
        records = [record for record in self._records() if record[0] < end]
        best = max((timestamp for _, timestamp in records), default=None)
        found = next((record for record in records if record[1] == best), None)
        assert _without_epoch(self.driver.log.max_timestamp(end)) == found

    def _records(self) -> list[tuple[int, int]]:
        driver = self.driver
        return [
            (batch.base_offset + i, timestamp)
            for batch in driver.chain
            for i, timestamp in enumerate(batch.timestamps_ms)
            if batch.base_offset + i >= driver.start
        ]

    @invariant()
    def matches(self) -> None:
        driver = self.driver
        driver.start = max(driver.start, driver.log.log_start_offset)  # retention may have moved it
        driver.check()


def _without_epoch(answer: OffsetAndTimestamp | None) -> tuple[int, int] | None:
    return None if answer is None else (answer.offset, answer.timestamp_ms)


LogMachine.TestCase.settings = settings(
    max_examples=examples(0.6), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLogMachine = LogMachine.TestCase
