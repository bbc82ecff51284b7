"""The way to the active controller, wherever it is.

A command keeps its (client id, sequence) over all attempts, so that it counts once even when its first attempt was
committed and nobody heard of it. Retried is what says nothing about the command: the wrong controller, a connection
that broke, an outcome that is unknown. What the state machine answered is final, retriable or not.

A controller that has much to do answers late. Asking again too early would give it more to do, so an attempt may take
longer each time that one was too short, and only some commands of a node are under way at a time, the rest in order
behind them (`command_window`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, TypeVar

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.tls import ChannelTls
from raftlog._client.trace_metadata import call_metadata
from raftlog.errors import (
    BrokerOverloaded,
    BrokerUnavailable,
    FencedController,
    MessageTooLarge,
    NotController,
    RaftlogError,
    RequestTimedOut,
    ShuttingDown,
    UnknownOutcome,
    from_wire,
)
from raftlog.v1 import controller_pb2, controller_pb2_grpc
from raftlog.v1.common_pb2 import NONE, Error, QuorumInfo
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.decide.outcome import outcome_from_wire
from raftmeta.port import HeartbeatStream
from raftmeta.quorum import quorum_views
from raftmeta.quorum.command_window import CommandWindow
from raftmeta.quorum.config import CHANNEL_OPTIONS, MAX_COMMAND_BYTES, Endpoint
from raftmeta.quorum.heartbeat_streams import HeartbeatTaker, LocalHeartbeats, RemoteHeartbeats

logger = logging.getLogger(__name__)

CLIENT_ID_BYTES: Final = 16
ATTEMPT_TIMEOUT_S: Final = 1.0
"""Asking again counts once, so it is better to ask somebody else early: the one asked may stand still."""
LAST_ATTEMPT_TIMEOUT_S: Final = 8.0
"""The timeout doubles up to this one."""
FIRST_BACKOFF_S: Final = 0.02
LAST_BACKOFF_S: Final = 0.3

_ASK_AGAIN = (
    NotController,
    FencedController,
    UnknownOutcome,
    BrokerUnavailable,
    ShuttingDown,
    BrokerOverloaded,
)
"""Not RequestTimedOut: that is what the state machine says of a sequence whose outcome it keeps no more."""

_T = TypeVar("_T")


class _Patience:
    """How long the next attempt may take: `with` it, and one that was too short makes the next one longer."""

    def __init__(self) -> None:
        self._timeout_s = ATTEMPT_TIMEOUT_S

    def __enter__(self) -> float:
        return self._timeout_s

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._timeout_s = min(2 * self._timeout_s, LAST_ATTEMPT_TIMEOUT_S)


class LocalController(HeartbeatTaker, Protocol):
    """A controller in this process."""

    @property
    def serving(self) -> bool:
        """Whether it is the active one."""
        ...

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command; its clock and epoch are set in place."""
        ...

    async def barrier(self) -> int:
        """Return a metadata offset that covers everything acknowledged."""
        ...


