"""The coordinator frame over a real partition: load, decide, append, replay, and effects once committed."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.coordinator import shard as shard_module
from broker.coordinator.core import decode, encode
from broker.coordinator.shard import Shard, State
from broker.coordinator.shards import Shards
from raftlog.errors import (
    BrokerOverloaded,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InternalError,
    NotCoordinator,
    RaftlogError,
)
from raftlog.v1.group_pb2 import HeartbeatAnswer
from replication.ports import Replica
from tests.support import virtual_time
from tests.support.broker_parts import TOPIC_ID, Parts, image_with
from tests.support.memory_storage import Fault, MemoryStorage
from tests.support.replica_link import settle
from tests.support.tally import Add, AddAll, Announce, Ask, Break, Command, Counted, Echo, Tally
from tests.support.virtual_time import LoopClock

KEY = (TOPIC_ID, 0)


class Waiting:
    """A recipient that keeps what it hears."""

    def __init__(self, *, is_stream: bool = False) -> None:
        self.is_stream = is_stream
        self.heard: list[Any] = []

    def deliver(self, message: Any) -> None:
        self.heard.append(message.member_epoch if isinstance(message, HeartbeatAnswer) else message)

    @property
    def error(self) -> RaftlogError:
        assert isinstance(self.heard[-1], RaftlogError)
        return self.heard[-1]


class Frame:
    """Shards of the tests' topic over the parts of a broker."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.cores: list[Tally] = []
        self.shards: Shards[Command, object] = Shards(
            "t", self._core, lambda: "topics", executor=parts.disk, clock=parts.clock, lease=parts.lease
        )
        parts.registry.on_term.append(self.shards.on_term)

    def _core(self, partition: int) -> Tally:
        self.cores.append(Tally())
        return self.cores[-1]

    @property
    def shard(self) -> Shard[Command, object]:
        found = self.shards.find(0)
        assert found is not None
        return found

    @property
    def core(self) -> Tally:
        assert isinstance(self.shard._core, Tally)
        return self.shard._core

    def add(self, name: str, *, is_stream: bool = False) -> Waiting:
        waiting = Waiting(is_stream=is_stream)
        self.shard.submit(Add(waiting, name), waiting)
        return waiting

    def ask(self, name: str) -> Waiting:
        waiting = Waiting()
        self.shard.submit(Ask(waiting, name), waiting)
        return waiting

    def written(self) -> list[tuple[int, bytes, bytes | None]]:
        log = self.parts.registry.find(*KEY).log
        result = log.read(0, 1 << 20, log.log_end_offset, blocking=True)
        assert result is not None
        return list(decode(result.records))


@asynccontextmanager
async def frame_on(tmp_path: Path, **options: Any) -> AsyncIterator[Frame]:
    parts = Parts(tmp_path, clock=LoopClock(), **options)
    frame = Frame(parts)
    async with parts:
        await settle()
        yield frame
        frame.shards.close()


def test_commands_of_one_round_share_a_batch_and_are_answered_once_it_is_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.parts.disk.held = True
            waiting = [frame.add("a"), frame.add("a"), frame.add("b")]
            await settle()
            assert frame.written() == [(0, b"a", b"1"), (1, b"a", b"2"), (2, b"b", b"1")]
            assert [each.heard for each in waiting] == [[], [], []]
            assert frame.parts.registry.find(*KEY).high_watermark == 0
            frame.parts.disk.release()
            await settle()
            assert [each.heard for each in waiting] == [[1], [2], [1]]

    virtual_time.run(scenario())


def test_what_writes_nothing_waits_for_what_it_has_seen(tmp_path: Path) -> None:
    """Else a client reads an offset that the next coordinator does not have."""

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.parts.disk.held = True
            frame.add("a")
            await settle()
            asked = frame.ask("a")
            await settle()
            assert asked.heard == []
            frame.parts.disk.release()
            await settle()
            assert asked.heard == [1]
            asked = frame.ask("a")
            await settle()
            assert asked.heard == [1]

    virtual_time.run(scenario())


