"""A leader's side of replication: the messages to each follower.

    probing       one message with entries, then heartbeats, until the follower's answer says where its log agrees
    pipelined     new entries at once, up to a window of unanswered bytes; nothing is sent twice on one stream
    snapshot      the log no longer has the entries that the follower lacks: a snapshot in chunks, a few unanswered

A stream delivers in order or breaks. After a break, the leader continues behind the last acknowledged entry.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from raftlog.v1.raft_pb2 import AppendAnswer, RaftMessage
from raftmeta.raft import messages
from raftmeta.raft.consensus import LEADER, Consensus, Peer, RaftOptions, RaftTransport
from raftmeta.raft.ports import RunOffLoop
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.wal import ENTRY_OVERHEAD_BYTES, WriteAheadLog

logger = logging.getLogger(__name__)

WINDOW_BATCHES = 4
WINDOW_CHUNKS = 4
MAX_ENTRIES_A_MESSAGE = 1024
TRANSFER_PATIENCE_S = 10.0
"""A snapshot that was sent completely but not acknowledged for this time is sent again."""


@dataclass(slots=True)
class Transfer:
    """A snapshot on its way to a follower."""

    index: int
    data: bytes
    position: int = 0
    sent: int = 0
    """Chunks sent, numbered from 1."""
    arrived: int = 0
    progress_s: float = 0.0


@dataclass(slots=True)
class Progress:
    """A leader's state of one follower."""

    peer: Peer
    connected: bool = False
    next_index: int = 1
    """The first entry not sent yet."""
    probing: bool = True
    probed: bool = False
    """A probe is under way."""
    told_commit: int = 0
    unanswered: deque[tuple[int, int]] = field(default_factory=deque)
    """(last index, bytes) of the messages under way."""
    unanswered_bytes: int = 0
    transfer: Transfer | None = None

    def probe_from(self, index: int) -> None:
        """Begin anew at `index`."""
        self.next_index = index
        self.probing, self.probed = True, False
        self.told_commit = 0
        self.unanswered.clear()
        self.unanswered_bytes = 0

    def answered_up_to(self, index: int) -> None:
        """Note that the follower has entries up to `index`."""
        self.probing = False
        while self.unanswered and self.unanswered[0][0] <= index:
            self.unanswered_bytes -= self.unanswered.popleft()[1]
        if self.next_index <= index:
            self.next_index = index + 1


