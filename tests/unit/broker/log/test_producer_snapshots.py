"""Producer snapshots: their bytes, which of them counts, and that the log says the same."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from broker.log import log_producers
from broker.log.checkpoints import encode_lines
from broker.log.config import LogConfig
from broker.log.group_commit import GroupCommit
from broker.log.producer_snapshots import (
    SNAPSHOT_INTERVAL_BYTES,
    Snapshot,
    decode_producers,
    decode_snapshot,
    encode_producers,
    snapshot_name,
    snapshot_offsets,
)
from broker.log.producer_state import MAX_SEQUENCE, ProducerLimits, ProducerState, ProducerStates, RememberedBatch
from broker.log.storage import read_file
from broker.log.transactions import AbortedTransaction, OpenTransaction, Undecided
from raftlog.errors import CorruptRecordError, UnsupportedVersion
from raftlog.format import parse_batch
from tests.support.batches import batch_of
from tests.support.log_driver import LOG_DIR, LogDriver
from tests.support.memory_storage import MemoryStorage

CONFIG = LogConfig(segment_bytes=1_100, index_interval_bytes=100, file_delete_delay_ms=10)
DIRECTORY = f"{LOG_DIR}/topic-0"
BATCHES = (
    RememberedBatch(MAX_SEQUENCE - 1, 2, 90, 94, 1_700),
    RememberedBatch(3, 3, 95, 95, -1),
)
PRODUCERS = [(12, ProducerState(3, 1_600, BATCHES[:1])), (5, ProducerState(0, 1_700, BATCHES))]


def snapshots(driver: LogDriver) -> list[int]:
    return snapshot_offsets(driver.storage.list_sizes(DIRECTORY))


def lived(batches: int = 30) -> LogDriver:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(batches):
        driver.append(value_bytes=100)
        driver.flush()
    return driver


def test_a_snapshot_is_what_it_was_made_of() -> None:
    producers = ProducerStates(None, PRODUCERS)
    data = encode_producers(producers)
    assert data.startswith(b"producers 1\n2 ")
    assert b"\n12 3 1600 2147483646 2 90 1700\n5 0 1700 2147483646 2 90 1700 3 3 95 -1\n" in data
    assert decode_producers("p", data, ProducerLimits()) == producers
    assert decode_producers("p", encode_producers(ProducerStates()), ProducerLimits()) == ProducerStates()


def test_the_example_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parents[4] / "docs" / "format.md").read_text()
    lines = [line.removeprefix("    ") for line in page.splitlines()]
    start = lines.index("producers 1")
    example = "".join(line + "\n" for line in lines[start : start + 3]).encode()
    batches = (RememberedBatch(15, 24, 912, 921, -1), RememberedBatch(25, 25, 922, 922, -1))
    expected = ProducerStates(None, [(4_000, ProducerState(2, 1_700_000_000_000, batches))])
    assert decode_producers("p", example, ProducerLimits()) == expected
    assert encode_producers(expected) == example
    start = lines.index("producers 2")
    example = "".join(line + "\n" for line in lines[start : start + 6]).encode()
    opened = ProducerState(2, 1_700_000_000_000, (RememberedBatch(0, 24, 912, 936, -1),), 912, 1_700_000_000_000)
    expected = ProducerStates(None, [(4_000, opened)], [Undecided(910, 880)])
    assert encode_producers(expected, [Undecided(910, 880)], [AbortedTransaction(5_000, 902, 911, 912)]) == example


def test_with_transactions_it_is_of_another_version() -> None:
    marked = ProducerState(7, 1_650, ())
    opened = ProducerState(3, 1_600, BATCHES[:1], 88, 1_500)
    undecided, aborted = (Undecided(91, 80),), (AbortedTransaction(5, 70, 89, 88), AbortedTransaction(4, 71, 90, 80))
    data = encode_producers(ProducerStates(None, [(12, opened), (5, marked)]), undecided, aborted)
    assert data.startswith(b"producers 2\n6 ")
    assert decode_snapshot("p", data, ProducerLimits()) == Snapshot(
        ProducerStates(None, [(12, opened), (5, marked)]), aborted
    )
    read = decode_producers("p", data, ProducerLimits())
    assert read.transactions.undecided == undecided
    assert read.transactions.get(12) == OpenTransaction(3, 88, 1_500)
    assert len(read.transactions) == 1


def test_how_an_epoch_began_is_kept_and_old_files_do_not_know() -> None:
    states = [
        (12, ProducerState(7, 1_650, (), decision=True)),
        (5, ProducerState(7, 1_650, BATCHES[:1], decision=False)),
        (6, ProducerState(7, 1_650, (), decision=False)),
        (7, ProducerState(7, 1_650, ())),
    ]
    data = encode_producers(ProducerStates(None, states))
    assert b"\ndecided 0 5 6\ndecided 1 12\n" in data
    assert decode_producers("p", data, ProducerLimits()) == ProducerStates(None, states)
    old = encode_lines("producers", ["12 7 1650"], 2)
    assert decode_producers("p", old, ProducerLimits()).get(12) == ProducerState(7, 1_650, ())


def test_with_a_smaller_bound_open_transactions_stay_as_well() -> None:
    opened = ProducerState(3, 1_600, BATCHES[:1], 88, 1_500)
    states = [(1, PRODUCERS[0][1]), (2, opened), (3, PRODUCERS[0][1]), (4, PRODUCERS[1][1])]
    read = decode_producers("p", encode_producers(ProducerStates(None, states)), ProducerLimits(max_ids=1))
    assert [producer_id for producer_id, _ in read.items()] == [2, 4]


@pytest.mark.parametrize(
    "lines",
    [
        ["open 5 1 2"],
        ["open 12 1", "12 3 1600"],
        ["undecided 1 2 3"],
        ["decided 2 12", "12 3 1600"],
        ["decided 1", "12 3 1600"],
        ["aborted 1 2 3"],
        ["torn 1"],
        ["12 3 1600 1"],
    ],
)
def test_lines_that_make_no_sense_are_damage(lines: list[str]) -> None:
    with pytest.raises(CorruptRecordError):
        decode_producers("p", encode_lines("producers", lines, 2), ProducerLimits())


def test_with_a_smaller_bound_those_that_wrote_last_stay() -> None:
    data = encode_producers(ProducerStates(None, PRODUCERS))
    assert [producer_id for producer_id, _ in decode_producers("p", data, ProducerLimits(max_ids=1)).items()] == [5]


def test_any_flipped_bit_is_damage() -> None:
    data = encode_producers(ProducerStates(None, PRODUCERS))
    for position in range(len(data)):
        for bit in range(8):
            torn = bytearray(data)
            torn[position] ^= 1 << bit
            with pytest.raises((CorruptRecordError, UnsupportedVersion)):
                decode_producers("p", bytes(torn), ProducerLimits())
    for length in range(len(data)):
        with pytest.raises((CorruptRecordError, UnsupportedVersion)):
            decode_producers("p", data[:length], ProducerLimits())


def test_names_have_twenty_digits() -> None:
    assert snapshot_name(42) == "00000000000000000042.snapshot"
    assert snapshot_offsets([snapshot_name(42), snapshot_name(7), "1.snapshot", snapshot_name(3) + ".tmp"]) == [7, 42]


def test_one_at_every_roll_and_one_at_the_end_and_few_are_kept() -> None:
    driver = lived()
    bases = [segment.base_offset for segment in driver.log.segments]
    assert len(bases) > 4
    assert snapshots(driver) == bases[-2:]
    driver.close()
    assert snapshots(driver) == [bases[-1], driver.end]
    driver.open()
    driver.check()
    driver.close()  # nothing is new
    assert snapshots(driver) == [bases[-1], driver.end]


def test_one_after_so_many_bytes() -> None:
    driver = lived(1)
    driver.log._snapshot_bytes = SNAPSHOT_INTERVAL_BYTES
    driver.append()
    driver.flush()
    assert snapshots(driver) == [2]


def test_one_that_no_truncation_reaches_is_kept() -> None:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(9):
        driver.append(value_bytes=100)
    driver.flush()
    committed = driver.log.high_watermark
    for _ in range(20):
        driver.append(value_bytes=100)
        driver.log.flush()
    assert [offset <= committed for offset in snapshots(driver)] == [True, False, False]
    driver.durable_end = committed
    driver.truncate(committed)
    driver.check()


@pytest.mark.parametrize("harm", ["removed", "torn", "altered", "emptied"])
def test_without_usable_snapshots_the_log_says_the_same(harm: str) -> None:
    driver = lived()
    expected = driver.log.producers.copy()
    driver.close()
    for offset in snapshots(driver):
        path = f"{DIRECTORY}/{snapshot_name(offset)}"
        file = driver.storage.open(path)
        match harm:
            case "removed":
                driver.storage.remove(path)
            case "torn":
                file.truncate(file.size() - 3)
            case "altered":
                file.write((b"9",), 20)
            case "emptied":
                file.truncate(0)
    driver.open()
    assert driver.log.producers == expected
    driver.check()


def test_a_snapshot_beyond_the_end_is_removed_before_the_log_grows_over_it() -> None:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(20):
        driver.append(value_bytes=100)
    ahead = driver.log.segments[-1].base_offset
    driver.log.store_producers()  # written and durable, though the log is not
    assert snapshots(driver) == [ahead]
    driver.crash(Random(1))
    assert driver.end < ahead
    assert snapshots(driver) == []
    for seed in range(5):
        driver.append(value_bytes=100)
        driver.crash(Random(seed))


def test_retention_takes_records_and_not_what_is_known_of_their_producers() -> None:
    """KIP-360: "producer state ... retained" though the log has none of its records any more."""
    driver = lived()
    expected = driver.log.producers.copy()
    driver.log.roll()
    driver.delete_records(driver.end)
    driver.checkpoint()
    driver.clock.now += CONFIG.file_delete_delay_ms + 1
    driver.checkpoint()
    assert driver.log.segment_count == 1
    driver.check()
    driver.crash(None)
    assert driver.log.producers == expected
    driver.crash(Random(3))
    assert driver.log.producers == expected


def test_idle_producers_are_forgotten_by_housekeeping() -> None:
    driver = lived(3)
    assert len(driver.log.producers) == 2
    driver.clock.now += ProducerLimits().expiration_ms + 1
    driver.checkpoint()
    assert len(driver.log.producers) == 0


def test_what_retention_removes_is_known_after_what_was_not_committed_is_cut() -> None:
    """The snapshot of the last roll lies above the high watermark, and goes with the truncation."""
    driver = LogDriver(
        MemoryStorage(), LogConfig(segment_bytes=600, index_interval_bytes=0, retention_bytes=1_000, retention_ms=None)
    )
    driver.open()
    driver.append([0, 1], 0)
    driver.append([0, 1], 0)
    driver.flush()
    committed = driver.end
    for _ in range(8):
        driver.append([0, 1], 0)
    driver.checkpoint()
    assert driver.log.log_start_offset == committed, "nothing of what was committed is left"
    assert min(snapshots(driver)) == committed
    driver.truncate(committed)
    driver.check()


def many(ids: int) -> ProducerStates:
    state = ProducerState(0, 1_000, (RememberedBatch(0, 0, 0, 0, -1),))
    return ProducerStates(None, dict.fromkeys(range(ids), state).items())


class WatchedLock:
    """A lock of a log that says what was forgotten while it was held."""

    def __init__(self, driver: LogDriver) -> None:
        self.driver = driver
        self.lock = driver.log._lock
        self.forgotten: list[int] = []
        self.before = 0

    def __enter__(self) -> None:
        self.lock.acquire()
        self.before = len(self.driver.log.producers)

    def __exit__(self, *error: object) -> None:
        self.forgotten.append(self.before - len(self.driver.log.producers))
        self.lock.release()


def test_many_idle_producers_are_forgotten_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waits for the lock meanwhile."""
    driver = lived(0)
    driver.log.producers = many(2_500)
    lock = WatchedLock(driver)
    monkeypatch.setattr(driver.log, "_lock", lock)
    assert driver.log.expire_producers(1_001 + ProducerLimits().expiration_ms) == 2_500
    assert lock.forgotten == [1_000, 1_000, 500]


