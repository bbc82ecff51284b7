"""Heartbeats at the active controller: sessions, leases, and what brokers report.

A heartbeat counts for its session when it arrives. Its answer waits for a round with a majority of the voters that
begins afterwards; all heartbeats that arrive during one round share the next. Only then is it decided whether the
broker gets a lease, from the image and the sessions of that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from raftlog.errors import (
    BrokerIdNotRegistered,
    InconsistentClusterId,
    NotController,
    RaftlogError,
    StaleBrokerEpoch,
    to_wire,
)
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftmeta.image import MetadataImage
from raftmeta.quorum.controller_plan import BrokerReport
from raftmeta.quorum.hello import same_cluster, shown
from raftmeta.quorum.sessions import BrokerSessions


class MajorityReads(Protocol):
    """Where a majority is asked."""

    def read_index(self) -> asyncio.Future[int]:
        """Ask for a round that begins now."""
        ...


@dataclass(eq=False, slots=True)
class _Asked:
    """A heartbeat whose answer is out. `counted`: it may get a lease."""

    request: HeartbeatRequest
    counted: bool
    answer: asyncio.Future[HeartbeatResponse]


class HeartbeatDesk:
    """The heartbeats of one term of the active controller; `close` ends it."""

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
        """Drop what is kept of brokers that are not registered any more."""
        for broker_id in self.reports.keys() - image.brokers.keys():
            del self.reports[broker_id]
            self._streams.pop(broker_id, None)

    def close(self) -> None:
        """The term is over: whoever waits is sent elsewhere."""
        self._closed = True
        self._refuse_all(NotController("this controller was deposed; ask the active one"))


def _fits(image: MetadataImage, request: HeartbeatRequest) -> RaftlogError | None:
    """Return why a heartbeat is none of a registered broker of this cluster, or None."""
    if not same_cluster(image.cluster_id, request.cluster_id):
        return InconsistentClusterId(
            f"broker {request.broker_id} belongs to the cluster {shown(request.cluster_id)} and this controller to "
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
