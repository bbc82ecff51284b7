"""The driver runs the core when it should, syncs before it promises, and stops for good when something breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raftlog.errors import CorruptRecordError, InternalError, NotController, RaftlogError, StorageError, UnknownOutcome
from raftlog.v1.raft_pb2 import RaftMessage, ReadProbe, TermNotice
from raftmeta.quorum.driver import Driver
from raftmeta.raft.ports import Applied, ProposalOutcome, Unknown
from tests.support import virtual_time

IMMEDIATE = RaftMessage(read_probe=ReadProbe(round=1))
DURABLE = RaftMessage(term_notice=TermNotice())


class FakeWal:
    """Collects what happened in which order."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.dirty = False
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def take(self) -> str:
        self.dirty = False
        self.events.append("take")
        return "frame"

    def write(self, pending: str) -> None:
        assert pending == "frame"
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.events.append(f"write in {threading.current_thread().name.partition('_')[0]}")

    def done(self, pending: str) -> None:
        self.events.append("done")


class FakeNode:
    """A core that acts as the test says."""

    def __init__(self, wal: FakeWal) -> None:
        self.wal = wal
        self.events = wal.events
        self.has_peers = True
        self.in_flight = False
        self.wants_cycle = False
        self.due_s = float("inf")
        self.error: Exception | None = None
        self.on_cycle: Callable[[], None] | None = None
        self.proposed: list[Callable[[ProposalOutcome], None]] = []
        self.reads: list[Callable[[int | None], None]] = []
        self.immediate: list[tuple[int, RaftMessage]] = []
        self.durable: list[tuple[int, RaftMessage]] = []

    def cycle(self) -> None:
        self.events.append("cycle")
        if self.error is not None:
            raise self.error
        if self.on_cycle is not None:
            self.on_cycle()

    def next_deadline_s(self) -> float:
        return self.due_s

    def take_immediate(self) -> list[tuple[int, RaftMessage]]:
        taken, self.immediate = self.immediate, []
        return taken

    def take_durable(self) -> list[tuple[int, RaftMessage]]:
        taken, self.durable = self.durable, []
        return taken

    def propose(self, command: bytes, done: Callable[[ProposalOutcome], None]) -> None:
        if command == b"refused":
            raise NotController("not here")
        self.proposed.append(done)

    def read_index(self, done: Callable[[int | None], None]) -> None:
        self.reads.append(done)


