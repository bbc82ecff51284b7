"""An idempotent producer's queue against a replicated log, message by message, with everything that can go wrong.

The queue, the numbers and the brokers' state of producers are the real ones. The rest is small: three replicas of one
partition, all of them in sync, of which any may be elected at any time and a former leader does not know at first;
streams that break, and whose messages arrive all the same, later; answers that are lost or come in another order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from broker.log.producer_state import ProducerStates
from raftlog._core.accumulator import LAST_EPOCH, Accumulator, AccumulatorConfig, Batch, Numbering, PartitionQueue
from raftlog.errors import (
    BrokerUnavailable,
    ChainBroken,
    DeliveryTimeout,
    DuplicateSequence,
    FencedLeaderEpoch,
    InvalidProducerEpoch,
    LeaderNotAvailable,
    MessageTooLarge,
    NotEnoughReplicas,
    NotLeader,
    OutOfOrderSequence,
    RaftlogError,
    RequestTimedOut,
    SequenceError,
)
from raftlog.format import BatchHeader, Codec, decode_batch, parse_header

_NODES = 3
_CONFIG = AccumulatorConfig(
    batch_size_bytes=1024,
    buffer_memory_bytes=1 << 24,
    max_request_size_bytes=1 << 20,
    linger_ms=5,
    delivery_timeout_ms=1e9,
)
_CERTAIN = (ChainBroken, FencedLeaderEpoch, LeaderNotAvailable, NotEnoughReplicas)


@dataclass
class Message:
    """One batch on its way; `correlation` finds the flight again."""

    correlation: int
    leader_epoch: int
    chain: int
    data: bytes


@dataclass
class Stream:
    """Messages in order to one node, and the node's state of the stream."""

    node: int
    to_come: deque[Message] = field(default_factory=deque)
    broken_chain: int = -1
    alive: bool = True


@dataclass
class Owed:
    """An answer: of an append once it is committed."""

    stream: Stream
    message: Message
    base_offset: int
    end_offset: int
    error: RaftlogError | None = None


class Node:
    """One replica and what it believes of itself."""

    def __init__(self) -> None:
        self.log: list[tuple[int, BatchHeader, list[bytes]]] = []
        """(leader epoch, header as stamped, values)"""
        self.producers = ProducerStates()
        self.leads = -1
        """The epoch in which it believes to lead; -1: it follows."""
        self.confirmed = False
        self.owed: list[Owed] = []
        self.denied: dict[int, int] = {}

    @property
    def end(self) -> int:
        return self.log[-1][1].next_offset if self.log else 0

    def follow(self, leader: Node) -> None:
        """Become a prefix of the leader's log, then all of it."""
        same = 0
        while same < min(len(self.log), len(leader.log)) and self.log[same] is leader.log[same]:
            same += 1
        self.log[same:] = leader.log[same:]
        self.producers = ProducerStates()
        for _, header, _ in self.log:
            self.producers.note(header, 0)


