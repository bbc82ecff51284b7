"""A node's channel to the active controller: commands, reads, views of the quorum, heartbeat streams.

A command keeps its (client id, sequence) over all attempts, so that it counts once even if its first attempt was
committed and the answer was lost. The channel retries errors that say nothing about the command: the wrong controller,
a broken connection, an unknown outcome. An answer of the state machine is final, retriable or not.

A busy controller answers late, and early retries would make it busier. So the timeout of an attempt grows after each
one that was too short, and a node has a limited number of commands under way; the others wait in order.

The state machine keeps the outcomes of a limited number of sequences for each client, and refuses an older sequence as
settled. A command that waits long for its answer must not fall behind them, so the newest sequence stays within
MAX_SPAN of the oldest unanswered one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.security import ChannelTls
from raftlog._client.tracing_choice import call_metadata
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
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.decide.outcome import outcome_from_wire
from raftmeta.port import HeartbeatStream
from raftmeta.quorum.config import CHANNEL_OPTIONS, MAX_COMMAND_BYTES, Endpoint
from raftmeta.state import MAX_OUTCOMES_PER_CLIENT

MAX_OUTSTANDING: Final = 1_000
"""The most commands of one client under way or waiting; more are refused."""
MAX_IN_FLIGHT: Final = 200
"""The most commands of one client under way: a controller commits this many well within an attempt's timeout."""
MAX_SPAN: Final = MAX_OUTCOMES_PER_CLIENT

assert MAX_IN_FLIGHT <= MAX_SPAN <= MAX_OUTCOMES_PER_CLIENT
assert MAX_IN_FLIGHT <= MAX_OUTSTANDING


class CommandWindow:
    """Hands out sequences. Invariant: `_out` is in rising order and spans less than MAX_SPAN."""

    def __init__(self) -> None:
        self._next = 0
        self._out: dict[int, None] = {}
        self._turns: deque[asyncio.Future[int]] = deque()

    @property
    def settled_below(self) -> int:
        """Every sequence below this one has been answered, or given up."""
        return next(iter(self._out), self._next)

    async def enter(self, timeout_s: float) -> int:
        """Return the sequence of a new command when its turn comes; the caller ends it with `leave`.

        Raises:
            BrokerOverloaded: MAX_OUTSTANDING commands are there already.
            RequestTimedOut: its turn did not come in time; it was not sent.
        """
        if not self._turns and self._has_room():
            return self._take()
        if len(self._out) + len(self._turns) >= MAX_OUTSTANDING:
            raise BrokerOverloaded(f"{MAX_OUTSTANDING} metadata commands of this node are under way; try again later")
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                return await turn
        except TimeoutError:
            self._give_up(turn)
            raise RequestTimedOut(
                f"the command did not get its turn within {timeout_s:g} s: {len(self._out)} others of this node wait "
                "for their answers; it was not sent"
            ) from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def leave(self, sequence: int) -> None:
        """Note that the caller of a command waits no longer."""
        del self._out[sequence]
        self._give_turns()

    def close(self) -> None:
        """Fail all callers that wait for a turn."""
        turns, self._turns = self._turns, deque()
        for turn in turns:
            if not turn.done():
                turn.set_exception(ShuttingDown("this node is stopping"))

    def _has_room(self) -> bool:
        return len(self._out) < MAX_IN_FLIGHT and self._next - self.settled_below < MAX_SPAN

    def _take(self) -> int:
        sequence, self._next = self._next, self._next + 1
        self._out[sequence] = None
        return sequence

    def _give_turns(self) -> None:
        while self._turns and self._has_room():
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(self._take())

    def _give_up(self, turn: asyncio.Future[int]) -> None:
        """Return a turn that was granted just as its caller gave up."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.leave(turn.result())
        elif turn in self._turns:
            self._turns.remove(turn)


AGAIN_S: Final = 0.1


def leads(view: QuorumInfo) -> bool:
    """Whether the view is the leader's own."""
    return view.leader_id >= 0 and view.leader_id == view.answered_by


def better(views: Iterable[QuorumInfo]) -> QuorumInfo:
    """Return the view of the leader with the highest epoch, or else of the node with the longest log; pure.

    A node whose directory was emptied has no log, and would show a quorum without data.
    """
    return max(
        views,
        key=lambda view: (leads(view), leads(view) and view.leader_epoch, view.log_end_index, -view.answered_by),
    )


