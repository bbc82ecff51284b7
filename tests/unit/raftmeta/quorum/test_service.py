"""What may be proposed from outside."""

from __future__ import annotations

import asyncio

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
from raftmeta.quorum.service import ALLOWED_KINDS, ControllerService, check_command

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
