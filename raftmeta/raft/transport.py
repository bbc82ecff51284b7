"""What a node sends: PySyncObj's `Transport`, with two queues in place of sockets.

Every message carries its sender's term. A message that promises something (an acknowledgement, a vote, a candidacy)
goes to the durable queue, which its owner empties only after the log was synced; so does any message that shows a term
which is not durable yet.
"""

from __future__ import annotations

from collections.abc import Callable

from pysyncobj.transport import Transport

from raftlog.v1.raft_pb2 import RaftMessage
from raftmeta.raft import messages
from raftmeta.raft.consensus import Peer
from raftmeta.raft.wal import WriteAheadLog

Outgoing = list[tuple[int, RaftMessage]]


class RaftTransport(Transport):  # type: ignore[misc] # PySyncObj has no types
    """The outgoing messages of one node, in order for each peer and queue."""

    def __init__(self, wal: WriteAheadLog) -> None:
        super().__init__(None, None, None)
        self._wal = wal
        self._immediate: Outgoing = []
        self._durable: Outgoing = []
        self.answer: Callable[[Peer, dict[str, object]], None] | None = None
        """Sends what PySyncObj answers to entries, in the terms of `receiving`."""
        self.transfer_term = 0
        """The term in which this node campaigns because the leader asked it to."""

    def send(self, node: Peer, message: dict[str, object]) -> bool:
        """Queue what PySyncObj sends by itself: answers and votes. Commands are never forwarded."""
        kind = message["type"]
        if kind == "next_node_idx":
            assert self.answer is not None
            self.answer(node, message)
        elif kind == "request_vote":
            term, index, last_term = message["term"], message["last_log_index"], message["last_log_term"]
            assert isinstance(term, int)
            assert isinstance(index, int)
            assert isinstance(last_term, int)
            self.post_durable(
                node.node_id,
                messages.vote_request(term, index, last_term, transfer=term == self.transfer_term),
            )
        elif kind == "response_vote":
            term = message["term"]
            assert isinstance(term, int)
            self.post_durable(node.node_id, messages.vote_granted(term))
        else:
            raise AssertionError(f"PySyncObj sent {kind!r}, which nothing here answers")
        return True

    def post(self, peer_id: int, message: RaftMessage) -> None:
        """Queue a message that promises nothing but its term."""
        queue = self._immediate if message.sender_term <= self._wal.synced_term else self._durable
        queue.append((peer_id, message))

    def post_durable(self, peer_id: int, message: RaftMessage) -> None:
        """Queue a message that may leave only after the log was synced."""
        self._durable.append((peer_id, message))

    def drop(self, peer_id: int) -> None:
        """Forget what was queued for a peer on a stream that is gone."""
        self._immediate = [item for item in self._immediate if item[0] != peer_id]
        self._durable = [item for item in self._durable if item[0] != peer_id]

    def take_immediate(self) -> Outgoing:
        """Return what may leave now, and forget it."""
        taken, self._immediate = self._immediate, []
        return taken

    def take_durable(self) -> Outgoing:
        """Return what may leave once everything that the log has collected by now is durable, and forget it."""
        taken, self._durable = self._durable, []
        return taken
