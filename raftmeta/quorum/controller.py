"""The active controller: the work of the quorum's leader besides replication.

    elected, no-op of the term applied -> ClaimController(epoch = term) -> applied: it serves
    rounds:  fence expired brokers -> begin shutdowns -> settle partitions -> hand over resigned leaderships -> unfence
    deposed -> its state is dropped

A round runs after every event that may need one, and when a session may end. `controller_plan` and `sessions` decide,
from the image and the brokers' reports; this module proposes the commands. They are stamped with this controller's
clock and with the epoch in which it was elected. If a proposal fails because the leadership is lost, the round just
ends: the engine reports the loss.

A heartbeat counts for its session when it arrives. Its answer waits for a round with a majority of the voters that
begins afterwards; all heartbeats that arrive during one round share the next. Only then the controller decides, from
the image and the sessions of that moment, whether the broker gets a lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from raftlog.errors import (
    BrokerIdNotRegistered,
    BrokerOverloaded,
    FeatureUpdateFailed,
    FencedController,
    InconsistentClusterId,
    InternalError,
    MessageTooLarge,
    NotController,
    RaftlogError,
    ShuttingDown,
    StaleBrokerEpoch,
    StorageError,
    StorageFull,
    UnknownOutcome,
    to_wire,
)
from raftlog.v1 import records_pb2
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand, MetadataRecord, UpdateFeatureCommand
from raftmeta.decide import CommandResult
from raftmeta.decide.outcome import shown
from raftmeta.elections import leaves_it_to, unsettled
from raftmeta.features import (
    ALTER_PARTITIONS,
    ALTER_PARTITIONS_LEVEL,
    DRAIN_LEVEL,
    DRAINING,
    SUPPORTED,
    check_metadata_version,
    newest_levels,
    supports,
)
from raftmeta.image import MetadataImage
from raftmeta.quorum import controller_plan as plan
from raftmeta.quorum.config import MAX_COMMAND_BYTES, Clock, ControllerOptions
from raftmeta.quorum.controller_plan import BrokerReport, PartitionKey, Revoked
from raftmeta.quorum.driver import Driver
from raftmeta.quorum.hello import same_cluster, shown_id
from raftmeta.quorum.sessions import BrokerSessions
from raftmeta.state import Applied, MetadataState

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 8
"""The controller's own commands under way at a time."""

HEAVY_PARTITIONS: Final = 500
"""Commands that make more partitions count as heavy: they block everything else for tens of milliseconds."""

_NOT_DECIDED = (NotController, UnknownOutcome, FencedController, StorageFull, ShuttingDown, StorageError)
"""Errors that are not answers of the state machine: the command may be proposed again unchanged."""


