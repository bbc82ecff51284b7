"""What may be proposed from outside, which node's view of the quorum is shown, and the newest image, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from raftlog.errors import (
    CorruptRecordError,
    InconsistentClusterId,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    ShuttingDown,
    StorageError,
    StorageFull,
)
from raftlog.v1 import records_pb2
from raftlog.v1.common_pb2 import QuorumInfo
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse, ProposeRequest
from raftlog.v1.records_pb2 import CommandOutcome, ElectLeadersCommand, MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage
from raftmeta.port import Change
from raftmeta.quorum.channel import ask_all, better
from raftmeta.quorum.image_feed import ImageFeed
from raftmeta.quorum.peer_identity import peer_nodes
from raftmeta.quorum.service import ALLOWED_KINDS, ControllerService, check_command
from tests.support import virtual_time
from tests.support.quorum import run

OWN = {"claim_controller", "fence_broker", "unfence_broker", "begin_shutdown", "revoke_leaders", "state_digest"}


def kinds() -> set[str]:
    return {each.name for each in MetadataCommand.DESCRIPTOR.oneofs_by_name["command"].fields}


def command(kind: str) -> MetadataCommand:
    made = MetadataCommand()
    getattr(made, kind).SetInParent()
    return made


def test_every_kind_is_either_open_to_all_or_the_controllers_own() -> None:
    assert kinds() == ALLOWED_KINDS | OWN
    assert not ALLOWED_KINDS & OWN


@pytest.mark.parametrize("kind", sorted(OWN))
def test_what_is_the_controllers_own_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=kind):
        check_command(command(kind))


@pytest.mark.parametrize("kind", sorted(ALLOWED_KINDS - {"elect_leaders"}))
def test_the_others_pass(kind: str) -> None:
    check_command(command(kind))


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        check_command(MetadataCommand())


def test_nobody_outside_says_that_a_leader_has_let_go() -> None:
    check_command(MetadataCommand(elect_leaders=ElectLeadersCommand(type=ElectLeadersCommand.PREFERRED)))
    for election in (
        ElectLeadersCommand(type=ElectLeadersCommand.SETTLE),
        ElectLeadersCommand(type=ElectLeadersCommand.PREFERRED, handed_over_as_of=1),
    ):
        with pytest.raises(InvalidRequestError, match="itself"):
            check_command(records_pb2.MetadataCommand(elect_leaders=election))


@pytest.mark.parametrize("size", [1, 15, 17, 1_000_000])
def test_a_client_id_is_empty_or_of_16_bytes(size: int) -> None:
    for good in (b"", bytes(16)):
        made = command("delete_topic")
        made.client_id = good
        check_command(made)
    made = command("delete_topic")
    made.client_id = bytes(size)
    with pytest.raises(InvalidRequestError, match=f"16 bytes.*{size}"):
        check_command(made)


class Controller:
    """An active controller that answers as the test says."""

    serving = True

    def __init__(self, error: RaftlogError | None = None) -> None:
        self.error = error
        self.asked = 0

    async def propose(self, command: MetadataCommand) -> CommandResult:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return CommandResult(7)

    async def barrier(self) -> int:
        raise NotImplementedError

    def heartbeat(self, request: HeartbeatRequest, stream: object) -> asyncio.Future[HeartbeatResponse]:
        raise NotImplementedError

    def stream_closed(self, stream: object) -> None:
        raise NotImplementedError


class View:
    def hint(self) -> ControllerHint:
        return ControllerHint()

    def quorum_info(self) -> QuorumInfo:
        return QuorumInfo()


class Context:
    def __init__(self, remaining_s: float | None) -> None:
        self.remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self.remaining_s


class HeartbeatContext:
    """A call whose stream holds one heartbeat, of node 7."""

    def __init__(self) -> None:
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    async def read(self) -> HeartbeatRequest:
        return HeartbeatRequest(broker_id=7)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        self.aborted = code, details
        raise asyncio.InvalidStateError("the call has ended")


async def test_a_heartbeat_with_another_nodes_certificate_is_refused_with_a_status() -> None:
    controller, context = Controller(), HeartbeatContext()
    controller.stream_closed = lambda stream: None  # type: ignore[method-assign]
    service = ControllerService(controller, View(), lambda: "c")
    peer_nodes.set(frozenset({8}))
    try:
        await service.Heartbeat(None, context)  # type: ignore[arg-type] # as far as used
    finally:
        peer_nodes.set(None)
    assert context.aborted is not None
    assert context.aborted[0] is grpc.StatusCode.PERMISSION_DENIED
    assert "said to be of node 7, with a certificate of node 8" in context.aborted[1]


def propose(controller: Controller, remaining_s: float | None = None, cluster_id: str = "") -> CommandOutcome:
    async def scenario() -> CommandOutcome:
        service = ControllerService(controller, View(), lambda: "c")
        request = ProposeRequest(command=command("delete_topic"), cluster_id=cluster_id)
        return (await service.Propose(request, Context(remaining_s))).outcome  # type: ignore[arg-type] # as far as used

    return asyncio.run(scenario())


def test_what_nobody_waits_for_is_not_done() -> None:
    controller = Controller()
    assert propose(controller, 0.0).error.code == RequestTimedOut.code
    assert controller.asked == 0
    for remaining_s in (None, 60.0):
        assert propose(controller, remaining_s).offset == 7
    assert controller.asked == 2


@pytest.mark.parametrize("error", [StorageError("disk"), CorruptRecordError("diverged"), InternalError("core")])
def test_a_controller_that_has_failed_sends_its_callers_elsewhere(error: RaftlogError) -> None:
    outcome = propose(Controller(error))
    assert outcome.error.code == ShuttingDown.code
    assert str(error) in outcome.error.message


def test_what_the_state_machine_says_of_the_disk_stays() -> None:
    assert propose(Controller(StorageFull("full"))).error.code == StorageFull.code


def test_a_cluster_id_beyond_all_measure_is_not_repeated() -> None:
    outcome = propose(Controller(), cluster_id="\x01" * 10_000_000)
    assert outcome.error.code == InconsistentClusterId.code
    assert len(outcome.error.message) <= 500


def view(answered_by: int, leader_id: int = -1, end: int = 0, epoch: int = 0) -> QuorumInfo:
    return QuorumInfo(answered_by=answered_by, leader_id=leader_id, log_end_index=end, leader_epoch=epoch)


def test_the_leader_is_believed_and_without_one_who_has_the_longest_log() -> None:
    assert better([view(1, 2, 900), view(2, 2, 800)]).answered_by == 2
    assert better([view(1, 1, 900, epoch=3), view(2, 2, 800, epoch=4)]).answered_by == 2, (
        "the leader of the later epoch must be believed, as the other was deposed"
    )
    assert better([view(1, -1, 1), view(2, -1, 800), view(3, 2, 700)]).answered_by == 2


def asked(answers: Callable[[int, int], QuorumInfo | None], timeout_s: float) -> tuple[list[int], int]:
    rounds = {1: 0, 2: 0}

    async def ask(target: int) -> QuorumInfo | None:
        rounds[target] += 1
        return answers(target, rounds[target])

    views = virtual_time.run(ask_all([1, 2], ask, timeout_s))
    return [each.answered_by for each in views], rounds[1]


def test_everybody_is_asked_once_where_nobody_leads() -> None:
    assert asked(lambda target, turn: view(target), 5) == ([1, 2], 1)
    assert asked(lambda target, turn: view(2) if target == 2 else None, 5) == ([2], 1)


def test_a_leader_that_somebody_names_is_waited_for() -> None:
    assert asked(lambda target, turn: view(target, 2) if (target, turn) != (2, 1) else None, 5) == ([1, 2], 2)


def test_it_ends_at_the_deadline_with_what_there_is() -> None:
    assert asked(lambda target, turn: view(1, 2) if target == 1 else None, 0) == ([1], 1)
    views, rounds = asked(lambda target, turn: None, 0.3)
    assert views == []
    assert 1 < rounds < 5


def publish(feed: ImageFeed, offset: int) -> None:
    feed.publish(MetadataImage(offset=offset, controller_epoch=1), Change(offset, 1, ()))


def test_listeners_hear_every_change_once_even_beside_a_broken_one() -> None:
    feed = ImageFeed()
    heard: list[tuple[int, object]] = []

    def broken(image: MetadataImage, records: object) -> None:
        raise ZeroDivisionError

    feed.subscribe(broken)
    unsubscribe = feed.subscribe(lambda image, records: heard.append((image.offset, records)))
    publish(feed, 3)
    feed.reset(MetadataImage(offset=9, controller_epoch=1))
    unsubscribe()
    publish(feed, 11)
    assert heard == [(3, ()), (9, None)]
    assert feed.image.offset == 11
    assert feed.changes_since(3) is None
    assert [change.offset for change in feed.changes_since(9) or ()] == [11]


def test_going_back_is_a_bug() -> None:
    feed = ImageFeed(MetadataImage(offset=5, controller_epoch=2))
    with pytest.raises(AssertionError):
        publish(feed, 5)
    with pytest.raises(AssertionError):
        feed.reset(MetadataImage(offset=4, controller_epoch=2))
    with pytest.raises(AssertionError):
        feed.publish(MetadataImage(offset=6, controller_epoch=1), Change(6, 1, ()))


def test_who_waits_for_an_offset_goes_on_when_it_is_reached() -> None:
    async def scenario() -> None:
        feed = ImageFeed()
        await feed.reached(0)
        waiting = [asyncio.create_task(feed.reached(offset)) for offset in (7, 3, 5)]
        await asyncio.sleep(0)
        publish(feed, 6)
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [False, True, True]
        feed.close(ShuttingDown("stopping"))
        with pytest.raises(ShuttingDown):
            await waiting[0]
        with pytest.raises(ShuttingDown):
            await feed.reached(100)
        await feed.reached(6)

    run(scenario)


def test_a_waiter_that_was_cancelled_is_no_trouble() -> None:
    async def scenario() -> None:
        feed = ImageFeed()
        waiting = asyncio.create_task(feed.reached(3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        publish(feed, 3)
        assert feed.image.offset == 3

    run(scenario)