class Replication:
    """Sends entries and snapshots to all followers of one leader."""

    def __init__(
        self,
        peers: Iterable[Peer],
        consensus: Callable[[], Consensus],
        wal: WriteAheadLog,
        transport: RaftTransport,
        snapshots: SnapshotStore,
        options: RaftOptions,
        run_off_loop: RunOffLoop,
    ) -> None:
        self._consensus_of = consensus
        self._wal, self._transport, self._snapshots = wal, transport, snapshots
        self._options, self._run_off_loop = options, run_off_loop
        self.progress = {peer.node_id: Progress(peer) for peer in peers}
        self._loaded: tuple[int, bytes] | None = None
        self._loading = False
        self._batch: tuple[int, int, int, RaftMessage] = (0, 0, 0, RaftMessage())

    def begin_term_at(self, index: int) -> None:
        """Begin a term whose first entry will be at `index`; followers are probed for agreement before it."""
        for progress in self.progress.values():
            progress.transfer = None
            progress.probe_from(index)

    def link_up(self, peer_id: int) -> None:
        """Note a new stream: messages under way on the old one may be lost."""
        progress = self.progress[peer_id]
        progress.connected, progress.transfer = True, None
        consensus = self._consensus_of()
        if consensus.role == LEADER:
            matched = consensus.match_index[progress.peer]
            progress.probe_from(matched + 1 if matched else self._wal.last_index)

    def link_down(self, peer_id: int) -> None:
        """Note that the stream is gone."""
        progress = self.progress[peer_id]
        progress.connected, progress.transfer = False, None

    def send(self, now_s: float, *, heartbeat: bool) -> None:
        """Send every follower the entries it lacks; with `heartbeat` at least one message to each."""
        consensus = self._consensus_of()
        term, commit_index = consensus.term, consensus.commit_index
        self._batch = (0, 0, 0, self._batch[3])
        for progress in self.progress.values():
            if not progress.connected:
                continue
            if progress.transfer is not None or progress.next_index <= self._wal.first_index:
                self._send_snapshot(progress, term, commit_index, now_s, heartbeat)
            else:
                self._send_entries(progress, term, commit_index, heartbeat)
        if self._loaded is not None and all(progress.transfer is None for progress in self.progress.values()):
            self._loaded = None

    def _send_entries(self, progress: Progress, term: int, commit_index: int, heartbeat: bool) -> None:
        window = WINDOW_BATCHES * self._options.batch_bytes
        peer_id, last_index = progress.peer.node_id, self._wal.last_index
        said = False
        while (
            progress.next_index <= last_index
            and not (progress.probing and progress.probed)
            and progress.unanswered_bytes < window
        ):
            if self._batch[0] != progress.next_index:
                self._make_batch(progress.next_index, term, commit_index)
            _, end, size, message = self._batch
            self._transport.post(peer_id, message)
            progress.unanswered.append((end, size))
            progress.unanswered_bytes += size
            progress.next_index = end + 1
            progress.probed = said = True
        if not said and (heartbeat or progress.told_commit < commit_index):
            previous = progress.next_index - 1
            previous_term = self._wal.term_at(previous)
            assert previous_term is not None
            self._transport.post(peer_id, messages.append_entries(term, commit_index, previous, previous_term, []))
        progress.told_commit = commit_index

    def _make_batch(self, first_index: int, term: int, commit_index: int) -> None:
        entries = self._wal.entries(first_index, first_index + MAX_ENTRIES_A_MESSAGE)
        size = 0
        for count, entry in enumerate(entries):
            size += len(entry[0]) + ENTRY_OVERHEAD_BYTES
            if size >= self._options.batch_bytes:
                del entries[count + 1 :]
                break
        previous_term = self._wal.term_at(first_index - 1)
        assert previous_term is not None
        message = messages.append_entries(term, commit_index, first_index - 1, previous_term, entries)
        self._batch = (first_index, entries[-1][1], size, message)

    # Snapshots

    def _send_snapshot(self, progress: Progress, term: int, commit_index: int, now_s: float, heartbeat: bool) -> None:
        transfer = progress.transfer
        if transfer is not None and now_s - transfer.progress_s > TRANSFER_PATIENCE_S:
            transfer = progress.transfer = None
        if self._loaded is not None and self._loaded[0] < progress.next_index:
            self._loaded = None  # it has that one: the log went on, and was trimmed again
        if transfer is None and self._load():
            assert self._loaded is not None
            index, data = self._loaded
            transfer = progress.transfer = Transfer(index, data, progress_s=now_s)
            logger.info("sending the snapshot at %d, %d bytes, to node %d", index, len(data), progress.peer.node_id)
        peer_id, said = progress.peer.node_id, False
        chunk_bytes = self._options.snapshot_chunk_bytes
        while (
            transfer is not None
            and transfer.position < len(transfer.data)
            and transfer.sent - transfer.arrived < WINDOW_CHUNKS
        ):
            end = min(transfer.position + chunk_bytes, len(transfer.data))
            data = transfer.data[transfer.position : end]
            first, last = transfer.sent == 0, end == len(transfer.data)
            transfer.sent += 1
            transfer.position = end
            self._transport.post(
                peer_id, messages.snapshot_chunk(term, commit_index, transfer.sent, data, first=first, last=last)
            )
            said = True
        if heartbeat and not said:
            self._transport.post(peer_id, messages.snapshot_heartbeat(term, commit_index))

    def _load(self) -> bool:
        """Whether the newest snapshot is in memory; if not, a read of it is begun."""
        if self._loaded is None and not self._loading:
            index = self._snapshots.newest()
            if index is None:
                return False
            self._loading = True
            found: list[bytes] = []

            def done(error: BaseException | None) -> None:
                self._loading = False
                if error is None:
                    self._loaded = (index, found[0])
                else:  # a newer one has taken its place
                    logger.warning("cannot read the snapshot at %d, trying again: %s", index, error)

            self._run_off_loop(lambda: found.append(self._snapshots.read_bytes(index)), done)
        return self._loaded is not None

    # Answers

    def answered(self, peer_id: int, body: AppendAnswer, now_s: float) -> None:
        """Process a follower's answer of this term."""
        progress = self.progress[peer_id]
        transfer = progress.transfer
        if body.success:
            progress.answered_up_to(body.next_index - 1)
            if transfer is not None and body.next_index > transfer.index:
                progress.transfer = None
        elif body.HasField("chunk"):
            if transfer is None:
                return
            if body.reset:
                progress.transfer = None
            elif body.chunk > transfer.arrived:
                transfer.arrived, transfer.progress_s = body.chunk, now_s
        elif body.reset and transfer is None:
            progress.probe_from(max(1, min(body.next_index, self._wal.last_index + 1)))
        self._consensus_of().deliver(
            progress.peer,
            {
                "type": "next_node_idx",
                "next_node_idx": body.next_index,
                "reset": body.reset,
                "success": body.success,
            },
        )

    @property
    def behind(self) -> bool:
        """Whether there is something to send to a peer right now."""
        last_index = self._wal.last_index
        return any(
            progress.connected
            and (
                (progress.next_index <= last_index and not (progress.probing and progress.probed))
                or progress.transfer is not None
            )
            for progress in self.progress.values()
        )
