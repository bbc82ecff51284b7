"""`MetadataPort` on a node with the role controller: a voter of the quorum, or all of it."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from grpc import aio

from raftlog.errors import RaftlogError, ShuttingDown, StorageError
from raftlog.v1 import controller_pb2_grpc, raft_pb2_grpc
from raftlog.v1.common_pb2 import QuorumInfo
from raftlog.v1.controller_pb2 import ControllerHint
from raftlog.v1.raft_pb2 import FRESH
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.disk import OsDisk
from raftmeta.image import MetadataImage
from raftmeta.port import Change, HeartbeatStream, Listener, Unsubscribe
from raftmeta.quorum.channel import ControllerChannel, better, leads
from raftmeta.quorum.config import MAX_COMMAND_BYTES, Clock, QuorumConfig
from raftmeta.quorum.controller import ActiveController
from raftmeta.quorum.description import RaftView, describe
from raftmeta.quorum.driver import Driver
from raftmeta.quorum.image_feed import ImageFeed
from raftmeta.quorum.links import RaftExchange, RaftLinks
from raftmeta.quorum.service import ControllerService
from raftmeta.raft import consensus
from raftmeta.raft.consensus import RaftOptions
from raftmeta.raft.node import RaftNode
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.voters import MetadataDirectory, read_properties
from raftmeta.raft.wal import WriteAheadLog
from raftmeta.state import MetadataState

logger = logging.getLogger(__name__)

STEP_DOWN_TIMEOUT_S: Final = 1.0
WATCH_S: Final = 0.005
"""How often a wait for what a cycle brings about looks again; only while starting and stopping."""


class QuorumMetadata:
    """States: new -> running (`start`) -> closed (`close`) or failed (disk, diverged state); both are final.

    Failed: `on_fatal` is told once, nothing leaves any more, and the process is expected to end.
    """

    def __init__(
        self,
        config: QuorumConfig,
        directory: MetadataDirectory,
        wal: WriteAheadLog,
        executor: Executor,
        clock: Clock,
        on_fatal: Callable[[RaftlogError], None],
        rng: random.Random,
    ) -> None:
        self._config = config
        self._directory = directory
        self._executor = executor
        self._clock = clock
        self._state = MetadataState()
        self._driver = Driver(wal, consensus.monotonic_s, executor, on_fatal)
        self._controller = ActiveController(
            config.node_id,
            lambda: directory.cluster_id,
            self._driver,
            self._state,
            self.hint,
            config.controller,
            clock,
            executor,
        )
        self._feed = ImageFeed()
        self._state.subscribe(self._on_change, self._on_reset)
        self._node = RaftNode(
            node_id=config.node_id,
            voters=config.voter_ids,
            directory=directory,
            wal=wal,
            snapshots=SnapshotStore(directory.disk),
            state=self._state,
            listener=self,
            rng=rng,
            options=_raft_options(config),
            run_off_loop=self._driver.run_off_loop,
        )
        peers = {node_id: endpoint for node_id, endpoint in config.voters.items() if node_id != config.node_id}
        self._links = RaftLinks(self._node, peers, self._driver.kick, rng, config.tls)
        self._exchange = RaftExchange(self._node, self._driver.kick)
        self._channel = ControllerChannel(
            config.node_id,
            config.voters,
            lambda: directory.cluster_id,
            timeout_ms=config.request_timeout_ms,
            local=self._controller,
            rng=rng,
            tls=config.tls,
        )
        self._feed.subscribe(lambda image, _: self._channel.follow(image.controller_id, image.controller_epoch))
        self._started = False
        self._closed = False

    # MetadataPort

    @property
    def image(self) -> MetadataImage:
        """The newest committed image."""
        return self._feed.image

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command; see `MetadataPort`."""
        result = await self._channel.propose(command)
        if result.offset > self._feed.image.offset:
            await self._feed.reached(result.offset)
        return result

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change from now on."""
        return self._feed.subscribe(listener)

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`, or None when they are not all kept."""
        return self._feed.changes_since(offset)

    async def barrier(self) -> int:
        """Return a metadata offset that covers all acknowledged before this call, once `image` shows it."""
        offset = await self._channel.barrier()
        await self._feed.reached(offset)
        return offset

    async def describe_quorum(self) -> QuorumInfo:
        """Return the leader's view of the quorum, or the best other view if there is no leader or it is silent."""
        if self._controller.serving or not self._node.has_peers:
            return self.quorum_info()
        try:
            theirs = await self._channel.describe_quorum(timeout_s=2.0 if self._node.leader_id >= 0 else 0.0)
        except RaftlogError as error:
            logger.info("no other controller can be asked: %s", error)
            info = self.quorum_info()
        else:
            info = better((self.quorum_info(), theirs))
        if not leads(info):
            info.leader_id = -1
        return info

    async def open_heartbeats(self) -> HeartbeatStream:
        """Open a stream of heartbeats to the active controller; see `MetadataPort`."""
        return await self._channel.open_heartbeats()

    async def wait_ready(self) -> None:
        """Return once an active controller has been heard and `image` is as new as what it had committed by then."""
        await self._feed.wait_ready(self._channel.barrier, lambda _: self._closed or self._driver.failed)

    def waiting_for(self) -> str:
        """Return the missing voters as text for a log line; "" once there is a leader."""
        if self._controller.serving or (self._node.role != "leader" and self._node.leader_id >= 0):
            return ""
        if self._node.role == "leader":
            return "this controller to finish its election"
        troubles = self._links.troubles()
        if not troubles:
            return "an election"
        said = (
            f"controller {peer_id} at {self._config.voters[peer_id].address}: {trouble}"
            for peer_id, trouble in troubles.items()
        )
        missing = "; ".join(said)
        if self._node.voter_state == FRESH:
            return f"{missing} (the first start of a quorum needs every voter once, see docs/quorum.md)"
        return missing

    # What else a server asks of a voter

    @property
    def cluster_id(self) -> str:
        """Of the metadata directory; known before there is an image."""
        return self._directory.cluster_id

    @property
    def is_active_controller(self) -> bool:
        """Whether this node is the active controller."""
        return self._controller.serving

    def add_to_server(self, server: aio.Server) -> None:
        """Serve `Raft` and `Controller` on the inter-node listener; before the server starts."""
        raft_pb2_grpc.add_RaftServicer_to_server(self._exchange, server)
        service = ControllerService(self._controller, self, lambda: self._directory.cluster_id)
        controller_pb2_grpc.add_ControllerServicer_to_server(service, server)

    def hint(self) -> ControllerHint:
        """Return where the active controller is, as far as this node knows."""
        leader_id = self._node.leader_id
        endpoint = self._config.voters.get(leader_id)
        if endpoint is None:
            return ControllerHint(controller_id=leader_id, controller_epoch=self._node.term)
        return ControllerHint(
            controller_id=leader_id, controller_epoch=self._node.term, host=endpoint.host, port=endpoint.port
        )

    def quorum_info(self) -> QuorumInfo:
        """Return the quorum as this node sees it."""
        return describe(self._node, self._config, self.image, self._controller.reports(), self._clock.monotonic_ms())

    def time_commits(self, told: Callable[[float], None]) -> None:
        """Have `told` called with the seconds that each command took which this node has proposed as the leader."""
        self._driver.on_commit = told

    def raft_view(self) -> RaftView:
        """Return this voter's own view of the log. For any thread."""
        node = self._node
        last_index = node.last_index
        peers = node.peers() if node.role == "leader" else {}
        return RaftView(
            role=node.role,
            term=node.term,
            leader_id=node.leader_id,
            commit_index=node.commit_index,
            last_applied=node.last_applied,
            last_index=last_index,
            snapshot_index=node.snapshot_index,
            lags={peer_id: max(0, last_index - peer.match_index) for peer_id, peer in peers.items()},
        )

    # RaftListener

    def on_active(self, term: int) -> None:
        """This node leads the quorum."""
        self._controller.on_active(term)

    def on_inactive(self) -> None:
        """This node leads no longer."""
        self._controller.on_inactive()

    def on_applied(self, index: int) -> None:
        """Entries were applied; what they changed has been told one by one."""

    def _on_change(self, image: MetadataImage, change: Change) -> None:
        self._controller.on_change(image, change.records)
        self._feed.publish(image, change)

    def _on_reset(self, image: MetadataImage) -> None:
        self._feed.reset(image)

    # Start and end

    async def start(self) -> None:
        """Take part in the quorum: dial the other voters, vote, lead."""
        assert not self._started
        self._started = True
        self._driver.start(self._node, self._links.send)
        self._links.start()

    async def step_down(self, timeout_s: float = STEP_DOWN_TIMEOUT_S) -> None:
        """Hand the leadership of the quorum to another voter, if this one leads and another can."""
        if not self._started or self._driver.failed or not self._leads():
            return
        if not self._node.transfer_leadership():
            return
        self._driver.kick()
        try:
            async with asyncio.timeout(timeout_s):
                while self._leads() or self._node.leader_id < 0:  # no event announces either
                    if not any(peer.connected for peer in self._node.peers().values()):
                        raise TimeoutError  # where all voters stop, the last one need not wait
                    await asyncio.sleep(WATCH_S)
        except TimeoutError:
            logger.info("controller %d could not hand its leadership over", self._config.node_id)

    def _leads(self) -> bool:
        return self._node.role == "leader"

    async def close(self, *, hand_over: bool = True) -> None:
        """Leave the quorum, and give the directory up; by default after handing the leadership over."""
        if self._closed:
            return
        self._closed = True
        if hand_over:
            await self.step_down()
        self._controller.on_inactive()
        self._feed.close(ShuttingDown("this node is stopping; try another one"))
        await self._channel.close()
        self._exchange.close()
        await self._links.close()
        await self._driver.close()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._directory.close)


