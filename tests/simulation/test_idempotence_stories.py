"""How a batch of an idempotent producer could come to be in a log twice, or not at all, each told as a story.

The ledger sees a second copy; random schedules come to these rarely, so that most planted bugs of idempotence have one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from raftlog.errors import LeaderNotAvailable, OutOfOrderSequence, RaftlogError
from raftlog.format import parse_batch
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand, PartitionRef
from tests.simulation.dataplane.clients import EPOCH_MS
from tests.simulation.dataplane.messages import Answer, Failed, PartitionKey, Produce, Produced
from tests.simulation.dataplane.scenario import FRAMES, REQUESTS, DataStory, Sent
from tests.simulation.dataplane.schedule import FIRST_CLIENT
from tests.simulation.parts import Parts
from tests.support.batches import batch_of

ASKED = "Asked"
PRODUCER_ID = 77


@pytest.fixture
def parts() -> Parts:
    """The real ones."""
    return Parts()


@dataclass
class Numbered:
    """An idempotent producer that does as it is told."""

    story: DataStory
    key: PartitionKey

    def send(
        self, value: bytes, sequence: int, *, epoch: int = 0, leader: int | None = None, padding_bytes: int = 10
    ) -> Sent:
        """Send a batch of one record to the leader, or to a node that takes itself for the leader."""
        part = self.story.partition(self.key)
        target = part.leader if leader is None else leader
        broker = self.story.simulation.data_broker(target)
        here = None if broker is None else broker.find(self.key)
        leader_epoch = part.leader_epoch if here is None else here.leader_epoch
        batch = batch_of(
            value + b"." * padding_bytes,
            timestamp_ms=EPOCH_MS,
            producer_id=PRODUCER_ID,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        sent = Sent(self.key)
        request = Produce(self.key, leader_epoch, batch, parse_batch(batch), True)
        self.story.producer.link(target).ask(request, sent.answers.append)
        return sent

    def ask(self, value: bytes, sequence: int, *, epoch: int = 0, padding_bytes: int = 10) -> Answer | None:
        """Send a batch, and return the answer."""
        sent = self.send(value, sequence, epoch=epoch, padding_bytes=padding_bytes)
        self.story.until(lambda: bool(sent.answers), "an answer")
        return sent.answers[0]

    def delivers(self, value: bytes, sequence: int, *, epoch: int = 0, padding_bytes: int = 10) -> int:
        """Send a batch until it is acknowledged; return its offset."""
        answers: list[Answer | None] = []

        def acknowledged() -> bool:
            answers.append(self.ask(value, sequence, epoch=epoch, padding_bytes=padding_bytes))
            if not isinstance(answers[-1], Produced):
                self.story.run(0.1)
            return isinstance(answers[-1], Produced)

        self.story.until(acknowledged, f"{value!r} is acknowledged")
        assert isinstance(answers[-1], Produced)
        return answers[-1].base_offset


def refusal(answer: Answer | None) -> RaftlogError | None:
    """Return why a request was refused; None if it was not refused, or not answered."""
    return answer.error if isinstance(answer, Failed) else None


def prefer(story: DataStory, key: PartitionKey) -> None:
    """Have the first replica lead again."""
    elect = ElectLeadersCommand(
        partitions=[PartitionRef(topic_id=key[0], partition=key[1])], type=ElectLeadersCommand.PREFERRED
    )
    story.simulation.propose(MetadataCommand(elect_leaders=elect))


def test_a_batch_that_is_sent_again_is_there_once(parts: Parts) -> None:
    """The answer is lost with the leader, and the next one knows the batch: KIP-98's reason to be."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        producer = Numbered(story, key)
        first = producer.delivers(b"a", 0)
        held = story.hold("Answered", source=2)
        producer.send(b"b", 1)
        story.until(lambda: story.simulation.ledger.of(key).end == 2, "it is committed")
        story.kill(2)
        story.drop(held)
        story.leads(key, 3)
        assert producer.delivers(b"b", 1) == 1
        assert producer.delivers(b"a", 0) == first
        assert producer.delivers(b"c", 2) == 2
        story.all_equal()
        assert story.simulation.ledger.of(key).end == 3