async def ask_all(
    targets: Iterable[int], ask: Callable[[int], Awaitable[QuorumInfo | None]], timeout_s: float
) -> list[QuorumInfo]:
    """Ask all of `targets`, again while one of them names a leader that does not answer.

    They are asked at least once, and for at most `timeout_s`. `ask` returns None without an answer. Returns [] if no
    target answers in time.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    wanted = list(targets)
    while True:
        views = [view for view in await asyncio.gather(*map(ask, wanted)) if view is not None]
        settled = bool(views) and (any(map(leads, views)) or all(view.leader_id < 0 for view in views))
        if settled or loop.time() + AGAIN_S >= end_s:
            return views
        await asyncio.sleep(AGAIN_S)


ANSWER_TIMEOUT_S: Final = 1.0
"""After this time without an answer a broker leaves the controller, because another one may be active by now."""
MAX_UNANSWERED: Final = 16

OnResponse = Callable[[HeartbeatResponse], None]


class HeartbeatTaker(Protocol):
    """The part of the active controller that takes heartbeats."""

    def heartbeat(self, request: HeartbeatRequest, stream: object) -> asyncio.Future[HeartbeatResponse]:
        """Take a heartbeat; the future never fails."""
        ...

    def stream_closed(self, stream: object) -> None:
        """Note the end of a stream."""
        ...


def checked(response: HeartbeatResponse) -> HeartbeatResponse:
    """Return the answer, or raise the error it carries."""
    if response.error.code != NONE:
        raise from_wire(response.error)
    return response


class RemoteHeartbeats:
    """A `HeartbeatStream` to a controller elsewhere."""

    def __init__(
        self, call: Any, where: str, on_response: OnResponse, on_broken: Callable[[RaftlogError], None]
    ) -> None:
        self._call = call
        self._where = where
        self._on_response = on_response
        self._on_broken = on_broken
        self._sent_s: deque[float] = deque()
        self._error: RaftlogError | None = None

    async def send(self, request: HeartbeatRequest) -> None:
        """Send a heartbeat."""
        now_s = time.monotonic()
        if self._sent_s and now_s - self._sent_s[0] > ANSWER_TIMEOUT_S:
            raise self._break(BrokerUnavailable(f"{self._where} has not answered for {ANSWER_TIMEOUT_S:g} s"))
        if self._error is not None:
            raise self._error
        self._sent_s.append(now_s)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._call.write(request)
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
            raise self._break(self._why(error)) from None
        except asyncio.CancelledError:
            raise self._unless_cancelled() from None

    async def receive(self) -> HeartbeatResponse:
        """Return the next answer."""
        try:
            response = await self._call.read()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._break(self._why(error)) from None
        except asyncio.CancelledError:
            raise self._unless_cancelled() from None
        if response is None:
            raise self._break(BrokerUnavailable(f"{self._where} sent a message that is not a heartbeat response"))
        if response is grpc.aio.EOF:
            raise self._break(BrokerUnavailable(f"{self._where} ended the stream"))
        if self._sent_s:
            self._sent_s.popleft()
        self._on_response(response)
        return checked(response)

    def _unless_cancelled(self) -> BaseException:
        """Return the error of a cancellation: of this task, or of the call, which another task cancelled."""
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return asyncio.CancelledError()
        return self._break(BrokerUnavailable(f"the heartbeat stream to {self._where} was cancelled"))

    def _why(self, error: BaseException) -> RaftlogError:
        if self._error is not None:
            return self._error
        if isinstance(error, grpc.aio.AioRpcError):
            return from_grpc(error, self._where)
        return BrokerUnavailable(f"the heartbeat stream to {self._where} broke")

    def _break(self, error: RaftlogError) -> RaftlogError:
        if self._error is None:
            self._error = error
            self._call.cancel()
            self._on_broken(error)
        return self._error

    async def close(self) -> None:
        """End the stream."""
        self._error = self._error or BrokerUnavailable("this stream was closed")
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._call.done_writing()
        self._call.cancel()


class LocalHeartbeats:
    """A `HeartbeatStream` to the active controller in this process."""

    def __init__(self, controller: HeartbeatTaker, on_response: OnResponse) -> None:
        self._controller = controller
        self._on_response = on_response
        self._answers: asyncio.Queue[asyncio.Future[HeartbeatResponse] | None] = asyncio.Queue()
        self._closed = False

    async def send(self, request: HeartbeatRequest) -> None:
        """Pass a heartbeat on."""
        if self._closed:
            raise BrokerUnavailable("this stream was closed")
        if self._answers.qsize() >= MAX_UNANSWERED:
            raise BrokerUnavailable("the controller has not answered the last heartbeats")
        copy = HeartbeatRequest()
        copy.CopyFrom(request)
        self._answers.put_nowait(self._controller.heartbeat(copy, self))

    async def receive(self) -> HeartbeatResponse:
        """Return the next answer."""
        answer = await self._answers.get()
        if answer is None:
            raise BrokerUnavailable("this stream was closed")
        response = await answer
        self._on_response(response)
        return checked(response)

    async def close(self) -> None:
        """End the stream."""
        if not self._closed:
            self._closed = True
            self._controller.stream_closed(self)
            self._answers.put_nowait(None)


logger = logging.getLogger(__name__)

CLIENT_ID_BYTES: Final = 16
ATTEMPT_TIMEOUT_S: Final = 1.0
"""Short, because a command counts once: the node that was asked may be paused, and another one may answer."""
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
"""Not RequestTimedOut: so the state machine answers a sequence whose outcome it no longer keeps."""

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
    """Finds the active controller, follows it, and repeats requests until a deadline."""

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
        self._followed = asyncio.Event()
        remote = sorted(self._controllers.keys() - ({node_id} if local is not None else set()))
        self._rng.shuffle(remote)
        self._rotation = itertools.cycle(remote) if remote else None
        self._connections = Connections(tls, CHANNEL_OPTIONS)
        self._failures: dict[int, str] = {}
        self._closed = False

    # What can be asked

    async def propose(self, command: MetadataCommand, timeout_s: float | None = None) -> CommandResult:
        """Commit a command exactly once, over retries and changes of the controller.

        Raises:
            BrokerOverloaded: too many commands are under way.
            MessageTooLarge: it is beyond what a log entry may have.
            RequestTimedOut: no answer in time; the command may or may not be committed.
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
        """Return the leader's view of the quorum, or the best view of the other controllers if it does not answer.

        Raises:
            RequestTimedOut: no controller answered in time.
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
        views = await ask_all(targets, ask, timeout_s)
        if not views:
            troubles = self.troubles() or "no controller answered"
            raise RequestTimedOut(f"the quorum cannot be described within {timeout_s:g} s; {troubles}")
        return better(views)

    async def open_heartbeats(self) -> HeartbeatStream:
        """Open a stream to where the active controller is believed to be.

        Raises:
            BrokerUnavailable: no controller can be tried at the moment.
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
        """Return which controllers did not answer last, and why; "" if all did."""
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
                                backoff_s = 0.0  # redirected to another controller: ask there at once
                        else:
                            self._failures.pop(target, None)
                            return answer
                    if backoff_s and await self._elected_within(backoff_s * self._rng.uniform(0.5, 1.5)):
                        backoff_s = 0.0
                    backoff_s = min(max(FIRST_BACKOFF_S, backoff_s * 1.7), LAST_BACKOFF_S)
        except TimeoutError:
            troubles = self.troubles() or "none of the controllers is active"
            raise RequestTimedOut(f"{what} within {timeout_s:.3g} s; {troubles}") from None

    async def _elected_within(self, pause_s: float) -> bool:
        """Wait, at most until the metadata names a newer active controller; return whether it has."""
        try:
            async with asyncio.timeout(pause_s):
                await self._followed.wait()
        except TimeoutError:
            return False
        return True

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
        """Return a response, or raise: gRPC returns None for bytes that do not parse."""
        if response is None:
            raise BrokerUnavailable(f"{self._name(target)} sent a message that is not a response")
        return response

    def _check(self, target: int, error: Error, hint: ControllerHint) -> None:
        self._note(hint)
        if error.code != NONE:
            raised = from_wire(error)
            if isinstance(raised, NotController):
                self._not_active(target)
            raise raised

    # Targets

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
        """Ask the active controller that the metadata names, unless one of its epoch or a newer one is known.

        The one before it may say nothing for a long time: it is paused, or cut off.
        """
        if controller_epoch > self._hint_epoch and controller_id in self._controllers:
            self._hint_epoch, self._hinted = controller_epoch, controller_id
            self._followed.set()  # wakes all that wait now, and none that waits later
            self._followed = asyncio.Event()

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