def _raft_options(config: QuorumConfig) -> RaftOptions:
    shortest_s = config.election_timeout_ms / 1_000
    defaults = RaftOptions()
    return RaftOptions(
        heartbeat_interval_s=min(defaults.heartbeat_interval_s, shortest_s / 5),
        election_timeout_s=(shortest_s, 2 * shortest_s),
        leader_fallback_s=1.6 * shortest_s,
        prevote_after_break_s=(
            min(defaults.prevote_after_break_s[0], shortest_s),
            min(defaults.prevote_after_break_s[1], shortest_s),
        ),
        first_election_s=(shortest_s / 10, shortest_s / 2),
        max_command_bytes=MAX_COMMAND_BYTES,
        snapshot_after_bytes=config.snapshot_bytes,
    )


async def open_quorum(
    config: QuorumConfig,
    executor: Executor,
    clock: Clock,
    on_fatal: Callable[[RaftlogError], None],
    *,
    rng: random.Random | None = None,
) -> QuorumMetadata:
    """Lock and recover the metadata directory, and return the voter; `start` it when its listener is there.

    Raises:
        RaftlogError: the directory is in use, damaged, of another node, cluster, list of voters, or version.
    """
    loop = asyncio.get_running_loop()
    directory, wal = await loop.run_in_executor(executor, _open_files, config)
    try:
        return QuorumMetadata(config, directory, wal, executor, clock, on_fatal, rng or random.Random())
    except BaseException:  # the directory must not stay locked, whatever it was
        await loop.run_in_executor(executor, directory.close)
        raise


def _open_files(config: QuorumConfig) -> tuple[MetadataDirectory, WriteAheadLog]:
    disk = OsDisk(config.directory)
    cluster_id = config.cluster_id or _present_cluster_id(disk) or str(uuid.uuid4())
    directory = MetadataDirectory.open(disk, config.node_id, cluster_id, config.voter_ids)
    try:
        wal = WriteAheadLog(disk, directory.directory_id)
        wal.open()
    except OSError as error:
        directory.close()
        raise StorageError(f"cannot read the metadata directory {disk.path}: {error}") from error
    except BaseException:  # the directory must not stay locked, whatever it was
        directory.close()
        raise
    return directory, wal


def _present_cluster_id(disk: OsDisk) -> str:
    """Return the cluster id that a directory was formatted with; "" for one that was not."""
    try:
        found = read_properties(disk)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"cannot read the metadata directory {disk.path}: {error}") from error
    return found.cluster_id if found is not None else ""
