"""Messages between controllers, by a peer that says what it likes: dropped, answered, or the node stops and says why.

A voter is trusted with what it claims to have committed. It is not trusted to be well: whatever it sends, what this
node had applied stays applied, and it can be started again on what it has written.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Final

from google.protobuf.message import DecodeError

from raftlog.errors import InternalError, RaftlogError
from raftlog.v1.raft_pb2 import VOTER, RaftFrame, RaftHello, RaftMessage
from raftmeta.quorum.hello import refusal
from raftmeta.quorum.links import flaw_in
from raftmeta.raft import messages
from raftmeta.raft.consensus import RaftOptions
from raftmeta.raft.messages import MAX_TERM
from raftmeta.raft.node import RaftNode
from raftmeta.raft.snapshots import Snapshot, encode_snapshot
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.messages import Known, message_of
from tests.fuzz.oracle import refusals, require
from tests.support.metadata_disk import MemoryDisk
from tests.support.raft_cluster import CLUSTER_ID, ListState, RaftCluster, raft_cluster

_OPTIONS: Final = RaftOptions(commit_notice_s=0, snapshot_after_entries=6, log_tail_entries=2)


@cache
def _disk() -> tuple[MemoryDisk, int, int]:
    """Return the disk of a follower with some entries, the term, and how many entries are committed."""
    with raft_cluster(3, _OPTIONS) as cluster:
        cluster.elect(1)
        cluster.propose(1, *(b"command %d" % number for number in range(5)))
        cluster.run(0.3)
        node = cluster[2]
        return cluster.hosts[2].disk.after_kill(), node.term, node.commit_index


def prepare() -> None:
    """Make the disk that followers start on."""
    logging.disable(logging.CRITICAL)
    _disk()
    logging.disable(logging.NOTSET)


def target(data: bytes) -> None:
    """A follower with some entries, or a leader; it hears hostile messages between its turns."""
    choices = Choices(data)
    logging.disable(logging.CRITICAL)
    try:
        with raft_cluster(3, _OPTIONS, start=False) as cluster:
            if choices.byte() % 16 == 15:
                cluster.start()
                cluster.elect(1)
                cluster.propose(1, *(b"command %d" % number for number in range(choices.below(10))))
                cluster.run(0.3)
                _run(cluster, 1, choices)
            else:
                disk, term, committed = _disk()
                host = cluster.hosts[2]
                host.disk = disk.after_kill()
                host.start()
                for peer_id in (1, 3):
                    hello = RaftHello(
                        cluster_id=CLUSTER_ID, node_id=peer_id, peer_id=2, voters=[1, 2, 3], voter_state=VOTER,
                        current_term=term,
                    )  # fmt: skip
                    cluster[2].link_up(peer_id, hello)
                    cluster[2].hello_from(peer_id, hello)
                message = messages.append_entries(term, committed, committed, term, [])
                cluster[2].receive(1, message)
                host.step()
                require(
                    len(host.state.applied) == 5,
                    "the follower must have applied the five entries before the fuzzed messages come, but has "
                    f"{len(host.state.applied)}",
                )
                _run(cluster, 2, choices)
    finally:
        logging.disable(logging.NOTSET)


def _run(cluster: RaftCluster, victim: int, choices: Choices) -> None:
    host, node = cluster.hosts[victim], cluster[victim]
    before = list(host.state.applied)
    taken: list[int] = []
    adopt = host.state.adopt

    def noted(decoded: object) -> None:
        taken.append(1)
        adopt(decoded)

    host.state.adopt = noted  # type: ignore[method-assign] # to see a leader's snapshot come in
    peers = [each for each in cluster.ids if each != victim]
    try:
        for _ in range(1 + choices.below(5)):
            known = _known(node)
            frame = _frame(choices, known)
            if not flaw_in(frame):
                for message in frame.messages:
                    node.receive(choices.pick(peers), message)
            host.step()
            cluster.now += choices.pick((0.0, 0.2, 2.0))
        host.step()
    except InternalError as error:
        require(
            error.__cause__ is None,
            f"the refusal came from an exception that the code does not expect: {error.__cause__!r}",
        )
    except RaftlogError as error:
        require(len(str(error)) > 5, f"a refusal gives no reason: {error}")
    require(node.term <= MAX_TERM, f"the node took term {node.term}, which a controller epoch cannot hold")
    if not taken:  # else it has taken another's state for its own, as it must
        require(host.state.applied[: len(before)] == before, "entries that were applied are applied no longer")
    _restart(cluster, victim)


def _known(node: RaftNode) -> Known:
    term, last = node.term, node.last_index
    return Known(
        fields={
            "term": (term, term + 1, MAX_TERM, 0),
            "sender_term": (term, term + 1, MAX_TERM),
            "previous_index": (last, last, last - 1, 1, 0),
            "previous_term": (term, term - 1),
            "index": (last + 1, last, last + 2, 1, 0),
            "commit_index": (last + 1, last, node.commit_index, 1 << 40),
            "data": (b"\0ok", b"\1", b"", b"\2", b"x"),
            "sequence": (1, 2, 0),
        },
        numbers=(0, 1, term, last, node.commit_index),
    )


def _frame(choices: Choices, known: Known) -> RaftFrame:
    frame = RaftFrame() if choices.one_in(2) else message_of(RaftFrame, choices, known)
    if choices.one_in(2):
        frame.messages.append(_entries(choices, known))
    elif choices.one_in(3):
        node_end = known.fields["previous_index"][0]
        term = choices.pick(known.fields["term"])
        index = choices.pick((choices.below(20) + 2, node_end + 3, (1 << 64) - 1, 1 << 63))
        of_term = choices.pick((term, term + 1, 1, MAX_TERM, MAX_TERM + 1, (1 << 64) - 1))
        entry = choices.pick((b"\1", b"\0ok", b"", b"\2"))
        state = ListState().encode(())  # with a digest that is right it is believed, as its sender's own is
        data = encode_snapshot(Snapshot(index, of_term, choices.below(9), entry, state))
        data = mutate(data, choices) if choices.one_in(4) else data
        frame.messages.append(messages.snapshot_chunk(term, 1, 1, data, first=True, last=True))
    data = frame.SerializeToString()
    try:
        return RaftFrame.FromString(mutate(data, choices) if choices.one_in(6) else data)
    except DecodeError:  # an unparsable message ends the stream before it is looked at
        return RaftFrame(messages=[message_of(RaftMessage, choices, known)])


def _entries(choices: Choices, known: Known) -> RaftMessage:
    """Return entries that nearly fit the log."""
    term, previous = known.fields["term"][0], known.fields["previous_index"][0]
    index, entries = previous + 1, []
    for _ in range(choices.below(4)):
        entries.append((choices.pick(known.fields["data"]), max(0, index + choices.pick((0, 0, 0, 1, -1, 5))), term))
        index += 1
    message = messages.append_entries(term, choices.pick(known.fields["commit_index"]), previous, term, entries)
    if choices.one_in(3):
        setattr(message.append_entries, choices.pick(("previous_index", "previous_term", "term")), choices.below(12))
    return message


def _restart(cluster: RaftCluster, victim: int) -> None:
    """Kill the node and start it on what it has: nothing that it wrote may be damage."""
    cluster.kill(victim, power=False)
    host = cluster.hosts[victim]
    host.start()
    host.step()


def hello_target(data: bytes) -> None:
    """Hellos: a peer that is not one of the voters, or of another cluster, is refused with a reason."""
    choices = Choices(data)
    mine = RaftHello(cluster_id=CLUSTER_ID, node_id=1, peer_id=choices.below(3), voters=[1, 2, 3], current_term=4)
    known = Known(
        fields={"cluster_id": (CLUSTER_ID, "", "other"), "node_id": (2, 3, 1, 9), "peer_id": (1, 0, 2)},
        texts=(CLUSTER_ID, ""),
        numbers=(1, 2, 3),
    )
    theirs = message_of(RaftHello, choices, known)
    if choices.one_in(2):
        theirs.voters[:] = choices.pick(([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 3]))
    with refusals():
        refused = refusal(mine, theirs)
        if refused is not None:
            require(
                10 < len(str(refused)) < 2_000,
                f"the refusal has {len(str(refused))} characters, but must have 11 to 1,999: {refused}",
            )
            raise refused
        require(theirs.node_id in (2, 3), f"a hello was accepted from node {theirs.node_id}, which is no other voter")
        require(theirs.cluster_id in ("", CLUSTER_ID), f"a hello was accepted from the cluster {theirs.cluster_id!r}")
        require(sorted(theirs.voters) == [1, 2, 3], f"a hello was accepted with the voters {list(theirs.voters)}")
        require(
            theirs.current_term <= MAX_TERM,
            f"a hello was accepted with term {theirs.current_term}, above which there is none",
        )