def test_while_a_snapshot_is_encoded_the_log_is_appended_to_flushed_and_rolled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread does so, which must not wait; and the snapshot is of the roll that it was taken at."""
    driver = lived(3)
    log = driver.log
    log.roll()
    offset, expected = driver.end, list(log.producers.items())

    def encode(producers: Any, *transactions: Any) -> bytes:
        monkeypatch.setattr(log_producers, "encode_producers", encode_producers)
        with ThreadPoolExecutor(1) as other:
            for step in (driver.append, lambda: other_flush(driver), log.roll, driver.append):
                other.submit(step).result(60)
        assert list(log.producers.items()) != expected
        return encode_producers(producers, *transactions)

    monkeypatch.setattr(log_producers, "encode_producers", encode)
    log.store_producers()
    data = read_file(driver.storage, f"{DIRECTORY}/{snapshot_name(offset)}")
    assert data is not None
    assert list(decode_producers("p", data, ProducerLimits()).items()) == expected
    driver.flush()
    assert snapshots(driver)[-1] > offset
    driver.check()
    driver.crash(None)
    driver.check()


def other_flush(driver: LogDriver) -> None:
    ticket = driver.log.begin_flush()
    assert ticket is not None
    ticket.run()
    driver.log.finish_flush(ticket)


def test_a_snapshot_that_a_truncation_overtakes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    driver.append()
    driver.flush()
    for _ in range(3):
        driver.append()
    driver.log.roll()

    def encode(producers: Any, *transactions: Any) -> bytes:
        driver.truncate(1)
        return encode_producers(producers, *transactions)

    monkeypatch.setattr(log_producers, "encode_producers", encode)
    driver.log.store_producers()
    assert snapshots(driver) == []
    driver.check()


def test_acks_do_not_wait_for_a_snapshot() -> None:
    """Whoever waits for a flush is answered first, and a bug in what follows it is no trouble of his."""

    class OneAtATime(Executor):
        def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Any:
            asyncio.get_running_loop().call_soon(work, *arguments)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        driver.append()
        driver.log.roll()
        happened: list[str] = []
        commit = GroupCommit(OneAtATime())

        def store(*, closing: bool = False) -> None:
            loop.call_soon(happened.append, "stored")
            raise KeyError("a bug")

        driver.log.store_producers = store  # type: ignore[method-assign]
        commit.request(driver.log, lambda end: happened.append("held"), lambda error: happened.append(repr(error)))
        await commit.close()
        await asyncio.sleep(0)
        assert happened == ["held", "stored"]

    driver = lived(0)
    asyncio.run(scenario())


def test_what_segments_say_is_written_while_producers_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop notes producers in the midst of it."""
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(20):
        driver.append(value_bytes=100)
    driver.flush()
    log = driver.log
    for offset in list(log._snapshots):
        driver.storage.remove(f"{DIRECTORY}/{snapshot_name(offset)}")
    log._snapshots, log._snapshot_offset = [], log.log_end_offset
    driver.delete_records(log.segments[2].base_offset)
    get, ids = ProducerState.__getattribute__, count(1_000)

    class Appending(ProducerState):
        """A state that is looked at while its log is appended to."""

        def __getattribute__(self, name: str) -> Any:
            if name == "last_append_ms" and not log._lock._is_owned():  # type: ignore[attr-defined]
                batch = batch_of(b"", producer_id=next(ids), producer_epoch=0, base_sequence=0)
                log.producers.note(parse_batch(batch), 5)
            return get(self, name)

    log.producers = ProducerStates(None, ((number, Appending(*state)) for number, state in log.producers.items()))
    log.store_producers()
    assert len(snapshots(driver)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_a_clean_stop_writes_survives_a_power_loss_where_nothing_else_is_left(seed: int) -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=600))
    driver.open()
    for _ in range(6):
        driver.append([0], 0)
    driver.crash(None)  # what was due at the rolls is forgotten
    driver.flush()
    driver.delete_records(driver.end)
    driver.close()
    driver.crash(None)
    driver.check()
    driver.crash(Random(seed))
    driver.check()
