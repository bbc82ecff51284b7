"""Invariants of records, in all partitions and on all brokers, checked after every step of a broker.

one value an offset             extend, verify: what was below a high watermark once never changes anywhere
logs equal below it             verify: byte by byte, each replica up to its own high watermark
StrongIsr                       check_isr: each member of the committed ISR durably holds everything that was committed
LeaderInIsr                     metadata_changed
committed by enough             extend: as many replicas as min.insync.replicas asks for hold it durably
high watermark never goes back  look: of a leader in its term, of a follower in its life
nothing above it was served     serves
no acknowledged record lost     acknowledges: it is committed (acks=all), or durable on a leader with a lease (acks=1);
                                check_all: with acks=1 it is lost only if its leader has lost the leadership
one leader an epoch             acknowledges
no record twice, none reordered extend (every value is produced once, idempotent producers send it many times); what
                                those have sent is committed in its order; the others look at the order themselves
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.log.partition_log import PartitionLog
from raftlog.format import HEADER_BYTES, STAMP_BYTES, Buffer, iter_headers, parse_header
from raftmeta.elections import is_unclean
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage
from tests.simulation.dataplane.committed import Batch, Committed
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.parts import Violation
from tests.support.memory_storage import MemoryStorage

if TYPE_CHECKING:
    from broker.partition.partition import Partition
    from tests.simulation.dataplane.broker import DataBroker
    from tests.simulation.dataplane.schedule import DataSimulation


@dataclass
class _View:
    """The state of one broker's log of a partition at the last look."""

    log: PartitionLog
    life: tuple[int, int]
    state: tuple[object, ...] = ()
    verified: int = 0
    """Below this it is known to be what was committed."""
    truncations: int = 0
    held: int = 0
    """Exclusive: what was durable; also after the process is gone."""
    high_watermark: int = 0
    leads_in: int = -1
    """The epoch in which it leads."""
    end: int = 0
    cursor: tuple[int, int, int] = (-1, 0, 0)
    """(segment, position, offset) at which the last look at its files ended."""


