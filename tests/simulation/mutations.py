"""Planted bugs: each is a protection taken out of the real code, and some schedule has to notice.

A mutation rewrites a line or two of a function for as long as it is planted. It says which, so that a change of that
code which leaves nothing to rewrite is an error and not a mutation that silently does nothing. A mutation that no
schedule catches is a hole in the simulation, or code that protects from nothing.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.parts import Parts

STORIES = {
    "quorum": ("test_stories",),
    "brokers": ("test_replication_stories", "test_idempotence_stories"),
    "groups": ("test_user_bound_stories",),
    "transactions": ("test_user_bound_stories",),
    "cluster": ("test_member_stories",),
}
"""The modules with the stories of each kind."""
ENOUGH_SCHEDULES = 150
"""A planted bug has to be caught within so many."""


@dataclass(frozen=True)
class Rewrite:
    """Replace `old`, which stands there once, by `new` in the source of `target` (module:Class.method)."""

    target: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A planted bug. `parts` are switches of the simulation for what is not in a function of the product."""

    why: str
    rewrites: tuple[Rewrite, ...] = ()
    parts: dict[str, Any] = field(default_factory=dict)
    voters: int | None = None
    """With how many voters it shows, if that matters."""
    schedules: int = ENOUGH_SCHEDULES
    """How many to run before the story is told."""
    story: str | None = None
    """The story that is about it (`STORIES`), for what schedules come to rarely."""
    kind: str = "quorum"
    """Which schedules hunt it (`runner.KINDS`), or which world of a part (`worlds.WORLDS`)."""


def _in(target: str, old: str, new: str) -> Rewrite:
    return Rewrite(f"raftmeta.{target}", old, new)


