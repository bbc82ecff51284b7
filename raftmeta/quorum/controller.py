"""The active controller: what the leader of the quorum does besides replicating.

    elected, no-op of the term applied -> ClaimController(epoch = term) -> applied: it serves
    rounds:  fence who is gone -> begin shutdowns -> settle partitions -> hand over what was let go -> unfence
    deposed -> everything is forgotten

A round follows whenever something happened that may call for one, and when a session may end. Every decision is made
in `controller_plan` and `sessions` from the image and the brokers' reports; here they are proposed. A proposal that
fails because the leadership is lost ends nothing: the engine will say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from raftlog.errors import (
    BrokerOverloaded,
    FencedController,
    InternalError,
    NotController,
    RaftlogError,
    UnknownOutcome,
)
from raftlog.v1 import records_pb2
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand, MetadataRecord
from raftmeta.decide import CommandResult
from raftmeta.elections import unsettled
from raftmeta.features import DRAIN_LEVEL, DRAINING, check_metadata_version, newest_levels
from raftmeta.image import MetadataImage
from raftmeta.quorum import controller_plan as plan
from raftmeta.quorum.config import Clock, ControllerOptions
from raftmeta.quorum.controller_plan import BrokerReport, PartitionKey, Revoked
from raftmeta.quorum.driver import Driver
from raftmeta.quorum.heartbeat_desk import HeartbeatDesk
from raftmeta.quorum.proposals import Proposals, elect
from raftmeta.quorum.sessions import BrokerSessions
from raftmeta.state import MetadataState

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 1_000
"""Commands from outside that wait to be committed."""
INLINE_REPLICAS: Final = 2_000
"""A scan over so many partitions takes a few milliseconds; longer ones go to a thread."""
STANDSTILL_MS: Final = 10_000.0
"""A broker that is behind and applies nothing for so long is fenced."""
RETRY_S: Final = 0.2
MAX_SWEEPS: Final = 10
"""Passes of settling in one round; what is left then waits for the next one."""

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
        self._desk: HeartbeatDesk | None = None
        self._revoked: dict[PartitionKey, Revoked] = {}
        self._unsettled = plan.Unsettled()
        self._settled_offset = -1
        self._shutdown_begun: dict[int, int] = {}
        self._digest_at = 0
        self._rebalance_at_ms = float("inf")

    # What the engine says

    def on_active(self, term: int) -> None:
        """This node leads, and everything committed before is applied."""
        self.on_inactive()
        self._term = term
        self._proposals = Proposals(self._driver, self._clock, term)
        self._task = asyncio.create_task(self._lead(term), name="active-controller")

    def on_inactive(self) -> None:
        """This node leads no more; nothing of the term outlives it."""
        if self._serving:
            logger.info(
                "controller %d is not active any more",
                self._node_id,
                extra={"event": "controller_inactive", "controller_epoch": self._term},
            )
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._desk is not None:
            self._desk.close()
            self._desk = None
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
        if self._desk is not None:
            self._desk.forget_gone(image)

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
        """Return what brokers said last, by id."""
        return dict(self._desk.reports) if self._desk is not None else {}

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command from outside; its clock and epoch are set in place.

        Raises:
            RaftlogError: refused; or NotController, UnknownOutcome, FencedController: ask again elsewhere.
        """
        if not self._serving:
            raise NotController("this controller is not the active one")
        if self._pending >= MAX_PENDING:
            raise BrokerOverloaded(f"{MAX_PENDING} metadata commands wait to be committed; try again later")
        if command.HasField("alter_broker"):  # a node that does not know the kind would stop when it is committed
            check_metadata_version(self._state.image, DRAIN_LEVEL, DRAINING)
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
        if self._desk is None:
            answer: asyncio.Future[HeartbeatResponse] = asyncio.get_running_loop().create_future()
            response = HeartbeatResponse(sequence=request.sequence, controller=self._hint())
            response.error.code = NotController.code
            response.error.message = "this controller is not the active one"
            answer.set_result(response)
            return answer
        return self._desk.take(request, stream)

    def stream_closed(self, stream: object) -> None:
        """A broker's heartbeat stream ended."""
        if self._desk is not None:
            self._desk.stream_closed(stream)

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
            except Exception:  # a bug here must not leave the cluster without anybody who fences and elects
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
        self._desk = HeartbeatDesk(
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
        """Until something happens that may call for a round."""
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
        """Return what is revoked now; changes during the scan make it look again."""
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
        assert self._desk is not None
        return self._desk.reports

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
        """Bring all partitions into the state that brokers ask for.

        `_settled_offset` is where that is known to be so. Scans look only at what changed since the one before.
        """
        before: list[PartitionKey] = []
        for _ in range(MAX_SWEEPS):
            image = self._state.image
            look_at = self._unsettled.take()
            keys: list[PartitionKey] = []
            if look_at:
                try:
                    keys = await self._scan(image, lambda image, at=look_at: _unsettled(image, at))  # type: ignore[misc]
                    if keys and keys != before:
                        await self._proposals.commit_all(elect(keys, ElectLeadersCommand.SETTLE))
                        self._unsettled.topic_ids |= {topic_id for topic_id, _ in keys}
                except BaseException:  # cancelled, or not committed: none of it is settled
                    self._unsettled.everything = True
                    raise
            if not keys or keys == before:
                if keys:
                    logger.warning("%d partitions are as before after they were settled", len(keys))
                self._settled_offset = image.offset
                return
            before = keys
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


def _unsettled(image: MetadataImage, at: plan.Unsettled) -> list[PartitionKey]:
    found = unsettled(image, None if at.everything else sorted(at.topic_ids))
    return [(reference.topic_id, reference.partition) for reference in found]