def test_the_next_term_finds_what_was_committed_and_who_waited_hears_where_to_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            stream = frame.add("a", is_stream=True)
            await settle()
            assert stream.heard == [1]
            before = frame.shard
            frame.parts.disk.held = True
            call = frame.add("a")
            await settle()
            await frame.parts.apply(image_with(1, offset=2, leader=2, leader_epoch=4, replicas=(1, 2)))
            await settle()
            assert isinstance(call.error, NotCoordinator)
            assert "broker 2 leads t-0" in str(call.error)
            assert isinstance(stream.error, NotCoordinator)
            assert before.state is State.GONE
            assert frame.shards.find(0) is None
            frame.parts.disk.release()
            await frame.parts.apply(image_with(1, offset=3, leader=1, leader_epoch=5, replicas=(1,)))
            await settle()
            assert frame.shard.state is State.ACTIVE
            assert frame.core.counts == {"a": 2}
            assert frame.core.topics == ["topics"]
            late = Waiting()
            before.submit(Ask(late, "a"), late)
            assert isinstance(late.error, NotCoordinator)

    virtual_time.run(scenario())


def test_nothing_is_answered_before_the_replicas_in_sync_have_confirmed_the_term(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.add("a")
            await settle()
            frame.parts.registry.find(*KEY).log.high_watermark = 0  # as a follower that has not heard yet
            await frame.parts.apply(image_with(1, offset=2, leader_epoch=4, replicas=(1, 2)))
            await settle()
            assert frame.shard.state is State.LOADING
            refused = frame.ask("a")
            assert isinstance(refused.error, CoordinatorLoadInProgress)
            partition = frame.parts.registry.find(*KEY)
            follower = Replica(2, 1)
            partition.open_replica(
                follower,
                leader_epoch=4,
                fetch_offset=1,
                last_fetched_epoch=3,
                durable_end_offset=1,
                on_change=lambda: None,
            )
            await settle()
            asked = frame.ask("a")
            await settle()
            assert asked.heard == [1]

    virtual_time.run(scenario())


def test_a_record_that_cannot_be_read_fails_its_shard_alone_and_says_where(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, partitions=2, clock=LoopClock())
        async with parts:
            parts.registry.find(*KEY).append(encode([(b"!", b"v")], 1)[0], -1, None)
            frame = Frame(parts)
            await parts.apply(image_with(2, offset=2, leader_epoch=4))
            await settle()
            shard = frame.shard
            assert shard.state is State.FAILED
            refused = frame.add("a")
            assert isinstance(refused.error, CoordinatorNotAvailable)
            assert str(refused.error) == "t-0 cannot be loaded: the record at offset 0: key b'!' is no name"
            other = frame.shards.find(1)
            assert other is not None
            assert other.state is State.ACTIVE
            frame.shards.close()

    virtual_time.run(scenario())


def test_without_a_lease_commands_wait_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.parts.lease.end()
            waiting = frame.add("a")
            await settle()
            assert waiting.heard == []
            assert frame.written() == []
            frame.parts.lease.renew()
            await settle()
            assert waiting.heard == [1]

    virtual_time.run(scenario())


def test_with_too_few_in_sync_calls_are_refused_and_streams_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            partition = frame.parts.registry.find(*KEY)
            leading = partition._leading
            assert leading is not None
            leading.has_enough_in_sync = False
            call, stream = frame.add("a"), frame.add("a", is_stream=True)
            await settle()
            assert isinstance(call.error, CoordinatorNotAvailable)
            assert "min.insync.replicas" in str(call.error)
            assert stream.heard == []
            assert frame.written() == []
            leading.has_enough_in_sync = True
            await asyncio.sleep(0.15)
            await settle()
            assert stream.heard == [1]

    virtual_time.run(scenario())


def test_a_disk_that_refuses_drops_the_state_which_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.coordinator.shard.RELOAD_S", 0.01)

    async def scenario() -> None:
        storage = MemoryStorage()
        async with frame_on(tmp_path, storage=storage) as frame:
            frame.add("a")
            await settle()
            storage.faults.append(Fault("write", "*.log", errno.ENOSPC))
            refused = frame.add("a")
            await settle()
            assert isinstance(refused.error, CoordinatorNotAvailable)
            assert frame.shard.state is State.FAILED
            storage.faults.clear()
            await asyncio.sleep(0.05)
            await settle()
            assert frame.core.counts == {"a": 1}
            again = frame.add("a")
            await settle()
            assert again.heard == [2]

    virtual_time.run(scenario())


def test_a_command_that_breaks_the_core_harms_nobody_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            broken = Waiting()
            first = frame.add("a")
            frame.shard.submit(Break(broken), broken)
            last = frame.add("a")
            await settle()
            assert (first.heard, last.heard) == ([1], [2])
            assert isinstance(broken.error, InternalError)

    virtual_time.run(scenario())


def test_what_is_due_by_time_is_done_without_a_command(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.core.deadline_ms = frame.parts.clock.monotonic_ms() + 30
            frame.ask("a")
            await settle()
            assert frame.core.counts == {}
            await asyncio.sleep(0.06)
            assert frame.core.counts == {"time": 1}
            assert frame.written() == [(0, b"time", b"1")]

    virtual_time.run(scenario())


def test_heartbeats_that_had_to_wait_count_before_the_time_that_has_passed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.core.deadline_ms = frame.parts.clock.monotonic_ms() + 5
            frame.parts.lease.end()
            frame.add("a", is_stream=True)
            await asyncio.sleep(0.02)
            frame.parts.lease.renew()
            await settle()
            await asyncio.sleep(0.01)
            assert [key for _, key, _ in frame.written()] == [b"a", b"time"]

    virtual_time.run(scenario())


def test_what_is_due_is_done_although_commands_never_stop_coming(tmp_path: Path) -> None:
    """Under load no member got an assignment, and none that was dead was given up."""

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.core.deadline_ms = frame.parts.clock.monotonic_ms() + 20
            for _ in range(500):
                for _ in range(300):
                    frame.add("a")
                await asyncio.sleep(0)
                virtual_time.work_for(0.001)
                if "time" in frame.core.counts:
                    break
            assert frame.core.counts["time"] == 1
            assert frame.shard._queue or frame.shard._uncommitted, (
                "the shard must still have work to do, or the test shows nothing"
            )

    virtual_time.run(scenario())


def test_what_is_due_is_done_although_every_turn_writes_as_much_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "TURN_BYTES", 1)

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            for number in range(50):
                frame.add(f"a{number}")
            frame.core.deadline_ms = frame.parts.clock.monotonic_ms()
            await settle()
            for number in range(50):
                frame.add(f"b{number}")
                await asyncio.sleep(0)
            await settle()
            keys = [key for _, key, _ in frame.written()]
            assert b"time" in keys
            assert keys.index(b"time") >= 50, "the deadline must be handled after the 50 commands that came before it"

    virtual_time.run(scenario())


def test_time_comes_only_as_far_as_everything_has_been_decided_that_was_queued_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that came after the fence, and in time, waits in the queue: nothing later than the fence is due."""
    monkeypatch.setattr(shard_module, "TURN_COMMANDS", 2)

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.parts.disk.held = True
            frame.add("a")
            await settle()
            for number in range(4):
                frame.add(f"b{number}")
            frame.core.deadline_ms = frame.parts.clock.monotonic_ms()
            await settle()
            assert frame.core.counts == {"a": 1}, "the commands must wait while an append is in progress"
            frame.parts.disk.release()
            for _ in range(100):
                await asyncio.sleep(0)
                if "b0" in frame.core.counts:
                    break
            fenced_ms = frame.parts.clock.monotonic_ms()
            await asyncio.sleep(0.01)
            frame.add("late")
            await settle()
            assert [key for _, key, _ in frame.written()][-2:] in ([b"time", b"late"], [b"late", b"time"])
            assert frame.core.times[0] <= fenced_ms

    virtual_time.run(scenario())


def test_what_reveals_nothing_does_not_wait_for_what_is_under_way(tmp_path: Path) -> None:
    """One append that a follower holds up cost every member of the shard its session."""

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.parts.disk.held = True
            frame.add("a")
            await settle()
            stream = Waiting(is_stream=True)
            frame.shard.submit(Echo(stream, 7), stream)
            await settle()
            assert stream.heard == [7]
            frame.parts.disk.release()

    virtual_time.run(scenario())


def test_without_a_lease_not_even_that_is_answered(tmp_path: Path) -> None:
    """Another broker may coordinate by now, and count sessions from before the heartbeat."""

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.parts.lease.end()
            stream = Waiting(is_stream=True)
            frame.shard.submit(Echo(stream, 7), stream)
            await settle()
            assert stream.heard == []
            frame.parts.lease.renew()
            await settle()
            assert stream.heard == [7]

    virtual_time.run(scenario())


def test_a_large_command_is_decided_in_pieces_and_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "TURN_COMMANDS", 2)

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            waiting = Waiting()
            frame.shard.submit(AddAll(waiting, ("a", "b", "c", "d", "e")), waiting)
            after = frame.ask("e")
            await settle()
            assert [key for _, key, _ in frame.written()] == [b"a", b"b", b"c", b"d", b"e"]
            assert waiting.heard == [5]
            assert after.heard == [1], "a command that came later must be decided later"

    virtual_time.run(scenario())


class Listening:
    """A listener that keeps what it is given notice of."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def notify(self, notice: object) -> None:
        self.heard.append(notice)


def test_a_notice_leaves_once_what_it_is_about_is_committed(tmp_path: Path) -> None:
    """Markers of an uncommitted decision would reveal a decision that the next coordinator does not know."""

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            listening = Listening()
            frame.parts.disk.held = True
            frame.shard.tell(Announce(listening, "a"))
            await settle()
            assert frame.written() == [(0, b"a", b"1")]
            assert not listening.heard
            frame.parts.disk.release()
            await settle()
            assert listening.heard == [Counted(1)]

    virtual_time.run(scenario())


def test_what_the_broker_itself_tells_a_coordinator_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal would lose the news that markers are written: it is sent only once."""
    monkeypatch.setattr(shard_module, "MAX_QUEUED", 1)

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            listening = Listening()
            frame.add("a")
            refused = frame.add("b")
            frame.shard.tell(Announce(listening, "a"))
            await settle()
            assert isinstance(refused.error, BrokerOverloaded)
            assert listening.heard == [Counted(2)]

    virtual_time.run(scenario())


def test_a_coordinator_that_is_loading_or_gone_passes_over_what_it_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            listening, shard = Listening(), frame.shard
            frame.shards.close()
            shard.tell(Announce(listening, "a"))
            await settle()
            assert shard.state is State.GONE
            assert not listening.heard

    virtual_time.run(scenario())


def test_a_commit_makes_a_turn_only_where_something_has_come_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that find nothing to do cost as much as those that do, while many partitions have little to do each."""
    turns: list[object] = []
    run_turn = Shard._turn

    def counted(shard: Shard[Command, object]) -> None:
        turns.append(shard)
        run_turn(shard)

    monkeypatch.setattr(Shard, "_turn", counted)

    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            await settle()
            turns.clear()
            waiting = frame.add("a")
            await settle()
            assert waiting.heard == [1]
            assert len(turns) == 1
            frame.parts.disk.held = True
            frame.add("a")
            await settle()
            waiting = frame.add("a")
            await settle()
            assert len(turns) == 2
            frame.parts.disk.release()
            await settle()
            assert waiting.heard == [3]
            assert len(turns) == 3

    virtual_time.run(scenario())


class Broken(Waiting):
    """Takes nothing."""

    def deliver(self, message: Any) -> None:
        super().deliver(message)
        raise RuntimeError("a bug of this one")

    def notify(self, notice: object) -> None:
        self.deliver(notice)


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_cannot_be_told_stops_nobody_else(tmp_path: Path, *, is_stream: bool) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            frame.parts.disk.held = True
            partition = frame.parts.registry.find(*KEY)
            woken: list[int] = []
            broken = Broken(is_stream=is_stream)
            frame.shard.submit(Add(broken, "a"), broken)
            frame.shard.tell(Announce(Broken(), "a"))
            after = frame.add("b", is_stream=is_stream)
            await settle()
            partition.wait(lambda: woken.append(partition.high_watermark))
            frame.parts.disk.release()
            await settle()
            assert (broken.heard, after.heard, woken) == ([1], [1], [3])
            assert frame.shard.state is State.ACTIVE
            later = frame.add("b")
            await settle()
            assert later.heard == [2]

    virtual_time.run(scenario())


@pytest.mark.parametrize("how", ["refused", "ended"])
def test_who_cannot_be_told_that_it_is_over_stops_nobody_else(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with frame_on(tmp_path) as frame:
            leading = frame.parts.registry.find(*KEY)._leading
            assert leading is not None
            leading.has_enough_in_sync = False
            broken, shard = Broken(), frame.shard
            shard.submit(Add(broken, "a"), broken)
            after = frame.add("b")
            if how == "ended":
                shard.end()
            await settle()
            assert isinstance(broken.error, NotCoordinator if how == "ended" else CoordinatorNotAvailable)
            assert type(after.error) is type(broken.error)
            assert shard.state is (State.GONE if how == "ended" else State.ACTIVE)

    virtual_time.run(scenario())
