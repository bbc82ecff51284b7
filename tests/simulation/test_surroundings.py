"""The base of the simulation behaves as documented: time, disk and network."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest

from broker.log.storage import SyncFailed
from tests.simulation.dataplane.disk import SimExecutor
from tests.simulation.dataplane.loop import SimLoop
from tests.simulation.dataplane.scenario import DataStory
from tests.simulation.dataplane.schedule import DataSimulation
from tests.simulation.disk import SECTOR_BYTES, DiskError, PowerLoss, SimDisk
from tests.simulation.network import Connection
from tests.simulation.parts import Violation
from tests.simulation.process import Process
from tests.simulation.schedule import Simulation
from tests.simulation.scheduler import Scheduler


def test_events_come_in_the_order_of_time_and_then_of_making() -> None:
    scheduler = Scheduler(0)
    seen: list[str] = []
    scheduler.after(2, seen.append, "later")
    scheduler.after(1, seen.append, "first")
    scheduler.after(1, seen.append, "second")
    scheduler.after(9, seen.append, "never")
    scheduler.run_until(5)
    assert seen == ["first", "second", "later"]
    assert scheduler.now_s == 5


# Disk


def disk_with(name: str, data: bytes) -> SimDisk:
    disk = SimDisk("/disk")
    disk.write(name, data)
    disk.sync(name)
    disk.sync_dir()
    return disk


@pytest.mark.parametrize("seed", range(20))
def test_what_was_synced_survives_a_power_cut(seed: int) -> None:
    disk = disk_with("log", b"a" * 3_000)
    disk.write_at("log", 1_000, b"b" * 1_000)
    disk.sync("log")
    disk.lose_power(random.Random(seed))
    assert disk.read("log") == b"a" * 1_000 + b"b" * 1_000 + b"a" * 1_000


def test_what_was_not_synced_survives_by_sectors() -> None:
    found = set()
    for seed in range(60):
        disk = disk_with("log", b"a" * 4 * SECTOR_BYTES)
        disk.write_at("log", 0, b"b" * 4 * SECTOR_BYTES)
        disk.lose_power(random.Random(seed))
        sectors = [disk.read("log")[at : at + SECTOR_BYTES] for at in range(0, 4 * SECTOR_BYTES, SECTOR_BYTES)]
        assert all(len(set(sector)) == 1 for sector in sectors), (
            "after a power cut a sector is a mixture of old and new bytes"
        )
        found.add(b"".join(sector[:1] for sector in sectors))
    assert {b"aaaa", b"bbbb"} < found


def test_a_kill_loses_nothing_that_was_written() -> None:
    disk = disk_with("log", b"a")
    disk.write_at("log", 1, b"b")
    disk.process_died()
    assert disk.read("log") == b"ab"
    found = set()
    for seed in range(20):
        again = disk_with("log", b"a")
        again.write_at("log", 1, b"b")
        again.process_died()
        again.lose_power(random.Random(seed))
        found.add(again.read("log"))
    assert b"a" in found, "a write that outlived its process must still be lost with some power cuts"


def test_a_rename_that_was_not_synced_may_be_undone() -> None:
    found = set()
    for seed in range(20):
        disk = disk_with("old", b"old")
        disk.write("new", b"new")
        disk.sync("new")
        disk.rename("new", "old")
        disk.lose_power(random.Random(seed))
        found.add(disk.read("old"))
    assert found == {b"old", b"new"}


def test_a_process_can_die_between_two_operations() -> None:
    disk = disk_with("log", b"")
    disk.die_after(1)
    disk.write_at("log", 0, b"abcdef")
    with pytest.raises(PowerLoss):
        disk.sync("log")
    assert disk.dead
    assert disk.read("log") == b"abc"
    disk.process_died()
    assert not disk.dead


def test_a_full_disk_takes_what_was_reserved() -> None:
    disk = disk_with("log", b"")
    disk.allocate("log", 100)
    disk.full = True
    disk.write_at("log", 0, b"a" * 100)
    with pytest.raises(DiskError) as caught:
        disk.write_at("log", 50, b"a" * 51)
    assert caught.value.errno == errno.ENOSPC


# Network


def two_processes() -> tuple[Simulation, Process, Process]:
    simulation = Simulation(0, 3)
    return simulation, Process(simulation.hosts[0]), Process(simulation.hosts[1])


def connected(simulation: Simulation, one: Process, other: Process, heard: list[object]) -> Connection:
    connection = simulation.network.connect(one, other)
    assert connection is not None
    connection.acceptor_hears(heard.append, lambda: heard.append("lost"))
    return connection


def test_a_connection_keeps_its_order_through_a_cut() -> None:
    simulation, one, other = two_processes()
    heard: list[object] = []
    connection = connected(simulation, one, other, heard)
    simulation.network.cut(1, 2)
    for number in range(5):
        simulation.scheduler.after(number * 0.03, connection.send, number)
    simulation.scheduler.run_until(1)
    assert heard == []
    simulation.network.mend(1, 2)
    simulation.scheduler.run_until(2)
    assert heard == [0, 1, 2, 3, 4]


def test_what_a_killed_process_sent_arrives_before_the_news_of_its_death() -> None:
    simulation, one, other = two_processes()
    heard: list[object] = []
    connected(simulation, one, other, heard).send("last words")
    one.die(with_machine=False)
    simulation.scheduler.run_until(1)
    assert heard == ["last words", "lost"]


@pytest.mark.parametrize(("late_share", "expected"), [(0.0, ["lost"]), (1.0, ["late", "lost"])])
def test_what_is_under_way_on_a_connection_that_breaks_is_lost_or_late(late_share: float, expected: list[str]) -> None:
    simulation, one, other = two_processes()
    simulation.network.late_share = late_share
    heard: list[object] = []
    connection = connected(simulation, one, other, heard)
    connection.send("late")
    connection.break_now()
    connection.send("never")
    simulation.scheduler.run_until(5)
    assert sorted(map(str, heard)) == expected


def test_a_paused_process_hears_everything_when_it_goes_on() -> None:
    simulation, one, other = two_processes()
    heard: list[object] = []
    connection = connected(simulation, one, other, heard)
    other.pause()
    connection.send(1)
    connection.send(2)
    simulation.scheduler.run_until(3)
    assert heard == []
    other.resume()
    assert heard == [1, 2]


def test_nobody_connects_through_a_cut() -> None:
    simulation, one, other = two_processes()
    simulation.network.cut(2, 1)
    assert simulation.network.connect(one, other) is None


# Whole brokers


def whole_process() -> tuple[DataSimulation, Process, SimLoop]:
    simulation = DataSimulation(1, 1, broker_ids=(2,))
    process = Process(simulation.host(2))
    return simulation, process, SimLoop(process, random.Random(1))


def test_tasks_run_in_virtual_time_and_only_while_their_process_does() -> None:
    simulation, process, loop = whole_process()
    seen: list[float] = []

    async def work() -> None:
        while True:
            await asyncio.sleep(1)
            seen.append(round(simulation.scheduler.now_s, 1))

    process.run(loop.create_task, work())
    simulation.scheduler.run_until(2.5)
    assert seen == [1.0, 2.0]
    process.pause()
    simulation.scheduler.run_until(5.5)
    assert seen == [1.0, 2.0]
    process.resume()
    simulation.scheduler.run_until(7.0)
    assert seen == [1.0, 2.0, 5.5, 6.5]
    process.die(with_machine=False)
    simulation.scheduler.run_until(20)
    assert len(seen) == 4


def test_work_for_the_disk_is_done_in_one_go_after_a_while_or_never() -> None:
    simulation, process, _ = whole_process()
    disk = process.host.log_disk
    assert disk is not None
    disk.sync_s = (1.0,)
    executor = SimExecutor(process, disk, random.Random(1))
    done: list[float] = []
    future = executor.submit(lambda: done.append(simulation.scheduler.now_s))
    simulation.scheduler.run_until(0.4)
    assert not done
    simulation.scheduler.run_until(2.0)
    assert done
    assert future.done()
    executor.submit(lambda: done.append(simulation.scheduler.now_s))
    process.die(with_machine=False)
    simulation.scheduler.run_until(9.0)
    assert len(done) == 1


def test_a_process_dies_within_an_operation_of_its_log_disk() -> None:
    _, process, _ = whole_process()
    process.host.process = process
    disk = process.host.log_disk
    assert disk is not None
    disk.storage.make_dir("/logs")
    disk.die_after(1)

    def work() -> None:
        file = disk.storage.open("/logs/file", create=True)
        file.write((b"never written",), 0)

    process.run(work)
    assert not process.alive
    assert not disk.dead, "the disk must work for the next process"


def test_what_a_broken_log_disk_did_not_sync_is_gone() -> None:
    _, process, _ = whole_process()
    disk = process.host.log_disk
    assert disk is not None
    disk.storage.make_dir("/logs")
    disk.storage.sync_dir("/")
    file = disk.storage.open("/logs/file", create=True)
    file.write((b"synced",), 0)
    file.datasync()
    disk.storage.sync_dir("/logs")
    file.write((b" lost",), 6)
    disk.break_now()
    with pytest.raises(SyncFailed):
        file.datasync()
    disk.loses_all = True
    disk.process_died(with_machine=False)
    assert bytes(disk.storage.raw("/logs/file")) == b"synced"


def test_the_ledger_notices_another_record_at_an_offset() -> None:
    with DataStory() as story:
        key = story.topic()
        story.produce(key, 3)
        broker = story.simulation.data_broker(3)
        assert broker is not None
        here = broker.find(key)
        assert here is not None
        content = broker.host.log_disk
        assert content is not None
        content.storage.raw(here.log.segments[0].log_path)[-1] ^= 0xFF
        with pytest.raises(Violation, match="another batch"):
            story.simulation.ledger.check_all()


def test_the_ledger_notices_a_replica_in_sync_that_lacks_what_is_committed() -> None:
    with DataStory() as story:
        key = story.topic()
        story.produce(key, 3)
        broker = story.simulation.data_broker(4)
        assert broker is not None
        here = broker.find(key)
        assert here is not None
        here.log.truncate_to(1, now_ms=0)
        with pytest.raises(Violation, match=r"in the ISR .*, but its log ends at 1, and 3 is committed"):
            story.simulation.ledger.check_isr(key)