MUTATIONS: dict[str, Mutation] = {
    # The log and the votes
    "term stamp off": Mutation(
        "acknowledgements of an earlier term count for a leader that was elected again",
        (
            _in(
                "raft.node:Receiver.handle",
                "peer, sender_term, term = self._peers[peer_id], message.sender_term, self._consensus.term",
                "peer, sender_term, term = self._peers[peer_id], message.sender_term, self._consensus.term\n"
                "    if kind == 'append_answer': sender_term = term",
            ),
        ),
        voters=5,
        schedules=8,
        story="test_a_stale_acknowledgement_counts_for_nothing_after_a_re_election",
    ),
    "append rewrite off": Mutation(
        "entries go to PySyncObj as they came: it cuts matching entries, and followers confirm what was never compared",
        (
            _in(
                "raft.node:Receiver._append_entries",
                "if entries and entries[0][1] <= last_index:",
                "if False:",
            ),
        ),
    ),
    "commit index past what was compared": Mutation(
        "a follower's own tail counts as committed because the leader's commit index covers it",
        (
            _in(
                "raft.node:Receiver._append_entries",
                "commit_index = min(body.commit_index, verified)",
                "commit_index = body.commit_index",
            ),
        ),
    ),
    "snapshot guard off": Mutation(
        "the first chunk of a snapshot carries the commit index over a tail that was never compared",
        (
            _in(
                "raft.node:Receiver._snapshot_chunk",
                "self._consensus.heard_leader(peer, body.term)",
                "self._consensus.deliver(peer, "
                "{'type': 'append_entries', 'term': body.term, 'commit_index': body.commit_index})",
            ),
        ),
    ),
    "fsync gate off": Mutation(
        "votes and acknowledgements leave before the log is synced", parts={"sends_before_sync": True}
    ),
    "own entries count before the sync": Mutation(
        "a leader counts entries as committed that are only in its memory, so that a power cut loses them",
        (_in("raft.consensus:Consensus._SyncObj__applyLogEntries", "self._wal.synced_index)", "self.commit_index)"),),
        voters=1,
    ),
    "vote not durable": Mutation(
        "a restarted voter votes again in the same term, so that two leaders may be elected in it",
        (
            _in(
                "raft.wal:WriteAheadLog.setCurrentTerm",
                "self._collected += VOTE_RECORD.pack(VOTE, term, voted_for)",
                "pass",
            ),
        ),
        voters=3,
    ),
    "wiped-voter guard off": Mutation(
        "a voter with an empty disk votes at once, though it has forgotten what it voted for and acknowledged",
        (
            _in(
                "raft.voters:JoinGuard.__init__",
                "self.state = VOTER if state == FRESH and not self._others else state",
                "self.state = VOTER",
            ),
        ),
    ),
    "snapshot not synced": Mutation(
        "a snapshot takes its name before its content is durable",
        (_in("raft.snapshots:SnapshotStore.write", "self._disk.sync(name + _TMP)", "pass"),),
    ),
    "checksum of the log off": Mutation(
        "a record that a power cut tore is read as if it were whole",
        (
            _in(
                "raft.wal:Segment._payload_at",
                "return payload if google_crc32c.extend(covered, payload) == crc else None",
                "return payload",
            ),
        ),
    ),
    # Reads
    "read without a round": Mutation(
        "a deposed leader answers reads, with a state that is out of date",
        (
            _in(
                "raft.node:ReadRounds.ready",
                "if sum(confirmed >= round_number for confirmed in self._confirmed.values()) < self._needed:",
                "if False:",
            ),
        ),
    ),
    # The state machine
    "epoch fence off": Mutation(
        "a command of a past controller epoch changes the state",
        (
            _in(
                "state:MetadataState.apply",
                "fenced = self._fence(parsed, term)",
                "parsed.controller_epoch = term; fenced = None",
            ),
        ),
    ),
    "drained brokers are elected like others": Mutation(
        "a broker that is to be stopped gets leaderships back while others in sync could have them",
        (
            _in(
                "elections:_elect",
                "candidates.sort(key=lambda replica: not _takes_leaderships(image, replica))",
                "pass",
            ),
        ),
    ),
    "a partition twice in a batch": Mutation(
        "two changes of an ISR that were made for the same partition epoch are granted in one command",
        (_in("decide:alter_partitions", "if key in decided:", "if False:"),),
    ),
    "deduplication off": Mutation(
        "a command that a client sends again is applied a second time",
        (_in("state:MetadataState.apply", "known = self._sessions.answered(index, parsed)", "known = None"),),
    ),
    # Sessions and leases
    "lease without a majority round": Mutation(
        "a deposed controller goes on granting leases",
        parts={"leases_without_majority": True},
        schedules=8,
        story="test_a_deposed_leader_does_not_hand_out_a_lease",
    ),
    "lease counted from the answer": Mutation(
        "an answer that was delayed on the network gives a lease as long as a fresh one",
        (_in("quorum.sessions:BrokerLease.granted", "sent_at_ms + lease_ms", "now_ms + lease_ms"),),
        schedules=8,
        story="test_an_answer_that_lay_in_a_socket_makes_no_longer_lease",
    ),
    "session shorter than the lease": Mutation(
        "a broker is fenced while its lease is valid",
        (
            _in(
                "quorum.sessions:BrokerSessions._deadline_ms",
                "self.session_timeout_ms",
                "self.session_timeout_ms / 2",
            ),
        ),
    ),
    "no session after an election": Mutation(
        "a new controller fences a broker to which the old one has just granted a lease",
        (
            _in(
                "quorum.sessions:BrokerSessions.activate",
                "self.observe(now_ms, image)",
                "self.observe(now_ms - self.session_timeout_ms, image)",
            ),
        ),
    ),
    "fenced at once when the stream breaks": Mutation(
        "a broker whose stream breaks is fenced before its last lease has ended",
        (_in("quorum.sessions:BrokerSessions._deadline_ms", "self._lease_over_ms if", "0.0 if"),),
    ),
    "lease while being fenced": Mutation(
        "a heartbeat that comes while the fencing is under way gets a lease",
        (
            _in("quorum.sessions:BrokerSessions.heartbeat", " or session.fencing:", ":"),
            _in("quorum.sessions:BrokerSessions.may_lease", "and not session.fencing", ""),
        ),
        schedules=8,
        story="test_a_broker_that_speaks_while_it_is_being_fenced_gets_no_lease",
    ),
    "lease for an old image": Mutation(
        "a broker that was fenced and came back leads with the metadata from before",
        (
            _in(
                "quorum.sessions:BrokerSessions.may_lease",
                "and applied_offset >= session.lease_from_offset",
                "",
            ),
        ),
    ),
    "handed over before it was let go": Mutation(
        "a revoked leader still serves when the next one is elected",
        (_in("quorum.controller_plan:let_go", "max(report.applied_offset, free_up_to[broker_id])", "image.offset"),),
    ),
    "acknowledged without a lease": Mutation(
        "a broker acknowledges by its metadata only, without a lease", parts={"checks_lease": False}
    ),
}


