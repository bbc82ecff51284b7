"""Run as a script: which holes PySyncObj has as it is shipped, as JSON. It must not share a process with the shims.

Messages are queued by hand, and the clock stands still unless it is moved.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import defaultdict, deque
from typing import Any

import pysyncobj.syncobj as module
from pysyncobj import SyncObj, SyncObjConf, replicated
from pysyncobj.journal import FileJournal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

logging.disable(logging.CRITICAL)
now = 1000.0
module.monotonicTime = lambda: now


class QueueTransport(Transport):  # type: ignore[misc] # PySyncObj has no types
    def __init__(self, net: Net, me: str, others: list[str]) -> None:
        super().__init__(None, None, None)
        self.net, self.me = net, me
        self.peers = {other: Node(other) for other in others}
        self.sent: list[dict[str, Any]] = []

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        if (self.me, node.id) in self.net.cut:
            return False
        self.sent.append(message)
        self.net.queues[self.me, node.id].append(message)
        return True


class Plain(SyncObj):  # type: ignore[misc] # PySyncObj has no types
    def __init__(self, net: Net, me: str, others: list[str], **conf: Any) -> None:
        self.wire = QueueTransport(net, me, others)
        settings = SyncObjConf(autoTick=False, commandsWaitLeader=False, raftMinTimeout=0.4, **conf)
        super().__init__(Node(me), list(self.wire.peers.values()), settings, transport=self.wire)
        self.applied: list[str] = []
        for peer in self.wire.peers.values():
            self.wire._onNodeConnected(peer)

    @replicated  # type: ignore[untyped-decorator] # PySyncObj has no types
    def put(self, value: str) -> str:
        self.applied.append(value)
        if value == "boom":
            raise ValueError(value)
        return value

    @property
    def log(self) -> list[tuple[bytes, int, int]]:
        entries: list[tuple[bytes, int, int]] = self._SyncObj__raftLog[:]
        return entries

    def get(self, message: dict[str, Any], sender: str) -> None:
        self.wire._onMessageReceived(self.wire.peers[sender], message)


class Net:
    def __init__(self, **conf: Any) -> None:
        self.queues: dict[tuple[str, str], deque[dict[str, Any]]] = defaultdict(deque)
        self.cut: set[tuple[str, str]] = set()
        names = ["A", "B", "C"]
        self.nodes = {name: Plain(self, name, [other for other in names if other != name], **conf) for name in names}

    def pump(self) -> None:
        while any(self.queues.values()):
            for (sender, receiver), queue in list(self.queues.items()):
                if queue:
                    self.nodes[receiver].get(queue.popleft(), sender)

    def tick(self, *names: str) -> None:
        global now  # the clock of the script
        now += 0.11
        for name in names or self.nodes:
            node = self.nodes[name]
            if not node._isLeader():
                node._SyncObj__raftElectionDeadline = now + 100
            node._onTick(0)

    def run(self, *names: str) -> None:
        for _ in range(6):
            self.tick(*names)
            self.pump()

    def elect(self, name: str) -> Plain:
        node = self.nodes[name]
        node._SyncObj__raftElectionDeadline = 0
        node._onTick(0)
        self.pump()
        self.run()
        assert node._isLeader()
        return node

    def isolate(self, name: str) -> None:
        for other in self.nodes:
            self.cut |= {(name, other), (other, name)}


def ack_without_term() -> bool:
    net = Net()
    leader = net.elect("A")
    leader.put("x")
    leader._onTick(0)
    leader.get({"type": "next_node_idx", "next_node_idx": leader.log[-1][1] + 1, "reset": False, "success": True}, "B")
    net.queues.clear()
    leader._onTick(0)
    return "x" in leader.applied  # nobody but the leader has it


def chunk_commits_unverified() -> bool:
    net = Net()
    leader = net.elect("A")
    net.isolate("A")
    leader.put("never committed")
    leader._onTick(0)
    chunk = {"type": "append_entries", "term": leader.raftCurrentTerm + 1, "commit_index": 100}
    leader.get({**chunk, "serialized": (b"part", True, False)}, "B")
    leader._onTick(0)
    return "never committed" in leader.applied


def failed_snapshot_acknowledged() -> bool:
    with tempfile.TemporaryDirectory() as directory:
        node = Net(fullDumpFile=f"{directory}/dump", useFork=False).nodes["A"]
        chunk = {"type": "append_entries", "term": 5, "commit_index": 1}
        node.get({**chunk, "serialized": (b"torn", True, False)}, "B")
        node.get({**chunk, "serialized": (b"", False, True)}, "B")
        return any(sent["type"] == "next_node_idx" and sent["success"] for sent in node.wire.sent)


def resent_entries_truncate() -> bool:
    net = Net()
    leader = net.elect("A")
    for i in range(10):
        leader.put(str(i))
    net.run()
    follower = net.nodes["B"]
    before = follower.log[-1][1]
    entry = follower.log[2]
    message = {"type": "append_entries", "term": leader.raftCurrentTerm, "commit_index": 1, "entries": [entry]}
    follower.get({**message, "prevLogIdx": follower.log[1][1], "prevLogTerm": follower.log[1][2]}, "A")
    return follower.log[-1][1] < before


def pipelining_resends() -> bool:
    net = Net(appendEntriesUseBatch=False)
    leader = net.elect("A")
    leader.wire.sent.clear()
    for i in range(100):
        leader.put(str(i))
        leader._onTick(0)
        if i % 5 == 4:
            for link in (("A", "B"), ("B", "A")):
                if net.queues[link]:
                    net.nodes[link[1]].get(net.queues[link].popleft(), link[0])
    return sum(len(sent.get("entries", [])) for sent in leader.wire.sent) > 2 * 100


def commit_index_outlives_log() -> bool:
    with tempfile.TemporaryDirectory() as directory:
        journal = FileJournal(f"{directory}/journal")
        journal.add(b"\x01", 1, 0)
        journal.setRaftCommitIndex(30)
        journal.onOneSecondTimer()
        return bool(FileJournal(f"{directory}/journal").getRaftCommitIndex() == 30)


def journal_without_checksum() -> bool:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "journal")
        journal = FileJournal(path)
        for index in range(1, 50):
            journal.add(b"\x00command", index, 1)
        journal.flush()
        with open(path, "r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 0x01]))
        return bool(FileJournal(path)[:] != [(b"\x00command", index, 1) for index in range(1, 50)])


def failing_apply_retried() -> bool:
    net = Net()
    leader = net.elect("A")
    leader.put("boom")
    for _ in range(4):
        try:
            net.run("A")
        except ValueError:
            continue
    return leader.applied.count("boom") > 1


def concurrent_membership_changes() -> bool:
    net = Net(dynamicMembershipChange=True)
    leader = net.elect("A")
    net.isolate("A")
    for name in "DEFG":
        leader.addNodeToCluster(Node(name))
    leader._onTick(0)
    return len(leader.otherNodes) == 6


HOLES = {
    "H1": ack_without_term,
    "H2": chunk_commits_unverified,
    "H3": failed_snapshot_acknowledged,
    "H4": resent_entries_truncate,
    "H4b": pipelining_resends,
    "H6": commit_index_outlives_log,
    "H7": journal_without_checksum,
    "H8": failing_apply_retried,
    "H10": concurrent_membership_changes,
}

if __name__ == "__main__":
    print(json.dumps({name: hole() for name, hole in HOLES.items()}))