def test_a_duplicate_waits_until_the_first_copy_is_committed(parts: Parts) -> None:
    """Otherwise records would be acknowledged that a later leader may not have."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        producer = Numbered(story, key)
        producer.delivers(b"a", 0)
        story.hold(FRAMES, source=2)
        first = producer.send(b"b", 1)
        again = producer.send(b"b", 1)
        story.run(0.3)
        assert not first.answers
        assert not again.answers
        story.release()
        story.until(lambda: first.acknowledged and again.acknowledged, "both are answered")
        assert first.offset == again.offset == 1
        story.all_equal()


def test_a_new_leader_does_not_deny_what_another_replica_may_have(parts: Parts) -> None:
    """It would be numbered anew, and be there twice when the other replica leads (docs/adr/0012).

    The new leader's high watermark is at the start of its epoch from the first moment on: that confirms nothing.
    """
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        producer = Numbered(story, key)
        producer.delivers(b"a", 0)
        story.run(0.2)
        # Broker 4 gets b and c, broker 3 nothing.
        story.hold(FRAMES, source=2, target=3)
        producer.send(b"b", 1)
        producer.send(b"c", 2)
        story.until(lambda: story.log_end(4, key) == 3, "broker 4 has both")
        assert story.log_end(3, key) == 1
        # Broker 3 leads, and does not hear of broker 4.
        story.hold(REQUESTS, source=4, target=3)
        story.kill(2)
        story.leads(key, 3)
        leader = story.simulation.data_broker(3)
        assert leader is not None
        here = leader.find(key)
        assert here is not None
        here.check_confirmed()
        # The producer gives b up; c is the first in flight now.
        denied = refusal(producer.ask(b"c", 2))
        numbers = (0, 1) if isinstance(denied, OutOfOrderSequence) else (2, 0)
        producer.send(b"c", numbers[0], epoch=numbers[1])
        story.run(0.1)
        story.kill(3)
        story.hold_no_more()
        story.leads(key, 4)
        story.boot(2)
        producer.delivers(b"c", numbers[0], epoch=numbers[1])
        assert isinstance(denied, LeaderNotAvailable)
        story.all_equal()


def test_a_leader_that_knows_denies_what_is_lost(parts: Parts) -> None:
    """Once all replicas in sync have opened, a gap is final, and the producer may number its batches anew."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        producer = Numbered(story, key)
        producer.delivers(b"a", 0)
        story.cut_off(2)
        producer.send(b"b", 1, leader=2)
        story.until(lambda: story.log_end(2, key) == 2, "the old leader has it for itself")
        story.leads(key, 3)
        story.until(lambda: isinstance(refusal(producer.ask(b"c", 2)), OutOfOrderSequence), "it is denied")
        assert producer.delivers(b"c", 0, epoch=1) == 1
        story.all_equal()
        assert story.simulation.ledger.of(key).end == 2


def test_a_late_copy_of_a_missing_batch_lets_nothing_in_that_was_denied(parts: Parts) -> None:
    """A batch from a stalled connection arrives after the producer has numbered its later batches anew."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        producer = Numbered(story, key)
        producer.delivers(b"a", 0)
        story.hold(ASKED, source=FIRST_CLIENT)
        producer.send(b"b", 1)
        producer.send(b"c", 2)
        story.hold_no_more()
        # b is given up; c is sent again, and denied.
        assert isinstance(refusal(producer.ask(b"c", 2)), OutOfOrderSequence)
        story.release()
        story.run(0.1)
        producer.delivers(b"c", 0, epoch=1)
        story.all_equal()
        assert story.simulation.ledger.of(key).end == 2


def test_a_batch_that_was_truncated_is_no_duplicate(parts: Parts) -> None:
    """A follower's state of producers is cut together with its log."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        producer = Numbered(story, key)
        producer.delivers(b"a", 0)
        story.cut_off(2)
        producer.send(b"b", 1, leader=2)
        story.until(lambda: story.log_end(2, key) == 2, "the old leader has it for itself")
        story.leads(key, 3)
        story.produce(key, 3)
        story.heal()
        story.in_sync(key, 2, 3, 4)
        prefer(story, key)
        story.leads(key, 2)
        assert producer.delivers(b"b", 1) == 4
        story.all_equal()


def test_a_snapshot_of_what_was_truncated_counts_for_nothing(parts: Parts) -> None:
    """The log has grown over its offset with other records, and then the broker is restarted."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2, segment_bytes="5000")
        producer = Numbered(story, key)
        story.produce(key)
        story.cut_off(2)
        for number in range(3):
            producer.send(b"%d" % number, number, leader=2, padding_bytes=4_000)
        story.until(lambda: story.log_end(2, key) == 4, "the old leader has them for itself")
        story.run(0.2)
        story.leads(key, 3)
        story.produce(key, 4)
        story.heal()
        story.in_sync(key, 2, 3, 4)
        story.kill(2)
        story.in_sync(key, 3, 4)
        story.boot(2)
        story.in_sync(key, 2, 3, 4)
        prefer(story, key)
        story.leads(key, 2)
        assert [producer.delivers(b"%d" % number, number, padding_bytes=4_000) for number in range(3)] == [5, 6, 7]
        story.all_equal()


def test_a_restarted_broker_knows_its_producers(parts: Parts) -> None:
    """All brokers lose power at once; afterwards they know the producers of committed batches again."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        producer = Numbered(story, key)
        offsets = [producer.delivers(b"%d" % number, number) for number in range(3)]
        story.power_cut(2, 3, 4)
        story.run(0.5)
        story.boot(2, 3, 4)
        story.leads(key, 2, 3, 4)
        assert [producer.delivers(b"%d" % number, number) for number in range(3)] == offsets
        story.all_equal()