class Ledger:
    """The committed records, and each replica's part of them."""

    def __init__(self, simulation: DataSimulation) -> None:
        self._simulation = simulation
        self.counts: Counter[str] = Counter()
        self.committed: dict[PartitionKey, Committed] = {}
        self._views: dict[PartitionKey, dict[int, _View]] = {}
        self._acknowledged_by: dict[tuple[PartitionKey, int], tuple[int, int]] = {}
        self._due: list[tuple[DataBroker, PartitionKey, int, int, Buffer]] = []
        """Acknowledgements of acks=all that leave in this event."""
        self._single: list[tuple[PartitionKey, int, int, bytes]] = []
        """Acknowledgements to acks=1: partition, leader epoch, offset, body."""
        self._served: list[tuple[DataBroker, PartitionKey, int, bytes]] = []
        self.log_starts: dict[PartitionKey, int] = {}
        """The highest log start of each partition, on any broker, so far."""
        self.lost_by_unclean_election = 0
        self._serials: dict[bytes, int] = {}
        """Of the batches of idempotent producers, by their bodies: the order in which they were sent first."""
        self._last_serials: dict[tuple[PartitionKey, int], int] = {}
        """By producer id: of the last batch committed."""

    def of(self, key: PartitionKey) -> Committed:
        """Return the committed records of a partition."""
        return self.committed.setdefault(key, Committed())

    def log_of(self, key: PartitionKey, node_id: int) -> PartitionLog | None:
        """Return the log that a broker has of a partition, or had when it was seen last."""
        view = self._views.get(key, {}).get(node_id)
        return None if view is None else view.log

    def lacks_committed(self, key: PartitionKey, node_id: int) -> bool:
        """Return whether a broker's log, at the last look, ends before the end of the committed records."""
        view = self._views.get(key, {}).get(node_id)
        return view is not None and view.end < self.of(key).end

    # After each event of a broker

    def look(self, broker: DataBroker) -> None:
        """A broker has done something."""
        for partition in broker.partitions():
            log = partition.log
            key = (log.topic_id, log.partition)
            views = self._views.setdefault(key, {})
            view = views.get(broker.broker_id)
            leads_in = partition.leader_epoch if partition.leads else -1
            state = (
                log.log_end_offset,
                log.flushed_end_offset,
                log.high_watermark,
                log.log_start_offset,
                log._truncations,
                leads_in,
            )
            if view is None or view.log is not log:
                view = views[broker.broker_id] = _View(log, broker.life, truncations=log._truncations)
                view.high_watermark = log.high_watermark
                self.counts["logs opened"] += 1
            elif view.state == state:
                continue
            view.state = state
            self._look_at(broker, partition, key, view, leads_in)
        self._check_answers()

    def _look_at(self, broker: DataBroker, partition: Partition, key: PartitionKey, view: _View, leads_in: int) -> None:
        log, committed = view.log, self.of(key)
        self.log_starts[key] = max(self.log_starts.get(key, 0), log.log_start_offset)
        shrank = log._truncations != view.truncations
        if shrank:
            self.counts["truncations"] += 1
            view.truncations = log._truncations
            view.verified = min(view.verified, log.log_end_offset)
            view.cursor = (-1, 0, 0)
        view.verified = max(view.verified, log.log_start_offset)
        # A log without any record that its leader still has is dropped, and what was deleted may be forgotten.
        if log.high_watermark < view.high_watermark and view.high_watermark > self.log_starts[key]:
            raise Violation(
                f"the high watermark of {partition.topic_partition} on broker {broker.broker_id} goes back from "
                f"{view.high_watermark} to {log.high_watermark}"
            )
        view.high_watermark, view.end = log.high_watermark, log.log_end_offset
        view.held = partition.durable_end_offset
        view.leads_in = leads_in
        if log.high_watermark > committed.end:
            if leads_in < 0:
                raise Violation(
                    f"broker {broker.broker_id} follows {partition.topic_partition} with the high watermark "
                    f"{log.high_watermark}, but leaders have committed only up to {committed.end}"
                )
            self._extend(broker, key, view, log.high_watermark)
            self.check_isr(key)
        else:
            self._verify(broker.broker_id, key, view, log.high_watermark)
            if shrank:
                self.check_isr(key)

    def _extend(self, broker: DataBroker, key: PartitionKey, view: _View, end: int) -> None:
        """A leader commits."""
        committed = self.of(key)
        self._verify(broker.broker_id, key, view, committed.end)
        part = self._simulation.invariants.truth.partition(*key)
        wanted = 0
        if part is not None:
            wanted = min(self._simulation.min_insync_replicas(key[0]), len(part.replicas) - len(part.adding_replicas))
        holders = sorted(node for node, each in self._views[key].items() if each.held >= end)
        if len(holders) < wanted:
            raise Violation(
                f"broker {broker.broker_id} commits {self._name(key)} up to {end}, which only the brokers "
                f"{holders} hold durably; min.insync.replicas={wanted}"
            )
        for batch in self._batches(view, committed.end, end):
            body = batch.data[HEADER_BYTES:]
            if body in committed.bodies and not self.may_repeat(key, batch):
                raise Violation(f"{self._name(key)} has the batch at offset {batch.base_offset} a second time")
            committed.bodies.add(body)
            committed.extend(batch)
            self._check_serial(key, batch)
            self.counts["batches committed"] += 1
        if committed.end != end:
            raise Violation(f"the high watermark {end} of {self._name(key)} is in the middle of a batch")
        view.verified = end

    def may_repeat(self, key: PartitionKey, batch: Batch) -> bool:
        """Whether a partition may have the same batch twice."""
        return self._simulation.is_internal(key)

    def new_serial(self, batch: Buffer) -> int:
        """Take note of a batch that an idempotent producer is about to send."""
        serial = len(self._serials)
        self._serials[bytes(batch[HEADER_BYTES:])] = serial
        return serial

    def _check_serial(self, key: PartitionKey, batch: Batch) -> None:
        serial = self._serials.get(batch.data[HEADER_BYTES:])
        if serial is None:
            return
        producer = (key, parse_header(batch.data).producer_id)
        if serial < self._last_serials.get(producer, -1):
            raise Violation(
                f"{self._name(key)} has batch {serial} of producer {producer[1]} at offset {batch.base_offset}, "
                f"behind its later batch {self._last_serials[producer]}"
            )
        self._last_serials[producer] = serial
        self.counts["idempotent batches committed"] += 1

    def _batches(self, view: _View, start: int, end: int) -> Iterator[Batch]:
        """Yield what a log has from `start` to `end`, looking at its files: for the disk that is no operation.

        Goes on where the last look has ended, if that was `start`.
        """
        log = view.log
        storage = log.log_dir.storage
        assert isinstance(storage, MemoryStorage)
        offset = start
        while offset < end:
            bases, segments = log._segments
            segment = segments[bisect_right(bases, offset) - 1]
            data = storage.content(segment.log_path)
            cursor_base, position, cursor_offset = view.cursor
            if cursor_base != segment.base_offset or cursor_offset != offset or position > segment.size:
                position = 0
            while position < segment.size and offset < end:
                header = parse_header(data, position)
                if header.next_offset > offset:
                    offset = header.next_offset
                    yield Batch(
                        header.base_offset,
                        offset,
                        header.leader_epoch,
                        bytes(memoryview(data)[position : position + header.size]),
                    )
                position += header.size
            view.cursor = (segment.base_offset, position, offset)
            if offset < end and offset < segment.next_offset:
                raise Violation(f"{log!r} has no records from offset {offset} on, but must have them up to {end}")

    def _verify(self, node_id: int, key: PartitionKey, view: _View, end: int) -> None:
        """Compare a replica's log, up to `end`, with the committed records."""
        if view.verified >= end:
            return
        committed = self.of(key)
        for batch in self._batches(view, view.verified, end):
            expected = committed.at(batch.base_offset)
            if expected != batch:
                raise Violation(
                    f"broker {node_id} has another batch in {self._name(key)} at offset {batch.base_offset} "
                    f"than was committed: found {batch}, committed {expected}"
                )
            view.verified = batch.next_offset

    def _name(self, key: PartitionKey) -> str:
        topic = self._simulation.invariants.truth.topics.get(key[0])
        return f"{topic.name if topic is not None else key[0].hex()}-{key[1]}"

    # The ISR

    def check_isr(self, key: PartitionKey) -> None:
        """StrongIsr (Kip320.tla): every member of the committed ISR has everything that any leader has committed."""
        part = self._simulation.invariants.truth.partition(*key)
        if part is None:
            return
        committed = self.of(key)
        for member in part.isr:
            view = self._views.get(key, {}).get(member)
            broker = self._simulation.data_broker(member)
            if view is None or broker is None or view.life != broker.life or view.log.closed:
                continue
            if broker.find(key) is None or view.log.log_dir.offline_reason is not None:
                continue
            flushes = view.log.config.flush_messages <= 1
            if not flushes and self._is_about_to_leave(broker):
                continue
            if view.log.log_end_offset < committed.end:
                raise Violation(
                    f"broker {member} is in the ISR {part.isr} of {self._name(key)} (partition epoch "
                    f"{part.partition_epoch}), but its log ends at {view.log.log_end_offset}, and "
                    f"{committed.end} is committed"
                )
            self._verify(member, key, view, committed.end)
            if flushes and not (view.log.flushed_end_offset >= committed.end and self._is_durable(view, committed)):
                raise Violation(
                    f"broker {member} is in the ISR {part.isr} of {self._name(key)}, but not all committed "
                    f"records are durable there: it reports {view.log.flushed_end_offset}, and {committed.end} "
                    "is committed"
                )

    def _is_about_to_leave(self, broker: DataBroker) -> bool:
        """Whether it has lost its page cache, and is in ISRs only until its registration has been dealt with."""
        known = self._simulation.invariants.truth.brokers.get(broker.broker_id)
        return known is None or known.broker_epoch != broker.broker_epoch or known.fenced

    @staticmethod
    def _is_durable(view: _View, committed: Committed) -> bool:
        """Whether the last committed batch would survive a power cut."""
        if not committed.batches or committed.end <= view.log.log_start_offset:
            return True
        last = committed.batches[-1]
        storage = view.log.log_dir.storage
        assert isinstance(storage, MemoryStorage)
        bases, segments = view.log._segments
        segment = segments[bisect_right(bases, last.base_offset) - 1]
        directory, _, name = segment.log_path.rpartition("/")
        file: Any = storage._find(segment.log_path)
        names: Any = storage._find(directory)
        return name in names.durable and file.durable.rfind(last.data) >= 0

    def metadata_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """The quorum has decided something."""
        if after.topics is before.topics:
            return
        for topic_id, topic in after.topics.items():
            old = before.topics.get(topic_id)
            if old is topic:
                continue
            for part in topic.partitions:
                was = before.partition(topic_id, part.partition)
                if was == part:
                    continue
                key = (topic_id, part.partition)
                if part.leader != NO_LEADER and part.leader not in part.isr:
                    raise Violation(
                        f"broker {part.leader} leads {topic.name}-{part.partition}, but is not in its ISR: {part}"
                    )
                if was is not None:
                    self._count(was, part)
                    if is_unclean(before, was, part.leader):
                        self._unclean_election(key, part)
                self.check_isr(key)

    def _count(self, was: PartitionImage, part: PartitionImage) -> None:
        self.counts["elections"] += part.leader not in (was.leader, NO_LEADER)
        self.counts["isr shrinks"] += len(part.isr) < len(was.isr)
        self.counts["isr grows"] += len(part.isr) > len(was.isr)
        self.counts["moves completed"] += bool(was.adding_replicas) and not part.adding_replicas
        self.counts["eligible elected"] += part.leader != was.leader and part.leader in was.eligible_leader_replicas

    def _unclean_election(self, key: PartitionKey, part: PartitionImage) -> None:
        """From here on the new leader's log is the reference; the operator has accepted any loss."""
        self.counts["unclean elections"] += 1
        committed = self.of(key)
        view = self._views.get(key, {}).get(part.leader)
        assert view is not None, f"broker {part.leader} was elected, but has no log of the partition"
        with contextlib.suppress(Violation):  # where its log parts from what was committed
            self._verify(part.leader, key, view, min(committed.end, view.log.log_end_offset))
        self.lost_by_unclean_election += committed.end - min(committed.end, view.verified)
        committed.cut(view.verified)
        for producer in [producer for producer in self._last_serials if producer[0] == key]:
            del self._last_serials[producer]
        for each in self._views[key].values():
            each.verified = min(each.verified, committed.end)
            each.high_watermark = min(each.high_watermark, committed.end)

    # What clients are told

    def check_may_acknowledge(self, broker: DataBroker, key: PartitionKey, leader_epoch: int) -> None:
        """Check that no other broker acknowledges in the same epoch, and that this broker has a lease.

        Raises:
            Violation: another broker does, or this one has no lease.
        """
        who = self._acknowledged_by.setdefault((key, leader_epoch), broker.life)
        if who != broker.life:
            raise Violation(
                f"{broker.host} acknowledges records in leader epoch {leader_epoch} of {self._name(key)}, in "
                f"which node {who[0]} did so before"
            )
        if not broker.has_lease():
            raise Violation(f"{broker.host} acknowledges a record of {self._name(key)} without a lease")

    def acknowledges(
        self,
        broker: DataBroker,
        key: PartitionKey,
        leader_epoch: int,
        base_offset: int,
        batch: Buffer,
        *,
        all_replicas: bool,
    ) -> None:
        """An acknowledgement leaves."""
        self._simulation.invariants.acknowledges(broker, key, leader_epoch)
        self.check_may_acknowledge(broker, key, leader_epoch)
        self.counts["acks=all" if all_replicas else "acks=1"] += 1
        if all_replicas:
            self._due.append((broker, key, leader_epoch, base_offset, batch))
        else:
            partition = broker.find(key)
            if partition is None or partition.durable_end_offset <= base_offset:
                raise Violation(f"{broker.host} acknowledges the record at offset {base_offset} before it is durable")
            self._single.append((key, leader_epoch, base_offset, bytes(batch[HEADER_BYTES:])))

    def serves(self, broker: DataBroker, key: PartitionKey, offset: int, records: bytes) -> None:
        """Records leave for a consumer."""
        if not broker.has_lease():
            raise Violation(f"{broker.host} serves records of {self._name(key)} without a lease")
        self._served.append((broker, key, offset, records))

    def _check_answers(self) -> None:
        due, self._due = self._due, []
        for broker, key, leader_epoch, base_offset, batch in due:
            batch_there = self.of(key).at(base_offset)
            if batch_there is None:
                raise Violation(
                    f"{broker.host} acknowledges the batch at offset {base_offset} of {self._name(key)} to "
                    f"acks=all in leader epoch {leader_epoch}, but only what is before {self.of(key).end} is "
                    "committed"
                )
            if batch_there.data[STAMP_BYTES:] != memoryview(batch)[STAMP_BYTES:]:
                raise Violation(
                    f"{broker.host} acknowledges a batch at offset {base_offset} of {self._name(key)}, but "
                    "another one is committed there"
                )
        served, self._served = self._served, []
        for broker, key, offset, records in served:
            for position, header in iter_headers(records):
                self.counts["batches served"] += 1
                if position == 0 and header.base_offset > offset:
                    raise Violation(
                        f"{broker.host} answers a fetch of {self._name(key)} from offset {offset} with records "
                        f"from {header.base_offset} on"
                    )
                there = self.of(key).at(header.base_offset)
                if there is None or there.data != memoryview(records)[position : position + header.size]:
                    raise Violation(
                        f"{broker.host} serves the batch at offset {header.base_offset} of {self._name(key)} "
                        f"with leader epoch {header.leader_epoch}, but what is committed there is {there}; all "
                        f"before {self.of(key).end} is committed"
                    )

    # The end

    def what_is_wrong(self) -> str | None:
        """Return the differences between replicas once no work is in progress."""
        image = self._simulation.invariants.truth
        for topic_id, topic in image.topics.items():
            for part in topic.partitions:
                key = (topic_id, part.partition)
                where = f"{topic.name}-{part.partition}"
                if set(part.isr) != set(part.replicas) or part.adding_replicas or part.removing_replicas:
                    return f"{where} is not in full sync: {part}"
                for node_id in part.replicas:
                    broker = self._simulation.data_broker(node_id)
                    partition = None if broker is None else broker.find(key)
                    if partition is None:
                        return f"{where} is not open on broker {node_id}"
                    log, end = partition.log, self.of(key).end
                    if not log.log_end_offset == log.high_watermark == log.flushed_end_offset == end:
                        return (
                            f"{where} on broker {node_id}: log end {log.log_end_offset}, high watermark "
                            f"{log.high_watermark}, durable {log.flushed_end_offset}, committed {end}"
                        )
        return None

    def check_all(self) -> None:
        """Compare every log with the committed records, from its start to its end.

        Raises:
            Violation: they differ.
        """
        for key, views in self._views.items():
            for node_id, view in views.items():
                broker = self._simulation.data_broker(node_id)
                if broker is None or (partition := broker.find(key)) is None or partition.log is not view.log:
                    continue
                view.verified = view.log.log_start_offset
                self._verify(node_id, key, view, view.log.log_end_offset)
                self.counts["replicas compared"] += 1
        for key, leader_epoch, base_offset, body in self._single:
            there = self.of(key).at(base_offset)
            if there is None or there.data[HEADER_BYTES:] != body:
                self.counts["acks=1 lost"] += 1
                part = self._simulation.invariants.truth.partition(*key)
                if part is None or part.leader_epoch == leader_epoch:
                    raise Violation(
                        f"{self._name(key)}: the record at offset {base_offset} was acknowledged to acks=1 in "
                        f"leader epoch {leader_epoch} and is lost, though the same leader still leads"
                    )