class Link:
    """Producer, network and brokers. `step` lets one thing happen; `heal` ends everything well."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.nodes = [Node() for _ in range(_NODES)]
        self.epoch = 0
        self.leader = 0
        self.nodes[0].leads = 0
        self.high_watermark = 0
        self.opened: set[int] = set()
        """The replicas that follow the leader in this epoch."""
        self.largest_rows = 100
        self.accumulator = Accumulator(_CONFIG)
        self.queue = PartitionQueue("t", 0, Numbering())
        self.producer_ids = 0
        self.view = (0, 0)
        self.stream = Stream(0)
        self.leftovers: list[Stream] = []
        self.flights: dict[int, tuple[Batch, Stream]] = {}
        self.answers: list[tuple[Owed, RaftlogError | None]] = []
        self.sent = 0
        self.correlation = 0
        self.batches: list[tuple[Batch, list[bytes]]] = []
        self.renumbered = 0

    # What can happen

    def step(self) -> None:
        """Let one thing happen."""
        happenings: list[tuple[int, Callable[[], None]]] = [
            (12, self.add),
            (16, self.send),
            (24, self.deliver),
            (10, self.deliver_leftover),
            (12, self.replicate),
            (16, self.answer),
            (2, self.time_out_at_broker),
            (3, self.break_stream),
            (2, self.elect),
            (2, self.depose),
            (5, self.learn),
            (2, self.expire),
            (1, self.change_limit),
        ]
        weights, what = zip(*happenings, strict=True)
        self.chance.choices(what, weights)[0]()

    def add(self) -> None:
        """The application sends a batch."""
        if len(self.queue.waiting) > 8:
            return
        values = [b"%d" % (self.sent + index) for index in range(self.chance.randint(1, 4))]
        self.sent += len(values)
        batch = self.accumulator.open(self.queue, 10, 0)
        for value in values:
            batch.append(value, None, (), 7, 10)
        self.accumulator.close(batch)
        batch.encode(Codec.NONE, None)
        self.batches.append((batch, values))

    def send(self) -> None:
        """The client's stream takes what it may."""
        if self.queue.lacks_id:
            self.producer_ids += 1
            self.queue.adopt(self.producer_ids, self.chance.choice((0, 0, LAST_EPOCH)))
        node, epoch = self.view
        room = self.chance.choice((1, 400, 10_000))
        for batch in self.queue.take(node, room, at_least_one=True, leader_epoch=epoch):
            assert batch.encoded is not None
            self.correlation += 1
            self.flights[self.correlation] = (batch, self.stream)
            self.stream.to_come.append(Message(self.correlation, epoch, self.queue.chain, batch.encoded))
        assert len(self.queue.in_flight) <= 5, (
            f"{len(self.queue.in_flight)} batches are in flight, but brokers remember only five"
        )

    def deliver(self) -> None:
        """The next message of the client's stream arrives."""
        self._deliver(self.stream)

    def deliver_leftover(self) -> None:
        """Messages on a stream that the client has given up still arrive."""
        if self.leftovers:
            self._deliver(self.chance.choice(self.leftovers))

    def replicate(self) -> None:
        """A follower fetches; once all do, the leader's term is confirmed, and everything is committed."""
        leader = self.nodes[self.leader]
        follower = self.chance.choice([number for number in range(_NODES) if number != self.leader])
        self._follow(follower)
        if len(self.opened) == _NODES - 1:
            leader.confirmed = True
            self.high_watermark = max(self.high_watermark, min(node.end for node in self.nodes))
            self._answer_committed(leader)

    def answer(self) -> None:
        """Any one answer reaches the client."""
        if self.answers:
            owed, error = self.answers.pop(self.chance.randrange(len(self.answers)))
            self._on_answer(owed, error)

    def time_out_at_broker(self) -> None:
        """The leader says that it takes too long: appended, and not committed."""
        node = self.chance.choice(self.nodes)
        if node.owed:
            self._answer(node.owed.pop(0), RequestTimedOut("too long"))

    def break_stream(self) -> None:
        """The client's stream breaks; it opens another one to the node that it takes for the leader."""
        self._leave_stream(BrokerUnavailable("broken"))

    def elect(self) -> None:
        """Another node is elected, which may lack uncommitted batches; the former leader lives on."""
        self.epoch += 1
        self.leader = self.chance.randrange(_NODES)
        node = self.nodes[self.leader]
        if node.leads >= 0:
            self._end_term(node)
        node.leads, node.confirmed = self.epoch, False
        self.opened = set()

    def depose(self) -> None:
        """A former leader hears that it leads no more."""
        for number, node in enumerate(self.nodes):
            if node.leads >= 0 and (number != self.leader or node.leads != self.epoch):
                self._end_term(node)

    def learn(self) -> None:
        """The client hears which node leads."""
        if self.view != (self.leader, self.epoch):
            moved = self.view[0] != self.leader
            self.view = (self.leader, self.epoch)
            if moved:
                self._leave_stream(NotLeader("somebody else leads"))

    def expire(self) -> None:
        """`delivery.timeout.ms` has passed for the oldest batch."""
        for batch in self.accumulator.incomplete:
            if self.chance.random() < 0.5:
                self.accumulator.complete(batch, error=DeliveryTimeout("late"))
                return

    def change_limit(self) -> None:
        """`max.message.bytes` is changed."""
        self.largest_rows = self.chance.choice((100, 100, 2))

    def heal(self) -> None:
        """End everything well: all is delivered, answered and committed."""
        self.largest_rows = 100
        for _ in range(2000):
            while self.leftovers and any(stream.to_come for stream in self.leftovers):
                self.deliver_leftover()
            self.depose()
            self.learn()
            self.send()
            while self.stream.to_come:
                self.deliver()
            for follower in range(_NODES):
                if follower != self.leader:
                    self._follow(follower)
            self.replicate()
            while self.answers:
                self.answer()
            if not self.queue.busy:
                return
        raise AssertionError(
            f"the producer does not come to rest: {len(self.queue.waiting)} batches wait and "
            f"{len(self.queue.in_flight)} are in flight"
        )

    # Brokers

    def _deliver(self, stream: Stream) -> None:
        if not stream.to_come:
            return
        message = stream.to_come.popleft()
        node = self.nodes[stream.node]
        try:
            if message.chain <= stream.broken_chain:
                raise ChainBroken("a batch before this one was refused")
            owed = self._append(node, stream, message)
        except RaftlogError as error:
            self._answer(Owed(stream, message, -1, -1), error)
        else:
            node.owed.append(owed)
            self._answer_committed(node)

    def _append(self, node: Node, stream: Stream, message: Message) -> Owed:
        if node.leads < 0:
            raise NotLeader("I follow")
        if message.leader_epoch < node.leads:
            raise FencedLeaderEpoch("an older epoch")
        if message.leader_epoch > node.leads:
            raise NotLeader("not yet")
        header = parse_header(message.data)
        if header.record_count > self.largest_rows:
            raise MessageTooLarge("too many")
        known = self._known(node, stream, message, header)
        if known is not None:
            return known
        if self.chance.random() < 0.03:
            raise NotEnoughReplicas("a passing reason")
        stamped = header._replace(base_offset=node.end, leader_epoch=node.leads)
        values = decode_batch(message.data).columns.column("value").to_pylist()
        node.log.append((node.leads, stamped, values))
        node.producers.note(stamped, 0)
        return Owed(stream, message, stamped.base_offset, stamped.next_offset)

    def _known(self, node: Node, stream: Stream, message: Message, header: BatchHeader) -> Owed | None:
        producer = header.producer_id
        try:
            duplicate = node.producers.check(header, 0)
        except DuplicateSequence as old:
            return Owed(stream, message, -1, node.end, old)
        except SequenceError:
            if not node.confirmed:
                raise LeaderNotAvailable("not confirmed yet") from None
            node.denied[producer] = header.producer_epoch
            raise
        if duplicate is not None:
            return Owed(stream, message, duplicate.base_offset, duplicate.last_offset + 1)
        if node.denied.get(producer, -1) >= header.producer_epoch:
            raise OutOfOrderSequence("denied before")
        return None

    def _follow(self, follower: int) -> None:
        leader, node = self.nodes[self.leader], self.nodes[follower]
        if node.leads >= 0:
            self._end_term(node)
        assert node.end < self.high_watermark or leader.end >= self.high_watermark, (
            f"the new leader lacks committed records: it ends at {leader.end}, and the high watermark is "
            f"{self.high_watermark}"
        )
        node.follow(leader)
        self.opened.add(follower)

    def _end_term(self, node: Node) -> None:
        node.leads, node.confirmed = -1, False
        node.denied.clear()
        for owed in node.owed:
            self._answer(owed, NotLeader("it was so before"))
        node.owed.clear()

    def _answer_committed(self, node: Node) -> None:
        if node is self.nodes[self.leader] and node.leads == self.epoch:
            for owed in [each for each in node.owed if each.end_offset <= self.high_watermark]:
                node.owed.remove(owed)
                self._answer(owed, owed.error)

    def _answer(self, owed: Owed, error: RaftlogError | None) -> None:
        if error is not None:
            owed.stream.broken_chain = max(owed.stream.broken_chain, owed.message.chain)
        self.answers.append((owed, error))

    # The client's shell

    def _leave_stream(self, error: RaftlogError) -> None:
        if self.stream.to_come:
            self.leftovers.append(self.stream)
        self.stream = Stream(self.view[0])
        for correlation, (batch, _) in list(self.flights.items()):
            del self.flights[correlation]
            self._send_again(batch, error)
        self.queue.recovered()

    def _send_again(self, batch: Batch, error: RaftlogError) -> None:
        batch.failures += 1
        batch.in_doubt |= not isinstance(error, _CERTAIN)
        self.queue.on_refused(batch, resend=True, counts=True)

    def _on_answer(self, owed: Owed, error: RaftlogError | None) -> None:
        flight = self.flights.pop(owed.message.correlation, None)
        if flight is None:
            return
        batch, queue = flight[0], self.queue
        match error:
            case None:
                queue.on_accepted(batch)
                self.accumulator.complete(batch, base_offset=owed.base_offset)
            case ChainBroken():
                queue.on_refused(batch, resend=True, counts=False)
            case DuplicateSequence():
                assert len(batch.order) > 1, (
                    "a whole batch was refused as a duplicate, but with at most five in flight brokers recognise "
                    "each of them"
                )
                queue.on_accepted(batch)
                self.accumulator.complete(batch)
            case InvalidProducerEpoch():
                for doubtful in queue.on_fenced(batch):
                    self.accumulator.complete(doubtful, error=error)
            case SequenceError():
                self.renumbered += queue.is_first_in_flight(batch)
                queue.on_denied(batch)
            case MessageTooLarge() if batch.count > 1 and not batch.done:
                for half in self.accumulator.split(batch):
                    half.encode(Codec.NONE, None)
            case MessageTooLarge():
                queue.on_refused(batch, resend=False, counts=False)
                self.accumulator.complete(batch, error=error)
            case _:
                self._send_again(batch, error)
        queue.recovered()

    # What came of it

    def log(self) -> list[bytes]:
        """Return the values in the leader's log."""
        return [value for _, _, values in self.nodes[self.leader].log for value in values]

    def check(self) -> None:
        """Everything acknowledged is where it was acknowledged, nothing is there twice, all in the order of sending.

        Raises:
            AssertionError: it is not so.
        """
        log = self.log()
        numbers = [int(value) for value in log]
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        assert not twice, f"records are in the log twice: {twice} of {numbers}"
        assert numbers == sorted(numbers), f"the records in the log are out of order: {numbers}"
        for batch, values in self.batches:
            row = 0
            for leaf in batch.leaves():
                part = values[row : row + leaf.count]
                row += leaf.count
                assert leaf.done, f"a batch with {values} was neither acknowledged nor refused"
                if leaf.error is None and leaf.base_offset >= 0:
                    found = log[leaf.base_offset : leaf.base_offset + leaf.count]
                    assert found == part, (
                        f"{part} was acknowledged at offset {leaf.base_offset}, but the log has {found} there"
                    )
                elif leaf.error is None:
                    assert all(value in log for value in part), f"{part} was acknowledged, but is not in the log"