def all_mutations() -> dict[str, Mutation]:
    """Return the planted bugs of all kinds."""
    from tests.simulation.cluster.mutations import CLUSTER_MUTATIONS
    from tests.simulation.dataplane.group_mutations import GROUP_MUTATIONS
    from tests.simulation.dataplane.mutations import BROKER_MUTATIONS
    from tests.simulation.dataplane.transaction_mutations import TRANSACTION_MUTATIONS
    from tests.simulation.runner import KINDS

    everything = {**MUTATIONS, **BROKER_MUTATIONS, **GROUP_MUTATIONS, **TRANSACTION_MUTATIONS}
    everything |= CLUSTER_MUTATIONS
    return {name: mutation for name, mutation in everything.items() if mutation.kind in KINDS}


def world_mutations() -> dict[str, Mutation]:
    """Return the planted bugs of parts of a broker that have simulations of their own."""
    from tests.simulation.worlds import WORLDS

    return {
        plant.__name__.replace("_", " "): Mutation(inspect.getdoc(plant) or "", kind=kind)
        for kind, world in WORLDS.items()
        for plant in world.plants
    }


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[Parts]:
    """Plant a bug for a while, and give the parts to simulate with; None plants nothing."""
    if name is None:
        yield Parts()
        return
    mutation = all_mutations()[name]
    undo: list[tuple[Any, str, Any]] = []
    try:
        undo.extend(_apply(rewrite) for rewrite in mutation.rewrites)  # one by one: what is planted is undone
        yield Parts(**mutation.parts)
    finally:
        for owner, attribute, original in reversed(undo):
            setattr(owner, attribute, original)


def _apply(rewrite: Rewrite) -> tuple[Any, str, Any]:
    module_name, _, path = rewrite.target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *owners, attribute = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    original = inspect.getattr_static(owner, attribute)
    function: Any = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    found = source.count(rewrite.old)
    if found != 1:
        raise LookupError(f"{rewrite.target} has {found} times what the planted bug rewrites: {rewrite.old!r}")
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(rewrite.old, rewrite.new), f"<{rewrite.target}>", "exec", flags, dont_inherit=True)
    scope: dict[str, Any] = {}
    exec(code, function.__globals__, scope)
    setattr(owner, attribute, scope[attribute])
    return owner, attribute, original


@dataclass(frozen=True)
class Caught:
    """The first schedule that noticed a planted bug; `schedules` is 0 when it was not hunted, but has a story."""

    schedules: int
    seed: int
    violation: str
    virtual_s: float = 0.0
    """How long was simulated until then; a story's own time does not count."""
    test: str = ""
    """Which one shows it."""


def _tell(name: str, story: str) -> Caught | None:
    modules = [importlib.import_module(f"tests.simulation.{each}") for each in STORIES[all_mutations()[name].kind]]
    stories = next(module for module in modules if hasattr(module, story))
    module = stories.__name__.rpartition(".")[2]
    with planted(name) as parts:
        try:
            getattr(stories, story)(parts)
        except AssertionError:
            told = f"the story in {module}.py: {story.removeprefix('test_').replace('_', ' ')}"
            return Caught(0, 0, told, test=f"tests/simulation/{module}.py::{story}")
    return None


def hunt(name: str, at_most: int = ENOUGH_SCHEDULES, first: int | None = None) -> Caught | None:
    """Run schedules with a planted bug, then its story, until something notices; None if nothing does.

    The seeds from 0 on; `first` comes before them, for one that is known to notice.

    For a worker (`runner.new_pool`): it changes the product while it runs, and a seed means there what it always means.
    """
    from tests.simulation.runner import Job, run_job

    if name in world_mutations():
        from tests.simulation.worlds import hunt_in_world

        return hunt_in_world(name)
    mutation = all_mutations()[name]
    at_most = min(at_most, mutation.schedules)
    virtual_s = 0.0
    for number, seed in enumerate([*(() if first is None else (first,)), *range(at_most)]):
        outcome = run_job(Job(seed, mutation.kind, mutation.voters, mutation=name))
        virtual_s += outcome.virtual_s
        if outcome.violation is not None:
            test = "tests/simulation/test_mutations.py::test_a_planted_bug_is_caught"
            return Caught(number + 1, seed, outcome.violation, virtual_s, test)
    told = None if mutation.story is None else _tell(name, mutation.story)
    return None if told is None else replace(told, schedules=at_most, virtual_s=virtual_s)
