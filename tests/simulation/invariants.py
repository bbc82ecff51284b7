"""Invariants, checked after every event. The right column names the method that checks.

one leader a term, one serving controller an epoch      after_cycle, serves
committed entries never change                          applied, restored
applied states are equal at equal indexes               applied, restored
what was acknowledged is never lost                     active (every new leader has it), and the end of a run
reads are as new as what was acknowledged before        read; the history of the clients is checked besides
a command of a past epoch changes nothing               applied
epochs and offsets only grow, on every process          image_moves
a fenced broker has no lease                            applied (when the fencing is committed)
two brokers never believe to lead the same partition    beliefs_changed
no broker acknowledges after another was elected        acknowledges
a batch of ISR changes decides each by itself           applied, batch_answered
a drained broker is elected only if no other can be     applied; at the end it leads only such partitions
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from raftlog.errors import FencedController
from raftlog.v1.raft_pb2 import VOTER
from raftlog.v1.records_pb2 import AlterPartitionsCommand, MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.image import NO_LEADER, MetadataImage, TopicImage
from raftmeta.raft.ports import Applied
from raftmeta.state import MetadataState
from tests.simulation.drains import misled, newly_elected
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.broker import PartitionKey, SimBroker
    from tests.simulation.schedule import Simulation
    from tests.simulation.voter import Voter

Life = tuple[int, int]
"""Node id and which of its processes."""


class Invariants:
    """What all processes together have shown so far. `truth` is the newest image that any replica has applied."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.counts: Counter[str] = Counter()
        self.truth = MetadataImage()
        self.acknowledged_index = 0
        self._truth_index = 0
        self._committed = 0
        self._votes: dict[tuple[int, int], int] = {}
        self._acknowledged: dict[int, int] = {}
        """By term, up to which entry."""
        self._log: dict[int, tuple[int, bytes]] = {}
        self._digests: dict[int, bytes] = {}
        self._leaders: dict[int, Life] = {}
        self._serving: dict[int, Life] = {}
        self._elected: dict[PartitionKey, int] = {}
        """No acknowledgement of an earlier epoch than this may leave.

        Elections of a partition's only replica do not count, because no other broker can have led in between. Records
        that wait for its lease are therefore acknowledged in its next epoch (`Partition.lead`).
        """
        self._topic_ids: set[bytes] = set()
        """Of all topics that there were."""

    # The log

    def applied(
        self, voter: Voter, index: int, term: int, command: bytes, state: MetadataState, *, changed: bool
    ) -> None:
        """A replica has applied an entry."""
        entry = (term, command)
        known = self._log.setdefault(index, entry)
        if known is entry:
            self.counts["entries"] += 1
            if changed:
                self._check_epoch(index, term, command)
                self._check_batch(index, command, state.image)
        elif known != entry:
            raise Violation(
                f"{voter.host} applies entry {index} with term {term}, but it was committed with term "
                f"{known[0]}{'' if known[1] == command else ' and other bytes'}"
            )
        self._check_state(voter, index, state)

    def restored(self, voter: Voter, index: int, term: int, state: MetadataState) -> None:
        """A replica has taken a snapshot in place of its state."""
        self.counts["snapshots restored"] += 1
        known = self._log.get(index)
        if known is None or known[0] != term:
            raise Violation(
                f"{voter.host} restores a snapshot up to entry {index} of term {term}, but what was committed "
                f"there is {known}"
            )
        self._check_state(voter, index, state)

    def _check_epoch(self, index: int, term: int, command: bytes) -> None:
        epoch = MetadataCommand.FromString(command).controller_epoch
        if epoch != term:
            raise Violation(
                f"entry {index} of term {term} changed the state, though it was proposed in the controller "
                f"epoch {epoch}"
            )

    def _check_batch(self, index: int, command: bytes, image: MetadataImage) -> None:
        """A batch of ISR changes has changed those partitions whose epochs it names, and no others."""
        parsed = MetadataCommand.FromString(command)
        if parsed.WhichOneof("command") != "alter_partitions" or index <= self._truth_index:
            return
        named = {
            (each.topic_id, each.partition, each.leader_epoch, each.partition_epoch)
            for each in parsed.alter_partitions.alterations
        }
        for topic_id, topic in image.topics.items():
            for after in topic.partitions:
                before = self.truth.partition(topic_id, after.partition)
                if before is None or before == after:
                    continue
                self.counts["isr changes in batches"] += 1
                if (topic_id, after.partition, before.leader_epoch, before.partition_epoch) not in named:
                    raise Violation(f"entry {index} changes {topic.name}-{after.partition}, which it does not name")
                if before.leader != parsed.alter_partitions.broker_id:
                    raise Violation(f"entry {index} changes {topic.name}-{after.partition}, led by {before.leader}")

    def batch_answered(self, command: AlterPartitionsCommand, outcome: CommandResult) -> None:
        """A leader has heard what became of its ISR changes, each with an answer of its own."""
        if len(outcome.alterations) != len(command.alterations):
            raise Violation(f"{len(command.alterations)} ISR changes got {len(outcome.alterations)} answers")
        granted: set[PartitionKey] = set()
        codes = set()
        for asked, answer in zip(command.alterations, outcome.alterations, strict=True):
            codes.add(answer.error.code)
            if answer.HasField("error"):
                continue
            key = (asked.topic_id, asked.partition)
            name = f"{asked.topic_id.hex()}-{asked.partition}"
            if key in granted:
                raise Violation("two ISR changes of one partition were granted in one command")
            granted.add(key)
            if not asked.partition_epoch <= answer.partition_epoch <= asked.partition_epoch + 1:
                raise Violation(f"{name}: asked at {asked.partition_epoch}, granted at {answer.partition_epoch}")
            known = self.truth.partition(*key)
            if known is not None and known.partition_epoch < answer.partition_epoch:
                raise Violation(f"{name} was granted at {answer.partition_epoch}, and is at {known.partition_epoch}")
        self.counts["batches of mixed outcomes"] += len(codes) > 1

    def _check_state(self, voter: Voter, index: int, state: MetadataState) -> None:
        digest = state.capture().digest
        if self._digests.setdefault(index, digest) != digest:
            raise Violation(
                f"{voter.host} has another state after entry {index} than a replica that applied it earlier"
            )
        if index > self._truth_index:
            self._truth_index = index
            if state.image is not self.truth:
                before, self.truth = self.truth, state.image
                self._follow_truth(before)

    def _follow_truth(self, before: MetadataImage) -> None:
        self._simulation.metadata_changed(before, self.truth)
        if self.truth.topics is not before.topics:
            for name, partition in newly_elected(before, self.truth):
                if wrong := misled(self.truth, partition):
                    raise Violation(f"{name}: {wrong}")
            for topic_id, topic in self.truth.topics.items():
                if before.topics.get(topic_id) is topic:
                    continue
                if topic_id not in before.topics:
                    self._check_new(topic)
                for partition in topic.partitions:
                    self.counts["revocations"] += partition.revoked_leader is not None
                    former = before.partition(topic_id, partition.partition)
                    is_alone = former is not None and former.replicas == partition.replicas == (partition.leader,)
                    if partition.leader != NO_LEADER and not is_alone:
                        self._elected[topic_id, partition.partition] = partition.leader_epoch
        if self.truth.brokers is not before.brokers:
            for broker_id, broker in self.truth.brokers.items():
                was = before.brokers.get(broker_id)
                if broker.fenced and was is not None and not was.fenced:
                    self._check_fenced(broker_id, broker.broker_epoch)

    def _check_new(self, topic: TopicImage) -> None:
        """A topic is there that was not: under an id that no other had, or logs of that one would pass for its own."""
        if topic.topic_id in self._topic_ids:
            raise Violation(f"topic {topic.name} is created with the id of an earlier topic")
        self._topic_ids.add(topic.topic_id)

    def _check_fenced(self, broker_id: int, broker_epoch: int) -> None:
        self.counts["fencings"] += 1
        broker = self._simulation.brokers.get(broker_id)
        if broker is not None and broker.broker_epoch == broker_epoch and broker.has_lease():
            left_ms = broker.lease.expires_at_ms - broker.host.local_s() * 1_000
            raise Violation(f"broker {broker_id} is fenced while its lease has {left_ms:.0f} ms to go")

    # The quorum

    def after_cycle(self, voter: Voter) -> None:
        """A node has taken a step."""
        if voter.node.role == "leader":
            self._check_matches(voter)
            if voter.node.commit_index > self._committed:
                self._check_majority(voter)
                self._committed = voter.node.commit_index
        # Before its term is durable a leader has shown it to no node, and may forget it.
        if voter.node.role == "leader" and voter.wal.synced_term >= voter.node.term:
            self._once(self._leaders, voter, voter.node.term, "leads")

    def votes(self, voter: Voter, term: int, candidate_id: int) -> None:
        """A vote leaves: a voter has one in a term, over all its lives."""
        given = self._votes.setdefault((voter.host.node_id, term), candidate_id)
        if given != candidate_id:
            raise Violation(
                f"{voter.host} votes for node {candidate_id} in term {term}, but it has voted for node {given} "
                "in that term"
            )

    def _check_matches(self, leader: Voter) -> None:
        """The records that a leader regards as a follower's are in the follower's log, as long as it follows."""
        for peer_id, status in leader.node.peers().items():
            follower = self._simulation.voter_on(peer_id)
            if follower is None or follower.node.term != leader.node.term or follower.node.voter_state != VOTER:
                continue
            index, wal = status.match_index, follower.wal
            if index < max(wal.first_index, leader.wal.first_index):
                continue
            held = wal.term_at(index)
            if held is None or held != leader.wal.term_at(index):
                raise Violation(
                    f"{leader.host} counts entry {index} ({_of_term(leader.wal.term_at(index))}) as stored on "
                    f"{follower.host}, whose log ends at entry {wal.last_index} and has at {index}: "
                    f"{_of_term(held)}"
                )

    def _check_majority(self, leader: Voter) -> None:
        """The entries that a leader regards as committed are on a majority of disks, stopped nodes included."""
        index = leader.node.commit_index
        term = leader.wal.term_at(index)
        without = 0
        for node_id in self._simulation.voters:
            voter = self._simulation.voter_on(node_id)
            if voter is None or voter.node.voter_state != VOTER or voter.wal.first_index > index:
                continue
            without += voter.wal.term_at(index) != term or voter.wal.synced_index < index
        if without * 2 >= len(self._simulation.voters):
            raise Violation(
                f"{leader.host} counts entry {index} as committed, but {without} of "
                f"{len(self._simulation.voters)} voters do not have it"
            )

    def active(self, voter: Voter, term: int) -> None:
        """A node leads, and has applied all entries that were committed before."""
        self.counts["leaders"] += 1
        # A leader may find out late that it was elected; what later ones acknowledged by then is none of its own.
        before = max((index for earlier, index in self._acknowledged.items() if earlier < term), default=0)
        if voter.node.last_applied < before:
            raise Violation(
                f"{voter.host} leads in term {term} with entries up to {voter.node.last_applied}, but entry "
                f"{before} was acknowledged earlier and is lost"
            )

    def serves(self, voter: Voter, epoch: int) -> None:
        """A node begins to serve as the active controller."""
        self._once(self._serving, voter, epoch, "serves as controller")

    def _once(self, who: dict[int, Life], voter: Voter, term: int, does: str) -> None:
        life = (voter.host.node_id, voter.host.boots)
        if who.setdefault(term, life) != life:
            raise Violation(f"{voter.host} {does} in term {term}, in which node {who[term][0]} did so before")

    def answered(self, voter: Voter, command: MetadataCommand, outcome: Applied) -> None:
        """A proposer has got the outcome of a command."""
        self.counts["acknowledged"] += 1
        fenced = isinstance(getattr(outcome.result, "outcome", None), FencedController)
        if command.controller_epoch != outcome.term and not fenced:
            raise Violation(
                f"{voter.host} acknowledges a command of controller epoch {command.controller_epoch} that was "
                f"committed in another term: {outcome}"
            )
        self.acknowledged_index = max(self.acknowledged_index, outcome.index)
        self._acknowledged[outcome.term] = max(self._acknowledged.get(outcome.term, 0), outcome.index)

    def read(self, voter: Voter, index: int, acknowledged_before: int) -> None:
        """A linearizable read is answered from this index on."""
        self.counts["reads"] += 1
        if min(index, voter.node.last_applied) < acknowledged_before:
            raise Violation(
                f"{voter.host} answers a read with the state at entry {index}, but entry {acknowledged_before} "
                "was acknowledged before the read began"
            )

    # Images and brokers

    def image_moves(self, who: Voter | SimBroker, before: MetadataImage | None, after: MetadataImage) -> None:
        """A process takes a newer image."""
        if before is None:
            return
        if after.offset < before.offset or after.controller_epoch < before.controller_epoch:
            raise Violation(
                f"the metadata of {who.host} goes back from offset {before.offset} (controller epoch "
                f"{before.controller_epoch}) to {after.offset} (controller epoch {after.controller_epoch})"
            )
        for broker_id, broker in after.brokers.items():
            was = before.brokers.get(broker_id)
            if was is not None and was.broker_epoch > broker.broker_epoch:
                raise Violation(
                    f"the broker epoch of broker {broker_id} goes back on {who.host}: from {was.broker_epoch} "
                    f"to {broker.broker_epoch}"
                )
        if after.topics is before.topics:
            return
        for topic_id, topic in after.topics.items():
            old = before.topics.get(topic_id)
            if old is None or old is topic:
                continue
            for was_partition, partition in zip(old.partitions, topic.partitions, strict=False):
                if (partition.leader_epoch, partition.partition_epoch) < (
                    was_partition.leader_epoch,
                    was_partition.partition_epoch,
                ) or partition.partition_epoch < was_partition.partition_epoch:
                    raise Violation(
                        f"the leader epoch or the partition epoch of {topic.name}-{partition.partition} goes "
                        f"back on {who.host}: from {was_partition} to {partition}"
                    )

    def beliefs_changed(self, broker: SimBroker) -> None:
        """A broker has a newer image or a longer lease."""
        mine = broker.led().keys()
        if not mine or not broker.has_lease():
            return
        for other in self._simulation.brokers.values():
            if other is broker or mine.isdisjoint(other.led()):
                continue
            if other.has_lease():
                both = mine & other.led().keys()
                raise Violation(
                    f"brokers {broker.broker_id} and {other.broker_id} both hold a lease and both believe "
                    f"that they lead {len(both)} partitions, in the leader epochs {broker.led()[min(both)]} "
                    f"and {other.led()[min(both)]}"
                )

    def acknowledges(self, broker: SimBroker, key: PartitionKey, leader_epoch: int) -> None:
        """A broker's acknowledgement leaves."""
        self.counts["records acknowledged"] += 1
        elected = self._elected.get(key, -1)
        if elected > leader_epoch:
            raise Violation(
                f"broker {broker.broker_id} acknowledges in leader epoch {leader_epoch} "
                f"after a leader of epoch {elected} was elected"
            )


def _of_term(term: int | None) -> str:
    return "none" if term is None else f"one of term {term}"
