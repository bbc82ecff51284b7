"""The `Controller` service on the inter-node listener. Errors are values in responses, with where to go instead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from raftlog._client.connections import refuse
from raftlog.errors import (
    AuthorizationError,
    CorruptRecordError,
    FencedController,
    InconsistentClusterId,
    InternalError,
    InvalidRequestError,
    NotController,
    RaftlogError,
    RequestTimedOut,
    ShuttingDown,
    StorageError,
    UnknownOutcome,
    to_wire,
)
from raftlog.v1 import controller_pb2, controller_pb2_grpc
from raftlog.v1.common_pb2 import NONE, QuorumInfo
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatResponse
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.decide.outcome import outcome_to_wire
from raftmeta.quorum.channel import CLIENT_ID_BYTES, LocalController
from raftmeta.quorum.hello import same_cluster, shown_id
from raftmeta.quorum.peer_identity import check_claim, refuse_false_claim

logger = logging.getLogger(__name__)

MAX_UNANSWERED: Final = 16
"""Unanswered heartbeats of one stream; gRPC holds back further ones."""
WRITE_TIMEOUT_S: Final = 5.0

ALLOWED_KINDS: Final = frozenset(
    {
        "register_broker",
        "create_topic",
        "delete_topic",
        "create_partitions",
        "alter_configs",
        "unregister_broker",
        "alter_broker",
        "alter_users",
        "alter_acls",
        "alter_quotas",
        "alter_roles",
        "elect_leaders",
        "alter_partition",
        "alter_partitions",
        "offline_replicas",
        "alter_reassignments",
        "allocate_producer_ids",
        "update_feature",
    }
)
"""Other commands are proposed only by the controller itself."""

_Context = aio.ServicerContext[Any, Any]


class ControllerView(Protocol):
    """The service's source for the state of the quorum."""

    def hint(self) -> ControllerHint:
        """Where the active controller is."""
        ...

    def quorum_info(self) -> QuorumInfo:
        """The quorum as this node sees it."""
        ...


def check_command(command: MetadataCommand) -> None:
    """Check that a command may come from outside.

    Raises:
        InvalidRequestError: it is empty, one of the controller's own, or its client id is none.
    """
    if len(command.client_id) not in (0, CLIENT_ID_BYTES):
        raise InvalidRequestError(
            f"a client id has {CLIENT_ID_BYTES} bytes or is empty, this one has {len(command.client_id)}"
        )
    kind = command.WhichOneof("command")
    if kind is None:
        raise InvalidRequestError("the command is empty, or of a kind that this version does not know")
    if kind not in ALLOWED_KINDS:
        raise InvalidRequestError(f"only the controller itself proposes {kind}")
    if kind == "elect_leaders" and (
        command.elect_leaders.type == ElectLeadersCommand.SETTLE or command.elect_leaders.handed_over_as_of
    ):
        raise InvalidRequestError("only the controller itself settles partitions; ask for PREFERRED or UNCLEAN")


def claimed_node(command: MetadataCommand) -> int | None:
    """Return the broker that must be the sender of a command; None if any node may send it."""
    match command.WhichOneof("command"):
        case "register_broker":
            return command.register_broker.broker_id
        case "alter_partition":
            return command.alter_partition.broker_id
        case "alter_partitions":
            return command.alter_partitions.broker_id
        case "offline_replicas":
            return command.offline_replicas.broker_id
        case "allocate_producer_ids":
            return command.allocate_producer_ids.broker_id
        case _:
            return None