class Rig:
    """A driver over fakes; make it inside a running loop."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.events: list[str] = []
        self.wal = FakeWal(self.events)
        self.node = FakeNode(self.wal)
        self.fatal: list[RaftlogError] = []
        self.now_s = 0.0
        loop = asyncio.get_running_loop()
        self.driver = Driver(self.wal, loop.time, executor, self.fatal.append)

    def send(self, peer_id: int, message: RaftMessage) -> None:
        self.events.append(f"send {message.WhichOneof('body')} to {peer_id}")

    def start(self) -> None:
        self.driver.start(self.node, self.send)

    async def happens(self, *events: str) -> None:
        """Check that these come next, and no others."""
        async with asyncio.timeout(60):
            while len(self.events) < len(events):  # noqa: ASYNC110 - threads take part
                await asyncio.sleep(0.001)
        await settle()
        assert self.events == [*events]
        self.events.clear()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        yield pool


async def settle() -> None:
    await asyncio.sleep(0.03)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - threads take part
            await asyncio.sleep(0.001)


async def test_promises_leave_after_the_sync_and_everything_else_before(executor: ThreadPoolExecutor) -> None:
    rig = Rig(executor)

    def step() -> None:
        rig.node.on_cycle = None
        rig.wal.dirty = True
        rig.node.immediate.append((2, IMMEDIATE))
        rig.node.durable.append((3, DURABLE))

    rig.node.on_cycle = step
    rig.start()
    await rig.happens(
        "cycle",
        "send read_probe to 2",
        "take",
        "write in wal",
        "done",
        "send term_notice to 3",
    )
    await rig.driver.close()


async def test_many_causes_make_one_cycle_and_none_runs_beside_a_sync(executor: ThreadPoolExecutor) -> None:
    rig = Rig(executor)
    rig.start()
    await rig.happens("cycle")
    for _ in range(100):
        rig.driver.kick()
    await rig.happens("cycle")

    rig.wal.gate.clear()
    rig.wal.dirty = True
    rig.driver.kick()
    await rig.happens("cycle", "take")
    for _ in range(100):
        rig.driver.kick()
    await rig.happens()
    rig.wal.gate.set()
    await rig.happens("write in wal", "done", "cycle")
    await rig.driver.close()


def test_the_deadline_makes_a_cycle_and_an_idle_core_makes_none(executor: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        rig = Rig(executor)
        loop = asyncio.get_running_loop()
        rig.node.due_s = loop.time() + 0.05

        def later() -> None:
            rig.node.due_s = loop.time() + 60

        rig.start()
        await settle()
        rig.node.on_cycle = later
        assert rig.events == ["cycle"]
        await asyncio.sleep(0.1)
        assert rig.events == ["cycle", "cycle"]
        await rig.driver.close()

    virtual_time.run(scenario())


def test_a_deadline_that_comes_nearer_is_kept(executor: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        rig = Rig(executor)
        loop = asyncio.get_running_loop()
        rig.node.due_s = loop.time() + 60
        rig.start()
        await settle()
        rig.node.due_s = loop.time() + 0.03
        rig.driver.kick()
        await settle()
        rig.node.due_s = min(rig.node.due_s, loop.time() + 60)
        await asyncio.sleep(0.05)
        assert rig.events.count("cycle") >= 3
        await rig.driver.close()

    virtual_time.run(scenario())


def test_proposals_wait_for_the_round_under_way_but_not_for_long(executor: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        rig = Rig(executor)
        rig.start()
        await settle()
        rig.node.in_flight = True
        for _ in range(10):
            rig.driver.propose(b"x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rig.events == ["cycle"]
        await settle()
        assert rig.events == ["cycle", "cycle"]
        rig.driver.propose(b"x")
        rig.driver.kick()  # the answer that ends the round
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rig.events == ["cycle"] * 3
        await rig.driver.close()

    virtual_time.run(scenario())


async def test_outcomes_reach_those_who_asked(executor: ThreadPoolExecutor) -> None:
    rig = Rig(executor)
    with pytest.raises(RaftlogError, match="not been started"):
        rig.driver.propose(b"early")
    rig.start()
    applied, unknown = rig.driver.propose(b"a"), rig.driver.propose(b"b")
    rig.node.proposed[0](Applied(7, 2, "result"))
    rig.node.proposed[1](Unknown())
    assert (await applied).result == "result"
    with pytest.raises(UnknownOutcome):
        await unknown
    with pytest.raises(NotController):
        rig.driver.propose(b"refused")
    confirmed, deposed = rig.driver.read_index(), rig.driver.read_index()
    rig.node.reads[0](9)
    rig.node.reads[1](None)
    assert await confirmed == 9
    with pytest.raises(NotController):
        await deposed
    await rig.driver.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(5, "Input/output error"), StorageError),
        (CorruptRecordError("the states differ"), CorruptRecordError),
        (ZeroDivisionError("a bug"), InternalError),
    ],
)
@pytest.mark.parametrize("where", ["cycle", "write"])
async def test_nothing_leaves_after_something_broke(
    executor: ThreadPoolExecutor, error: Exception, expected: type[RaftlogError], where: str
) -> None:
    rig = Rig(executor)
    rig.start()
    await settle()
    waiting = rig.driver.propose(b"x")
    rig.node.durable.append((2, DURABLE))
    if where == "cycle":
        rig.node.error = error
    else:
        rig.wal.dirty, rig.wal.error = True, error
    rig.driver.kick()
    await until(lambda: bool(rig.fatal))
    await settle()
    assert [type(fatal) for fatal in rig.fatal] == [expected]
    assert rig.driver.failed
    with pytest.raises(UnknownOutcome):
        await waiting
    before = list(rig.events)
    rig.driver.kick()
    await settle()
    assert rig.events == before
    assert not any(event.startswith("send") for event in before)
    with pytest.raises(expected):
        rig.driver.propose(b"y")
    await rig.driver.close()
    assert len(rig.fatal) == 1


async def test_work_off_the_loop_ends_on_the_loop(executor: ThreadPoolExecutor) -> None:
    rig = Rig(executor)
    rig.start()
    await settle()
    seen: list[object] = []
    rig.driver.run_off_loop(lambda: seen.append(threading.current_thread().name), seen.append)
    await until(lambda: len(seen) == 2)
    assert str(seen[0]).startswith("other")
    assert seen[1] is None
    rig.driver.run_off_loop(lambda: 1 / 0, seen.append)  # type: ignore[arg-type] # what fails is meant
    await until(lambda: len(seen) == 3)
    assert isinstance(seen[2], ZeroDivisionError)
    await rig.happens("cycle", "cycle", "cycle")
    await rig.driver.close()


async def test_closing_waits_for_a_sync_and_answers_who_waits(executor: ThreadPoolExecutor) -> None:
    rig = Rig(executor)
    rig.start()
    await settle()
    rig.wal.gate.clear()
    rig.wal.dirty = True
    waiting = rig.driver.propose(b"x")
    await until(lambda: "take" in rig.events)
    closing = asyncio.create_task(rig.driver.close())
    await settle()
    assert not closing.done()
    rig.wal.gate.set()
    await closing
    with pytest.raises(UnknownOutcome):
        await waiting
    assert rig.fatal == []