class Proposals:
    """Commits commands in one term. Every state machine refuses a command that is applied after the term.

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


class MajorityReads(Protocol):
    """Asks a majority of the voters."""

    def read_index(self) -> asyncio.Future[int]:
        """Ask for a round that begins now."""
        ...


@dataclass(eq=False, slots=True)
class _Asked:
    """An unanswered heartbeat. `counted`: it may get a lease."""

    request: HeartbeatRequest
    counted: bool
    answer: asyncio.Future[HeartbeatResponse]


class HeartbeatHandler:
    """The heartbeats in one term of the active controller; `close` ends the term."""

    def __init__(
        self,
        term: int,
        sessions: BrokerSessions,
        reads: MajorityReads,
        image: Callable[[], MetadataImage],
        now_ms: Callable[[], float],
        wake: Callable[[], None],
        may_shut_down: Callable[[int], bool],
        hint: Callable[[], ControllerHint],
    ) -> None:
        self._term = term
        self._sessions = sessions
        self._reads = reads
        self._image = image
        self._now_ms = now_ms
        self._wake = wake
        self._may_shut_down = may_shut_down
        self._hint = hint
        self._loop = asyncio.get_running_loop()
        self._asked: list[_Asked] = []
        self._out: list[_Asked] = []
        self._streams: dict[int, object] = {}
        self._closed = False
        self.reports: dict[int, BrokerReport] = {}
        """By broker id: the newest heartbeat of each registered broker."""

    def take(self, request: HeartbeatRequest, stream: object) -> asyncio.Future[HeartbeatResponse]:
        """Take a heartbeat the moment it arrives; the future never fails."""
        answer: asyncio.Future[HeartbeatResponse] = self._loop.create_future()
        if self._closed:
            answer.set_result(self._refused(request, NotController("this controller was deposed; ask the active one")))
            return answer
        counted = False
        if _fits(self._image(), request) is None:
            now_ms = self._now_ms()
            if self._sessions.is_silent(request.broker_id, now_ms):
                self._wake()  # partitions may have waited for this broker
            counted = self._sessions.heartbeat(request.broker_id, request.broker_epoch, now_ms)
            self._note(request, now_ms)
            self._streams[request.broker_id] = stream
        self._asked.append(_Asked(request, counted, answer))
        if not self._out:
            self._ask_majority()
        return answer

    def _note(self, request: HeartbeatRequest, now_ms: float) -> None:
        report = self.reports.get(request.broker_id)
        if report is None or report.broker_epoch != request.broker_epoch:
            catch_up_to = self._image().offset
            report = self.reports[request.broker_id] = BrokerReport(request.broker_epoch, catch_up_to=catch_up_to)
        report.heard_ms = now_ms
        news = (
            request.applied_offset > report.applied_offset
            or request.wants_shutdown != report.wants_shutdown
            or request.lease_released != report.lease_released
        )
        report.applied(request.applied_offset, self._image().offset, now_ms)
        report.wants_shutdown = request.wants_shutdown
        report.lease_released = request.lease_released
        broker = self._image().brokers.get(request.broker_id)
        if news or (broker is not None and broker.fenced):
            self._wake()

    def _ask_majority(self) -> None:
        self._out, self._asked = self._asked, []
        try:
            read = self._reads.read_index()
        except RaftlogError as error:
            self._refuse_all(error)
            return
        read.add_done_callback(self._confirmed)

    def _confirmed(self, read: asyncio.Future[int]) -> None:
        if read.cancelled():
            return
        error = read.exception()
        if self._closed:
            return
        if error is not None:
            self._refuse_all(error)
            return
        answered, self._out = self._out, []
        for asked in answered:
            if not asked.answer.done():
                asked.answer.set_result(self._answer(asked))
        if self._asked:
            self._ask_majority()

    def _answer(self, asked: _Asked) -> HeartbeatResponse:
        request = asked.request
        image = self._image()
        error = _fits(image, request)
        if error is not None:
            return self._refused(request, error)
        broker = image.brokers[request.broker_id]
        leased = (
            asked.counted
            and not broker.fenced
            and not request.lease_released
            and self._sessions.may_lease(request.broker_id, request.broker_epoch, request.applied_offset)
        )
        return HeartbeatResponse(
            sequence=request.sequence,
            lease_ms=int(self._sessions.lease_ms) if leased else 0,
            controller_epoch=self._term,
            fenced=broker.fenced,
            may_shut_down=request.wants_shutdown and self._may_shut_down(request.broker_id),
            metadata_offset=image.offset,
        )

    def _refused(self, request: HeartbeatRequest, error: BaseException) -> HeartbeatResponse:
        return HeartbeatResponse(
            error=to_wire(error), sequence=request.sequence, controller_epoch=self._term, controller=self._hint()
        )

    def _refuse_all(self, error: BaseException) -> None:
        refused, self._out, self._asked = self._out + self._asked, [], []
        for asked in refused:
            if not asked.answer.done():
                asked.answer.set_result(self._refused(asked.request, error))

    def stream_closed(self, stream: object) -> None:
        """A stream ended: brokers that have no newer one are waited for only until their lease must be over."""
        for broker_id in [broker_id for broker_id, newest in self._streams.items() if newest is stream]:
            del self._streams[broker_id]
            self._sessions.stream_lost(broker_id, self._now_ms())
            self._wake()

    def forget_gone(self, image: MetadataImage) -> None:
        """Drop the state of brokers that are no longer registered."""
        for broker_id in self.reports.keys() - image.brokers.keys():
            del self.reports[broker_id]
            self._streams.pop(broker_id, None)

    def close(self) -> None:
        """End the term: waiting callers are sent to another controller."""
        self._closed = True
        self._refuse_all(NotController("this controller was deposed; ask the active one"))


def _fits(image: MetadataImage, request: HeartbeatRequest) -> RaftlogError | None:
    """Return why a heartbeat does not come from a registered broker of this cluster, or None."""
    if not same_cluster(image.cluster_id, request.cluster_id):
        return InconsistentClusterId(
            f"broker {request.broker_id} belongs to the cluster {shown_id(request.cluster_id)} and this controller to "
            f"{image.cluster_id!r}: correct cluster.id or controller.quorum.voters of the broker"
        )
    broker = image.brokers.get(request.broker_id)
    if broker is None:
        return BrokerIdNotRegistered(f"broker {request.broker_id} is not registered; register it first")
    if broker.broker_epoch != request.broker_epoch:
        return StaleBrokerEpoch(
            f"broker {request.broker_id} has the epoch {broker.broker_epoch}, the heartbeat says "
            f"{request.broker_epoch}: another process with this id has registered since; is there one too many?"
        )
    return None


MAX_PENDING: Final = 1_000
"""The most commands from outside that wait to be committed."""
INLINE_REPLICAS: Final = 2_000
"""A scan over this many partitions takes a few milliseconds; longer ones run in a thread."""
STANDSTILL_MS: Final = 10_000.0
"""A broker that is behind and applies nothing for this time is fenced."""
RETRY_S: Final = 0.2
MAX_SWEEPS: Final = 10
"""The most passes of settling in one round; the rest waits for the next round."""

_T = TypeVar("_T")


class ActiveController:
    """States: idle -> claiming (`on_active`) -> serving (claim applied) -> idle (`on_inactive`)."""

    def __init__(
        self,
        node_id: int,
        cluster_id: Callable[[], str],
        driver: Driver,
        state: MetadataState,
        hint: Callable[[], ControllerHint],
        options: ControllerOptions,
        clock: Clock,
        executor: Executor,
    ) -> None:
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._driver = driver
        self._state = state
        self._hint = hint
        self._options = options
        self._clock = clock
        self._executor = executor
        self._term = 0
        self._proposals = Proposals(driver, clock, 0)
        self._serving = False
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._pending = 0
        self._sessions = BrokerSessions(options.session_timeout_ms, options.lease_ms)
        self._heartbeats: HeartbeatHandler | None = None
        self._revoked: dict[PartitionKey, Revoked] = {}
        self._unsettled = plan.Unsettled()
        self._settled_offset = -1
        self._shutdown_begun: dict[int, int] = {}
        self._digest_at = 0
        self._rebalance_at_ms = float("inf")

    # What the engine says

    def on_active(self, term: int) -> None:
        """Begin a term: this node leads, and has applied everything committed before."""
        self.on_inactive()
        self._term = term
        self._proposals = Proposals(self._driver, self._clock, term)
        self._task = asyncio.create_task(self._lead(term), name="active-controller")

    def on_inactive(self) -> None:
        """End the term, with all of its state."""
        if self._serving:
            logger.info(
                "controller %d is not active any more",
                self._node_id,
                extra={"event": "controller_inactive", "controller_epoch": self._term},
            )
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._heartbeats is not None:
            self._heartbeats.close()
            self._heartbeats = None
        self._serving = False
        self._revoked = {}
        self._shutdown_begun = {}

    def on_change(self, image: MetadataImage, records: Sequence[MetadataRecord]) -> None:
        """Follow the image while this node leads."""
        if self._task is None:
            return
        kinds = {record.WhichOneof("record") for record in records}
        if kinds & plan.WATCHED_KINDS:
            plan.follow_revoked(self._revoked, records)
            self._unsettled.note(image, records)
            if self._serving and kinds & plan.BROKER_KINDS:
                self._follow_brokers(image, records)
        if self._serving and (self._unsettled or self._revoked or self._state.last_applied >= self._digest_at):
            self._wake.set()

    def _follow_brokers(self, image: MetadataImage, records: Sequence[MetadataRecord]) -> None:
        for record in records:
            if record.WhichOneof("record") == "broker" and record.broker.in_controlled_shutdown:
                self._shutdown_begun[record.broker.broker_id] = image.offset
        self._sessions.observe(self._clock.monotonic_ms(), image)
        if self._heartbeats is not None:
            self._heartbeats.forget_gone(image)

    # What others ask

    @property
    def serving(self) -> bool:
        """Whether this node is the active controller: elected, and its claim applied."""
        return self._serving

    @property
    def epoch(self) -> int:
        """The controller epoch it serves, or served last."""
        return self._term

    def reports(self) -> dict[int, BrokerReport]:
        """Return the brokers' newest reports, by broker id."""
        return dict(self._heartbeats.reports) if self._heartbeats is not None else {}

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command from outside; its clock and epoch are set in place.

        Raises:
            RaftlogError: refused; or NotController, UnknownOutcome, FencedController: ask again elsewhere.
        """
        if not self._serving:
            raise NotController("this controller is not the active one")
        if self._pending >= MAX_PENDING:
            raise BrokerOverloaded(f"{MAX_PENDING} metadata commands wait to be committed; try again later")
        match command.WhichOneof("command"):  # a node that does not know the kind would stop when it is committed
            case "alter_broker":
                check_metadata_version(self._state.image, DRAIN_LEVEL, DRAINING)
            case "alter_partitions":
                check_metadata_version(self._state.image, ALTER_PARTITIONS_LEVEL, ALTER_PARTITIONS)
            case _:
                pass
        self._pending += 1
        try:
            return await self._proposals.commit(command)
        finally:
            self._pending -= 1

    async def barrier(self) -> int:
        """Return a metadata offset that covers everything acknowledged before this call.

        Raises:
            NotController: no majority confirms that this is the active controller.
        """
        if not self._serving:
            raise NotController("this controller is not the active one")
        await self._driver.read_index()
        return self._state.image.offset

    def heartbeat(self, request: HeartbeatRequest, stream: object) -> asyncio.Future[HeartbeatResponse]:
        """Take a heartbeat the moment it arrives; the future never fails."""
        if self._heartbeats is None:
            answer: asyncio.Future[HeartbeatResponse] = asyncio.get_running_loop().create_future()
            response = HeartbeatResponse(sequence=request.sequence, controller=self._hint())
            response.error.code = NotController.code
            response.error.message = "this controller is not the active one"
            answer.set_result(response)
            return answer
        return self._heartbeats.take(request, stream)

    def stream_closed(self, stream: object) -> None:
        """A broker's heartbeat stream ended."""
        if self._heartbeats is not None:
            self._heartbeats.stream_closed(stream)

    # Leading

    async def _lead(self, term: int) -> None:
        said = ""
        while True:
            try:
                if not self._serving:
                    await self._begin(term)
                await self._round()
            except (NotController, UnknownOutcome, FencedController) as error:
                logger.info("controller %d could not commit in epoch %d: %s", self._node_id, term, error)
                await asyncio.sleep(RETRY_S)
                continue
            except RaftlogError as error:
                if str(error) != said:  # a full disk stays full: one line is enough
                    said = str(error)
                    logger.error("controller %d cannot work: %s", self._node_id, error)
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a bug here must not leave the cluster without fencing and elections
                logger.exception("a round of controller %d failed", self._node_id)
                await asyncio.sleep(RETRY_S)
                continue
            said = ""
            await self._sleep()

    async def _begin(self, term: int) -> None:
        if self._state.image.controller_epoch < term:
            claim = records_pb2.ClaimControllerCommand(controller_id=self._node_id, cluster_id=self._cluster_id())
            if not self._state.image.cluster_id:
                claim.features.extend(newest_levels())
            await self._proposals.commit(MetadataCommand(claim_controller=claim))
        image = self._state.image
        if image.controller_epoch != term:
            raise InternalError(f"epoch {term} was claimed, the image has {image.controller_epoch}")
        self._revoked = await self._scan_revoked()
        now_ms = self._clock.monotonic_ms()
        self._sessions.activate(now_ms, self._state.image)
        self._heartbeats = HeartbeatHandler(
            term,
            self._sessions,
            self._driver,
            lambda: self._state.image,
            self._clock.monotonic_ms,
            self._wake.set,
            self._may_shut_down,
            self._hint,
        )
        self._unsettled = plan.Unsettled()
        self._settled_offset = -1
        self._shutdown_begun = dict.fromkeys(self._state.image.brokers, self._state.image.offset)
        self._digest_at = self._state.last_applied + self._options.digest_after_entries
        if self._options.auto_leader_rebalance:
            self._rebalance_at_ms = now_ms + self._options.leader_imbalance_check_interval_ms
        self._serving = True
        logger.info(
            "controller %d is active",
            self._node_id,
            extra={
                "event": "controller_active",
                "controller_epoch": term,
                "metadata_offset": self._state.image.offset,
            },
        )

    async def _sleep(self) -> None:
        """Wait until a round may be needed."""
        now_ms = self._clock.monotonic_ms()
        due_ms = min(self._sessions.next_deadline_ms() or float("inf"), self._rebalance_at_ms)
        try:
            async with asyncio.timeout(max(0.001, (due_ms - now_ms) / 1_000) if due_ms < float("inf") else None):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _scan(self, image: MetadataImage, scan: Callable[[MetadataImage], _T]) -> _T:
        """Look at partitions, in a thread when they are many."""
        if sum(load.replicas for load in image.load.values()) <= INLINE_REPLICAS:
            return scan(image)
        return await asyncio.get_running_loop().run_in_executor(self._executor, scan, image)

    async def _scan_revoked(self) -> dict[PartitionKey, Revoked]:
        """Return the revoked leaderships; if the image changes during the scan, it is repeated."""
        while True:
            image = self._state.image
            revoked = await self._scan(image, plan.revoked_in)
            if image is self._state.image:
                return revoked

    async def _round(self) -> None:
        self._wake.clear()
        await self._fence()
        image, reports = self._state.image, self._reports()
        await self._proposals.commit_all(
            MetadataCommand(
                begin_shutdown=records_pb2.BeginShutdownCommand(broker_id=broker_id, broker_epoch=broker_epoch)
            )
            for broker_id, broker_epoch in plan.to_begin_shutdown(image, reports)
        )
        await self._settle()
        image = self._state.image
        ready = plan.let_go(image, self._revoked, self._reports())
        await self._proposals.commit_all(elect(ready, ElectLeadersCommand.SETTLE, handed_over_as_of=image.offset))
        await self._unfence()
        await self._rebalance()
        await self._propose_digest()

    def _reports(self) -> dict[int, BrokerReport]:
        assert self._heartbeats is not None
        return self._heartbeats.reports

    async def _fence(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for broker_id, report in self._reports().items():
            broker = self._state.image.brokers.get(broker_id)
            if report.lease_released and broker is not None and broker.in_controlled_shutdown and not broker.fenced:
                self._sessions.begin_fencing(broker_id, report.broker_epoch)
        image, reports = self._state.image, self._reports()
        for broker_id, broker_epoch in plan.standing_still(image, reports, now_ms, patience_ms=STANDSTILL_MS):
            logger.warning(
                "broker %d lives, but applies no metadata beyond offset %d: it is fenced until it has caught up; does "
                "its controller have another list of voters?",
                broker_id,
                reports[broker_id].applied_offset,
            )
            reports[broker_id].catch_up_to = image.offset
            self._sessions.begin_fencing(broker_id, broker_epoch)
        expired = self._sessions.expired(now_ms, self._state.image)
        for broker_id, broker_epoch in expired:
            logger.info(
                "fencing broker %d",
                broker_id,
                extra={"event": "broker_fenced", "broker_id": broker_id, "broker_epoch": broker_epoch},
            )
        await self._proposals.commit_all(
            MetadataCommand(fence_broker=records_pb2.FenceBrokerCommand(broker_id=broker_id, broker_epoch=broker_epoch))
            for broker_id, broker_epoch in expired
        )

    async def _settle(self) -> None:
        """Settle all partitions, except those that wait for silent brokers.

        At `_settled_offset` all are known to be settled. A scan looks only at what has changed since the last one.
        """
        before: list[PartitionKey] = []
        waiting: set[bytes] = set()
        for _ in range(MAX_SWEEPS):
            image = self._state.image
            look_at = self._unsettled.take()
            keys: list[PartitionKey] = []
            if look_at:
                try:
                    silent = self._sessions.silent(self._clock.monotonic_ms())
                    keys, held = await self._scan(
                        image,
                        lambda image, at=look_at, silent=silent: _unsettled(image, at, silent),  # type: ignore[misc]
                    )
                    waiting |= held
                    if keys and keys != before:
                        await self._proposals.commit_all(elect(keys, ElectLeadersCommand.SETTLE))
                        self._unsettled.topic_ids |= {topic_id for topic_id, _ in keys}
                except BaseException:  # cancelled, or not committed: none of it is settled
                    self._unsettled.everything = True
                    raise
            if not keys or keys == before:
                if keys:
                    logger.warning("%d partitions are as before after they were settled", len(keys))
                self._unsettled.topic_ids |= waiting
                if not waiting:
                    self._settled_offset = image.offset
                return
            before = keys
        self._unsettled.topic_ids |= waiting
        self._wake.set()  # others have their turn first

    async def _unfence(self) -> None:
        now_ms = self._clock.monotonic_ms()
        settled = [
            broker_id
            for broker_id, report in self._reports().items()
            if report.broker_epoch <= self._settled_offset
            and self._sessions.is_live(broker_id, report.broker_epoch, now_ms)
        ]
        ready = plan.to_unfence(self._state.image, self._reports(), settled)
        for broker_id, broker_epoch in ready:
            logger.info(
                "unfencing broker %d",
                broker_id,
                extra={"event": "broker_unfenced", "broker_id": broker_id, "broker_epoch": broker_epoch},
            )
        await self._proposals.commit_all(
            MetadataCommand(
                unfence_broker=records_pb2.UnfenceBrokerCommand(broker_id=broker_id, broker_epoch=broker_epoch)
            )
            for broker_id, broker_epoch in ready
        )

    async def _rebalance(self) -> None:
        if self._clock.monotonic_ms() < self._rebalance_at_ms:
            return
        self._rebalance_at_ms = self._clock.monotonic_ms() + self._options.leader_imbalance_check_interval_ms
        percentage = self._options.leader_imbalance_percentage
        keys = await self._scan(self._state.image, lambda image: plan.imbalanced(image, percentage))
        if keys:
            logger.info(
                "moving %d partitions to their preferred leaders",
                len(keys),
                extra={"event": "preferred_election", "partitions": len(keys)},
            )
            await self._proposals.commit_all(elect(keys, ElectLeadersCommand.PREFERRED))

    async def _propose_digest(self) -> None:
        if self._state.last_applied < self._digest_at:
            return
        self._digest_at = self._state.last_applied + self._options.digest_after_entries
        digest = self._state.digest_command()
        if digest is not None:
            await self._proposals.commit_all([MetadataCommand(state_digest=digest)])

    def _may_shut_down(self, broker_id: int) -> bool:
        begun = self._shutdown_begun.get(broker_id, self._state.image.offset)
        return plan.may_shut_down(self._state.image, broker_id, self._revoked, settled=self._settled_offset >= begun)


def _unsettled(
    image: MetadataImage, at: plan.Unsettled, silent: frozenset[int]
) -> tuple[list[PartitionKey], set[bytes]]:
    """Return the partitions to settle now, and the topics of those that wait for silent brokers."""
    keys: list[PartitionKey] = []
    waiting: set[bytes] = set()
    for reference in unsettled(image, None if at.everything else sorted(at.topic_ids)):
        if leaves_it_to(image, reference, silent):
            waiting.add(reference.topic_id)
        else:
            keys.append((reference.topic_id, reference.partition))
    return keys, waiting
