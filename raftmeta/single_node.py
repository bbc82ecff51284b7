"""The metadata quorum of one node: `MetadataPort` over a durable journal.

    propose -> queue -> [decide, replay, append, fsync] off the event loop -> image, listeners, answer

Commands that arrive while the disk is busy are decided and made durable together, one fsync for all of them. Neither
an answer nor a new image leaves before that fsync, and refusals wait for it as well: what they refer to may be a
command of the same group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from raftlog.errors import BrokerOverloaded, InternalError, InvalidRequestError, RaftlogError, ShuttingDown, StorageFull
from raftlog.v1.records_pb2 import ClaimControllerCommand, MetadataCommand, MetadataEntry
from raftmeta.decide import CommandResult, decide
from raftmeta.disk import MetadataDisk
from raftmeta.history import ChangeHistory
from raftmeta.image import MetadataImage
from raftmeta.journal import MetadataJournal, Recovered
from raftmeta.os_disk import OsDisk
from raftmeta.port import Change, Listener, Unsubscribe
from raftmeta.replay import replay_all

logger = logging.getLogger(__name__)

COMPACT_AT_BYTES = 20 << 20
MAX_PENDING = 1_000
MAX_GROUP_BYTES = 8 << 20
MAX_COMMAND_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Committed:
    """One command of a group: its answer, and what it changed (the image after it and its change), if anything."""

    outcome: CommandResult | RaftlogError
    image: MetadataImage | None
    change: Change | None


_Pending = tuple[MetadataCommand, "asyncio.Future[CommandResult]"]


class SingleNodeMetadata:
    """A quorum of one. States: new -> running (`start`) -> closed (`close`) or failed (the disk); both are final.

    Failed: a write or fsync error leaves open whether the last group is durable, so nothing more is committed;
    `on_fatal` is told once and the process is expected to end.
    """

    def __init__(
        self,
        disk: MetadataDisk,
        executor: Executor,
        now_ms: Callable[[], int],
        *,
        node_id: int,
        cluster_id: str = "",
        compact_at_bytes: int = COMPACT_AT_BYTES,
        on_fatal: Callable[[RaftlogError], None] | None = None,
    ) -> None:
        self._executor = executor
        self._now_ms = now_ms
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._on_fatal = on_fatal
        self._journal = MetadataJournal(disk, node_id, compact_at_bytes)
        self._image = MetadataImage()
        self._history = ChangeHistory(0)
        self._listeners: dict[object, Listener] = {}
        self._pending: deque[_Pending] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._controller_epoch = 0
        self._stopped_by: RaftlogError | None = ShuttingDown("the metadata has not been started yet")
        self._opened = False

    @staticmethod
    async def open(
        path: str | os.PathLike[str],
        node_id: int,
        cluster_id: str,
        executor: Executor,
        *,
        compact_at_bytes: int = COMPACT_AT_BYTES,
        on_fatal: Callable[[RaftlogError], None] | None = None,
    ) -> SingleNodeMetadata:
        """Return the started metadata in a real directory, with the machine's clock. Raises as `start` does."""
        metadata = SingleNodeMetadata(
            OsDisk(path),
            executor,
            lambda: time.time_ns() // 1_000_000,
            node_id=node_id,
            cluster_id=cluster_id,
            compact_at_bytes=compact_at_bytes,
            on_fatal=on_fatal,
        )
        await metadata.start()
        return metadata

    # MetadataPort

    @property
    def image(self) -> MetadataImage:
        """The newest durable image."""
        return self._image

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command; see `MetadataPort`. Left at 0, its clock and its controller epoch are filled in."""
        if self._stopped_by is not None:
            raise self._stopped_by
        if len(self._pending) >= MAX_PENDING:
            raise BrokerOverloaded(f"{MAX_PENDING} metadata commands are waiting for the disk; try again later")
        stamped = MetadataCommand()
        stamped.CopyFrom(command)
        stamped.proposed_at_ms = stamped.proposed_at_ms or self._now_ms()
        stamped.controller_epoch = stamped.controller_epoch or self._controller_epoch
        if stamped.ByteSize() > MAX_COMMAND_BYTES:
            raise InvalidRequestError(
                f"the command has {stamped.ByteSize()} bytes, at most {MAX_COMMAND_BYTES} are allowed"
            )
        answer: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        self._pending.append((stamped, answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="metadata-commit")
        return await answer

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change from now on."""
        token = object()
        self._listeners[token] = listener

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`, or None when they are not all kept."""
        return self._history.since(offset)

    # Start and end

    async def start(self) -> None:
        """Read the directory back and claim the next controller epoch.

        Raises:
            RaftlogError: as `MetadataJournal.open`; InvalidConfig also when it belongs to another cluster.
        """
        loop = asyncio.get_running_loop()
        recovered = await loop.run_in_executor(self._executor, self._journal.open)
        self._opened = True
        self._take(recovered)
        self._stopped_by = None
        epoch = self._image.controller_epoch + 1
        cluster_id = self._cluster_id or self._image.cluster_id or str(uuid.uuid4())
        claim = ClaimControllerCommand(controller_id=self._node_id, cluster_id=cluster_id)
        try:
            await self.propose(MetadataCommand(controller_epoch=epoch, claim_controller=claim))
        except BaseException:  # the directory must not stay locked, whatever it was
            await self.close()
            raise
        self._controller_epoch = epoch
        logger.info(
            "metadata of cluster %s is at offset %d, controller epoch %d",
            self._image.cluster_id,
            self._image.offset,
            epoch,
        )

    def _take(self, recovered: Recovered) -> None:
        self._image = recovered.image
        first = recovered.entries[0].offset - 1 if recovered.entries else recovered.image.offset
        self._history = ChangeHistory(first)
        for entry in recovered.entries:
            self._history.add(_change(entry))

    async def close(self) -> None:
        """Finish what is under way, refuse what comes later, and give the directory up."""
        if self._stopped_by is None:
            self._stopped_by = ShuttingDown("the broker is stopping; try another one")
        if self._worker is not None:
            await asyncio.wait([self._worker])
        if self._opened:
            self._opened = False
            await asyncio.get_running_loop().run_in_executor(self._executor, self._journal.close)

    # Committing

    async def _work(self) -> None:
        try:
            while self._pending:
                await self._commit_group(self._next_group())
        finally:
            self._worker = None

    def _next_group(self) -> list[_Pending]:
        group: list[_Pending] = []
        size_bytes = 0
        while self._pending and size_bytes < MAX_GROUP_BYTES:
            group.append(self._pending.popleft())
            size_bytes += group[-1][0].ByteSize()
        return group

    async def _commit_group(self, group: Sequence[_Pending]) -> None:
        commands = [command for command, _ in group]
        loop = asyncio.get_running_loop()
        try:
            committed = await loop.run_in_executor(self._executor, self._commit, self._image, commands)
        except StorageFull as error:
            _refuse(group, error)
            return
        except RaftlogError as error:
            self._fail(error)
            _refuse(group, error)
            return
        except Exception as error:  # a bug in deciding or replaying: stop before it becomes durable
            logger.exception("committing metadata failed at offset %d", self._image.offset)
            internal = InternalError(f"committing metadata failed: {type(error).__name__}: {error}")
            self._fail(internal)
            _refuse(group, internal)
            return
        for (_, answer), done in zip(group, committed, strict=True):
            if done.change is not None and done.image is not None:
                self._publish(done.image, done.change)
            _answer(answer, done.outcome)
        await self._compact_if_needed()

    def _commit(self, image: MetadataImage, commands: Sequence[MetadataCommand]) -> list[_Committed]:
        """Off the event loop: decide on each command, make what they yield durable together."""
        committed: list[_Committed] = []
        entries: list[MetadataEntry] = []
        for command in commands:
            decision = decide(image, command)
            if not decision.records:
                committed.append(_Committed(decision.outcome, None, None))
                continue
            offset = image.offset + 1
            image = replay_all(image, decision.records, offset)
            entry = MetadataEntry(
                offset=offset,
                controller_epoch=image.controller_epoch,
                committed_at_ms=command.proposed_at_ms,
                records=decision.records,
            )
            entries.append(entry)
            committed.append(_Committed(decision.outcome, image, _change(entry)))
        if entries:
            self._journal.append(entries)
        return committed

    def _publish(self, image: MetadataImage, change: Change) -> None:
        assert image.offset == self._image.offset + 1, f"{image.offset} after {self._image.offset}"
        self._image = image
        self._history.add(change)
        for listener in list(self._listeners.values()):
            try:
                listener(image, change.records)
            except Exception:  # one listener's bug must not keep the change from the others
                logger.exception("a metadata listener failed at offset %d", image.offset)

    async def _compact_if_needed(self) -> None:
        if not self._journal.needs_compaction:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._journal.compact, self._image)
        except RaftlogError as error:
            self._fail(error)

    def _fail(self, error: RaftlogError) -> None:
        """Commit nothing more; whoever waits behind the failed group was not written and may try elsewhere."""
        logger.error("the metadata of this node has failed: %s", error)
        self._stopped_by = error
        waiting, self._pending = list(self._pending), deque()
        _refuse(waiting, error)
        if self._on_fatal is not None:
            self._on_fatal(error)


def _change(entry: MetadataEntry) -> Change:
    return Change(entry.offset, entry.controller_epoch, tuple(entry.records))


def _refuse(group: Sequence[_Pending], error: RaftlogError) -> None:
    for _, answer in group:
        _answer(answer, error)


def _answer(answer: asyncio.Future[CommandResult], outcome: CommandResult | RaftlogError) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # the proposer was cancelled and waits no more
        if isinstance(outcome, RaftlogError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
