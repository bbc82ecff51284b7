"""The active controller's work in virtual time, in the order of `raftmeta.quorum.controller`, with its real decisions.

Sessions, leases and plans are the real ones (`sessions`, `controller_plan`); only the waiting differs: a round is a
list of steps, and each step's commands must be committed before the next step looks at the image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand
from raftmeta import elections
from raftmeta.elections import unsettled
from raftmeta.features import newest_levels
from raftmeta.image import MetadataImage
from raftmeta.quorum import controller_plan as plan
from raftmeta.quorum.controller_plan import BrokerReport, PartitionKey
from raftmeta.quorum.sessions import BrokerSessions

if TYPE_CHECKING:
    from tests.simulation.network import Connection
    from tests.simulation.voter import Voter

IDLE_S = 0.25
"""A round follows at the latest after this time."""
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The content of a broker's heartbeat."""

    broker_id: int
    broker_epoch: int
    sequence: int
    applied_offset: int
    wants_shutdown: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What it is told; `lease_ms` 0 is no lease. `active` False: this is not the controller, `hint` may be.

    `replaced`: a later registration of this broker is committed, so the process that asks has to end.
    """

    sequence: int
    lease_ms: int = 0
    active: bool = True
    metadata_offset: int = 0
    """What was committed when it was made."""
    hint: int = -1
    may_shut_down: bool = False
    replaced: bool = False


class SimController:
    """The controller of one process, through all its terms."""

    def __init__(self, voter: Voter) -> None:
        self._voter = voter
        self._term = -1
        self.serving = False
        self.sessions = self._new_sessions()
        self._reports: dict[int, BrokerReport] = {}
        self._streams: dict[int, Connection] = {}
        self._steps: Iterator[Iterable[MetadataCommand]] | None = None
        self._wanted = False
        self._settled_offset = -1
        self._digest_at = 0

    def _new_sessions(self) -> BrokerSessions:
        return self._voter.simulation.parts.sessions()

    def _now_ms(self) -> float:
        return self._voter.host.local_s() * 1_000

    @property
    def _image(self) -> MetadataImage:
        return self._voter.image

    def activate(self, term: int) -> None:
        """Claim the controller's place; once that is applied, serve."""
        node = self._voter.node
        if not node.active or node.term != term or (self.serving and self._term == term):
            return
        self._term = term
        claim = records_pb2.ClaimControllerCommand(
            controller_id=self._voter.host.node_id,
            cluster_id=self._voter.simulation.cluster_id,
            features=() if self._image.cluster_id else newest_levels(),
        )
        self._voter.propose(MetadataCommand(claim_controller=claim), lambda answer: self._claimed(term))

    def _claimed(self, term: int) -> None:
        node = self._voter.node
        if not node.active or node.term != term:
            return
        if self._image.controller_epoch != term:
            self._voter.process.after(RETRY_S, self.activate, term)
            return
        self.sessions = self._new_sessions()
        self.sessions.activate(self._now_ms(), self._image)
        self._reports, self._streams, self._steps = {}, {}, None
        self._settled_offset = -1
        self._digest_at = node.last_applied + 40
        self.serving = True
        self._voter.simulation.invariants.serves(self._voter, term)
        self._voter.simulation.trace(self._voter.host, f"serves as controller in epoch {term}")
        self._round(term)

    def deactivate(self) -> None:
        """Forget everything about the term."""
        self.serving = False
        self._steps = None

    def observe(self, image: MetadataImage) -> None:
        """Follow the image."""
        if self.serving:
            self.sessions.observe(self._now_ms(), image)
            self._wanted = True

    # Heartbeats

    def heartbeat(self, connection: Connection, heartbeat: Heartbeat) -> None:
        """Take a heartbeat; the answer follows a majority round that begins now."""
        if not self.serving:
            connection.answer(HeartbeatAnswer(heartbeat.sequence, active=False, hint=self._voter.node.leader_id))
            return
        term, parts = self._term, self._voter.simulation.parts
        counted = self.sessions.heartbeat(heartbeat.broker_id, heartbeat.broker_epoch, self._now_ms())
        if counted:
            self._note(heartbeat)
            self._streams[heartbeat.broker_id] = connection

        def confirmed(image: MetadataImage | None) -> None:
            if image is None or not self.serving or self._term != term:
                connection.answer(HeartbeatAnswer(heartbeat.sequence, active=False))
                return
            known = image.brokers.get(heartbeat.broker_id)
            if known is not None and known.broker_epoch > heartbeat.broker_epoch:
                connection.answer(HeartbeatAnswer(heartbeat.sequence, replaced=True))
                return
            leased = counted and self.sessions.may_lease(
                heartbeat.broker_id, heartbeat.broker_epoch, heartbeat.applied_offset
            )
            connection.answer(
                HeartbeatAnswer(
                    heartbeat.sequence,
                    int(self.sessions.lease_ms) if leased else 0,
                    metadata_offset=image.offset,
                    may_shut_down=heartbeat.wants_shutdown and self._may_shut_down(heartbeat.broker_id),
                )
            )

        if parts.leases_without_majority:
            confirmed(self._image)
        else:
            self._voter.read(confirmed)

    def _note(self, heartbeat: Heartbeat) -> None:
        report = self._reports.get(heartbeat.broker_id)
        if report is None or report.broker_epoch != heartbeat.broker_epoch:
            report = self._reports[heartbeat.broker_id] = BrokerReport(heartbeat.broker_epoch)
        if heartbeat.applied_offset > report.applied_offset or heartbeat.wants_shutdown != report.wants_shutdown:
            self._wanted = True
        report.applied_offset = max(report.applied_offset, heartbeat.applied_offset)
        report.wants_shutdown = heartbeat.wants_shutdown

    def stream_closed(self, connection: Connection) -> None:
        """A broker's stream broke."""
        for broker_id in [each for each, newest in self._streams.items() if newest is connection]:
            del self._streams[broker_id]
            if self.serving:
                self.sessions.stream_lost(broker_id, self._now_ms())

    def _may_shut_down(self, broker_id: int) -> bool:
        return plan.may_shut_down(
            self._image, broker_id, plan.revoked_in(self._image), settled=not any(unsettled(self._image))
        )

    # Rounds

    def _round(self, term: int) -> None:
        if not self.serving or self._term != term:
            return
        self._wanted = False
        self._steps = self._make_round()
        self._next_step(term)

    def _next_step(self, term: int) -> None:
        if self._steps is None or not self.serving or self._term != term:
            return
        for commands in self._steps:
            waiting = list(commands)
            if waiting:
                self._commit_all(waiting, term)
                return
        self._steps = None
        self._sleep(term)

    def _sleep(self, term: int) -> None:
        due_ms = self.sessions.next_deadline_ms()
        wait_s = IDLE_S if due_ms is None else min(IDLE_S, max(0.0, (due_ms - self._now_ms()) / 1_000))
        if self._wanted:
            wait_s = 0.002
        self._voter.process.after(max(0.001, wait_s), self._round, term)

    def _commit_all(self, commands: list[MetadataCommand], term: int) -> None:
        left = len(commands)

        def done(answer: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._voter.process.after(0, self._next_step, term)

        for command in commands:
            self._voter.propose(command, done)

    def _make_round(self) -> Iterator[Iterable[MetadataCommand]]:
        """Yield the commands of each step, decided when its turn comes."""
        yield [
            MetadataCommand(fence_broker=records_pb2.FenceBrokerCommand(broker_id=broker_id, broker_epoch=epoch))
            for broker_id, epoch in self.sessions.expired(self._now_ms(), self._image)
        ]
        yield [
            MetadataCommand(begin_shutdown=records_pb2.BeginShutdownCommand(broker_id=broker_id, broker_epoch=epoch))
            for broker_id, epoch in plan.to_begin_shutdown(self._image, self._reports)
        ]
        image = self._image
        silent = self.sessions.silent(self._now_ms())
        ready = [ref for ref in unsettled(image) if not elections.leaves_it_to(image, ref, silent)]
        yield _elect([(ref.topic_id, ref.partition) for ref in ready])
        if not any(unsettled(self._image)):
            self._settled_offset = self._image.offset
        image = self._image
        resigned = plan.let_go(image, plan.revoked_in(image), self._reports)
        yield _elect(resigned, handed_over_as_of=image.offset)
        yield self._to_unfence()
        if self._voter.node.last_applied >= self._digest_at:
            self._digest_at = self._voter.node.last_applied + 40
            digest = self._voter.state.inner.digest_command()
            if digest is not None:
                yield [MetadataCommand(state_digest=digest)]

    def _to_unfence(self) -> Iterable[MetadataCommand]:
        now_ms = self._now_ms()
        settled = [
            broker_id
            for broker_id, report in self._reports.items()
            if report.broker_epoch <= self._settled_offset
            and self.sessions.is_live(broker_id, report.broker_epoch, now_ms)
        ]
        for broker_id, epoch in plan.to_unfence(self._image, self._reports, settled):
            yield MetadataCommand(
                unfence_broker=records_pb2.UnfenceBrokerCommand(broker_id=broker_id, broker_epoch=epoch)
            )


def _elect(keys: list[PartitionKey], handed_over_as_of: int = 0) -> Iterator[MetadataCommand]:
    for partitions in plan.chunks(keys):
        yield MetadataCommand(
            elect_leaders=ElectLeadersCommand(
                partitions=partitions, type=ElectLeadersCommand.SETTLE, handed_over_as_of=handed_over_as_of
            )
        )
