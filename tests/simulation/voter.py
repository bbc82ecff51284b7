"""The controller role of a process: a Raft node, what drives it, its streams to the others, and what it is asked."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftlog.errors import InvalidRequestError, NotController, RaftlogError, StorageError
from raftlog.v1 import raft_pb2
from raftlog.v1.raft_pb2 import RaftMessage
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.image import MetadataImage
from raftmeta.raft.node import RaftNode
from raftmeta.raft.ports import Applied, ProposalOutcome
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.voters import MetadataDirectory
from raftmeta.raft.wal import PendingWrite, WriteAheadLog
from tests.simulation.controller import SimController
from tests.simulation.network import Connection
from tests.simulation.process import Process, ProcessGone

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation

CYCLE_S = 0.0001
"""What a cycle takes."""
RECONNECT_S = (0.05, 0.2)

Answer = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Propose:
    """Commit this command, stamped by the active controller."""

    command: MetadataCommand
    stale_epoch: bool = False
    """Stamp it with an epoch that is over, as a command delayed since then would be."""


@dataclass(frozen=True, slots=True)
class Read:
    """Return the image after a majority round."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Not the active controller; `hint` is the node that may be, or -1. `maybe`: the command may still take effect."""

    hint: int
    maybe: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The command's outcome."""

    index: int
    outcome: object


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was appended."""

    error: RaftlogError


class HelloBytes(bytes):
    """A hello, as it travels; Raft messages are plain bytes."""


class WatchedState:
    """A `ReplicatedState` that is the real one, with the invariants looking on."""

    def __init__(self, voter: Voter) -> None:
        self.inner = voter.simulation.parts.state()
        self._voter = voter
        self._checks = voter.simulation.invariants

    def apply(self, index: int, term: int, command: bytes) -> object:
        result = self.inner.apply(index, term, command)
        self._checks.applied(self._voter, index, term, command, self.inner, changed=result.change is not None)
        return result

    def begin_term(self, index: int, term: int) -> None:
        self.inner.begin_term(index, term)
        self._checks.applied(self._voter, index, term, b"", self.inner, changed=False)

    def capture(self) -> object:
        return self.inner.capture()

    def encode(self, captured: object) -> bytes:
        return self.inner.encode(captured)

    def decode(self, data: bytes, index: int, term: int) -> object:
        return index, term, self.inner.decode(data, index, term)

    def adopt(self, decoded: object) -> None:
        assert isinstance(decoded, tuple)
        index, term, state = decoded
        self.inner.adopt(state)
        self._checks.restored(self._voter, index, term, self.inner)
        self._voter.image_changed()


class Voter:
    """One life of a voter: from opening its directory to the death of its process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.host = process.host
        self.simulation: Simulation = process.simulation
        simulation, host = self.simulation, self.host
        self._random = random.Random(simulation.random.random())
        self.directory = MetadataDirectory.open(
            host.disk, host.node_id, simulation.cluster_id, simulation.voters, self._new_directory_id
        )
        self.wal: WriteAheadLog = simulation.parts.wal(
            host.disk, self.directory.directory_id, segment_bytes=simulation.segment_bytes
        )
        self.wal.open()
        self.state = WatchedState(self)
        self.controller = SimController(self)
        self.watchers: list[Callable[[MetadataImage], None]] = []
        self._image: MetadataImage | None = None
        self._links: dict[int, Connection] = {}
        self._inbound: dict[int, Connection] = {}
        self._wake_at_s: float | None = None
        self._syncing: PendingWrite | None = None
        self._again = False
        self.node: RaftNode = simulation.parts.node(
            node_id=host.node_id,
            voters=simulation.voters,
            directory=self.directory,
            wal=self.wal,
            snapshots=SnapshotStore(host.disk),
            state=self.state,
            listener=self,
            rng=self._random,
            options=simulation.options,
            run_off_loop=self._run_off_loop,
        )
        process.on_death.append(self._finish_write)
        for peer_id in simulation.voters:
            if peer_id != host.node_id:
                process.after(self._random.uniform(0.001, 0.02), self._connect, peer_id)
        self._wake()

    @property
    def image(self) -> MetadataImage:
        """The committed image here."""
        return self.state.inner.image

    def _new_directory_id(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128))

    # Driving: cycle, send what promises nothing, sync, send what waited for the sync

    def _wake(self, delay_s: float = CYCLE_S) -> None:
        at_s = self.simulation.scheduler.now_s + delay_s
        if self._wake_at_s is None or at_s < self._wake_at_s:
            self._wake_at_s = at_s
            self.process.after(delay_s, self._cycle, at_s)

    def _cycle(self, scheduled_s: float) -> None:
        if self._wake_at_s != scheduled_s:
            return  # an earlier one took its place
        self._wake_at_s = None
        if self._syncing is not None:
            self._again = True
            return
        self._again = False
        self.node.cycle()
        self._still_here()
        self.simulation.invariants.after_cycle(self)
        self._send(self.node.take_immediate())
        if self.wal.dirty:
            if self.simulation.parts.sends_before_sync:
                self._send(self.node.take_durable())
            self._syncing = self.wal.take()
            self.process.after(self._random.choice(self.host.sync_s), self._synced)
        else:
            self._after_sync()

    def _synced(self) -> None:
        pending, self._syncing = self._syncing, None
        assert pending is not None
        self.wal.write(pending)
        self._still_here()
        self.wal.done(pending)
        self._after_sync()

    def _after_sync(self) -> None:
        self._send(self.node.take_durable())
        if self._again or self.node.wants_cycle:
            self._wake()
        else:
            self._wake(max(CYCLE_S, self.node.next_deadline_s() - self.host.local_s() + 0.0005))

    def _still_here(self) -> None:
        if self.host.disk.dead:
            raise ProcessGone

    def _finish_write(self, with_machine: bool) -> None:
        """The process dies while its log is written: some of that write may be done."""
        if self._syncing is not None and not self.host.disk.dead:
            pending, self._syncing = self._syncing, None
            self.host.disk.die_after(self._random.randrange(3))
            try:
                self.wal.write(pending)
            except (OSError, RaftlogError):
                return

    def _run_off_loop(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run it at once, in one go, and say so later: meanwhile the process may die, and other things happen."""

        def finish(error: BaseException | None) -> None:
            done(error)
            self._wake()

        def begin() -> None:
            error: BaseException | None = None
            try:
                work()
            except Exception as raised:  # it goes to the node, as from a thread
                error = raised
            self._still_here()
            self.process.after(self._random.uniform(0.0001, 0.2), finish, error)

        self.process.after(self._random.uniform(0.0001, 0.2), begin)

    # Streams to and from the other voters

    def _connect(self, peer_id: int) -> None:
        if peer_id in self._links:
            return
        other = self.simulation.voter_on(peer_id)
        connection = None if other is None else self.simulation.network.connect(self.process, other.process)
        if connection is None or other is None:
            self.process.after(self._random.uniform(*RECONNECT_S), self._connect, peer_id)
            return
        self._links[peer_id] = connection
        hellos: list[bytes] = []

        def answered(data: bytes) -> None:
            hello = raft_pb2.RaftHello.FromString(data)
            self.node.hello_from(peer_id, hello)
            if self._links.get(peer_id) is connection:
                hellos.append(data)
                self.node.link_up(peer_id, hello)
            self._wake()

        def lost() -> None:
            if self._links.get(peer_id) is connection:
                del self._links[peer_id]
                if hellos:
                    self.node.link_down(peer_id)
                self.process.after(self._random.uniform(*RECONNECT_S), self._connect, peer_id)
            self._wake()

        connection.opener_hears(answered, lost)
        other.accept(self.host.node_id, connection)
        connection.send(HelloBytes(self.node.hello(peer_id).SerializeToString()))

    def accept(self, peer_id: int, connection: Connection) -> None:
        """Take a stream of another voter: its hello first, then its messages."""
        greeted: list[bool] = []

        def receive(data: bytes) -> None:
            if not greeted:
                greeted.append(True)
                self._inbound[peer_id] = connection
                self.node.hello_from(peer_id, raft_pb2.RaftHello.FromString(data))
                connection.answer(HelloBytes(self.node.hello(peer_id).SerializeToString()))
            else:
                self.node.receive(peer_id, RaftMessage.FromString(data))
            self._wake()

        def lost() -> None:
            if self._inbound.get(peer_id) is connection:
                del self._inbound[peer_id]
                self.node.stream_lost(peer_id)
                self._wake()

        connection.acceptor_hears(receive, lost)

    def _send(self, messages: list[tuple[int, RaftMessage]]) -> None:
        for peer_id, message in messages:
            connection = self._links.get(peer_id)
            if connection is not None:
                if message.HasField("vote_granted"):
                    self.simulation.invariants.votes(self, message.vote_granted.term, peer_id)
                elif message.HasField("vote_request"):
                    self.simulation.invariants.votes(self, message.vote_request.term, self.host.node_id)
                connection.send(message.SerializeToString())

    # What the node says

    def on_active(self, term: int) -> None:
        """Begin as the controller, once this cycle is over."""
        self.simulation.trace(self.host, f"is active in term {term}")
        self.simulation.invariants.active(self, term)
        self.process.after(0, self.controller.activate, term)

    def on_inactive(self) -> None:
        """Stop being the controller."""
        self.simulation.trace(self.host, "is active no longer")
        self.controller.deactivate()

    def on_applied(self, index: int) -> None:
        """Tell every watcher of the image."""
        self.image_changed()

    def image_changed(self) -> None:
        """Let broker, controller and watchers see the image, if it is a new one."""
        image = self.image
        if image is self._image:
            return
        self.simulation.invariants.image_moves(self, self._image, image)
        self._image = image
        self.controller.observe(image)
        for watcher in list(self.watchers):
            watcher(image)

    # What it is asked

    def propose(self, command: MetadataCommand, done: Callable[[object], None], stale_epoch: bool = False) -> None:
        """Stamp a command and append it; `done` gets Committed, Elsewhere or Refused."""
        node = self.node
        if not node.active:
            done(Elsewhere(node.leader_id))
            return
        stamped = MetadataCommand()
        stamped.CopyFrom(command)
        stamped.controller_epoch = node.term - stale_epoch
        stamped.proposed_at_ms = self.host.wall_ms()

        def applied(outcome: ProposalOutcome) -> None:
            if isinstance(outcome, Applied):
                self.simulation.invariants.answered(self, stamped, outcome)
                done(Committed(outcome.index, getattr(outcome.result, "outcome", outcome.result)))
            else:
                done(Elsewhere(-1, maybe=True))

        try:
            node.propose(stamped.SerializeToString(), applied)
        except NotController:
            done(Elsewhere(node.leader_id))
        except (StorageError, InvalidRequestError) as error:
            done(Refused(error))
        self._wake()

    def read(self, done: Callable[[MetadataImage | None], None]) -> None:
        """Give the image once a majority has confirmed this leader; None if it is not one."""
        started_at = self.simulation.invariants.acknowledged_index

        def confirmed(index: int | None) -> None:
            if index is not None:
                self.simulation.invariants.read(self, index, started_at)
            done(None if index is None else self.image)

        try:
            self.node.read_index(confirmed)
        except NotController:
            done(None)
        self._wake()

    def transfer(self) -> None:
        """Hand the leadership over, if this node has it."""
        self.node.transfer_leadership()
        self._wake()

    def serve(self, request: object, answer: Answer) -> None:
        """Serve a client."""
        if isinstance(request, Propose):
            self.propose(request.command, answer, request.stale_epoch)
        elif isinstance(request, Read):
            if not self.node.active:
                answer(Elsewhere(self.node.leader_id))
            else:
                self.read(lambda image: answer(Elsewhere(-1) if image is None else image))