class ControllerChannel:
    """Asks the active controller; finds it, follows it, and asks again until a deadline."""

    def __init__(
        self,
        node_id: int,
        controllers: Mapping[int, Endpoint],
        cluster_id: Callable[[], str],
        *,
        timeout_ms: float = 30_000.0,
        local: LocalController | None = None,
        on_heartbeat: Callable[[HeartbeatResponse], None] | None = None,
        rng: random.Random | None = None,
        client_id: bytes | None = None,
        tls: ChannelTls | None = None,
    ) -> None:
        self._node_id = node_id
        self._controllers = dict(controllers)
        self._cluster_id = cluster_id
        self._timeout_s = timeout_ms / 1_000
        self._local = local
        self._on_heartbeat = on_heartbeat or (lambda response: None)
        self._rng = rng or random.Random()
        self._client_id = client_id or uuid.uuid4().bytes
        self._window = CommandWindow()
        self._hinted: int | None = None
        self._hint_epoch = -1
        remote = sorted(self._controllers.keys() - ({node_id} if local is not None else set()))
        self._rng.shuffle(remote)
        self._rotation = itertools.cycle(remote) if remote else None
        self._connections = Connections(tls, CHANNEL_OPTIONS)
        self._failures: dict[int, str] = {}
        self._closed = False

    # What can be asked

    async def propose(self, command: MetadataCommand, timeout_s: float | None = None) -> CommandResult:
        """Commit a command, once, whatever happens on the way.

        Raises:
            BrokerOverloaded: too many commands are under way.
            MessageTooLarge: it is beyond what a log entry may have.
            RequestTimedOut: nobody could say in time; it may or may not be committed.
            RaftlogError: what the state machine answered.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        size = command.ByteSize()
        if size > MAX_COMMAND_BYTES:
            raise MessageTooLarge(f"the command has {size} bytes, at most {MAX_COMMAND_BYTES} are allowed")
        begun_s = time.monotonic()
        sequence = await self._window.enter(timeout_s)
        stamped = MetadataCommand()
        stamped.CopyFrom(command)
        stamped.client_id = self._client_id
        stamped.sequence = sequence
        patience = _Patience()

        async def attempt(target: int) -> CommandResult:
            stamped.settled_below = self._window.settled_below
            if self._local is not None and target == self._node_id:
                return await self._local.propose(stamped)
            with patience as attempt_timeout_s:
                return await self._propose_remote(target, stamped, attempt_timeout_s)

        try:
            if self._local is not None and self._local.serving and not self._closed:
                try:  # the way of most commands of a controller's node: no timer, since the core ends it in any case
                    return await attempt(self._node_id)
                except _ASK_AGAIN:
                    await asyncio.sleep(FIRST_BACKOFF_S * self._rng.random())
            left_s = max(0.0, timeout_s - (time.monotonic() - begun_s))
            return await self._ask("the command was not answered", attempt, left_s)
        finally:
            self._window.leave(sequence)

    async def barrier(self, timeout_s: float | None = None) -> int:
        """Return a metadata offset that covers everything acknowledged before this call.

        Raises:
            RaftlogError: no active controller could say in time.
        """

        patience = _Patience()

        async def attempt(target: int) -> int:
            if self._local is not None and target == self._node_id:
                return await self._local.barrier()
            with patience as attempt_timeout_s:
                request = controller_pb2.BarrierRequest()
                response = self._answered(target, await self._stub(target).Barrier(request, timeout=attempt_timeout_s))
            self._check(target, response.error, response.controller)
            return response.metadata_offset

        return await self._ask("no commit barrier", attempt, timeout_s)

    async def describe_quorum(self, timeout_s: float | None = None) -> QuorumInfo:
        """Return the quorum as the controllers elsewhere see it: the leader, or who knows most when it does not answer.

        Raises:
            RequestTimedOut: nobody answered in time.
        """

        async def ask(target: int) -> QuorumInfo | None:
            try:
                request = controller_pb2.DescribeQuorumRequest()
                asked = self._stub(target).DescribeQuorum(request, timeout=ATTEMPT_TIMEOUT_S)
                response = self._answered(target, await asked)
            except BrokerUnavailable as error:
                self._forget(target, error)
            except grpc.aio.AioRpcError as error:
                self._forget(target, from_grpc(error, self._name(target)))
            except asyncio.InvalidStateError:  # the channel was closed under the call
                self._forget(target, BrokerUnavailable("the connection was closed"))
            else:
                self._failures.pop(target, None)
                self._note(response.controller)
                return response.quorum if response.HasField("quorum") else None
            return None

        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        targets = sorted(self._controllers.keys() - ({self._node_id} if self._local is not None else set()))
        views = await quorum_views.ask_all(targets, ask, timeout_s)
        if not views:
            troubles = self.troubles() or "no controller answered"
            raise RequestTimedOut(f"the quorum cannot be described within {timeout_s:g} s; {troubles}")
        return quorum_views.better(views)

    async def open_heartbeats(self) -> HeartbeatStream:
        """Open a stream to where the active controller is believed to be.

        Raises:
            BrokerUnavailable: there is nobody to try at the moment.
        """
        target = self._pick()
        if target is None:
            raise BrokerUnavailable("no active controller is known at the moment")
        if self._local is not None and target == self._node_id:
            return LocalHeartbeats(self._local, self._heartbeat_answered)

        def broken(error: RaftlogError) -> None:
            self._forget(target, error)

        call = self._stub(target).Heartbeat()
        return RemoteHeartbeats(call, self._name(target), self._heartbeat_answered, broken)

    def troubles(self) -> str:
        """Say which controllers failed to answer last, and why; "" when all did."""
        return "; ".join(f"{self._name(target)}: {why}" for target, why in sorted(self._failures.items()))

    async def close(self) -> None:
        """Close all connections; what is under way fails."""
        self._closed = True
        self._window.close()
        await self._connections.close()

    # Asking

    async def _ask(self, what: str, attempt: Callable[[int], Awaitable[_T]], timeout_s: float | None) -> _T:
        """Ask one controller after the other until one answers."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                backoff_s = 0.0
                while True:
                    if self._closed:
                        raise ShuttingDown("this node is stopping")
                    target = self._pick()
                    if target is not None:
                        hint = self._hinted
                        try:
                            answer = await attempt(target)
                        except grpc.aio.AioRpcError as error:
                            self._forget(target, from_grpc(error, self._name(target)))
                        except asyncio.InvalidStateError:  # the channel was closed under the call
                            self._forget(target, BrokerUnavailable("the connection was closed"))
                        except asyncio.CancelledError:
                            task = asyncio.current_task()
                            if task is None or task.cancelling():
                                raise
                            # The call was cancelled, not this task: its channel was closed.
                            self._forget(target, BrokerUnavailable("the connection was closed"))
                        except _ASK_AGAIN as error:
                            if self._closed:
                                raise
                            if not isinstance(error, NotController | FencedController | UnknownOutcome):
                                self._forget(target, error)
                            elif self._hinted is not None and self._hinted not in (hint, target):
                                backoff_s = 0.0  # sent on to somebody new: ask there at once
                        else:
                            self._failures.pop(target, None)
                            return answer
                    if backoff_s:
                        await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.5))
                    backoff_s = min(max(FIRST_BACKOFF_S, backoff_s * 1.7), LAST_BACKOFF_S)
        except TimeoutError:
            troubles = self.troubles() or "none of the controllers is active"
            raise RequestTimedOut(f"{what} within {timeout_s:.3g} s; {troubles}") from None

    async def _propose_remote(self, target: int, command: MetadataCommand, timeout_s: float) -> CommandResult:
        request = controller_pb2.ProposeRequest(command=command, cluster_id=self._cluster_id())
        asked = self._stub(target).Propose(request, timeout=timeout_s, metadata=call_metadata())
        response = self._answered(target, await asked)
        self._note(response.controller)
        outcome = outcome_from_wire(response.outcome)
        if isinstance(outcome, RaftlogError):
            if isinstance(outcome, NotController | FencedController):
                self._not_active(target)
            raise outcome
        self._hinted = target
        return outcome

    def _answered(self, target: int, response: _T | None) -> _T:
        """Return a response; gRPC gives None for bytes that are none."""
        if response is None:
            raise BrokerUnavailable(f"{self._name(target)} sends what is no answer")
        return response

    def _check(self, target: int, error: Error, hint: ControllerHint) -> None:
        self._note(hint)
        if error.code != NONE:
            raised = from_wire(error)
            if isinstance(raised, NotController):
                self._not_active(target)
            raise raised

    # Who is asked

    def _pick(self) -> int | None:
        if self._local is not None and self._local.serving:
            return self._node_id
        if self._hinted is not None and (self._local is None or self._hinted != self._node_id):
            return self._hinted
        return next(self._rotation) if self._rotation is not None else None

    def _note(self, hint: ControllerHint) -> None:
        """Follow a hint, unless a newer one is known."""
        if not hint.host and hint.controller_id <= 0 and not hint.controller_epoch:
            return  # absent
        if hint.controller_epoch < self._hint_epoch or hint.controller_id not in self._controllers:
            return
        if hint.controller_epoch > self._hint_epoch or self._hinted is None:
            self._hint_epoch, self._hinted = hint.controller_epoch, hint.controller_id

    def follow(self, controller_id: int, controller_epoch: int) -> None:
        """The metadata names the active controller: ask that one, unless one of its epoch or a newer one is known.

        The one before it may say nothing for a long time: it is paused, or cut off.
        """
        if controller_epoch > self._hint_epoch and controller_id in self._controllers:
            self._hint_epoch, self._hinted = controller_epoch, controller_id

    def _not_active(self, target: int) -> None:
        if self._hinted == target:
            self._hinted = None
        self._failures.pop(target, None)

    def _forget(self, target: int, error: RaftlogError) -> None:
        self._failures[target] = str(error)
        if self._hinted == target:
            self._hinted = None

    def _heartbeat_answered(self, response: HeartbeatResponse) -> None:
        self._note(response.controller)
        if response.error.code == NotController.code:
            self._hinted = response.controller.controller_id if response.controller.host else None
            if self._hinted not in self._controllers:
                self._hinted = None
        self._on_heartbeat(response)

    def _stub(self, target: int) -> controller_pb2_grpc.ControllerAsyncStub:
        return controller_pb2_grpc.ControllerStub(self._connections.channel(self._controllers[target].address))

    def _name(self, target: int) -> str:
        return f"controller {target} at {self._controllers[target].address}"
