"""What may be proposed from outside."""

from __future__ import annotations

import pytest

from raftlog.errors import InvalidRequestError
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand
from raftmeta.quorum.service import ALLOWED_KINDS, check_command

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
