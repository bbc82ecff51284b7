"""How the active controller commits commands: stamped with its clock and the epoch in which it was elected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from raftlog.errors import (
    FeatureUpdateFailed,
    FencedController,
    MessageTooLarge,
    NotController,
    RaftlogError,
    ShuttingDown,
    StorageError,
    StorageFull,
    UnknownOutcome,
)
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand, UpdateFeatureCommand
from raftmeta.decide import CommandResult
from raftmeta.decide.outcome import shown
from raftmeta.features import SUPPORTED, supports
from raftmeta.quorum import controller_plan as plan
from raftmeta.quorum.config import MAX_COMMAND_BYTES, Clock
from raftmeta.quorum.controller_plan import PartitionKey
from raftmeta.quorum.driver import Driver
from raftmeta.state import Applied

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 8
"""The controller's own commands under way at a time."""

HEAVY_PARTITIONS: Final = 500
"""A command that makes more partitions takes tens of milliseconds to apply, with everything else waiting meanwhile."""

_NOT_DECIDED = (NotController, UnknownOutcome, FencedController, StorageFull, ShuttingDown, StorageError)
"""What the state machine has not said: the command says the same when it is proposed again."""


class Proposals:
    """Commits in one term. A command that comes too late for it is refused by the state machine, everywhere.

    Heavy commands are committed one at a time, so that heartbeats have their turn between them.
    """

    def __init__(self, driver: Driver, clock: Clock, term: int) -> None:
        self._driver = driver
        self._clock = clock
        self._term = term
        self._heavy = asyncio.Lock()

    async def commit(self, command: MetadataCommand) -> CommandResult:
        """Commit a command; its clock and epoch are set in place.

        Raises:
            NotController, UnknownOutcome, FencedController: the leadership is lost, before or meanwhile.
            RaftlogError: refused.
        """
        kind = command.WhichOneof("command")
        if kind == "update_feature":
            check_feature(command.update_feature)
        if _partitions_made(kind, command) <= HEAVY_PARTITIONS:
            return await self._commit(command)
        async with self._heavy:
            return await self._commit(command)

    async def _commit(self, command: MetadataCommand) -> CommandResult:
        command.proposed_at_ms = self._clock.now_ms()
        command.controller_epoch = self._term
        data = command.SerializeToString()
        if len(data) > MAX_COMMAND_BYTES:
            raise MessageTooLarge(f"the command has {len(data)} bytes, at most {MAX_COMMAND_BYTES} are allowed")
        applied = (await self._driver.propose(data)).result
        assert isinstance(applied, Applied)
        if isinstance(applied.outcome, RaftlogError):
            raise applied.outcome
        return applied.outcome

    async def commit_all(self, commands: Iterable[MetadataCommand]) -> None:
        """Commit the controller's own commands, some at a time.

        One that the state machine refuses has been overtaken by something: the next round sees what.

        Raises:
            NotController, UnknownOutcome, FencedController: the leadership is lost.
            StorageFull, ShuttingDown, StorageError: nothing can be committed at the moment.
        """
        under_way: set[asyncio.Task[CommandResult]] = set()
        try:
            for command in commands:
                if len(under_way) >= MAX_IN_FLIGHT:
                    done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                    _check(done)
                under_way.add(asyncio.create_task(self.commit(command)))
            if under_way:
                done, under_way = await asyncio.wait(under_way)
                _check(done)
        finally:
            for task in under_way:
                task.cancel()


def check_feature(asked: UpdateFeatureCommand) -> None:
    """Check that this controller could go on with the feature level that a command asks for.

    A committed level ends every node that does not know it (`state.py`), and no state machine may look at what its own
    version knows; so it is refused here, before it is appended. The rule for an upgrade: all controllers first, then
    the level. This controller speaks for itself only; that the other voters run its version or a newer one is for the
    operator to see to.

    Raises:
        FeatureUpdateFailed: this version does not know the level.
    """
    if asked.level > 0 and not supports(SUPPORTED.values(), asked.name, asked.level):
        raise FeatureUpdateFailed(
            f"the active controller does not know {shown(asked.name)} at level {asked.level}; run a newer version "
            "on all controllers first"
        )


def _partitions_made(kind: str | None, command: MetadataCommand) -> int:
    match kind:
        case "create_topic":
            return command.create_topic.partitions
        case "create_partitions":
            return command.create_partitions.partitions
        case _:
            return 0


def _check(done: Iterable[asyncio.Task[CommandResult]]) -> None:
    lost: RaftlogError | None = None
    for task in done:
        error = task.exception()
        if isinstance(error, _NOT_DECIDED):
            lost = error
        elif isinstance(error, RaftlogError):
            logger.info("a command of the controller was refused: %s", error)
        elif error is not None:
            raise error
    if lost is not None:
        raise lost


def elect(
    keys: Sequence[PartitionKey], kind: ElectLeadersCommand.Type.ValueType, *, handed_over_as_of: int = 0
) -> Iterable[MetadataCommand]:
    """Yield the commands that ask for the partitions to be settled, in pieces."""
    for partitions in plan.chunks(keys):
        yield MetadataCommand(
            elect_leaders=ElectLeadersCommand(partitions=partitions, type=kind, handed_over_as_of=handed_over_as_of)
        )