class ControllerService(controller_pb2_grpc.ControllerServicer):
    """Serves brokers, and other controllers' channels, while this node is the active controller."""

    def __init__(self, controller: LocalController, view: ControllerView, cluster_id: Callable[[], str]) -> None:
        self._controller = controller
        self._view = view
        self._cluster_id = cluster_id

    async def Propose(
        self, request: controller_pb2.ProposeRequest, context: _Context
    ) -> controller_pb2.ProposeResponse:
        """Commit a command, unless its sender has given up already and will ask again."""
        if (claimed := claimed_node(request.command)) is not None:
            await refuse_false_claim(context, claimed)
        outcome: CommandResult | RaftlogError
        remaining_s = context.time_remaining()
        try:
            if remaining_s is not None and remaining_s <= 0:
                raise RequestTimedOut("the caller's deadline has passed; nothing was done")
            self._check_cluster(request.cluster_id)
            check_command(request.command)
            outcome = await self._controller.propose(request.command)
        except (StorageError, CorruptRecordError, InternalError) as error:
            # Never what the state machine says: this node has stopped taking part for good.
            outcome = ShuttingDown(f"this controller has failed: {error}")
        except RaftlogError as error:
            outcome = error
        except Exception as error:  # a bug: the caller gets an answer, the log has the details
            logger.exception("a proposal failed")
            outcome = InternalError(f"the proposal failed: {type(error).__name__}: {error}")
        response = controller_pb2.ProposeResponse(outcome=outcome_to_wire(outcome))
        if isinstance(outcome, NotController | UnknownOutcome | FencedController):
            response.controller.CopyFrom(self._view.hint())
        return response

    async def Barrier(
        self, request: controller_pb2.BarrierRequest, context: _Context
    ) -> controller_pb2.BarrierResponse:
        """Confirm leadership with a majority, and return the committed offset."""
        try:
            offset = await self._controller.barrier()
        except RaftlogError as error:
            return controller_pb2.BarrierResponse(error=to_wire(error), controller=self._view.hint())
        hint = self._view.hint()
        return controller_pb2.BarrierResponse(metadata_offset=offset, controller_epoch=hint.controller_epoch)

    async def DescribeQuorum(
        self, request: controller_pb2.DescribeQuorumRequest, context: _Context
    ) -> controller_pb2.DescribeQuorumResponse:
        """Describe the quorum: the leader answers, or any voter while there is no leader."""
        hint = self._view.hint()
        quorum = self._view.quorum_info()
        if hint.controller_id >= 0 and not self._controller.serving:
            error = NotController(f"controller {hint.controller_id} leads; ask it")
            return controller_pb2.DescribeQuorumResponse(error=to_wire(error), controller=hint, quorum=quorum)
        return controller_pb2.DescribeQuorumResponse(controller=hint, quorum=quorum)

    async def Heartbeat(  # type: ignore[override] # the stub knows generators only; reading must not wait for answers
        self, request_iterator: Any, context: _Context
    ) -> None:
        """Serve one broker until its stream ends, or an answer carries an error."""
        stream = object()
        answers: asyncio.Queue[asyncio.Future[HeartbeatResponse] | None] = asyncio.Queue(MAX_UNANSWERED)
        reader = asyncio.create_task(self._take_heartbeats(context, stream, answers))
        try:
            while (answer := await answers.get()) is not None:
                response = await answer
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(response)
                if response.error.code != NONE:
                    return
            if (refusal := await reader) is not None:
                status, error = refusal
                await refuse(context, status, error, str(error))
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            pass  # the broker is gone, or reads nothing: it opens another stream
        finally:
            reader.cancel()
            self._controller.stream_closed(stream)

    async def _take_heartbeats(
        self, context: _Context, stream: object, answers: asyncio.Queue[asyncio.Future[HeartbeatResponse] | None]
    ) -> tuple[grpc.StatusCode, RaftlogError] | None:
        """Count each heartbeat when it arrives, even before the last one is answered.

        Return the status for a stream that is refused; None: it has ended.
        """
        try:
            while (request := await context.read()) is not aio.EOF and request is not None:
                check_claim(request.broker_id)
                await answers.put(self._controller.heartbeat(request, stream))
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        except DecodeError as error:
            logger.warning("ended a heartbeat stream: it does not parse: %s", error)
            return grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError(f"the heartbeat does not parse: {error}")
        except AuthorizationError as error:
            logger.error("ended a heartbeat stream: %s", error, extra={"peer": context.peer()})
            return grpc.StatusCode.PERMISSION_DENIED, error
        finally:
            # The answers have no reader any more: drop the queued ones to make room for the end mark.
            while answers.full():
                answers.get_nowait()
            answers.put_nowait(None)
        return None

    def _check_cluster(self, cluster_id: str) -> None:
        ours = self._cluster_id()
        if not same_cluster(ours, cluster_id):
            raise InconsistentClusterId(
                f"the request is for the cluster {shown_id(cluster_id)}, this controller belongs to {ours!r}: "
                "correct cluster.id or controller.quorum.voters"
            )
