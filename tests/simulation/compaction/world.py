"""Three replicas of a compacted partition, its leader and its clients in one thread: chance is a seed.

Logs and cleaner are the real ones, and so are the rules by which a follower finds out where its log ends
(`replication.leader_epochs`). Each replica compacts its own log at its own time, while others copy from it: some lack
what it has removed, some have records that are truncated later, one gets an empty disk. Brokers are killed, lose their
power, and sometimes their producer snapshots; leaders are elected among those in sync.

Checked as it happens:
    readers of committed records, on every replica, get such records only, and the last one of each key
    a replica in sync knows every producer: its epoch, its last five batches, its last sequence before a marker, and
        whether its transaction is open; by its log alone as well, for the next replica that copies it
    the leader takes the next batch of each producer; late batches are refused, repeated ones are recognised
    no follower truncates below its high watermark, and no leader lacks what is committed
and after `heal`: all replicas hold everything, and every transaction is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from broker.log import cleaner
from broker.log.config import LogConfig
from broker.log.producer_state import Before, Duplicate, ProducerStates, rebuild_producers
from broker.log.transactions import MarkerFate
from raftlog._core.positions import Rows, wanted_rows
from raftlog.errors import DuplicateSequence, InvalidProducerEpoch, InvalidTxnState, RaftlogError
from raftlog.format import HEADER_BYTES, Attributes, BatchHeader, parse_header, validate_produced
from raftlog.format.aborted import AbortedRanges
from raftlog.format.control import Marker
from raftlog.format.header import build_batch
from raftlog.types import TopicPartition
from replication.leader_epochs import check_prefix, truncation_offset
from replication.ports import Accepted, OutOfRange
from tests.support.keyed_log import keyed_batch
from tests.support.log_driver import TOPIC_ID, FakeClock, open_manager
from tests.support.memory_storage import MemoryStorage

NODES = 3
RETENTION_MS = 1_000
"""delete.retention.ms."""
TRANSACTIONAL = (1, 2, 3)
IDEMPOTENT = (4, 5, 6)
PRODUCERS = (*TRANSACTIONAL, *IDEMPOTENT)
SHORT_LIVED = (3, 6)
"""Producers that write nothing after the first seconds."""
SHORT_MS = 3_000
KEYS = [b"a", b"b", b"c", b"d"]
SERIES = 6
"""Keys of large batches are in so many series, `0-0`, `0-1` and so on."""
READ_BYTES = 2_000
EVERY = 5
"""All is checked after so many steps."""

Row = tuple[int, bytes, bytes | None]
"""(offset, key, value)"""


class Entry(NamedTuple):
    """A batch as it was produced, or one marker."""

    offset: int
    next_offset: int
    rows: Sequence[tuple[bytes, bytes | None]]
    producer_id: int
    producer_epoch: int
    base_sequence: int
    transactional: bool = False
    commit: bool | None = None
    """Of a marker."""


@dataclass
class Known:
    """What the entries of a log say of a producer; `batches` are at most five."""

    epoch: int
    batches: list[Entry]
    before: Before | None = None
    is_open: bool = False

    @property
    def next_sequence(self) -> int:
        """The sequence of its next batch."""
        return self.batches[-1].base_sequence + len(self.batches[-1].rows) if self.batches else 0


class Node:
    """A replica; `entries` is what its log has, as it was produced."""

    def __init__(self, config: LogConfig, clock: FakeClock) -> None:
        self._config = config
        self._clock = clock
        self.storage = MemoryStorage()
        self.entries: list[Entry] = []
        self.open()

    def open(self) -> None:
        """Start the broker."""
        self.manager = open_manager(self.storage, config=self._config, clock=self._clock)
        self.log = self.manager.create("topic", TOPIC_ID, 0, self._config)
        self.forget_cut()

    @property
    def end(self) -> int:
        """Log end offset."""
        return self.log.log_end_offset

    def forget_cut(self) -> None:
        """Forget what lies above the log end."""
        self.entries = [entry for entry in self.entries if entry.offset < self.end]

    def crash(self, dice: Random | None, *, with_snapshots: bool) -> None:
        """Lose power (None: kill -9), perhaps with the producer snapshots, and start again."""
        held = self.log.flushed_end_offset
        self.storage.crash(dice)
        if not with_snapshots:
            for name in self.storage.list_sizes(self.log.directory):
                if name.endswith(".snapshot"):
                    self.storage.remove(f"{self.log.directory}/{name}")
        self.open()
        assert self.end >= held, f"the log ends at {self.end} after a crash, though {held} was durable"

    def known(self) -> dict[int, Known]:
        """Return what must be known of producers."""
        found: dict[int, Known] = {}
        for entry in self.entries:
            if entry.producer_id < 0:
                continue
            known = found.get(entry.producer_id)
            if known is None:
                known = found[entry.producer_id] = Known(entry.producer_epoch, [])
            if entry.commit is None:
                known.batches, known.before = [*known.batches[-4:], entry], None
                known.is_open = entry.transactional
                continue
            if known.batches:
                known.before = Before(known.epoch, known.next_sequence - 1)
            known.epoch, known.batches, known.is_open = entry.producer_epoch, [], False
        return found

    def committed(self, end: int) -> list[Row]:
        """Return the rows below an offset that readers of committed records may get, before any compaction."""
        begin = self.log.log_start_offset
        pending: dict[int, list[Row]] = {}
        found: list[Row] = []
        for entry in self.entries:
            rows = [(offset, *row) for offset, row in enumerate(entry.rows, entry.offset) if begin <= offset < end]
            if entry.commit is not None:
                ended = pending.pop(entry.producer_id, [])
                found += ended if entry.commit else []
            elif entry.transactional:
                pending.setdefault(entry.producer_id, []).extend(rows)
            else:
                found += rows
        return sorted(found)

    def visible(self) -> tuple[list[Row], int]:
        """Read as a consumer of committed records does; return what it gets, and how far it comes.

        After a restart the high watermark may lie in the midst of a batch that compaction has merged since.
        """
        found: list[Row] = []
        log, end = self.log, self.log.last_stable_offset
        position, part = log.log_start_offset, TopicPartition(log.topic, log.partition)
        while position < end:
            result = log.read(position, READ_BYTES, end, blocking=True)
            assert result is not None
            if not result.records:
                result = log.read(position, 1, log.log_end_offset, blocking=True)
                assert result is not None
                header = parse_header(result.records)
                is_merged = header.attributes & Attributes.SPARSE_OFFSETS and header.next_offset > end
                assert is_merged, f"a read at offset {position} makes no progress"
                break
            ranges = AbortedRanges(log.aborted_transactions(position, result.next_offset))
            for rows in wanted_rows(part, result.records, position, check_crcs=True, aborted=ranges):
                if isinstance(rows, Rows):
                    found += [(record.offset, record.key or b"", record.value) for record in rows.records()]
            position = result.next_offset
        return found, min(position, end)

    def by_the_log_alone(self) -> ProducerStates:
        """Return what a replica would know of producers that has copied this log."""
        log, limits = self.log, self.log.producers.limits
        return rebuild_producers(self.storage, log.directory, (), log.segments, self.end, limits, self._clock.now)

    def check_readers(self, compacted: Sequence[Row]) -> None:
        """Readers get committed rows only, and the last one of each key.

        `compacted`: the committed rows up to where some replica is compacted. A replica that copies from it may lack
        what they replaced, and shows rows of a transaction before it has the marker.
        A deleted key may be back on a replica that was away for longer than delete.retention.ms (ADR 0013).
        """
        found, end = self.visible()
        committed = self.committed(end)
        assert found == sorted(found), "readers get records out of order"
        uncommitted = set(found).difference(committed, compacted)
        assert not uncommitted, f"readers get records that are not committed: {sorted(uncommitted)}"
        last = {row[1]: row for row in sorted({*committed, *compacted})}
        missing = {row for row in last.values() if row[2] is not None and row[0] < end} - set(found)
        assert not missing, f"readers miss the last records of keys: {sorted(missing)}"

    def check_producers(self) -> None:
        """What is known of producers follows from what they wrote, also by the log alone."""
        expected = {
            producer_id: (
                known.epoch,
                [(batch.offset, batch.base_sequence) for batch in known.batches],
                known.before,
                known.is_open,
            )
            for producer_id, known in self.known().items()
        }
        for states, who in ((self.log.producers, "a replica knows"), (self.by_the_log_alone(), "its log alone says")):
            there = {
                producer_id: (
                    state.epoch,
                    [(batch.base_offset, batch.base_sequence) for batch in state.batches],
                    state.before,
                    state.first_offset >= 0,
                )
                for producer_id, state in states.items()
            }
            assert there == expected, f"of producers {who} {there}, but they wrote {expected}"


class World:
    """One run: `run` with faults, then `heal`. `now_ms`: how long it has taken."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.config = LogConfig(
            segment_bytes=self.random.choice([900, 1_500, 6_000]),
            index_interval_bytes=300,
            cleanup_policy="compact",
            delete_retention_ms=RETENTION_MS,
            file_delete_delay_ms=10,
            max_message_bytes=self.random.choice([700, 1 << 20]),
        )
        self.clock = FakeClock()
        self._began_ms = self.clock.now
        self.nodes = [Node(self.config, self.clock) for _ in range(NODES)]
        self.leader_id = 0
        self.leader_epoch = 1
        self.epoch_start_offset = 0
        self.isr = set(range(NODES))
        self.heard: dict[int, int] = {}
        """What each follower holds durably, as the leader has heard in this epoch."""
        self.committed = 0
        """The largest high watermark that any leader has had."""
        self._away_until_ms = [0.0] * NODES
        self.steps = {
            self.produce: 30,
            self.end: 6,
            self.send_again: 6,
            self.copy: 25,
            self.commit: 12,
            self.change_isr: 5,
            self.go_away: 1,
            self.elect: 2,
            self.elect_while_copying: 2,
            self.cut_off: 2,
            self.clean: 12,
            self.roll: 6,
            self.housekeep: 2,
            self.crash: 2,
            self.replace_disk: 1,
        }

    @property
    def now_ms(self) -> float:
        """Simulated time since the start."""
        return float(self.clock.now - self._began_ms)

    @property
    def leader(self) -> Node:
        """The replica that leads."""
        return self.nodes[self.leader_id]

    def _followers(self) -> list[int]:
        """Return the followers that are there, or all if none is."""
        all_ = [node_id for node_id in range(NODES) if node_id != self.leader_id]
        return [node_id for node_id in all_ if self._away_until_ms[node_id] <= self.now_ms] or all_

    def _follower(self) -> int:
        return self.random.choice(self._followers())

    def _alive(self, producer_ids: Sequence[int]) -> list[int]:
        return [each for each in producer_ids if each not in SHORT_LIVED or self.now_ms < SHORT_MS]

    def run(self, run_ms: float) -> None:
        """Let chance have its way."""
        until_ms, number = self.now_ms + run_ms, 0
        while self.now_ms < until_ms:
            self.random.choices(list(self.steps), list(self.steps.values()))[0]()
            self.clock.now += self.random.choice([0, 1, 20, 100])
            number += 1
            if number % EVERY == 0:
                self.check()

    def heal(self) -> None:
        """End all transactions, copy everything everywhere, and compact it all."""
        self.copy_all()
        if open_ := [producer for producer, known in self.leader.known().items() if known.is_open]:
            self._end(dict.fromkeys(open_, False))
        self.copy_all()
        for node in self.nodes:
            node.log.roll()
        for _ in range(3):
            for node_id in range(NODES):
                self._clean(node_id)
            self.clock.now += RETENTION_MS
            self.check()
        for node_id in range(NODES):
            assert self.nodes[node_id].end == self.leader.end, f"replica {node_id} does not hold everything"
            assert self.nodes[node_id].log.first_unstable_offset is None, f"replica {node_id} has a transaction open"
            self.nodes[node_id].check_producers()

    def check(self) -> None:
        """Check what must hold at any time."""
        compacted = self.leader.committed(max(node.log.cleaned.first_dirty_offset for node in self.nodes))
        for node in self.nodes:
            node.check_readers(compacted)
        for node_id in self.isr:  # each may lead next; the others may still lack what compaction relies on
            self.nodes[node_id].check_producers()

    # Clients

    def _rows(self) -> list[tuple[bytes, bytes | None]]:
        chance = self.random
        if chance.random() < 0.2:  # a batch that grows when it loses a record, as offsets need room then
            series = chance.randrange(SERIES)
            return [(b"%d-%d" % (series, number), b"v") for number in range(chance.randint(20, 60))]
        values = (None, b"", b"x" * 40, chance.randbytes(30))
        keys = [*KEYS, b"%d-%d" % (chance.randrange(SERIES), chance.randrange(20))]
        return [(chance.choice(keys), chance.choice(values)) for _ in range(chance.randint(1, 3))]

    def _batch(
        self, rows: Sequence[tuple[bytes, bytes | None]], numbers: tuple[int, int, int]
    ) -> tuple[bytes, BatchHeader]:
        batch = keyed_batch(rows, self.clock.now, producer=numbers)
        if numbers[0] in TRANSACTIONAL:
            header = parse_header(batch)
            header = header._replace(attributes=header.attributes | Attributes.TRANSACTIONAL)
            batch = build_batch(header, batch[HEADER_BYTES:])
        return batch, validate_produced(batch)

    def produce(self) -> None:
        """The next batch of a producer, or one of none."""
        rows, producer_id, leader = self._rows(), self.random.choice([-1, *self._alive(PRODUCERS)]), self.leader
        known = leader.known().get(producer_id) or Known(0, [])
        numbers = (producer_id, known.epoch, known.next_sequence) if producer_id >= 0 else (-1, -1, -1)
        batch, header = self._batch(rows, numbers)
        try:
            duplicate = leader.log.check_producer(header, self.clock.now)
        except RaftlogError as refusal:
            raise AssertionError(f"the leader refuses the next batch of a producer: {refusal}") from refusal
        assert duplicate is None, f"the leader takes the next batch of a producer for an old one: {duplicate}"
        result = leader.log.append(batch, header, leader_epoch=self.leader_epoch, now_ms=self.clock.now)
        is_open = producer_id in TRANSACTIONAL
        leader.entries.append(Entry(result.base_offset, leader.end, rows, *numbers, transactional=is_open))

    def end(self) -> None:
        """One control batch; some transactions in it may have no records."""
        alive = self._alive(TRANSACTIONAL)
        producers = self.random.sample(alive, self.random.randint(1, len(alive)))
        self._end({producer: self.random.random() < 0.6 for producer in producers})

    def _end(self, decisions: dict[int, bool]) -> None:
        leader = self.leader
        known = leader.known()
        markers = []
        for producer_id, commit in decisions.items():
            epoch = known[producer_id].epoch if producer_id in known else 0
            markers.append(Marker(producer_id, epoch + 1, commit, coordinator_epoch=1))
        fates = leader.log.check_markers(markers, self.clock.now)
        assert fates == [MarkerFate.APPENDED] * len(markers), f"the leader does not append {markers}: {fates}"
        result = leader.log.append_markers(markers, leader_epoch=self.leader_epoch, now_ms=self.clock.now)
        for offset, (producer_id, epoch, commit, *_) in enumerate(markers, result.base_offset):
            leader.entries.append(Entry(offset, offset + 1, (), producer_id, epoch, -1, commit=commit))

    def send_again(self) -> None:
        """A batch comes once more, or late: it is never appended."""
        sent = [entry for entry in self.leader.entries if entry.producer_id >= 0 and entry.commit is None]
        if not sent:
            return
        entry = self.random.choice(sent[-20:])
        known = self.leader.known()[entry.producer_id]
        _, header = self._batch(entry.rows, (entry.producer_id, entry.producer_epoch, entry.base_sequence))
        outcome: Duplicate | RaftlogError | None
        try:
            outcome = self.leader.log.check_producer(header, self.clock.now)
        except (DuplicateSequence, InvalidProducerEpoch, InvalidTxnState) as refusal:
            outcome = refusal
        if entry.producer_epoch < known.epoch:
            assert isinstance(outcome, InvalidProducerEpoch), f"a fenced producer is not refused: {outcome}"
        elif entry in known.batches:
            expected = Duplicate(entry.offset, entry.next_offset - 1, -1)
            assert outcome == expected, f"a batch that is sent again is {outcome}, not {expected}"
        else:
            assert isinstance(outcome, DuplicateSequence), f"an old batch is not refused: {outcome}"

    # Replication

    def copy(self) -> None:
        """A follower opens at the leader, truncates if it has to, and copies some batches."""
        self._copy(self._follower(), self.random.choice([0, 1, 2, 100]), self.random.choice([1, 400, READ_BYTES]))

    def _copy(self, node_id: int, reads: int, max_bytes: int) -> None:
        node, leader = self.nodes[node_id], self.leader
        self._open(node)
        for _ in range(reads):
            begin = node.end
            if begin == leader.end:
                break
            result = leader.log.read(begin, max_bytes, leader.end, blocking=True)
            assert result is not None
            try:
                node.log.append_stamped(result.records, now_ms=self.clock.now, max_epoch=self.leader_epoch)
            except RaftlogError as refusal:
                raise AssertionError(f"a follower cannot go on at offset {begin}: {refusal}") from refusal
            node.entries = [entry for entry in node.entries if entry.next_offset <= begin] + [
                entry for entry in leader.entries if entry.next_offset > begin and entry.offset < node.end
            ]
        node.log.flush()
        self.heard[node_id] = node.end
        node.log.high_watermark = max(node.log.high_watermark, min(leader.log.high_watermark, node.end))

    def _open(self, node: Node) -> None:
        """Truncate a follower's log until it is a prefix of the leader's."""
        start, end, epochs = self.leader.log.bounds()
        while True:
            own = node.log.bounds().leader_epochs
            opening = check_prefix(epochs, start, end, node.end, own.latest_epoch, leader_epoch=self.leader_epoch)
            if isinstance(opening, Accepted):
                return
            assert not isinstance(opening, OutOfRange), "nothing is deleted"
            offset = truncation_offset(own, node.end, opening)
            assert offset >= node.log.high_watermark, f"committed records are truncated: {offset}"
            node.log.truncate_to(offset, now_ms=self.clock.now)
            node.forget_cut()

    def copy_all(self) -> None:
        """All followers copy everything, and it is committed."""
        for node_id in range(NODES):
            if node_id != self.leader_id:
                self._copy(node_id, 1_000, READ_BYTES)
        self.commit()
        for node_id in range(NODES):
            if node_id != self.leader_id:
                self._copy(node_id, 0, READ_BYTES)

    def commit(self) -> None:
        """The high watermark moves to what all in sync hold."""
        log = self.leader.log
        log.flush()
        others = self.isr - {self.leader_id}
        if others <= self.heard.keys():
            log.high_watermark = max(log.high_watermark, min([self.leader.end, *map(self.heard.__getitem__, others)]))
            self.committed = max(self.committed, log.high_watermark)

    def change_isr(self) -> None:
        """A follower leaves the ISR, or joins it if it holds everything committed."""
        node_id = self._follower()
        if node_id in self.isr:
            self.isr.discard(node_id)
        elif self.heard.get(node_id, -1) >= max(self.leader.log.high_watermark, self.epoch_start_offset):
            self.isr.add(node_id)

    def go_away(self) -> None:
        """A follower leaves the ISR, and copies nothing for a while."""
        node_id = self._follower()
        self.isr.discard(node_id)
        self._away_until_ms[node_id] = self.now_ms + self.random.uniform(500, 4_000)

    def elect(self) -> None:
        """Another replica in sync leads from now on, or the same one again."""
        self.leader_id = self.random.choice(sorted(self.isr))
        self.leader_epoch += 1
        self.heard.clear()
        self.epoch_start_offset = self.leader.end
        assert self.leader.end >= self.committed, f"a leader's log ends at {self.leader.end}, below what is committed"
        self.check()

    def elect_while_copying(self) -> None:
        """A follower gets a new leader after it has copied some batches of the old one."""
        last = min(range(NODES), key=lambda node_id: self.nodes[node_id].end)
        if last != self.leader_id:
            self._copy(last, self.random.randint(1, 20), 1)
        self.elect()
        if last != self.leader_id:
            self._copy(last, 1, 1)

    def cut_off(self) -> None:
        """A leader loses its followers, goes on for a while, and finds out that another one leads."""
        deposed = self.leader_id
        self.copy_all()
        self._clean(deposed)
        self.roll()
        self.clock.now += RETENTION_MS
        for _ in range(self.random.randint(1, 8)):
            self.random.choice([self.produce, self.end])()
        self._clean(deposed)
        self.elect()
        if deposed != self.leader_id:
            self._copy(deposed, 0, READ_BYTES)
            self.nodes[deposed].check_producers()

    # Cleaning, and what goes wrong

    def clean(self) -> None:
        """Compact a replica, perhaps again when its tombstones and markers are due."""
        node_id = self.random.randrange(NODES)
        self._clean(node_id)
        if self.random.random() < 0.4:
            self.clock.now += RETENTION_MS
            self.roll()
            self._clean(node_id)

    def _clean(self, node_id: int) -> None:
        log = self.nodes[node_id].log
        plan = cleaner.plan_cleaning(log, cleaner.committed_end(log), self.clock.now)
        if plan is None:
            return
        if node_id == self.leader_id and len(self.heard) == NODES - 1:
            plan = plan._replace(markers_below=min(log.flushed_end_offset, *self.heard.values()))
        for _ in cleaner.clean(plan, dedupe_bytes=self.random.choice([1, 1 << 20, 1 << 20]), clock=self.clock.now_ms):
            pass

    def roll(self) -> None:
        """Everybody begins another segment."""
        for node in self.nodes:
            node.log.roll()

    def housekeep(self) -> None:
        """A replica writes its checkpoint and removes files."""
        self.random.choice(self.nodes).manager.run_housekeeping_once(self.clock.now)

    def crash(self) -> None:
        """A broker is killed or loses power; a leader has a successor then."""
        node_id, chance = self.random.randrange(NODES), self.random
        dice = Random(chance.random()) if chance.random() < 0.6 else None
        self.nodes[node_id].crash(dice, with_snapshots=chance.random() < 0.6)
        self.heard.pop(node_id, None)
        if node_id == self.leader_id:
            self.elect()

    def replace_disk(self) -> None:
        """A follower gets an empty disk. It is out of the ISR until it has copied everything.

        It copies all of the present leader's log: from two leaders, it might miss a marker (`broker.log.cleaner`).
        """
        node_id = self._follower()
        self.isr.discard(node_id)
        self.nodes[node_id] = Node(self.config, self.clock)
        self._copy(node_id, 1_000, READ_BYTES)
